//! Shows a screen on a terminal: handles keys and signals, and restores the terminal at the end.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use ratatui::crossterm::terminal;
use ratatui::{DefaultTerminal, Frame};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Longest time before the screen notices a signal.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest time that the screen may take to end after a signal.
const END: Duration = Duration::from_secs(1);

/// Standard output is not a terminal.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("standard output is not a terminal: {instead}")]
pub struct NoTerminal {
    /// A sentence that names an option which needs no terminal.
    instead: String,
}

/// The user's next wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// To keep looking at the screen.
    Look,
    /// To quit.
    Quit,
}

/// A screen that is shown on a terminal.
pub(crate) trait Screen {
    /// Draws the screen.
    fn draw(&self, frame: &mut Frame<'_>);
    /// Handles a key.
    fn key(&mut self, key: KeyEvent) -> Next;
    /// Applies what arrived since the last call; returns whether the screen changed.
    fn tick(&mut self) -> bool;
}

/// Shows a screen until the user quits or a signal arrives, and then restores the terminal. After a signal, the exit status is
/// 128 plus the signal's number.
///
/// # Errors
/// If there is no terminal, or it cannot be used; `instead` names an option that needs none. Also if the screen cannot begin.
pub(crate) fn show<S: Screen>(
    instead: &str,
    begin: impl FnOnce() -> anyhow::Result<S>,
) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() {
        let instead = instead.to_owned();
        return Err(NoTerminal { instead }.into());
    }
    let signalled = Arc::new(AtomicU8::new(0));
    end_on_signals(Arc::clone(&signalled))?;
    // Installs a hook that restores the terminal after a panic too.
    let mut terminal = ratatui::try_init().with_context(|| format!("cannot use this terminal: {instead}"))?;
    let ended = begin().and_then(|mut screen| follow(&mut screen, &mut terminal, &signalled));
    let restored = ratatui::try_restore();
    let signal = signalled.load(Ordering::Relaxed);
    if signal != 0 {
        return Ok(ExitCode::from(128 + signal));
    }
    ended?;
    restored.context("cannot restore the terminal")?;
    Ok(ExitCode::SUCCESS)
}

fn follow(
    screen: &mut impl Screen,
    terminal: &mut DefaultTerminal,
    signalled: &AtomicU8,
) -> anyhow::Result<()> {
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        let mut is_new = false;
        while !is_new {
            if signalled.load(Ordering::Relaxed) != 0 {
                return Ok(());
            }
            if event::poll(LOOK_EVERY)? {
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        if screen.key(key) == Next::Quit {
                            return Ok(());
                        }
                        is_new = true;
                    }
                    Event::Resize(..) => is_new = true,
                    _ => {}
                }
            }
            is_new |= screen.tick();
        }
    }
}

/// Records a signal, and ends the process if it has not ended by itself in time: the library that reads keys never returns if the
/// terminal was closed.
fn end_on_signals(signalled: Arc<AtomicU8>) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            let signal = u8::try_from(signal).unwrap_or_default();
            signalled.store(signal, Ordering::Relaxed);
            std::thread::sleep(END);
            let _ = ratatui::try_restore();
            std::process::exit(i32::from(128 + signal));
        }
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(wait)
        .context("cannot start the thread that waits for signals")?;
    Ok(())
}

/// Returns width and height of the terminal on standard output, or a usual size if they are unknown.
pub fn size() -> (usize, usize) {
    // A serial line reports 0, because it does not know its size.
    let known = terminal::size()
        .ok()
        .filter(|(width, height)| *width > 0 && *height > 0);
    let (width, height) = known.unwrap_or((80, 24));
    (usize::from(width.max(20)), usize::from(height.max(5)))
}

/// Returns the width of the terminal on standard output; `None` for a pipe, which gets every column.
pub fn width() -> Option<usize> {
    match std::io::stdout().is_terminal() {
        true => terminal::size().ok().map(|(width, _)| usize::from(width)),
        false => None,
    }
}

//! The page on a terminal: keys, time, and restoring the terminal at the end.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use homenode_recorder::Which;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::bad_input;
use crate::top::live::Live;
use crate::top::past::Past;
use crate::top::screen;
use crate::top::view::{View, When, Wish};

/// Longest time before the page notices a signal.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long the page may take to end after a signal.
const END: Duration = Duration::from_secs(1);

/// Sources of the pictures, and where they are shown.
pub struct Session {
    /// What is shown.
    pub view: View,
    /// The agent's directory.
    pub state: PathBuf,
    /// The history, for earlier times.
    pub history: PathBuf,
    /// Time between pictures.
    pub every: Duration,
    /// The place in the history, if that is shown.
    pub past: Option<Past>,
}

/// Shows the page until the user quits, or a signal arrives.
///
/// # Errors
/// No terminal, or one that cannot be used.
pub fn run(session: Session) -> anyhow::Result<ExitCode> {
    let instead = "`homenode top --once` prints one picture as text, `--batch N` several";
    on_terminal(instead, |terminal, signalled| {
        Running::new(session).and_then(|mut running| running.run(terminal, signalled))
    })
}

/// Shows something on the terminal, and restores the terminal afterwards. It ends when it notices a signal: the status is
/// then 128 plus the signal's number.
///
/// # Errors
/// No terminal, or one that cannot be used: `instead` names an option that needs none.
pub fn on_terminal(
    instead: &str,
    show: impl FnOnce(&mut DefaultTerminal, &AtomicU8) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() {
        return Err(bad_input(format!("standard output is no terminal: {instead}")));
    }
    let signalled = Arc::new(AtomicU8::new(0));
    end_on_signals(Arc::clone(&signalled))?;
    // A panic restores the terminal too, through its hook.
    let mut terminal = ratatui::try_init().with_context(|| format!("cannot use this terminal: {instead}"))?;
    let ended = show(&mut terminal, &signalled);
    let restored = ratatui::try_restore();
    let signal = signalled.load(Ordering::Relaxed);
    if signal != 0 {
        return Ok(ExitCode::from(128 + signal));
    }
    ended?;
    restored.context("cannot give the terminal back")?;
    Ok(ExitCode::SUCCESS)
}

/// Records a signal, and ends the process if it does not end by itself: the library that reads keys never returns from a
/// terminal that was closed.
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

struct Running {
    session: Session,
    live: Option<Live>,
    /// When the next period is played.
    next_at: Instant,
    /// Since when the agent has not answered.
    silent_since: Option<Instant>,
}

impl Running {
    fn new(session: Session) -> anyhow::Result<Running> {
        let live = match session.past {
            None => Some(Live::start(&session.state, session.every)?),
            Some(_) => None,
        };
        let mut running = Running {
            session,
            live,
            next_at: Instant::now(),
            silent_since: None,
        };
        let message = running.session.view.message.take();
        running.show_past();
        running.session.view.message = message.or(running.session.view.message.take());
        Ok(running)
    }

    fn run(&mut self, terminal: &mut DefaultTerminal, signalled: &AtomicU8) -> anyhow::Result<()> {
        loop {
            terminal.draw(|frame| screen::draw(frame, &self.session.view))?;
            let mut is_new = false;
            while !is_new {
                if signalled.load(Ordering::Relaxed) != 0 {
                    return Ok(());
                }
                if event::poll(LOOK_EVERY)? {
                    match event::read()? {
                        Event::Key(key) if key.kind != KeyEventKind::Release => {
                            let wish = self.session.view.key(key);
                            if wish == Wish::Quit {
                                return Ok(());
                            }
                            self.grant(wish);
                            is_new = true;
                        }
                        Event::Resize(..) => is_new = true,
                        _ => {}
                    }
                }
                is_new |= self.tick();
            }
        }
    }

    /// Applies what arrived since; returns whether the page changed.
    fn tick(&mut self) -> bool {
        let view = &mut self.session.view;
        if let Some(asked) = self.live.as_ref().and_then(Live::newest) {
            match asked {
                Ok(picture) => {
                    (view.picture, view.message) = (Some(picture), None);
                    self.silent_since = None;
                }
                Err(error) => {
                    let since = self
                        .silent_since
                        .get_or_insert_with(Instant::now)
                        .elapsed()
                        .as_secs();
                    view.message = Some(format!("no answer for {since} s, asking again: {error}"));
                }
            }
            return true;
        }
        let is_playing = matches!(view.when, When::Then { is_playing: true, .. });
        if is_playing && Instant::now() >= self.next_at {
            self.next_at = Instant::now() + self.session.every;
            self.grant(Wish::Step(1));
            if self.session.view.message.is_some() {
                self.session.view.pause();
            }
            return true;
        }
        false
    }

    /// Carries out a key's request; shows any error on the page.
    fn grant(&mut self, wish: Wish) {
        if wish == Wish::Nothing {
            return;
        }
        match self.go(wish) {
            Ok(message) => {
                self.show_past();
                if self.session.past.is_some() {
                    self.session.view.message = message.or(self.session.view.message.take());
                }
            }
            Err(error) => self.session.view.message = Some(format!("{error:#}")),
        }
    }

    /// Goes to another time; returns a message for the user, if any.
    fn go(&mut self, wish: Wish) -> anyhow::Result<Option<String>> {
        self.session.view.message = None;
        if wish == Wish::Now {
            let live = Live::start(&self.session.state, self.session.every)?;
            self.live = Some(live);
            self.session.past = None;
            self.session.view.when = When::Now;
            // The past must not be shown as the present, even if no agent answers.
            self.session.view.picture = None;
            return Ok(None);
        }
        let was_now = self.session.past.is_none();
        // There is nothing after now.
        if was_now && matches!(wish, Wish::Play | Wish::Step(1..) | Wish::Minutes(1..)) {
            return Ok(None);
        }
        let past = open(&mut self.session.past, &self.session.history)?;
        // From now on the history is shown, and the agent is not asked.
        self.live = None;
        match wish {
            Wish::Step(_) | Wish::Minutes(_) if was_now => {}
            Wish::Step(by) if !past.step(by)? => {
                let end = if by > 0 { "last" } else { "first" };
                return Ok(Some(format!("this is the {end} period that was recorded")));
            }
            Wish::Minutes(by) => past.minutes(by)?,
            Wish::First => past.go_to_end(Which::First)?,
            Wish::Last => past.go_to_end(Which::Last)?,
            Wish::Jump(text) => return past.go_to_time(&text.parse().map_err(bad_input)?),
            Wish::Play => {
                if let When::Then { is_playing, .. } = &mut self.session.view.when {
                    *is_playing = !*is_playing;
                }
            }
            Wish::Step(_) | Wish::Nothing | Wish::Quit | Wish::Now => {}
        }
        Ok(None)
    }

    /// Puts the current place in the history on the page, if the history is shown.
    fn show_past(&mut self) {
        let Some(past) = &self.session.past else { return };
        let view = &mut self.session.view;
        let was_playing = matches!(view.when, When::Then { is_playing: true, .. });
        let shown = past.span().and_then(|span| Ok((span, past.picture()?)));
        match shown {
            Ok((span, picture)) => {
                view.when = When::Then {
                    span,
                    is_playing: was_playing,
                };
                view.picture = Some(picture);
            }
            Err(error) => view.message = Some(format!("{error:#}")),
        }
    }
}

/// The place in the history, at its end if none was open.
fn open<'a>(past: &'a mut Option<Past>, history: &Path) -> anyhow::Result<&'a mut Past> {
    if past.is_none() {
        *past = Some(Past::open(history, Which::Last)?);
    }
    past.as_mut().context("a history")
}

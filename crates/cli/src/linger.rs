//! `homenode run --host twin --web`: keeps the page of a run that has ended, until a key, a signal or a time ends it.

use std::io::{IsTerminal as _, stdin, stdout};
use std::time::{Duration, Instant};

use homenode_agent::Show as _;
use homenode_host::WakeSignal;
use homenode_units::Ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

use crate::output::{Output, Style};

/// How long the page stays by default, for a user who reads text at a terminal.
const AT_TERMINAL: Ns = Ns::from_secs(60);
/// Longest time before a key or a signal is noticed.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Returns how long the page stays: as requested, else a minute if the output is text on a terminal, else no time.
pub(crate) fn time(asked: Option<Ns>, style: Style) -> Ns {
    let usual = match style {
        Style::Terminal => AT_TERMINAL,
        Style::Lines | Style::Json => Ns::ZERO,
    };
    asked.unwrap_or(usual)
}

/// Waits until the time is over, a key is pressed, or a signal requests the end.
pub(crate) fn wait(url: &str, time: Ns, output: &mut Output, wake_signal: &WakeSignal) {
    let keys = Keys::of_terminal();
    let end = match &keys {
        Some(_) => "press a key, or Ctrl-C, to end now",
        None => "SIGINT (Ctrl-C) ends it now",
    };
    output.notice(&format!(
        "The run has ended. Its page stays at {url} for {time}; {end}."
    ));
    let end = Instant::now() + Duration::from_nanos(time.0);
    while Instant::now() < end && !wake_signal.is_stopping() && !output.is_closed() {
        match &keys {
            Some(keys) if keys.is_pressed() => break,
            Some(_) => {}
            None => drop(wake_signal.wait(Duration::from_millis(100))),
        }
    }
}

/// The keys of the terminal on standard input, each read when it is pressed. Restores the terminal when dropped.
struct Keys {
    before: Termios,
}

impl Keys {
    /// Returns `None` if there is no terminal, or if it belongs to another program at the moment, which reads the keys.
    fn of_terminal() -> Option<Keys> {
        let is_ours = tcgetpgrp(stdin()).is_ok_and(|group| group == rustix::process::getpgrp());
        let before = tcgetattr(stdin())
            .ok()
            .filter(|_| is_ours && stdout().is_terminal())?;
        let mut by_key = before.clone();
        by_key.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        // Keys that were pressed during the run are dropped.
        tcsetattr(stdin(), OptionalActions::Flush, &by_key).ok()?;
        Some(Keys { before })
    }

    /// Waits a moment for a key. A terminal that is gone counts as one.
    fn is_pressed(&self) -> bool {
        let input = stdin();
        let mut polled = [PollFd::new(&input, PollFlags::IN)];
        // A signal may end the wait early.
        poll(&mut polled, Some(&LOOK_EVERY)).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // Drops the key, which is not for the shell. The terminal may be gone.
        let _ = tcsetattr(stdin(), OptionalActions::Flush, &self.before);
    }
}

//! How commands handle signals. Long work other than `run` ends at once at SIGINT and SIGTERM, and says what is kept
//! ([`end_at_once`]). This is how `homenode run` handles them:
//!
//! | signal | effect |
//! |---|---|
//! | SIGINT | ends the run normally; on the twin the comparison follows, which another SIGINT ends |
//! | SIGTERM | ends the run normally, without a comparison |
//! | SIGHUP | reads the settings again; on the twin, ends the run like SIGTERM if the terminal was closed (not under `nohup`) |
//! | SIGUSR1, SIGUSR2 | nothing, although by default they would end the process |
//!
//! A further SIGINT or SIGTERM ends the process at once. SIGINT and SIGTERM have no effect if they were ignored when the process
//! started.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::reload::Reload;
use homenode_host::WakeSignal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// How long a simulation may take to end after a signal. A step may be long or the reader slow, and there is nothing to restore.
const SIMULATION_ENDS: Duration = Duration::from_millis(700);

/// How long undoing on a real host may take before a message says what ends it.
const UNDOING_SILENT: Duration = Duration::from_secs(2);

/// Exit status of a command that a signal cut short, as in shells; 0 before any signal.
static SIGNALLED: AtomicU8 = AtomicU8::new(0);

/// Whether the work is done, except that the page may still linger.
static IS_DONE: AtomicBool = AtomicBool::new(false);

/// The parts of a run that signals end.
pub(crate) struct Reached {
    /// The run.
    pub run: WakeSignal,
    /// The comparison after the run, on the simulated host.
    pub comparison: Option<WakeSignal>,
    /// The settings.
    pub reload: Reload,
}

/// Signals that are caught, and wait to be handled.
pub(crate) struct Caught {
    signals: Signals,
    /// Whether a simulation ends when its terminal is closed.
    ends_with_terminal: bool,
}

/// Returns the exit status of a command that a signal cut short, as in shells; 0 before any signal.
pub(crate) fn status() -> u8 {
    SIGNALLED.load(Ordering::Relaxed)
}

/// Says that a run on the simulated host and its comparison are done. A signal that ends the process from now on is no failure.
pub(crate) fn all_is_done() {
    IS_DONE.store(true, Ordering::Relaxed);
}

/// Starts a thread that ends the process at SIGINT or SIGTERM and says what becomes of the work: `kept` is a sentence.
///
/// # Errors
/// If the thread cannot start.
pub(crate) fn end_at_once(kept: &'static str) -> anyhow::Result<()> {
    let mut signals = Signals::new(heeded([SIGINT, SIGTERM]))?;
    let named = std::thread::Builder::new().name("signals".into());
    let thread = named.spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // On a terminal, the message replaces the line that shows progress.
            let erase = if std::io::stderr().is_terminal() {
                "\r\x1b[K"
            } else {
                ""
            };
            let name = if signal == SIGINT {
                "SIGINT (Ctrl-C)"
            } else {
                "SIGTERM"
            };
            // The terminal may be gone.
            let _ = writeln!(std::io::stderr(), "{erase}homenode: stopped by {name}: {kept}");
            std::process::exit(128 + signal);
        }
    });
    thread.context("cannot start the thread that waits for signals")?;
    Ok(())
}

/// Catches SIGHUP, SIGUSR1 and SIGUSR2, which would end the process. Called first, because starting may take long.
///
/// # Errors
/// If they cannot be caught.
pub(crate) fn caught() -> anyhow::Result<Caught> {
    let ends_with_terminal = has_terminal() && !is_ignored(SIGHUP);
    Ok(Caught {
        signals: Signals::new([SIGHUP, SIGUSR1, SIGUSR2])?,
        ends_with_terminal,
    })
}

/// Returns true if this process has a controlling terminal.
fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok()
}

/// Returns true if the process that started this one had this signal ignored, as `nohup` does.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Returns those of these signals that end this process. A signal that was ignored when it started stays ignored: SIGINT is in a
/// shell script's background jobs. Call this before any of the signals is caught.
pub(crate) fn heeded<const N: usize>(signals: [i32; N]) -> impl Iterator<Item = i32> {
    signals.into_iter().filter(|signal| !is_ignored(*signal))
}

/// Starts a thread that waits for signals, including earlier ones.
///
/// # Errors
/// If the thread cannot start.
pub(crate) fn wait_for(caught: Caught, reached: Reached) -> anyhow::Result<()> {
    let Caught {
        mut signals,
        ends_with_terminal,
    } = caught;
    for signal in heeded([SIGINT, SIGTERM]) {
        signals.add_signal(signal)?;
    }
    let named = std::thread::Builder::new().name("signals".into());
    let thread = named.spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGHUP if ends_with_terminal && reached.comparison.is_some() && !has_terminal() => {
                    reached.end(SIGHUP);
                }
                // The control loop reports the result.
                SIGHUP => reached.reload.ask(drop),
                SIGUSR1 | SIGUSR2 => {}
                signal => reached.end(signal),
            }
        }
    });
    thread.context("cannot start the thread that waits for signals")?;
    Ok(())
}

impl Reached {
    fn end(&self, signal: i32) {
        let last = self.comparison.as_ref().unwrap_or(&self.run);
        if last.is_stopping() {
            std::process::exit(128 + signal);
        }
        // Signal numbers are small, so the sum fits.
        SIGNALLED.store(128 + signal as u8, Ordering::Relaxed);
        if signal != SIGINT || self.run.is_stopping() {
            last.stop();
            if self.comparison.is_some() {
                end_soon(signal);
            }
        }
        self.run.stop();
        if self.comparison.is_none() {
            after(UNDOING_SILENT, || {
                complain!(
                    "homenode: still undoing changes; a second signal ends the agent now and leaves the rest to its guard"
                );
            });
        }
    }
}

/// Ends the process if the simulation takes too long to end.
fn end_soon(signal: i32) {
    after(SIMULATION_ENDS, move || match IS_DONE.load(Ordering::Relaxed) {
        true => std::process::exit(0),
        false => std::process::exit(128 + signal),
    });
}

/// Calls a function after a while, if the process has not ended by then. If the thread for it cannot start, the function is not
/// called.
fn after(time: Duration, act: impl FnOnce() + Send + 'static) {
    let wait = move || {
        std::thread::sleep(time);
        act();
    };
    let _ = std::thread::Builder::new().name("end".into()).spawn(wait);
}

//! How `homenode run` handles signals.
//!
//! | signal | effect |
//! |---|---|
//! | SIGINT | ends the run normally; on the twin the comparison follows, which another SIGINT ends |
//! | SIGTERM | ends the run normally, without a comparison |
//! | SIGHUP | reads the settings again |
//! | SIGUSR1, SIGUSR2 | nothing, although by default they would end the process |
//!
//! A further SIGINT or SIGTERM ends the process at once.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::reload::Reload;
use homenode_host::WakeSignal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// How long a simulation may take to end after a signal. A step may be long or the reader slow, and there is nothing to restore.
const SIMULATION_ENDS: Duration = Duration::from_millis(700);

/// Exit status of a command that a signal cut short, as in shells; 0 before any signal.
static SIGNALLED: AtomicU8 = AtomicU8::new(0);

/// What signals act on.
pub(crate) struct Reached {
    /// The run.
    pub run: WakeSignal,
    /// The comparison after it, on the twin.
    pub comparison: Option<WakeSignal>,
    /// The settings.
    pub reload: Reload,
}

/// Returns the exit status of a command that a signal cut short, as in shells; 0 before any signal.
pub(crate) fn status() -> u8 {
    SIGNALLED.load(Ordering::Relaxed)
}

/// Catches SIGHUP, SIGUSR1 and SIGUSR2, which would end the process. Called first, because starting may take long.
///
/// # Errors
/// If they cannot be caught.
pub(crate) fn caught() -> anyhow::Result<Signals> {
    Ok(Signals::new([SIGHUP, SIGUSR1, SIGUSR2])?)
}

/// Starts a thread that waits for signals, including earlier ones.
///
/// # Errors
/// If the thread cannot start.
pub(crate) fn wait_for(mut signals: Signals, reached: Reached) -> anyhow::Result<()> {
    signals.add_signal(SIGINT)?;
    signals.add_signal(SIGTERM)?;
    let named = std::thread::Builder::new().name("signals".into());
    let thread = named.spawn(move || {
        for signal in signals.forever() {
            match signal {
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
        if signal == SIGTERM || self.run.is_stopping() {
            last.stop();
            if self.comparison.is_some() {
                end_soon(signal);
            }
        }
        self.run.stop();
    }
}

/// Ends the process if the simulation takes too long to end.
fn end_soon(signal: i32) {
    let wait = move || {
        std::thread::sleep(SIMULATION_ENDS);
        std::process::exit(128 + signal);
    };
    // Without a thread, the simulation ends at its own pace.
    let _ = std::thread::Builder::new().name("end".into()).spawn(wait);
}

//! What signals do to `homenode run`.
//!
//! | signal | what it does |
//! |---|---|
//! | SIGINT | ends the run in good order, and on the twin leads on to the comparison after it, which another one ends |
//! | SIGTERM | the same, and no comparison follows |
//! | SIGHUP | settings are read anew |
//! | SIGUSR1, SIGUSR2 | nothing: they would end a program that does not expect them |
//!
//! One more SIGINT or SIGTERM ends the process at once.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::reload::Reload;
use homenode_host::Bell;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

/// How long a simulation that is told to end may take for that: a step of it may be long, or its reader slow, and there is
/// nothing to give back.
const SIMULATION_ENDS: Duration = Duration::from_millis(700);

/// The status of a command that a signal cut short, as shells have it; 0 while none came.
static SIGNALLED: AtomicU8 = AtomicU8::new(0);

/// What signals reach.
pub struct Reached {
    /// The run.
    pub run: Bell,
    /// The comparison after it, on the twin.
    pub comparison: Option<Bell>,
    /// Its settings.
    pub reload: Reload,
}

/// The status of a command that a signal cut short, as shells have it; 0 while none came.
pub fn status() -> u8 {
    SIGNALLED.load(Ordering::Relaxed)
}

/// From now on, signals that are no request to end do not end the process: a start may take long.
///
/// # Errors
/// When they cannot be caught.
pub fn caught() -> anyhow::Result<Signals> {
    Ok(Signals::new([SIGHUP, SIGUSR1, SIGUSR2])?)
}

/// Has a thread wait for signals, those that came before among them.
///
/// # Errors
/// When there can be no such thread.
pub fn wait_for(mut signals: Signals, reached: Reached) -> anyhow::Result<()> {
    signals.add_signal(SIGINT)?;
    signals.add_signal(SIGTERM)?;
    let named = std::thread::Builder::new().name("signals".into());
    let thread = named.spawn(move || {
        for signal in signals.forever() {
            match signal {
                // The loop says what came of it.
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
        // Both numbers are small.
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

/// Ends a simulation that does not end by itself.
fn end_soon(signal: i32) {
    let wait = move || {
        std::thread::sleep(SIMULATION_ENDS);
        std::process::exit(128 + signal);
    };
    // Without a thread it ends when it ends.
    let _ = std::thread::Builder::new().name("end".into()).spawn(wait);
}

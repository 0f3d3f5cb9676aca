//! The only loop over a host: sample, plan, commit, wait, until the run is over. The caller supplies everything else.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use homenode_host::{Host, HostError};

use crate::{Control, Cycle};

/// A part of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Reading the host.
    Sample,
    /// Deriving rates and planning.
    Plan,
    /// Carrying the plan out.
    Act,
    /// Remembering the outcome.
    Remember,
}

/// Hooks around the cycles of a run. They determine how the run is shown, how time passes, and when the run ends.
pub trait Around<H: Host> {
    /// An error that ends a run before it is over.
    type Error;

    /// Called before the host is sampled; may end the run.
    ///
    /// # Errors
    /// An error that ends the run.
    fn before(&mut self, host: &mut H) -> Result<ControlFlow<()>, Self::Error>;

    /// Called when a phase of a cycle begins, which ends the previous phase. Used for timing.
    fn begins(&mut self, _: Phase) {}

    /// Called with what the agent saw and did in a cycle, or with the error if the host could not be read. In that case nothing
    /// was done, and the next sample may succeed. May end the run.
    ///
    /// # Errors
    /// An error that ends the run.
    fn after(
        &mut self,
        host: &mut H,
        cycle: Result<Cycle, HostError>,
    ) -> Result<ControlFlow<()>, Self::Error>;

    /// Waits until the next cycle.
    fn wait(&mut self, host: &mut H);
}

/// Runs until the hooks end it. In each cycle, the control loop's state is locked for two short stretches, but not while a plan
/// is carried out, so other threads can query it meanwhile.
///
/// # Errors
/// An error that ended the run before it was over.
pub fn run<H: Host, A: Around<H>>(
    host: &mut H,
    control: &Mutex<Control>,
    around: &mut A,
) -> Result<(), A::Error> {
    let lock = || control.lock().unwrap_or_else(PoisonError::into_inner);
    while around.before(host)?.is_continue() {
        around.begins(Phase::Sample);
        let cycle = host.sample().map(|sample| {
            around.begins(Phase::Plan);
            let begun = lock().begin(host.machine(), sample);
            around.begins(Phase::Act);
            let answer = begun.commit(host);
            around.begins(Phase::Remember);
            lock().finish(host.machine(), begun, answer)
        });
        if around.after(host, cycle)?.is_break() {
            break;
        }
        around.wait(host);
    }
    Ok(())
}

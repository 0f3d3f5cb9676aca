//! The one loop over a host: sample, plan, commit, wait, until it is over. The caller supplies everything else of a run.

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

/// Hooks around the cycles of a run: how it is shown, how time passes, when it ends.
pub trait Around<H: Host> {
    /// An error that ends a run before it is over.
    type Error;

    /// Called before the host is sampled; may end the run.
    ///
    /// # Errors
    /// An error that ends the run.
    fn before(&mut self, host: &mut H) -> Result<ControlFlow<()>, Self::Error>;

    /// Called when a part of a cycle begins, and the one before it is over: for timing.
    fn begins(&mut self, _: Phase) {}

    /// Called with the observations and actions of a cycle, or with the reason the host could not be read: nothing was done
    /// then, and the next sample may succeed. May end the run.
    ///
    /// # Errors
    /// An error that ends the run.
    fn after(
        &mut self,
        host: &mut H,
        cycle: Result<Cycle, HostError>,
    ) -> Result<ControlFlow<()>, Self::Error>;

    /// Lets the time to the next cycle pass.
    fn wait(&mut self, host: &mut H);
}

/// Runs until the hooks end it. The control loop's state is locked in two short stretches of each cycle and not while a plan
/// is carried out, so that others can query it meanwhile.
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

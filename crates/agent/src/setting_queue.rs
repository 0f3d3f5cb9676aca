//! A queue of settings that operators send through the servers. The loop carries them out, since only the loop owns the host.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use homenode_control::Control;
use homenode_host::{ActionError, Host, Setting, VmSettings, WakeSignal};
use homenode_units::VmId;

use crate::feed::Feed;
use crate::loop_queue::LoopQueue;

/// Why settings are not in force after a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotSet {
    /// The host failed to set them.
    #[error("{0}")]
    Failed(#[from] ActionError),
    /// The settings have changed since the client read them.
    #[error("another client changed the settings of that VM meanwhile")]
    Changed,
    /// The run has ended, and its loop carries out nothing more.
    #[error("the run has ended: no change takes effect any more")]
    Ended,
}

/// A callback that gets the result.
type Told = Box<dyn FnOnce(Result<(), NotSet>) + Send>;
/// Returns true if a VM's settings are still as expected.
type Holds = Box<dyn Fn(&VmSettings) -> bool + Send>;

/// Settings of a VM that wait to be carried out.
struct Pending {
    vm: VmId,
    settings: Vec<Setting>,
    holds: Holds,
    told: Told,
}

/// Settings that wait for the loop.
#[derive(Clone)]
pub struct SettingQueue(LoopQueue<Pending>);

impl fmt::Debug for SettingQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettingQueue").finish_non_exhaustive()
    }
}

impl SettingQueue {
    /// Creates an empty queue; `wake_signal` wakes the loop.
    pub fn new(wake_signal: &WakeSignal) -> SettingQueue {
        SettingQueue(LoopQueue::new(wake_signal))
    }

    /// Queues a setting of a VM; the loop calls `told` with the result.
    pub fn set(&self, vm: VmId, setting: Setting, told: impl FnOnce(Result<(), NotSet>) + Send + 'static) {
        self.set_where(vm, vec![setting], |_| true, told);
    }

    /// Queues several settings of a VM, to be set only if `holds` returns true for its current settings. The loop calls `holds`
    /// first with the settings that it knows, and then with the stored ones, under the lock that protects the write.
    pub fn set_where(
        &self,
        vm: VmId,
        settings: Vec<Setting>,
        holds: impl Fn(&VmSettings) -> bool + Send + 'static,
        told: impl FnOnce(Result<(), NotSet>) + Send + 'static,
    ) {
        let pending = Pending {
            vm,
            settings,
            holds: Box::new(holds),
            told: Box::new(told),
        };
        if let Err(pending) = self.0.push(pending) {
            (pending.told)(Err(NotSet::Ended));
        }
    }

    /// Refuses the settings that wait, and all that come later: the loop has ended, but the servers go on answering.
    pub fn close(&self) {
        for pending in self.0.close() {
            (pending.told)(Err(NotSet::Ended));
        }
    }

    /// Returns whether the loop has ended, so that no change takes effect any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Carries out the settings that wait now; answers and the feed show them from then on. Settings that arrive meanwhile wait
    /// for the next call, so a client that keeps sending settings cannot block the loop.
    pub fn carry_out<H: Host + ?Sized>(&self, host: &mut H, control: &Mutex<Control>, feed: Option<&Feed>) {
        for pending in self.0.take() {
            let control = || control.lock().unwrap_or_else(PoisonError::into_inner);
            let Pending {
                vm,
                settings,
                holds,
                told,
            } = pending;
            // If the VM has ended, continue: the host reports that.
            let is_changed = control().settings(vm).is_some_and(|now| !holds(&now));
            told(if is_changed {
                Err(NotSet::Changed)
            } else {
                match host.set_where(vm, &settings, &holds) {
                    Ok(true) => {
                        let mut control = control();
                        for setting in settings {
                            control.was_set(vm, setting);
                        }
                        if let Some(feed) = feed {
                            feed.refresh(control.status(host.machine()));
                        }
                        Ok(())
                    }
                    Ok(false) => Err(NotSet::Changed),
                    Err(error) => Err(error.into()),
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn settings_after_the_end_of_the_loop_are_refused_at_once() {
        let queue = SettingQueue::new(&WakeSignal::default());
        let (said, heard) = mpsc::channel();
        for is_late in [false, true] {
            let said = said.clone();
            queue.set(VmId(1), Setting::Permit(None), move |set| {
                said.send((is_late, set)).unwrap();
            });
            if !is_late {
                assert!(heard.try_recv().is_err(), "it waits for the loop");
                queue.close();
            }
            assert_eq!(heard.try_recv(), Ok((is_late, Err(NotSet::Ended))));
        }
    }
}

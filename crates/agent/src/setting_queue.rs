//! Settings that operators ask for through the servers: the loop carries them out, as it alone owns the host.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use homenode_control::Control;
use homenode_host::{ActionError, Bell, Host, Setting, VmSettings};
use homenode_units::VmId;

use crate::feed::Feed;

/// Why settings are not in force.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotSet {
    /// The host could not.
    #[error("{0}")]
    Failed(#[from] ActionError),
    /// They are not any more what they were when it was asked for.
    #[error("somebody else set something of that VM meanwhile")]
    Changed,
}

/// Who is told what came of settings.
type Told = Box<dyn FnOnce(Result<(), NotSet>) + Send>;
/// What must still hold of a VM's settings.
type Holds = Box<dyn Fn(&VmSettings) -> bool + Send>;

/// Settings of a VM that are to be carried out.
struct Pending {
    vm: VmId,
    settings: Vec<Setting>,
    holds: Holds,
    told: Told,
}

/// Settings that wait for the loop.
#[derive(Clone)]
pub struct SettingQueue {
    bell: Bell,
    queue: Arc<Mutex<VecDeque<Pending>>>,
}

impl fmt::Debug for SettingQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettingQueue").finish_non_exhaustive()
    }
}

impl SettingQueue {
    /// An empty queue that rings for the loop.
    pub fn new(bell: &Bell) -> SettingQueue {
        SettingQueue {
            bell: bell.clone(),
            queue: Arc::default(),
        }
    }

    /// Asks that something of a VM be set; `told` is called by the loop, once that was tried.
    pub fn set(&self, vm: VmId, setting: Setting, told: impl FnOnce(Result<(), NotSet>) + Send + 'static) {
        self.set_where(vm, vec![setting], |_| true, told);
    }

    /// Asks for several at once, if `holds` of the VM's settings when the loop comes to them: of those that the loop knows, and
    /// of those that are stored then, under the lock that they are stored under.
    pub fn set_where(
        &self,
        vm: VmId,
        settings: Vec<Setting>,
        holds: impl Fn(&VmSettings) -> bool + Send + 'static,
        told: impl FnOnce(Result<(), NotSet>) + Send + 'static,
    ) {
        self.lock().push_back(Pending {
            vm,
            settings,
            holds: Box::new(holds),
            told: Box::new(told),
        });
        self.bell.ring();
    }

    /// Carries out what waits now. Answers and the feed show it from then on. What comes meanwhile waits for the next time: a
    /// client that asks without end must not keep the loop.
    pub fn carry_out<H: Host + ?Sized>(&self, host: &mut H, control: &Mutex<Control>, feed: Option<&Feed>) {
        let waits = std::mem::take(&mut *self.lock());
        for pending in waits {
            let control = || control.lock().unwrap_or_else(PoisonError::into_inner);
            let Pending {
                vm,
                settings,
                holds,
                told,
            } = pending;
            // A VM that is gone is for the host to say.
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

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Pending>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

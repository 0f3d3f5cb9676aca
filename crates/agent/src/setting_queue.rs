//! Settings that operators ask for through the server: the loop carries them out, as it alone owns the host.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use homenode_control::Control;
use homenode_host::{ActionError, Bell, Host, Setting};
use homenode_units::VmId;

use crate::feed::Feed;

/// Who is told what came of a setting.
type Told = Box<dyn FnOnce(Result<(), ActionError>) + Send>;

/// A setting of a VM that is to be carried out.
struct Pending {
    vm: VmId,
    setting: Setting,
    told: Told,
}

/// Settings that wait for the loop.
#[derive(Clone)]
pub struct SettingQueue {
    bell: Bell,
    queue: Arc<Mutex<VecDeque<Pending>>>,
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
    pub fn set(
        &self,
        vm: VmId,
        setting: Setting,
        told: impl FnOnce(Result<(), ActionError>) + Send + 'static,
    ) {
        let told = Box::new(told);
        self.lock().push_back(Pending { vm, setting, told });
        self.bell.ring();
    }

    /// Carries out what waits now: whoever asks once he is told so is shown it, and so are those who look at the feed. What comes meanwhile waits for the next time: a client that asks without end must not keep
    /// the loop.
    pub fn carry_out<H: Host + ?Sized>(&self, host: &mut H, control: &Mutex<Control>, feed: Option<&Feed>) {
        let waits = std::mem::take(&mut *self.lock());
        for Pending { vm, setting, told } in waits {
            let done = host.set(vm, setting);
            if done.is_ok() {
                let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
                control.was_set(vm, setting);
                if let Some(feed) = feed {
                    feed.refresh(control.status(host.machine()));
                }
            }
            told(done);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Pending>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

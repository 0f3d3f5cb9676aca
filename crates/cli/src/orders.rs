//! What operators order of the host through the desk: the loop carries it out, as it alone owns the host.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use homenode_control::Control;
use homenode_host::{ActionError, Host, Setting};
use homenode_units::VmId;

/// How long whoever ordered waits: moving pages may keep the loop busy for a while.
const PATIENCE: Duration = Duration::from_secs(30);

/// A setting of a VM.
#[derive(Debug)]
struct Order {
    vm: VmId,
    setting: Setting,
    done: Sender<Result<(), ActionError>>,
}

/// Orders that wait for the loop.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    queue: Arc<Mutex<VecDeque<Order>>>,
}

/// An order that was placed.
#[derive(Debug)]
pub struct Placed {
    done: Receiver<Result<(), ActionError>>,
}

impl Placed {
    /// Waits until it is carried out; says why it was not.
    pub fn wait(&self) -> Result<(), String> {
        match self.done.recv_timeout(PATIENCE) {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(_) => {
                Err("the agent is busy or stopping; look with `homenode vm` whether it was done".into())
            }
        }
    }
}

impl Orders {
    /// Orders that something of a VM be set.
    pub fn set(&self, vm: VmId, setting: Setting) -> Placed {
        let (sender, done) = channel();
        let order = Order {
            vm,
            setting,
            done: sender,
        };
        self.lock().push_back(order);
        Placed { done }
    }

    /// Carries out what was ordered.
    pub fn carry_out<H: Host + ?Sized>(&self, host: &mut H, control: &Mutex<Control>) {
        loop {
            let Some(order) = self.lock().pop_front() else {
                return;
            };
            let done = host.set(order.vm, order.setting);
            if done.is_ok() {
                let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
                control.was_set(order.vm, order.setting);
            }
            // Whoever ordered it may have gone.
            let _ = order.done.send(done);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Order>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

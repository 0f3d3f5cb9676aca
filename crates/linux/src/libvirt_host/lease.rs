//! Leases: whatever limit is in force on a VM ends by itself, in one place, and never outlasts the agent.

use homenode_host::{ActionError, Lever, Outcome};
use homenode_units::Ns;

use super::vm::Vm;
use super::{LibvirtHost, now};

/// How long a limit that an earlier agent left may stay unless this one decides for it.
pub(super) const CARRIED_LEASE: Ns = Ns::from_secs(10);
/// How long to wait before what could not be lifted is tried again.
const RETRY: Ns = Ns::from_secs(1);
/// Levers that the agent holds by leases.
const LEASED: [Lever; 4] = [Lever::CpuQuota, Lever::Resctrl, Lever::Memory, Lever::Watching];

impl Vm {
    /// The end of the lease on a lever, while a limit of the agent's is in force there.
    fn lease_end(&mut self, lever: Lever) -> Option<&mut Ns> {
        match lever {
            Lever::CpuQuota => self.held.as_mut().map(|held| &mut held.until),
            Lever::Resctrl => self.confined.as_mut().map(|confined| &mut confined.until),
            Lever::Memory => self.shrunk.as_mut().map(|shrunk| &mut shrunk.until),
            Lever::Watching => self.watching.as_mut().map(|watching| &mut watching.until),
            Lever::VcpuPlacement | Lever::Home | Lever::Pages | Lever::MemoryPolicy | Lever::Topology => None,
        }
    }
}

impl LibvirtHost {
    /// Lifts what the agent set on a lever of a VM, if anything: a limit, a watch or its home.
    pub(super) fn lift(&mut self, vm: &mut Vm, lever: Lever) -> Result<Outcome, ActionError> {
        match lever {
            Lever::CpuQuota => self.unhold(vm),
            Lever::Resctrl => self.free(vm),
            Lever::Memory => self.give_back(vm),
            Lever::Watching => self.unwatch(vm),
            Lever::Home => self.leave_home(vm),
            // Plans that lift anything else are refused.
            Lever::VcpuPlacement | Lever::Pages | Lever::MemoryPolicy | Lever::Topology => Ok(Outcome::Done),
        }
    }

    /// Lifts every limit of the agent's: limits never outlast it, whatever else it leaves in force. What cannot be lifted is
    /// said and stays journalled.
    pub fn lift_limits(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        for (id, mut vm) in std::mem::take(&mut self.vms) {
            for lever in LEASED {
                failures.extend(self.lift(&mut vm, lever).err().map(|error| error.to_string()));
            }
            failures.extend(self.unquestion(&mut vm).err().map(|error| error.to_string()));
            self.vms.insert(id, vm);
        }
        failures
    }

    /// Lifts the limits whose leases are over.
    pub(super) fn end_leases(&mut self) {
        if self.acts.is_none() {
            return;
        }
        let at = now();
        let is_over = |vm: &mut Vm, lever| vm.lease_end(lever).is_some_and(|end| *end <= at);
        let over = self.vms.iter_mut().filter_map(|(id, vm)| {
            let any = LEASED.into_iter().any(|lever| is_over(vm, lever));
            any.then_some(*id)
        });
        let over: Vec<_> = over.collect();
        for id in over {
            let Some(mut vm) = self.vms.remove(&id) else {
                continue;
            };
            for lever in LEASED {
                if is_over(&mut vm, lever)
                    && let Err(error) = self.lift(&mut vm, lever)
                {
                    self.notice(format!("{error}; tried again"));
                    if let Some(end) = vm.lease_end(lever) {
                        *end = at + RETRY;
                    }
                }
            }
            self.vms.insert(id, vm);
        }
    }
}

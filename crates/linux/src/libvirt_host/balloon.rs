//! Memory of VMs, by their balloons: set through libvirt, asked of the guest's driver, given back with the lease.
//!
//! ```text
//!              journal, setMemory           lease over, or Lift
//!   operator's ─────────────────▶ ours … ─────────────────────────▶ operator's
//!       ▲                          │ plugged in: both grow
//!       └──────────────────────────┘ there, and then elsewhere: theirs
//! ```
//!
//! A balloon follows as fast as its guest likes, so reading back tells nothing at once: [`Balloon::current`] of later samples
//! does. libvirt does not say what was asked for last. A balloon that had come to the agent's target and is then elsewhere was
//! set by somebody else, or deflated by its guest (which a balloon with `autodeflate='on'` does when it is out of memory).

use homenode_host::{ActionError, Balloon, GuestMemory, Outcome};
use homenode_units::{Bytes, Ns};

use super::act::host_error;
use super::connection::CallError;
use super::vm::Vm;
use super::{LibvirtHost, now};
use crate::journal::{Shrink, StatsPeriod};

/// How often guests are asked for figures, in seconds, where the operator does not have them asked.
const STATS_PERIOD_S: u32 = 2;

/// A limit on memory that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shrunk {
    pub shrink: Shrink,
    /// End of its lease.
    pub until: Ns,
    /// Whether the balloon has come to where it was asked to be.
    pub is_there: bool,
    /// All memory that the VM had then, DIMMs included.
    pub memory_kib: u64,
}

/// What giving a VM less memory is called in errors.
pub(super) const SHRINK: &str = "setting the memory";
/// What giving it back is called.
pub(super) const GIVE_BACK: &str = "giving back the memory";
const QUESTION: &str = "setting the period of memory statistics";

impl LibvirtHost {
    /// Gives a VM this much memory until the lease is over.
    pub(super) fn shrink(&mut self, vm: &mut Vm, ours: Bytes, lease: Ns) -> Result<Outcome, ActionError> {
        let until = Ns(now().0.saturating_add(lease.0));
        let before = match vm.shrunk {
            Some(shrunk) if shrunk.shrink.ours == ours => {
                vm.shrunk = Some(Shrunk { until, ..shrunk });
                return Ok(Outcome::Renewed);
            }
            Some(shrunk) => shrunk.shrink.before,
            None => vm.domain.memory_current_bytes,
        };
        let shrink = Shrink { ours, before };
        self.journal_set(vm, SHRINK, &shrink)?;
        vm.shrunk = Some(Shrunk {
            shrink,
            until,
            is_there: false,
            memory_kib: vm.domain.memory_kib,
        });
        let call = |e: CallError| host_error(vm, SHRINK, e.cause());
        if let Err(failure) = self.libvirt.set_memory(&vm.handle, ours).map_err(call) {
            // The VM is as it was, or the lease's end tries again.
            let _ = self.give_back(vm);
            return Err(failure);
        }
        Ok(Outcome::Done)
    }

    /// Gives a VM back what the agent took.
    pub(super) fn give_back(&mut self, vm: &mut Vm) -> Result<Outcome, ActionError> {
        if let Some(shrunk) = vm.shrunk {
            let call = |e: CallError| host_error(vm, GIVE_BACK, e.cause());
            self.libvirt
                .set_memory(&vm.handle, shrunk.shrink.before)
                .map_err(call)?;
            vm.shrunk = None;
            self.journal_clear::<Shrink>(vm, GIVE_BACK)?;
        }
        Ok(Outcome::Done)
    }

    /// Takes in what was plugged in since the memory was set, and what somebody else or the guest did to it.
    pub(super) fn reconcile_memory(&mut self, vm: &mut Vm) {
        let Some(mut shrunk) = vm.shrunk else { return };
        let (current, name) = (vm.domain.memory_current_bytes, vm.run.name.clone());
        let written = if vm.domain.memory_kib != shrunk.memory_kib {
            // QEMU leaves the balloon as large as it is: current memory and what was asked for move alike.
            let moved = |bytes: Bytes| {
                let grown = bytes + Bytes(vm.domain.memory_kib.saturating_mul(1024));
                grown.saturating_sub(Bytes(shrunk.memory_kib.saturating_mul(1024)))
            };
            shrunk.shrink = Shrink {
                ours: moved(shrunk.shrink.ours),
                before: moved(shrunk.shrink.before),
            };
            (shrunk.memory_kib, shrunk.is_there) = (vm.domain.memory_kib, false);
            let shrink = shrunk.shrink;
            vm.shrunk = Some(shrunk);
            self.journal_set(vm, SHRINK, &shrink)
        } else if Balloon::is_near(current, shrunk.shrink.ours) {
            shrunk.is_there = true;
            vm.shrunk = Some(shrunk);
            return;
        } else if shrunk.is_there {
            let ours = shrunk.shrink.ours;
            self.notice(format!(
                "VM {name} now has {current}, the agent had set {ours}: somebody else changed it, or its guest took it back"
            ));
            vm.shrunk = None;
            self.journal_clear::<Shrink>(vm, SHRINK)
        } else {
            return;
        };
        if let Err(error) = written {
            self.notice(error.to_string());
        }
    }

    /// Has the guest asked for figures while it may be shrunk, and not otherwise.
    pub(super) fn question(&mut self, vm: &mut Vm) {
        let Some(device) = vm.domain.balloon.filter(|_| self.acts.is_some()) else {
            return;
        };
        let done = match (vm.domain.may_be_shrunk(), vm.asked_before) {
            (true, None) if device.stats_period_s == 0 => {
                let before_s = device.stats_period_s;
                vm.asked_before = Some(before_s);
                self.journal_first(vm)
                    .map_err(|e| host_error(vm, QUESTION, &e.to_string()))
                    .and_then(|()| self.journal_set(vm, QUESTION, &StatsPeriod { before_s }))
                    .and_then(|()| self.set_stats_period(vm, STATS_PERIOD_S))
            }
            (false, Some(_)) => self.unquestion(vm),
            _ => Ok(()),
        };
        if let Err(error) = done {
            self.notice(error.to_string());
        }
    }

    /// Asks guests as often as the operator had them asked.
    pub(super) fn unquestion(&mut self, vm: &mut Vm) -> Result<(), ActionError> {
        if let Some(before) = vm.asked_before.take() {
            self.set_stats_period(vm, before)?;
            self.journal_clear::<StatsPeriod>(vm, QUESTION)?;
        }
        Ok(())
    }

    fn set_stats_period(&mut self, vm: &Vm, seconds: u32) -> Result<(), ActionError> {
        let call = |e: CallError| host_error(vm, QUESTION, e.cause());
        self.libvirt.set_stats_period(&vm.handle, seconds).map_err(call)
    }

    /// What a VM's balloon tells.
    pub(super) fn balloon(&mut self, vm: &Vm) -> Option<Balloon> {
        vm.domain.balloon?;
        let current = vm.domain.memory_current_bytes;
        let shrink = vm.shrunk.map(|shrunk| shrunk.shrink);
        let is_asked = vm.domain.may_be_shrunk() || shrink.is_some();
        let guest: Option<GuestMemory> = match is_asked {
            true => self.libvirt.guest_memory(&vm.handle).unwrap_or_default(),
            false => None,
        };
        Some(Balloon {
            current,
            maximum: shrink.map_or(current, |shrink| shrink.before),
            limit: shrink.map(|shrink| shrink.ours),
            guest,
        })
    }
}

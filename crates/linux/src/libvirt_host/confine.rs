//! Parts of caches and memory bandwidth: a resctrl group per confined VM, removed with its lease.

use homenode_host::{ActionError, Limit, Outcome};
use homenode_units::Ns;

use super::act::host_error;
use super::vm::Vm;
use super::{LibvirtHost, now};
use crate::confine::{ConfineError, Confiner};
use crate::journal;

/// A part that is in force, and the end of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Confined {
    pub limit: Limit,
    pub until: Ns,
}

/// What confining a VM is called in errors.
pub(super) const CONFINE: &str = "confining to a part of caches or memory bandwidth";
/// What letting it go is called.
pub(super) const FREE: &str = "letting go of a part of caches or memory bandwidth";

impl LibvirtHost {
    /// Confines a VM's vCPUs until the lease is over.
    pub(super) fn confine(&mut self, vm: &mut Vm, limit: Limit, lease: Ns) -> Result<Outcome, ActionError> {
        let until = Ns(now().0.saturating_add(lease.0));
        let confiner = Confiner::new(&self.root);
        let tids: Vec<i32> = vm.vcpu_tids().collect();
        let said = |vm: &Vm, e: ConfineError| host_error(vm, CONFINE, &e.to_string());
        let holds = |vm: &Vm| confiner.holds(vm.run.vm, &tids).map_err(|e| said(vm, e));
        if vm.confined.is_some_and(|confined| confined.limit == limit) && holds(vm)? {
            vm.confined = Some(Confined { limit, until });
            return Ok(Outcome::Renewed);
        }
        self.journal_set(vm, CONFINE, &journal::Confined(limit))?;
        vm.confined = Some(Confined { limit, until });
        let done = confiner.confine(vm.run.vm, &tids, limit).map_err(|e| said(vm, e));
        let failure = match (done, holds(vm)) {
            (Ok(()), Ok(true)) => return Ok(Outcome::Done),
            (Ok(()), Ok(false)) => host_error(vm, CONFINE, "its vCPUs are not in the group"),
            (Err(failure), _) | (_, Err(failure)) => failure,
        };
        // The VM is as it was, or the lease's end tries again.
        let _ = self.free(vm);
        Err(failure)
    }

    /// Lets a VM's vCPUs use all of caches and memory bandwidth again.
    pub(super) fn free(&mut self, vm: &mut Vm) -> Result<Outcome, ActionError> {
        if vm.confined.is_some() {
            let released = Confiner::new(&self.root).release(vm.run.vm);
            released.map_err(|e| host_error(vm, FREE, &e.to_string()))?;
            vm.confined = None;
            self.journal_clear::<journal::Confined>(vm, FREE)?;
        }
        Ok(Outcome::Done)
    }
}

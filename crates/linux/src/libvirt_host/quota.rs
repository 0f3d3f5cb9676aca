//! CPU quotas of vCPUs: set through libvirt, read back from the cgroups, lifted with their lease.
//!
//! ```text
//!              journal, vcpu_quota                lease over, or Lift
//!   operator's ───────────────────▶ ours until … ─────────────────────▶ operator's
//!                                      │ somebody else changed it
//!                                      └────────────────────────────▶ theirs, left alone
//! ```
//!
//! libvirt's quotas never end by themselves. While the agent lives it ends them; when it dies the guard does.

use homenode_host::{ActionError, CpuQuota, Outcome};
use homenode_units::Ns;

use super::act::host_error;
use super::connection::CallError;
use super::vm::Vm;
use super::{LibvirtHost, now};
use crate::cgroup::{CpuGroup, CpuMax, Hierarchy};
use crate::journal::Quotas;
use crate::read::ReadError;
use crate::task::{self, Process, Role};

/// A quota of the agent's that is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub quotas: Quotas,
    /// End of its lease.
    pub until: Ns,
}

/// What the vCPUs of a VM may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InForce {
    /// The same for all.
    All(CpuMax),
    /// Not the same: somebody wrote to single cgroups.
    Mixed,
    /// No kernel says.
    Unknown,
}

impl InForce {
    fn of(each: impl Iterator<Item = Option<CpuMax>>) -> InForce {
        let mut each = each.peekable();
        let Some(Some(first)) = each.peek().copied() else {
            return InForce::Unknown;
        };
        if each.all(|max| max == Some(first)) {
            InForce::All(first)
        } else {
            InForce::Mixed
        }
    }

    /// The quota of all; `None` where there is none, or not one.
    pub fn quota(self) -> Option<CpuQuota> {
        match self {
            InForce::All(max) => max.quota(),
            InForce::Mixed | InForce::Unknown => None,
        }
    }
}

impl Quotas {
    /// Whether what is in force may be the agent's; where no cgroup tells that is the likelier.
    fn is_in(&self, seen: InForce) -> bool {
        match seen {
            InForce::Unknown => true,
            seen => seen.quota().is_some_and(|seen| self.may_be_ours(seen)),
        }
    }

    /// The same after an agent died: libvirt may have died with it, and left vCPUs with different quotas.
    pub(super) fn is_left_in(&self, seen: InForce) -> bool {
        seen == InForce::Mixed || self.is_in(seen)
    }
}

impl std::fmt::Display for InForce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InForce::All(CpuMax::Unlimited) => f.write_str("no quota"),
            InForce::All(CpuMax::Quota(quota)) => write!(f, "{quota}"),
            InForce::Mixed => f.write_str("different quotas of its vCPUs"),
            InForce::Unknown => f.write_str("a quota that no cgroup shows"),
        }
    }
}

/// What the vCPUs of a process may use now: for the guard, who knows nothing else of it.
pub(super) fn of_process(root: &std::path::Path, process: Process) -> Result<InForce, ReadError> {
    let cgroups = Hierarchy::read(root)?;
    let mut each = Vec::new();
    for thread in task::threads(root, process.pid)? {
        if matches!(thread.role, Role::Vcpu(_)) {
            let group = cgroups.group_of(process.pid, thread.tid)?;
            each.push(group.map(|group| group.max()).transpose()?.flatten());
        }
    }
    Ok(InForce::of(each.into_iter()))
}

impl Vm {
    /// What its vCPUs may use now.
    pub fn in_force(&self) -> Result<InForce, ReadError> {
        let each = self
            .vcpu_tids()
            .map(|tid| self.group(tid).map_or(Ok(None), CpuGroup::max));
        let each: Vec<Option<CpuMax>> = each.collect::<Result<_, _>>()?;
        Ok(InForce::of(each.into_iter()))
    }
}

impl LibvirtHost {
    /// Holds every vCPU of a VM to a quota until the lease is over.
    pub(super) fn hold(&mut self, vm: &mut Vm, ours: CpuQuota, lease: Ns) -> Result<Outcome, ActionError> {
        let until = Ns(now().0.saturating_add(lease.0));
        let said = |e: ReadError| host_error(vm, HOLD, &e.to_string());
        let seen = vm.in_force().map_err(said)?;
        let before = match (vm.held, seen) {
            (_, InForce::Unknown) => {
                let cause = "its vCPUs have no cgroups with a quota; is libvirt's cpu controller mounted?";
                return Err(host_error(vm, HOLD, cause));
            }
            (None, InForce::Mixed) => {
                let cause = "its vCPUs have different quotas already, which could not be given back";
                return Err(host_error(vm, HOLD, cause));
            }
            (Some(held), seen) if held.quotas.ours == ours && seen.quota() == Some(ours) => {
                vm.held = Some(Held { until, ..held });
                return Ok(Outcome::Renewed);
            }
            (Some(held), _) => held.quotas.before,
            (None, seen) => seen.quota(),
        };
        let previous = vm.held.map(|held| held.quotas.ours);
        let quotas = Quotas {
            ours,
            previous,
            before,
        };
        self.journal_set(vm, HOLD, &quotas)?;
        vm.held = Some(Held { quotas, until });
        let call = |e: CallError| host_error(vm, HOLD, e.cause());
        let done = self.libvirt.hold(&vm.handle, ours).map_err(call);
        let seen = vm.in_force().map_err(|e| host_error(vm, HOLD, &e.to_string()));
        let failure = match (done, seen) {
            (Ok(()), Ok(seen)) if seen.quota() == Some(ours) => return Ok(Outcome::Done),
            (Ok(()), Ok(seen)) => host_error(vm, HOLD, &format!("asked for {ours}, in force is {seen}")),
            (Err(failure), _) | (_, Err(failure)) => failure,
        };
        // Whatever came of it: the VM is as it was, or the lease's end tries again.
        let _ = self.unhold(vm);
        Err(failure)
    }

    /// Gives a VM's vCPUs back what the operator had set, where a quota of the agent's is in force.
    pub(super) fn unhold(&mut self, vm: &mut Vm) -> Result<Outcome, ActionError> {
        let Some(held) = vm.held else {
            return Ok(Outcome::Done);
        };
        let call = |e: CallError| host_error(vm, LIFT, e.cause());
        self.libvirt.lift(&vm.handle, held.quotas.before).map_err(call)?;
        vm.held = None;
        self.journal_clear::<Quotas>(vm, LIFT)?;
        let seen = vm.in_force().map_err(|e| host_error(vm, LIFT, &e.to_string()))?;
        if seen.quota() != held.quotas.before {
            return Err(host_error(vm, LIFT, &format!("in force is {seen}")));
        }
        Ok(Outcome::Done)
    }

    /// Takes in what somebody else did to the quota that the agent set.
    pub(super) fn reconcile_quota(&mut self, vm: &mut Vm, is_first: bool) {
        let Some(held) = vm.held else { return };
        let Ok(seen) = vm.in_force() else { return };
        if held.quotas.is_in(seen) || (is_first && held.quotas.is_left_in(seen)) {
            return;
        }
        // An agent that died between journal and libvirt leaves a quota that never came into force.
        if seen.quota() != held.quotas.before {
            let (name, ours) = (&vm.run.name, held.quotas.ours);
            let text = format!(
                "VM {name} now has {seen}, the agent had set {ours}: somebody else changed it, it is left alone"
            );
            self.notice(text);
        }
        vm.held = None;
        if let Err(error) = self.journal_clear::<Quotas>(vm, LIFT) {
            self.notice(error.to_string());
        }
    }
}

/// What holding a VM to a quota is called in errors.
pub(super) const HOLD: &str = "setting the CPU quota";
/// What lifting it is called.
pub(super) const LIFT: &str = "lifting the CPU quota";

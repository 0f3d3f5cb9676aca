//! CPU quotas of vCPUs: set through the VM's manager, read back from the cgroups.
//!
//! The kernel never ends a quota. The agent lifts it while it lives; the guard lifts it when the agent dies. The journal records
//! in which cgroups it was set: a VM may be moved to another cgroup, or end before its own is removed, and whatever runs in the
//! old cgroup next would stay throttled.

use std::path::PathBuf;

use homenode_host::{Act, ActionError, CpuQuota, Lever, Limit, Outcome, VmSample};
use homenode_kernel::cgroup::{CpuGroup, CpuMax, Hierarchy, PERIOD_DEFAULT};
use homenode_kernel::read::ReadError;
use homenode_kernel::task::Role;
use homenode_undo::journal::{Entry, Written};
use homenode_units::Ns;
use serde::{Deserialize, Serialize};

use super::{After, Kvm, LeverState, Steps, UndoError, failed};
use crate::context::HostContext;
use crate::manager::CallError;
use crate::vm::Vm;

/// A CPU quota that the agent set instead of the operator's, as it is in the cgroup: the quota of a shared cgroup is for all of
/// its vCPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// The agent's quota.
    pub ours: CpuQuota,
    /// The agent's former quota, in force until the new one is.
    #[serde(default)]
    pub previous: Option<CpuQuota>,
    /// The operator's quota, if there was one.
    pub before: Option<CpuQuota>,
    /// Directories of the cgroups in which the quota was set; empty if an older version wrote this entry.
    #[serde(default)]
    pub groups: Vec<PathBuf>,
}

impl Written for Quotas {
    const KEY: &'static str = "cpu-quota";
}

const HOLD: &str = "setting the CPU quota";
const LIFT: &str = "lifting the CPU quota";

/// CPU time that the vCPUs of a VM may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InForce {
    /// The same CPU time for all vCPUs.
    All(CpuMax),
    /// Different quotas: another program wrote to individual cgroups.
    Mixed,
    /// No cgroup shows a quota.
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

    /// The common quota; `None` if there is none.
    fn quota(self) -> Option<CpuQuota> {
        match self {
            InForce::All(max) => max.quota(),
            InForce::Mixed | InForce::Unknown => None,
        }
    }
}

impl Quotas {
    /// Whether a quota in force may be the agent's. libvirt sets time and period in separate steps, so an agent that dies in
    /// between leaves the time of one quota with the period of another.
    pub fn may_be_ours(&self, seen: CpuQuota) -> bool {
        let mut ours = std::iter::once(self.ours).chain(self.previous);
        let theirs = self.before.map_or(PERIOD_DEFAULT, |before| before.period_ns);
        let periods: Vec<Ns> = ours
            .clone()
            .map(|quota| quota.period_ns)
            .chain([theirs])
            .collect();
        ours.any(|quota| quota.run_ns == seen.run_ns) && periods.contains(&seen.period_ns)
    }

    /// Whether what is in force may be the agent's quota. Assumes that it is if no cgroup shows it.
    fn is_in(&self, seen: InForce) -> bool {
        match seen {
            InForce::Unknown => true,
            seen => seen.quota().is_some_and(|seen| self.may_be_ours(seen)),
        }
    }

    /// Like [`Quotas::is_in`], after an agent died: libvirt may have died too, and left the vCPUs with different quotas.
    fn is_left_in(&self, seen: InForce) -> bool {
        seen == InForce::Mixed || self.is_in(seen)
    }

    /// Returns those of these cgroups whose quota may be the agent's.
    fn held_in(&self, groups: impl IntoIterator<Item = CpuGroup>) -> Result<Vec<CpuGroup>, ReadError> {
        let mut held = Vec::new();
        for group in groups {
            if group.max()?.is_some_and(|max| self.is_in(InForce::All(max))) {
                held.push(group);
            }
        }
        Ok(held)
    }

    /// Returns the cgroups in which the quota was set and still is, though the VM's vCPUs are now in the cgroups `now`.
    fn left_behind(&self, now: &[CpuGroup]) -> Result<Vec<CpuGroup>, ReadError> {
        let is_left = |path: &&PathBuf| !now.iter().any(|group| group.path() == **path);
        let left = self.groups.iter().filter(is_left);
        let left: Vec<Option<CpuGroup>> = left.map(|path| CpuGroup::open(path)).collect::<Result<_, _>>()?;
        self.held_in(left.into_iter().flatten())
    }

    /// Returns all cgroups that have the quota: among `now`, where the VM's vCPUs are, and among those in which it was set.
    fn held_anywhere(&self, now: Vec<CpuGroup>) -> Result<Vec<CpuGroup>, ReadError> {
        let left = self.left_behind(&now)?;
        Ok([self.held_in(now)?, left].concat())
    }
}

impl std::fmt::Display for InForce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InForce::All(CpuMax::Unlimited) => f.write_str("no quota"),
            InForce::All(CpuMax::Quota(quota)) => write!(f, "{quota}"),
            InForce::Mixed => f.write_str("different quotas on its vCPUs"),
            InForce::Unknown => f.write_str("a quota that no cgroup shows"),
        }
    }
}

/// Returns the cgroups of a VM's vCPUs, for a guard that knows nothing else about the VM.
fn groups_of_run(after: &mut After<'_>) -> Result<Vec<CpuGroup>, ReadError> {
    let cgroups = Hierarchy::read(after.root)?;
    let mut groups = Vec::new();
    for thread in after.manager.threads(after.run)? {
        if matches!(thread.role, Role::Vcpu(_)) {
            groups.extend(cgroups.group_of(after.run.pid, thread.tid)?);
        }
    }
    Ok(each_once(groups))
}

/// The groups without repetitions.
fn each_once(groups: impl IntoIterator<Item = CpuGroup>) -> Vec<CpuGroup> {
    let mut once: Vec<CpuGroup> = Vec::new();
    for group in groups {
        if !once.contains(&group) {
            once.push(group);
        }
    }
    once
}

impl InForce {
    /// What these cgroups allow.
    fn in_groups(groups: &[CpuGroup]) -> Result<InForce, ReadError> {
        let each: Vec<Option<CpuMax>> = groups.iter().map(CpuGroup::max).collect::<Result<_, _>>()?;
        Ok(InForce::of(each.into_iter()))
    }
}

impl Vm {
    /// Returns the cgroups of the VM's vCPUs.
    fn cpu_groups(&self) -> Vec<CpuGroup> {
        each_once(self.vcpu_tids().filter_map(|tid| self.group(tid).cloned()))
    }

    /// Returns what the VM's vCPUs may use now.
    fn in_force(&self) -> Result<InForce, ReadError> {
        InForce::in_groups(&self.cpu_groups())
    }
}

struct OfVm {
    quotas: Option<Quotas>,
    /// Quota requested for each vCPU; `None` if an earlier agent set it.
    asked: Option<CpuQuota>,
    /// How many vCPUs share a cgroup.
    sharing: u64,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    let quotas = entry.and_then(Entry::get);
    Box::new(OfVm {
        quotas,
        asked: None,
        sharing: 1,
    })
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::CpuQuota
    }

    fn what(&self, act: &Act) -> &'static str {
        match act {
            Act::Lift { .. } => LIFT,
            _ => HOLD,
        }
    }

    fn holds(&self, _context: &HostContext, vm: &Vm, act: &Act) -> Result<bool, ActionError> {
        let ours = self.quotas.as_ref().map(|quotas| quotas.ours);
        Ok(ours.is_some() && wanted(act) == self.asked && seen(vm, HOLD)?.quota() == ours)
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Some(asked) = wanted(act) else {
            return Ok(Outcome::Done);
        };
        self.give_back_what_it_left(context, vm)?;
        self.sharing = sharing(vm);
        let ours = CpuQuota {
            run_ns: Ns(asked.run_ns.0.saturating_mul(self.sharing)),
            ..asked
        };
        let before = match (&self.quotas, seen(vm, HOLD)?) {
            (_, InForce::Unknown) => {
                let cause = "its vCPUs have no cgroups with a quota; is libvirt's cpu controller mounted?";
                return Err(failed(vm, HOLD, cause));
            }
            (None, InForce::Mixed) => {
                let cause = "its vCPUs have different quotas already, which could not be restored";
                return Err(failed(vm, HOLD, cause));
            }
            (Some(quotas), _) => quotas.before,
            (None, seen) => seen.quota(),
        };
        let groups = vm.cpu_groups();
        let can = context.manager.check_groups(vm.run.vm, &groups);
        can.map_err(|cause| failed(vm, HOLD, cause.cause()))?;
        let quotas = Quotas {
            ours,
            previous: self.quotas.as_ref().map(|quotas| quotas.ours),
            before,
            groups: groups.iter().map(|group| group.path().to_owned()).collect(),
        };
        context.set(vm, HOLD, &quotas)?;
        (self.quotas, self.asked) = (Some(quotas), Some(asked));
        let call = |e: CallError| failed(vm, HOLD, e.cause());
        context.manager.hold(vm.run.vm, ours, &groups).map_err(call)?;
        match seen(vm, HOLD)? {
            seen if seen.quota() == Some(ours) => Ok(Outcome::Done),
            seen => Err(failed(vm, HOLD, &format!("asked for {ours}, but it has {seen}"))),
        }
    }

    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(quotas) = &self.quotas else {
            return Ok(());
        };
        let unread = |e: ReadError| failed(vm, LIFT, &e.to_string());
        let held = quotas.held_anywhere(vm.cpu_groups()).map_err(unread)?;
        // A lease may end before the next sample shows that another program changed the quota since.
        if held.is_empty() && !quotas.is_left_in(vm.in_force().map_err(unread)?) {
            (self.quotas, self.asked) = (None, None);
            context.clear::<Quotas>(vm);
            return Ok(());
        }
        let call = |e: CallError| failed(vm, LIFT, e.cause());
        context
            .manager
            .lift(vm.run.vm, quotas.before, &held)
            .map_err(call)?;
        // A quota that is still the agent's, or cannot be read, is not lifted yet.
        let places = if held.is_empty() { vm.cpu_groups() } else { held };
        let seen = InForce::in_groups(&places).map_err(unread)?;
        if seen.quota() != quotas.before && quotas.is_left_in(seen) {
            return Err(failed(vm, LIFT, &format!("it still has {seen}")));
        }
        (self.quotas, self.asked) = (None, None);
        context.clear::<Quotas>(vm);
        Ok(())
    }

    fn reconcile(&mut self, context: &mut HostContext, vm: &mut Vm, is_first: bool) {
        if let Err(error) = self.give_back_what_it_left(context, vm) {
            context.notice(error.to_string());
            return;
        }
        let Some(quotas) = &self.quotas else { return };
        let Ok(seen) = vm.in_force() else { return };
        if quotas.is_in(seen) || (is_first && quotas.is_left_in(seen)) {
            return;
        }
        // If an agent died after it wrote the journal and before libvirt acted, its quota never came into force.
        if seen.quota() != quotas.before {
            let (name, ours) = (&vm.run.name, quotas.ours);
            context.notice(format!(
                "VM {name} now has {seen}; the agent had set {ours}: another program changed it, and the agent leaves it alone"
            ));
        }
        (self.quotas, self.asked) = (None, None);
        context.clear::<Quotas>(vm);
    }

    fn tell(&mut self, _context: &mut HostContext, vm: &mut Vm, sample: &mut VmSample) {
        self.sharing = sharing(vm);
        sample.settings.quota = match &self.quotas {
            Some(quotas) => quotas.before.map(|before| of_one(before, self.sharing)),
            None => sample.vcpus.first().and_then(|vcpu| vcpu.quota),
        };
    }

    fn limit(&self) -> Option<Limit> {
        let ours = self.quotas.as_ref()?.ours;
        let asked = self.asked.unwrap_or_else(|| of_one(ours, self.sharing));
        Some(Limit::CpuQuota(asked))
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.quotas.as_ref().map(|_| Quotas::KEY).into_iter().collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        let Some(quotas) = &self.quotas else {
            return Ok(());
        };
        let mut steps = Steps::default();
        let unread = |steps: &mut Steps, e: ReadError| steps.unknown("its CPU quota", e.to_string());
        let Some(vm) = after.vm()? else {
            // If a cgroup is not removed with its VM, its quota throttles whatever comes into it.
            match quotas.left_behind(&[]) {
                Ok(left) => {
                    let before = quotas.before.map_or(CpuMax::Unlimited, CpuMax::Quota);
                    let given_back = left.iter().map(|group| group.set_max(before));
                    given_back.for_each(|result| steps.note("CPU quota", result.map_err(CallError::from)));
                }
                Err(error) => unread(&mut steps, error),
            }
            return steps.done();
        };
        let groups = groups_of_run(after).and_then(|now| {
            let seen = InForce::in_groups(&now)?;
            Ok((seen, quotas.held_anywhere(now)?))
        });
        match groups {
            Ok((seen, held)) if quotas.is_left_in(seen) || !held.is_empty() => {
                steps.note("CPU quota", after.manager.lift(vm, quotas.before, &held));
            }
            // Another program changed the quota since; it is not touched.
            Ok(_) => {}
            Err(error) => unread(&mut steps, error),
        }
        steps.done()
    }
}

impl OfVm {
    /// Restores a cgroup that the VM was moved out of, if it still has the agent's quota. The quota of the VM's new cgroup is not
    /// the agent's.
    fn give_back_what_it_left(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(quotas) = &self.quotas else {
            return Ok(());
        };
        let unread = |e: ReadError| failed(vm, LIFT, &e.to_string());
        let left = quotas.left_behind(&vm.cpu_groups()).map_err(unread)?;
        let Some(group) = left.first() else {
            return Ok(());
        };
        let (from, ours) = (group.path().display().to_string(), quotas.ours);
        self.lift(context, vm)?;
        let name = &vm.run.name;
        context.notice(format!(
            "VM {name} was moved out of its cgroup {from} while the agent held it to {ours} there: that limit is lifted"
        ));
        Ok(())
    }
}

/// How many vCPUs share a cgroup.
fn sharing(vm: &Vm) -> u64 {
    vm.vcpu_tids().next().map_or(1, |tid| vm.sharing(tid)) as u64
}

/// Returns one vCPU's share of a quota.
fn of_one(all: CpuQuota, sharing: u64) -> CpuQuota {
    CpuMax::Quota(all).divided(sharing).quota().unwrap_or(all)
}

fn wanted(act: &Act) -> Option<CpuQuota> {
    match act {
        Act::Limit {
            limit: Limit::CpuQuota(quota),
            ..
        } => Some(*quota),
        _ => None,
    }
}

fn seen(vm: &Vm, what: &str) -> Result<InForce, ActionError> {
    vm.in_force().map_err(|e| failed(vm, what, &e.to_string()))
}

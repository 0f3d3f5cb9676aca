//! Properties that every host must have, whatever its kind. The simulator runs these checks in its tests; the live host runs them
//! in the testbed, on a real kernel. Each lever has a file, and one more file holds general properties.
//!
//! Every [`Act`] has a check ([`of`]). If a host cannot do an act, the check requires that the host reports this and leaves the
//! VM unchanged. The verdict is then [`Verdict::Skipped`] with the host's reason, which the suite's caller shows.
//!
//! Not verified here: whether a policy's decisions are wise, and timing (except that a quota holds). Nor is it verified where a
//! homed VM's emulator and I/O threads run, because samples do not show that.

mod contract;
mod home;
mod memory;
mod memory_policy;
mod pages;
mod quota;
mod resctrl;
mod settings;
mod topology;
mod vcpus;
mod watching;

use homenode_units::{NodeId, NodeMap, Ns, Pages, VmId};

use crate::{
    Act, ActionError, Host, HostError, Impossible, Lever, Limit, Outcome, Plan, Refusal, Sample, VmSample,
};

/// A check: a name, and a function. If the check fails, the function's error tells what was expected and what was seen.
#[derive(Debug)]
pub struct Check {
    /// The property that is checked.
    pub name: &'static str,
    /// Runs the check against a host on which `vm` runs. The VM needs at least one vCPU and touched memory, and no agent may run.
    pub run: fn(&mut dyn Host, VmId) -> Result<Verdict, Breach>,
}

/// How a host broke its contract, or the host's own error that ended a check.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Breach {
    /// What was expected, and what was seen.
    #[error("{0}")]
    Seen(String),
    /// The host could not be read.
    #[error(transparent)]
    Unreadable(#[from] HostError),
    /// The host refused a plan that is possible.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The host could not store a setting.
    #[error(transparent)]
    NotStored(#[from] ActionError),
}

impl From<String> for Breach {
    fn from(seen: String) -> Breach {
        Breach::Seen(seen)
    }
}

impl From<&str> for Breach {
    fn from(seen: &str) -> Breach {
        Breach::Seen(seen.to_owned())
    }
}

/// The result of a check that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// The host has the property.
    Passed,
    /// The host cannot do the act, for this reason. The check still made sure that the host reports this, refuses what is
    /// impossible, and leaves the VM unchanged.
    Skipped(String),
}

/// All checks, in the order to run them.
pub static CHECKS: &[&Check] = &[
    &contract::LISTS,
    &contract::COUNTERS,
    &contract::VERSION,
    &contract::STALE,
    &contract::IMPOSSIBLE,
    &vcpus::PINNED,
    &pages::MOVED,
    &pages::NAMED,
    &pages::OF_VIRTUAL_NODE,
    &home::LIFTED,
    &home::TOLD,
    &home::HOLDS,
    &memory_policy::SET,
    &quota::HELD,
    &quota::LEASED,
    &quota::IMPOSSIBLE,
    &resctrl::CONFINED,
    &watching::WATCHED,
    &memory::LIMITED,
    &topology::PUBLISHED,
    &settings::KEPT,
];

/// Returns an act's check, which is one of [`CHECKS`]. Every act has one.
pub fn of(act: &Act) -> &'static Check {
    match act {
        Act::PinVcpus { .. } => &vcpus::PINNED,
        Act::SetHome { .. } => &home::HOLDS,
        Act::MovePages { .. } => &pages::MOVED,
        Act::MoveVirtualNode { .. } => &pages::OF_VIRTUAL_NODE,
        Act::MoveFrames { .. } => &pages::NAMED,
        Act::SetMemoryPolicy { .. } => &memory_policy::SET,
        Act::Limit { limit, .. } => match limit {
            Limit::CpuQuota(_) => &quota::HELD,
            Limit::CacheWays(_) | Limit::MemoryBandwidth(_) => &resctrl::CONFINED,
            Limit::Memory(_) => &memory::LIMITED,
        },
        Act::Watch { .. } => &watching::WATCHED,
        Act::PublishTopology { .. } => &topology::PUBLISHED,
        Act::Lift { lever } => match lever {
            Lever::Home => &home::LIFTED,
            Lever::CpuQuota => &quota::HELD,
            Lever::Resctrl => &resctrl::CONFINED,
            Lever::Watching => &watching::WATCHED,
            Lever::Memory => &memory::LIMITED,
            Lever::VcpuPlacement | Lever::Pages | Lever::MemoryPolicy | Lever::Topology => &quota::IMPOSSIBLE,
        },
    }
}

/// Time between the checks' samples.
const PERIOD: Ns = Ns::from_millis(500);
/// A lease longer than any check.
const LEASE: Ns = Ns::from_secs(600);

fn passed((): ()) -> Verdict {
    Verdict::Passed
}

fn sample(host: &mut dyn Host) -> Result<Sample, Breach> {
    Ok(host.sample()?)
}

/// Returns the VM as the host sees it now.
fn sample_of(host: &mut dyn Host, vm: VmId) -> Result<VmSample, Breach> {
    let seen = sample(host)?.vm(vm).cloned();
    seen.ok_or_else(|| format!("VM {vm} is not in the sample").into())
}

fn expect(condition: bool, message: impl FnOnce() -> String) -> Result<(), Breach> {
    if condition { Ok(()) } else { Err(message().into()) }
}

fn affinities(sample: &Sample, vm: VmId) -> Vec<String> {
    let vcpus = sample.vm(vm).map(|vm| vm.vcpus.as_slice()).unwrap_or_default();
    vcpus.iter().map(|vcpu| vcpu.affinity.to_string()).collect()
}

/// Returns a plan for one act, made from the host's present state.
fn plan_of(host: &mut dyn Host, vm: VmId, act: Act) -> Result<Plan, Breach> {
    let mut plan = Plan::new(sample(host)?.version);
    plan.decide("conformance", act.on(vm), "conformance check".into());
    Ok(plan)
}

fn commit_one(host: &mut dyn Host, vm: VmId, act: Act) -> Result<Outcome, Breach> {
    let plan = plan_of(host, vm, act)?;
    let receipt = host.commit(&plan)?;
    let mut outcomes = receipt.outcomes.into_iter();
    outcomes.next().ok_or_else(|| "no outcome".into())
}

/// Checks that the host refuses the act for this kind of reason.
fn refused(host: &mut dyn Host, vm: VmId, act: Act, is_why: fn(&Impossible) -> bool) -> Result<(), Breach> {
    let plan = plan_of(host, vm, act)?;
    match host.commit(&plan) {
        Err(Refusal::Vm { why, .. }) if is_why(&why) => Ok(()),
        other => Err(format!(
            "expected {:?} to be refused, saw {other:?}",
            plan.decisions[0].action.act
        )
        .into()),
    }
}

/// Lifts a lever twice: the second time must have no effect.
fn lift_twice(host: &mut dyn Host, vm: VmId, lever: Lever) -> Result<(), Breach> {
    for _ in 0..2 {
        let outcome = commit_one(host, vm, Act::Lift { lever })?;
        expect(outcome == Outcome::Done, || {
            format!("expected {} to be lifted, saw {outcome:?}", lever.of_vm())
        })?;
    }
    Ok(())
}

/// Returns the node with the most of these pages, and another node that can hold memory.
fn fullest_and_other(host: &dyn Host, pages: &NodeMap<Pages>) -> Result<(NodeId, NodeId), Breach> {
    let fullest = pages.iter().max_by_key(|(_, pages)| **pages);
    let (fullest, _) = fullest.ok_or("the VM has no pages")?;
    let nodes = host.machine().memory_nodes();
    let other = nodes.iter().find(|node| *node != fullest);
    Ok((fullest, other.ok_or("the host has one node only")?))
}

/// Returns a node that the host lacks.
fn no_node(host: &dyn Host) -> NodeId {
    let last = host.machine().nodes.keys().last();
    NodeId(last.map_or(0, |node| node.0 + 1))
}

#[cfg(test)]
mod tests {
    use homenode_units::{Bytes, CpuSet, MemoryPolicy, NodeSet};

    use super::*;
    use crate::{CpuQuota, GuestTopology, Percent};

    #[test]
    fn the_suite_runs_a_check_of_every_act() {
        let node = NodeId(0);
        let limits = [
            Limit::CpuQuota(CpuQuota::of(0.5, Ns::from_millis(30))),
            Limit::CacheWays(Percent(50)),
            Limit::MemoryBandwidth(Percent(50)),
            Limit::Memory(Bytes::from_gib(1)),
        ];
        let limits = limits.map(|limit| Act::Limit {
            limit,
            lease_ns: LEASE,
        });
        let levers = [
            Lever::VcpuPlacement,
            Lever::Home,
            Lever::Pages,
            Lever::MemoryPolicy,
            Lever::CpuQuota,
            Lever::Resctrl,
            Lever::Watching,
            Lever::Memory,
            Lever::Topology,
        ];
        let acts = [
            Act::PinVcpus {
                vcpus: vec![0],
                cpus: CpuSet::new(),
            },
            Act::SetHome {
                nodes: NodeSet::one(node),
            },
            Act::MovePages {
                from: NodeSet::new(),
                to: NodeSet::one(node),
                pages_max: Pages(1),
            },
            Act::MoveVirtualNode {
                virtual_node: 0,
                to: node,
                pages_max: Pages(1),
            },
            Act::MoveFrames { moves: Vec::new() },
            Act::SetMemoryPolicy {
                policy: MemoryPolicy::default(),
            },
            Act::Watch {
                window_ns: PERIOD,
                lease_ns: LEASE,
            },
            Act::PublishTopology {
                topology: GuestTopology::default(),
            },
        ];
        let lifts = levers.map(|lever| Act::Lift { lever });
        for act in acts.into_iter().chain(limits).chain(lifts) {
            let is_run = CHECKS.iter().any(|check| std::ptr::eq(*check, of(&act)));
            assert!(is_run, "{act:?}: {}", of(&act).name);
        }
    }
}

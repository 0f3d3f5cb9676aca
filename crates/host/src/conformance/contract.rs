//! Properties of every host before any action: samples, versions, and refusals of whole plans.

use homenode_units::{NodeSet, Pages, VmId};

use super::vcpus::pin_plan;
use super::{Breach, Check, PERIOD, affinities, expect, passed, sample};
use crate::{Act, Action, Host, Impossible, Refusal, Version};

pub(super) static LISTS: Check = Check {
    name: "a sample lists every CPU and node once, in order",
    run: |host, vm| lists_are_complete(host, vm).map(passed),
};

pub(super) static COUNTERS: Check = Check {
    name: "counters never run backwards",
    run: |host, vm| counters_are_monotone(host, vm).map(passed),
};

pub(super) static VERSION: Check = Check {
    name: "version is stable while nothing changes",
    run: |host, vm| version_is_stable(host, vm).map(passed),
};

pub(super) static STALE: Check = Check {
    name: "a stale plan is refused and nothing is done",
    run: |host, vm| stale_is_refused(host, vm).map(passed),
};

pub(super) static IMPOSSIBLE: Check = Check {
    name: "an impossible plan is refused as a whole",
    run: |host, vm| impossible_is_refused(host, vm).map(passed),
};

fn lists_are_complete(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let seen = sample(host)?;
    let cpus: Vec<_> = seen.cpus.iter().map(|c| c.id).collect();
    let expected: Vec<_> = host.machine().cpus.iter().map(|c| c.id).collect();
    expect(cpus == expected, || {
        format!("CPUs {expected:?} expected, {cpus:?} sampled")
    })?;
    let nodes = host.machine().node_set();
    expect(seen.nodes.node_set() == nodes, || {
        format!("nodes {nodes} expected, {} sampled", seen.nodes.node_set())
    })?;
    expect(seen.vms.windows(2).all(|w| w[0].id < w[1].id), || {
        "VMs are not in ascending order".into()
    })?;
    let vm = seen
        .vm(vm)
        .ok_or_else(|| format!("VM {vm} is running but is not in the sample"))?;
    expect(!vm.vcpus.is_empty(), || {
        format!("VM {} has no vCPU in the sample", vm.name)
    })?;
    let usable = host.machine().cpu_set();
    for vcpu in &vm.vcpus {
        expect(
            !vcpu.affinity.is_empty() && vcpu.affinity.is_subset(&usable),
            || {
                format!(
                    "affinity {} of vCPU {} is not among the host's CPUs {usable}",
                    vcpu.affinity, vcpu.index
                )
            },
        )?;
    }
    Ok(())
}

fn counters_are_monotone(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    host.wait(PERIOD);
    let after = sample(host)?;
    expect(after.at > before.at, || {
        format!("time went from {} to {}", before.at, after.at)
    })?;
    for (a, b) in before.cpus.iter().zip(&after.cpus) {
        expect(a.busy_ns <= b.busy_ns, || {
            format!(
                "busy time of CPU {} fell from {} to {}",
                a.id, a.busy_ns, b.busy_ns
            )
        })?;
    }
    let (Some(a), Some(b)) = (before.vm(vm), after.vm(vm)) else {
        return Err(format!("VM {vm} was not in both samples").into());
    };
    for (a, b) in a.vcpus.iter().zip(&b.vcpus) {
        let pairs = [
            ("running", Some(a.running_ns), Some(b.running_ns)),
            ("waiting", a.waiting_ns, b.waiting_ns),
        ];
        // A counter that only one sample has cannot be compared.
        for (what, old, new) in pairs.into_iter().filter_map(|(what, a, b)| Some((what, a?, b?))) {
            expect(old <= new, || {
                format!("{what} time of vCPU {} fell from {old} to {new}", a.index)
            })?;
        }
        expect(a.counters.is_some() == b.counters.is_some(), || {
            format!("only one of the two samples has counters of vCPU {}", a.index)
        })?;
    }
    Ok(())
}

fn version_is_stable(host: &mut dyn Host, _vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?.version;
    host.wait(PERIOD);
    let after = sample(host)?.version;
    expect(before == after, || {
        format!(
            "nothing changed, but the version went from {} to {}",
            before.0, after.0
        )
    })
}

fn stale_is_refused(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    let stale = Version(before.version.0 + 1_000);
    let plan = pin_plan(stale, &before, host, vm, 1)?;
    match host.commit(&plan) {
        Err(Refusal::Stale { planned, .. }) if planned == stale => {}
        other => {
            return Err(format!(
                "expected a plan of the wrong version {} to be refused as stale, saw {other:?}",
                stale.0
            )
            .into());
        }
    }
    let after = sample(host)?;
    expect(affinities(&before, vm) == affinities(&after, vm), || {
        "a refused plan changed affinities".into()
    })
}

fn impossible_is_refused(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let before = sample(host)?;
    let mut unknown = pin_plan(before.version, &before, host, vm, 0)?;
    let to = host.machine().memory_nodes();
    let nobody = VmId(vm.0 ^ 1);
    unknown.decide(
        "conformance",
        Action::gather(host.machine(), nobody, to, Pages(1)),
        "a VM that does not exist".into(),
    );
    match host.commit(&unknown) {
        Err(Refusal::UnknownVm { vm }) if vm == nobody => {}
        other => {
            return Err(format!("expected a plan for an unknown VM to be refused, saw {other:?}").into());
        }
    }
    let mut nowhere = pin_plan(before.version, &before, host, vm, 0)?;
    nowhere.decide(
        "conformance",
        Act::SetHome {
            nodes: NodeSet::new(),
        }
        .on(vm),
        "no node at all".into(),
    );
    match host.commit(&nowhere) {
        Err(Refusal::Vm {
            why: Impossible::Nodes { .. },
            ..
        }) => {}
        other => return Err(format!("expected a home without a node to be refused, saw {other:?}").into()),
    }
    let after = sample(host)?;
    expect(affinities(&before, vm) == affinities(&after, vm), || {
        "part of a refused plan was carried out".into()
    })
}

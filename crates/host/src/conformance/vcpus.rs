//! Pins of vCPUs.

use homenode_units::{CpuSet, VmId};

use super::{Breach, Check, PERIOD, expect, passed, refused, sample};
use crate::{Act, Host, Impossible, Outcome, Plan, Sample, Version};

pub(super) static PINNED: Check = Check {
    name: "a pinned vCPU is seen pinned, and the version grows",
    run: |host, vm| pin_is_seen(host, vm).map(passed),
};

pub(super) fn pin_plan(
    version: Version,
    now: &Sample,
    host: &dyn Host,
    vm: VmId,
    node_index: usize,
) -> Result<Plan, Breach> {
    let seen = now
        .vm(vm)
        .ok_or_else(|| format!("VM {vm} is not in the sample"))?;
    // No plan may pin vCPUs outside the operator's CPU mask.
    let allowed = seen.settings.cpus_allowed.clone();
    let allowed = allowed.unwrap_or_else(|| host.machine().cpu_set());
    let of_nodes = host.machine().nodes.iter();
    let of_nodes = of_nodes.map(|(_, node)| node.cpus.intersection(&allowed));
    let cpus = of_nodes.filter(|cpus| !cpus.is_empty()).nth(node_index);
    let cpus = cpus.ok_or("the VM may use CPUs of too few nodes")?;
    let mut plan = Plan::new(version);
    let vcpus = vec![seen.vcpus[0].index];
    plan.decide(
        "conformance",
        Act::PinVcpus { vcpus, cpus }.on(vm),
        "conformance check".into(),
    );
    Ok(plan)
}

fn pin_is_seen(host: &mut dyn Host, vm: VmId) -> Result<(), Breach> {
    let pin = |vcpu, cpus| Act::PinVcpus {
        vcpus: vec![vcpu],
        cpus,
    };
    let all = host.machine().cpu_set();
    refused(host, vm, pin(u16::MAX, all), |why| {
        matches!(why, Impossible::UnknownVcpu { .. })
    })?;
    refused(host, vm, pin(0, CpuSet::new()), |why| {
        matches!(why, Impossible::Cpus { .. })
    })?;
    for node_index in [1, 0] {
        let before = sample(host)?;
        let plan = pin_plan(before.version, &before, host, vm, node_index)?;
        let receipt = host.commit(&plan)?;
        expect(receipt.outcomes == [Outcome::Done], || {
            format!("expected the pins to be done, saw {:?}", receipt.outcomes)
        })?;
        host.wait(PERIOD);
        let after = sample(host)?;
        expect(after.version > before.version, || {
            "a pin left the version as it was".into()
        })?;
        let Act::PinVcpus { vcpus, cpus, .. } = &plan.decisions[0].action.act else {
            unreachable!()
        };
        let seen = after
            .vm(vm)
            .and_then(|vm| vm.vcpu(vcpus[0]))
            .ok_or("the pinned vCPU is gone")?;
        expect(seen.affinity == *cpus, || {
            format!("pinned to {cpus}, seen on {}", seen.affinity)
        })?;
    }
    Ok(())
}

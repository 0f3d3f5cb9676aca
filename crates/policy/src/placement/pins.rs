//! Keeps the vCPUs of VMs at their homes.

use homenode_host::{Act, CPUS_SETTLE, Plan, VcpuSample, View, VmView};
use homenode_units::{CpuSet, NodeSet};

use super::{Algorithm, Config, Home, POLICY, State, Supply, company};

/// Pins the vCPUs of all VMs at home again, after the CPUs that they may use have changed: the kernel changes affinities when
/// CPUs go offline, and CPUs of a drained node come back.
pub(super) fn pin_anew(view: &View<'_>, config: &Config, state: &mut State, plan: &mut Plan) {
    let has_new_bounds = take_in_bounds(view, state);
    let changed_at = match &state.cpus {
        None => None,
        Some((cpus, at)) if *cpus == view.cpus && !has_new_bounds => *at,
        Some(_) => Some(view.at),
    };
    state.cpus = Some((view.cpus.clone(), changed_at));
    if changed_at.is_none_or(|at| view.at.saturating_sub(at) > CPUS_SETTLE) {
        return;
    }
    for vm in view
        .vms
        .iter()
        .filter(|vm| vm.managed() && vm.hands_off.is_none())
    {
        let Some(home) = vm.home.filter(|home| !company::must_leave(view, vm, home)) else {
            continue;
        };
        // Take the whole home, even if the VM was kept on some of its caches: the home may have more CPUs now.
        let allowed = vm.sample.settings.cpus_allowed.as_ref();
        let (cpus, usable) = (Supply::cpus_for(view, home, allowed), view.cpus_for(allowed));
        // A vCPU may also be at its place in the guest's layout, or on a CPU of its own.
        let may_be_narrow = vm.layout.is_some() || config.algorithm == Algorithm::FirstFit;
        let is_lent = |index: u16| vm.away_node(view.machine, index).is_some();
        let stands = |vcpu: &VcpuSample| {
            let is_narrow = may_be_narrow && vcpu.affinity.is_subset(&cpus);
            let may_be_so = is_lent(vcpu.index) || is_narrow;
            vcpu.affinity == cpus
                || may_be_so && !vcpu.affinity.is_empty() && vcpu.affinity.is_subset(&usable)
        };
        if !vm.sample.vcpus.iter().all(stands) {
            let home = Home {
                nodes: home.clone(),
                cpus,
            };
            pin(view, config, vm, &home, POLICY, plan);
        }
    }
}

/// Records which CPUs each VM may use; returns whether they changed for a VM that was known before.
fn take_in_bounds(view: &View<'_>, state: &mut State) -> bool {
    let of = |vm: &VmView<'_>| (vm.sample.id, vm.sample.settings.cpus_allowed.clone());
    let known = |vm: &VmView<'_>| {
        let known = state.allowed.get(&vm.sample.id);
        known.map(|known| *known == vm.sample.settings.cpus_allowed)
    };
    let has_changed = view.vms.iter().any(|vm| known(vm) == Some(false));
    let is_as_before =
        state.allowed.len() == view.vms.len() && view.vms.iter().all(|vm| known(vm) == Some(true));
    if !is_as_before {
        state.allowed = view.vms.iter().map(of).collect();
    }
    has_changed
}

/// Returns the CPUs on which a VM's vCPUs are at home. These are the CPUs of its home nodes or, if the vCPUs are kept on some
/// of these nodes' caches, the CPUs of these caches; CPUs that the VM may not use are left out.
///
/// Whether vCPUs are kept on some caches is read from the affinities in force, whatever set them, and however long ago.
pub fn cpus_at_home(view: &View<'_>, vm: &VmView<'_>, home: &NodeSet) -> CpuSet {
    let all = Supply::cpus_for(view, home, vm.sample.settings.cpus_allowed.as_ref());
    // With a guest layout each vCPU has its own place within the home.
    if vm.layout.is_some() {
        return all;
    }
    let is_kept = |cpus: &CpuSet| {
        vm.sample
            .vcpus
            .iter()
            .any(|vcpu| !vcpu.affinity.intersection(cpus).is_empty())
    };
    let caches = view.machine.llcs.iter().map(|llc| llc.cpus.intersection(&all));
    let kept: CpuSet = caches
        .filter(is_kept)
        .flat_map(|cpus| cpus.iter().collect::<Vec<_>>())
        .collect();
    if kept.is_empty() { all } else { kept }
}

/// Adds the decisions that pin all vCPUs of a VM at home.
pub(super) fn pin(
    view: &View<'_>,
    config: &Config,
    vm: &VmView<'_>,
    home: &Home,
    policy: &'static str,
    plan: &mut Plan,
) {
    let id = vm.sample.id;
    let Home { nodes, cpus } = home;
    let vcpus: Vec<u16> = vm.sample.vcpus.iter().map(|vcpu| vcpu.index).collect();
    if cpus.is_empty() {
        let message = format!(
            "VM {} may not use any CPU of node {nodes}; its vCPUs stay where they are",
            vm.sample.name
        );
        plan.find(policy, Some(id), message);
        return;
    }
    if config.algorithm != Algorithm::FirstFit {
        let may = Supply::cpus_for(view, nodes, vm.sample.settings.cpus_allowed.as_ref());
        let reason = format!("its vCPUs run at home, {}", home.name(&may));
        let cpus = cpus.clone();
        plan.decide(policy, Act::PinVcpus { vcpus, cpus }.on(id), reason);
        return;
    }
    // FF-Pin: take the lowest CPUs that are not the only CPU of a vCPU, in an earlier decision or a running VM.
    let mut free = cpus.difference(&cpus_pinned_singly(view, plan));
    for vcpu in vcpus {
        let cpu = free
            .first()
            .or_else(|| cpus.iter().nth(usize::from(vcpu) % cpus.len()))
            .expect("cpus is not empty");
        free.remove(cpu);
        let action = Act::PinVcpus {
            vcpus: vec![vcpu],
            cpus: CpuSet::one(cpu),
        }
        .on(id);
        plan.decide(policy, action, format!("first fit pins vCPU {vcpu} to CPU {cpu}"));
    }
}

fn cpus_pinned_singly(view: &View<'_>, plan: &Plan) -> CpuSet {
    let running = view
        .vms
        .iter()
        .flat_map(|vm| &vm.sample.vcpus)
        .map(|vcpu| &vcpu.affinity);
    let planned = plan
        .decisions
        .iter()
        .filter_map(|decision| match &decision.action.act {
            Act::PinVcpus { cpus, .. } => Some(cpus),
            _ => None,
        });
    running
        .chain(planned)
        .filter(|cpus| cpus.len() == 1)
        .filter_map(CpuSet::first)
        .collect()
}

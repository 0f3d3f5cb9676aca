//! The epoch is a resolution: no reported figure may depend on it, nor on solving only when something has changed.
//!
//! VMs are pinned here. Otherwise a wake-up that is a nanosecond earlier might take another CPU. From then on two runs would
//! differ as much as two seeds do.

use crate::common::r910;
use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin, TwinReport};
use homenode_units::{NodeId, NodeSet, Ns};

/// Largest relative difference of two figures that agree.
const TOLERANCE: f64 = 0.02;
/// Differences of ratios below this are taken relative to this value.
const RATIO_MIN: f64 = 0.01;

/// Returns the default scenario with two VMs on each node, shortened.
fn pinned(machine: &Machine) -> Scenario {
    let mut scenario = Scenario::tavo_mixed();
    let nodes: Vec<NodeId> = machine.nodes.keys().collect();
    for (at, vm) in scenario.vms.iter_mut().enumerate() {
        vm.work_share *= 0.15;
        vm.cpus = Some(machine.cpus_of(&NodeSet::one(nodes[at / 2])));
        vm.memory_nodes = Some(NodeSet::one(nodes[at / 2]));
    }
    scenario
}

fn run(mut twin: Twin) -> TwinReport {
    assert!(twin.run_to_end(Ns::from_secs(120)), "a program does not end");
    twin.report()
}

fn same(one: &TwinReport, other: &TwinReport, what: &str) {
    let near = |name: &str, a: f64, b: f64, least: f64| {
        let off = (a - b).abs() / a.abs().max(least);
        assert!(off < TOLERANCE, "{what}: {name} is {a} and {b}");
    };
    for (a, b) in one.vms.iter().zip(&other.vms) {
        let name = |figure: &str| format!("{figure} of {}", a.name);
        near(&name("runtime"), a.runtime_s.unwrap(), b.runtime_s.unwrap(), 0.0);
        let (misses_a, misses_b) = (a.llc_miss_rate.unwrap(), b.llc_miss_rate.unwrap());
        near(&name("LLC miss rate"), misses_a, misses_b, RATIO_MIN);
        let (local_a, local_b) = (a.local_access_ratio.unwrap(), b.local_access_ratio.unwrap());
        near(&name("local access ratio"), local_a, local_b, RATIO_MIN);
        assert_eq!(a.node_changes, b.node_changes);
        // Waiting is the small remainder when eight threads share eight hyperthreads, so it is compared with the run time.
        let run = a.runtime_s.unwrap();
        near(&name("waiting"), a.waiting_s, b.waiting_s, run);
    }
    for (a, b) in one.nodes.values().zip(other.nodes.values()) {
        let rate = |node: &homenode_twin::NodeReport| node.bandwidth_bytes_per_s.as_f64();
        near("a node's bandwidth", rate(a), rate(b), 1.0);
        near("a node's busy CPUs", a.cpus_busy, b.cpus_busy, 0.0);
    }
}

#[test]
fn halving_or_doubling_the_epoch_changes_no_figure_by_two_percent() {
    let machine = r910();
    let scenario = pinned(&machine);
    let at = |epoch| run(Twin::with_epoch(machine.clone(), &scenario, 1, Ns(epoch)).unwrap());
    let one = at(1_000_000);
    same(&one, &at(500_000), "half an epoch");
    same(&one, &at(2_000_000), "two epochs");
}

#[test]
fn solving_only_on_change_changes_no_figure_by_two_percent() {
    let machine = r910();
    let scenario = pinned(&machine);
    let twin = || Twin::new(machine.clone(), &scenario, 1).unwrap();
    same(
        &run(twin()),
        &run(twin().solving_every_epoch()),
        "solving in every epoch",
    );
}

#[test]
fn a_loop_that_is_loaded_again_in_each_slice_is_found_whole_in_time() {
    use homenode_host::Host;
    use homenode_twin::{Hypervisor, VmSpec};
    use homenode_units::{Bytes, CpuId, CpuSet};
    // The miss ratio of a loop stays at 1 until nearly all of the loop is cached, so nothing seems to change until then.
    let vm = |name, program| {
        let vm = VmSpec::new(name, 1, Bytes::from_mib(200), program).doing(100.0);
        vm.on_cpus(CpuSet::one(CpuId(0)))
    };
    let mut scenario = Scenario::of("in turn", vec![vm("a", "walk.c2"), vm("b", "disrupt.c3")]);
    scenario.hypervisor = Hypervisor::Xen;
    let machine = homenode_machine_files::preset("e5_1603v3").unwrap();
    let miss_ratio = |epoch| {
        let mut twin = Twin::with_epoch(machine.clone(), &scenario, 1, Ns(epoch)).unwrap();
        twin.wait(Ns::from_secs(5));
        twin.mark();
        twin.wait(Ns::from_secs(5));
        twin.report().vms[0].llc_miss_rate.unwrap()
    };
    let (coarse, fine) = (miss_ratio(1_000_000), miss_ratio(100_000));
    // While epochs grew without limit, it was 0.6 in one run and 0.23 in the other.
    assert!((coarse - fine).abs() < 0.05, "{coarse} and {fine}");
}

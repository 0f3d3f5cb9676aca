//! Monotonicity: rules that every machine obeys, whatever runs on it. VMs are pinned, each with its memory on one node.

use crate::common;
use crate::common::{bound, node, r910, runtime, scenario};
use homenode_machine::Machine;
use homenode_twin::{Twin, VmReport, VmSpec};
use homenode_units::{Bytes, BytesPerSec, Ns};
use proptest::prelude::*;

const PROGRAMS: [&str; 5] = ["stream", "cached", "inert", "soplex", "cg.B"];

/// Largest effect in the wrong direction that the resolution and damping of one epoch may have.
const SLACK: f64 = 1.002;

fn program() -> impl Strategy<Value = &'static str> {
    prop::sample::select(&PROGRAMS[..])
}

fn shortened(mut spec: VmSpec) -> VmSpec {
    spec.work_share = match spec.workload.as_str() {
        "soplex" => 0.002,
        "cg.B" => 0.02,
        _ => 0.25,
    };
    spec
}

/// Returns two VMs on given nodes, with memory on given nodes.
fn two(machine: &Machine, programs: (&str, &str), at: (u16, u16, u16, u16)) -> Vec<VmSpec> {
    let (cpus1, memory1, cpus2, memory2) = at;
    vec![
        shortened(bound(machine, "vm1", programs.0, cpus1, 0, memory1)),
        shortened(bound(machine, "vm2", programs.1, cpus2, 2, memory2)),
    ]
}

fn reports(machine: &Machine, vms: Vec<VmSpec>) -> Vec<VmReport> {
    let mut twin = Twin::new(machine.clone(), &scenario(vms), 1).expect("the scenario fits");
    assert!(twin.run_to_end(Ns::from_secs(400)), "a program does not end");
    twin.report().vms
}

fn faster(mut machine: Machine, factor: f64) -> Machine {
    let more = |rate: BytesPerSec| BytesPerSec((rate.as_f64() * factor) as u64);
    for (_, node) in machine.nodes.iter_mut() {
        node.memory_bandwidth = node.memory_bandwidth.map(more);
    }
    for link in &mut machine.links {
        link.bandwidth = link.bandwidth.map(more);
    }
    machine
}

fn placement() -> impl Strategy<Value = (u16, u16, u16, u16)> {
    (0u16..4, 0u16..4, 0u16..4, 0u16..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn more_bandwidth_never_hurts(one in program(), other in program(), at in placement(), factor in 1.0..4.0f64) {
        let machine = r910();
        let before = reports(&machine, two(&machine, (one, other), at));
        let after = reports(&faster(machine.clone(), factor), two(&machine, (one, other), at));
        // The time of the program that ends last. A faster neighbour may take more of a cache while both run, so single times may
        // rise.
        let last = |vms: &[VmReport]| vms.iter().filter_map(|vm| vm.runtime_s).fold(0.0, f64::max);
        prop_assert!(last(&after) <= last(&before) * SLACK, "{} after {}", last(&after), last(&before));
    }

    #[test]
    fn a_bigger_llc_never_raises_misses(one in program(), other in program(), at in placement(), factor in 1.0..4.0f64) {
        let machine = r910();
        let mut bigger = machine.clone();
        for llc in &mut bigger.llcs {
            llc.size_bytes = Bytes((llc.size_bytes.as_f64() * factor) as u64);
        }
        let before = reports(&machine, two(&machine, (one, other), at));
        let after = reports(&bigger, two(&machine, (one, other), at));
        for (before, after) in before.iter().zip(&after) {
            let (before, after) = (before.llc_miss_rate.unwrap(), after.llc_miss_rate.unwrap());
            prop_assert!(after <= before * SLACK + 1e-6, "{after} after {before}");
        }
    }

    #[test]
    fn a_remote_page_speeds_nobody_up_in_an_idle_machine(name in program(), cpus in 0u16..4, memory in 0u16..4) {
        let machine = r910();
        let at = |memory| runtime(&machine, vec![shortened(bound(&machine, "vm1", name, cpus, 0, memory))]);
        prop_assert!(at(memory) * SLACK >= at(cpus));
        let spread = shortened(bound(&machine, "vm1", name, cpus, 0, cpus))
            .with_memory_on([cpus, memory].into_iter().map(homenode_units::NodeId).collect());
        prop_assert!(runtime(&machine, vec![spread]) * SLACK >= at(cpus));
    }

    #[test]
    fn an_idle_vm_changes_nobody(name in program(), at in placement()) {
        let machine = r910();
        let (cpus, memory, idle_cpus, idle_memory) = at;
        let vm = || shortened(bound(&machine, "vm1", name, cpus, 0, memory));
        let idle = VmSpec::new("idle", 2, Bytes::from_gib(4), "idle")
            .on_cpus(common::cores(&machine, idle_cpus, 2, 2))
            .with_memory_on(node(idle_memory));
        let (alone, beside) = (runtime(&machine, vec![vm()]), runtime(&machine, vec![vm(), idle]));
        prop_assert!((beside / alone - 1.0).abs() < 0.005, "{beside} beside an idle VM, {alone} alone");
    }
}

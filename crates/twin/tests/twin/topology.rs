//! Topologies that change while guests run: vCPUs change places, and guests and runtime libraries are notified or not. Guests
//! that move threads between vCPUs.

use crate::common;
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::workload::{Reuse, RuntimeProfile};
use homenode_twin::{Hypervisor, RuntimeNodes, Scenario, Twin, TwinError, VmReport, VmSpec, Vnuma, Workload};
use homenode_units::{Bytes, CpuId, CpuSet, Ns, Placing};

const MINUTE: Ns = Ns::from_secs(60);

fn machine() -> Machine {
    preset("amd6344x8").expect("it comes with the machines")
}

fn cpus(range: std::ops::Range<u32>) -> CpuSet {
    range.map(CpuId).collect()
}

/// Returns a program that streams through memory which its runtime library hands out again every few seconds.
fn allocating(reuse: Reuse) -> Workload {
    let mut workload = common::program("allocating", 30.0, 1.0, 16.0, "private");
    let program = workload.program.as_mut().expect("it has one");
    program.instructions_g_per_thread = 1e6;
    program.runtime = Some(RuntimeProfile {
        allocated_bytes_per_kilo_instruction: 200.0,
        reuse,
    });
    workload
}

/// Returns a VM on both nodes of a package, with a vCPU for each of the twelve CPUs.
fn vm(vnuma: Vnuma, runtime_nodes: RuntimeNodes) -> VmSpec {
    let mut spec = VmSpec::new("a", 12, Bytes::from_gib(6), "allocating").on_cpus(cpus(0..12));
    (spec.vnuma, spec.runtime_nodes) = (vnuma, runtime_nodes);
    spec
}

fn scenario(spec: VmSpec, reuse: Reuse, exchanges_per_minute: f64) -> Scenario {
    let mut scenario = Scenario::of("topology", vec![spec]).with_workload(allocating(reuse));
    scenario.hypervisor = Hypervisor::Xen;
    scenario.vcpu_exchanges_per_minute = exchanges_per_minute;
    scenario
}

fn a_minute(scenario: &Scenario) -> VmReport {
    let mut twin = Twin::new(machine(), scenario, 1).unwrap_or_else(|error| panic!("{error}"));
    twin.run_to_end(MINUTE);
    twin.report().vms.swap_remove(0)
}

#[test]
fn vcpus_change_places_as_often_as_the_scenario_says() {
    let changes = |per_minute| {
        a_minute(&scenario(
            vm(Vnuma::None, RuntimeNodes::None),
            Reuse::Thread,
            per_minute,
        ))
    };
    assert_eq!(changes(0.0).node_changes, 0, "every vCPU has a CPU to itself");
    // 100 exchanges of two vCPUs each are expected, within three standard deviations of a Poisson count.
    let changed = changes(100.0).node_changes;
    assert!((140..=260).contains(&changed), "{changed} changes");
}

#[test]
fn who_is_told_keeps_its_memory_near_and_who_is_not_loses_it() {
    let local = |vnuma, runtime| {
        let report = a_minute(&scenario(vm(vnuma, runtime), Reuse::Thread, 30.0));
        report.local_access_ratio.expect("it accesses memory")
    };
    let live = local(Vnuma::Live, RuntimeNodes::Live);
    let os_only = local(Vnuma::Live, RuntimeNodes::Static);
    let stale = local(Vnuma::Static, RuntimeNodes::Static);
    assert!(live > 0.85, "{live}");
    assert!(stale < 0.75 && os_only < 0.75, "{stale} and {os_only}");
}

#[test]
fn a_library_that_knows_no_nodes_mixes_threads_of_one_heap_and_not_processes() {
    let local = |reuse| {
        let report = a_minute(&scenario(vm(Vnuma::Static, RuntimeNodes::None), reuse, 0.0));
        report.local_access_ratio.expect("it accesses memory")
    };
    let (mixed, apart) = (local(Reuse::Program), local(Reuse::Thread));
    assert!(apart > 0.99, "{apart}");
    assert!((0.45..0.65).contains(&mixed), "two nodes, half each: {mixed}");
}

#[test]
fn the_hosts_autonuma_draws_a_vcpu_back_to_its_memory() {
    let drawn = |exchanges| {
        let mut spec = vm(Vnuma::None, RuntimeNodes::None);
        spec.memory_policy = Placing::FirstTouch.with_autonuma();
        a_minute(&scenario(spec, Reuse::Thread, exchanges))
    };
    assert_eq!(drawn(0.0).vcpus_drawn, 0, "all memory is where its vCPU is");
    let moved = drawn(20.0);
    assert!(moved.vcpus_drawn > 10, "{} of some 40", moved.vcpus_drawn);
    let local = moved.local_access_ratio.expect("it accesses memory");
    assert!(local > 0.8, "{local}");
}

#[test]
fn an_impossible_rate_of_exchanges_is_refused() {
    for rate in [-1.0, f64::NAN, f64::INFINITY] {
        let scenario = scenario(vm(Vnuma::None, RuntimeNodes::None), Reuse::Thread, rate);
        let error = Twin::new(machine(), &scenario, 1).expect_err("must be refused");
        assert!(matches!(error, TwinError::Key { .. }), "{error}");
        assert!(error.to_string().contains("vcpu_exchanges_per_minute"), "{error}");
    }
}

/// Returns the share of accesses that are local in a minute in which a guest moves each thread this many times.
fn local_with_moves(per_minute: f64, set: impl Fn(&mut VmSpec)) -> f64 {
    let mut spec = vm(Vnuma::None, RuntimeNodes::None);
    spec.thread_moves_per_minute = per_minute;
    set(&mut spec);
    let report = a_minute(&scenario(spec, Reuse::Thread, 0.0));
    assert_eq!(report.node_changes, 0, "every vCPU has a CPU to itself");
    report.local_access_ratio.expect("it accesses memory")
}

#[test]
fn threads_that_their_guest_moves_lose_their_memory() {
    let [none, few, many] = [0.0, 2.0, 60.0].map(|per_minute| local_with_moves(per_minute, |_| {}));
    assert!(none > 0.99, "{none}");
    assert!((0.55..0.9).contains(&few), "{few}");
    // Half of the time each, but a thread at its memory is up to twice as fast, and so makes more accesses.
    assert!((0.4..0.7).contains(&many), "two nodes, half each: {many}");
}

#[test]
fn a_library_that_knows_nodes_brings_a_moved_threads_memory_after_it() {
    let local = |runtime| {
        local_with_moves(5.0, |spec| {
            (spec.vnuma, spec.runtime_nodes) = (Vnuma::Live, runtime);
        })
    };
    let (knows, not) = (local(RuntimeNodes::Live), local(RuntimeNodes::None));
    assert!(knows > 0.85 && not < 0.75, "{knows} and {not}");
}

#[test]
fn a_guest_that_knows_nodes_and_balances_brings_threads_and_memory_together() {
    let local = |autonuma| {
        local_with_moves(5.0, |spec| {
            (spec.vnuma, spec.autonuma) = (Vnuma::Live, autonuma);
        })
    };
    let (balances, not) = (local(true), local(false));
    assert!(balances > not + 0.1, "{balances} and {not}");
}

#[test]
fn moves_of_threads_are_refused_if_impossible() {
    for rate in [-1.0, f64::NAN, f64::INFINITY] {
        let mut spec = vm(Vnuma::None, RuntimeNodes::None);
        spec.thread_moves_per_minute = rate;
        let error =
            Twin::new(machine(), &scenario(spec, Reuse::Thread, 0.0), 1).expect_err("must be refused");
        assert!(matches!(error, TwinError::Figure { .. }), "{error}");
    }
    let mut spec = vm(Vnuma::None, RuntimeNodes::None);
    spec.thread_moves_per_minute = 1.0;
    let mut scenario = scenario(spec, Reuse::Thread, 0.0);
    scenario.hypervisor = Hypervisor::Native;
    let error = Twin::new(machine(), &scenario, 1).expect_err("the host's scheduler moves threads");
    assert!(error.to_string().contains("thread_moves_per_minute"), "{error}");
}

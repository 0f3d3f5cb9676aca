//! The four sources of slowness of [TAVO, figure 2], each constructed separately with two VMs of two vCPUs on cores of their own.
//! The base case (e) is VM 1 alone with everything local.

use crate::common;
use crate::common::{bound, cores, node, program, r910, runtime};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::workload::MissRatioCurve;
use homenode_twin::{Hypervisor, Scenario, Twin, VmSpec};
use homenode_units::{Bytes, NodeId, Ns};

fn base(workload: &str) -> f64 {
    let machine = r910();
    runtime(&machine, vec![bound(&machine, "vm1", workload, 0, 0, 0)])
}

#[test]
fn llc_contention_slows() {
    // (a): both VMs on socket 0, with memory on different nodes. VM 2 works longer than VM 1.
    let machine = r910();
    let with = |other: &str| {
        let vm2 = bound(&machine, "vm2", other, 0, 2, 1).doing(4.0);
        runtime(&machine, vec![bound(&machine, "vm1", "cached", 0, 0, 0), vm2])
    };
    let alone = base("cached");
    assert!(
        with("stream") > 1.1 * alone,
        "{} beside a stream, {alone} alone",
        with("stream")
    );
    assert!(
        with("idle") < 1.01 * alone,
        "{} beside an idle VM, {alone} alone",
        with("idle")
    );
}

#[test]
fn memory_controller_contention_slows() {
    // (b): vCPUs on different sockets, all memory on node 0. Two streams do not fill a controller, so each VM has four vCPUs, as
    // in the paper.
    let machine = r910();
    let vm = |name, cpu_node| {
        VmSpec::new(name, 4, Bytes::from_gib(4), "stream")
            .on_cpus(cores(&machine, cpu_node, 0, 4))
            .with_memory_on(node(0))
    };
    let slowed = runtime(&machine, vec![vm("vm1", 0), vm("vm2", 1).doing(4.0)]);
    let alone = runtime(&machine, vec![vm("vm1", 0)]);
    assert!(
        slowed > 1.1 * alone,
        "{slowed} with a busy controller, {alone} alone"
    );
}

#[test]
fn remote_memory_and_link_contention_slow() {
    // (d): VM 1 alone, with its memory on node 1. (c): VM 2 on the same socket also has its memory there, so both use the link
    // from 1 to
    // 0. A stream reuses no data, so sharing the LLC costs it nothing.
    let machine = r910();
    let local = base("stream");
    let remote = runtime(&machine, vec![bound(&machine, "vm1", "stream", 0, 0, 1)]);
    let vm2 = bound(&machine, "vm2", "stream", 0, 2, 1).doing(4.0);
    let contended = runtime(&machine, vec![bound(&machine, "vm1", "stream", 0, 0, 1), vm2]);
    assert!(remote > 1.1 * local, "{remote} remote, {local} local");
    assert!(
        contended > 1.1 * remote,
        "{contended} over a shared link, {remote} over a free one"
    );
}

/// A hop within a package is shorter than one between packages. A remote access must cost what the link between the nodes states.
#[test]
fn a_link_of_its_own_latency_costs_that_and_changes_no_other() {
    let usual = r910();
    let mut near = usual.clone();
    for link in &mut near.links {
        let is_pair = link.from.0.max(link.to.0) == 1;
        link.hop_ns = is_pair.then_some(1.0);
    }
    let on =
        |machine: &Machine, memory| runtime(machine, vec![bound(machine, "vm1", "stream", 0, 0, memory)]);
    let local = on(&usual, 0);
    assert!(
        on(&near, 1) < local + 0.1 * (on(&usual, 1) - local),
        "{} by a short link",
        on(&near, 1)
    );
    for memory in [0, 2] {
        assert!(
            (on(&near, memory) / on(&usual, memory) - 1.0).abs() < 1e-9,
            "node {memory}"
        );
    }
}

#[test]
fn a_program_without_misses_minds_nothing() {
    let machine = r910();
    let specs = |memory_node| bound(&machine, "vm1", "inert", 0, 0, memory_node);
    let alone = runtime(&machine, vec![specs(0)]);
    let vm2 = bound(&machine, "vm2", "stream", 0, 2, 1).doing(4.0);
    let disturbed = runtime(&machine, vec![specs(1), vm2]);
    assert!(
        disturbed < 1.02 * alone,
        "{disturbed} with everything wrong, {alone} alone"
    );
}

#[test]
fn hyperthreads_share_a_core() {
    // Two vCPUs on one core: while not waiting for memory, each runs at 1.25 / 2 of its speed.
    let machine = r910();
    let first = machine.cpus[0];
    let both = machine
        .cpus
        .iter()
        .filter(|cpu| cpu.core == first.core)
        .map(|cpu| cpu.id)
        .collect();
    let spec = || {
        VmSpec::new("vm1", 2, Bytes::from_gib(4), "povray")
            .with_memory_on(node(0))
            .doing(0.01)
    };
    let apart = runtime(&machine, vec![spec().on_cpus(cores(&machine, 0, 0, 2))]);
    let together = runtime(&machine, vec![spec().on_cpus(both)]);
    let ratio = together / apart;
    assert!(
        (1.5..1.61).contains(&ratio),
        "ratio {ratio}, expected just below 2 / 1.25"
    );
}

#[test]
fn a_solo_run_takes_what_its_profile_says() {
    // stream, by hand: CPI = 0.7 + 0.03 * 299.2 cycles * g(u) / 10 with 160 ns = 299.2 cycles at 1.87 GHz; without load that is
    // 1.598, so 4 G instructions take 3.42 s. Two such threads load the controller somewhat.
    let took = base("stream");
    assert!((3.4..4.3).contains(&took), "{took} s");
}

/// Returns the lines per second that six threads on each of amd48's nodes get from node 0, with `in_flight` misses in flight
/// each.
fn lines_per_s_from_node_0(in_flight: f64) -> Vec<f64> {
    let machine = preset("amd48").unwrap();
    let vms = machine.nodes.iter().map(|(id, described)| {
        VmSpec::new(&format!("node{id}"), 6, Bytes::from_gib(2), "reads")
            .on_cpus(described.cpus.clone())
            .with_memory_on(node(0))
    });
    // Every instruction reads a line that it has never read before: 1000 accesses per thousand instructions, none of which hits.
    let mut reads = program("reads", 1000.0, 1.0, in_flight, "private");
    let of = reads.program.as_mut().unwrap();
    (of.cpi_core, of.write_share, of.instructions_g_per_thread) = (0.001, 0.0, 1000.0);
    of.regions[0].size = Bytes::from_mib(32);
    let mut scenario = Scenario::of("one node", vms.collect()).with_workload(reads);
    scenario.hypervisor = Hypervisor::Native;
    let mut twin = Twin::new(machine, &scenario, 1).unwrap();
    twin.run_to_end(Ns::from_secs(3));
    twin.mark();
    twin.run_to_end(Ns::from_secs(4));
    let report = twin.report();
    report.vms.iter().map(|vm| vm.instructions_g * 1e9).collect()
}

#[test]
fn loads_that_need_each_other_wait_as_long_as_measured_where_48_threads_want_one_node() {
    // [Policies, table 3] is the source of the machine file's rate of such lines that a controller sustains.
    let rates = lines_per_s_from_node_0(1.0);
    let machine = preset("amd48").unwrap();
    for (to, rate) in rates.iter().enumerate() {
        let hops = machine.route(NodeId(0), NodeId(to as u16)).unwrap().len();
        let (cycles, published) = (6.0 * 2.2e9 / rate, [697.0, 740.0, 863.0][hops]);
        assert!(
            (cycles / published - 1.0).abs() < 0.1,
            "node {to}: {cycles:.0}, published {published}"
        );
    }
}

#[test]
fn streams_get_all_that_a_controller_sustains() {
    // A stream gets 13 GiB/s, not the 8.7 GB/s that the controller sustains for lines that do not follow each other in memory.
    let bytes: f64 = lines_per_s_from_node_0(8.0)
        .iter()
        .map(|lines| lines * 64.0)
        .sum();
    let whole = 13.0 * f64::from(1 << 30);
    assert!((bytes / whole - 1.0).abs() < 0.02, "{bytes}");
}

#[test]
fn a_table_taken_from_the_family_gives_what_the_family_gives() {
    // One program with its curve as three numbers, and as a table of 8 points for each doubling from 16 KiB to 64 MiB.
    let machine = r910();
    let slowed = |as_table: bool| {
        let mut reuser = program("reuser", 40.0, 0.02, 4.0, "private");
        let curve = &mut reuser.program.as_mut().unwrap().miss_ratio;
        if as_table {
            let capacities = (0..=96).map(|at| 16384.0 * (f64::from(at) / 8.0).exp2());
            *curve = MissRatioCurve::through(capacities.map(|bytes| (Bytes(bytes as u64), curve.at(bytes))));
        }
        let vms = vec![
            bound(&machine, "vm1", "reuser", 0, 0, 0),
            bound(&machine, "vm2", "stream", 0, 2, 1).doing(4.0),
        ];
        let scenario = common::scenario(vms).with_workload(reuser);
        let mut twin = Twin::new(machine.clone(), &scenario, 1).unwrap();
        twin.run_to_end(Ns::from_secs(400));
        twin.report().vms[0].runtime_s.unwrap()
    };
    let (family, table) = (slowed(false), slowed(true));
    assert!(
        (table / family - 1.0).abs() < 0.005,
        "{table} s as a table, {family} s"
    );
    assert!(
        family > 1.1 * base("cached"),
        "a cache shared makes a difference: {family} s"
    );
}

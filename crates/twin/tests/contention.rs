//! The four sources of slowness of [TAVO, figure 2], each by its own construction: two VMs of two vCPUs on cores of
//! their own. The base (e) is VM 1 alone with everything local.

mod common;

use common::{bound, cores, node, r910, runtime};
use homenode_twin::VmSpec;
use homenode_units::Bytes;

fn base(workload: &str) -> f64 {
    let machine = r910();
    runtime(&machine, vec![bound(&machine, "vm1", workload, 0, 0, 0)])
}

#[test]
fn llc_contention_slows() {
    // (a): both on socket 0, memory on different nodes; VM 2 works longer than VM 1.
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
    // (b): vCPUs on different sockets, all memory on node 0. Two streams do not fill a controller: four vCPUs each, as
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
    // (d): VM 1 alone, memory on node 1. (c): VM 2 on the same socket has its memory there too, so both use the link
    // from 1 to 0. A stream reuses nothing, so sharing the LLC costs it nothing.
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
    // Two vCPUs on one core: each runs at 1.25 / 2 of its speed as far as it does not wait for memory.
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
    // stream, by hand: CPI = 0.7 + 0.03 * 299.2 cycles * g(u) / 10 with 160 ns = 299.2 cycles at 1.87 GHz; without load
    // 1.598, so 4 G instructions take 3.42 s, and two such threads load the controller somewhat.
    let took = base("stream");
    assert!((3.4..4.3).contains(&took), "{took} s");
}

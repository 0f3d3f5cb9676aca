//! Helpers shared by the tests: machines, pinned VMs, small programs.

#![allow(dead_code)] // each test file uses its part

use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::workload::{Barrier, Threads, Waiting};
use homenode_twin::{Hypervisor, Scenario, Twin, VmSpec, Workload};
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns};

pub(crate) fn r910() -> Machine {
    preset("r910").expect("r910 comes with the machines")
}

/// Returns `count` CPUs of a node, one hyperthread per core, starting with core number `skip`.
pub(crate) fn cores(machine: &Machine, node: u16, skip: usize, count: usize) -> CpuSet {
    let mut seen = Vec::new();
    let mut set = CpuSet::new();
    for cpu in machine.cpus.iter().filter(|cpu| cpu.node == NodeId(node)) {
        if !seen.contains(&cpu.core) {
            seen.push(cpu.core);
            if seen.len() > skip && seen.len() <= skip + count {
                set.insert(cpu.id);
            }
        }
    }
    assert_eq!(set.len(), count, "node {node} has too few cores");
    set
}

pub(crate) fn node(id: u16) -> NodeSet {
    NodeSet::one(NodeId(id))
}

/// Returns a VM of 2 vCPUs and 4 GiB that runs on two cores of one node and whose memory is bound to a node.
pub(crate) fn bound(
    machine: &Machine,
    name: &str,
    workload: &str,
    cpu_node: u16,
    skip: usize,
    memory_node: u16,
) -> VmSpec {
    VmSpec::new(name, 2, Bytes::from_gib(4), workload)
        .on_cpus(cores(machine, cpu_node, skip, 2))
        .with_memory_on(node(memory_node))
}

/// Returns a program that streams through 256 MiB per thread and reuses no data.
pub(crate) fn stream() -> Workload {
    program("stream", 30.0, 1.0, 16.0, "private")
}

/// Returns a program that reuses 12 MiB, and hardly ever misses if its cache holds them.
pub(crate) fn cached() -> Workload {
    program("cached", 40.0, 0.02, 4.0, "private")
}

/// Returns a program whose data fits its private caches.
pub(crate) fn inert() -> Workload {
    program("inert", 0.01, 0.02, 4.0, "private")
}

pub(crate) fn program(name: &str, accesses: f64, m_inf: f64, in_flight: f64, kind: &str) -> Workload {
    let text = format!(
        "name = \"{name}\"\nabout = \"test\"\n[program]\nthreads = \"one-copy-per-vcpu\"\ninstructions_g_per_thread = 4.0\n\
         cpi_core = 0.7\nllc_accesses_per_kilo_instruction = {accesses}\nmisses_in_flight = {in_flight}\nhits_in_flight = 6.0\n\
         write_share = 0.3\n[program.miss_ratio]\nm_inf = {m_inf}\nc0 = \"3MiB\"\nk = 2.0\n\
         [[program.regions]]\nkind = \"{kind}\"\nsize = \"256MiB\"\naccess_share = 1.0\n"
    );
    Workload::from_toml("test.toml", &text).expect("a possible workload")
}

pub(crate) fn scenario(vms: Vec<VmSpec>) -> Scenario {
    Scenario::of("test", vms)
        .with_workload(stream())
        .with_workload(cached())
        .with_workload(inert())
}

/// Returns the run time of the first VM's program.
pub(crate) fn runtime(machine: &Machine, vms: Vec<VmSpec>) -> f64 {
    let mut twin = Twin::new(machine.clone(), &scenario(vms), 1).expect("the scenario fits");
    while twin.report().vms[0].runtime_s.is_none() {
        assert!(twin.now() < Ns::from_secs(400), "the program does not end");
        twin.run_to_end(Ns(twin.now().0 + 500_000_000));
    }
    twin.report().vms[0].runtime_s.expect("checked above")
}

pub(crate) fn amd48() -> Machine {
    preset("amd48").expect("amd48 comes with the machines")
}

/// Returns a scenario of one VM on a hypervisor, with these workloads of its own.
pub(crate) fn one(hypervisor: Hypervisor, spec: VmSpec, workloads: &[Workload]) -> Scenario {
    let mut scenario = Scenario::of("guests", vec![spec]);
    scenario.hypervisor = hypervisor;
    scenario.workloads = workloads.to_vec();
    scenario
}

pub(crate) fn start(machine: &Machine, scenario: &Scenario) -> Twin {
    Twin::new(machine.clone(), scenario, 1).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a VM of 8 vCPUs and 8 GiB.
pub(crate) fn vm(workload: &str) -> VmSpec {
    VmSpec::new("a", 8, Bytes::from_gib(8), workload)
}

/// Returns a program whose threads meet every 0.2 M instructions, 20 000 times.
pub(crate) fn meeting(waiting: Waiting) -> Workload {
    let mut workload = program("meeting", 0.01, 0.02, 4.0, "private");
    let program = workload.program.as_mut().expect("it has one");
    program.threads = Threads::OnePerVcpu;
    program.waiting = waiting;
    program.barrier = Some(Barrier {
        interval_m_instructions: 0.2,
        imbalance: 0.0,
    });
    workload
}

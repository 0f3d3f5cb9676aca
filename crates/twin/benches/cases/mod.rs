//! Cases that the bench and the example `pace` measure: scenarios, and the machines that they run on.

use homenode_machine_files::preset;
use homenode_twin::{Backend, Hypervisor, Scenario, Transfer, Twin, VmSpec, workload};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns};

/// A scenario on a machine.
pub(crate) struct Case {
    pub name: &'static str,
    pub machine: &'static str,
    pub scenario: Scenario,
    /// Whether latencies are solved in every epoch, even if nothing has changed.
    pub every_epoch: bool,
}

impl Case {
    /// Returns the host before its first VM arrives.
    pub(crate) fn twin(&self) -> Twin {
        let machine = preset(self.machine).expect("a preset");
        let twin = Twin::new(machine, &self.scenario, 1).expect("the scenario fits");
        if self.every_epoch {
            twin.solving_every_epoch()
        } else {
            twin
        }
    }
}

/// Returns the cases measured second by second.
pub(crate) fn all() -> Vec<Case> {
    let case = |name, machine, scenario| Case {
        name,
        machine,
        scenario,
        every_epoch: false,
    };
    let every_epoch = |name, scenario| Case {
        every_epoch: true,
        ..case(name, "amd48", scenario)
    };
    let mixed = Scenario::mixed_for(&preset("amd48").expect("a preset"), 1);
    let copies = three(["soplex", "milc", "lbm"]);
    let barriers = three(["cg.B", "sp.B", "lu.B"]);
    vec![
        case("r910, 8 VMs x 4 vCPUs", "r910", eight()),
        case("amd48, mixed", "amd48", mixed),
        every_epoch("amd48, 3 x 16 single programs, every epoch", copies.clone()),
        case("amd48, 3 x 16 single programs", "amd48", copies),
        every_epoch("amd48, 3 x 16 with barriers, every epoch", barriers.clone()),
        case("amd48, 3 x 16 with barriers", "amd48", barriers),
        case("amd48, 100 VMs x 2 vCPUs", "amd48", hundred(Hypervisor::Kvm)),
        case("amd48, 100 VMs x 2 vCPUs, Xen", "amd48", hundred(Hypervisor::Xen)),
        case("r910, tavo-mixed", "r910", Scenario::tavo_mixed()),
    ]
}

/// Eight VMs of four vCPUs on the R910: half of them meet at barriers, half do not.
fn eight() -> Scenario {
    let programs = ["cg.B", "sp.B", "lu.B", "ep.B", "soplex", "milc", "mcf", "povray"];
    let vms = programs.map(|name| VmSpec::new(name, 4, Bytes::from_gib(8), name).doing(100.0));
    Scenario::of("bench", vms.to_vec())
}

/// Three VMs of 16 vCPUs, pinned, on all 48 CPUs of the AMD48.
fn three(programs: [&str; 3]) -> Scenario {
    let vm = |(at, name): (u32, &str)| {
        let cpus: CpuSet = (16 * at..16 * (at + 1)).map(CpuId).collect();
        VmSpec::new(name, 16, Bytes::from_gib(16), name)
            .doing(100.0)
            .on_cpus(cpus)
    };
    Scenario::of("bench", (0..).zip(programs).map(vm).collect())
}

/// A hundred VMs of two vCPUs on the AMD48, four VMs per CPU and none pinned. They run the programs of [`Scenario::mixed_for`] in
/// turn; three of every eight meet at barriers. No program ends while the case is measured.
fn hundred(hypervisor: Hypervisor) -> Scenario {
    let programs = [
        "cg.B", "povray", "soplex", "sp.B", "ep.B", "milc", "lu.B", "sphinx3",
    ];
    let vm = |at: usize| {
        let name = programs[at % programs.len()];
        VmSpec::new(&format!("vm{at}-{name}"), 2, Bytes::from_gib(2), name).doing(100.0)
    };
    let mut scenario = Scenario::of("hundred", (0..100).map(vm).collect());
    scenario.hypervisor = hypervisor;
    scenario
}

/// Returns a run of 180 minutes with page flipping, as in \[Flip\]: BigBench on 16 vCPUs behind a driver domain, at about a
/// hundredth of its I/O rate.
pub(crate) fn flipping() -> Case {
    let node = |node| NodeSet::one(NodeId(node));
    // The first and the second hyperthreads of a node's 13 cores.
    let cpus = |firsts: [u32; 2]| {
        let each = firsts.into_iter().flat_map(|first| first..first + 13);
        each.map(CpuId).collect::<CpuSet>()
    };
    let mut workload = workload::builtin("bigbench").expect("it comes with the twin");
    workload.name = "flipping".to_owned();
    for io in workload.program.iter_mut().flat_map(|program| &mut program.io) {
        io.bytes_per_kilo_instruction = 0.0244;
    }
    let driver = VmSpec::new("privvm", 4, Bytes::from_gib(64), "idle")
        .on_cpus(cpus([13, 39]))
        .with_memory_on(node(1));
    let backend = Backend {
        vm: "privvm".to_owned(),
        transfer: Transfer::Flip,
        pool: None,
    };
    let vm = VmSpec::new("vm", 16, Bytes::from_gib(16), "flipping")
        .doing(180.0)
        .on_cpus(cpus([0, 26]))
        .with_memory_on(node(0))
        .behind(backend);
    let mut scenario = Scenario::of("flipping", vec![driver, vm]).with_workload(workload);
    scenario.hypervisor = Hypervisor::Xen;
    Case {
        name: "xeon26x2, 180 minutes of page flipping",
        machine: "xeon26x2",
        scenario,
        every_epoch: false,
    }
}

/// How long [`flipping`] is simulated.
pub(crate) const FLIPPING_LASTS: Ns = Ns::from_secs(180 * 60);

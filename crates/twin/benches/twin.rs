//! Simulated time per time: how long one simulated second takes. The reciprocal of a result is simulated seconds per
//! second.

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_host::Host;
use homenode_machine_files::preset;
use homenode_twin::{Backend, Hypervisor, Scenario, Transfer, Twin, VmSpec, workload};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns};

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

/// 180 minutes of flipping, as in \[Flip\]: BigBench on 16 vCPUs at a hundredth of its I/O or thereabouts, behind a driver
/// domain.
fn flipping() -> Scenario {
    let node = |node| NodeSet::one(NodeId(node));
    let cpus = |first: u32, count: u32| (first..first + count).map(CpuId).collect::<CpuSet>();
    let mut workload = workload::builtin("bigbench").expect("it comes with the twin");
    workload.name = "flipping".to_owned();
    for io in workload.program.iter_mut().flat_map(|program| &mut program.io) {
        io.bytes_per_kilo_instruction = 0.0244;
    }
    let driver = VmSpec::new("privvm", 4, Bytes::from_gib(64), "idle")
        .on_cpus(cpus(26, 26))
        .with_memory_on(node(1));
    let backend = Backend {
        vm: "privvm".to_owned(),
        transfer: Transfer::Flip,
        pool: None,
    };
    let vm = VmSpec::new("vm", 16, Bytes::from_gib(16), "flipping")
        .doing(180.0)
        .on_cpus(cpus(0, 16))
        .with_memory_on(node(0))
        .behind(backend);
    let mut scenario = Scenario::of("flipping", vec![driver, vm]).with_workload(workload);
    scenario.hypervisor = Hypervisor::Xen;
    scenario
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("twin");
    group.sample_size(10);
    let mixed = Scenario::mixed_for(&preset("amd48").expect("a preset"), 1);
    let copies = three(["soplex", "milc", "lbm"]);
    let barriers = three(["cg.B", "sp.B", "lu.B"]);
    for (name, machine, scenario, every_epoch) in [
        ("r910, 8 VMs x 4 vCPUs", "r910", eight(), false),
        ("amd48, mixed", "amd48", mixed, false),
        (
            "amd48, 3 x 16 single programs, every epoch",
            "amd48",
            copies.clone(),
            true,
        ),
        ("amd48, 3 x 16 single programs", "amd48", copies, false),
        (
            "amd48, 3 x 16 with barriers, every epoch",
            "amd48",
            barriers.clone(),
            true,
        ),
        ("amd48, 3 x 16 with barriers", "amd48", barriers, false),
    ] {
        let machine = preset(machine).expect("a preset");
        let mut twin = Twin::new(machine, &scenario, 1).expect("the scenario fits");
        if every_epoch {
            twin = twin.solving_every_epoch();
        }
        twin.wait(Ns::from_secs(10));
        group.bench_function(format!("{name}: one simulated second"), |b| {
            b.iter(|| twin.wait(Ns::from_secs(1)));
        });
    }
    let machine = preset("xeon26x2").expect("a preset");
    let twin = Twin::new(machine, &flipping(), 1).expect("the scenario fits");
    group.bench_function("xeon26x2, 180 minutes of page flipping", |b| {
        b.iter(|| twin.clone().run_to_end(Ns::from_secs(180 * 60)));
    });
    group.finish();
}

criterion_group!(twin, benches);
criterion_main!(twin);

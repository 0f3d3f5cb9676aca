//! `xpv.under-ballooning`: all systems after a balloon has taken memory and given it back [XPV, figure 4.10].
//!
//! # Choices, made before the experiment was run
//!
//! - Three VMs of 10 vCPUs and 18 GiB, one of JBB, one of swim and one of milc, whose vCPUs may use the CPUs of nodes 1 to 7; the
//!   privileged VM holds node 0 with its memory, so that nothing else lies there. The paper's VMs have 20 GB, 60 on 56; here a
//!   host creates VMs with all that they have.
//! - What a balloon driven by working sets does that is seen from outside: it takes what an idle guest does not use, and gives
//!   a program what it needs when it begins. Each VM first runs something small; meanwhile it is left 1 GiB, and then given its
//!   program's memory and a tenth, the reserve of this project's own policy ([`overcommit`]). Working sets of profiles do not
//!   change afterwards, so the balloon has nothing more to do.
//! - What Xen gives back comes from all nodes with free memory in turn: [XPV, section 4.1.2], says "any NUMA node".
//! - Speeds count from the 90th to the 120th second, as in `xpv.under-load-balancing`.

use homenode_policy::overcommit;
use homenode_twin::workload::{self, RegionKind};
use homenode_twin::{EventAction, NextProgram, VmSpec};
use homenode_units::{Bytes, NodeId, NodeSet, Ns, Placing};

use super::{ENDLESS, MACHINE, System, above_percent, cpus_of, on_xen};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{solo_s, table};
use crate::figure::{Figure, Shape as Drawing};
use crate::run::Run;
use crate::verdict::Measured;
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.under-ballooning",
    runs: || SYSTEMS.map(run).to_vec(),
    decide,
};

const PROGRAMS: [&str; 3] = ["jbb2005", "swim", "milc.mpi"];
const SYSTEMS: [System; 7] = [
    System::NoPolicy,
    System::Interleaved,
    System::FirstTouch,
    System::Anb,
    System::Vnuma,
    System::OsOnly,
    System::Xpv,
];
const VCPUS: u16 = 10;
/// What runs before the program, and for how long.
const SMALL: &str = "povray";
const SMALL_S: f64 = 10.0;
/// When memory is taken and given back: while that runs.
const TAKEN: Ns = Ns::from_secs(2);
const GIVEN: Ns = Ns::from_secs(5);
/// What an idle guest is left with.
const IDLE: Bytes = Bytes::from_gib(1);
const WARM_UP: Ns = Ns::from_secs(90);
const COUNTED: Ns = Ns::from_secs(30);

/// Memory of a program's regions.
fn footprint(program: &str) -> Bytes {
    let found = workload::builtin(program).and_then(|workload| workload.program);
    let regions = found.map_or(Vec::new(), |program| program.regions);
    let size = |region: &workload::RegionProfile| {
        let copies = if region.kind == RegionKind::Private {
            VCPUS
        } else {
            1
        };
        region.size.0 * u64::from(copies)
    };
    Bytes(regions.iter().map(size).sum())
}

/// What a balloon that knows the working set leaves a guest.
fn given(program: &str) -> Bytes {
    let reserve = overcommit::Config::default().reserve;
    Bytes(IDLE.0 + (footprint(program).as_f64() * (1.0 + reserve)) as u64)
}

fn run(system: System) -> Run {
    let nodes: NodeSet = (1..8).map(NodeId).collect();
    let small = solo_s(MACHINE, SMALL).map_or(1.0, |solo_s| SMALL_S / solo_s);
    let vm = |program: &&'static str| {
        let memory = Bytes::from_gib(18);
        let mut vm = system
            .vm(program, VCPUS, memory, SMALL, cpus_of(1, 7), nodes.clone())
            .doing(small);
        vm.then = vec![NextProgram::new(program).doing(ENDLESS)];
        vm
    };
    let mut privileged = VmSpec::new("privileged", 6, Bytes::from_gib(8), "idle")
        .on_cpus(cpus_of(0, 0))
        .with_memory_on(NodeSet::one(NodeId(0)));
    privileged.memory_policy = Placing::Round4k.alone();
    let vms = std::iter::once(privileged)
        .chain(PROGRAMS.iter().map(vm))
        .collect();
    let mut scenario = on_xen(&format!("three VMs and a balloon, {}", system.name()), vms);
    for program in PROGRAMS {
        let sized = |memory| EventAction::Balloon { memory };
        scenario = scenario.with_event(TAKEN, program, sized(IDLE)).with_event(
            GIVEN,
            program,
            sized(given(program)),
        );
    }
    Run::between(MACHINE, scenario, WARM_UP, Ns(WARM_UP.0 + COUNTED.0))
}

/// Thousand million instructions per second of one VM, and percent of its accesses that are local.
fn speed(outcomes: &Outcomes, system: System, at: usize) -> Result<(f64, f64), String> {
    let run = run(system);
    let outcome = outcomes.of(&run)?;
    // The privileged VM comes first.
    let first = 6 + at * usize::from(VCPUS);
    let vcpus = outcome.window.vcpus.iter().skip(first).take(VCPUS.into());
    let instructions: u64 = vcpus.map(|vcpu| vcpu.instructions).sum();
    let local = outcome.vms[1 + at].local_access_ratio;
    if instructions == 0 {
        return Err(format!(
            "{} ran no instruction of {}",
            run.scenario.name, PROGRAMS[at]
        ));
    }
    Ok((
        instructions as f64 / outcome.window.seconds / 1e9,
        100.0 * local.unwrap_or(0.0),
    ))
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut measured = Measured::default();
    let (mut rows, mut series) = (Vec::new(), Vec::new());
    for system in SYSTEMS {
        let mut bars = Vec::new();
        for (at, program) in PROGRAMS.into_iter().enumerate() {
            let ((ours, local), (xpv, _)) = (speed(outcomes, system, at)?, speed(outcomes, System::Xpv, at)?);
            rows.push((
                format!("{program}, {}", system.name()),
                vec![ours, 100.0 * ours / xpv, local],
            ));
            bars.push(Some(ours / xpv));
            let published = match system {
                System::Interleaved => Some("swim_vs_interleaved"),
                System::FirstTouch => Some("swim_vs_ft"),
                _ => None,
            };
            if let (Some(name), "swim") = (published, program) {
                measured.numbers.insert(name.to_owned(), above_percent(xpv, ours));
            }
        }
        series.push((system.name().to_owned(), bars));
    }
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Thousand million instructions per second; percent of XPV's; percent of accesses that are local.",
            &["program and system", "speed", "of XPV's", "local"],
            rows,
        )],
        figures: vec![Figure {
            name: "xpv-ballooning".to_owned(),
            title: "After a balloon has taken memory and given it back [XPV, figure 4.10]".to_owned(),
            x_label: String::new(),
            y_label: "speed against XPV".to_owned(),
            shape: Drawing::Bars(PROGRAMS.map(str::to_owned).to_vec(), series),
        }],
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "VMs of JBB, swim and milc, 10 vCPUs and 18 GiB each, together on nodes 1 to 7. Their balloons leave idle guests 1 GiB, \
     and give each what its program needs and a tenth as it begins, from all nodes. Speeds from the 90th to the 120th second.";
const WHY: &str = "swim is fastest under XPV and slower under FT than Interleaved, as published, and what the guest knows makes all of the \
     difference, since it has no runtime library; the gains are smaller. Pages that come from seven nodes in turn are 14 percent \
     local and load no node more than another; swim alone loses 28 percent by that on this machine file, whose latencies are \
     estimates. To run at a quarter of its speed, as the paper's under FT, it would have to find its pages on few nodes that others \
     use as well: with all of them on one other node it loses 60 percent alone. The paper does not say from which nodes its Xen took \
     what it gave back, nor how often Badis resized the VMs while they ran.";

//! `xpv.autonuma-fights-balancer`: AutoNUMA in the hypervisor and its CPU load balancer undo each other
//! [XPV, sections 2.4 and 4.4.5].
//!
//! # Choices, made before the experiment was run
//!
//! - Both at work: Linux's fair scheduler, which balances, and its AutoNUMA for VMs, on nodes 1 to 7 with three VMs of milc of 16
//!   vCPUs, so that 48 share 42 CPUs. Without overcommitment, 14 vCPUs each on 14 CPUs of their own, the balancer has nothing
//!   to do, but AutoNUMA may still move them; without AutoNUMA nobody draws vCPUs to memory. (Until 2026-11-25 these 14 were
//!   pinned one by one, so that nobody could have moved them.)
//! - The ping-pong is vCPUs that AutoNUMA moves to their memory, again and again: per minute, from the 60th second on.
//!
//! # Tests of shapes, fixed before the experiment was run
//!
//! - With both there are at least 3 such moves per minute, and more node changes than under the balancer alone.
//! - Without the balancer there is at most one such move per minute.

use homenode_twin::Hypervisor;
use homenode_units::{Bytes, NodeSet, Ns};

use super::{MACHINE, System, cpus_of, on_xen, speed};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{shape, table};
use crate::run::Run;
use crate::verdict::{Measured, show};
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.autonuma-fights-balancer",
    runs: || {
        CASES
            .map(|(_, system, balancing)| run(system, balancing))
            .to_vec()
    },
    decide,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Balancing {
    Needed,
    Idle,
}

const CASES: [(&str, System, Balancing); 3] = [
    ("both", System::Anb, Balancing::Needed),
    ("AutoNUMA alone", System::Anb, Balancing::Idle),
    ("balancer alone", System::FirstTouch, Balancing::Needed),
];
const WARM_UP: Ns = Ns::from_secs(60);
const COUNTED: Ns = Ns::from_secs(60);
const MOVES_LEAST: f64 = 3.0;
const MOVES_MOST: f64 = 1.0;

fn run(system: System, balancing: Balancing) -> Run {
    let vcpus = if balancing == Balancing::Needed { 16 } else { 14 };
    let own = |at: u32| match balancing {
        Balancing::Needed => cpus_of(1, 7),
        Balancing::Idle => cpus_of(1, 7).iter().skip(14 * at as usize).take(14).collect(),
    };
    let vm = |(name, at)| {
        let memory = Bytes::from_gib(16);
        system.vm(name, vcpus, memory, "milc.mpi", own(at), NodeSet::new())
    };
    let vms = [("a", 0), ("b", 1), ("c", 2)].map(vm).to_vec();
    let mut scenario = on_xen(
        &format!("{} while balancing is {balancing:?}", system.name()),
        vms,
    );
    scenario.hypervisor = Hypervisor::Kvm;
    Run::between(MACHINE, scenario, WARM_UP, Ns(WARM_UP.0 + COUNTED.0))
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut rows = Vec::new();
    for (name, system, balancing) in CASES {
        let run = run(system, balancing);
        let outcome = outcomes.of(&run)?;
        let minutes = outcome.window.seconds / 60.0;
        let sum =
            |count: fn(&homenode_twin::VmReport) -> u64| outcome.vms.iter().map(count).sum::<u64>() as f64;
        let moves = sum(|vm| vm.vcpus_drawn) / minutes;
        let changes = sum(|vm| vm.node_changes) / minutes;
        rows.push((name.to_owned(), vec![moves, changes, speed(outcomes, &run)?]));
    }
    let [both, without_balancer, without_autonuma] = [0, 1, 2].map(|at: usize| rows[at].1.clone());
    let shapes = vec![
        shape(
            "with both vCPUs are drawn back again and again",
            format!("{} per minute", show(both[0])),
            both[0] >= MOVES_LEAST,
        ),
        shape(
            "with both more vCPUs change nodes than under the balancer alone",
            format!(
                "{} against {} per minute",
                show(both[1]),
                show(without_autonuma[1])
            ),
            both[1] > without_autonuma[1],
        ),
        shape(
            "without the balancer it ends",
            format!("{} per minute", show(without_balancer[0])),
            without_balancer[0] <= MOVES_MOST,
        ),
    ];
    Ok(Decision {
        measured: Measured {
            shapes,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Per minute, of all VMs: vCPUs that AutoNUMA moves to their memory, and node changes of vCPUs; thousand million \
             instructions per second.",
            &["at work", "drawn", "node changes", "speed"],
            rows,
        )],
        ..Decision::default()
    })
}

const SET_UP: &str = "Three VMs of milc under KVM, whose scheduler balances and whose kernel has AutoNUMA; on nodes 1 to 7, and first \
     touched where their vCPUs are.";

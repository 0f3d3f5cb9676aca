//! `xpv.autonuma-can-be-abused`: a VM that makes the hypervisor's AutoNUMA migrate vCPUs for ever [XPV, section 4.4.5].
//!
//! # Choices
//!
//! - The malicious VM has two vCPUs, the first on node 1 and the second on node 2, and STREAM in it, whose threads have touched
//!   half of its memory each: a half on each node. The other CPUs of these nodes are those of two VMs of milc with 5 vCPUs. Once
//!   all of them run, every vCPU may use all twelve CPUs.
//! - The attack: every 10 s all threads go over to the other half of the memory. Whatever has been moved to it is remote then,
//!   at least for one of them. The paper's program measures latencies to find out when it has been followed; here it waits.
//! - The same VM that stays with its memory, and the attack under a hypervisor without AutoNUMA, tell what the attack does. Xen,
//!   in which the paper implemented AutoNUMA. Seconds 30 to 90 count.
//! - Where the tenants are was chosen twice. With each on one node, the choice made before anything was run, AutoNUMA moves
//!   nobody; that is in the table. The claim says what can be done, so it is decided by tenants that have both nodes.
//!
//! # Tests of shapes, fixed before the experiment was run
//!
//! - Under attack AutoNUMA moves vCPUs at least 3 times a minute, also in the last half minute; without the attack at most once.
//! - Under attack vCPUs of the tenants change nodes at least 3 times a minute; in the two other cases at most once.
//! - The tenants are slower under attack than in both other cases, by a percent at least.

use homenode_twin::{EventAction, VmSpec};
use homenode_units::{Bytes, CpuId, NodeSet, Ns};

use super::{MACHINE, System, above_percent, cpus_of, on_xen};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{shape, table};
use crate::figure::{Figure, Shape as Drawing};
use crate::run::{Outcome, Run};
use crate::verdict::{Measured, show};
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.autonuma-can-be-abused",
    runs: || {
        let of = |from| CASES.map(|(_, case)| run(case, from));
        [WHOLE, LAST_HALF].into_iter().flat_map(of).collect()
    },
    decide,
};

/// What the hypervisor does, whether the VM attacks, and where the tenants are.
#[derive(Clone, Copy, Debug)]
struct Case {
    system: System,
    attacks: bool,
    tenants: Tenants,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tenants {
    OnBothNodes,
    OnOneNodeEach,
}

const ATTACK: Case = Case {
    system: System::Anb,
    attacks: true,
    tenants: Tenants::OnBothNodes,
};
const CASES: [(&str, Case); 4] = [
    ("attack on AutoNUMA", ATTACK),
    (
        "AutoNUMA without an attack",
        Case {
            attacks: false,
            ..ATTACK
        },
    ),
    (
        "attack without AutoNUMA",
        Case {
            system: System::FirstTouch,
            ..ATTACK
        },
    ),
    (
        "attack on AutoNUMA, tenants on a node each",
        Case {
            tenants: Tenants::OnOneNodeEach,
            ..ATTACK
        },
    ),
];
const FREE_FROM: Ns = Ns::from_secs(5);
const CHANGE_EVERY_S: u64 = 10;
/// From when what happens counts, and until when.
const WHOLE: Ns = Ns::from_secs(30);
const LAST_HALF: Ns = Ns::from_secs(60);
const END_S: u64 = 90;
const OFTEN: f64 = 3.0;
const HARDLY: f64 = 1.0;
const SLOWER_PERCENT: f64 = 1.0;

fn run(case: Case, from: Ns) -> Run {
    let pinned = |name: &str, cpus: &[u32], memory, program| -> VmSpec {
        let (vcpus, cpus) = (cpus.len() as u16, cpus.iter().map(|cpu| CpuId(*cpu)).collect());
        let vm = case.system.vm(
            name,
            vcpus,
            Bytes::from_gib(memory),
            program,
            cpus,
            NodeSet::new(),
        );
        vm.pinned()
    };
    let [first, second] = match case.tenants {
        Tenants::OnBothNodes => [[7, 8, 9, 13, 14], [10, 11, 15, 16, 17]],
        Tenants::OnOneNodeEach => [[7, 8, 9, 10, 11], [13, 14, 15, 16, 17]],
    };
    let vms = vec![
        pinned("malicious", &[6, 12], 2, "stream"),
        pinned("first tenant", &first, 4, "milc.mpi"),
        pinned("second tenant", &second, 4, "milc.mpi"),
    ];
    let names: Vec<String> = vms.iter().map(|vm| vm.name.clone()).collect();
    let name = format!("two tenants and a third VM: {case:?}");
    let mut scenario = on_xen(&name, vms);
    for vm in &names {
        let cpus = cpus_of(1, 2);
        scenario = scenario.with_event(FREE_FROM, vm, EventAction::Pin { cpus });
    }
    for change in (1..).take_while(|change| case.attacks && change * CHANGE_EVERY_S < END_S) {
        let thread = (change % 2) as u16;
        let at = Ns::from_secs(change * CHANGE_EVERY_S);
        scenario = scenario.with_event(at, &names[0], EventAction::Gather { thread });
    }
    Run::between(MACHINE, scenario, from, Ns::from_secs(END_S))
}

/// Thousand million instructions per second of both tenants.
fn tenants_speed(outcome: &Outcome) -> f64 {
    let instructions: u64 = (outcome.window.vcpus.iter().skip(2))
        .map(|vcpu| vcpu.instructions)
        .sum();
    instructions as f64 / outcome.window.seconds / 1e9
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let (mut rows, mut last) = (Vec::new(), Vec::new());
    for (name, case) in CASES {
        let drawn = |outcome: &Outcome| {
            let drawn: u64 = outcome.vms.iter().map(|vm| vm.vcpus_drawn).sum();
            drawn as f64 / outcome.window.seconds * 60.0
        };
        let (whole, half) = (run(case, WHOLE), run(case, LAST_HALF));
        let whole = outcomes.of(&whole)?;
        last.push(drawn(outcomes.of(&half)?));
        let changes: u64 = whole.vms.iter().skip(1).map(|vm| vm.node_changes).sum();
        let changes = changes as f64 / whole.window.seconds * 60.0;
        rows.push((name.to_owned(), vec![drawn(whole), changes, tenants_speed(whole)]));
    }
    let [attacked, quiet, without] = [0, 1, 2].map(|at: usize| rows[at].1.clone());
    if quiet[2] == 0.0 || without[2] == 0.0 {
        return Err("the tenants ran no instruction".to_owned());
    }
    let slower = [&quiet, &without].map(|other| -above_percent(attacked[2], other[2]));
    let shapes = vec![
        shape(
            "vCPUs are moved for ever",
            format!(
                "{} per minute, {} in the last half",
                show(attacked[0]),
                show(last[0])
            ),
            attacked[0] >= OFTEN && last[0] >= OFTEN,
        ),
        shape(
            "without the attack they are not",
            format!("{} per minute", show(quiet[0])),
            quiet[0] <= HARDLY,
        ),
        shape(
            "vCPUs of tenants change nodes",
            format!(
                "{} per minute, {} without the attack, {} without AutoNUMA",
                show(attacked[1]),
                show(quiet[1]),
                show(without[1])
            ),
            attacked[1] >= OFTEN && quiet[1] <= HARDLY && without[1] <= HARDLY,
        ),
        shape(
            "tenants are slower",
            format!(
                "by {} percent, by {} than without AutoNUMA",
                show(slower[0]),
                show(slower[1])
            ),
            slower.iter().all(|percent| *percent >= SLOWER_PERCENT),
        ),
    ];
    let bars = |at: usize| rows.iter().map(|(_, row)| Some(row[at])).collect::<Vec<_>>();
    let figures = vec![Figure {
        name: "xpv-abuse".to_owned(),
        title: "A VM that abuses AutoNUMA in the hypervisor [XPV, 4.4.5]".to_owned(),
        x_label: String::new(),
        y_label: "per minute".to_owned(),
        shape: Drawing::Bars(
            CASES.map(|(name, _)| name.to_owned()).to_vec(),
            vec![
                ("vCPUs moved by AutoNUMA".to_owned(), bars(0)),
                ("node changes of tenants".to_owned(), bars(1)),
            ],
        ),
    }];
    Ok(Decision {
        measured: Measured {
            shapes,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Per minute: vCPUs that AutoNUMA moves, and node changes of the tenants' vCPUs; thousand million instructions per second \
             of both tenants.",
            &["case", "drawn", "tenants' node changes", "tenants' speed"],
            rows,
        )],
        figures,
        ..Decision::default()
    })
}

const SET_UP: &str = "STREAM on two vCPUs with half of its memory on each of two nodes, whose other ten CPUs are those of two VMs of milc. Every \
     10 s both of its threads go over to the other half. AutoNUMA exchanges two vCPUs where both together win by 3 percent of their \
     accesses at least: one all of whose accesses go to the other node displaces any that has but a few of its own there, as those of \
     a program that shares memory over both nodes have. Tenants whose memory is all on one node win as much by staying as the attack \
     gains, and stay: the last row, which was tried first.";

//! `xpv.stale-is-worse-than-none`: a topology that is not true any more against none [XPV, figure 4.3].
//!
//! # Choices, made before the experiment was run
//!
//! - 12 vCPUs, three on each of nodes 1 to 4, each pinned; 30 GiB need four nodes of 8. *Stale*: while the guest boots, so
//!   that its programs find it so, all vCPUs are moved to nodes 5 to 7, four on each.
//!
//! # Tests of shapes, fixed before the experiment was run
//!
//! - vNUMA is faster than Interleaved, and stale vNUMA slower than Interleaved, for both programs.

use homenode_twin::EventAction;
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns};

use super::{MACHINE, System, above_percent, local_percent, on_xen, speed};
use crate::experiment::{Decision, Experiment};
use crate::experiments::table;
use crate::figure::{Figure, Shape as Drawing};
use crate::run::Run;
use crate::verdict::{Measured, Shape, show};
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.stale-is-worse-than-none",
    runs: || {
        let of = |program| BARS.map(|(system, when)| run(program, system, when));
        PROGRAMS.into_iter().flat_map(of).collect()
    },
    decide,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vcpus {
    Stay,
    MoveAway,
}

const PROGRAMS: [&str; 2] = ["lu.mpi", "stream"];
const BARS: [(System, Vcpus); 5] = [
    (System::Interleaved, Vcpus::Stay),
    (System::Vnuma, Vcpus::Stay),
    (System::Vnuma, Vcpus::MoveAway),
    (System::Interleaved, Vcpus::MoveAway),
    (System::Xpv, Vcpus::MoveAway),
];
/// While the guest boots, which takes 1.2 s.
const MOVED_AT: Ns = Ns::from_millis(1000);
const WARM_UP: Ns = Ns::from_secs(20);
const COUNTED: Ns = Ns::from_secs(10);

/// So many CPUs of each of these nodes.
fn some(nodes: std::ops::Range<u32>, each: u32) -> CpuSet {
    nodes
        .flat_map(|node| (0..each).map(move |at| CpuId(node * super::CORES + at)))
        .collect()
}

fn run(program: &'static str, system: System, vcpus: Vcpus) -> Run {
    let nodes: NodeSet = (1..5).map(NodeId).collect();
    let vm = system
        .vm("tested", 12, Bytes::from_gib(30), program, some(1..5, 3), nodes)
        .pinned();
    let mut scenario = on_xen(
        &format!("{program}, {}, vCPUs {vcpus:?}", system.name()),
        vec![vm],
    );
    if vcpus == Vcpus::MoveAway {
        let cpus = some(5..8, 4);
        scenario = scenario.with_event(MOVED_AT, "tested", EventAction::Pin { cpus });
    }
    Run::between(MACHINE, scenario, WARM_UP, Ns(WARM_UP.0 + COUNTED.0))
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut measured = Measured::default();
    let (mut rows, mut series) = (Vec::new(), Vec::new());
    for program in PROGRAMS {
        let of = |at: usize| speed(outcomes, &run(program, BARS[at].0, BARS[at].1));
        let (interleaved, vnuma, stale) = (of(0)?, of(1)?, of(2)?);
        let gain = above_percent(vnuma, interleaved);
        if program == "lu.mpi" {
            measured
                .numbers
                .insert("lu_vnuma_over_interleaved_pct".to_owned(), gain);
        }
        let shape = |name: &str, percent: f64, holds| Shape {
            name: format!("{program}: {name}"),
            ours: format!("{} percent", show(percent)),
            holds,
        };
        let below = above_percent(stale, interleaved);
        measured
            .shapes
            .push(shape("vNUMA is faster than Interleaved", gain, gain > 0.0));
        measured
            .shapes
            .push(shape("stale vNUMA is slower", below, below < 0.0));
        for (system, vcpus) in BARS {
            let run = run(program, system, vcpus);
            let moved = if vcpus == Vcpus::MoveAway {
                ", vCPUs moved away"
            } else {
                ""
            };
            let name = format!("{program}, {}{moved}", system.name());
            let speed = speed(outcomes, &run)?;
            let percent = above_percent(speed, interleaved);
            rows.push((name, vec![speed, percent, local_percent(outcomes, &run)?]));
        }
        let bars = [interleaved, vnuma, stale].map(|speed| Some(speed / interleaved));
        series.push((program.to_owned(), bars.to_vec()));
    }
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Thousand million instructions per second; percent above Interleaved; percent of accesses that are local.",
            &["program and system", "speed", "above", "local"],
            rows,
        )],
        figures: vec![Figure {
            name: "xpv-stale".to_owned(),
            title: "A stale topology [XPV, figure 4.3]".to_owned(),
            x_label: String::new(),
            y_label: "speed against Interleaved".to_owned(),
            shape: Drawing::Bars(
                ["Interleaved", "vNUMA", "Stale vNUMA"]
                    .map(str::to_owned)
                    .to_vec(),
                series,
            ),
        }],
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "One VM of 12 vCPUs and 30 GiB on nodes 1 to 4; to make its topology stale all vCPUs are moved to nodes 5 to 7 \
     before its program begins. Speeds from the 20th to the 30th second.";
const WHY: &str = "Each part but the size of LU's gain holds. The gain is what remote accesses cost times how many there are: LU's accesses per \
     instruction are an estimate, and so are the machine's remote latencies. Under Interleaved half of its accesses are local, since \
     its 6 GiB lie in GiBs of two nodes of the four.";

//! `xpv.vnuma-beats-blackbox`: a topology that is shown and true against policies of the hypervisor [XPV, figure 4.7].
//!
//! # Choices, made before the experiment was run
//!
//! - 18 vCPUs, one on each CPU of nodes 1 to 3, pinned, since no topology change is triggered; 20 GiB of their 24.
//! - Without "NUMA SRL" the library knows no nodes. "Other solutions" of JBB are the four of the hypervisor.
//!
//! # Tests of shapes, fixed before the experiment was run
//!
//! - AutoNUMA is the best blackbox policy: the geometric mean of its three speeds is the highest of the four.

use homenode_units::{Bytes, NodeId, NodeSet, Ns};

use super::{MACHINE, System, above_percent, cpus_of, local_percent, on_xen, speed};
use crate::experiment::{Decision, Experiment};
use crate::experiments::table;
use crate::figure::{Figure, Shape as Drawing};
use crate::run::Run;
use crate::verdict::{Measured, Shape, show};
use crate::work::Outcomes;

pub const EXPERIMENT: Experiment = Experiment {
    claim: "xpv.vnuma-beats-blackbox",
    runs: || {
        let of = |program| SYSTEMS.map(|system| run(program, system));
        PROGRAMS.into_iter().flat_map(of).collect()
    },
    decide,
};

const PROGRAMS: [&str; 3] = ["jbb2005", "milc.mpi", "swim"];
const BLACKBOX: [System; 4] = [
    System::NoPolicy,
    System::Interleaved,
    System::FirstTouch,
    System::Anb,
];
const SYSTEMS: [System; 6] = [
    BLACKBOX[0],
    BLACKBOX[1],
    BLACKBOX[2],
    BLACKBOX[3],
    System::VnumaNoSrl,
    System::Vnuma,
];
const WARM_UP: Ns = Ns::from_secs(30);
const COUNTED: Ns = Ns::from_secs(10);

fn run(program: &'static str, system: System) -> Run {
    let nodes: NodeSet = (1..4).map(NodeId).collect();
    let vm = system
        .vm("tested", 18, Bytes::from_gib(20), program, cpus_of(1, 3), nodes)
        .pinned();
    let scenario = on_xen(&format!("{program} on three nodes, {}", system.name()), vec![vm]);
    Run::between(MACHINE, scenario, WARM_UP, Ns(WARM_UP.0 + COUNTED.0))
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let of = |program, system| speed(outcomes, &run(program, system));
    let gain =
        |program, system, other| Ok::<f64, String>(above_percent(of(program, system)?, of(program, other)?));
    let mut measured = Measured::default();
    let mut number = |name: &str, value| measured.numbers.insert(name.to_owned(), value);
    number(
        "swim_vs_interleaved",
        gain("swim", System::Vnuma, System::Interleaved)?,
    );
    number("swim_vs_ft", gain("swim", System::Vnuma, System::FirstTouch)?);
    number("swim_vs_anb", gain("swim", System::Vnuma, System::Anb)?);
    let over_blackbox = BLACKBOX
        .into_iter()
        .map(|other| gain("jbb2005", System::Vnuma, other))
        .collect::<Result<Vec<_>, _>>()?;
    number(
        "jbb_vs_best",
        over_blackbox.into_iter().fold(f64::INFINITY, f64::min),
    );
    number(
        "milc_srl_gain",
        gain("milc.mpi", System::Vnuma, System::VnumaNoSrl)?,
    );
    let (mut rows, mut series, mut means) = (Vec::new(), Vec::new(), Vec::new());
    for system in SYSTEMS {
        let (mut bars, mut product) = (Vec::new(), 1.0);
        for program in PROGRAMS {
            let relative = of(program, system)? / of(program, System::NoPolicy)?;
            product *= relative;
            let local = local_percent(outcomes, &run(program, system))?;
            rows.push((
                format!("{program}, {}", system.name()),
                vec![of(program, system)?, relative, local],
            ));
            bars.push(Some(relative));
        }
        means.push((system, product.cbrt()));
        series.push((system.name().to_owned(), bars));
    }
    let best = means[..BLACKBOX.len()].iter().fold(
        means[0],
        |best, other| if other.1 > best.1 { *other } else { best },
    );
    measured.shapes.push(Shape {
        name: "AutoNUMA is the best blackbox policy".to_owned(),
        ours: format!("{}, {} times No policy", best.0.name(), show(best.1)),
        holds: best.0 == System::Anb,
    });
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "Thousand million instructions per second; the same against No policy; percent of accesses that are local.",
            &["program and system", "speed", "against No policy", "local"],
            rows,
        )],
        figures: vec![Figure {
            name: "xpv-blackbox".to_owned(),
            title: "vNUMA against the hypervisor's policies [XPV, figure 4.7]".to_owned(),
            x_label: String::new(),
            y_label: "speed against No policy".to_owned(),
            shape: Drawing::Bars(PROGRAMS.map(str::to_owned).to_vec(), series),
        }],
        why: vec![WHY.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "One VM of 18 vCPUs and 20 GiB, a vCPU on each CPU of nodes 1 to 3. Speeds from the 30th to the 40th second.";
const WHY: &str = "swim: first-touch places what a thread initialises beside it, in the hypervisor as in the guest, and the guest's AutoNUMA \
     only costs time then; the paper's guest sees one node and moves threads between vCPUs as it likes (its own explanation in 4.4.3), \
     while here a guest's thread keeps its vCPU. milc: a rank is a process, and what a library hands it was first touched by itself, so \
     a library that knows nodes wins nothing while nothing changes; the paper does not say where TCMalloc loses 64 percent. JBB gains \
     more than published: how much a thread allocates is an estimate. AutoNUMA in the hypervisor moves pages that are in place already, \
     and its scans cost; it is best for JBB's locality alone.";

//! The experiments, by claim.

mod flip;
mod four_sources;
mod kyoto;
mod latencies;
mod overhead;
mod page_logs;
mod policies;
mod tavo;
mod xpv;

use homenode_twin::workload;

use crate::experiment::{Experiment, Table};
use crate::verdict::{Shape, show};

/// All that there are.
pub const ALL: &[Experiment] = &[
    kyoto::contention::PRIVATE_CACHES,
    kyoto::contention::PARALLEL_AND_ALTERNATE,
    kyoto::contention::MISSES_PER_TICK,
    kyoto::contention::LEVER,
    kyoto::indicator::EXPERIMENT,
    kyoto::enforcement::PROTECT,
    kyoto::enforcement::SCALES,
    kyoto::enforcement::PARTITIONING,
    kyoto::metering::MIGRATION,
    kyoto::metering::SKIPPABLE,
    kyoto::overhead::EXPERIMENT,
    flip::AGAIN,
    flip::DRIFT,
    flip::COST,
    flip::CURED,
    flip::TRIGGERS,
    four_sources::EXPERIMENT,
    tavo::NPB,
    tavo::SPEC,
    tavo::STABILITY,
    overhead::EXPERIMENT,
    latencies::EXPERIMENT,
    page_logs::limits::EXPERIMENT,
    page_logs::costs::WSS,
    page_logs::costs::INVALIDATION,
    page_logs::costs::MIGRATION,
    page_logs::costs::GUEST,
    page_logs::costs::CHECKPOINT,
    page_logs::accuracy::EXPERIMENT,
    page_logs::hpl::EXPERIMENT,
    page_logs::parsec::EXPERIMENT,
    page_logs::overhead::MISSED,
    page_logs::overhead::OVERHEAD,
    page_logs::uses::RESTORE,
    page_logs::uses::CACHE,
    policies::IMBALANCE,
    policies::ALL_USEFUL,
    policies::CLASS_RULE,
    policies::BEST_TABLE,
    policies::SINGLE_VM,
    policies::CONSOLIDATED,
    policies::XEN,
    policies::XEN_PLUS,
    policies::REMAINING,
    policies::RELEASES,
    policies::IPI,
    policies::FIRST_TOUCH_DISK,
    policies::NEAR_BEST,
    policies::PHASES,
    policies::BOUNDED,
    xpv::MOVES,
    xpv::STALE,
    xpv::BLACKBOX,
    xpv::LOAD,
    xpv::BALLOONING,
    xpv::ABUSE,
    xpv::FIGHTS,
];

/// Claims that no model here could decide, and why.
pub const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "xpv.internals",
        "cycles of one interrupt handler on one processor; no part of the twin counts single instructions",
    ),
    (
        "policies.iommu",
        "which of two interrupts of a failed transfer comes first, the device's to the guest or the IOMMU's to the hypervisor, is a \
         property of that hardware, and a model of it would only say what was put in. What follows from it the twin holds: it \
         refuses passthrough under the hypervisor's first-touch, in a scenario and when a policy is changed",
    ),
];

/// Longest solo run of a program: a longer one does only so much of its work. Repeated loops make the rest more of the same.
const SOLO_S_MAX: f64 = 60.0;

/// NPB class B, five kernels and three applications [TAVO, section VI].
const NPB_B: [&str; 8] = ["bt.B", "cg.B", "ep.B", "ft.B", "is.B", "lu.B", "mg.B", "sp.B"];
/// The programs of SPEC CPU2006 that \[TAVO\] names.
const SPEC_2006: [&str; 8] = [
    "astar", "lbm", "mcf", "milc", "omnetpp", "povray", "soplex", "sphinx3",
];

/// Share of a program's work that takes at most [`SOLO_S_MAX`] alone on a machine. 1 for a name that is unknown: running it
/// will say so.
fn work_share(machine: &str, program: &str) -> f64 {
    solo_s(machine, program).map_or(1.0, |solo_s| (SOLO_S_MAX / solo_s).min(1.0))
}

/// How long a program takes alone on a machine; `None` for a name that is unknown.
fn solo_s(machine: &str, program: &str) -> Option<f64> {
    let machine = homenode_machine_files::preset(machine).ok()?;
    let program = workload::builtin(program)?.program?;
    Some(program.solo_seconds(&machine, machine.hardware.as_ref()?))
}

/// Percent by which a runtime is above another.
fn slowdown_percent(base_s: f64, other_s: f64) -> f64 {
    100.0 * (other_s / base_s - 1.0)
}

/// The test of a shape: what is tested, what came out, and whether it was passed.
fn shape(name: &str, ours: String, holds: bool) -> Shape {
    Shape {
        name: name.to_owned(),
        ours,
        holds,
    }
}

/// A table whose rows are a name and numbers.
fn table(
    title: &str,
    header: &[impl AsRef<str>],
    rows: impl IntoIterator<Item = (String, Vec<f64>)>,
) -> Table {
    let row = |(name, numbers): (String, Vec<f64>)| {
        let mut row = vec![name];
        row.extend(numbers.into_iter().map(show));
        row
    };
    Table {
        title: title.to_owned(),
        header: header.iter().map(|head| head.as_ref().to_owned()).collect(),
        rows: rows.into_iter().map(row).collect(),
    }
}

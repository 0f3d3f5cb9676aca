//! The experiments, by claim: in files, or in code if a file cannot express them.

mod parsec;

use std::sync::LazyLock;

use crate::design::Design;
use crate::experiment::{Decides, Experiment};
use crate::verdict::Shape;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../data/experiments/", $name, ".toml"))),)*]
    };
}

/// Experiments in files, with their text.
pub(crate) const FILES: &[(&str, &str)] = files!(
    "kyoto/private-caches",
    "kyoto/parallel-and-alternate",
    "kyoto/misses-per-tick",
    "kyoto/lever",
    "kyoto/indicator",
    "kyoto/protect",
    "kyoto/scales",
    "kyoto/partitioning",
    "kyoto/migration",
    "kyoto/isolation",
    "kyoto/overhead",
    "xpv/moves",
    "xpv/stale",
    "xpv/blackbox",
    "xpv/load",
    "xpv/ballooning",
    "xpv/abuse",
    "xpv/fights",
    "tavo/four-sources",
    "tavo/npb",
    "tavo/spec",
    "tavo/stability",
    "tavo/overhead",
    "policies/latencies",
    "policies/imbalance",
    "policies/all-useful",
    "policies/class-rule",
    "policies/best-table",
    "policies/single-vm",
    "policies/consolidated",
    "policies/xen-overhead",
    "policies/xenplus-overhead",
    "policies/remaining-overhead",
    "policies/releases",
    "policies/ipi",
    "policies/first-touch-disk",
    "policies/near-best",
    "policies/phases",
    "policies/bounded",
    "page-logs/limits",
    "page-logs/wss",
    "page-logs/invalidation",
    "page-logs/migration",
    "page-logs/guest",
    "page-logs/checkpoint",
    "page-logs/accuracy",
    "page-logs/hpl",
    "page-logs/missed",
    "page-logs/overhead",
    "page-logs/restore",
    "page-logs/shared-cache",
    "flip/repeated",
    "flip/drift",
    "flip/cost",
    "flip/cured",
    "flip/triggers",
);

/// Returns all experiments, those in files first.
pub fn all() -> impl Iterator<Item = &'static dyn Decides> {
    static READ: LazyLock<Vec<Design>> = LazyLock::new(|| {
        let read = |(name, text): &(&str, &str)| {
            // A test parses every one of them.
            Design::embedded(name, text).expect("embedded experiment")
        };
        FILES.iter().map(read).collect()
    });
    let files = READ.iter().map(|design| -> &dyn Decides { design });
    files.chain(CODE.iter().map(|code| -> &dyn Decides { code }))
}

/// Experiments in code.
const CODE: &[Experiment] = &[parsec::EXPERIMENT];

/// Claims that no model here could decide, with the reason.
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

/// Creates the test of a shape: its subject, its outcome, and whether it passed.
fn shape(name: &str, ours: String, holds: bool) -> Shape {
    Shape {
        name: name.to_owned(),
        ours,
        holds,
    }
}

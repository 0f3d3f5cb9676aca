//! The experiments that come with the program: files of `data/experiments`.

use std::sync::LazyLock;

use crate::design::Design;

/// Names and texts of the experiments.
pub(crate) const FILES: &[(&str, &str)] = files! {
    "kyoto/": "private-caches", "parallel-and-alternate", "misses-per-tick", "lever", "indicator", "protect",
        "scales", "partitioning", "migration", "isolation", "overhead";
    "xpv/": "moves", "stale", "blackbox", "load", "ballooning", "abuse", "fights";
    "tavo/": "four-sources", "npb", "spec", "stability", "overhead";
    "policies/": "latencies", "imbalance", "all-useful", "class-rule", "best-table", "single-vm",
        "consolidated", "xen-overhead", "xenplus-overhead", "remaining-overhead", "releases", "ipi",
        "first-touch-disk", "near-best", "held-out", "phases", "bounded";
    "page-logs/": "limits", "wss", "invalidation", "migration", "guest", "checkpoint", "accuracy", "hpl",
        "missed", "overhead", "parsec", "restore", "shared-cache";
    "flip/": "repeated", "drift", "cost", "cured", "triggers";
};

/// Returns all experiments.
pub(crate) fn all() -> impl Iterator<Item = &'static Design> {
    static READ: LazyLock<Vec<Design>> = LazyLock::new(|| {
        let read = |(name, text): &(&str, &str)| {
            // A test parses every experiment.
            Design::embedded(name, text).expect("embedded experiment")
        };
        FILES.iter().map(read).collect()
    });
    READ.iter()
}

/// Claims that no model here can decide, each with the reason.
pub(crate) const NOT_MODELLED: &[(&str, &str)] = &[
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

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
        "missed", "overhead", "parsec", "power", "restore", "shared-cache";
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

/// Why XPV cannot be compared with Xen's own vNUMA.
const XENS_VNUMA: &str = "the paper explains the gap by a fault of the guest's scheduler under Xen's vNUMA (xen-devel, \
    July 2015, \"PV-vNUMA issue: topology is misinterpreted by the guest\"), and does not say on which vCPUs it leaves the \
    threads. On the twin both show a guest the same true topology, so that they are equal; a model of the fault would only \
    say what was put in";

/// Claims that no model here can decide, each with the reason.
pub(crate) const NOT_MODELLED: &[(&str, &str)] = &[
    (
        "xpv.internals",
        "cycles of one interrupt handler on one processor; no part of the twin counts single instructions",
    ),
    ("xpv.beats-xens-vnuma", XENS_VNUMA),
    ("xpv.beats-xens-vnuma-in-small-vms", XENS_VNUMA),
    (
        "xpv.effort",
        "lines of code of the authors' patches. Their release has some of them: HotSpot's has the table's 53 lines in 3 \
         files, Xen's adds 103 lines in 8 files (table: 117), Linux' 896 in 34 files (670 in 26); KVM's, FreeBSD's, \
         TCMalloc's and jemalloc's are not in it",
    ),
    (
        "policies.iommu",
        "which of two interrupts of a failed transfer comes first, the device's to the guest or the IOMMU's to the hypervisor, is a \
         property of that hardware, and a model of it would only say what was put in. What follows from it the twin holds: it \
         refuses passthrough under the hypervisor's first-touch, in a scenario and when a policy is changed",
    ),
];

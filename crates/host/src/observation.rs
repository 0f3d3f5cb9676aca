//! A tracker's observations of a VM's memory: the input of `policy::working_set`. The live host, the simulator and models all
//! report them in the same form.
//!
//! A *tracker* is a mechanism that reports which guest memory is used: a log of page walks, accessed bits, DAMON, faults on pages
//! that were made invalid. Each tracker sees different things, so an [`ObservationRef`] names its tracker, the time that it
//! observed, and what it lost. Nothing is judged here: the policy decides what is hot, and how large the working set is.
//!
//! # Contract
//!
//! - Each interval has one observation, in order of time; intervals do not overlap.
//! - Frames are guest frames of 4 KiB, whatever the mapping's page size. A tracker that sees larger pages names each of their
//!   frames, reports [`UsedRef::Regions`], or tells how much of its [`UsedRef::Amount`] is coarse.
//! - Frames are untrusted input from a guest or a kernel. Readers drop and count frames beyond [`ObservationRef::frames`].

use homenode_units::{Ns, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A mechanism that reports which guest memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tracker {
    /// Page reference logging [PRL, section 4], modelled: every page walk is logged.
    Prl,
    /// Page modification logging: the first write to a page is logged.
    Pml,
    /// Faults on all pages, made invalid in each interval.
    Invalidation,
    /// Faults on some pages, drawn afresh for each interval and made invalid (ESX).
    Sampling,
    /// Accessed bits of page tables, cleared in each interval.
    AccessedBits,
    /// DAMON, which samples one page of each of its regions.
    Damon,
    /// Generations of the kernel's multi-generational LRU.
    Mglru,
    /// Pages written since they were write-protected (`PAGEMAP_SCAN`).
    WrittenPages,
    /// KVM's log of dirty pages, kept as a bitmap or a ring.
    DirtyLog,
    /// The exact set of used pages, kept by an emulator.
    Exact,
}

/// Which accesses a tracker sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sees {
    /// Reads and writes.
    All,
    /// The tracker sees only writes. Its reports lack pages that are only read.
    Writes,
}

impl Tracker {
    /// Returns the tracker's name for people and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Tracker::Prl => "prl",
            Tracker::Pml => "pml",
            Tracker::Invalidation => "invalidation",
            Tracker::Sampling => "sampling",
            Tracker::AccessedBits => "accessed-bits",
            Tracker::Damon => "damon",
            Tracker::Mglru => "mglru",
            Tracker::WrittenPages => "written-pages",
            Tracker::DirtyLog => "dirty-log",
            Tracker::Exact => "exact",
        }
    }

    /// Returns which accesses the tracker sees.
    pub fn sees(self) -> Sees {
        match self {
            Tracker::Pml | Tracker::WrittenPages | Tracker::DirtyLog => Sees::Writes,
            Tracker::Prl
            | Tracker::Invalidation
            | Tracker::Sampling
            | Tracker::AccessedBits
            | Tracker::Damon
            | Tracker::Mglru
            | Tracker::Exact => Sees::All,
        }
    }

    /// Returns what the tracker cannot see, as a sentence to show next to its figures.
    pub fn blind_spot(self) -> &'static str {
        match self {
            Tracker::Prl => {
                "pages whose translation stays in the TLB, and accesses while a buffer is emptied"
            }
            Tracker::Pml => "pages that are only read, and how often a page is written",
            Tracker::Invalidation => "how often a page is used within an interval",
            Tracker::Sampling => "pages outside the sample: the error is that of a poll of that many pages",
            Tracker::AccessedBits => {
                "pages whose translation stays in the TLB, since clearing the bit does not flush it"
            }
            Tracker::Damon => "hot pages between cold ones: a region counts as a whole",
            Tracker::Mglru => "how often a page is used between two agings",
            Tracker::WrittenPages | Tracker::DirtyLog => "pages that are only read",
            Tracker::Exact => "nothing",
        }
    }

    /// Returns the tracker's advantage, as a sentence to show when it was chosen.
    pub fn merit(self) -> &'static str {
        match self {
            Tracker::Prl => {
                "it reports every page that a page walk reaches, by reads and writes, at no cost to the VM"
            }
            Tracker::Pml => "it reports every page written, in hardware",
            Tracker::Invalidation => "it sees every page that is read or written, and the TLB hides none",
            Tracker::Sampling => "it costs a hundred faults per window however large the VM is",
            Tracker::AccessedBits => "it sees reads and writes page by page, and needs nothing but root",
            Tracker::Damon => "it sees reads and writes at a cost that does not grow with the VM",
            Tracker::Mglru => "it sees reads and writes page by page, and looks only at memory in use",
            Tracker::WrittenPages => "it sees writes page by page",
            Tracker::DirtyLog => "the hypervisor keeps this log by itself",
            Tracker::Exact => "it is the truth, which a simulated host knows",
        }
    }
}

/// A stretch of guest memory that a tracker treats as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Region {
    /// The region's first guest frame.
    pub first: u64,
    /// The region's length.
    pub pages: Pages,
    /// In how many of the interval's looks the region was found used: at most the `looks` of [`UsedRef::Regions`].
    pub found: u32,
}

/// The memory that was found used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UsedRef<'a> {
    /// Guest frames in any order. A frame appears as many times as it was logged; a tracker that only knows *that* a page was
    /// used names it once.
    Frames(&'a [u64]),
    /// Stretches of memory, each with the number of readings in which it was found used.
    Regions {
        /// The stretches, which do not overlap.
        regions: &'a [Region],
        /// Number of readings in this interval, at least one.
        looks: u32,
    },
    /// A number of pages, from a tracker that does not identify them.
    Amount {
        /// Pages used in this interval.
        used: Pages,
        /// Used pages that are part of larger pages (2 MiB). Using any part of a larger page counts all of it.
        coarse: Pages,
    },
    /// How many pages of a random sample were used.
    Sample {
        /// Pages of the sample found used so far.
        used: u32,
        /// Pages in the sample, at least 1.
        drawn: u32,
        /// Whether the interval is over. If not, this is an interim result.
        complete: bool,
    },
}

/// A tracker's observation of one VM in one interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservationRef<'a> {
    /// The tracker.
    pub tracker: Tracker,
    /// End of the interval, on any monotonic clock.
    pub at: Ns,
    /// Length of the interval.
    pub interval: Ns,
    /// Memory that the VM has when the interval ends. Plugging and ballooning change it.
    pub memory: Pages,
    /// The VM's highest guest frame plus one. This is more than `memory` if guest memory has holes.
    pub frames: u64,
    /// The memory that was found used.
    pub seen: UsedRef<'a>,
    /// Number of accesses that the tracker knows to have lost.
    pub lost: u64,
    /// The most memory that may be in use without the tracker seeing it. For logs of page walks and for accessed bits, that is
    /// the memory that the TLBs map.
    pub blind: Pages,
}

/// An owned [`ObservationRef`], kept in a [`crate::VmSample`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Observation {
    /// The tracker.
    pub tracker: Tracker,
    /// End of the window, on the clock of [`crate::Sample::at`].
    pub at: Ns,
    /// Actual length of the window.
    pub interval: Ns,
    /// Memory that the VM had when the window ended.
    pub memory: Pages,
    /// The VM's highest guest frame plus one.
    pub frames: u64,
    /// The memory that was found used.
    pub found: Used,
    /// Number of accesses that the tracker knows to have lost; see [`ObservationRef::lost`].
    pub lost: u64,
    /// The most memory that may be in use without the tracker seeing it; see [`ObservationRef::blind`].
    pub blind: Pages,
    /// CPU time that the host spent on looking in this window. Costs to the VM itself are not included.
    pub cost: Ns,
}

/// An owned [`UsedRef`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Used {
    /// [`UsedRef::Frames`].
    Frames {
        /// Guest frames.
        frames: Vec<u64>,
    },
    /// [`UsedRef::Regions`].
    Regions {
        /// The stretches.
        regions: Vec<Region>,
        /// Number of looks.
        looks: u32,
    },
    /// [`UsedRef::Amount`].
    Amount {
        /// Pages used.
        used: Pages,
        /// Used pages that are part of larger pages.
        coarse: Pages,
    },
}

impl Observation {
    /// Returns the observation in the form that the estimators take.
    pub fn as_observation(&self) -> ObservationRef<'_> {
        ObservationRef {
            tracker: self.tracker,
            at: self.at,
            interval: self.interval,
            memory: self.memory,
            frames: self.frames,
            seen: match &self.found {
                Used::Frames { frames } => UsedRef::Frames(frames),
                Used::Regions { regions, looks } => UsedRef::Regions {
                    regions,
                    looks: *looks,
                },
                Used::Amount { used, coarse } => UsedRef::Amount {
                    used: *used,
                    coarse: *coarse,
                },
            },
            lost: self.lost,
            blind: self.blind,
        }
    }
}

/// Whether a tracker is available on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackerChoice {
    /// The tracker.
    pub tracker: Tracker,
    /// Why the tracker cannot be used, with the remedy if there is one; `None` if it can.
    pub why_not: Option<String>,
}

//! What a tracker saw of a VM's memory: the input of `policy::working_set`, the same from a live host, the twin and models.
//!
//! A *tracker* is a mechanism that tells which guest memory is used: a log of page walks, accessed bits, DAMON, faults on pages
//! that were made invalid. Each sees something else, so an [`ObservationRef`] names its tracker, and says how long it looked and
//! what escaped it. Nothing is judged here: what is hot, and how large the working set is, is for the policy to say.
//!
//! # Contract
//!
//! - One observation per interval, in order of time; intervals do not overlap.
//! - Frames are guest frames of 4 KiB whatever the mapping's page size. A tracker that sees larger pages names each of their
//!   frames, or gives [`UsedRef::Regions`], or says how much of its [`UsedRef::Amount`] is coarse.
//! - Frames are a guest's or a kernel's word: who reads them leaves out those beyond [`ObservationRef::frames`] and counts them.

use homenode_units::{Ns, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A mechanism that tells which guest memory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tracker {
    /// Page reference logging [PRL, section 4], modelled: every page walk is logged.
    Prl,
    /// Page modification logging: the first write to a page is logged.
    Pml,
    /// Faults on all pages, made invalid in each interval.
    Invalidation,
    /// Faults on some pages, drawn anew for each interval and made invalid (ESX).
    Sampling,
    /// Accessed bits of page tables, cleared in each interval.
    AccessedBits,
    /// DAMON, which samples one page of each of its regions.
    Damon,
    /// Generations of the kernel's multi-generational LRU.
    Mglru,
    /// Pages written since they were write-protected (`PAGEMAP_SCAN`).
    WrittenPages,
    /// KVM's log of dirty pages, as a bitmap or a ring.
    DirtyLog,
    /// The exact set, kept by an emulator.
    Exact,
}

/// Which accesses a tracker sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Sees {
    /// Reads and writes.
    All,
    /// Writes only: pages that are read are missing from what it says.
    Writes,
}

impl Tracker {
    /// Name for people and in JSON.
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

    /// Which accesses it sees.
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

    /// What it cannot see, in a sentence to be shown beside its figures.
    pub fn blind_spot(self) -> &'static str {
        match self {
            Tracker::Prl => {
                "pages whose translation stays in the TLB are not walked to, and what comes while a buffer is emptied is lost"
            }
            Tracker::Pml => "pages that are only read, and how often a page is written",
            Tracker::Invalidation => "how often a page is used within an interval",
            Tracker::Sampling => "all but the sample: the error is that of a poll of so many pages",
            Tracker::AccessedBits => {
                "pages whose translation stays in the TLB, since clearing the bit does not flush it"
            }
            Tracker::Damon => "hot pages between cold ones: a region counts as a whole",
            Tracker::Mglru => "how often a page is used between two agings",
            Tracker::WrittenPages | Tracker::DirtyLog => "pages that are only read",
            Tracker::Exact => "nothing",
        }
    }

    /// What speaks for it, in a sentence to be shown where it was chosen.
    pub fn merit(self) -> &'static str {
        match self {
            Tracker::Prl => "it names every page walked to, reads and writes, at no cost to the VM",
            Tracker::Pml => "it names every page written, in hardware",
            Tracker::Invalidation => "it sees every page used, reads and writes, and no TLB hides any",
            Tracker::Sampling => "it costs a hundred faults per window however large the VM is",
            Tracker::AccessedBits => "it sees reads and writes page by page, and needs nothing but root",
            Tracker::Damon => "it sees reads and writes at a cost that does not grow with the VM",
            Tracker::Mglru => "it sees reads and writes page by page, and looks only at memory in use",
            Tracker::WrittenPages => "it sees writes page by page",
            Tracker::DirtyLog => "the hypervisor keeps it by itself",
            Tracker::Exact => "it is the truth, which a simulated host knows",
        }
    }
}

/// A stretch of guest memory that a tracker treats as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Region {
    /// Its first guest frame.
    pub first: u64,
    /// Its length.
    pub pages: Pages,
    /// In how many of the interval's looks it was found used; at most [`UsedRef::Regions`]' `looks`.
    pub found: u32,
}

/// What was seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UsedRef<'a> {
    /// Guest frames in any order, each as often as it was logged; a tracker that only knows *that* a page was used names it
    /// once.
    Frames(&'a [u64]),
    /// Stretches of memory, and in how many of `looks` looks each was found used.
    Regions {
        /// The stretches; they do not overlap.
        regions: &'a [Region],
        /// How often the tracker looked in this interval, at least once.
        looks: u32,
    },
    /// A number of pages, where the tracker does not tell which.
    Amount {
        /// Used in this interval.
        used: Pages,
        /// Of them, pages that are part of larger ones (2 MiB): one use of any counts the whole.
        coarse: Pages,
    },
    /// How many of some pages drawn at random were used.
    Sample {
        /// Used so far.
        used: u32,
        /// Drawn, at least 1.
        drawn: u32,
        /// Whether the interval is over, or this is a look into a running one.
        complete: bool,
    },
}

/// What a tracker saw of one VM in one interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservationRef<'a> {
    /// Who saw it.
    pub tracker: Tracker,
    /// End of the interval, on any monotonic clock.
    pub at: Ns,
    /// Length of the interval.
    pub interval: Ns,
    /// Memory that the VM has at its end: it changes where memory is plugged or ballooned.
    pub memory: Pages,
    /// One past the highest guest frame that the VM has; more than `memory` where guest memory has holes.
    pub frames: u64,
    /// What was seen.
    pub seen: UsedRef<'a>,
    /// Accesses that the tracker knows it lost, where it knows.
    pub lost: u64,
    /// Most memory that may be in use although the tracker does not see it: for logs of walks and accessed bits what the
    /// TLBs hold.
    pub blind: Pages,
}

/// An [`ObservationRef`] with storage of its own, as a [`crate::VmSample`] carries it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Observation {
    /// Who saw it.
    pub tracker: Tracker,
    /// End of the window, on the clock of [`crate::Sample::at`].
    pub at: Ns,
    /// Its length, as it was.
    pub interval: Ns,
    /// Memory that the VM had at its end.
    pub memory: Pages,
    /// One past the highest guest frame.
    pub frames: u64,
    /// What was seen.
    pub found: Used,
    /// As [`ObservationRef::lost`].
    pub lost: u64,
    /// As [`ObservationRef::blind`].
    pub blind: Pages,
    /// CPU time of the host that looking took in this window; what the VM itself paid is not in it.
    pub cost: Ns,
}

/// [`UsedRef`], owned.
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
        /// Looks.
        looks: u32,
    },
    /// [`UsedRef::Amount`].
    Amount {
        /// Used.
        used: Pages,
        /// Of them in larger pages.
        coarse: Pages,
    },
}

impl Observation {
    /// As estimators read it.
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

/// Whether a host can use a tracker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackerChoice {
    /// Which.
    pub tracker: Tracker,
    /// Why not, with the remedy where there is one; `None` where it can.
    pub why_not: Option<String>,
}

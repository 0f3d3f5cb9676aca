//! Assigns the counts that a modelled PMU makes on an emulated host to the host's VMs.
//!
//! # Problem
//! The model ([`crate::modelled_pmu`]) counts for each CPU, and for each tag of the machine frame that was used. It does not know
//! VMs.
//!
//! # Approach
//! 1. Each VM gets a tag of its own. If no tag is left, the VM has no counters, and this is reported.
//! 2. The frames of its memory get that tag. For this, `pagemap` is read in parts of [`PART_PAGES`], at intervals that keep the
//!    cost within [`COST_SHARE`] (`frames`). A frame that the VM no longer uses loses the tag. Counters start once all memory was
//!    read.
//! 3. The growth of the tag's counts, summed over all CPUs, is divided among the VM's vCPUs in proportion to the time each ran.
//!
//! # What the figures are
//! - *References* and *misses* are those to the VM's memory, whichever CPU caused them. They are exact for a VM with one vCPU;
//!   for several vCPUs the VM's sum is divided. Three kinds are not assigned: the host's work for the VM in the host's own
//!   memory, which a real PMU would count; use of new frames until the next reading; and any use of frames that several processes
//!   map (zeroes, KSM), unless the VM's memory is meant to be shared.
//! - *Cycles* are the time run at the machine's clock, or at 1 GHz if the clock is unknown, because the model has no time. So
//!   equation 3.1 yields misses per millisecond run.
//! - *Instructions* are those that a machine would have completed in the time run if an instruction takes one cycle, a reference
//!   [`LLC_CYCLES`] more, and a miss [`MEMORY_CYCLES`] or [`REMOTE_CYCLES`] more. Without this correction misses would not slow a
//!   VM, since emulated memory takes no time. The instructions that the VM really executed per reference are estimated from those
//!   of all CPUs, by time run. References and misses are scaled by the same factor, so that a VM that is slowed keeps its
//!   references per instruction.
//! - A VM's *accesses* and the controllers' *traffic* are numbers of samples times the sampling period. Lost samples are assumed
//!   to be distributed like the others.
//! - *Uses* of single pages are numbers of samples, not scaled ([`Sampler`]).
//!
//! # Trust
//! The model can be wrong, or stop. Counts that run backwards, and instructions that do not grow while this program runs, are
//! reported; there are then no counters until the counts grow again.
//!
//! # Properties (tests of the same names)
//! - What is counted for a frame goes to the VM that has the frame, also after it moved.
//! - Counts divided among vCPUs add up.
//! - Frames of a VM that went away belong to no VM, and its tag is free for the next.
//! - Samples go to the page whose frame they name, and show which nodes used it.

pub mod dealing;
mod frames;
mod samples;

use std::collections::BTreeMap;
use std::path::Path;

use homenode_formats::pmu_region::Page;
use homenode_host::{Accesses, Counters, PageUse};
use homenode_units::{NodeMap, Ns, VmId};

use crate::numa_maps::Range;
use crate::read::ReadError;
use crate::task::Process;

pub use dealing::{LLC_CYCLES, MEMORY_CYCLES, REMOTE_CYCLES};
pub use frames::{COST_SHARE, PART_PAGES};
pub use samples::Sampler;

pub(crate) use frames::Frames;
pub(crate) use samples::Samples;

use dealing::{Dealt, Pulse, State, of_tag};

/// Why a VM has no counters from the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCounted {
    /// All tags are used by other VMs.
    #[error("the modelled PMU can count {tags} VMs, and more than that are running")]
    NoTag {
        /// Number of tags for VMs.
        tags: u64,
    },
    /// The model's page covers less than the machine's memory.
    #[error(
        "some of its memory is beyond the {frames} frames that the modelled PMU covers; start the emulator's plugin with a larger `frames`"
    )]
    Beyond {
        /// Number of frames that the page covers.
        frames: u64,
    },
    /// Counts that should only grow went backwards.
    #[error("the modelled PMU's counts decreased")]
    Backwards,
    /// No CPU started an instruction, although this program ran.
    #[error(
        "the modelled PMU counts nothing; does the emulator run with the plugin, and does it map the plugin's file?"
    )]
    Silent,
    /// The VM's frames cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// A VM to assign counts to.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The VM's identity.
    pub id: VmId,
    /// The VM's QEMU process.
    pub process: Process,
    /// The VM's memory.
    pub ranges: &'a [Range],
    /// Time for which each of the VM's vCPUs ran, by index.
    pub ran: &'a BTreeMap<u16, Ns>,
}

/// Assigns a modelled PMU's counts to VMs. A host may have only one instance, since it owns the tags.
#[derive(Debug)]
pub struct Attribution {
    page: Page<'static>,
    pulse: Pulse,
    /// The sampler, or why there are no samples.
    sampler: Result<Sampler, String>,
    /// Free tags. The last one is used next.
    free: Vec<u8>,
    vms: BTreeMap<VmId, Tagged>,
}

/// A VM with a tag.
#[derive(Debug)]
struct Tagged {
    tag: u8,
    /// The frames that have the tag, by page.
    frames: Frames,
    /// Counts assigned since all memory was read once.
    dealt: Dealt,
    accesses: Option<Accesses>,
}

impl Attribution {
    /// Starts with all frames untagged, whatever an earlier agent had tagged. `clock_hz` is the machine's clock, if known.
    /// Without a sampler, `sampler` holds the reason.
    pub fn new(page: Page<'static>, clock_hz: Option<u64>, sampler: Result<Sampler, String>) -> Attribution {
        page.clear_tags();
        let tags = page.layout().tags.min(256) as u16;
        Attribution {
            page,
            pulse: Pulse::new(page, clock_hz),
            sampler,
            free: (1..tags).rev().map(|tag| tag as u8).collect(),
            vms: BTreeMap::new(),
        }
    }

    /// Begins a look at all VMs. `busy` is the busy time of all CPUs. This asks the emulator to count, which takes most of its
    /// speed.
    pub fn begin(&mut self, busy: Ns) {
        self.pulse.beat(busy);
        if let Ok(sampler) = &mut self.sampler {
            sampler.look();
        }
    }

    /// Returns the counters of a VM's vCPUs, by index; `None` if there are none yet, or the VM has just ended.
    ///
    /// # Errors
    /// Returns a sentence for the host's operator.
    pub fn counters(
        &mut self,
        root: &Path,
        at: Ns,
        seen: Seen<'_>,
    ) -> Result<Option<BTreeMap<u16, Counters>>, NotCounted> {
        let is_another = |vm: &Tagged| !vm.frames.is_of(seen.process, seen.ranges);
        if self.vms.get(&seen.id).is_some_and(is_another) {
            self.forget(seen.id);
        }
        if !self.vms.contains_key(&seen.id) {
            let tags = self.page.layout().tags - 1;
            let tag = self.free.pop().ok_or(NotCounted::NoTag { tags })?;
            self.vms.insert(seen.id, Tagged::new(tag, &seen));
        }
        let page = self.page;
        let vm = self.vms.get_mut(&seen.id).expect("there, or just put there");
        let frames = page.layout().frames;
        let mut changed = |before: &[u32], now: &[u32]| retag(page, vm.tag, before, now);
        let found = vm.frames.follow(root, at, frames, &mut changed);
        if found?.is_none() {
            return Ok(None);
        }
        if vm.frames.is_beyond() {
            vm.dealt.interrupt();
            return Err(NotCounted::Beyond { frames });
        }
        match self.pulse.state() {
            State::Unknown => return Ok(None),
            State::Silent => return Err(NotCounted::Silent),
            State::Counting if !vm.frames.is_read() => return Ok(None),
            State::Counting => {}
        }
        let sampled = self.sampler.as_ref().ok().and_then(|sampler| sampler.tag(vm.tag));
        let sampled = sampled.filter(|sampled| sampled.local + sampled.remote > 0);
        let local = sampled.map_or(1.0, |sampled| {
            sampled.local as f64 / (sampled.local + sampled.remote) as f64
        });
        let speed = self.pulse.speed(local);
        vm.dealt.deal(of_tag(page, vm.tag), seen.ran, speed).map(Some)
    }

    /// Returns why it is unknown which node uses which page; `None` if it is known.
    pub fn no_samples(&self) -> Option<&str> {
        self.sampler.as_ref().err().map(String::as_str)
    }

    /// Returns the bytes that each node's controllers have moved since the start; empty without samples.
    pub fn traffic(&self) -> NodeMap<u64> {
        let sampler = self.sampler.as_ref().ok();
        sampler
            .map(|sampler| sampler.traffic().clone())
            .unwrap_or_default()
    }

    /// Returns a VM's memory accesses, by the node of the memory. Call this once after each [`Attribution::begin`]. `None` until
    /// all of the VM's memory was read.
    pub fn accesses(&mut self, vm: VmId) -> Option<Accesses> {
        let sampler = self.sampler.as_ref().ok()?;
        let vm = self.vms.get_mut(&vm).filter(|vm| vm.frames.is_read())?;
        match (&mut vm.accesses, sampler.tag(vm.tag)) {
            (Some(accesses), Some(since)) => samples::add(accesses, since),
            (Some(_), None) => {}
            // At the first reading some samples are from another VM, which used the frames before they got this tag.
            (none, _) => *none = Some(sampler.nothing()),
        }
        vm.accesses.clone()
    }

    /// Returns which nodes used which pages of a VM between the last two calls of [`Attribution::begin`]; `None` until all of the
    /// VM's memory was read.
    pub fn page_uses(&self, vm: VmId) -> Option<Vec<PageUse>> {
        let sampler = self.sampler.as_ref().ok()?;
        let vm = self.vms.get(&vm).filter(|vm| vm.frames.is_read())?;
        Some(sampler.samples().uses(&vm.frames))
    }

    /// Releases the frames and tags of all VMs for which `vms` returns false.
    pub fn keep_only(&mut self, vms: impl Fn(VmId) -> bool) {
        let gone: Vec<VmId> = self.vms.keys().filter(|vm| !vms(**vm)).copied().collect();
        gone.into_iter().for_each(|vm| self.forget(vm));
    }

    fn forget(&mut self, vm: VmId) {
        if let Some(vm) = self.vms.remove(&vm) {
            let frames = vm.frames.by_page().iter();
            frames.for_each(|frame| untag(self.page, vm.tag, *frame));
            self.free.push(vm.tag);
        }
    }
}

/// Stops counting, so that the emulator regains its speed.
impl Drop for Attribution {
    fn drop(&mut self) {
        self.page.sample_every(0);
        self.page.rest();
    }
}

impl Tagged {
    fn new(tag: u8, seen: &Seen<'_>) -> Tagged {
        Tagged {
            tag,
            frames: Frames::new(seen.process, seen.ranges),
            dealt: Dealt::default(),
            accesses: None,
        }
    }
}

fn untag(page: Page<'_>, tag: u8, frame: u32) {
    // The frame may belong to another VM by now.
    if frame != 0 && page.tag(frame.into()) == tag {
        page.set_tag(frame.into(), 0);
    }
}

/// Moves a tag from the frames that pages had to those that they have now.
fn retag(page: Page<'_>, tag: u8, before: &[u32], now: &[u32]) {
    // Untag all frames that were left before tagging those in use: a frame may have passed from one page to another.
    for (before, now) in before.iter().zip(now) {
        if before != now {
            untag(page, tag, *before);
        }
    }
    for frame in now.iter().filter(|frame| **frame != 0) {
        if page.tag((*frame).into()) != tag {
            page.set_tag((*frame).into(), tag);
        }
    }
}

#[cfg(test)]
mod tests;

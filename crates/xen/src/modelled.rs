//! Assigns the counts that a modelled PMU makes on an emulated host to the host's domains ([`modelled_pmu`]).
//!
//! # Problem
//! The model counts for each CPU, and for each tag of the machine frame that was used. It does not know domains. Hardware has no
//! such model, and stock Xen lets dom0 count nothing; this module is not used there.
//!
//! # Approach
//! 1. Each PV domain gets a tag of its own, and so do the frames that Xen reports as the domain's. At first Xen is asked about
//!    pieces of [`PIECE`] frames. If this finds less than 19 in 20 of the domain's pages, Xen is asked about [`PART_FRAMES`]
//!    frames per look until all of the machine's frames were covered. All of this is repeated when the domain's number of pages
//!    has changed, and every [`FRAMES_EVERY`]. There are no counters before the first pass ends.
//! 2. For PVH and HVM domains Xen reports no frames. They are assigned the untagged counts of the CPUs that their vCPUs ran on,
//!    divided among the domains of this kind on a CPU by the time that each ran there. dom0's own frames then have a tag, so that
//!    their counts go to no domain.
//! 3. The growth of a domain's counts is divided among its vCPUs ([`dealing`]).
//!
//! # What the figures are
//! They are as in [`homenode_kernel::attribution`], except that no misses are sampled: local memory is assumed to serve all of
//! them. Under point 2, Xen's own work on a CPU counts for the domain too, and a vCPU that changed its CPU since the last reading
//! is assumed to have been on the new CPU all the time.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use homenode_formats::pmu_region::{Counts, Page};
use homenode_host::Counters;
use homenode_kernel::attribution::NotCounted;
use homenode_kernel::attribution::dealing::{self, Dealt, Pulse, State};
use homenode_kernel::now;
use homenode_units::{CpuId, Ns, VmId};

use crate::domain::Domain;
use crate::error::CallError;
use crate::hypervisor::Hypervisor;

/// How often frames are queried again if a domain's number of pages does not change.
const FRAMES_EVERY: Ns = Ns::from_secs(60);
/// Number of frames to query per look for each domain: 128 MiB.
const PART_FRAMES: u64 = 32_768;
/// Unit in which Xen allocates most memory, in frames: 2 MiB.
const PIECE: u64 = 512;
/// Share of misses that local memory serves: all of them, since none are sampled.
const LOCAL: f64 = 1.0;

/// Why a domain has no counters from the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Why {
    /// The model does not count, or its counts cannot be assigned.
    #[error(transparent)]
    NotCounted(#[from] NotCounted),
    /// The domain's frames cannot be queried.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Counters of a domain's vCPUs; empty while too little is known.
pub(crate) type Counted = BTreeMap<u16, Counters>;

/// Assigns a modelled PMU's counts to domains. A host may have only one instance, since it owns the tags.
#[derive(Debug)]
pub(crate) struct Model {
    page: Page<'static>,
    pulse: Pulse,
    /// Free tags. The last one is used next.
    free: Vec<u8>,
    domains: BTreeMap<VmId, Known>,
    /// dom0's frames, tagged as soon as there is a domain whose frames Xen does not report.
    dom0: Option<Frames>,
    /// Untagged counts of each CPU at the last reading.
    untagged: BTreeMap<CpuId, Counts>,
}

/// A domain whose counts are assigned.
#[derive(Debug)]
struct Known {
    /// The domain's number. A different number means another run.
    domid: u32,
    by: By,
    dealt: Dealt,
}

/// How the domain's counts are determined.
#[derive(Debug)]
enum By {
    Frames(Frames),
    /// From running time: the domain's counts so far, and how long its vCPUs had run at the last reading.
    Running(Counts, BTreeMap<u16, Ns>),
}

/// A domain's frames, which share a tag.
#[derive(Debug)]
struct Frames {
    tag: u8,
    /// The frame to continue from; `None` if all were queried.
    next: Option<u64>,
    is_read: bool,
    /// The domain's number of pages when the query began.
    pages: u64,
    next_read: Ns,
}

impl Model {
    /// Starts with all frames untagged, whatever an earlier agent had tagged. `clock_hz` is the machine's clock, if known.
    pub(crate) fn new(page: Page<'static>, clock_hz: Option<u64>) -> Model {
        page.clear_tags();
        let tags = page.layout().tags.min(256) as u16;
        Model {
            pulse: Pulse::new(page, clock_hz),
            page,
            free: (1..tags).rev().map(|tag| tag as u8).collect(),
            domains: BTreeMap::new(),
            dom0: None,
            untagged: BTreeMap::new(),
        }
    }

    /// Returns the counters of each domain's vCPUs, or why it has none. `busy` is the busy time of all CPUs.
    pub(crate) fn look(
        &mut self,
        hypervisor: &Hypervisor,
        domains: &BTreeMap<VmId, Domain>,
        busy: Ns,
    ) -> BTreeMap<VmId, Result<Counted, Why>> {
        self.pulse.beat(busy);
        self.forget_ended(domains);
        let mut told = BTreeMap::new();
        for (vm, domain) in domains {
            if let Err(why) = self.follow(hypervisor, *vm, domain) {
                told.insert(*vm, Err(why));
            }
        }
        self.deal_untagged(domains);
        for (vm, domain) in domains {
            if !told.contains_key(vm)
                && let Some(counted) = self.deal(*vm, domain).transpose()
            {
                told.insert(*vm, counted.map_err(Why::from));
            }
        }
        told
    }

    fn forget_ended(&mut self, domains: &BTreeMap<VmId, Domain>) {
        let is_over = |vm: &VmId, known: &Known| {
            domains
                .get(vm)
                .is_none_or(|domain| domain.run.runtime_id != known.domid)
        };
        let over = self.domains.iter().filter(|(vm, known)| is_over(vm, known));
        for vm in over.map(|(vm, _)| *vm).collect::<Vec<_>>() {
            if let Some(Known {
                by: By::Frames(of), ..
            }) = self.domains.remove(&vm)
            {
                (0..self.page.layout().frames).for_each(|frame| untag(self.page, of.tag, frame));
                self.free.push(of.tag);
            }
        }
    }

    /// Tags the frames that a domain has now, as far as this look covers them.
    fn follow(&mut self, hypervisor: &Hypervisor, vm: VmId, domain: &Domain) -> Result<(), Why> {
        let (domid, listed) = (domain.run.runtime_id, domain.listed);
        let known = match self.domains.entry(vm) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Known {
                domid,
                by: match listed.is_hvm {
                    true => By::Running(Counts::default(), times(domain)),
                    false => By::Frames(Frames::new(&mut self.free, self.page)?),
                },
                dealt: Dealt::default(),
            }),
        };
        match &mut known.by {
            By::Frames(of) => of.follow(self.page, hypervisor, (domid, listed.pages)),
            By::Running(..) => self.tag_dom0(hypervisor),
        }
    }

    /// Tags dom0's frames.
    fn tag_dom0(&mut self, hypervisor: &Hypervisor) -> Result<(), Why> {
        let Some(listed) = hypervisor.domain(0)? else {
            return Ok(());
        };
        let dom0 = match &mut self.dom0 {
            Some(dom0) => dom0,
            none => none.insert(Frames::new(&mut self.free, self.page)?),
        };
        dom0.follow(self.page, hypervisor, (0, listed.pages))
    }

    /// Divides the untagged counts among the domains whose frames are unknown, according to where each ran.
    fn deal_untagged(&mut self, domains: &BTreeMap<VmId, Domain>) {
        let mut grown = BTreeMap::new();
        for number in 0..self.page.layout().cpus {
            let (cpu, now) = (
                CpuId(number as u32),
                self.page.counts(number, 0).unwrap_or_default(),
            );
            let before = self.untagged.insert(cpu, now);
            let since = before.and_then(|before| dealing::grown(before, now));
            grown.insert(cpu, since.unwrap_or_default());
        }
        // For each CPU: the domains that have run on it since the last reading, and for how long.
        let mut ran: BTreeMap<CpuId, Vec<(VmId, Ns)>> = BTreeMap::new();
        for (vm, known) in &mut self.domains {
            let (By::Running(_, before), Some(domain)) = (&mut known.by, domains.get(vm)) else {
                continue;
            };
            for (index, vcpu) in &domain.vcpus {
                let since = before.insert(*index, vcpu.running).unwrap_or(vcpu.running);
                let time = vcpu.running.saturating_sub(since);
                ran.entry(vcpu.cpu).or_default().push((*vm, time));
            }
        }
        for (cpu, ran) in ran {
            let (references, misses) = grown.get(&cpu).copied().unwrap_or_default();
            let total: u128 = ran.iter().map(|(_, time)| u128::from(time.0)).sum();
            for (vm, time) in ran {
                let part = |count: u64| {
                    (u128::from(count) * u128::from(time.0))
                        .checked_div(total)
                        .unwrap_or(0) as u64
                };
                if let Some(Known {
                    by: By::Running(sum, _),
                    ..
                }) = self.domains.get_mut(&vm)
                {
                    sum.references = sum.references.wrapping_add(part(references));
                    sum.misses = sum.misses.wrapping_add(part(misses));
                }
            }
        }
    }

    /// Divides a domain's counts among its vCPUs; `None` while not enough is known.
    fn deal(&mut self, vm: VmId, domain: &Domain) -> Result<Option<Counted>, NotCounted> {
        match self.pulse.state() {
            State::Unknown => return Ok(None),
            State::Silent => return Err(NotCounted::Silent),
            State::Counting => {}
        }
        let Some(known) = self.domains.get_mut(&vm) else {
            return Ok(None);
        };
        let counts = match &known.by {
            By::Frames(of) if !of.is_read => return Ok(None),
            By::Frames(of) => dealing::of_tag(self.page, of.tag),
            By::Running(sum, _) => *sum,
        };
        let speed = self.pulse.speed(LOCAL);
        known.dealt.deal(counts, &times(domain), speed).map(Some)
    }
}

/// Stops counting, so that the emulator regains its speed.
impl Drop for Model {
    fn drop(&mut self) {
        self.page.rest();
    }
}

impl Frames {
    /// Starts with a tag and no frames.
    fn new(free: &mut Vec<u8>, page: Page<'_>) -> Result<Frames, NotCounted> {
        let tags = page.layout().tags - 1;
        Ok(Frames {
            tag: free.pop().ok_or(NotCounted::NoTag { tags })?,
            next: Some(0),
            is_read: false,
            pages: 0,
            next_read: Ns::ZERO,
        })
    }

    /// Queries the next part of the frames, if that is due.
    fn follow(
        &mut self,
        page: Page<'_>,
        hypervisor: &Hypervisor,
        (domid, pages): (u32, u64),
    ) -> Result<(), Why> {
        let at = now();
        if self.next.is_none() && (at >= self.next_read || pages != self.pages) {
            self.next = Some(0);
        }
        let Some(first) = self.next else {
            return Ok(());
        };
        if first == 0 {
            self.pages = pages;
        }
        let (last, most) = (hypervisor.frame_count()?, page.layout().frames);
        if last > most {
            return Err(NotCounted::Beyond { frames: most }.into());
        }
        if first == 0 && self.in_pieces(page, hypervisor, (domid, last))? * 20 >= pages * 19 {
            (self.next, self.is_read, self.next_read) = (None, true, at + FRAMES_EVERY);
            return Ok(());
        }
        let until = last.min(first + PART_FRAMES);
        let all: Vec<u64> = (first..until).collect();
        self.tag_those(page, hypervisor, domid, &all)?;
        self.next = Some(until).filter(|until| *until < last);
        if self.next.is_none() {
            self.is_read = true;
            self.next_read = at + FRAMES_EVERY;
        }
        Ok(())
    }
}

impl Frames {
    /// Searches pieces, the units in which Xen allocates memory. Takes those with a probed frame that belongs to the domain, and
    /// their neighbours. Returns how many of their frames belong to the domain.
    fn in_pieces(
        &self,
        page: Page<'_>,
        hypervisor: &Hypervisor,
        (domid, last): (u32, u64),
    ) -> Result<u64, CallError> {
        let probes: Vec<u64> = (PIECE / 2..last).step_by(PIECE as usize).collect();
        let hits = hypervisor.frames(domid, &probes)?;
        let beside = hits.iter().flat_map(|hit| {
            let piece = hit / PIECE;
            piece.saturating_sub(1)..=piece + 1
        });
        let pieces: BTreeSet<u64> = beside.collect();
        let all = pieces.iter().flat_map(|piece| piece * PIECE..(piece + 1) * PIECE);
        let all: Vec<u64> = all.filter(|frame| *frame < last).collect();
        self.tag_those(page, hypervisor, domid, &all)
    }

    /// Tags those of these frames (ascending) that belong to the domain. Returns how many there are.
    fn tag_those(
        &self,
        page: Page<'_>,
        hypervisor: &Hypervisor,
        domid: u32,
        all: &[u64],
    ) -> Result<u64, CallError> {
        let its = hypervisor.frames(domid, all)?;
        let count = its.len() as u64;
        let mut its = its.into_iter().peekable();
        for frame in all {
            match its.next_if_eq(frame) {
                Some(_) if page.tag(*frame) != self.tag => page.set_tag(*frame, self.tag),
                Some(_) => {}
                None => untag(page, self.tag, *frame),
            }
        }
        Ok(count)
    }
}

/// Removes a tag, unless the frame has another tag by now.
fn untag(page: Page<'_>, tag: u8, frame: u64) {
    if page.tag(frame) == tag {
        page.set_tag(frame, 0);
    }
}

/// Returns how long each vCPU has run so far.
fn times(domain: &Domain) -> BTreeMap<u16, Ns> {
    let times = domain.vcpus.iter().map(|(index, vcpu)| (*index, vcpu.running));
    times.collect()
}

//! The split driver model: how a VM's data gets from the driver domain, which owns the devices, into the VM's pages.
//!
//! # Model [Flip, section II.B]
//!
//! - A VM with a driver domain shares with it, for each direction, a *ring* of requests, and grants it the pages that the
//!   requests name. Each request of a program takes as many pages as its bytes fill. The data of packets is in pages of the
//!   driver domain, on its node. All pages of a VM's requests pass one backend thread of the driver domain after the device,
//!   first come, first served: the cost of a page there limits the backend's throughput.
//! - *Flip*: for each page the two domains exchange ownership. The guest hands over a page that it can spare and gets the driver
//!   domain's page under the same guest frame. The backend pays for the exchange, and the guest's vCPU for the shootdown of its
//!   old page.
//! - *Copy*: the backend copies each page into one of the guest's pages, as fast as one core's misses allow. Pages stay where
//!   they are, and the guest pays only for the notification.
//! - *Which pages*: they are drawn evenly, without replacement, from those that the guest turns over: its free pages and its
//!   program's. The pages that a program frees and allocates come from the same lists many times between two flips of one page
//!   ("those pages can be used by other applications"). Kernel pages stay. The driver domain draws in the same way from all but
//!   its kernel's pages. So the two are urns that exchange balls. For a VM of `g` such pages and a driver domain of `d` on
//!   another node, `d / (g + d) * (1 - exp(-n * (1/g + 1/d)))` of the VM's are remote after `n` flips. In the end both are mixed
//!   alike.
//! - With a *pool* ([`crate::flip_pool`]) a guest exchanges only pages of the pool, and no program uses those. The pages posted
//!   in the ring and those of unfinished requests count as used. The pool grows out of free pages and releases only pages on the
//!   VM's home nodes. Data for which a pool is too small is copied.
//! - Every [`SETTLE_PERIOD`] in which pages passed, counts are brought up to date, and the driver domain's vCPU works off
//!   the debt of its backend threads.
//!
//! Pages are conserved: an exchange changes the owner of a page, never the number of pages that a domain has.
//!
//! # Left out
//!
//! Lists of hot pages: a guest that first reuses the page freed last returns the page that it just got, and fewer of its flips
//! count. The node of a flipped page when a guest has several virtual nodes (refused). Packets that fill pages only in part.
//! Queues for the driver domain's CPUs: a backend continues while its vCPU waits, and runs its debt later.

use crate::flip_pool;
use homenode_units::{Ns, PAGE_BYTES, Pages};

use crate::index::VmIx;
use crate::scenario::Transfer;

/// Number of pages that a guest keeps posted in its receive ring: 256 entries of one page each (estimate: Linux's netfront,
/// recalled).
pub(crate) const RING_PAGES: u64 = 256;
/// Interval at which exchanges are drawn and the driver domain's work is run.
pub(crate) const SETTLE_PERIOD: Ns = Ns::from_secs(1);
/// CPU cycles of one exchange for the backend: its share of a hypercall, and changes to three tables (estimate: two VM exits,
/// `facts/simulators.md`, 3.3 item 8).
pub(crate) const FLIP_CYCLES: f64 = 3000.0;
/// CPU cycles of one page for the backend in addition to the copy. A patch to Linux' netback that avoids grant copies has
/// 2.04 million packets of 64 bytes per second to a guest "versus half of it with grant copy", on a Xeon E5-2699 v3 of
/// 2.3 GHz (J. Martins, "xen-netback: use gref mappings for Rx requests").
pub(crate) const COPY_CYCLES: f64 = 2255.0;
/// CPU cycles of a packet for the backend of a network: the mean of both directions. To a guest as above. From a guest the
/// same author has 1.24 million packets per second with grants that are mapped for each packet, 1855 cycles.
pub(crate) const PACKET_CYCLES: f64 = (COPY_CYCLES + 1855.0) / 2.0;
/// CPU cycles of a page for the guest, besides a shootdown: grant and notification, for a flip or a copy (estimate: half an
/// exit).
pub(crate) const GRANT_CYCLES: f64 = 750.0;
/// At most one part in this many of the smaller urn is exchanged at a time. A larger part would hide that a page may go to and
/// fro.
const PART_MAX: u64 = 64;

/// Cost of one page, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageCost {
    pub guest_ns: f64,
    pub backend_ns: f64,
}

/// A pool, and the size up to which it may grow.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub config: flip_pool::Config,
    pub most: u64,
}

/// Channel that carries a VM's I/O to its driver domain.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    /// The driver domain's position among the VMs.
    pub driver: VmIx,
    pub transfer: Transfer,
    pub pool: Option<Pool>,
    /// Pages of the ring that passed since the last settling.
    pub passed: u64,
    /// Bytes of a page that is not full yet.
    carry: f64,
    /// Time at which the backend has passed on all that it got, in nanoseconds.
    free_ns: f64,
    /// CPU time that the backend owes its driver domain's vCPU.
    pub owed_ns: f64,
    /// Whether a settling timer is set.
    pub timer_set: bool,
    pub flipped: u64,
    pub copied: u64,
    pub backend_ns: f64,
    /// Largest number of pages that were used at once.
    pub used_max: u64,
}

impl Channel {
    pub(crate) fn new(driver: VmIx, transfer: Transfer, pool: Option<Pool>) -> Channel {
        Channel {
            driver,
            transfer,
            pool,
            passed: 0,
            carry: 0.0,
            free_ns: 0.0,
            owed_ns: 0.0,
            timer_set: false,
            flipped: 0,
            copied: 0,
            backend_ns: 0.0,
            used_max: RING_PAGES,
        }
    }

    /// Carries over the counts of an earlier life of the channel's VM.
    pub(crate) fn counts_on(&mut self, earlier: &Channel) {
        self.flipped = earlier.flipped;
        self.copied = earlier.copied;
        self.backend_ns = earlier.backend_ns;
        self.timer_set = earlier.timer_set;
    }

    /// Passes on what a device completes at `done`. Returns when the guest has it, and the cost to the guest's vCPU.
    pub(crate) fn pass(&mut self, bytes: f64, done: Ns, cost: PageCost) -> (Ns, f64) {
        let pages = bytes / PAGE_BYTES as f64;
        self.carry += pages;
        let whole = self.carry as u64;
        self.carry -= whole as f64;
        self.passed += whole;
        let backend_ns = pages * cost.backend_ns;
        self.free_ns = self.free_ns.max(done.as_f64()) + backend_ns;
        self.owe(backend_ns);
        (Ns(libm::ceil(self.free_ns) as u64), pages * cost.guest_ns)
    }

    /// Adds time that the driver domain's vCPU will run on behalf of this VM.
    pub(crate) fn owe(&mut self, ns: f64) {
        self.owed_ns += ns;
        self.backend_ns += ns;
    }

    /// Returns how many of the passed pages are flipped, with a pool of `size` pages of which `used` are used. The others are
    /// copied.
    pub(crate) fn split(&mut self, size: u64, used: u64) -> u64 {
        self.used_max = self.used_max.max(used);
        let passed = std::mem::take(&mut self.passed);
        let flips = match (self.transfer, &self.pool) {
            (Transfer::Copy, _) => 0,
            (Transfer::Flip, Some(_)) if used > size => {
                (u128::from(passed) * u128::from(size) / u128::from(used)) as u64
            }
            (Transfer::Flip, _) => passed,
        };
        self.flipped += flips;
        self.copied += passed - flips;
        flips
    }
}

impl Pool {
    /// Returns the size that the pool gets after `flips` flips.
    pub(crate) fn sized(&self, size: u64, used: u64, flips: u64) -> u64 {
        let sized = self
            .config
            .after_flips(Pages(size), Pages(used), Pages(self.most), flips);
        sized.0
    }
}

/// Splits `flips` exchanges between a guest and its driver domain into parts. The caller draws each side's pages evenly with
/// `lift` and puts them in the other's place with `lay`. Going part by part, a page may come back.
pub(crate) fn rounds(flips: u64, guest: u64, driver: u64) -> impl Iterator<Item = u64> {
    let part = (guest.min(driver) / PART_MAX).max(1);
    let urns = guest > 0 && driver > 0;
    let (whole, rest) = if urns {
        (flips / part, flips % part)
    } else {
        (0, 0)
    };
    std::iter::repeat_n(part, whole as usize).chain((rest > 0).then_some(rest))
}

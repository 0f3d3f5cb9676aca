//! The split driver model: how a VM's data gets from the driver domain, which owns the devices, into the VM's pages.
//!
//! # Model [Flip, section II.B]
//!
//! - A VM with a driver domain has, in each direction, a *ring* of requests shared with it, and grants on the pages that they
//!   name. Each request of a program takes as many pages as its bytes fill; data of packets is in pages of the driver domain,
//!   on its node. All pages of a VM's requests pass one backend thread of the driver domain, first come, first served, after
//!   the device: the cost of a page there limits the backend's throughput.
//! - *Flip*: for each page the two exchange ownership. The guest hands over a page that it can spare and gets the driver
//!   domain's, under the same guest frame. The backend pays the exchange, and the guest's vCPU the shootdown of its old page.
//! - *Copy*: the backend copies each page into one of the guest's, as fast as one core's misses allow; pages stay where they
//!   are, and the guest pays the notification only.
//! - *Which pages*: drawn evenly, without replacement, from those that the guest turns over: its free ones and its program's,
//!   since the pages that a program frees and takes again come from the same lists many times between two flips of one page
//!   ("those pages can be used by other applications"). Kernel pages stay. The driver domain does the same with all but its
//!   kernel's. So the two are urns that exchange balls: a VM of `g` such pages and a driver domain of `d` on another node have,
//!   after `n` flips, `d / (g + d) * (1 - exp(-n * (1/g + 1/d)))` of them remote. It ends where both are mixed alike.
//! - With a *pool* ([`crate::flip_pool`]) a guest exchanges pages of the pool only, and no program uses those. Used
//!   are the pages posted in the ring and those of unfinished requests. The pool grows out of free pages and releases only
//!   pages at home. Data for which a pool is too small is copied.
//! - Every [`SETTLE_PERIOD`] in which pages passed, counts are brought up to date, and the driver domain's vCPU works off
//!   the debt of its backend threads.
//!
//! Pages are conserved: an exchange changes the owner of a page, never how many pages a domain has.
//!
//! # Left out
//!
//! Lists of hot pages: a guest that reuses the page freed last returns the one it just got, and fewer of its flips count.
//! The node of a flipped page when a guest has several virtual nodes (refused). Packets that fill pages in part only. Queues
//! for the driver domain's CPUs: a backend goes on while its vCPU waits, and runs its debt later.

use crate::flip_pool;
use homenode_units::{Ns, PAGE_BYTES, Pages};

use crate::index::VmIx;
use crate::scenario::Transfer;

/// Pages that a guest keeps posted in its receive ring: 256 entries of one page each (estimate: Linux's netfront, recalled).
pub(crate) const RING_PAGES: u64 = 256;
/// How often exchanges are drawn and the driver domain's work is run.
pub(crate) const SETTLE_PERIOD: Ns = Ns::from_secs(1);
/// Cost of one exchange for the backend: its share of a hypercall, and three tables to change (estimate: two VM exits,
/// `facts/simulators.md`, 3.3 item 8).
pub(crate) const FLIP_CYCLES: f64 = 3000.0;
/// Cost of one page for the backend in addition to the copy: its share of a hypercall for many (estimate: half an exit).
pub(crate) const COPY_CYCLES: f64 = 750.0;
/// Cost of either for the guest in addition to a shootdown: grant and notification (estimate: half an exit).
pub(crate) const GRANT_CYCLES: f64 = 750.0;
/// Largest part of the smaller urn that is exchanged at a time: more would hide that a page may go to and fro.
const PART_MAX: u64 = 64;

/// Cost of one page, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageCost {
    pub guest_ns: f64,
    pub backend_ns: f64,
}

/// A pool, and how far it may grow.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub config: flip_pool::Config,
    pub most: u64,
}

/// Channel of a VM's I/O to its driver domain.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    /// Number of the driver domain among the VMs.
    pub driver: VmIx,
    pub transfer: Transfer,
    pub pool: Option<Pool>,
    /// Pages of the ring that passed since the last settling.
    pub passed: u64,
    /// Bytes of a page that is not full.
    carry: f64,
    /// When the backend has passed on all that it got.
    free_ns: f64,
    /// Time that the backend owes its driver domain's vCPU.
    pub owed_ns: f64,
    /// Whether a timer to settle is set.
    pub timer_set: bool,
    pub flipped: u64,
    pub copied: u64,
    pub backend_ns: f64,
    /// Most pages that were used at once.
    pub used_max: u64,
}

impl Channel {
    pub fn new(driver: VmIx, transfer: Transfer, pool: Option<Pool>) -> Channel {
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

    /// Carries over the counts of an earlier life of its VM.
    pub fn counts_on(&mut self, earlier: &Channel) {
        self.flipped = earlier.flipped;
        self.copied = earlier.copied;
        self.backend_ns = earlier.backend_ns;
        self.timer_set = earlier.timer_set;
    }

    /// Passes on what a device has done at `done`: returns when the guest has it, and its cost for the guest's vCPU.
    pub fn pass(&mut self, bytes: f64, done: Ns, cost: PageCost) -> (Ns, f64) {
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

    /// Adds time that the driver domain's vCPU will run for this VM.
    pub fn owe(&mut self, ns: f64) {
        self.owed_ns += ns;
        self.backend_ns += ns;
    }

    /// Returns how many of the pages that passed are flipped, with a pool of `size` pages and `used` of them used; the
    /// others are copied.
    pub fn split(&mut self, size: u64, used: u64) -> u64 {
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
    /// Returns the size that it gets after `flips` flips.
    pub fn sized(&self, size: u64, used: u64, flips: u64) -> u64 {
        let sized = self
            .config
            .after_flips(Pages(size), Pages(used), Pages(self.most), flips);
        sized.0
    }
}

/// Exchanges `flips` pages of a guest for as many of its driver domain's, each drawn evenly by `lift` and put in the other's
/// place by `lay`; part by part, so that a page may come back.
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

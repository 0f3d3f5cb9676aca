//! A guest with one vCPU on the access-level model, and an estimator that reads the guest's log of pages.

use homenode_policy::working_set::{Estimate, Estimator, Logged, ObservationRef, Tracker, UsedRef};
use homenode_tracking::paging::{Buffer, Costs, Exit, Flags, Guest, Handler, Mode, Options, Step, Vcpu};
use homenode_tracking::tlb::{Access, PageSize, core};
use homenode_units::{Ns, Pages};

/// Frames of a VM of 1 GiB [PRL, section 3.1].
pub(super) const FRAMES: u64 = 1 << 18;
/// Number of 4-KiB pages of the array: 400 MB (section 3.1) as the paper counts them.
pub(super) const ARRAY: u64 = 102_400;

/// Duration of a cycle of the machine, in nanoseconds: 3.4 GHz.
const CYCLE_NS: f64 = 1.0 / 3.4;
/// Time of a VM exit and entry: 1228 cycles, Xen's hypercall on x86 (Dall and others, ISCA 2016, table II, recalled).
const EXIT_NS: f64 = 1228.0 * CYCLE_NS;
/// Time of a fault on a guest's page, as `data/experiments/page-logs/costs.toml` derives it from Xen's source.
pub(super) const FAULT_NS: f64 = EXIT_NS + 520.0;
/// Time of an interrupt to another CPU: native, from the machine file.
const IPI_NS: f64 = 900.0;
/// Time to copy and count an entry: the figure of the estimator's benchmark, rounded up.
const ENTRY_NS: f64 = 10.0;
/// Writing and refreshing an index: a `VMWRITE` and the paper's new instruction, estimated.
const REFRESH_NS: f64 = 100.0;

/// Costs of a run of PRL's handler.
pub(super) const HANDLER: Costs = Costs {
    begin_ns: IPI_NS + EXIT_NS,
    entry_ns: ENTRY_NS,
    refresh_ns: REFRESH_NS,
};

/// The running guest.
pub(crate) struct Model {
    guest: Guest,
    vcpu: [Vcpu; 1],
    handler: Handler,
    frames: Vec<u64>,
    kernel: u64,
    now_ns: f64,
    window_ns: f64,
    lost: u64,
}

/// Returns the guest frame of a page. Frames are scattered, as in a real guest, and unique.
pub(super) fn frame(page: u64) -> u64 {
    page.wrapping_mul(40_503) % FRAMES
}

impl Model {
    /// Creates a guest that uses this number of pages, and that logs in this mode.
    pub(crate) fn new(pages: u64, mode: Mode, entries: u16, options: Options) -> Model {
        // The guest's page tables have frames beyond those tracked here, because they belong to the guest's kernel.
        let mut guest = Guest::new(2 * FRAMES, FRAMES, PageSize::Small, Flags::Kept);
        let space = guest.tables.space().expect("frames for tables");
        for page in 0..pages {
            let mapped = guest.tables.map(space, page, frame(page), PageSize::Small);
            mapped.expect("frames for tables");
        }
        let core = core("i7_pml").expect("a core of the list");
        Model {
            guest,
            vcpu: [Vcpu::new(core, Buffer::new(mode, entries, options))],
            handler: Handler::new(HANDLER),
            frames: Vec::new(),
            kernel: 0,
            now_ns: 0.0,
            window_ns: 0.0,
            lost: 0,
        }
    }

    /// Accesses a page. `takes_ns` is the time that the program itself takes for the access.
    #[inline]
    pub(crate) fn access(&mut self, page: u64, access: Access, takes_ns: f64) {
        self.now_ns += takes_ns;
        self.handler
            .advance(self.now_ns, &mut self.vcpu, &mut self.frames);
        loop {
            match self.vcpu[0].access(&mut self.guest, page, access) {
                Step::Hit | Step::Walked => return,
                Step::Raised => return self.handler.raise(self.now_ns),
                Step::Exit(Exit::LogFull) => self.empty(),
                Step::Exit(exit) => unreachable!("the model's guest maps what it uses: {exit:?}"),
            }
        }
    }

    /// Drains and restarts the log, as the hypervisor does.
    fn empty(&mut self) {
        let log = &mut self.vcpu[0].log;
        self.frames.extend(log.contents());
        log.reset();
        log.refresh();
    }

    /// Ends an interval, and returns the estimator's estimate.
    pub(crate) fn close(&mut self, estimator: &mut Logged, interval: Ns) -> Estimate {
        let tracker = match self.vcpu[0].log.mode() {
            Mode::Pml => Tracker::Pml,
            Mode::Paml | Mode::Off => Tracker::Prl,
        };
        if tracker == Tracker::Pml {
            self.empty();
        }
        self.window_ns += interval.as_f64();
        // Page tables belong to the kernel and are counted separately.
        let all = self.frames.len();
        self.frames.retain(|frame| *frame < FRAMES);
        self.kernel += (all - self.frames.len()) as u64;
        let lost = self.lost();
        let seen = ObservationRef {
            tracker,
            at: Ns(self.window_ns as u64),
            interval,
            memory: Pages(FRAMES),
            frames: FRAMES,
            seen: UsedRef::Frames(&self.frames),
            lost: lost - self.lost,
            blind: Pages(self.vcpu[0].tlb().reach(PageSize::Small)),
        };
        let estimate = estimator.observe(&seen).expect("intervals in order");
        self.lost = lost;
        self.frames.clear();
        estimate.expect("an observation is as long as an interval")
    }

    /// Flushes TLBs and walkers' caches.
    pub(crate) fn flush(&mut self) {
        self.vcpu[0].flush();
    }

    /// Returns the number of logged frames that are page tables.
    pub(crate) fn kernel_logged(&self) -> u64 {
        self.kernel
    }

    /// Returns true if a frame has been used so far.
    pub(crate) fn used(&self, frame: u64) -> bool {
        self.guest.ept.flags(frame).0
    }

    /// Returns the number of logged frames, and of full buffers.
    pub(crate) fn logged(&self) -> (u64, u64) {
        let (logged, _, filled) = self.vcpu[0].log.counts();
        (logged, filled)
    }

    /// Returns the number of lost frames, including each frame that found the buffer full.
    pub(crate) fn lost(&self) -> u64 {
        self.vcpu[0].log.counts().1
    }

    /// Returns the nanoseconds for which the privileged VM used its CPU, and for which the guest ran.
    pub(crate) fn times_ns(&self) -> (f64, f64) {
        (self.handler.counts().2, self.now_ns)
    }
}

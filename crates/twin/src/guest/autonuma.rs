//! AutoNUMA: the kernel of a guest or of the host moves pages to the node that uses them.
//!
//! # Model (constants and rules from Linux's `kernel/sched/fair.c`, see `facts/simulators.md` 4.3)
//!
//! A *group* is the threads of one process: all threads of a program, or one copy of it. Its kernel begins a second after the
//! start. From then on, whenever a thread of the group has run for a period, the kernel marks the next 256 MiB of the group's
//! pages. A marked page faults when it is used next. The fault's node is that of the vCPU as the guest knows it
//! ([`super::View`]).
//!
//! - A fault is *first* if its page had no fault before, and *own* if the page's last fault was from the same thread. A fault
//!   from another node than the page's may move the page. Until the first pass with faults, and in the first four passes, a first
//!   or own fault is enough. Otherwise the page's last fault, if any, must have been from this node as well (the two-stage
//!   filter), and one of these must hold: the fault is own; the process has one thread; this node's CPUs fault more than three
//!   times as often as those of the page's node; or its ratio of faults by CPU to faults on memory is more than 4/3 of that
//!   node's.
//! - Each pass over all pages halves the counts and adapts the period. Let `l` and `p` be the tenths of faults that are local and
//!   private. If one of them is at least 7, `p` being tested first, the period grows by as many tenths of itself as that one
//!   exceeds 7, but at least by 1. Otherwise it shrinks by 7 minus the larger. Without a local or shared fault, or once a move
//!   has found no room, it doubles. The period is between 1 and 60 s divided by the number of windows of 256 MiB, and not below
//!   100 ms. A shared fault between two nodes that the process uses much counts as local, so a process that has settled is
//!   scanned less.
//! - Scanning takes at most a 32nd of the scanning thread's time: the next scan waits for 32 times the duration of the last.
//!
//! The host's AutoNUMA knows each vCPU's real node. To it a VM is one process, whose threads are the vCPUs; its faults are exits
//! from the guest. In transparent huge pages it marks, faults and moves 2 MiB at a time: a fault counts for all 512 pages, as in
//! the kernel, and costs as much as one. It moves no pages of a VM whose memory is bound to nodes. After its first pass it also
//! moves running vCPUs, at each scan, to the node that holds most of the memory they use (`engine/autonuma.rs`).
//!
//! Pages of a class are a population. A pass marks pages class by class; within a class it draws them evenly. Each marked page
//! faults with probability `1 - exp(-rate * time of a pass)`, a huge page at 512 times the rate. The faulting thread is drawn
//! according to the threads' LLC accesses since the last scan. Each rule above gets its probability from that. The expected
//! number of pages moves, rounded at random.
//!
//! A fault or a moved page costs the faulting thread time; a moved page also costs every other running thread time (shootdown). A
//! scan's moves happen when it marks, and load controllers and links evenly until the next scan.
//!
//! # Left out
//!
//! Moving a guest's threads to their memory, unless the scenario's guest moves threads (`engine/threads.rs`). Groups of several
//! processes, tiers, the rate limit that kernels before 5.x had. Read-only shared file pages, which Linux leaves alone. If a VM's
//! frames are not its own, the host takes back the frame that a page left, which KVM without a balloon does not.

use std::ops::Range;

use homenode_units::{Bytes, Chance, Ns};

use super::memory::{ClassUse, VmMemory};
use super::thread::Thread;
use super::view::By;
use crate::hardware::fabric::Copying;
use crate::hypervisor::PAGE_MOVE_NS;
use crate::index::{IxVec, ThreadIx};

/// Delay before scanning begins (`scan_delay`); also the period until then.
pub(crate) const SCAN_DELAY: Ns = Ns::from_secs(1);
/// Bounds of the time of a pass over all pages (`scan_period_min`, `scan_period_max`), and lower bound of a period.
const PASS_MIN_NS: f64 = 1e9;
const PASS_MAX_NS: f64 = 60e9;
const PERIOD_MIN_NS: f64 = 1e8;
/// Pages of one scan (`scan_size`, 256 MiB).
const WINDOW: u64 = Bytes::from_mib(256).0 / homenode_units::PAGE_BYTES;
/// Pages of 4 KiB in a transparent huge page.
pub(crate) const HUGE_PAGES: f64 = 512.0;
/// Number of slots of a period, and the number of them from which on faults count as local or private enough.
const SLOTS: f64 = 10.0;
const THRESHOLD: f64 = 7.0;
/// A scan takes at most one part in this many of its thread's time.
const OVERHEAD_PARTS: f64 = 32.0;
/// Number of passes in which a first or own fault is enough.
const EARLY_PASSES: u64 = 4;
/// A node is active if its CPUs fault more than a third as often as the busiest node's (`ACTIVE_NODE_FRACTION`).
const ACTIVE_FRACTION: f64 = 3.0;
/// CPU time of marking a page (estimate: 3 ms for 256 MiB).
const MARK_NS: f64 = 50.0;
/// CPU time of a hinting fault without a move, in addition to the exit from the guest if the fault is the host's (estimate).
const FAULT_NS: f64 = 1000.0;

/// The AutoNUMA of one kernel for one VM.
#[derive(Clone, Debug)]
pub(crate) struct Autonuma {
    /// Distinguishes this AutoNUMA's timers from those of an earlier one of the VM.
    pub number: u32,
    pub groups: Vec<Group>,
    pub counts: Counts,
    pub chance: Chance,
}

/// A kernel's counts of its own work, as in `/proc/vmstat`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Passes over all pages of a group.
    pub passes: u64,
    /// Pages of 4 KiB that were marked and were not marked already (`numa_pte_updates`).
    pub marked: f64,
    /// Faults, one for a huge page; and those of them on pages of the faulting node (`numa_hint_faults`,
    /// `numa_hint_faults_local`).
    pub faults: f64,
    pub local: f64,
    /// Pages of 4 KiB that moved.
    pub moved: u64,
    /// CPU time spent marking.
    pub scan_ns: f64,
}

impl Counts {
    fn add(&mut self, more: &Counts) {
        self.passes += more.passes;
        self.marked += more.marked;
        self.faults += more.faults;
        self.local += more.local;
        self.moved += more.moved;
        self.scan_ns += more.scan_ns;
    }
}

/// The threads of one process.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    threads: Range<usize>,
    period_ns: f64,
    passes: u64,
    /// Whether a pass with faults has ended: the kernel then prefers a node.
    prefers: bool,
    /// Number of pages that the present pass has marked.
    cursor: u64,
    /// By class and node: share of the class's pages whose last fault was from that node. The rest to 1 had no fault.
    last: Vec<Vec<f64>>,
    /// By class: share of its pages that are marked and have not faulted yet.
    waiting: Vec<f64>,
    /// Faults by the node of the page, and by the node of the CPU; halved after every pass.
    memory_faults: Vec<f64>,
    cpu_faults: Vec<f64>,
    seen: Seen,
    /// By thread: CPU time and LLC references at the last scan.
    before: Vec<(f64, f64)>,
    /// Traffic that the last scan's moves cause.
    pub copying: Vec<Copying>,
}

/// Faults since the last pass ended.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    local: f64,
    remote: f64,
    private: f64,
    shared: f64,
    no_room: bool,
}

/// Inputs of a scan.
pub(crate) struct Scene<'a> {
    pub by: By,
    /// The VM's threads, and the node of each thread's vCPU as this kernel knows it.
    pub threads: &'a mut IxVec<ThreadIx, Thread>,
    pub node_of: &'a IxVec<ThreadIx, usize>,
    pub clock_ghz: f64,
    /// Duration of an exit from the guest, in nanoseconds.
    pub exit_ns: f64,
    /// Share of the memory that this kernel holds in huge pages.
    pub huge: f64,
    /// Time to copy a page from one node to another, at `from * nodes + to`, and time that a move costs every other thread, both
    /// in nanoseconds.
    pub copy_ns: &'a [f64],
    pub shootdown_ns: f64,
    /// Free pages of the host.
    pub free: &'a mut [u64],
}

/// Pages of a class that a scan has marked.
struct Marks<'a> {
    class: usize,
    uses: &'a ClassUse,
    marked: u64,
    /// Duration of a pass over all pages.
    pass_ns: f64,
    /// LLC references per nanosecond of each thread of the group.
    references: &'a [f64],
}

/// Result of a scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scan {
    /// Pages that moved: (from, to, pages). If the guest's frames are not its own, the pages are taken from the free pages of
    /// `to` and not yet returned to `from`.
    pub moved: Vec<(usize, usize, u64)>,
    pub counts: Counts,
    /// Time from now until the group is to be looked at again.
    pub after: Ns,
}

/// Returns one process that consists of all `threads` threads.
pub(crate) fn one_process(threads: usize) -> Vec<Range<usize>> {
    std::iter::once(0..threads).collect()
}

impl Autonuma {
    /// Creates the AutoNUMA for a program whose processes are these ranges of threads.
    pub(crate) fn new(processes: Vec<Range<usize>>, memory: &VmMemory, chance: Chance) -> Autonuma {
        Autonuma {
            number: 0,
            groups: Group::all(processes, memory),
            counts: Counts::default(),
            chance,
        }
    }

    /// Scans for a group. See [`Group::scan`].
    pub(crate) fn scan(&mut self, group: usize, memory: &mut VmMemory, scene: &mut Scene<'_>) -> Scan {
        let scan = self.groups[group].scan(memory, scene, &mut self.chance);
        self.counts.add(&scan.counts);
        scan
    }

    /// Starts over for another program, about which the kernel knows nothing.
    pub(crate) fn begin(&mut self, number: u32, processes: Vec<Range<usize>>, memory: &VmMemory) {
        self.number = number;
        self.groups = Group::all(processes, memory);
    }
}

/// Returns the shortest and the longest period for this many pages.
fn bounds(pages: u64) -> (f64, f64) {
    let windows = pages.div_ceil(WINDOW).max(1) as f64;
    let min = (PASS_MIN_NS / windows).max(PERIOD_MIN_NS);
    (min, (PASS_MAX_NS / windows).max(min))
}

impl Autonuma {
    /// Whether the kernel has seen enough faults to prefer nodes.
    pub(crate) fn prefers(&self) -> bool {
        self.groups.iter().any(|group| group.prefers)
    }
}

impl Group {
    fn all(processes: Vec<Range<usize>>, memory: &VmMemory) -> Vec<Group> {
        let nodes = memory.pages().len();
        let group = |threads: Range<usize>| Group {
            before: vec![(0.0, 0.0); threads.len()],
            threads,
            period_ns: SCAN_DELAY.as_f64(),
            passes: 0,
            prefers: false,
            cursor: 0,
            last: vec![vec![0.0; nodes]; memory.classes()],
            waiting: vec![0.0; memory.classes()],
            memory_faults: vec![0.0; nodes],
            cpu_faults: vec![0.0; nodes],
            seen: Seen::default(),
            copying: Vec::new(),
        };
        processes.into_iter().map(group).collect()
    }

    /// Returns the group's threads.
    fn threads(&self) -> impl Iterator<Item = ThreadIx> + Clone + use<> {
        self.threads.clone().map(ThreadIx)
    }

    /// Scans the next window if a thread has run for a period since the last scan.
    fn scan(&mut self, memory: &mut VmMemory, scene: &mut Scene<'_>, chance: &mut Chance) -> Scan {
        let mut scan = Scan::default();
        let classes = memory.class_uses();
        let mine = |class: &ClassUse| self.threads().any(|thread| class.used_by(thread));
        let used: Vec<(usize, ClassUse)> = classes
            .into_iter()
            .enumerate()
            .filter(|(_, class)| mine(class))
            .collect();
        let pages: u64 = used.iter().map(|(_, class)| class.pages()).sum();
        let (ran_ns, scanner) = self.longest_run(scene);
        if ran_ns < self.period_ns || pages == 0 {
            scan.after = Ns((self.period_ns - ran_ns).max(PERIOD_MIN_NS) as u64);
            return scan;
        }
        let references = self.references(scene);
        let (min_ns, max_ns) = bounds(pages);
        if self.passes == 0 && self.cursor == 0 {
            self.period_ns = min_ns;
        }
        let pass_ns = self.period_ns * pages.div_ceil(WINDOW) as f64;
        let (from, to) = (self.cursor, (self.cursor + WINDOW).min(pages));
        let mut start = 0;
        for (at, class) in &used {
            let end = start + class.pages();
            let marked = to.min(end).saturating_sub(from.max(start));
            start = end;
            if marked > 0 {
                let marks = Marks {
                    class: *at,
                    uses: class,
                    marked,
                    pass_ns,
                    references: &references,
                };
                self.fault(&marks, memory, scene, chance, &mut scan);
            }
        }
        let counts = &mut scan.counts;
        counts.scan_ns = (to - from) as f64 * MARK_NS * (1.0 - scene.huge + scene.huge / HUGE_PAGES);
        counts.moved = scan.moved.iter().map(|(_, _, pages)| pages).sum();
        scene.threads[scanner].owed_ns += counts.scan_ns;
        self.cursor = to;
        if to >= pages {
            counts.passes += 1;
            self.end_pass(min_ns, max_ns);
        }
        scan.after = Ns(self.period_ns.max(OVERHEAD_PARTS * counts.scan_ns) as u64);
        scan
    }

    /// Returns the longest time that any thread ran since the last scan, and that thread.
    fn longest_run(&self, scene: &Scene<'_>) -> (f64, ThreadIx) {
        let run = |thread: ThreadIx| {
            let (before, _) = self.before[thread.0 - self.threads.start];
            scene.threads[thread].cycles / scene.clock_ghz - before
        };
        let runs = self.threads().map(|thread| (run(thread), thread));
        runs.fold(
            (0.0, ThreadIx(self.threads.start)),
            |a, b| if b.0 > a.0 { b } else { a },
        )
    }

    /// Returns each thread's LLC references per nanosecond of its run time since the last scan, or of a period if that is longer.
    /// Remembers the present counts.
    fn references(&mut self, scene: &Scene<'_>) -> Vec<f64> {
        let mut rates = Vec::with_capacity(self.threads.len());
        for (thread, before) in self.threads().zip(&mut self.before) {
            let state = &scene.threads[thread];
            let (ran, references) = *before;
            *before = (state.cycles / scene.clock_ghz, state.llc_references);
            rates.push((before.1 - references) / (before.0 - ran).max(self.period_ns));
        }
        rates
    }

    /// Lets marked pages of a class fault.
    fn fault(
        &mut self,
        marks: &Marks<'_>,
        memory: &mut VmMemory,
        scene: &mut Scene<'_>,
        chance: &mut Chance,
        scan: &mut Scan,
    ) {
        let (class, held) = (marks.class, &marks.uses.on);
        let nodes = held.len();
        let rates: Vec<f64> = (self.threads().zip(marks.references))
            .map(|(thread, rate)| if marks.uses.used_by(thread) { *rate } else { 0.0 })
            .collect();
        let rate: f64 = rates.iter().sum();
        if rate <= 0.0 || marks.uses.share <= 0.0 {
            return;
        }
        // By node: its share of the faults, and the share of faults from the same thread as the last one, once placed.
        let (mut by_node, mut own) = (vec![0.0; nodes], vec![0.0; nodes]);
        for (thread, thread_rate) in self.threads().zip(&rates) {
            let share = thread_rate / rate;
            by_node[scene.node_of[thread]] += share;
            own[scene.node_of[thread]] += share * share;
        }
        let pages = marks.uses.pages();
        let per_page = rate * marks.uses.share / pages as f64;
        let used = |pages: f64| 1.0 - libm::exp(-per_page * pages * marks.pass_ns);
        let (small, huge) = ((1.0 - scene.huge) * used(1.0), scene.huge * used(HUGE_PAGES));
        // Share of the pages that fault; and how many times per page the kernel does the work that it does once for a huge page.
        let faulting = small + huge;
        let per_page = (small + huge / HUGE_PAGES) / faulting;
        let fresh = marks.marked as f64 / pages as f64;
        scan.counts.marked += marks.marked as f64 * (1.0 - self.waiting[class]);
        self.waiting[class] += fresh * (1.0 - faulting - self.waiting[class]);
        let ever: f64 = self.last[class].iter().sum();
        let private = (1.0 - ever) + ever * own.iter().sum::<f64>();
        let (mut rest, mut draws) = (pages, marks.marked);
        for from in (0..nodes).filter(|node| held[*node] > 0) {
            let drawn = chance.hypergeometric(rest, held[from], draws);
            rest -= held[from];
            draws -= drawn;
            let mut left = drawn;
            for to in (0..nodes).filter(|node| by_node[*node] > 0.0) {
                let faults = drawn as f64 * faulting * by_node[to];
                let mut moved = 0;
                if to != from && memory.movable_by(scene.by) {
                    let expected = faults * self.chance_of_move(class, from, to, own[to] / by_node[to]);
                    let wanted = ((expected + chance.unit()) as u64).min(left);
                    moved = wanted.min(memory.room_for(scene.by, to, scene.free[to]));
                    self.seen.no_room |= moved < wanted;
                    left -= moved;
                }
                if moved > 0 {
                    if !memory.keeps_frames(scene.by) {
                        scene.free[to] -= moved;
                    }
                    memory.move_class(scene.by, class, from, to, moved);
                    scan.moved.push((from, to, moved));
                }
                scan.counts.faults += faults * per_page;
                scan.counts.local += if from == to { faults * per_page } else { 0.0 };
                self.count(faults, from, to, moved, private);
                let exit_ns = if scene.by == By::Host { scene.exit_ns } else { 0.0 };
                let move_ns = PAGE_MOVE_NS * per_page + scene.copy_ns[from * nodes + to];
                let fault_ns = faults * per_page * (FAULT_NS + exit_ns) + moved as f64 * move_ns;
                for (thread, thread_rate) in self.threads().zip(&rates) {
                    let state = &mut scene.threads[thread];
                    if scene.node_of[thread] == to {
                        state.owed_ns += fault_ns * thread_rate / (rate * by_node[to]);
                    }
                    if state.runnable() {
                        state.owed_ns += moved as f64 * per_page * scene.shootdown_ns;
                    }
                }
            }
        }
        for (last, now) in self.last[class].iter_mut().zip(&by_node) {
            *last += fresh * faulting * (now - *last);
        }
    }

    /// Returns the probability that a fault from `to` moves a page of a class from `from`; `own` is the probability that it
    /// comes from the same thread as the last one.
    fn chance_of_move(&self, class: usize, from: usize, to: usize, own: f64) -> f64 {
        let last = &self.last[class];
        let ever: f64 = last.iter().sum();
        let (first, again) = ((1.0 - ever).max(0.0), last[to]);
        let by_group = if self.threads.len() == 1 || self.is_drawn(from, to) {
            1.0
        } else {
            0.0
        };
        if self.passes <= EARLY_PASSES || !self.prefers {
            let own_any = ever * own;
            return first + own_any + (again - own_any).max(0.0) * by_group;
        }
        let own_again = again.min(if self.threads.len() == 1 {
            again
        } else {
            ever * own
        });
        own_again + (again - own_again + first) * by_group
    }

    /// Whether the whole process's faults draw memory from one node to another.
    fn is_drawn(&self, from: usize, to: usize) -> bool {
        let (cpu, memory) = (&self.cpu_faults, &self.memory_faults);
        cpu[to] > cpu[from] * ACTIVE_FRACTION || cpu[to] * memory[from] * 3.0 > cpu[from] * memory[to] * 4.0
    }

    fn count(&mut self, faults: f64, from: usize, to: usize, moved: u64, private: f64) {
        let most = self.cpu_faults.iter().copied().fold(0.0, f64::max);
        let active = |node: usize| self.cpu_faults[node] * ACTIVE_FRACTION > most;
        let settled = self.threads.len() > 1 && active(from) && active(to);
        let local = match (from == to, settled) {
            (true, _) => 1.0,
            (false, true) => 1.0 - private,
            (false, false) => 0.0,
        };
        self.seen.local += faults * local;
        self.seen.remote += faults * (1.0 - local);
        self.seen.private += faults * private;
        self.seen.shared += faults * (1.0 - private);
        self.memory_faults[from] += (faults - moved as f64).max(0.0);
        self.memory_faults[to] += moved as f64;
        self.cpu_faults[to] += faults;
    }

    fn end_pass(&mut self, min_ns: f64, max_ns: f64) {
        self.cursor = 0;
        self.passes += 1;
        self.prefers |= self.seen.local + self.seen.remote >= 1.0;
        self.period_ns = adapted(self.period_ns, self.seen, min_ns, max_ns);
        // A pass that doubles the period resets neither the faults nor the note of a failed move. So one failure doubles the
        // period in every later pass (until a fix that was proposed in August 2026).
        self.seen = match self.seen.doubles() {
            true => Seen {
                private: 0.0,
                shared: 0.0,
                ..self.seen
            },
            false => Seen::default(),
        };
        for count in self.memory_faults.iter_mut().chain(&mut self.cpu_faults) {
            *count /= 2.0;
        }
    }
}

impl Seen {
    /// Whether the period doubles. It also does after a pass with only private faults on other nodes, because the kernel tests
    /// for local or shared ones.
    fn doubles(self) -> bool {
        self.local + self.shared < 1.0 || self.no_room
    }
}

fn adapted(period_ns: f64, seen: Seen, min_ns: f64, max_ns: f64) -> f64 {
    let faults = seen.local + seen.remote;
    if seen.doubles() {
        return (2.0 * period_ns).clamp(min_ns, max_ns);
    }
    let local = (SLOTS * seen.local / faults).floor();
    let private = (SLOTS * seen.private / (seen.private + seen.shared)).floor();
    let slots = if private >= THRESHOLD {
        (private - THRESHOLD).max(1.0)
    } else if local >= THRESHOLD {
        (local - THRESHOLD).max(1.0)
    } else {
        local.max(private) - THRESHOLD
    };
    (period_ns + slots * period_ns / SLOTS).clamp(min_ns, max_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_period_follows_the_documented_rules() {
        let seen = |local, private| Seen {
            local,
            remote: 100.0 - local,
            private,
            shared: 100.0 - private,
            no_room: false,
        };
        let adapt = |seen| adapted(1e9, seen, 1e8, 60e9) / 1e9;
        let close =
            |got: f64, expected: f64| assert!((got - expected).abs() < 1e-9, "{got}, expected {expected}");
        close(adapt(seen(100.0, 100.0)), 1.3); // private 10: + 3 tenths
        close(adapt(seen(0.0, 75.0)), 1.1); // private 7: + 1 tenth
        close(adapt(seen(90.0, 20.0)), 1.2); // local 9: + 2 tenths
        close(adapt(seen(30.0, 50.0)), 0.8); // 5 is the larger: - 2 tenths
        close(adapt(Seen::default()), 2.0);
        close(adapted(50e9, Seen::default(), 1e8, 60e9) / 1e9, 60.0);
        close(adapted(1.1e8, seen(0.0, 0.0), 1e8, 60e9) / 1e8, 1.0);
    }

    #[test]
    fn periods_shrink_with_memory() {
        assert_eq!(bounds(1000), (1e9, 60e9));
        assert_eq!(bounds(4 * WINDOW), (2.5e8, 15e9));
        assert_eq!(bounds(1000 * WINDOW), (1e8, 1e8));
    }
}

//! A VM from start to end: it boots; its program touches memory, computes, meets at barriers, and ends.
//!
//! ```text
//!   Absent ──arrival──▶ Booting ──every vCPU booted──▶ Program ──every thread done──▶ Ended ──after = leave──▶ Gone
//!                        │ touches kernel pages         │ touches its regions           │ idles, keeps memory
//!                                                       └──then: the next program───────┘ frees its memory for the next
//! ```
//!
//! The threads of a barrier program all run the same number of intervals. The work of each thread in each interval is drawn when
//! the interval begins. It comes from the VM's own random stream, so it is the same under every policy. If the program rests,
//! the last thread to arrive at a barrier rests before it releases the others.
//!
//! A thread that arrives at a barrier either halts at once or keeps its vCPU busy, as its program does. The last to arrive
//! releases the others. It must interrupt those that halted, one after the other: each begins when its interrupt has been sent,
//! and the sender continues after the last. A virtual interrupt costs more than a native one (the machine's `ipi`;
//! [Policies, section 5.3.2]). If a program's threads sleep when they wait, each of its other wake-ups costs an interrupt as well
//! ([`crate::workload::Program::wakeups_per_m_instructions`]). A program that spins does not pay for them.
//!
//! Under a hypervisor a woken vCPU first pays for its way back into the guest: the exit of its halt, the entry, the schedulers
//! (the machine's `wake`, if it has one). A vCPU that a timer wakes pays as well. A vCPU that waited for a device does not:
//! device times for guests were measured in guests.
//!
//! # Left out
//!
//! Spinning for a while and then halting; a spinning hyperthread that leaves more to its sibling than a computing one; further
//! costs of an interrupt to its receiver; that a halt's exit is over before the wake-up; locks; page cache.

mod work;

use std::collections::VecDeque;
use std::ops::Range;

use homenode_host::{CpuQuota, HomeInForce};
use homenode_units::{Bytes, Chance, MemoryPolicy, Ns, Placing, VmId};

use super::autonuma::{Autonuma, HUGE_PAGES, one_process};
use super::costs::{BOOT_CPU, BOOT_CPU_SECONDARY, HIGH_MEMORY, HOUSEKEEPING_RUN, TOUCH_NS, boot_footprint};
use super::memory::{Scattered, Touches, VmMemory};
use super::releases::Releases;
use super::requests::RequestTimes;
use super::runtime::Runtime;
use super::thread::{Doing, Thread};
use super::view::{By, View};
use crate::hypervisor::sampling::Sampling;
use crate::hypervisor::turns::WhenFull;
use crate::index::{IxVec, TaskIx, ThreadIx, VmIx, first};
use crate::io::Request;
use crate::io::flip::Channel;
use crate::report::ProgramReport;
use crate::scenario::{AfterProgram, Allocation, Hypervisor, ReleaseCalls, RuntimeNodes, VmSpec};
use crate::workload::{Program, Threads, Workload};

/// Stage of a VM's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Absent,
    Booting,
    Program,
    Ended,
    Gone,
}

/// What a vCPU does next when it has finished something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The vCPU continues.
    Run,
    /// The vCPU waits: it halts, unless it spins.
    Sleep,
    /// The vCPU halts for this long and then continues.
    Rest(Ns),
    /// The program starts: the vCPU continues if it has something to run. It wakes every other vCPU, which does the same.
    Start,
    /// Like `Start`, but at a barrier, where waking costs time.
    Release,
    /// The program has ended.
    End,
}

/// A program that a guest has yet to run.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub workload: Workload,
    pub work_share: f64,
    /// Each thread's requests to devices.
    pub requests: Vec<Request>,
}

/// A quota of CPU time for each vCPU, and the end of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub quota: CpuQuota,
    pub until: Ns,
}

/// A limit on memory, the memory that the VM had before, and the end of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLease {
    pub memory: Bytes,
    pub before: Bytes,
    pub until: Ns,
}

/// Limits that a plan has set and that are in force, and how far such limits may go.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    pub quota: Option<Lease>,
    pub memory: Option<MemoryLease>,
    /// Least memory to which the scenario lets a limit go.
    pub floor: Option<Bytes>,
}

/// The guest's swap: faults on swapped pages, the fraction of a fault carried over, and pages written to swap.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Swap {
    pub faults: f64,
    pub carried: f64,
    pub written: u64,
}

/// Counts of a VM since it was first started.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmCounts {
    /// LLC misses by the node whose memory they go to.
    pub accesses: Vec<f64>,
    pub local: f64,
    pub remote: f64,
    /// Number of pages that the host moved, and number of times that it moved a vCPU to its pages.
    pub pages_moved: u64,
    pub vcpus_drawn: u64,
    pub policy_changes: u32,
    /// Durations of the program's pieces of work between two rests.
    pub requests: RequestTimes,
}

/// The host's means to learn how a VM's pages are used, as the VM's memory policy says.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostCare {
    /// The host kernel's page mover, and the number of times that it was begun.
    pub autonuma: Option<Autonuma>,
    pub autonumas: u32,
    /// Whether the host's kernel would balance the VM's memory if no policy said otherwise.
    pub balanced: bool,
    /// Share of the VM's memory that the host's kernel holds in huge pages.
    pub huge: f64,
    /// Samples of which nodes use the VM's pages, while a policy requires them, and the number of times that sampling was begun.
    pub sampling: Option<Sampling>,
    pub samplings: u32,
}

impl HostCare {
    /// Returns how many times per page the kernel does work that it does once for a huge page and once for each other page.
    pub(crate) fn per_page(&self) -> f64 {
        1.0 - self.huge + self.huge / HUGE_PAGES
    }
}

/// Factors that an event applies to a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors {
    pub llc_accesses: f64,
    pub cycles: f64,
    pub rest: f64,
}

impl Default for Factors {
    fn default() -> Factors {
        Factors {
            llc_accesses: 1.0,
            cycles: 1.0,
            rest: 1.0,
        }
    }
}

/// The program that a VM runs, and its progress.
#[derive(Clone, Debug)]
pub(crate) struct Course {
    pub workload: String,
    pub program: Option<Program>,
    /// When the program was started, and when it ended.
    pub started: Option<Ns>,
    pub ended: Option<Ns>,
    /// Programs that the VM runs after this one.
    pub then: VecDeque<Prepared>,
    /// Programs that have ended before this one.
    pub ran: Vec<ProgramReport>,
    /// Number of pages that the program has touched, and how many of them were outside the VM's home.
    pub touched: (u64, u64),
    /// Factors that an event has set for LLC accesses, cycles and rests.
    pub factors: Factors,
    work_share: f64,
    starts: Touches,
    at_barrier: usize,
    intervals: u64,
    intervals_left: u64,
    /// Instructions of a thread since the threads of a barrier program last rested.
    since_rest: f64,
}

/// One start of a VM and its outcome.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub arrived: Ns,
    /// When the VM left; `None` while it is on the host.
    pub left: Option<Ns>,
    /// How long each program that was begun has run, in seconds. A single `None` before the first program.
    pub runtimes_s: Vec<Option<f64>>,
}

impl Course {
    /// Returns how long the program ran, in seconds; `None` if it has not ended.
    pub(crate) fn runtime_s(&self) -> Option<f64> {
        let (started, ended) = (self.started?, self.ended?);
        Some(Ns(ended.0 - started.0).as_secs_f64())
    }

    /// Whether the program is the VM's only one.
    pub(crate) fn is_only(&self) -> bool {
        self.ran.is_empty() && self.then.is_empty()
    }

    /// Creates the course of a program that has not begun. `starts` is what each thread will touch in it.
    fn new(spec: &VmSpec, program: Option<Program>, starts: Touches) -> Course {
        Course {
            workload: spec.workload.clone(),
            program,
            started: None,
            ended: None,
            then: VecDeque::new(),
            ran: Vec::new(),
            touched: (0, 0),
            factors: Factors::default(),
            work_share: spec.work_share,
            starts,
            at_barrier: 0,
            intervals: 0,
            intervals_left: 0,
            since_rest: 0.0,
        }
    }
}

/// One VM.
#[derive(Clone, Debug)]
pub(crate) struct Vm {
    pub id: VmId,
    pub name: String,
    pub memory_bytes: Bytes,
    pub memory_policy: MemoryPolicy,
    pub page_size: Bytes,
    pub allocation: Allocation,
    /// Whether the VM drives devices itself.
    pub passthrough: bool,
    pub after: AfterProgram,
    pub stage: Stage,
    /// Number of times that the VM has been started again.
    pub life: u32,
    /// When the VM was started.
    pub arrived: Option<Ns>,
    /// When the VM left.
    pub left: Option<Ns>,
    /// Outcomes of the VM's earlier starts.
    earlier: Vec<Life>,
    /// Task of the VM's vCPU 0; those of its other vCPUs follow.
    pub first_vcpu: TaskIx,
    pub threads: IxVec<ThreadIx, Thread>,
    pub memory: VmMemory,
    pub course: Course,
    /// The guest kernel's own page mover, if it has one.
    pub autonuma: Option<Autonuma>,
    /// The program's releases, if its guest notifies the hypervisor of them.
    pub releases: Option<Releases>,
    /// Runtime library of the VM's program, while a program that has one runs.
    pub runtime: Option<Runtime>,
    /// What the program's runtime library knows of nodes.
    pub runtime_nodes: RuntimeNodes,
    /// Channel of the VM's I/O to a driver domain.
    pub channel: Option<Channel>,
    pub host: HostCare,
    pub limits: Limits,
    /// The home that the agent has given the VM.
    pub home_in_force: HomeInForce,
    pub swap: Swap,
    pub counts: VmCounts,
    boots: Touches,
    booted: usize,
    chance: Chance,
}

/// Returns the processes of a program, as ranges of threads.
fn processes(program: Option<&Program>, vcpus: usize) -> Vec<Range<usize>> {
    match program.map(|program| program.threads) {
        None => Vec::new(),
        Some(Threads::OneCopyPerVcpu) => (0..vcpus).map(|copy| copy..copy + 1).collect(),
        Some(Threads::OnePerVcpu) => one_process(vcpus),
        Some(Threads::Single) => one_process(1),
    }
}

impl Vm {
    pub(crate) fn new(
        spec: &VmSpec,
        hypervisor: Hypervisor,
        workload: Workload,
        at: VmIx,
        first_vcpu: TaskIx,
        nodes: usize,
        seed: u64,
    ) -> Vm {
        let vcpus = usize::from(spec.vcpus);
        let boot = boot_footprint(spec.memory);
        let (mut memory, boots, starts) = VmMemory::new(
            nodes,
            vcpus,
            boot,
            workload.program.as_ref(),
            View::of(spec, hypervisor),
        );
        memory.scattered = Scattered::new(spec.memory_scattered);
        memory.lie_from(HIGH_MEMORY.to_pages().0, spec.memory.to_pages().0);
        if hypervisor == Hypervisor::Xen && spec.memory_policy.placing == Placing::FirstTouch {
            memory.when_full = WhenFull::InTurn;
        }
        let threads = first(vcpus)
            .map(|thread| Thread::new(memory.shared_share(thread)))
            .collect();
        let rate = workload
            .program
            .as_ref()
            .map_or(0.0, |program| program.page_releases_per_m_instructions / 1e6);
        let releases = (rate > 0.0).then(|| Releases::new(spec.release_calls, rate, vcpus, seed, at));
        Vm {
            autonuma: spec.autonuma.then(|| {
                let chance = Chance::labelled(seed, "autonuma", at.0);
                Autonuma::new(processes(workload.program.as_ref(), vcpus), &memory, chance)
            }),
            // "twin" and the position in the scenario: IDs ascend, and are the same in every run.
            id: VmId(0x7477_696e << 96 | (at.0 as u128 + 1)),
            name: spec.name.clone(),
            memory_bytes: spec.memory,
            memory_policy: spec.memory_policy,
            page_size: spec.page_size.bytes(),
            allocation: spec.allocation,
            passthrough: spec.passthrough,
            after: spec.after,
            stage: Stage::Absent,
            life: 0,
            arrived: None,
            left: None,
            earlier: Vec::new(),
            first_vcpu,
            threads,
            memory,
            course: Course::new(spec, workload.program, starts),
            releases: releases.filter(|_| spec.release_calls != ReleaseCalls::None),
            runtime: None,
            runtime_nodes: spec.runtime_nodes,
            channel: None,
            host: HostCare::default(),
            limits: Limits {
                floor: spec.memory_floor,
                ..Limits::default()
            },
            home_in_force: HomeInForce::Unplaced,
            swap: Swap::default(),
            counts: VmCounts {
                accesses: vec![0.0; nodes],
                ..VmCounts::default()
            },
            boots,
            booted: 0,
            chance: Chance::labelled(seed, "guest", at.0),
        }
    }

    /// Returns the task of the vCPU that a thread runs on.
    pub(crate) fn task(&self, thread: ThreadIx) -> TaskIx {
        TaskIx(self.first_vcpu.0 + thread.0)
    }

    /// Returns the tasks of the VM's vCPUs, in order.
    pub(crate) fn tasks(&self) -> impl ExactSizeIterator<Item = TaskIx> + Clone + use<> {
        let first = self.first_vcpu.0;
        (first..first + self.threads.len()).map(TaskIx)
    }

    /// Returns the page mover of the guest's own kernel or of the host's.
    pub(crate) fn autonuma_by(&self, by: By) -> Option<&Autonuma> {
        match by {
            By::Guest => self.autonuma.as_ref(),
            By::Host => self.host.autonuma.as_ref(),
        }
    }

    /// Returns the page movers of the guest's own kernel and of the host's.
    pub(crate) fn page_movers(&self) -> impl Iterator<Item = &Autonuma> {
        self.autonuma.iter().chain(&self.host.autonuma)
    }

    /// Whether the VM is on the host.
    pub(crate) fn present(&self) -> bool {
        !matches!(self.stage, Stage::Absent | Stage::Gone)
    }

    /// Whether the VM has a program that has not ended.
    pub(crate) fn busy(&self) -> bool {
        self.course.program.is_some() && self.course.ended.is_none() && self.stage != Stage::Gone
    }

    /// Carries over the counts and the random stream of an earlier life of this VM.
    pub(crate) fn counts_on(&mut self, earlier: &Vm) {
        self.life = earlier.life + 1;
        self.earlier = earlier.lives().collect();
        if let (Some(autonuma), Some(earlier)) = (&mut self.autonuma, &earlier.autonuma) {
            autonuma.number = earlier.number + 1;
            autonuma.counts = earlier.counts;
        }
        self.counts.clone_from(&earlier.counts);
        self.host.samplings = earlier.host.samplings;
        if let (Some(releases), Some(earlier)) = (&mut self.releases, &earlier.releases) {
            releases.clone_from(earlier);
        }
        self.host.autonumas = earlier.host.autonumas;
        if let (Some(channel), Some(earlier)) = (&mut self.channel, &earlier.channel) {
            channel.counts_on(earlier);
        }
        self.chance = earlier.chance.clone();
        for (thread, earlier) in self.threads.iter_mut().zip(&earlier.threads) {
            thread.counts_on(earlier);
        }
    }

    /// Starts the VM: every vCPU has something to boot.
    pub(crate) fn boot(&mut self, now: Ns) {
        self.stage = Stage::Booting;
        self.arrived = Some(now);
        for (at, (thread, touches)) in self.threads.iter_mut().zip(&self.boots).enumerate() {
            let cpu = if at == 0 { BOOT_CPU } else { BOOT_CPU_SECONDARY };
            let pages: u64 = touches.iter().map(|touch| touch.pages).sum();
            thread.touches.clone_from(touches);
            thread.next_touch(cpu.as_f64() / pages.max(1) as f64);
        }
    }

    /// Ends what a vCPU was doing. Returns what the vCPU does next.
    pub(crate) fn next(&mut self, thread: ThreadIx, now: Ns) -> Next {
        match self.threads[thread].doing {
            Doing::Touching { ns_per_page, .. } => {
                if self.threads[thread].next_touch(ns_per_page) {
                    return Next::Run;
                }
                if self.stage == Stage::Booting {
                    self.end_of_boot(thread, now)
                } else {
                    self.end_of_touching(thread, now)
                }
            }
            Doing::Computing if self.threads[thread].instructions_left >= 1.0 => {
                let rest = self.rest(thread);
                self.stretch(thread);
                if rest == Ns::ZERO {
                    return Next::Run;
                }
                if let Some(began) = self.threads[thread].began.take() {
                    self.counts.requests.note(Ns(now.0 - began.0));
                }
                self.threads[thread].doing = Doing::Resting;
                Next::Rest(rest)
            }
            Doing::Computing => self.end_of_stretch(thread, now),
            Doing::Housekeeping
            | Doing::Idle
            | Doing::AtBarrier
            | Doing::Spinning
            | Doing::WaitingForIo
            | Doing::Resting => {
                self.threads[thread].doing = Doing::Idle;
                Next::Sleep
            }
        }
    }

    /// Wakes an idle vCPU to handle its kernel's timers.
    pub(crate) fn housekeep(&mut self, thread: ThreadIx) {
        self.threads[thread].doing = Doing::Housekeeping;
        self.threads[thread].left = HOUSEKEEPING_RUN.as_f64();
    }

    fn end_of_boot(&mut self, thread: ThreadIx, now: Ns) -> Next {
        self.threads[thread].doing = Doing::Idle;
        self.booted += 1;
        if self.booted < self.threads.len() {
            return Next::Sleep;
        }
        if self.course.program.is_none() {
            self.stage = Stage::Ended;
            return Next::Sleep;
        }
        self.begin(now)
    }

    /// Begins the VM's program.
    fn begin(&mut self, now: Ns) -> Next {
        let Some(program) = &self.course.program else {
            return Next::Sleep;
        };
        self.stage = Stage::Program;
        self.course.started = Some(now);
        self.course.since_rest = 0.0;
        let instructions = program.instructions_g_per_thread * 1e9 * self.course.work_share;
        if let Some(barrier) = program.barrier {
            let intervals = instructions / (barrier.interval_m_instructions * 1e6);
            self.course.intervals = (libm::round(intervals) as u64).max(1);
            self.course.intervals_left = self.course.intervals;
        }
        for at in first(self.program_threads()) {
            self.threads[at].touches = std::mem::take(&mut self.course.starts[at]);
            self.threads[at].touches.reverse();
            self.threads[at].instructions_left = instructions;
            if !self.threads[at].next_touch(TOUCH_NS) {
                // The thread has nothing to touch and continues at once.
                self.end_of_touching(at, now);
            }
        }
        Next::Start
    }

    /// Begins the VM's next program, if there is one, after the last has ended. Frees the last program's memory.
    pub(crate) fn begin_next(&mut self, now: Ns) -> Option<Next> {
        let next = self.course.then.pop_front()?;
        self.course.ran.extend(self.program_report());
        self.memory.end_program();
        self.course.workload = next.workload.name;
        self.course.program = next.workload.program;
        self.course.work_share = next.work_share;
        self.course.ended = None;
        self.course.touched = (0, 0);
        (
            self.course.intervals,
            self.course.intervals_left,
            self.course.at_barrier,
        ) = (0, 0, 0);
        if let Some(program) = &self.course.program {
            self.course.starts = self.memory.add_program(program);
            self.memory
                .lie_from(HIGH_MEMORY.to_pages().0, self.memory_bytes.to_pages().0);
        }
        let vcpus = self.threads.len();
        if let Some(autonuma) = &mut self.autonuma {
            let processes = processes(self.course.program.as_ref(), vcpus);
            autonuma.begin(autonuma.number + 1, processes, &self.memory);
        }
        if let Some(autonuma) = &mut self.host.autonuma {
            self.host.autonumas += 1;
            autonuma.begin(self.host.autonumas, one_process(vcpus), &self.memory);
        }
        for (at, thread) in first(vcpus).zip(&mut self.threads) {
            thread.shared_share = self.memory.shared_share(at);
            thread.requests.restart(next.requests.clone());
        }
        Some(self.begin(now))
    }

    /// Returns the VM's starts so far, the present one last.
    pub(crate) fn lives(&self) -> impl Iterator<Item = Life> {
        let now = self.arrived.map(|arrived| Life {
            arrived,
            left: self.left,
            runtimes_s: match self
                .programs()
                .map(|program| program.runtime_s)
                .collect::<Vec<_>>()
            {
                none if none.is_empty() => vec![None],
                begun => begun,
            },
        });
        self.earlier.iter().cloned().chain(now)
    }

    /// Returns the programs that the VM has begun since its start.
    pub(crate) fn programs(&self) -> impl Iterator<Item = ProgramReport> {
        self.course.ran.iter().cloned().chain(self.program_report())
    }

    /// Reports on the VM's program so far; `None` before it began.
    fn program_report(&self) -> Option<ProgramReport> {
        let began = self.course.started?;
        Some(ProgramReport {
            workload: self.course.workload.clone(),
            began_s: began.as_secs_f64(),
            runtime_s: self.course.runtime_s(),
            pages_touched: self.course.touched.0,
            pages_touched_away: self.course.touched.1,
        })
    }

    /// Counts pages that the VM's program touched, by node.
    pub(crate) fn count_touched(&mut self, placed: &[u64]) {
        let home = self.memory.home.as_deref();
        for (node, pages) in placed.iter().enumerate() {
            self.course.touched.0 += pages;
            if home.is_some_and(|home| !home.contains(&node)) {
                self.course.touched.1 += pages;
            }
        }
    }

    /// Returns the size of the VM's I/O pool at creation.
    pub(crate) fn pool_at_start(&self) -> Option<u64> {
        let pool = self.channel.as_ref()?.pool.as_ref()?;
        Some(pool.config.initial.to_pages().0)
    }

    /// Whether other vCPUs change what they do when this one finishes, because it is the last to boot or to arrive at a barrier.
    pub(crate) fn is_last(&self) -> bool {
        match self.stage {
            Stage::Booting => self.booted + 1 == self.threads.len(),
            _ => self.course.at_barrier + 1 == self.program_threads(),
        }
    }

    fn program_threads(&self) -> usize {
        match self.course.program.as_ref().map(|program| program.threads) {
            None => 0,
            Some(Threads::Single) => 1,
            Some(_) => self.threads.len(),
        }
    }

    fn end_of_touching(&mut self, thread: ThreadIx, now: Ns) -> Next {
        if self
            .course
            .program
            .as_ref()
            .is_some_and(|program| program.barrier.is_some())
        {
            return self.arrive(thread, now);
        }
        self.threads[thread].began = Some(now);
        self.stretch(thread);
        Next::Run
    }

    fn end_of_stretch(&mut self, thread: ThreadIx, now: Ns) -> Next {
        if self
            .course
            .program
            .as_ref()
            .is_some_and(|program| program.barrier.is_some())
        {
            return self.arrive(thread, now);
        }
        self.threads[thread].doing = Doing::Idle;
        if self.threads.iter().any(|thread| {
            matches!(
                thread.doing,
                Doing::Computing | Doing::Touching { .. } | Doing::WaitingForIo | Doing::Resting
            )
        }) {
            return Next::Sleep;
        }
        self.end(now)
    }

    fn end(&mut self, now: Ns) -> Next {
        self.stage = Stage::Ended;
        self.course.ended = Some(now);
        Next::End
    }
}

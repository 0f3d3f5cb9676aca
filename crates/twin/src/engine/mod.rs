//! The engine: time, and who acts on whom.
//!
//! # Time
//!
//! Integer nanoseconds. Everything a scheduler or a guest does is an event at its own time: the end of a slice, a thread
//! that reaches a barrier, a timer. Between events every CPU runs one task at a constant speed. Once per epoch (1 ms by
//! default) caches take in what was missed and latencies are found anew, if anything changed; a task that is switched to
//! in mid-epoch runs at the latencies of the last solution. While a cache is steady its epoch grows up to 64-fold, as far
//! as the drift of miss ratios and occupancies allows; a switch on its CPUs, memory touched or pages on the move bring it
//! back. What ran on it is accounted when its epoch ends. Events at equal time have a fixed order: timers in the order they
//! were set, then CPUs by number, then the scheduler's own, then the epoch.
//!
//! The epoch is a resolution, not a quantum: halving or doubling it changes pinned runs by less than 2 percent, and so does
//! solving in every epoch (tests show it).
//!
//! # Silence
//!
//! An engine that handles a million events without time moving on stops with what it was doing.

mod account;
mod autonuma;
mod balloon;
mod boot;
mod busiest;
mod check;
mod events;
mod exchange;
mod flip;
mod io;
mod moves;
mod permits;
mod placing;
mod releases;
mod runtime;
mod speed;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use busiest::Busiest;
use homenode_machine::{Hardware, Machine};

pub(crate) use events::Script;
pub(crate) use moves::Alike;
pub(crate) use releases::Releases;
pub(crate) use runtime::Runtime;

use crate::cpu_mask::CpuMask;
use crate::guest::autonuma::By;
use crate::guest::vm::Next;
use crate::guest::{Doing, HOUSEKEEPING_PERIOD, Lease, Prepared, Stage, Vm};
use crate::hardware::core::{CoreCost, InLlc, Paging};
use crate::hardware::fabric::Copying;
use crate::hardware::{Fabric, Llc, Sharer, Topology};
use crate::hypervisor::permits::Permits;
use crate::hypervisor::{DAEMON_PERIOD, DAEMON_RUN, HostMemory, Run, Scheduler};
use crate::index::{CpuIx, IxVec, TaskIx, ThreadIx, VmIx, first};
use crate::io::{Device, Plan};
use crate::scenario::{AfterProgram, Attribution, Hypervisor, Scenario, TwinError};
use homenode_units::{Chance, Ns};

/// Events without progress of time after which the engine gives up.
const SILENCE_MAX: u32 = 1_000_000;

/// A task of the scheduler, by what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Vcpu { vm: VmIx, thread: ThreadIx },
    Daemon(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Arrival(VmIx),
    Event(usize),
    Daemon(usize),
    Housekeeping {
        vm: VmIx,
        thread: ThreadIx,
    },
    /// A kernel may be due to scan the memory of a group of threads.
    Scan {
        vm: VmIx,
        by: By,
        group: usize,
        /// Which AutoNUMA of the VM's it belongs to.
        number: u32,
    },
    /// An interrupt that was sent from a CPU arrives at a halted vCPU.
    Wake {
        vm: VmIx,
        thread: ThreadIx,
        waker: CpuIx,
    },
    /// A device may have served a thread's request.
    Served {
        vm: VmIx,
        thread: ThreadIx,
        /// Which life of the VM it belongs to.
        life: u32,
    },
    /// The rate at which a VM's accesses are sampled is chosen anew.
    Sampling {
        vm: VmIx,
        /// Which of the VM's samplings it belongs to.
        number: u32,
    },
    /// Pages that a VM's guest has released are placed anew.
    Releases {
        vm: VmIx,
        /// Which life of the VM it belongs to.
        life: u32,
    },
    /// What a VM's program has allocated is placed.
    Runtime {
        vm: VmIx,
        /// Which life of the VM it belongs to.
        life: u32,
    },
    /// What passed to or from a VM's driver domain is settled.
    Flips {
        vm: VmIx,
    },
    /// The host's permits are settled.
    Permits,
    /// Two vCPUs change places.
    Exchange,
}

/// How fast the current task of a CPU goes.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    cost: CoreCost,
    /// Nanoseconds per unit of the task's work.
    ns_per_unit: f64,
}

/// What the present latencies were found for, on a CPU.
#[derive(Clone, Copy, Debug, Default)]
struct Solved {
    /// The vCPU that ran, if one did.
    task: Option<TaskIx>,
    cost: CoreCost,
    /// Share of its speed that throughput caps left it.
    granted: f64,
}

/// When a cache is brought up to date.
#[derive(Clone, Copy, Debug)]
struct Cadence {
    began: Ns,
    /// How long its epoch may be while nothing is switched on its CPUs.
    stride: Ns,
    due: Ns,
}

/// A running vCPU in a solution.
#[derive(Clone, Copy, Debug)]
struct Loading {
    cpu: CpuIx,
    vm: VmIx,
    thread: ThreadIx,
    /// Its number in the fabric, if it misses at all.
    flow: Option<usize>,
}

/// What the host has counted since it started.
#[derive(Clone, Debug)]
pub(crate) struct Totals {
    nodes: usize,
    /// Bytes that a node read from a node's memory, by `reader * nodes + memory`.
    pub read: Vec<f64>,
    /// Bytes that a node wrote to a node's memory, by `writer * nodes + memory`.
    pub written: Vec<f64>,
    pub busiest: Busiest,
}

impl Totals {
    fn new(nodes: usize, links: usize) -> Totals {
        Totals {
            nodes,
            read: vec![0.0; nodes * nodes],
            written: vec![0.0; nodes * nodes],
            busiest: Busiest::new(links),
        }
    }

    /// Notes bytes that a CPU or device of a node wrote to a node's memory.
    pub fn write(&mut self, writer: usize, memory: usize, bytes: f64) {
        self.written[writer * self.nodes + memory] += bytes;
    }

    /// Notes bytes that were copied from a node's memory to another's, by the latter.
    pub fn copy(&mut self, from: usize, to: usize, bytes: f64) {
        self.read[to * self.nodes + from] += bytes;
        self.write(to, to, bytes);
    }

    /// Bytes moved by each node's controllers.
    pub fn controllers(&self) -> Vec<f64> {
        let mut controllers = vec![0.0; self.nodes];
        for (at, bytes) in self.read.iter().chain(&self.written).enumerate() {
            controllers[at % self.nodes] += bytes;
        }
        controllers
    }

    /// Bytes that went from a node to a node.
    pub fn between(&self, from: usize, to: usize) -> f64 {
        self.read[to * self.nodes + from] + self.written[from * self.nodes + to]
    }
}

/// Who has pages moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    /// A policy, which waits for them.
    Policy,
    /// An event of the scenario.
    Event,
}

/// Pages of a VM on the move.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    pub vm: VmIx,
    pub by: Mover,
    /// Share of time that the VM's vCPUs lose.
    pub stall: f64,
    pub copying: Vec<Copying>,
}

/// The simulated host.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    pub topology: Topology,
    pub hardware: Hardware,
    pub fabric: Fabric,
    pub llcs: Vec<Llc>,
    pub scheduler: Scheduler,
    pub memory: HostMemory,
    /// The host's own ledger, where VMs have permits.
    pub permits: Option<Permits>,
    attribution: Attribution,
    hypervisor: Hypervisor,
    /// Devices that programs of the scenario use.
    pub devices: Vec<Device>,
    /// What the scenario asks for and the machine cannot give, in sentences.
    pub notes: Vec<String>,
    pub vms: IxVec<VmIx, Vm>,
    pub owners: IxVec<TaskIx, Owner>,
    pub totals: Totals,
    pub now: Ns,
    pub version: u64,
    pub chance: Chance,
    seed: u64,
    pub moving: Option<Moving>,
    pub script: Script,
    pub epoch: Ns,
    pub line_bytes: f64,
    clock_ghz: f64,
    /// How many times as long as the machine's figures say threads wait for memory.
    memory_waits: f64,
    /// Whether to solve in every epoch, whatever has changed.
    every_epoch: bool,
    epoch_began: Ns,
    /// When all CPUs were accounted last.
    settled: Ns,
    /// What an interrupt to another CPU costs under this hypervisor.
    ipi_ns: f64,
    /// What a lock costs that changes hands: a line from another node, all alike.
    handoff_ns: f64,
    epoch_end: Ns,
    /// When each cache is brought up to date.
    cadences: Vec<Cadence>,
    timers: BinaryHeap<Reverse<(Ns, u64, Timer)>>,
    timers_set: u64,
    speeds: IxVec<CpuIx, Speed>,
    /// When the current task's work is done, by CPU: apart, since every event looks for the least.
    ends: IxVec<CpuIx, Ns>,
    daemon_left: Vec<f64>,
    daemon_chance: Chance,
    /// Mean time between two exchanges of vCPUs; 0 where there are none.
    exchange_every_ns: f64,
    exchange_chance: Chance,
    /// What caches know of each vCPU.
    sharers: IxVec<TaskIx, Sharer>,
    /// Scratch: pages by the node that a touch placed them on.
    placed: Vec<u64>,
    /// What translating each VM's addresses takes.
    paging: IxVec<VmIx, Paging>,
    /// What each CPU's task asked for at the last solution.
    solved: IxVec<CpuIx, Solved>,
    /// What each CPU's task could use of the cache when last looked at.
    seen: IxVec<CpuIx, InLlc>,
    /// The running vCPUs of a solution, kept for its memory.
    loading: Vec<Loading>,
    dirty: bool,
}

impl Engine {
    pub fn new(machine: &Machine, scenario: &Scenario, seed: u64, epoch: Ns) -> Result<Engine, TwinError> {
        scenario.check_on(machine)?;
        let (topology, hardware) = Topology::new(machine)?;
        let nodes = topology.nodes();
        let line_bytes = f64::from(machine.llcs.first().map_or(64, |llc| llc.line_bytes));
        let mut scheduler = Scheduler::new(&topology, scenario.hypervisor);
        let llc_bytes = machine.llcs.iter().map(|llc| llc.size_bytes.as_f64());
        let llc_lines_max = llc_bytes.fold(line_bytes, f64::max) / line_bytes;
        let (mut vms, mut owners, mut sharers) = (IxVec::new(), IxVec::new(), IxVec::new());
        let mut paging = IxVec::new();
        let mut io = Plan::new(machine);
        for (at, spec) in first(scenario.vms.len()).zip(&scenario.vms) {
            let workload = scenario.workload(spec)?;
            let mut vm = Vm::new(
                spec,
                scenario.hypervisor,
                workload.clone(),
                at,
                TaskIx(owners.len()),
                nodes,
                seed,
            );
            if let Some(home) = &spec.memory_nodes {
                vm.memory.home = Some(
                    home.iter()
                        .map(|n| machine.nodes.position(n).expect("checked"))
                        .collect(),
                );
            }
            let requests = io.requests(spec, scenario.hypervisor, &workload, &hardware);
            for thread in &mut vm.threads {
                thread.requests.restart(requests.clone());
            }
            for next in &spec.then {
                let workload = scenario.workload_named(spec, &next.workload)?;
                vm.then.push_back(Prepared {
                    requests: io.requests(spec, scenario.hypervisor, &workload, &hardware),
                    work_share: next.work_share,
                    workload,
                });
            }
            vm.memory.owns_frames = scenario.owns_frames(spec);
            vm.channel = flip::channel(scenario, spec)?;
            vm.memory.pool = vm.pool_at_start().map(|_| vec![0; nodes]);
            let number = scheduler.add_vm(spec.weight, spec.cap_percent);
            for thread in first(spec.vcpus.into()) {
                scheduler.add(spec.allowed(thread, machine), Some(number));
                owners.push(Owner::Vcpu { vm: at, thread });
            }
            sharers.extend(vm_sharers(&vm, at, line_bytes, llc_lines_max));
            paging.push(vm_paging(&vm, &hardware, scenario.hypervisor));
            vms.push(vm);
        }
        let vcpus = owners.len();
        let total: Vec<u64> = machine
            .nodes
            .values()
            .map(|node| node.memory_bytes.to_pages().0)
            .collect();
        let llc = |cache: &homenode_machine::Llc| {
            let lines = cache.size_bytes.as_f64() / line_bytes;
            Llc::new(lines, cache.replacement.unwrap_or_default(), vcpus)
        };
        let cpus = topology.cpus.len();
        let mut engine = Engine {
            fabric: Fabric::new(&topology, &hardware, line_bytes),
            llcs: machine.llcs.iter().map(llc).collect(),
            scheduler,
            memory: HostMemory::new(total),
            permits: Permits::new(
                scenario.enforcer,
                hardware.clock_hz / 1000,
                line_bytes,
                scenario.vms.iter().map(|vm| vm.permit).collect(),
            ),
            attribution: scenario.attribution,
            hypervisor: scenario.hypervisor,
            devices: io.devices,
            notes: io.notes,
            vms,
            owners,
            totals: Totals::new(nodes, topology.links.len()),
            now: Ns::ZERO,
            version: 1,
            chance: Chance::labelled(seed, "host", 0),
            seed,
            moving: None,
            script: Script::new(scenario, machine),
            epoch,
            line_bytes,
            clock_ghz: hardware.clock_hz as f64 / 1e9,
            memory_waits: scenario.disturbance.memory_waits,
            every_epoch: false,
            epoch_began: Ns::ZERO,
            settled: Ns::ZERO,
            ipi_ns: match scenario.hypervisor {
                Hypervisor::Native => hardware.ipi.native_ns,
                Hypervisor::Kvm | Hypervisor::Xen => hardware.ipi.virtual_ns,
            },
            handoff_ns: 0.0,
            epoch_end: epoch,
            cadences: vec![
                Cadence {
                    began: Ns::ZERO,
                    stride: epoch,
                    due: epoch,
                };
                machine.llcs.len()
            ],
            timers: BinaryHeap::new(),
            timers_set: 0,
            speeds: IxVec::filled(Speed::default(), cpus),
            ends: IxVec::filled(Ns(u64::MAX), cpus),
            daemon_left: Vec::new(),
            daemon_chance: Chance::labelled(seed, "daemons", 0),
            exchange_every_ns: match scenario.vcpu_exchanges_per_minute {
                0.0 => 0.0,
                per_minute => 60e9 / per_minute,
            },
            exchange_chance: Chance::labelled(seed, "exchanges", 0),
            sharers,
            placed: vec![0; nodes],
            paging,
            solved: IxVec::filled(Solved::default(), cpus),
            seen: IxVec::filled(InLlc::default(), cpus),
            loading: Vec::new(),
            dirty: true,
            topology,
            hardware,
        };
        for (vm, arrival) in first(scenario.vms.len()).zip(scenario.arrivals(seed)) {
            if let Some(arrival) = arrival {
                engine.set_timer(arrival, Timer::Arrival(vm));
            }
        }
        let pairs = (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to)));
        let lines = pairs.map(|(from, to)| engine.fabric.latency_between(from, to));
        engine.handoff_ns = lines.sum::<f64>() / (nodes * nodes) as f64;
        engine.set_events();
        engine.start_daemons();
        engine.set_permit_tick();
        engine.set_exchange();
        Ok(engine)
    }

    fn start_daemons(&mut self) {
        for cpus in self
            .topology
            .node_cpus
            .clone()
            .iter()
            .filter(|cpus| !cpus.is_empty())
        {
            let task = self.scheduler.add(CpuMask::all(self.topology.cpus.len()), None);
            self.scheduler.queues.tasks[task].cpu = cpus[0];
            let daemon = self.daemon_left.len();
            self.owners.push(Owner::Daemon(daemon));
            self.daemon_left.push(0.0);
            self.set_daemon(daemon);
        }
    }

    fn set_daemon(&mut self, daemon: usize) {
        let after = self.daemon_chance.exponential(DAEMON_PERIOD.as_f64()) as u64;
        self.set_timer(Ns(self.now.0 + after), Timer::Daemon(daemon));
    }

    fn set_timer(&mut self, at: Ns, timer: Timer) {
        self.timers_set += 1;
        self.timers.push(Reverse((at, self.timers_set, timer)));
    }

    /// Solves in every epoch from now on, as a reference for speed and for what skipping costs in accuracy.
    pub fn solve_every_epoch(&mut self) {
        self.every_epoch = true;
    }

    /// Simulates up to a point in time.
    pub fn run_until(&mut self, end: Ns) {
        let mut silent = 0;
        while self.now < end {
            let (cpu, work) = self.next_of_cpus();
            // A queue that grows shortens the running slice, perhaps to less than has been used of it: it is over now.
            let scheduling = self.scheduler.next_event().max(self.now);
            let timer = self.timers.peek().map_or(Ns(u64::MAX), |Reverse((at, ..))| *at);
            let next = work.min(timer).min(scheduling).min(self.epoch_end).min(end);
            silent = if next > self.now { 0 } else { silent + 1 };
            assert!(silent < SILENCE_MAX, "no progress {}", self.dump());
            self.now = next;
            if next == timer {
                let Reverse((_, _, timer)) = self.timers.pop().expect("peeked above");
                self.fire(timer);
            } else if next == work {
                self.cpu_event(cpu);
            } else if next == scheduling {
                self.scheduler.handle_events(self.now);
                self.after_scheduling();
            } else if next == self.epoch_end {
                self.end_epoch();
            }
        }
    }

    fn next_of_cpus(&self) -> (CpuIx, Ns) {
        let mut soonest = (CpuIx(0), Ns(u64::MAX));
        for (cpu, end) in self.ends.placed() {
            if *end < soonest.1 {
                soonest = (cpu, *end);
            }
        }
        soonest
    }

    fn fire(&mut self, timer: Timer) {
        match timer {
            Timer::Arrival(vm) => self.boot(vm),
            Timer::Event(at) => self.event(at),
            Timer::Daemon(daemon) => {
                let (task, _) = self
                    .owners
                    .placed()
                    .find(|(_, owner)| **owner == Owner::Daemon(daemon))
                    .expect("a daemon has a task");
                if self.scheduler.queues.tasks[task].run == Run::Sleeping {
                    self.daemon_left[daemon] =
                        self.daemon_chance.exponential(DAEMON_RUN.as_f64()).max(1000.0);
                    self.scheduler.wake(task, None, self.now);
                    self.after_scheduling();
                }
                self.set_daemon(daemon);
            }
            Timer::Housekeeping { vm, thread } => {
                self.vms[vm].threads[thread].timer_set = false;
                if self.vms[vm].present() && self.vms[vm].threads[thread].doing == Doing::Idle {
                    self.vms[vm].housekeep(thread);
                    self.scheduler.wake(self.vms[vm].task(thread), None, self.now);
                    self.after_scheduling();
                }
            }
            Timer::Scan {
                vm,
                by,
                group,
                number,
            } => {
                let now = self.vms[vm].autonuma_by(by);
                if now.is_some_and(|autonuma| autonuma.number == number) {
                    self.scan(vm, by, group);
                }
            }
            Timer::Wake { vm, thread, waker } => {
                let task = self.vms[vm].task(thread);
                let sleeps = self.scheduler.queues.tasks[task].run == Run::Sleeping;
                if sleeps && self.vms[vm].present() && self.vms[vm].threads[thread].runnable() {
                    self.scheduler.wake(task, Some(waker), self.now);
                    self.after_scheduling();
                }
            }
            Timer::Served { vm, thread, life } => self.served(vm, thread, life),
            Timer::Sampling { vm, number } => self.sampled(vm, number),
            Timer::Releases { vm, life } => self.place_released(vm, life),
            Timer::Runtime { vm, life } => self.place_allocated(vm, life),
            Timer::Flips { vm } => self.settle_channel(vm),
            Timer::Permits => self.permit_tick(),
            Timer::Exchange => self.exchange(),
        }
    }

    fn boot(&mut self, vm: VmIx) {
        self.version += 1;
        self.create_memory(vm);
        self.set_sampling(vm);
        self.set_host_autonuma(vm);
        self.vms[vm].boot(self.now);
        for thread in self.vms[vm].threads.places() {
            if self.vms[vm].threads[thread].runnable() {
                let task = self.vms[vm].task(thread);
                self.scheduler.fork(task, self.now, &mut self.chance);
                self.after_scheduling();
            }
        }
        self.show_nodes(vm);
    }

    /// A CPU's task has finished what it was doing.
    fn cpu_event(&mut self, cpu: CpuIx) {
        self.scheduler.settle(cpu, self.now);
        self.apply_segments();
        let task = self
            .scheduler
            .queues
            .current(cpu)
            .expect("a CPU with an end runs a task");
        match self.owners[task] {
            Owner::Daemon(_) => {
                self.scheduler.sleep(cpu, self.now);
                self.after_scheduling();
            }
            Owner::Vcpu { vm, thread } => self.vcpu_done(cpu, vm, thread),
        }
    }

    fn vcpu_done(&mut self, cpu: CpuIx, vm: VmIx, thread: ThreadIx) {
        self.vms[vm].threads[thread].left = 0.0;
        self.vms[vm].threads[thread].owed_ns = 0.0;
        self.finish_touch(cpu, vm, thread);
        if self.vms[vm].is_last() {
            self.settle_vm(vm);
        }
        let next = match self.request(vm, thread) {
            Some(next) => next,
            None => self.vms[vm].next(thread, self.now),
        };
        let next = match next {
            Next::End => self.next_program(vm).unwrap_or(Next::End),
            next => next,
        };
        if next == Next::End && self.vms[vm].after == AfterProgram::Leave {
            self.leave(vm);
            return;
        }
        if next == Next::Start {
            self.start_scanning(vm, By::Guest);
            self.start_scanning(vm, By::Host);
            self.start_releases(vm);
            self.start_runtime(vm);
        }
        // Wake-ups come from the CPU of the thread that released the others: while it still runs there.
        if matches!(next, Next::Start | Next::Release | Next::End) {
            let ipi_ns = if next == Next::Release { self.ipi_ns } else { 0.0 };
            self.rouse(cpu, vm, thread, ipi_ns);
        }
        if self.vms[vm].threads[thread].runnable() {
            if self.vms[vm].threads[thread].doing == Doing::Spinning {
                self.unsettle(cpu);
            }
            self.set_speed(cpu);
        } else {
            self.set_housekeeping(vm, thread);
            // Whoever it woke may have taken its CPU.
            self.scheduler.stop(self.vms[vm].task(thread), self.now);
        }
        self.after_scheduling();
    }

    /// A VM's program has ended: its guest begins the next, if there is one.
    fn next_program(&mut self, vm: VmIx) -> Option<Next> {
        let next = self.vms[vm].begin_next(self.now)?;
        self.fit_program(vm);
        Some(next)
    }

    /// Caches and TLBs learn of the program that a VM begins: nothing of it is in them.
    fn fit_program(&mut self, vm: VmIx) {
        let lines_max = self.llcs.iter().map(Llc::lines).fold(1.0, f64::max);
        let sharers = vm_sharers(&self.vms[vm], vm, self.line_bytes, lines_max);
        self.paging[vm] = vm_paging(&self.vms[vm], &self.hardware, self.hypervisor);
        for (number, sharer) in self.vms[vm].tasks().zip(sharers) {
            self.sharers[number] = sharer;
            self.llcs.iter_mut().for_each(|llc| llc.forget(number.0));
        }
    }

    /// Accounts the vCPUs of a VM up to now: what they do is about to change.
    fn settle_vm(&mut self, vm: VmIx) {
        for thread in self.vms[vm].threads.places() {
            let task = &self.scheduler.queues.tasks[self.vms[vm].task(thread)];
            if task.run == Run::Running {
                self.scheduler.settle(task.cpu, self.now);
            }
        }
        self.apply_segments();
    }

    /// Lets the other vCPUs of a VM take up what they have to do now. Those that sleep are woken, by interrupts one after
    /// the other that each cost the waker; those that have nothing to do any more go to sleep.
    fn rouse(&mut self, cpu: CpuIx, vm: VmIx, rouser: ThreadIx, ipi_ns: f64) {
        let mut sent_ns = 0.0;
        for other in self.vms[vm].threads.places().filter(|other| *other != rouser) {
            let task = self.vms[vm].task(other);
            match (
                self.scheduler.queues.tasks[task].run,
                self.vms[vm].threads[other].runnable(),
            ) {
                (Run::Sleeping, true) if ipi_ns > 0.0 => {
                    sent_ns += ipi_ns;
                    let wake = Timer::Wake {
                        vm,
                        thread: other,
                        waker: cpu,
                    };
                    self.set_timer(Ns(self.now.0 + sent_ns as u64), wake);
                }
                (Run::Sleeping, true) => {
                    self.scheduler.wake(task, Some(cpu), self.now);
                    self.after_scheduling();
                }
                (Run::Sleeping, false) => self.set_housekeeping(vm, other),
                (Run::Running, true) => {
                    let cpu = self.scheduler.queues.tasks[task].cpu;
                    self.unsettle(cpu);
                    self.set_speed(cpu);
                }
                (Run::Waiting | Run::Throttled, true) => {}
                (Run::Running | Run::Waiting | Run::Throttled, false) => {
                    self.set_housekeeping(vm, other);
                    self.scheduler.stop(task, self.now);
                    self.after_scheduling();
                }
            }
        }
        self.vms[vm].threads[rouser].owed_ns += sent_ns;
    }

    /// A halted vCPU that waits for nothing wakes now and then for its kernel's timers.
    fn set_housekeeping(&mut self, vm: VmIx, thread: ThreadIx) {
        let state = &mut self.vms[vm].threads[thread];
        if state.doing == Doing::Idle && !state.timer_set {
            state.timer_set = true;
            let after = self.chance.exponential(HOUSEKEEPING_PERIOD.as_f64()).max(1e6) as u64;
            self.set_timer(Ns(self.now.0 + after), Timer::Housekeeping { vm, thread });
        }
    }

    fn leave(&mut self, vm: VmIx) {
        self.vms[vm].stage = Stage::Gone;
        self.version += 1;
        let Vm {
            autonuma,
            host_autonuma,
            ..
        } = &mut self.vms[vm];
        for group in autonuma
            .iter_mut()
            .chain(host_autonuma)
            .flat_map(|autonuma| &mut autonuma.groups)
        {
            group.copying.clear();
        }
        for thread in self.vms[vm].threads.places() {
            let task = self.vms[vm].task(thread);
            self.scheduler.stop(task, self.now);
            self.after_scheduling();
            for llc in &mut self.llcs {
                llc.forget(task.0);
            }
        }
        self.set_quota(vm, None);
        self.vms[vm].limit = None;
        self.forget_permit(vm);
        let pages = self.vms[vm].memory.pages();
        self.memory.release(&pages);
    }

    /// Holds a VM's vCPUs to a quota from now on, or no longer; renewing one changes its lease only.
    pub fn set_quota(&mut self, vm: VmIx, lease: Option<Lease>) {
        let before = std::mem::replace(&mut self.vms[vm].quota, lease);
        let quota = lease.map(|lease| lease.quota);
        if quota == before.map(|before| before.quota) {
            return;
        }
        let vcpus = self.vms[vm].tasks();
        let times = quota.map(|quota| (quota.run_ns, quota.period_ns));
        self.scheduler.set_quota(vcpus, times, self.now);
        self.after_scheduling();
        self.version += 1;
    }

    /// Whether neither what a CPU runs now nor what it ran when latencies were found accesses its cache.
    fn asks_nothing(&self, cpu: CpuIx) -> bool {
        let runs = self.scheduler.queues.current(cpu).is_some();
        let now = if runs { self.speeds[cpu].cost.accesses } else { 0.0 };
        now == 0.0 && self.solved[cpu].cost.accesses == 0.0
    }

    /// A CPU does something else now: its cache is looked at soon.
    pub(super) fn unsettle(&mut self, cpu: CpuIx) {
        let soon = self.next_boundary();
        let cadence = &mut self.cadences[self.topology.cpus[cpu].llc];
        cadence.due = cadence.due.min(soon);
        self.epoch_end = self.epoch_end.min(soon);
    }

    /// Memory is loaded otherwise now: latencies are found anew, soon.
    pub(super) fn solve_soon(&mut self) {
        self.dirty = true;
        self.epoch_end = self.epoch_end.min(self.next_boundary());
    }

    /// Epochs end at multiples of the base length, so that those of several caches end together.
    fn next_boundary(&self) -> Ns {
        Ns((self.now.0 / self.epoch.0 + 1) * self.epoch.0)
    }

    /// After the scheduler acted: accounts what ran, and sets the speed of what runs now.
    pub fn after_scheduling(&mut self) {
        self.apply_segments();
        let mut switched = std::mem::take(&mut self.scheduler.queues.switched);
        for cpu in switched.drain(..) {
            self.set_speed(cpu);
            // Who asks nothing of caches and memory may come and go unnoticed, unless a sibling feels it.
            let alone = self.topology.cpus[cpu].siblings.is_empty();
            if !(alone && self.asks_nothing(cpu)) {
                self.unsettle(cpu);
            }
            // Siblings now share the core with another task, or with none.
            for at in 0..self.topology.cpus[cpu].siblings.len() {
                let sibling = self.topology.cpus[cpu].siblings[at];
                self.scheduler.settle(sibling, self.now);
                self.apply_segments();
                self.set_speed(sibling);
            }
        }
        self.scheduler.queues.switched = switched;
    }
}

/// What caches know of a VM's vCPUs. Most lines that one thread can use: its private memory and all that is shared.
fn vm_sharers(vm: &Vm, number: VmIx, line_bytes: f64, lines_max: f64) -> Vec<Sharer> {
    let regions = vm.program.iter().flat_map(|program| &program.regions);
    let footprint = regions.map(|region| region.size.as_f64()).sum::<f64>() / line_bytes;
    let miss_ratio = |lines: f64| match &vm.program {
        Some(program) => program.miss_ratio.at(lines * line_bytes),
        None => 1.0,
    };
    let sharer = Sharer::new(lines_max, footprint, miss_ratio);
    let threads = vm.threads.iter();
    threads
        .map(|thread| sharer.clone().in_group(number.0, thread.shared_share))
        .collect()
}

/// What translating addresses of a VM's program takes.
fn vm_paging(vm: &Vm, hardware: &Hardware, hypervisor: Hypervisor) -> Paging {
    let in_guest = hypervisor != Hypervisor::Native;
    let translate = |program| Paging::new(hardware, vm.page_size, program, in_guest);
    vm.program.as_ref().map_or_else(Paging::default, translate)
}

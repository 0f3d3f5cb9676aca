//! The engine: simulated time, and the events that drive the host.
//!
//! # Time
//!
//! Time is in integer nanoseconds. Everything that a scheduler or a guest does is an event at its own time: the end of a slice, a
//! thread that reaches a barrier, a timer. Between events every CPU runs one task at a constant speed. At the end of each epoch
//! (1 ms by default) the caches take in the misses, and latencies are solved again if anything changed. A task that a CPU
//! switches to within an epoch runs at the latencies of the last solution. While a cache is steady, its epoch grows up to
//! 64-fold, as far as the drift of miss ratios and occupancies allows. Another vCPU on one of its CPUs, touched memory or moving
//! pages shorten it again to the base length. A vCPU that pauses and continues shortens it to four times as long. What ran on its
//! CPUs is accounted when its epoch ends. Events at equal time have a fixed order: timers in the order in which they were set,
//! then CPUs by number, then the scheduler's own events, then the epoch.
//!
//! The epoch is a resolution, not a quantum: halving or doubling it changes pinned runs by less than 2 percent, and so does
//! solving in every epoch (tests show it).
//!
//! # Silence
//!
//! An engine that handles a million events while time does not advance stops and reports what it was doing.

mod account;
mod agenda;
mod autonuma;
mod background;
mod balloon;
mod boot;
mod build;
mod busiest;
mod check;
mod daemons;
mod epochs;
mod events;
mod exchange;
mod figures;
mod flip;
mod io;
pub(crate) mod moves;
mod pace;
mod permits;
mod placing;
mod releases;
mod runtime;
mod script;
mod speed;
mod threads;
mod totals;
mod vcpus;

use homenode_machine::Hardware;
use homenode_units::{Chance, Ns};

use agenda::{Agenda, Timer};
use background::{Daemons, Exchanges};
use epochs::Epochs;
use figures::Figures;
use pace::Pace;
use totals::Totals;

pub(crate) use script::Script;

use crate::guest::Vm;
use crate::hardware::fabric::Copying;
use crate::hardware::{Fabric, Llc, Topology};
use crate::hypervisor::permits::Permits;
use crate::hypervisor::{HostMemory, Scheduler};
use crate::index::{IxVec, TaskIx, ThreadIx, VmIx};
use crate::io::Device;
use crate::scenario::{Attribution, Hypervisor};

/// Number of events without progress of time after which the engine gives up.
const SILENCE_MAX: u32 = 1_000_000;

/// The owner of a task of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Vcpu { vm: VmIx, thread: ThreadIx },
    Daemon(usize),
}

/// The cause of a page move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    /// A policy, which waits until the pages have moved.
    Policy,
    /// An event of the scenario.
    Event,
}

/// Pages of a VM that are being moved.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    pub vm: VmIx,
    pub by: Mover,
    /// Share of time that the VM's vCPUs lose to the move.
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
    /// Devices that the scenario's programs use.
    pub devices: Vec<Device>,
    /// Time at which each VM's backend has passed on all packets that it got, in nanoseconds.
    backends_free_ns: IxVec<VmIx, f64>,
    figures: Figures,
    pub scheduler: Scheduler,
    pub memory: HostMemory,
    /// The host's own ledger, if VMs have permits.
    pub permits: Option<Permits>,
    attribution: Attribution,
    hypervisor: Hypervisor,
    /// Whether the host's kernel balances NUMA memory; `None` if it is not Linux.
    pub numa_balancing: Option<bool>,
    pub vms: IxVec<VmIx, Vm>,
    pub owners: IxVec<TaskIx, Owner>,
    daemons: Daemons,
    exchanges: Exchanges,
    pub script: Script,
    pub moving: Option<Moving>,
    /// VMs whose pages a kernel moves, in order. Every solution asks what is being copied, and most VMs have no such kernel.
    movers: Vec<VmIx>,
    pub totals: Totals,
    /// Requests of the scenario that the machine cannot meet, as sentences.
    pub notes: Vec<String>,
    pub now: Ns,
    pub version: u64,
    seed: u64,
    pub chance: Chance,
    agenda: Agenda,
    pub epochs: Epochs,
    pace: Pace,
    /// Scratch: number of pages that a touch placed on each node.
    placed: Vec<u64>,
}

impl Engine {
    /// Solves in every epoch from now on: a reference for speed, and for the accuracy that skipping solutions costs.
    pub(crate) fn solve_every_epoch(&mut self) {
        self.epochs.always_solve = true;
    }

    /// Simulates up to a point in time.
    pub(crate) fn run_until(&mut self, end: Ns) {
        let mut silent = 0;
        while self.now < end {
            let work = self.pace.first_end();
            // A growing queue shortens the running slice, perhaps to less than the task has already used. The slice is then over.
            let scheduling = self.scheduler.next_event().max(self.now);
            let timer = self.agenda.next();
            let next = work.min(timer).min(scheduling).min(self.epochs.end).min(end);
            silent = if next > self.now { 0 } else { silent + 1 };
            assert!(silent < SILENCE_MAX, "no progress {}", self.dump());
            self.now = next;
            if next == timer {
                let timer = self.agenda.take().expect("peeked above");
                self.fire(timer);
            } else if next == work {
                self.cpu_event(self.pace.ends_at(work).expect("found above"));
            } else if next == scheduling {
                self.scheduler.handle_events(self.now);
                self.after_scheduling();
            } else if next == self.epochs.end {
                self.end_epoch();
            }
        }
    }

    fn fire(&mut self, timer: Timer) {
        match timer {
            Timer::Arrival(vm) => self.boot(vm),
            Timer::Event(at) => self.event(at),
            Timer::Daemon(daemon) => self.wake_daemon(daemon),
            Timer::Housekeeping { vm, thread } => self.housekeep(vm, thread),
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
            Timer::Wake { vm, thread, waker } => self.interrupt(vm, thread, waker),
            Timer::Served { vm, thread, life } => self.served(vm, thread, life),
            Timer::Sampling { vm, number } => self.sampled(vm, number),
            Timer::Releases { vm, life } => self.place_released(vm, life),
            Timer::Runtime { vm, life } => self.place_allocated(vm, life),
            Timer::Flips { vm } => self.settle_channel(vm),
            Timer::Permits => self.permit_tick(),
            Timer::Exchange => self.exchange(),
            Timer::ThreadMove { vm, life } => self.move_thread(vm, life),
        }
    }
}

//! A guest's scheduler moves a program's threads between vCPUs ([`crate::VmSpec::thread_moves_per_minute`]).
//!
//! # Model
//!
//! A guest's daemon takes a vCPU from a program's thread. Another vCPU falls idle when its thread waits for the first one, so the
//! guest's scheduler moves the first thread there; the other thread later gets the free vCPU (`newidle_balance` and
//! `select_idle_sibling` of Linux's `kernel/sched/fair.c`). So two threads exchange vCPUs. In the simulator this happens at
//! random, at the rate that the scenario gives. Each pair of threads is equally likely, because a guest that sees one node has
//! one scheduling domain. So has the guest of [XPV, section 4.3.2], even if it knows its nodes: "we only build a single domain
//! containing all the CPUs of the VM". The rate is that of a thread: published counts of programs with 4 to 40 threads differ by
//! less per thread than per machine (`data/experiments/xpv.toml`).
//!
//! The pages of the two threads stay where they are, and so do the lines that they have in caches. So a thread that comes to
//! another node finds its memory remote and its cache without its lines.
//!
//! If the guest's kernel balances NUMA memory, it also moves threads to their memory after a scan: a thread exchanges vCPUs with
//! one on the node that holds most of its memory, if the two together gain (`task_numa_migrate`). The kernel uses the nodes that
//! it believes its vCPUs to be on.
//!
//! # Left out
//!
//! The progress, waits and counts of the two threads: they stay with the vCPU, because a program's threads are alike. Moves while
//! a program first touches its memory. Moves to an idle vCPU: a program of one thread stays. The time that the guest's scheduler
//! needs. A guest's kernel whose threads have no rate of moves: it does not move them to their memory either.

use homenode_units::{Chance, Ns};

use super::Engine;
use super::agenda::Timer;
use crate::guest::view::By;
use crate::guest::{Doing, Stage, Thread};
use crate::hypervisor::Run;
use crate::index::{ThreadIx, VmIx};
use crate::scenario::VmSpec;

/// Smallest share of two threads' accesses that an exchange must make local to be worthwhile (`SMALLIMP`, 30 of 1000).
const GAIN_LEAST: f64 = 0.03;

/// How often the guest of a VM moves threads.
#[derive(Clone, Debug)]
pub(super) struct ThreadMoves {
    /// Mean time between two exchanges; 0 if there are none.
    every_ns: f64,
    chance: Chance,
}

impl ThreadMoves {
    /// Creates the moves of a VM. An exchange moves two threads.
    pub(super) fn new(spec: &VmSpec, seed: u64, vm: VmIx) -> ThreadMoves {
        let exchanges_per_minute = spec.thread_moves_per_minute * f64::from(spec.vcpus) / 2.0;
        let is_still = exchanges_per_minute <= 0.0 || spec.vcpus < 2;
        ThreadMoves {
            every_ns: if is_still {
                0.0
            } else {
                60e9 / exchanges_per_minute
            },
            chance: Chance::labelled(seed, "thread moves", vm.0),
        }
    }
}

/// Whether a thread has touched its memory and runs its program.
fn is_at_work(thread: &Thread) -> bool {
    let works = matches!(
        thread.doing,
        Doing::Computing | Doing::WaitingForIo | Doing::Resting | Doing::AtBarrier | Doing::Spinning
    );
    works && thread.touches.is_empty()
}

impl Engine {
    /// Sets the time of the next exchange of two threads of a VM, if its guest moves threads.
    pub(super) fn set_thread_move(&mut self, vm: VmIx) {
        let moves = &mut self.exchanges.threads[vm];
        if moves.every_ns > 0.0 {
            let after = moves.chance.exponential(moves.every_ns).max(1.0) as u64;
            let life = self.vms[vm].life;
            let at = Ns(self.now.0.saturating_add(after));
            self.agenda.set(at, Timer::ThreadMove { vm, life });
        }
    }

    /// Exchanges two threads of a VM, drawn at random, if both are at work.
    pub(super) fn move_thread(&mut self, vm: VmIx, life: u32) {
        let owner = &self.vms[vm];
        if owner.life != life || !owner.present() {
            return;
        }
        self.set_thread_move(vm);
        let threads = self.vms[vm].threads.len() as u64;
        let chance = &mut self.exchanges.threads[vm].chance;
        let one = chance.below(threads);
        let other = (one + 1 + chance.below(threads - 1)) % threads;
        let (one, other) = (ThreadIx(one as usize), ThreadIx(other as usize));
        if self.may_exchange(vm, one) && self.may_exchange(vm, other) {
            self.exchange_threads(vm, one, other);
        }
    }

    fn may_exchange(&self, vm: VmIx, thread: ThreadIx) -> bool {
        let owner = &self.vms[vm];
        owner.stage == Stage::Program && is_at_work(&owner.threads[thread])
    }

    fn exchange_threads(&mut self, vm: VmIx, one: ThreadIx, other: ThreadIx) {
        self.settle_vm(vm);
        let owner = &mut self.vms[vm];
        owner.memory.exchange(one, other);
        let tasks = [owner.task(one), owner.task(other)];
        for llc in &mut self.llcs {
            llc.exchange(tasks[0].0, tasks[1].0);
        }
        for task in tasks {
            let task = &self.scheduler.queues.tasks[task];
            let (is_running, cpu) = (task.run == Run::Running, task.cpu);
            if is_running {
                self.set_speed(cpu);
                self.unsettle(cpu);
            }
        }
        self.epochs.solve_soon(self.now);
    }

    /// Lets a guest's kernel move threads to the nodes that hold most of the memory they use, as far as it knows its nodes. A
    /// thread changes places with the one that loses least there, if the two together gain.
    pub(super) fn draw_threads(&mut self, vm: VmIx) {
        if self.exchanges.threads[vm].every_ns <= 0.0 {
            return;
        }
        for thread in self.vms[vm].threads.places() {
            self.vms[vm].memory.weigh();
            if let Some(other) = self.better_placed(vm, thread) {
                self.exchange_threads(vm, thread, other);
            }
        }
    }

    /// Returns the thread with which a thread would best exchange vCPUs to be nearer to its memory, or `None` if it should stay.
    fn better_placed(&self, vm: VmIx, thread: ThreadIx) -> Option<ThreadIx> {
        if !self.may_exchange(vm, thread) {
            return None;
        }
        let memory = &self.vms[vm].memory;
        let node_of = |thread| self.node_seen(vm, By::Guest, thread);
        let uses = |thread, node: usize| memory.weights(thread)[node];
        let from = node_of(thread);
        let mut to = from;
        for node in 0..self.topology.nodes() {
            if uses(thread, node) > uses(thread, to) {
                to = node;
            }
        }
        let gain = uses(thread, to) - uses(thread, from);
        if to == from || gain < GAIN_LEAST {
            return None;
        }
        let mut best = None;
        for other in self.vms[vm].threads.places() {
            if node_of(other) != to || !self.may_exchange(vm, other) {
                continue;
            }
            let both = gain + uses(other, from) - uses(other, to);
            if both >= GAIN_LEAST && best.is_none_or(|(_, most)| both > most) {
                best = Some((other, both));
            }
        }
        best.map(|(other, _)| other)
    }
}

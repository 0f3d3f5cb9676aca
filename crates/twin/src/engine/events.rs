//! Events of a scenario: starts, stops, balloons, moves of memory, pins, changes of behaviour.
//!
//! # Model
//!
//! - A VM that is started again is a new VM under the old name: it boots, its guest has touched nothing, and its pins and home
//!   are those of the scenario. Its counts continue.
//! - A balloon acts at once. If it leaves a guest less memory than the guest has touched, the guest releases pages drawn evenly
//!   from those it can spare. It never releases what a running program needs: the balloon then stops there, and the report says
//!   so. A larger target returns nothing at once: pages come when they are touched.
//! - Memory moves as under a policy ([`super::moves`]), one VM after the other. The end of each epoch moves what that epoch had
//!   time for. An event's move waits while a policy moves pages.
//!
//! # Left out
//!
//! The time that a guest takes to find pages for its balloon; swapping, which a balloon below the needed size would cause.

use homenode_units::{Bytes, Pages};

use super::agenda::Timer;
use super::script::{Event, Migration};
use super::{Engine, Mover, Moving};
use crate::guest::{Factors, Stage};
use crate::index::{ThreadIx, VmIx, first};
use crate::report::{EventReport, EventResult};
use crate::scenario::EventAction;

impl Engine {
    /// Sets a timer for each event of a new engine.
    pub(super) fn set_events(&mut self) {
        for at in 0..self.script.events.len() {
            self.agenda.set(self.script.events[at].at, Timer::Event(at));
        }
        let fresh = self.vms.placed().map(|(at, vm)| {
            let allowed = |task| self.scheduler.queues.tasks[task].allowed.clone();
            let starts = self.script.starts(at);
            starts.then(|| (vm.clone(), vm.tasks().map(allowed).collect()))
        });
        self.script.fresh = fresh.collect();
    }

    pub(super) fn event(&mut self, at: usize) {
        let Event { vm, action, to, .. } = self.script.events[at].clone();
        let entry = self.script.log.len();
        self.script.log.push(EventReport {
            at_s: self.now.as_secs_f64(),
            vm: self.vms[vm].name.clone(),
            event: action.name(),
            result: EventResult::Done,
            note: None,
        });
        let (result, note) = match action {
            EventAction::Start => self.start(vm),
            _ if !self.vms[vm].present() => (EventResult::Skipped, Some("the VM is not running".to_owned())),
            EventAction::Stop => {
                self.settle_all();
                self.leave(vm);
                (EventResult::Done, None)
            }
            EventAction::Balloon { memory } => self.balloon(vm, memory),
            EventAction::Migrate { memory_max, .. } => {
                self.epochs.solve_soon(self.now);
                self.script.migrations.push_back(Migration {
                    entry,
                    vm,
                    to,
                    since: self.now,
                    left: memory_max.map_or(u64::MAX, |bytes| bytes.to_pages().0),
                    moved: 0,
                    carry: 0.0,
                    over: false,
                });
                (EventResult::Running, None)
            }
            EventAction::Pin { .. } => {
                self.settle_all();
                for task in self.vms[vm].tasks() {
                    let allowed = self.script.events[at].allowed.clone();
                    self.scheduler.set_affinity(task, allowed, self.now);
                    self.after_scheduling();
                }
                self.version += 1;
                (EventResult::Done, None)
            }
            EventAction::Gather { thread } => {
                self.settle_all();
                let owner = &mut self.vms[vm];
                owner.memory.gather(ThreadIx(thread.into()));
                for (at, thread) in first(owner.threads.len()).zip(&mut owner.threads) {
                    thread.shared_share = owner.memory.shared_share(at);
                }
                self.set_speeds_of(vm);
                self.epochs.solve_soon(self.now);
                (EventResult::Done, None)
            }
            EventAction::Phase {
                llc_access_factor,
                cpi_factor,
                rest_factor,
            } => {
                self.settle_all();
                self.vms[vm].course.factors = Factors {
                    llc_accesses: llc_access_factor,
                    cycles: cpi_factor,
                    rest: rest_factor,
                };
                self.set_speeds_of(vm);
                (EventResult::Done, None)
            }
        };
        self.script.log[entry].result = result;
        self.script.log[entry].note = note;
    }

    fn start(&mut self, vm: VmIx) -> (EventResult, Option<String>) {
        self.script.starts_left -= 1;
        match self.vms[vm].stage {
            Stage::Absent => {}
            Stage::Gone => {
                let (mut fresh, allowed) = self.script.fresh[vm].clone().expect("an event starts it");
                fresh.counts_on(&self.vms[vm]);
                self.vms[vm] = fresh;
                self.backends_free_ns[vm] = 0.0;
                self.fit_program(vm);
                self.find_movers();
                for (task, allowed) in self.vms[vm].tasks().zip(&allowed) {
                    self.scheduler.set_affinity(task, allowed.clone(), self.now);
                }
            }
            _ => return (EventResult::Skipped, Some("the VM is already running".to_owned())),
        }
        self.boot(vm);
        (EventResult::Done, None)
    }

    fn balloon(&mut self, vm: VmIx, memory: Bytes) -> (EventResult, Option<String>) {
        let owner = &mut self.vms[vm];
        let needs = owner.needs();
        // From here on the operator controls the VM's memory, so its limit ends.
        owner.limits.memory = None;
        let asked = memory.to_pages().0;
        let left = asked.max(owner.memory.needed(needs));
        let back = owner.memory.pages().iter().sum::<u64>().saturating_sub(left);
        let pages = owner.memory.give_back(back, needs, &mut self.chance);
        self.memory.release(&pages);
        self.resize(vm, Pages(left).to_bytes());
        self.version += 1;
        if left == asked {
            return (EventResult::Done, None);
        }
        let note = format!("asked for {memory}; the guest needs {}", Pages(left).to_bytes());
        (EventResult::Partly, Some(note))
    }

    /// Moves pages for the events' migrations, as many as one epoch has time for.
    pub(super) fn migrate_slice(&mut self) {
        if self
            .moving
            .as_ref()
            .is_some_and(|moving| moving.by == Mover::Policy)
        {
            return;
        }
        // Pages copied during the last epoch have arrived.
        self.epochs.dirty |= self.moving.take().is_some();
        while self.script.migrations.front().is_some_and(|front| front.over) {
            self.script.migrations.pop_front();
        }
        let Some(mut work) = self.script.migrations.pop_front() else {
            return;
        };
        let count = if self.vms[work.vm].present() {
            let from: Vec<usize> = (0..self.topology.nodes())
                .filter(|node| !work.to.contains(node))
                .collect();
            let page_ns = self.page_move_ns(work.vm, &from, &work.to);
            // A migration that waited for another began when the epoch did.
            let slice = (self.now.0 - work.since.max(self.epochs.began).0) as f64;
            work.carry += slice / page_ns;
            let budget = (work.carry as u64).min(work.left);
            work.carry -= budget as f64;
            self.moving = Some(Moving {
                vm: work.vm,
                by: Mover::Event,
                stall: self.move_stall(work.vm, page_ns),
                copying: Vec::new(),
            });
            let memory = &mut self.vms[work.vm].memory;
            let done = memory.migrate(&from, &work.to, budget, &mut self.memory.free, &mut self.chance);
            self.count_copies(work.vm, &done, page_ns, slice.max(1.0));
            let count: u64 = done.iter().map(|(_, _, pages)| pages).sum();
            work.over = count < budget;
            count
        } else {
            work.over = true;
            0
        };
        work.moved += count;
        work.left -= count;
        work.over |= work.left == 0;
        if work.over {
            self.report_migration(&work);
        }
        self.script.migrations.push_front(work);
    }

    fn report_migration(&mut self, work: &Migration) {
        let vm = &self.vms[work.vm];
        let pages = vm.memory.pages();
        let outside = pages
            .iter()
            .enumerate()
            .filter(|(node, _)| !work.to.contains(node));
        let left: u64 = outside.map(|(_, pages)| pages).sum();
        let (result, why) = match (vm.present(), left) {
            (false, _) => (EventResult::Partly, ", then the VM left"),
            (true, 0) => (EventResult::Done, ""),
            (true, _) if work.left == 0 => (EventResult::Done, ", the requested maximum"),
            (true, _) => (EventResult::Partly, ", then the nodes were full"),
        };
        let (moved, until) = (Pages(work.moved).to_bytes(), self.now);
        let entry = &mut self.script.log[work.entry];
        entry.result = result;
        entry.note = Some(format!("moved {moved} until {until}{why}"));
    }
}

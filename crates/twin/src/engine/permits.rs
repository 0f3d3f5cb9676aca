//! Ticks of the host's own permits: the host reads counters, settles accounts, and stops VMs or lets them run.

use homenode_host::Counters;
use homenode_policy::permits::meter::Reading;
use homenode_units::Ns;

use super::Engine;
use super::agenda::Timer;
use crate::guest::Thread;
use crate::hypervisor::Task;
use crate::hypervisor::permits::{Measure, PERIOD, TICK};
use crate::index::VmIx;
use crate::scenario::Attribution;

impl Engine {
    pub(super) fn set_permit_tick(&mut self) {
        if self.permits.is_some() {
            self.agenda.set(Ns(self.now.0 + TICK.0), Timer::Permits);
        }
    }

    pub(super) fn permit_tick(&mut self) {
        self.settle_all();
        let Some(mut permits) = self.permits.take() else {
            return;
        };
        permits.tick();
        for vm in self.vms.places() {
            if permits.permit(vm).is_none() || !self.vms[vm].present() {
                continue;
            }
            let measure = permits.settle(vm, self.readings(vm));
            self.enforce(vm, measure);
        }
        self.permits = Some(permits);
        self.set_permit_tick();
    }

    /// Forgets a VM that leaves the host, so that no permit stops it after it is started again.
    pub(super) fn forget_permit(&mut self, vm: VmIx) {
        let measure = self.permits.as_mut().map(|permits| permits.forget(vm));
        self.enforce(vm, measure.unwrap_or(Measure::None));
    }

    fn enforce(&mut self, vm: VmIx, measure: Measure) {
        let vcpus = self.vms[vm].tasks();
        match measure {
            Measure::None => return,
            Measure::Standing(standing) => self.scheduler.set_standing(vcpus, standing, self.now),
            Measure::Quota(run) => {
                let quota = run.map(|run| (run, PERIOD));
                self.scheduler.set_quota(vcpus, quota, self.now);
            }
        }
        self.after_scheduling();
    }

    /// Returns the counters of a VM's vCPUs. The misses are those that the host attributes to the VM.
    fn readings(&self, vm: VmIx) -> Vec<Reading> {
        let owner = &self.vms[vm];
        let tasks = owner.tasks().map(|task| &self.scheduler.queues.tasks[task]);
        let reading = |(thread, task): (&Thread, &Task)| {
            let misses = match (self.attribution, &owner.course.program) {
                (Attribution::Replay, Some(program)) => {
                    let llc = &self.llcs[self.topology.cpus[task.cpu].llc];
                    thread.llc_references * program.miss_ratio.at(llc.lines() * self.figures.line_bytes)
                }
                _ => thread.llc_misses,
            };
            Reading {
                counters: Some(Counters {
                    instructions: thread.instructions as u64,
                    cycles: thread.cycles as u64,
                    llc_references: Some(thread.llc_references as u64),
                    llc_misses: Some(misses as u64),
                }),
                running_ns: Ns(task.running_ns),
                counted_ns: Ns(task.running_ns),
            }
        };
        owner.threads.iter().zip(tasks).map(reading).collect()
    }
}

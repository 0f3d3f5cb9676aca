//! A balancer of which only the rate is known: at random times two running vCPUs on different nodes, drawn at random, change
//! places ([`crate::Scenario::vcpu_exchanges_per_minute`]). Caches, memory and load play no part.

use homenode_units::Ns;

use crate::index::{CpuIx, TaskIx};

use super::agenda::Timer;
use super::{Engine, Owner};

impl Engine {
    pub(super) fn set_exchange(&mut self) {
        if self.exchanges.every_ns > 0.0 {
            let after = self
                .exchanges
                .chance
                .exponential(self.exchanges.every_ns)
                .max(1.0) as u64;
            self.agenda
                .set(Ns(self.now.0.saturating_add(after)), Timer::Exchange);
        }
    }

    /// Exchanges two vCPUs that may each use the other's CPU, if there are two such.
    pub(super) fn exchange(&mut self) {
        self.set_exchange();
        let queues = &self.scheduler.queues;
        let running = self
            .topology
            .cpus
            .places()
            .filter_map(|cpu| Some((cpu, queues.current(cpu)?)));
        let vcpus: Vec<(CpuIx, TaskIx)> = running
            .filter(|(_, task)| matches!(self.owners[*task], Owner::Vcpu { .. }))
            .collect();
        if vcpus.is_empty() {
            return;
        }
        let (cpu, task) = vcpus[self.exchanges.chance.below(vcpus.len() as u64) as usize];
        let fits = |(other_cpu, other): &&(CpuIx, TaskIx)| {
            self.topology.cpus[*other_cpu].node != self.topology.cpus[cpu].node
                && queues.tasks[task].allowed[*other_cpu]
                && queues.tasks[*other].allowed[cpu]
        };
        let others: Vec<CpuIx> = vcpus.iter().filter(fits).map(|(cpu, _)| *cpu).collect();
        if others.is_empty() {
            return;
        }
        let other = others[self.exchanges.chance.below(others.len() as u64) as usize];
        self.scheduler.exchange(cpu, other, self.now);
        self.after_scheduling();
    }
}

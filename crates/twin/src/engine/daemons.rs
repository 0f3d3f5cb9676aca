//! The host's own daemons: one per node, which runs briefly now and then.

use homenode_units::Ns;

use super::agenda::Timer;
use super::{Engine, Owner};
use crate::hypervisor::{DAEMON_PERIOD, DAEMON_RUN, Run};
use crate::index::first;

impl Engine {
    pub(super) fn start_daemons(&mut self) {
        for cpus in self
            .topology
            .node_cpus
            .clone()
            .iter()
            .filter(|cpus| !cpus.is_empty())
        {
            let task = self
                .scheduler
                .add(first(self.topology.cpus.len()).collect(), None);
            self.scheduler.queues.tasks[task].cpu = cpus[0];
            let daemon = self.daemons.left.len();
            self.owners.push(Owner::Daemon(daemon));
            self.daemons.tasks.push(task);
            self.daemons.left.push(0.0);
            self.set_daemon(daemon);
        }
    }

    fn set_daemon(&mut self, daemon: usize) {
        let after = self.daemons.chance.exponential(DAEMON_PERIOD.as_f64()) as u64;
        self.agenda.set(Ns(self.now.0 + after), Timer::Daemon(daemon));
    }

    /// Wakes a daemon unless it is already running.
    pub(super) fn wake_daemon(&mut self, daemon: usize) {
        let task = self.daemons.tasks[daemon];
        if self.scheduler.queues.tasks[task].run == Run::Sleeping {
            let run_ns = self.daemons.chance.exponential(DAEMON_RUN.as_f64());
            self.daemons.left[daemon] = run_ns.max(1000.0);
            self.scheduler.wake(task, None, self.now);
            self.after_scheduling();
        }
        self.set_daemon(daemon);
    }
}

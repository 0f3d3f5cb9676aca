//! Conservation checks at the end of every epoch if debug assertions are on, as they are in tests; and the message of a stuck
//! engine.

use std::fmt::Write as _;

use super::Engine;
use super::totals::Totals;

impl Engine {
    /// Panics unless the counts of pages, time, bytes, lines and run queues add up.
    pub(crate) fn check(&self) {
        self.scheduler.queues.check();
        self.check_pages();
        self.check_time();
        self.check_bytes();
        self.check_movers();
        for llc in &self.llcs {
            assert!(
                llc.full() <= llc.lines() * (1.0 + 1e-9),
                "a cache holds more lines than it has"
            );
        }
    }

    fn check_pages(&self) {
        let mut used = vec![0; self.topology.nodes()];
        for vm in self.vms.iter().filter(|vm| vm.present()) {
            vm.memory.check();
            for (used, pages) in used.iter_mut().zip(vm.memory.pages()) {
                *used += pages;
            }
        }
        for (node, used) in used.iter().enumerate() {
            assert_eq!(
                used + self.memory.free[node],
                self.memory.total[node],
                "pages of node {node} do not add up"
            );
        }
    }

    /// Checks that the time that tasks ran equals the time that CPUs were busy, and that no CPU was busy for longer than time
    /// passed.
    fn check_time(&self) {
        let queues = &self.scheduler.queues;
        let cpus = self.topology.cpus.places();
        for cpu in cpus.clone() {
            let busy = queues.busy_ns(cpu, self.now);
            assert!(busy <= self.now.0, "a CPU was busy before the start");
        }
        let busy: u64 = cpus.map(|cpu| queues.settled_ns(cpu)).sum();
        let ran: u64 = queues.tasks.iter().map(|task| task.running_ns).sum();
        assert_eq!(ran, busy, "tasks ran for longer or shorter than CPUs were busy");
    }

    /// Checks that byte counts are valid numbers. That links carried what controllers handled needs no check: both are sums of
    /// the same counts.
    fn check_bytes(&self) {
        let finite = |bytes: &f64| bytes.is_finite() && *bytes >= 0.0;
        let Totals { read, written, .. } = &self.totals;
        assert!(
            read.iter().chain(written).all(finite),
            "bytes that are no count: {read:?}, {written:?}"
        );
        for vm in &self.vms {
            let counts = vm
                .threads
                .iter()
                .flat_map(|t| [t.instructions, t.cycles, t.llc_misses]);
            for count in counts {
                assert!(
                    count.is_finite() && count >= 0.0,
                    "VM {}: counted {count}",
                    vm.name
                );
            }
        }
    }

    /// Checks that `movers` includes every VM whose pages a kernel moves.
    fn check_movers(&self) {
        for (at, vm) in self.vms.placed() {
            let is_moved = vm.page_movers().next().is_some();
            assert_eq!(is_moved, self.movers.contains(&at), "pages of VM {}", vm.name);
        }
    }

    /// Describes the state of every CPU, for the message of a stuck engine.
    pub(crate) fn dump(&self) -> String {
        let mut text = format!(
            "at {} ns, epoch ends {}, scheduler {}, next timer {}",
            self.now.0,
            self.epochs.end.0,
            self.scheduler.next_event().0,
            self.agenda.next().0
        );
        for (cpu, end) in self.pace.ends.placed() {
            let Some(task) = self.scheduler.queues.current(cpu) else {
                continue;
            };
            let _ = write!(
                text,
                "\nCPU {cpu}: {:?} until {}, {} ns per unit",
                self.owners[task], end.0, self.pace.speeds[cpu].ns_per_unit
            );
        }
        for vm in &self.vms {
            let _ = write!(text, "\nVM {} ({:?}):", vm.name, vm.stage);
            for thread in &vm.threads {
                let _ = write!(text, " {:?} with {} left;", thread.doing, thread.left);
            }
        }
        text
    }
}

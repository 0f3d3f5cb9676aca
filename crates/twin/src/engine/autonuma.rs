//! AutoNUMA on the host: when guests' kernels scan, and what their moves cost. What they do is in
//! [`crate::guest::autonuma`].

use homenode_units::Ns;

use super::moves::copying;
use super::{Engine, Timer};
use crate::guest::autonuma::{SCAN_DELAY, Scene};
use crate::guest::{Stage, Vm};
use crate::hypervisor::{Run, SHOOTDOWN_CYCLES};

impl Engine {
    /// The program of a VM starts: its kernel will scan, if it does at all.
    pub(super) fn start_scanning(&mut self, vm: usize) {
        let groups = self.vms[vm]
            .autonuma
            .as_ref()
            .map_or(0, |autonuma| autonuma.groups.len());
        let life = self.vms[vm].life;
        for group in 0..groups {
            self.set_timer(Ns(self.now.0 + SCAN_DELAY.0), Timer::Scan { vm, group, life });
        }
    }

    /// A group of threads may be due for a scan.
    pub(super) fn scan(&mut self, vm: usize, group: usize) {
        self.settle_vm(vm);
        let nodes = self.topology.nodes();
        let pairs = (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to)));
        let line_ns =
            |(from, to)| self.fabric.latency_between(to, from) + self.fabric.latency_between(to, to);
        let page_ns: Vec<f64> = pairs.map(|pair| self.page_ns(line_ns(pair))).collect();
        let node_of: Vec<usize> = (0..self.vms[vm].threads.len())
            .map(|thread| self.node_seen_by_guest(vm, thread))
            .collect();
        let Vm {
            autonuma,
            memory,
            threads,
            stage,
            life,
            ..
        } = &mut self.vms[vm];
        let Some(autonuma) = autonuma else { return };
        let life = *life;
        if *stage != Stage::Program {
            autonuma.groups[group].copying.clear();
            self.dirty = true;
            return;
        }
        let mut scene = Scene {
            threads,
            node_of: &node_of,
            clock_ghz: self.clock_ghz,
            page_ns: &page_ns,
            shootdown_ns: SHOOTDOWN_CYCLES / self.clock_ghz,
            free: &mut self.memory.free,
        };
        let scan = autonuma.groups[group].scan(memory, &mut scene, &mut autonuma.chance);
        autonuma.groups[group].copying = copying(&scan.moved, scan.after.as_f64());
        autonuma.scan_ns += scan.scan_ns;
        autonuma.pages_moved += scan.moved.iter().map(|(_, _, pages)| pages).sum::<u64>();
        self.count_moved(&scan.moved);
        self.set_timer(Ns(self.now.0 + scan.after.0), Timer::Scan { vm, group, life });
        // What its threads owe now comes before what they were to do.
        for thread in 0..node_of.len() {
            let task = &self.scheduler.queues.tasks[self.vms[vm].first_vcpu + thread];
            if task.run == Run::Running {
                self.set_speed(task.cpu);
            }
        }
        self.solve_soon();
    }

    /// Node with memory on which a vCPU is, as its guest knows.
    fn node_seen_by_guest(&self, vm: usize, thread: usize) -> usize {
        let vm = &self.vms[vm];
        let real = self.topology.cpus[self.scheduler.queues.tasks[vm.first_vcpu + thread].cpu].node;
        let node = vm.memory.view.node_of(thread, real);
        self.topology.fallback[node].first().copied().unwrap_or(node)
    }
}

//! AutoNUMA as part of the host: when the guests' kernels and the host's kernel scan, and what the resulting moves cost. The
//! scans themselves are in [`crate::guest::autonuma`].

use homenode_units::{Chance, Migration, Ns, Placing};

use super::agenda::Timer;
use super::moves::copying;
use super::{Engine, Owner};
use crate::guest::autonuma::{Autonuma, SCAN_DELAY, Scene, one_process};
use crate::guest::view::By;
use crate::guest::{Stage, Vm};
use crate::hypervisor::{EXIT_CYCLES, Run, SHOOTDOWN_CYCLES};
use crate::index::{IxVec, TaskIx, ThreadIx, VmIx};
use crate::scenario::Hypervisor;

#[cfg(test)]
mod measured;

/// Smallest share of a vCPU's accesses that a move must make local to be worthwhile (`SMALLIMP`, 30 of 1000).
const VCPU_GAIN_LEAST: f64 = 0.03;

impl Engine {
    /// Starts a kernel's scanning when a VM's program starts, if that kernel scans the VM at all.
    pub(super) fn start_scanning(&mut self, vm: VmIx, by: By) {
        let Some(autonuma) = self.vms[vm].autonuma_by(by) else {
            return;
        };
        let number = autonuma.number;
        for group in 0..autonuma.groups.len() {
            let scan = Timer::Scan {
                vm,
                by,
                group,
                number,
            };
            self.agenda.set(Ns(self.now.0 + SCAN_DELAY.0), scan);
        }
    }

    /// Turns the host kernel's balancing of a VM's pages on or off: as the VM's memory policy says, else as the host's setting
    /// says.
    pub(super) fn set_host_autonuma(&mut self, vm: VmIx) {
        let owner = &mut self.vms[vm];
        let policy = owner.memory_policy;
        // The kernel scans neither interleaved nor bound memory.
        let is_balanced = owner.host.balanced
            && (policy.placing, policy.migration) == (Placing::FirstTouch, Migration::None);
        if policy.migration != Migration::AutoNuma && !is_balanced {
            self.epochs.dirty |= owner.host.autonuma.take().is_some();
            for task in owner.tasks() {
                self.scheduler.queues.tasks[task].prefers = None;
            }
        } else if owner.host.autonuma.is_none() {
            owner.host.autonumas += 1;
            // To the host's kernel, a VM is one process.
            let process = one_process(owner.threads.len());
            let chance = Chance::labelled(self.seed, "host autonuma", vm.0);
            let mut autonuma = Autonuma::new(process, &owner.memory, chance);
            autonuma.number = owner.host.autonumas;
            owner.host.autonuma = Some(autonuma);
            if owner.stage == Stage::Program {
                self.start_scanning(vm, By::Host);
            }
        }
        self.find_movers();
    }

    /// Finds again, after a change, the VMs whose pages a kernel moves.
    pub(super) fn find_movers(&mut self) {
        let vms = self.vms.placed();
        let moved = vms.filter(|(_, vm)| vm.page_movers().next().is_some());
        self.movers.clear();
        self.movers.extend(moved.map(|(at, _)| at));
    }

    /// Scans for a group of threads if a scan is due.
    pub(super) fn scan(&mut self, vm: VmIx, by: By, group: usize) {
        self.settle_vm(vm);
        let nodes = self.topology.nodes();
        let pairs = (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to)));
        let line_ns =
            |(from, to)| self.fabric.latency_between(to, from) + self.fabric.latency_between(to, to);
        let copy_ns: Vec<f64> = pairs.map(|pair| self.copy_ns(line_ns(pair))).collect();
        // Only the host's kernel has huge pages here; those of a guest's kernel are not modelled.
        let is_hosts = by == By::Host || self.hypervisor == Hypervisor::Native;
        let node_of: IxVec<ThreadIx, usize> = self.vms[vm]
            .threads
            .places()
            .map(|thread| self.node_seen(vm, by, thread))
            .collect();
        let Vm {
            autonuma,
            host,
            memory,
            threads,
            stage,
            counts,
            ..
        } = &mut self.vms[vm];
        let autonuma = match by {
            By::Guest => autonuma,
            By::Host => &mut host.autonuma,
        };
        let Some(autonuma) = autonuma else { return };
        let number = autonuma.number;
        if *stage != Stage::Program {
            autonuma.groups[group].copying.clear();
            self.epochs.dirty = true;
            return;
        }
        let mut scene = Scene {
            by,
            exit_ns: EXIT_CYCLES / self.figures.clock_ghz,
            threads,
            node_of: &node_of,
            clock_ghz: self.figures.clock_ghz,
            huge: if is_hosts { host.huge } else { 0.0 },
            copy_ns: &copy_ns,
            shootdown_ns: SHOOTDOWN_CYCLES / self.figures.clock_ghz,
            free: &mut self.memory.free,
        };
        let scan = autonuma.scan(group, memory, &mut scene);
        autonuma.groups[group].copying = copying(&scan.moved, scan.after.as_f64());
        if by == By::Host {
            counts.pages_moved += scan.counts.moved;
        }
        if self.vms[vm].memory.keeps_frames(by) {
            self.note_copies(&scan.moved);
        } else {
            self.count_moved(&scan.moved);
        }
        self.agenda.set(
            Ns(self.now.0 + scan.after.0),
            Timer::Scan {
                vm,
                by,
                group,
                number,
            },
        );
        // The time that scans and moves have cost threads is charged before the threads continue.
        for thread in node_of.places() {
            let task = &self.scheduler.queues.tasks[self.vms[vm].task(thread)];
            if task.run == Run::Running {
                self.set_speed(task.cpu);
            }
        }
        self.draw(vm, by);
        self.epochs.solve_soon(self.now);
    }

    /// Draws vCPUs, or the threads on them, to where the pages are after a scan, once the kernel prefers nodes.
    fn draw(&mut self, vm: VmIx, by: By) {
        if !self.vms[vm].autonuma_by(by).is_some_and(Autonuma::prefers) {
            return;
        }
        match by {
            By::Host => {
                // With the weights from before the scan, pages and vCPUs would keep changing places.
                self.vms[vm].memory.weigh();
                self.draw_to_memory(vm);
            }
            By::Guest => self.draw_threads(vm),
        }
    }

    /// Moves running vCPUs to the nodes that hold most of the memory they use (`task_numa_migrate`). A vCPU goes to an idle CPU
    /// there. If there is none, it changes places with the vCPU that loses least, provided that the two together gain.
    fn draw_to_memory(&mut self, vm: VmIx) {
        for thread in self.vms[vm].threads.places() {
            let task = self.vms[vm].task(thread);
            let here = self.scheduler.queues.tasks[task].cpu;
            let (from, uses) = (self.topology.cpus[here].node, |node| self.use_of(task, node));
            let all = 0..self.topology.nodes();
            let Some(to) = all.max_by(|a, b| uses(*a).total_cmp(&uses(*b)).then(b.cmp(a))) else {
                continue;
            };
            let gain = uses(to) - uses(from);
            let preferring = &mut self.scheduler.queues.tasks[task];
            preferring.prefers = Some(to);
            if preferring.run != Run::Running {
                continue;
            }
            if to == from || gain < VCPU_GAIN_LEAST {
                continue;
            }
            let allowed = &self.scheduler.queues.tasks[task].allowed;
            let there = self.topology.node_cpus[to]
                .iter()
                .copied()
                .filter(|cpu| allowed[*cpu]);
            let (mut idle, mut best) = (None, None);
            for cpu in there {
                let Some(other) = self.scheduler.queues.current(cpu) else {
                    idle = idle.or(Some(cpu));
                    continue;
                };
                let is_vcpu = matches!(self.owners[other], Owner::Vcpu { .. });
                let both = gain + self.use_of(other, from) - self.use_of(other, to);
                let better = best.is_none_or(|(_, most)| both > most);
                if is_vcpu
                    && self.scheduler.queues.tasks[other].allowed[here]
                    && both >= VCPU_GAIN_LEAST
                    && better
                {
                    best = Some((cpu, both));
                }
            }
            match (idle, best) {
                (Some(cpu), _) => self.scheduler.migrate(task, cpu, self.now),
                (None, Some((cpu, _))) => self.scheduler.exchange(here, cpu, self.now),
                (None, None) => continue,
            }
            self.after_scheduling();
            self.vms[vm].counts.vcpus_drawn += 1;
        }
    }

    /// Returns the share of a vCPU's accesses that go to a node, as far as the host's kernel knows. Returns 0 for a task whose
    /// memory that kernel does not scan.
    fn use_of(&self, task: TaskIx, node: usize) -> f64 {
        match self.owners[task] {
            Owner::Vcpu { vm, thread } if self.vms[vm].host.autonuma.is_some() => {
                self.vms[vm].memory.weights(thread)[node]
            }
            _ => 0.0,
        }
    }

    /// Returns the node that a kernel believes a vCPU is on, or the nearest node with memory.
    pub(super) fn node_seen(&self, vm: VmIx, by: By, thread: ThreadIx) -> usize {
        let vm = &self.vms[vm];
        let real = self.topology.cpus[self.scheduler.queues.tasks[vm.task(thread)].cpu].node;
        let node = match by {
            By::Guest => vm.memory.view.node_of(thread, real),
            By::Host => real,
        };
        self.topology.fallback[node].first().copied().unwrap_or(node)
    }
}

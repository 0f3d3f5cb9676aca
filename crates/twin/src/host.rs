//! The simulator as a [`Host`]: it takes samples and carries out plans.

use homenode_host::observation::{Tracker, TrackerChoice};
use homenode_host::{
    Accesses, ActionError, Balloon, Balloons, CountedBy, Counters, CpuSample, Failure, Holds, Host,
    HostError, KernelSettings, LinkSample, NodeSample, NumaBalancing, PageUse, Plan, Receipt, Refusal,
    Sample, Setting, VcpuSample, Version, VmSample, VmSettings,
};
use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeMap, NodeSet, Ns, Pages, VmId};

use crate::engine::Engine;
use crate::guest::Vm;
use crate::hypervisor::page_uses::{self, Used};
use crate::index::{ThreadIx, VmIx, first};
use crate::twin::{Looked, Twin};

/// Why the agent cannot notify a guest of the simulator.
pub(crate) const NO_TOPOLOGY_DEVICE: &str =
    "on the twin the hypervisor itself tells a guest with vnuma = \"live\"";

impl Host for Twin {
    fn machine(&self) -> &Machine {
        &self.told.machine
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.advance(Ns(self.engine.now.0 + period.0));
        period
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        let engine = self.engine.settled();
        let mut sample = self.see(&engine);
        for vm in &mut sample.vms {
            let at = self.position(vm.id).expect("it was seen");
            vm.page_uses = self.page_uses(&engine.vms[at], at);
            vm.observed = self.watches[at].as_ref().and_then(|watch| watch.last.clone());
        }
        self.told.distort(&mut sample);
        Ok(sample)
    }

    /// Commits a plan. Moving pages takes simulated time, as the system call takes time on a live host, so the clock is later
    /// afterwards.
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        plan.check(&self.machine, &self.see(&self.engine.settled()))?;
        // Settles first, because the time before the plan passed without it.
        self.engine.settle_all();
        let outcomes = plan
            .decisions
            .iter()
            .map(|decision| self.act(plan, &decision.action))
            .collect();
        Ok(Receipt {
            version: Version(self.engine.version),
            outcomes,
        })
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], _holds: Holds<'_>) -> Result<bool, ActionError> {
        let at = self.position(vm).filter(|at| self.engine.vms[*at].present());
        let at = at.ok_or_else(|| Failure::VmGone.on(&vm.to_string()))?;
        for setting in settings {
            self.settings[at].set(*setting);
            self.engine.version += 1;
        }
        Ok(true)
    }
}

impl Twin {
    pub(crate) fn position(&self, vm: VmId) -> Option<VmIx> {
        self.engine
            .vms
            .placed()
            .find(|(_, known)| known.id == vm)
            .map(|(at, _)| at)
    }

    /// Returns how a VM's pages were used since the last reading.
    fn page_uses(&mut self, vm: &Vm, at: VmIx) -> Option<Vec<PageUse>> {
        let sampling = vm.host.sampling.as_ref()?;
        let looked = &mut self.looked[at];
        if looked.number != vm.host.samplings {
            *looked = Looked {
                number: vm.host.samplings,
                expected: vec![0.0; sampling.expected.len()],
            };
        }
        let since = sampling.expected.iter().zip(&looked.expected);
        let since: Vec<f64> = since.map(|(now, before)| now - before).collect();
        looked.expected.clone_from(&sampling.expected);
        let write_share = vm
            .course
            .program
            .as_ref()
            .map_or(0.0, |program| program.write_share);
        let used = page_uses::draw(&vm.memory, &since, write_share, &mut self.look_chance);
        let named = |used: Used| {
            let samples = self.machine.nodes.keys().zip(&used.samples);
            PageUse {
                frame: used.first_frame,
                pages: Pages(used.pages),
                on: self.machine.nodes.keys().nth(used.on).expect("a node"),
                samples: samples
                    .filter(|(_, samples)| **samples > 0)
                    .map(|(node, samples)| (node, *samples))
                    .collect(),
                writes: used.writes,
            }
        };
        Some(used.into_iter().map(named).collect())
    }

    pub(crate) fn positions(&self, nodes: &NodeSet) -> Vec<usize> {
        nodes
            .iter()
            .map(|node| self.machine.nodes.position(node).expect("checked with the plan"))
            .collect()
    }

    fn see(&self, engine: &Engine) -> Sample {
        let cpus = first(self.machine.cpus.len()).zip(&self.machine.cpus);
        let nodes = self.machine.nodes.iter().enumerate();
        let (link_bytes, controllers) = (engine.link_bytes(), engine.totals.controllers());
        let links = engine.topology.links.iter().zip(&link_bytes);
        Sample {
            at: engine.now,
            version: Version(engine.version),
            counted_by: CountedBy::Hardware,
            balloons: Balloons::Virtio,
            cpus: cpus
                .map(|(at, cpu)| CpuSample {
                    id: cpu.id,
                    busy_ns: Ns(engine.scheduler.queues.busy_ns(at, engine.now)),
                })
                .collect(),
            nodes: nodes
                .map(|(at, (id, _))| {
                    let sample = NodeSample {
                        memory_total_bytes: Pages(engine.memory.total[at]).to_bytes(),
                        memory_free_bytes: Pages(engine.memory.free[at]).to_bytes(),
                        memory_traffic_bytes: Some(controllers[at] as u64),
                        huge_pages: None,
                    };
                    (id, sample)
                })
                .collect(),
            links: links
                .map(|(link, bytes)| LinkSample {
                    from: link.from,
                    to: link.to,
                    bytes: *bytes as u64,
                })
                .collect(),
            no_page_uses: None,
            trackers: vec![TrackerChoice {
                tracker: Tracker::Exact,
                why_not: None,
            }],
            kernel: KernelSettings {
                numa_balancing: engine.numa_balancing.map(|is_on| match is_on {
                    true => NumaBalancing::On,
                    false => NumaBalancing::Off,
                }),
                ..KernelSettings::default()
            },
            // Scenario order is the order of ids.
            vms: engine
                .vms
                .iter()
                .zip(&self.settings)
                .filter(|(vm, _)| vm.present())
                .map(|(vm, s)| self.see_vm(engine, vm, s))
                .collect(),
        }
    }

    fn see_vm(&self, engine: &Engine, vm: &Vm, settings: &VmSettings) -> VmSample {
        let pages = vm.memory.pages();
        let pages: NodeMap<Pages> = self
            .machine
            .nodes
            .keys()
            .zip(pages)
            .map(|(node, pages)| (node, Pages(pages)))
            .collect();
        VmSample {
            id: vm.id,
            name: vm.name.clone(),
            vcpus: vm
                .threads
                .places()
                .map(|thread| self.see_vcpu(engine, vm, thread))
                .collect(),
            memory_bytes: vm.memory_bytes,
            balloon: Some(Balloon {
                current: vm.memory_bytes,
                maximum: vm.limits.memory.map_or(vm.memory_bytes, |limit| limit.before),
                limit: vm.limits.memory.map(|limit| limit.memory),
                guest: Some(engine.guest_memory(vm)),
            }),
            pages: Some(pages),
            virtual_nodes: Vec::new(),
            no_topology_device: Some(NO_TOPOLOGY_DEVICE.into()),
            published: None,
            accesses: Some(Accesses {
                local: vm.counts.local as u64,
                remote: vm.counts.remote as u64,
                on: self
                    .machine
                    .nodes
                    .keys()
                    .zip(vm.counts.accesses.iter().map(|count| *count as u64))
                    .collect(),
            }),
            memory_policy: vm.memory_policy,
            page_uses: None,
            observed: None,
            moves_whole: false,
            immovable: None,
            huge_page_bytes: None,
            bound_to: None,
            no_releases: None,
            confined: None,
            device_nodes: NodeSet::new(),
            home: vm.home_in_force.clone(),
            is_unread: false,
            settings: settings.clone(),
        }
    }

    fn see_vcpu(&self, engine: &Engine, vm: &Vm, thread: ThreadIx) -> VcpuSample {
        let state = &vm.threads[thread];
        let task = &engine.scheduler.queues.tasks[vm.task(thread)];
        let throttled_ns = task.throttled_ns(engine.now);
        let affinity: CpuSet = task
            .allowed
            .iter()
            .map(|cpu| self.machine.cpus[cpu.0].id)
            .collect();
        VcpuSample {
            index: thread.0 as u16,
            running_ns: Ns(task.running_ns),
            waiting_ns: Some(Ns(task.waiting_ns(engine.now) + throttled_ns)),
            throttled_ns: Ns(throttled_ns),
            cpu: Some(self.machine.cpus[task.cpu.0].id),
            affinity,
            quota: vm.limits.quota.map(|lease| lease.quota),
            counters: Some(Counters {
                instructions: state.instructions as u64,
                cycles: state.cycles as u64,
                llc_references: Some(state.llc_references as u64),
                llc_misses: Some(state.llc_misses as u64),
            }),
        }
    }
}

//! The twin as a [`Host`]: samples, and plans carried out.

use homenode_host::observed::{Carrier, CarrierChoice};
use homenode_host::{
    Accesses, Act, Action, ActionError, Balloon, CountedBy, Counters, CpuSample, Failure, FrameMove, Host,
    HostError, Lever, Limit, LinkSample, NodeSample, Outcome, PageUse, Plan, Receipt, Refusal, Sample,
    Setting, VcpuSample, Version, VmSample, VmSettings,
};
use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeMap, NodeSet, Ns, Pages, VmId};

use crate::cpu_mask::CpuMask;
use crate::engine::{Alike, Engine};
use crate::guest::{Lease, Vm};
use crate::hypervisor::page_uses::{self, Used};
use crate::hypervisor::watching::Watching;
use crate::{Before, Looked, Twin};

/// Why the agent tells no guest of the twin anything.
const NO_FEED: &str = "on the twin the hypervisor itself tells a guest with vnuma = \"live\"";

impl Host for Twin {
    fn machine(&self) -> &Machine {
        &self.told.machine
    }

    fn wait(&mut self, period: Ns) {
        self.advance(Ns(self.engine.now.0 + period.0));
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

    /// Moving pages takes simulated time, as the system call does on a live host: the clock is later afterwards.
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        plan.check(&self.machine, &self.see(&self.engine.settled()))?;
        // What happened before the plan happened without it.
        self.engine.settle_all();
        let outcomes = plan
            .decisions
            .iter()
            .map(|decision| self.act(&decision.action))
            .collect();
        Ok(Receipt {
            version: Version(self.engine.version),
            outcomes,
        })
    }

    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        let at = self.position(vm).filter(|at| self.engine.vms[*at].present());
        let at = at.ok_or_else(|| Failure::VmGone.on(&vm.to_string()))?;
        self.settings[at].set(setting);
        self.engine.version += 1;
        Ok(())
    }
}

impl Twin {
    fn position(&self, vm: VmId) -> Option<usize> {
        self.engine.vms.iter().position(|known| known.id == vm)
    }

    fn act(&mut self, action: &Action) -> Outcome {
        let at = self.position(action.vm).expect("checked with the plan");
        let done = self.done(at, &action.act);
        done.unwrap_or_else(|why| Outcome::Failed(why.on(&self.engine.vms[at].name)))
    }

    fn done(&mut self, at: usize, act: &Act) -> Result<Outcome, Failure> {
        if !self.engine.vms[at].present() {
            return Err(Failure::VmGone);
        }
        let until = Ns(self
            .engine
            .now
            .0
            .saturating_add(act.lease().unwrap_or_default().0));
        Ok(match act {
            Act::PinVcpus { vcpus, cpus } => {
                self.note_before(at);
                let allowed: CpuMask = self
                    .machine
                    .cpus
                    .iter()
                    .map(|cpu| cpus.contains(cpu.id))
                    .collect();
                for index in vcpus {
                    let task = self.engine.vms[at].first_vcpu + usize::from(*index);
                    self.engine
                        .scheduler
                        .set_affinity(task, allowed.clone(), self.engine.now);
                    self.engine.after_scheduling();
                }
                self.engine.version += 1;
                Outcome::Done
            }
            Act::SetHome { nodes } => {
                self.note_before(at);
                self.engine.vms[at].memory.home = Some(self.positions(nodes));
                self.engine.version += 1;
                Outcome::Done
            }
            Act::MovePages { from, to, pages_max } => self.move_pages(at, from, to, *pages_max)?,
            Act::Limit {
                limit: Limit::CpuQuota(quota),
                ..
            } => {
                let version = self.engine.version;
                let quota = *quota;
                self.engine.set_quota(at, Some(Lease { quota, until }));
                match self.engine.version == version {
                    true => Outcome::Renewed,
                    false => Outcome::Done,
                }
            }
            Act::Limit {
                limit: Limit::Memory(memory),
                ..
            } => match self.engine.set_memory(at, *memory, until) {
                true => Outcome::Done,
                false => Outcome::Renewed,
            },
            Act::Limit { limit, .. } => {
                return Err(Failure::Host {
                    what: format!("holding to {limit}"),
                    cause: "the twin has no resctrl; hold VMs by CPU quota".into(),
                });
            }
            // No VM of the twin has virtual nodes that a plan could name: the hypervisor tells live guests itself.
            Act::MoveVirtualNode { .. } | Act::TellTopology { .. } => {
                return Err(Failure::NoFeed { why: NO_FEED.into() });
            }
            Act::MoveFrames { moves } => self.move_frames(at, moves)?,
            Act::SetMemoryPolicy { policy } => match self.engine.set_memory_policy(at, *policy) {
                Ok(()) => Outcome::Done,
                Err(why) => {
                    return Err(Failure::MemoryPolicy {
                        policy: *policy,
                        why: why.into(),
                    });
                }
            },
            Act::Watch { window_ns, .. } => self.watch(at, *window_ns, until),
            Act::Lift { lever } => {
                self.lift(at, *lever);
                Outcome::Done
            }
        })
    }

    fn watch(&mut self, at: usize, window: Ns, until: Ns) -> Outcome {
        if let Some(watch) = &mut self.watches[at] {
            watch.until = until;
            let before = std::mem::replace(&mut watch.window, window);
            return if before == window {
                Outcome::Renewed
            } else {
                Outcome::Done
            };
        }
        let vm = &self.engine.vms[at];
        self.watches[at] = Some(Watching::begin(vm, window, until, self.engine.now));
        Outcome::Done
    }

    /// Lifts a limit, a watch or a home, if one is in force.
    pub(crate) fn lift(&mut self, at: usize, lever: Lever) {
        match lever {
            Lever::CpuQuota => self.engine.set_quota(at, None),
            Lever::Memory => self.engine.give_back_memory(at),
            Lever::Watching => self.watches[at] = None,
            Lever::Home => self.leave_home(at),
            // The twin has no resctrl, and plans that lift anything else are refused.
            _ => {}
        }
    }

    /// Notes how a VM was before the agent's first pin or home, as a journal does.
    fn note_before(&mut self, at: usize) {
        let vm = &self.engine.vms[at];
        let tasks = vm.first_vcpu..vm.first_vcpu + vm.threads.len();
        let allowed = tasks.map(|task| self.engine.scheduler.queues.tasks[task].allowed.clone());
        self.before[at].get_or_insert_with(|| Before {
            allowed: allowed.collect(),
            home: vm.memory.home.clone(),
        });
    }

    /// The VM runs and allocates as it did before the agent's first pin or home.
    fn leave_home(&mut self, at: usize) {
        let Some(before) = self.before[at].take() else {
            return;
        };
        for (index, allowed) in before.allowed.into_iter().enumerate() {
            let task = self.engine.vms[at].first_vcpu + index;
            self.engine.scheduler.set_affinity(task, allowed, self.engine.now);
            self.engine.after_scheduling();
        }
        self.engine.vms[at].memory.home = before.home;
        self.engine.version += 1;
    }

    fn move_pages(
        &mut self,
        at: usize,
        from: &NodeSet,
        to: &NodeSet,
        pages_max: Pages,
    ) -> Result<Outcome, Failure> {
        let (from, positions) = (self.positions(from), self.positions(to));
        let there = |engine: &Engine| -> u64 {
            let pages = engine.vms[at].memory.pages();
            from.iter().map(|node| pages[*node]).sum()
        };
        let wanted = there(&self.engine).min(pages_max.0);
        let room: u64 = positions.iter().map(|node| self.engine.memory.free[*node]).sum();
        if wanted > 0 && room == 0 {
            return Err(Failure::NoMemory { nodes: to.clone() });
        }
        let moved = self.engine.move_pages(at, &from, &positions, wanted.min(room));
        if !self.engine.vms[at].present() {
            return Err(Failure::VmGone);
        }
        Ok(Outcome::Moved {
            moved: Pages(moved),
            left: Pages(there(&self.engine)),
            busy: Pages::ZERO,
        })
    }

    fn move_frames(&mut self, at: usize, moves: &[FrameMove]) -> Result<Outcome, Failure> {
        let position = |node| self.machine.nodes.position(node).expect("checked with the plan");
        let alike = |step: &FrameMove| Alike {
            frame: step.frame,
            pages: step.pages.0,
            from: position(step.from),
            to: position(step.to),
        };
        let moves: Vec<Alike> = moves.iter().map(alike).collect();
        let wanted: u64 = moves.iter().map(|alike| alike.pages).sum();
        let moved = self.engine.move_alike(at, &moves);
        if !self.engine.vms[at].present() {
            return Err(Failure::VmGone);
        }
        Ok(Outcome::Moved {
            moved: Pages(moved),
            left: Pages(wanted - moved),
            busy: Pages::ZERO,
        })
    }

    /// What was seen of the use of a VM's pages since the last look.
    fn page_uses(&mut self, vm: &Vm, at: usize) -> Option<Vec<PageUse>> {
        let sampling = vm.sampling.as_ref()?;
        let looked = &mut self.looked[at];
        if looked.number != vm.samplings {
            *looked = Looked {
                number: vm.samplings,
                expected: vec![0.0; sampling.expected.len()],
            };
        }
        let since = sampling.expected.iter().zip(&looked.expected);
        let since: Vec<f64> = since.map(|(now, before)| now - before).collect();
        looked.expected.clone_from(&sampling.expected);
        let write_share = vm.program.as_ref().map_or(0.0, |program| program.write_share);
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

    fn positions(&self, nodes: &NodeSet) -> Vec<usize> {
        nodes
            .iter()
            .map(|node| self.machine.nodes.position(node).expect("checked with the plan"))
            .collect()
    }

    fn see(&self, engine: &Engine) -> Sample {
        let cpus = self.machine.cpus.iter().enumerate();
        let nodes = self.machine.nodes.iter().enumerate();
        let (link_bytes, controllers) = (engine.link_bytes(), engine.totals.controllers());
        let links = engine.topology.links.iter().zip(&link_bytes);
        Sample {
            at: engine.now,
            version: Version(engine.version),
            counted_by: CountedBy::Hardware,
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
            carriers: vec![CarrierChoice {
                carrier: Carrier::Exact,
                why_not: None,
            }],
            // Scenario order is id order.
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
            vcpus: (0..vm.threads.len())
                .map(|thread| self.see_vcpu(engine, vm, thread))
                .collect(),
            memory_bytes: vm.memory_bytes,
            balloon: Some(Balloon {
                current: vm.memory_bytes,
                maximum: vm.limit.map_or(vm.memory_bytes, |limit| limit.before),
                limit: vm.limit.map(|limit| limit.memory),
                guest: Some(engine.guest_memory(vm)),
            }),
            pages: Some(pages),
            virtual_nodes: Vec::new(),
            no_feed: Some(NO_FEED.into()),
            told: None,
            accesses: Some(Accesses {
                local: vm.accesses_local as u64,
                remote: vm.accesses_remote as u64,
                on: self
                    .machine
                    .nodes
                    .keys()
                    .zip(vm.accesses.iter().map(|count| *count as u64))
                    .collect(),
            }),
            memory_policy: vm.memory_policy,
            page_uses: None,
            observed: None,
            immovable: None,
            no_releases: None,
            confined: None,
            device_nodes: NodeSet::new(),
            settings: settings.clone(),
        }
    }

    fn see_vcpu(&self, engine: &Engine, vm: &Vm, thread: usize) -> VcpuSample {
        let state = &vm.threads[thread];
        let task = &engine.scheduler.queues.tasks[vm.first_vcpu + thread];
        let throttled_ns = task.throttled_ns(engine.now);
        let affinity: CpuSet = task.allowed.iter().map(|cpu| self.machine.cpus[cpu].id).collect();
        VcpuSample {
            index: thread as u16,
            running_ns: Ns(task.running_ns),
            waiting_ns: Ns(task.waiting_ns(engine.now) + throttled_ns),
            throttled_ns: Ns(throttled_ns),
            cpu: Some(self.machine.cpus[task.cpu].id),
            affinity,
            quota: vm.quota.map(|lease| lease.quota),
            counters: Some(Counters {
                instructions: state.instructions as u64,
                cycles: state.cycles as u64,
                llc_references: state.llc_references as u64,
                llc_misses: state.llc_misses as u64,
            }),
        }
    }
}

//! The simulator's levers on its VMs: those that a real host has.

use homenode_host::{Act, Action, Failure, FrameMove, HomeInForce, Lever, Limit, Outcome, Plan};
use homenode_units::{CpuSet, NodeSet, Ns, Pages};

use crate::engine::Engine;
use crate::engine::moves::Alike;
use crate::guest::{Lease, Limits};
use crate::host::NO_TOPOLOGY_DEVICE;
use crate::hypervisor::watching::Watching;
use crate::index::{CpuIxSet, ThreadIx, VmIx, marked};
use crate::twin::{Before, Ends, Twin};

/// Returns the limits that are in force, and the ends of their leases.
fn in_force(limits: &Limits) -> impl Iterator<Item = (Lever, Ns)> + use<> {
    let quota = limits.quota.map(|lease| (Lever::CpuQuota, lease.until));
    let memory = limits.memory.map(|lease| (Lever::Memory, lease.until));
    quota.into_iter().chain(memory)
}

impl Twin {
    /// Returns what ends next by itself, when, and for which VM. Limits and watches end with their leases. At equal times limits
    /// end before windows, and earlier VMs before later ones.
    pub(crate) fn next_end(&self) -> Option<(Ns, Ends, VmIx)> {
        let vms = self.engine.vms.placed();
        let limits = vms.flat_map(|(at, vm)| {
            let limits = in_force(&vm.limits);
            limits.map(move |(lever, until)| (until, Ends::Limit(lever), at))
        });
        let watches = self.watches.placed();
        let watches = watches.filter_map(|(at, watch)| Some((at, watch.as_ref()?)));
        let watches =
            watches.flat_map(|(at, watch)| [(watch.ends, Ends::Window, at), (watch.until, Ends::Watch, at)]);
        limits.chain(watches).min()
    }

    /// Carries out one action of a plan.
    pub(crate) fn act(&mut self, plan: &Plan, action: &Action) -> Outcome {
        let at = self.position(action.vm).expect("checked with the plan");
        let done = self.done(at, &action.act);
        if done.is_ok() {
            self.note_home(at, plan, action);
        }
        done.unwrap_or_else(|why| Outcome::Failed(why.on(&self.engine.vms[at].name)))
    }

    fn done(&mut self, at: VmIx, act: &Act) -> Result<Outcome, Failure> {
        if !self.engine.vms[at].present() {
            return Err(Failure::VmGone);
        }
        let until = Ns(self
            .engine
            .now
            .0
            .saturating_add(act.lease().unwrap_or_default().0));
        Ok(match act {
            Act::PinVcpus { vcpus, cpus } => self.pin(at, vcpus, cpus),
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
                    cause: "the twin has no resctrl; limit VMs by CPU quota".into(),
                });
            }
            // A plan cannot name a virtual node in the simulator: the hypervisor itself notifies live guests.
            Act::MoveVirtualNode { .. } | Act::PublishTopology { .. } => {
                return Err(Failure::NoTopologyDevice {
                    why: NO_TOPOLOGY_DEVICE.into(),
                });
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

    /// Notes what an action that was carried out leaves of the VM's home.
    fn note_home(&mut self, at: VmIx, plan: &Plan, Action { vm, act }: &Action) {
        let pinned = || plan.cpus_with_home(*vm);
        let home = &mut self.engine.vms[at].home_in_force;
        match act {
            Act::SetHome { nodes } => *home = HomeInForce::on(&self.machine, nodes, &pinned()),
            Act::Lift { lever: Lever::Home } => *home = HomeInForce::Unplaced,
            Act::PinVcpus { cpus, .. } => drop(home.widen(cpus)),
            _ => {}
        }
    }

    fn pin(&mut self, at: VmIx, vcpus: &[u16], cpus: &CpuSet) -> Outcome {
        self.note_before(at);
        let allowed: CpuIxSet = marked(self.machine.cpus.iter().map(|cpu| cpus.contains(cpu.id)));
        for index in vcpus {
            let task = self.engine.vms[at].task(ThreadIx(usize::from(*index)));
            self.engine
                .scheduler
                .set_affinity(task, allowed.clone(), self.engine.now);
            self.engine.after_scheduling();
        }
        self.engine.version += 1;
        Outcome::Done
    }

    fn watch(&mut self, at: VmIx, window: Ns, until: Ns) -> Outcome {
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

    pub(crate) fn end_watch(&mut self, at: VmIx) {
        self.lift(at, Lever::Watching);
    }

    /// Lifts a limit, a watch or a home, if one is in force.
    pub(crate) fn lift(&mut self, at: VmIx, lever: Lever) {
        match lever {
            Lever::CpuQuota => self.engine.set_quota(at, None),
            Lever::Memory => self.engine.give_back_memory(at),
            Lever::Watching => self.watches[at] = None,
            Lever::Home => self.leave_home(at),
            // The simulator has no resctrl, and plans that lift any other lever are refused.
            _ => {}
        }
    }

    /// Notes a VM's state before the agent's first pin or home, as the journal of a real host does.
    fn note_before(&mut self, at: VmIx) {
        let vm = &self.engine.vms[at];
        let tasks = vm.tasks();
        let allowed = tasks.map(|task| self.engine.scheduler.queues.tasks[task].allowed.clone());
        self.before[at].get_or_insert_with(|| Before {
            allowed: allowed.collect(),
            home: vm.memory.home.clone(),
        });
    }

    /// Restores the CPUs and nodes that the VM used before the agent's first pin or home.
    fn leave_home(&mut self, at: VmIx) {
        let Some(before) = self.before[at].take() else {
            return;
        };
        for (task, allowed) in self.engine.vms[at].tasks().zip(&before.allowed) {
            self.engine
                .scheduler
                .set_affinity(task, allowed.clone(), self.engine.now);
            self.engine.after_scheduling();
        }
        self.engine.vms[at].memory.home = before.home;
        self.engine.version += 1;
    }

    fn move_pages(
        &mut self,
        at: VmIx,
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

    fn move_frames(&mut self, at: VmIx, moves: &[FrameMove]) -> Result<Outcome, Failure> {
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
}

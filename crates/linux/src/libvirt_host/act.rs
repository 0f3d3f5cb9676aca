//! Carrying out a plan: journal, act through libvirt, read back.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use homenode_host::{
    Act, Action, ActionError, Failure, FrameMove, Immovable, Lever, Limit, Management, Outcome, Plan,
    Refusal, Version,
};
use homenode_units::{CpuSet, NodeSet, Pages, VmId};

use super::balloon::{GIVE_BACK, SHRINK};
use super::confine::{CONFINE, FREE};
use super::connection::CallError;
use super::feed::TELL;
use super::home::{HOME, LEAVE};
use super::quota::{HOLD, LIFT};
use super::vm::{Part, Vm, Which};
use super::watching::WATCH;
use super::{LibvirtHost, memory_policy_is_possible, now};
use crate::journal::{Journal, JournalError, Moving, Pins, Written};
use crate::pages::{Linux, MoveError};
use crate::task;

impl LibvirtHost {
    /// Refuses a plan whose VMs someone else pinned or gave a quota since the sample.
    pub(super) fn refuse_changed(&mut self, plan: &Plan) -> Result<(), Refusal> {
        let usable = self.machine.cpu_set();
        for decision in &plan.decisions {
            let Some(vm) = self.vms.get(&decision.action.vm) else {
                continue;
            };
            let Some(sampled) = self.last.vm(vm.run.vm) else {
                continue;
            };
            for vcpu in &sampled.vcpus {
                let Some(thread) = vm.vcpu_thread(vcpu.index) else {
                    continue;
                };
                // A thread that cannot be read has ended; then acting fails and says so.
                let Ok(Some(affinity)) = task::affinity(&self.root, vm.run.pid, thread.tid) else {
                    continue;
                };
                // As with quotas that cannot be read.
                let quota = vm.group(thread.tid).and_then(|group| group.max().ok()?);
                let same_quota = quota.is_none_or(|max| max.quota() == vcpu.quota);
                if affinity.intersection(&usable) != vcpu.affinity || !same_quota {
                    let planned = self.last.version;
                    let current = Version(planned.0 + 1);
                    self.last.version = current;
                    return Err(Refusal::Stale { planned, current });
                }
            }
        }
        Ok(())
    }

    /// After acting: what the sample said of affinities and quotas is brought up to date, with a new version if it changed.
    pub(super) fn take_in_changes(&mut self, touched: &BTreeSet<VmId>) {
        let usable = self.machine.cpu_set();
        let mut has_changed = false;
        for sampled in self.last.vms.iter_mut().filter(|vm| touched.contains(&vm.id)) {
            let Some(vm) = self.vms.get(&sampled.id) else {
                continue;
            };
            for vcpu in &mut sampled.vcpus {
                let Some(thread) = vm.vcpu_thread(vcpu.index) else {
                    continue;
                };
                let Ok(Some(affinity)) = task::affinity(&self.root, vm.run.pid, thread.tid) else {
                    continue;
                };
                let affinity = affinity.intersection(&usable);
                has_changed |= affinity != vcpu.affinity;
                vcpu.affinity = affinity;
                if let Some(max) = vm.group(thread.tid).and_then(|group| group.max().ok()?) {
                    has_changed |= max.quota() != vcpu.quota;
                    vcpu.quota = max.quota();
                }
            }
            if let Some(balloon) = &mut sampled.balloon {
                let limit = vm.shrunk.map(|shrunk| shrunk.shrink.ours);
                has_changed |= limit != balloon.limit;
                balloon.limit = limit;
            }
            if let Some((_, affinities, limit, _)) = self.fingerprint.get_mut(&sampled.id) {
                *limit = sampled.balloon.and_then(|balloon| balloon.limit);
                *affinities = sampled
                    .vcpus
                    .iter()
                    .map(|v| (v.index, v.affinity.clone(), v.quota))
                    .collect();
            }
        }
        if has_changed {
            self.last.version = Version(self.last.version.0 + 1);
        }
    }

    /// Carries out one action.
    pub(super) fn act(&mut self, action: &Action) -> Result<Outcome, ActionError> {
        let sampled = self.last.vm(action.vm);
        let name = sampled.map(|vm| vm.name.clone()).unwrap_or_default();
        let is_ignored = sampled.is_some_and(|vm| vm.settings.management == Management::Ignored);
        let failed = |cause: &str| {
            let (what, cause) = (what(&action.act).into(), cause.into());
            Failure::Host { what, cause }.on(&name)
        };
        if is_ignored {
            return Err(failed("its operator opted it out; the agent only watches it"));
        }
        // Taken out while acting, so that journal and libvirt can be used beside it.
        let mut vm = self.vms.remove(&action.vm).ok_or(Failure::VmGone.on(&name))?;
        let result = self
            .journal_first(&vm)
            .map_err(|e| failed(&e.to_string()))
            .and_then(|()| match &action.act {
                Act::PinVcpus { vcpus, cpus, .. } => self.pin_vcpus(&mut vm, vcpus, cpus),
                Act::SetHome { nodes, .. } => self.set_home(&mut vm, nodes),
                Act::MovePages {
                    from, to, pages_max, ..
                } => self.move_pages(&mut vm, Which::Whole, from, to, *pages_max),
                Act::MoveVirtualNode {
                    virtual_node,
                    to,
                    pages_max,
                    ..
                } => {
                    let to = NodeSet::one(*to);
                    let from = self.machine.memory_nodes().difference(&to);
                    self.move_pages(&mut vm, Which::VirtualNode(*virtual_node), &from, &to, *pages_max)
                }
                Act::MoveFrames { moves, .. } => self.move_frames(&mut vm, moves),
                Act::SetMemoryPolicy { policy, .. } => {
                    let no_page_uses = self.no_page_uses();
                    memory_policy_is_possible(&vm.run.name, *policy, no_page_uses.as_deref()).map(|()| {
                        vm.memory_policy = *policy;
                        Outcome::Done
                    })
                }
                Act::Limit {
                    limit: Limit::CpuQuota(quota),
                    lease_ns,
                    ..
                } => self.hold(&mut vm, *quota, *lease_ns),
                Act::Limit {
                    limit: Limit::Memory(memory),
                    lease_ns,
                    ..
                } => self.shrink(&mut vm, *memory, *lease_ns),
                Act::Limit { limit, lease_ns, .. } => self.confine(&mut vm, *limit, *lease_ns),
                Act::Watch {
                    window_ns, lease_ns, ..
                } => self.watch_memory(&mut vm, *window_ns, *lease_ns),
                Act::TellTopology { topology, .. } => self.tell(&mut vm, topology),
                Act::Lift { lever, .. } => self.lift(&mut vm, *lever),
            });
        let is_alive = task::is_alive(&self.root, vm.run.process());
        self.vms.insert(action.vm, vm);
        // Whatever went wrong: if the VM has ended, that is the reason.
        if is_alive {
            result
        } else {
            Err(Failure::VmGone.on(&name))
        }
    }

    /// Writes down what will be in force on a lever.
    pub(super) fn journal_set<T: Written>(
        &mut self,
        vm: &Vm,
        what: &str,
        entry: &T,
    ) -> Result<(), ActionError> {
        self.journal(vm, what, |journal| journal.set(vm.run.vm, entry))
    }

    /// Writes down that nothing is in force on a lever any more.
    pub(super) fn journal_clear<T: Written>(&mut self, vm: &Vm, what: &str) -> Result<(), ActionError> {
        self.journal(vm, what, |journal| journal.clear::<T>(vm.run.vm))
    }

    pub(super) fn journal(
        &mut self,
        vm: &Vm,
        what: &str,
        write: impl FnOnce(&mut Journal) -> Result<(), JournalError>,
    ) -> Result<(), ActionError> {
        let Some(acts) = &mut self.acts else { return Ok(()) };
        write(&mut acts.journal).map_err(|e| host_error(vm, what, &e.to_string()))
    }

    /// What the journal says of a lever of a VM, whoever wrote it.
    pub(super) fn journalled<T: Written>(&self, vm: &Vm) -> Option<T> {
        self.acts.as_ref()?.journal.entry(vm.run.vm)?.get()
    }

    fn pin_vcpus(&mut self, vm: &mut Vm, vcpus: &[u16], cpus: &CpuSet) -> Result<Outcome, ActionError> {
        let mut pins: Pins = self.journalled(vm).unwrap_or_default();
        pins.0.extend(vcpus.iter().map(|index| (*index, cpus.clone())));
        self.journal_set(vm, PIN, &pins)?;
        for &index in vcpus {
            let before = vm.ours.insert(index, cpus.clone());
            let result = self.pin_vcpu(vm, index, cpus);
            if result.is_err() {
                // What libvirt did not do must not look like someone else's doing.
                match before {
                    Some(before) => vm.ours.insert(index, before),
                    None => vm.ours.remove(&index),
                };
            }
            result?;
        }
        Ok(Outcome::Done)
    }

    /// Pins one vCPU.
    pub(super) fn pin_vcpu(&mut self, vm: &Vm, index: u16, cpus: &CpuSet) -> Result<(), ActionError> {
        let what = format!("{PIN} {index}");
        let said = |e: CallError| host_error(vm, &what, e.cause());
        self.libvirt.pin_vcpu(&vm.handle, index, cpus).map_err(said)?;
        let tid = vm
            .vcpu_thread(index)
            .map(|t| t.tid)
            .ok_or_else(|| host_error(vm, &what, "it has no thread"))?;
        self.read_back(vm, tid, cpus, &what)
    }

    /// Whether a thread may now run where it should.
    pub(super) fn read_back(&self, vm: &Vm, tid: i32, cpus: &CpuSet, what: &str) -> Result<(), ActionError> {
        let seen =
            task::affinity(&self.root, vm.run.pid, tid).map_err(|e| host_error(vm, what, &e.to_string()))?;
        let usable = self.machine.cpu_set();
        match seen.map(|seen| seen.intersection(&usable)) {
            Some(seen) if seen == cpus.intersection(&usable) => Ok(()),
            Some(seen) => Err(host_error(
                vm,
                what,
                &format!("asked for CPUs {cpus}, in force are {seen}"),
            )),
            None => Err(Failure::VmGone.on(&vm.run.name)),
        }
    }

    /// Whether anything is known to keep this VM's memory from going there.
    fn check_movable(&self, vm: &Vm, to: &NodeSet) -> Result<(), ActionError> {
        let why = self
            .last
            .vm(vm.run.vm)
            .and_then(|sampled| sampled.immovable.as_ref());
        match why {
            // Within the nodes that it is bound to it can still move.
            Some(Immovable::BoundAtStart { nodes }) if to.is_subset(nodes) => Ok(()),
            Some(why) => Err(Failure::MemoryFixed { why: why.to_string() }.on(&vm.run.name)),
            None => Ok(()),
        }
    }

    /// Writes down where pages are moving to, once per destination.
    fn journal_move(&mut self, vm: &Vm, to: &NodeSet) -> Result<(), ActionError> {
        let moving = Moving(to.clone());
        if self.journalled(vm).as_ref() == Some(&moving) {
            return Ok(());
        }
        self.journal_set(vm, MOVE, &moving)
    }

    fn move_pages(
        &mut self,
        vm: &mut Vm,
        which: Which,
        from: &NodeSet,
        to: &NodeSet,
        budget: Pages,
    ) -> Result<Outcome, ActionError> {
        let name = vm.run.name.clone();
        let fixed = |why: String| Failure::MemoryFixed { why }.on(&name);
        self.check_movable(vm, to)?;
        if let Some(set) = vm.restrictive_nodes().filter(|set| !to.is_subset(set)) {
            let wider = set.union(to);
            self.set_memory_nodes(vm, &wider)?;
        }
        vm.forget_pages();
        let unreadable = |vm: &Vm, e: crate::ReadError| host_error(vm, MOVE, &e.to_string());
        vm.refresh_pages(&self.root, now())
            .map_err(|e| unreadable(vm, e))?;
        self.journal_move(vm, to)?;
        let process = vm.run.process();
        let mut go_on = || !self.stop.load(Ordering::Relaxed) && task::is_alive(&self.root, process);
        let part = vm.memory.part(which).filter(|part| part.pages.is_some());
        let Some(Part {
            mover,
            pages: Some(before),
        }) = part
        else {
            return Err(host_error(vm, MOVE, NO_MAPPING));
        };
        let result = mover.advance(&mut Linux, from, to, before, budget, &mut go_on);
        let progress = result.map_err(|error| move_error(vm, error))?;
        vm.forget_pages();
        vm.refresh_pages(&self.root, now())
            .map_err(|e| unreadable(vm, e))?;
        let after = vm.memory.part(which).and_then(|part| part.pages.as_ref());
        let after = after.ok_or_else(|| Failure::VmGone.on(&name))?;
        let left: Pages = after
            .iter()
            .filter(|(node, _)| from.contains(*node))
            .map(|(_, pages)| *pages)
            .sum();
        if progress.moved == Pages::ZERO && progress.busy == Pages::ZERO && progress.refused > Pages::ZERO {
            return Err(fixed(format!(
                "the kernel refuses to move {} (pinned, or shared with another process)",
                progress.refused
            )));
        }
        if left == Pages::ZERO {
            self.journal_clear::<Moving>(vm, MOVE)?;
        }
        self.narrow_if_little_is_left(vm)?;
        // Still to be looked at with the next sample: the guest goes on touching memory.
        vm.forget_pages();
        Ok(Outcome::Moved {
            moved: progress.moved,
            left,
            busy: progress.busy,
        })
    }
}

impl LibvirtHost {
    /// Moves single pages. They are where an instruction of the guest wants them for now; nothing is written down, as nothing
    /// is to be undone.
    fn move_frames(&mut self, vm: &mut Vm, moves: &[FrameMove]) -> Result<Outcome, ActionError> {
        let to: NodeSet = moves.iter().map(|each| each.to).collect();
        self.check_movable(vm, &to)?;
        vm.refresh_pages(&self.root, now())
            .map_err(|e| host_error(vm, MOVE, &e.to_string()))?;
        let Some(mover) = vm.memory.mover() else {
            return Err(host_error(vm, MOVE, NO_MAPPING));
        };
        let mut go_on = || !self.stop.load(Ordering::Relaxed) && task::is_alive(&self.root, vm.run.process());
        let progress = mover
            .move_frames(&mut Linux, moves, &mut go_on)
            .map_err(|error| move_error(vm, error))?;
        let wanted: Pages = moves.iter().map(|each| each.pages).sum();
        vm.forget_pages();
        Ok(Outcome::Moved {
            moved: progress.moved,
            left: wanted - progress.moved.min(wanted),
            busy: progress.busy,
        })
    }
}

const PIN: &str = "pinning vCPU";
const MOVE: &str = "moving memory";
const NO_MAPPING: &str = "no mapping of its QEMU has the size of its memory";

fn what(act: &Act) -> &'static str {
    match act {
        Act::PinVcpus { .. } => PIN,
        Act::SetHome { .. } => HOME,
        Act::MovePages { .. } | Act::MoveVirtualNode { .. } | Act::MoveFrames { .. } => MOVE,
        Act::TellTopology { .. } => TELL,
        Act::SetMemoryPolicy { .. } => "setting the memory policy",
        Act::Limit {
            limit: Limit::CpuQuota(_),
            ..
        } => HOLD,
        Act::Limit {
            limit: Limit::Memory(_),
            ..
        } => SHRINK,
        Act::Limit { .. } => CONFINE,
        Act::Lift {
            lever: Lever::Memory, ..
        } => GIVE_BACK,
        Act::Lift {
            lever: Lever::Resctrl,
            ..
        } => FREE,
        Act::Lift {
            lever: Lever::Home, ..
        } => LEAVE,
        Act::Watch { .. }
        | Act::Lift {
            lever: Lever::Watching,
            ..
        } => WATCH,
        Act::Lift { .. } => LIFT,
    }
}

fn move_error(vm: &Vm, error: MoveError) -> ActionError {
    let name = &vm.run.name;
    match error {
        MoveError::Gone => Failure::VmGone.on(name),
        MoveError::NoMemory { nodes } => Failure::NoMemory { nodes }.on(name),
        MoveError::NodeNotAllowed { .. } | MoveError::BudgetBelowHugePage { .. } => {
            let why = error.to_string();
            Failure::MemoryFixed { why }.on(name)
        }
        MoveError::NotPermitted | MoveError::Os { .. } => host_error(vm, MOVE, &error.to_string()),
    }
}

pub(super) fn host_error(vm: &Vm, what: &str, cause: &str) -> ActionError {
    let (what, cause) = (what.to_owned(), cause.to_owned());
    Failure::Host { what, cause }.on(&vm.run.name)
}

//! Where vCPUs may run: pinned through the VM's manager, read back from the kernel, not touched if the operator pins them.

use std::collections::BTreeMap;

use homenode_host::{Act, ActionError, Failure, Lever, Outcome};
use homenode_kernel::now;
use homenode_kernel::task::{self, Thread};
use homenode_undo::journal::{Before, Entry, Run, Written};
use homenode_units::CpuSet;
use serde::{Deserialize, Serialize};

use super::home::{cpus_of_home, emulator_before};
use super::{After, Home, Kvm, LeverState, Steps, UndoError, failed};
use crate::context::HostContext;
use crate::manager::CallError;
use crate::vm::{Pinned, Vm, vcpu_index};

/// The CPU sets to which each vCPU may be pinned, the newest first. There are several if an agent ended, or got no answer, while
/// it changed the pin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "vcpus";
}

impl Pinned {
    /// Returns the pins of a VM that has this journal entry.
    pub(crate) fn of(entry: Option<&Entry>) -> Pinned {
        let before = entry.map(|entry| &entry.before);
        let operator = before.map(|before| before.operator_pins.iter().copied().collect());
        Pinned {
            operator: operator.unwrap_or_default(),
            restored: before.map(|before| before.vcpus.clone()).unwrap_or_default(),
            ours: entry.and_then(Entry::get::<Pins>).unwrap_or_default().0,
        }
    }

    /// The pin that restoring this vCPU left behind, if the operator had none.
    fn restored(&self, index: u16, usable: &CpuSet) -> Option<CpuSet> {
        self.restored.get(&index).map(|cpus| cpus.intersection(usable))
    }
}

const PIN: &str = "pinning vCPU";
/// Most sets that are kept for a vCPU: one for each change in a row that got no answer.
const PINS_KEPT: usize = 8;

struct Vcpus {
    journalled: Pins,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    let journalled = entry.and_then(Entry::get).unwrap_or_default();
    Box::new(Vcpus { journalled })
}

impl LeverState<Kvm> for Vcpus {
    fn lever(&self) -> Lever {
        Lever::VcpuPlacement
    }

    fn may_be_refused_for_good(&self) -> bool {
        true
    }

    fn what(&self, _act: &Act) -> &'static str {
        PIN
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::PinVcpus { vcpus, cpus } = act else {
            return Ok(Outcome::Done);
        };
        let mut may_be = vm.pins.ours.clone();
        for index in vcpus {
            add(may_be.entry(*index).or_default(), std::slice::from_ref(cpus));
        }
        context.set(vm, PIN, &Pins(may_be.clone()))?;
        // Whether libvirt succeeds or not, the resulting pins are the agent's.
        let was = std::mem::replace(&mut vm.pins.ours, may_be);
        let mut before = Vec::with_capacity(vcpus.len());
        for &index in vcpus {
            let pinned = affinity_now(context, vm, index).and_then(|now| {
                // Take the agent's pin if it was read back, else what the kernel reports.
                let ours = was.get(&index).and_then(|sets| match sets.as_slice() {
                    [one] => Some(one.clone()),
                    _ => None,
                });
                before.push((index, ours.unwrap_or(now)));
                pin(context, vm, index, cpus)
            });
            if let Err(error) = pinned {
                roll_back(context, vm, &before, was);
                return Err(error);
            }
            vm.pins.ours.insert(index, vec![cpus.clone()]);
        }
        let mut home = vm.home.clone();
        if home.as_mut().is_some_and(|home| home.0.widen(cpus)) {
            // If this cannot be written, the next agent takes the VM's home for narrower than it is.
            let _ = home.iter().try_for_each(|home| context.set(vm, PIN, home));
            vm.home = home;
        }
        Ok(Outcome::Done)
    }

    fn reconcile(&mut self, context: &mut HostContext, vm: &mut Vm, is_first: bool) {
        let usable = context.machine.cpu_set();
        let is_kernels = now() < context.kernels_until;
        let later = came_at_home(context, vm);
        if let Err(error) = adopt(context, vm, &later) {
            context.notice(error.to_string());
        }
        let mut others = Vec::new();
        let shows_affinities = context.manager.shows_affinities();
        let pins = context.manager.pins(&vm.domain, &vm.threads);
        for index in vm
            .vcpu_indices()
            .into_iter()
            .filter(|index| !later.contains(index))
        {
            let written = pins.get(&index);
            let limits = |cpus: &&CpuSet| {
                !context.manager.is_unpinned(&vm.domain, cpus)
                    && !vm.reach.is_no_limit(&context.machine, cpus)
            };
            let written = written.filter(limits);
            let written = written.map(|pin| pin.intersection(&usable));
            let thread = vm.vcpu_thread(index);
            let in_force = thread
                .map(|t| t.affinity.intersection(&usable))
                .unwrap_or_default();
            let restored = vm.pins.restored(index, &usable);
            let (run, pins, reach) = (&vm.run, &mut vm.pins, &vm.reach);
            let by_hand = |in_force: &CpuSet| {
                let name = &run.name;
                format!(
                    "vCPU {index} of VM {name} was pinned to CPUs {in_force} by another program; the agent leaves it alone"
                )
            };
            if let Some(ours) = pins.ours.get_mut(&index) {
                // Within a smaller cpuset, the kernel applies only a part of what the agent asked for.
                let is_ours = reach.is_one_of(&in_force, &usable, ours);
                let is_ours_written =
                    |set: &CpuSet| ours.contains(set) || shows_affinities && *set == in_force;
                if is_ours && written.as_ref().is_none_or(is_ours_written) {
                    if ours.contains(&in_force) && written.is_none_or(|written| written == in_force) {
                        *ours = vec![in_force];
                    }
                    continue;
                }
                // The kernel changed the affinity, and the agent pins the vCPU again if it still wants to. A pin made by hand at
                // the same time cannot be told apart from that.
                if is_kernels {
                    continue;
                }
                pins.ours.remove(&index);
                others.push(index);
                // An agent that died between journal and pin leaves a journalled pin that never came into force.
                let entry = context.journal.as_ref().and_then(|journal| journal.entry(run.vm));
                let was = entry.and_then(|entry| entry.before.vcpus.get(&index));
                let was = was.map(|cpus| cpus.intersection(&usable));
                if (is_first && (written.is_none() || written == restored)) || was.as_ref() == Some(&in_force)
                {
                    continue;
                }
                if in_force != usable {
                    pins.operator.insert(index);
                    context.notice(by_hand(&in_force));
                }
                continue;
            }
            let is_pinned = written.as_ref().is_some_and(|w| *w != usable)
                && (written != restored || pins.operator.contains(&index));
            if is_pinned && pins.operator.insert(index) && !is_first {
                context.notice(by_hand(&in_force));
            }
            if !is_pinned && pins.operator.remove(&index) {
                let text = "is no longer pinned by hand; the agent manages it";
                context.notice(format!("vCPU {index} of VM {} {text}", run.name));
            }
        }
        if let Err(error) = leave_to_others(context, vm, &others) {
            context.notice(error.to_string());
        }
    }

    fn journalled(&self) -> Vec<&'static str> {
        let any = (!self.journalled.0.is_empty()).then_some(Pins::KEY);
        any.into_iter().collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        let Some(vm) = after.vm()? else {
            return Ok(());
        };
        let mut steps = Steps::default();
        let threads = after.manager.threads(after.run).map_err(|e| e.to_string());
        let described = after.manager.describe(vm).map_err(|e| e.cause().to_owned());
        let reach = after.reach();
        let shows_affinities = after.manager.shows_affinities();
        let pins = match described.and_then(|domain| Ok(after.manager.pins(&domain, &threads?))) {
            Ok(pins) => pins,
            Err(cause) => {
                steps.unknown("its vCPUs' pins", cause);
                return steps.done();
            }
        };
        for (index, ours) in &self.journalled.0 {
            // Pins that another program made since are not touched.
            let is_ours = |pin: &CpuSet| {
                ours.contains(pin) || shows_affinities && ours.iter().any(|set| reach.in_force(set) == *pin)
            };
            let is_ours = pins.get(index).is_some_and(is_ours);
            let before = before_of(after.before, *index);
            if let Some(cpus) = before.filter(|_| is_ours) {
                let cpus = reach.to_give_back(cpus);
                steps.note(
                    &format!("vCPU {index}"),
                    after.manager.pin_vcpu(vm, *index, &cpus),
                );
            }
        }
        steps.done()
    }
}

/// Returns the CPUs that a vCPU had before the agent. For a vCPU that was added later, they are the emulator's, which started it.
pub(crate) fn before_of(before: &Before, index: u16) -> Option<&CpuSet> {
    let of_vcpu = before.vcpus.get(&index).or_else(|| emulator_before(before));
    of_vcpu.filter(|cpus| !cpus.is_empty())
}

/// Returns the vCPUs that were added since the agent's first pin, that the agent has not pinned, and whose affinity is the main
/// thread's: QEMU started them there. Empty if the operator had pinned the main thread. Only for managers whose vCPUs inherit.
pub(super) fn begun_by_emulator(
    threads: &[Thread],
    (run, before): (&Run, &Before),
    ours: &BTreeMap<u16, Vec<CpuSet>>,
) -> Vec<u16> {
    let main = threads.iter().find(|thread| thread.tid == run.pid);
    let main = main.filter(|_| emulator_before(before).is_some());
    let came_later = |thread: &Thread| {
        let index = vcpu_index(&thread.role)?;
        let is_new = !before.vcpus.contains_key(&index) && !ours.contains_key(&index);
        (is_new && thread.affinity == main?.affinity).then_some(index)
    };
    threads.iter().filter_map(came_later).collect()
}

/// Returns the vCPUs that were added after the agent had given the VM a home, and that started there. QEMU starts a vCPU's thread
/// from its main thread, with the main thread's CPUs at that time. Such a vCPU would keep the agent's CPUs forever.
fn came_at_home(context: &HostContext, vm: &Vm) -> Vec<u16> {
    let entry = context
        .entry(vm)
        .filter(|entry| context.manager.vcpus_inherit() && entry.run == vm.run);
    let (Some(entry), Some(home)) = (entry.filter(|entry| entry.has(&[Home::KEY])), vm.home_nodes()) else {
        return Vec::new();
    };
    let of = (&vm.run, &entry.before);
    let mut later = begun_by_emulator(&vm.threads, of, &vm.pins.ours);
    // If the operator has pinned the emulator since, the vCPUs that it starts are the operator's too.
    let given = cpus_of_home(context, vm, home);
    later.retain(|index| {
        let is_at_home = vm
            .vcpu_thread(*index)
            .is_some_and(|thread| thread.affinity == given);
        is_at_home && !vm.pins.operator.contains(index)
    });
    later
}

/// Records these vCPUs as pinned by the agent to their current CPUs.
fn adopt(context: &mut HostContext, vm: &mut Vm, later: &[u16]) -> Result<(), ActionError> {
    if later.is_empty() {
        return Ok(());
    }
    let affinity = |index: &u16| Some((*index, vec![vm.vcpu_thread(*index)?.affinity.clone()]));
    let mut ours = vm.pins.ours.clone();
    ours.extend(later.iter().filter_map(affinity));
    vm.begin(context).map_err(|e| failed(vm, PIN, &e.to_string()))?;
    context.set(vm, PIN, &Pins(ours.clone()))?;
    vm.pins.ours = ours;
    Ok(())
}

/// Removes from the journal the pins of vCPUs that an operator has pinned since: the operator's pins stay when the agent ends.
fn leave_to_others(context: &mut HostContext, vm: &Vm, vcpus: &[u16]) -> Result<(), ActionError> {
    let Some(Pins(mut pins)) = context.journalled::<Pins>(vm).filter(|_| !vcpus.is_empty()) else {
        return Ok(());
    };
    pins.retain(|index, _| !vcpus.contains(index));
    if pins.is_empty() {
        context.clear::<Pins>(vm);
        return Ok(());
    }
    context.set(vm, PIN, &Pins(pins))
}

/// Restores the CPUs that vCPUs had before the agent's first pin. A vCPU that another program pinned since is no longer the
/// agent's.
pub(super) fn unpin(context: &mut HostContext, vm: &mut Vm, before: &Before) -> Result<(), ActionError> {
    vm.pins.restored.clone_from(&before.vcpus);
    for index in vm.pins.ours.keys().copied().collect::<Vec<_>>() {
        let anywhere = || vm.reach.left(&context.machine, &[]).cpus;
        let cpus = before_of(before, index).cloned().unwrap_or_else(anywhere);
        let cpus = vm.reach.to_give_back(&cpus);
        vm.pins.restored.insert(index, cpus.clone());
        if vm.vcpu_thread(index).is_some() {
            pin(context, vm, index, &cpus)?;
        }
        vm.pins.ours.remove(&index);
    }
    Ok(())
}

/// Returns the CPUs on which a vCPU may run at this moment.
fn affinity_now(context: &HostContext, vm: &Vm, index: u16) -> Result<CpuSet, ActionError> {
    let what = format!("{PIN} {index}");
    let thread = vm.vcpu_thread(index);
    let tid = thread.ok_or_else(|| failed(vm, &what, "it has no thread"))?.tid;
    let affinity = task::affinity(&context.root, vm.run.pid, tid);
    let affinity = affinity.map_err(|e| failed(vm, &what, &e.to_string()))?;
    affinity.ok_or_else(|| Failure::VmGone.on(&vm.run.name))
}

/// Puts the sets that a vCPU may now be pinned to in front of the older ones.
pub(super) fn add(may_be: &mut Vec<CpuSet>, newer: &[CpuSet]) {
    may_be.retain(|set| !newer.contains(set));
    may_be.splice(0..0, newer.iter().cloned());
    may_be.truncate(PINS_KEPT);
}

/// Rolls back a pin that came into force only in part, or not at all: the touched vCPUs get the CPUs in `before`. If that fails
/// too, the journal still lists what may be in force, and it is undone with the home or after the agent's end.
fn roll_back(
    context: &mut HostContext,
    vm: &mut Vm,
    before: &[(u16, CpuSet)],
    mut ours: BTreeMap<u16, Vec<CpuSet>>,
) {
    vm.reach.look_again(&context.root, vm.run.pid);
    for (index, cpus) in before {
        if pin(context, vm, *index, cpus).is_err() {
            // The pin may have come into force without an answer.
            let tried = vm.pins.ours.get(index).map_or(&[][..], Vec::as_slice);
            add(ours.entry(*index).or_default(), tried);
        } else if !ours.contains_key(index) {
            vm.pins.restored.insert(*index, cpus.clone());
        }
    }
    vm.pins.ours = ours;
    match vm.pins.ours.is_empty() {
        true => context.clear::<Pins>(vm),
        // If this cannot be written, the journal lists more than is in force, which does no harm.
        false => drop(context.set(vm, PIN, &Pins(vm.pins.ours.clone()))),
    }
}

/// Pins one vCPU.
fn pin(context: &mut HostContext, vm: &Vm, index: u16, cpus: &CpuSet) -> Result<(), ActionError> {
    let what = format!("{PIN} {index}");
    let said = |e: CallError| failed(vm, &what, e.cause());
    context.manager.pin_vcpu(vm.run.vm, index, cpus).map_err(said)?;
    let thread = vm.vcpu_thread(index);
    let tid = thread
        .map(|t| t.tid)
        .ok_or_else(|| failed(vm, &what, "it has no thread"))?;
    read_back(context, vm, tid, cpus, &what)
}

/// Checks that a thread may now run where it should.
pub(super) fn read_back(
    context: &HostContext,
    vm: &Vm,
    tid: i32,
    cpus: &CpuSet,
    what: &str,
) -> Result<(), ActionError> {
    let seen = task::affinity(&context.root, vm.run.pid, tid);
    let seen = seen.map_err(|e| failed(vm, what, &e.to_string()))?;
    let usable = context.machine.cpu_set();
    match seen.map(|seen| seen.intersection(&usable)) {
        // The restored CPUs may include some that the VM's cpuset no longer allows.
        Some(seen) if seen == vm.reach.in_force(cpus).intersection(&usable) => Ok(()),
        Some(seen) => {
            let cause = format!("asked for CPUs {cpus}, but CPUs {seen} are in force");
            Err(failed(vm, what, &cause))
        }
        None => Err(Failure::VmGone.on(&vm.run.name)),
    }
}

//! A VM's home: where its emulator and I/O threads run and, if libvirt can change them, its memory nodes. Lifting the home unpins
//! vCPUs too.

use std::collections::BTreeMap;

use homenode_host::{Act, ActionError, HomeInForce, Lever, Outcome};
use homenode_kernel::pages::WINDOW_PAGES;
use homenode_kernel::task::{self, Role, Thread};
use homenode_undo::journal::{Before, Entry, Helper, Written};
use homenode_units::{CpuSet, NodeSet, Pages, VmId};
use serde::{Deserialize, Serialize};

use super::vcpus::{self, read_back};
use super::{After, Kvm, LeverState, Pins, Steps, UndoError, failed, is_placed};
use crate::context::HostContext;
use crate::domain::Domain;
use crate::manager::{CallError, Manager};
use crate::reach::Reach;
use crate::vm::Vm;

/// The home that emulator, I/O threads and memory nodes follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "OnDisk", into = "OnDisk")]
pub(crate) struct Home(pub HomeInForce);

impl Written for Home {
    const KEY: &'static str = "home";
}

/// A home as it is in the journal. A home on all CPUs of its nodes has the format of earlier versions.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum OnDisk {
    Whole(NodeSet),
    Part { nodes: NodeSet, cpus: CpuSet },
}

impl From<OnDisk> for Home {
    fn from(read: OnDisk) -> Home {
        let (nodes, cpus) = match read {
            OnDisk::Whole(nodes) => (nodes, CpuSet::new()),
            OnDisk::Part { nodes, cpus } => (nodes, cpus),
        };
        Home(HomeInForce::On { nodes, cpus })
    }
}

impl From<Home> for OnDisk {
    fn from(home: Home) -> OnDisk {
        let nodes = home.nodes().cloned().unwrap_or_default();
        match home.0.part() {
            Some(cpus) => OnDisk::Part {
                nodes,
                cpus: cpus.clone(),
            },
            None => OnDisk::Whole(nodes),
        }
    }
}

impl Home {
    pub(crate) fn nodes(&self) -> Option<&NodeSet> {
        self.0.nodes()
    }
}

/// Memory nodes that the agent set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryNodes(pub NodeSet);

impl Written for MemoryNodes {
    const KEY: &'static str = "memory-nodes";
}

/// The CPU sets to which each helper (the emulator or an I/O thread) may be pinned, the newest first, as in [`Pins`]. A helper
/// whose pin is none of them was pinned by another program since.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HelperPins(pub Vec<(Helper, Vec<CpuSet>)>);

impl Written for HelperPins {
    const KEY: &'static str = "helpers";
}

impl HelperPins {
    /// Whether the agent may have pinned an emulator or I/O thread.
    pub(crate) fn has(&self, helper: Helper) -> bool {
        self.0.iter().any(|(known, _)| *known == helper)
    }

    /// Notes that a helper is about to be pinned to these CPUs.
    fn add(&mut self, helper: Helper, cpus: &CpuSet) {
        let cpus = std::slice::from_ref(cpus);
        match self.0.iter_mut().find(|(known, _)| *known == helper) {
            Some((_, sets)) => vcpus::add(sets, cpus),
            None => self.0.push((helper, cpus.to_vec())),
        }
    }

    /// Returns the helpers that are not where the agent put them, each with its pin: another program has pinned them since, or
    /// the agent's pin never came into force. Journals of earlier versions lack the sets; then all helpers count as the agent's.
    fn of_others(
        &self,
        manager: &dyn Manager,
        domain: &Domain,
        (threads, reach): (&[Thread], &Reach),
    ) -> BTreeMap<Helper, Option<CpuSet>> {
        let pins = pins_of_helpers(manager, domain, threads);
        let shows_affinities = manager.shows_affinities();
        let is_at =
            |set: &CpuSet, pin: &CpuSet| set == pin || shows_affinities && reach.in_force(set) == *pin;
        let is_ours = |helper: Helper, sets: &[CpuSet]| {
            let pin = pins.get(&helper);
            pin.is_some_and(|pin| sets.iter().any(|set| is_at(set, pin)))
        };
        let others = self.0.iter().filter(|(helper, sets)| !is_ours(*helper, sets));
        others
            .map(|(helper, _)| (*helper, pins.get(helper).cloned()))
            .collect()
    }
}

/// Returns the pins of the emulator and I/O threads: as the manager describes them, or, if it describes none, the affinities in
/// force.
fn pins_of_helpers(manager: &dyn Manager, domain: &Domain, threads: &[Thread]) -> BTreeMap<Helper, CpuSet> {
    if manager.shows_affinities() {
        let pin = |thread: &Thread| Some((helper_of(&thread.role)?, thread.affinity.clone()));
        return threads.iter().filter_map(pin).collect();
    }
    let iothreads = domain.iothread_pins.iter();
    let iothreads = iothreads.map(|(id, cpus)| (Helper::IoThread(*id), cpus.clone()));
    let emulator = domain.emulator_pin.clone().map(|cpus| (Helper::Emulator, cpus));
    iothreads.chain(emulator).collect()
}

fn helper_of(role: &Role) -> Option<Helper> {
    match role {
        Role::Emulator => Some(Helper::Emulator),
        Role::IoThread(id) => Some(Helper::IoThread(*id)),
        Role::Vcpu(_) | Role::Other => None,
    }
}

/// Lifts the home, and unpins vCPUs.
pub(crate) const NO_HOME: Act = Act::Lift { lever: Lever::Home };

const HOME: &str = "setting the home";
const LEAVE: &str = "lifting the home";
const MEMORY_NODES: &str = "setting the memory nodes";

struct OfVm {
    home: Option<Home>,
    helpers: Option<HelperPins>,
    nodes: Option<MemoryNodes>,
    pinned: Pins,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    Box::new(OfVm {
        home: entry.and_then(Entry::get),
        helpers: entry.and_then(Entry::get),
        nodes: entry.and_then(Entry::get),
        pinned: entry.and_then(Entry::get).unwrap_or_default(),
    })
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Home
    }

    fn may_be_refused_for_good(&self) -> bool {
        true
    }

    fn what(&self, act: &Act) -> &'static str {
        match act {
            Act::Lift { .. } => LEAVE,
            _ => HOME,
        }
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::SetHome { nodes } = act else {
            return Ok(Outcome::Done);
        };
        // This may also be a home whose memory nodes could not be set.
        let was = context.journalled::<Home>(vm);
        let pinned = context.pinned_with_home.get(&vm.run.vm).cloned();
        let home = Home(HomeInForce::on(
            &context.machine,
            nodes,
            &pinned.unwrap_or_default(),
        ));
        context.set(vm, HOME, &home)?;
        pin_helpers(context, vm, nodes, was)?;
        if let Some(set) = vm.restrictive_nodes().cloned() {
            set_memory_nodes(context, vm, &set.union(nodes))?;
        }
        vm.home = Some(home);
        narrow_if_little_is_left(context, vm)?;
        Ok(Outcome::Done)
    }

    /// Lets the VM run and allocate as before the agent's first pin; its pages stay where they are. The agent's changes stay
    /// journalled until all of them are undone: if the agent dies in between, its successor undoes them again.
    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        let Some(entry) = context.entry(vm).filter(|entry| is_placed(entry)).cloned() else {
            return Ok(());
        };
        let before = &entry.before;
        vcpus::unpin(context, vm, before)?;
        if entry.has(&[Home::KEY]) {
            let described = context.manager.describe(vm.run.vm);
            let described = described.map_err(|e| failed(vm, LEAVE, e.cause()))?;
            let ours: HelperPins = entry.get().unwrap_or_default();
            let others = ours.of_others(context.manager.as_ref(), &described, (&vm.threads, &vm.reach));
            for (helper, cpus) in helpers_before(before) {
                if others.contains_key(&helper) {
                    continue;
                }
                pin_helper(context, vm, helper, &vm.reach.to_give_back(&cpus))?;
            }
        }
        if let (Some(all), Some(before)) = (nodes_before(before, entry.get()), &before.nodes) {
            set_memory_nodes(context, vm, &all)?;
            narrow_to(context, vm, before)?;
        }
        // The next action of this plan journals these affinities.
        let threads = context.manager.threads(&vm.run);
        vm.threads = threads.map_err(|e| failed(vm, LEAVE, &e.to_string()))?;
        let own = [Pins::KEY, Home::KEY, HelperPins::KEY, MemoryNodes::KEY];
        context.clear_keys(vm, &[&own[..], &[super::Moving::KEY]].concat());
        vm.home = None;
        Ok(())
    }

    fn journalled(&self) -> Vec<&'static str> {
        let home = self.home.is_some().then_some(Home::KEY);
        let helpers = self.helpers.is_some().then_some(HelperPins::KEY);
        let nodes = self.nodes.is_some().then_some(MemoryNodes::KEY);
        home.into_iter().chain(helpers).chain(nodes).collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        let Some(vm) = after.vm()? else {
            return Ok(());
        };
        let mut steps = Steps::default();
        if self.home.is_some() {
            give_back_late_vcpus(after, &self.pinned, &mut steps);
            let reach = after.reach();
            match self.pinned_by_others(after, vm, &reach) {
                Ok(others) => {
                    let mut helpers = helpers_before(after.before);
                    helpers.retain(|helper, _| !others.contains_key(helper));
                    for (helper, cpus) in helpers {
                        let cpus = reach.to_give_back(&cpus);
                        let (what, done) = match helper {
                            Helper::Emulator => {
                                ("emulator".to_owned(), after.manager.pin_emulator(vm, &cpus))
                            }
                            Helper::IoThread(id) => (
                                format!("I/O thread {id}"),
                                after.manager.pin_iothread(vm, id, &cpus),
                            ),
                        };
                        steps.note(&what, done);
                    }
                }
                Err(error) => steps.unknown("the pins of its emulator and I/O threads", error.to_string()),
            }
        }
        if let Some(nodes) = nodes_before(after.before, self.nodes.clone()) {
            steps.note("memory nodes", after.manager.set_memory_nodes(vm, &nodes));
        }
        steps.done()
    }
}

impl OfVm {
    /// Returns the emulator and I/O threads that another program has pinned since the agent did. If the manager describes pins,
    /// threads are not read: one that cannot be read then does not prevent undoing the rest.
    fn pinned_by_others(
        &self,
        after: &mut After<'_>,
        vm: VmId,
        reach: &Reach,
    ) -> Result<BTreeMap<Helper, Option<CpuSet>>, UndoError> {
        let Some(ours) = &self.helpers else {
            return Ok(BTreeMap::new());
        };
        let threads = match after.manager.shows_affinities() {
            true => {
                let threads = after.manager.threads(after.run);
                threads.map_err(|e| UndoError::Call(e.to_string()))?
            }
            false => Vec::new(),
        };
        let described = after.manager.describe(vm);
        let described = described.map_err(|e| UndoError::Call(e.cause().to_owned()))?;
        Ok(ours.of_others(after.manager, &described, (&threads, reach)))
    }
}

/// Returns a home's CPUs for the emulator: those left to the VM, not reserved for the host, and allowed to the emulator before.
pub(super) fn cpus_of_home(context: &HostContext, vm: &Vm, nodes: &NodeSet) -> CpuSet {
    let cpus = context
        .machine
        .cpus_of(nodes)
        .intersection(&vm.left(context).cpus);
    within_before(
        context,
        vm,
        Helper::Emulator,
        &cpus.difference(&context.reserved_cpus),
    )
}

/// Returns the part of these CPUs that a helper had before the agent; all of them if a tool placed the VM, or nothing is known.
fn within_before(context: &HostContext, vm: &Vm, helper: Helper, cpus: &CpuSet) -> CpuSet {
    let before = context.entry(vm).filter(|_| !vm.domain.placed_by_advice);
    let own = before.and_then(|entry| match helper {
        Helper::Emulator => Some(&entry.before.emulator),
        Helper::IoThread(id) => entry.before.iothreads.get(&id),
    });
    match own.filter(|own| !own.is_empty()) {
        Some(own) => cpus.intersection(own),
        None => cpus.clone(),
    }
}

/// Pins the emulator and I/O threads to the home. If pinning one fails, all get their former CPUs again. If the home has no CPUs
/// that a helper may use, the helper stays where it is. `was` is the home that the journal lists as in force.
fn pin_helpers(
    context: &mut HostContext,
    vm: &mut Vm,
    nodes: &NodeSet,
    was: Option<Home>,
) -> Result<(), ActionError> {
    let cpus = cpus_of_home(context, vm, nodes);
    let iothreads = vm.domain.iothreads.iter().map(|id| Helper::IoThread(*id));
    let helpers: Vec<Helper> = std::iter::once(Helper::Emulator).chain(iothreads).collect();
    leave_to_others(context, vm)?;
    let own = |helper| (helper, within_before(context, vm, helper, &cpus));
    let is_to_be_pinned =
        |(helper, own): &(Helper, CpuSet)| !own.is_empty() && !vm.operator_helpers.contains(helper);
    let helpers: Vec<(Helper, CpuSet)> = helpers.into_iter().map(own).filter(is_to_be_pinned).collect();
    let mut ours: HelperPins = context.journalled(vm).unwrap_or_default();
    helpers.iter().for_each(|(helper, cpus)| ours.add(*helper, cpus));
    if !helpers.is_empty() {
        context.set(vm, HOME, &ours)?;
    }
    let mut before = Vec::with_capacity(helpers.len());
    for (helper, own) in helpers {
        let tid = thread_of(vm, helper);
        let now = tid.and_then(|tid| task::affinity(&context.root, vm.run.pid, tid).ok()?);
        before.push((helper, now));
        if let Err(error) = pin_helper(context, vm, helper, &own) {
            roll_back(context, vm, before, was);
            return Err(error);
        }
    }
    Ok(())
}

/// Notes which helpers another program has pinned since the agent did: they stay there, now and after the agent's end.
fn leave_to_others(context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
    let Some(ours) = context.journalled::<HelperPins>(vm) else {
        return Ok(());
    };
    let described = context.manager.describe(vm.run.vm);
    let described = described.map_err(|e| failed(vm, HOME, e.cause()))?;
    let others = ours.of_others(context.manager.as_ref(), &described, (&vm.threads, &vm.reach));
    let former = context
        .entry(vm)
        .map(|entry| helpers_before(&entry.before))
        .unwrap_or_default();
    let is_pin = |(helper, pin): &(Helper, Option<CpuSet>)| {
        let limits =
            |pin: &CpuSet| !vm.reach.is_no_limit(&context.machine, pin) && former.get(helper) != Some(pin);
        pin.as_ref().is_some_and(limits)
    };
    let pinned: Vec<Helper> = others
        .into_iter()
        .filter(is_pin)
        .map(|(helper, _)| helper)
        .collect();
    for helper in pinned {
        if vm.operator_helpers.insert(helper) {
            let name = &vm.run.name;
            context.notice(format!(
                "{helper} of VM {name} was pinned by another program; the agent leaves it alone"
            ));
        }
    }
    Ok(())
}

/// Rolls back a home that came into force only in part: helpers get their former CPUs. If that fails too, the journal still lists
/// the home, and it is lifted later.
fn roll_back(
    context: &mut HostContext,
    vm: &mut Vm,
    before: Vec<(Helper, Option<CpuSet>)>,
    was: Option<Home>,
) {
    vm.reach.look_again(&context.root, vm.run.pid);
    let mut is_as_before = true;
    for (helper, cpus) in before {
        is_as_before &= cpus.is_some_and(|cpus| pin_helper(context, vm, helper, &cpus).is_ok());
    }
    match was {
        _ if !is_as_before => {}
        // If this cannot be written the journal names more than is in force, which does no harm.
        Some(home) => drop(context.set(vm, HOME, &home)),
        None => context.clear_keys(vm, &[Home::KEY, HelperPins::KEY]),
    }
}

/// The thread of a helper; an I/O thread may be unknown.
fn thread_of(vm: &Vm, helper: Helper) -> Option<i32> {
    match helper {
        Helper::Emulator => Some(vm.run.pid),
        Helper::IoThread(id) => {
            let thread = vm.threads.iter().find(|t| t.role == Role::IoThread(id));
            thread.map(|t| t.tid)
        }
    }
}

/// CPUs of the emulator before the agent, unless the operator had pinned it.
pub(super) fn emulator_before(before: &Before) -> Option<&CpuSet> {
    let is_operators = before.operator_helpers.contains(&Helper::Emulator);
    Some(&before.emulator).filter(|cpus| !is_operators && !cpus.is_empty())
}

/// Unpins vCPUs that the emulator started at home and that the agent did not journal before it died.
fn give_back_late_vcpus(after: &mut After<'_>, pinned: &Pins, steps: &mut Steps) {
    if !after.manager.vcpus_inherit() {
        return;
    }
    let (run, before, reach) = (after.run, after.before, after.reach());
    let (Some(cpus), Ok(threads)) = (emulator_before(before), after.manager.threads(run)) else {
        return;
    };
    for index in vcpus::begun_by_emulator(&threads, (run, before), &pinned.0) {
        let done = after.manager.pin_vcpu(run.vm, index, &reach.to_give_back(cpus));
        steps.note(&format!("vCPU {index}"), done);
    }
}

/// CPUs to restore for emulator and I/O threads, except those that the operator pinned.
fn helpers_before(before: &Before) -> BTreeMap<Helper, CpuSet> {
    let iothreads = before.iothreads.iter();
    let helpers = iothreads
        .map(|(id, cpus)| (Helper::IoThread(*id), cpus))
        .chain([(Helper::Emulator, &before.emulator)]);
    helpers
        .filter(|(helper, cpus)| !cpus.is_empty() && !before.operator_helpers.contains(helper))
        .map(|(helper, cpus)| (helper, cpus.clone()))
        .collect()
}

/// Returns the memory nodes to allow again, if they were changed: the former ones and those set by the agent, because removing a
/// node would move the VM's pages all at once.
fn nodes_before(before: &Before, set: Option<MemoryNodes>) -> Option<NodeSet> {
    let MemoryNodes(set) = set?;
    Some(before.nodes.as_ref()?.union(&set))
}

fn pin_helper(context: &mut HostContext, vm: &Vm, helper: Helper, cpus: &CpuSet) -> Result<(), ActionError> {
    let (what, pinned) = match helper {
        Helper::Emulator => {
            let pinned = context.manager.pin_emulator(vm.run.vm, cpus);
            ("pinning the emulator".to_owned(), pinned)
        }
        Helper::IoThread(id) => {
            let pinned = context.manager.pin_iothread(vm.run.vm, id, cpus);
            (format!("pinning I/O thread {id}"), pinned)
        }
    };
    pinned.map_err(|e| failed(vm, &what, e.cause()))?;
    thread_of(vm, helper).map_or(Ok(()), |tid| read_back(context, vm, tid, cpus, &what))
}

/// Sets the memory nodes of a `restrictive` VM. If a node is removed, the kernel moves everything on it at once,
/// unthrottled; adding nodes moves nothing.
pub(super) fn set_memory_nodes(
    context: &mut HostContext,
    vm: &mut Vm,
    nodes: &NodeSet,
) -> Result<(), ActionError> {
    if vm.restrictive_nodes() == Some(nodes) {
        return Ok(());
    }
    context.set(vm, MEMORY_NODES, &MemoryNodes(nodes.clone()))?;
    let said = |e: CallError| failed(vm, MEMORY_NODES, e.cause());
    context.manager.set_memory_nodes(vm.run.vm, nodes).map_err(said)?;
    if let Some(tune) = &mut vm.domain.numatune {
        tune.nodes = Some(nodes.clone());
    }
    Ok(())
}

/// Narrows a `restrictive` VM's memory nodes to its home once little of its memory is outside. Until then, nodes are only added.
///
/// Narrowing moves what is outside, so it waits if the VM's memory must stay in place.
pub(super) fn narrow_if_little_is_left(context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
    let home = vm.home_nodes().cloned().filter(|_| vm.immovable.is_none());
    home.map_or(Ok(()), |home| narrow_to(context, vm, &home))
}

/// Narrows a `restrictive` VM's memory nodes if at most a hundredth of its memory, or one window, is outside.
fn narrow_to(context: &mut HostContext, vm: &mut Vm, nodes: &NodeSet) -> Result<(), ActionError> {
    let Some(pages) = vm.memory.pages() else {
        return Ok(());
    };
    if vm.restrictive_nodes().is_none_or(|set| set == nodes) {
        return Ok(());
    }
    let total: Pages = pages.values().copied().sum();
    let outside = pages.iter().filter(|(node, _)| !nodes.contains(*node));
    let outside: Pages = outside.map(|(_, p)| *p).sum();
    if outside.0 <= (total.0 / 100).max(WINDOW_PAGES) {
        set_memory_nodes(context, vm, nodes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_operator_pinned_and_nodes_that_hold_pages_are_left() {
        let cpus = |list: &str| -> CpuSet { list.parse().unwrap() };
        let nodes = |list: &str| -> NodeSet { list.parse().unwrap() };
        let before = Before {
            emulator: cpus("0-3"),
            iothreads: [(1, cpus("2")), (2, cpus("3"))].into(),
            operator_helpers: vec![Helper::IoThread(2)],
            nodes: Some(nodes("0")),
            ..Before::default()
        };
        let given_back = [(Helper::Emulator, cpus("0-3")), (Helper::IoThread(1), cpus("2"))];
        assert_eq!(helpers_before(&before), given_back.into());
        assert_eq!(
            nodes_before(&before, Some(MemoryNodes(nodes("2")))),
            Some(nodes("0,2"))
        );
        assert_eq!(nodes_before(&before, None), None);
    }
}

//! An operator's temporary requests: to keep VMs off some nodes, to change nothing, or to only observe a VM.
//!
//! A *drained* node cannot be a home: [`homenode_host::View::cpus`] has none of its CPUs, so each policy avoids it without
//! further rules. VMs whose home is there get another home. Unplaced VMs get a home elsewhere for as long as the drain lasts.
//! Memory follows the home. If homes wait for approval, their recommendations end with the drain.
//!
//! # Properties (`tests/control/drain.rs`)
//! - `what_a_drain_recommends_ends_with_it`
//! - `the_arranger_recommends_homes_again_after_a_drain`
//! - `a_vm_that_is_observed_for_a_while_is_given_back_and_managed_again_by_itself` (`tests/control/modes.rs`)

use homenode_host::{Sample, View, VmSample, VmView};
use homenode_machine::Machine;
use homenode_policy::{arrange, placement};
use homenode_units::{Bytes, NodeId, NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cycle::barred;
use crate::recommendations::most_careful;
use crate::{Control, Input, Mode, stages};

/// Why nodes cannot be drained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDrained {
    /// Some of the nodes do not exist on this host.
    #[error("this host has no node {missing}; it has {there}")]
    NoSuchNode {
        /// The unknown nodes.
        missing: NodeSet,
        /// The nodes of this host.
        there: NodeSet,
    },
    /// No node would be left.
    #[error("no node would be left for VMs; VMs of this host can use node {homes}")]
    NoneLeft {
        /// Nodes that can be a home.
        homes: NodeSet,
    },
    /// No policy would carry out the drain.
    #[error("{0}")]
    Idle(String),
}

/// A node that is being drained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DrainStatus {
    /// The node.
    pub node: NodeId,
    /// VMs that have memory or vCPUs on the node, those with most memory there first.
    pub vms: Vec<LeftBehind>,
}

/// A VM on a node that is being drained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LeftBehind {
    /// Its name.
    pub name: String,
    /// UUID.
    pub id: VmId,
    /// The VM's memory on the node; `None` if the host does not know it.
    pub memory_bytes: Option<Bytes>,
    /// Number of the VM's vCPUs that last ran on the node.
    pub vcpus: usize,
    /// Why the VM stays, if it does.
    pub why: Option<String>,
}

impl LeftBehind {
    /// Returns what is left of a VM on a node, or `None` if nothing is.
    fn of(
        view: &View<'_>,
        vm: &VmView<'_>,
        node: NodeId,
        mode: impl Fn(&VmView<'_>) -> Mode,
    ) -> Option<LeftBehind> {
        let pages = vm.sample.pages.as_ref();
        let memory_bytes = pages.map(|pages| pages.get(node).copied().unwrap_or_default().to_bytes());
        let there = |cpu| view.machine.node_of(cpu) == Some(node);
        let vcpus = vm
            .sample
            .vcpus
            .iter()
            .filter(|vcpu| vcpu.cpu.is_some_and(there))
            .count();
        let is_gone = vcpus == 0 && memory_bytes.is_none_or(|bytes| bytes == Bytes::ZERO);
        (!is_gone).then(|| LeftBehind {
            name: vm.sample.name.clone(),
            id: vm.sample.id,
            memory_bytes,
            vcpus,
            why: why_it_stays(view, vm, node, mode(vm)),
        })
    }
}

fn why_it_stays(view: &View<'_>, vm: &VmView<'_>, node: NodeId, mode: Mode) -> Option<String> {
    let settings = &vm.sample.settings;
    if let Some(why) = vm.hands_off {
        return Some(why.to_string());
    }
    if settings.home.as_ref().is_some_and(|home| home.contains(node)) {
        return Some(
            "its operator set its home to this node; set another home, or remove that setting".to_owned(),
        );
    }
    match mode {
        Mode::Act => {}
        Mode::Recommend => {
            return Some(format!(
                "mode {mode} is in force for it: it moves once you approve that (`homenode recommend`)"
            ));
        }
        Mode::Observe => return Some(format!("mode {mode} is in force for it")),
    }
    if let Some(fixed) = vm.memory_fixed() {
        return Some(fixed.to_string());
    }
    let lives_there = vm.home.is_none_or(|home| home.contains(node));
    (lives_there && view.rates.is_some()).then(|| "no other node has room for it yet".to_owned())
}

impl Control {
    /// Keeps VMs off these nodes, and no others, until the operator's next request.
    ///
    /// # Errors
    /// If a node does not exist, no node would be left, or no policy would assign other homes.
    pub fn drain(&mut self, machine: &Machine, nodes: NodeSet) -> Result<(), NotDrained> {
        let there = machine.node_set();
        let missing = nodes.difference(&there);
        if !missing.is_empty() {
            return Err(NotDrained::NoSuchNode { missing, there });
        }
        let left = |drained: &NodeSet| {
            let empty = Sample::default();
            let sample = self.sample().unwrap_or(&empty);
            let barred = barred(&self.config, drained);
            View::new(machine, sample, None, barred, Vec::new()).homes()
        };
        if !nodes.is_empty() && left(&nodes).is_empty() {
            let homes = left(&NodeSet::new());
            return Err(NotDrained::NoneLeft { homes });
        }
        if let Some(why) = self.homes_idle().filter(|_| !nodes.is_empty()) {
            return Err(NotDrained::Idle(why));
        }
        self.inputs.push(Input::Drained { nodes: nodes.clone() });
        if nodes.is_empty() {
            let now = self.now();
            self.recommendations
                .end_of_drain(self.states.placement.sheltered(), now);
        }
        self.drained = nodes;
        Ok(())
    }

    /// Sets the drained nodes of an earlier agent, for a loop that only answers questions.
    pub fn with_drained(mut self, nodes: NodeSet) -> Control {
        self.drained = nodes;
        self
    }

    /// Returns the nodes that are being drained.
    pub fn drained(&self) -> &NodeSet {
        &self.drained
    }

    /// Returns what is left on each drained node, by ascending node.
    pub fn drains(&self, machine: &Machine) -> Vec<DrainStatus> {
        let of_policy = self.config.modes.of(placement::POLICY);
        let mode = |vm: &VmView<'_>| match most_careful(self.mode, of_policy, vm.sample.settings.mode) {
            Mode::Recommend if self.recommendations.moves(vm.sample.id) => Mode::Act,
            mode => mode,
        };
        let of = |view: &View<'_>, node: NodeId| {
            let left = view
                .vms
                .iter()
                .filter_map(|vm| LeftBehind::of(view, vm, node, mode));
            let mut vms: Vec<LeftBehind> = left.collect();
            if self.is_paused(view.at) {
                vms.iter_mut()
                    .for_each(|vm| vm.why = Some("the agent is paused".to_owned()));
            }
            vms.sort_by(|a, b| b.memory_bytes.cmp(&a.memory_bytes).then(a.name.cmp(&b.name)));
            DrainStatus { node, vms }
        };
        self.look(machine, |view| {
            self.drained.iter().map(|node| of(view, node)).collect()
        })
    }

    /// Suspends all changes for `span`, on behalf of the operator. Zero ends a pause.
    pub fn pause(&mut self, span: Ns) {
        self.inputs.push(Input::Paused { span });
        let now = self.now();
        self.paused_until = (span > Ns::ZERO).then(|| Ns(now.0.saturating_add(span.0)));
    }

    /// Only observes a VM for `span`, whatever its mode: what is in force on it is released, and its mode returns by itself.
    /// Zero ends that.
    pub fn observe_for(&mut self, vm: VmId, span: Ns) {
        self.inputs.push(Input::Observing { vm, span });
        let until = Ns(self.now().0.saturating_add(span.0));
        let sampled = self.sample().and_then(|sample| sample.vm(vm));
        let own = sampled.and_then(|vm| self.own_mode(vm));
        self.observed.insert(vm, (until, own));
    }

    /// Returns the mode that the operator chose for a VM, which a lease hides.
    pub(crate) fn own_mode(&self, vm: &VmSample) -> Option<Mode> {
        let leased = self.observed.get(&vm.id);
        leased.map_or(vm.settings.mode, |(_, own)| *own)
    }

    /// Returns how much longer the VM is only observed, or `None` if its own mode applies.
    pub(crate) fn observed_for(&self, vm: VmId) -> Option<Ns> {
        let left = self.observed.get(&vm)?.0.saturating_sub(self.now());
        (left > Ns::ZERO).then_some(left)
    }

    /// Sets the mode of VMs that are only observed for a while.
    pub(crate) fn only_observe(&mut self, sample: &mut Sample) {
        self.observed.retain(|_, (until, _)| *until > sample.at);
        for vm in &mut sample.vms {
            if let Some((_, own)) = self.observed.get_mut(&vm.id) {
                *own = vm.settings.mode.replace(Mode::Observe);
            }
        }
    }

    /// Returns how much longer the pause lasts, or `None` if the agent is not paused.
    pub fn paused_for(&self) -> Option<Ns> {
        let now = self.now();
        let until = self.paused_until.filter(|until| *until > now)?;
        Some(until.saturating_sub(now))
    }

    pub(crate) fn is_paused(&self, now: Ns) -> bool {
        self.paused_until.is_some_and(|until| until > now)
    }

    /// Returns why no VM would get another home, or `None` if VMs would.
    fn homes_idle(&self) -> Option<String> {
        let gives = |stage: &&stages::Stage| [placement::POLICY, arrange::POLICY].contains(&stage.policy);
        let stage = stages::of(self.config.policies).find(gives);
        let not = "give no VM another home";
        let idle = self.idle(stage.map_or(placement::POLICY, |stage| stage.policy), not);
        // VMs that must leave get their homes from `placement`, even if the arranger chooses homes otherwise.
        let observes = self.config.modes.of(placement::POLICY) == Some(Mode::Observe);
        let of_mode = || {
            format!(
                "the policy {} only observes (setting modes): its decisions {not}",
                placement::POLICY
            )
        };
        idle.or_else(|| observes.then(of_mode))
    }
}

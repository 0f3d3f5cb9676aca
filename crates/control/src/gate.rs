//! Decides how far each decision goes, and lifts what may no longer stay in force.
//!
//! # Algorithm
//! Three modes apply to a decision: that of the run, that of its policy (`[modes]`), and that of its VM ([`Mode`]). The most
//! careful of the three counts. Under `observe` the decision is reported, under `recommend` it becomes a recommendation
//! ([`crate::recommendations`]), and under `act` it is carried out.
//!
//! Decisions that protect a VM, or restore what it had, need no approval under `recommend`:
//! 1. lifting anything that the agent has set;
//! 2. returning a vCPU that is lent to another node to its home;
//! 3. undoing a trial that did not pay, which restores the earlier home or memory policy. A memory policy that the advisor chose
//!    is restored under `observe` too;
//! 4. returning a VM that was kept off a cache for a measurement. None begins unless the mode is `act`.
//!
//! Limits with a lease (quotas, parts of caches, memory, watches) are lifted as soon as they may no longer stay in force, not at
//! the end of the lease. So if a VM's mode changes from `act` to `recommend`, its limits end at once, while its home stays. Under
//! `observe` the home is lifted too, since the agent keeps nothing in force on a VM that it only observes. A client that asks for
//! a working set thereby approves the watch.
//!
//! While the agent is *paused*, only decisions that need no approval are carried out; all others are only reported. Limits with a
//! lease are lifted, homes stay, and recommendations continue to wait.
//!
//! The arranger predicts all homes of one cycle together. If one of them waits for approval, all of them wait.
//!
//! # Properties (`tests/control/modes.rs`)
//! - `the_most_careful_of_run_policy_and_vm_holds_for_every_pair`
//! - `nothing_is_changed_before_it_is_approved`
//! - `what_is_approved_is_what_act_would_have_done`
//! - `a_vm_put_to_recommend_is_not_left_throttled`
//! - `of_a_vm_put_to_observe_everything_is_given_back`
//! - `a_memory_policy_on_trial_does_not_outlast_a_change_of_mode` (`tests/control/memory_policy.rs`)
//! - `a_home_stays_and_lent_vcpus_come_home_under_recommend`
//! - `a_pause_changes_nothing_but_gives_back_what_is_held_and_ends_by_itself`
//! - `homes_of_the_arranger_are_on_trial_from_their_approval_on_and_memory_follows`

use std::collections::BTreeMap;

use homenode_host::{
    Act, Action, Decision, Immovable, Lever, Management, Mode, Outcome, Plan, Sample, View, VmSample,
};
use homenode_policy::permits::attribution;
use homenode_policy::{arrange, placement};
use homenode_units::{NodeSet, Ns, VmId};

use crate::config::Modes;
use crate::recommendations::{Recommendations, most_careful};
use crate::stages::States;

/// The modes and approvals that decide whether a decision of a cycle is only reported, recommended, or carried out.
pub(crate) struct Gate<'a> {
    pub run: Mode,
    /// Whether the operator has paused all changes.
    pub is_paused: bool,
    pub modes: &'a Modes,
    pub recommendations: &'a Recommendations,
    /// VMs whose working sets clients wait for, and until when.
    pub asked: &'a BTreeMap<VmId, Ns>,
}

impl Gate<'_> {
    /// Returns how far decisions of a policy on a VM go. Decisions that need no approval may go further.
    pub(crate) fn mode(&self, policy: &str, vm: Option<&VmSample>) -> Mode {
        most_careful(
            self.run,
            self.modes.of(policy),
            vm.and_then(|vm| vm.settings.mode),
        )
    }

    /// Returns true if decisions of a policy are carried out on VMs with no mode of their own.
    pub(crate) fn may_act(&self, policy: &str) -> bool {
        !self.is_paused && self.mode(policy, None) == Mode::Act
    }

    /// Returns how far a decision goes.
    pub(crate) fn of(&self, view: &View<'_>, states: &States, decision: &Decision) -> Mode {
        let ends_isolation = decision.policy == attribution::POLICY
            && states.permits.attribution.gives_back(decision.action.vm);
        match self.mode(decision.policy, view.sample.vm(decision.action.vm)) {
            // A VM that was sent away returns, whatever has become of its mode.
            _ if ends_isolation && self.run != Mode::Observe => Mode::Act,
            // What the advisor tried does not outlast a change of mode.
            _ if restores_memory_policy(states, decision) && self.run != Mode::Observe => Mode::Act,
            Mode::Observe => Mode::Observe,
            Mode::Act if !self.is_paused => Mode::Act,
            _ if self.waits_for_nobody(view, states, decision) => Mode::Act,
            // A measurement of seconds is over before it could be approved, so none begins.
            Mode::Recommend if decision.policy == attribution::POLICY => Mode::Observe,
            Mode::Recommend => Mode::Recommend,
            Mode::Act => Mode::Observe,
        }
    }

    /// Returns how far each decision of a plan goes, in order.
    pub(crate) fn of_plan(&self, view: &View<'_>, states: &States, plan: &Plan) -> Vec<Mode> {
        let mut modes: Vec<Mode> = plan
            .decisions
            .iter()
            .map(|decision| self.of(view, states, decision))
            .collect();
        let is_arranged = |decision: &Decision| decision.policy == arrange::POLICY;
        let waits = |(decision, mode): (&Decision, &Mode)| is_arranged(decision) && *mode == Mode::Recommend;
        if plan.decisions.iter().zip(&modes).any(waits) {
            for (decision, mode) in plan.decisions.iter().zip(&mut modes) {
                if is_arranged(decision) && !self.waits_for_nobody(view, states, decision) {
                    *mode = (*mode).min(Mode::Recommend);
                }
            }
        }
        modes
    }

    fn waits_for_nobody(&self, view: &View<'_>, states: &States, decision: &Decision) -> bool {
        let id = decision.action.vm;
        let gives_back = match &decision.action.act {
            Act::Lift { .. } => true,
            Act::SetHome { .. } | Act::PinVcpus { .. }
                if decision.policy == arrange::POLICY && states.arrange.trials.gives_back(id) =>
            {
                true
            }
            Act::PinVcpus { vcpus, cpus } => {
                let vm = view.vms.iter().find(|vm| vm.sample.id == id);
                let comes_home = |home: &NodeSet| {
                    let nodes: NodeSet = cpus.iter().filter_map(|cpu| view.machine.node_of(cpu)).collect();
                    nodes.is_subset(home)
                };
                vm.is_some_and(|vm| {
                    let is_away = |vcpu: &u16| vm.away_node(view.machine, *vcpu).is_some();
                    vm.home.is_some_and(comes_home) && vcpus.iter().all(is_away)
                })
            }
            Act::SetMemoryPolicy { .. } => {
                let vm = view.sample.vm(id);
                let is_ours = vm.is_some_and(|vm| vm.settings.memory_policy.is_none());
                is_ours && states.memory.advisor.gives_back(id)
            }
            Act::Watch { .. } => self.is_asked(id, view.at),
            _ => false,
        };
        gives_back || !self.is_paused && self.recommendations.lets_through(decision)
    }

    fn is_asked(&self, vm: VmId, now: Ns) -> bool {
        self.asked.get(&vm).is_some_and(|until| *until > now)
    }
}

/// Whether a decision restores the memory policy from before the advisor's choices.
fn restores_memory_policy(states: &States, decision: &Decision) -> bool {
    let Act::SetMemoryPolicy { policy } = &decision.action.act else {
        return false;
    };
    let is_ours = decision.policy == homenode_policy::memory::POLICY;
    is_ours && states.memory.was_before(decision.action.vm, *policy)
}

/// What this run has in force on VMs, as far as it can be lifted.
#[derive(Debug, Default)]
pub(crate) struct InForce(BTreeMap<(VmId, Lever), Set>);

/// The policy that set a lever, and when the setting ends by itself.
#[derive(Debug)]
struct Set {
    policy: &'static str,
    until: Option<Ns>,
}

impl InForce {
    /// Notes that a home is in force on this VM, which an earlier agent gave it if this run did not.
    pub(crate) fn adopted(&mut self, vm: VmId) {
        let (policy, until) = (placement::POLICY, None);
        let home = self.0.entry((vm, Lever::Home));
        home.or_insert(Set { policy, until });
    }

    /// Notes that nothing is in force on this lever of a VM any more.
    pub(crate) fn has_ended(&mut self, vm: VmId, lever: Lever) {
        self.0.remove(&(vm, lever));
    }

    /// Takes in the outcome of a decision.
    pub(crate) fn outcome(&mut self, decision: &Decision, outcome: &Outcome, at: Ns) {
        let Decision { policy, action, .. } = decision;
        let (policy, Action { vm, act }) = (*policy, action);
        let key = (*vm, act.lever());
        match (act, outcome) {
            (Act::Lift { .. }, Outcome::Done) => drop(self.0.remove(&key)),
            (
                Act::SetHome { .. } | Act::Limit { .. } | Act::Watch { .. },
                Outcome::Done | Outcome::Renewed,
            ) => {
                let until = act.lease().map(|lease| at + lease);
                self.0.insert(key, Set { policy, until });
            }
            _ => {}
        }
    }

    /// Returns the VMs and levers that can be lifted.
    pub(crate) fn levers(&self) -> impl Iterator<Item = (VmId, Lever)> + '_ {
        self.0.keys().copied()
    }

    /// Lifts what may no longer stay in force.
    pub(crate) fn give_back(&mut self, gate: &Gate<'_>, sample: &Sample, plan: &mut Plan) {
        let now = sample.at;
        self.0.retain(|(vm, _), set| {
            sample
                .vm(*vm)
                .is_some_and(|vm| vm.settings.management == Management::Managed)
                && set.until.is_none_or(|until| until > now)
        });
        for ((id, lever), set) in &self.0 {
            let vm = sample.vm(*id);
            // libvirt accepts no changes to a migrating VM, and hosts change nothing on a VM that they could not read.
            if vm.is_some_and(|vm| vm.is_unread || vm.immovable == Some(Immovable::Migrating)) {
                continue;
            }
            let of_vm = vm.and_then(|vm| vm.settings.mode);
            let mode = gate.mode(set.policy, vm);
            let stands = match mode {
                _ if *lever == Lever::Watching && mode != Mode::Observe && gate.is_asked(*id, now) => true,
                Mode::Act => !gate.is_paused || !lever.is_leased(),
                Mode::Recommend => {
                    !lever.is_leased()
                        || !gate.is_paused && gate.recommendations.lets_stand(*id, set.policy, *lever)
                }
                // The mode of the run or policy does not lift homes, since an earlier agent with other settings may have left
                // them.
                Mode::Observe => !lever.is_leased() && of_vm != Some(Mode::Observe),
            };
            if !stands {
                let why = match mode {
                    Mode::Act | Mode::Recommend if gate.is_paused => "lifted: the agent is paused".to_owned(),
                    mode => format!("lifted: mode {mode} is in force for it"),
                };
                plan.decide(set.policy, Act::Lift { lever: *lever }.on(*id), why);
            }
        }
    }
}

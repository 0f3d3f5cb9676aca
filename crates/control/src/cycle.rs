//! One cycle: observe, plan, carry out, remember.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use homenode_host::{
    Act, Action, Barred, Decision, HandsOff, HomeInForce, Host, HostError, Immovable, Lever, Limit,
    Management, Outcome, Plan, Rates, Receipt, Refusal, Sample, View, VmSample, VmView,
};
use homenode_machine::Machine;
use homenode_policy::arrange::what_if::Obstacle;
use homenode_policy::permits::attribution;
use homenode_policy::{arrange, levers, topology_feed, working_set};
use homenode_units::{NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::Serialize;

use crate::external::{self, External};
use crate::foreign_changes::ForeignChanges;
use crate::gate::{Gate, InForce};
use crate::recommendations::most_careful;
use crate::stages::Plans;
use crate::status::Known;
use crate::{
    Config, Control, Decided, Event, MemoryStatus, Mode, PermitStatus, Recommendation, Status,
    TopologyStatus, Turn, stages,
};

/// What the agent saw and did in one cycle.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Cycle {
    /// The host before any action of this cycle, except that homes are those after it.
    #[serde(flatten)]
    pub status: Status,
    /// Changes, decisions and actions, in order.
    pub events: Vec<Event>,
}

/// A cycle whose plan is made, but not yet carried out.
#[derive(Clone, Debug)]
pub struct Begun {
    sample: Arc<Sample>,
    rates: Option<Rates>,
    /// The acting part of the plan, followed by decisions that are only reported.
    plan: Plan,
    /// Number of decisions in the acting part.
    acts_count: usize,
    events: Vec<Event>,
}

impl Begun {
    /// Returns the decisions to carry out, followed by those that are only reported.
    pub fn decisions(&self) -> &[Decision] {
        &self.plan.decisions
    }

    /// Commits the acting part of the plan, unless it is empty.
    ///
    /// # Errors
    /// If the host refuses the plan.
    pub fn commit<H: Host + ?Sized>(&self, host: &mut H) -> Result<Receipt, Refusal> {
        let (acts, told) = self.plan.decisions.split_at(self.acts_count);
        let mut receipt = match (acts, told) {
            ([], _) => Receipt {
                version: self.sample.version,
                outcomes: vec![],
            },
            (_, []) => host.commit(&self.plan)?,
            (acts, _) => host.commit(&Plan {
                decisions: acts.to_vec(),
                ..Plan::new(self.plan.version)
            })?,
        };
        receipt.outcomes.extend(told.iter().map(|_| Outcome::DryRun));
        Ok(receipt)
    }
}

impl Control {
    /// Runs one cycle: sample, derive, plan, commit.
    ///
    /// # Errors
    /// If the host cannot be read. Then nothing was done, and the next step may succeed.
    pub fn step<H: Host + ?Sized>(&mut self, host: &mut H) -> Result<Cycle, HostError> {
        let sample = host.sample()?;
        let begun = self.begin(host.machine(), sample);
        let answer = begun.commit(host);
        Ok(self.finish(host.machine(), begun, answer))
    }

    /// Runs the first half of a cycle: everything except acting. Between [`Control::begin`] and [`Control::finish`] the caller
    /// may release the loop: moving pages takes long, and a VM that starts meanwhile needs an answer.
    pub fn begin(&mut self, machine: &Machine, mut sample: Sample) -> Begun {
        self.take_over_homes(&sample);
        self.let_go_of_opted_out(&sample);
        self.since.retain_mut(|set| {
            set.samples_left = set.samples_left.saturating_sub(1);
            let is_missing = |vm: &VmSample| !vm.settings.has(set.setting);
            set.samples_left > 0 && sample.vm(set.vm).is_some_and(is_missing)
        });
        self.only_observe(&mut sample);
        let mut events = self
            .foreign
            .compare(self.last.as_ref().map(|(sample, _)| sample.as_ref()), &sample);
        let rates = self
            .last
            .as_ref()
            .and_then(|(prev, _)| Rates::between(machine, prev, &sample));
        self.observe(machine, &sample, rates.as_ref());
        self.told.retain(|(vm, _)| sample.vm(*vm).is_some());
        let (plan, acts_count) = self.decide(machine, &sample, rates.as_ref());
        events.extend(self.recommendations.take_events());
        let refusal = self.external.as_mut().and_then(External::take_refusal);
        events.extend(refusal.map(|refusal| Event::Refused { refusal }));
        self.turn = Turn {
            number: self.begun_count,
            before: std::mem::take(&mut self.inputs),
            decided: plan.decisions.iter().map(Decided::from).collect(),
            ..Turn::default()
        };
        self.begun_count += 1;
        let sample = Arc::new(sample);
        self.last = Some((Arc::clone(&sample), rates.clone()));
        Begun {
            sample,
            rates,
            plan,
            acts_count,
            events,
        }
    }

    /// Forgets the homes, pins and quotas of VMs that operators opted out. The host restores these VMs, so the agent expects
    /// nothing on them.
    fn let_go_of_opted_out(&mut self, sample: &Sample) {
        let opted_out = |vm: &&VmSample| vm.settings.management == Management::Ignored;
        for vm in sample.vms.iter().filter(opted_out) {
            self.homes.remove(&vm.id);
            self.foreign.forget_pins(vm.id);
            self.foreign.forget_quota(vm.id);
        }
    }

    /// Takes over from the host which homes are in force: those that an earlier agent gave, without those that the host has
    /// lifted by itself or that ended with an earlier run of the VM. What the loop remembers counts only for a host that does
    /// not tell.
    fn take_over_homes(&mut self, sample: &Sample) {
        if stages::leave_homes_to_operators(self.config.policies) {
            return;
        }
        let last = self.last.as_ref().map(|(last, _)| last.as_ref());
        for vm in &sample.vms {
            let is_new = last.is_none_or(|last| last.vm(vm.id).is_none());
            match &vm.home {
                // A run that only observes continues with the homes that it would have given.
                _ if self.mode == Mode::Observe && !is_new => {}
                HomeInForce::On { nodes, .. } => {
                    self.in_force.adopted(vm.id);
                    let known = self.homes.insert(vm.id, nodes.clone());
                    // An earlier agent that gave the VM this home may have left the VM's vCPUs elsewhere.
                    if is_new && known.is_none() {
                        self.states.permits.attribution.adopted(vm.id);
                    }
                }
                HomeInForce::Unplaced => {
                    self.in_force.has_ended(vm.id, Lever::Home);
                    // Pins end with the home.
                    if self.homes.remove(&vm.id).is_some() {
                        self.foreign.forget_pins(vm.id);
                    }
                }
                HomeInForce::Untold => {}
            }
        }
    }

    /// Runs the second half of a cycle: remembers what the host did.
    pub fn finish(&mut self, machine: &Machine, begun: Begun, answer: Result<Receipt, Refusal>) -> Cycle {
        let Begun {
            sample,
            rates,
            plan,
            acts_count,
            mut events,
        } = begun;
        events.extend(
            plan.findings
                .into_iter()
                .map(|finding| Event::found(finding, &sample)),
        );
        self.turn.during = std::mem::take(&mut self.inputs);
        self.turn.answered(&answer);
        if let Some(external) = &mut self.external {
            external.answered(plan.version, &plan.decisions, &answer);
        }
        match answer {
            Err(refusal) => events.push(Event::Refused { refusal }),
            Ok(receipt) => {
                let decided = plan.decisions.into_iter().zip(receipt.outcomes);
                for (at, (decision, outcome)) in decided.enumerate() {
                    let told = (decision.action.vm, what_is_told(&decision.action));
                    if outcome == Outcome::DryRun && !self.told.insert(told) {
                        continue;
                    }
                    // In a run that acts, state must not depend on decisions that were only reported.
                    if at < acts_count || self.mode == Mode::Observe {
                        self.migrations.outcome(decision.action.vm, &outcome);
                        self.remember(&decision.action, &outcome, sample.at);
                        self.in_force.outcome(&decision, &outcome, sample.at);
                        let config = &self.config.recommendations;
                        self.recommendations
                            .outcome(&decision, &outcome, config, sample.at);
                    }
                    if outcome == Outcome::Renewed {
                        continue;
                    }
                    events.push(Event::decided(decision, outcome, &sample));
                }
            }
        }
        // A run that only observes remembers homes that it did not give.
        if self.mode != Mode::Observe {
            self.migrations.homes(&self.homes);
        }
        events.extend(self.recommendations.take_events());
        self.recent.extend(sample.at, &events);
        Cycle {
            status: self.status_of(machine, &sample, rates.as_ref()),
            events,
        }
    }

    /// Takes in a sample before anything is planned from it.
    pub fn observe(&mut self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) {
        self.homes.retain(|id, _| sample.vm(*id).is_some());
        if stages::leave_homes_to_operators(self.config.policies) {
            for vm in &sample.vms {
                let home = self.homes.entry(vm.id);
                home.or_insert_with(|| vm.settings.home.clone().unwrap_or_else(|| may_use(machine, vm)));
            }
        }
        self.migrations.observe(machine, sample, &self.homes);
        self.layouts.update(sample, &self.homes);
        let view = view(
            machine,
            sample,
            rates,
            barred(&self.config, &self.drained),
            &self.homes,
            &self.layouts,
            (&self.foreign, &self.states.permits.attribution),
        );
        // What VMs do while some are off a cache for a measurement is not usual.
        if !self.states.permits.attribution.is_open() {
            self.states.history.observe(&view, &self.config.demand);
            self.states.speeds.observe(&view);
        }
        working_set::observe(&view, &mut self.states.working_set);
    }

    /// Returns the merged plan of the policies, from what [`Control::observe`] last took in. Changes nothing on the host.
    pub fn plan(&mut self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) -> Plan {
        self.decide(machine, sample, rates).0
    }

    /// Returns the plan and the number of decisions to carry out, which come first. Decisions that must wait for the operator
    /// become recommendations.
    fn decide(&mut self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) -> (Plan, usize) {
        let view = view(
            machine,
            sample,
            rates,
            barred(&self.config, &self.drained),
            &self.homes,
            &self.layouts,
            (&self.foreign, &self.states.permits.attribution),
        );
        self.recommendations.expire(&self.config.recommendations, sample);
        self.asked.retain(|_, until| *until > sample.at);
        let is_paused = self.is_paused(sample.at);
        let due = match is_paused || self.states.permits.attribution.is_open() {
            true => Vec::new(),
            false => self.recommendations.due(&view),
        };
        let gate = Gate {
            run: self.mode,
            is_paused,
            modes: &self.config.modes,
            recommendations: &self.recommendations,
            asked: &self.asked,
        };
        let mut first = Plan::new(view.version);
        self.in_force.give_back(&gate, sample, &mut first);
        let Plans { mut acting, kept } = match &mut self.external {
            None => stages::plans(&view, &self.config, &gate, &mut self.states),
            Some(external) => external_plans(external, &view, &gate, &self.states, &self.in_force),
        };
        for (one, decisions) in due {
            let states = &mut self.states;
            give_home(&view, &self.config, &one, decisions, &acting, states, &mut first);
        }
        acting.insert(0, first);
        let mut plan = levers::merge(&view, acting);
        let acts_count = plan.decisions.len();
        for mode in [Mode::Recommend, Mode::Observe] {
            let plans = kept
                .iter()
                .filter(|(_, of)| *of == mode)
                .map(|(plan, _)| plan.clone());
            let kept = levers::merge(&view, plans.collect());
            plan.findings.extend(kept.findings);
            if self.mode != Mode::Observe {
                kept.decisions
                    .iter()
                    .for_each(|decision| self.states.was_kept(decision));
            }
            if mode == Mode::Observe {
                plan.decisions.extend(kept.decisions);
                continue;
            }
            let gains = |homes: &[(VmId, NodeSet)]| gains(&view, &self.config, &self.states, homes);
            let config = &self.config.recommendations;
            self.recommendations.take(config, sample, kept.decisions, gains);
        }
        (plan, acts_count)
    }

    /// Remembers what a carried-out action leaves in force.
    pub(crate) fn remember(&mut self, action: &Action, outcome: &Outcome, at: Ns) {
        let vm = action.vm;
        match (&action.act, outcome) {
            (Act::SetHome { nodes }, Outcome::Done | Outcome::DryRun) => {
                self.homes.insert(vm, nodes.clone());
            }
            (Act::Lift { lever: Lever::Home }, Outcome::Done | Outcome::DryRun) => {
                self.homes.remove(&vm);
                self.foreign.forget_pins(vm);
            }
            (Act::PinVcpus { vcpus, cpus }, Outcome::Done) => {
                for index in vcpus {
                    self.foreign.expect(vm, *index, cpus.clone());
                }
            }
            // The agent may have pinned some of the vCPUs before the failure, so it expects no particular affinity of any of
            // them.
            (Act::PinVcpus { vcpus, .. }, Outcome::Failed(_)) => self.foreign.forget(vm, vcpus),
            (Act::SetHome { .. }, Outcome::Failed(_)) => self.states.placement.ledger.withdraw(vm),
            (Act::Lift { lever: Lever::Home }, Outcome::Failed(_)) => self.foreign.forget_pins(vm),
            (
                Act::Limit {
                    limit: Limit::CpuQuota(quota),
                    lease_ns,
                },
                Outcome::Done | Outcome::Renewed,
            ) => self.foreign.expect_quota(vm, *quota, at + *lease_ns),
            (act, _) if act.lever() == Lever::CpuQuota => self.foreign.forget_quota(vm),
            (Act::Lift { lever: Lever::Memory }, Outcome::Done) => self.states.overcommit.was_lifted(vm),
            _ if action.act.lever() == Lever::Watching => {
                self.states.working_set.outcome(action, outcome, at);
            }
            _ => {}
        }
    }

    /// Returns the policies' view of a sample.
    pub(crate) fn view<'a>(
        &'a self,
        machine: &'a Machine,
        sample: &'a Sample,
        rates: Option<&'a Rates>,
    ) -> View<'a> {
        let barred = barred(&self.config, &self.drained);
        let (homes, layouts) = (&self.homes, &self.layouts);
        let left_alone = (&self.foreign, &self.states.permits.attribution);
        view(machine, sample, rates, barred, homes, layouts, left_alone)
    }

    /// Calls `look` with the policies' view of the last sample. Before the first cycle the view is empty.
    pub(crate) fn look<T>(&self, machine: &Machine, look: impl FnOnce(&View<'_>) -> T) -> T {
        let empty = Sample::default();
        let last = self.last.as_ref();
        let (sample, rates) = last.map_or((&empty, None), |(sample, rates)| (sample, rates.as_ref()));
        look(&self.view(machine, sample, rates))
    }

    /// Returns the host at the last sample, with the settings made since. Before the first cycle the status is empty.
    pub fn status(&self, machine: &Machine) -> Status {
        let last = self.last.as_ref();
        last.map_or_else(Status::default, |(sample, rates)| {
            self.status_of(machine, sample, rates.as_ref())
        })
    }

    fn status_of(&self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) -> Status {
        let makes_trials = self.trials_idle().is_none();
        let known = |vm: &VmSample| Known {
            home: self.homes.get(&vm.id).cloned(),
            left_alone: hands_off(vm, &self.foreign).map(|why| why.to_string()),
            mode: most_careful(self.mode, None, vm.settings.mode),
            mode_chosen: self.own_mode(vm),
            observed_for: self.observed_for(vm.id),
            permit: PermitStatus::of(sample, vm, &self.states.permits),
            memory: MemoryStatus::of(vm, &self.states.overcommit),
            topology: TopologyStatus::of(machine, vm, sample.at, self.layouts.of(vm.id)),
            speed_usual: self.states.speeds.usual(vm.id),
            // A dry run changes no home, so it has nothing to measure.
            time: self.states.arrange.trials.time(vm.id).filter(|_| makes_trials),
            migrations: self.migrations.of(vm.id),
        };
        let view = self.view(machine, sample, rates);
        let supply = self.supply(&view);
        let mut sample = Cow::Borrowed(sample);
        if !self.since.is_empty() {
            for vm in &mut sample.to_mut().vms {
                self.with_set_since(vm.id, &mut vm.settings);
            }
        }
        let mut status = Status::new(machine, (&sample, rates), &supply, known);
        for node in &mut status.nodes {
            node.is_drained = self.drained.contains(node.node);
        }
        status.paused_for_ns = self.paused_for();
        status
    }
}

/// Returns the plans of an external planner, which replace those of the stages.
fn external_plans(
    external: &mut External,
    view: &View<'_>,
    gate: &Gate<'_>,
    states: &stages::States,
    in_force: &InForce,
) -> Plans {
    let mode = |vm: &VmSample| gate.mode(external::POLICY, Some(vm));
    let plan = external.plan(view, in_force, mode);
    let modes = gate.of_plan(view, states, &plan);
    let mut plans = Plans::default();
    plans.add(plan, modes);
    plans
}

/// Assigns an approved home, unless a policy has just decided on the VM's home. If the arranger recommended the home, its trial
/// begins now.
fn give_home(
    view: &View<'_>,
    config: &Config,
    one: &Recommendation,
    decisions: Vec<Decision>,
    acting: &[Plan],
    states: &mut stages::States,
    plan: &mut Plan,
) {
    let id = one.decision.action.vm;
    let decided = acting.iter().flat_map(|plan| &plan.decisions);
    let mut homes = decided.filter(|other| other.action.vm == id && other.action.act.lever() == Lever::Home);
    if homes.next().is_some() {
        return;
    }
    let vm = view.vms.iter().find(|vm| vm.sample.id == id);
    if let (arrange::POLICY, Some(vm), Act::SetHome { nodes }) =
        (one.decision.policy, vm, &one.decision.action.act)
    {
        let mut home = homenode_policy::placement::Home::whole(view, nodes);
        let pinned = decisions.iter().find_map(|decision| match &decision.action.act {
            Act::PinVcpus { cpus, .. } => Some(cpus.clone()),
            _ => None,
        });
        home.cpus = pinned.unwrap_or(home.cpus);
        let predicted = 1.0 + one.gain.unwrap_or(0.0);
        states
            .arrange
            .begin_trial(view, config.of_homes(), vm, home, predicted);
    }
    plan.decisions.extend(decisions);
}

/// Predicts the gains of VMs from new homes, all assigned together. Leaves out VMs for which there is no prediction, and those
/// that cannot have the home.
fn gains(
    view: &View<'_>,
    config: &Config,
    states: &stages::States,
    homes: &[(VmId, NodeSet)],
) -> BTreeMap<VmId, f64> {
    let wanted = homes
        .iter()
        .map(|(vm, nodes)| (*vm, Some(nodes.clone())))
        .collect();
    let Ok(forecast) = arrange::what_if(view, config.of_homes(), &states.arrange, &wanted) else {
        return BTreeMap::new();
    };
    let gain = |vm: &arrange::what_if::VmForecast| {
        let slow = vm.slow_down.ok()?;
        let gain = slow.now / slow.then - 1.0;
        let is_impossible = matches!(vm.obstacle, Some(Obstacle::Forbidden(_) | Obstacle::LeftAlone(_)));
        let is_predicted = wanted.contains_key(&vm.vm) && !is_impossible && gain.is_finite();
        is_predicted.then_some((vm.vm, gain))
    };
    forecast.vms.iter().filter_map(gain).collect()
}

/// Returns the CPUs and nodes of the host that VMs must not use.
pub(crate) fn barred<'a>(config: &'a Config, drained: &'a NodeSet) -> Barred<'a> {
    Barred {
        cpus: Some(&config.placement.reserved_cpus),
        nodes: Some(drained),
    }
}

pub(crate) fn view<'a>(
    machine: &'a Machine,
    sample: &'a Sample,
    rates: Option<&'a Rates>,
    barred: Barred<'_>,
    homes: &'a BTreeMap<VmId, NodeSet>,
    layouts: &'a topology_feed::Layouts,
    (foreign, attribution): (&ForeignChanges, &attribution::State),
) -> View<'a> {
    let isolating = |vm: VmId| attribution.involves(vm).then_some(HandsOff::Isolating);
    let vms = sample.vms.iter().map(|vm| VmView {
        sample: vm,
        rates: rates.and_then(|rates| rates.vm(vm.id)),
        home: homes.get(&vm.id),
        layout: layouts.of(vm.id),
        hands_off: hands_off(vm, foreign).or_else(|| isolating(vm.id)),
        quota_hands_off: foreign
            .quota_changed_by_other(vm.id)
            .then_some(HandsOff::QuotaByHand),
    });
    View::new(machine, sample, rates, barred, vms.collect())
}

/// Returns the home nodes on which a VM's vCPUs may run, or all home nodes if there are none.
fn may_use(machine: &Machine, vm: &VmSample) -> NodeSet {
    let cpus = vm.vcpus.iter().flat_map(|vcpu| vcpu.affinity.iter());
    let nodes: NodeSet = cpus.filter_map(|cpu| machine.node_of(cpu)).collect();
    let nodes = nodes.intersection(&machine.home_nodes());
    if nodes.is_empty() {
        machine.home_nodes()
    } else {
        nodes
    }
}

/// Returns the key by which a decision is recognized that was already reported. It leaves out budgets, which change with every
/// page that the guest touches.
pub(crate) fn what_is_told(action: &Action) -> String {
    let vm = action.vm;
    match &action.act {
        Act::MovePages { to, .. } => format!("pages of {vm} to {to}"),
        Act::MoveVirtualNode { virtual_node, to, .. } => {
            format!("virtual node {virtual_node} of {vm} to {to}")
        }
        Act::MoveFrames { .. } => format!("used pages of {vm}"),
        Act::Limit { limit, .. } => format!("{:?} of {vm}", limit.lever()),
        other => format!("{other:?} of {vm}"),
    }
}

pub(crate) fn hands_off(vm: &VmSample, foreign: &ForeignChanges) -> Option<HandsOff> {
    if vm.settings.management == Management::Ignored {
        Some(HandsOff::Ignored)
    } else if vm.immovable == Some(Immovable::Migrating) {
        Some(HandsOff::Migrating)
    } else if vm.is_unread {
        Some(HandsOff::Unread)
    } else if foreign.changed_by_other(vm.id) || !vm.settings.pinned_vcpus.is_empty() {
        Some(HandsOff::PinnedByHand)
    } else {
        None
    }
}

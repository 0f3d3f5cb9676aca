//! Carries out a schedule like the agent: cycle by cycle, and within the agent's budgets.

use std::collections::BTreeMap;

use homenode_control::Config;
use homenode_host::{
    Act, Barred, HandsOff, Host as _, Lever, Management, Outcome, Plan, Rates, Sample, View, VmSample, VmView,
};
use homenode_machine::Machine;
use homenode_policy::{levers, memory, pace, placement, repatriate};
use homenode_reproduce::engine::Run;
use homenode_twin::Twin;
use homenode_units::{MemoryPolicy, NodeSet, VmId};

use super::schedule::{Goal, Place, Schedule};

/// Name of the policy that these decisions have in plans.
pub const POLICY: &str = "search";

/// A VM that uses less than this many CPUs counts as idle.
const ACTIVE_CPUS: f64 = 0.2;

/// An agent that takes its decisions, and their times, from a schedule.
#[derive(Clone, Debug)]
pub struct Arranger {
    schedule: Schedule,
    config: Config,
    /// Position in the scenario of each running VM, by id.
    places: BTreeMap<VmId, usize>,
    /// The last goal that was carried out for each running VM.
    done: BTreeMap<VmId, Goal>,
    /// Home nodes of each VM's memory.
    homes: BTreeMap<VmId, NodeSet>,
    /// Memory policy of each VM before the first decision about it.
    before: BTreeMap<VmId, MemoryPolicy>,
    repatriate: repatriate::State,
    memory: memory::State,
    pace: pace::State,
    last: Option<(Sample, Option<Rates>)>,
    decisions: usize,
}

impl Arranger {
    /// Creates an arranger without decisions; `places` maps ids to positions in the scenario.
    pub fn new(config: Config, places: BTreeMap<VmId, usize>) -> Arranger {
        Arranger {
            schedule: Schedule::default(),
            config,
            places,
            done: BTreeMap::new(),
            homes: BTreeMap::new(),
            before: BTreeMap::new(),
            repatriate: repatriate::State::default(),
            memory: memory::State::default(),
            pace: pace::State::default(),
            last: None,
            decisions: 0,
        }
    }

    /// Returns the arranger with another schedule to follow.
    #[must_use]
    pub fn following(mut self, schedule: Schedule) -> Arranger {
        self.schedule = schedule;
        self
    }

    /// Returns the VMs that were not idle in the last cycle.
    pub fn active(&self) -> Vec<VmId> {
        let rates = self.last.as_ref().and_then(|(_, rates)| rates.as_ref());
        let vms = rates.map_or(&[][..], |rates| &rates.vms);
        vms.iter()
            .filter(|vm| vm.cpus_used > ACTIVE_CPUS)
            .map(|vm| vm.id)
            .collect()
    }

    /// Runs one cycle: sample, decide, act.
    ///
    /// # Errors
    /// When the host cannot be read, or refuses a plan.
    pub fn step(&mut self, twin: &mut Twin) -> anyhow::Result<()> {
        let mut sample = twin.sample()?;
        self.done.retain(|id, _| sample.vm(*id).is_some());
        self.homes.retain(|id, _| sample.vm(*id).is_some());
        let goals = self.goals(&sample);
        self.choose_memory(&mut sample, &goals);
        let before = self.last.as_ref().map(|(sample, _)| sample);
        let rates = before.and_then(|before| Rates::between(twin.machine(), before, &sample));
        let plan = self.plan(twin.machine(), &sample, rates.as_ref(), &goals);
        self.last = Some((sample, rates));
        if plan.decisions.is_empty() {
            return Ok(());
        }
        let receipt = twin.commit(&plan)?;
        let renewed = receipt
            .outcomes
            .iter()
            .filter(|outcome| **outcome == Outcome::Renewed);
        self.decisions += plan.decisions.len() - renewed.count();
        Ok(())
    }

    /// Returns the result of the run.
    pub fn came_to(&self, twin: &Twin) -> Run {
        Run {
            policy: POLICY.to_owned(),
            decisions: self.decisions,
            report: twin.report(),
        }
    }

    fn goals(&self, sample: &Sample) -> BTreeMap<VmId, Goal> {
        let goal = |vm: &VmSample| {
            let place = *self.places.get(&vm.id)?;
            Some((vm.id, self.schedule.goal(place, sample.at)))
        };
        sample.vms.iter().filter_map(goal).collect()
    }

    /// Sets the decided memory policies, as if the operator had chosen them. A VM without such a decision keeps its own
    /// policy.
    fn choose_memory(&mut self, sample: &mut Sample, goals: &BTreeMap<VmId, Goal>) {
        for vm in &mut sample.vms {
            let before = *self.before.entry(vm.id).or_insert(vm.memory_policy);
            let chosen = vm.settings.memory_policy.unwrap_or(before);
            let decided = goals.get(&vm.id).and_then(|goal| goal.memory);
            vm.settings.memory_policy = Some(decided.unwrap_or(chosen));
        }
    }

    fn plan(
        &mut self,
        machine: &Machine,
        sample: &Sample,
        rates: Option<&Rates>,
        goals: &BTreeMap<VmId, Goal>,
    ) -> Plan {
        for (id, goal) in goals {
            match &goal.place {
                Place::Unplaced => self.homes.remove(id),
                Place::Home(nodes) | Place::Memory(nodes) => self.homes.insert(*id, nodes.clone()),
            };
        }
        let view = view(machine, sample, rates, &self.homes);
        let mut places = Plan::new(view.version);
        for vm in &view.vms {
            let id = vm.sample.id;
            let (Some(goal), before) = (goals.get(&id), self.done.get(&id)) else {
                continue;
            };
            let was = before.map_or(Place::Unplaced, |goal| goal.place.clone());
            if goal.place != was {
                decide_place(&view, &self.config, vm, &goal.place, &was, &mut places);
            }
        }
        self.done.clone_from(goals);
        let config = &self.config;
        let strays = repatriate::plan(&view, &config.repatriate, &mut self.repatriate);
        let laid_out = memory::plan(
            &view,
            &config.memory,
            &config.repatriate,
            std::slice::from_ref(&strays),
            &mut self.memory,
        );
        let mut plans = vec![places, strays, laid_out];
        let said = pace::hold(&view, &config.pace, &mut self.pace, &mut plans);
        plans.push(said);
        levers::merge(&view, plans)
    }
}

fn decide_place(
    view: &View<'_>,
    config: &Config,
    vm: &VmView<'_>,
    place: &Place,
    was: &Place,
    plan: &mut Plan,
) {
    let id = vm.sample.id;
    match place {
        Place::Home(nodes) => {
            placement::settle(
                view,
                &config.placement,
                vm,
                &placement::Home::whole(view, nodes),
                "it is on the schedule",
                POLICY,
                plan,
            );
        }
        Place::Unplaced | Place::Memory(_) if matches!(was, Place::Home(_)) => {
            let action = Act::Lift { lever: Lever::Home }.on(id);
            plan.decide(POLICY, action, format!("{place:?} is on the schedule"));
        }
        Place::Unplaced | Place::Memory(_) => {}
    }
}

fn view<'a>(
    machine: &'a Machine,
    sample: &'a Sample,
    rates: Option<&'a Rates>,
    homes: &'a BTreeMap<VmId, NodeSet>,
) -> View<'a> {
    let hands_off = |vm: &VmSample| match vm.settings.management {
        Management::Ignored => Some(HandsOff::Ignored),
        _ if !vm.settings.pinned_vcpus.is_empty() => Some(HandsOff::PinnedByHand),
        _ => None,
    };
    let vms = sample.vms.iter().map(|vm| VmView {
        sample: vm,
        rates: rates.and_then(|rates| rates.vm(vm.id)),
        home: homes.get(&vm.id),
        layout: None,
        hands_off: hands_off(vm),
        quota_hands_off: None,
    });
    View::new(machine, sample, rates, Barred::default(), vms.collect())
}

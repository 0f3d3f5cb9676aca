//! The table of stages: which policies plan, in which order, and what each may set.
//!
//! A row has the sets in which a policy acts, the levers that it may set, and the function with which it plans. To add a policy,
//! add a row; no other code lists policies. The order of rows is the order of precedence (see [`homenode_policy::levers`]), and
//! the order in which the host carries plans out:
//!
//! | set | stages |
//! |---|---|
//! | `default` | working-set |
//! | `ff-pin` | placement, working-set |
//! | `numad` | numad, working-set |
//! | `memory` | repatriate, memory, pace, working-set |
//! | `tavo` | overcommit, attribution, permits, placement, balance, repatriate, memory, pace, topology-feed, working-set |
//! | `homenode` | overcommit, attribution, permits, arrange, balance, repatriate, memory, pace, topology-feed, working-set |

use homenode_host::{Act, Decision, Lever, Mode, Plan, View};
use homenode_policy::permits::attribution;
// Rows name policies by their modules.
use homenode_policy::*;

use crate::gate::Gate;
use crate::{Config, PolicySet};

/// A row of the table.
pub(crate) struct Stage {
    /// The policy's name in decisions.
    pub policy: &'static str,
    /// Sets in which the policy plans.
    pub sets: &'static [PolicySet],
    /// Levers that the policy may set.
    pub levers: &'static [Lever],
    plan: fn(&View<'_>, &Config, &mut States, &mut [Plan]) -> Plan,
}

/// Makes [`States`] and [`STAGES`] from rows of the form `module(its State) [sets] [levers] => plan`. If a policy has no state,
/// or uses the state of another row, its row begins with `module()`.
macro_rules! stages {
    (|$view:ident, $config:ident, $states:ident, $earlier:ident|
     $($policy:ident($($state:ident)?) [$($set:ident)*] [$($lever:ident)*] => $plan:expr;)*) => {
        /// State of the policies.
        #[derive(Debug, Default)]
        pub(crate) struct States {
            /// Measured needs of VMs, which several policies use.
            pub history: demand::History,
            /// Usual speeds of VMs, which the status shows.
            pub speeds: speed::Speeds,
            /// Whether VMs may be sent off a cache in this cycle.
            pub may_isolate: bool,
            $($(pub $policy: $policy::$state,)?)*
        }

        pub(crate) const STAGES: &[Stage] = &[$(Stage {
            policy: $policy::POLICY,
            sets: &[$(PolicySet::$set),*],
            levers: &[$(Lever::$lever),*],
            // Each row uses only what it needs.
            #[allow(unused_variables)]
            plan: |$view, $config, $states, $earlier| $plan,
        }),*];
    };
}

stages! { |view, config, of, earlier|
    overcommit(State) [Tavo Homenode] [Memory] => take_memory(view, config, of);
    attribution() [Tavo Homenode] [Home VcpuPlacement] => attribute(view, config, of);
    permits(State) [Tavo Homenode] [CpuQuota Resctrl] => permits::plan(view, &config.permits, &mut of.permits);
    placement(State) [FfPin Tavo] [Home VcpuPlacement]
        => placement::plan(view, &config.placement, &of.history, &mut of.placement);
    numad(State) [Numad] [Home VcpuPlacement Pages] => numad::plan(view, &mut of.numad);
    arrange(State) [Homenode] [Home VcpuPlacement]
        => unless_isolating(view, of, |of| {
            arrange::plan(view, config.of_homes(), &of.history, &mut of.placement, &mut of.arrange)
        });
    balance(State) [Tavo] [Home VcpuPlacement]
        => unless_isolating(view, of, |of| {
            balance::plan(view, config.of_balance(), &of.history, &mut of.placement, &mut of.balance)
        });
    balance() [Homenode] [VcpuPlacement]
        => unless_isolating(view, of, |_| balance::plan_vcpus(view, config.of_balance()));
    repatriate(State) [Memory Tavo Homenode] [Pages] => repatriate::plan(view, &config.repatriate, &mut of.repatriate);
    memory(State) [Memory Tavo Homenode] [MemoryPolicy Pages]
        => lay_out(view, config, earlier, of);
    pace(State) [Memory Tavo Homenode] [] => pace::hold(view, &config.pace, &mut of.pace, earlier);
    topology_feed(State) [Tavo Homenode] [Topology]
        => topology_feed::plan(view, &config.topology_feed, &mut of.topology_feed);
    working_set(State) [Default FfPin Numad Memory Tavo Homenode] [Watching]
        => working_set::plan(view, &config.working_set, &mut of.working_set);
}

fn take_memory(view: &View<'_>, config: &Config, of: &mut States) -> Plan {
    overcommit::want_working_sets(view, &config.overcommit, &mut of.working_set);
    let estimate = |vm| of.working_set.estimate(vm);
    overcommit::plan(view, &config.overcommit, estimate, &mut of.overcommit)
}

fn lay_out(view: &View<'_>, config: &Config, earlier: &[Plan], of: &mut States) -> Plan {
    let mode = config.modes.of(memory::POLICY);
    of.memory.observe_only(mode == Some(Mode::Observe));
    memory::plan(view, &config.memory, &config.repatriate, earlier, &mut of.memory)
}

fn attribute(view: &View<'_>, config: &Config, of: &mut States) -> Plan {
    let situation = attribution::Situation {
        ledger: &of.placement.ledger,
        has_trials: of.arrange.trials.running_count() > 0,
        may_act: of.may_isolate,
    };
    attribution::plan(
        view,
        &config.permits.attribution,
        situation,
        &mut of.permits.attribution,
    )
}

/// Plans nothing while VMs are off a cache for a measurement: what is measured of them then says nothing about their homes.
fn unless_isolating(view: &View<'_>, of: &mut States, plan: impl FnOnce(&mut States) -> Plan) -> Plan {
    match of.permits.attribution.is_open() {
        true => Plan::new(view.version),
        false => plan(of),
    }
}

/// Returns the stages of a set, in order.
pub(crate) fn of(set: PolicySet) -> impl Iterator<Item = &'static Stage> {
    STAGES.iter().filter(move |stage| stage.sets.contains(&set))
}

/// Returns true if a set moves pages home but assigns no homes. The home is then the operator's choice for a VM, or else all
/// nodes that the VM may use.
pub(crate) fn leave_homes_to_operators(set: PolicySet) -> bool {
    let has = |lever| of(set).any(|stage| stage.levers.contains(&lever));
    has(Lever::Pages) && !has(Lever::Home)
}

/// Returns the policies of a set in two lists without duplicates. Those in the first choose between nodes, so they have nothing
/// to do on a host with one node; those in the second do not.
pub fn stages_by_need_of_nodes(set: PolicySet) -> (Vec<&'static str>, Vec<&'static str>) {
    const BETWEEN_NODES: [Lever; 5] = [
        Lever::Home,
        Lever::VcpuPlacement,
        Lever::Pages,
        Lever::MemoryPolicy,
        Lever::Topology,
    ];
    let deciding = of(set).filter(|stage| !stage.levers.is_empty());
    let (idle, busy): (Vec<&Stage>, Vec<&Stage>) =
        deciding.partition(|stage| stage.levers.iter().any(|lever| BETWEEN_NODES.contains(lever)));
    let names = |stages: Vec<&Stage>| {
        let mut names: Vec<&'static str> = stages.iter().map(|stage| stage.policy).collect();
        names.dedup();
        names
    };
    (names(idle), names(busy))
}

/// Returns the names of all policies that decide something, without duplicates.
pub(crate) fn deciding_policies() -> Vec<&'static str> {
    let deciding = STAGES.iter().filter(|stage| !stage.levers.is_empty());
    let mut names: Vec<&'static str> = deciding.map(|stage| stage.policy).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Plans of the stages of the configured set, in order.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    /// Plans to carry out. Later stages see them: they leave alone the VMs and pages that these plans move, and have only the
    /// rest of the budgets.
    pub acting: Vec<Plan>,
    /// Other plans, each with its mode: they wait for approval, or are only reported.
    pub kept: Vec<(Plan, Mode)>,
}

/// Returns the plans of all stages of the configured set.
pub(crate) fn plans(view: &View<'_>, config: &Config, gate: &Gate<'_>, states: &mut States) -> Plans {
    let mut plans = Plans::default();
    states.may_isolate = gate.may_act(attribution::POLICY);
    for stage in of(config.policies) {
        let plan = (stage.plan)(view, config, states, &mut plans.acting);
        if cfg!(debug_assertions) {
            stage.check(&plan);
        }
        let modes = gate.of_plan(view, states, &plan);
        plans.add(plan, modes);
    }
    plans
}

impl Plans {
    /// Adds a plan, with the mode of each decision.
    pub(crate) fn add(&mut self, mut plan: Plan, modes: Vec<Mode>) {
        for kept in [Mode::Recommend, Mode::Observe] {
            let pairs = plan
                .decisions
                .iter()
                .zip(&modes)
                .filter(|(_, mode)| **mode == kept);
            let decisions: Vec<Decision> = pairs.map(|(decision, _)| decision.clone()).collect();
            if !decisions.is_empty() {
                let plan = Plan {
                    decisions,
                    ..Plan::new(plan.version)
                };
                self.kept.push((plan, kept));
            }
        }
        let mut modes = modes.into_iter();
        plan.decisions.retain(|_| modes.next() == Some(Mode::Act));
        self.acting.push(plan);
    }
}

impl States {
    /// Notes that a decision was not carried out, so policies do not learn from it as from a change that failed.
    pub(crate) fn was_kept(&mut self, decision: &Decision) {
        let vm = decision.action.vm;
        match (&decision.action.act, decision.policy) {
            (Act::SetHome { .. }, arrange::POLICY) => self.arrange.trials.forget(vm),
            (Act::SetMemoryPolicy { .. }, _) => self.memory.advisor.postpone(vm),
            _ => {}
        }
    }
}

impl Stage {
    /// Panics if a plan uses a lever that its row does not list, which is a mistake in the table. Used in debug builds.
    fn check(&self, plan: &Plan) {
        for decision in &plan.decisions {
            let lever = decision.action.act.lever();
            assert!(
                self.levers.contains(&lever),
                "stage {} plans for {lever:?}, which its row in `control::stages` does not list",
                self.policy
            );
        }
    }
}

#[cfg(test)]
mod tests;

//! The table of stages: which policies plan, in which order, and what each may set.
//!
//! A row is a policy's place in the order, the sets that it acts in, the levers that it may set, and how it plans. To add a
//! policy, add a row; nothing else lists them. The order is that of precedence (see [`homenode_policy::levers`]), and that
//! in which the host carries plans out:
//!
//! | set | stages |
//! |---|---|
//! | `default` | working-set |
//! | `ff-pin` | placement, working-set |
//! | `numad` | numad, working-set |
//! | `memory` | repatriate, memory, pace, working-set |
//! | `tavo` | overcommit, permits, placement, balance, repatriate, memory, pace, topology-feed, working-set |
//! | `homenode` | overcommit, permits, arrange, balance, repatriate, memory, pace, topology-feed, working-set |

use homenode_host::{Lever, Plan, View};
// Rows name policies by their modules.
use homenode_policy::*;

use crate::{Config, Mode, PolicySet};

/// A row of the table.
pub(crate) struct Stage {
    /// As decisions name it.
    pub policy: &'static str,
    /// Sets that it plans in.
    pub sets: &'static [PolicySet],
    /// Levers that it may set.
    pub levers: &'static [Lever],
    plan: fn(&View<'_>, &Config, Mode, &mut States, &mut [Plan]) -> Plan,
}

/// Makes [`States`] and [`STAGES`] from rows of the form `module(its State) [sets] [levers] => plan`. A policy that remembers
/// nothing, or what another row names, has no state: `module()`.
macro_rules! stages {
    (|$view:ident, $config:ident, $mode:ident, $states:ident, $earlier:ident|
     $($policy:ident($($state:ident)?) [$($set:ident)*] [$($lever:ident)*] => $plan:expr;)*) => {
        /// What the policies remember.
        #[derive(Debug, Default)]
        pub(crate) struct States {
            /// What VMs needed so far, which several policies ask.
            pub history: demand::History,
            $($(pub $policy: $policy::$state,)?)*
        }

        pub(crate) const STAGES: &[Stage] = &[$(Stage {
            policy: $policy::POLICY,
            sets: &[$(PolicySet::$set),*],
            levers: &[$(Lever::$lever),*],
            // A row takes what it needs.
            #[allow(unused_variables)]
            plan: |$view, $config, $mode, $states, $earlier| $plan,
        }),*];
    };
}

stages! { |view, config, mode, of, earlier|
    overcommit(State) [Tavo Homenode] [Memory] => take_memory(view, config, of);
    permits(State) [Tavo Homenode] [CpuQuota Resctrl] => permits::plan(view, &config.permits, &mut of.permits);
    placement(State) [FfPin Tavo] [Home VcpuPlacement]
        => placement::plan(view, &config.placement, &of.history, &mut of.placement);
    numad(State) [Numad] [Home VcpuPlacement Pages] => numad::plan(view, &config.placement, &mut of.numad);
    arrange(State) [Homenode] [Home VcpuPlacement]
        => arrange::plan(view, &config.placement, &of.history, &mut of.placement, &mut of.arrange);
    balance(State) [Tavo] [Home VcpuPlacement]
        => balance::plan(view, &config.placement, &of.history, &mut of.placement, &mut of.balance);
    balance() [Homenode] [VcpuPlacement] => balance::plan_vcpus(view, &config.placement);
    repatriate(State) [Memory Tavo Homenode] [Pages] => repatriate::plan(view, &config.repatriate, &mut of.repatriate);
    memory(State) [Memory Tavo Homenode] [MemoryPolicy Pages]
        => memory::plan(view, &config.memory, &config.repatriate, earlier, &mut of.memory);
    pace(State) [Memory Tavo Homenode] [] => slow_down(view, config, mode, of, earlier);
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

fn slow_down(view: &View<'_>, config: &Config, mode: Mode, of: &mut States, earlier: &mut [Plan]) -> Plan {
    match mode {
        Mode::Act => pace::hold(view, &config.pace, &mut of.pace, earlier),
        // Nothing moves: nothing is learnt from it.
        Mode::DryRun => Plan::new(view.version),
    }
}

/// The stages of a set, in order.
pub(crate) fn of(set: PolicySet) -> impl Iterator<Item = &'static Stage> {
    STAGES.iter().filter(move |stage| stage.sets.contains(&set))
}

/// Whether a set moves pages home and gives no homes: then home is where the operator wants a VM, or all that it may use.
pub(crate) fn leave_homes_to_operators(set: PolicySet) -> bool {
    let has = |lever| of(set).any(|stage| stage.levers.contains(&lever));
    has(Lever::Pages) && !has(Lever::Home)
}

/// What each stage of the configured set plans, in order.
pub(crate) fn plans(view: &View<'_>, config: &Config, mode: Mode, states: &mut States) -> Vec<Plan> {
    let mut plans = Vec::new();
    for stage in of(config.policies) {
        let plan = (stage.plan)(view, config, mode, states, &mut plans);
        if cfg!(debug_assertions) {
            stage.check(&plan);
        }
        plans.push(plan);
    }
    plans
}

impl Stage {
    /// Panics where a plan does not keep to the levers of the row: a mistake in the table. For debug builds.
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

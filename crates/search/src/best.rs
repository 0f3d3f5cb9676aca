//! Finds the best known result of a case and seed: among all policies, earlier results, and a search that starts from them.

use homenode_control::{Config, Event, PolicySet};
use homenode_host::{Act, Lever, Outcome};
use homenode_reproduce::engine::Run;
use homenode_reproduce::jobs::{self, Progress};
use homenode_twin::Scenario;
use homenode_units::Ns;

use crate::contender::Contender;
use crate::program::Program;
use crate::score::value;
use crate::search::schedule::{Goal, Place};
use crate::search::{Effort, Found, Schedule, search};
use homenode_twin::Setup;

/// A contender's run and its value.
#[derive(Clone, Debug)]
pub struct PolicyRun {
    /// The contender.
    pub contender: Contender,
    /// Mean over VMs of the ratio to `default`; infinite if no VM has a ratio.
    pub mean: f64,
    /// The contender's run.
    pub run: Run,
    /// The contender's decisions about homes and memory policies.
    pub schedule: Schedule,
}

/// All attempts for a case and seed.
#[derive(Clone, Debug)]
pub struct Best {
    /// The run under `default`.
    pub base: Run,
    /// The runs of all other contenders.
    pub policies: Vec<PolicyRun>,
    /// The result of the search.
    pub found: Found,
}

impl Best {
    /// Returns the best policy if it beats both the search's result and `default`.
    pub fn policy(&self) -> Option<&PolicyRun> {
        let least = self.policies.iter().min_by(|a, b| a.mean.total_cmp(&b.mean));
        least.filter(|policy| policy.mean < self.found.mean.min(1.0))
    }

    /// Returns the best known mean: at most 1, since an agent may change nothing.
    pub fn mean(&self) -> f64 {
        self.policy()
            .map_or(self.found.mean.min(1.0), |policy| policy.mean)
    }

    /// Returns the name of the finder of the best result: a policy, `search`, or `default` if nothing beat it.
    pub fn found_by(&self) -> &str {
        match self.policy() {
            Some(policy) => policy.contender.name(),
            None if self.found.mean < 1.0 => "search",
            None => PolicySet::Default.name(),
        }
    }

    /// Returns the best run.
    pub fn run(&self) -> &Run {
        match self.policy() {
            Some(policy) => &policy.run,
            None if self.found.mean < 1.0 => &self.found.run,
            None => &self.base,
        }
    }

    /// Returns the decisions of the best run. Those of a policy are included only as far as a schedule can express them.
    pub fn schedule(&self) -> Schedule {
        match self.policy() {
            Some(policy) => policy.schedule.clone(),
            None if self.found.mean < 1.0 => self.found.schedule.clone(),
            None => Schedule::default(),
        }
    }

    /// Returns the number of runs on the simulated host, without `default`.
    pub fn evaluations(&self) -> usize {
        self.policies.len() + self.found.evaluations
    }
}

/// Runs all policies and the given programs, then spends the remaining evaluations on a search that starts from their
/// decisions and from earlier results.
///
/// # Errors
/// A scenario that the machine cannot run.
pub fn best(
    setup: &Setup,
    config: &Config,
    (programs, before): (&[Program], &[Schedule]),
    effort: &Effort,
    progress: &Progress,
) -> anyhow::Result<Best> {
    let (base, _) = recorded(setup, config, &Contender::DEFAULT)?;
    let mut others = Contender::all();
    others.extend(programs.iter().cloned().map(Contender::Program));
    let runs = jobs::each(effort.jobs, &others, progress, |other| {
        recorded(setup, config, other)
    })?;
    let policies = others.into_iter().zip(runs);
    let policies: Vec<PolicyRun> = policies
        .map(|(contender, (run, schedule))| PolicyRun {
            contender,
            mean: value(&base, &run),
            run,
            schedule,
        })
        .collect();
    let decided = policies.iter().map(|policy| policy.schedule.clone());
    let starts: Vec<Schedule> = before.iter().cloned().chain(decided).collect();
    let effort = Effort {
        evaluations: effort.evaluations.saturating_sub(policies.len()),
        ..effort.clone()
    };
    let found = search(setup, config, &base, &starts, &effort, progress)?;
    Ok(Best {
        base,
        policies,
        found,
    })
}

/// Runs a contender, and records its decisions about homes and memory policies.
fn recorded(setup: &Setup, config: &Config, contender: &Contender) -> anyhow::Result<(Run, Schedule)> {
    let mut schedule = Schedule::default();
    let done = contender.run(setup, config, |cycle, _| {
        for event in &cycle.events {
            note(&setup.scenario, event, cycle.status.at_ns, &mut schedule);
        }
        Ok(())
    })?;
    Ok((done, schedule))
}

/// Adds a decision to a schedule, if a schedule can express it.
fn note(scenario: &Scenario, event: &Event, now: Ns, schedule: &mut Schedule) {
    let Event::Decided {
        name,
        decision,
        result: Outcome::Done,
    } = event
    else {
        return;
    };
    let Some(vm) = scenario.vms.iter().position(|vm| vm.name == *name) else {
        return;
    };
    let goal = schedule.goal(vm, now);
    let goal = match &decision.action.act {
        Act::SetHome { nodes, .. } => Goal {
            place: Place::Home(nodes.clone()),
            ..goal
        },
        Act::Lift {
            lever: Lever::Home, ..
        } => Goal {
            place: Place::Unplaced,
            ..goal
        },
        Act::SetMemoryPolicy { policy, .. } => Goal {
            memory: Some(*policy),
            ..goal
        },
        _ => return,
    };
    schedule.decide(now, vm, goal);
}

//! The best that is known of a case and seed: of all policies, of what was found before, and of a search that starts from them.

use std::cell::Cell;

use homenode_control::{Config, Event, PolicySet};
use homenode_host::{Act, Lever, Outcome};
use homenode_twin::{Scenario, Twin};
use homenode_units::Ns;

use crate::contender::Contender;
use crate::jobs::{self, Progress};
use crate::program::Program;
use crate::run::Run;
use crate::score::value;
use crate::search::schedule::{Goal, Place};
use crate::search::{Effort, Found, Schedule, search};
use homenode_twin::Setup;

/// A contender's run and how good it is.
#[derive(Clone, Debug)]
pub struct PolicyRun {
    /// Whose.
    pub contender: Contender,
    /// Mean over VMs of the ratio beside `default`; infinite where there is none.
    pub mean: f64,
    /// What came of it.
    pub run: Run,
    /// Its decisions on homes and memory policies.
    pub schedule: Schedule,
}

/// All that was tried for a case and seed.
#[derive(Clone, Debug)]
pub struct Best {
    /// The run under `default`.
    pub base: Run,
    /// The other policies.
    pub policies: Vec<PolicyRun>,
    /// What the search found.
    pub found: Found,
}

impl Best {
    /// The policy that is better than what the search found, if one is.
    pub fn policy(&self) -> Option<&PolicyRun> {
        let least = self.policies.iter().min_by(|a, b| a.mean.total_cmp(&b.mean));
        least.filter(|policy| policy.mean < self.found.mean.min(1.0))
    }

    /// The best known mean: at most 1, since an agent may leave all as it is.
    pub fn mean(&self) -> f64 {
        self.policy()
            .map_or(self.found.mean.min(1.0), |policy| policy.mean)
    }

    /// Who found it.
    pub fn found_by(&self) -> &str {
        match self.policy() {
            Some(policy) => policy.contender.name(),
            None if self.found.mean < 1.0 => "search",
            None => PolicySet::Default.name(),
        }
    }

    /// The run behind it.
    pub fn run(&self) -> &Run {
        match self.policy() {
            Some(policy) => &policy.run,
            None if self.found.mean < 1.0 => &self.found.run,
            None => &self.base,
        }
    }

    /// The decisions behind it; those of a policy as far as a schedule can say them.
    pub fn schedule(&self) -> Schedule {
        match self.policy() {
            Some(policy) => policy.schedule.clone(),
            None if self.found.mean < 1.0 => self.found.schedule.clone(),
            None => Schedule::default(),
        }
    }

    /// Runs on the twin that it took, `default` not counted.
    pub fn evaluations(&self) -> usize {
        self.policies.len() + self.found.evaluations
    }
}

/// Runs all policies and these programs. Then it searches for the rest of the evaluations from what they decided and from what
/// was found before.
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
        progress.go_on()?;
        recorded(setup, config, other)
    });
    let mut policies = Vec::new();
    for (named, done) in others.into_iter().zip(runs) {
        let (run, schedule) = done?;
        policies.push(PolicyRun {
            contender: named,
            mean: value(&base, &run),
            run,
            schedule,
        });
    }
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

/// A run under policies, with what they decided on homes and memory policies.
fn recorded(setup: &Setup, config: &Config, contender: &Contender) -> anyhow::Result<(Run, Schedule)> {
    let (now, mut schedule) = (Cell::new(Ns::ZERO), Schedule::default());
    let look = |twin: &Twin| now.set(twin.now());
    let done = contender.run(setup, config, look, |event| {
        note(&setup.scenario, event, now.get(), &mut schedule);
    })?;
    Ok((done, schedule))
}

/// Puts a decision into a schedule, if it is one that a schedule can say.
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
            place: Place::Free,
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

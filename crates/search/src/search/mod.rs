//! Searches for the best known decisions, made before and during a run, by trying them on the simulated host.
//!
//! # Problem
//! If a policy beats `default`, that says little unless we know what was possible. There are too many schedules (where each
//! VM is at each time) to try them all, so the result is only an upper bound on the least mean ratio.
//!
//! # Terms
//! - *Schedule*: decisions with their times ([`Schedule`]). An empty schedule is `default` with monitoring.
//! - *Static schedule*: one that decides once about each VM, at the agent's first sample that contains the VM.
//! - *Evaluation*: a run on the simulated host under one schedule, from time 0 or rolled out from a point of another run. Both
//!   give the same result, because the simulator is deterministic and can be copied.
//! - *Value*: mean over VMs of the ratio to `default` with the same seed ([`crate::score`]); lower is better.
//!
//! # Algorithm
//! 1. Try starts: those of the caller (decisions of policies that were run, earlier results), some systematic arrangements,
//!    then random ones until [`STARTS_SHARE`] of the evaluations is used. All except the caller's are static.
//! 2. In the best schedule, try every other place for one VM after the other, in order of arrival, until no VM gains from
//!    another place or [`PASSES_SHARE`] of the evaluations is used.
//! 3. Run batches of [`BATCH`] candidates. Each candidate changes one of the [`ELITES`] best schedules (the best one at
//!    least every second time): mostly at time 0 in the first half of the remaining evaluations, and mostly at a *point* in
//!    the second half. Points are times at which VMs arrived, left, began or ended their work, and some times in between. A
//!    change moves a VM, removes its home, swaps or pools two VMs, adds or removes a node, spreads a VM's memory, or
//!    arranges all VMs again; later decisions about a changed VM are dropped. For a change at a point, only the rest of the
//!    run is simulated, and only while it can still be among the best ([`Cut`]).
//! 4. No schedule is tried twice; if nothing new can be drawn, the search ends early. It reports the number of evaluations.
//!
//! [`arranger`] carries out the decisions with the policies' own `settle`, `repatriate`, `memory`, `pace` and `merge`, once
//! per agent cycle and within the agent's page budgets.
//!
//! # Properties (tests of the same names)
//! - `never_worse_than_the_best_start`
//! - `the_number_of_jobs_changes_nothing`: candidates are drawn before the batch runs.
//! - `page_budgets_hold`
//! - `a_rollout_from_a_point_equals_the_run_from_the_beginning`
//!
//! # What it is not
//! The search is not a policy. It knows the future of its seed and picks the best of many runs, so a part of each policy's
//! gap to it is luck that no policy can have.

pub mod arranger;
mod moves;
mod rollout;
pub mod schedule;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use homenode_control::Config;
use homenode_reproduce::engine::Run;
use homenode_reproduce::jobs::{self, Progress};
use homenode_units::{Chance, Ns};

pub use rollout::{Cut, Point, Rollout, rollout};
pub use schedule::Schedule;

use crate::score::ratios;
use homenode_twin::Setup;
use moves::Choices;

/// Number of candidates that run together; it does not depend on the number of jobs.
pub const BATCH: usize = 8;
/// Number of best schedules from which changes start.
pub const ELITES: usize = 4;
/// Share of the evaluations that is spent on starts.
pub const STARTS_SHARE: f64 = 0.15;
/// Share of the evaluations after which the systematic passes over VMs end.
pub const PASSES_SHARE: f64 = 0.6;
/// Minimum number of evaluations of a search.
pub const EVALUATIONS_MIN: usize = 8;
/// The search ends when this many draws in a row yield only schedules that were tried before.
const DRAWS_MAX: usize = 200;

/// The effort that a search may spend.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Maximum number of evaluations.
    pub evaluations: usize,
    /// Number of runs at the same time.
    pub jobs: usize,
    /// Seed of the search's random choices.
    pub seed: u64,
}

/// Result of a search.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best schedule.
    pub schedule: Schedule,
    /// Value of the best schedule.
    pub mean: f64,
    /// The run under the best schedule.
    pub run: Run,
    /// Number of evaluations that were made.
    pub evaluations: usize,
    /// Value of the best static schedule that was tried; infinite if none was.
    pub static_mean: f64,
}

/// A schedule that was tried.
struct Tried {
    schedule: Schedule,
    rollout: Rollout,
    /// Points of the whole run: first those of the run from which it was rolled out, then its own.
    points: Vec<Point>,
}

/// A schedule to try, and the point at which it begins to differ from another schedule.
struct Candidate {
    schedule: Schedule,
    from: Point,
    /// Points before the one at which the candidate begins to differ.
    before: Vec<Point>,
}

/// Searches for the schedule with the lowest value. `base` is the run under `default` with the same seed; `starts` are tried
/// first.
///
/// # Errors
/// A scenario that the machine cannot run.
pub fn search(
    setup: &Setup,
    config: &Config,
    base: &Run,
    starts: &[Schedule],
    effort: &Effort,
    progress: &Progress,
) -> anyhow::Result<Found> {
    let mut state = State {
        setup,
        config,
        base,
        beginning: Point::beginning(setup, config)?,
        choices: Choices::new(&setup.machine, &setup.scenario),
        chance: Chance::labelled(effort.seed, "search", setup.seed as usize),
        seen: BTreeSet::new(),
        elites: Vec::new(),
        evaluations: 0,
        static_mean: f64::INFINITY,
        least: vec![1.0; base.report.vms.len()],
    };
    let all = effort.evaluations.max(EVALUATIONS_MIN);
    let first = (starts.len() + Choices::STARTS)
        .max((all as f64 * STARTS_SHARE) as usize)
        .min(all);
    let mut brought = starts.iter().cloned();
    let mut number = 0;
    while state.evaluations < first {
        let room = BATCH.min(first - state.evaluations);
        let batch = state.draw_starts(room, &mut brought, &mut number);
        if batch.is_empty() {
            break;
        }
        state.evaluate(batch, effort.jobs, progress)?;
    }
    let passes = (all as f64 * PASSES_SHARE) as usize;
    while state.evaluations < passes {
        let before = state.elites.first().map(|elite| elite.rollout.mean);
        for vm in state.by_arrival() {
            let room = passes.saturating_sub(state.evaluations);
            let batch = state.draw_places(vm, room);
            state.evaluate(batch, effort.jobs, progress)?;
        }
        if state.elites.first().map(|elite| elite.rollout.mean) == before {
            break;
        }
    }
    let begun = state.evaluations;
    while state.evaluations < all {
        let done = (state.evaluations - begun) as f64 / (all - begun) as f64;
        let batch = state.draw_changes(BATCH.min(all - state.evaluations), done);
        if batch.is_empty() {
            break;
        }
        state.evaluate(batch, effort.jobs, progress)?;
    }
    let best = state.elites.into_iter().next();
    let best = best.ok_or_else(|| anyhow::anyhow!("no schedule was tried; allow more evaluations"))?;
    Ok(Found {
        schedule: best.schedule,
        mean: best.rollout.mean,
        run: best.rollout.run,
        evaluations: state.evaluations,
        static_mean: state.static_mean,
    })
}

struct State<'a> {
    setup: &'a Setup,
    config: &'a Config,
    base: &'a Run,
    beginning: Point,
    choices: Choices,
    chance: Chance,
    seen: BTreeSet<Schedule>,
    /// The best schedules so far, the best first.
    elites: Vec<Tried>,
    evaluations: usize,
    static_mean: f64,
    /// The lowest ratio of each VM so far.
    least: Vec<f64>,
}

impl State<'_> {
    /// Draws untried schedules; those of the caller come first.
    fn draw_starts(
        &mut self,
        count: usize,
        brought: &mut impl Iterator<Item = Schedule>,
        number: &mut usize,
    ) -> Vec<Candidate> {
        let mut batch = Vec::new();
        for _ in 0..DRAWS_MAX {
            if batch.len() == count {
                break;
            }
            let schedule = brought.next().unwrap_or_else(|| {
                *number += 1;
                self.choices.start(*number - 1, &mut self.chance)
            });
            if self.seen.insert(schedule.clone()) {
                batch.push(Candidate {
                    schedule,
                    from: self.beginning.clone(),
                    before: Vec::new(),
                });
            }
        }
        batch
    }

    /// Returns the VMs in the order of their first arrival, which no policy changes.
    fn by_arrival(&self) -> Vec<usize> {
        let mut vms: Vec<usize> = (0..self.base.report.vms.len()).collect();
        vms.retain(|vm| self.base.report.vms[*vm].first_arrival_s().is_some());
        vms.sort_by(|a, b| {
            let arrival = |vm: usize| self.base.report.vms[vm].first_arrival_s().unwrap_or(0.0);
            arrival(*a).total_cmp(&arrival(*b))
        });
        vms
    }

    /// Draws variants of the best schedule in which one VM has another place from its arrival on.
    fn draw_places(&mut self, vm: usize, count: usize) -> Vec<Candidate> {
        let Some(best) = self.elites.first() else {
            return Vec::new();
        };
        let arrival_s = self.base.report.vms[vm].first_arrival_s().unwrap_or(0.0);
        let before = best
            .points
            .partition_point(|point| point.at().as_secs_f64() < arrival_s);
        let from = before
            .checked_sub(1)
            .map_or(&self.beginning, |at| &best.points[at]);
        let goals = self
            .choices
            .all_for(vm, &best.schedule, from.at(), &mut self.chance);
        let mut batch = Vec::new();
        for goal in goals {
            let mut schedule = best.schedule.clone();
            // A decision at any time before the arrival has the same effect; 0 means "from the beginning".
            schedule.decide(Ns::ZERO, vm, goal);
            if batch.len() < count && self.seen.insert(schedule.clone()) {
                batch.push(Candidate {
                    schedule,
                    from: from.clone(),
                    before: best.points[..before].to_vec(),
                });
            }
        }
        batch
    }

    /// Draws changes of the best schedules. `done` is the share of this phase's evaluations that is used.
    fn draw_changes(&mut self, count: usize, done: f64) -> Vec<Candidate> {
        let mut batch = Vec::new();
        let at_points = if done < 0.5 { 0.2 } else { 0.85 };
        for _ in 0..DRAWS_MAX {
            if batch.len() == count {
                break;
            }
            let elite = if self.chance.unit() < 0.5 {
                0
            } else {
                self.chance.below(self.elites.len() as u64) as usize
            };
            let elite = &self.elites[elite];
            let points = elite.points.len();
            let at_point = points > 0 && self.chance.unit() < at_points;
            let point = at_point.then(|| self.chance.below(points as u64) as usize);
            let from = point.map_or(&self.beginning, |point| &elite.points[point]);
            let at = if at_point { from.at() } else { Ns::ZERO };
            let schedule = self.choices.change(&elite.schedule, at, &mut self.chance);
            if self.seen.insert(schedule.clone()) {
                batch.push(Candidate {
                    schedule,
                    from: from.clone(),
                    before: elite.points[..point.map_or(0, |point| point + 1)].to_vec(),
                });
            }
        }
        batch
    }

    fn evaluate(&mut self, batch: Vec<Candidate>, jobs: usize, progress: &Progress) -> anyhow::Result<()> {
        let (setup, config, base) = (self.setup, self.config, self.base);
        let cut = self.elites.get(ELITES - 1).map(|worst| Cut {
            bound: worst.rollout.mean,
            least: self.least.clone(),
        });
        let rollouts = jobs::each(jobs, &batch, progress, |candidate| {
            rollout(
                setup,
                config,
                base,
                &candidate.from,
                &candidate.schedule,
                cut.as_ref(),
            )
        })?;
        for (candidate, rollout) in batch.into_iter().zip(rollouts) {
            self.evaluations += 1;
            let Some(rollout) = rollout else { continue };
            for (least, ratio) in self.least.iter_mut().zip(ratios(base, &rollout.run)) {
                *least = ratio.map_or(*least, |ratio| ratio.min(*least));
            }
            if candidate.schedule.is_static() {
                self.static_mean = self.static_mean.min(rollout.mean);
            }
            let mut points = candidate.before;
            points.extend(rollout.points.iter().cloned());
            // On a tie the earlier schedule stays ahead.
            let place = self
                .elites
                .partition_point(|elite| elite.rollout.mean <= rollout.mean);
            if place < ELITES {
                let schedule = candidate.schedule;
                self.elites.insert(
                    place,
                    Tried {
                        schedule,
                        rollout,
                        points,
                    },
                );
                self.elites.truncate(ELITES);
            }
        }
        Ok(())
    }
}

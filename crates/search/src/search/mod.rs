//! The best that is known: a search for decisions, made before the run and during it, by trying them on the twin.
//!
//! # Problem
//! That a policy beats `default` says little as long as nobody knows what was possible. The number of schedules, which VM
//! is where from when on, is beyond trying them all; what is found is an upper bound on the least mean ratio.
//!
//! # Terms
//! - *Schedule*: decisions with their times ([`Schedule`]). An empty one is `default` watched.
//! - *Static*: a schedule that decides for each VM once, at the agent's first sample that has it.
//! - *Evaluation*: a run on the twin under one schedule, from time 0 or rolled out from a point of another run: as the twin is
//!   deterministic and can be copied, both give the same.
//! - *Value*: mean over VMs of the ratio beside `default` with the same seed ([`crate::score`]); less is better.
//!
//! # Algorithm
//! 1. Starts: what the caller brings (decisions of policies that were run, what was found before), some systematic
//!    arrangements and drawn ones, until [`STARTS_SHARE`] of the evaluations are used. All but the caller's are static.
//! 2. Then, VM by VM in order of arrival, each place that the best schedule could give it instead, until no VM gains by another
//!    place or [`PASSES_SHARE`] of the evaluations are used.
//! 3. Then batches of [`BATCH`]: each candidate changes one of the [`ELITES`] best schedules (the best one every second
//!    time), mostly at time 0 in the first half of what is left, afterwards mostly at a *point*: where VMs came, went, began or
//!    ended their work, and now and then. A change moves a VM, frees it, swaps two, pools two, adds or takes a node,
//!    spreads its memory, or arranges all anew; what was decided later for that VM is dropped. From a point on only the
//!    rest of the run is simulated, and not even that where it cannot be among the best any more ([`Cut`]).
//! 4. What was tried is not tried again; where nothing new can be drawn the search ends early: it tells how
//!    many evaluations it made.
//!
//! Decisions are carried out by [`arranger`]: by the policies' own `settle`, `repatriate`, `memory`, `pace` and `merge`,
//! once per agent's epoch, with the agent's budgets of pages.
//!
//! # Properties (tests of the same names)
//! - `never_worse_than_the_best_start`
//! - `the_number_of_jobs_changes_nothing`: candidates are drawn before the batch runs.
//! - `page_budgets_hold`
//! - `a_rollout_from_a_point_equals_the_run_from_the_beginning`
//!
//! # What it is not
//! It knows the future of its seed, and picks the best of many runs of it: some of the gap to it is luck that no policy
//! can have.

pub mod arranger;
mod moves;
mod rollout;
pub mod schedule;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use homenode_control::Config;
use homenode_units::{Chance, Ns};

pub use rollout::{Cut, Point, Rollout, replay, rollout};
pub use schedule::Schedule;

use crate::jobs::{self, Progress};
use crate::run::Run;
use crate::score::ratio;
use homenode_twin::Setup;
use moves::Choices;

/// Candidates that run together; the same for any number of jobs.
pub const BATCH: usize = 8;
/// Schedules that changes start from.
pub const ELITES: usize = 4;
/// Share of the evaluations for starts.
pub const STARTS_SHARE: f64 = 0.15;
/// Share of the evaluations after which no VM is tried everywhere any more.
pub const PASSES_SHARE: f64 = 0.6;
/// Fewer evaluations than this are no search.
pub const EVALUATIONS_MIN: usize = 8;
/// So many draws in a row that were all tried before: there is nothing new.
const DRAWS_MAX: usize = 200;

/// How long to search.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Evaluations.
    pub evaluations: usize,
    /// How many at the same time.
    pub jobs: usize,
    /// Seed of the search's own draws.
    pub seed: u64,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best schedule.
    pub schedule: Schedule,
    /// Its value.
    pub mean: f64,
    /// What came of it.
    pub run: Run,
    /// Evaluations made.
    pub evaluations: usize,
    /// Value of the best static schedule that was tried; infinite where none was.
    pub static_mean: f64,
}

/// A schedule that was tried.
struct Tried {
    schedule: Schedule,
    rollout: Rollout,
    /// Points from its beginning on: those of the run that it was rolled out from, then its own.
    points: Vec<Point>,
}

/// A schedule to try, and the point from which it differs.
struct Candidate {
    schedule: Schedule,
    from: Point,
    /// Points before that one.
    before: Vec<Point>,
}

/// Searches for the schedule of least value. `base` is the run under `default` with the same seed, `starts` what is tried
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
    let best = best.ok_or_else(|| anyhow::anyhow!("nothing was tried; ask for some evaluations"))?;
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
    /// The best so far, best first.
    elites: Vec<Tried>,
    evaluations: usize,
    static_mean: f64,
    /// The least ratio of each VM so far.
    least: Vec<f64>,
}

impl State<'_> {
    /// Schedules that nobody has tried: first those that the caller brings.
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

    /// VMs by their first arrival, which no policy changes.
    fn by_arrival(&self) -> Vec<usize> {
        let mut vms: Vec<usize> = (0..self.base.report.vms.len()).collect();
        vms.retain(|vm| self.base.report.vms[*vm].first_arrival_s().is_some());
        vms.sort_by(|a, b| {
            let arrival = |vm: usize| self.base.report.vms[vm].first_arrival_s().unwrap_or(0.0);
            arrival(*a).total_cmp(&arrival(*b))
        });
        vms
    }

    /// The best schedule with one VM anywhere else from its arrival on.
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
            // Before its arrival is at any time before; at 0 it reads as what it is.
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

    /// Changes of the best schedules; `done` is the share of the evaluations for changes that were made.
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
            progress.go_on()?;
            rollout(
                setup,
                config,
                base,
                &candidate.from,
                &candidate.schedule,
                cut.as_ref(),
            )
        });
        for (candidate, rollout) in batch.into_iter().zip(rollouts) {
            self.evaluations += 1;
            let Some(rollout) = rollout? else { continue };
            for (least, (base, vm)) in self
                .least
                .iter_mut()
                .zip(base.report.vms.iter().zip(&rollout.run.report.vms))
            {
                *least = ratio(base, vm).map_or(*least, |ratio| ratio.min(*least));
            }
            if candidate.schedule.is_static() {
                self.static_mean = self.static_mean.min(rollout.mean);
            }
            let mut points = candidate.before;
            points.extend(rollout.points.iter().cloned());
            // Of equals the first one stays.
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

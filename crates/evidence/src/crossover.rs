//! The experiment's course: blocks in which the agent acts, and blocks in which it only observes.

use std::collections::BTreeMap;
use std::fmt;

use homenode_control::{Mode, Status, VmStatus};
use homenode_units::{Chance, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Fewest pairs of blocks.
pub const PAIRS_MIN: u64 = 8;
/// Most pairs of blocks. All falls of the coin are tried, and their number doubles with each pair.
pub const PAIRS_MAX: u64 = 16;
/// Shortest block: the agent gives homes again only after the minute or so that it takes to learn and to try one.
pub const BLOCK_MIN: Ns = Ns::from_secs(180);
/// The share of a block that is washout.
const WASHOUT_PART: u64 = 3;
/// How long VMs are only observed at a time. It is renewed while the block lasts.
pub const LEASE: Ns = Ns::from_secs(60);

/// The chance that any claim of a run is wrong.
pub const WRONG_MAX: f64 = 0.05;

/// Returns true if an effect on one of this many VMs can be claimed: if all pairs have the same sign, chance is ruled out.
pub fn can_be_claimed(pairs: u64, vms: usize) -> bool {
    // Beside several VMs, all together are judged.
    let effects = if vms > 1 { vms as f64 + 1.0 } else { 1.0 };
    effects * 2.0 / (2.0_f64).powi(pairs as i32) <= WRONG_MAX
}

/// What the agent does in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Acting {
    /// It acts as its settings say.
    Acts,
    /// It only observes: what it has in force on the VMs is released.
    Observes,
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Crossover {
    /// Seed of the coin.
    pub seed: u64,
    /// Length of each block.
    pub block_ns: Ns,
    /// Length of the beginning of each block that does not count.
    pub washout_ns: Ns,
    /// What the agent does in each block. The first block belongs to no pair; then each two are a pair.
    pub blocks: Vec<Acting>,
}

impl Crossover {
    /// Plans a run of a length with a number of VMs.
    ///
    /// # Errors
    /// It is too short for an effect on one of that many VMs to be told from chance.
    pub fn of(length: Ns, vms: usize, seed: u64) -> Result<Crossover, TooShort> {
        let least = (PAIRS_MIN..=PAIRS_MAX).find(|pairs| can_be_claimed(*pairs, vms));
        let least = least.ok_or(TooShort { vms, least: None })?;
        let pairs = ((length.0 / BLOCK_MIN.0).saturating_sub(1) / 2).min(PAIRS_MAX);
        if pairs < least {
            let least = Some(Ns(BLOCK_MIN.0 * (2 * least + 1)));
            return Err(TooShort { vms, least });
        }
        let block = Ns(length.0 / (2 * pairs + 1));
        let mut coin = Chance::labelled(seed, "crossover", 0);
        let mut blocks = vec![Acting::Observes];
        for _ in 0..pairs {
            blocks.extend(match coin.below(2) {
                0 => [Acting::Acts, Acting::Observes],
                _ => [Acting::Observes, Acting::Acts],
            });
        }
        Ok(Crossover {
            seed,
            block_ns: block,
            washout_ns: Ns(block.0 / WASHOUT_PART),
            blocks,
        })
    }

    /// Returns the length of the whole run.
    pub fn length(&self) -> Ns {
        Ns(self.block_ns.0 * self.blocks.len() as u64)
    }

    /// Returns the number of the first block to run if these are done. A pair is done as a whole: after an interruption its two
    /// blocks would not be neighbours.
    pub fn next(&self, done: usize) -> usize {
        match done {
            0 => 0,
            _ => done - (done - 1) % 2,
        }
    }
}

/// A run that could not tell an effect from chance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct TooShort {
    /// Number of its VMs.
    pub vms: usize,
    /// The least length for them; `None` if there are too many for any.
    pub least: Option<Ns>,
}

impl fmt::Display for TooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least {
            Some(least) => {
                let minutes = least.0.div_ceil(60_000_000_000);
                write!(
                    f,
                    "with {} VMs a run takes at least {minutes} minutes to tell an effect from chance",
                    self.vms
                )
            }
            None => write!(
                f,
                "{} VMs are too many to tell an effect on one of them from chance",
                self.vms
            ),
        }
    }
}

/// What was measured in a block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Block {
    /// What the agent did.
    pub acting: Acting,
    /// Time that counted.
    pub counted_ns: Ns,
    /// Number of VMs on which the agent had a home or a limit in force at the end.
    pub in_force: usize,
    /// Each VM's mean speed in that time, in instructions per second of CPU time that it wanted. A VM without one was not
    /// counted, did not run or did not work.
    pub speeds: BTreeMap<String, f64>,
}

/// What a look at the host shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Time since the last look.
    pub passed: Ns,
    /// What the agent does; `None` if it differs by VM, or the agent is paused.
    pub acting: Option<Acting>,
    /// Number of VMs on which it has a home or a limit in force.
    pub in_force: usize,
    /// Each VM's speed over that time; `None` if it is not known.
    pub speeds: BTreeMap<String, Option<f64>>,
}

impl Look {
    /// Reads the agent's status of the VMs that `named` gives a name.
    pub fn of(passed: Ns, status: &Status, named: impl Fn(&VmStatus) -> Option<String>) -> Look {
        let vms: Vec<(String, &VmStatus)> = status
            .vms
            .iter()
            .filter_map(|vm| Some((named(vm)?, vm)))
            .collect();
        let acts = |vm: &VmStatus| vm.mode == Mode::Act && status.paused_for_ns.is_none();
        let acting = match () {
            () if vms.iter().all(|(_, vm)| vm.observed_for_ns.is_some()) => Some(Acting::Observes),
            () if vms.iter().all(|(_, vm)| acts(vm)) => Some(Acting::Acts),
            () => None,
        };
        let is_held = |vm: &VmStatus| vm.home.is_some() || vm.permit.quota.is_some();
        Look {
            passed,
            acting,
            in_force: vms.iter().filter(|(_, vm)| is_held(vm)).count(),
            speeds: vms
                .into_iter()
                .map(|(name, vm)| (name, vm.instructions_per_cpu_s))
                .collect(),
        }
    }
}

/// A host whose agent can act and only observe.
pub trait Subject {
    /// Why the host cannot be asked.
    type Error;

    /// Lets the agent act on the VMs, or only observe them for `span`. After that it acts again by itself, whatever became of
    /// this program.
    ///
    /// # Errors
    /// The agent does not answer, or refuses.
    fn set(&mut self, acting: Acting, span: Ns) -> Result<(), Self::Error>;

    /// Waits for the agent's next sample, and returns it.
    ///
    /// # Errors
    /// The agent does not answer.
    fn look(&mut self) -> Result<Look, Self::Error>;
}

/// Runs one block. Returns `None` if the agent did something else while the block counted: it was restarted, paused, or another
/// client set modes.
///
/// # Errors
/// Those of the subject.
pub fn run_block<S: Subject>(
    subject: &mut S,
    plan: &Crossover,
    acting: Acting,
) -> Result<Option<Block>, S::Error> {
    subject.set(acting, LEASE)?;
    let (mut gone, mut counted, mut renewed) = (Ns::ZERO, Ns::ZERO, Ns::ZERO);
    let mut in_force = 0;
    let mut sums: BTreeMap<String, (f64, u64)> = BTreeMap::new();
    while gone < plan.block_ns {
        let look = subject.look()?;
        let is_counted = gone >= plan.washout_ns;
        gone = Ns(gone.0.saturating_add(look.passed.0));
        if acting == Acting::Observes && gone.saturating_sub(renewed).0 >= LEASE.0 / 4 {
            subject.set(acting, LEASE)?;
            renewed = gone;
        }
        if !is_counted {
            continue;
        }
        if look.acting != Some(acting) {
            return Ok(None);
        }
        in_force = look.in_force;
        counted = Ns(counted.0.saturating_add(look.passed.0));
        for (vm, speed) in look.speeds {
            let Some(speed) = speed.filter(|speed| speed.is_finite() && *speed > 0.0) else {
                continue;
            };
            let (sum, time) = sums.entry(vm).or_default();
            *sum += speed * look.passed.as_secs_f64();
            *time += look.passed.0;
        }
    }
    let mean = |(vm, (sum, time)): (String, (f64, u64))| (vm, sum / Ns(time).as_secs_f64());
    Ok(Some(Block {
        acting,
        counted_ns: counted,
        in_force,
        speeds: sums
            .into_iter()
            .filter(|(_, (_, time))| *time > 0)
            .map(mean)
            .collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_can_tell_an_effect_from_chance_and_fits_its_time() {
        for (vms, minutes) in [(1, 51), (5, 51), (6, 57), (16, 63), (100, 75), (1000, 99)] {
            let least = Some(Ns::from_secs(60 * minutes));
            let short = Crossover::of(Ns::from_secs(60 * minutes - 1), vms, 1);
            assert_eq!(short, Err(TooShort { vms, least }));
            for length in [minutes, minutes + 1, 200, 1440] {
                let length = Ns::from_secs(60 * length);
                let plan = Crossover::of(length, vms, length.0).unwrap();
                assert_eq!(plan.blocks[0], Acting::Observes);
                assert!(plan.block_ns >= BLOCK_MIN && plan.length() <= length);
                let pairs = plan.blocks[1..].chunks_exact(2);
                assert!(pairs.remainder().is_empty() && can_be_claimed(pairs.len() as u64, vms));
                assert!(pairs.into_iter().all(|pair| pair[0] != pair[1]));
            }
        }
        let too_many = Crossover::of(Ns(u64::MAX), 10_000, 1);
        assert_eq!(
            too_many,
            Err(TooShort {
                vms: 10_000,
                least: None
            })
        );
    }

    fn plan(seed: u64) -> Crossover {
        Crossover::of(Ns::from_secs(3600), 1, seed).unwrap()
    }

    #[test]
    fn the_coin_is_fair() {
        let firsts = (0..1000).map(|seed| plan(seed).blocks[1]);
        let acting = firsts.filter(|acting| *acting == Acting::Acts).count();
        // Four standard deviations of 1000 throws.
        assert!((437..=563).contains(&acting), "{acting}");
    }

    #[test]
    fn whatever_stops_a_run_it_goes_on_where_it_was() {
        let plan = plan(1);
        let next: Vec<usize> = (0..8).map(|done| plan.next(done)).collect();
        assert_eq!(next, [0, 1, 1, 3, 3, 5, 5, 7]);
    }

    /// A subject whose VM has a speed by what the agent does, and whose speeds during washout are wild.
    struct Made {
        acting: Acting,
        since: Ns,
        washout: Ns,
        /// How long the agent does as it was told without being told again.
        lease: Ns,
    }

    impl Subject for Made {
        type Error = std::convert::Infallible;

        fn set(&mut self, acting: Acting, span: Ns) -> Result<(), Self::Error> {
            if acting != self.acting {
                self.since = Ns::ZERO;
            }
            (self.acting, self.lease) = (acting, span);
            Ok(())
        }

        fn look(&mut self) -> Result<Look, Self::Error> {
            let passed = Ns::from_secs(1);
            let speed = match (self.since < self.washout, self.acting) {
                (true, _) => 1e9,
                (false, Acting::Acts) => 3.0,
                (false, Acting::Observes) => 2.0,
            };
            self.since = Ns(self.since.0 + passed.0);
            self.lease = self.lease.saturating_sub(passed);
            let is_leased = self.acting == Acting::Acts || self.lease > Ns::ZERO;
            let speeds = [("vm", Some(speed)), ("idle", None), ("broken", Some(f64::NAN))];
            let speeds = speeds.map(|(name, speed)| (name.to_owned(), speed));
            Ok(Look {
                passed,
                acting: is_leased.then_some(self.acting),
                in_force: usize::from(self.acting == Acting::Acts),
                speeds: speeds.into(),
            })
        }
    }

    #[test]
    fn washout_does_not_count_and_what_is_not_known_is_absent() {
        let plan = plan(1);
        let mut made = Made {
            acting: Acting::Observes,
            since: Ns::ZERO,
            washout: plan.washout_ns,
            lease: Ns::ZERO,
        };
        for (acting, speed) in [(Acting::Acts, 3.0), (Acting::Observes, 2.0)] {
            let block = run_block(&mut made, &plan, acting).unwrap().unwrap();
            // Looks last a second, so both ends may be off by that.
            let counted = Ns(plan.block_ns.0 - plan.washout_ns.0);
            assert!(
                block.counted_ns.0.abs_diff(counted.0) < 1_000_000_000,
                "{}",
                block.counted_ns
            );
            assert_eq!(block.speeds, BTreeMap::from([("vm".to_owned(), speed)]));
            assert_eq!(block.in_force, usize::from(acting == Acting::Acts));
        }
    }

    /// A subject that does something else for a moment.
    struct Disturbed(Made, u64);

    impl Subject for Disturbed {
        type Error = std::convert::Infallible;

        fn set(&mut self, acting: Acting, span: Ns) -> Result<(), Self::Error> {
            self.0.set(acting, span)
        }

        fn look(&mut self) -> Result<Look, Self::Error> {
            self.1 = self.1.wrapping_sub(1);
            let look = self.0.look()?;
            let acting = look.acting.filter(|_| self.1 != 0);
            Ok(Look { acting, ..look })
        }
    }

    #[test]
    fn a_block_in_which_the_agent_did_something_else_does_not_count() {
        let plan = plan(1);
        for (at, is_kept) in [(1, true), (plan.washout_ns.0 / 1_000_000_000 + 2, false)] {
            let made = Made {
                acting: Acting::Observes,
                since: Ns::ZERO,
                washout: plan.washout_ns,
                lease: Ns::ZERO,
            };
            let block = run_block(&mut Disturbed(made, at), &plan, Acting::Observes).unwrap();
            assert_eq!(block.is_some(), is_kept, "{at}");
        }
    }
}

//! The experiment's course: blocks in which the agent acts, and blocks in which it only observes.

use std::collections::BTreeMap;

use homenode_units::{Chance, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Fewest pairs of blocks. With eight, chance alone gives all pairs the same sign once in 128 runs.
pub const PAIRS_MIN: u64 = 8;
/// Most pairs of blocks. More blocks would be shorter, and more of them washout.
pub const PAIRS_MAX: u64 = 12;
/// Shortest block.
pub const BLOCK_MIN: Ns = Ns::from_secs(30);
/// Shortest run.
pub const RUN_MIN: Ns = Ns(BLOCK_MIN.0 * (2 * PAIRS_MIN + 1));
/// The share of a block that is washout.
const WASHOUT_PART: u64 = 3;

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
    /// Plans a run of a length; `None` if it is less than [`RUN_MIN`].
    pub fn of(length: Ns, seed: u64) -> Option<Crossover> {
        if length < RUN_MIN {
            return None;
        }
        let pairs = ((length.0 / BLOCK_MIN.0 - 1) / 2).clamp(PAIRS_MIN, PAIRS_MAX);
        let block = Ns(length.0 / (2 * pairs + 1));
        let mut coin = Chance::labelled(seed, "crossover", 0);
        let mut blocks = vec![Acting::Observes];
        for _ in 0..pairs {
            blocks.extend(match coin.below(2) {
                0 => [Acting::Acts, Acting::Observes],
                _ => [Acting::Observes, Acting::Acts],
            });
        }
        Some(Crossover {
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

/// What was measured in a block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Block {
    /// What the agent did.
    pub acting: Acting,
    /// Time that counted.
    pub counted_ns: Ns,
    /// Each VM's mean speed in that time, in instructions per second of CPU time that it wanted. A VM without one was not
    /// counted, did not run or did not work.
    pub speeds: BTreeMap<String, f64>,
}

/// What a look at the host shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Time since the last look.
    pub passed: Ns,
    /// Each VM's speed over that time; `None` if it is not known.
    pub speeds: BTreeMap<String, Option<f64>>,
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

/// Runs one block.
///
/// # Errors
/// Those of the subject.
pub fn run_block<S: Subject>(subject: &mut S, plan: &Crossover, acting: Acting) -> Result<Block, S::Error> {
    // Looks end a little after the block does.
    let span = Ns(plan.block_ns.0 + plan.washout_ns.0);
    subject.set(acting, span)?;
    let (mut gone, mut counted) = (Ns::ZERO, Ns::ZERO);
    let mut sums: BTreeMap<String, (f64, u64)> = BTreeMap::new();
    while gone < plan.block_ns {
        let look = subject.look()?;
        let is_counted = gone >= plan.washout_ns;
        gone = Ns(gone.0.saturating_add(look.passed.0));
        if !is_counted {
            continue;
        }
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
    Ok(Block {
        acting,
        counted_ns: counted,
        speeds: sums
            .into_iter()
            .filter(|(_, (_, time))| *time > 0)
            .map(mean)
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_has_pairs_of_both_kinds_and_fits_its_time() {
        assert_eq!(Crossover::of(Ns(RUN_MIN.0 - 1), 1), None);
        for minutes in [9, 10, 11, 12, 13, 30, 60, 600] {
            for seed in 0..20 {
                let length = Ns::from_secs(60 * minutes);
                let plan = Crossover::of(length, seed).unwrap();
                assert_eq!(plan.blocks[0], Acting::Observes);
                assert!(plan.block_ns >= BLOCK_MIN && plan.length() <= length);
                let pairs = plan.blocks[1..].chunks_exact(2);
                assert!(pairs.remainder().is_empty());
                assert!((PAIRS_MIN..=PAIRS_MAX).contains(&(pairs.len() as u64)));
                assert!(pairs.into_iter().all(|pair| pair[0] != pair[1]));
            }
        }
    }

    #[test]
    fn the_coin_is_fair() {
        let firsts = (0..1000).map(|seed| Crossover::of(RUN_MIN, seed).unwrap().blocks[1]);
        let acting = firsts.filter(|acting| *acting == Acting::Acts).count();
        // Four standard deviations of 1000 throws.
        assert!((437..=563).contains(&acting), "{acting}");
    }

    #[test]
    fn whatever_stops_a_run_it_goes_on_where_it_was() {
        let plan = Crossover::of(RUN_MIN, 1).unwrap();
        let next: Vec<usize> = (0..8).map(|done| plan.next(done)).collect();
        assert_eq!(next, [0, 1, 1, 3, 3, 5, 5, 7]);
    }

    /// A subject whose VM has a speed by what the agent does, and whose speeds during washout are wild.
    struct Made {
        acting: Acting,
        since: Ns,
        washout: Ns,
    }

    impl Subject for Made {
        type Error = std::convert::Infallible;

        fn set(&mut self, acting: Acting, _: Ns) -> Result<(), Self::Error> {
            (self.acting, self.since) = (acting, Ns::ZERO);
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
            let speeds = [("vm", Some(speed)), ("idle", None), ("broken", Some(f64::NAN))];
            let speeds = speeds.map(|(name, speed)| (name.to_owned(), speed));
            Ok(Look {
                passed,
                speeds: speeds.into(),
            })
        }
    }

    #[test]
    fn washout_does_not_count_and_what_is_not_known_is_absent() {
        let plan = Crossover::of(RUN_MIN, 1).unwrap();
        let mut made = Made {
            acting: Acting::Observes,
            since: Ns::ZERO,
            washout: plan.washout_ns,
        };
        for (acting, speed) in [(Acting::Acts, 3.0), (Acting::Observes, 2.0)] {
            let block = run_block(&mut made, &plan, acting).unwrap();
            assert_eq!(block.counted_ns, Ns(plan.block_ns.0 - plan.washout_ns.0));
            assert_eq!(block.speeds, BTreeMap::from([("vm".to_owned(), speed)]));
        }
    }
}

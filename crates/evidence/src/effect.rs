//! What the agent's acting does to each VM, and the verdict.
//!
//! # Algorithm
//! 1. For each pair of blocks and each VM: the logarithm of its speed while the agent acts over its speed while it observes. For
//!    the host: their mean over the VMs of that pair.
//! 2. The effect is the mean over the pairs. Its interval is that of Student's t, at 95 percent for each VM by itself.
//! 3. How often would chance alone give as much? If the agent had no effect, each pair's difference would have the other sign if
//!    the coin had fallen otherwise. So count, over all falls of the coin, those whose mean is at least as far from zero
//!    (a randomisation test). That assumes nothing about distributions.
//! 4. Several VMs are several chances to be wrong. Holm's method corrects for them: the chance that any claim of a run is wrong
//!    is at most [`WRONG_MAX`].
//! 5. An effect is *claimed* if that chance is small enough, its interval lies on one side of zero, the effect is at least
//!    [`MATTERS`], and the run is complete: stopping at a moment that suits would be as many throws of the coin.
//!
//! # Sources
//! Fisher, *The Design of Experiments* (1935), chapter 3: the randomisation test. Holm, *A Simple Sequentially Rejective Multiple
//! Test Procedure* (1979).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use homenode_units::stats::{Estimate, mean};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::crossover::{Acting, Block, PAIRS_MAX, WRONG_MAX};

/// The least effect that is claimed, as a share. Less would not decide whether to switch the agent on.
pub const MATTERS: f64 = 0.01;
/// Fewest pairs by which a VM is judged. With fewer nothing could be claimed.
pub const PAIRS_JUDGED_MIN: usize = 7;

/// The agent's effect on a VM, or on all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Effect {
    /// Number of pairs of blocks that it is of.
    pub pairs: usize,
    /// Speed while the agent acts over speed while it observes, less 1, in percent.
    pub percent: f64,
    /// Low end of the 95 percent interval, in percent.
    pub low_percent: f64,
    /// High end of the 95 percent interval, in percent.
    pub high_percent: f64,
    /// How often chance alone would give as much, corrected for the number of VMs.
    pub chance: f64,
    /// Whether the effect is claimed.
    pub is_claimed: bool,
}

/// The verdict on the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    /// VMs are slower while the agent acts.
    Harms {
        /// These; empty if only all together are.
        slower: Vec<String>,
    },
    /// VMs are faster while it acts, and none is slower.
    Gains {
        /// These; empty if only all together are.
        faster: Vec<String>,
    },
    /// No difference that matters was seen.
    NoDifference,
    /// The agent had no home and no limit in force at the end of any block in which it acts.
    NothingDone,
    /// Blocks are missing.
    NotComplete,
    /// No VM was counted for long enough.
    NotMeasured,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |vms: &[String]| match vms {
            [] => "all VMs together".to_owned(),
            vms => vms.join(", "),
        };
        match self {
            Verdict::Harms { slower } => write!(f, "harms: slower while the agent acts: {}", named(slower)),
            Verdict::Gains { faster } => write!(f, "gains: faster while the agent acts: {}", named(faster)),
            Verdict::NoDifference => f.write_str("no difference that matters was seen"),
            Verdict::NothingDone => f.write_str(
                "no difference could be seen: the agent had no home and no limit in force on these VMs when it acted",
            ),
            Verdict::NotComplete => f.write_str("not complete: nothing is claimed yet"),
            Verdict::NotMeasured => f.write_str("not measured: no VM was counted for long enough"),
        }
    }
}

/// Effects and verdict of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Judged {
    /// The effect on all VMs together; `None` if none was measured.
    pub all: Option<Effect>,
    /// The effect on each VM that was measured in enough pairs.
    pub vms: BTreeMap<String, Effect>,
    /// VMs that are not judged, as too few pairs have their speed.
    pub not_judged: Vec<String>,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// Judges the blocks of a run; the first belongs to no pair. Nothing is claimed before a run is complete.
pub fn judge(blocks: &[Block], is_complete: bool) -> Judged {
    let pairs: Vec<BTreeMap<&str, f64>> = blocks
        .get(1..)
        .unwrap_or_default()
        .chunks_exact(2)
        .map(differences)
        .collect();
    let names: BTreeSet<&str> = blocks
        .iter()
        .flat_map(|block| block.speeds.keys().map(String::as_str))
        .collect();
    let of = |name: &str| -> Vec<f64> { pairs.iter().filter_map(|pair| pair.get(name).copied()).collect() };
    let (judged, not_judged): (Vec<&str>, Vec<&str>) = names
        .into_iter()
        .partition(|name| of(name).len() >= PAIRS_JUDGED_MIN);
    let means = pairs
        .iter()
        .filter_map(|pair| mean(judged.iter().filter_map(|name| pair.get(name).copied())));
    let together: Vec<f64> = means.collect();
    let mut effects: Vec<Effect> = judged.iter().map(|name| Effect::of(&of(name))).collect();
    let has_all = judged.len() > 1 && together.len() >= PAIRS_JUDGED_MIN;
    effects.extend(has_all.then(|| Effect::of(&together)));
    correct(&mut effects, is_complete);
    let all = if has_all { effects.pop() } else { None };
    let vms: BTreeMap<String, Effect> = judged
        .iter()
        .map(|name| (*name).to_owned())
        .zip(effects)
        .collect();
    Judged {
        verdict: match is_complete {
            true => verdict(all.as_ref(), &vms, blocks),
            false => Verdict::NotComplete,
        },
        all,
        vms,
        not_judged: not_judged.into_iter().map(str::to_owned).collect(),
    }
}

/// Returns the logarithm of acting over observing for each VM that both blocks of a pair have.
fn differences(pair: &[Block]) -> BTreeMap<&str, f64> {
    let [a, b] = pair else { return BTreeMap::new() };
    let (acts, observes) = match a.acting {
        Acting::Acts => (a, b),
        Acting::Observes => (b, a),
    };
    let mut ratios = BTreeMap::new();
    for (vm, speed) in &acts.speeds {
        let Some(other) = observes.speeds.get(vm) else {
            continue;
        };
        let ratio = (speed / other).ln();
        if ratio.is_finite() {
            ratios.insert(vm.as_str(), ratio);
        }
    }
    ratios
}

fn verdict(all: Option<&Effect>, vms: &BTreeMap<String, Effect>, blocks: &[Block]) -> Verdict {
    if vms.is_empty() {
        return Verdict::NotMeasured;
    }
    let claimed = |is_it: fn(f64) -> bool| -> Vec<String> {
        let is_it = |(_, effect): &(&String, &Effect)| effect.is_claimed && is_it(effect.percent);
        vms.iter().filter(is_it).map(|(vm, _)| vm.clone()).collect()
    };
    let (slower, faster) = (claimed(|percent| percent < 0.0), claimed(|percent| percent > 0.0));
    let together = |is_it: fn(f64) -> bool| all.is_some_and(|all| all.is_claimed && is_it(all.percent));
    let did_nothing = |block: &Block| block.acting == Acting::Observes || block.in_force == 0;
    if !slower.is_empty() || together(|percent| percent < 0.0) {
        Verdict::Harms { slower }
    } else if !faster.is_empty() || together(|percent| percent > 0.0) {
        Verdict::Gains { faster }
    } else if blocks.iter().all(did_nothing) {
        Verdict::NothingDone
    } else {
        Verdict::NoDifference
    }
}

impl Effect {
    /// Estimates an effect from the differences of pairs, before the correction for several VMs.
    fn of(differences: &[f64]) -> Effect {
        let estimate = Estimate::of(differences);
        let (middle, half) = (estimate.mean.unwrap_or(0.0), estimate.half.unwrap_or(0.0));
        let percent = |log: f64| 100.0 * (log.exp() - 1.0);
        Effect {
            pairs: differences.len(),
            percent: percent(middle),
            low_percent: percent(middle - half),
            high_percent: percent(middle + half),
            chance: chance(differences),
            is_claimed: false,
        }
    }
}

/// Returns the share of the coin's falls that give a mean at least as far from zero.
fn chance(differences: &[f64]) -> f64 {
    let differences = &differences[..differences.len().min(PAIRS_MAX as usize)];
    let seen = differences.iter().sum::<f64>().abs();
    let falls = 1_u32 << differences.len();
    let sum = |fall: u32| -> f64 {
        let signed = |(at, one): (usize, &f64)| if fall & 1 << at == 0 { *one } else { -one };
        differences.iter().enumerate().map(signed).sum()
    };
    // Sums in another order differ in their last bits.
    let as_far = (0..falls)
        .filter(|fall| sum(*fall).abs() >= seen * (1.0 - 1e-9))
        .count();
    as_far as f64 / f64::from(falls)
}

/// Corrects chances for the number of effects (Holm), and claims effects.
fn correct(effects: &mut [Effect], is_complete: bool) {
    let count = effects.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|a, b| effects[*a].chance.total_cmp(&effects[*b].chance));
    let mut least: f64 = 0.0;
    for (rank, at) in order.into_iter().enumerate() {
        let left = count - rank;
        let effect = &mut effects[at];
        least = least.max((effect.chance * left as f64).min(1.0));
        effect.chance = least;
        let is_one_sided = effect.low_percent > 0.0 || effect.high_percent < 0.0;
        let matters = effect.percent.abs() >= 100.0 * MATTERS;
        effect.is_claimed = is_complete && least <= WRONG_MAX && is_one_sided && matters;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::Ns;

    fn block(acting: Acting, speeds: &[(&str, f64)]) -> Block {
        Block {
            acting,
            counted_ns: Ns::from_secs(20),
            in_force: usize::from(acting == Acting::Acts),
            speeds: speeds
                .iter()
                .map(|(vm, speed)| ((*vm).to_owned(), *speed))
                .collect(),
        }
    }

    fn judge_all(blocks: &[Block]) -> Judged {
        judge(blocks, true)
    }

    /// Blocks of pairs, with the first one before them.
    fn blocks(pairs: impl IntoIterator<Item = [Vec<(&'static str, f64)>; 2]>) -> Vec<Block> {
        let mut all = vec![block(Acting::Observes, &[("a", 1.0)])];
        for (at, [acts, observes]) in pairs.into_iter().enumerate() {
            let mut pair = [block(Acting::Acts, &acts), block(Acting::Observes, &observes)];
            if at % 3 == 0 {
                pair.reverse();
            }
            all.extend(pair);
        }
        all
    }

    #[test]
    fn chances_by_hand() {
        // All of eight signs alike: two of 256 falls.
        assert!((chance(&[1.0; 8]) - 2.0 / 256.0).abs() < 1e-12);
        // 3 and -1: sums are 2, 4, -4, -2, all at least 2 from zero.
        assert!((chance(&[3.0, -1.0]) - 1.0).abs() < 1e-12);
        // 3 and 1: 4 and -4 of four falls.
        assert!((chance(&[3.0, 1.0]) - 0.5).abs() < 1e-12);
        assert!((chance(&[0.0; 8]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn an_effect_by_hand_and_its_correction() {
        let pairs = (0..8).map(|_| [vec![("a", 1.1), ("b", 2.0)], vec![("a", 1.0), ("b", 2.0)]]);
        let judged = judge_all(&blocks(pairs));
        let a = &judged.vms["a"];
        assert!((a.percent - 10.0).abs() < 1e-9 && a.pairs == 8, "{a:?}");
        // Three effects: a, b, and all; a and all have 2 of 256.
        assert!((a.chance - 3.0 * 2.0 / 256.0).abs() < 1e-12, "{a:?}");
        assert!(a.is_claimed && !judged.vms["b"].is_claimed);
        assert_eq!(
            judged.verdict,
            Verdict::Gains {
                faster: vec!["a".to_owned()]
            }
        );
        let all = judged.all.unwrap();
        assert!(
            (all.percent - 100.0 * (1.1_f64.sqrt() - 1.0)).abs() < 1e-9,
            "{all:?}"
        );
    }

    #[test]
    fn one_vm_that_is_harmed_is_the_verdict_whatever_others_gain() {
        let pairs = (0..8).map(|_| [vec![("a", 2.0), ("b", 1.0)], vec![("a", 1.0), ("b", 1.1)]]);
        let judged = judge_all(&blocks(pairs));
        assert_eq!(
            judged.verdict,
            Verdict::Harms {
                slower: vec!["b".to_owned()]
            }
        );
        assert!(judged.all.unwrap().percent > 0.0);
    }

    #[test]
    fn nothing_is_claimed_that_chance_may_have_made_or_before_the_end() {
        // Seven small gains and a large one: the interval includes zero.
        let pairs = (0..8).map(|at| {
            let gained = if at == 0 { 1.35 } else { 1.02 };
            [vec![("a", gained)], vec![("a", 1.0)]]
        });
        let judged = judge_all(&blocks(pairs));
        assert!(judged.vms["a"].chance < WRONG_MAX && judged.vms["a"].low_percent < 0.0);
        assert_eq!(judged.verdict, Verdict::NoDifference);
        let pairs = (0..8).map(|_| [vec![("a", 2.0)], vec![("a", 1.0)]]);
        let early = judge(&blocks(pairs), false);
        assert!(!early.vms["a"].is_claimed && early.verdict == Verdict::NotComplete);
        // One VM is not also all together.
        assert_eq!(early.all, None);
    }

    #[test]
    fn an_agent_that_did_nothing_is_said_to_have_done_nothing() {
        let pairs = (0..8).map(|_| [vec![("a", 1.0)], vec![("a", 1.0)]]);
        let mut all = blocks(pairs);
        assert_eq!(judge_all(&all).verdict, Verdict::NoDifference);
        all.iter_mut().for_each(|block| block.in_force = 0);
        assert_eq!(judge_all(&all).verdict, Verdict::NothingDone);
    }

    #[test]
    fn an_effect_too_small_to_matter_is_no_claim() {
        let pairs = (0..8).map(|_| [vec![("a", 1.005)], vec![("a", 1.0)]]);
        assert_eq!(judge_all(&blocks(pairs)).verdict, Verdict::NoDifference);
    }

    #[test]
    fn a_vm_that_is_not_counted_is_not_judged() {
        let pairs = (0..8).map(|at| {
            let b = if at < 5 {
                vec![("a", 1.0), ("b", 1.0)]
            } else {
                vec![("a", 1.0)]
            };
            [b.clone(), b]
        });
        let judged = judge_all(&blocks(pairs));
        assert_eq!(judged.not_judged, ["b"]);
        assert!(judged.vms.contains_key("a") && !judged.vms.contains_key("b"));
        for empty in [vec![], blocks([]), blocks([[vec![], vec![]]])] {
            assert_eq!(judge_all(&empty).verdict, Verdict::NotMeasured);
        }
        let zeros = (0..8).map(|_| [vec![("a", 0.0)], vec![("a", 0.0)]]);
        assert_eq!(judge_all(&blocks(zeros)).verdict, Verdict::NotMeasured);
    }
}

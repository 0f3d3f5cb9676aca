//! How close our numbers are to the published ones. This is a reader's first question, before any verdict.
//!
//! The headline covers predicted numbers that are not trivial, that is, numbers that a prediction of no effect anywhere
//! would miss. Our own claims and measurements that depend on the current machine are excluded.
//!
//! # Bands
//!
//! A claim states which inputs the paper leaves open, and the range of factors for each. Each input in turn is set to both
//! ends of its range. A value's band spans the minimum to the maximum of the results. It shows how much of a difference the
//! input could explain; no verdict uses it.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use homenode_machine_files::file::{FileError, read_toml};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::claims::{Attribution, Claim, Kind};
use crate::decide;
use crate::experiment::Reproduced;
use crate::figure::{Figure, Line, Ranged, Shape};
use crate::vary::{End, Open};
use crate::verdict::{Band, Part, Score};
use crate::work::Outcomes;
use homenode_units::stats::median;

/// Factors reported in the headline.
const FACTORS: [f64; 3] = [1.25, 2.0, 3.0];
/// In the figures: how far to the right of the largest error values of the opposite sign are drawn, and at which factors
/// there are marks.
const BEYOND: f64 = 0.5;
const MARKED: [f64; 2] = [2.0, 3.0];

/// How close our numbers are to the published ones.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Scoreboard {
    /// Statistics of predicted numbers that are not trivial.
    #[serde(flatten)]
    pub headline: Group,
    /// Headline numbers that rest on profiles fitted to other figures of the same paper.
    pub same_paper: Group,
    /// The other headline numbers.
    pub without_same_paper: Group,
    /// Number of these that a prediction of no effect would get right within the tolerance.
    pub judged: usize,
    /// How many of these a prediction of no effect would get right within the tolerance.
    pub trivial: usize,
    /// Predicted bounds, rankings and tests that a prediction of no effect would fail.
    pub tests: Tally,
    /// Headline numbers by paper.
    pub by_source: BTreeMap<String, Group>,
    /// Headline numbers by what they depend on most.
    pub by_attribution: BTreeMap<Attribution, Group>,
    /// Numbers, bounds, rankings and tests by how much of each was put into the model; inputs are excluded.
    pub by_kind: BTreeMap<Kind, Worth>,
}

/// Values, divided by whether a prediction of no effect gets them right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Worth {
    /// Values that such a prediction gets wrong.
    pub beyond_null: Tally,
    /// Values that such a prediction gets right.
    pub trivial: Tally,
}

/// A number of values, and how many of them hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tally {
    /// Number of all values.
    pub all: usize,
    /// Number of values that hold.
    pub held: usize,
}

/// Statistics of numbers against the published ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Group {
    /// Number of values.
    pub values: usize,
    /// Number of values that hold according to the rules.
    pub held: usize,
    /// Number of values within a factor of 1.25.
    pub within_1_25x: usize,
    /// Number of values within a factor of 2.
    pub within_2x: usize,
    /// Number of values within a factor of 3.
    pub within_3x: usize,
    /// Number of values that are on the same side of no effect as the published ones.
    pub sign_right: usize,
    /// Median of the absolute logarithms of our effect over the published one; null if more than half differ in sign.
    pub median_abs_ln: Option<f64>,
    /// Median of our effect over the published one, with its sign; null without values.
    pub median_ratio: Option<f64>,
    /// Number of values with a band, and how many of these bands contain the published number.
    pub in_band: Tally,
    /// Median width of the bands, as the logarithm of high over low; null without bands, or if more than half change sign.
    pub median_band_ln: Option<f64>,
}

/// Returns the measured parts of published claims, each with its claim. Excludes those measured on the current machine.
fn parts(all: &[Reproduced]) -> impl Iterator<Item = (&Claim, &Part)> {
    let decided = all
        .iter()
        .filter(|one| one.decision.is_some() && !one.measured_here() && !one.claim.is_own());
    decided.flat_map(|one| one.judgement.parts.iter().map(move |part| (&one.claim, part)))
}

/// Returns headline numbers, each with its claim.
pub(crate) fn headline(all: &[Reproduced]) -> impl Iterator<Item = (&Claim, &Part, &Score)> {
    let counted = parts(all).filter(|(_, part)| part.kind == Kind::Predicted && !part.trivial);
    counted.filter_map(|(claim, part)| Some((claim, part, part.score.as_ref()?)))
}

impl Scoreboard {
    /// Computes the scoreboard of some claims.
    pub fn of(all: &[Reproduced]) -> Scoreboard {
        let among = |keeps: &dyn Fn(&Claim, &Part) -> bool| {
            let kept = headline(all).filter(|(claim, part, _)| keeps(claim, part));
            Group::of(kept.map(|(_, part, score)| (part, score)))
        };
        let of = |keeps: &dyn Fn(&Claim) -> bool| among(&|claim, _| keeps(claim));
        let judged = || parts(all).filter(|(_, part)| !part.input && part.score.is_some());
        let tests = parts(all)
            .filter(|(_, part)| part.kind == Kind::Predicted && !part.trivial && part.score.is_none());
        let sources = headline(all).map(|(claim, ..)| claim.source.clone());
        let attributions = headline(all).map(|(claim, ..)| claim.attribution);
        let with = |kind: Kind| {
            let of_kind = |trivial: bool| {
                let some = parts(all)
                    .filter(|(_, part)| part.kind == kind && !part.input && part.trivial == trivial);
                Tally::of(some.map(|(_, part)| part.holds))
            };
            let worth = Worth {
                beyond_null: of_kind(false),
                trivial: of_kind(true),
            };
            (kind, worth)
        };
        Scoreboard {
            headline: of(&|_| true),
            same_paper: among(&|_, part| part.same_paper),
            without_same_paper: among(&|_, part| !part.same_paper),
            judged: judged().count(),
            trivial: judged().filter(|(_, part)| part.trivial).count(),
            tests: Tally::of(tests.map(|(_, part)| part.holds)),
            by_source: sources
                .map(|source| (source.clone(), of(&|claim| claim.source == source)))
                .collect(),
            by_attribution: attributions
                .map(|attribution| (attribution, of(&|claim| claim.attribution == attribution)))
                .collect(),
            by_kind: Kind::ALL
                .into_iter()
                .map(with)
                .filter(|(_, worth)| worth.beyond_null.all + worth.trivial.all > 0)
                .collect(),
        }
    }
}

impl Tally {
    fn of(held: impl Iterator<Item = bool>) -> Tally {
        held.fold(Tally::default(), |sum, held| Tally {
            all: sum.all + 1,
            held: sum.held + usize::from(held),
        })
    }
}

impl Group {
    /// Returns the number of values within each factor, with the right sign, and that hold.
    pub(crate) fn counts(&self) -> [usize; 5] {
        [
            self.within_1_25x,
            self.within_2x,
            self.within_3x,
            self.sign_right,
            self.held,
        ]
    }

    pub(crate) fn of<'a>(scores: impl Iterator<Item = (&'a Part, &'a Score)>) -> Group {
        let scores: Vec<(&Part, &Score)> = scores.collect();
        let within = |factor: f64| {
            scores
                .iter()
                .filter(|(_, score)| score.factor() <= factor)
                .count()
        };
        let [within_1_25x, within_2x, within_3x] = FACTORS.map(within);
        let banded = || {
            scores
                .iter()
                .filter_map(|(_, score)| Some((score.published, score.band?)))
        };
        let width = |band: Band| {
            let ratio = band.high / band.low;
            if ratio > 0.0 {
                libm::log(ratio).abs()
            } else {
                f64::INFINITY
            }
        };
        Group {
            values: scores.len(),
            held: scores.iter().filter(|(part, _)| part.holds).count(),
            within_1_25x,
            within_2x,
            within_3x,
            sign_right: scores.iter().filter(|(_, score)| score.sign_right).count(),
            median_abs_ln: median(scores.iter().map(|(_, score)| score.error())),
            median_ratio: median(scores.iter().map(|(_, score)| score.ratio())),
            in_band: Tally::of(banded().map(|(published, band)| (band.low..=band.high).contains(&published))),
            median_band_ln: median(banded().map(|(_, band)| width(band))),
        }
    }
}

/// Draws the distribution of errors of headline numbers: one figure by paper and one by attribution. Values of the opposite
/// sign are at the right end.
pub fn figures(all: &[Reproduced]) -> Vec<Figure> {
    let finite = headline(all).filter_map(|(_, _, score)| score.ln_ratio);
    let end = finite.map(f64::abs).fold(libm::log(MARKED[1]), f64::max) + BEYOND;
    let figure = |name: &str, what: &str, groups: Vec<(String, Vec<f64>)>| Figure {
        name: format!("scoreboard-by-{name}"),
        title: format!("Predicted numbers by how far they are off, by {what}"),
        x_label: "|ln(ours/published)|; at the right end: no effect, or another sign".to_owned(),
        y_label: "percent of the numbers".to_owned(),
        shape: Shape::Lines(
            groups
                .into_iter()
                .map(|(name, errors)| distribution(name, errors, end))
                .collect(),
        ),
        marks: MARKED
            .iter()
            .map(|factor| (libm::log(*factor), format!("{factor}x")))
            .collect(),
    };
    let grouped = |by: &dyn Fn(&Claim) -> String| {
        let mut groups: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (claim, _, score) in headline(all) {
            groups.entry(by(claim)).or_default().push(score.error());
        }
        let every = headline(all).map(|(_, _, score)| score.error()).collect();
        let named = groups
            .into_iter()
            .map(|(name, errors)| (format!("{name} ({})", errors.len()), errors));
        named.chain([("all".to_owned(), every)]).collect::<Vec<_>>()
    };
    vec![
        figure("paper", "paper", grouped(&|claim| claim.source.clone())),
        figure(
            "attribution",
            "what they depend on first",
            grouped(&|claim| claim.attribution.name()),
        ),
    ]
}

/// Returns the steps of a cumulative distribution; infinite errors are drawn at `end`.
fn distribution(name: String, mut errors: Vec<f64>, end: f64) -> Line {
    errors.sort_by(f64::total_cmp);
    let all = errors.len() as f64;
    let mut points: Vec<(f64, Ranged)> = vec![(0.0, 0.0.into())];
    let mut share = 0.0;
    for (at, error) in errors.iter().enumerate() {
        points.push((error.min(end), share.into()));
        share = 100.0 * (at + 1) as f64 / all;
        points.push((error.min(end), share.into()));
    }
    points.push((end, share.into()));
    (name, points)
}

/// Bands of values, by claim and value. A band also has the value for which it was computed; if the value has changed since,
/// the band is ignored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bands(BTreeMap<String, BTreeMap<String, Banded>>);

/// A value's band, and the value for which it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Banded {
    ours: f64,
    low: f64,
    high: f64,
}

/// The committed bands.
const BANDS: &str = include_str!("../../../data/reproduction/bands.toml");

impl Bands {
    /// Returns the embedded bands.
    ///
    /// # Errors
    /// None, as a test parses the file.
    pub fn committed() -> Result<Bands, FileError> {
        Bands::parse("data/reproduction/bands.toml", BANDS)
    }

    /// Parses a file of bands.
    ///
    /// # Errors
    /// A parse error, with its line.
    pub fn parse(path: &str, text: &str) -> Result<Bands, FileError> {
        read_toml(path, text)
    }

    /// Merges two sets of bands; for a claim in both, those of `others` are used.
    #[must_use]
    pub fn with(mut self, others: Bands) -> Bands {
        self.0.extend(others.0);
        self
    }

    /// Computes the bands around decided values. The outcomes must include the claims' runs at the ends of their open
    /// inputs.
    ///
    /// # Errors
    /// A claim that cannot be decided, unchanged or at one of the ends, and why. A band without that end would be too
    /// narrow.
    pub fn of(all: &[Reproduced], outcomes: &Outcomes) -> Result<Bands> {
        let mut bands = BTreeMap::new();
        for Reproduced {
            claim,
            decision,
            reason,
            ..
        } in all.iter().filter(|one| !one.claim.open.is_empty())
        {
            let Some(experiment) = decide::of(claim) else {
                continue;
            };
            let at = |end: End| {
                let decision = experiment.decide(&outcomes.at(&end));
                let numbers = decision.map(|decision| decision.measured.numbers);
                numbers.map_err(|why| anyhow!("{} with {end}: {why}", claim.id))
            };
            let ends = ends(claim).map(at).collect::<Result<Vec<_>>>()?;
            let why = reason.as_deref().unwrap_or_default();
            let decision = decision.as_ref().ok_or_else(|| anyhow!("{}: {why}", claim.id))?;
            let banded = decision.measured.numbers.iter().map(|(name, ours)| {
                let others = ends.iter().filter_map(|numbers| numbers.get(name).copied());
                let (low, high) = others.fold((*ours, *ours), |(low, high), other| {
                    (low.min(other), high.max(other))
                });
                let ours = *ours;
                (name.clone(), Banded { ours, low, high })
            });
            bands.insert(claim.id.clone(), banded.collect());
        }
        Ok(Bands(bands))
    }

    /// Formats the bands as a file.
    ///
    /// # Errors
    /// None for results of [`Bands::of`].
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        let head = "# Bands of values over the inputs that the papers leave open, one input at a time (`open` in data/published/claims.toml).\n\
                    # Written by `homenode reproduce all --bands data/reproduction/bands.toml`.\n\n";
        Ok(format!("{head}{}", toml::to_string(self)?))
    }

    /// Attaches each band to its value, if the band was computed for the same value, up to rounding.
    pub fn join(&self, all: &mut [Reproduced]) {
        for one in all {
            let of_claim = self.0.get(&one.claim.id);
            for part in &mut one.judgement.parts {
                let band = of_claim.and_then(|values| values.get(&part.name));
                if let (Some(score), Some(band)) = (&mut part.score, band)
                    && (score.ours - band.ours).abs() <= 1e-9 * band.ours.abs()
                {
                    let Banded { low, high, .. } = *band;
                    score.band = Some(Band { low, high });
                }
            }
        }
    }
}

/// Returns the ends of a claim's open inputs; each end changes one input.
pub(crate) fn ends(claim: &Claim) -> impl Iterator<Item = End> {
    claim.open.iter().flat_map(Open::ends)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::claims::{self, Values};
    use crate::experiment::Decision;
    use crate::verdict::{Measured, judge};

    /// Returns every published claim with numbers, as if an experiment had measured these values.
    pub(crate) fn measured(ours: impl Fn(&Claim, &str, f64) -> f64) -> Vec<Reproduced> {
        let claims = claims::all().into_iter().filter(|claim| claim.value.is_some());
        let judged = claims.map(|claim| {
            let published = claim.value.iter().flat_map(Values::iter);
            let numbers = published.map(|(name, number)| (name.to_owned(), ours(&claim, name, number.get())));
            let measured = Measured {
                numbers: numbers.collect(),
                ..Measured::default()
            };
            Reproduced {
                judgement: judge(&claim, &measured, Kind::Predicted),
                decision: Some(Decision::default()),
                kind: Kind::Predicted,
                reason: None,
                claim,
            }
        });
        judged.collect()
    }

    #[test]
    fn whoever_predicts_no_effect_anywhere_has_nothing_in_the_headline() {
        let null = |claim: &Claim, name: &str, _| claim.null.get(name).copied().unwrap_or(0.0);
        let board = Scoreboard::of(&measured(null));
        assert!(board.headline.values > 40, "{board:?}");
        assert_eq!(
            (board.headline.counts(), board.headline.median_abs_ln),
            ([0; 5], None)
        );
        assert!(board.trivial > 0);
    }

    #[test]
    fn whoever_predicts_what_is_published_has_all_of_it() {
        let board = Scoreboard::of(&measured(|_, _, published| published));
        let values = board.headline.values;
        assert_eq!(
            (board.headline.counts(), board.headline.median_abs_ln),
            ([values; 5], Some(0.0))
        );
        assert_eq!(
            board.by_source.values().map(|group| group.values).sum::<usize>(),
            values
        );
        let groups = board.by_attribution.values();
        assert_eq!(groups.map(|group| group.values).sum::<usize>(), values);
    }

    proptest! {
        #[test]
        fn a_factor_counts_alike_above_and_below(factor in 1.0..6.0_f64) {
            let of = |by: f64| Scoreboard::of(&measured(|claim, name, published| {
                let null = claim.null.get(name).copied().unwrap_or(0.0);
                null + (published - null) * by
            })).headline;
            let (above, below) = (of(factor), of(1.0 / factor));
            let known = [above.within_1_25x, above.within_2x, above.within_3x];
            let expected = FACTORS.map(|most| if factor <= most { above.values } else { 0 });
            prop_assume!(FACTORS.iter().all(|most| (factor - most).abs() > 1e-6));
            prop_assert_eq!(known, expected);
            prop_assert_eq!([below.within_1_25x, below.within_2x, below.within_3x], expected);
            prop_assert!((above.median_abs_ln.unwrap() - below.median_abs_ln.unwrap()).abs() < 1e-9);
        }
    }

    #[test]
    fn kinds_other_than_predicted_are_outside() {
        let named = |id: &str| {
            let all = measured(|_, _, published| published);
            Scoreboard::of(
                &all.into_iter()
                    .filter(|one| one.claim.id == id)
                    .collect::<Vec<_>>(),
            )
        };
        // The first value rests on a calibration, and the second is predicted.
        assert_eq!(named("xpv.under-load-balancing").headline.values, 0);
        assert_eq!(named("policies.consolidated").headline.values, 3);
        assert_eq!(Scoreboard::of(&[]).headline, Group::default());
    }

    #[test]
    fn a_band_stays_only_beside_the_value_that_it_was_made_beside() {
        let text = "[\"tavo.npb\".cg]\nours = 4.0\nlow = 3.0\nhigh = 9.0\n";
        let bands: Bands = toml::from_str(text).unwrap();
        let band = |cg: f64| {
            let mut all = measured(|_, name, published| if name == "cg" { cg } else { published });
            bands.join(&mut all);
            let npb = all.iter().find(|one| one.claim.id == "tavo.npb").unwrap();
            let part = npb.judgement.parts.iter().find(|part| part.name == "cg").unwrap();
            part.score.unwrap().band
        };
        assert_eq!(band(4.0), Some(Band { low: 3.0, high: 9.0 }));
        assert_eq!(band(4.1), None);
        assert_eq!(toml::from_str::<Bands>(&bands.to_toml().unwrap()).unwrap(), bands);
        Bands::committed().unwrap();
    }

    #[test]
    fn open_inputs_are_at_most_three_with_ranges_around_what_was_chosen() {
        for claim in claims::all() {
            assert!(claim.open.len() <= 3, "{}", claim.id);
            for open in &claim.open {
                assert!(
                    0.0 < open.from && open.from <= 1.0 && 1.0 <= open.to,
                    "{}",
                    claim.id
                );
            }
            let names = |open: &Open| usize::from(open.input.is_some()) + usize::from(open.value.is_some());
            assert!(claim.open.iter().all(|open| names(open) == 1), "{}", claim.id);
            assert!(claim.open.iter().all(|open| open.from < open.to), "{}", claim.id);
        }
    }

    #[test]
    fn a_distribution_steps_up_to_all_with_other_signs_at_its_end() {
        let (_, points) = distribution("two of three".to_owned(), vec![2.0, f64::INFINITY, 1.5], 4.0);
        let third = 100.0 / 3.0;
        let points: Vec<(f64, f64)> = points.iter().map(|(x, y)| (*x, y.value)).collect();
        assert_eq!(
            points,
            [
                (0.0, 0.0),
                (1.5, 0.0),
                (1.5, third),
                (2.0, third),
                (2.0, 2.0 * third),
                (4.0, 2.0 * third),
                (4.0, 100.0),
                (4.0, 100.0)
            ]
        );
    }

    #[test]
    fn what_rests_on_profiles_of_its_own_paper_is_counted_apart() {
        let mut all = measured(|_, _, published| published);
        for part in all
            .iter_mut()
            .filter(|one| one.claim.source == "Policies")
            .flat_map(|one| &mut one.judgement.parts)
        {
            part.same_paper = true;
        }
        let board = Scoreboard::of(&all);
        assert_eq!(board.same_paper, board.by_source["Policies"]);
        assert_eq!(
            board.same_paper.values + board.without_same_paper.values,
            board.headline.values
        );
        assert!(board.without_same_paper.values > 0);
    }
}

//! Verdicts on claims. This is the only implementation of the rules at the head of `data/published/claims.toml`.
//!
//! # Rules
//!
//! - A number holds if it is within 25 percent of the published one or within 5 points, whichever is larger. Points are
//!   percentage points, so only the 25 percent apply to a number that is not a percentage.
//! - A count holds if it differs by at most 3, and is from half to double the published one. Counts are whole numbers in a
//!   claim whose unit is not a unit of measurement.
//! - An effect must be seen, however small it is. If a published number differs from no effect, ours holds only if it
//!   differs in the same direction, by a quarter to four times as much.
//! - An order holds if Kendall's tau between it and the published order is at least 0.7.
//! - A bound must hold exactly. A shape holds if it passes the test that the experiment names.
//! - An entry's own `tolerance` (percent of the published number) or `within_factor` replaces the first rule.
//! - A claim `holds` if all of its values hold, holds `partly` if more than half hold, and `misses` otherwise. Values that
//!   were inputs do not count. A value that was not measured does not hold.
//! - A number is *trivial* if its value without any effect is within the tolerance, so that a prediction of no effect gets
//!   it right.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::claims::{Claim, Kind, Number, Values};
use crate::vary::name;
use homenode_units::stats::kendall_tau_of_orders;

/// Tolerance as a share of the published number.
const NUMBER_TOLERANCE: f64 = 0.25;
/// Tolerance in percentage points.
const POINTS_TOLERANCE: f64 = 5.0;
/// Maximum difference between counts.
const COUNT_TOLERANCE: f64 = 3.0;
/// Maximum factor between counts.
const COUNT_FACTOR: f64 = 2.0;
/// Minimum of Kendall's tau between orders.
const TAU_LEAST: f64 = 0.7;
/// An effect counts as seen if it is within this factor of the published one.
const SEEN_FACTOR: f64 = 4.0;

/// Verdict on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All values of the claim hold.
    Holds,
    /// More than half of the values hold.
    Partly,
    /// At most half of the values hold.
    Misses,
    /// The claim has no experiment yet, or the experiment could not be made.
    Pending,
    /// No model here covers the claim.
    NotModelled,
}

impl Verdict {
    /// Returns the name used in tables and JSON.
    pub fn name(self) -> String {
        name(&self)
    }
}

/// An experiment's measurements, by the names that the claim uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Numbers: the claim's values and bounds.
    pub numbers: BTreeMap<String, f64>,
    /// Rankings, the highest first.
    pub orders: BTreeMap<String, Vec<String>>,
    /// Tests of shapes, and of numbers in separate published tables.
    pub shapes: Vec<Shape>,
    /// Names of numbers that were inputs.
    pub inputs: Vec<String>,
    /// For tests of single numbers in a published table: the published number and ours, by the test's name.
    pub tabled: BTreeMap<String, (f64, f64)>,
    /// For rankings and tests of published choices: the regret of following the published one, according to our
    /// measurements. It is the mean over all pairs, or relative to the best choice.
    pub regrets: BTreeMap<String, f64>,
}

/// The test of a shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// The subject of the test, in a few words; unique in the claim.
    pub name: String,
    /// The outcome, in words.
    pub ours: String,
    /// Whether the test passed.
    pub holds: bool,
}

/// A published value, and ours.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Part {
    /// Name of the value.
    pub name: String,
    /// The published value and the rule, in words.
    pub published: String,
    /// Our value; `-` if it was not measured.
    pub ours: String,
    /// Whether our value holds.
    pub holds: bool,
    /// Whether the value was an input, and therefore does not count.
    pub input: bool,
    /// How much of the value was put into the model.
    pub kind: Kind,
    /// Whether the value would hold if nothing had any effect.
    pub trivial: bool,
    /// Distance of a number from the published one; null for bounds, rankings and tests.
    pub score: Option<Score>,
    /// For a ranking: the regret of following the published one, as the mean over all pairs. For a choice: how much worse
    /// the published one is than the best.
    pub regret: Option<f64>,
    /// Whether the value rests on a profile fitted to other figures of the same paper.
    pub same_paper: bool,
}

/// A published number, and ours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Score {
    /// The published number.
    pub published: f64,
    /// Our number.
    pub ours: f64,
    /// The value that the number would have if nothing had any effect.
    pub null: f64,
    /// Natural logarithm of our effect over the published one; an effect is the distance from `null`. The logarithm is null
    /// if the effects have different signs, or one of them is zero.
    pub ln_ratio: Option<f64>,
    /// Whether our number is on the same side of `null` as the published one.
    pub sign_right: bool,
    /// Our value at the ends of the inputs that the publication leaves open; null if unknown or not requested.
    pub band: Option<Band>,
}

/// Minimum and maximum of a value if each open input, one at a time, is set to the ends of its range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Band {
    /// Minimum.
    pub low: f64,
    /// Maximum.
    pub high: f64,
}

impl Score {
    fn of(published: f64, ours: f64, null: f64) -> Score {
        let ratio = effect_ratio(published, ours, null);
        let side = |number: f64| (number > null, number < null);
        Score {
            published,
            ours,
            null,
            ln_ratio: (ratio > 0.0 && ratio.is_finite()).then(|| libm::log(ratio)),
            sign_right: side(ours) == side(published),
            band: None,
        }
    }

    /// Returns our effect over the published one; not finite if there is no published effect.
    pub fn ratio(&self) -> f64 {
        effect_ratio(self.published, self.ours, self.null)
    }

    /// Returns our effect divided by the published one, or the inverse if that is larger. Infinite if the effects differ in sign
    /// or one of them is zero.
    pub fn factor(&self) -> f64 {
        libm::exp(self.error())
    }

    /// Returns the error of our number: the logarithm of [`Score::factor`].
    pub fn error(&self) -> f64 {
        self.ln_ratio.map_or(f64::INFINITY, f64::abs)
    }
}

/// All values of a claim, and the verdict on them.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Judgement of each value.
    pub parts: Vec<Part>,
}

/// Formats a number with at most three significant digits, for people.
pub fn show(number: f64) -> String {
    let number = number + 0.0; // zero has no sign
    let digits = match number.abs() {
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        n if n >= 1.0 || n == 0.0 => 2,
        _ => 3,
    };
    // A number that rounds to zero has no sign.
    let text = format!("{number:.digits$}").replace("-0.000", "0");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Compares measured values with published ones. `kind` applies to values for which the claim states no kind.
pub fn judge(claim: &Claim, measured: &Measured, kind: Kind) -> Judgement {
    let mut parts = numbers(claim, measured);
    parts.extend(bounds(claim, measured));
    parts.extend(orders(claim, measured));
    parts.extend(measured.shapes.iter().map(|shape| tested(claim, measured, shape)));
    for part in &mut parts {
        part.input = measured.inputs.contains(&part.name);
        part.kind = kind_of(claim, part, kind);
    }
    let counted = parts.iter().filter(|part| !part.input);
    let (held, all) = counted.fold((0, 0), |(held, all), part| {
        (held + usize::from(part.holds), all + 1)
    });
    let verdict = match (held, all) {
        (held, all) if held == all && all > 0 => Verdict::Holds,
        (held, all) if 2 * held > all => Verdict::Partly,
        _ => Verdict::Misses,
    };
    Judgement { verdict, parts }
}

/// Returns the judgement of a claim's published number, given our value.
pub fn number(claim: &Claim, name: &str, ours: f64) -> Option<Part> {
    let measured = Measured {
        numbers: [(name.to_owned(), ours)].into(),
        ..Measured::default()
    };
    numbers(claim, &measured)
        .into_iter()
        .find(|part| part.name == name && part.score.is_some())
}

/// Returns the name of a published number, bound or ranking that the experiment did not measure, if any.
pub fn unmeasured(claim: &Claim, measured: &Measured) -> Option<String> {
    let stated = [&claim.value, &claim.at_least, &claim.at_most];
    let numbers = stated.into_iter().flatten().flat_map(Values::iter);
    let mut numbers = numbers
        .map(|(name, _)| name)
        .filter(|name| !measured.numbers.contains_key(*name));
    let mut orders = claim
        .order
        .keys()
        .filter(|name| !measured.orders.contains_key(*name));
    numbers
        .next()
        .map(str::to_owned)
        .or_else(|| orders.next().cloned())
}

/// Returns a name, for which the claim states something, that is not one of the claim's values or tests.
pub fn unknown_name<'a>(claim: &'a Claim, judgement: &Judgement) -> Option<&'a str> {
    let stated = claim.kinds.iter().flat_map(|stated| &stated.of);
    let passes = claim.null_passes.iter().filter(|name| *name != "*");
    let mut named = stated.chain(passes).chain(claim.null.keys());
    let is_known = |name: &&String| judgement.parts.iter().any(|part| part.name == **name);
    named.find(|name| !is_known(name)).map(String::as_str)
}

fn kind_of(claim: &Claim, part: &Part, kind: Kind) -> Kind {
    let is_of = |of: &[String]| of.is_empty() || of.contains(&part.name);
    let stated = claim.kinds.iter().find(|stated| is_of(&stated.of));
    match stated {
        _ if part.input => Kind::ByConstruction,
        Some(stated) => stated.is,
        None => kind,
    }
}

fn part(name: &str, published: String, ours: Option<f64>, holds: bool) -> Part {
    Part {
        name: name.to_owned(),
        published,
        ours: ours.map_or("-".to_owned(), show),
        holds,
        input: false,
        kind: Kind::Predicted,
        trivial: false,
        score: None,
        regret: None,
        same_paper: false,
    }
}

fn numbers(claim: &Claim, measured: &Measured) -> Vec<Part> {
    let values = claim.value.iter().flat_map(Values::iter);
    let judged = values.map(|(name, published)| {
        let ours = measured.numbers.get(name).copied();
        let null = claim.null.get(name).copied().unwrap_or(0.0);
        let tolerates = |ours: f64| tolerated(claim, name, published, ours);
        let published = published.get();
        let holds = ours.is_some_and(|ours| tolerates(ours) && is_seen(published, ours, null));
        Part {
            trivial: tolerates(null),
            // A value that is itself a correlation is not the size of an effect, so it has no score.
            score: ours
                .filter(|_| !name.starts_with("tau_"))
                .map(|ours| Score::of(published, ours, null)),
            ..part(name, show(published), ours, holds)
        }
    });
    judged.collect()
}

fn bounds(claim: &Claim, measured: &Measured) -> Vec<Part> {
    let judged = |bounds: &Option<Values>, word: &str, within: fn(f64, f64) -> bool| {
        let bounds = bounds.iter().flat_map(Values::iter);
        let judged = bounds.map(|(name, bound)| {
            let ours = measured.numbers.get(name).copied();
            let null = claim.null.get(name).copied().unwrap_or(0.0);
            let holds = ours.is_some_and(|ours| within(ours, bound.get()));
            Part {
                trivial: within(null, bound.get()),
                ..part(name, format!("{word} {}", show(bound.get())), ours, holds)
            }
        });
        judged.collect::<Vec<_>>()
    };
    let least = judged(&claim.at_least, "at least", |ours, bound| ours >= bound);
    let most = judged(&claim.at_most, "at most", |ours, bound| ours <= bound);
    least.into_iter().chain(most).collect()
}

fn orders(claim: &Claim, measured: &Measured) -> Vec<Part> {
    let judged = claim.order.iter().map(|(name, published)| {
        let ours = measured.orders.get(name);
        let tau = ours.and_then(|ours| kendall_tau_of_orders(ours, published));
        let holds = tau.is_some_and(|tau| tau >= TAU_LEAST);
        Part {
            regret: measured.regrets.get(name).copied(),
            ..part(
                &format!("order {name}"),
                format!("tau at least {TAU_LEAST}"),
                tau,
                holds,
            )
        }
    });
    judged.collect()
}

fn tested(claim: &Claim, measured: &Measured, shape: &Shape) -> Part {
    let tabled = measured.tabled.get(&shape.name);
    Part {
        ours: shape.ours.clone(),
        trivial: match tabled {
            Some((published, _)) => percentage_holds(*published, 0.0),
            None => claim
                .null_passes
                .iter()
                .any(|name| name == "*" || *name == shape.name),
        },
        holds: shape.holds && tabled.is_none_or(|(published, ours)| is_seen(*published, *ours, 0.0)),
        score: tabled.map(|(published, ours)| Score::of(*published, *ours, 0.0)),
        regret: measured.regrets.get(&shape.name).copied(),
        ..part(&shape.name, "shape".to_owned(), None, shape.holds)
    }
}

/// Returns our effect over the published one; an effect is the distance from `null`.
fn effect_ratio(published: f64, ours: f64, null: f64) -> f64 {
    (ours - null) / (published - null)
}

/// Returns true if our number shows the published effect, or if there is no published effect.
fn is_seen(published: f64, ours: f64, null: f64) -> bool {
    published == null || (1.0 / SEEN_FACTOR..=SEEN_FACTOR).contains(&effect_ratio(published, ours, null))
}

/// Returns true if our percentage holds, by the rule for percentages, against one of a published table.
pub fn percentage_holds(published: f64, ours: f64) -> bool {
    within(
        published,
        ours,
        (NUMBER_TOLERANCE * published.abs()).max(POINTS_TOLERANCE),
    )
}

fn tolerated(claim: &Claim, name: &str, published: Number, ours: f64) -> bool {
    let unit = claim.unit.as_deref().unwrap_or_default();
    let is_count =
        matches!(published, Number::Whole(_)) && (unit.is_empty() || unit.contains("applications"));
    let published = published.get();
    let within_factor = |factor: f64| (1.0 / factor..=factor).contains(&(ours / published));
    if let Some(percent) = claim.tolerance {
        return within(published, ours, published.abs() * percent / 100.0);
    }
    if let Some(factor) = claim.within_factor {
        return within_factor(factor);
    }
    if is_count {
        return within(published, ours, COUNT_TOLERANCE) && (published == 0.0 || within_factor(COUNT_FACTOR));
    }
    if unit.starts_with("percent") || name.ends_with("_pct") {
        return percentage_holds(published, ours);
    }
    within(published, ours, NUMBER_TOLERANCE * published.abs())
}

/// Returns true if our number is within the tolerance; a NaN never is.
fn within(published: f64, ours: f64, tolerance: f64) -> bool {
    (ours - published).abs() <= tolerance
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::claims::parse;

    fn claim(text: &str) -> Claim {
        let head = "[[claim]]\nid = \"a.b\"\nsource = \"X\"\nat = \"here\"\nsays = \"it is so\"\ninputs = []\n\
                    attribution = \"machine\"\n";
        parse("test", &format!("{head}{text}")).unwrap().remove(0)
    }

    fn measured(numbers: &[(&str, f64)]) -> Measured {
        Measured {
            numbers: numbers
                .iter()
                .map(|(name, number)| ((*name).to_owned(), *number))
                .collect(),
            ..Measured::default()
        }
    }

    fn verdict(text: &str, numbers: &[(&str, f64)]) -> Verdict {
        judge(&claim(text), &measured(numbers), Kind::Predicted).verdict
    }

    #[test]
    fn more_than_half_of_the_values_is_partly() {
        let text = "unit = \"cycles\"\nvalue = { a = 100.0, b = 100.0, c = 100.0, d = 100.0 }";
        let with = |held: usize| {
            let of = |at: usize| if at < held { 100.0 } else { 0.0 };
            verdict(text, &[("a", of(0)), ("b", of(1)), ("c", of(2)), ("d", of(3))])
        };
        assert_eq!(with(4), Verdict::Holds);
        assert_eq!(with(3), Verdict::Partly);
        assert_eq!(with(2), Verdict::Misses);
        assert_eq!(with(0), Verdict::Misses);
    }

    #[test]
    fn inputs_count_for_nothing() {
        let text = "unit = \"cycles\"\nvalue = { a = 100, b = 100, c = 100 }";
        let mut measured = measured(&[("a", 100.0), ("b", 100.0), ("c", 1.0)]);
        assert_eq!(
            judge(&claim(text), &measured, Kind::Predicted).verdict,
            Verdict::Partly
        );
        measured.inputs = vec!["a".into(), "b".into()];
        assert_eq!(
            judge(&claim(text), &measured, Kind::Predicted).verdict,
            Verdict::Misses
        );
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        assert_eq!(
            verdict("value = { a = 1.0, b = 1.0, c = 1.0 }", &[("a", 1.0), ("b", 1.0)]),
            Verdict::Partly
        );
        assert_eq!(verdict("", &[]), Verdict::Misses);
        assert_eq!(verdict("value = 1.0", &[("value", f64::NAN)]), Verdict::Misses);
    }

    #[test]
    fn orders_hold_from_tau_0_7() {
        let text = "order = { rank = [\"a\", \"b\", \"c\", \"d\", \"e\"] }";
        let with = |order: &[&str]| {
            let order = order.iter().map(|name| (*name).to_owned()).collect();
            let orders = BTreeMap::from([("rank".to_owned(), order)]);
            judge(
                &claim(text),
                &Measured {
                    orders,
                    ..Measured::default()
                },
                Kind::Predicted,
            )
            .verdict
        };
        assert_eq!(with(&["b", "a", "c", "d", "e"]), Verdict::Holds); // 0.8
        assert_eq!(with(&["b", "a", "d", "c", "e"]), Verdict::Misses); // 0.6
        assert_eq!(with(&["a", "b", "c", "d"]), Verdict::Misses);
    }

    #[test]
    fn an_effect_that_nobody_predicts_is_trivial_and_holds_only_if_seen() {
        let text = "unit = \"percent\"\nvalue = { a = 2.43, b = 22.6, c = 3.0, d = 0.0 }\nnull = { c = 1.0 }";
        let judged = |numbers: &[(&str, f64)]| judge(&claim(text), &measured(numbers), Kind::Predicted).parts;
        let parts = judged(&[("a", 0.0), ("b", 20.0), ("c", 2.5), ("d", 0.0)]);
        let trivial: Vec<bool> = parts.iter().map(|part| part.trivial).collect();
        assert_eq!(trivial, [true, false, true, true]);
        assert!(!parts[0].holds, "nothing is not 2.43 percent");
        assert!(parts[1].holds && parts[2].holds && parts[3].holds);
        let of = |at: usize| parts[at].score.unwrap();
        assert_eq!((of(0).ln_ratio, of(0).sign_right), (None, false));
        assert_eq!((of(2).null, of(2).sign_right), (1.0, true));
        assert!((of(1).factor() - 1.13).abs() < 1e-9);
        assert_eq!(of(0).factor(), f64::INFINITY);
        // The number is on the wrong side of no effect.
        assert!(!judged(&[("c", 0.9)])[2].holds);
    }

    #[test]
    fn kinds_are_those_that_the_claim_states() {
        let stated = "kind = [{ of = [\"a\"], is = \"contradictory\", because = \"so\" }]";
        let text = format!("value = {{ a = 1.0, b = 1.0 }}\n{stated}");
        let mut measured = measured(&[("a", 1.0), ("b", 1.0)]);
        let kinds = |measured: &Measured| {
            let judged = judge(&claim(&text), measured, Kind::Calibrated);
            judged.parts.iter().map(|part| part.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&measured), [Kind::Contradictory, Kind::Calibrated]);
        measured.inputs = vec!["a".to_owned()];
        assert_eq!(kinds(&measured), [Kind::ByConstruction, Kind::Calibrated]);
    }

    #[test]
    fn a_factor_takes_the_place_of_points() {
        let text = "unit = \"percent\"\nvalue = 0.95\nwithin_factor = 2.0";
        let with = |ours| verdict(text, &[("value", ours)]);
        assert_eq!(
            [with(1.8), with(2.0), with(0.4)],
            [Verdict::Holds, Verdict::Misses, Verdict::Misses]
        );
    }

    #[test]
    fn numbers_show_at_most_three_significant_digits() {
        let shown = [0.0, 0.0214, 1.2, 22.64, 697.4, -3.0, -0.0001, -0.0].map(show);
        assert_eq!(shown, ["0", "0.021", "1.2", "22.6", "697", "-3", "0", "0"]);
    }

    proptest! {
        #[test]
        fn a_percentage_holds_within_a_quarter_or_5_points_if_seen(published in -300.0..300.0_f64, off in -200.0..200.0_f64) {
            let held = verdict(&format!("unit = \"percent slower\"\nvalue = {published:.6}"), &[("value", published + off)]);
            let tolerance = (published.abs() / 4.0).max(5.0);
            let seen = 1.0 + off / published;
            prop_assume!((off.abs() - tolerance).abs() > 1e-4 && (seen - 0.25).abs() > 1e-4 && (seen - 4.0).abs() > 1e-4);
            prop_assert_eq!(held == Verdict::Holds, off.abs() < tolerance && seen > 0.25 && seen < 4.0);
        }

        #[test]
        fn a_number_without_percent_holds_within_a_quarter_only(published in 0.1..300.0_f64, off in -200.0..200.0_f64) {
            let held = verdict(&format!("unit = \"cycles\"\nvalue = {published:.6}"), &[("value", published + off)]);
            prop_assume!((off.abs() - published / 4.0).abs() > 1e-4);
            prop_assert_eq!(held == Verdict::Holds, off.abs() < published / 4.0);
        }

        #[test]
        fn a_count_holds_within_3_and_within_a_factor_of_two(published in 0..40_i64, ours in 0..40_i64) {
            let held = verdict(&format!("unit = \"applications\"\nvalue = {published}"), &[("value", ours as f64)]);
            let near = (published - ours).abs() <= 3;
            let factor = published == 0 || (2 * ours >= published && ours <= 2 * published);
            prop_assert_eq!(held == Verdict::Holds, near && factor);
        }

        #[test]
        fn bounds_hold_as_they_stand(bound in -50.0..50.0_f64, ours in -50.0..50.0_f64) {
            let most = verdict(&format!("at_most = {{ x = {bound:?} }}"), &[("x", ours)]);
            let least = verdict(&format!("at_least = {{ x = {bound:?} }}"), &[("x", ours)]);
            prop_assert_eq!(most == Verdict::Holds, ours <= bound);
            prop_assert_eq!(least == Verdict::Holds, ours >= bound);
        }

        #[test]
        fn an_own_tolerance_takes_the_place_of_the_general_one(percent in 1.0..70.0_f64, off in -1.0..1.0_f64) {
            let text = format!("unit = \"percent\"\nvalue = 10.0\ntolerance = {percent:?}");
            prop_assume!((off.abs() * 100.0 - percent).abs() > 1e-6);
            let held = verdict(&text, &[("value", 10.0 * (1.0 + off))]);
            prop_assert_eq!(held == Verdict::Holds, off.abs() * 100.0 < percent);
        }
    }
}

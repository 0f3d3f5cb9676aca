//! Verdicts: the rules at the head of `data/published/claims.toml`, in one place.
//!
//! # Rules
//!
//! - A number holds within 25 percent of the published one or 5 points, whichever is larger. Points are percentage points:
//!   a number whose unit is no percentage has only the 25 percent.
//! - A count holds within 3. Counts are written as whole numbers, in a claim whose unit does not measure.
//! - An order holds if Kendall's tau to the published one is at least 0.7.
//! - A bound holds as it stands, a shape by the test that the experiment names.
//! - An entry's own `tolerance` (percent of the published number) takes the place of the first rule.
//! - A claim `holds` if all of its values do, holds `partly` if more than half do, and `misses` otherwise. Values that were
//!   inputs count for nothing; a value that was not measured does not hold.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::claims::{Claim, Number};
use crate::stats::kendall_tau_of_orders;

/// Share of the published number that is tolerated.
const NUMBER_TOLERANCE: f64 = 0.25;
/// Percentage points that are.
const POINTS_TOLERANCE: f64 = 5.0;
/// Difference of counts that is.
const COUNT_TOLERANCE: f64 = 3.0;
/// Least correlation of orders.
const TAU_LEAST: f64 = 0.7;

/// What came of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All of its values hold.
    Holds,
    /// More than half of them do.
    Partly,
    /// Not even that.
    Misses,
    /// There is no experiment yet, or it could not be made.
    Pending,
    /// Outside of any model here.
    NotModelled,
}

impl Verdict {
    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Holds => "holds",
            Verdict::Partly => "partly",
            Verdict::Misses => "misses",
            Verdict::Pending => "pending",
            Verdict::NotModelled => "not-modelled",
        }
    }
}

/// How much of a result was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Nothing of it.
    Predicted,
    /// Part of it, or a profile was calibrated to an input that the claim lists.
    Calibrated,
    /// The model cannot disagree.
    ByConstruction,
}

impl Kind {
    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Predicted => "predicted",
            Kind::Calibrated => "calibrated",
            Kind::ByConstruction => "by-construction",
        }
    }
}

/// What an experiment measured, by the names that the claim uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Numbers: the claim's values and bounds.
    pub numbers: BTreeMap<String, f64>,
    /// Rankings, first is highest.
    pub orders: BTreeMap<String, Vec<String>>,
    /// Tests of shapes, and numbers published in a table of their own.
    pub shapes: Vec<Shape>,
    /// Names of numbers that were inputs.
    pub inputs: Vec<String>,
}

/// The test of a shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// What is tested, in a few words; unique in the claim.
    pub name: String,
    /// What came out, in words.
    pub ours: String,
    /// Whether the test was passed.
    pub holds: bool,
}

/// One published value beside ours.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Part {
    /// Which.
    pub name: String,
    /// Published, with the rule, in words.
    pub published: String,
    /// Ours; `-` where it was not measured.
    pub ours: String,
    /// Whether it holds.
    pub holds: bool,
    /// Whether it was an input, and so does not count.
    pub input: bool,
}

/// All values of a claim, and what they add up to.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Value by value.
    pub parts: Vec<Part>,
}

/// A number in at most three significant digits, for people.
pub fn show(number: f64) -> String {
    let number = number + 0.0; // zero has no sign
    let digits = match number.abs() {
        n if n >= 100.0 => 0,
        n if n >= 10.0 => 1,
        n if n >= 1.0 || n == 0.0 => 2,
        _ => 3,
    };
    // What rounds to nothing has no sign.
    let text = format!("{number:.digits$}").replace("-0.000", "0");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Compares what was measured with what was published.
pub fn judge(claim: &Claim, measured: &Measured) -> Judgement {
    let mut parts = Vec::new();
    let number = |name: &str| measured.numbers.get(name).copied();
    let mut push = |name: &str, published: String, ours: Option<f64>, holds: bool| {
        parts.push(Part {
            name: name.to_owned(),
            published,
            ours: ours.map_or("-".to_owned(), show),
            holds,
            input: measured.inputs.iter().any(|input| input == name),
        });
    };
    for (name, published) in claim.value.iter().flat_map(crate::claims::Values::iter) {
        let ours = number(name);
        let holds = ours.is_some_and(|ours| number_holds(claim, name, published, ours));
        push(name, show(published.get()), ours, holds);
    }
    for (name, least) in claim.at_least.iter().flat_map(crate::claims::Values::iter) {
        let ours = number(name);
        let holds = ours.is_some_and(|ours| ours >= least.get());
        push(name, format!("at least {}", show(least.get())), ours, holds);
    }
    for (name, most) in claim.at_most.iter().flat_map(crate::claims::Values::iter) {
        let ours = number(name);
        let holds = ours.is_some_and(|ours| ours <= most.get());
        push(name, format!("at most {}", show(most.get())), ours, holds);
    }
    for (name, published) in &claim.order {
        let tau = measured
            .orders
            .get(name)
            .and_then(|ours| kendall_tau_of_orders(ours, published));
        let holds = tau.is_some_and(|tau| tau >= TAU_LEAST);
        push(
            &format!("order {name}"),
            format!("tau at least {TAU_LEAST}"),
            tau,
            holds,
        );
    }
    parts.extend(measured.shapes.iter().map(|shape| Part {
        name: shape.name.clone(),
        published: "shape".to_owned(),
        ours: shape.ours.clone(),
        holds: shape.holds,
        input: false,
    }));
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

/// Whether a number published in a table beside the claims holds: a percentage, by the rule for those.
pub fn percentage_holds(published: f64, ours: f64) -> bool {
    within(
        published,
        ours,
        (NUMBER_TOLERANCE * published.abs()).max(POINTS_TOLERANCE),
    )
}

fn number_holds(claim: &Claim, name: &str, published: Number, ours: f64) -> bool {
    let unit = claim.unit.as_deref().unwrap_or_default();
    let is_count =
        matches!(published, Number::Whole(_)) && (unit.is_empty() || unit.contains("applications"));
    let published = published.get();
    if let Some(percent) = claim.tolerance {
        return within(published, ours, published.abs() * percent / 100.0);
    }
    if is_count {
        return within(published, ours, COUNT_TOLERANCE);
    }
    if unit.starts_with("percent") || name.ends_with("_pct") {
        return percentage_holds(published, ours);
    }
    within(published, ours, NUMBER_TOLERANCE * published.abs())
}

/// Written so that what is not a number never holds.
fn within(published: f64, ours: f64, tolerance: f64) -> bool {
    (ours - published).abs() <= tolerance
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::claims::parse;

    fn claim(text: &str) -> Claim {
        let head =
            "[[claim]]\nid = \"a.b\"\nsource = \"X\"\nat = \"here\"\nsays = \"it is so\"\ninputs = []\n";
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
        judge(&claim(text), &measured(numbers)).verdict
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
        assert_eq!(judge(&claim(text), &measured).verdict, Verdict::Partly);
        measured.inputs = vec!["a".into(), "b".into()];
        assert_eq!(judge(&claim(text), &measured).verdict, Verdict::Misses);
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
            )
            .verdict
        };
        assert_eq!(with(&["b", "a", "c", "d", "e"]), Verdict::Holds); // 0.8
        assert_eq!(with(&["b", "a", "d", "c", "e"]), Verdict::Misses); // 0.6
        assert_eq!(with(&["a", "b", "c", "d"]), Verdict::Misses);
    }

    #[test]
    fn numbers_show_at_most_three_significant_digits() {
        let shown = [0.0, 0.0214, 1.2, 22.64, 697.4, -3.0, -0.0001, -0.0].map(show);
        assert_eq!(shown, ["0", "0.021", "1.2", "22.6", "697", "-3", "0", "0"]);
    }

    proptest! {
        #[test]
        fn a_percentage_holds_within_a_quarter_or_5_points(published in -300.0..300.0_f64, off in -200.0..200.0_f64) {
            let held = verdict(&format!("unit = \"percent slower\"\nvalue = {published:.6}"), &[("value", published + off)]);
            let tolerance = (published.abs() / 4.0).max(5.0);
            prop_assume!((off.abs() - tolerance).abs() > 1e-4);
            prop_assert_eq!(held == Verdict::Holds, off.abs() < tolerance);
        }

        #[test]
        fn a_number_without_percent_holds_within_a_quarter_only(published in 0.1..300.0_f64, off in -200.0..200.0_f64) {
            let held = verdict(&format!("unit = \"cycles\"\nvalue = {published:.6}"), &[("value", published + off)]);
            prop_assume!((off.abs() - published / 4.0).abs() > 1e-4);
            prop_assert_eq!(held == Verdict::Holds, off.abs() < published / 4.0);
        }

        #[test]
        fn a_count_holds_within_3(published in 0..40_i64, ours in 0..40_i64) {
            let held = verdict(&format!("unit = \"applications\"\nvalue = {published}"), &[("value", ours as f64)]);
            prop_assert_eq!(held == Verdict::Holds, (published - ours).abs() <= 3);
        }

        #[test]
        fn bounds_hold_as_they_stand(bound in -50.0..50.0_f64, ours in -50.0..50.0_f64) {
            let most = verdict(&format!("at_most = {{ x = {bound:?} }}"), &[("x", ours)]);
            let least = verdict(&format!("at_least = {{ x = {bound:?} }}"), &[("x", ours)]);
            prop_assert_eq!(most == Verdict::Holds, ours <= bound);
            prop_assert_eq!(least == Verdict::Holds, ours >= bound);
        }

        #[test]
        fn an_own_tolerance_takes_the_place_of_the_general_one(percent in 1.0..90.0_f64, off in -1.0..1.0_f64) {
            let text = format!("unit = \"percent\"\nvalue = 10.0\ntolerance = {percent:?}");
            prop_assume!((off.abs() * 100.0 - percent).abs() > 1e-6);
            let held = verdict(&text, &[("value", 10.0 * (1.0 + off))]);
            prop_assert_eq!(held == Verdict::Holds, off.abs() * 100.0 < percent);
        }
    }
}

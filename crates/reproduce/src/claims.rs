//! The claims. Published ones are in `data/published/claims.toml`, and Homenode's own in `data/own/claims.toml`. Both have
//! the same form, and are judged by the same rules.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};
use homenode_machine_files::file::{FileError, read_toml};
use homenode_units::Candidates;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::vary::{Open, name};

/// The published claims and the tables to which they refer, as committed.
pub const CLAIMS: &str = include_str!("../../../data/published/claims.toml");
/// Homenode's own claims.
pub const OWN_CLAIMS: &str = include_str!("../../../data/own/claims.toml");
/// The `source` of Homenode's own claims.
pub const OWN: &str = "own";
/// Table 1 of \[Policies\].
pub const TABLE_1: &str = include_str!("../../../data/published/numa-policies-table1.csv");
/// Table 4 of \[Policies\].
pub const TABLE_4: &str = include_str!("../../../data/published/numa-policies-table4.csv");

/// A measurable claim.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Stable name: family, dot, rest.
    pub id: String,
    /// The paper that makes the claim, by its key in `docs/SOURCES.md`, or [`OWN`].
    pub source: String,
    /// Figure, table or section of the paper.
    pub at: String,
    /// The claim in words; for a shape, also the test.
    pub says: String,
    /// Published numbers.
    #[serde(default)]
    pub value: Option<Values>,
    /// Lower bounds.
    #[serde(default)]
    pub at_least: Option<Values>,
    /// Upper bounds.
    #[serde(default)]
    pub at_most: Option<Values>,
    /// Published rankings, the highest first.
    #[serde(default)]
    pub order: BTreeMap<String, Vec<String>>,
    /// Unit of the numbers.
    #[serde(default)]
    pub unit: Option<String>,
    /// Figures to which a model may be calibrated beforehand.
    pub inputs: Vec<String>,
    /// The claim's own tolerance, in percent of the published number.
    #[serde(default)]
    pub tolerance: Option<f64>,
    /// The claim's own tolerance as a factor, at least 1: our number may be this many times larger or smaller. Used for
    /// effects smaller than five points.
    #[serde(default)]
    pub within_factor: Option<f64>,
    /// The value that each number would have if nothing had any effect, by name; 0 by default.
    #[serde(default)]
    pub null: BTreeMap<String, f64>,
    /// Names of the shape's tests that would pass if nothing had any effect.
    #[serde(default)]
    pub null_passes: Vec<String>,
    /// Where to look first for the cause of a difference.
    pub attribution: Attribution,
    /// Values whose kind is not the one that the claim's inputs imply.
    #[serde(default, rename = "kind")]
    pub kinds: Vec<StatedKind>,
    /// Inputs that the publication leaves open, at most three, with their possible range.
    #[serde(default)]
    pub open: Vec<Open>,
}

/// The kind of some values, and the reason.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatedKind {
    /// Names of values and tests; if empty, the kind applies to all of the claim.
    #[serde(default)]
    pub of: Vec<String>,
    /// The kind of these values.
    pub is: Kind,
    /// The reason.
    pub because: String,
}

/// How much of a result was put into the model. A result into which less was put is worth more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Nothing was put in.
    Predicted,
    /// A part was put in, or a profile was calibrated to an input that the claim lists.
    Calibrated,
    /// Set-up, test or constant was changed after the result had been seen.
    ChosenAfterARun,
    /// The result was put in, so the model cannot disagree.
    ByConstruction,
    /// No model here can test it.
    Untestable,
    /// The publication contradicts itself.
    Contradictory,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 6] = [
        Kind::Predicted,
        Kind::Calibrated,
        Kind::ChosenAfterARun,
        Kind::ByConstruction,
        Kind::Untestable,
        Kind::Contradictory,
    ];

    /// Returns the name used in tables and JSON.
    pub fn name(self) -> String {
        name(&self)
    }
}

/// What a value depends on most: where to look first for the cause of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Attribution {
    /// The machine's constants.
    Machine,
    /// The behaviour of programs.
    Profile,
    /// The behaviour of hypervisors, policies and trackers.
    Mechanism,
}

impl Attribution {
    /// Returns the name used in tables and JSON.
    pub fn name(self) -> String {
        name(&self)
    }
}

/// Two statements in the papers that cannot both be right.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contradiction {
    /// The paper.
    pub source: String,
    /// Where the two statements are, and what each says.
    pub says: String,
    /// How the contradiction is handled here.
    pub taken: String,
}

/// One number without a name, or several with names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Values {
    /// One number, whose name is [`ONLY`].
    One(Number),
    /// Numbers by name.
    Named(BTreeMap<String, Number>),
}

/// Name of the only number of a claim.
pub const ONLY: &str = "value";

/// A published number. A whole number in the file is a count, unless the claim's unit is a unit of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Number {
    /// Written without a decimal point.
    Whole(i64),
    /// Written with a decimal point.
    Real(f64),
}

impl Number {
    /// Returns the number.
    pub fn get(self) -> f64 {
        match self {
            Number::Whole(number) => number as f64,
            Number::Real(number) => number,
        }
    }
}

impl Values {
    /// Returns names and numbers.
    pub fn iter(&self) -> Box<dyn Iterator<Item = (&str, Number)> + '_> {
        match self {
            Values::One(number) => Box::new(std::iter::once((ONLY, *number))),
            Values::Named(numbers) => Box::new(numbers.iter().map(|(name, number)| (name.as_str(), *number))),
        }
    }
}

impl Claim {
    /// Returns true if this claim is one of Homenode's own.
    pub fn is_own(&self) -> bool {
        self.source == OWN
    }

    /// Returns the number by which the claim's source was known up to version 0.1.0.
    pub fn seed(&self) -> &str {
        match self.source.as_str() {
            "Kyoto" | "XPV" => "000",
            "Flip" => "001",
            "TAVO" => "002",
            "PRL" => "003",
            "Policies" => "004",
            other => other,
        }
    }

    /// Returns the part of the id before the dot.
    pub fn family(&self) -> &str {
        self.id.split_once('.').map_or(&self.id, |(family, _)| family)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    claim: Vec<Claim>,
    #[serde(default)]
    contradiction: Vec<Contradiction>,
}

/// Parses a file of claims.
///
/// # Errors
/// A parse error, with its line.
pub fn parse(path: &str, text: &str) -> Result<Vec<Claim>, FileError> {
    Ok(read_toml::<File>(path, text)?.claim)
}

/// Returns all claims in the order of the files, Homenode's own last.
pub fn all() -> Vec<Claim> {
    // A test parses both files.
    let file = |path, text| parse(path, text).expect("embedded claims");
    let published = file("data/published/claims.toml", CLAIMS);
    let own = file("data/own/claims.toml", OWN_CLAIMS);
    published.into_iter().chain(own).collect()
}

/// Returns the contradictions within the papers.
pub fn contradictions() -> Vec<Contradiction> {
    // A test parses the file.
    let file: File = read_toml("data/published/claims.toml", CLAIMS).expect("embedded claims");
    file.contradiction
}

/// Returns the claim with this id.
pub fn named(id: &str) -> Option<Claim> {
    all().into_iter().find(|claim| claim.id == id)
}

/// Returns a published number of a claim, for figures that show it next to our number.
pub fn published(id: &str, name: &str) -> Option<f64> {
    let claim = named(id)?;
    let mut numbers = claim.value.iter().flat_map(Values::iter);
    numbers
        .find(|(known, _)| *known == name)
        .map(|(_, number)| number.get())
}

/// Returns the claims that match any of the words, in the file's order. A word is `all`, a paper, a family or an id, in
/// upper or lower case. Without words, all claims are returned.
///
/// # Errors
/// The first word that matches no claim, with the closest match.
pub fn select(claims: Vec<Claim>, words: &[String]) -> Result<Vec<Claim>> {
    let is = |claim: &Claim, word: &str| {
        let names = [claim.source.as_str(), claim.family(), &claim.id];
        word == "all" || names.iter().any(|name| name.eq_ignore_ascii_case(word))
    };
    for word in words {
        if !claims.iter().any(|claim| is(claim, word)) {
            let names = claims
                .iter()
                .flat_map(|claim| [&*claim.source, claim.family(), &claim.id]);
            let names: BTreeSet<String> = names.chain(["all"]).map(str::to_owned).collect();
            let candidates = Candidates::of(word, names);
            ensure!(!candidates.near, "no claim is named `{word}`{candidates}");
            let nearest: Vec<&str> = candidates.names.iter().take(5).map(String::as_str).collect();
            bail!(
                "no claim is named `{word}`; name a paper (`TAVO`), `own`, a family (`tavo`), a claim or `all`; nearest: `{}`",
                nearest.join("`, `")
            );
        }
    }
    let selected = |claim: &Claim| words.is_empty() || words.iter().any(|word| is(claim, word));
    Ok(claims.into_iter().filter(selected).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_orders_have_the_published_tau() {
        let claims = all();
        let claim = claims.iter().find(|claim| claim.id == "kyoto.indicator").unwrap();
        let tau = |name: &str| {
            homenode_units::stats::kendall_tau_of_orders(&claim.order[name], &claim.order["real"]).unwrap()
        };
        assert!((tau("eq31") - 0.822).abs() < 1e-3, "{}", tau("eq31"));
        assert!((tau("llcm") - 0.6).abs() < 1e-3, "{}", tau("llcm"));
    }

    #[test]
    fn the_embedded_files_have_every_claim_once() {
        let claims = all();
        assert_eq!(claims.iter().filter(|claim| !claim.is_own()).count(), 58);
        let ids: BTreeSet<&str> = claims.iter().map(|claim| claim.id.as_str()).collect();
        assert_eq!(ids.len(), claims.len());
        assert!(
            claims
                .iter()
                .all(|claim| claim.id.contains('.') && !claim.says.is_empty())
        );
    }

    #[test]
    fn numbers_keep_how_they_were_written() {
        let claims = all();
        let numbers = |id: &str| {
            let claim = claims.iter().find(|claim| claim.id == id).unwrap();
            claim.value.clone().unwrap()
        };
        assert_eq!(
            numbers("kyoto.sampling-by-migration"),
            Values::One(Number::Real(12.0))
        );
        let counts = numbers("policies.all-are-useful");
        assert_eq!(
            counts.iter().collect::<Vec<_>>(),
            [
                ("over100", Number::Whole(5)),
                ("over25", Number::Whole(17)),
                ("over50", Number::Whole(12))
            ]
        );
    }

    fn selected(words: &[&str]) -> Result<Vec<String>> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        Ok(select(all(), &words)?.into_iter().map(|claim| claim.id).collect())
    }

    #[test]
    fn claims_are_selected_by_paper_family_and_id_in_the_files_order() {
        assert_eq!(selected(&[]).unwrap().len(), all().len());
        assert_eq!(selected(&["all"]).unwrap().len(), all().len());
        assert_eq!(selected(&["own"]).unwrap()[0], "advisor.near-best");
        assert_eq!(selected(&["TAVO"]).unwrap(), selected(&["tavo"]).unwrap());
        assert_eq!(selected(&["tavo"]).unwrap().len(), 5);
        assert_eq!(
            selected(&["tavo.spec", "kyoto.scales", "tavo.spec"]).unwrap(),
            ["kyoto.scales", "tavo.spec"]
        );
    }

    #[test]
    fn an_unknown_word_is_answered_with_the_nearest() {
        let said = |word| selected(&[word]).unwrap_err().to_string();
        assert_eq!(
            said("tavo.ncb"),
            "no claim is named `tavo.ncb`; did you mean `tavo.npb`?"
        );
        assert!(
            said("something")
                .contains("name a paper (`TAVO`), `own`, a family (`tavo`), a claim or `all`; nearest:")
        );
    }
}

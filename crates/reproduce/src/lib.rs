//! Runs scenarios on the simulated host ([`engine`], [`jobs`]), and reproduces published claims with it.
//!
//! ```text
//!   claims.toml ─▶ claims ─▶ experiment.runs ─▶ work (jobs, cache) ─▶ experiment.decide ─▶ verdict ─▶ scoreboard, table,
//!                              (vary)                  twin                                             JSON, figures, document
//! ```
//!
//! # Properties (tests of the same names)
//!
//! - Claims are selected by seed, family and id, in the file's order.
//! - Outcomes do not depend on threads or cache.
//! - A verdict follows from the rules in `claims.toml` alone: [`verdict`] is their only implementation.
//! - What is no finished run is left out with a note: a cache is trusted for its format only.

/// Lists the names and texts of files in `data/experiments`, by folder.
macro_rules! files {
    ($($folder:literal: $($name:literal),*;)*) => {
        &[$($((concat!($folder, $name), include_str!(concat!("../../../data/experiments/", $folder, $name, ".toml"))),)*)*]
    };
}

mod bases;
mod cache;
pub mod claims;
mod decide;
mod design;
mod document;
pub mod engine;
mod experiment;
mod experiments;
mod figure;
pub mod history;
pub mod jobs;
mod made;
mod markdown;
mod models;
mod run;
pub mod scoreboard;
pub mod vary;
pub mod verdict;
mod work;

use anyhow::Result;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use jobs::Progress;

pub use cache::{Cache, Found};
pub use claims::Claim;
pub use design::Design;
pub use design::array::Row;
pub use document::{Document, headline, ours, published, render, tally};
pub use experiment::{Decision, Reproduced, Table};
pub use figure::{Figure, Shape};
pub use history::Log;
pub use made::{Experiment, Made, experiment, experiment_to_json};
pub use scoreboard::{Bands, Scoreboard};

/// Decides claims: makes the required runs on `jobs` threads, then judges one claim after another. Values get the embedded
/// bands.
pub fn reproduce(
    claims: Vec<Claim>,
    jobs: usize,
    cache: Option<&Cache>,
    progress: &Progress,
) -> Vec<Reproduced> {
    let (mut all, _) = decided(claims, jobs, cache, progress, false);
    match Bands::committed() {
        Ok(bands) => bands.join(&mut all),
        Err(error) => progress.note(&error.to_string()),
    }
    all
}

/// Like [`reproduce`], but also computes the bands, which takes more than four times as many runs.
///
/// # Errors
/// A claim that cannot be decided at an end of one of its open inputs, and why.
pub fn reproduce_with_bands(
    claims: Vec<Claim>,
    jobs: usize,
    cache: Option<&Cache>,
    progress: &Progress,
) -> Result<(Vec<Reproduced>, Bands)> {
    let (mut all, outcomes) = decided(claims, jobs, cache, progress, true);
    let bands = Bands::of(&all, &outcomes)?;
    bands.join(&mut all);
    Ok((all, bands))
}

fn decided(
    claims: Vec<Claim>,
    jobs: usize,
    cache: Option<&Cache>,
    progress: &Progress,
    with_bands: bool,
) -> (Vec<Reproduced>, work::Outcomes) {
    let experiments = claims
        .iter()
        .filter_map(|claim| Some((claim, decide::of(claim)?)));
    let runs = experiments.flat_map(|(claim, experiment)| {
        let ends = scoreboard::ends(claim).filter(|_| with_bands);
        work::with_ends(experiment.runs(), ends)
    });
    let outcomes = work::execute(runs.collect(), jobs, cache, progress);
    let decided = claims.into_iter().map(|claim| decide::decide(claim, &outcomes));
    (decided.collect(), outcomes)
}

#[derive(Serialize)]
struct Published<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    value: &'a Option<claims::Values>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_least: &'a Option<claims::Values>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: &'a Option<claims::Values>,
    #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    order: &'a std::collections::BTreeMap<String, Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: &'a Option<String>,
}

/// Machine-readable document of claims.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Claims<'a> {
    /// How close the numbers of the selected claims are to the published ones.
    scoreboard: Scoreboard,
    claims: Vec<OneClaim<'a>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct OneClaim<'a> {
    id: &'a str,
    /// The paper, by its key in docs/SOURCES.md, or `own`.
    source: &'a str,
    /// The name of `source` up to version 0.1; will be removed in 0.3.
    seed: &'a str,
    /// Figure, table or section of the paper.
    at: &'a str,
    says: &'a str,
    /// Published values and bounds, by name.
    published: Value,
    /// Our values, under the names of the published ones; null if nothing was measured.
    ours: Option<serde_json::Map<String, Value>>,
    /// How much was put into the model, for the claim as a whole. Each part has the kind of its value.
    kind: claims::Kind,
    /// Where to look first for the cause of a difference.
    attribution: claims::Attribution,
    verdict: verdict::Verdict,
    parts: &'a [verdict::Part],
    /// Whether time was measured on the machine that ran the experiment, so that no two runs are equal.
    measured_here: bool,
    /// Why the claim was not decided; null if it was.
    reason: Option<&'a str>,
    tables: Option<Value>,
    why: Option<Value>,
}

/// Returns the machine-readable document of claims.
pub fn to_json(all: &[Reproduced]) -> Claims<'_> {
    Claims {
        scoreboard: Scoreboard::of(all),
        claims: all.iter().map(OneClaim::of).collect(),
    }
}

impl OneClaim<'_> {
    fn of(one: &Reproduced) -> OneClaim<'_> {
        let Claim {
            value,
            at_least,
            at_most,
            order,
            unit,
            ..
        } = &one.claim;
        let published = Published {
            value,
            at_least,
            at_most,
            order,
            unit,
        };
        let ours = one.decision.as_ref().map(|Decision { measured, .. }| {
            let numbers = measured
                .numbers
                .iter()
                .map(|(name, number)| (name.clone(), json!(number)));
            let orders = measured
                .orders
                .iter()
                .map(|(name, order)| (name.clone(), json!(order)));
            let shapes = measured
                .shapes
                .iter()
                .map(|shape| (shape.name.clone(), json!(shape.ours)));
            numbers.chain(orders).chain(shapes).collect()
        });
        OneClaim {
            id: &one.claim.id,
            source: &one.claim.source,
            seed: one.claim.seed(),
            at: &one.claim.at,
            says: &one.claim.says,
            published: json!(published),
            ours,
            kind: one.kind,
            attribution: one.claim.attribution,
            verdict: one.judgement.verdict,
            parts: &one.judgement.parts,
            measured_here: one.measured_here(),
            reason: one.reason.as_deref(),
            tables: one.decision.as_ref().map(|decision| json!(decision.tables)),
            why: one.decision.as_ref().map(|decision| json!(decision.why)),
        }
    }
}

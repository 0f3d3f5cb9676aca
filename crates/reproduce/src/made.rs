//! Executes an experiment for a researcher, with or without a claim, and once more for each change of an input.

use anyhow::Result;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cache::Cache;
use crate::decide;
use crate::design::Design;
use crate::design::array::Row;
use crate::experiment::{Decision, Reproduced};
use crate::jobs::Progress;
use crate::vary::End;
use crate::work::{Outcomes, execute, with_ends};
use crate::{Claim, claims};

/// The result of an experiment with one change, or without any.
#[derive(Debug)]
pub struct Made {
    /// The one input that was changed; `None` for the unchanged experiment.
    pub change: Option<End>,
    /// The experiment's decision.
    pub decision: Decision,
    /// The verdict, if the experiment decides a claim.
    pub reproduced: Option<Reproduced>,
    /// A row for each VM of each run.
    pub rows: Vec<Row>,
}

/// Makes the runs of an experiment on `jobs` threads, unchanged and with each change, and decides the experiment each time.
///
/// # Errors
/// A message: a run that cannot be made, or a value that cannot be computed.
pub fn experiment(
    design: &Design,
    changes: &[End],
    jobs: usize,
    cache: Option<&Cache>,
    progress: &Progress,
) -> Result<Vec<Made>> {
    for change in changes {
        if let End::Value(name, _) = change {
            design.has_value(name)?;
        }
    }
    let outcomes = execute(
        with_ends(design.runs(), changes.iter().cloned()),
        jobs,
        cache,
        progress,
    );
    let each = std::iter::once(None).chain(changes.iter().cloned().map(Some));
    each.map(|change| made(design, change, &outcomes)).collect()
}

fn made(design: &Design, change: Option<End>, outcomes: &Outcomes) -> Result<Made> {
    let outcomes = change
        .as_ref()
        .map_or_else(|| outcomes.clone(), |end| outcomes.at(end));
    let decision = design.decide(&outcomes)?;
    let claim: Option<Claim> = claims::named(design.claim());
    Ok(Made {
        change,
        reproduced: claim.map(|claim| decide::judged(claim, design, decision.clone())),
        decision,
        rows: design.rows(&outcomes)?,
    })
}

/// Machine-readable document of an experiment.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Experiment<'a> {
    title: &'a str,
    /// The claim that the experiment decides.
    claim: Option<&'a str>,
    /// The unchanged experiment, then one variation for each change.
    variations: Vec<Variation<'a>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Variation<'a> {
    /// The changed input and its factor; null if unchanged.
    change: Option<String>,
    /// Numbers by name.
    results: Map<String, Value>,
    /// Tests: subject, outcome, and whether it passed.
    tests: Vec<Tested<'a>>,
    tables: Value,
    /// An object for each VM of each run.
    runs: Vec<Map<String, Value>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Tested<'a> {
    name: &'a str,
    ours: &'a str,
    holds: bool,
}

/// Returns the machine-readable document.
pub fn experiment_to_json<'a>(design: &'a Design, all: &'a [Made]) -> Experiment<'a> {
    let variation = |made: &'a Made| {
        let measured = &made.decision.measured;
        let numbers = measured.numbers.iter();
        let tests = measured.shapes.iter().map(|shape| Tested {
            name: &shape.name,
            ours: &shape.ours,
            holds: shape.holds,
        });
        Variation {
            change: made.change.as_ref().map(End::to_string),
            results: numbers
                .map(|(name, number)| (name.clone(), json!(number)))
                .collect(),
            tests: tests.collect(),
            tables: json!(made.decision.tables),
            runs: made
                .rows
                .iter()
                .map(|row| row.iter().cloned().collect())
                .collect(),
        }
    };
    Experiment {
        title: design.title(),
        claim: Some(design.claim()).filter(|claim| !claim.is_empty()),
        variations: all.iter().map(variation).collect(),
    }
}

//! Runs experiments from files, and compares published claims with the simulator.

use std::path::Path;

use homenode_reproduce::jobs::{self, Progress};
use homenode_reproduce::vary::End;
use homenode_reproduce::{Claim, Design, Made, Reproduced, Row, claims, experiment_to_json, to_json};
use pyo3::prelude::*;

use crate::errors::{Failed, bad_input};
use crate::table::{Columns, Table};
use crate::values;
use crate::wait::apart;

/// Result of an experiment. See `homenode.experiment`.
#[pyclass(frozen, module = "homenode._native")]
pub struct MadeExperiment {
    design: Design,
    all: Vec<Made>,
}

fn words(changes: Option<&End>) -> Option<String> {
    changes.map(End::to_string)
}

#[pymethods]
impl MadeExperiment {
    /// The experiment's title.
    fn title(&self) -> &str {
        self.design.title()
    }

    /// A row for each VM of each run, with all metrics.
    fn rows(&self) -> PyResult<Table> {
        let rows: Vec<(Option<String>, &Row)> = self
            .all
            .iter()
            .flat_map(|made| made.rows.iter().map(|row| (words(made.change.as_ref()), row)))
            .collect();
        let changed = rows.iter().map(|(change, _)| change.clone());
        Columns::default()
            .words(
                "vary",
                "what was changed of the inputs; none as the file says",
                changed,
            )
            .cells(rows.iter().map(|(_, row)| *row))
            .table()
    }

    /// A row for each result of each variation.
    fn results(&self) -> PyResult<Table> {
        let rows: Vec<_> = self
            .all
            .iter()
            .flat_map(|made| {
                made.decision
                    .measured
                    .numbers
                    .iter()
                    .map(|result| (words(made.change.as_ref()), result))
            })
            .collect();
        Columns::default()
            .words(
                "vary",
                "what was changed of the inputs; none as the file says",
                rows.iter().map(|row| row.0.clone()),
            )
            .words("result", "its name", rows.iter().map(|row| row.1.0.clone()))
            .numbers("value", "what came out", rows.iter().map(|row| *row.1.1))
            .table()
    }

    /// A row for each test of each variation.
    fn tests(&self) -> PyResult<Table> {
        let rows: Vec<_> = self
            .all
            .iter()
            .flat_map(|made| {
                made.decision
                    .measured
                    .shapes
                    .iter()
                    .map(|test| (words(made.change.as_ref()), test))
            })
            .collect();
        Columns::default()
            .words(
                "vary",
                "what was changed of the inputs; none as the file says",
                rows.iter().map(|row| row.0.clone()),
            )
            .words("test", "its name", rows.iter().map(|row| row.1.name.clone()))
            .words("ours", "what came out", rows.iter().map(|row| row.1.ours.clone()))
            .flags("holds", "whether it passed", rows.iter().map(|row| row.1.holds))
            .table()
    }

    /// The experiment's figures as SVG, by name.
    fn figures(&self) -> Vec<(String, String)> {
        let first = self.all.first().into_iter();
        let figures = first.flat_map(|made| &made.decision.figures);
        figures
            .map(|figure| (figure.name.clone(), figure.svg()))
            .collect()
    }

    /// The results as a dictionary, as printed by `homenode experiment --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::document(py, "experiment", &experiment_to_json(&self.design, &self.all))
    }
}

/// Runs an experiment. See `homenode.experiment`.
#[pyfunction]
#[pyo3(signature = (path, text, vary, jobs, progress))]
pub(crate) fn experiment(
    py: Python<'_>,
    path: &str,
    text: Option<&str>,
    vary: Vec<(String, f64)>,
    jobs: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<MadeExperiment> {
    let design = match text {
        Some(text) => Design::beside(Path::new(path), text),
        None => Design::open(Path::new(path)),
    };
    let design = design.map_err(bad_input)?;
    let changes = vary.iter().map(|(input, factor)| End::parse(input, *factor));
    let changes: Vec<End> = changes.collect::<Result<_, _>>().map_err(bad_input)?;
    let (runs, jobs) = (Progress::silent(), jobs.unwrap_or_else(jobs::available));
    let all = apart(py, design.title(), progress.as_ref(), &runs, || {
        homenode_reproduce::experiment(&design, &changes, jobs, None, &runs)
    })?;
    let all = all.map_err(|error| Failed::new_err(format!("{path}: {error}")))?;
    Ok(MadeExperiment { design, all })
}

fn selected(words: &[String]) -> PyResult<Vec<Claim>> {
    claims::select(claims::all(), words).map_err(bad_input)
}

/// Published values: a row for each value, bound, ranking and shape. See `homenode.published`.
#[pyfunction]
pub(crate) fn published(words: Vec<String>) -> PyResult<Table> {
    // Claim, kind of value, its name, the number, and the ranking.
    type Row<'a> = (Claim, &'a str, Option<String>, Option<f64>, Option<String>);
    let mut rows: Vec<Row<'_>> = Vec::new();
    for claim in selected(&words)? {
        let numbers = [
            ("value", &claim.value),
            ("at_least", &claim.at_least),
            ("at_most", &claim.at_most),
        ];
        let before = rows.len();
        for (kind, values) in numbers {
            for (name, number) in values.iter().flat_map(claims::Values::iter) {
                let name = Some(name.to_owned()).filter(|name| !name.is_empty());
                rows.push((claim.clone(), kind, name, Some(number.get()), None));
            }
        }
        for (name, order) in &claim.order {
            rows.push((
                claim.clone(),
                "order",
                Some(name.clone()),
                None,
                Some(order.join(" > ")),
            ));
        }
        if rows.len() == before {
            rows.push((claim, "shape", None, None, None));
        }
    }
    Columns::default()
        .words("claim", "its id", rows.iter().map(|row| row.0.id.clone()))
        .words(
            "source",
            "the paper, by its key in docs/SOURCES.md; `own` of ours",
            rows.iter().map(|row| row.0.source.clone()),
        )
        .words(
            "at",
            "figure, table or section",
            rows.iter().map(|row| row.0.at.clone()),
        )
        .words(
            "says",
            "the claim in words",
            rows.iter().map(|row| row.0.says.clone()),
        )
        .words(
            "kind",
            "value, at_least, at_most, order or shape",
            rows.iter().map(|row| row.1.to_owned()),
        )
        .words(
            "name",
            "which of its values; none where it has one",
            rows.iter().map(|row| row.2.clone()),
        )
        .numbers("published", "the published number", rows.iter().map(|row| row.3))
        .words("unit", "its unit", rows.iter().map(|row| row.0.unit.clone()))
        .words(
            "order",
            "a published ranking, the highest first",
            rows.iter().map(|row| row.4.clone()),
        )
        .table()
}

/// Claims and their verdicts. See `homenode.reproduce`.
#[pyclass(frozen, module = "homenode._native")]
pub struct Decided {
    all: Vec<Reproduced>,
}

#[pymethods]
impl Decided {
    /// A row for each claim.
    fn claims(&self) -> PyResult<Table> {
        let all = || self.all.iter();
        Columns::default()
            .words("claim", "its id", all().map(|one| one.claim.id.clone()))
            .words("source", "the paper", all().map(|one| one.claim.source.clone()))
            .words(
                "verdict",
                "holds, partly, misses, pending or not-modelled",
                all().map(|one| one.judgement.verdict.name()),
            )
            .words(
                "kind",
                "how much was put in: predicted, calibrated, …",
                all().map(|one| one.kind.name()),
            )
            .words(
                "reason",
                "why it is not decided, if it is not",
                all().map(|one| one.reason.clone()),
            )
            .table()
    }

    /// A row for each part of each claim, with our value and the published one.
    fn parts(&self) -> PyResult<Table> {
        let rows: Vec<_> = self
            .all
            .iter()
            .flat_map(|one| one.judgement.parts.iter().map(move |part| (one, part)))
            .collect();
        let rows = || rows.iter().copied();
        let band = |of: fn(&homenode_reproduce::verdict::Band) -> f64| {
            move |part: &homenode_reproduce::verdict::Part| part.score?.band.as_ref().map(of)
        };
        let parts = || rows().map(|(_, part)| part);
        Columns::default()
            .words("claim", "its id", rows().map(|(one, _)| one.claim.id.clone()))
            .words(
                "part",
                "which of its values",
                parts().map(|part| part.name.clone()),
            )
            .words(
                "rule",
                "published, with the rule, in words",
                parts().map(|part| part.published.clone()),
            )
            .words("said", "ours, in words", parts().map(|part| part.ours.clone()))
            .flags("holds", "whether it holds", parts().map(|part| part.holds))
            .flags(
                "input",
                "whether it was an input, and does not count",
                parts().map(|part| part.input),
            )
            .flags(
                "trivial",
                "whether it would hold where nothing has any effect",
                parts().map(|part| part.trivial),
            )
            .numbers(
                "published",
                "the published number",
                parts().map(|part| part.score.map(|score| score.published)),
            )
            .numbers(
                "ours",
                "ours",
                parts().map(|part| part.score.map(|score| score.ours)),
            )
            .numbers(
                "low",
                "least of ours over inputs that the paper leaves open, where known",
                parts().map(band(|band| band.low)),
            )
            .numbers("high", "largest", parts().map(band(|band| band.high)))
            .table()
    }

    /// The results as a dictionary, as printed by `homenode reproduce --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::document(py, "claims", &to_json(&self.all))
    }
}

/// Compares claims with results of the simulator. See `homenode.reproduce`.
#[pyfunction]
#[pyo3(signature = (words, jobs, progress))]
pub(crate) fn reproduce(
    py: Python<'_>,
    words: Vec<String>,
    jobs: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Decided> {
    let claims = selected(&words)?;
    let (runs, jobs) = (Progress::silent(), jobs.unwrap_or_else(jobs::available));
    let all = apart(py, "claims", progress.as_ref(), &runs, || {
        homenode_reproduce::reproduce(claims, jobs, None, &runs)
    })?;
    Ok(Decided { all })
}

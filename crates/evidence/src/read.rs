//! Reads a report, which may come from anybody: everything that follows from its figures is derived again.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::crossover::PAIRS_MAX;
use crate::report::{HostFacts, Report, Trial};
use crate::section::{Figure, Outcome, Section, Topic};

/// Version of a report's format. Version 1 had the crossover only, at its top level; it is read, too.
pub const VERSION: u32 = 2;
/// Most VMs of a trial: with more, no effect on one could be told from chance, and to judge them takes minutes.
const VMS_MAX: usize = 1700;

/// Why a text is not a report.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or not of a report's shape.
    #[error("this is not evidence.json of `homenode evidence`: {0}")]
    Shape(#[from] serde_json::Error),
    /// A format of another program.
    #[error(
        "its format is {0}, and this program reads evidence/1 and evidence/{VERSION}; a newer homenode may read it"
    )]
    Version(String),
    /// Blocks that do not belong to the plan.
    #[error("its blocks are not those of its plan")]
    Plan,
    /// More VMs than a trial can have.
    #[error("it has more than {VMS_MAX} VMs, on which no trial can claim anything")]
    Vms,
    /// Sections out of order, or two of a topic.
    #[error("its section `{0}` is there twice or in the wrong place")]
    Order(Topic),
}

/// A report of version 1.
#[derive(Deserialize)]
struct First {
    version: String,
    commit: String,
    host: HostFacts,
    #[serde(flatten)]
    trial: Trial,
}

/// Writes a report as the text of `evidence.json`.
pub fn written(report: &Report) -> String {
    let mut value = json!(report);
    value["schema"] = json!(format!("evidence/{VERSION}"));
    format!("{value:#}\n")
}

/// Reads a report.
///
/// # Errors
/// [`ReadError`].
pub fn read(text: &str) -> Result<Report, ReadError> {
    let value: Value = serde_json::from_str(text)?;
    let report = match value
        .get("schema")
        .map(|schema| schema.as_str().unwrap_or_default())
    {
        // Early files of version 1 do not name it.
        Some("evidence/1") => first(value)?,
        None if value.get("plan").is_some() => first(value)?,
        Some("evidence/2") | None => serde_json::from_value(value)?,
        Some(other) => return Err(ReadError::Version(other.to_owned())),
    };
    derived_again(report)
}

fn first(value: Value) -> Result<Report, ReadError> {
    let First {
        version,
        commit,
        host,
        trial,
    } = serde_json::from_value(value)?;
    Ok(Report::begun(&version, &commit, host).with_crossover(trial))
}

fn derived_again(mut report: Report) -> Result<Report, ReadError> {
    if let Some(trial) = report.crossover.take() {
        let (plan, blocks) = (&trial.plan.blocks, &trial.blocks);
        let is_of_plan = blocks.len() <= plan.len() && blocks.iter().zip(plan).all(|(a, b)| a.acting == *b);
        if !is_of_plan || plan.len() as u64 > 2 * PAIRS_MAX + 1 {
            return Err(ReadError::Plan);
        }
        let vms = blocks.iter().map(|block| block.speeds.len()).max().unwrap_or(0);
        if vms.max(trial.about.len()) > VMS_MAX {
            return Err(ReadError::Vms);
        }
        let blocks = trial.blocks.clone();
        report.crossover = Some(trial.with_blocks(blocks));
    }
    if let Some(pair) = report
        .sections
        .windows(2)
        .find(|pair| pair[0].topic >= pair[1].topic)
    {
        return Err(ReadError::Order(pair[1].topic));
    }
    let sections = std::mem::take(&mut report.sections);
    report.sections = sections.into_iter().map(section).collect();
    Ok(report)
}

fn section(mut section: Section) -> Section {
    if let Outcome::Measured { figures, .. } = &mut section.outcome {
        *figures = std::mem::take(figures).into_iter().map(figure).collect();
    }
    section
}

fn figure(read: Figure) -> Figure {
    let mut derived = Figure::of(read.what, read.unit, &read.values);
    derived.vm = read.vm;
    derived.lost = derived.lost.saturating_add(read.lost);
    match read.predicted {
        Some(predicted) => derived.predicted(predicted.value, predicted.by),
        None => derived,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::section::{Bearing, With};

    fn report() -> Report {
        let figure = Figure::of("victim", "percent", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, f64::NAN]);
        let figures = vec![figure.predicted(7.0, "the twin").of_vm("web")];
        let contention = Section::measured(
            Topic::Contention,
            With::Processes,
            "How.",
            "What.",
            Bearing::For,
            figures,
        );
        let numad = Section::not_possible(Topic::Numad, "How.", "numad is not installed", None);
        Report::begun("1", "c", HostFacts::default())
            .with_section(numad)
            .with_section(contention)
    }

    fn value() -> Value {
        serde_json::to_value(report()).unwrap()
    }

    #[test]
    fn what_is_written_is_read_and_what_was_derived_is_derived_again() {
        assert_eq!(read(&value().to_string()).unwrap(), report());
        let mut forged = value();
        forged["sections"][0]["figures"][0]["median"] = json!(1e9);
        forged["sections"][0]["figures"][0]["predicted"]["is_within"] = json!(true);
        assert_eq!(read(&forged.to_string()).unwrap(), report());
    }

    #[test]
    fn a_file_of_version_1_is_read() {
        let mut old = json!({
            "schema": "evidence/1", "version": "1", "commit": "c", "about": ["web"], "blocks": [],
            "host": {"nodes": 1, "cpus": 2, "memory_bytes": 3, "kernel": "6.1", "vms": 1},
            "plan": {"seed": 1, "block_ns": 1, "washout_ns": 0, "blocks": ["observes"]},
            "all": null, "vms": {}, "not_judged": [], "verdict": "not-complete"
        });
        for _ in 0..2 {
            let report = read(&old.to_string()).unwrap();
            assert_eq!((report.host.cpus, report.sections.len()), (2, 0));
            assert!(report.crossover.unwrap().about.contains("web"));
            old.as_object_mut().unwrap().remove("schema");
        }
    }

    #[test]
    fn what_is_not_a_report_is_refused() {
        let mut other = value();
        other["schema"] = json!("evidence/3");
        assert!(matches!(read(&other.to_string()), Err(ReadError::Version(_))));
        other["schema"] = json!(7);
        assert!(matches!(read(&other.to_string()), Err(ReadError::Version(_))));
        let mut twice = value();
        twice["sections"][1] = twice["sections"][0].clone();
        assert!(matches!(
            read(&twice.to_string()),
            Err(ReadError::Order(Topic::Contention))
        ));
        for text in ["", "{}", "[]", "null", "not json", &"[".repeat(1 << 16)] {
            assert!(matches!(read(text), Err(ReadError::Shape(_))), "{text}");
        }
    }
}

//! `homenode evidence show`: a report in the terminal.

use std::path::PathBuf;

use homenode_evidence::answer::Answer;
use homenode_evidence::number::number;
use homenode_evidence::{Effect, Figure, Outcome, Report, Section, Trial};
use homenode_screens::printable::OneLine;

use crate::print::{print_json, table};

/// Options of `evidence show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The file: evidence.json or to-share.tar.gz
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    pub shown: crate::options::ShownArgs,
}

/// Prints a report: the sections, the agent on and off, and the answer last.
pub(super) fn show(report: &Report, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        return print_json("evidence", report);
    }
    for section in &report.sections {
        show_section(section);
    }
    if let Some(trial) = &report.crossover {
        show_trial(trial);
    }
    let answer = Answer::of(report);
    say!("{}", OneLine(&answer.line));
    say!("{}", OneLine(&answer.next));
    Ok(())
}

fn show_section(section: &Section) {
    say!("{}", section.topic.question());
    match &section.outcome {
        Outcome::NotPossible { why, detail } => {
            say!("  not measured: {}", OneLine(why));
            if let Some(detail) = detail {
                say!("  {}", OneLine(detail));
            }
        }
        Outcome::Measured { means, figures, .. } => {
            say!("  {}", OneLine(means));
            let rows: Vec<_> = figures.iter().map(row_of_figure).collect();
            if !rows.is_empty() {
                say!(
                    "{}",
                    table(&["what", "unit", "measured", "interval", "predicted", "by"], rows)
                );
            }
        }
    }
    say!("");
}

fn row_of_figure(figure: &Figure) -> Vec<String> {
    let written = |value: Option<f64>| value.map_or_else(|| "?".to_owned(), number);
    let what = match &figure.vm {
        Some(vm) => format!("{vm}: {}", figure.what),
        None => figure.what.clone(),
    };
    let interval = match figure.low.zip(figure.high) {
        Some((low, high)) => format!("{} to {}", number(low), number(high)),
        None => format!("none: {} repetitions", figure.values.len()),
    };
    let predicted = figure.predicted.as_ref();
    vec![
        what,
        figure.unit.clone(),
        written(figure.median),
        interval,
        predicted.map_or_else(String::new, |predicted| written(Some(predicted.value))),
        predicted.map_or_else(String::new, |predicted| predicted.by.clone()),
    ]
}

fn show_trial(trial: &Trial) {
    let row = |name: &str, effect: &Effect| {
        vec![
            name.to_owned(),
            format!("{:+.1} %", effect.percent),
            format!("{:+.1} to {:+.1} %", effect.low_percent, effect.high_percent),
            format!("{:.3}", effect.chance),
            effect.pairs.to_string(),
            if effect.is_claimed { "yes" } else { "no" }.to_owned(),
        ]
    };
    let judged = &trial.judged;
    let all = judged.all.iter().map(|all| row("all together", all));
    let rows: Vec<_> = all
        .chain(judged.vms.iter().map(|(vm, effect)| row(vm, effect)))
        .collect();
    if !rows.is_empty() {
        let heads = [
            "VM",
            "speed while the agent acts",
            "interval",
            "chance",
            "pairs",
            "claimed",
        ];
        say!("{}", table(&heads, rows));
    }
    if !judged.not_judged.is_empty() {
        say!(
            "not judged, as too few pairs of blocks have their speed: {}",
            OneLine(&judged.not_judged.join(", "))
        );
    }
    if !trial.is_complete() {
        say!(
            "not complete: {} of {} blocks",
            trial.blocks.len(),
            trial.plan.blocks.len()
        );
    }
    say!("{}", OneLine(&judged.verdict.to_string()));
}

//! What a process costs another on the same last-level cache, beside the twin's prediction of it.

use homenode_calibrate::validate::{ValidateError, Validation, validate_with};

use super::{Bench, Why, machine};
use crate::section::{Bearing, Figure, Section, Topic, With};

pub(super) const METHOD: &str = "Two processes, pinned to two CPUs that share a last-level cache, run alone and together in \
     turn. One of them draws lines from a part of the cache or more; a stream through four times the cache is the thrasher. \
     The figure is the time per line together over the time alone, in CPU time. The twin predicts it from the machine's \
     measured figures and each program's time alone.";

/// With less time, only the most telling pairs are measured.
const ALL_SECONDS: f64 = 60.0;
/// The pair of which the sentence speaks.
const TELLING: &str = "random reads in 1/2 of the cache beside a stream";
/// Most predictions that are named as missed.
const NAMED_MAX: usize = 3;
/// A loss that matters, in percent.
const MATTERS: f64 = 103.0;

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<Section, Why> {
    bench.neighbours()?;
    let machine = machine::with_figures(bench)?;
    let is_short = bench.budget.as_secs_f64() < ALL_SECONDS;
    let told = &mut *bench.told;
    let mut progress =
        |at: usize, of: usize, what: &str| told(what, at.saturating_sub(1) as f64 / of.max(1) as f64);
    let measured = validate_with(&machine, is_short, super::REPETITIONS, bench.spawn, &mut progress);
    let measured = measured.map_err(|error| match error {
        ValidateError::Worker(error) => error.into(),
        other => Why::said("the twin could not predict this host")(&other),
    })?;
    let figures = figures(&measured);
    let (means, bearing) = judged(&figures, bench.machine.llcs.len());
    Ok(Section::measured(
        Topic::Contention,
        With::Processes,
        METHOD,
        means,
        bearing,
        figures,
    ))
}

fn figures(measured: &Validation) -> Vec<Figure> {
    let mut figures = Vec::new();
    for case in &measured.cases {
        let (first, second) = case.name.split_once(" + ").unwrap_or((&case.name, "another"));
        let again = if first == second { ", the other" } else { "" };
        let sides = [(first, second, ""), (second, first, again)];
        for (side, (which, other, again)) in case.sides.iter().zip(sides) {
            let percent: Vec<f64> = side.slowdowns.iter().map(|times| 100.0 * times).collect();
            let what = format!("{} beside {}{again}", in_words(which), in_words(other));
            figures.push(
                Figure::of(what, "percent of the time alone", &percent)
                    .predicted(100.0 * side.predicted, "the twin with this machine's figures"),
            );
        }
    }
    figures
}

/// Returns what a program of a pair does, for people.
fn in_words(program: &str) -> String {
    match program.split_once(' ') {
        Some(("uniform", "1")) => "random reads in all of the cache".to_owned(),
        Some(("uniform", "2")) => "random reads in twice the cache".to_owned(),
        Some(("uniform", part)) => format!("random reads in {part} of the cache"),
        _ => format!("a {program}"),
    }
}

/// Returns how far off the twin was, as a ratio's logarithm, and what it missed; `None` if its prediction holds.
fn missed(figure: &Figure) -> Option<(f64, String)> {
    let (measured, predicted) = (figure.median?, figure.predicted.as_ref()?);
    let what = format!(
        "{} ({measured:.0} measured, {:.0} predicted)",
        figure.what, predicted.value
    );
    (predicted.is_within == Some(false)).then(|| ((predicted.value / measured).ln().abs(), what))
}

fn judged(figures: &[Figure], caches: usize) -> (String, Bearing) {
    let mut missed: Vec<(f64, String)> = figures.iter().filter_map(missed).collect();
    missed.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let farthest: Vec<&str> = missed
        .iter()
        .take(NAMED_MAX)
        .map(|(_, what)| what.as_str())
        .collect();
    let twin = match farthest.as_slice() {
        [] => "The twin's predictions all lie within what was measured.".to_owned(),
        farthest => format!(
            "The twin predicted {} of {} figures; it missed most {}.",
            figures.len() - missed.len(),
            figures.len(),
            farthest.join(", ")
        ),
    };
    let victim = figures.iter().find(|figure| figure.what == TELLING);
    let Some((median, low)) = victim.and_then(|victim| victim.median.zip(victim.low)) else {
        return (twin, Bearing::Neither);
    };
    let costs = low > MATTERS;
    let says = match (costs, caches > 1) {
        (true, true) => "The agent can keep such programs on different caches.",
        (true, false) => "All CPUs share one cache, so the agent could only limit the neighbour.",
        (false, _) => "That is no loss that matters.",
    };
    let bearing = if costs && caches > 1 {
        Bearing::For
    } else {
        Bearing::Neither
    };
    (
        format!(
            "Beside a thrasher, a program that uses half of the cache takes {median:.0} percent of its time alone. {says} {twin}"
        ),
        bearing,
    )
}

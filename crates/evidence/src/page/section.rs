//! A section of the page: what it means, figure, table, method, raw numbers.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::chart::{Strip, chart};
use super::with_code;
use crate::number::number;
use crate::section::{Bearing, Figure, Outcome, Prediction, REPETITIONS_MIN, Section, With};

/// Most figures of a unit that are drawn. The table has all.
const DRAWN_MAX: usize = 24;

/// Writes a section that was measured; nothing for one that was not.
pub(super) fn section(section: &Section) -> Markup {
    let Outcome::Measured {
        with, means, figures, ..
    } = &section.outcome
    else {
        return html! {};
    };
    html! {
        h2 id=(section.topic.name()) { (section.topic.question()) }
        p { (with_code(means)) " " span.dim { "(" (tag(section)) ")" } }
        @if *with == With::EmulatedVms { p.caveat { "Measured in emulated VMs: these figures mean nothing." } }
        @for (unit, strips) in by_unit(figures) { (chart(unit, &strips)) }
        @if !figures.is_empty() { (table(figures)) }
        p.dim { "How: " (section.method) " Measured with " (with_what(*with)) "." }
        @if !figures.is_empty() {
            details {
                summary { "Raw numbers" }
                div.scroll tabindex="0" role="region" aria-label=(format!("raw numbers: {}", section.topic.name())) { (raw(figures)) }
            }
        }
    }
}

/// Says in a few words what a section says about the agent.
pub(super) fn tag(section: &Section) -> &'static str {
    match section.outcome {
        Outcome::NotPossible { .. } => "not measured",
        Outcome::Measured { bearing, .. } => match bearing {
            Bearing::For => "speaks for the agent",
            Bearing::Against => "speaks against the agent",
            Bearing::Neither => "speaks neither for nor against the agent",
        },
    }
}

fn with_what(with: With) -> &'static str {
    match with {
        With::OwnVms => "VMs started for it, under KVM",
        With::EmulatedVms => "VMs started for it, emulated without KVM",
        With::NamedVms => "the operator's VMs",
        With::Processes => "processes pinned to CPUs, without VMs",
    }
}

fn name(figure: &Figure) -> String {
    match &figure.vm {
        Some(vm) => format!("{vm}: {}", figure.what),
        None => figure.what.clone(),
    }
}

fn with_unit(value: f64, unit: &str) -> String {
    match unit {
        "percent" => format!("{} %", number(value)),
        _ => format!("{} {unit}", number(value)),
    }
}

/// Returns strips by unit, in the order in which units first occur.
fn by_unit(figures: &[Figure]) -> Vec<(&str, Vec<Strip<'_>>)> {
    let mut order: Vec<&str> = Vec::new();
    let mut strips: BTreeMap<&str, Vec<Strip<'_>>> = BTreeMap::new();
    for figure in figures.iter().filter(|figure| figure.median.is_some()) {
        let of_unit = strips.entry(&figure.unit).or_insert_with(|| {
            order.push(&figure.unit);
            Vec::new()
        });
        if of_unit.len() < DRAWN_MAX {
            of_unit.push(Strip {
                label: name(figure),
                value: figure
                    .median
                    .map_or_else(String::new, |median| with_unit(median, &figure.unit)),
                dots: &figure.values,
                interval: figure.low.zip(figure.high),
                middle: figure.median,
                predicted: figure.predicted.as_ref().map(|predicted| predicted.value),
            });
        }
    }
    order
        .into_iter()
        .map(|unit| (unit, strips.remove(unit).unwrap_or_default()))
        .collect()
}

fn table(figures: &[Figure]) -> Markup {
    let is_predicted = figures.iter().any(|figure| figure.predicted.is_some());
    html! {
        table {
            tr { th { "What" } th { "Measured" } @if is_predicted { th { "Predicted" } } }
            @for figure in figures {
                tr {
                    td { (name(figure)) }
                    td { (measured(figure)) }
                    @if is_predicted {
                        td { @if let Some(predicted) = &figure.predicted { (beside(figure, predicted)) } }
                    }
                }
            }
        }
    }
}

fn measured(figure: &Figure) -> Markup {
    let count = figure.values.len();
    html! {
        @match figure.median {
            Some(median) => (with_unit(median, &figure.unit)),
            None => "no value",
        }
        small {
            @match figure.low.zip(figure.high) {
                Some((low, high)) => { (number(low)) " to " (number(high)) ", " (count) " repetitions" },
                None if count == 1 => "once",
                None if count > 0 => { (count) " repetitions, too few for an interval" },
                None => "",
            }
            @if figure.lost > 0 { "; " (figure.lost) " gave no value" }
        }
    }
}

fn beside(figure: &Figure, predicted: &Prediction) -> Markup {
    let off = figure
        .median
        .filter(|median| *median != 0.0)
        .map(|median| 100.0 * (predicted.value - median) / median.abs());
    html! {
        (with_unit(predicted.value, &figure.unit))
        small {
            "by " (predicted.by)
            @match predicted.is_within {
                Some(true) => ": within the interval",
                Some(false) => ": outside the interval",
                None => "",
            }
            @if let Some(off) = off.filter(|_| predicted.is_within != Some(true)) {
                ", " (number(off.abs())) " % " (if off < 0.0 { "too low" } else { "too high" })
            }
        }
    }
}

fn raw(figures: &[Figure]) -> Markup {
    html! {
        table.raw {
            caption { "Each repetition, in the order in which they were measured. An interval needs " (REPETITIONS_MIN) " of them." }
            tr { th { "what" } th { "unit" } th { "values" } }
            @for figure in figures {
                tr {
                    td { (name(figure)) }
                    td { (figure.unit) }
                    td { (figure.values.iter().map(|value| format!("{value}")).collect::<Vec<_>>().join(", ")) }
                }
            }
        }
    }
}

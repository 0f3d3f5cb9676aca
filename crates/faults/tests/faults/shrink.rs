//! Makes a failing case smaller, and tells its story.

use crate::case::Case;
use crate::life::{self, Outcome};

/// The kind of a failure: its words without names, numbers and sets.
pub(crate) fn kind(violation: &str) -> String {
    let words = violation.split_whitespace().take(6);
    words
        .filter(|word| !word.contains(|c: char| c.is_ascii_digit()))
        .collect::<Vec<_>>()
        .join(" ")
}

fn fails_alike(case: &Case, wanted: &str) -> Option<Outcome> {
    let outcome = life::run(case);
    let is_alike = outcome
        .violations
        .first()
        .is_some_and(|violation| kind(violation) == wanted);
    is_alike.then_some(outcome)
}

/// Returns a smaller case that fails in the same way.
pub(crate) fn shrink(case: &Case) -> Option<(Case, Outcome)> {
    let outcome = life::run(case);
    let wanted = kind(outcome.violations.first()?);
    let (mut best, mut told) = (case.clone(), outcome);
    // Halves of the events first, then ever smaller parts.
    let mut part = best.events.len().div_ceil(2).max(1);
    loop {
        let mut from = 0;
        while from < best.events.len() {
            let mut smaller = best.clone();
            smaller.events.drain(from..(from + part).min(best.events.len()));
            match fails_alike(&smaller, &wanted) {
                Some(outcome) => (best, told) = (smaller, outcome),
                None => from += part,
            }
        }
        if part == 1 {
            break;
        }
        part = part.div_ceil(2);
    }
    while best.vms.len() > 1 {
        let mut smaller = best.clone();
        smaller.vms.pop();
        match fails_alike(&smaller, &wanted) {
            Some(outcome) => (best, told) = (smaller, outcome),
            None => break,
        }
    }
    let last = best.events.iter().map(|event| event.cycle).max().unwrap_or(1);
    let mut smaller = best.clone();
    smaller.cycles = last + 1;
    if let Some(outcome) = fails_alike(&smaller, &wanted) {
        (best, told) = (smaller, outcome);
    }
    Some((best, told))
}

/// Lines of a story: the last ones before the first violation, and that.
const LINES: usize = 14;

/// Prints the story of a failing case, and the case.
pub(crate) fn tell(case: &Case) {
    let Some((small, outcome)) = shrink(case) else {
        println!("seed {}: it does not fail again", case.seed);
        return;
    };
    println!("seed {}: {}", case.seed, outcome.violations[0]);
    let story = outcome.trace.story();
    let end = story
        .iter()
        .position(|line| line.contains("VIOLATION"))
        .map_or(story.len(), |at| at + 1);
    for line in &story[end.saturating_sub(LINES)..end] {
        println!("    {line}");
    }
    println!("{}", toml::to_string(&small).unwrap_or_default());
}

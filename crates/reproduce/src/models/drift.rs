//! Measures the remote memory of a VM whose pages a driver domain flips ([Flip], [XPV, figure 4.2]).

use anyhow::{Context as _, Result};

use crate::design::array::{Array, Axis, Named};
use crate::models::{named, numbered};
use crate::run::Outcome;

/// Minutes for which BigBench is watched: slightly more than are counted.
const MINUTES: f64 = 181.0;

/// Returns arrays for the second VM. Along axis `moment`: each `minute` of its second program, and `remote_pages` then.
/// Along axis `half`: `half_pages`, the remote pages after six minutes and at the end of each half hour. Along axis
/// `programs`: `start_pages`, the remote pages when each program began.
pub(super) fn drift(outcome: &Outcome) -> Result<Named> {
    let guest = outcome.vms.get(1).context("the run has no second VM")?;
    let at_s = |at_ns: u64| at_ns as f64 / 1e9;
    let away = outcome.moments.iter().map(|moment| {
        let pages = moment.vms.get(1).map_or(0, |vm| vm.pages_away);
        (at_s(moment.at_ns), pages as f64)
    });
    let all: Vec<(f64, f64)> = away.collect();
    let began = guest.programs.get(1).map_or(0.0, |program| program.began_s);
    let since = all.iter().map(|(at_s, pages)| ((at_s - began) / 60.0, *pages));
    let line: Vec<(f64, f64)> = since
        .filter(|(minute, _)| (0.0..=MINUTES).contains(minute))
        .collect();
    let along = |axis: Axis, numbers: Vec<f64>| Array::of_numbers(vec![axis], numbers);
    let moments = numbered("moment", 1..=line.len());
    let halves = (0..=6).map(|half| at(&line, 30.0 * f64::from(half).max(0.2)));
    let starts = guest.programs.iter().map(|program| at(&all, program.began_s));
    let (minutes, pages) = line.iter().copied().unzip();
    Ok(named([
        ("minute", along(moments.clone(), minutes)),
        ("remote_pages", along(moments, pages)),
        ("half_pages", along(numbered("half", 0..=6), halves.collect())),
        (
            "start_pages",
            along(numbered("programs", 1..=guest.programs.len()), starts.collect()),
        ),
    ]))
}

/// Returns the value of a line at a point, interpolated between the two neighbouring points.
fn at(line: &[(f64, f64)], x: f64) -> f64 {
    let after = line.partition_point(|(here, _)| *here < x);
    match (line.get(after.wrapping_sub(1)), line.get(after)) {
        (Some(a), Some(b)) => a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_two_points_a_line_is_straight_and_beyond_them_unknown() {
        let line = [(0.0, 0.0), (10.0, 50.0), (20.0, 50.0)];
        assert_eq!((at(&line, 4.0), at(&line, 15.0)), (20.0, 50.0));
        assert!(at(&line, 21.0).is_nan());
    }
}

//! Measures the LLC misses of a VM in each tick of its first slices, as in [Kyoto, figure 3.2], and the state of a VM over
//! time.
//!
//! A tick is 10 ms of the VM's own running time. Slice 1 begins when the VM's program starts. The next slice begins when the
//! VM runs again after another VM had the CPU, or after three ticks.

use anyhow::{Context as _, Result};

use crate::design::array::{Array, Axis, Named};
use crate::models::{named, numbered};
use crate::run::{Moment, Outcome};

const SLICES: usize = 6;
const TICKS: usize = 3;
const TICK_NS: u64 = 10_000_000;

/// Returns `ticks`: misses of the first VM along axes `slice` and `tick`.
pub(super) fn by_tick(outcome: &Outcome) -> Result<Named> {
    let misses = ticks(&outcome.moments)?.concat();
    let axes = vec![numbered("slice", 1..=SLICES), numbered("tick", 1..=TICKS)];
    Ok(named([("ticks", Array::of_numbers(axes, misses))]))
}

/// Returns, for the second VM along axis `moment`: `balance`, the balance of its permit's account, and `processor`, the
/// percent of a CPU that it used until the next moment.
pub(super) fn by_moment(outcome: &Outcome) -> Result<Named> {
    let moments = &outcome.moments;
    let axis = Axis::new("moment", (0..moments.len()).map(|at| at.to_string()));
    let used = moments.windows(2).map(|pair| {
        let ran = (pair[1].vms[1].running_ns - pair[0].vms[1].running_ns) as f64;
        100.0 * ran / (pair[1].at_ns - pair[0].at_ns) as f64
    });
    let balance = moments.iter().map(|moment| moment.vms[1].balance_units as f64);
    let along = |numbers: Vec<f64>| Array::of_numbers(vec![axis.clone()], numbers);
    Ok(named([
        ("balance", along(balance.collect())),
        ("processor", along(used.collect())),
    ]))
}

/// Returns the LLC misses in each tick of the first VM's first slices, from the start of its program.
fn ticks(moments: &[Moment]) -> Result<[[f64; TICKS]; SLICES]> {
    let begin = moments
        .iter()
        .rposition(|moment| moment.vms[0].llc_references == 0);
    let own = &moments[begin.context("the program was not watched from its start")?..];
    let mut ticks = [[0.0; TICKS]; SLICES];
    // The current slice, the time run in it, and whether the VM is still running.
    let (mut slice, mut ran, mut running) = (0, 0, true);
    for pair in own.windows(2) {
        let (before, now) = (pair[0].vms[0], pair[1].vms[0]);
        let stretch = now.running_ns - before.running_ns;
        if stretch == 0 {
            running = false;
            continue;
        }
        let again = !std::mem::replace(&mut running, true) && ran > 0;
        if again || ran >= TICKS as u64 * TICK_NS {
            (slice, ran) = (slice + 1, 0);
        }
        if slice == SLICES {
            break;
        }
        // A count that spans the end of a tick belongs to the tick in which the count began.
        ticks[slice][((ran / TICK_NS) as usize).min(TICKS - 1)] +=
            (now.llc_misses - before.llc_misses) as f64;
        ran += stretch;
    }
    Ok(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::VmMoment;

    #[test]
    fn ticks_count_running_time_from_the_first_reference() {
        let moment = |running_ms: u64, references: u64, misses: u64| Moment {
            at_ns: 0,
            vms: vec![VmMoment {
                running_ns: running_ms * 1_000_000,
                llc_references: references,
                llc_misses: misses,
                balance_units: 0,
                pages_away: 0,
            }],
        };
        // The VM boots for 5 ms, runs for 10, waits, and runs for 10 more.
        let moments = [
            moment(0, 0, 0),
            moment(5, 0, 0),
            moment(10, 100, 70),
            moment(15, 200, 80),
            moment(15, 200, 80),
            moment(25, 300, 95),
        ];
        let ticks = ticks(&moments).unwrap();
        // The first slice counts 80 in its first 10 ms. Then another VM has the CPU, and slice 2 begins.
        assert_eq!(ticks[..2], [[80.0, 0.0, 0.0], [15.0, 0.0, 0.0]]);
    }
}

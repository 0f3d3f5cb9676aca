//! Watching which memory a VM uses.

use homenode_units::{Ns, Pages, VmId};

use super::{Breach, Check, LEASE, PERIOD, Verdict, commit_one, expect, lift_twice, sample, sample_of};
use crate::{Act, Failure, Host, Lever, Outcome};

pub(super) static WATCHED: Check = Check {
    name: "a watched VM's memory is seen once a window, and no more once the lease is over",
    run: memory_is_watched,
};

fn memory_is_watched(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let window_ns = PERIOD;
    let watch = |lease_ns| Act::Watch { window_ns, lease_ns };
    let trackers = sample(host)?.trackers;
    let has_tracker = trackers.iter().any(|choice| choice.why_not.is_none());
    let outcome = commit_one(host, vm, watch(LEASE))?;
    if !has_tracker {
        let is_told =
            matches!(&outcome, Outcome::Failed(error) if matches!(error.why, Failure::NoTracker { .. }));
        expect(is_told, || {
            format!("expected a failure, as there is no tracker; saw {outcome:?}")
        })?;
        let why_not = trackers.into_iter().filter_map(|choice| choice.why_not);
        return Ok(Verdict::Skipped(why_not.collect::<Vec<_>>().join("; ")));
    }
    expect(outcome == Outcome::Done, || {
        format!("expected the watch to begin, saw {outcome:?}")
    })?;
    expect(commit_one(host, vm, watch(LEASE))? == Outcome::Renewed, || {
        "watching it again was not a renewal".into()
    })?;
    let mut ends = Vec::new();
    for _ in 0..4 {
        host.wait(PERIOD);
        let watched = sample_of(host, vm)?;
        let Some(observed) = &watched.observed else {
            continue;
        };
        let seen = observed.as_observation();
        // Hosts may end a window late, but never early.
        expect(seen.interval >= window_ns, || {
            format!("a window of {window_ns} lasted {}", seen.interval)
        })?;
        expect(seen.memory > Pages::ZERO && seen.memory.0 <= seen.frames, || {
            format!("{} of {} frames", seen.memory, seen.frames)
        })?;
        if ends.last() != Some(&seen.at) {
            ends.push(seen.at);
        }
    }
    expect(
        ends.len() >= 2 && ends.windows(2).all(|pair| pair[0] < pair[1]),
        || format!("in four windows' time, windows ended at {ends:?}"),
    )?;
    // Like that of a limit, a watch's renewal may shorten the lease.
    commit_one(host, vm, watch(Ns(PERIOD.0 / 2)))?;
    host.wait(PERIOD);
    expect(sample_of(host, vm)?.observed.is_none(), || {
        "the lease is over, but observations are still reported".into()
    })?;
    commit_one(host, vm, watch(LEASE))?;
    lift_twice(host, vm, Lever::Watching)?;
    expect(sample_of(host, vm)?.observed.is_none(), || {
        "watching was lifted, but observations are still reported".into()
    })?;
    Ok(Verdict::Passed)
}

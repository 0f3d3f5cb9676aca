//! Limits on a VM's part of caches and of memory bandwidth.

use homenode_units::{Ns, VmId};

use super::{Breach, Check, LEASE, PERIOD, Verdict, commit_one, expect, lift_twice, refused, sample_of};
use crate::{Act, Failure, Host, Impossible, Lever, Limit, Outcome, Percent};

pub(super) static CONFINED: Check = Check {
    name: "a part of caches or bandwidth is seen, can be renewed and lifted, and ends with its lease",
    run: parts_are_held,
};

fn parts_are_held(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let half = Percent(50);
    let mut skipped = Vec::new();
    for limit in [Limit::CacheWays(half), Limit::MemoryBandwidth(half)] {
        if let Some(why) = part_is_held(host, vm, limit)? {
            skipped.push(why);
        }
    }
    for percent in [0, 101] {
        for limit in [
            Limit::CacheWays(Percent(percent)),
            Limit::MemoryBandwidth(Percent(percent)),
        ] {
            refused(host, vm, act(limit, LEASE), |why| {
                matches!(why, Impossible::Part { .. })
            })?;
        }
    }
    Ok(match skipped.is_empty() {
        true => Verdict::Passed,
        false => Verdict::Skipped(skipped.join("; ")),
    })
}

fn act(limit: Limit, lease_ns: Ns) -> Act {
    Act::Limit { limit, lease_ns }
}

/// Checks that a limit is held, renewed, lifted, and ends with its lease. Returns the host's reason if it cannot set the limit.
fn part_is_held(host: &mut dyn Host, vm: VmId, limit: Limit) -> Result<Option<String>, Breach> {
    let is_confined = |host: &mut dyn Host, expected: Option<Limit>| {
        let seen = sample_of(host, vm)?.confined;
        expect(seen == expected, || {
            format!("{expected:?} expected, {seen:?} seen")
        })
    };
    let outcome = commit_one(host, vm, act(limit, LEASE))?;
    if let Outcome::Failed(error) = &outcome
        && let Failure::Host { .. } = &error.why
    {
        is_confined(host, None)?;
        lift_twice(host, vm, Lever::Resctrl)?;
        return Ok(Some(error.to_string()));
    }
    expect(outcome == Outcome::Done, || {
        format!("expected {limit} to be done, saw {outcome:?}")
    })?;
    is_confined(host, Some(limit))?;
    let outcome = commit_one(host, vm, act(limit, LEASE))?;
    expect(outcome == Outcome::Renewed, || {
        format!("expected the renewed limit to be done, saw {outcome:?}")
    })?;
    lift_twice(host, vm, Lever::Resctrl)?;
    is_confined(host, None)?;
    let outcome = commit_one(host, vm, act(limit, Ns(PERIOD.0 / 2)))?;
    expect(outcome == Outcome::Done, || {
        format!("expected {limit} to be done, saw {outcome:?}")
    })?;
    host.wait(PERIOD);
    is_confined(host, None)?;
    Ok(None)
}

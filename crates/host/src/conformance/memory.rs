//! Limits on memory, set through the VM's balloon.

use homenode_units::{Bytes, Ns, VmId};

use super::{
    Breach, Check, LEASE, PERIOD, Verdict, commit_one, expect, lift_twice, refused, sample, sample_of,
};
use crate::{Act, Balloon, Host, Impossible, Lever, Limit, Outcome};

pub(super) static LIMITED: Check = Check {
    name: "a limit on memory is seen, can be renewed and lifted, and ends with its lease",
    run: memory_is_limited,
};

fn memory_is_limited(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let balloon = |host: &mut dyn Host| Ok::<_, Breach>(sample_of(host, vm)?.balloon);
    let before = sample(host)?.version;
    let Some(first) = balloon(host)? else {
        return cannot_be_limited(host, vm);
    };
    let less = Bytes(first.maximum.0 / 10 * 9).to_pages().to_bytes();
    let outcome = commit_one(host, vm, limit(less, LEASE))?;
    expect(outcome == Outcome::Done, || {
        format!("expected the memory limit to be done, saw {outcome:?}")
    })?;
    let held = sample(host)?;
    expect(held.version > before, || {
        "limiting memory left the version as it was".into()
    })?;
    let is_held = |seen: Option<Balloon>| {
        seen.is_some_and(|seen| (seen.limit, seen.maximum) == (Some(less), first.maximum))
    };
    let seen = balloon(host)?;
    expect(is_held(seen), || {
        format!("held to {less} of {}, seen is {seen:?}", first.maximum)
    })?;
    let outcome = commit_one(host, vm, limit(less, LEASE))?;
    expect(outcome == Outcome::Renewed, || {
        format!("expected the renewed limit to be done, saw {outcome:?}")
    })?;
    let is_free = |seen: Option<Balloon>| {
        seen.is_some_and(|seen| {
            seen.limit.is_none() && seen.maximum.0.abs_diff(first.maximum.0) <= first.maximum.0 / 5
        })
    };
    lift_twice(host, vm, Lever::Memory)?;
    let seen = balloon(host)?;
    expect(is_free(seen), || format!("lifted, but seen is {seen:?}"))?;
    let outcome = commit_one(host, vm, limit(less, Ns(PERIOD.0 / 2)))?;
    expect(outcome == Outcome::Done, || {
        format!("expected the memory limit to be done, saw {outcome:?}")
    })?;
    host.wait(PERIOD);
    let seen = balloon(host)?;
    expect(is_free(seen), || {
        format!("the lease is over, but seen is {seen:?}")
    })?;
    for memory in [Bytes::ZERO, first.maximum + first.maximum] {
        refused(host, vm, limit(memory, LEASE), is_memory)?;
    }
    Ok(Verdict::Passed)
}

fn limit(memory: Bytes, lease_ns: Ns) -> Act {
    Act::Limit {
        limit: Limit::Memory(memory),
        lease_ns,
    }
}

fn is_memory(why: &Impossible) -> bool {
    matches!(why, Impossible::Memory { .. })
}

/// Checks that limiting the memory of a VM without a balloon is refused.
fn cannot_be_limited(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    refused(host, vm, limit(Bytes::from_mib(64), LEASE), is_memory)?;
    Ok(Verdict::Skipped("the VM has no balloon".into()))
}

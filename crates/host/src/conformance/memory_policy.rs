//! Placing and sampling of pages.

use homenode_units::{MemoryPolicy, Migration, Placing, VmId};

use super::{Breach, Check, Verdict, commit_one, expect, sample, sample_of};
use crate::{Act, Failure, Host, Outcome};

pub(super) static SET: Check = Check {
    name: "a memory policy is seen once it is set, and one that the host cannot have leaves the one before",
    run: policies_are_set,
};

fn policies_are_set(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let first = sample_of(host, vm)?.memory_policy;
    let placings = [Placing::FirstTouch, Placing::Round4k, Placing::Round1g];
    let migrations = [Migration::None, Migration::Carrefour, Migration::AutoNuma];
    let mut why_not = String::new();
    let mut others_set = 0;
    for placing in placings {
        for migration in migrations {
            let policy = MemoryPolicy { placing, migration };
            let before = sample_of(host, vm)?.memory_policy;
            let outcome = commit_one(host, vm, Act::SetMemoryPolicy { policy })?;
            let expected = match outcome {
                Outcome::Done => policy,
                Outcome::Failed(error) => {
                    let is_said =
                        matches!(&error.why, Failure::MemoryPolicy { policy: asked, .. } if *asked == policy);
                    expect(is_said, || format!("{policy} failed: {error}"))?;
                    why_not = error.to_string();
                    before
                }
                other => return Err(format!("expected policy {policy} to be set, saw {other:?}").into()),
            };
            let now = sample(host)?;
            let seen = now.vm(vm).ok_or("the VM is gone")?.memory_policy;
            expect(seen == expected, || {
                format!("{policy} was requested while {before} was in force, and now {seen} is")
            })?;
            let is_blind = now.no_page_uses.is_some();
            expect(seen.migration != Migration::Carrefour || !is_blind, || {
                format!("{seen} is in force, but pages are not sampled")
            })?;
            others_set += usize::from(seen != first);
        }
    }
    let outcome = commit_one(host, vm, Act::SetMemoryPolicy { policy: first })?;
    let seen = sample_of(host, vm)?.memory_policy;
    expect(outcome == Outcome::Done && seen == first, || {
        format!("expected policy {first} again, saw {seen} and {outcome:?}")
    })?;
    Ok(match others_set {
        0 => Verdict::Skipped(why_not),
        _ => Verdict::Passed,
    })
}

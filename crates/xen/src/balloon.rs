//! Memory of domains, by their balloons. What a guest is to come to is its target in xenstore; `xl mem-set` changes it with all
//! that belongs to it: the hypervisor's own bound, and, of what is no PV domain, the pages that are populated on demand.
//!
//! A balloon follows as fast as its guest likes, so reading back what was asked for tells only that: the domain's pages tell the
//! rest. A target that is not the agent's is its operator's, and left alone.

use homenode_host::Balloon;
use homenode_undo::journal::{Entry, Written};
use homenode_units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::hypervisor::{Hypervisor, Listed};
use crate::store::Asking;

/// Its operator's target, and targets that it may have been left with, the newest first; KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Its operator's.
    pub before: u64,
    /// The agent's.
    pub ours: Vec<u64>,
}

impl Written for Target {
    const KEY: &'static str = "xen-memory";
}

/// What xenstore has of a domain's memory, below its own place there.
const KEYS: [&str; 3] = ["memory/target", "memory/static-max", "memory/videoram"];

/// Where that stands, of the domain of this number.
pub fn paths(domid: u32) -> impl Iterator<Item = String> {
    KEYS.into_iter()
        .map(move |key| format!("/local/domain/{domid}/{key}"))
}

/// How many that are.
pub const PATHS: usize = KEYS.len();

/// The target by what stands there, in KiB. `None` of a domain without a balloon, of one that is being built, and of one with
/// video memory: `xl` counts that in, and none was tried.
pub fn target(values: &[Option<String>]) -> Option<u64> {
    let number = |at: usize| values.get(at)?.as_ref()?.trim().parse::<u64>().ok();
    let (target, most) = (number(0)?, number(1)?);
    let has_video = number(2).is_some_and(|video| video > 0);
    (target > 0 && target <= most && !has_video).then_some(target)
}

/// The same, asked for now.
///
/// # Errors
/// Xenstore does not tell.
pub fn target_of(store: &mut Asking, domid: u32) -> Result<Option<u64>, String> {
    let said = store.read(paths(domid).collect());
    let said = said.map_err(|why| format!("xenstored does not tell its memory: {why}"))?;
    Ok(target(&said))
}

/// The balloon for a sample, of a domain with this target and so many pages.
pub fn sample(target: u64, pages: u64, entry: Option<&Entry>) -> Balloon {
    let ours = entry.and_then(Entry::get::<Target>);
    let ours = ours.filter(|ours| ours.ours.contains(&target));
    let bytes = |kib: u64| Bytes(kib.saturating_mul(1024));
    Balloon {
        current: Pages(pages).to_bytes(),
        maximum: bytes(ours.as_ref().map_or(target, |ours| ours.before)),
        limit: ours.map(|_| bytes(target)),
        // Xen's driver of a balloon says nothing of it.
        guest: None,
    }
}

impl Target {
    /// Gives a domain its operator's target back. Whether it had one of ours.
    ///
    /// # Errors
    /// Why that is not known, or could not be.
    pub fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String> {
        let now = target_of(&mut hypervisor.store(), of.domid)?;
        if !now.is_some_and(|now| self.ours.contains(&now)) {
            return Ok(false);
        }
        hypervisor.set_memory(of.domid, self.before).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_number_up_to_the_most() {
        let of = |values: [&str; 3]| {
            let said = values.map(|value| Some(value.to_owned()).filter(|value| !value.is_empty()));
            target(&said)
        };
        assert_eq!(of(["131072", "131072", ""]), Some(131_072));
        assert_eq!(of(["100000", "131072", "0"]), Some(100_000));
        assert_eq!(
            of(["100000", "131072", "-1"]),
            Some(100_000),
            "libxl's word for none"
        );
        for said in [
            ["", "131072", ""],
            ["131072", "", ""],
            ["0", "131072", ""],
            ["131073", "131072", ""],
            ["x", "131072", ""],
            ["131072", "139264", "8192"],
        ] {
            assert_eq!(of(said), None, "{said:?}");
        }
        assert_eq!(target(&[]), None);
    }
}

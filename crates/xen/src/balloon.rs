//! Memory of domains, by their balloons. A guest's target is in xenstore; `xl mem-set` changes it together with all that
//! depends on it: the hypervisor's own bound, and, unless it is a PV domain, the pages that are populated on demand.
//!
//! A balloon follows at its guest's own pace, so reading the target back shows only the request: the domain's pages show the
//! rest. A target that is not the agent's is its operator's, and is not touched.

use homenode_host::Balloon;
use homenode_undo::journal::{Entry, Written};
use homenode_units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::hypervisor::{Hypervisor, Listed};
use crate::store::Asking;

/// The operator's target, and targets that it may have been left with, the newest first; KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The operator's.
    pub before: u64,
    /// The agent's.
    pub ours: Vec<u64>,
}

impl Written for Target {
    const KEY: &'static str = "xen-memory";
}

/// Xenstore's keys about a domain's memory, below the domain's own path.
const KEYS: [&str; 3] = ["memory/target", "memory/static-max", "memory/videoram"];

/// Paths of these keys, for the domain of this number.
pub fn paths(domid: u32) -> impl Iterator<Item = String> {
    KEYS.into_iter()
        .map(move |key| format!("/local/domain/{domid}/{key}"))
}

/// Number of paths.
pub const PATHS: usize = KEYS.len();

/// The target according to these values, in KiB. `None` for a domain without a balloon, one that is being built, and one
/// with video memory: `xl` counts that in, and this was never tried.
pub fn target(values: &[Option<String>]) -> Option<u64> {
    let number = |at: usize| values.get(at)?.as_ref()?.trim().parse::<u64>().ok();
    let (target, most) = (number(0)?, number(1)?);
    let has_video = number(2).is_some_and(|video| video > 0);
    (target > 0 && target <= most && !has_video).then_some(target)
}

/// As [`target`], read now.
///
/// # Errors
/// When xenstore does not answer.
pub fn target_of(store: &mut Asking, domid: u32) -> Result<Option<u64>, String> {
    let said = store.read(paths(domid).collect());
    let said = said.map_err(|why| format!("xenstored does not tell its memory: {why}"))?;
    Ok(target(&said))
}

/// The balloon for a sample, for a domain with this target and this many pages.
pub fn sample(target: u64, pages: u64, entry: Option<&Entry>) -> Balloon {
    let ours = entry.and_then(Entry::get::<Target>);
    let ours = ours.filter(|ours| ours.ours.contains(&target));
    let bytes = |kib: u64| Bytes(kib.saturating_mul(1024));
    Balloon {
        current: Pages(pages).to_bytes(),
        maximum: bytes(ours.as_ref().map_or(target, |ours| ours.before)),
        limit: ours.map(|_| bytes(target)),
        // Xen's balloon driver reports nothing about it.
        guest: None,
    }
}

impl Target {
    /// Restores a domain's operator's target. Returns whether it had one of ours.
    ///
    /// # Errors
    /// Why the target is not known, or could not be restored.
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

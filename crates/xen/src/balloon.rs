//! Targets of domains' balloons in xenstore.

use crate::error::NoTarget;
use crate::store::Asking;

/// Xenstore keys about a domain's memory, below the domain's own path.
const KEYS: [&str; 3] = ["memory/target", "memory/static-max", "memory/videoram"];

/// Returns the paths of these keys for the domain with this number.
pub(crate) fn paths(domid: u32) -> impl Iterator<Item = String> {
    KEYS.into_iter()
        .map(move |key| format!("/local/domain/{domid}/{key}"))
}

/// Number of paths for each domain.
pub(crate) const PATHS: usize = KEYS.len();

/// Returns the balloon's target in KiB, from the values at these paths. `None` for a domain that has no balloon, is being built,
/// or has video memory: `xl` includes video memory in the target, and such a domain was never tried.
pub(crate) fn target(values: &[Option<String>]) -> Option<u64> {
    let number = |at: usize| values.get(at)?.as_ref()?.trim().parse::<u64>().ok();
    let (target, most) = (number(0)?, number(1)?);
    let has_video = number(2).is_some_and(|video| video > 0);
    (target > 0 && target <= most && !has_video).then_some(target)
}

/// Reads these values now and returns [`target`].
///
/// # Errors
/// If xenstore does not answer.
pub(crate) fn target_of(store: &mut Asking, domid: u32) -> Result<Option<u64>, NoTarget> {
    let said = store.read(paths(domid).collect());
    let said = said.map_err(NoTarget)?;
    Ok(target(&said))
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

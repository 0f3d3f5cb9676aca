//! Whether this system is dom0 of a Xen host, according to the kernel.
//!
//! Xen's own file system (xenfs) shows it if it is mounted, which distributions leave to Xen's tools. The kernel's files below
//! `/sys/hypervisor` need no mount of their own. If they name the initial domain but xenfs shows nothing, this is an incomplete
//! dom0 and not a host without Xen.

use std::io::ErrorKind;
use std::path::Path;

use crate::error::XenError;

/// File in xenfs with the capabilities of the domain that reads it.
const CAPABILITIES: &str = "proc/xen/capabilities";
/// File that names the hypervisor below this kernel, with or without xenfs.
const KIND: &str = "sys/hypervisor/type";
/// The features that the hypervisor gives this domain, written as eight hexadecimal digits per 32 features, with the first
/// features last.
const FEATURES: &str = "sys/hypervisor/properties/features";
/// The feature that Xen gives only to the initial domain (`XENFEAT_dom0`). systemd uses it too.
const INITIAL_DOMAIN: u32 = 1 << 11;

/// Returns true if this system is dom0 of a Xen host, according to the kernel's files below `root`. Returns false if no file
/// shows it.
///
/// # Errors
/// [`XenError::NoXenfs`] if it is dom0, but lacks what an agent needs there. Such a system must not be treated as a host without
/// Xen.
pub fn is_dom0(root: &Path) -> Result<bool, XenError> {
    match check(root) {
        Ok(()) => Ok(true),
        Err(error @ XenError::NoXenfs { .. }) => Err(error),
        Err(_) => Ok(false),
    }
}

/// Like [`is_dom0`], but returns the reason. [`XenError::NotDom0`] means that the files show that there is no Xen, or that this
/// is another domain.
///
/// # Errors
/// When this machine is not dom0, or when the files do not show whether it is.
pub(crate) fn check(root: &Path) -> Result<(), XenError> {
    let not = |cause: &str| Err(XenError::NotDom0 { cause: cause.into() });
    let unknown = |cause: String| Err(XenError::Unknown { cause });
    let error = match std::fs::read_to_string(root.join(CAPABILITIES)) {
        Ok(text) if text.contains("control_d") => return Ok(()),
        Ok(_) => return not("/proc/xen/capabilities does not contain `control_d`"),
        Err(error) => error,
    };
    let is_missing = error.kind() == ErrorKind::NotFound;
    let cause = format!("/{CAPABILITIES}: {error}");
    match std::fs::read_to_string(root.join(KIND)) {
        Ok(kind) if kind.trim() == "xen" => match is_initial_domain(root) {
            Some(true) => Err(XenError::NoXenfs { cause }),
            Some(false) if is_missing => not("it lacks the Xen feature that only dom0 has"),
            Some(false) | None => unknown(cause),
        },
        Ok(_) if is_missing => not("its hypervisor is not Xen"),
        Err(other) if is_missing && other.kind() == ErrorKind::NotFound => {
            not("there is no /proc/xen/capabilities")
        }
        Err(other) if is_missing => unknown(format!("/{KIND}: {other}")),
        Ok(_) | Err(_) => unknown(cause),
    }
}

/// Returns true if a Xen below this kernel takes it for the initial domain; `None` if the features cannot be read.
fn is_initial_domain(root: &Path) -> Option<bool> {
    let text = std::fs::read_to_string(root.join(FEATURES)).ok()?;
    let text = text.trim();
    let first = text.get(text.len().saturating_sub(8)..)?;
    let first = u32::from_str_radix(first, 16).ok()?;
    Some(first & INITIAL_DOMAIN != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns both results for a tree with these files.
    fn found(files: &[(&str, &str)]) -> (Result<(), XenError>, Result<bool, XenError>) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (check(dir.path()), is_dom0(dir.path()))
    }

    #[test]
    fn only_what_says_that_there_is_no_xen_is_taken_for_that() {
        let is_not = |error: XenError| matches!(error, XenError::NotDom0 { .. });
        let found = |files: &[(&str, &str)]| found(files).0.map_err(is_not);
        assert_eq!(found(&[(CAPABILITIES, "control_d\n")]), Ok(()));
        assert_eq!(found(&[]), Err(true), "no Xen");
        assert_eq!(found(&[(CAPABILITIES, "")]), Err(true), "another domain");
        assert_eq!(found(&[(KIND, "kvm\n")]), Err(true));
        assert_eq!(found(&[(KIND, "xen\n")]), Err(false), "nothing says which domain");
        // Make the file unreadable by putting a directory in its place.
        let inside = format!("{CAPABILITIES}/x");
        assert_eq!(found(&[(inside.as_str(), "")]), Err(false));
        let inside = format!("{KIND}/x");
        assert_eq!(found(&[(inside.as_str(), "")]), Err(false));
    }

    #[test]
    fn a_dom0_without_xenfs_is_taken_for_no_host_without_xen() {
        let hidden = format!("{CAPABILITIES}/x");
        for features in ["00002a05\n", "00000800", "0000000000000800\n"] {
            let bare = [(KIND, "xen\n"), (FEATURES, features)];
            let unreadable = [bare[0], bare[1], (hidden.as_str(), "")];
            for files in [&bare[..], &unreadable] {
                let (why, is_dom0) = found(files);
                assert!(
                    matches!(why, Err(XenError::NoXenfs { .. })),
                    "{features}: {why:?}"
                );
                let said = is_dom0.unwrap_err().to_string();
                assert!(said.contains("`mount -t xenfs xenfs /proc/xen`"), "{said}");
            }
        }
        let mounted = [
            (KIND, "xen\n"),
            (FEATURES, "00002a05\n"),
            (CAPABILITIES, "control_d\n"),
        ];
        assert_eq!(found(&mounted), (Ok(()), Ok(true)));
    }

    #[test]
    fn another_domain_is_a_host_like_any_other() {
        // Without the feature; with the same bit among later features; not a number; no file.
        for features in ["00000705\n", "0000080000000000\n", "", "é0000800", "00000z00\n"] {
            let files = [(KIND, "xen\n"), (FEATURES, features)];
            assert_eq!(found(&files).1, Ok(false), "{features}");
        }
        assert_eq!(found(&[(KIND, "xen\n")]).1, Ok(false));
        assert_eq!(found(&[(KIND, "xen\n"), (CAPABILITIES, "\n")]).1, Ok(false));
        // The host was rebooted as a guest, so nothing is left that an agent in dom0 could restore.
        let guest = [(KIND, "xen\n"), (FEATURES, "00000705\n")];
        assert!(matches!(found(&guest).0, Err(XenError::NotDom0 { .. })));
        // Without Xen, features do not matter.
        assert_eq!(found(&[(KIND, "kvm\n"), (FEATURES, "00000800\n")]).1, Ok(false));
    }
}

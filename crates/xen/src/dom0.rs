//! Whether this system is dom0 of a Xen host: what the kernel says of it.

use std::io::ErrorKind;
use std::path::Path;

use crate::error::XenError;

/// What xenfs says of this domain.
const CAPABILITIES: &str = "proc/xen/capabilities";
/// The hypervisor below this kernel, whether xenfs is mounted or not.
const KIND: &str = "sys/hypervisor/type";

/// Whether this system is dom0 of a Xen host, by what the kernel says below `root`. Where that cannot be read it is not.
pub fn is_dom0(root: &Path) -> bool {
    check(root).is_ok()
}

/// The same with the reason: only what says that there is no Xen, or that this is another domain, is [`XenError::NotDom0`].
///
/// # Errors
/// Why it is not, or why that is not known.
pub fn check(root: &Path) -> Result<(), XenError> {
    let not = |cause: &str| Err(XenError::NotDom0 { cause: cause.into() });
    let unknown = |cause: String| Err(XenError::Unknown { cause });
    match std::fs::read_to_string(root.join(CAPABILITIES)) {
        Ok(text) if text.contains("control_d") => Ok(()),
        Ok(_) => not("/proc/xen/capabilities does not say `control_d`"),
        Err(error) if error.kind() == ErrorKind::NotFound => match std::fs::read_to_string(root.join(KIND)) {
            Ok(kind) if kind.trim() == "xen" => {
                unknown("there is no /proc/xen/capabilities: mount xenfs at /proc/xen".into())
            }
            Ok(_) => not("its hypervisor is another"),
            Err(error) if error.kind() == ErrorKind::NotFound => not("there is no /proc/xen/capabilities"),
            Err(error) => unknown(format!("/{KIND}: {error}")),
        },
        Err(error) => unknown(format!("/{CAPABILITIES}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_that_there_is_no_xen_is_taken_for_that() {
        let is_not = |error: XenError| matches!(error, XenError::NotDom0 { .. });
        let found = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = dir.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            check(dir.path()).map_err(is_not)
        };
        assert_eq!(found(&[(CAPABILITIES, "control_d\n")]), Ok(()));
        assert_eq!(found(&[]), Err(true), "no Xen");
        assert_eq!(found(&[(CAPABILITIES, "")]), Err(true), "another domain");
        assert_eq!(found(&[(KIND, "kvm\n")]), Err(true));
        assert_eq!(found(&[(KIND, "xen\n")]), Err(false), "xenfs is not mounted");
        // What cannot be read: here a directory in its place, and one that is no text.
        let inside = format!("{CAPABILITIES}/x");
        assert_eq!(found(&[(inside.as_str(), "")]), Err(false));
        let inside = format!("{KIND}/x");
        assert_eq!(found(&[(inside.as_str(), "")]), Err(false));
    }
}

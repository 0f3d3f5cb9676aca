//! What resctrl can do on this host: a processor may have any part of it without the others.

use std::path::Path;

use homenode_kernel::confine::Confiner;
use homenode_kernel::resctrl::Resctrl;
use homenode_machine::Machine;

use super::{Found, lack};

/// Says what resctrl can do on this host, part by part.
pub(super) fn examine(root: &Path, machine: Option<&Machine>) -> Found {
    let missing = |why: String| {
        lack(
            why,
            "permits are enforced by CPU quotas alone",
            match has_cat(root) {
                true => "mount -t resctrl resctrl /sys/fs/resctrl",
                false => "none: this processor has none (no rdt_a in /proc/cpuinfo)",
            },
        )
    };
    let confiner = Confiner::new(root);
    if !confiner.is_mounted() {
        return Err(missing("it is not mounted".to_owned()));
    }
    let counts = match machine.map(|machine| Resctrl::open(root, machine)) {
        Some(Ok(counters)) => match counters.map(|counters| counters.note) {
            Some(None) => Ok(()),
            Some(Some(why)) => Err(why),
            None => Err("no MBM".to_owned()),
        },
        Some(Err(error)) => Err(error.to_string()),
        None => Err("the machine cannot be read".to_owned()),
    };
    let (ways, bandwidth) = confiner.allocates();
    let allocates = match (ways, bandwidth) {
        (true, true) => "allocates parts of caches (CAT) and memory bandwidth (MBA)",
        (true, false) => "allocates parts of caches (CAT), not memory bandwidth (MBA)",
        (false, true) => "allocates memory bandwidth (MBA), not parts of caches (CAT)",
        (false, false) => "allocates neither parts of caches (CAT) nor memory bandwidth (MBA)",
    };
    let counted = match counts {
        Ok(()) => "it counts nodes' memory traffic (MBM)".to_owned(),
        Err(why) => format!("it does not count nodes' memory traffic ({why})"),
    };
    let found = format!("it is mounted, and {allocates}; {counted}");
    match ways || bandwidth {
        true => Ok(found),
        false => Err(lack(
            found,
            "permits are enforced by CPU quotas alone",
            "none: this processor has neither, or the kernel does not support it",
        )),
    }
}

/// Returns whether the processor can allocate parts of its caches.
fn has_cat(root: &Path) -> bool {
    let cpuinfo = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| {
        flags
            .split_ascii_whitespace()
            .any(|flag| matches!(flag, "rdt_a" | "cat_l3"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resctrl_is_described_by_what_the_processor_has() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join("sys/fs/resctrl").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let said = |machine: &Machine| match examine(root.path(), Some(machine)) {
            Ok(found) => (true, found),
            Err(lack) => (false, lack.found),
        };
        let machine = homenode_machine_files::preset("r910").unwrap();
        assert_eq!(said(&machine), (false, "it is not mounted".to_owned()));
        write("schemata", "L3:0=7ff\n");
        let (has, found) = said(&machine);
        assert!(
            !has && found.contains("neither parts of caches (CAT) nor memory bandwidth (MBA)"),
            "{found}"
        );
        write("info/L3/cbm_mask", "7ff\n");
        let (has, found) = said(&machine);
        assert!(
            has && found.contains("allocates parts of caches (CAT), not memory bandwidth (MBA)")
                && found.contains("(no MBM)"),
            "{found}"
        );
        write("info/MB/min_bandwidth", "10\n");
        write("info/L3_MON/mon_features", "mbm_local_bytes\n");
        write("mon_data/mon_L3_00/mbm_local_bytes", "0\n");
        let (has, found) = said(&machine);
        assert!(
            has && found.contains("(CAT) and memory bandwidth (MBA)")
                && found.contains("more than two nodes"),
            "{found}"
        );
    }
}

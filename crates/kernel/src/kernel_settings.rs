//! Current settings of what the kernel does with memory on its own: AutoNUMA, transparent huge pages, KSM, zone reclaim.
//!
//! Operators and `tuned` profiles change these while VMs run, so they are read again every 10 s. A missing file means that the
//! kernel was built without the feature. A malformed file is reported, and its setting counts as unknown.

use std::path::Path;
use std::str::FromStr;

use homenode_host::{KernelSettings, NumaBalancing, NumaScanning, TransparentHugePages};
use homenode_units::{Bytes, Ns};

use crate::read::{self, ReadError};

const BALANCING: &str = "proc/sys/kernel/numa_balancing";
/// Path of the settings of NUMA balancing's scans since Linux 5.13. Before, these settings were at [`BALANCING`], followed by an
/// underscore and the same names.
const SCANNING: &str = "sys/kernel/debug/sched/numa_balancing";
const THP: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const KSM: &str = "sys/kernel/mm/ksm";
const ZONE_RECLAIM: &str = "proc/sys/vm/zone_reclaim_mode";

/// Reads all settings. Calls `trouble` for each file that exists and cannot be understood.
pub fn read(root: &Path, mut trouble: impl FnMut(ReadError)) -> KernelSettings {
    let mut number = |path: &str, expected, known: fn(u32) -> bool| -> Option<u32> {
        let path = root.join(path);
        let found = read::value_if_there::<u32>(&path, expected).and_then(|found| match found {
            Some(number) if !known(number) => Err(ReadError::malformed(&path, expected, &number.to_string())),
            found => Ok(found),
        });
        found.unwrap_or_else(|error| {
            trouble(error);
            None
        })
    };
    let balancing = number(BALANCING, "a number from 0 to 3", |number| {
        NumaBalancing::of(number).is_some()
    });
    let merging = number(&format!("{KSM}/run"), "0, 1 or 2", |number| number <= 2);
    let across = number(&format!("{KSM}/merge_across_nodes"), "0 or 1", |number| {
        number <= 1
    });
    // Flags: 1 reclaim, 2 write, 4 swap.
    let reclaim = number(ZONE_RECLAIM, "a number from 0 to 7", |number| number <= 7);
    let huge_pages = thp(root).unwrap_or_else(|error| {
        trouble(error);
        None
    });
    KernelSettings {
        numa_balancing: balancing.and_then(NumaBalancing::of),
        scanning: scanning(root),
        transparent_huge_pages: huge_pages,
        merges_pages: merging.map(|run| run == 1),
        merges_across_nodes: across.map(|across| across == 1),
        reclaims_zones: reclaim.map(|flags| flags != 0),
    }
}

/// Returns the word in brackets in `always [madvise] never`.
fn thp(root: &Path) -> Result<Option<TransparentHugePages>, ReadError> {
    let path = root.join(THP);
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let chosen = text
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix('['));
    match chosen.and_then(|word| word.strip_suffix(']')) {
        Some("always") => Ok(Some(TransparentHugePages::Always)),
        Some("madvise") => Ok(Some(TransparentHugePages::Madvise)),
        Some("never") => Ok(Some(TransparentHugePages::Never)),
        _ => Err(ReadError::malformed(
            &path,
            "`always madvise never`, one in brackets",
            &text,
        )),
    }
}

/// Returns the scan settings; `None` if one is missing. A confined agent does not see debugfs, which is not an error.
fn scanning(root: &Path) -> Option<NumaScanning> {
    let one = |name: &str| {
        let at = |path: String| {
            u64::from_str(
                read::text_if_there(&root.join(path), read::SMALL_BYTES)
                    .ok()??
                    .trim(),
            )
            .ok()
        };
        at(format!("{SCANNING}/{name}")).or_else(|| at(format!("{BALANCING}_{name}")))
    };
    let ms = |name: &str| Some(Ns(one(name)?.checked_mul(1_000_000)?));
    Some(NumaScanning {
        delay_ns: ms("scan_delay_ms")?,
        period_min_ns: ms("scan_period_min_ms")?,
        period_max_ns: ms("scan_period_max_ms")?,
        size_bytes: Bytes(one("scan_size_mb")?.checked_mul(1 << 20)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    fn seen(files: &[(&str, &str)]) -> (KernelSettings, Vec<String>) {
        let tree = Tree::new(files);
        let mut said = Vec::new();
        let settings = read(tree.root(), |error| said.push(error.to_string()));
        (settings, said)
    }

    /// Defaults of Debian 12 and 13, RHEL 9, Proxmox 8.
    const STOCK: [(&str, &str); 4] = [
        (BALANCING, "1\n"),
        (THP, "always [madvise] never\n"),
        ("sys/kernel/mm/ksm/run", "0\n"),
        (ZONE_RECLAIM, "0\n"),
    ];

    #[test]
    fn a_stock_host_is_read_as_it_is() {
        let (settings, said) = seen(&STOCK);
        assert_eq!(said, [""; 0]);
        assert!(settings.balances());
        assert_eq!(
            settings.to_string(),
            "NUMA balancing on, THP madvise, KSM off, zone reclaim off"
        );
        assert_eq!(settings.scanning, None, "debugfs is not there");
    }

    #[test]
    fn how_it_scans_is_found_where_the_kernels_age_puts_it() {
        let values = [
            ("scan_delay_ms", "1000\n"),
            ("scan_period_min_ms", "1000"),
            ("scan_period_max_ms", "60000\n"),
            ("scan_size_mb", "256\n"),
        ];
        for place in [format!("{SCANNING}/"), format!("{BALANCING}_")] {
            let files: Vec<(String, &str)> = values
                .iter()
                .map(|(name, value)| (format!("{place}{name}"), *value))
                .collect();
            let files: Vec<(&str, &str)> = files
                .iter()
                .map(|(path, value)| (path.as_str(), *value))
                .collect();
            let scanning = seen(&files).0.scanning.expect(&place);
            assert_eq!(
                (scanning.delay_ns, scanning.period_max_ns),
                (Ns::from_secs(1), Ns::from_secs(60))
            );
            assert_eq!(scanning.size_bytes, Bytes::from_mib(256));
        }
    }

    #[test]
    fn a_kernel_without_a_feature_is_no_trouble_and_what_is_not_in_order_is_said_and_unknown() {
        assert_eq!(seen(&[]), (KernelSettings::default(), vec![]));
        for (path, text) in [
            (BALANCING, "4\n"),
            (BALANCING, "-1\n"),
            (BALANCING, ""),
            (BALANCING, "99999999999999999999\n"),
            (THP, "always madvise never\n"),
            (THP, "always [sometimes] never"),
            (THP, "[always"),
            ("sys/kernel/mm/ksm/run", "yes"),
            (ZONE_RECLAIM, "8"),
        ] {
            let (settings, said) = seen(&[(path, text)]);
            assert_eq!(settings, KernelSettings::default(), "{path}: {text:?}");
            assert!(said.len() == 1 && said[0].contains(path), "{text:?}: {said:?}");
        }
    }
}

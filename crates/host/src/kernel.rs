//! Memory management that the host's kernel does by itself, independent of the agent.

use std::fmt;

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of the host's Linux at the time of a sample. Settings that a kernel lacks or hides are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KernelSettings {
    /// Whether the kernel moves pages and threads of all processes closer together (`kernel.numa_balancing`, AutoNUMA).
    pub numa_balancing: Option<NumaBalancing>,
    /// AutoNUMA's scan settings. Only root can read them, in debugfs.
    pub scanning: Option<NumaScanning>,
    /// Which processes get transparent huge pages.
    pub transparent_huge_pages: Option<TransparentHugePages>,
    /// Whether the kernel merges pages with the same content (whether KSM runs).
    pub merges_pages: Option<bool>,
    /// Whether merged pages may come from different nodes (`merge_across_nodes` of KSM).
    pub merges_across_nodes: Option<bool>,
    /// Whether the kernel frees a node's page cache before it takes memory from another node (`vm.zone_reclaim_mode`).
    pub reclaims_zones: Option<bool>,
}

/// The value of `kernel.numa_balancing`: a set of flags since Linux 5.18, and 0 or 1 before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NumaBalancing {
    /// 0: nothing is moved.
    #[default]
    Off,
    /// 1: pages and threads move closer together.
    On,
    /// 2: only pages in slow memory that are used often move to fast memory.
    Tiering,
    /// 3: `On` and `Tiering` together.
    OnAndTiering,
}

impl NumaBalancing {
    /// Returns the meaning of the kernel's number; `None` for a number that no kernel reports.
    pub const fn of(number: u32) -> Option<NumaBalancing> {
        match number {
            0 => Some(NumaBalancing::Off),
            1 => Some(NumaBalancing::On),
            2 => Some(NumaBalancing::Tiering),
            3 => Some(NumaBalancing::OnAndTiering),
            _ => None,
        }
    }

    /// Returns true if pages and threads move closer together.
    pub const fn is_on(self) -> bool {
        matches!(self, NumaBalancing::On | NumaBalancing::OnAndTiering)
    }
}

impl fmt::Display for NumaBalancing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NumaBalancing::Off => "off",
            NumaBalancing::On => "on",
            NumaBalancing::Tiering => "for memory tiers only",
            NumaBalancing::OnAndTiering => "on, also for memory tiers",
        })
    }
}

/// AutoNUMA's scans of a process (`scan_*` of the kernel's scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NumaScanning {
    /// Time from a process's start to its first scan.
    pub delay_ns: Ns,
    /// Shortest time for one pass over all of a process's memory.
    pub period_min_ns: Ns,
    /// Longest time for such a pass.
    pub period_max_ns: Ns,
    /// Amount of memory per scan.
    pub size_bytes: Bytes,
}

/// Which processes get huge pages without reserving a pool of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TransparentHugePages {
    /// All processes.
    Always,
    /// Processes that ask for huge pages (`madvise`), as QEMU does for a guest's memory.
    Madvise,
    /// No process.
    Never,
}

impl fmt::Display for TransparentHugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransparentHugePages::Always => "always",
            TransparentHugePages::Madvise => "madvise",
            TransparentHugePages::Never => "never",
        })
    }
}

impl KernelSettings {
    /// Returns true if no setting is known.
    pub fn is_unknown(&self) -> bool {
        *self == KernelSettings::default()
    }

    /// Returns true if AutoNUMA is on; false if the kernel does not say.
    pub fn balances(&self) -> bool {
        self.numa_balancing.is_some_and(NumaBalancing::is_on)
    }

    /// Returns what changed since an earlier reading: each setting's sysctl or sysfs name, with its old and new value.
    pub fn changes(&self, before: &KernelSettings) -> Vec<String> {
        fn told<T: PartialEq>(
            what: &str,
            before: Option<T>,
            now: Option<T>,
            said: impl Fn(T) -> String,
        ) -> Option<String> {
            match before == now {
                true => None,
                false => {
                    let said = |value: Option<T>| value.map_or("unknown".to_owned(), &said);
                    let (before, now) = (said(before), said(now));
                    Some(format!("{what} is {now} now; it was {before}"))
                }
            }
        }
        let on = |is_on: bool| if is_on { "on" } else { "off" }.to_owned();
        [
            told(
                "NUMA balancing (kernel.numa_balancing)",
                before.numa_balancing,
                self.numa_balancing,
                |value| value.to_string(),
            ),
            told(
                "transparent_hugepage/enabled",
                before.transparent_huge_pages,
                self.transparent_huge_pages,
                |value| value.to_string(),
            ),
            told("KSM (ksm/run)", before.merges_pages, self.merges_pages, on),
            told(
                "vm.zone_reclaim_mode",
                before.reclaims_zones,
                self.reclaims_zones,
                on,
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl fmt::Display for KernelSettings {
    /// A short form of the known settings, for a line of `top` or `doctor`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |is_on: bool| if is_on { "on" } else { "off" };
        let parts = [
            self.numa_balancing.map(|value| format!("NUMA balancing {value}")),
            self.transparent_huge_pages.map(|value| format!("THP {value}")),
            self.merges_pages.map(|value| {
                let apart = match (value, self.merges_across_nodes) {
                    (true, Some(false)) => " within nodes",
                    _ => "",
                };
                format!("KSM {}{apart}", on(value))
            }),
            self.reclaims_zones
                .map(|value| format!("zone reclaim {}", on(value))),
        ];
        let known: Vec<String> = parts.into_iter().flatten().collect();
        match known.is_empty() {
            true => f.write_str("unknown"),
            false => f.write_str(&known.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_is_said_and_only_what_changed_is_told() {
        let before = KernelSettings {
            numa_balancing: NumaBalancing::of(1),
            transparent_huge_pages: Some(TransparentHugePages::Madvise),
            ..KernelSettings::default()
        };
        assert_eq!(before.to_string(), "NUMA balancing on, THP madvise");
        assert_eq!(KernelSettings::default().to_string(), "unknown");
        assert_eq!(before.changes(&before), [""; 0]);
        let after = KernelSettings {
            numa_balancing: NumaBalancing::of(2),
            merges_pages: Some(true),
            ..before
        };
        assert_eq!(
            after.changes(&before),
            [
                "NUMA balancing (kernel.numa_balancing) is for memory tiers only now; it was on",
                "KSM (ksm/run) is on now; it was unknown"
            ]
        );
        assert!(before.balances() && !after.balances());
    }

    #[test]
    fn every_number_that_a_kernel_has_is_known_and_no_other() {
        let known: Vec<u32> = (0..100)
            .filter(|number| NumaBalancing::of(*number).is_some())
            .collect();
        assert_eq!(known, [0, 1, 2, 3]);
        let on = |number| NumaBalancing::of(number).is_some_and(NumaBalancing::is_on);
        assert_eq!([0, 1, 2, 3].map(on), [false, true, false, true]);
    }
}

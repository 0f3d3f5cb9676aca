//! Memory management that the host's kernel does by itself, besides the agent.

use std::fmt;

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of the host's Linux at the time of a sample. Settings that a kernel lacks or hides are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KernelSettings {
    /// Whether it moves pages and threads of all processes towards each other (`kernel.numa_balancing`, AutoNUMA).
    pub numa_balancing: Option<NumaBalancing>,
    /// Scan settings of AutoNUMA. Only root can read them, in debugfs.
    pub scanning: Option<NumaScanning>,
    /// Which processes get transparent huge pages.
    pub transparent_huge_pages: Option<TransparentHugePages>,
    /// Whether pages of the same content are merged (KSM runs).
    pub merges_pages: Option<bool>,
    /// Whether merged pages may come from different nodes (`merge_across_nodes` of KSM).
    pub merges_across_nodes: Option<bool>,
    /// Whether it frees a node's page cache before it takes memory of another node (`vm.zone_reclaim_mode`).
    pub reclaims_zones: Option<bool>,
}

/// The value of `kernel.numa_balancing`: a set of flags since Linux 5.18, 0 or 1 before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NumaBalancing {
    /// 0: nothing is moved.
    #[default]
    Off,
    /// 1: pages and threads move towards each other.
    On,
    /// 2: only frequently used pages of slow memory move to fast memory.
    Tiering,
    /// 3: both.
    OnAndTiering,
}

impl NumaBalancing {
    /// Returns the meaning of the kernel's number; `None` for one that no kernel has.
    pub const fn of(number: u32) -> Option<NumaBalancing> {
        match number {
            0 => Some(NumaBalancing::Off),
            1 => Some(NumaBalancing::On),
            2 => Some(NumaBalancing::Tiering),
            3 => Some(NumaBalancing::OnAndTiering),
            _ => None,
        }
    }

    /// Whether pages and threads move towards each other.
    pub const fn is_on(self) -> bool {
        matches!(self, NumaBalancing::On | NumaBalancing::OnAndTiering)
    }
}

impl fmt::Display for NumaBalancing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NumaBalancing::Off => "off",
            NumaBalancing::On => "on",
            NumaBalancing::Tiering => "tiers only",
            NumaBalancing::OnAndTiering => "on, and of tiers",
        })
    }
}

/// AutoNUMA's scans of a process (`scan_*` of the kernel's scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NumaScanning {
    /// From a process's start to its first scan.
    pub delay_ns: Ns,
    /// Least time of a pass over all of a process's memory.
    pub period_min_ns: Ns,
    /// Longest time of such a pass.
    pub period_max_ns: Ns,
    /// Memory of one scan.
    pub size_bytes: Bytes,
}

/// Processes that get huge pages without reserving a pool of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TransparentHugePages {
    /// All.
    Always,
    /// Those that ask (`madvise`), as QEMU does for a guest's memory.
    Madvise,
    /// None.
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
    /// Whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        *self == KernelSettings::default()
    }

    /// Whether AutoNUMA is on; false if the kernel does not tell.
    pub fn balances(&self) -> bool {
        self.numa_balancing.is_some_and(NumaBalancing::is_on)
    }

    /// Returns the changes since an earlier look, in words of sysctl and sysfs: old and new.
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
    /// A short form of what is known, for a line of `top` or `doctor`.
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
                "NUMA balancing (kernel.numa_balancing) is tiers only now; it was on",
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

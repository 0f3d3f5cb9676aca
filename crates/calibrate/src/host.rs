//! Reads facts about this host that are not part of the machine's topology: private caches, free memory, the date.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use homenode_units::{CpuId, NodeId};
use serde::Serialize;

/// Sizes of the caches that a CPU uses, in bytes, from sysfs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheSizes {
    /// First level, data.
    pub l1_bytes: Option<u64>,
    /// Second level.
    pub l2_bytes: Option<u64>,
    /// The last level.
    pub llc_bytes: Option<u64>,
}

/// Reads `/sys/devices/system/cpu/cpuN/cache`.
pub(crate) fn cache_sizes(cpu: CpuId) -> CacheSizes {
    let read = |index: u32| {
        let file = |name: &str| {
            fs::read_to_string(format!(
                "/sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}"
            ))
            .map(|text| text.trim().to_owned())
            .ok()
        };
        let level: u32 = file("level")?.parse().ok()?;
        Some((level, file("type")?, cache_bytes(&file("size")?)?))
    };
    let caches: Vec<(u32, String, u64)> = (0..8)
        .map_while(read)
        .filter(|(_, kind, _)| kind != "Instruction")
        .collect();
    let at = |level: u32| {
        caches
            .iter()
            .find(|(found, ..)| *found == level)
            .map(|(.., bytes)| *bytes)
    };
    CacheSizes {
        l1_bytes: at(1),
        l2_bytes: at(2),
        llc_bytes: caches
            .iter()
            .max_by_key(|(level, ..)| *level)
            .map(|(.., bytes)| *bytes),
    }
}

/// Parses sizes like `2048K` and `32M`.
fn cache_bytes(text: &str) -> Option<u64> {
    let (number, factor) = match text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
    {
        (number, "K") => (number, 1 << 10),
        (number, "M") => (number, 1 << 20),
        (number, "") => (number, 1),
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Returns the bytes that can be allocated on a node without evicting anything: the least of the node's free memory, the
/// host's available memory, and the cgroup's remaining allowance.
pub(crate) fn memory_available(node: NodeId) -> u64 {
    let field = |path: &str, key: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.contains(key))?;
        let kib: u64 = line.split_ascii_whitespace().rev().nth(1)?.parse().ok()?;
        Some(kib << 10)
    };
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let cgroup = number("/sys/fs/cgroup/memory.max").zip(number("/sys/fs/cgroup/memory.current"));
    let bounds = [
        field(
            &format!("/sys/devices/system/node/node{node}/meminfo"),
            "MemFree:",
        ),
        field("/proc/meminfo", "MemAvailable:"),
        cgroup.map(|(max, current)| max.saturating_sub(current)),
    ];
    // A modest default if Linux reports none of these.
    bounds.into_iter().flatten().min().unwrap_or(1 << 30)
}

/// Returns date and time of day by the system clock, UTC: `2026-11-22 01:05`.
pub(crate) fn date_now() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    date(seconds)
}

fn date(seconds: u64) -> String {
    // Civil date of a day number (H. Hinnant, "chrono-compatible low-level date algorithms"): years begin in March.
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}",
        second / 3600,
        second / 60 % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00");
        assert_eq!(date(951_782_400), "2000-02-29 00:00");
        assert_eq!(date(1_795_309_506), "2026-11-22 01:05");
        assert_eq!(date(4_107_542_399), "2100-02-28 23:59");
        assert_eq!(date(4_107_542_400), "2100-03-01 00:00");
    }

    #[test]
    fn cache_sizes_read_as_the_kernel_writes_them() {
        assert_eq!(cache_bytes("48K"), Some(48 << 10));
        assert_eq!(cache_bytes("32M"), Some(32 << 20));
        assert_eq!(cache_bytes("512"), Some(512));
        for bad in ["", "K", "12X", "99999999999999999999K"] {
            assert_eq!(cache_bytes(bad), None, "{bad}");
        }
    }
}

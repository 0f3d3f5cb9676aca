//! Measures other activity on the host: stolen CPU time and that of other processes, from `/proc/stat` and this process's
//! own counters.

use std::fs;

use serde::Serialize;

/// CPU time of the whole host so far, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    /// User, system and interrupt time of all processes; not idle, not stolen.
    busy: u64,
    idle: u64,
    /// Time in which a CPU had work, but a hypervisor ran something else.
    stolen: u64,
}

impl Ticks {
    /// Parses the first line of `/proc/stat`.
    fn parse(stat: &str) -> Option<Ticks> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let fields: Vec<u64> = line
            .split_ascii_whitespace()
            .map_while(|field| field.parse().ok())
            .collect();
        let at = |index: usize| fields.get(index).copied().unwrap_or(0);
        (fields.len() >= 4).then(|| Ticks {
            busy: at(0) + at(1) + at(2) + at(5) + at(6),
            idle: at(3) + at(4),
            stolen: at(7),
        })
    }
}

/// Returns the ticks that a process and its ended children used, from `/proc/PID/stat`.
fn own_ticks(stat: &str) -> Option<u64> {
    // The name in parentheses may contain anything; fields are counted after it: utime is the 12th.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    fields
        .get(11..15)?
        .iter()
        .map(|field| field.parse::<u64>().ok())
        .sum()
}

/// Other load in a time span, as shares of the host's total CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Noise {
    /// Share of CPU time that a hypervisor stole.
    pub steal_share: f64,
    /// Share of CPU time that other processes used.
    pub others_share: f64,
}

/// The counters at the beginning of a time span.
#[derive(Clone, Copy, Debug)]
pub struct Watch(Option<(Ticks, u64)>);

fn look() -> Option<(Ticks, u64)> {
    let host = Ticks::parse(&fs::read_to_string("/proc/stat").ok()?)?;
    Some((host, own_ticks(&fs::read_to_string("/proc/self/stat").ok()?)?))
}

impl Watch {
    /// Begins a time span.
    pub fn begin() -> Watch {
        Watch(look())
    }

    /// Returns the load since the beginning; `None` if the kernel does not report CPU times.
    pub fn seen(&self) -> Option<Noise> {
        let ((before, own_before), (now, own_now)) = (self.0?, look()?);
        Some(between(before, now, own_now.saturating_sub(own_before)))
    }
}

fn between(before: Ticks, now: Ticks, own: u64) -> Noise {
    let busy = now.busy.saturating_sub(before.busy);
    let stolen = now.stolen.saturating_sub(before.stolen);
    let all = (busy + stolen + now.idle.saturating_sub(before.idle)).max(1) as f64;
    Noise {
        steal_share: stolen as f64 / all,
        others_share: busy.saturating_sub(own) as f64 / all,
    }
}

/// Returns true if the processor says that a hypervisor runs below this kernel.
pub(crate) fn under_hypervisor() -> bool {
    let flags = |text: String| {
        text.lines()
            .any(|line| line.starts_with("flags") && line.contains(" hypervisor"))
    };
    fs::read_to_string("/proc/cpuinfo").is_ok_and(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_all_cpu_time_between_two_looks() {
        let before = Ticks::parse("cpu  10 0 10 100 0 0 0 5 0 0\ncpu0 1 2 3 4\n").unwrap();
        let now = Ticks::parse("cpu  60 0 20 120 10 0 0 15 0 0\n").unwrap();
        // Of 100 ticks, 60 are busy, 30 idle and 10 stolen. This process had 45 of the busy ones.
        let noise = between(before, now, 45);
        assert!(
            (noise.steal_share - 0.10).abs() < 1e-12 && (noise.others_share - 0.15).abs() < 1e-12,
            "{noise:?}"
        );
    }

    #[test]
    fn a_process_name_with_spaces_and_parentheses_does_not_shift_fields() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 11 22 33 44 20 0 1 0 100";
        assert_eq!(own_ticks(stat), Some(110));
        assert_eq!(own_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn text_that_is_not_a_stat_file_says_nothing() {
        assert_eq!(Ticks::parse(""), None);
        assert_eq!(Ticks::parse("cpu  1 2\n"), None);
    }
}

//! How much VMs use of their permits, hour by hour.

use std::collections::BTreeMap;

use homenode_policy::permits::Usage;
use homenode_units::{Ns, Permit, Resource, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of hours that are kept: a month and a day, however long the month. Bounds the size of the usage file, and is not a
/// setting.
const HOURS_MAX: u64 = 32 * 24;
const HOUR: Ns = Ns::from_secs(3600);

/// An hour: its number since the start of the usage's clock (1970 on a real host, the run on the twin).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Hour(pub u64);

impl Hour {
    /// Returns the hour of a point in time.
    pub fn at(time: Ns) -> Hour {
        Hour(time.0 / HOUR.0)
    }
}

/// What one VM used in one hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Line {
    /// The VM.
    pub vm: VmId,
    /// The VM's last name, for readers.
    pub name: String,
    /// The hour.
    pub hour: Hour,
    /// The booked resource.
    pub resource: Resource,
    /// How much was booked, and how much was used.
    #[serde(flatten)]
    pub usage: Usage,
}

impl Line {
    /// Returns the used share of what was booked; above 1 the VM broke its permit. Returns `None` if nothing was booked.
    pub fn used_share(&self) -> Option<f64> {
        (self.usage.booked_units > 0).then(|| self.usage.used_units as f64 / self.usage.booked_units as f64)
    }

    /// Returns the mean use per slice, in the units of the permit.
    pub fn used_per_slice(&self) -> Option<f64> {
        let slices = self.usage.time_ns.as_f64() / Permit::SLICE.as_f64();
        (slices > 0.0).then(|| self.usage.used_units as f64 / slices)
    }
}

/// All lines of the last month.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HourlyUsage {
    lines: BTreeMap<(VmId, Hour, Resource), (String, Usage)>,
}

impl HourlyUsage {
    /// Adds what a VM used to an hour's line. If a clock is set back, the repeated hour is added to the same line.
    pub fn add(&mut self, hour: Hour, vm: VmId, name: &str, resource: Resource, usage: Usage) {
        let (known, sum) = self.lines.entry((vm, hour, resource)).or_default();
        if known != name {
            name.clone_into(known);
        }
        *sum += usage;
    }

    /// Drops all lines that are more than a month older than `now`.
    pub fn forget_before(&mut self, now: Hour) {
        let oldest = Hour(now.0.saturating_sub(HOURS_MAX));
        self.lines.retain(|(_, hour, _), _| *hour >= oldest);
    }

    /// Returns all lines, by VM, then by hour.
    pub fn lines(&self) -> impl Iterator<Item = Line> + '_ {
        self.lines
            .iter()
            .map(|((vm, hour, resource), (name, usage))| Line {
                vm: *vm,
                name: name.clone(),
                hour: *hour,
                resource: *resource,
                usage: *usage,
            })
    }
}

impl FromIterator<Line> for HourlyUsage {
    fn from_iter<T: IntoIterator<Item = Line>>(lines: T) -> HourlyUsage {
        let mut hourly_usage = HourlyUsage::default();
        for line in lines {
            hourly_usage.add(line.hour, line.vm, &line.name, line.resource, line.usage);
        }
        hourly_usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(used: u64) -> Usage {
        Usage {
            used_units: used,
            booked_units: 1000,
            time_ns: Ns::from_secs(3),
            unmetered_ns: Ns::ZERO,
        }
    }

    #[test]
    fn an_hour_adds_up_and_a_month_is_kept() {
        let mut hourly_usage = HourlyUsage::default();
        let add = |hourly_usage: &mut HourlyUsage, hour: u64, used| {
            hourly_usage.add(Hour(hour), VmId(1), "one", Resource::Pollution, usage(used));
        };
        add(&mut hourly_usage, 5, 100);
        add(&mut hourly_usage, 6, 7);
        // The clock is set back.
        add(&mut hourly_usage, 5, 1100);
        hourly_usage.add(Hour(5), VmId(1), "renamed", Resource::Bandwidth, usage(1));
        let lines: Vec<Line> = hourly_usage.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            (lines[0].usage.used_units, lines[0].used_share()),
            (1200, Some(0.6))
        );
        assert_eq!(lines[0].used_per_slice(), Some(6.0));
        let read: HourlyUsage = lines.into_iter().collect();
        assert_eq!(read, hourly_usage);
        hourly_usage.forget_before(Hour(5 + HOURS_MAX));
        assert_eq!(hourly_usage.lines().count(), 3);
        hourly_usage.forget_before(Hour(6 + HOURS_MAX));
        assert_eq!(
            hourly_usage.lines().map(|line| line.hour).collect::<Vec<_>>(),
            [Hour(6)]
        );
    }

    #[test]
    fn sums_do_not_overflow() {
        let mut hourly_usage = HourlyUsage::default();
        let all = Usage {
            used_units: u64::MAX,
            booked_units: u64::MAX,
            time_ns: Ns(u64::MAX),
            unmetered_ns: Ns(u64::MAX),
        };
        for _ in 0..2 {
            hourly_usage.add(Hour::at(Ns(u64::MAX)), VmId(1), "one", Resource::Pollution, all);
        }
        assert_eq!(hourly_usage.lines().next().unwrap().usage, all);
    }
}

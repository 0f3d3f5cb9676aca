//! A user of a last-level cache: the lines that it can use, and how often its accesses then miss.

use std::sync::Arc;

/// Number of points of a sharer's curve.
const POINTS: usize = 1024;

/// What a cache needs to know about one of its users. Cheap to clone, because threads of a program share its curve.
#[derive(Clone, Debug)]
pub struct Sharer {
    pub(super) footprint_lines: f64,
    /// Number of the sharer's group. The sharers of one group have memory in common.
    pub(super) group: usize,
    /// Share of the sharer's accesses that go to the group's common memory.
    pub(super) common: f64,
    /// Miss ratio with 0, 1, 2, … steps of lines, and steps per line.
    pub(super) curve: Arc<[f64; POINTS + 1]>,
    steps_per_line: f64,
}

impl Sharer {
    /// Creates a sharer that can use this many lines, and that misses with the share `miss_ratio(lines)` of its accesses. Caches
    /// have at most `lines_max` lines.
    pub fn new(lines_max: f64, footprint_lines: f64, miss_ratio: impl Fn(f64) -> f64) -> Sharer {
        let steps_per_line = POINTS as f64 / lines_max;
        Sharer {
            footprint_lines,
            group: 0,
            common: 0.0,
            curve: Arc::new(std::array::from_fn(|at| miss_ratio(at as f64 / steps_per_line))),
            steps_per_line,
        }
    }

    /// Uses the curve of another sharer if the curves are equal. A curve takes 8 KiB, so the curves of many VMs that run few
    /// programs would otherwise displace each other from the cache of the CPU that simulates them.
    #[must_use]
    pub(crate) fn reusing<'a>(mut self, others: impl IntoIterator<Item = &'a Sharer>) -> Sharer {
        let mut others = others.into_iter();
        if let Some(other) = others.find(|other| other.curve == self.curve) {
            self.curve = Arc::clone(&other.curve);
        }
        self
    }

    /// Sets the share of the sharer's accesses that go to memory which all sharers of a group use.
    #[must_use]
    pub fn in_group(mut self, group: usize, common: f64) -> Sharer {
        self.group = group;
        self.common = common;
        self
    }

    /// Returns the share of the sharer's accesses that miss with this many lines.
    #[inline]
    pub fn miss_ratio(&self, lines: f64) -> f64 {
        let place = (lines * self.steps_per_line).clamp(0.0, POINTS as f64);
        // Converts through the smallest type that holds the value, because a processor converts that directly.
        let below = usize::from(place as u16).min(POINTS - 1);
        self.curve[below] + (self.curve[below + 1] - self.curve[below]) * (place - below as f64)
    }

    /// Returns the lines that the sharer can use: `own` and those of its group.
    pub(super) fn usable(&self, own: f64, groups: &[f64]) -> f64 {
        if self.common == 0.0 {
            return own;
        }
        self.usable_of(own, groups.get(self.group).copied().unwrap_or(own))
    }

    /// Returns the lines that the sharer can use: `own` and those of its group, which holds `group` lines.
    #[inline]
    pub(super) fn usable_of(&self, own: f64, group: f64) -> f64 {
        own + self.common * (group - own)
    }
}

//! Computes exact stack distances.

use super::Curve;
use crate::recency::Recency;
use crate::table::Table;

/// Exact stack distances of a stream, counted up to a maximum.
#[derive(Clone, Debug)]
pub struct Mattson {
    recency: Recency,
    slots: Table,
    /// Number of accesses by stack distance.
    by_distance: Vec<f64>,
    accesses: u64,
}

impl Mattson {
    /// Creates a counter of stack distances below this many lines.
    pub fn new(lines_max: usize) -> Mattson {
        Mattson {
            recency: Recency::new(lines_max),
            slots: Table::new(),
            by_distance: vec![0.0; lines_max],
            accesses: 0,
        }
    }

    /// Records an access; returns its stack distance, or `None` for the first use of the line.
    pub fn access(&mut self, line: u64) -> Option<usize> {
        self.accesses += 1;
        let distance = reuse(&mut self.recency, &mut self.slots, line);
        if let Some(count) = distance.and_then(|distance| self.by_distance.get_mut(distance)) {
            *count += 1.0;
        }
        distance
    }

    /// Resets the counts, but keeps the lines: accesses so far were warm-up.
    pub fn restart(&mut self) {
        self.by_distance.fill(0.0);
        self.accesses = 0;
    }

    /// Returns the curve so far, with a point for each number of lines.
    pub fn curve(&self) -> Curve {
        Curve::of_distances(1.0, &self.by_distance, self.accesses as f64)
    }
}

/// Moves a line to the top; returns its previous depth.
pub(super) fn reuse(recency: &mut Recency, slots: &mut Table, line: u64) -> Option<usize> {
    let known = slots.get(line);
    let distance = known.map(|slot| recency.newer(slot));
    if let Some(slot) = known {
        recency.remove(slot);
    }
    if recency.full() {
        recency.compact(|line, slot| slots.set(line, slot));
    }
    slots.set(line, recency.push(line));
    distance
}

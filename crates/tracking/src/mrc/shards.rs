//! Computes stack distances from a sample of lines.

use std::collections::BinaryHeap;

use super::Curve;
use super::mattson::reuse;
use crate::recency::Recency;
use crate::table::Table;
use homenode_units::mix;

/// Sampled stack distances of a stream.
#[derive(Clone, Debug)]
pub struct Shards {
    recency: Recency,
    slots: Table,
    /// A line is sampled if its hash does not exceed this.
    threshold: u64,
    /// The threshold is never lowered below this.
    floor: u64,
    /// Maximum number of tracked lines, and a heap of their hashes with the largest on top.
    limit: Option<(usize, BinaryHeap<(u64, u64)>)>,
    step: f64,
    by_step: Vec<f64>,
    /// Sum of the weights of all sampled accesses.
    weight: f64,
    accesses: u64,
}

const POINTS: usize = 1 << 14;

fn threshold(rate: f64) -> u64 {
    (rate.clamp(1e-9, 1.0) * u64::MAX as f64) as u64
}

impl Shards {
    /// Samples a fixed share of lines, in (0, 1].
    pub fn with_rate(rate: f64, lines_max: usize) -> Shards {
        Shards::new(threshold(rate), 0, None, lines_max)
    }

    /// Samples at most this many lines, at least 1. The share falls as the stream uses more lines.
    pub fn with_size(lines_tracked: usize, lines_max: usize) -> Shards {
        Shards::with_size_or_rate(lines_tracked, 0.0, lines_max)
    }

    /// Samples this many lines, or this share of lines if that is more. Exact for a stream of few lines, and never worse than
    /// sampling the share.
    pub fn with_size_or_rate(lines_tracked: usize, rate: f64, lines_max: usize) -> Shards {
        let limit = (lines_tracked.max(1), BinaryHeap::new());
        Shards::new(u64::MAX, threshold(rate), Some(limit), lines_max)
    }

    fn new(
        threshold: u64,
        floor: u64,
        limit: Option<(usize, BinaryHeap<(u64, u64)>)>,
        lines_max: usize,
    ) -> Shards {
        Shards {
            recency: Recency::new(1024),
            slots: Table::new(),
            threshold,
            floor,
            limit,
            step: (lines_max as f64 / POINTS as f64).max(1.0),
            by_step: vec![0.0; POINTS],
            weight: 0.0,
            accesses: 0,
        }
    }

    /// Returns the estimated number of lines that the stream has used.
    pub fn lines(&self) -> f64 {
        self.recency.len() as f64 / self.rate()
    }

    /// Returns the current share of sampled lines.
    pub fn rate(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    /// Records an access.
    #[inline]
    pub fn access(&mut self, line: u64) {
        self.accesses += 1;
        let hash = mix(line);
        if hash <= self.threshold {
            self.look(line, hash);
        }
    }

    fn look(&mut self, line: u64, hash: u64) {
        let stands_for = 1.0 / self.rate();
        self.weight += stands_for;
        let distance = reuse(&mut self.recency, &mut self.slots, line);
        match distance {
            Some(distance) => {
                // Adds half a sampled line: the true distance is between this sampled one and the next larger one.
                let point = ((distance as f64 + 0.5) * stands_for / self.step) as usize;
                if let Some(weight) = self.by_step.get_mut(point) {
                    *weight += stands_for;
                }
            }
            None => self.limit_lines(line, hash),
        }
    }

    /// Tracks a new line. If that makes too many, drops the lines with the largest hashes for good.
    fn limit_lines(&mut self, line: u64, hash: u64) {
        let Some((most, hashes)) = &mut self.limit else {
            return;
        };
        hashes.push((hash, line));
        while self.recency.len() > *most {
            let Some((largest, line)) = hashes.pop().filter(|(largest, _)| *largest > self.floor) else {
                self.threshold = self.floor;
                self.limit = None;
                return;
            };
            self.threshold = largest - 1;
            if let Some(slot) = self.slots.get(line) {
                self.recency.remove(slot);
                self.slots.remove(line);
            }
        }
    }

    /// Resets the counts, but keeps the lines: accesses so far were warm-up.
    pub fn restart(&mut self) {
        self.by_step.fill(0.0);
        self.weight = 0.0;
        self.accesses = 0;
    }

    /// Returns the curve so far. Sampled lines may be used more or less often than other lines; the difference to the number of
    /// all accesses is added as reuse at the shortest distance (the paper's adjustment).
    pub fn curve(&self) -> Curve {
        let mut by_step = self.by_step.clone();
        by_step[0] += self.accesses as f64 - self.weight;
        Curve::of_distances(self.step, &by_step, self.accesses as f64)
    }
}

//! Generates streams of accesses, which drive the models of this crate. A stream can be derived from a workload profile.
//!
//! A [`Pattern`] describes a stream, and a [`Stream`] draws its accesses from a seed. Lines are counted from the stream's first
//! line: streams with the same first line share memory, and streams whose regions do not overlap do not.

use crate::recency::Recency;
use homenode_units::Chance;

/// Description of a stream of accesses.
#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    /// Line after line, none of them twice.
    Sequential,
    /// Consecutive lines, over and over.
    Cyclic {
        /// Lines per round.
        lines: u64,
    },
    /// Lines drawn uniformly.
    Uniform {
        /// Lines to draw from.
        lines: u64,
    },
    /// Line `r` (counted from 1) with a probability proportional to `r^-exponent`.
    Zipf {
        /// Lines to draw from, at most 2^32.
        lines: u32,
        /// 0 is uniform; 0.6 to 1.2 are usual.
        exponent: f64,
    },
    /// Stack distances drawn from `m(c) = m_inf + (1 - m_inf) exp(-(c / c0)^k)`: in an LRU cache of `c` lines the stream misses
    /// with probability `m(c)`, like a workload profile of `homenode-twin`.
    StackDistance {
        /// Share of accesses that go to lines never used before.
        m_inf: f64,
        /// Number of lines, c0, at which the exponential term has fallen to 1/e.
        c0_lines: f64,
        /// Steepness of the curve.
        k: f64,
        /// Number of lines after which a line counts as never used before. Must exceed any cache's lines.
        lines_max: usize,
    },
    /// Several patterns, each with memory of its own. Each access comes from one of them, drawn by weight.
    Mix(Vec<(f64, Pattern)>),
}

/// The state of a pattern that is being drawn.
#[derive(Clone, Debug)]
pub struct Stream {
    first_line: u64,
    source: Source,
    chance: Chance,
}

#[derive(Clone, Debug)]
enum Source {
    Cyclic { lines: u64, next: u64 },
    Uniform { lines: u64 },
    Zipf(Alias),
    StackDistance(Box<Stack>),
    Mix(Vec<(f64, Source, u64)>),
}

/// Distance between the parts of a mix, in lines.
const PART_LINES: u64 = 1 << 44;

impl Stream {
    /// Creates a stream whose first line has this number.
    pub fn new(pattern: &Pattern, first_line: u64, seed: u64) -> Stream {
        Stream {
            first_line,
            source: Source::new(pattern),
            chance: Chance::new(seed),
        }
    }

    /// Returns the next line of the stream.
    #[inline]
    pub fn next_line(&mut self) -> u64 {
        self.first_line + self.source.next(&mut self.chance)
    }
}

impl Source {
    fn new(pattern: &Pattern) -> Source {
        match pattern {
            Pattern::Sequential => Source::Cyclic {
                lines: PART_LINES,
                next: 0,
            },
            Pattern::Cyclic { lines } => Source::Cyclic {
                lines: *lines,
                next: 0,
            },
            Pattern::Uniform { lines } => Source::Uniform { lines: *lines },
            Pattern::Zipf { lines, exponent } => Source::Zipf(Alias::zipf(*lines, *exponent)),
            Pattern::StackDistance {
                m_inf,
                c0_lines,
                k,
                lines_max,
            } => Source::StackDistance(Box::new(Stack::new(*m_inf, *c0_lines, *k, *lines_max))),
            Pattern::Mix(parts) => {
                let total: f64 = parts.iter().map(|(weight, _)| weight).sum();
                let mut below = 0.0;
                let part = |(at, (weight, pattern)): (usize, &(f64, Pattern))| {
                    below += weight / total;
                    (below, Source::new(pattern), at as u64 * PART_LINES)
                };
                Source::Mix(parts.iter().enumerate().map(part).collect())
            }
        }
    }

    #[inline]
    fn next(&mut self, chance: &mut Chance) -> u64 {
        match self {
            Source::Cyclic { lines, next } => {
                let line = *next;
                *next += 1;
                if *next == *lines {
                    *next = 0;
                }
                line
            }
            Source::Uniform { lines } => chance.below(*lines),
            Source::Zipf(alias) => u64::from(alias.draw(chance)),
            Source::StackDistance(stack) => stack.next(chance),
            Source::Mix(parts) => {
                let drawn = chance.unit();
                let last = parts.len() - 1;
                let at = parts
                    .iter()
                    .position(|(below, ..)| drawn < *below)
                    .unwrap_or(last);
                let (_, source, first) = &mut parts[at];
                *first + source.next(chance)
            }
        }
    }
}

/// Draws from any finite distribution in constant time (Walker's alias method).
#[derive(Clone, Debug)]
struct Alias {
    /// For each column, the probability of staying in it as a share of 2^32, and the alternative otherwise.
    columns: Vec<(u32, u32)>,
}

impl Alias {
    fn zipf(lines: u32, exponent: f64) -> Alias {
        let weights: Vec<f64> = (1..=lines)
            .map(|rank| libm::pow(f64::from(rank), -exponent))
            .collect();
        let mean = weights.iter().sum::<f64>() / f64::from(lines);
        let mut left: Vec<f64> = weights.iter().map(|weight| weight / mean).collect();
        let mut columns: Vec<(u32, u32)> = (0..lines).map(|line| (u32::MAX, line)).collect();
        let (mut small, mut large) = (Vec::new(), Vec::new());
        for (line, weight) in left.iter().enumerate() {
            if *weight < 1.0 {
                small.push(line);
            } else {
                large.push(line);
            }
        }
        while let (Some(poor), Some(rich)) = (small.pop(), large.last().copied()) {
            columns[poor] = ((left[poor] * f64::from(u32::MAX)) as u32, rich as u32);
            left[rich] -= 1.0 - left[poor];
            if left[rich] < 1.0 {
                large.pop();
                small.push(rich);
            }
        }
        Alias { columns }
    }

    #[inline]
    fn draw(&self, chance: &mut Chance) -> u32 {
        let bits = chance.bits();
        let at = (((bits >> 32) * self.columns.len() as u64) >> 32) as usize;
        let (stays, instead) = self.columns[at];
        if bits as u32 <= stays { at as u32 } else { instead }
    }
}

/// A stack of lines from which depths are drawn.
#[derive(Clone, Debug)]
struct Stack {
    m_inf: f64,
    c0: f64,
    inverse_k: f64,
    lines_max: usize,
    recency: Recency,
    new_line: u64,
}

impl Stack {
    /// Creates a stack that is full from the start, so depths are valid from the first access on.
    fn new(m_inf: f64, c0: f64, k: f64, lines_max: usize) -> Stack {
        let mut recency = Recency::new(lines_max);
        for line in 0..lines_max as u64 {
            recency.push(line);
        }
        Stack {
            m_inf,
            c0,
            inverse_k: 1.0 / k,
            lines_max,
            recency,
            new_line: lines_max as u64,
        }
    }

    fn next(&mut self, chance: &mut Chance) -> u64 {
        if self.recency.full() {
            self.recency.compact(|_, _| {});
        }
        let depth = self.depth(chance.unit());
        if depth < self.lines_max as f64 {
            let line = self.recency.remove(self.recency.slot_at(depth as usize));
            self.recency.push(line);
            return line;
        }
        self.recency.remove(self.recency.slot_at(self.lines_max - 1));
        self.recency.push(self.new_line);
        self.new_line += 1;
        self.new_line - 1
    }

    /// Returns the distance that a share `exceeding` of all accesses exceeds.
    fn depth(&self, exceeding: f64) -> f64 {
        if exceeding < self.m_inf {
            return f64::INFINITY;
        }
        let reuse = (exceeding - self.m_inf) / (1.0 - self.m_inf);
        self.c0 * libm::pow(-libm::log(reuse.max(f64::MIN_POSITIVE)), self.inverse_k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mrc::Mattson;

    fn curve_of(pattern: &Pattern, lines_max: usize) -> crate::mrc::Curve {
        let (mut stream, mut mattson) = (Stream::new(pattern, 0, 1), Mattson::new(lines_max));
        for _ in 0..100_000 {
            mattson.access(stream.next_line());
        }
        mattson.restart();
        for _ in 0..200_000 {
            mattson.access(stream.next_line());
        }
        mattson.curve()
    }

    #[test]
    fn a_stack_distance_stream_has_the_curve_that_was_prescribed() {
        for (m_inf, c0, k) in [(0.1, 600.0, 0.7), (0.02, 1000.0, 2.0), (0.6, 300.0, 1.0)] {
            let pattern = Pattern::StackDistance {
                m_inf,
                c0_lines: c0,
                k,
                lines_max: 8000,
            };
            let curve = curve_of(&pattern, 4000);
            for lines in [50.0_f64, 200.0, 800.0, 2000.0, 4000.0] {
                let expected = m_inf + (1.0 - m_inf) * (-(lines / c0).powf(k)).exp();
                let got = curve.at(lines);
                assert!(
                    (got - expected).abs() < 0.01,
                    "{got} at {lines}, {expected} prescribed"
                );
            }
        }
    }

    #[test]
    fn a_uniform_stream_misses_what_it_does_not_hold() {
        let curve = curve_of(&Pattern::Uniform { lines: 1000 }, 1000);
        assert!((curve.at(250.0) - 0.75).abs() < 0.01 && (curve.at(900.0) - 0.1).abs() < 0.01);
    }

    #[test]
    fn a_loop_misses_always_or_never() {
        let curve = curve_of(&Pattern::Cyclic { lines: 500 }, 1000);
        assert!(curve.at(499.0) == 1.0 && curve.at(500.0) == 0.0);
    }

    #[test]
    fn zipf_draws_ranks_by_their_power() {
        // With 100 lines and exponent 1, line 1 has probability 1 / H(100) = 0.1928, and line 2 half of it.
        let (mut stream, mut drawn) = (
            Stream::new(
                &Pattern::Zipf {
                    lines: 100,
                    exponent: 1.0,
                },
                0,
                3,
            ),
            [0; 100],
        );
        for _ in 0..200_000 {
            drawn[stream.next_line() as usize] += 1;
        }
        let share = |line: usize| f64::from(drawn[line]) / 200_000.0;
        assert!((share(0) - 0.1928).abs() < 0.004 && (share(1) - 0.0964).abs() < 0.003);
    }

    #[test]
    fn parts_of_a_mix_keep_their_weights_and_memory_apart() {
        let parts = vec![(3.0, Pattern::Sequential), (1.0, Pattern::Uniform { lines: 10 })];
        let mut stream = Stream::new(&Pattern::Mix(parts), 0, 1);
        let second = (0..40_000).filter(|_| stream.next_line() >= PART_LINES).count();
        assert!((9_600..10_400).contains(&second), "{second} of 40000");
    }
}

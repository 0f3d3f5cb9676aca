//! The model of [`super`] exactly as its documentation states it, place by place and without regard to speed. The cache must
//! match it to the bit.

use homenode_machine::Replacement;
use proptest::prelude::*;

use super::{Course, LINES_LEAST, LINES_MIN, Llc, Sharer, TURNOVERS_MAX};

/// Lines by class and sharer.
struct Plain {
    lines: f64,
    held: Vec<Vec<f64>>,
}

impl Plain {
    /// Returns the lines that each sharer holds in the youngest `classes` classes, and the sums by group.
    fn sums(&self, sharers: &[Sharer], classes: usize) -> (Vec<f64>, Vec<f64>) {
        let (mut own, mut groups) = (vec![0.0; sharers.len()], vec![0.0; sharers.len()]);
        for held in &self.held[..classes] {
            for (at, sharer) in sharers.iter().enumerate() {
                own[at] += held[at];
                if sharer.common != 0.0 {
                    groups[sharer.group] += held[at];
                }
            }
        }
        (own, groups)
    }

    fn uses(&self, sharers: &[Sharer], accessed: &[f64]) -> Vec<Vec<f64>> {
        let mut used = vec![vec![0.0; sharers.len()]; self.held.len()];
        for (class, used) in used.iter_mut().enumerate().skip(1) {
            let (younger, with) = (self.sums(sharers, class), self.sums(sharers, class + 1));
            for (at, sharer) in sharers.iter().enumerate() {
                if accessed[at] > 0.0 && self.held[class][at] > LINES_MIN {
                    let missed = |(own, groups): &(Vec<f64>, Vec<f64>)| {
                        sharer.miss_ratio(sharer.usable(own[at], groups))
                    };
                    used[at] = accessed[at] * (missed(&younger) - missed(&with)).max(0.0);
                }
            }
        }
        used
    }

    fn step(&mut self, sharers: &[Sharer], accessed: &[f64], inserted: &[f64]) {
        let class_lines = self.lines / self.held.len() as f64;
        let used = self.uses(sharers, accessed);
        let mut entering = inserted.to_vec();
        for (at, entering) in entering.iter_mut().enumerate() {
            used.iter().for_each(|used| *entering += used[at]);
        }
        let entries = used.iter().flatten().sum::<f64>() + inserted.iter().sum::<f64>();
        let many = self.held.len() > 1 && entries > TURNOVERS_MAX * class_lines;
        let way = if many { 0.5 } else { 1.0 };
        for (held, used) in self.held.iter_mut().zip(&used) {
            let (growth, full) = (
                entering.iter().sum::<f64>() - used.iter().sum::<f64>(),
                held.iter().sum::<f64>(),
            );
            let room = class_lines - full;
            let filling = if room <= 1e-9 * class_lines {
                0.0
            } else if room >= growth {
                1.0
            } else {
                room / growth
            };
            let rest = 1.0 - filling;
            let pushes = (growth * rest + (full - class_lines).max(0.0)).max(0.0) / class_lines;
            for at in 0..sharers.len() {
                if filling > 0.0 {
                    let course = Course::in_use(used[at] / held[at].max(LINES_LEAST) * filling);
                    held[at] = course.run(held[at], entering[at] * filling).0;
                    entering[at] *= rest;
                }
                let used_of_held = used[at] / held[at].max(LINES_LEAST);
                let course = if used_of_held > 0.0 {
                    Course::in_use(used_of_held * rest + pushes)
                } else {
                    Course::of(pushes)
                };
                let (after, mean) = course.run(held[at], entering[at]);
                held[at] += (after - held[at]) * way;
                entering[at] = pushes * mean;
            }
        }
        self.settle(sharers);
    }

    fn settle(&mut self, sharers: &[Sharer]) {
        let (mut total, _) = self.sums(sharers, self.held.len());
        for (at, sharer) in sharers.iter().enumerate() {
            let mut over = (total[at] - sharer.footprint_lines).max(0.0);
            total[at] -= over;
            for held in self.held.iter_mut().rev() {
                let gone = over.min(held[at]);
                held[at] -= gone;
                over -= gone;
            }
        }
        let full: f64 = total.iter().sum();
        if full > self.lines {
            let shrink = self.lines / full;
            self.held.iter_mut().flatten().for_each(|lines| *lines *= shrink);
        }
    }
}

/// Returns sharers of all kinds: with few and many lines to hold, with and without memory in common.
fn sharers() -> Vec<Sharer> {
    let sharer = |footprint: f64, scale: f64| {
        Sharer::new(1000.0, footprint, move |lines| {
            0.1 + 0.9 * libm::exp(-lines / scale)
        })
    };
    vec![
        sharer(1e9, 300.0),
        sharer(150.0, 80.0),
        sharer(1e9, 900.0).in_group(1, 0.5),
        sharer(1e9, 900.0).in_group(1, 0.5),
        sharer(400.0, 200.0).in_group(0, 0.9),
    ]
}

proptest! {
    #[test]
    fn steps_are_those_of_the_text_to_the_bit(
        steps in prop::collection::vec(prop::collection::vec((0.0..2e3f64, 0.0..1.0f64, any::<bool>()), 5), 1..30),
        policy in 0usize..5,
    ) {
        let sharers = sharers();
        let mut llc = Llc::new(1000.0, Replacement::ALL[policy], sharers.len());
        let held = vec![vec![0.0; sharers.len()]; llc.classes];
        let mut plain = Plain { lines: 1000.0, held };
        // All sharers are present from the start, in order, and use some lines. A paused sharer must not be forgotten, because
        // this model leaves forgetting out.
        for (at, step) in steps.iter().enumerate() {
            let runs = |(accesses, _, runs): &(f64, f64, bool)| if *runs || at == 0 { 1.0 + accesses } else { 0.0 };
            let accessed: Vec<f64> = step.iter().map(runs).collect();
            let inserted: Vec<f64> = step.iter().zip(&accessed).map(|((_, missed, _), all)| all * missed).collect();
            for (at, (accesses, misses)) in accessed.iter().zip(&inserted).enumerate() {
                llc.access(at, *accesses, *misses);
            }
            llc.step(&sharers);
            if accessed.iter().any(|accesses| *accesses > 0.0) {
                plain.step(&sharers, &accessed, &inserted);
            }
            let (total, _) = plain.sums(&sharers, llc.classes);
            if total.iter().any(|lines| *lines < LINES_MIN) {
                return Ok(());
            }
            for (number, lines) in total.iter().enumerate() {
                prop_assert!((llc.held(number) - lines).abs() < 1e-12 * lines, "sharer {} in step {}", number, at);
                for (held, plain) in llc.held.iter().zip(&plain.held) {
                    prop_assert_eq!(held[llc.places[number]].to_bits(), plain[number].to_bits());
                }
            }
        }
    }
}

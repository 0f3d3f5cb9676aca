//! Last-level caches: who holds how many lines.
//!
//! # Model
//!
//! A cache of `C` lines keeps them in `K` age classes of `C / K` lines. A line that comes in or is used enters the youngest
//! class; every entry pushes a line, drawn evenly, out of that class into the next, and out of the oldest class
//! out of the cache. Sharer `i` holds `O_ic` lines in class `c`, inserts `M_i` lines a second (its misses), and uses
//! lines of class `c` at the rate
//!
//! `H_ic = A_i (m_i(S_i,c-1) - m_i(S_ic))`, `S_ic = O_i0 + ... + O_ic`
//!
//! with `A_i` its accesses and `m_i` its miss-ratio curve: what it would miss with the younger classes alone and does not
//! with this one (Mattson's stack property). So with `F_c` entries a second into a full class
//!
//! `dO_ic/dt = in_ic - (H_ic / O_ic + F_c / (C / K)) O_ic`
//!
//! where `in` is what the younger class pushes out, and for the youngest `M_i` and all `H_i`. For constant rates this is
//! linear; a step takes its solution (exact for lines not in use), so that the steady state does not depend on the
//! step. A sharer that does not run inserts and uses nothing, and its lines age and go. Nobody holds more than its
//! footprint; what it cannot hold is room for others.
//!
//! `K = 1` is random replacement: shares of the cache are shares of misses, and a sleeper's lines decay as
//! `exp(-t M / C)`. Many classes are true LRU: all sharers' lines live equally long without use (Che's characteristic
//! time). Policies that remember use lie between, and [`CLASSES`] classes describe them all: `docs/VALIDATION.md` has
//! the error by number of classes. How much that protects a program is a question of its rate: who uses a line less often
//! than the cache turns over loses it under any policy.
//!
//! # Left out
//!
//! Sets and ways (so no conflict misses and no way partitioning), back-invalidation of private caches by an inclusive
//! LLC (`docs/VALIDATION.md` has its size), lines of the host and of page copies. Use of a line by a sibling that shares
//! memory counts as the sibling's own.

use homenode_machine::Replacement;

/// Age classes of a policy that remembers use.
pub const CLASSES: usize = 4;
/// Entries into the youngest class, in its sizes, above which a step goes half of its way: rates of use are those at its
/// beginning, and would swing.
const TURNOVERS_MAX: f64 = 2.0;
/// Fewer lines than this are none.
const LINES_MIN: f64 = 1e-3;
/// Points of a sharer's curve.
const POINTS: usize = 128;

/// Number of age classes that describe a policy.
pub fn classes(replacement: Replacement) -> usize {
    match replacement {
        Replacement::Random => 1,
        Replacement::Lru | Replacement::PseudoLru | Replacement::NotRecentlyUsed | Replacement::QuadAge => {
            CLASSES
        }
    }
}

/// What a cache has to know of somebody who uses it.
#[derive(Clone, Debug)]
pub struct Sharer {
    footprint_lines: f64,
    /// Sharers of one group have memory in common.
    group: usize,
    /// Share of its accesses that go to memory of the group.
    common: f64,
    /// Miss ratio with 0, 1, 2, … times `step_lines`.
    curve: Vec<f64>,
    step_lines: f64,
}

impl Sharer {
    /// Somebody who can use this many lines and whose share `miss_ratio(lines)` of accesses misses; caches have at most
    /// `lines_max` lines.
    pub fn new(lines_max: f64, footprint_lines: f64, miss_ratio: impl Fn(f64) -> f64) -> Sharer {
        let step_lines = lines_max / POINTS as f64;
        Sharer {
            footprint_lines,
            group: 0,
            common: 0.0,
            curve: (0..=POINTS)
                .map(|at| miss_ratio(at as f64 * step_lines))
                .collect(),
            step_lines,
        }
    }

    /// The same, with this share of its accesses to memory that all sharers of a group use.
    #[must_use]
    pub fn in_group(mut self, group: usize, common: f64) -> Sharer {
        self.group = group;
        self.common = common;
        self
    }

    fn miss_ratio(&self, lines: f64) -> f64 {
        let place = (lines / self.step_lines).clamp(0.0, POINTS as f64);
        let below = (place as usize).min(POINTS - 1);
        self.curve[below] + (self.curve[below + 1] - self.curve[below]) * (place - below as f64)
    }
}

/// One last-level cache.
#[derive(Clone, Debug)]
pub struct Llc {
    lines: f64,
    classes: usize,
    /// Lines held, by sharer and class, youngest first.
    held: Vec<f64>,
    /// The same over all classes, by sharer.
    total: Vec<f64>,
    /// Accesses and insertions since the last step, by sharer.
    accessed: Vec<f64>,
    inserted: Vec<f64>,
    /// Uses of lines of each class in this step, by sharer and class.
    used: Vec<f64>,
    /// Lines held by a group, by group and class.
    common: Vec<f64>,
    /// Who holds lines or used the cache, and what of them enters the class at hand.
    active: Vec<usize>,
    entering: Vec<f64>,
}

impl Llc {
    /// An empty cache of this many lines for this many sharers.
    pub fn new(lines: f64, replacement: Replacement, sharers: usize) -> Llc {
        Llc::with_classes(lines, classes(replacement), sharers)
    }

    /// The same with another number of age classes.
    pub fn with_classes(lines: f64, classes: usize, sharers: usize) -> Llc {
        Llc {
            lines,
            classes,
            held: vec![0.0; sharers * classes],
            total: vec![0.0; sharers],
            accessed: vec![0.0; sharers],
            inserted: vec![0.0; sharers],
            used: vec![0.0; sharers * classes],
            common: Vec::new(),
            active: Vec::with_capacity(sharers),
            entering: vec![0.0; sharers],
        }
    }

    /// Lines that a sharer holds.
    pub fn held(&self, sharer: usize) -> f64 {
        self.total[sharer]
    }

    /// Notes accesses of a sharer, and how many of them missed.
    pub fn access(&mut self, sharer: usize, accesses: f64, misses: f64) {
        self.accessed[sharer] += accesses;
        self.inserted[sharer] += misses;
    }

    /// Takes in what happened since the last step.
    pub fn step(&mut self, sharers: &[Sharer]) {
        self.active.clear();
        let busy = |at: &usize| self.accessed[*at] > 0.0 || self.total[*at] > 0.0;
        self.active.extend((0..sharers.len()).filter(busy));
        if self.active.iter().all(|at| self.accessed[*at] <= 0.0) {
            return;
        }
        let class_lines = self.lines / self.classes as f64;
        let entries = self.count_uses(sharers) + self.active.iter().map(|at| self.inserted[*at]).sum::<f64>();
        let way = if self.classes > 1 && entries > TURNOVERS_MAX * class_lines {
            0.5
        } else {
            1.0
        };
        self.age(class_lines, way);
        self.settle(sharers);
        for at in &self.active {
            self.accessed[*at] = 0.0;
            self.inserted[*at] = 0.0;
        }
    }

    /// How often lines of each class but the youngest are used; gives the sum.
    fn count_uses(&mut self, sharers: &[Sharer]) -> f64 {
        if self.classes == 1 {
            return 0.0;
        }
        self.count_common(sharers);
        let mut sum = 0.0;
        for at in &self.active {
            let (sharer, accesses) = (&sharers[*at], self.accessed[*at]);
            let first = at * self.classes;
            let (mut own, mut group, mut younger) = (0.0, 0.0, 1.0);
            for class in 0..self.classes {
                let lines = self.held[first + class];
                own += lines;
                group += self.common[sharer.group * self.classes + class];
                let used = &mut self.used[first + class];
                *used = 0.0;
                if accesses <= 0.0 || (class > 0 && lines <= LINES_MIN) {
                    continue;
                }
                let with_this = sharer.miss_ratio(own + sharer.common * (group - own));
                if class > 0 {
                    *used = accesses * (younger - with_this).max(0.0);
                    sum += *used;
                }
                younger = with_this;
            }
        }
        sum
    }

    fn count_common(&mut self, sharers: &[Sharer]) {
        self.common.fill(0.0);
        for at in &self.active {
            let first = sharers[*at].group * self.classes;
            if self.common.len() < first + self.classes {
                self.common.resize(first + self.classes, 0.0);
            }
            for class in 0..self.classes {
                self.common[first + class] += self.held[at * self.classes + class];
            }
        }
    }

    /// Lets lines enter, age and leave, a share of the `way` that they would go.
    fn age(&mut self, class_lines: f64, way: f64) {
        let classes = self.classes;
        for at in &self.active {
            let uses: f64 = self.used[at * classes..(at + 1) * classes].iter().sum();
            self.entering[*at] = self.inserted[*at] + uses;
        }
        for class in 0..classes {
            let (mut entries, mut uses, mut full) = (0.0, 0.0, 0.0);
            for at in &self.active {
                entries += self.entering[*at];
                uses += self.used[at * classes + class];
                full += self.held[at * classes + class];
            }
            // While there is room nothing is pushed out; what is over goes in this step.
            let growth = entries - uses;
            let filling = match class_lines - full {
                room if room <= 1e-9 * class_lines => 0.0,
                room if room >= growth => 1.0,
                room => room / growth,
            };
            let rest = 1.0 - filling;
            let pushes = (growth * rest + (full - class_lines).max(0.0)).max(0.0) / class_lines;
            let left = libm::exp(-pushes);
            for at in &self.active {
                let (held, used) = (self.held[at * classes + class], self.used[at * classes + class]);
                let mut entering = self.entering[*at];
                let mut lines = held;
                let loss = if used > 0.0 { used / held } else { 0.0 };
                if filling > 0.0 {
                    let loss = loss * filling;
                    (lines, _) = relax(lines, entering * filling, loss, fade(loss));
                    entering *= rest;
                }
                let (after, mean) = if used > 0.0 {
                    let loss = loss * rest + pushes;
                    relax(lines, entering, loss, fade(loss))
                } else {
                    relax(lines, entering, pushes, left)
                };
                self.held[at * classes + class] = if after > LINES_MIN {
                    held + (after - held) * way
                } else {
                    0.0
                };
                self.entering[*at] = pushes * mean;
            }
        }
    }

    /// Keeps sharers within their footprints and the cache within its size.
    fn settle(&mut self, sharers: &[Sharer]) {
        let classes = self.classes;
        let mut full = 0.0;
        for at in &self.active {
            let held = &mut self.held[at * classes..(at + 1) * classes];
            let mut over = held.iter().sum::<f64>() - sharers[*at].footprint_lines;
            for lines in held.iter_mut().rev() {
                let gone = over.clamp(0.0, *lines);
                *lines -= gone;
                over -= gone;
            }
            self.total[*at] = held.iter().sum();
            full += self.total[*at];
        }
        if full > self.lines {
            let shrink = self.lines / full;
            for at in &self.active {
                self.total[*at] *= shrink;
                self.held[at * classes..(at + 1) * classes]
                    .iter_mut()
                    .for_each(|lines| *lines *= shrink);
            }
        }
    }

    /// Drops a sharer's lines, when its VM leaves.
    pub fn forget(&mut self, sharer: usize) {
        self.held[sharer * self.classes..(sharer + 1) * self.classes].fill(0.0);
        self.total[sharer] = 0.0;
        self.accessed[sharer] = 0.0;
        self.inserted[sharer] = 0.0;
    }

    /// Lines held by all.
    pub fn full(&self) -> f64 {
        self.total.iter().sum()
    }

    /// Capacity in lines.
    pub fn lines(&self) -> f64 {
        self.lines
    }
}

/// Solution of `dO/dt = entering - loss O` after a unit of time, and the mean of `O` over it; `left` is `exp(-loss)`.
fn relax(lines: f64, entering: f64, loss: f64, left: f64) -> (f64, f64) {
    if loss < 1e-9 {
        return (lines + entering, lines + 0.5 * entering);
    }
    let inverse = 1.0 / loss;
    let steady = entering * inverse;
    let off = lines - steady;
    (steady + off * left, steady + off * (1.0 - left) * inverse)
}

/// `exp(-loss)` within 0.03, cheaply: for lines in use, whose loss is an estimate anyway.
fn fade(loss: f64) -> f64 {
    1.0 / (1.0 + loss * (1.0 + loss * (0.5 + loss * (1.0 / 6.0))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sharers who can use everything and reuse nothing.
    fn streams() -> [Sharer; 2] {
        [0, 1].map(|_| Sharer::new(1000.0, 1e9, |_| 1.0))
    }

    /// Drives a cache until nothing changes; each access finds what its curve says. Gives miss ratios.
    fn steady(llc: &mut Llc, sharers: &[Sharer], accesses: &[f64]) -> Vec<f64> {
        for _ in 0..20_000 {
            for (at, accesses) in accesses.iter().enumerate() {
                let ratio = sharers[at].miss_ratio(llc.held(at));
                llc.access(at, *accesses, accesses * ratio);
            }
            llc.step(sharers);
        }
        (0..accesses.len())
            .map(|at| sharers[at].miss_ratio(llc.held(at)))
            .collect()
    }

    #[test]
    fn shares_tend_to_shares_of_misses() {
        // Two sharers without reuse inserting 3:1 into 1000 lines settle at 750 and 250, under any policy.
        for policy in Replacement::ALL {
            let mut llc = Llc::new(1000.0, policy, 2);
            for _ in 0..100 {
                llc.access(0, 300.0, 300.0);
                llc.access(1, 100.0, 100.0);
                llc.step(&streams());
            }
            let held = (llc.held(0), llc.held(1));
            assert!(
                (held.0 - 750.0).abs() < 0.01 && (held.1 - 250.0).abs() < 0.01,
                "{held:?} {policy:?}"
            );
        }
    }

    #[test]
    fn lines_of_a_sleeper_decay_by_the_exponential_under_random_replacement() {
        // Full of sharer 0's lines; sharer 1 then inserts C lines: 1/e of them survive.
        let mut llc = Llc::new(1000.0, Replacement::Random, 2);
        llc.access(0, 1000.0, 1000.0);
        llc.step(&streams());
        llc.access(1, 1000.0, 1000.0);
        llc.step(&streams());
        assert!((llc.held(0) - 1000.0 * libm::exp(-1.0)).abs() < 1e-6);
    }

    #[test]
    fn use_protects_as_long_as_the_cache_turns_over_more_slowly() {
        // Uniform use of 200 lines at rate a beside a stream at rate s, 1000 lines. By hand: random replacement keeps
        // O = 200 x / (1 + x) with x = a T / 200, T = (1000 - O) / s; LRU keeps O = 200 (1 - exp(-x)), missing exp(-x).
        // With a = s / 2: x = 2.1 misses 0.32 and 0.12. With a = s / 20: x = 0.24 misses 0.81 and 0.79.
        let uniform = Sharer::new(1000.0, 200.0, |lines| (1.0 - lines / 200.0).max(0.0));
        let sharers = [uniform, Sharer::new(1000.0, 1e9, |_| 1.0)];
        let miss = |classes, rate| {
            steady(
                &mut Llc::with_classes(1000.0, classes, 2),
                &sharers,
                &[rate, 20.0],
            )[0]
        };
        let (random, some, lru) = (miss(1, 10.0), miss(CLASSES, 10.0), miss(32, 10.0));
        assert!(
            (random - 0.32).abs() < 0.01 && (lru - 0.12).abs() < 0.02,
            "{random} {some} {lru}"
        );
        assert!(lru < some && some < random, "{random} {some} {lru}");
        let (random, lru) = (miss(1, 1.0), miss(32, 1.0));
        assert!(
            (random - 0.81).abs() < 0.01 && (lru - 0.79).abs() < 0.02,
            "{random} {lru}"
        );
    }

    #[test]
    fn the_steady_state_does_not_depend_on_the_step() {
        let sharers = [
            Sharer::new(1000.0, 1e9, |lines| 0.1 + 0.9 * libm::exp(-lines / 300.0)),
            Sharer::new(1000.0, 1e9, |lines| {
                0.02 + 0.98 * libm::exp(-(lines / 500.0) * (lines / 500.0))
            }),
        ];
        let at = |scale: f64| {
            let mut llc = Llc::new(1000.0, Replacement::PseudoLru, 2);
            steady(&mut llc, &sharers, &[5.0 * scale, 20.0 * scale])
        };
        let fine = at(1.0);
        for scale in [4.0, 20.0, 100.0, 1000.0] {
            for (fine, coarse) in fine.iter().zip(at(scale)) {
                assert!(
                    (fine - coarse).abs() < 2e-3,
                    "{fine} and {coarse} with steps {scale} times as long"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn never_overfull_and_never_beyond_a_footprint(
            steps in prop::collection::vec((0.0..5e3f64, 0.0..5e3f64, 0.0..1.0f64), 1..40),
            policy in 0usize..5,
        ) {
            let sharers = [
                Sharer::new(1000.0, 300.0, |lines| libm::exp(-lines / 200.0)),
                Sharer::new(1000.0, 1e9, |lines| 0.2 + 0.8 * libm::exp(-lines / 900.0)).in_group(1, 0.5),
            ];
            let mut llc = Llc::new(1000.0, Replacement::ALL[policy], 2);
            for (a, b, missed) in steps {
                llc.access(0, a, a * missed);
                llc.access(1, b, b * missed);
                llc.step(&sharers);
                prop_assert!(llc.full() <= 1000.0 + 1e-6);
                prop_assert!(llc.held(0) <= 300.0 + 1e-6 && llc.held(0) >= 0.0 && llc.held(1) >= 0.0);
            }
        }

        #[test]
        fn one_step_is_two_half_steps_when_full(a in 1.0..4e3f64, b in 1.0..4e3f64) {
            let mut whole = Llc::new(1000.0, Replacement::Random, 2);
            whole.access(0, 600.0, 600.0);
            whole.access(1, 400.0, 400.0);
            whole.step(&streams());
            let mut halves = whole.clone();
            whole.access(0, a, a);
            whole.access(1, b, b);
            whole.step(&streams());
            for _ in 0..2 {
                halves.access(0, a / 2.0, a / 2.0);
                halves.access(1, b / 2.0, b / 2.0);
                halves.step(&streams());
            }
            prop_assert!((whole.held(0) - halves.held(0)).abs() < 1e-6);
        }
    }
}

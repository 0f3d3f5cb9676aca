//! Last-level caches: how many lines each sharer holds.
//!
//! # Model
//!
//! A cache of `C` lines keeps them in `K` age classes of `C / K` lines. A line that comes in or is used enters the youngest
//! class. Every entry pushes a line, drawn evenly, out of that class into the next, and so on; the oldest class pushes its line
//! out of the cache. Sharer `i` holds `O_ic` lines in class `c`, inserts `M_i` lines a second (its misses), and uses lines of
//! class `c` at the rate
//!
//! `H_ic = A_i (m_i(S_i,c-1) - m_i(S_ic))`, `S_ic = O_i0 + ... + O_ic`
//!
//! with `A_i` its accesses and `m_i` its miss-ratio curve: the accesses that would miss with only the younger classes and do not
//! miss with this one (Mattson's stack property). So with `F_c` entries a second into a full class
//!
//! `dO_ic/dt = in_ic - (H_ic / O_ic + F_c / (C / K)) O_ic`
//!
//! where `in` is what the younger class pushes out; for the youngest class it is `M_i` and all `H_i`. For constant rates this is
//! linear. A step uses the solution (exact for lines not in use), so the steady state does not depend on the step. A sharer that
//! does not run inserts and uses no lines, and its lines age and leave. No sharer holds more lines than its footprint; lines
//! beyond it are room for others.
//!
//! `K = 1` is random replacement: shares of the cache are shares of misses, and a sleeper's lines decay as `exp(-t M / C)`. Many
//! classes are true LRU: all sharers' lines live equally long without use (Che's characteristic time). Policies that remember use
//! are in between, and [`CLASSES`] classes describe them all: `docs/VALIDATION.md` has the error by number of classes. How much
//! such a policy protects a program depends on the program's rate: a program that uses a line more rarely than the cache turns
//! over loses the line under any policy.
//!
//! # Left out
//!
//! Sets and ways (so no conflict misses and no way partitioning), back-invalidation of private caches by an inclusive LLC
//! (`docs/VALIDATION.md` has its size), lines of the host and of page copies. If a sibling that shares memory uses a line, the
//! use counts as the sibling's own.

mod course;
mod sharer;

use homenode_machine::Replacement;

use course::Course;

pub use sharer::Sharer;

/// Age classes of a policy that remembers use.
pub const CLASSES: usize = 4;
/// Entries into the youngest class, as a multiple of its size, above which a step goes only half its way. A step uses the rates
/// at its beginning, and would otherwise oscillate.
const TURNOVERS_MAX: f64 = 2.0;
/// A sharer that does not use the cache and holds fewer lines than this is forgotten.
const LINES_MIN: f64 = 0.5;
/// Keeps shares of lines finite if there are no lines.
const LINES_LEAST: f64 = 1e-9;
/// Place of a sharer that is unknown to a cache.
const ABSENT: usize = usize::MAX;

/// Returns the number of age classes that describe a policy.
pub(crate) fn classes(replacement: Replacement) -> usize {
    match replacement {
        Replacement::Random => 1,
        Replacement::Lru | Replacement::PseudoLru | Replacement::NotRecentlyUsed | Replacement::QuadAge => {
            CLASSES
        }
    }
}

/// One last-level cache.
#[derive(Clone, Debug)]
pub struct Llc {
    lines: f64,
    classes: usize,
    /// Sharers that use the cache or hold lines, and the place of each sharer in this list. The other fields are indexed by
    /// place.
    present: Vec<Present>,
    places: Vec<usize>,
    /// Lines held: by class, youngest first; and in total.
    held: Vec<Vec<f64>>,
    total: Vec<f64>,
    /// Accesses and insertions since the last step.
    accessed: Vec<f64>,
    inserted: Vec<f64>,
    /// Lines that enter the class being processed.
    entering: Vec<f64>,
    /// Most lines that each sharer holds: its footprint.
    most: Vec<f64>,
    /// Lines held by each group, by the group's number.
    groups: Vec<f64>,
    /// Sharers that used the cache since the last step, in order of places. The other sharers, which are many if vCPUs take
    /// turns, have no uses to count, and all their lines take the same course.
    users: Vec<User>,
    /// Number of uses of each class's lines in this step: by class, and then by position among the users.
    used: Vec<f64>,
    /// Sharers with memory in common, in order of places.
    sharing: Vec<Sharing>,
    /// Groups with a sharer in [`Llc::sharing`].
    slots: Vec<usize>,
    /// Lines that these groups hold in a class and the younger ones: by class, and then by position in [`Llc::slots`].
    younger: Vec<f64>,
    /// Whether a sharer came or went since the last step.
    has_changed: bool,
}

/// A sharer with memory in common.
#[derive(Clone, Copy, Debug)]
struct Sharing {
    place: usize,
    group: usize,
    /// Position of the group in [`Llc::slots`].
    slot: usize,
}

/// A sharer that uses the cache or holds lines.
#[derive(Clone, Copy, Debug)]
struct Present {
    sharer: usize,
    /// The facts that every step needs, kept here because the sharers themselves are far apart in memory. `None` if the sharer
    /// came after the last step.
    facts: Option<Facts>,
    /// Position of the sharer's group in [`Llc::slots`], if it has memory in common with the group.
    slot: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Facts {
    footprint_lines: f64,
    /// The sharer's group, if it has memory in common with the group.
    group: Option<usize>,
}

/// A sharer that used the cache since the last step.
#[derive(Clone, Copy, Debug)]
struct User {
    place: usize,
    /// Lines of the class being processed, after those that had room have entered.
    filled: f64,
    /// If the sharer uses its lines of the class being processed: the lines it holds afterwards, and the lines that go to the
    /// next class.
    fate: Option<(f64, f64)>,
}

impl Llc {
    /// Creates an empty cache of this many lines for this many sharers.
    pub fn new(lines: f64, replacement: Replacement, sharers: usize) -> Llc {
        Llc::with_classes(lines, classes(replacement), sharers)
    }

    /// Creates a cache with any number of age classes.
    pub fn with_classes(lines: f64, classes: usize, sharers: usize) -> Llc {
        Llc {
            lines,
            classes,
            present: Vec::new(),
            places: vec![ABSENT; sharers],
            held: vec![Vec::new(); classes],
            total: Vec::new(),
            accessed: Vec::new(),
            inserted: Vec::new(),
            entering: Vec::new(),
            most: Vec::new(),
            groups: Vec::new(),
            users: Vec::new(),
            used: Vec::new(),
            sharing: Vec::new(),
            slots: Vec::new(),
            younger: Vec::new(),
            has_changed: false,
        }
    }

    /// Exchanges the lines of two sharers that are alike, so that each holds what the other did.
    pub fn exchange(&mut self, one: usize, other: usize) {
        self.places.swap(one, other);
        for sharer in [one, other] {
            if let Some(present) = self.present.get_mut(self.places[sharer]) {
                present.sharer = sharer;
            }
        }
    }

    /// Returns the lines that a sharer holds.
    pub fn held(&self, sharer: usize) -> f64 {
        self.total.get(self.places[sharer]).copied().unwrap_or(0.0)
    }

    /// Returns the lines that a sharer can use: its own, and those of the common memory that its group brought in.
    pub fn usable(&self, number: usize, sharer: &Sharer) -> f64 {
        sharer.usable(self.held(number), &self.groups)
    }

    /// Counts accesses of a sharer, and how many of them missed.
    pub fn access(&mut self, sharer: usize, accesses: f64, misses: f64) {
        if self.places[sharer] == ABSENT {
            self.admit(sharer);
        }
        let place = self.places[sharer];
        self.accessed[place] += accesses;
        self.inserted[place] += misses;
    }

    fn admit(&mut self, sharer: usize) {
        self.places[sharer] = self.present.len();
        self.present.push(Present {
            sharer,
            facts: None,
            slot: None,
        });
        self.has_changed = true;
        for of_all in self.all() {
            of_all.push(0.0);
        }
    }

    /// Returns all vectors that are indexed by place.
    fn all(&mut self) -> impl Iterator<Item = &mut Vec<f64>> {
        let single = [
            &mut self.total,
            &mut self.accessed,
            &mut self.inserted,
            &mut self.entering,
            &mut self.most,
        ];
        self.held.iter_mut().chain(single)
    }

    /// Takes in what happened since the last step. A sharer that is to be replaced by another must be forgotten first.
    pub fn step(&mut self, sharers: &[Sharer]) {
        self.look(sharers);
        if self.users.is_empty() {
            return;
        }
        let class_lines = self.lines / self.classes as f64;
        let entries = self.count_uses(sharers) + self.inserted.iter().sum::<f64>();
        let way = if self.classes > 1 && entries > TURNOVERS_MAX * class_lines {
            0.5
        } else {
            1.0
        };
        self.age(class_lines, way);
        self.settle();
        self.has_changed = false;
        for place in (0..self.present.len()).rev() {
            if self.total[place] < LINES_MIN && self.accessed[place] <= 0.0 {
                self.forget(self.present[place].sharer);
            }
        }
        self.accessed.fill(0.0);
        self.inserted.fill(0.0);
    }

    /// Finds the sharers that used the cache, and those that share memory.
    fn look(&mut self, sharers: &[Sharer]) {
        self.users.clear();
        for (place, accesses) in self.accessed.iter().enumerate() {
            if *accesses > 0.0 {
                self.users.push(User {
                    place,
                    filled: 0.0,
                    fate: None,
                });
            }
        }
        if self.has_changed {
            self.look_again(sharers);
        }
        debug_assert!(
            self.present
                .iter()
                .all(|present| present.facts == Some(Facts::of(&sharers[present.sharer]))),
            "forget a sharer that changes"
        );
    }

    /// Finds the sharers that share memory, after a sharer came or went.
    fn look_again(&mut self, sharers: &[Sharer]) {
        self.sharing.clear();
        self.slots.clear();
        for (place, present) in self.present.iter_mut().enumerate() {
            let facts = present
                .facts
                .get_or_insert_with(|| Facts::of(&sharers[present.sharer]));
            self.most[place] = facts.footprint_lines;
            present.slot = None;
            if let Some(group) = facts.group {
                let known = self.slots.iter().position(|other| *other == group);
                let slot = known.unwrap_or_else(|| {
                    self.slots.push(group);
                    self.slots.len() - 1
                });
                present.slot = Some(slot);
                self.sharing.push(Sharing { place, group, slot });
                if group >= self.groups.len() {
                    self.groups.resize(group + 1, 0.0);
                }
            }
        }
    }

    /// Counts the uses of lines of each class but the youngest. Returns their sum.
    fn count_uses(&mut self, sharers: &[Sharer]) -> f64 {
        let users = self.users.len();
        self.used.clear();
        self.used.resize(self.classes * users, 0.0);
        if self.classes == 1 {
            return 0.0;
        }
        self.count_groups();
        for (at, user) in self.users.iter().enumerate() {
            let (present, accessed) = (&self.present[user.place], self.accessed[user.place]);
            let sharer = &sharers[present.sharer];
            // Lines of the classes counted so far, and the miss ratio with only these.
            let (mut own, mut without) = (0.0, 1.0);
            for (class, held) in self.held.iter().enumerate() {
                let lines = held[user.place];
                own += lines;
                let usable = match present.slot {
                    None => own,
                    Some(slot) => sharer.usable_of(own, self.younger[class * self.slots.len() + slot]),
                };
                let with_this = sharer.miss_ratio(usable);
                if class > 0 && lines > LINES_MIN {
                    self.used[class * users + at] = accessed * (without - with_this).max(0.0);
                }
                without = with_this;
            }
        }
        self.used.iter().sum()
    }

    /// Counts the lines that groups hold in each class and the younger ones.
    fn count_groups(&mut self) {
        let slots = self.slots.len();
        if slots == 0 {
            return;
        }
        self.younger.clear();
        self.younger.resize(self.classes * slots, 0.0);
        for (class, held) in self.held.iter().enumerate() {
            let (before, now) = self.younger.split_at_mut(class * slots);
            if class > 0 {
                now[..slots].copy_from_slice(&before[(class - 1) * slots..]);
            }
            for Sharing { place, slot, .. } in &self.sharing {
                now[*slot] += held[*place];
            }
        }
    }

    /// Lets lines enter, age and leave, but only a share `way` of their full course.
    fn age(&mut self, class_lines: f64, way: f64) {
        self.entering.copy_from_slice(&self.inserted);
        for used in self.used.chunks_exact(self.users.len()) {
            for (user, used) in self.users.iter().zip(used) {
                self.entering[user.place] += used;
            }
        }
        for (held, used) in self.held.iter_mut().zip(self.used.chunks_exact(self.users.len())) {
            // A sum is a chain of additions in a fixed order, so two sums in parallel take as long as one.
            let (mut entries, mut full) = (0.0, 0.0);
            for (held, entering) in held.iter().zip(&self.entering) {
                entries += entering;
                full += held;
            }
            let uses: f64 = used.iter().sum();
            // While there is room, no line is pushed out. What exceeds the room leaves in this step.
            let growth = entries - uses;
            let filling = match class_lines - full {
                room if room <= 1e-9 * class_lines => 0.0,
                room if room >= growth => 1.0,
                room => room / growth,
            };
            let rest = 1.0 - filling;
            let pushes = (growth * rest + (full - class_lines).max(0.0)).max(0.0) / class_lines;
            if filling > 0.0 {
                for (user, used) in self.users.iter_mut().zip(used) {
                    let (lines, entering) = (held[user.place], self.entering[user.place]);
                    let course = Course::in_use(used / lines.max(LINES_LEAST) * filling);
                    user.filled = course.run(lines, entering * filling).0;
                }
                for (held, entering) in held.iter_mut().zip(&mut self.entering) {
                    *held += *entering * filling; // the course of unused lines
                    *entering *= rest;
                }
                for user in &self.users {
                    held[user.place] = user.filled;
                }
            }
            let fate = |course: Course, held: f64, entering: f64| {
                let (after, mean) = course.run(held, entering);
                (held + (after - held) * way, pushes * mean)
            };
            let mut in_use = 0;
            for (user, used) in self.users.iter_mut().zip(used) {
                user.fate = (*used > 0.0).then(|| {
                    let (lines, entering) = (held[user.place], self.entering[user.place]);
                    let loss = used / lines.max(LINES_LEAST) * rest + pushes;
                    fate(Course::in_use(loss), lines, entering)
                });
                in_use += usize::from(*used > 0.0);
            }
            // All lines take the course of unused lines. Those in use are then set to their own course, which was computed above.
            // So this loop need not check which sharer uses which line.
            if in_use < held.len() {
                let unused = Course::of(pushes);
                for (held, entering) in held.iter_mut().zip(&mut self.entering) {
                    (*held, *entering) = fate(unused, *held, *entering);
                }
            }
            for user in &self.users {
                if let Some(fate) = user.fate {
                    (held[user.place], self.entering[user.place]) = fate;
                }
            }
        }
    }

    /// Limits sharers to their footprints and the cache to its size.
    fn settle(&mut self) {
        self.total.fill(0.0);
        for held in &self.held {
            for (total, lines) in self.total.iter_mut().zip(held) {
                *total += lines;
            }
        }
        for place in 0..self.total.len() {
            let mut over = self.total[place] - self.most[place];
            if over > 0.0 {
                self.total[place] -= over;
                for held in self.held.iter_mut().rev() {
                    let gone = over.min(held[place]);
                    held[place] -= gone;
                    over -= gone;
                }
            }
        }
        let full = self.full();
        if full > self.lines {
            let shrink = self.lines / full;
            for lines in self.held.iter_mut().chain([&mut self.total]).flatten() {
                *lines *= shrink;
            }
        }
        // Groups without a sharer here have no lines anyway, unless a sharer went.
        if self.has_changed {
            self.groups.fill(0.0);
        }
        for group in &self.slots {
            self.groups[*group] = 0.0;
        }
        for Sharing { place, group, .. } in &self.sharing {
            self.groups[*group] += self.total[*place];
        }
    }

    /// Drops a sharer's lines when its VM leaves.
    pub fn forget(&mut self, sharer: usize) {
        let place = std::mem::replace(&mut self.places[sharer], ABSENT);
        if place == ABSENT {
            return;
        }
        self.present.swap_remove(place);
        self.has_changed = true;
        if let Some(moved) = self.present.get(place) {
            self.places[moved.sharer] = place;
        }
        for of_all in self.all() {
            of_all.swap_remove(place);
        }
    }

    /// Returns the number of lines that all sharers hold.
    pub fn full(&self) -> f64 {
        self.total.iter().sum()
    }

    /// Returns the capacity in lines.
    pub fn lines(&self) -> f64 {
        self.lines
    }
}

impl Facts {
    fn of(sharer: &Sharer) -> Facts {
        Facts {
            footprint_lines: sharer.footprint_lines,
            // A sharer without memory in common with its group needs no group. Nor do the other sharers of that group, which are
            // like it.
            group: (sharer.common != 0.0).then_some(sharer.group),
        }
    }
}

#[cfg(test)]
mod plain;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use proptest::prelude::*;

    /// Returns sharers that can use the whole cache and reuse no lines.
    fn streams() -> [Sharer; 2] {
        [0, 1].map(|_| Sharer::new(1000.0, 1e9, |_| 1.0))
    }

    /// Drives a cache until it no longer changes. Each access misses as its sharer's curve says. Returns the miss ratios.
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
    fn sharers_of_one_program_keep_one_curve() {
        let sharer = |floor: f64| Sharer::new(1000.0, 500.0, move |lines| (1.0 - lines / 1000.0).max(floor));
        let first = [sharer(0.2), sharer(0.3)];
        let is_kept = |sharer: Sharer, of: usize| Arc::ptr_eq(&sharer.curve, &first[of].curve);
        assert!(is_kept(sharer(0.2).reusing(&first), 0) && is_kept(sharer(0.3).reusing(&first), 1));
        assert!((0..2).all(|of| !is_kept(sharer(0.4).reusing(&first), of)));
    }

    #[test]
    fn shares_tend_to_shares_of_misses() {
        // Two sharers without reuse that insert 3:1 into 1000 lines settle at 750 and 250 lines under any policy.
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
        // The cache is full of sharer 0's lines. Sharer 1 then inserts C lines: 1/e of sharer 0's lines survive.
        let mut llc = Llc::new(1000.0, Replacement::Random, 2);
        llc.access(0, 1000.0, 1000.0);
        llc.step(&streams());
        llc.access(1, 1000.0, 1000.0);
        llc.step(&streams());
        assert!((llc.held(0) - 1000.0 * libm::exp(-1.0)).abs() < 1e-6);
    }

    #[test]
    fn use_protects_as_long_as_the_cache_turns_over_more_slowly() {
        // Uniform use of 200 lines at rate a, next to a stream at rate s, in 1000 lines. By hand: under random replacement O =
        // 200 x / (1 + x) with x = a T / 200, T = (1000 - O) / s. Under LRU O = 200 (1 - exp(-x)), and exp(-x) of the accesses
        // miss. With a = s / 2: x = 2.1, and 0.32 (random) and 0.12 (LRU) of them miss. With a = s / 20: x = 0.24, and 0.81 and
        // 0.79 of them miss.
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

    #[test]
    fn sharers_that_exchange_their_lines_hold_each_others_and_the_cache_stays_as_full() {
        let sharers = [0, 1, 2].map(|_| Sharer::new(1000.0, 1e9, |_| 1.0));
        let mut llc = Llc::new(1000.0, Replacement::PseudoLru, 3);
        llc.access(0, 300.0, 300.0);
        llc.access(1, 100.0, 100.0);
        llc.step(&sharers);
        let (one, other, full) = (llc.held(0), llc.held(1), llc.full());
        assert!(one > other && other > 0.0, "{one} and {other}");
        llc.exchange(0, 1);
        assert_eq!((llc.held(0), llc.held(1), llc.full()), (other, one, full));
        // Sharer 2 has no lines here.
        llc.exchange(2, 1);
        assert_eq!((llc.held(1), llc.held(2), llc.full()), (0.0, one, full));
        llc.access(2, 50.0, 50.0);
        llc.access(1, 50.0, 50.0);
        llc.step(&sharers);
        let (kept, begun) = (llc.held(2), llc.held(1));
        assert!(kept > begun && begun > 0.0, "{kept} and {begun}");
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

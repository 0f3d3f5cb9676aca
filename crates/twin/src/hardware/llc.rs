//! Last-level caches: who holds how many lines.
//!
//! # Model
//!
//! A cache of `C` lines holds `O_i` lines of vCPU `i`, which inserts `M_i` lines per second (its misses). While the
//! cache has room, `dO_i/dt = M_i`. When it is full, every insertion evicts a line drawn evenly from all:
//! `dO_i/dt = M_i - M * O_i / C` with `M = sum of M_i`, whose exact solution over a step `dt` is
//!
//! `O_i <- O* + (O_i - O*) * exp(-dt * M / C)`, `O* = C * M_i / M`
//!
//! (pseudo-LRU hardware is near random replacement: `facts/simulators.md`, 3.3 item 1, mean error 0.011 of miss
//! ratio in synthetic streams). A vCPU that does not run inserts nothing, and its lines decay. A vCPU never holds more
//! than its footprint; what it cannot hold is room for others.
//!
//! # Left out
//!
//! Sets and ways (so no conflict misses and no way partitioning), back-invalidation of private caches by an inclusive
//! LLC, lines of the host and of page copies.

/// One last-level cache.
#[derive(Clone, Debug)]
pub(crate) struct Llc {
    lines: f64,
    /// Lines held, by vCPU.
    held: Vec<f64>,
    /// Lines inserted since the last step, by vCPU.
    inserted: Vec<f64>,
}

impl Llc {
    pub fn new(lines: f64, vcpus: usize) -> Llc {
        Llc {
            lines,
            held: vec![0.0; vcpus],
            inserted: vec![0.0; vcpus],
        }
    }

    /// Lines that a vCPU holds.
    pub fn held(&self, vcpu: usize) -> f64 {
        self.held[vcpu]
    }

    /// Notes lines that a vCPU missed.
    pub fn insert(&mut self, vcpu: usize, lines: f64) {
        self.inserted[vcpu] += lines;
    }

    /// Takes in what was inserted since the last step. `footprints` is the most lines that each vCPU can use.
    pub fn step(&mut self, footprints: &[f64]) {
        let total: f64 = self.inserted.iter().sum();
        if total <= 0.0 {
            return;
        }
        let full: f64 = self.held.iter().sum();
        // The part of the insertions that finds room, the rest evicts.
        let filling = ((self.lines - full).max(0.0) / total).min(1.0);
        let decay = libm::exp(-(1.0 - filling) * total / self.lines);
        for ((held, inserted), footprint) in self.held.iter_mut().zip(&mut self.inserted).zip(footprints) {
            let grown = *held + *inserted * filling;
            let steady = self.lines * *inserted / total;
            *held = (steady + (grown - steady) * decay).min(*footprint);
            *inserted = 0.0;
        }
    }

    /// Drops a vCPU's lines, when its VM leaves.
    pub fn forget(&mut self, vcpu: usize) {
        self.held[vcpu] = 0.0;
        self.inserted[vcpu] = 0.0;
    }

    /// Lines held by all.
    pub fn full(&self) -> f64 {
        self.held.iter().sum()
    }

    /// Capacity in lines.
    pub fn lines(&self) -> f64 {
        self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_tend_to_shares_of_misses() {
        // Two vCPUs inserting 3:1 into 1000 lines settle at 750 and 250.
        let mut llc = Llc::new(1000.0, 2);
        for _ in 0..100 {
            llc.insert(0, 300.0);
            llc.insert(1, 100.0);
            llc.step(&[1e9, 1e9]);
        }
        assert!((llc.held(0) - 750.0).abs() < 1e-6 && (llc.held(1) - 250.0).abs() < 1e-6);
    }

    #[test]
    fn lines_of_a_sleeper_decay_by_the_exponential() {
        // Full of vCPU 0's lines; vCPU 1 then inserts C lines: 1/e of them survive.
        let mut llc = Llc::new(1000.0, 2);
        llc.insert(0, 1000.0);
        llc.step(&[1e9, 1e9]);
        llc.insert(1, 1000.0);
        llc.step(&[1e9, 1e9]);
        assert!((llc.held(0) - 1000.0 * libm::exp(-1.0)).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn never_overfull_and_never_beyond_a_footprint(steps in prop::collection::vec((0.0..5e3f64, 0.0..5e3f64), 1..40)) {
            let mut llc = Llc::new(1000.0, 2);
            for (a, b) in steps {
                llc.insert(0, a);
                llc.insert(1, b);
                llc.step(&[300.0, 1e9]);
                prop_assert!(llc.full() <= 1000.0 + 1e-6);
                prop_assert!(llc.held(0) <= 300.0 && llc.held(0) >= 0.0 && llc.held(1) >= 0.0);
            }
        }

        #[test]
        fn one_step_is_two_half_steps_when_full(a in 1.0..4e3f64, b in 1.0..4e3f64) {
            let mut whole = Llc::new(1000.0, 2);
            whole.insert(0, 600.0);
            whole.insert(1, 400.0);
            whole.step(&[1e9, 1e9]);
            let mut halves = whole.clone();
            whole.insert(0, a);
            whole.insert(1, b);
            whole.step(&[1e9, 1e9]);
            for _ in 0..2 {
                halves.insert(0, a / 2.0);
                halves.insert(1, b / 2.0);
                halves.step(&[1e9, 1e9]);
            }
            prop_assert!((whole.held(0) - halves.held(0)).abs() < 1e-6);
        }
    }
}

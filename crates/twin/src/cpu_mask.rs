//! Sets of CPUs by index, a bit each: a scheduler asks at every wake-up which CPUs are idle and allowed and near.

use crate::index::{CpuIx, first};
use std::ops::Index;

/// Some of a fixed number of CPUs. Sets that meet have the same number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CpuMask {
    words: Vec<u64>,
}

impl CpuMask {
    /// None of so many.
    pub fn none(cpus: usize) -> CpuMask {
        CpuMask {
            words: vec![0; cpus.div_ceil(64)],
        }
    }

    /// All of so many.
    pub fn all(cpus: usize) -> CpuMask {
        CpuMask::of(cpus, first(cpus))
    }

    /// These of so many.
    pub fn of(cpus: usize, members: impl IntoIterator<Item = CpuIx>) -> CpuMask {
        let mut mask = CpuMask::none(cpus);
        members.into_iter().for_each(|cpu| mask.set(cpu, true));
        mask
    }

    /// Adds or removes one.
    pub fn set(&mut self, cpu: CpuIx, is_in: bool) {
        let (word, bit) = (cpu.0 / 64, 1 << (cpu.0 % 64));
        if is_in {
            self.words[word] |= bit;
        } else {
            self.words[word] &= !bit;
        }
    }

    /// Takes over another set's members.
    pub fn copy(&mut self, other: &CpuMask) {
        self.words.copy_from_slice(&other.words);
    }

    /// Keeps those that the other has too.
    pub fn keep(&mut self, other: &CpuMask) {
        self.words
            .iter_mut()
            .zip(&other.words)
            .for_each(|(own, other)| *own &= other);
    }

    /// Removes those that the other has.
    pub fn remove(&mut self, other: &CpuMask) {
        self.words
            .iter_mut()
            .zip(&other.words)
            .for_each(|(own, other)| *own &= !other);
    }

    /// How many both have.
    pub fn count_common(&self, other: &CpuMask) -> u32 {
        self.words
            .iter()
            .zip(&other.words)
            .map(|(own, other)| (own & other).count_ones())
            .sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = CpuIx> {
        let words = self.words.iter().enumerate();
        words.flat_map(|(at, word)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                (left != 0).then(|| {
                    left &= left - 1;
                    CpuIx(64 * at + bit)
                })
            })
        })
    }

    /// The next after a CPU in a circle, it being the last.
    pub fn next_after(&self, cpu: CpuIx) -> Option<CpuIx> {
        let (at, bit) = (cpu.0 / 64, cpu.0 % 64);
        let above = self.words[at] & (u64::MAX << bit) & !(1 << bit);
        let from_word =
            |(at, word): (usize, u64)| (word != 0).then(|| CpuIx(64 * at + word.trailing_zeros() as usize));
        let whole = |range: std::ops::Range<usize>| range.map(|at| (at, self.words[at]));
        let rest = (at, self.words[at] & !above);
        std::iter::once((at, above))
            .chain(whole(at + 1..self.words.len()))
            .chain(whole(0..at))
            .chain([rest])
            .find_map(from_word)
    }
}

/// Marks by index.
impl FromIterator<bool> for CpuMask {
    fn from_iter<I: IntoIterator<Item = bool>>(marks: I) -> CpuMask {
        let mut mask = CpuMask::none(0);
        for (cpu, is_in) in marks.into_iter().enumerate() {
            if cpu % 64 == 0 {
                mask.words.push(0);
            }
            mask.set(CpuIx(cpu), is_in);
        }
        mask
    }
}

impl Index<CpuIx> for CpuMask {
    type Output = bool;

    fn index(&self, cpu: CpuIx) -> &bool {
        if self.words[cpu.0 / 64] >> (cpu.0 % 64) & 1 == 1 {
            &true
        } else {
            &false
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(
            a in prop::collection::vec(any::<bool>(), 1..200),
            b in prop::collection::vec(any::<bool>(), 200),
            from in 0usize..200,
        ) {
            let (cpus, b) = (a.len(), &b[..a.len()]);
            let (mask, other) = (a.iter().copied().collect::<CpuMask>(), b.iter().copied().collect::<CpuMask>());
            let members: Vec<CpuIx> = first(cpus).filter(|cpu: &CpuIx| a[cpu.0]).collect();
            prop_assert_eq!(mask.iter().collect::<Vec<_>>(), members.clone());
            prop_assert_eq!(mask.count() as usize, members.len());
            prop_assert!(first(cpus).all(|cpu: CpuIx| mask[cpu] == a[cpu.0]));
            let from = from % cpus;
            let next = (1..=cpus).map(|step| (from + step) % cpus).find(|cpu| a[*cpu]);
            prop_assert_eq!(mask.next_after(CpuIx(from)), next.map(CpuIx));
            let (mut both, mut only) = (mask.clone(), mask.clone());
            both.keep(&other);
            only.remove(&other);
            let is_right = |at: CpuIx| both[at] == (a[at.0] && b[at.0]) && only[at] == (a[at.0] && !b[at.0]);
            prop_assert!(first(cpus).all(is_right));
            prop_assert_eq!(both.count(), mask.count_common(&other));
            both.copy(&mask);
            prop_assert_eq!(both, mask);
        }
    }
}

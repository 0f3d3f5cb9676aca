//! Sets of nodes or CPUs, read and written in the kernel's list format (`0-3,8`).

use std::fmt;
use std::marker::PhantomData;
use std::ops::Index;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{CpuId, NodeId};

/// Larger ids are refused. The kernel's own limits are 8192 CPUs and 1024 nodes, and a hostile list such as `0-4294967295` must
/// not fill memory.
const ID_LIMIT: u32 = 65_536;

/// An id that has a small non-negative number.
pub trait Id: Copy + Ord {
    /// Returns the number.
    fn number(self) -> u32;
    /// Returns the id with that number.
    fn from_number(number: u32) -> Self;
}

impl Id for NodeId {
    fn number(self) -> u32 {
        u32::from(self.0)
    }
    fn from_number(number: u32) -> Self {
        NodeId(number as u16)
    }
}

impl Id for CpuId {
    fn number(self) -> u32 {
        self.0
    }
    fn from_number(number: u32) -> Self {
        CpuId(number)
    }
}

/// An ordered set of ids, kept as a bitmap without trailing zero words, so equal sets compare equal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdSet<T> {
    words: Vec<u64>,
    id: PhantomData<T>,
}

/// A set of NUMA nodes.
pub type NodeSet = IdSet<NodeId>;
/// A set of logical CPUs.
pub type CpuSet = IdSet<CpuId>;

impl<T> Default for IdSet<T> {
    fn default() -> Self {
        IdSet {
            words: Vec::new(),
            id: PhantomData,
        }
    }
}

impl<T: Id> IdSet<T> {
    /// Returns the empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the set with one member.
    pub fn one(id: T) -> Self {
        let mut set = Self::new();
        set.insert(id);
        set
    }

    /// Adds a member.
    pub fn insert(&mut self, id: T) {
        let n = id.number() as usize;
        if self.words.len() <= n / 64 {
            self.words.resize(n / 64 + 1, 0);
        }
        self.words[n / 64] |= 1 << (n % 64);
    }

    /// Removes a member, if it is in the set.
    pub fn remove(&mut self, id: T) {
        let n = id.number() as usize;
        if let Some(word) = self.words.get_mut(n / 64) {
            *word &= !(1 << (n % 64));
            self.trim();
        }
    }

    /// Adds or removes a member.
    pub fn set(&mut self, id: T, is_in: bool) {
        if is_in { self.insert(id) } else { self.remove(id) }
    }

    /// Copies another set into the existing allocation.
    pub fn copy_from(&mut self, other: &Self) {
        self.words.clone_from(&other.words);
    }

    /// Keeps only the members that are also in `other`.
    pub fn keep(&mut self, other: &Self) {
        self.words.truncate(other.words.len());
        let pairs = self.words.iter_mut().zip(&other.words);
        pairs.for_each(|(own, other)| *own &= other);
        self.trim();
    }

    /// Removes the members that are in `other`.
    pub fn remove_all(&mut self, other: &Self) {
        let pairs = self.words.iter_mut().zip(&other.words);
        pairs.for_each(|(own, other)| *own &= !other);
        self.trim();
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    /// Returns true if the id is a member.
    pub fn contains(&self, id: T) -> bool {
        let n = id.number() as usize;
        self.words
            .get(n / 64)
            .is_some_and(|word| word & (1 << (n % 64)) != 0)
    }

    /// Returns the number of members.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns true if the set has no members.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.words.iter().enumerate().flat_map(|(w, &word)| {
            std::iter::successors((word != 0).then_some(word), |rest| {
                let rest = rest & (rest - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |rest| T::from_number(w as u32 * 64 + rest.trailing_zeros()))
        })
    }

    /// Returns the number of members that both sets have.
    pub fn count_common(&self, other: &Self) -> usize {
        let pairs = self.words.iter().zip(&other.words);
        pairs
            .map(|(own, other)| (own & other).count_ones() as usize)
            .sum()
    }

    /// Returns the next member after an id, wrapping around at the end. The id itself comes last. `None` for the empty set.
    pub fn next_after(&self, id: T) -> Option<T> {
        let (at, bit) = (id.number() as usize / 64, id.number() % 64);
        let above = !(u64::MAX >> (63 - bit));
        let word = |w: usize, of: u64| {
            let word = self.words.get(w).map_or(0, |word| word & of);
            (word != 0).then(|| T::from_number(w as u32 * 64 + word.trailing_zeros()))
        };
        word(at, above)
            .or_else(|| (at + 1..self.words.len()).find_map(|w| word(w, u64::MAX)))
            .or_else(|| (0..at.min(self.words.len())).find_map(|w| word(w, u64::MAX)))
            .or_else(|| word(at, !above))
    }

    /// Returns the smallest member.
    pub fn first(&self) -> Option<T> {
        self.iter().next()
    }

    /// Returns true if every member is also in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words
            .iter()
            .enumerate()
            .all(|(w, word)| word & !other.words.get(w).copied().unwrap_or(0) == 0)
    }

    /// Returns the members that both sets have.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & b)
    }

    /// Returns the members of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a | b)
    }

    /// Returns the members of this set that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & !b)
    }

    fn combine(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        let at = |words: &[u64], w: usize| words.get(w).copied().unwrap_or(0);
        let mut words: Vec<u64> = (0..self.words.len().max(other.words.len()))
            .map(|w| op(at(&self.words, w), at(&other.words, w)))
            .collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        IdSet {
            words,
            id: PhantomData,
        }
    }
}

impl<T: Id> Index<T> for IdSet<T> {
    type Output = bool;

    fn index(&self, id: T) -> &bool {
        if self.contains(id) { &true } else { &false }
    }
}

impl<T: Id> FromIterator<T> for IdSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(iter: I) -> Self {
        let mut set = Self::new();
        for id in iter {
            set.insert(id);
        }
        set
    }
}

impl<T: Id> fmt::Display for IdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids = self.iter().map(Id::number).peekable();
        let mut separator = "";
        while let Some(first) = ids.next() {
            let mut last = first;
            while ids.peek() == Some(&(last + 1)) {
                last += 1;
                ids.next();
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl<T: Id> fmt::Debug for IdSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// Why a list such as `0-3,8` could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseSetError {
    text: String,
}

impl fmt::Display for ParseSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a list such as `0-3,8`", self.text)
    }
}

impl std::error::Error for ParseSetError {}

impl<T: Id> FromStr for IdSet<T> {
    type Err = ParseSetError;

    /// Reads the kernel's list format; an empty line is the empty set.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseSetError {
            text: text.trim().chars().take(80).collect(),
        };
        let number = |part: &str| {
            part.parse::<u32>()
                .ok()
                .filter(|n| *n < ID_LIMIT)
                .ok_or_else(error)
        };
        let mut set = Self::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(error());
            }
            for n in first..=last {
                set.insert(T::from_number(n));
            }
        }
        Ok(set)
    }
}

impl<T: Id> Serialize for IdSet<T> {
    /// Writes an array of numbers, because programs should not have to parse a list such as `0-3,8`.
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(self.iter().map(Id::number))
    }
}

impl<'de, T: Id> Deserialize<'de> for IdSet<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let numbers = Vec::<u32>::deserialize(d)?;
        match numbers.iter().find(|n| **n >= ID_LIMIT) {
            Some(n) => Err(serde::de::Error::custom(format!("id {n} is out of range"))),
            None => Ok(numbers.into_iter().map(T::from_number).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_read_as_the_kernel_writes_them() {
        let set: NodeSet = "0-2,8,252-255\n".parse().unwrap();
        assert_eq!(set.len(), 8);
        assert_eq!(set.to_string(), "0-2,8,252-255");
        assert_eq!("".parse::<CpuSet>().unwrap(), CpuSet::new());
        for bad in ["a", "3-1", "0-", "-1", "0-99999999", "1 2"] {
            assert!(bad.parse::<CpuSet>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_removed_member_leaves_no_trace() {
        let mut set = CpuSet::one(CpuId(100));
        set.remove(CpuId(100));
        set.remove(CpuId(7));
        assert_eq!(set, CpuSet::new());
    }

    proptest! {
        #[test]
        fn behaves_as_a_set(
            a in prop::collection::btree_set(0u32..300, 0..40),
            b in prop::collection::btree_set(0u32..300, 0..40),
        ) {
            let of = |s: &std::collections::BTreeSet<u32>| s.iter().map(|n| CpuId(*n)).collect::<CpuSet>();
            let (x, y) = (of(&a), of(&b));
            prop_assert_eq!(x.to_string().parse::<CpuSet>().unwrap(), x.clone());
            prop_assert_eq!(x.iter().map(|c| c.0).collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(x.union(&y), of(&a.union(&b).copied().collect()));
            prop_assert_eq!(x.intersection(&y), of(&a.intersection(&b).copied().collect()));
            prop_assert_eq!(x.difference(&y), of(&a.difference(&b).copied().collect()));
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
            let mut z = CpuSet::one(CpuId(1000));
            z.copy_from(&x);
            z.keep(&y);
            prop_assert_eq!(&z, &x.intersection(&y));
            prop_assert_eq!(z.len(), x.count_common(&y));
            z.copy_from(&x);
            z.remove_all(&y);
            prop_assert_eq!(z, x.difference(&y));
            for id in 0..310 {
                prop_assert_eq!(x[CpuId(id)], a.contains(&id));
                let next = a.range(id + 1..).chain(a.range(..=id)).next();
                prop_assert_eq!(x.next_after(CpuId(id)), next.map(|id| CpuId(*id)));
            }
        }
    }
}

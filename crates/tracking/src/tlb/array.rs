//! One array of a TLB, or of a walker's caches: sets of entries, the one used least recently goes.

/// Which set an entry goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// The low bits of its number.
    Low,
    /// The low bits, combined by exclusive or with as many above them.
    Fold,
}

/// Shape of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Entries in all.
    pub entries: usize,
    /// Ways of a set, at most 128. As many as entries: fully associative.
    pub ways: usize,
    /// Which set an entry goes to.
    pub hash: Hash,
}

impl Shape {
    /// An array whose sets are chosen by low bits.
    pub const fn low(entries: usize, ways: usize) -> Shape {
        Shape {
            entries,
            ways,
            hash: Hash::Low,
        }
    }

    /// An array in which any entry can go anywhere.
    pub const fn full(entries: usize) -> Shape {
        Shape::low(entries, entries)
    }
}

/// Keys and when each was used last. A key's lowest bit is a mark of its entry and not part of its identity.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    keys: Vec<u64>,
    /// Time of the last use above [`WAY_BITS`], the way below: the least of a set names the way that goes.
    used: Vec<u64>,
    ways: usize,
    set_bits: u32,
    hash: Hash,
    clock: u64,
}

/// The mark of an entry, in its key.
pub(crate) const MARK: u64 = 1;
const EMPTY: u64 = u64::MAX;
const WAY_BITS: u32 = 7;

impl Array {
    /// An empty array.
    ///
    /// # Panics
    /// Unless sets are a power of two and a set has 1 to 128 ways.
    pub fn new(shape: Shape) -> Array {
        let Shape { entries, ways, hash } = shape;
        assert!((1..=1 << WAY_BITS).contains(&ways), "a set has 1 to 128 ways");
        let sets = entries / ways;
        assert!(
            sets.is_power_of_two() && sets * ways == entries,
            "{entries} entries of {ways} ways are no power of two of sets"
        );
        Array {
            keys: vec![EMPTY; entries],
            used: (0..entries).map(|slot| (slot % ways) as u64).collect(),
            ways,
            set_bits: sets.trailing_zeros(),
            hash,
            clock: 0,
        }
    }

    /// First slot of the set that a number goes to.
    #[inline]
    fn set(&self, number: u64) -> usize {
        let folded = match self.hash {
            Hash::Low => number,
            Hash::Fold => number ^ (number >> self.set_bits),
        };
        (folded & ((1 << self.set_bits) - 1)) as usize * self.ways
    }

    #[inline]
    fn way(keys: &[u64], key: u64) -> Option<usize> {
        // No early end: which way it is cannot be predicted, that there is one can.
        let mut found = 0_u128;
        for (way, known) in keys.iter().enumerate() {
            found |= u128::from(known & !MARK == key) << way;
        }
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    /// As [`Array::way`], where the number of ways is known when this is compiled.
    #[inline]
    fn way_of<const WAYS: usize>(keys: &[u64], key: u64) -> Option<usize> {
        let mut found = 0_u32;
        for (way, known) in keys[..WAYS].iter().enumerate() {
            found |= u32::from(known & !MARK == key) << way;
        }
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    #[inline]
    fn slot(&self, number: u64, key: u64) -> Option<usize> {
        let first = self.set(number);
        let keys = &self.keys[first..first + self.ways];
        let way = match self.ways {
            4 => Array::way_of::<4>(keys, key),
            8 => Array::way_of::<8>(keys, key),
            12 => Array::way_of::<12>(keys, key),
            16 => Array::way_of::<16>(keys, key),
            _ => Array::way(keys, key),
        };
        way.map(|way| first + way)
    }

    /// Uses an entry; gives its slot, and its key with the mark.
    #[inline]
    pub fn find(&mut self, number: u64, key: u64) -> Option<(usize, u64)> {
        let slot = self.slot(number, key)?;
        self.clock += 1 << WAY_BITS;
        let way = self.used[slot] & ((1 << WAY_BITS) - 1);
        self.used[slot] = self.clock | way;
        Some((slot, self.keys[slot]))
    }

    /// Whether an entry is there; it does not count as a use.
    pub fn holds(&self, number: u64, key: u64) -> bool {
        self.slot(number, key).is_some()
    }

    /// Puts an entry in that is not there; gives its slot.
    #[inline]
    pub fn fill(&mut self, number: u64, key: u64) -> usize {
        let first = self.set(number);
        let mut least = u64::MAX;
        for used in &self.used[first..first + self.ways] {
            least = least.min(*used);
        }
        let way = least & ((1 << WAY_BITS) - 1);
        let slot = first + way as usize;
        self.clock += 1 << WAY_BITS;
        self.used[slot] = self.clock | way;
        self.keys[slot] = key;
        slot
    }

    /// Puts an entry in, or its mark where it is there without.
    #[inline]
    pub fn put(&mut self, number: u64, key: u64) -> usize {
        match self.slot(number, key & !MARK) {
            Some(slot) => {
                self.keys[slot] |= key;
                slot
            }
            None => self.fill(number, key),
        }
    }

    /// Drops an entry if it is there.
    pub fn drop_one(&mut self, number: u64, key: u64) {
        if let Some(slot) = self.slot(number, key) {
            self.empty(slot);
        }
    }

    /// Drops all entries of which this holds.
    pub fn drop_where(&mut self, doomed: impl Fn(u64) -> bool) {
        for slot in 0..self.keys.len() {
            if self.keys[slot] != EMPTY && doomed(self.keys[slot]) {
                self.empty(slot);
            }
        }
    }

    /// An empty slot is the first to be used again.
    fn empty(&mut self, slot: usize) {
        self.keys[slot] = EMPTY;
        self.used[slot] &= (1 << WAY_BITS) - 1;
    }

    /// Entries.
    #[cfg(test)]
    pub fn live(&self) -> usize {
        self.keys.iter().filter(|key| **key != EMPTY).count()
    }

    /// Slots.
    pub fn slots(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_set_is_a_list_in_order_of_use(
            uses in prop::collection::vec((0_u64..200, any::<bool>()), 1..500),
            ways in prop::sample::select(vec![1, 4, 6, 8, 12, 16, 72]), fold: bool,
        ) {
            let hash = if fold { Hash::Fold } else { Hash::Low };
            let mut array = Array::new(Shape { entries: 4 * ways, ways, hash });
            let mut lists: [Vec<u64>; 4] = Default::default();
            for (number, drop) in uses {
                let set = if fold { number ^ (number >> 2) } else { number } as usize % 4;
                let there = lists[set].contains(&number);
                lists[set].retain(|known| *known != number);
                if drop {
                    array.drop_one(number, number << 1);
                } else {
                    prop_assert_eq!(array.find(number, number << 1).is_some(), there);
                    if !there {
                        array.fill(number, number << 1);
                    }
                    lists[set].insert(0, number);
                    lists[set].truncate(ways);
                }
                prop_assert_eq!(array.live(), lists.iter().map(Vec::len).sum::<usize>());
            }
        }
    }
}

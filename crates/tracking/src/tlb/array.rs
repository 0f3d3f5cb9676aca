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

/// Keys by set, and the order in which each set's were used. A key's lowest bit is a mark of its entry and not part of its
/// identity.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    keys: Vec<u64>,
    /// Sixteen bits of each key's identity, four to a word: most of what a lookup has to look at.
    tags: Vec<u64>,
    ways: usize,
    words: usize,
    set_bits: u32,
    hash: Hash,
    order: Order,
}

/// The order of use in each set.
#[derive(Clone, Debug)]
enum Order {
    /// Up to 16 ways: their numbers from the newest to the oldest, four bits each.
    Lists(Vec<u64>),
    /// More: the time of each entry's last use above [`WAY_BITS`], its way below, and the time now.
    Stamps(Vec<u64>, u64),
}

/// The mark of an entry, in its key.
pub(crate) const MARK: u64 = 1;
const EMPTY: u64 = u64::MAX;
const WAY_BITS: u32 = 7;
const WAY_MASK: u64 = (1 << WAY_BITS) - 1;
/// One in each of four lanes of sixteen bits.
const LANES: u64 = 0x0001_0001_0001_0001;
/// One in each of sixteen lanes of four bits.
const NIBBLES: u64 = 0x1111_1111_1111_1111;

/// A key's tag, in each lane of a word.
#[inline]
fn tags_of(key: u64) -> u64 {
    let identity = key >> 1;
    (identity ^ identity >> 16 ^ identity >> 32 & 0xffff) as u16 as u64 * LANES
}

/// A word whose highest bits are set in each lane that may be zero: in all that are, and rarely in one above such a lane.
#[inline]
fn zero_lanes(word: u64, lanes: u64, lane_bits: u32) -> u64 {
    word.wrapping_sub(lanes) & !word & lanes << (lane_bits - 1)
}

/// The highest bits of four lanes of sixteen bits, in the lowest four bits.
#[inline]
fn lane_bits(lanes: u64) -> u64 {
    (lanes >> 15).wrapping_mul(0x0001_0002_0004_0008) >> 48
}

impl Order {
    fn new(sets: usize, ways: usize) -> Order {
        if ways <= 16 {
            // Way n is the nth newest; lanes without a way are older than all.
            Order::Lists(vec![0xfedc_ba98_7654_3210; sets])
        } else {
            Order::Stamps((0..sets * ways).map(|slot| (slot % ways) as u64).collect(), 0)
        }
    }

    /// A way of a set is used.
    #[inline]
    fn touch(&mut self, set: usize, way: usize, ways: usize) {
        match self {
            Order::Lists(lists) => {
                let list = lists[set];
                // The lane that holds the way; those below it move up, and it goes first. The lowest lane found is exact.
                let found = zero_lanes(list ^ (way as u64 * NIBBLES), NIBBLES, 4);
                let below = (found & found.wrapping_neg()) >> 3;
                let moved = below.wrapping_sub(1);
                let kept = !(moved | (below * 15));
                lists[set] = list & kept | (list & moved) << 4 | way as u64;
            }
            Order::Stamps(stamps, now) => {
                *now += 1 << WAY_BITS;
                stamps[set * ways + way] = *now | way as u64;
            }
        }
    }

    /// The way that was used longest ago.
    #[inline]
    fn oldest(&self, set: usize, ways: usize) -> usize {
        match self {
            Order::Lists(lists) => (lists[set] >> (4 * (ways - 1)) & 15) as usize,
            Order::Stamps(stamps, _) => {
                let stamps = &stamps[set * ways..][..ways];
                (stamps.iter().fold(u64::MAX, |least, stamp| least.min(*stamp)) & WAY_MASK) as usize
            }
        }
    }

    /// A way of a set is the next to go.
    fn forget(&mut self, set: usize, way: usize, ways: usize) {
        match self {
            Order::Lists(lists) => {
                let list = lists[set];
                let lanes = (0..ways).map(|at| list >> (4 * at) & 15);
                let rest: Vec<u64> = lanes.filter(|lane| *lane != way as u64).collect();
                let used = rest.iter().rev().fold(way as u64, |list, lane| list << 4 | lane);
                let above = if ways == 16 { 0 } else { u64::MAX << (4 * ways) };
                lists[set] = list & above | used;
            }
            Order::Stamps(stamps, _) => stamps[set * ways + way] &= WAY_MASK,
        }
    }
}

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
        let words = ways.div_ceil(4);
        Array {
            keys: vec![EMPTY; entries],
            tags: vec![tags_of(EMPTY); sets * words],
            ways,
            words,
            set_bits: sets.trailing_zeros(),
            hash,
            order: Order::new(sets, ways),
        }
    }

    /// The set that a number goes to.
    #[inline]
    fn set(&self, number: u64) -> usize {
        let folded = match self.hash {
            Hash::Low => number,
            Hash::Fold => number ^ (number >> self.set_bits),
        };
        (folded & ((1 << self.set_bits) - 1)) as usize
    }

    /// The way of a set that has a key, with or without the mark.
    #[inline]
    fn way(&self, set: usize, key: u64) -> Option<usize> {
        let tags = tags_of(key);
        let set_tags = &self.tags[set * self.words..][..self.words];
        let keys = &self.keys[set * self.ways..][..self.ways];
        for (sixteen, words) in set_tags.chunks(4).enumerate() {
            // In which word it is cannot be predicted, that it is in one can: all are looked at before any jump.
            let mut found = 0;
            for (at, word) in words.iter().enumerate() {
                found |= lane_bits(zero_lanes(word ^ tags, LANES, 16)) << (4 * at);
            }
            while found != 0 {
                let way = 16 * sixteen + found.trailing_zeros() as usize;
                if keys.get(way).is_some_and(|known| known ^ key <= MARK) {
                    return Some(way);
                }
                found &= found - 1;
            }
        }
        None
    }

    /// Uses an entry; gives its slot, and its key with the mark.
    #[inline]
    pub fn find(&mut self, number: u64, key: u64) -> Option<(usize, u64)> {
        let set = self.set(number);
        let way = self.way(set, key)?;
        self.order.touch(set, way, self.ways);
        let slot = set * self.ways + way;
        Some((slot, self.keys[slot]))
    }

    /// As [`Array::find`], where the entry may be in this slot; nothing where it is not, or is without a mark that it needs.
    #[inline]
    pub fn find_at(&mut self, slot: usize, number: u64, key: u64, needs: u64) -> bool {
        // Apart from an exact match with the mark, a read may differ in just the mark.
        let there = self.keys[slot] ^ (key | MARK) <= MARK ^ needs;
        if there {
            let set = self.set(number);
            self.order.touch(set, slot - set * self.ways, self.ways);
        }
        there
    }

    /// Whether an entry is there; it does not count as a use.
    pub fn holds(&self, number: u64, key: u64) -> bool {
        self.way(self.set(number), key).is_some()
    }

    /// Puts an entry in that is not there; gives its slot.
    #[inline]
    pub fn fill(&mut self, number: u64, key: u64) -> usize {
        let set = self.set(number);
        let way = self.order.oldest(set, self.ways);
        self.order.touch(set, way, self.ways);
        let slot = set * self.ways + way;
        self.put(set, way, key);
        slot
    }

    #[inline]
    fn put(&mut self, set: usize, way: usize, key: u64) {
        self.keys[set * self.ways + way] = key;
        let word = &mut self.tags[set * self.words + way / 4];
        let lane = 0xffff << (16 * (way % 4));
        *word = *word & !lane | tags_of(key) & lane;
    }

    /// Adds the mark of a key to its entry, if that is there. Not a use.
    pub fn mark(&mut self, number: u64, key: u64) {
        let set = self.set(number);
        if let Some(way) = self.way(set, key & !MARK) {
            self.keys[set * self.ways + way] |= key & MARK;
        }
    }

    /// Drops an entry if it is there.
    pub fn drop_one(&mut self, number: u64, key: u64) {
        let set = self.set(number);
        if let Some(way) = self.way(set, key) {
            self.empty(set, way);
        }
    }

    /// Drops all entries of which this holds.
    pub fn drop_where(&mut self, doomed: impl Fn(u64) -> bool) {
        for slot in 0..self.keys.len() {
            if self.keys[slot] != EMPTY && doomed(self.keys[slot]) {
                self.empty(slot / self.ways, slot % self.ways);
            }
        }
    }

    /// An empty way is the first to be used again.
    fn empty(&mut self, set: usize, way: usize) {
        self.put(set, way, EMPTY);
        self.order.forget(set, way, self.ways);
    }

    /// Entries.
    #[cfg(test)]
    pub fn live(&self) -> usize {
        self.keys.iter().filter(|key| **key != EMPTY).count()
    }

    /// Its sets, if the low bits of a number choose among them.
    pub fn sets_by_low_bits(&self) -> Option<usize> {
        (self.hash == Hash::Low).then_some(1 << self.set_bits)
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

//! An array of a TLB or of a walker's caches: sets of entries with LRU replacement.

/// How the set of an entry is chosen from the entry's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// By the low bits of the number.
    Low,
    /// By the low bits, XORed with the bits above them.
    Fold,
}

/// Shape of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Total number of entries.
    pub entries: usize,
    /// Ways of a set, at most 128; equal to the number of entries if the array is fully associative.
    pub ways: usize,
    /// How the set of an entry is chosen.
    pub hash: Hash,
}

impl Shape {
    /// Returns the shape of an array whose sets are chosen by low bits of the number.
    pub const fn low(entries: usize, ways: usize) -> Shape {
        Shape {
            entries,
            ways,
            hash: Hash::Low,
        }
    }

    /// Returns the shape of a fully associative array.
    pub const fn full(entries: usize) -> Shape {
        Shape::low(entries, entries)
    }
}

/// The keys of each set, and the set's order of use. A key's lowest bit is a mark on its entry, and not part of its identity.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    rows: Vec<Row>,
    /// Rows that a set occupies: more than one if it has more ways than a row.
    set_rows: usize,
    ways: usize,
    sets: usize,
    /// Distance between the bits that choose a set and the bits XORed with them. Beyond all bits if there is no folding.
    fold: u32,
    /// Each set's order of use, if sets have more than one row; otherwise the rows hold it.
    uses: Vec<Uses>,
}

/// Up to [`LANES`] ways of a set.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Sixteen bits of each key's identity, which decide most lookups.
    tags: [u16; LANES],
    keys: [u64; LANES],
    /// For sets of one row: the ways from the newest to the oldest, four bits each. Bits above the ways are ignored.
    order: u64,
}

const LANES: usize = 16;
/// The mark of an entry, in its key.
pub(crate) const MARK: u64 = 1;
const EMPTY: u64 = u64::MAX;
/// Maximum ways of a set.
const WAYS: usize = 128;
/// A shift that leaves no bit of a number.
const NEVER: u32 = 63;
/// A one in each four-bit lane.
const NIBBLES: u64 = 0x1111_1111_1111_1111;

/// Returns a key's tag: the highest bits of its identity times 2^64 over the golden ratio, which depend on all its bits.
#[inline]
fn tag_of(key: u64) -> u16 {
    ((key | MARK).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16
}

impl Row {
    /// Returns an empty row, in which way 0 is the newest, way 1 the next, and so on.
    fn empty() -> Row {
        Row {
            tags: [tag_of(EMPTY); LANES],
            keys: [EMPTY; LANES],
            order: 0xfedc_ba98_7654_3210,
        }
    }

    /// Returns the lane of a key, with or without the mark.
    #[inline(always)]
    fn lane(&self, key: u64, tag: u16) -> Option<usize> {
        // Compilers turn this into one comparison of all sixteen tags. Most calls find nothing and end here.
        let may_be = self.tags.iter().fold(false, |any, known| any | (*known == tag));
        if may_be { self.find(key, tag) } else { None }
    }

    /// Finds a key's lane. A hit is predictable but its lane is not, so all lanes are compared before any branch.
    #[inline(never)]
    fn find(&self, key: u64, tag: u16) -> Option<usize> {
        let same = |(lane, known): (usize, &u16)| u32::from(*known == tag) << lane;
        let mut found = self
            .tags
            .iter()
            .enumerate()
            .map(same)
            .fold(0, |all, one| all | one);
        while found != 0 {
            let lane = found.trailing_zeros() as usize % LANES;
            if self.keys[lane] ^ key <= MARK {
                return Some(lane);
            }
            found &= found - 1;
        }
        None
    }

    #[inline]
    fn put(&mut self, lane: usize, key: u64) {
        self.keys[lane % LANES] = key;
        self.tags[lane % LANES] = tag_of(key);
    }

    /// Moves a way to the front; ways that were newer move back by one.
    #[inline]
    fn touch(&mut self, way: usize) {
        let unlike = self.order ^ (way as u64 * NIBBLES);
        // The highest bit of each lane that equals the way, and perhaps of lanes above it. The lowest of these bits is right.
        let found = unlike.wrapping_sub(NIBBLES) & !unlike & NIBBLES << 3;
        let below = (found & found.wrapping_neg()) >> 3;
        let moved = below.wrapping_sub(1);
        let kept = !(moved | (below * 15));
        self.order = self.order & kept | (self.order & moved) << 4 | way as u64;
    }

    /// Returns the least recently used of this many ways, and counts that as a use.
    #[inline]
    fn take_oldest(&mut self, ways: usize) -> usize {
        let way = self.order >> (4 * (ways - 1)) & 15;
        self.order = self.order << 4 | way;
        way as usize
    }

    /// Makes a way the next one to be evicted.
    fn forget(&mut self, way: usize, ways: usize) {
        self.touch(way);
        let last = 4 * (ways - 1);
        self.order = self.order >> 4 & !(15 << last) | (way as u64) << last;
    }
}

/// Order of use in a set of many ways: a sequence of uses, in which only the last use of each way counts.
#[derive(Clone, Debug)]
struct Uses {
    ways: Box<[u8; USES]>,
    /// For each way, the index of its last use in `ways`.
    last: [u16; WAYS],
    /// Uses before this index no longer count.
    from: usize,
    /// Index after the last use.
    until: usize,
}

/// Number of uses that are kept before outdated ones are removed.
const USES: usize = 4096;

impl Uses {
    /// Starts with one use of each way, the lowest way first.
    fn new(ways: usize) -> Uses {
        let mut uses = Uses {
            ways: Box::new([0; USES]),
            last: [0; WAYS],
            from: 0,
            until: 0,
        };
        (0..ways).for_each(|way| uses.touch(way));
        uses
    }

    #[inline]
    fn touch(&mut self, way: usize) {
        if self.until == USES {
            self.sort_out();
        }
        self.last[way % WAYS] = self.until as u16;
        self.ways[self.until % USES] = way as u8;
        self.until += 1;
    }

    /// Returns the least recently used way, and counts that as a use.
    #[inline]
    fn take_oldest(&mut self) -> usize {
        while !self.counts(self.from) {
            self.from += 1;
        }
        let way = usize::from(self.ways[self.from]);
        self.touch(way);
        way
    }

    #[inline]
    fn counts(&self, at: usize) -> bool {
        usize::from(self.last[usize::from(self.ways[at]) % WAYS]) == at
    }

    /// Returns all ways, from the oldest to the newest.
    fn in_order(&self) -> Vec<u8> {
        let counted = (self.from..self.until).filter(|at| self.counts(*at));
        counted.map(|at| self.ways[at]).collect()
    }

    fn keep(&mut self, order: &[u8]) {
        (self.from, self.until) = (0, 0);
        order.iter().for_each(|way| self.touch(usize::from(*way)));
    }

    #[cold]
    fn sort_out(&mut self) {
        self.keep(&self.in_order());
    }

    /// Makes a way the next one to be evicted.
    fn forget(&mut self, way: usize) {
        let mut order = self.in_order();
        order.retain(|known| usize::from(*known) != way);
        order.insert(0, way as u8);
        self.keep(&order);
    }
}

impl Array {
    /// Creates an empty array.
    ///
    /// # Panics
    /// If the number of sets is not a power of two, or a set does not have 1 to 128 ways.
    pub(crate) fn new(shape: Shape) -> Array {
        let Shape { entries, ways, hash } = shape;
        assert!((1..=WAYS).contains(&ways), "a set has 1 to 128 ways");
        let sets = entries / ways;
        assert!(
            sets.is_power_of_two() && sets * ways == entries,
            "{entries} entries in sets of {ways} ways do not give a power of two of sets"
        );
        let set_rows = ways.div_ceil(LANES);
        Array {
            rows: vec![Row::empty(); sets * set_rows],
            set_rows,
            ways,
            sets,
            fold: match hash {
                Hash::Low => NEVER,
                Hash::Fold => sets.trailing_zeros(),
            },
            uses: if set_rows == 1 {
                Vec::new()
            } else {
                vec![Uses::new(ways); sets]
            },
        }
    }

    /// Returns the set that an entry's number chooses.
    #[inline]
    fn set(&self, number: u64) -> usize {
        (number ^ (number >> self.fold)) as usize & (self.sets - 1)
    }

    /// Returns the slot of the set that holds a key, with or without the mark.
    #[inline(always)]
    fn slot(&self, set: usize, key: u64) -> Option<usize> {
        let tag = tag_of(key);
        if self.set_rows == 1 {
            return self.rows[set].lane(key, tag).map(|lane| set * LANES + lane);
        }
        self.slot_of_many(set, key, tag)
    }

    #[inline(never)]
    fn slot_of_many(&self, set: usize, key: u64, tag: u16) -> Option<usize> {
        let first = set * self.set_rows;
        let mut rows = self.rows[first..][..self.set_rows].iter().enumerate();
        rows.find_map(|(at, row)| row.lane(key, tag).map(|lane| (first + at) * LANES + lane))
    }

    /// Records the use of a slot.
    #[inline(always)]
    fn touch(&mut self, set: usize, slot: usize) {
        if self.set_rows == 1 {
            self.rows[set].touch(slot % LANES);
        } else {
            self.uses[set].touch(slot - set * self.set_rows * LANES);
        }
    }

    /// Finds an entry, which counts as a use. Returns its slot, and its key with the mark.
    #[inline(always)]
    pub(crate) fn find(&mut self, number: u64, key: u64) -> Option<(usize, u64)> {
        let set = self.set(number);
        let slot = self.slot(set, key)?;
        self.touch(set, slot);
        Some((slot, self.key(slot)))
    }

    #[inline]
    fn key(&self, slot: usize) -> u64 {
        self.rows[slot / LANES].keys[slot % LANES]
    }

    /// Like [`Array::find`], for an entry expected in this slot. Returns false, without a use, if it is absent or lacks a
    /// required mark.
    #[inline]
    pub(crate) fn find_at(&mut self, slot: usize, number: u64, key: u64, needs: u64) -> bool {
        // The key must match with the mark set; if the mark is not needed, the slot's key may also lack it.
        let there = self.key(slot) ^ (key | MARK) <= MARK ^ needs;
        if there {
            self.touch(self.set(number), slot);
        }
        there
    }

    /// Returns true if an entry is present; does not count as a use.
    pub(crate) fn holds(&self, number: u64, key: u64) -> bool {
        self.slot(self.set(number), key).is_some()
    }

    /// Inserts an entry that is missing; returns its slot.
    #[inline(always)]
    pub(crate) fn fill(&mut self, number: u64, key: u64) -> usize {
        let set = self.set(number);
        if self.set_rows == 1 {
            let row = &mut self.rows[set];
            let lane = row.take_oldest(self.ways);
            row.put(lane, key);
            return set * LANES + lane;
        }
        self.fill_many(set, key)
    }

    #[inline(never)]
    fn fill_many(&mut self, set: usize, key: u64) -> usize {
        let slot = set * self.set_rows * LANES + self.uses[set].take_oldest();
        self.rows[slot / LANES].put(slot % LANES, key);
        slot
    }

    /// Adds the mark of a key to its entry, if present. Does not count as a use.
    pub(crate) fn mark(&mut self, number: u64, key: u64) {
        if let Some(slot) = self.slot(self.set(number), key & !MARK) {
            self.rows[slot / LANES].keys[slot % LANES] |= key & MARK;
        }
    }

    /// Drops an entry if present.
    pub(crate) fn drop_one(&mut self, number: u64, key: u64) {
        if let Some(slot) = self.slot(self.set(number), key) {
            self.empty(slot);
        }
    }

    /// Drops all matching entries.
    pub(crate) fn drop_where(&mut self, doomed: impl Fn(u64) -> bool) {
        for slot in 0..self.slots() {
            if self.key(slot) != EMPTY && doomed(self.key(slot)) {
                self.empty(slot);
            }
        }
    }

    /// Empties a slot, which will be the first to be filled again.
    fn empty(&mut self, slot: usize) {
        let (row, lane) = (slot / LANES, slot % LANES);
        self.rows[row].put(lane, EMPTY);
        if self.set_rows == 1 {
            self.rows[row].forget(lane, self.ways);
        } else {
            let set = row / self.set_rows;
            self.uses[set].forget(slot - set * self.set_rows * LANES);
        }
    }

    /// Returns the number of entries that the array holds.
    #[cfg(test)]
    pub(crate) fn live(&self) -> usize {
        (0..self.slots()).filter(|slot| self.key(*slot) != EMPTY).count()
    }

    /// Returns the number of sets if the low bits of a number choose among them; otherwise `None`.
    pub(crate) fn sets_by_low_bits(&self) -> Option<usize> {
        (self.fold == NEVER).then_some(self.sets)
    }

    /// Returns the array's capacity in entries.
    pub(crate) fn entries(&self) -> usize {
        self.ways * self.sets
    }

    /// Returns one past the highest slot. Some slots below it belong to no way.
    pub(crate) fn slots(&self) -> usize {
        self.rows.len() * LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_set_is_a_list_in_order_of_use(
            uses in prop::collection::vec((0_u64..400, prop::bool::weighted(0.1)), 1..9000),
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
            }
            prop_assert_eq!(array.live(), lists.iter().map(Vec::len).sum::<usize>());
        }
    }
}

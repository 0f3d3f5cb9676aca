//! Replacement policies: each records the uses of a set's lines, and chooses the line to evict (the victim).
//!
//! A set has up to 128 bits of state. True LRU has none: it keeps the entries of a set in order of use.

use homenode_machine::Replacement;

use homenode_units::Chance;

#[derive(Clone, Debug)]
pub(crate) struct Policy {
    replacement: Replacement,
    ways: usize,
    /// A mask with one bit for each way.
    all: u64,
    /// State of each set: bits of the tree, bits of use, or the two bits of ages.
    state: Vec<[u64; 2]>,
    /// For each way: the tree bits on its path, and their values if they point away from the way.
    paths: Vec<(u64, u64)>,
    /// For each node of the tree, where its bit leads if it is 0, and if 1: to a way if below `ways`, else to `ways` + node.
    children: Vec<[usize; 2]>,
}

impl Policy {
    pub(crate) fn new(replacement: Replacement, sets: usize, ways: usize) -> Policy {
        let mut policy = Policy {
            replacement,
            ways,
            all: u64::MAX >> (64 - ways),
            state: Vec::new(),
            paths: vec![(0, 0); ways],
            children: Vec::new(),
        };
        match replacement {
            Replacement::PseudoLru => {
                policy.grow_tree(0, ways);
            }
            Replacement::Lru | Replacement::NotRecentlyUsed | Replacement::QuadAge | Replacement::Random => {}
        }
        if !matches!(replacement, Replacement::Lru | Replacement::Random) {
            policy.state = vec![[0; 2]; sets];
        }
        policy
    }

    /// Builds the tree over the ways from `first` to `end`, whose halves differ by at most one way. Returns its top.
    fn grow_tree(&mut self, first: usize, end: usize) -> usize {
        if end - first == 1 {
            return first;
        }
        let node = self.children.len();
        self.children.push([0; 2]);
        let middle = first + (end - first).div_ceil(2);
        for way in first..end {
            self.paths[way].0 |= 1 << node;
            if way < middle {
                self.paths[way].1 |= 1 << node; // points to the upper half
            }
        }
        self.children[node] = [self.grow_tree(first, middle), self.grow_tree(middle, end)];
        self.ways + node
    }

    /// Records the use of a line.
    #[inline]
    pub(crate) fn used(&mut self, set: usize, way: usize, entries: &mut [u64]) {
        match self.replacement {
            Replacement::Lru => entries[..=way].rotate_right(1),
            Replacement::PseudoLru => self.point_away(set, way),
            Replacement::NotRecentlyUsed => self.mark(set, way),
            Replacement::QuadAge => {
                // Maps age 3 to 1, 2 to 1, 1 to 0 and 0 to 0: the new low bit is the old high bit.
                let [low, high] = &mut self.state[set];
                let bit = 1 << way;
                *low = (*low & !bit) | (*high & bit);
                *high &= !bit;
            }
            Replacement::Random => {}
        }
    }

    /// Records that a line came into a set. With all policies but `QuadAge`, this counts as a use of the line.
    #[inline]
    pub(crate) fn filled(&mut self, set: usize, way: usize, entries: &mut [u64]) {
        if self.replacement == Replacement::QuadAge {
            let [low, high] = &mut self.state[set];
            *low |= 1 << way;
            *high &= !(1 << way);
        } else {
            self.used(set, way, entries);
        }
    }

    /// Returns the way to evict from a full set.
    #[inline]
    pub(crate) fn victim(&mut self, set: usize, chance: &mut Chance) -> usize {
        match self.replacement {
            Replacement::Lru => self.ways - 1,
            Replacement::PseudoLru => {
                let bits = self.state[set][0];
                let mut at = if self.ways == 1 { 0 } else { self.ways };
                while at >= self.ways {
                    let node = at - self.ways;
                    at = self.children[node][(bits >> node & 1) as usize];
                }
                at
            }
            // With one way, its bit is always set.
            Replacement::NotRecentlyUsed => {
                (!self.state[set][0] & self.all).trailing_zeros() as usize % self.ways
            }
            Replacement::QuadAge => {
                let [low, high] = &mut self.state[set];
                while *low & *high & self.all == 0 {
                    *high ^= *low;
                    *low = !*low;
                }
                (*low & *high & self.all).trailing_zeros() as usize
            }
            Replacement::Random => chance.below(self.ways as u64) as usize,
        }
    }

    fn point_away(&mut self, set: usize, way: usize) {
        let (path, away) = self.paths[way];
        let bits = &mut self.state[set][0];
        *bits = (*bits & !path) | away;
    }

    fn mark(&mut self, set: usize, way: usize) {
        let bits = &mut self.state[set][0];
        *bits |= 1 << way;
        if *bits & self.all == self.all {
            *bits = 1 << way;
        }
    }
}

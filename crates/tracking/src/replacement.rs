//! Replacement policies: a set's record of its lines' use, and its choice of a victim.
//!
//! Up to 128 bits of state per set. True LRU keeps the entries of a set in order of use instead.

use homenode_machine::Replacement;

use homenode_units::Chance;

#[derive(Clone, Debug)]
pub(crate) struct Policy {
    replacement: Replacement,
    ways: usize,
    /// One bit for each way.
    all: u64,
    /// Tree bits, use bits, or the two bits of ages, by set.
    state: Vec<[u64; 2]>,
    /// By way: the tree bits on its path, and their values when they point away from it.
    paths: Vec<(u64, u64)>,
    /// By node of the tree: the targets of bit values 0 and 1; a way when below `ways`, else `ways` + node.
    children: Vec<[usize; 2]>,
}

impl Policy {
    pub fn new(replacement: Replacement, sets: usize, ways: usize) -> Policy {
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

    /// Builds the tree over the ways from `first` to `end`; halves differ by at most one way. Returns its top.
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
    pub fn used(&mut self, set: usize, way: usize, entries: &mut [u64]) {
        match self.replacement {
            Replacement::Lru => entries[..=way].rotate_right(1),
            Replacement::PseudoLru => self.point_away(set, way),
            Replacement::NotRecentlyUsed => self.mark(set, way),
            Replacement::QuadAge => {
                // 3 -> 1, 2 -> 1, 1 -> 0, 0 -> 0: the new low bit is the old high bit.
                let [low, high] = &mut self.state[set];
                let bit = 1 << way;
                *low = (*low & !bit) | (*high & bit);
                *high &= !bit;
            }
            Replacement::Random => {}
        }
    }

    /// Records that a line came into a set: a use, except if lines have ages.
    #[inline]
    pub fn filled(&mut self, set: usize, way: usize, entries: &mut [u64]) {
        if self.replacement == Replacement::QuadAge {
            let [low, high] = &mut self.state[set];
            *low |= 1 << way;
            *high &= !(1 << way);
        } else {
            self.used(set, way, entries);
        }
    }

    /// Returns the victim of a full set.
    #[inline]
    pub fn victim(&mut self, set: usize, chance: &mut Chance) -> usize {
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
            // With one way the only bit is always set.
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

//! Lines in the order of their last use. Finds how many lines were used since a given one, and which line is at a given depth.
//!
//! Each use takes the next slot, and a line occupies only the slot of its last use. A Fenwick tree counts occupied slots, so both
//! queries take O(log n). When the slots run out, the occupied ones are compacted, which is O(1) per use on average.

/// Lines in the order of their last use.
#[derive(Clone, Debug)]
pub(crate) struct Recency {
    lines: Vec<u64>,
    /// Fenwick tree over the occupied slots; indices begin at 1.
    tree: Vec<u32>,
    next: usize,
    live: usize,
}

const VACANT: u64 = u64::MAX;

impl Recency {
    /// Creates a list with room for this many lines before it has to grow.
    pub(crate) fn new(lines: usize) -> Recency {
        let slots = (2 * lines).next_power_of_two().max(16);
        Recency {
            lines: vec![VACANT; slots],
            tree: vec![0; slots + 1],
            next: 0,
            live: 0,
        }
    }

    /// Returns the number of lines.
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// Returns true if [`Recency::compact`] must be called before the next [`Recency::push`].
    pub(crate) fn full(&self) -> bool {
        self.next == self.lines.len()
    }

    /// Puts a line on top; returns its slot.
    pub(crate) fn push(&mut self, line: u64) -> usize {
        let slot = self.next;
        self.lines[slot] = line;
        self.next += 1;
        self.live += 1;
        self.add(slot, 1);
        slot
    }

    /// Removes the line in a slot.
    pub(crate) fn remove(&mut self, slot: usize) -> u64 {
        self.live -= 1;
        self.add(slot, u32::MAX); // minus 1
        std::mem::replace(&mut self.lines[slot], VACANT)
    }

    /// Returns the number of lines whose last use is later than that of the line in this slot.
    pub(crate) fn newer(&self, slot: usize) -> usize {
        let mut at = slot + 1;
        let mut older = 0;
        while at > 0 {
            older += self.tree[at];
            at &= at - 1;
        }
        self.live - older as usize
    }

    /// Returns the slot of the line with this many newer lines. Such a line must exist.
    pub(crate) fn slot_at(&self, depth: usize) -> usize {
        // Counted from the oldest line, this is the line at place live - depth.
        let mut rank = (self.live - depth) as u32;
        let mut at = 0;
        let mut step = self.lines.len();
        while step > 0 {
            if at + step <= self.lines.len() && self.tree[at + step] < rank {
                at += step;
                rank -= self.tree[at];
            }
            step /= 2;
        }
        at
    }

    /// Compacts lines, oldest first, and reports each line's new slot. Doubles the slots if half of them are in use.
    pub(crate) fn compact(&mut self, mut moved: impl FnMut(u64, usize)) {
        let slots = self.lines.len();
        let mut to = 0;
        for from in 0..self.next {
            let line = self.lines[from];
            if line != VACANT {
                self.lines[from] = VACANT;
                self.lines[to] = line;
                moved(line, to);
                to += 1;
            }
        }
        self.next = to;
        if 2 * to > slots {
            self.lines.resize(2 * slots, VACANT);
            self.tree.resize(2 * slots + 1, 0);
        }
        for at in 1..self.tree.len() {
            let lowest = at & at.wrapping_neg();
            self.tree[at] = to.clamp(at - lowest, at) as u32 - (at - lowest) as u32;
        }
    }

    fn add(&mut self, slot: usize, delta: u32) {
        let mut at = slot + 1;
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add(delta);
            at += at & at.wrapping_neg();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn depths_are_those_of_a_list(uses in prop::collection::vec(0u64..40, 1..400)) {
            let (mut recency, mut list, mut slots) = (Recency::new(4), Vec::<u64>::new(), [usize::MAX; 40]);
            for line in uses {
                if recency.full() {
                    recency.compact(|line, slot| slots[line as usize] = slot);
                }
                if let Some(depth) = list.iter().rev().position(|known| *known == line) {
                    let slot = slots[line as usize];
                    prop_assert_eq!(recency.newer(slot), depth);
                    prop_assert_eq!(recency.slot_at(depth), slot);
                    prop_assert_eq!(recency.remove(slot), line);
                    list.retain(|known| *known != line);
                }
                list.push(line);
                slots[line as usize] = recency.push(line);
                prop_assert_eq!(recency.len(), list.len());
            }
        }
    }
}

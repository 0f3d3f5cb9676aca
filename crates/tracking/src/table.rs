//! A table from line to slot with open addressing: it costs one memory access where an ordered map costs many, and its order
//! never affects a result.

use homenode_units::mix;

#[derive(Clone, Debug)]
pub(crate) struct Table {
    /// Line and slot of each cell; the line is [`FREE`] if the cell is empty.
    cells: Vec<(u64, usize)>,
    used: usize,
}

const FREE: u64 = u64::MAX;

impl Table {
    pub(crate) fn new() -> Table {
        Table {
            cells: vec![(FREE, 0); 1024],
            used: 0,
        }
    }

    /// Returns the cell of a line, or a free cell for it.
    fn cell(&self, line: u64) -> usize {
        let mask = self.cells.len() - 1;
        let mut at = mix(line) as usize & mask;
        while self.cells[at].0 != line && self.cells[at].0 != FREE {
            at = (at + 1) & mask;
        }
        at
    }

    pub(crate) fn get(&self, line: u64) -> Option<usize> {
        let (known, slot) = self.cells[self.cell(line)];
        (known == line).then_some(slot)
    }

    pub(crate) fn set(&mut self, line: u64, slot: usize) {
        let at = self.cell(line);
        if self.cells[at].0 == FREE {
            self.used += 1;
        }
        self.cells[at] = (line, slot);
        if 2 * self.used > self.cells.len() {
            let twice = vec![(FREE, 0); 2 * self.cells.len()];
            for (line, slot) in std::mem::replace(&mut self.cells, twice) {
                if line != FREE {
                    let at = self.cell(line);
                    self.cells[at] = (line, slot);
                }
            }
        }
    }

    pub(crate) fn remove(&mut self, line: u64) {
        let mask = self.cells.len() - 1;
        let mut hole = self.cell(line);
        if self.cells[hole].0 == FREE {
            return;
        }
        self.used -= 1;
        // Lines after the hole that should be before it move into it.
        let mut at = (hole + 1) & mask;
        while self.cells[at].0 != FREE {
            let home = mix(self.cells[at].0) as usize & mask;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.cells[hole] = self.cells[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.cells[hole].0 = FREE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn answers_as_an_ordered_map_does(steps in prop::collection::vec((any::<bool>(), 0u64..3000), 1..4000)) {
            let (mut table, mut map) = (Table::new(), BTreeMap::new());
            for (at, (set, line)) in steps.into_iter().enumerate() {
                if set {
                    table.set(line, at);
                    map.insert(line, at);
                } else {
                    table.remove(line);
                    map.remove(&line);
                }
            }
            for line in 0..3000 {
                prop_assert_eq!(table.get(line), map.get(&line).copied());
            }
        }
    }
}

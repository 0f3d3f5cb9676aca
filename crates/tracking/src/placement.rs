//! Decides which node holds a page when it is first used.

use crate::table::Table;

/// Where a page is placed at its first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On the node of the page's first user.
    FirstTouch,
    /// Round-robin over the nodes.
    RoundRobin,
    /// On this node, whichever node uses it.
    On(usize),
}

/// The pages that were used so far, with their nodes.
#[derive(Clone, Debug)]
pub struct Pages {
    placement: Placement,
    homes: Table,
    on: Vec<u64>,
    next: usize,
}

impl Pages {
    /// Creates an empty set of pages for this many nodes.
    pub fn new(placement: Placement, nodes: usize) -> Pages {
        Pages {
            placement,
            homes: Table::new(),
            on: vec![0; nodes],
            next: 0,
        }
    }

    /// Returns the node of a page. If this is the page's first use, places it; the use comes from node `from`.
    #[inline]
    pub fn home(&mut self, page: u64, node: usize) -> usize {
        if let Some(home) = self.homes.get(page) {
            return home;
        }
        let home = match self.placement {
            Placement::FirstTouch => node,
            Placement::RoundRobin => self.next,
            Placement::On(home) => home,
        };
        self.next = (self.next + 1) % self.on.len();
        self.homes.set(page, home);
        self.on[home] += 1;
        home
    }

    /// Returns the number of pages on each node.
    pub fn by_node(&self) -> &[u64] {
        &self.on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_use_decides() {
        let mut pages = Pages::new(Placement::FirstTouch, 2);
        assert_eq!(
            (pages.home(7, 1), pages.home(7, 0), pages.by_node()),
            (1, 1, &[0, 1][..])
        );
        let mut pages = Pages::new(Placement::RoundRobin, 3);
        for page in 0..9 {
            pages.home(page, 0);
        }
        assert_eq!(pages.by_node(), [3, 3, 3]);
    }
}

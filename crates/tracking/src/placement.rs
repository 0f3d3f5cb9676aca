//! Which node a page lies on, decided when it is first used.

use crate::table::Table;

/// Where a page goes that is used for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// To the node of whoever uses it first.
    FirstTouch,
    /// To one node after the other.
    RoundRobin,
    /// To this node.
    On(usize),
}

/// The pages used so far.
#[derive(Clone, Debug)]
pub struct Pages {
    placement: Placement,
    homes: Table,
    on: Vec<u64>,
    next: usize,
}

impl Pages {
    /// No page yet, on this many nodes.
    pub fn new(placement: Placement, nodes: usize) -> Pages {
        Pages {
            placement,
            homes: Table::new(),
            on: vec![0; nodes],
            next: 0,
        }
    }

    /// Node of a page that somebody on `node` uses.
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

    /// Pages by node.
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

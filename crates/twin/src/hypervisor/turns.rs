//! Nodes in turn: how pages are dealt out according to their guest frames, and where a page goes if its node is full.

/// Where a page goes if its node is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WhenFull {
    /// To the nearest node with room, as in Linux.
    #[default]
    Nearest,
    /// To the other nodes in turn, as in a hypervisor's own first-touch. That also keeps a page on a home node if it is touched
    /// there.
    InTurn,
}

/// The nodes of guest frames: stretch after stretch, each of which deals its nodes out in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Turns(pub Vec<Stretch>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub pages: u64,
    /// Number of pages in one turn.
    pub turn: u64,
    pub nodes: Vec<usize>,
}

impl Turns {
    /// Deals page by page over these nodes, without end.
    pub(crate) fn even(nodes: Vec<usize>) -> Turns {
        Turns(vec![Stretch {
            pages: u64::MAX,
            turn: 1,
            nodes,
        }])
    }

    /// Adds the `pages` frames from `frame` on to the counts by node. Frames beyond the end go to the last stretch's nodes.
    pub(crate) fn deal(&self, mut frame: u64, mut pages: u64, counts: &mut [u64]) {
        for (at, stretch) in self.0.iter().enumerate() {
            let last = at + 1 == self.0.len();
            if frame >= stretch.pages && !last {
                frame -= stretch.pages;
                continue;
            }
            let here = if last {
                pages
            } else {
                pages.min(stretch.pages - frame)
            };
            stretch.deal(frame, here, counts);
            pages -= here;
            if pages == 0 {
                return;
            }
            frame = 0;
        }
    }
}

impl Stretch {
    /// Adds the `pages` frames from `frame` on to the counts by node.
    pub(crate) fn deal(&self, mut frame: u64, mut pages: u64, counts: &mut [u64]) {
        let rounds = pages / (self.turn * self.nodes.len() as u64);
        for node in &self.nodes {
            counts[*node] += rounds * self.turn;
        }
        pages -= rounds * self.turn * self.nodes.len() as u64;
        while pages > 0 {
            let part = pages.min(self.turn - frame % self.turn);
            counts[self.nodes[(frame / self.turn) as usize % self.nodes.len()]] += part;
            frame += part;
            pages -= part;
        }
    }
}

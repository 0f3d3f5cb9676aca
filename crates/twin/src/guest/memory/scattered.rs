//! Memory that a VM's past life has scattered over the nodes.
//!
//! # Model
//!
//! A page is on the node of the vCPU that touched it first, in whatever program that was. The guest sees one node, and later
//! hands the page to another program's thread on any node, without the hypervisor's knowledge. So a share of the pages that a
//! program touches was touched before. That share is spread evenly over all nodes, as if the VM's vCPUs had run anywhere in its
//! life.
//!
//! # Left out
//!
//! Where the vCPUs really ran; that such pages cost no page fault in the hypervisor.

/// The share of a program's pages that are where the VM's past life left them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scattered {
    /// Share of the program's pages, in [0, 1].
    share: f64,
    /// Fraction of a page left over from the last deal.
    carry: f64,
    /// Node that gets the next page.
    next: usize,
}

impl Scattered {
    /// Creates the state for this share of all pages that a program touches.
    pub(crate) fn new(share: f64) -> Scattered {
        Scattered {
            share,
            ..Scattered::default()
        }
    }

    /// Deals the part of `pages` that was touched before out in turn over `nodes`, into `wanted`. Returns how many pages that is.
    pub(crate) fn deal(&mut self, pages: u64, nodes: impl FnOnce() -> Vec<usize>, wanted: &mut [u64]) -> u64 {
        if self.share == 0.0 {
            return 0;
        }
        self.carry += pages as f64 * self.share;
        let elsewhere = (self.carry as u64).min(pages);
        self.carry -= elsewhere as f64;
        let nodes = nodes();
        let (rounds, rest) = (elsewhere / nodes.len() as u64, elsewhere as usize % nodes.len());
        for (at, node) in nodes.iter().enumerate() {
            let turn = (at + nodes.len() - self.next) % nodes.len();
            wanted[*node] += rounds + u64::from(turn < rest);
        }
        self.next = (self.next + rest) % nodes.len();
        elsewhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_come_to_the_share_and_lie_evenly() {
        // A share of 0.3 of 1000 pages is 300 pages: 100 on each of nodes 0, 2 and 3, however they are touched.
        for piece in [1, 7, 40, 1000] {
            let (mut scattered, mut wanted, mut left) = (Scattered::new(0.3), [0; 4], 1000);
            while left > 0 {
                let pages = piece.min(left);
                scattered.deal(pages, || vec![0, 2, 3], &mut wanted);
                left -= pages;
            }
            let even = [0, 2, 3].iter().all(|node| wanted[*node].abs_diff(100) <= 1);
            assert!(even && wanted[1] == 0, "{piece}: {wanted:?}");
        }
    }
}

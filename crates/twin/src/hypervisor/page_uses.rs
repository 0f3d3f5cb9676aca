//! Use of pages by node: memory sampling as the processor does it (IBS).
//!
//! # Model
//!
//! While a VM's memory policy needs samples (Carrefour), every 65 528th cycle (0xFFF8) of each of its vCPUs marks an instruction.
//! The mark yields a sample if the instruction accesses memory. Only those of a vCPU's instructions that miss its caches do so;
//! the number of samples is Poisson-distributed with the mean that follows. Samples fall on the classes of pages as the thread's
//! accesses do, and evenly on the pages of a class. A sample is a write with the program's share of writes. A page is on the
//! nodes of its class as the class's pages are; identities of pages are not kept from one look to the next.
//!
//! So a policy learns what it would learn on a real host. Most pages of a big region have no sample, and the others have one or
//! two a second; the number of samples bounds how many pages a policy can act on. A page that one thread uses shows one node. A
//! page that all threads use shows as many nodes as it has samples.
//!
//! A sample costs its vCPU an interrupt. If fewer than ten pages were moved in a second, the next second has a fourth of the
//! samples (0x3FFE0 cycles): both periods are Carrefour's.
//!
//! # Left out
//!
//! Skid and dropped interrupts; samples of cache hits, which Carrefour throws away; accesses of the guest's kernel.

use std::collections::BTreeMap;

use crate::guest::VmMemory;
use crate::index::{IxVec, ThreadIx, first};
use homenode_units::Chance;

/// Pages of a class that are on one node and have equal samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    pub first_frame: u64,
    pub pages: u64,
    pub on: usize,
    /// Number of samples of each page by the node of the CPU.
    pub samples: Vec<u32>,
    pub writes: u32,
}

/// Draws the samples of one look at a VM, in order of guest frames. `expected` is how much [`Sampling::expected`] has grown since
/// the previous look.
pub(crate) fn draw(memory: &VmMemory, expected: &[f64], write_share: f64, chance: &mut Chance) -> Vec<Used> {
    let classes = memory.class_uses();
    let nodes = memory.pages().len();
    let threads = expected.len() / nodes;
    // A thread's accesses fall only on classes that have pages.
    let whole = |thread: ThreadIx| -> f64 {
        let mine = classes
            .iter()
            .filter(|class| class.used_by(thread) && class.pages() > 0);
        mine.map(|class| class.share).sum()
    };
    let wholes: IxVec<ThreadIx, f64> = first(threads).map(whole).collect();
    let mut used = Vec::new();
    let mut hits: Vec<(u64, usize, bool)> = Vec::new();
    for class in classes.iter().filter(|class| class.pages() > 0) {
        hits.clear();
        for node in 0..nodes {
            let of = |thread: ThreadIx| expected[thread.0 * nodes + node] * class.share / wholes[thread];
            let mine = wholes
                .places()
                .filter(|thread| class.used_by(*thread) && wholes[*thread] > 0.0);
            for _ in 0..chance.poisson(mine.map(of).sum()) {
                let page = chance.below(class.pages());
                hits.push((page, node, chance.unit() < write_share));
            }
        }
        hits.sort_unstable();
        let mut alike: BTreeMap<(usize, Vec<u32>, u32), Used> = BTreeMap::new();
        for page in hits.chunk_by(|a, b| a.0 == b.0) {
            let mut samples = vec![0; nodes];
            for (_, node, _) in page {
                samples[*node] += 1;
            }
            let writes = page.iter().filter(|(.., writes)| *writes).count() as u32;
            let on = node_of(page[0].0, &class.on);
            let used = Used {
                first_frame: class.first_frame + page[0].0,
                pages: 0,
                on,
                samples: samples.clone(),
                writes,
            };
            alike.entry((on, samples, writes)).or_insert(used).pages += 1;
        }
        used.extend(alike.into_values());
    }
    used
}

/// Returns the node of a page, given the page's number within its class.
fn node_of(page: u64, on: &[u64]) -> usize {
    let mut end = 0;
    on.iter()
        .position(|pages| {
            end += pages;
            page < end
        })
        .expect("the class has that many pages")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::View;
    use crate::hypervisor::sampling::Sampling;
    use homenode_units::Bytes;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_more_pages_are_seen_than_there_are_samples_or_pages(
            means in prop::collection::vec(0.0f64..300.0, 8), pages in 1u64..2000, seed: u64,
        ) {
            // soplex on two threads and four nodes; checks one thread's regions.
            let program = crate::workload::builtin("soplex").and_then(|workload| workload.program);
            let (mut memory, ..) = VmMemory::new(4, 2, Bytes(4096), program.as_ref(), View::Blind);
            memory.touch(1, 0, 2, pages);
            let used = draw(&memory, &means, 0.25, &mut Chance::new(seed));
            let seen: u64 = used.iter().map(|used| used.pages).sum();
            let samples: u64 = used.iter().map(|used| used.pages * used.samples.iter().map(|n| u64::from(*n)).sum::<u64>()).sum();
            prop_assert!(seen <= samples && seen <= pages);
            for used in &used {
                prop_assert_eq!(used.on, 2);
                prop_assert!(used.writes <= used.samples.iter().sum());
                prop_assert!(used.samples.iter().any(|n| *n > 0));
            }
            // Six standard deviations of a Poisson count are next to impossible.
            let mean: f64 = means[..4].iter().sum();
            prop_assert!((samples as f64 - mean).abs() <= 6.0 * mean.sqrt() + 6.0, "{} samples, {} expected", samples, mean);
        }
    }

    #[test]
    fn few_moves_make_samples_rare_and_cheap() {
        let mut sampling = Sampling::new(1, 1);
        assert!((sampling.share_of_time() - 0.0305).abs() < 1e-4);
        sampling.moved = 9;
        sampling.second();
        sampling.ran(ThreadIx(0), 0, 65_528.0 * 400.0, 0.02);
        assert!((sampling.expected[0] - 2.0).abs() < 1e-9, "{sampling:?}");
        sampling.moved = 10;
        sampling.second();
        sampling.ran(ThreadIx(0), 0, 65_528.0 * 400.0, 0.02);
        assert!((sampling.expected[0] - 10.0).abs() < 1e-9, "{sampling:?}");
    }
}

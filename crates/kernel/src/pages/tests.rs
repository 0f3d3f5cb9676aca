use std::collections::{BTreeMap, BTreeSet};

use homenode_units::Bytes;
use proptest::prelude::*;

use super::*;

const BASE: u64 = 0x7f00_0000_0000;

/// A fake kernel. Maps each page's address to its node, how many more times it is busy, and whether it is part of a huge page.
#[derive(Default)]
struct Fake {
    pages: BTreeMap<u64, (u16, u32, bool)>,
    free: BTreeMap<u16, u64>,
    calls: u64,
    /// Number of calls after which the process is gone.
    dies_after: Option<u64>,
    forbidden: Option<u16>,
    /// Pages that automatic balancing hides.
    hidden: BTreeSet<u64>,
}

impl Fake {
    fn with(count: u64, node: impl Fn(u64) -> Option<u16>, huge: bool) -> Fake {
        let pages = (0..count)
            .filter_map(|i| Some((BASE + i * PAGE_BYTES, (node(i)?, 0, huge))))
            .collect();
        Fake {
            pages,
            ..Fake::default()
        }
    }

    fn on(&self, node: u16) -> u64 {
        self.pages.values().filter(|p| p.0 == node).count() as u64
    }

    fn tick(&mut self) -> Result<(), i32> {
        self.calls += 1;
        if self.dies_after.is_some_and(|n| self.calls > n) {
            Err(libc::ESRCH)
        } else {
            Ok(())
        }
    }
}

impl Kernel for Fake {
    fn reveal(&mut self, _: i32, addresses: &[usize]) -> usize {
        let was_hidden = |address: &&usize| self.hidden.remove(&(**address as u64));
        addresses.iter().filter(was_hidden).count()
    }

    fn query(&mut self, _: i32, addresses: &[usize], status: &mut [i32]) -> Result<(), i32> {
        self.tick()?;
        for (address, status) in addresses.iter().zip(status) {
            *status = self
                .pages
                .get(&(*address as u64))
                .filter(|_| !self.hidden.contains(&(*address as u64)))
                .map_or(-libc::ENOENT, |p| i32::from(p.0));
        }
        Ok(())
    }

    fn relocate(
        &mut self,
        _: i32,
        addresses: &[usize],
        node: NodeId,
        _: Sharing,
        status: &mut [i32],
    ) -> Result<(), i32> {
        self.tick()?;
        if self.forbidden == Some(node.0) {
            return Err(libc::EACCES);
        }
        for (address, status) in addresses.iter().zip(status) {
            if self.hidden.contains(&(*address as u64)) {
                *status = -libc::ENOENT;
                continue;
            }
            let Some(page) = self.pages.get_mut(&(*address as u64)) else {
                continue;
            };
            if page.1 > 0 {
                page.1 -= 1;
                *status = -libc::EBUSY;
                continue;
            }
            let is_huge = page.2;
            let size = if is_huge { WINDOW_PAGES } else { 1 };
            let free = self.free.entry(node.0).or_insert(u64::MAX);
            if *free < size {
                *status = -libc::ENOMEM;
                continue;
            }
            *free -= size;
            *status = i32::from(node.0);
            let first = if is_huge {
                *address as u64 & !(WINDOW_PAGES * PAGE_BYTES - 1)
            } else {
                *address as u64
            };
            for i in 0..size {
                self.pages
                    .entry(first + i * PAGE_BYTES)
                    .and_modify(|p| p.0 = node.0);
            }
        }
        Ok(())
    }
}

fn range(pages: u64) -> Range {
    Range {
        start: BASE,
        end: BASE + pages * PAGE_BYTES,
        sharing: Sharing::Private,
        page_bytes: Bytes(PAGE_BYTES),
    }
}

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn go(mover: &mut Mover, fake: &mut Fake, to: &str, budget: u64) -> Result<Progress, MoveError> {
    let to = nodes(to);
    let leave = nodes("0-9").difference(&to);
    mover.advance(fake, &leave, &to, &NodeMap::new(), Pages(budget), &mut || true)
}

#[test]
fn successive_budgets_go_on_where_the_last_ended() {
    let mut fake = Fake::with(4096, |i| (i % 3 != 2).then_some((i % 2) as u16), false);
    let outside = fake.on(0);
    let mut mover = Mover::new(1, vec![range(4096)]);
    let mut moved = 0;
    let mut rounds = 0;
    while fake.on(0) > 0 {
        let progress = go(&mut mover, &mut fake, "1", 300).unwrap();
        assert!(progress.moved.0 <= 300 && progress.moved.0 > 0, "{progress:?}");
        moved += progress.moved.0;
        rounds += 1;
    }
    assert_eq!(moved, outside);
    assert!(rounds <= outside / 300 + 4, "{rounds} rounds for {outside} pages");
    assert_eq!(go(&mut mover, &mut fake, "1", 300), Ok(Progress::default()));
}

#[test]
fn a_transparent_huge_page_moves_whole_and_within_the_budget() {
    let mut fake = Fake::with(4 * WINDOW_PAGES, |_| Some(0), true);
    let mut mover = Mover::new(1, vec![range(4 * WINDOW_PAGES)]);
    assert_eq!(
        go(&mut mover, &mut fake, "1", 1300).unwrap().moved,
        Pages(1024),
        "the third would exceed it"
    );
    assert_eq!(
        go(&mut mover, &mut fake, "1", 100).unwrap().moved,
        Pages(512),
        "one page, or none ever"
    );
    assert_eq!(go(&mut mover, &mut fake, "1", 600).unwrap().moved, Pages(512));
    assert_eq!(fake.on(1), 4 * WINDOW_PAGES);
}

#[test]
fn base_pages_in_a_full_window_stay_below_a_small_budget() {
    let mut fake = Fake::with(WINDOW_PAGES, |_| Some(0), false);
    let mut mover = Mover::new(1, vec![range(WINDOW_PAGES)]);
    let moved = go(&mut mover, &mut fake, "1", 100).unwrap().moved;
    assert!(moved.0 >= 1 && moved.0 <= 100, "{moved}");
}

#[test]
fn pages_of_hugetlbfs_count_as_base_pages() {
    let huge = Range {
        page_bytes: Bytes(2 << 20),
        ..range(4 * WINDOW_PAGES)
    };
    let mut fake = Fake::with(4 * WINDOW_PAGES, |_| Some(0), true);
    let mut mover = Mover::new(1, vec![huge]);
    assert_eq!(go(&mut mover, &mut fake, "1", 1100).unwrap().moved, Pages(1024));
    assert_eq!(
        go(&mut mover, &mut fake, "1", 511),
        Err(MoveError::BudgetBelowHugePage {
            needed: Pages(512),
            budget: Pages(511)
        })
    );
    assert_eq!(go(&mut mover, &mut fake, "1", 5000).unwrap().moved, Pages(1024));
}

#[test]
fn pages_spread_evenly_over_several_nodes() {
    let mut fake = Fake::with(8 * WINDOW_PAGES, |_| Some(0), false);
    let mut mover = Mover::new(1, vec![range(8 * WINDOW_PAGES)]);
    go(&mut mover, &mut fake, "1,3", 1 << 20).unwrap();
    assert_eq!((fake.on(1), fake.on(3)), (4 * WINDOW_PAGES, 4 * WINDOW_PAGES));
}

#[test]
fn busy_pages_are_tried_a_few_times_and_then_reported() {
    let mut fake = Fake::with(WINDOW_PAGES, |i| Some(u16::from(i % 2 == 0)), false);
    fake.pages.get_mut(&(BASE + PAGE_BYTES)).unwrap().1 = 2;
    fake.pages.get_mut(&(BASE + 3 * PAGE_BYTES)).unwrap().1 = 1000;
    let mut mover = Mover::new(1, vec![range(WINDOW_PAGES)]);
    let progress = go(&mut mover, &mut fake, "1", 10_000).unwrap();
    assert_eq!(
        progress,
        Progress {
            moved: Pages(255),
            busy: Pages(1),
            refused: Pages(0)
        }
    );
    assert!(fake.calls < 12, "{} calls", fake.calls);
}

#[test]
fn a_full_node_is_left_for_the_next_and_all_full_is_an_error() {
    let mut fake = Fake::with(4 * WINDOW_PAGES, |_| Some(0), false);
    fake.free = [(1, 600), (2, 100)].into();
    let mut mover = Mover::new(1, vec![range(4 * WINDOW_PAGES)]);
    let moved = go(&mut mover, &mut fake, "1-2", 1 << 20).unwrap().moved;
    assert_eq!(moved.0, fake.on(1) + fake.on(2));
    assert_eq!(moved.0, 700);
    let full = go(&mut mover, &mut fake, "1-2", 1 << 20).unwrap_err();
    assert_eq!(full, MoveError::NoMemory { nodes: nodes("1-2") });
}

#[test]
fn a_process_that_dies_in_mid_move_is_said_to_be_gone() {
    let pages = 4 * CALL_WINDOWS * WINDOW_PAGES;
    let mut fake = Fake::with(pages, |_| Some(0), false);
    fake.dies_after = Some(7);
    let mut mover = Mover::new(1, vec![range(pages)]);
    assert_eq!(go(&mut mover, &mut fake, "1", 1 << 20), Err(MoveError::Gone));
    assert_eq!(error_of(libc::EPERM, None), MoveError::NotPermitted);
}

#[test]
fn a_node_outside_the_cpuset_is_named() {
    let mut fake = Fake::with(WINDOW_PAGES, |_| Some(0), false);
    fake.forbidden = Some(1);
    let mut mover = Mover::new(1, vec![range(WINDOW_PAGES)]);
    assert_eq!(
        go(&mut mover, &mut fake, "1", 600),
        Err(MoveError::NodeNotAllowed { node: NodeId(1) })
    );
}

#[test]
fn the_caller_can_stop_it_between_calls() {
    let pages = 5 * CALL_WINDOWS * WINDOW_PAGES;
    let mut fake = Fake::with(pages, |_| Some(0), false);
    let mut mover = Mover::new(1, vec![range(pages)]);
    let mut asked = 0;
    let mut go_on = || {
        asked += 1;
        asked <= 3
    };
    let progress = mover
        .advance(
            &mut fake,
            &nodes("0"),
            &nodes("1"),
            &NodeMap::new(),
            Pages(1 << 20),
            &mut go_on,
        )
        .unwrap();
    assert_eq!(progress.moved, Pages(3 * CALL_WINDOWS * WINDOW_PAGES));
}

#[test]
fn pages_that_automatic_balancing_hides_move_as_well() {
    let mut fake = Fake::with(1024, |_| Some(0), false);
    fake.hidden = (0..1024).step_by(3).map(|i| BASE + i * PAGE_BYTES).collect();
    let mut mover = Mover::new(1, vec![range(1024)]);
    let progress = go(&mut mover, &mut fake, "1", 4096).unwrap();
    assert_eq!((progress.moved, fake.on(1)), (Pages(1024), 1024));
}

#[test]
fn single_pages_move_from_where_they_are_said_to_be() {
    let mut fake = Fake::with(2048, |i| Some((i % 2) as u16), false);
    let ranges = vec![
        range(600),
        Range {
            start: BASE + 1000 * PAGE_BYTES,
            end: BASE + 2048 * PAGE_BYTES,
            ..range(0)
        },
    ];
    let mover = Mover::new(1, ranges);
    let each = |frame, pages, from, to| FrameMove {
        frame,
        pages: Pages(pages),
        from: NodeId(from),
        to: NodeId(to),
    };
    // Frame 599 ends the first range, and 600 begins the second. Half of all pages are on node 0. Two moves are skipped: frame 7
    // is on node 1, not 0, and frame 5000 is in no range.
    let moves = [
        each(598, 4, 0, 2),
        each(7, 1, 0, 3),
        each(5000, 9, 0, 3),
        each(3, 1, 1, 3),
        each(u64::MAX, 9, 0, 3),
    ];
    let progress = mover.move_frames(&mut fake, &moves, &mut || true).unwrap();
    assert_eq!((progress.moved, fake.on(2), fake.on(3)), (Pages(3), 2, 1));
    assert_eq!(fake.pages[&(BASE + 1000 * PAGE_BYTES)].0, 2);
}

#[test]
fn pages_with_one_way_go_together_and_those_far_apart_as_well() {
    let pages = 64 * WINDOW_PAGES;
    let mut fake = Fake::with(pages, |_| Some(0), false);
    let mover = Mover::new(1, vec![range(pages)]);
    let moves: Vec<FrameMove> = (0..pages)
        .step_by(100)
        .map(|frame| FrameMove {
            frame,
            pages: Pages(1),
            from: NodeId(0),
            to: NodeId(1 + (frame / 100 % 2) as u16),
        })
        .collect();
    let progress = mover.move_frames(&mut fake, &moves, &mut || true).unwrap();
    let half = moves.len() as u64 / 2;
    assert_eq!((progress.moved.0, fake.on(1), fake.on(2)), (2 * half, half, half));
    // Each node takes a query, a move and another query.
    assert_eq!(fake.calls, 2 * 3);
}

#[test]
fn the_kernel_says_where_our_own_pages_are() {
    let page = vec![1u8; 3 * PAGE_BYTES as usize];
    let address = (page.as_ptr() as usize).next_multiple_of(PAGE_BYTES as usize);
    let mut status = [-1];
    match Linux.query(0, &[address], &mut status) {
        Ok(()) => assert!(status[0] >= 0, "{status:?}"),
        Err(errno) => assert!(errno == libc::ENOSYS || errno == libc::EPERM, "{errno}"), // kernel without NUMA, or a sandbox
    }
}

proptest! {
    #[test]
    fn never_more_than_the_budget_and_nothing_is_lost(
        layout in prop::collection::vec(prop::option::of(0u16..3), 1..2000),
        start in 0u64..600,
        budget in 513u64..3000,
        busy in 0u32..5,
    ) {
        let first = BASE + start * PAGE_BYTES;
        let mut fake = Fake::default();
        for (i, node) in layout.iter().enumerate() {
            if let Some(node) = node {
                fake.pages.insert(first + i as u64 * PAGE_BYTES, (*node, if i % 7 == 0 { busy } else { 0 }, false));
            }
        }
        let count = fake.pages.len();
        let before = fake.on(1);
        let range = Range { start: first, end: first + layout.len() as u64 * PAGE_BYTES, ..range(0) };
        let mut mover = Mover::new(1, vec![range]);
        let progress = go(&mut mover, &mut fake, "1", budget).unwrap();
        prop_assert!(progress.moved.0 <= budget);
        prop_assert_eq!(fake.on(1), before + progress.moved.0);
        prop_assert_eq!(fake.pages.len(), count);
        for _ in 0..8 {
            go(&mut mover, &mut fake, "1", budget).unwrap();
        }
        prop_assert_eq!(fake.on(1) as usize, count);
    }
}

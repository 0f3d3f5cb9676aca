use super::*;
use crate::index::first;
use crate::workload::{RegionKind, Threads};
use proptest::prelude::*;

#[test]
fn threads_that_exchange_vcpus_leave_their_pages_behind_and_find_them_when_they_return() {
    let mut program = crate::workload::builtin("soplex").unwrap().program.unwrap();
    program.threads = Threads::OnePerVcpu;
    program.regions = vec![crate::workload::RegionProfile {
        kind: RegionKind::Private,
        size: Bytes(100 * 4096),
        access_share: 1.0,
        heat: Vec::new(),
        window: None,
    }];
    let (mut memory, ..) = VmMemory::new(3, 3, Bytes(4096), Some(&program), View::Blind);
    for thread in 0..3 {
        memory.touch(1 + thread, 0, thread, 100);
    }
    let near = |memory: &mut VmMemory| -> Vec<usize> {
        memory.refresh();
        let near = |weights: &[f64]| weights.iter().position(|weight| *weight > 0.99).unwrap();
        first(3).map(|thread| near(memory.weights(thread))).collect()
    };
    let pages = memory.pages();
    assert_eq!(near(&mut memory), [0, 1, 2]);
    memory.exchange(ThreadIx(0), ThreadIx(2));
    assert_eq!(near(&mut memory), [2, 1, 0]);
    memory.exchange(ThreadIx(1), ThreadIx(0));
    assert_eq!(near(&mut memory), [1, 2, 0]);
    assert_eq!(memory.pages(), pages);
    // All threads may use the memory of the thread that is now on vCPU 1.
    memory.gather(ThreadIx(1));
    assert_eq!(near(&mut memory), [2, 2, 2]);
}

fn memory(on: &[u64]) -> VmMemory {
    let pages: u64 = on.iter().sum();
    let (mut memory, ..) = VmMemory::new(on.len(), 1, Bytes(pages * 4096), None, View::Blind);
    for (node, pages) in on.iter().enumerate() {
        memory.touch(0, 0, node, *pages);
    }
    memory
}

proptest! {
    #[test]
    fn pages_that_change_places_keep_their_number_in_each_class_and_on_each_node(
        own in prop::collection::vec(prop::collection::vec(0u64..2000, 3..4), 2..5),
        asked in prop::collection::vec(0u64..8000, 5..6),
        seed: u64,
    ) {
        let mut program = crate::workload::builtin("soplex").unwrap().program.unwrap();
        let heat = |page_share, access_share| crate::workload::HeatClass { page_share, access_share };
        program.threads = Threads::OnePerVcpu;
        program.regions = vec![crate::workload::RegionProfile {
            kind: RegionKind::Private,
            size: Bytes(12_000 * 4096),
            access_share: 1.0,
            heat: vec![heat(0.5, 0.9), heat(0.5, 0.1)],
            window: None,
        }];
        let (mut memory, ..) = VmMemory::new(3, own.len(), Bytes(4096), Some(&program), View::Blind);
        for (thread, on) in own.iter().enumerate() {
            for (node, pages) in on.iter().enumerate() {
                memory.touch(1 + thread, 0, node, *pages);
                memory.touch(1 + thread, 1, node, pages / 3);
            }
        }
        let by_class = |memory: &VmMemory| -> Vec<u64> { memory.class_uses().iter().map(ClassUse::pages).collect() };
        let before = (memory.pages(), by_class(&memory));
        memory.mix(&asked[..own.len()].iter().copied().collect(), &mut Chance::new(seed));
        prop_assert_eq!((memory.pages(), by_class(&memory)), before);
    }

    #[test]
    fn moves_conserve_pages_and_respect_budget_and_room(
        on in prop::collection::vec(0u64..5000, 4..5),
        budget in 0u64..10_000,
        room in prop::collection::vec(0u64..4000, 4..5),
        seed: u64,
    ) {
        let mut memory = memory(&on);
        let mut left = room.clone();
        let moved = memory.migrate(&[0, 2], &[1, 3], budget, &mut left, &mut Chance::new(seed));
        let moved: u64 = moved.iter().map(|(_, _, pages)| pages).sum();
        let after = memory.pages();
        prop_assert_eq!(after.iter().sum::<u64>(), on.iter().sum::<u64>());
        prop_assert_eq!(moved, budget.min(on[0] + on[2]).min(room[1] + room[3]));
        prop_assert_eq!(after[1] + after[3], on[1] + on[3] + moved);
        prop_assert!(after[1] - on[1] == room[1] - left[1] && after[3] - on[3] == room[3] - left[3]);
    }

    #[test]
    fn a_guest_gives_back_what_is_asked_and_never_what_it_needs(
        on in prop::collection::vec(0u64..5000, 4..5),
        asked in 0u64..30_000,
        seed: u64,
    ) {
        let program = crate::workload::builtin("soplex").unwrap().program;
        let (mut memory, ..) = VmMemory::new(4, 1, Bytes(100 * 4096), program.as_ref(), View::Blind);
        memory.touch(0, 0, 2, 100);
        for (node, pages) in on.iter().enumerate() {
            memory.touch(1, 1, node, *pages);
        }
        let untouched = memory.needed(Needs::Program) - 100 - on.iter().sum::<u64>();
        memory.free_list = vec![0, untouched + 50, 0, 0];
        let whole = memory.pages();
        // While the program runs, the guest can spare only free pages that the program will not need.
        let free = memory.give_back(asked, Needs::Program, &mut Chance::new(seed));
        prop_assert_eq!(&free, &vec![0, asked.min(50), 0, 0]);
        let taken = memory.give_back(asked, Needs::Kernel, &mut Chance::new(seed));
        let spare = on.iter().sum::<u64>() + untouched + 50 - free[1];
        prop_assert_eq!(taken.iter().sum::<u64>(), asked.min(spare));
        for (node, pages) in memory.pages().into_iter().enumerate() {
            prop_assert_eq!(pages + taken[node] + free[node], whole[node]);
        }
    }
}

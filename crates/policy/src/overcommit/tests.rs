//! A host of two nodes. Its guests do what balloons and drivers may do, cycle by cycle.

use super::*;
use crate::testing::{Scene, vm_id};
use crate::working_set::Tracker;
use homenode_host::Balloons;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const CYCLE: Ns = Ns::from_secs(5);

fn mib(count: u64) -> Bytes {
    Bytes(count * MIB)
}

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// The guest's balloon reaches its target in the next cycle.
    Honest,
    /// The guest keeps its memory, whatever its target is.
    Stubborn,
    /// The guest's balloon driver never reports.
    Silent,
    /// The guest reports that nothing is usable and that it swaps.
    Wails,
    /// The guest reports endless spare memory.
    Boasts,
}

#[derive(Clone, Debug)]
struct Guest {
    home: u16,
    maximum: Bytes,
    floor: Option<Bytes>,
    manner: Manner,
    /// Memory that the guest uses, which is also the estimate; `None` without an estimate.
    uses: Option<Bytes>,
    current: Bytes,
    limit: Option<Bytes>,
    /// Memory that the guest has touched.
    touched: Bytes,
    swapped_in: Bytes,
}

impl Guest {
    fn new(home: u16, maximum: u64, floor: Option<u64>, uses: Option<u64>) -> Guest {
        Guest {
            home,
            maximum: mib(maximum),
            floor: floor.map(mib),
            manner: Manner::Honest,
            uses: uses.map(mib),
            current: mib(maximum),
            limit: None,
            touched: mib(maximum),
            swapped_in: Bytes::ZERO,
        }
    }

    fn given(&self) -> Bytes {
        self.limit.unwrap_or(self.maximum)
    }

    fn report(&self) -> Option<GuestMemory> {
        let usable = self.current.saturating_sub(self.uses.unwrap_or_default());
        let (usable, swapped_in) = match self.manner {
            Manner::Silent => return None,
            Manner::Honest | Manner::Stubborn => (usable, self.swapped_in),
            Manner::Wails => (Bytes::ZERO, Bytes(u64::MAX)),
            Manner::Boasts => (Bytes(u64::MAX), Bytes::ZERO),
        };
        Some(GuestMemory {
            age: Some(Ns::from_secs(1)),
            usable: Some(usable),
            swapped_in: Some(swapped_in),
            major_faults: Some(0),
            ..GuestMemory::default()
        })
    }

    fn balloon(&self) -> Balloon {
        Balloon {
            current: self.current,
            maximum: self.maximum,
            limit: self.limit,
            guest: self.report(),
        }
    }
}

struct World {
    guests: Vec<Guest>,
    config: Config,
    state: State,
    at: Ns,
    plan: Plan,
    /// Free memory of each node when the last plan was made.
    free: Vec<Bytes>,
    before: Vec<Bytes>,
}

impl World {
    fn new(guests: Vec<Guest>, when: When) -> World {
        World {
            guests,
            config: Config {
                when,
                ..Config::default()
            },
            state: State::default(),
            at: Ns::from_secs(100),
            plan: Plan::default(),
            free: vec![],
            before: vec![],
        }
    }

    fn estimate(&self, guest: &Guest) -> Option<Estimate> {
        let most = guest.uses?;
        Some(Estimate {
            tracker: Tracker::AccessedBits,
            at: self.at,
            window: Ns::from_secs(30),
            size: most,
            least: most,
            most,
            certainty: Certainty::Bounds,
            hot: most,
            warm: Bytes::ZERO,
            kernel: Bytes::ZERO,
            settled: Settled::Yes,
            curve: None,
            outside: 0,
            lost: 0,
        })
    }

    fn need(&self, at: usize) -> Bytes {
        let guest = &self.guests[at];
        let most = guest.uses.unwrap_or(guest.maximum);
        let reserve = part(most, self.config.reserve).max(self.config.reserve_min);
        (most + reserve)
            .max(guest.floor.unwrap_or(guest.maximum))
            .min(guest.maximum)
    }

    /// Runs one cycle: a plan is made and carried out, and the guests react.
    fn step(&mut self) {
        let mut scene = Scene::nodes(2, 2);
        scene.at = self.at;
        for (n, guest) in self.guests.iter().enumerate() {
            let vm = scene.add_vm(n as u128, 1, guest.maximum, guest.home);
            vm.home(guest.home).pages(guest.home, guest.touched.to_pages().0);
            vm.balloon(guest.balloon()).settings().memory_floor = guest.floor;
        }
        let estimates: BTreeMap<VmId, Estimate> = self
            .guests
            .iter()
            .enumerate()
            .filter_map(|(n, guest)| Some((vm_id(n as u128), self.estimate(guest)?)))
            .collect();
        self.before = self.guests.iter().map(Guest::given).collect();
        let (config, state) = (&self.config, &mut self.state);
        (self.plan, self.free) = scene.with_view(|view| {
            let free = view.sample.nodes.values().map(|node| node.memory_free_bytes);
            (plan(view, config, |vm| estimates.get(&vm), state), free.collect())
        });
        for decision in &self.plan.decisions {
            let guest = &mut self.guests[decision.action.vm.0 as usize];
            match decision.action.act {
                Act::Limit {
                    limit: Limit::Memory(bytes),
                    ..
                } => guest.limit = Some(bytes),
                Act::Lift { .. } => guest.limit = None,
                _ => panic!("{decision:?}"),
            }
        }
        for guest in &mut self.guests {
            if guest.manner != Manner::Stubborn || guest.given() > guest.current {
                guest.current = guest.given();
            }
            guest.touched = guest
                .touched
                .min(guest.current)
                .max(guest.uses.unwrap_or_default().min(guest.current));
            if guest.uses.is_some_and(|uses| uses > guest.current) {
                guest.swapped_in += mib(1);
            }
        }
        self.at += CYCLE;
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    fn findings(&self) -> String {
        let said = self.plan.findings.iter().map(|finding| finding.message.as_str());
        said.collect::<Vec<_>>().join("\n")
    }
}

fn guests() -> impl Strategy<Value = Vec<Guest>> {
    let manner = prop_oneof![
        6 => Just(Manner::Honest),
        1 => Just(Manner::Stubborn),
        1 => Just(Manner::Silent),
        1 => Just(Manner::Wails),
        1 => Just(Manner::Boasts),
    ];
    let guest = (
        0_u16..2,
        256_u64..8192,
        prop::option::weighted(0.9, 64_u64..2048),
        prop::option::weighted(0.9, 32_u64..6000),
    );
    prop::collection::vec((guest, manner), 1..6).prop_map(|drawn| {
        let guest = |((home, maximum, floor, uses), manner)| Guest {
            manner,
            ..Guest::new(home, maximum, floor, uses)
        };
        drawn.into_iter().map(guest).collect()
    })
}

fn when() -> impl Strategy<Value = When> {
    prop_oneof![Just(When::Scarce), Just(When::Always)]
}

/// Changes of use: each is a guest and the memory that it uses from then on.
fn changes() -> impl Strategy<Value = Vec<(usize, u64)>> {
    prop::collection::vec((0_usize..6, 32_u64..6000), 0..12)
}

fn change(world: &mut World, (which, uses): (usize, u64)) {
    let count = world.guests.len();
    let guest = &mut world.guests[which % count];
    if let Some(now) = &mut guest.uses {
        *now = mib(uses);
        guest.touched = guest.touched.max(mib(uses).min(guest.current));
    }
}

proptest! {
    #[test]
    fn never_below_the_floor_nor_below_working_set_and_reserve(guests in guests(), when in when(), changes in changes()) {
        let mut world = World::new(guests, when);
        for it in changes {
            world.steps(7);
            change(&mut world, it);
            world.step();
            for (at, guest) in world.guests.iter().enumerate().filter(|(_, guest)| guest.given() < guest.maximum) {
                let floor = guest.floor.expect("without one there is no limit");
                prop_assert!(guest.given() >= floor.min(guest.maximum), "{guest:?}");
                // The need limits what is taken in this cycle. Memory from before may be below a need that has grown since.
                let need = world.need(at).min(world.before[at]);
                prop_assert!(guest.given() >= need, "{guest:?} needs {need}");
            }
        }
    }

    #[test]
    fn what_is_given_on_a_node_is_never_more_than_it_has(guests in guests(), when in when(), changes in changes()) {
        let mut world = World::new(guests, when);
        for it in changes {
            world.steps(5);
            change(&mut world, it);
            world.step();
            for node in 0..2_u16 {
                let grown = world.guests.iter().zip(&world.before).filter(|(guest, _)| guest.home == node);
                // If a limit is lifted because its balloon is of no use, the memory that returns was never saved.
                let grown = grown.filter(|(guest, _)| {
                    matches!(guest.manner, Manner::Honest | Manner::Wails) && guest.limit.is_some()
                });
                let sum: u64 = grown.map(|(guest, before)| guest.given().saturating_sub(*before).0).sum();
                prop_assert!(sum <= world.free[usize::from(node)].0, "{sum} given on node {node}");
            }
        }
    }

    #[test]
    fn pressure_is_answered_with_growth_in_the_same_cycle(uses in 200_u64..900, more in 200_u64..3000) {
        let mut world = World::new(vec![Guest::new(0, 4096, Some(128), Some(uses))], When::Always);
        world.steps(300);
        prop_assert!(world.guests[0].given() < mib(2048), "{:?}", world.guests);
        // The guest swaps before an estimate shows its need.
        let before = world.guests[0].given();
        world.guests[0].swapped_in += mib(more);
        world.step();
        let after = world.guests[0].given();
        prop_assert!(after >= part(before, 1.4), "{before} became {after}: {:?}", world.plan);
        prop_assert!(world.plan.decisions[0].reason.contains("back from swap"), "{:?}", world.plan);
        // The guest is not shrunk for a while.
        world.steps(5);
        prop_assert!(world.guests[0].given() >= after);
    }

    #[test]
    fn a_quiet_system_comes_to_rest(guests in guests(), when in when()) {
        let guests: Vec<Guest> = guests.into_iter().map(|guest| Guest { manner: Manner::Honest, ..guest }).collect();
        let mut world = World::new(guests, when);
        // A twentieth every 10 s: 5 GiB of spare memory take some 60 steps. Backoff lasts up to half an hour.
        world.steps(800);
        for _ in 0..40 {
            world.step();
            for (guest, before) in world.guests.iter().zip(&world.before) {
                prop_assert_eq!(guest.given(), *before, "{:?}", &world.plan);
            }
        }
    }

    #[test]
    fn every_limit_is_renewed_or_lifted(guests in guests(), when in when(), changes in changes()) {
        let mut world = World::new(guests, when);
        for it in changes {
            change(&mut world, it);
            let limited: Vec<VmId> = (0..world.guests.len())
                .filter(|at| world.guests[*at].limit.is_some())
                .map(|at| vm_id(at as u128))
                .collect();
            world.steps(1);
            for vm in limited {
                prop_assert!(world.plan.decisions.iter().any(|decision| decision.action.vm == vm), "{:?}", &world.plan);
            }
            world.steps(4);
        }
    }

    #[test]
    fn a_guest_decides_over_nobody_but_itself(
        guests in guests(),
        when in when(),
        liar in prop_oneof![Just(Manner::Wails), Just(Manner::Boasts)],
    ) {
        // What one guest claims does not change what others keep: they stay above their need.
        let mut world = World::new(guests, when);
        world.guests.push(Guest { manner: liar, ..Guest::new(0, 8192, Some(64), Some(512)) });
        for _ in 0..60 {
            world.step();
            for (at, guest) in world.guests.iter().enumerate() {
                prop_assert!(guest.given() >= world.need(at).min(world.before[at]), "{guest:?}");
                prop_assert!(guest.given() <= guest.maximum);
            }
        }
    }
}

#[test]
fn without_a_floor_or_an_estimate_nothing_is_taken() {
    let guests = vec![
        Guest::new(0, 4096, None, Some(100)),
        Guest::new(0, 4096, Some(128), None),
    ];
    let mut world = World::new(guests, When::Always);
    for _ in 0..30 {
        world.step();
        assert_eq!(world.plan.decisions, []);
    }
}

#[test]
fn a_headroom_beyond_all_memory_leaves_nothing_to_give_back() {
    for headroom in [1.5, 1e30, f64::INFINITY] {
        let mut world = World::new(vec![Guest::new(0, 4096, Some(128), Some(100))], When::Scarce);
        world.config.headroom = headroom;
        world.steps(10);
        assert!(world.guests[0].given() < mib(4096), "{headroom}");
    }
}

#[test]
fn memory_is_taken_only_where_a_node_lacks_it() {
    // Node 0 has 16 GiB, of which 15 are touched: 1 GiB is free where 1.6 should be. Node 1 has plenty.
    let guests = vec![
        Guest::new(0, 10 << 10, Some(128), Some(1024)),
        Guest::new(0, 5 << 10, Some(128), Some(5 << 10)),
        Guest::new(1, 4096, Some(128), Some(100)),
    ];
    let mut world = World::new(guests, When::Scarce);
    world.steps(10);
    let given: Vec<Bytes> = world.guests.iter().map(Guest::given).collect();
    assert_eq!(given[1..], [mib(5 << 10), mib(4096)]);
    // The node has 16 GiB. A headroom of 1.6 GiB and the other guest's 5 GiB are not available.
    let expected = 16.0 * 1024.0 - 1638.4 - 5.0 * 1024.0;
    let left = given[0].as_f64() / MIB as f64;
    assert!((left - expected).abs() < 2.0, "{left} MiB left, not {expected}");
}

fn shrunk(manner: Manner) -> World {
    let guest = Guest::new(0, 4096, Some(128), Some(512));
    let mut world = World::new(vec![guest], When::Always);
    world.steps(10);
    assert!(world.guests[0].given() < mib(4096), "{:?}", world.guests);
    world.guests[0].manner = manner;
    world
}

#[test]
fn a_balloon_that_does_not_follow_is_said_and_let_go() {
    let mut world = shrunk(Manner::Stubborn);
    let mut said = String::new();
    for _ in 0..20 {
        world.step();
        said += &world.findings();
    }
    assert_eq!(said.matches("does not follow").count(), 1, "{said}");
    assert_eq!(world.guests[0].limit, None);
    // After ten minutes the balloon is tried again.
    world.guests[0].manner = Manner::Honest;
    world.steps(130);
    assert!(world.guests[0].given() < mib(4096));
}

#[test]
fn a_driver_that_does_not_answer_is_said_and_let_go() {
    let mut world = shrunk(Manner::Silent);
    world.step();
    assert!(
        world.findings().contains("does not report the guest's memory"),
        "{}",
        world.findings()
    );
    assert_eq!(world.guests[0].limit, None);
    world.step();
    assert_eq!(world.findings(), "");
}

#[test]
fn a_limit_that_somebody_undid_is_not_set_again_at_once() {
    let mut world = shrunk(Manner::Honest);
    (world.guests[0].limit, world.guests[0].current) = (None, mib(4096));
    world.step();
    assert!(
        world.findings().contains("another program changed it"),
        "{}",
        world.findings()
    );
    world.steps(20);
    assert_eq!(world.guests[0].limit, None);
}

#[test]
fn a_vm_without_a_balloon_is_told_how_to_get_one() {
    let mut scene = Scene::nodes(2, 2);
    scene.add_vm(1, 1, mib(512), 0).settings().memory_floor = Some(mib(64));
    let mut state = State::default();
    let mut said = || scene.with_view(|view| plan(view, &Config::default(), |_| None, &mut state).findings);
    assert!(said()[0].message.contains("<memballoon model='virtio'/>"));
    assert_eq!(said(), []);
}

#[test]
fn what_is_said_of_balloons_is_of_those_that_the_host_has() {
    for (balloons, has) in [(Balloons::Virtio, "virtio"), (Balloons::Xen, "xen-balloon")] {
        let mut scene = Scene::nodes(2, 2);
        scene.balloons = balloons;
        scene.add_vm(1, 1, mib(512), 0).settings().memory_floor = Some(mib(64));
        let silent = Guest {
            manner: Manner::Silent,
            ..Guest::new(0, 512, Some(64), None)
        };
        let vm = scene.add_vm(2, 1, mib(512), 0).balloon(silent.balloon());
        vm.settings().memory_floor = Some(mib(64));
        let (config, mut state) = (Config::default(), State::default());
        let mut findings = Vec::new();
        for _ in 0..2 {
            let plan = scene.with_view(|view| plan(view, &config, |_| None, &mut state));
            findings.extend(plan.findings);
            scene.at += config.first_report_max;
        }
        assert_eq!(findings.len(), 2, "{findings:?}");
        for finding in findings {
            let said = finding.message;
            assert!(said.contains(has), "{said}");
            assert_eq!(said.contains("virtio"), balloons.is_virtio(), "{said}");
        }
    }
}

#[test]
fn memory_plugged_in_while_it_is_held_is_its_own() {
    let mut world = shrunk(Manner::Honest);
    let guest = &mut world.guests[0];
    let before = guest.given();
    // The host raises the limit and the maximum by the amount of memory that was plugged in.
    (guest.maximum, guest.current) = (mib(5120), guest.current + mib(1024));
    guest.limit = guest.limit.map(|limit| limit + mib(1024));
    world.step();
    assert_eq!(world.findings(), "");
    assert!(world.guests[0].given() > before);
}

#[test]
fn pages_are_taken_from_whom_most_can_be_spared() {
    let guests = vec![
        Guest::new(0, 7 << 10, Some(128), Some(6 << 10)),
        Guest::new(0, 8 << 10, Some(128), Some(1 << 10)),
    ];
    let mut world = World::new(guests, When::Scarce);
    world.step();
    let of: Vec<VmId> = world
        .plan
        .decisions
        .iter()
        .map(|decision| decision.action.vm)
        .collect();
    // The second VM can spare 0.4 GiB and the lack is 0.6, so the first supplies the rest.
    assert_eq!(of, [vm_id(1), vm_id(0)]);
    assert!(
        world.plan.decisions[0].reason.contains("as node 0 has"),
        "{:?}",
        world.plan
    );
}

/// A guest with 4 GiB that uses 600 MiB of them, after this many cycles under these settings.
fn used_by_halves(set: impl Fn(&mut Config), cycles: usize) -> World {
    let mut world = World::new(vec![Guest::new(0, 4096, Some(128), Some(600))], When::Always);
    set(&mut world.config);
    world.steps(cycles);
    world
}

#[test]
fn how_fast_memory_goes_and_comes_is_the_operators_to_say() {
    let settled = used_by_halves(|_| {}, 300).guests[0].given();
    assert!(settled < mib(800), "{settled}");
    // With this band, memory that the guest could spare is too little to take any.
    let kept = used_by_halves(|config| config.band = 0.9, 300).guests[0].given();
    assert_eq!(kept, mib(4096));
    let mut world = used_by_halves(|config| config.step_min = mib(512), 0);
    while world.guests[0].limit.is_none() {
        world.step();
    }
    assert_eq!(world.guests[0].given(), mib(3584), "the first step");
    // A guest that swaps grows by the operator's setting.
    for (growth, least, most) in [(0.1, 1.09, 1.11), (2.0, 2.99, 3.01)] {
        let mut world = used_by_halves(|config| config.growth = growth, 300);
        let before = world.guests[0].given();
        world.guests[0].swapped_in += mib(100);
        world.step();
        let after = world.guests[0].given();
        assert!(
            after >= part(before, least) && after <= part(before, most),
            "{before} {after}"
        );
    }
    // A guest that reads less than `swap_min` from swap does not count as short of memory.
    let mut world = used_by_halves(|config| config.swap_min = mib(200), 300);
    let before = world.guests[0].given();
    world.guests[0].swapped_in += mib(100);
    world.step();
    assert_eq!(world.guests[0].given(), before);
}

#[test]
fn how_long_a_balloon_is_waited_for_and_left_alone_is_the_operators_to_say() {
    let findings = |set: fn(&mut Config)| {
        let mut world = World::new(vec![Guest::new(0, 4096, Some(128), Some(600))], When::Always);
        world.guests[0].manner = Manner::Stubborn;
        set(&mut world.config);
        let mut count = 0;
        for _ in 0..120 {
            world.step();
            count += world.plan.findings.len();
        }
        count
    };
    // By default: a minute of waiting, then ten minutes in which the VM is left alone.
    let once = findings(|_| {});
    let often = findings(|config| (config.follow_max, config.left_alone) = (CYCLE, CYCLE));
    let never = findings(|config| config.follow_max = Ns::from_secs(3600));
    assert!(once == 1 && often > 5 && never == 0, "{once} {often} {never}");
}

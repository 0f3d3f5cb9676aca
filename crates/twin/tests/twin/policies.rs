//! Memory policies in the hypervisor: observed use of pages, moving single pages, switching policies while a VM runs.

use crate::common::{cores, program};
use homenode_host::{
    Act, Action, Barred, Failure, FrameMove, Host, Outcome, PageUse, Plan, Rates, VcpuSample, View, VmView,
};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_policy::memory::carrefour;
use homenode_twin::{Hypervisor, ReleaseCalls, Scenario, Twin, VmReport, VmSpec, Vnuma, Workload};
use homenode_units::{Bytes, MemoryPolicy, Migration, NodeId, NodeSet, Ns, Pages, Placing};
use proptest::prelude::*;

const MIB: u64 = 256;

fn amd48() -> Machine {
    preset("amd48").expect("amd48 comes with the machines")
}

fn endless(name: &str, kind: &str) -> Workload {
    let mut workload = program(name, 30.0, 1.0, 16.0, kind);
    workload.program.as_mut().unwrap().instructions_g_per_thread = 1000.0;
    workload
}

/// Returns a VM of 8 vCPUs, one on the first core of each node. Either one thread initialises its memory or each thread has its
/// own.
fn spec(kind: &str, policy: MemoryPolicy) -> VmSpec {
    let machine = amd48();
    let one_each = (0..8).map(|node| cores(&machine, node, 0, 1));
    let cpus = one_each.reduce(|all, one| all.union(&one)).expect("nodes");
    let mut spec = VmSpec::new("a", 8, Bytes::from_gib(8), kind).on_cpus(cpus);
    spec.memory_policy = policy;
    spec
}

fn run(hypervisor: Hypervisor, spec: VmSpec, seconds: u64) -> Twin {
    let mut scenario = Scenario::of("policies", vec![spec]);
    scenario.hypervisor = hypervisor;
    let mut hot = endless("hot", "private");
    hot.program.as_mut().unwrap().regions[0].size = Bytes::from_mib(8);
    let mut releasing = endless("releasing", "private");
    releasing
        .program
        .as_mut()
        .unwrap()
        .page_releases_per_m_instructions = 100.0;
    scenario.workloads = vec![
        endless("private", "private"),
        endless("initialised-by-one", "initialised-by-one"),
        hot,
        releasing,
    ];
    let mut twin = Twin::new(amd48(), &scenario, 1).unwrap_or_else(|error| panic!("{error}"));
    twin.wait(Ns::from_secs(seconds));
    twin
}

fn commit(twin: &mut Twin, action: Action) -> Outcome {
    let mut plan = Plan::new(twin.sample().unwrap().version);
    plan.decide("test", action, "test".into());
    twin.commit(&plan).expect("a possible plan").outcomes.remove(0)
}

fn set(twin: &mut Twin, policy: MemoryPolicy) -> Outcome {
    let vm = twin.vm_id("a").unwrap();
    commit(twin, Act::SetMemoryPolicy { policy }.on(vm))
}

fn pages(twin: &mut Twin) -> Vec<u64> {
    let sample = twin.sample().unwrap();
    let pages = sample.vms[0].pages.as_ref().expect("the twin knows");
    pages.values().map(|pages| pages.0).collect()
}

fn uses(twin: &mut Twin) -> Vec<PageUse> {
    twin.sample().unwrap().vms[0]
        .page_uses
        .clone()
        .expect("it is sampled")
}

fn samples(uses: &[PageUse]) -> u64 {
    uses.iter()
        .map(|used| used.pages.0 * used.samples.values().map(|n| u64::from(*n)).sum::<u64>())
        .sum()
}

fn assert_conserved(twin: &mut Twin) {
    let sample = twin.sample().unwrap();
    for (id, node) in sample.nodes.iter() {
        let held = sample.vms.iter().filter_map(|vm| vm.pages.as_ref()?.get(id));
        let all = held.map(|pages| pages.0).sum::<u64>() * 4096 + node.memory_free_bytes.0;
        assert_eq!(all, node.memory_total_bytes.0, "node {id}");
    }
}

#[test]
fn a_page_of_one_thread_shows_one_node_and_a_page_of_all_shows_many() {
    let carrefour = Placing::FirstTouch.with_carrefour();
    let mut twin = run(Hypervisor::Xen, spec("private", carrefour), 3);
    uses(&mut twin);
    twin.wait(Ns::from_secs(1));
    let seen = uses(&mut twin);
    assert!(!seen.is_empty());
    for used in &seen {
        assert_eq!(used.samples.len(), 1, "{used:?}");
        assert!(
            used.samples.get(used.on).is_some(),
            "first touch is local: {used:?}"
        );
    }
    // Of the samples, 0.3 are writes.
    let writes: u64 = seen
        .iter()
        .map(|used| used.pages.0 * u64::from(used.writes))
        .sum();
    assert!((writes as f64 / samples(&seen) as f64 - 0.3).abs() < 0.03);

    let mut shared = endless("shared", "initialised-by-one");
    // A sixteenth of a MiB is 16 pages, each of which gets many samples from all threads.
    shared.program.as_mut().unwrap().regions[0].size = Bytes(1 << 16);
    let mut scenario = Scenario::of("shared", vec![spec("shared", carrefour)]);
    scenario.workloads = vec![shared];
    let mut twin = Twin::new(amd48(), &scenario, 1).unwrap();
    twin.wait(Ns::from_secs(3));
    for used in uses(&mut twin) {
        assert!(used.samples.len() > 4, "{used:?}");
    }
}

#[test]
fn samples_come_at_the_stated_rate_and_are_told_once() {
    let mut twin = run(
        Hypervisor::Xen,
        spec("private", Placing::Round4k.with_carrefour()),
        3,
    );
    uses(&mut twin);
    let before = twin.sample().unwrap().vms[0].clone();
    twin.wait(Ns::from_secs(1));
    let after = twin.sample().unwrap().vms[0].clone();
    let grown = |what: fn(&homenode_host::Counters) -> u64| -> f64 {
        let sum = |vm: &homenode_host::VmSample| {
            vm.vcpus
                .iter()
                .map(|vcpu| what(&vcpu.counters.unwrap()))
                .sum::<u64>()
        };
        (sum(&after) - sum(&before)) as f64
    };
    // No pages were moved, so every 0x3FFE0th cycle is sampled; 30 of 1000 instructions miss.
    let expected = grown(|c| c.cycles) / f64::from(0x3_FFE0) * grown(|c| c.llc_misses.unwrap())
        / grown(|c| c.instructions);
    let got = samples(after.page_uses.as_ref().unwrap()) as f64;
    assert!(
        (got - expected).abs() < 5.0 * expected.sqrt(),
        "{got} samples, {expected} expected"
    );
    // Hardly any of 524 288 pages is hit twice, and a policy can act only on sampled pages.
    let pages: u64 = after.page_uses.unwrap().iter().map(|used| used.pages.0).sum();
    assert!(pages as f64 > 0.99 * got && pages as f64 <= got);
    assert_eq!(samples(&uses(&mut twin)), 0, "no time has passed");
}

#[test]
fn sampling_costs_a_guest_time_and_looking_changes_nothing() {
    let instructions = |policy, looks: u64| {
        let mut twin = run(Hypervisor::Xen, spec("private", policy), 2);
        let before = twin.report().vms[0].instructions_g;
        for _ in 0..looks {
            twin.wait(Ns(2_000_000_000 / looks));
            twin.sample().unwrap();
        }
        twin.report().vms[0].instructions_g - before
    };
    let free = instructions(Placing::FirstTouch.alone(), 1);
    let sampled = instructions(Placing::FirstTouch.with_carrefour(), 1);
    // No pages move, so sampling takes 2000 of every 0x3FFE0 cycles.
    assert!(
        (sampled / free - (1.0 - 2000.0 / f64::from(0x3_FFE0))).abs() < 2e-3,
        "{}",
        sampled / free
    );
    assert_eq!(instructions(Placing::FirstTouch.with_carrefour(), 20), sampled);
}

#[test]
fn the_pages_that_are_named_move_and_no_others() {
    let mut twin = run(
        Hypervisor::Xen,
        spec("private", Placing::Round4k.with_carrefour()),
        3,
    );
    let vm = twin.vm_id("a").unwrap();
    twin.wait(Ns::from_secs(1));
    let seen = uses(&mut twin);
    let before = pages(&mut twin);
    let remote = seen.iter().filter(|used| used.samples.get(used.on).is_none());
    let moves: Vec<FrameMove> = remote
        .map(|used| FrameMove {
            frame: used.frame,
            pages: used.pages,
            from: used.on,
            to: used.samples.keys().next().unwrap(),
        })
        .collect();
    let wanted: Pages = moves.iter().map(|step| step.pages).sum();
    let mut expected = before.clone();
    for step in &moves {
        expected[usize::from(step.from.0)] -= step.pages.0;
        expected[usize::from(step.to.0)] += step.pages.0;
    }
    let at = twin.now();
    let done = commit(&mut twin, Act::MoveFrames { moves }.on(vm));
    assert_eq!(
        done,
        Outcome::Moved {
            moved: wanted,
            left: Pages::ZERO,
            busy: Pages::ZERO
        }
    );
    assert_eq!(pages(&mut twin), expected);
    assert_eq!(twin.report().vms[0].host_pages_moved, wanted.0);
    let each = (twin.now().0 - at.0) / wanted.0;
    assert!((3_000..30_000).contains(&each), "{each} ns for a page");
    assert_conserved(&mut twin);
}

#[test]
fn pages_that_are_not_there_or_find_no_room_stay() {
    let mut twin = run(Hypervisor::Xen, spec("private", Placing::FirstTouch.alone()), 3);
    let vm = twin.vm_id("a").unwrap();
    let before = pages(&mut twin);
    let step = |frame, pages, from, to| FrameMove {
        frame,
        pages: Pages(pages),
        from: NodeId(from),
        to: NodeId(to),
    };
    // Two frames that the guest does not have.
    let moves = vec![step(u64::MAX, 10, 0, 1), step(1 << 40, 10, 0, 1)];
    let done = commit(&mut twin, Act::MoveFrames { moves }.on(vm));
    assert_eq!(
        done,
        Outcome::Moved {
            moved: Pages::ZERO,
            left: Pages(20),
            busy: Pages::ZERO
        }
    );
    assert_eq!(pages(&mut twin), before);
    // More pages than the class has there.
    let moves = vec![step(0, 1 << 40, 0, 1), step(0, 5, 1, 2)];
    let Outcome::Moved { moved, left, .. } = commit(&mut twin, Act::MoveFrames { moves }.on(vm)) else {
        panic!("it moves what there is");
    };
    assert_eq!(moved + left, Pages((1 << 40) + 5));
    assert_eq!(pages(&mut twin).iter().sum::<u64>(), before.iter().sum::<u64>());
    assert_conserved(&mut twin);
}

#[test]
fn a_switch_to_first_touch_places_what_is_touched_later() {
    let program = Bytes::from_mib(8 * MIB).to_pages().0;
    for (switched, local) in [(false, 1.0 / 8.0), (true, 1.0)] {
        let mut twin = run(Hypervisor::Xen, spec("private", Placing::Round4k.alone()), 0);
        twin.wait(Ns::from_millis(500));
        if switched {
            assert_eq!(set(&mut twin, Placing::FirstTouch.alone()), Outcome::Done);
            assert!(
                pages(&mut twin).iter().sum::<u64>() < program,
                "what is not touched went back"
            );
            assert_eq!(
                twin.sample().unwrap().vms[0].memory_policy,
                Placing::FirstTouch.alone()
            );
        }
        twin.wait(Ns::from_secs(3));
        twin.mark();
        twin.wait(Ns::from_secs(1));
        let ratio = twin.report().vms[0].local_access_ratio.unwrap();
        assert!((ratio - local).abs() < 1e-3, "{ratio}");
        assert_conserved(&mut twin);
    }
}

#[test]
fn a_switch_to_round_4k_deals_out_what_is_touched_later_and_moves_nothing() {
    let mut twin = run(
        Hypervisor::Kvm,
        spec("initialised-by-one", Placing::FirstTouch.alone()),
        0,
    );
    twin.wait(Ns::from_millis(500));
    let before = pages(&mut twin);
    assert_eq!(set(&mut twin, Placing::Round4k.with_carrefour()), Outcome::Done);
    assert_eq!(pages(&mut twin), before);
    twin.wait(Ns::from_secs(3));
    let dealt: Vec<u64> = pages(&mut twin)
        .iter()
        .zip(&before)
        .map(|(now, then)| now - then)
        .collect();
    let (least, most) = (dealt.iter().min().unwrap(), dealt.iter().max().unwrap());
    // The kernel is still booting at the switch, so all but its first pages are dealt out as well.
    assert!(
        *least > Bytes::from_mib(MIB / 8).to_pages().0 && most - least <= 8,
        "{dealt:?}"
    );
    twin.wait(Ns::from_millis(100));
    assert!(!uses(&mut twin).is_empty());
    assert_eq!(set(&mut twin, Placing::Round4k.alone()), Outcome::Done);
    assert_eq!(twin.sample().unwrap().vms[0].page_uses, None);
    assert_conserved(&mut twin);
}

#[test]
fn a_policy_that_a_vm_cannot_have_is_refused_with_the_reason() {
    let refused = |hypervisor, change: fn(&mut VmSpec), policy| {
        let mut spec = spec("private", Placing::Round4k.alone());
        change(&mut spec);
        let mut twin = run(hypervisor, spec, 1);
        let (before, policy_before) = (pages(&mut twin), twin.sample().unwrap().vms[0].memory_policy);
        let outcome = set(&mut twin, policy);
        let Outcome::Failed(error) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(matches!(error.why, Failure::MemoryPolicy { .. }), "{error:?}");
        assert_eq!(pages(&mut twin), before);
        assert_eq!(twin.sample().unwrap().vms[0].memory_policy, policy_before);
        error.to_string()
    };
    assert_eq!(
        refused(Hypervisor::Xen, |_| {}, Placing::Round1g.alone()),
        "VM a cannot have memory policy round-1g: only VMs that were created with round-1g can use it; use round-4k"
    );
    let passthrough = |spec: &mut VmSpec| spec.passthrough = true;
    refused(Hypervisor::Xen, passthrough, Placing::FirstTouch.alone());
    let virtual_nodes = |spec: &mut VmSpec| {
        spec.vnuma = Vnuma::Static;
        spec.memory_policy = Placing::FirstTouch.alone();
    };
    refused(Hypervisor::Kvm, virtual_nodes, Placing::Round4k.alone());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn pages_add_up_and_a_seed_repeats_whatever_policies_ask(
        steps in prop::collection::vec((0u8..4, 0u64..3_000_000, 0u16..8, 0u16..8, 0u64..100_000), 1..6),
    ) {
        let go = || {
            let mut twin = run(Hypervisor::Xen, spec("private", Placing::Round4k.with_carrefour()), 0);
            let vm = twin.vm_id("a").unwrap();
            twin.wait(Ns::from_millis(100));
            for (what, frame, from, to, pages) in &steps {
                match what {
                    0 => drop(set(&mut twin, Placing::FirstTouch.with_carrefour())),
                    1 => drop(set(&mut twin, Placing::Round4k.alone())),
                    _ if from != to => {
                        let (from, to) = (NodeId(*from), NodeId(*to));
                        let moves = vec![FrameMove { frame: *frame, pages: Pages(*pages), from, to }];
                        commit(&mut twin, Act::MoveFrames { moves }.on(vm));
                    }
                    _ => {}
                }
                twin.wait(Ns::from_millis(400));
                assert_conserved(&mut twin);
            }
            (serde_json::to_string(&twin.sample().unwrap()).unwrap(), serde_json::to_string(&twin.report()).unwrap())
        };
        prop_assert_eq!(go(), go());
    }
}

#[test]
fn the_hosts_autonuma_brings_pages_to_a_blind_guests_threads_until_it_is_switched_off() {
    let autonuma = MemoryPolicy {
        placing: Placing::Round4k,
        migration: Migration::AutoNuma,
    };
    let mut twin = run(Hypervisor::Kvm, spec("private", autonuma), 3);
    assert!(twin.report().vms[0].local_access_ratio.unwrap() < 0.2);
    twin.wait(Ns::from_secs(20));
    twin.mark();
    twin.wait(Ns::from_secs(1));
    let report = twin.report();
    let local = report.vms[0].local_access_ratio.unwrap();
    assert!(local > 0.95, "{local} local after 20 s");
    assert_eq!(report.vms[0].guest_pages_moved, 0);
    assert_conserved(&mut twin);

    let mut off = run(Hypervisor::Kvm, spec("private", autonuma), 4);
    assert_eq!(set(&mut off, Placing::Round4k.alone()), Outcome::Done);
    let moved = off.report().vms[0].host_pages_moved;
    assert!(moved > 0);
    off.wait(Ns::from_secs(3));
    assert_eq!(off.report().vms[0].host_pages_moved, moved);
}

/// Returns the report of a VM under Carrefour over the second that follows `seconds`.
fn under_carrefour(kind: &str, policy: MemoryPolicy, seconds: u64) -> VmReport {
    let mut twin = run(Hypervisor::Xen, spec(kind, policy), 3);
    let machine = amd48();
    let mut state = carrefour::State::default();
    let mut before = twin.sample().unwrap();
    for _ in 0..seconds {
        twin.mark();
        twin.wait(Ns::from_secs(1));
        let now = twin.sample().unwrap();
        let rates = Rates::between(&machine, &before, &now);
        let vm = VmView {
            sample: &now.vms[0],
            rates: rates.as_ref().and_then(|rates| rates.vm(now.vms[0].id)),
            home: None,
            layout: None,
            hands_off: None,
            quota_hands_off: None,
        };
        let view = View::new(&machine, &now, rates.as_ref(), Barred::default(), vec![vm]);
        let plan = carrefour::plan(&view, &carrefour::Config::default(), &mut state);
        twin.commit(&plan).expect("a possible plan");
        before = now;
    }
    assert_conserved(&mut twin);
    twin.report().vms.remove(0)
}

#[test]
fn carrefour_evens_out_what_one_thread_initialised_as_fast_as_pages_are_sampled() {
    // 256 MiB are on one node at first: 65 536 pages, of which thousands are sampled in a second.
    let policy = Placing::FirstTouch.with_carrefour();
    let (soon, late) = (
        under_carrefour("initialised-by-one", policy, 2),
        under_carrefour("initialised-by-one", policy, 40),
    );
    let (soon, late) = (soon.imbalance.unwrap(), late.imbalance.unwrap());
    assert!(soon > 1.5, "{soon} after 2 s: it cannot have seen most pages");
    // Carrefour stops where the standard deviation of the samples is 35 percent of the mean.
    assert!(late < 0.4, "{late} after 40 s");
}

#[test]
fn carrefour_brings_private_pages_to_their_threads_where_pages_are_sampled_twice() {
    let policy = Placing::Round4k.with_carrefour();
    let local = |kind, seconds| under_carrefour(kind, policy, seconds).local_access_ratio.unwrap();
    // Each thread has 2048 pages and, at the slow rate, some 250 samples, so only a dozen pages have two samples.
    let (soon, late) = (local("hot", 1), local("hot", 40));
    assert!(soon < 0.2, "{soon}");
    assert!(late > 0.7, "{late}");
    // Hardly any of 65 536 pages is sampled twice in a second, and nothing else shows to which node a page belongs.
    let big = local("private", 40);
    assert!(big < 0.13, "{big}");
}

/// What Carrefour does with a sampled page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// The page moves to a node that is drawn at random.
    IsSpread,
    Follows(NodeId),
}

fn fate(used: &PageUse, judgement: &carrefour::Judgement) -> Fate {
    let samples: u32 = used.samples.values().sum();
    let follows = judgement.interleaving || judgement.migration && samples >= 2;
    match (used.samples.len(), used.samples.keys().next()) {
        (2.., _) if judgement.interleaving => Fate::IsSpread,
        (1, Some(user)) if user != used.on && follows => Fate::Follows(user),
        _ => Fate::Stays,
    }
}

/// How alike Carrefour decides if it knows only how often a page was used, as DAMON or accessed bits tell, and assumes that all
/// vCPUs use all pages alike. Figures are shares.
#[derive(Clone, Copy, Debug)]
struct Coarse {
    /// Share of all sampled pages for which the decision differs.
    wrong: f64,
    /// Of the pages that samples with nodes would move, the share that coarse samples move in the same way.
    found: f64,
}

/// Compares decisions by both kinds of samples over a second, in which nothing moves.
fn coarse(spec: VmSpec) -> Coarse {
    let mut twin = run(Hypervisor::Xen, spec, 3);
    let machine = amd48();
    let before = twin.sample().unwrap();
    twin.wait(Ns::from_secs(1));
    let now = twin.sample().unwrap();
    let (rates, vm) = (Rates::between(&machine, &before, &now), &now.vms[0]);
    let seen = VmView {
        sample: vm,
        rates: rates.as_ref().and_then(|rates| rates.vm(vm.id)),
        home: None,
        layout: None,
        hands_off: None,
        quota_hands_off: None,
    };
    let view = View::new(&machine, &now, rates.as_ref(), Barred::default(), vec![seen]);
    let mut state = carrefour::State::default();
    carrefour::plan(&view, &carrefour::Config::default(), &mut state);
    let judgement = *state.judgement(vm.id).expect("it was sampled and counted");
    assert!(judgement.interleaving || judgement.migration, "{judgement:?}");
    let ran_on = |vcpu: &VcpuSample| vcpu.cpu.and_then(|cpu| machine.node_of(cpu));
    let nodes: NodeSet = vm.vcpus.iter().filter_map(ran_on).collect();
    let (mut all, mut wrong, mut moved, mut found) = (0, 0, 0, 0);
    for used in vm.page_uses.as_ref().expect("it is sampled") {
        let samples: u32 = used.samples.values().sum();
        let each = samples.div_ceil(nodes.len() as u32);
        let blind = PageUse {
            samples: nodes.iter().map(|node| (node, each)).collect(),
            ..used.clone()
        };
        let (fine, coarse) = (fate(used, &judgement), fate(&blind, &judgement));
        all += used.pages.0;
        wrong += if fine == coarse { 0 } else { used.pages.0 };
        if fine != Fate::Stays {
            moved += used.pages.0;
            found += if fine == coarse { used.pages.0 } else { 0 };
        }
    }
    Coarse {
        wrong: wrong as f64 / all as f64,
        found: found as f64 / u64::max(moved, 1) as f64,
    }
}

#[test]
#[allow(clippy::print_stderr)] // the figures that docs/SOURCES.md quotes
fn heat_without_nodes_decides_as_samples_do_only_for_a_vm_on_one_node() {
    let (first_touch, round_4k) = (
        Placing::FirstTouch.with_carrefour(),
        Placing::Round4k.with_carrefour(),
    );
    let show = |what: &str, coarse: Coarse| {
        eprintln!(
            "{what}: {:.1} percent of decisions differ, {:.1} percent of moves found",
            100.0 * coarse.wrong,
            100.0 * coarse.found
        );
        coarse
    };
    // Eight vCPUs on eight nodes. A page that all use follows its only sample; heat spreads it instead. A page that one vCPU uses
    // follows that vCPU; heat never tells which.
    let scattered = show(
        "one thread initialises",
        coarse(spec("initialised-by-one", first_touch)),
    );
    assert!(scattered.wrong > 0.98 && scattered.found < 0.02, "{scattered:?}");
    let private = show("private, hot", coarse(spec("hot", round_4k)));
    assert!(private.found < 0.01, "{private:?}");
    // Eight vCPUs on node 0, memory everywhere: each page has this node as its only user.
    let mut single = VmSpec::new("a", 8, Bytes::from_gib(8), "hot").on_cpus(cores(&amd48(), 0, 0, 6));
    single.memory_policy = round_4k;
    let single = show("on one node", coarse(single));
    assert!(single.wrong == 0.0 && single.found == 1.0, "{single:?}");
}

/// Runs wrmem on all CPUs of the paper's machine. Its guest notifies the hypervisor in this way. Returns the report of one
/// second.
fn wrmem(calls: ReleaseCalls) -> VmReport {
    let mut spec = VmSpec::new("a", 48, Bytes::from_gib(64), "wrmem");
    spec.release_calls = calls;
    let mut twin = run(Hypervisor::Xen, spec, 20);
    twin.mark();
    twin.wait(Ns::from_secs(1));
    assert_conserved(&mut twin);
    twin.report().vms.remove(0)
}

#[test]
fn a_call_per_released_page_is_dear_and_queues_are_not() {
    let [none, empty, each, batched] = [
        ReleaseCalls::None,
        ReleaseCalls::Empty,
        ReleaseCalls::Each,
        ReleaseCalls::Batched,
    ]
    .map(wrmem);
    let slower = |report: &VmReport| none.instructions_g / report.instructions_g;
    // The guest's list of free pages is locked during a call. So 48 threads get one call each in the time of 48 exits of 1500
    // cycles and 48 hand-overs of the lock. Without calls a thread releases a page every 31 847 instructions.
    let exits_us = 48.0 * 1500.0 / 2200.0;
    let gap_us = 31_847.0 / (none.instructions_g * 1e3 / 48.0);
    let bound = exits_us / gap_us;
    assert!(
        (bound..1.6 * bound).contains(&slower(&empty)),
        "{}, {bound} at least",
        slower(&empty)
    );
    assert!(slower(&each) > slower(&empty), "{}", slower(&each));
    assert!(slower(&batched) < 0.7 * slower(&empty), "{}", slower(&batched));
    assert_eq!(none.releases, None);
    assert_eq!(empty.releases.unwrap().invalidated, 0);
    let queued = batched.releases.unwrap();
    assert!(
        queued.invalidated as f64 > 0.95 * queued.released as f64,
        "{queued:?}"
    );
}

#[test]
fn released_pages_go_to_their_threads_once_first_touch_is_told_of_them() {
    let local = |calls, policy| {
        let mut spec = spec("releasing", Placing::Round4k.alone());
        spec.release_calls = calls;
        let mut twin = run(Hypervisor::Xen, spec, 3);
        assert_eq!(set(&mut twin, policy), Outcome::Done);
        twin.wait(Ns::from_secs(20));
        twin.mark();
        twin.wait(Ns::from_secs(1));
        assert_conserved(&mut twin);
        twin.report().vms[0].local_access_ratio.unwrap()
    };
    // The program releases 100 pages per million instructions, so each of a thread's 65 536 pages is released many times.
    let first_touch = Placing::FirstTouch.alone();
    assert!(local(ReleaseCalls::Batched, first_touch) > 0.9);
    assert!(
        local(ReleaseCalls::None, first_touch) < 0.13,
        "the guest does not say that pages are free"
    );
    assert!(
        local(ReleaseCalls::Batched, Placing::Round4k.with_carrefour()) < 0.13,
        "round-4k does not listen"
    );
}

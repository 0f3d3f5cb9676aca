use homenode_host::{Action, CpuQuota, Limit};
use homenode_units::{Bytes, NodeId, Permit};

use super::*;
use crate::testing::{Scene, vm_id};

const VICTIM: u128 = 1;
const HOMED: u128 = 2;
const STRAY: u128 = 3;

/// A host of two nodes of four CPUs, each with a cache. The victim, a VM with a home and one without run on node 0, and all of
/// them miss much.
struct Host {
    scene: Scene,
    config: Config,
    state: State,
    ledger: Ledger,
    periods: u64,
    may_act: bool,
    has_trials: bool,
}

impl Host {
    fn new(nodes: u16) -> Host {
        let mut scene = Scene::nodes(nodes, 4);
        let home = scene.machine.cpus_of(&homenode_units::NodeSet::one(NodeId(0)));
        for (cpu, n) in [VICTIM, HOMED, STRAY].into_iter().enumerate() {
            let vm = scene.add_vm(n, 1, Bytes::from_gib(1), 0);
            vm.vcpus_busy(1.0)
                .misses_per_s(5_000_000)
                .instructions_per_s(1_000_000_000);
            vm.vcpu(0).cpu = cpu as u32;
            if n != STRAY {
                vm.home(0).affinity(&home);
            }
        }
        scene.vm(VICTIM).settings().permit = Some(Permit::pollution(100_000).expect("a permit"));
        Host {
            scene,
            config: Config::default(),
            state: State::default(),
            ledger: Ledger::default(),
            periods: 0,
            may_act: true,
            has_trials: false,
        }
    }

    fn affinity(&mut self, n: u128) -> String {
        self.scene.vm(n).vcpu(0).affinity.to_string()
    }

    /// Runs a period and carries out what is decided.
    fn step(&mut self) -> Plan {
        self.periods += 1;
        let Host {
            scene,
            config,
            state,
            ledger,
            periods,
            may_act,
            has_trials,
        } = self;
        let plan = scene.with_view_after(*periods, |view| {
            let mut view = view.clone();
            for vm in &mut view.vms {
                let isolating = state.involves(vm.sample.id).then_some(HandsOff::Isolating);
                vm.hands_off = vm.hands_off.or(isolating);
            }
            let situation = Situation {
                ledger,
                has_trials: *has_trials,
                may_act: *may_act,
            };
            plan(&view, config, situation, state)
        });
        let all = scene.machine.cpu_set();
        for Action { vm, act } in plan.decisions.iter().map(|decision| &decision.action) {
            match act {
                Act::PinVcpus { cpus, vcpus } => {
                    for index in vcpus {
                        let vcpu = scene.vm(vm.0).vcpu(usize::from(*index));
                        let at = (vm.0 as usize - 1 + usize::from(*index)) % cpus.len();
                        vcpu.affinity = cpus.clone();
                        vcpu.cpu = cpus.iter().nth(at).expect("a CPU").0;
                    }
                }
                Act::Lift { lever: Lever::Home } => {
                    let vcpu = scene.vm(vm.0).vcpu(0);
                    vcpu.affinity = all.clone();
                    vcpu.cpu = vm.0 as u32 - 1;
                }
                other => panic!("{other:?}"),
            }
        }
        plan
    }

    fn steps(&mut self, count: usize) -> Vec<Plan> {
        (0..count).map(|_| self.step()).collect()
    }

    fn charge(&self) -> Charge {
        self.state.charge(vm_id(VICTIM)).expect("it has a permit")
    }
}

#[test]
fn neighbours_leave_and_come_back_to_where_they_were() {
    let mut host = Host::new(2);
    let plans = host.steps(3);
    assert!(
        plans[..2].iter().all(|plan| plan.decisions.is_empty()),
        "others must know first"
    );
    assert_eq!(plans[2].decisions.len(), 2);
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["4-7", "4-7"]);
    assert_eq!(host.affinity(VICTIM), "0-3");
    assert!(host.state.is_open());
    assert_eq!(host.charge().part, None, "nothing is charged before it is known");
    host.step();
    assert_eq!(
        host.charge().basis,
        Basis::Awaited,
        "it may still miss what they evicted"
    );
    let back = host.step();
    assert_eq!(host.charge().basis, Basis::Isolated);
    let kinds: Vec<&str> = back.decisions.iter().map(|of| of.action.act.kind()).collect();
    assert_eq!(kinds, ["pin-vcpus", "lift"], "{back:?}");
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["0-3", "0-7"]);
    assert!(host.steps(5).iter().all(|plan| plan.decisions.is_empty()));
    assert!(!host.state.is_open() && !host.state.involves(vm_id(STRAY)));
    assert!(
        matches!(host.charge().basis, Basis::Window { .. }),
        "{:?}",
        host.charge()
    );
    assert_eq!(host.state.away(vm_id(HOMED)), Ns::from_secs(3));
}

#[test]
fn who_may_not_leave_leaves_the_plain_count_and_the_reason() {
    type Change<'a> = &'a dyn Fn(&mut Host);
    let cases: [(u16, Change<'_>, &str); 7] = [
        (1, &|_| {}, "no other last-level cache"),
        (
            2,
            &|host| {
                host.scene.vm(STRAY).hands_off(HandsOff::PinnedByHand);
            },
            "VM vm3 cannot leave its cache: the operator pinned",
        ),
        (
            2,
            &|host| host.scene.vm(HOMED).settings().mode = Some(Mode::Recommend),
            "VM vm2 cannot leave its cache: mode recommend",
        ),
        (
            2,
            &|host| {
                host.scene.vm(HOMED).allowed("0-3");
            },
            "VM vm2 cannot leave its cache: it may use no other CPU",
        ),
        (2, &|host| host.scene.host_busy[4..].fill(0.9), "no time left"),
        (2, &|host| host.may_act = false, "no VM is sent away while"),
        (
            2,
            &|host| host.scene.drained = homenode_units::NodeSet::one(NodeId(1)),
            "no other last-level cache",
        ),
    ];
    for (nodes, change, expected) in cases {
        let mut host = Host::new(nodes);
        change(&mut host);
        let plans = host.steps(10);
        assert!(plans.iter().all(|plan| plan.decisions.is_empty()), "{expected}");
        let said: Vec<&str> = plans
            .iter()
            .flat_map(|plan| &plan.findings)
            .map(|finding| finding.message.as_str())
            .collect();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains(expected), "{said:?}");
        assert_eq!(host.charge().part, Some(1.0));
    }
}

#[test]
fn nobody_is_away_for_more_than_its_share() {
    for away_share in [0.02, 0.12] {
        let mut host = Host::new(2);
        host.config.away_share = away_share;
        // Every VM has a permit, so each of them wants windows.
        for n in [HOMED, STRAY] {
            host.scene.vm(n).settings().permit = Some(Permit::pollution(100_000).expect("a permit"));
        }
        let mut away = [0; 3];
        for _ in 0..3600 {
            host.step();
            for (at, n) in [VICTIM, HOMED, STRAY].into_iter().enumerate() {
                away[at] += u32::from(host.affinity(n) == "4-7");
            }
        }
        // A window is at most three periods, and the last rest may not be over.
        let most = (away_share * 3600.0) as u32 + 3;
        assert!(
            away.iter().all(|away| (3..=most).contains(away)),
            "{away:?} of {most}"
        );
    }
}

#[test]
fn a_change_of_cpus_ends_the_window() {
    let mut host = Host::new(2);
    host.steps(3);
    assert_eq!(host.affinity(STRAY), "4-7");
    host.scene.drained = homenode_units::NodeSet::one(NodeId(1));
    host.step();
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["0-3", "0-7"]);
    // The kernel takes a CPU that goes offline out of affinities.
    let mut host = Host::new(2);
    host.steps(3);
    host.scene.offline = CpuSet::one(CpuId(4));
    let left: CpuSet = "5-7".parse().expect("CPUs");
    host.scene.vm(HOMED).affinity(&left);
    host.step();
    assert_eq!(host.affinity(HOMED), "0-3");
    // A pause ends the window too.
    let mut host = Host::new(2);
    host.steps(3);
    host.may_act = false;
    host.step();
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["0-3", "0-7"]);
    assert!(host.steps(5).iter().all(|plan| plan.decisions.is_empty()));
}

#[test]
fn who_is_missing_from_a_sample_returns_all_the_same() {
    for periods in [1, 6, 90] {
        let mut host = Host::new(2);
        host.steps(3);
        let missing = host.scene.vms.remove(1);
        host.steps(periods);
        assert!(periods == 1 || !host.state.is_open());
        host.scene.vms.insert(1, missing);
        assert_eq!(host.affinity(HOMED), "4-7");
        host.steps(3);
        assert_eq!(host.affinity(HOMED), "0-3", "after {periods}");
        assert!(host.state.away(vm_id(HOMED)) > Ns::ZERO && host.state.leftovers.is_empty());
    }
    // A VM with a permit that is missing from a sample is remembered as well.
    let mut host = Host::new(2);
    host.steps(8);
    let missing = host.scene.vms.remove(0);
    host.steps(2);
    host.scene.vms.insert(0, missing);
    host.step();
    assert!(matches!(host.charge().basis, Basis::Window { .. }));
}

#[test]
fn vcpus_that_the_operator_did_not_pin_return() {
    const WIDE: u128 = 4;
    let mut host = Host::new(2);
    let vm = host.scene.add_vm(WIDE, 2, Bytes::from_gib(1), 0);
    vm.vcpus_busy(1.0)
        .misses_per_s(5_000_000)
        .instructions_per_s(1_000_000);
    host.steps(3);
    assert_eq!(host.affinity(WIDE), "4-7");
    let vm = host.scene.vm(WIDE).hands_off(HandsOff::PinnedByHand);
    vm.vcpu(0).affinity = CpuSet::one(CpuId(5));
    host.step();
    assert_eq!(host.affinity(WIDE), "5");
    assert_eq!(host.scene.vm(WIDE).vcpu(1).affinity.to_string(), "0-7");
    let plans = host.steps(5);
    let mut moved = plans.iter().flat_map(|plan| &plan.decisions);
    assert!(moved.all(|decision| decision.action.vm != vm_id(WIDE)));
}

#[test]
fn a_quota_stays_while_own_misses_are_awaited() {
    let mut host = Host::new(2);
    host.has_trials = true;
    let quota = CpuQuota::of(0.5, Ns::from_millis(30));
    host.scene.vm(VICTIM).quota(quota);
    let config = super::super::plan::Config::default();
    let mut permits = super::super::plan::State::new(&config);
    let mut awaited_count = 0;
    for _ in 0..50 {
        host.step();
        permits.attribution = host.state.clone();
        awaited_count += u32::from(host.state.part(vm_id(VICTIM)).is_none());
        let plan = host.scene.with_view_after(host.periods, |view| {
            super::super::plan::plan(view, &config, &mut permits)
        });
        let acts: Vec<&Act> = plan.decisions.iter().map(|of| &of.action.act).collect();
        let limit = Limit::CpuQuota(quota);
        assert!(
            matches!(acts[..], [Act::Limit { limit: held, .. }] if *held == limit),
            "{acts:?}"
        );
    }
    assert!(awaited_count > 40, "{awaited_count}");
}

#[test]
fn who_may_not_leave_when_it_joins_ends_the_window() {
    let mut host = Host::new(2);
    let vm = host.scene.add_vm(4, 1, Bytes::from_gib(1), 0);
    vm.vcpus_busy(0.5)
        .misses_per_s(100)
        .hands_off(HandsOff::PinnedByHand);
    host.steps(3);
    assert_eq!(host.affinity(STRAY), "4-7");
    host.scene.vm(4).misses_per_s(5_000_000);
    host.step();
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["0-3", "0-7"]);
    let why = Obstacle::HandsOff(vm_id(4), HandsOff::PinnedByHand);
    assert_eq!(host.charge().basis, Basis::Counted(why));
}

#[test]
fn what_an_earlier_agent_left_away_is_brought_back() {
    let mut host = Host::new(2);
    host.config.charged = Charged::Counted;
    let away: CpuSet = "4-7".parse().expect("CPUs");
    for n in [HOMED, STRAY] {
        host.scene.vm(n).affinity(&away);
        host.state.adopted(vm_id(n));
    }
    let plan = host.step();
    assert_eq!(plan.decisions.len(), 2, "{plan:?}");
    assert_eq!([HOMED, STRAY].map(|n| host.affinity(n)), ["0-3", "0-7"]);
    assert_eq!(host.step().decisions, []);
    // The VM's home has several caches, and an earlier agent kept the VM on one of them. A pin to one CPU is another program's.
    for (affinity, then) in [("4-7", "0-7"), ("5", "5")] {
        let left: CpuSet = affinity.parse().expect("CPUs");
        host.scene.vm(HOMED).homes("0-1").affinity(&left);
        host.state.adopted(vm_id(HOMED));
        // The return is ordered again until the VM is back, up to ten times.
        for _ in 0..3 {
            host.step();
            assert_eq!(host.affinity(HOMED), then);
            if then != "5" {
                host.scene.vm(HOMED).affinity(&left);
            }
        }
    }
    host.scene.vm(HOMED).homes("0-1").affinity(&away);
    host.state.adopted(vm_id(HOMED));
    let mut ordered = 0;
    for _ in 0..20 {
        ordered += host.step().decisions.len();
        host.scene.vm(HOMED).affinity(&away);
    }
    assert_eq!(ordered, 10);
}

#[test]
fn a_home_on_some_of_its_nodes_caches_is_not_taken_for_a_window() {
    let mut host = Host::new(2);
    host.config.charged = Charged::Counted;
    let cache = |list: &str| list.parse::<CpuSet>().expect("CPUs");
    host.scene
        .vm(HOMED)
        .home_told("0-1", "4-7")
        .affinity(&cache("4-7"));
    host.state.adopted(vm_id(HOMED));
    assert_eq!(host.step().decisions, []);
    // A VM on its home's other cache, or on another node, returns to where its home keeps it.
    for away in ["0-3", "0-7"] {
        host.scene.vm(HOMED).affinity(&cache(away));
        host.state.adopted(vm_id(HOMED));
        host.step();
        let then = if away == "0-3" { "4-7" } else { "0-7" };
        assert_eq!(host.affinity(HOMED), then, "from {away}");
    }
    // If the host does not say that a home is narrower, it is whole, as before.
    host.scene.vm(HOMED).home_told("0-1", "").affinity(&cache("4-7"));
    host.state.adopted(vm_id(HOMED));
    host.step();
    assert_eq!(host.affinity(HOMED), "0-7");
}

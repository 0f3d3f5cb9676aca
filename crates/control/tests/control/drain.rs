//! Nodes that are being drained, and a loop that is paused, on the simulated host.

use homenode_control::recommendations::State;
use homenode_control::{Config, Control, Cycle, Event, Mode, NotDrained, PolicySet, Recommendation};
use homenode_host::{Act, Host as _, Lever, Outcome, Setting};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, NodeId, NodeSet, Ns, Pages, Permit};
use proptest::prelude::*;

const PERIOD: Ns = Ns::from_secs(1);

fn set(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn twin(vms: Vec<VmSpec>) -> Twin {
    let machine = homenode_machine_files::preset("r910").unwrap();
    Twin::new(machine, &Scenario::of("test", vms), 1).unwrap()
}

fn vms(workloads: &[&str]) -> Vec<VmSpec> {
    let vm = |(n, kind): (usize, &&str)| VmSpec::new(&format!("vm{n}"), 4, Bytes::from_gib(2), kind);
    workloads.iter().enumerate().map(vm).collect()
}

fn of(policies: PolicySet) -> Control {
    let config = Config {
        policies,
        ..Config::default()
    };
    Control::new(config, Mode::Act)
}

fn step(control: &mut Control, twin: &mut Twin) -> Cycle {
    twin.wait(PERIOD);
    control.step(twin).unwrap()
}

fn run(control: &mut Control, twin: &mut Twin, cycles: usize) -> Vec<Event> {
    (0..cycles).flat_map(|_| step(control, twin).events).collect()
}

/// Returns how many pages VMs have on a node, and how many of their vCPUs may run there.
fn on(twin: &mut Twin, node: NodeId) -> (Pages, usize) {
    let sample = twin.sample().unwrap();
    let cpus = twin.machine().nodes[node].cpus.clone();
    let vcpus = sample.vms.iter().flat_map(|vm| &vm.vcpus);
    let there = vcpus
        .filter(|vcpu| !vcpu.affinity.intersection(&cpus).is_empty())
        .count();
    let pages = sample
        .vms
        .iter()
        .filter_map(|vm| vm.pages.as_ref()?.get(node))
        .copied()
        .sum();
    (pages, there)
}

#[test]
fn a_node_that_is_drained_is_empty_soon_and_stays_so_whatever_the_policies() {
    for policies in [PolicySet::Tavo, PolicySet::Homenode, PolicySet::FfPin] {
        let mut twin = twin(vms(&["lu.B", "mg.B", "povray", "stream"]));
        let mut control = of(policies);
        run(&mut control, &mut twin, 20);
        let machine = twin.machine().clone();
        control.drain(&machine, set("1")).unwrap();
        let mut said = run(&mut control, &mut twin, 30);
        let moves = policies != PolicySet::FfPin;
        let (pages, vcpus) = on(&mut twin, NodeId(1));
        assert_eq!(vcpus, 0, "{policies:?}: {said:#?}");
        assert!(!moves || pages == Pages::ZERO, "{policies:?}: {pages}");
        let drains = control.drains(&machine);
        assert!(drains.len() == 1 && drains[0].node == NodeId(1));
        // A VM that would start now gets another node.
        let wanted = homenode_control::Request {
            vcpus: 2,
            memory: Bytes::from_gib(1),
            bandwidth: None,
            huge_pages: Vec::new(),
        };
        assert!(
            !control
                .place(&machine, &wanted)
                .unwrap()
                .nodes
                .contains(NodeId(1))
        );
        said = run(&mut control, &mut twin, 60);
        assert_eq!(on(&mut twin, NodeId(1)).1, 0, "{policies:?}: {said:#?}");
    }
}

#[test]
fn homes_that_were_given_for_a_drain_go_with_it() {
    let mut twin = twin(vms(&["povray"]));
    let mut control = of(PolicySet::Homenode);
    run(&mut control, &mut twin, 15);
    let machine = twin.machine().clone();
    let homes = |control: &Control, machine| control.status(machine).vms[0].home.clone();
    assert_eq!(homes(&control, &machine), None, "a VM alone is left unplaced");
    control.drain(&machine, set("0,2")).unwrap();
    run(&mut control, &mut twin, 3);
    let home = homes(&control, &machine).unwrap();
    assert!(home.intersection(&set("0,2")).is_empty(), "{home}");
    control.drain(&machine, NodeSet::new()).unwrap();
    let said = run(&mut control, &mut twin, 3);
    assert_eq!(homes(&control, &machine), None, "{said:#?}");
    let all = twin.machine().cpu_set();
    assert!(
        twin.sample().unwrap().vms[0]
            .vcpus
            .iter()
            .all(|vcpu| vcpu.affinity == all)
    );
}

#[test]
fn homes_that_have_another_reason_outlast_a_drain() {
    let mut specs = vms(&["povray", "povray", "povray"]);
    (specs[0].anti_affinity, specs[1].anti_affinity) = (Some("db".into()), Some("db".into()));
    specs[2].memory_nodes = Some(set("3"));
    let mut twin = twin(specs);
    let mut control = of(PolicySet::Homenode);
    let machine = twin.machine().clone();
    step(&mut control, &mut twin);
    control.drain(&machine, set("2")).unwrap();
    run(&mut control, &mut twin, 10);
    let homes = |control: &Control| {
        let vms = control.status(&machine).vms.into_iter();
        vms.map(|vm| vm.home).collect::<Vec<_>>()
    };
    let before = homes(&control);
    assert!(before.iter().all(Option::is_some), "{before:?}");
    control.drain(&machine, NodeSet::new()).unwrap();
    run(&mut control, &mut twin, 10);
    assert_eq!(homes(&control), before);
}

#[test]
fn what_was_approved_waits_for_the_end_of_a_pause() {
    let mut twin = twin(vms(&["povray"]));
    let config = Config {
        policies: PolicySet::Tavo,
        ..Config::default()
    };
    let mut control = Control::new(config, Mode::Recommend);
    run(&mut control, &mut twin, 5);
    control.pause(Ns::from_secs(10));
    let open: Vec<u64> = control.recommendations().iter().map(|one| one.id).collect();
    open.iter().for_each(|id| drop(control.approve(*id).unwrap()));
    assert!(!open.is_empty());
    run(&mut control, &mut twin, 8);
    let machine = twin.machine().clone();
    assert_eq!(control.status(&machine).vms[0].home, None);
    run(&mut control, &mut twin, 5);
    assert!(control.status(&machine).vms[0].home.is_some());
}

fn recommending() -> Control {
    let config = Config {
        policies: PolicySet::Homenode,
        ..Config::default()
    };
    Control::new(config, Mode::Recommend)
}

/// Returns the open recommendations of a policy.
fn open(control: &Control, policy: &str) -> Vec<Recommendation> {
    let all = control.recommendations().into_iter();
    all.filter(|one| one.state == State::Open && one.decision.policy == policy)
        .cloned()
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn what_a_drain_recommends_ends_with_it(
        node in 0..4_u16, before in 0..12_usize, during in 1..12_usize, after in 1..20_usize, is_approved in any::<bool>(),
    ) {
        let mut twin = twin(vms(&["lu.B", "mg.B", "povray", "stream"]));
        let machine = twin.machine().clone();
        let mut control = recommending();
        run(&mut control, &mut twin, before);
        control.drain(&machine, NodeSet::one(NodeId(node))).unwrap();
        run(&mut control, &mut twin, during);
        let caused = open(&control, "placement");
        prop_assert_eq!(caused.len(), 4, "{:#?}", caused);
        let why = format!("because node {node} is drained");
        for one in &caused {
            prop_assert!(one.decision.reason.contains(&why), "{}", one.decision.reason);
        }
        if is_approved {
            control.approve(caused[0].id).unwrap();
        }
        control.drain(&machine, NodeSet::new()).unwrap();
        for _ in 0..after {
            step(&mut control, &mut twin);
            let left = open(&control, "placement");
            prop_assert!(left.is_empty(), "{:#?}", left);
        }
        let homes: Vec<_> = control.status(&machine).vms.into_iter().filter_map(|vm| vm.home).collect();
        prop_assert!(homes.is_empty(), "{:?}", homes);
    }
}

#[test]
fn the_arranger_recommends_homes_again_after_a_drain() {
    let kind = |n: usize| if n.is_multiple_of(2) { "sp.B" } else { "lu.B" };
    let spec = |n: usize| VmSpec::new(&format!("vm{n}"), 4, Bytes::from_gib(4), kind(n)).doing(1000.0);
    let mut twin = twin((0..8).map(spec).collect());
    let machine = twin.machine().clone();
    let mut control = recommending();
    step(&mut control, &mut twin);
    control.drain(&machine, set("1")).unwrap();
    run(&mut control, &mut twin, 5);
    assert!(!open(&control, "placement").is_empty() && open(&control, "arrange").is_empty());
    control.drain(&machine, NodeSet::new()).unwrap();
    let mut cycles = 0;
    while open(&control, "arrange").is_empty() {
        step(&mut control, &mut twin);
        cycles += 1;
        assert!(cycles < 240, "nothing is recommended");
    }
}

#[test]
fn a_vm_that_must_be_approved_to_leave_a_drained_node_says_so_until_it_is() {
    let mut twin = twin(vms(&["mg.B", "mg.B", "mg.B"]));
    let machine = twin.machine().clone();
    let mut control = recommending();
    step(&mut control, &mut twin);
    control.drain(&machine, set("0-2")).unwrap();
    run(&mut control, &mut twin, 2);
    let why = |control: &Control| -> Vec<Option<String>> {
        let drains = control.drains(&machine).into_iter();
        drains.flat_map(|drain| drain.vms).map(|vm| vm.why).collect()
    };
    let said = why(&control);
    assert!(!said.is_empty());
    for why in said {
        assert!(
            why.as_deref()
                .unwrap_or_default()
                .contains("`homenode recommend`"),
            "{why:?}"
        );
    }
    for one in open(&control, "placement") {
        control.approve(one.id).unwrap();
    }
    let said = why(&control);
    assert!(
        said.iter()
            .flatten()
            .all(|why| !why.contains("`homenode recommend`")),
        "{said:?}"
    );
}

#[test]
fn what_cannot_be_drained_is_said_and_what_stays_says_why() {
    let mut specs = vms(&["povray", "povray"]);
    specs[1].memory_nodes = Some(set("1"));
    let mut twin = twin(specs);
    let machine = twin.machine().clone();
    let mut control = of(PolicySet::Default);
    assert!(matches!(
        control.drain(&machine, set("1")),
        Err(NotDrained::Idle(_))
    ));
    let mut control = of(PolicySet::Homenode);
    let missing = control.drain(&machine, set("1,9")).unwrap_err().to_string();
    assert!(missing.contains("no node 9"), "{missing}");
    let none = control.drain(&machine, set("0-3")).unwrap_err().to_string();
    assert!(none.contains("no node would be left"), "{none}");
    control.drain(&machine, set("1")).unwrap();
    run(&mut control, &mut twin, 10);
    let drains = control.drains(&machine);
    let left: Vec<(&str, &str)> = drains[0]
        .vms
        .iter()
        .map(|vm| (vm.name.as_str(), vm.why.as_deref().unwrap()))
        .collect();
    assert!(
        matches!(&left[..], [("vm1", why)] if why.contains("operator set its home to this node")),
        "{left:?}"
    );
}

#[test]
fn a_pause_changes_nothing_but_gives_back_what_is_held_and_ends_by_itself() {
    let mut twin = twin(vms(&["stream", "lu.B", "mg.B", "povray", "stream", "lu.B"]));
    twin.wait(PERIOD);
    let polluter = twin.vm_id("vm0").unwrap();
    twin.set(
        polluter,
        Setting::Permit(Some(Permit::pollution(10_000).unwrap())),
    )
    .unwrap();
    let mut control = of(PolicySet::Tavo);
    run(&mut control, &mut twin, 20);
    let is_held = |twin: &mut Twin| {
        twin.sample().unwrap().vm(polluter).unwrap().vcpus[0]
            .quota
            .is_some()
    };
    assert!(is_held(&mut twin));
    control.pause(Ns::from_secs(30));
    let done = |event: &Event| match event {
        Event::Decided {
            decision,
            result: Outcome::Done,
            ..
        } => Some(decision.action.act.clone()),
        _ => None,
    };
    let lifted = Act::Lift {
        lever: Lever::CpuQuota,
    };
    let first = run(&mut control, &mut twin, 2);
    let acts: Vec<Act> = first.iter().filter_map(done).collect();
    assert!(acts.contains(&lifted), "{acts:?}");
    assert!(!is_held(&mut twin));
    let homes = control
        .status(twin.machine())
        .vms
        .iter()
        .map(|vm| vm.home.clone())
        .collect::<Vec<_>>();
    let later = run(&mut control, &mut twin, 26);
    let acts: Vec<Act> = later.iter().filter_map(done).collect();
    let comes_home = |act: &Act| matches!(act, Act::PinVcpus { .. } | Act::Lift { .. });
    assert!(acts.iter().all(comes_home), "{acts:?}");
    let still = control
        .status(twin.machine())
        .vms
        .iter()
        .map(|vm| vm.home.clone())
        .collect::<Vec<_>>();
    assert_eq!(still, homes);
    assert!(
        control.paused_for().is_some_and(|left| left <= Ns::from_secs(3)),
        "{:?}",
        control.paused_for()
    );
    run(&mut control, &mut twin, 10);
    assert!(control.paused_for().is_none() && is_held(&mut twin));
    // Zero ends a pause at once.
    control.pause(Ns::from_secs(3600));
    control.pause(Ns::ZERO);
    assert_eq!(control.paused_for(), None);
}

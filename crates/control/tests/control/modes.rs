//! On the simulated host: how far decisions go, which decisions wait for the operator, and which need no approval.

use std::collections::BTreeSet;

use homenode_control::recommendations::State;
use homenode_control::{Config, Control, Cycle, Event, Mode, PolicySet, Recommendation, Request};
use homenode_host::{
    Act, Action, Holds, Host, HostError, HugeMemory, HugePages, Lever, Outcome, Plan, Receipt, Refusal,
    Sample, Setting,
};
use homenode_machine::Machine;
use homenode_policy::placement::{Announcement, Asked, Shape};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, NodeId, NodeSet, Ns, Permit, VmId};

const PERIOD: Ns = Ns::from_secs(1);

fn twin(vms: Vec<VmSpec>) -> Twin {
    let machine = homenode_machine_files::preset("r910").unwrap();
    Twin::new(machine, &Scenario::of("test", vms), 1).unwrap()
}

fn vm(name: &str, workload: &str) -> VmSpec {
    VmSpec::new(name, 4, Bytes::from_gib(4), workload)
}

fn of(policies: PolicySet) -> Config {
    Config {
        policies,
        ..Config::default()
    }
}

/// Returns settings with modes of single policies, in the form of an operator's file.
fn with_modes(policies: PolicySet, modes: &str) -> Config {
    Config {
        modes: serde_json::from_str(modes).unwrap(),
        ..of(policies)
    }
}

fn step(control: &mut Control, twin: &mut Twin) -> Cycle {
    twin.wait(PERIOD);
    control.step(twin).unwrap()
}

fn run(control: &mut Control, twin: &mut Twin, cycles: usize) -> Vec<Event> {
    (0..cycles).flat_map(|_| step(control, twin).events).collect()
}

fn open(control: &Control) -> Vec<Recommendation> {
    let all = control.recommendations().into_iter();
    all.filter(|one| one.state == State::Open).cloned().collect()
}

/// A host on which nothing may be changed.
struct Untouchable(Twin);

impl Host for Untouchable {
    fn machine(&self) -> &Machine {
        self.0.machine()
    }

    fn wait(&mut self, period: Ns) -> Ns {
        self.0.wait(period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.0.sample()
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        panic!("this is done to the host: {:#?}", plan.decisions)
    }

    fn set_where(
        &mut self,
        vm: VmId,
        settings: &[Setting],
        holds: Holds<'_>,
    ) -> Result<bool, homenode_host::ActionError> {
        self.0.set_where(vm, settings, holds)
    }
}

/// Returns VMs that policies want to give homes, hold to a permit, take memory from, and give another memory layout.
fn various() -> Twin {
    let mut all = vec![
        vm("polluter", "stream"),
        vm("spread", "mg.B"),
        vm("floor", "povray").with_memory_floor(Bytes::from_mib(256)),
    ];
    all.extend(["a", "b", "c"].map(|name| vm(name, "lu.B")));
    let mut twin = twin(all);
    twin.wait(PERIOD);
    let polluter = twin.vm_id("polluter").unwrap();
    let permit = Permit::pollution(10_000).unwrap();
    twin.set(polluter, Setting::Permit(Some(permit))).unwrap();
    twin
}

#[test]
fn nothing_is_changed_before_it_is_approved() {
    for policies in [PolicySet::Tavo, PolicySet::Homenode, PolicySet::FfPin] {
        let mut config = of(policies);
        config.overcommit.when = homenode_policy::overcommit::When::Always;
        config.working_set.watch = homenode_policy::working_set::Whom::All;
        let mut host = Untouchable(various());
        let mut untouched = host.0.clone();
        let mut control = Control::new(config, Mode::Recommend);
        let mut told: Vec<Event> = Vec::new();
        for _ in 0..60 {
            host.wait(PERIOD);
            untouched.wait(PERIOD);
            told.extend(control.step(&mut host).unwrap().events);
        }
        assert!(!open(&control).is_empty(), "{policies:?}: nothing is recommended");
        assert!(
            !told.iter().any(|event| matches!(event, Event::Decided { .. })),
            "{policies:?}"
        );
        // If the agent died now, it would leave nothing in force.
        drop(control);
        assert_eq!(host.sample(), untouched.sample(), "{policies:?}");
    }
}

#[test]
fn what_is_wanted_in_every_period_is_told_once() {
    let mut twin = various();
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Recommend);
    let told = run(&mut control, &mut twin, 60);
    let subjects: Vec<(VmId, &str, Lever)> = told
        .iter()
        .filter_map(|event| match event {
            Event::Recommended { decision, .. } => {
                let Action { vm, act } = &decision.action;
                Some((*vm, decision.policy, act.lever()))
            }
            _ => None,
        })
        .collect();
    let distinct: BTreeSet<_> = subjects.iter().collect();
    assert!(
        !subjects.is_empty() && distinct.len() == subjects.len(),
        "{told:#?}"
    );
}

#[test]
fn the_most_careful_of_run_policy_and_vm_holds_for_every_pair() {
    let of_vm = Mode::ALL.into_iter().map(Some).chain([None]);
    for own in of_vm {
        for run_mode in Mode::ALL {
            for of_policy in Mode::ALL {
                let mut twin = twin(vec![vm("a", "povray")]);
                twin.wait(PERIOD);
                let id = twin.vm_id("a").unwrap();
                twin.set(id, Setting::Mode(own)).unwrap();
                let modes = format!("{{\"placement\": \"{of_policy}\"}}");
                let mut control = Control::new(with_modes(PolicySet::Tavo, &modes), run_mode);
                let told = run(&mut control, &mut twin, 3);
                let outcome = told.iter().find_map(|event| match event {
                    Event::Decided { decision, result, .. } if decision.policy == "placement" => Some(result),
                    _ => None,
                });
                let found = match outcome {
                    Some(Outcome::Done) => Mode::Act,
                    Some(Outcome::DryRun) => Mode::Observe,
                    None if !open(&control).is_empty() => Mode::Recommend,
                    other => panic!("{other:?}: {told:#?}"),
                };
                let least = run_mode.min(of_policy).min(own.unwrap_or(Mode::Act));
                assert_eq!(found, least, "run {run_mode}, policy {of_policy}, VM {own:?}");
                let is_touched = twin.sample().unwrap().vms[0].vcpus[0].affinity != twin.machine().cpu_set();
                assert_eq!(is_touched, least == Mode::Act);
            }
        }
    }
}

#[test]
fn what_is_approved_is_what_act_would_have_done() {
    let mut twin = twin(vec![vm("a", "cg.B"), vm("b", "mg.B")]);
    twin.wait(PERIOD);
    let machine = twin.machine().clone();
    let sample = twin.sample().unwrap();
    let mut acting = Control::new(of(PolicySet::Tavo), Mode::Act);
    let would: Vec<Action> = acting
        .begin(&machine, sample.clone())
        .decisions()
        .iter()
        .map(|decision| decision.action.clone())
        .collect();
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Recommend);
    let begun = control.begin(&machine, sample);
    let answer = begun.commit(&mut twin);
    control.finish(&machine, begun, answer);
    let waiting = open(&control);
    assert_eq!(waiting.len(), 2, "{waiting:#?}");
    for one in waiting {
        control.approve(one.id).unwrap();
    }
    let told = step(&mut control, &mut twin).events;
    let done: Vec<Action> = told
        .iter()
        .filter_map(|event| match event {
            Event::Decided { decision, result, .. } => {
                assert_eq!(*result, Outcome::Done);
                Some(decision.action.clone())
            }
            _ => None,
        })
        .collect();
    assert_eq!(done, would);
    let states: Vec<State> = control.recommendations().iter().map(|one| one.state).collect();
    assert_eq!(states, [State::Applied, State::Applied]);
}

/// Returns eight VMs that fill four nodes, so the arranger's homes pay.
fn crowded() -> Twin {
    let names = ["sp0", "lu0", "sp1", "lu1", "sp2", "lu2", "sp3", "lu3"];
    let all = names.map(|name| vm(name, if name.starts_with('s') { "sp.B" } else { "lu.B" }).doing(1000.0));
    twin(all.into())
}

#[test]
fn homes_of_the_arranger_are_on_trial_from_their_approval_on_and_memory_follows() {
    let mut twin = crowded();
    let mut control = Control::new(of(PolicySet::Homenode), Mode::Recommend);
    let mut cycles = 0;
    while open(&control).is_empty() {
        step(&mut control, &mut twin);
        cycles += 1;
        assert!(cycles < 120, "nothing is recommended");
    }
    // The arrangement stays recommended, and never counts as a trial that failed.
    run(&mut control, &mut twin, 200);
    assert_eq!(
        (control.trials().running_count(), control.trials().count()),
        (0, 0)
    );
    let waiting: Vec<Recommendation> = open(&control)
        .into_iter()
        .filter(|one| one.decision.policy == "arrange")
        .collect();
    assert!(waiting.len() > 1, "{waiting:#?}");
    for one in &waiting {
        assert!(one.gain.is_some_and(|gain| gain > -0.5 && gain < 5.0), "{one:#?}");
        assert_eq!(one.together.len(), waiting.len() - 1, "{one:#?}");
        control.approve(one.id).unwrap();
    }
    step(&mut control, &mut twin);
    assert_eq!(control.trials().running_count(), waiting.len());
    run(&mut control, &mut twin, 20);
    let status = control.status(twin.machine());
    let sample = control.sample().unwrap();
    for one in &waiting {
        let Act::SetHome { nodes } = &one.decision.action.act else {
            panic!("{one:#?}")
        };
        let id = one.decision.action.vm;
        let home = status.vms.iter().find(|vm| vm.id == id).unwrap().home.clone();
        if home.as_ref() == Some(nodes) {
            let away = sample.vm(id).unwrap().pages_outside(nodes).unwrap();
            assert!(
                away.0 < 4096,
                "{away:?} pages of {} are away from its home",
                one.name
            );
        }
    }
    assert!(control.trials().count() > 0, "they are judged as any others");
}

#[test]
fn what_is_rejected_is_not_asked_again() {
    let mut twin = twin(vec![vm("a", "povray")]);
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Recommend);
    run(&mut control, &mut twin, 3);
    let one = open(&control).remove(0);
    control.reject(one.id).unwrap();
    let told = run(&mut control, &mut twin, 400);
    let said: Vec<&Event> = told
        .iter()
        .filter(|event| matches!(event, Event::Recommended { .. } | Event::Rejected { .. }))
        .collect();
    assert!(matches!(said[..], [Event::Rejected { .. }]), "{said:#?}");
    assert!(control.approve(one.id).is_err() && control.reject(one.id).is_err());
    assert!(control.approve(one.id + 1).is_err());
}

fn quota(twin: &mut Twin, vm: VmId) -> bool {
    let sample = twin.sample().unwrap();
    sample
        .vm(vm)
        .unwrap()
        .vcpus
        .iter()
        .any(|vcpu| vcpu.quota.is_some())
}

#[test]
fn a_vm_put_to_recommend_is_not_left_throttled() {
    for careful in [Mode::Recommend, Mode::Observe] {
        let mut twin = various();
        let id = twin.vm_id("polluter").unwrap();
        let mut control = Control::new(of(PolicySet::Homenode), Mode::Act);
        let mut cycles = 0;
        while !quota(&mut twin, id) {
            step(&mut control, &mut twin);
            cycles += 1;
            assert!(cycles < 60, "it is never held to its permit");
        }
        twin.set(id, Setting::Mode(Some(careful))).unwrap();
        let told = step(&mut control, &mut twin).events;
        assert!(!quota(&mut twin, id), "{careful}: {told:#?}");
        run(&mut control, &mut twin, 20);
        assert!(!quota(&mut twin, id), "{careful}");
        let waiting: Vec<_> = open(&control)
            .into_iter()
            .filter(|one| one.decision.policy == "permits")
            .collect();
        if careful == Mode::Observe {
            assert!(waiting.is_empty(), "{waiting:#?}");
            continue;
        }
        // After approval the VM is held again, by leases that are renewed, until the approval ends; then it is released at once.
        control.approve(waiting[0].id).unwrap();
        run(&mut control, &mut twin, 30);
        assert!(quota(&mut twin, id));
        run(&mut control, &mut twin, 3600);
        let state = control
            .recommendations()
            .iter()
            .find(|one| one.id == waiting[0].id)
            .map(|one| one.state);
        assert_eq!((quota(&mut twin, id), state), (false, Some(State::Applied)));
    }
}

#[test]
fn a_recommendation_to_hold_a_vm_ends_with_its_permit() {
    let mut twin = various();
    let id = twin.vm_id("polluter").unwrap();
    let mut control = Control::new(of(PolicySet::Homenode), Mode::Recommend);
    let is_recommended = |control: &Control| {
        let mut open = open(control).into_iter();
        open.any(|one| one.decision.policy == "permits")
    };
    let mut cycles = 0;
    while !is_recommended(&control) {
        step(&mut control, &mut twin);
        cycles += 1;
        assert!(cycles < 60, "it is never recommended to hold it to its permit");
    }
    let note = control.permit_waits(id).unwrap();
    assert!(
        note.contains("mode recommend") && note.contains("`homenode recommend`"),
        "{note}"
    );
    twin.set(id, Setting::Permit(None)).unwrap();
    step(&mut control, &mut twin);
    assert!(!is_recommended(&control));
    // In mode `act` nothing waits.
    let mut acting = Control::new(of(PolicySet::Homenode), Mode::Act);
    step(&mut acting, &mut twin);
    assert_eq!(acting.permit_waits(id), None);
}

#[test]
fn of_a_vm_put_to_observe_everything_is_given_back() {
    let mut twin = various();
    let all = twin.machine().cpu_set();
    let id = twin.vm_id("a").unwrap();
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Act);
    run(&mut control, &mut twin, 10);
    assert!(twin.sample().unwrap().vm(id).unwrap().vcpus[0].affinity != all);
    twin.set(id, Setting::Mode(Some(Mode::Observe))).unwrap();
    let told = run(&mut control, &mut twin, 30);
    let sample = twin.sample().unwrap();
    assert!(
        sample
            .vm(id)
            .unwrap()
            .vcpus
            .iter()
            .all(|vcpu| vcpu.affinity == all)
    );
    assert!(
        !told
            .iter()
            .any(|event| matches!(event, Event::ChangedByOther { .. })),
        "{told:#?}"
    );
    let vms = control.status(twin.machine()).vms;
    let seen = vms.iter().find(|vm| vm.id == id).unwrap();
    assert_eq!(
        (&seen.home, seen.mode, seen.mode_chosen),
        (&None, Mode::Observe, Some(Mode::Observe))
    );
    // Under its own mode again, the VM is managed again.
    twin.set(id, Setting::Mode(None)).unwrap();
    run(&mut control, &mut twin, 5);
    assert!(twin.sample().unwrap().vm(id).unwrap().vcpus[0].affinity != all);
}

#[test]
fn a_vm_that_is_observed_for_a_while_is_given_back_and_managed_again_by_itself() {
    let mut twin = various();
    let all = twin.machine().cpu_set();
    let id = twin.vm_id("a").unwrap();
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Act);
    run(&mut control, &mut twin, 10);
    let is_home = |twin: &mut Twin| twin.sample().unwrap().vm(id).unwrap().vcpus[0].affinity != all;
    assert!(is_home(&mut twin));
    control.observe_for(id, Ns::from_secs(20));
    for left in (1..20).rev() {
        run(&mut control, &mut twin, 1);
        assert!(!is_home(&mut twin));
        let vms = control.status(twin.machine()).vms;
        let seen = vms.iter().find(|vm| vm.id == id).unwrap();
        assert_eq!(
            (seen.mode, seen.observed_for_ns),
            (Mode::Observe, Some(Ns::from_secs(left)))
        );
    }
    run(&mut control, &mut twin, 5);
    assert!(is_home(&mut twin));
    let vms = control.status(twin.machine()).vms;
    let seen = vms.iter().find(|vm| vm.id == id).unwrap();
    assert_eq!(
        (seen.mode, seen.mode_chosen, seen.observed_for_ns),
        (Mode::Act, None, None)
    );
    // A span of zero ends the observation.
    control.observe_for(id, Ns::from_secs(20));
    run(&mut control, &mut twin, 2);
    assert!(!is_home(&mut twin));
    control.observe_for(id, Ns::ZERO);
    run(&mut control, &mut twin, 5);
    assert!(is_home(&mut twin));
}

#[test]
fn a_home_stays_and_lent_vcpus_come_home_under_recommend() {
    // Three VMs of four busy vCPUs on node 0, which has eight CPUs; two of them end early.
    let on_0 = |spec: VmSpec| spec.with_memory_on("0".parse().unwrap());
    let specs = vec![
        on_0(vm("long", "povray")),
        on_0(vm("short1", "povray").doing(0.12)),
        on_0(vm("short2", "povray").doing(0.12)),
    ];
    let mut twin = twin(specs);
    let mut control = Control::new(of(PolicySet::Tavo), Mode::Act);
    let away = |twin: &mut Twin, id: VmId| {
        let machine = twin.machine().clone();
        let sample = twin.sample().unwrap();
        let nodes =
            |cpus: &homenode_units::CpuSet| cpus.iter().all(|cpu| machine.node_of(cpu).unwrap().0 != 0);
        sample
            .vm(id)
            .unwrap()
            .vcpus
            .iter()
            .filter(|vcpu| nodes(&vcpu.affinity))
            .count()
    };
    let id = twin.vm_id("long").unwrap();
    let mut lent = 0;
    for _ in 0..15 {
        step(&mut control, &mut twin);
        lent = lent.max(away(&mut twin, id));
        if lent > 0 {
            break;
        }
    }
    assert!(lent > 0, "twelve busy vCPUs on eight CPUs: some are lent");
    twin.set(id, Setting::Mode(Some(Mode::Recommend))).unwrap();
    run(&mut control, &mut twin, 60);
    assert_eq!(away(&mut twin, id), 0);
    let vms = control.status(twin.machine()).vms;
    assert_eq!(
        vms.iter().find(|vm| vm.id == id).unwrap().home,
        Some("0".parse().unwrap())
    );
}

#[test]
fn reservations_are_seen_and_a_dropped_one_is_room_at_once() {
    let mut twin = twin(vec![vm("a", "povray")]);
    let mut control = Control::new(of(PolicySet::Homenode), Mode::Act);
    run(&mut control, &mut twin, 2);
    let machine = twin.machine().clone();
    let wanted = Request {
        vcpus: 4,
        memory: Bytes::from_gib(1),
        bandwidth: None,
        huge_pages: Vec::new(),
    };
    assert!(control.place(&machine, &wanted).is_ok());
    for _ in 0..21 {
        control.reserve(&machine, Shape::new(4, Bytes::from_gib(1)));
    }
    let short = control.place(&machine, &wanted).unwrap_err();
    assert!(short.to_string().contains("CPU"), "{short}");
    let ids: Vec<u64> = control
        .reservations()
        .iter()
        .map(|reservation| reservation.id)
        .collect();
    assert!(
        ids.len() > 3 && ids.windows(2).all(|pair| pair[0] < pair[1]),
        "{ids:?}"
    );
    assert!(!control.drop_reservation(999));
    assert!(control.drop_reservation(ids[0]) && !control.drop_reservation(ids[0]));
    assert!(
        control.place(&machine, &wanted).is_ok(),
        "one place is free again"
    );
    for id in &ids[1..] {
        assert!(control.drop_reservation(*id));
    }
    assert!(control.reservations().is_empty());
    assert!(control.place(&machine, &wanted).is_ok());
}

#[test]
fn the_price_of_a_home_is_that_of_the_named_home_in_every_mode() {
    let mut twin = twin(["a", "b", "c"].map(|name| vm(name, "mg.B")).into());
    twin.wait(PERIOD);
    let sample = twin.sample().unwrap();
    let machine = twin.machine().clone();
    let wanted = Request {
        vcpus: 64,
        memory: Bytes::from_gib(1),
        bandwidth: None,
        huge_pages: Vec::new(),
    };
    let priced = |mode| {
        let mut control = Control::new(of(PolicySet::Homenode), mode);
        control.begin(&machine, sample.clone());
        control.place_crowded(&machine, &wanted).unwrap()
    };
    let (home, price) = priced(Mode::Act);
    assert!(
        price.own < 1.0 && price.neighbours.len() == 3,
        "{home:?} {price:?}"
    );
    for mode in [Mode::Observe, Mode::Recommend] {
        // There the kernel places VMs, but this is the price of placing it on the named nodes.
        assert_eq!(priced(mode), (home.clone(), price.clone()), "{mode}");
    }
}

/// Returns a control that has sampled an idle host of four nodes. Node 1 has 350 free huge pages of 2 MiB, and node 3 has 100.
fn with_huge_pages(machine: &Machine, twin: &mut Twin) -> Control {
    let mut control = Control::new(of(PolicySet::Homenode), Mode::Observe);
    for _ in 0..2 {
        twin.wait(PERIOD);
        let mut sample = twin.sample().unwrap();
        for (node, of) in sample.nodes.iter_mut() {
            let count = [0, 350, 0, 100][usize::from(node.0)];
            of.huge_pages = Some(vec![HugePages {
                page_bytes: Bytes::from_mib(2),
                total_count: count,
                free_count: count,
            }]);
        }
        control.begin(machine, sample);
    }
    control
}

#[test]
fn a_domain_in_huge_pages_that_the_hook_announced_goes_where_the_pool_has_room() {
    let mut twin = twin(vec![vm("later", "povray").arriving(Ns::from_secs(3600))]);
    let machine = twin.machine().clone();
    let mut control = with_huge_pages(&machine, &mut twin);
    let shape = Shape::new(1, Bytes::from_mib(600));
    let huge = |mib| HugeMemory {
        page_bytes: Bytes::from_mib(2),
        memory_bytes: Bytes::from_mib(mib),
    };
    let announcement = |huge_pages| Announcement {
        vm: VmId(7),
        name: "seven".into(),
        shape,
        bandwidth: None,
        home: None,
        device_nodes: NodeSet::new(),
        huge_pages,
    };
    let nodes = |control: &mut Control, asked: Asked| control.reserve(&machine, asked).nodes.to_string();
    assert_eq!(nodes(&mut control, shape.into()), "0");
    // This takes 300 of 350 pages. The number in `-H` gives the size if there is no hook.
    control.announce(announcement(vec![huge(600)]));
    assert_eq!(nodes(&mut control, shape.into()), "1");
    // 50 pages are left on node 1. A VM with 100 of its 600 MiB in huge pages goes to node 3, whose pool has room for 200 MiB.
    let asked = Asked {
        huge_page_bytes: Some(Bytes::from_mib(2)),
        ..shape.into()
    };
    let reserved = control.reserve(&machine, asked);
    let why = reserved
        .unplaceable
        .expect("no pool has 300 pages left")
        .to_string();
    assert!(
        why.contains("node 1 is short of huge pages of 2MiB (50 of a pool of 350 left, 300 needed)"),
        "{why}"
    );
    assert_eq!(reserved.nodes, machine.memory_nodes());
    control.announce(announcement(vec![huge(200)]));
    assert_eq!(
        nodes(&mut control, shape.into()),
        "3",
        "200 MiB in huge pages and 400 in ordinary ones"
    );
    // Dropped reservations are free again, so the request that failed before now gets its node.
    let reserved: Vec<u64> = control
        .reservations()
        .iter()
        .map(|reservation| reservation.id)
        .collect();
    reserved
        .iter()
        .for_each(|id| assert!(control.drop_reservation(*id)));
    assert_eq!(nodes(&mut control, asked), "1");
}

#[test]
fn a_vm_that_is_announced_with_a_device_gets_a_reservation_on_the_devices_node() {
    let mut twin = twin(vec![vm("a", "povray")]);
    let mut control = Control::new(of(PolicySet::Homenode), Mode::Act);
    run(&mut control, &mut twin, 2);
    let machine = twin.machine().clone();
    for node in [3, 1] {
        let shape = Shape::new(2, Bytes::from_gib(1));
        control.announce(Announcement {
            vm: VmId(100 + node),
            name: format!("with-{node}"),
            shape,
            bandwidth: None,
            home: None,
            device_nodes: NodeSet::one(NodeId(node as u16)),
            huge_pages: Vec::new(),
        });
        let reserved = control.reserve(&machine, shape).nodes;
        assert_eq!(reserved.to_string(), node.to_string());
    }
}

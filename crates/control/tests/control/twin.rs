//! The whole loop on the simulated host, as an operator would see it.

use homenode_control::{Config, Control, Cycle, Event, Hour, Mode, PolicySet};
use homenode_host::{Act, CpuQuota, Host, Limit, Outcome, Plan, Setting};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, Permit, VmId};

const PERIOD: Ns = Ns::from_secs(1);

fn twin(vms: Vec<VmSpec>) -> Twin {
    let machine = homenode_machine_files::preset("r910").unwrap();
    Twin::new(machine, &Scenario::of("test", vms), 1).unwrap()
}

fn vm(name: &str, workload: &str) -> VmSpec {
    VmSpec::new(name, 4, Bytes::from_gib(8), workload)
}

/// Returns settings under which VMs get a home when they arrive.
fn placing() -> Config {
    Config {
        policies: PolicySet::Tavo,
        ..Config::default()
    }
}

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn run(control: &mut Control, twin: &mut Twin, cycles: usize) -> Vec<Cycle> {
    (0..cycles)
        .map(|_| {
            twin.wait(PERIOD);
            control.step(twin).unwrap()
        })
        .collect()
}

fn events(cycles: &[Cycle]) -> Vec<&Event> {
    cycles.iter().flat_map(|cycle| &cycle.events).collect()
}

#[test]
fn vms_get_homes_of_their_own_and_their_memory_follows() {
    let mut twin = twin(vec![vm("a", "cg.B"), vm("b", "mg.B"), vm("c", "povray")]);
    let mut control = Control::new(placing(), Mode::Act);
    let cycles = run(&mut control, &mut twin, 12);
    let status = &cycles.last().unwrap().status;
    let homes: std::collections::BTreeSet<_> = status.vms.iter().map(|vm| vm.home.clone().unwrap()).collect();
    assert_eq!(
        homes.len(),
        3,
        "three VMs on four nodes need not share: {homes:?}"
    );
    for vm in &status.vms {
        let home = vm.home.as_ref().unwrap();
        assert!(vm.vcpus_by_node.iter().all(|on| home.contains(on.node)), "{vm:?}");
        let lies = vm.pages_by_node.as_ref().unwrap();
        let all: u64 = lies.iter().map(|on| on.pages.0).sum();
        let at_home = lies.iter().filter(|on| home.contains(on.node));
        let at_home: u64 = at_home.map(|on| on.pages.0).sum();
        assert!(at_home as f64 >= 0.99 * all as f64, "{vm:?}");
    }
}

#[test]
fn an_overloaded_node_lends_vcpus_and_takes_them_back() {
    // The home of three VMs, each with four busy vCPUs, is node 0, which has eight CPUs; two of the VMs end early.
    let mut specs = vec![
        vm("long", "povray"),
        vm("short1", "povray").doing(0.12),
        vm("short2", "povray").doing(0.12),
    ];
    for spec in &mut specs {
        spec.memory = Bytes::from_gib(4);
        spec.memory_nodes = Some(nodes("0"));
    }
    let mut twin = twin(specs);
    let mut control = Control::new(placing(), Mode::Act);
    let cycles = run(&mut control, &mut twin, 60);
    let moves = |word: &str| {
        let said = |event: &&&Event| matches!(event, Event::Decided { decision, .. } if decision.reason.contains(word));
        events(&cycles).iter().filter(said).count()
    };
    assert!(
        moves("moves from node 0") >= 4,
        "twelve busy vCPUs on eight CPUs: four at least are lent"
    );
    assert!(
        moves("returns from node") >= 1,
        "vCPUs come back when home has idle cores"
    );
    assert_eq!(
        cycles.last().unwrap().status.vms[0].home,
        Some(nodes("0")),
        "the operator's home never changes"
    );
}

/// Pins all vCPUs of a VM, as another program would.
fn pin_by_hand(twin: &mut Twin, vm: VmId, cpus: CpuSet) {
    let sample = twin.sample().unwrap();
    let vcpus = sample
        .vm(vm)
        .unwrap()
        .vcpus
        .iter()
        .map(|vcpu| vcpu.index)
        .collect();
    let mut plan = Plan::new(sample.version);
    plan.decide("operator", Act::PinVcpus { vcpus, cpus }.on(vm), "by hand".into());
    assert_eq!(twin.commit(&plan).unwrap().outcomes, [Outcome::Done]);
}

#[test]
fn what_somebody_else_changed_is_reported_and_respected() {
    let mut twin = twin(vec![vm("a", "povray")]);
    let mut control = Control::new(placing(), Mode::Act);
    run(&mut control, &mut twin, 3);
    let id = twin.vm_id("a").unwrap();
    pin_by_hand(&mut twin, id, "30-31".parse().unwrap());
    let after = run(&mut control, &mut twin, 15);
    let changed = |event: &&&Event| matches!(event, Event::ChangedByOther { found, .. } if found.to_string() == "30-31");
    assert_eq!(
        events(&after).iter().filter(changed).count(),
        4,
        "once for each vCPU, not in each cycle"
    );
    let sample = twin.sample().unwrap();
    assert!(
        sample
            .vm(id)
            .unwrap()
            .vcpus
            .iter()
            .all(|vcpu| vcpu.affinity.to_string() == "30-31")
    );
    assert!(after.last().unwrap().status.vms[0].left_alone.is_some());
    // Once the VM is returned to the agent, it is managed again.
    let all = twin.machine().cpu_set();
    pin_by_hand(&mut twin, id, all);
    let after = run(&mut control, &mut twin, 2);
    assert!(
        events(&after)
            .iter()
            .any(|event| matches!(event, Event::GivenBack { .. }))
    );
    assert!(after.last().unwrap().status.vms[0].left_alone.is_none());
}

#[test]
fn a_dry_run_tells_each_decision_once_and_does_nothing() {
    let mut twin = twin(vec![vm("a", "povray"), vm("b", "cg.B")]);
    let untouched = twin.clone();
    let mut control = Control::new(placing(), Mode::Observe);
    let cycles = run(&mut control, &mut twin, 10);
    let mut told: Vec<String> = events(&cycles)
        .iter()
        .filter_map(|event| match event {
            Event::Decided { decision, result, .. } => {
                assert_eq!(*result, Outcome::DryRun);
                Some(format!("{:?}", decision.action))
            }
            _ => None,
        })
        .collect();
    assert!(!told.is_empty());
    let count = told.len();
    told.sort();
    told.dedup();
    assert_eq!(told.len(), count);
    let mut untouched = untouched;
    untouched.wait(Ns(10 * PERIOD.0));
    assert_eq!(
        untouched.sample().unwrap(),
        twin.sample().unwrap(),
        "as if no agent had looked"
    );
}

#[test]
fn the_default_policies_do_nothing_and_first_fit_pins_one_to_one() {
    for policies in [PolicySet::Default, PolicySet::FfPin] {
        let mut twin = twin(vec![vm("a", "povray"), vm("b", "povray")]);
        let mut control = Control::new(
            Config {
                policies,
                ..Config::default()
            },
            Mode::Act,
        );
        run(&mut control, &mut twin, 4);
        let sample = twin.sample().unwrap();
        let affinities = sample
            .vms
            .iter()
            .flat_map(|vm| &vm.vcpus)
            .map(|vcpu| vcpu.affinity.clone());
        let affinities: Vec<CpuSet> = affinities.collect();
        match policies {
            PolicySet::Default => assert!(affinities.iter().all(|cpus| *cpus == twin.machine().cpu_set())),
            _ => {
                let all: CpuSet = affinities.iter().filter_map(CpuSet::first).collect();
                assert!(
                    affinities.iter().all(|cpus| cpus.len() == 1) && all.len() == affinities.len(),
                    "{affinities:?}"
                );
            }
        }
    }
}

#[test]
fn numad_binds_one_vm_at_a_time_and_moves_its_memory_in_one_go() {
    let mut twin = twin(vec![vm("a", "mg.B"), vm("b", "lbm"), vm("c", "povray")]);
    let config = Config {
        policies: PolicySet::Numad,
        ..Config::default()
    };
    let mut control = Control::new(config, Mode::Act);
    let cycles = run(&mut control, &mut twin, 40);
    let mut bound = Vec::new();
    for cycle in &cycles {
        let homes = cycle.events.iter().filter_map(|event| match event {
            Event::Decided { decision, .. } => match &decision.action.act {
                Act::SetHome { nodes } => Some((decision.action.vm, nodes.clone())),
                _ => None,
            },
            _ => None,
        });
        let homes: Vec<(VmId, NodeSet)> = homes.collect();
        assert!(homes.len() <= 1, "{homes:?}");
        bound.extend(homes);
    }
    // povray has too little memory for numad to consider it.
    let bound_vms: Vec<&str> = ["a", "b", "c"]
        .into_iter()
        .filter(|name| bound.iter().any(|(vm, _)| twin.vm_id(name) == Some(*vm)))
        .collect();
    assert_eq!(bound_vms, ["a", "b"]);
    let sample = twin.sample().unwrap();
    for (vm, home) in bound {
        let outside = sample.vm(vm).unwrap().pages_outside(&home).unwrap();
        assert!(
            outside.to_bytes() < Bytes::from_mib(64),
            "{outside} of {vm} outside {home}"
        );
    }
}

fn misses(twin: &mut Twin, vm: VmId) -> u64 {
    let sample = twin.sample().unwrap();
    let counters = sample
        .vm(vm)
        .unwrap()
        .vcpus
        .iter()
        .filter_map(|vcpu| vcpu.counters);
    counters.filter_map(|counters| counters.llc_misses).sum()
}

/// Returns LLC misses per slice over this many cycles.
fn misses_per_slice(control: &mut Control, twin: &mut Twin, vm: VmId, cycles: usize) -> f64 {
    let before = (misses(twin, vm), twin.now());
    run(control, twin, cycles);
    let slices = (twin.now().0 - before.1.0) as f64 / Permit::SLICE.as_f64();
    (misses(twin, vm) - before.0) as f64 / slices
}

fn limits(cycles: &[Cycle]) -> usize {
    let is_limit = |event: &&&Event| match event {
        Event::Decided { decision, .. } => matches!(decision.action.act, Act::Limit { .. }),
        _ => false,
    };
    events(cycles).iter().filter(is_limit).count()
}

#[test]
fn a_polluter_is_held_to_its_permit_and_its_usage_counted_and_a_neighbour_is_not() {
    let mut twin = twin(vec![vm("polluter", "stream"), vm("neighbour", "povray")]);
    let (polluter, neighbour) = (twin.vm_id("polluter").unwrap(), twin.vm_id("neighbour").unwrap());
    let mut control = Control::new(placing(), Mode::Act);
    run(&mut control, &mut twin, 8);
    let free = misses_per_slice(&mut control, &mut twin, polluter, 5);
    let permit = Permit::pollution((free / 4.0) as u64).unwrap();
    for vm in [polluter, neighbour] {
        twin.set(vm, Setting::Permit(Some(permit))).unwrap();
    }
    let settling = run(&mut control, &mut twin, 30);
    assert!(limits(&settling) > 0);
    control.settle_usage(Hour(4));
    let held = misses_per_slice(&mut control, &mut twin, polluter, 40);
    let booked = permit.units_per_slice() as f64;
    assert!(
        (held / booked - 1.0).abs() < 0.1,
        "{held} per slice, booked {booked}, free {free}"
    );
    let status = control.status(twin.machine());
    let of = |name: &str| &status.vms.iter().find(|vm| vm.name == name).unwrap().permit;
    assert!(of("polluter").quota.is_some() && of("polluter").punished_count > 0);
    assert_eq!((of("neighbour").quota, of("neighbour").punished_count), (None, 0));
    control.settle_usage(Hour(5));
    let lines: Vec<_> = control
        .hourly_usage()
        .lines()
        .filter(|line| line.vm == polluter)
        .collect();
    assert_eq!(
        lines.iter().map(|line| line.hour).collect::<Vec<_>>(),
        [Hour(4), Hour(5)]
    );
    assert!((lines[1].used_share().unwrap() - 1.0).abs() < 0.1, "{lines:?}");
    twin.set(polluter, Setting::Permit(None)).unwrap();
    run(&mut control, &mut twin, 2);
    let again = misses_per_slice(&mut control, &mut twin, polluter, 5);
    assert!(again > 0.9 * free, "{again}, {free} before");
}

#[test]
fn a_quota_that_somebody_else_sets_is_theirs_until_the_permit_is_set_anew() {
    let mut twin = twin(vec![vm("a", "stream")]);
    let id = twin.vm_id("a").unwrap();
    let mut control = Control::new(placing(), Mode::Act);
    run(&mut control, &mut twin, 1);
    twin.set(id, Setting::Permit(Some(Permit::pollution(10_000).unwrap())))
        .unwrap();
    let cycles = run(&mut control, &mut twin, 10);
    assert!(limits(&cycles) > 0);
    let mut plan = Plan::new(twin.sample().unwrap().version);
    let theirs = CpuQuota::of(0.9, Ns::from_millis(100));
    let action = Act::Limit {
        limit: Limit::CpuQuota(theirs),
        lease_ns: Ns::from_secs(3600),
    }
    .on(id);
    plan.decide("operator", action, "by hand".into());
    assert_eq!(twin.commit(&plan).unwrap().outcomes, [Outcome::Done]);
    let cycles = run(&mut control, &mut twin, 10);
    let said = events(&cycles)
        .into_iter()
        .filter(|event| matches!(event, Event::QuotaChangedByOther { found, .. } if *found == Some(theirs)));
    assert_eq!(said.count(), 1);
    assert_eq!(limits(&cycles), 0);
    control.was_set(id, Setting::Permit(None));
    assert!(limits(&run(&mut control, &mut twin, 5)) > 0);
}

#[test]
fn a_dry_run_tells_of_a_limit_once() {
    let mut twin = twin(vec![vm("a", "stream")]);
    let id = twin.vm_id("a").unwrap();
    let mut control = Control::new(placing(), Mode::Observe);
    run(&mut control, &mut twin, 1);
    twin.set(id, Setting::Permit(Some(Permit::pollution(10_000).unwrap())))
        .unwrap();
    assert_eq!(limits(&run(&mut control, &mut twin, 20)), 1);
    assert!(
        twin.sample().unwrap().vms[0]
            .vcpus
            .iter()
            .all(|vcpu| vcpu.quota.is_none())
    );
}

#[test]
fn who_asks_learns_how_much_memory_a_vm_uses() {
    let mut watched = vm("asked", "povray");
    watched.kernel_footprint = Some(Bytes::from_mib(80));
    let mut twin = twin(vec![watched, vm("other", "povray")]);
    let (asked, other) = (twin.vm_id("asked").unwrap(), twin.vm_id("other").unwrap());
    let mut control = Control::new(placing(), Mode::Act);
    run(&mut control, &mut twin, 4);
    control.want_working_set(asked, Some(Ns::from_secs(5)), Ns::from_secs(8));
    let cycles = run(&mut control, &mut twin, 12);
    // The VM runs four copies of a program of 7 MiB each, on a kernel of 80 MiB that the simulator does not watch, and has 8 GiB.
    let estimate = control.working_set().estimate(asked).expect("a window is over");
    assert_eq!(
        (estimate.kernel, estimate.size, estimate.hot),
        (Bytes::from_mib(80), Bytes::from_mib(108), Bytes::from_mib(28))
    );
    assert_eq!(estimate.window, Ns::from_secs(5));
    assert!(control.working_set().estimate(other).is_none(), "not asked for");
    let told: Vec<String> = events(&cycles).iter().map(ToString::to_string).collect();
    let watched = [
        "measuring working set on request, every 5s",
        "its working set is no longer requested",
    ];
    for (event, expected) in told.iter().zip(watched) {
        assert_eq!(*event, format!("working-set: VM asked: {expected}"));
    }
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(!control.working_set().is_watched(asked));
}

#[test]
fn a_vms_speed_is_shown_against_its_usual_speed_and_what_changes_of_its_home_gained() {
    // Eight VMs that fill the host, so that homes pay.
    let names = ["sp0", "lu0", "sp1", "lu1", "sp2", "lu2", "sp3", "lu3"];
    let specs = names.map(|name| vm(name, if name.starts_with('s') { "sp.B" } else { "lu.B" }).doing(1000.0));
    for mode in [Mode::Act, Mode::Observe] {
        let mut twin = twin(specs.to_vec());
        let mut control = Control::new(Config::default(), mode);
        let early = run(&mut control, &mut twin, 50);
        let all =
            |cycles: &[Cycle]| -> Vec<_> { cycles.iter().flat_map(|of| of.status.vms.clone()).collect() };
        assert!(all(&early).iter().any(|vm| vm.instructions_per_cpu_s.is_some()));
        assert!(all(&early).iter().all(|vm| vm.speed_ratio.is_none()), "too early");
        let late = run(&mut control, &mut twin, 150);
        let known: Vec<_> = all(&late)
            .into_iter()
            .filter(|vm| vm.speed_ratio.is_some())
            .collect();
        assert!(known.len() > 150, "{}", known.len());
        for vm in &known {
            let (speed, usual) = (
                vm.instructions_per_cpu_s.unwrap(),
                vm.instructions_per_cpu_s_usual.unwrap(),
            );
            assert_eq!(vm.speed_ratio, Some(speed / usual));
        }
        let times = all(&late)
            .into_iter()
            .filter_map(|vm| Some((vm.id, vm.time_gained_ns?, vm.time_lost_ns?)));
        let times: Vec<_> = times.collect();
        assert_eq!(
            times.is_empty(),
            mode == Mode::Observe,
            "a dry run changes no home"
        );
        assert!(
            times
                .iter()
                .all(|(id, ..)| !control.trials().results(*id).is_empty())
        );
        let is_some = |(_, gained, lost): &(VmId, Ns, Ns)| *gained > Ns::ZERO || *lost > Ns::ZERO;
        assert_eq!(times.iter().any(is_some), mode == Mode::Act);
    }
}

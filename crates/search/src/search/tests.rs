use homenode_host::Host as _;
use homenode_machine_files::preset;
use homenode_reproduce::engine::is_over;
use homenode_twin::{Scenario, VmSpec};
use homenode_units::{Bytes, NodeId, NodeSet};

use super::arranger::Arranger;
use super::schedule::Goal;
use super::*;
use crate::contender::Contender;
use crate::score::value;

/// Three VMs on two nodes for some ten seconds: two arrive together, one later.
fn setup() -> Setup {
    let vm =
        |name: &str, workload: &str, share| VmSpec::new(name, 4, Bytes::from_gib(3), workload).doing(share);
    let vms = vec![
        vm("a", "sp.B", 0.1),
        vm("b", "milc", 0.015),
        vm("c", "cg.B", 0.1).arriving(Ns::from_secs(5)),
    ];
    let mut scenario = Scenario::of("three", vms);
    scenario.duration = Ns::from_secs(60);
    Setup::new(preset("r420").unwrap(), scenario, 1)
}

fn base(setup: &Setup) -> Run {
    let base = Contender::DEFAULT.run(setup, &Config::default(), |_, _| Ok(()));
    base.unwrap()
}

fn found(setup: &Setup, starts: &[Schedule], jobs: usize) -> Found {
    let effort = Effort {
        evaluations: 40,
        jobs,
        seed: 3,
    };
    search(
        setup,
        &Config::default(),
        &base(setup),
        starts,
        &effort,
        &Progress::silent(),
    )
    .unwrap()
}

fn home(node: u16) -> Goal {
    Goal::home(NodeSet::one(NodeId(node)))
}

#[test]
fn never_worse_than_the_best_start() {
    let (setup, config) = (setup(), Config::default());
    let base = base(&setup);
    let mut start = Schedule::default();
    start.decide(Ns::ZERO, 0, home(0));
    start.decide(Ns::ZERO, 1, home(1));
    start.decide(Ns::from_secs(6), 1, Goal::default());
    let beginning = Point::beginning(&setup, &config).unwrap();
    let of_start = rollout(&setup, &config, &base, &beginning, &start, None)
        .unwrap()
        .unwrap();
    let found = found(&setup, &[start], 2);
    assert!(found.mean <= of_start.mean, "{} {}", found.mean, of_start.mean);
    assert!(found.mean <= found.static_mean);
    assert_eq!(found.evaluations, 40);
    // Running the reported schedule must give the reported result.
    let again = rollout(&setup, &config, &base, &beginning, &found.schedule, None)
        .unwrap()
        .unwrap();
    assert_eq!((again.mean, &again.run), (found.mean, &found.run));
    assert_eq!(value(&base, &found.run), found.mean);
}

#[test]
fn the_number_of_jobs_changes_nothing() {
    let setup = setup();
    let (one, many) = (found(&setup, &[], 1), found(&setup, &[], 5));
    assert_eq!(
        (&one.schedule, one.mean, one.evaluations),
        (&many.schedule, many.mean, many.evaluations)
    );
    assert_eq!(one.run, many.run);
}

#[test]
fn a_rollout_from_a_point_equals_the_run_from_the_beginning() {
    let (setup, config) = (setup(), Config::default());
    let base = base(&setup);
    let beginning = Point::beginning(&setup, &config).unwrap();
    let mut schedule = Schedule::default();
    schedule.decide(Ns::ZERO, 0, home(0));
    let first = rollout(&setup, &config, &base, &beginning, &schedule, None)
        .unwrap()
        .unwrap();
    assert!(first.points.len() > 2, "{}", first.points.len());
    for point in &first.points {
        let mut changed = schedule.clone();
        changed.decide(point.at(), 0, home(1));
        let rest = rollout(&setup, &config, &base, point, &changed, None)
            .unwrap()
            .unwrap();
        let whole = rollout(&setup, &config, &base, &beginning, &changed, None)
            .unwrap()
            .unwrap();
        assert_eq!(rest.run, whole.run, "from {}", point.at());
    }
}

#[test]
fn page_budgets_hold() {
    let (setup, config) = (setup(), Config::default());
    let mut twin = setup.start().unwrap();
    let places = setup.scenario.vms.iter().enumerate();
    let places = places
        .map(|(at, vm)| (twin.vm_id(&vm.name).unwrap(), at))
        .collect();
    let mut schedule = Schedule::default();
    for second in 3..12 {
        for vm in 0..3 {
            schedule.decide(Ns::from_secs(second), vm, home((second % 2) as u16));
        }
    }
    let mut arranger = Arranger::new(config.clone(), places).following(schedule);
    let (mut before, mut moved_in_all) = (vec![0; 3], 0);
    while !is_over(&twin, setup.scenario.duration) {
        arranger.step(&mut twin).unwrap();
        let after: Vec<u64> = twin.report().vms.iter().map(|vm| vm.host_pages_moved).collect();
        let moved: Vec<u64> = after
            .iter()
            .zip(&before)
            .map(|(after, before)| after - before)
            .collect();
        assert!(
            moved
                .iter()
                .all(|pages| *pages <= config.repatriate.vm_pages_per_cycle.0),
            "{moved:?}"
        );
        let sum: u64 = moved.iter().sum();
        assert!(sum <= config.repatriate.host_pages_per_cycle.0, "{moved:?}");
        moved_in_all += sum;
        before = after;
        let left = setup.scenario.duration.saturating_sub(twin.now());
        twin.wait(left.min(config.period));
    }
    assert!(moved_in_all > 0);
}

#[test]
fn goals_are_carried_out_and_taken_back() {
    let (setup, config) = (setup(), Config::default());
    let mut twin = setup.start().unwrap();
    let id = twin.vm_id("a").unwrap();
    let mut schedule = Schedule::default();
    schedule.decide(Ns::from_secs(2), 0, home(1));
    schedule.decide(Ns::from_secs(5), 0, "memory 0-1, round-4k".parse().unwrap());
    schedule.decide(Ns::from_secs(9), 0, Goal::default());
    let mut arranger = Arranger::new(config.clone(), [(id, 0)].into()).following(schedule);
    let mut seen = Vec::new();
    while twin.now() < Ns::from_secs(12) {
        arranger.step(&mut twin).unwrap();
        let sample = twin.sample().unwrap();
        let vm = sample.vm(id);
        seen.push(vm.map_or((0, String::new()), |vm| {
            (vm.vcpus[0].affinity.len(), vm.memory_policy.to_string())
        }));
        twin.wait(config.period);
    }
    let (all, node) = (24, 12);
    let at = |second: usize| (seen[second].0, seen[second].1.as_str());
    assert_eq!(at(1), (all, "first-touch"));
    assert_eq!(at(4), (node, "first-touch"));
    assert_eq!(at(8), (all, "round-4k"));
    assert_eq!(*seen.last().unwrap(), (all, "first-touch".to_owned()));
}

#[test]
fn a_rollout_is_cut_only_where_it_cannot_win() {
    let (setup, config) = (setup(), Config::default());
    let base = base(&setup);
    let beginning = Point::beginning(&setup, &config).unwrap();
    let mut schedule = Schedule::default();
    schedule.decide(Ns::ZERO, 0, home(0));
    let whole = rollout(&setup, &config, &base, &beginning, &schedule, None)
        .unwrap()
        .unwrap();
    let mut cut = Cut {
        least: ratios(&base, &whole.run).map(Option::unwrap).collect(),
        bound: whole.mean,
    };
    let kept = rollout(&setup, &config, &base, &beginning, &schedule, Some(&cut)).unwrap();
    assert_eq!(kept.unwrap().run, whole.run);
    cut.bound = whole.mean * 0.8;
    assert!(
        rollout(&setup, &config, &base, &beginning, &schedule, Some(&cut))
            .unwrap()
            .is_none()
    );
}

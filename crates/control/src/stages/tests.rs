use std::collections::BTreeSet;

use homenode_host::{Act, Host, Setting, VirtualNode, VmSample};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns, Permit, Placing, VmId};

use super::*;
use crate::{Control, Event};

#[test]
fn every_set_has_its_stages_in_the_documented_order() {
    for set in PolicySet::ALL {
        let stages: Vec<&str> = of(set).map(|stage| stage.policy).collect();
        let row = format!("//! | `{}` | {} |", set.name(), stages.join(", "));
        let is_documented = include_str!("../stages.rs").lines().any(|line| line == row);
        assert!(is_documented, "the module's text lacks this line:\n{row}");
    }
}

#[test]
#[should_panic(expected = "stage test plans for Home, which its row")]
fn a_stage_that_sets_a_lever_that_its_row_does_not_list_is_found() {
    let stage = Stage {
        policy: "test",
        sets: &[PolicySet::Default],
        levers: &[Lever::Pages],
        plan: |view, _, _, _| Plan::new(view.version),
    };
    let mut plan = Plan::default();
    let lever = Lever::Home;
    plan.decide("test", Act::Lift { lever }.on(VmId(1)), String::new());
    stage.check(&plan);
}

#[test]
fn sets_that_give_no_homes_leave_them_to_operators() {
    let left: Vec<&str> = PolicySet::ALL
        .into_iter()
        .filter(|set| leave_homes_to_operators(*set))
        .map(PolicySet::name)
        .collect();
    assert_eq!(left, ["memory"]);
}

#[test]
fn every_lever_of_a_row_is_set_by_its_stage() {
    let mut seen = BTreeSet::new();
    for set in PolicySet::ALL {
        run(&various(), config(set), Mode::Act, &mut seen);
    }
    // Whether homes pay does not matter in this test, so these settings accept homes that promise any gain.
    let mut eager = config(PolicySet::Homenode);
    (eager.arrange.mean_max, eager.arrange.mean_max_crowded) = (1.0, 1.0);
    (eager.arrange.worst_max, eager.arrange.harm_weight) = (10.0, 0.0);
    eager.arrange.moving_loss = 0.0;
    run(&crowded(), eager, Mode::Act, &mut seen);
    // A dry run also plans what the simulator cannot do: limits by resctrl, and notices to guests.
    let mut by_resctrl = config(PolicySet::Homenode);
    by_resctrl.permits.enforcer = permits::Enforcer::CacheWays;
    run(&various(), by_resctrl, Mode::Observe, &mut seen);
    let rows = STAGES
        .iter()
        .flat_map(|stage| stage.levers.iter().map(|lever| (stage.policy, *lever)));
    // Not seen in these runs: balance re-homes a VM whose home is crowded for a long time, as its own tests show.
    seen.insert((balance::POLICY, Lever::Home));
    // Nor are VMs that disturb one with a permit, as `tests/control/attribution.rs` shows.
    seen.extend([Lever::Home, Lever::VcpuPlacement].map(|lever| (attribution::POLICY, lever)));
    let missing: Vec<_> = rows.filter(|row| !seen.contains(row)).collect();
    assert!(missing.is_empty(), "listed, and not set: {missing:?}");
}

fn config(policies: PolicySet) -> Config {
    let mut config = Config {
        policies,
        ..Config::default()
    };
    config.overcommit.when = overcommit::When::Always;
    config.working_set.window = Ns::from_secs(2);
    config
}

type Levers = BTreeSet<(&'static str, Lever)>;

/// Returns a scenario in which each policy for single VMs has something to decide.
fn various() -> Scenario {
    let vm = |name: &str, workload: &str| VmSpec::new(name, 4, Bytes::from_gib(4), workload);
    let on_node_0 = |name: &str| {
        let nodes = "0".parse().expect("a node");
        vm(name, "povray").with_memory_on(nodes)
    };
    let vms = vec![
        vm("polluter", "stream"),
        vm("spread", "mg.B"),
        vm("guest", "cg.B"),
        vm("floor", "povray").with_memory_floor(Bytes::from_mib(256)),
        on_node_0("one"),
        on_node_0("two"),
        on_node_0("three"),
    ];
    Scenario::of("various", vms)
}

/// Returns a scenario of eight VMs on four nodes. Most depend on memory, so homes pay there.
fn crowded() -> Scenario {
    let workloads = [
        "cg.B", "soplex", "povray", "sphinx3", "lu.B", "mcf", "ep.B", "milc",
    ];
    let vm = |workload: &&str| VmSpec::new(workload, 4, Bytes::from_gib(7), workload).doing(1e4);
    Scenario::of("crowded", workloads.iter().map(vm).collect())
}

/// Runs a scenario, and notes which policy decided on which lever.
fn run(scenario: &Scenario, config: Config, mode: Mode, seen: &mut Levers) {
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let mut twin = Twin::new(machine.clone(), scenario, 1).expect("it fits");
    let mut control = Control::new(config, mode);
    for cycle in 0..100 {
        twin.wait(Ns::from_secs(1));
        if cycle == 1 {
            let permit = Permit::pollution(10_000).expect("a permit");
            let round = Placing::Round4k.alone();
            for (name, setting) in [
                ("polluter", Setting::Permit(Some(permit))),
                ("spread", Setting::MemoryPolicy(Some(round))),
            ] {
                if let Some(vm) = twin.vm_id(name) {
                    twin.set(vm, setting).expect("it runs");
                }
            }
        }
        let mut sample = twin.sample().expect("it answers");
        if mode == Mode::Observe {
            sample
                .vms
                .iter_mut()
                .filter(|vm| vm.name == "guest")
                .for_each(let_be_told);
        }
        let begun = control.begin(&machine, sample);
        let answer = begun.commit(&mut twin);
        for event in control.finish(&machine, begun, answer).events {
            if let Event::Decided { decision, .. } = event {
                seen.insert((decision.policy, decision.action.act.lever()));
            }
        }
    }
}

/// Makes it look as if a guest can be notified. The simulator's guests have no device for that, but a dry run does not use it.
fn let_be_told(vm: &mut VmSample) {
    vm.no_topology_device = None;
    vm.virtual_nodes = vec![VirtualNode {
        vcpus: (0..4).collect(),
        memory_bytes: vm.memory_bytes,
        pages: vm.pages.clone(),
    }];
}

//! A recorded run is repeated: under its own settings the decisions are the same, bit for bit, and under others they differ.

use homenode_control::recommendations::State;
use homenode_control::replay::{Compared, Replay, Settings};
use homenode_control::{Config, Control, Mode, PolicySet, Turn};
use homenode_host::{Act, Host, Plan, Sample, Setting};
use homenode_machine::Machine;
use homenode_policy::placement::{Announcement, Shape};
use homenode_twin::{Scenario, Twin};
use homenode_units::{Bytes, NodeSet, Ns, VmId};
use proptest::prelude::*;

const CYCLES: u64 = 40;

/// A cycle as text, in recorded form: the sample and the turn.
type Written = (String, String);

/// Disturbs a run from outside its host: with questions, settings, and a plan that is refused because another program was faster.
fn disturb(control: &mut Control, twin: &mut Twin, cycle: u64) {
    let vms: Vec<VmId> = control
        .sample()
        .into_iter()
        .flat_map(|sample| &sample.vms)
        .map(|vm| vm.id)
        .collect();
    let Some(vm) = vms.get(cycle as usize % vms.len().max(1)).copied() else {
        return;
    };
    match cycle % 11 {
        2 => control.want_working_set(vm, Some(Ns::from_secs(2)), Ns::from_secs(5)),
        4 => {
            let permit = Setting::Permit(Some("100k".parse().unwrap()));
            if twin.set(vm, permit).is_ok() {
                control.was_set(vm, permit);
            }
        }
        6 => {
            let shape = Shape::new(2, Bytes::from_gib(1));
            control.announce(Announcement {
                vm: VmId(77),
                name: "to come".into(),
                shape,
                bandwidth: None,
                home: None,
                device_nodes: NodeSet::new(),
                huge_pages: Vec::new(),
            });
            control.reserve(&twin.machine().clone(), shape);
        }
        7 => {
            let mode = Setting::Mode([None, Some(Mode::Recommend), Some(Mode::Observe)][cycle as usize % 3]);
            if twin.set(vm, mode).is_ok() {
                control.was_set(vm, mode);
            }
        }
        8 => {
            let reservation = control
                .reservations()
                .first()
                .map_or(99, |reservation| reservation.id);
            control.drop_reservation(reservation);
        }
        5 if cycle > CYCLES / 2 => {
            let mut newer = control.config().clone();
            newer.pace.slowdown_max = 0.05;
            newer.arrange.move_gain_min = 0.05;
            newer.predict.distance_real = 0.8;
            newer.predict.average_weight = 0.5;
            newer.trial.watch = Ns::from_secs(2);
            newer.repatriate.host_pages_per_cycle = homenode_units::Pages(1024);
            newer.repatriate.vm_pages_per_cycle = homenode_units::Pages(512);
            newer.record.days = 1;
            assert_eq!(control.take_over(newer), ["record"]);
        }
        9 | 10 => {
            let open = |one: &&&homenode_control::Recommendation| one.state == State::Open;
            let ids: Vec<u64> = control
                .recommendations()
                .iter()
                .filter(open)
                .map(|one| one.id)
                .collect();
            for (at, id) in ids.into_iter().enumerate() {
                let judged = match at % 3 {
                    2 => control.reject(id),
                    _ => control.approve(id),
                };
                judged.unwrap();
            }
            // Numbers that do not exist change nothing.
            assert!(control.approve(u64::MAX).is_err());
        }
        _ => {}
    }
}

fn pin_by_hand(twin: &mut Twin, sample: &Sample) {
    let Some(vm) = sample.vms.first() else { return };
    let cpus = twin.machine().cpu_set();
    let vcpus = vm.vcpus.iter().map(|vcpu| vcpu.index).collect();
    let mut plan = Plan::new(sample.version);
    plan.decide(
        "operator",
        Act::PinVcpus { vcpus, cpus }.on(vm.id),
        "by hand".into(),
    );
    let _ = twin.commit(&plan);
}

/// Runs a scenario of the library, and returns it as a recording.
fn recorded(name: &str, seed: u64, config: &Config, mode: Mode) -> (Machine, Vec<Written>) {
    let scenario = Scenario::builtin(name).expect("a scenario of the library");
    let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap_or("r910")).unwrap();
    let mut twin = Twin::new(machine.clone(), &scenario, seed).unwrap();
    let mut control = Control::new(config.clone(), mode);
    let mut written = Vec::new();
    for cycle in 0..CYCLES {
        twin.wait(config.period);
        disturb(&mut control, &mut twin, cycle);
        let sample = twin.sample().unwrap();
        let begun = control.begin(&machine, sample.clone());
        disturb(&mut control, &mut twin, cycle + 3);
        if cycle % 13 == 12 {
            pin_by_hand(&mut twin, &sample);
        }
        let answer = begun.commit(&mut twin);
        control.finish(&machine, begun, answer);
        let text = serde_json::to_string(&sample).unwrap();
        let read: Sample = serde_json::from_str(&text).unwrap();
        assert_eq!(
            read, sample,
            "{name}, seed {seed}: a sample reads back as another"
        );
        written.push((text, serde_json::to_string(control.turn()).unwrap()));
    }
    (machine, written)
}

fn replayed(machine: &Machine, written: &[Written], config: &Config, mode: Mode) -> Vec<Compared> {
    replayed_under(Settings::OfThen, (machine, written), config, mode)
}

fn replayed_under(
    settings: Settings,
    (machine, written): (&Machine, &[Written]),
    config: &Config,
    mode: Mode,
) -> Vec<Compared> {
    let mut replay = Replay::new(machine.clone(), (config.clone(), settings), mode);
    let step = |(sample, turn): &Written| {
        let turn: Turn = serde_json::from_str(turn).unwrap();
        replay.step(serde_json::from_str(sample).unwrap(), turn)
    };
    written.iter().map(step).collect()
}

fn of(policies: PolicySet) -> Config {
    Config {
        policies,
        ..Config::default()
    }
}

#[test]
fn a_run_that_is_repeated_decides_the_same_to_the_last_letter() {
    let (mut decided, mut refused) = (0, 0);
    for (name, policies, mode) in [
        ("churn", PolicySet::Homenode, Mode::Act),
        ("churn", PolicySet::Tavo, Mode::Act),
        ("churn", PolicySet::Homenode, Mode::Observe),
        ("churn", PolicySet::Tavo, Mode::Recommend),
        ("permits", PolicySet::Homenode, Mode::Recommend),
        ("memory-overcommit", PolicySet::Homenode, Mode::Recommend),
        ("permits", PolicySet::Homenode, Mode::Act),
        ("memory-overcommit", PolicySet::Homenode, Mode::Act),
        ("phase-change", PolicySet::Tavo, Mode::Act),
        ("tavo-mixed", PolicySet::Numad, Mode::Act),
        ("balloon", PolicySet::FfPin, Mode::Act),
    ] {
        for seed in [1, 2] {
            let (machine, written) = recorded(name, seed, &of(policies), mode);
            for (cycle, compared) in replayed(&machine, &written, &of(policies), mode)
                .iter()
                .enumerate()
            {
                assert!(
                    compared.is_same(),
                    "{name}, seed {seed}, cycle {cycle}: {compared:#?}"
                );
                assert_eq!(compared.missing_count + compared.inputs_missing_count, 0);
                decided += compared.same.len();
            }
            let was_refused = |(_, turn): &&Written| turn.contains("\"refused\"");
            refused += written.iter().filter(was_refused).count();
        }
    }
    assert!(
        decided > 200 && refused > 0,
        "{decided} decisions, {refused} plans refused: too few to tell"
    );
}

#[test]
fn other_policies_decide_otherwise_and_what_both_decide_is_told_apart() {
    let (machine, written) = recorded("churn", 1, &of(PolicySet::Tavo), Mode::Act);
    let recording = (&machine, written.as_slice());
    let others = replayed_under(Settings::Others, recording, &of(PolicySet::FfPin), Mode::Act);
    let then = others.iter().flat_map(|compared| &compared.then_only);
    let now: Vec<_> = others.iter().flat_map(|compared| &compared.now_only).collect();
    assert!(then.count() > 0 && !now.is_empty());
    assert!(
        now.iter()
            .all(|decided| decided.policy == "placement" || decided.policy == "working-set"),
        "{now:#?}"
    );
    // A client requested working sets, which are measured whatever the policies.
    let idle = replayed_under(Settings::Others, recording, &of(PolicySet::Default), Mode::Act);
    let mut now = idle
        .iter()
        .flat_map(|compared| compared.now_only.iter().chain(&compared.same));
    assert!(now.all(|decided| decided.policy == "working-set"));
}

#[test]
fn a_cycle_that_is_missing_shows() {
    let (machine, mut written) = recorded("churn", 1, &of(PolicySet::Homenode), Mode::Act);
    written.drain(10..13);
    let compared = replayed(&machine, &written, &of(PolicySet::Homenode), Mode::Act);
    let missing: Vec<u64> = compared.iter().map(|compared| compared.missing_count).collect();
    assert_eq!((missing[9], missing[10], missing.iter().sum::<u64>()), (0, 3, 3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn what_a_host_says_reads_back_equal(
        seed in any::<u64>(), at in 0usize..12, millis in 1u64..5000, looks in 1usize..4,
    ) {
        let names: Vec<&str> = Scenario::names().collect();
        let scenario = Scenario::builtin(names[at % names.len()]).unwrap();
        let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap_or("r910")).unwrap();
        let mut twin = Twin::new(machine, &scenario, seed).unwrap();
        for _ in 0..looks {
            twin.wait(Ns::from_millis(millis));
            let sample = twin.sample().unwrap();
            let value = serde_json::to_value(&sample).unwrap();
            prop_assert_eq!(&serde_json::from_value::<Sample>(value).unwrap(), &sample);
        }
    }
}

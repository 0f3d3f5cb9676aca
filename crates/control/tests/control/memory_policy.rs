//! A memory policy that the advisor tries on the simulated host, and what becomes of it when the agent may not follow the advisor
//! any more.

use homenode_control::{Config, Control, Cycle, Event, Mode, PolicySet};
use homenode_host::{Host, Setting};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, MemoryPolicy, Ns, VmId};

const PERIOD: Ns = Ns::from_secs(1);

fn config() -> Config {
    Config {
        policies: PolicySet::Memory,
        ..Config::default()
    }
}

/// Settings under which the policy that sets memory policies only observes.
fn observing() -> Config {
    Config {
        modes: serde_json::from_str("{\"memory\": \"observe\"}").unwrap(),
        ..config()
    }
}

fn step(control: &mut Control, twin: &mut Twin) -> Cycle {
    twin.wait(PERIOD);
    control.step(twin).unwrap()
}

fn run(control: &mut Control, twin: &mut Twin, cycles: usize) -> Vec<Event> {
    (0..cycles).flat_map(|_| step(control, twin).events).collect()
}

/// Returns a simulated host on which the advisor tries another memory policy on a VM, with the policy before.
fn with_a_policy_on_trial(control: &mut Control) -> (Twin, VmId, MemoryPolicy) {
    let machine = homenode_machine_files::preset("amd48").unwrap();
    let wide = VmSpec::new("wide", 48, Bytes::from_gib(120), "streamcluster");
    let wide = wide.doing(1000.0).pinned();
    let scenario = Scenario::of("test", vec![wide]).with_numa_balancing(false);
    let mut twin = Twin::new(machine, &scenario, 1).unwrap();
    let id = twin.vm_id("wide").unwrap();
    let policy = |twin: &mut Twin| twin.sample().unwrap().vm(id).map(|vm| vm.memory_policy);
    step(control, &mut twin);
    let before = policy(&mut twin).unwrap();
    let waited = (0..120).find(|_| {
        step(control, &mut twin);
        policy(&mut twin) != Some(before)
    });
    let advice = control.memory_advice(id);
    assert!(waited.is_some(), "nothing is tried: {advice:?}");
    (twin, id, before)
}

#[test]
fn a_memory_policy_on_trial_does_not_outlast_a_change_of_mode() {
    let by_vm = |_: &mut Control, twin: &mut Twin, id| {
        twin.set(id, Setting::Mode(Some(Mode::Observe))).unwrap();
    };
    let by_policy = |control: &mut Control, _: &mut Twin, _| {
        control.take_over(observing());
    };
    let by_advice = |control: &mut Control, _: &mut Twin, _| {
        let mut config = config();
        config.memory.advisor.acts = false;
        control.take_over(config);
    };
    let changes: [fn(&mut Control, &mut Twin, VmId); 3] = [by_vm, by_policy, by_advice];
    for (at, change) in changes.into_iter().enumerate() {
        for is_paused in [false, true] {
            let mut control = Control::new(config(), Mode::Act);
            let (mut twin, id, before) = with_a_policy_on_trial(&mut control);
            change(&mut control, &mut twin, id);
            if is_paused {
                control.pause(Ns::from_secs(600));
            }
            let told = run(&mut control, &mut twin, 2);
            let now = twin.sample().unwrap().vm(id).unwrap().memory_policy;
            assert_eq!(now, before, "change {at}, paused {is_paused}: {told:#?}");
            let is_said = told.iter().any(|event| match event {
                Event::Decided { decision, .. } => decision.reason.starts_with("restored"),
                _ => false,
            });
            assert!(is_said, "{told:#?}");
        }
    }
}

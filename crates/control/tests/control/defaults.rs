//! The default settings make the expected decisions, and other settings decide differently as soon as they are taken over.

use homenode_control::{Config, Control, Event, Mode, PolicySet};
use homenode_host::{Act, Host};
use homenode_twin::{Scenario, Twin};

fn start(scenario: &str, config: Config) -> (Twin, Control) {
    let scenario = Scenario::builtin(scenario).expect("a scenario of the library");
    let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap_or("r910")).unwrap();
    let twin = Twin::new(machine, &scenario, 1).unwrap();
    (twin, Control::new(config, Mode::Act))
}

/// Returns the decisions of this many cycles, with a line of text for each.
fn decided(twin: &mut Twin, control: &mut Control, cycles: u32) -> Vec<(Act, String)> {
    let mut found = Vec::new();
    for _ in 0..cycles {
        twin.wait(control.config().period);
        let cycle = control.step(twin).expect("the twin always answers");
        let seconds = cycle.status.at_ns.as_secs_f64();
        for event in cycle.events {
            if let Event::Decided { name, decision, .. } = event {
                let line = format!("{seconds} {name} {}: {}", decision.policy, decision.reason);
                found.push((decision.action.act, line));
            }
        }
    }
    found
}

/// A changed default changes a decision here. If that is intended, run with `INSTA_UPDATE=always`, and look at the difference.
#[test]
fn default_settings_decide_what_they_did() {
    for (scenario, policies, cycles) in [
        ("tavo-mixed", PolicySet::Homenode, 150),
        ("numa-policies", PolicySet::Homenode, 60),
        ("memory-overcommit", PolicySet::Tavo, 100),
    ] {
        let config = Config {
            policies,
            ..Config::default()
        };
        let (mut twin, mut control) = start(scenario, config);
        let lines: Vec<String> = decided(&mut twin, &mut control, cycles)
            .into_iter()
            .map(|(_, line)| line)
            .collect();
        insta::assert_snapshot!(format!("{scenario}-{}", policies.name()), lines.join("\n"));
    }
}

#[test]
fn settings_that_are_read_anew_decide_from_then_on() {
    let mut careful = Config::default();
    (careful.arrange.mean_max, careful.arrange.mean_max_crowded) = (0.0, 0.0);
    let (mut twin, mut control) = start("tavo-mixed", careful);
    let homes = |decided: Vec<(Act, String)>| {
        let is_home = |(act, _): &(Act, String)| matches!(act, Act::SetHome { .. });
        decided.into_iter().filter(is_home).count()
    };
    assert_eq!(homes(decided(&mut twin, &mut control, 60)), 0);
    assert_eq!(
        control.take_over(Config::default()),
        [""; 0],
        "nothing waits for a start"
    );
    assert!(homes(decided(&mut twin, &mut control, 150)) > 0);
}

//! Tests with any settings that an operator may write into a configuration file.

use std::collections::BTreeMap;

use homenode_control::{Config, Control, Mode};
use homenode_machine_files::file::read_toml;
use homenode_twin::{Scenario, Twin};
use homenode_units::Ns;
use proptest::prelude::*;
use serde_json::Value;

/// VMs whose permits, floors, memory policies and homes give each policy something to decide on.
const SCENARIO: &str = "\
name = \"settings\"
machine = \"r420\"
duration = \"600s\"
[[vm]]
name = \"booked\"
vcpus = 2
memory = \"3GiB\"
workload = \"milc\"
permit = \"250k\"
[[vm]]
name = \"floor\"
vcpus = 2
memory = \"4GiB\"
workload = \"idle\"
memory_floor = \"1GiB\"
[[vm]]
name = \"free\"
vcpus = 4
memory = \"2GiB\"
workload = \"cg.B\"
";

const CYCLES: u32 = 6;

/// A setting that is a number, or that is an amount or a duration in quotes.
#[derive(Clone, Debug)]
struct Setting {
    key: String,
    is_text: bool,
}

/// Returns all settings that are a number, an amount or a duration, with their names in a file.
fn settings() -> Vec<Setting> {
    fn look(path: &str, value: &Value, found: &mut Vec<Setting>) {
        let is_text = match value {
            Value::Object(inner) => {
                let key = |name: &str| match path {
                    "" => name.to_owned(),
                    _ => format!("{path}.{name}"),
                };
                return inner
                    .iter()
                    .for_each(|(name, value)| look(&key(name), value, found));
            }
            Value::Number(_) => false,
            Value::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => true,
            _ => return,
        };
        found.push(Setting {
            key: path.to_owned(),
            is_text,
        });
    }
    let mut found = Vec::new();
    look(
        "",
        &serde_json::to_value(Config::default()).expect("JSON"),
        &mut found,
    );
    found.push(Setting {
        key: "repatriate.start.period".into(),
        is_text: true,
    });
    found
}

fn number() -> impl Strategy<Value = String> {
    let edges = [
        "nan",
        "-nan",
        "inf",
        "-inf",
        "-5.0",
        "0.0",
        "-0.0",
        "1e308",
        "1e-308",
        "1.0",
        "0",
        "-1",
        "1",
        "100",
        "4294967295",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
    ];
    let edge = proptest::sample::select(edges.to_vec()).prop_map(str::to_owned);
    prop_oneof![
        3 => edge,
        1 => any::<f64>().prop_map(|value| format!("{value:e}")),
        1 => (0.0..1.0).prop_map(|value: f64| format!("{value:?}")),
        1 => any::<u32>().prop_map(|value| value.to_string()),
    ]
}

fn amount() -> impl Strategy<Value = String> {
    let units = ["ns", "ms", "s", "h", "B", "MiB", "TiB", "TB", "GB/s"];
    let count = prop_oneof![
        Just("0".to_owned()),
        Just("1".to_owned()),
        Just("-1".to_owned()),
        Just("18446744073709551615".to_owned()),
        any::<u64>().prop_map(|value| value.to_string()),
        (0_u64..10_000).prop_map(|value| value.to_string()),
    ];
    (count, proptest::sample::select(units.to_vec())).prop_map(|(count, unit)| format!("\"{count}{unit}\""))
}

/// Generates files with one to three settings.
fn file() -> impl Strategy<Value = BTreeMap<String, String>> {
    proptest::collection::vec(line(), 1..=3).prop_map(|lines| lines.into_iter().collect())
}

fn line() -> impl Strategy<Value = (String, String)> {
    (proptest::sample::select(settings()), number(), amount())
        .prop_map(|(setting, number, amount)| (setting.key, if setting.is_text { amount } else { number }))
}

/// Runs some cycles under these settings: enough for VMs to become known, if two cycles suffice for that.
fn run(mut config: Config) {
    config.predict.known_cycles = config.predict.known_cycles.min(2);
    let scenario = Scenario::from_toml("settings.toml", SCENARIO).expect("a scenario");
    let machine = homenode_machine_files::preset("r420").expect("a preset");
    let mut twin = Twin::new(machine, &scenario, 1).expect("the VMs fit");
    let wait = config.period.min(Ns::from_secs(1));
    let mut control = Control::new(config, Mode::Act);
    for _ in 0..CYCLES {
        homenode_host::Host::wait(&mut twin, wait);
        control.step(&mut twin).expect("the twin always answers");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1024,
        // As in tests of any crate without a library, a failing case is only printed; make it a test by hand.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_value_of_a_setting_is_refused_by_name_or_runs(file in file()) {
        let text: String = file.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        match read_toml::<Config>("homenode.toml", &text) {
            Ok(config) => run(config),
            Err(refused) => {
                let said = refused.to_string();
                // If a choice cannot be read, the TOML crate reports the choice's key, not the key inside it.
                let names = |key: &str| said.contains(&format!("`{key}`"));
                let is_named = file.keys().any(|key| names(key) || key.contains(".start.") && names("repatriate.start"));
                prop_assert!(said.starts_with("homenode.toml:") && is_named, "{said}");
            }
        }
    }
}

#[test]
fn absurd_settings_are_refused_with_key_value_range_and_remedy() {
    let absurd = [
        ("overcommit.headroom", "nan"),
        ("overcommit.headroom", "-5.0"),
        ("overcommit.headroom", "inf"),
        ("overcommit.lease", "\"0s\""),
        ("overcommit.step", "0.0"),
        ("overcommit.reserve", "-1.0"),
        ("overcommit.growth", "0.0"),
        ("overcommit.step_min", "\"0B\""),
        ("overcommit.swap_min", "\"0B\""),
        ("overcommit.faults_per_s_min", "0.0"),
        ("permits.spare", "1.5"),
        ("permits.suggest.percentile", "0.0"),
        ("permits.lease", "\"0s\""),
        ("permits.repay", "\"0s\""),
        ("permits.share_min", "nan"),
        ("permits.confined_percent", "0"),
        ("pace.slowdown_max", "nan"),
        ("memory.spread_excess", "inf"),
        ("memory.advisor.watch", "\"0s\""),
        ("memory.advisor.gain_min", "-inf"),
        ("memory.carrefour.imbalance_max", "nan"),
        ("placement.link_busy_max", "0.0"),
        ("placement.link_busy_max", "1.5"),
        ("placement.touched_min", "1.5"),
        ("demand.average_weight", "0.0"),
        ("arrange.belief", "nan"),
        ("arrange.harm_weight", "-1.0"),
        ("arrange.looks_per_hour", "0.0"),
        ("arrange.horizon", "\"0s\""),
        ("arrange.work_max", "0"),
        ("predict.known_cycles", "0"),
        ("predict.average_weight", "0.0"),
        ("predict.smt_stretch", "0.5"),
        ("predict.bandwidth_per_core", "\"0B/s\""),
        ("trial.loss_max", "1.5"),
        ("balance.cycles", "0"),
        ("balance.cycles", "17"),
        ("pace.pace_min", "0.0"),
        ("recommendations.much_more", "nan"),
        ("memory.advisor.crowded_min", "-1.0"),
        ("topology_feed.interval", "\"0s\""),
        ("working_set.window", "\"0s\""),
        ("working_set.lease", "\"0s\""),
        ("working_set.cpu_share_max", "1e300"),
        ("repatriate.start.period", "\"0s\""),
        ("period", "\"0s\""),
        ("period", "\"18000000s\""),
    ];
    for (key, value) in absurd {
        let refused = read_toml::<Config>("homenode.toml", &format!("# mine\n{key} = {value}\n"));
        let said = refused.expect_err(key).to_string();
        let bare = value.trim_matches('"').trim_end_matches(".0");
        for part in [
            "homenode.toml:2:",
            &format!("`{key}`"),
            bare,
            " from ",
            " to ",
            "default",
        ] {
            // The message shows 1e300 with all its digits.
            assert!(
                said.contains(part) || value == "1e300" && part == bare,
                "{key} = {value}: no {part} in: {said}"
            );
        }
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused_with_both_names() {
    for (text, names) in [
        ("memory.advisor.hold = \"3h\"", ["hold", "hold_max"]),
        (
            "memory.advisor.imbalance_low = 200.0",
            ["imbalance_low", "imbalance_moderate"],
        ),
        (
            "repatriate.vm_pages_per_cycle = 300000",
            ["vm_pages_per_cycle", "host_pages_per_cycle"],
        ),
        ("arrange.rest = \"10m\"", ["rest", "rest_idle"]),
        ("balance.cycles = 7", ["away_cycles_max", "cycles"]),
        ("permits.suggest.slices_min = 700", ["slices_min", "slices_max"]),
        ("trial.hold = \"2h\"", ["hold", "hold_max"]),
        ("trial.loss_max = 0.2", ["loss_max", "loss_unsure"]),
        (
            "memory.carrefour.host_pages_per_cycle = 5",
            ["vm_pages_per_cycle", "host_pages_per_cycle"],
        ),
    ] {
        let said = read_toml::<Config>("homenode.toml", text)
            .expect_err(text)
            .to_string();
        assert!(
            names.iter().all(|name| said.contains(&format!("{name}`"))),
            "{text}: {said}"
        );
    }
}

/// Settings that an agent recorded before thresholds became settings: its recordings are repeated under the defaults.
#[test]
fn settings_that_were_recorded_before_there_were_more_are_the_defaults() {
    let before: Config = serde_json::from_str(include_str!("settings-before.json")).expect("settings");
    assert_eq!(before, Config::default());
}

/// Names of settings in version 0.2.0, which are accepted for one more version.
#[test]
fn settings_under_their_names_in_the_last_version_are_read() {
    for (before, now) in [
        ("balance.epochs = 12", "balance.cycles = 12"),
        ("balance.away_epochs_max = 5", "balance.away_cycles_max = 5"),
        ("pace.wait_max_epochs = 9", "pace.wait_max_cycles = 9"),
        ("permits.blind_epochs_max = 9", "permits.blind_cycles_max = 9"),
        ("permits.calm_epochs = 9", "permits.calm_cycles = 9"),
        ("predict.known_epochs = 9", "predict.known_cycles = 9"),
        (
            "repatriate.vm_pages_per_epoch = 9",
            "repatriate.vm_pages_per_cycle = 9",
        ),
        (
            "repatriate.host_pages_per_epoch = 500000",
            "repatriate.host_pages_per_cycle = 500000",
        ),
        (
            "memory.carrefour.vm_pages_per_epoch = 9",
            "memory.carrefour.vm_pages_per_cycle = 9",
        ),
        (
            "memory.carrefour.host_pages_per_epoch = 500000",
            "memory.carrefour.host_pages_per_cycle = 500000",
        ),
    ] {
        let read = |text| read_toml::<Config>("homenode.toml", text).expect(text);
        assert_eq!(read(before), read(now));
        assert_ne!(read(now), Config::default(), "{now}");
    }
}

#[test]
fn defaults_are_allowed() {
    assert_eq!(read_toml::<Config>("homenode.toml", ""), Ok(Config::default()));
}

#[test]
fn a_mode_of_an_unknown_policy_and_a_mode_that_is_none_are_refused_with_what_there_is() {
    let read = |text: &str| read_toml::<Config>("agent.toml", text);
    let good =
        read("mode = \"recommend\"\n[modes]\narrange = \"observe\"\ntopology-feed = \"act\"\n").unwrap();
    assert_eq!(
        (good.mode, good.modes.of("arrange"), good.modes.of("memory")),
        (Mode::Recommend, Some(Mode::Observe), None)
    );
    for (text, said) in [
        ("mode = \"careful\"", "`recommend`"),
        ("[modes]\narange = \"act\"", "`arrange`"),
        ("[modes]\npace = \"act\"", "no policy is named `pace`"),
        ("[modes]\narrange = \"maybe\"", "`recommend`"),
        ("[modes]\narrange = 1", "arrange"),
        ("modes = \"act\"", "modes"),
        ("[recommendations]\nlife_max = \"0s\"", "recommendations.life_max"),
    ] {
        let why = read(text).unwrap_err().to_string();
        assert!(why.contains("agent.toml") && why.contains(said), "{text}: {why}");
    }
}

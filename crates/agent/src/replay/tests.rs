use std::path::Path;

use homenode_control::Cycle;
use homenode_host::WakeSignal;
use homenode_twin::{Scenario, Setup, VmSpec};
use homenode_units::{Bytes, Pages};

use super::*;
use crate::run::{Pace, Show};

struct Unseen;

impl Show for Unseen {
    fn line(&mut self, _: &str) {}
    fn object(&mut self, _: &str, _: Value) {}
    fn cycle(&mut self, _: &Cycle) {}
    fn is_closed(&self) -> bool {
        false
    }
}

/// Records some seconds of a scenario.
fn record(path: &Path, scenario: Scenario, seconds: u64, config: &Config) {
    let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap_or("r910")).unwrap();
    let run = crate::twin::Run {
        state: None,
        history: Some(path.to_owned()),
        trace: None,
        mode: Mode::Act,
        pace: Pace::Fast,
        duration: Some(Ns::from_secs(seconds)),
        listen: None,
        commit: "test",
        reload: crate::reload::Reload::never(&WakeSignal::default()),
    };
    crate::twin::run(
        &run,
        config,
        &Setup::new(machine, scenario, 3),
        &mut Unseen,
        &WakeSignal::default(),
    )
    .unwrap();
}

fn replayed(path: &Path, wanted: &Wanted) -> Report {
    replay(&Archive::open(path).unwrap(), wanted).unwrap()
}

fn under(policies: PolicySet) -> Wanted {
    Wanted {
        policies: Some(policies),
        ..Wanted::default()
    }
}

#[test]
fn a_recorded_run_is_decided_the_same_and_otherwise_under_other_settings() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.sqlite");
    // Settings that are neither defaults nor round must be restored exactly.
    let mut config = Config {
        policies: PolicySet::Tavo,
        period: Ns(1_250_000_001),
        ..Config::default()
    };
    config.permits.lease = Ns(7_123_456_789);
    record(&path, Scenario::builtin("churn").unwrap(), 100, &config);

    let same = replayed(&path, &Wanted::default());
    assert!(same.same && same.same_settings, "{same:#?}");
    assert_eq!(
        (&same.inexact, &same.differences, same.first_difference_wall_ns),
        (&vec![], &vec![], None)
    );
    assert!(
        same.recorded_count > 10 && same.recorded_count == same.replayed_count,
        "{same:#?}"
    );
    assert!(same.periods_count > 60, "{same:#?}");

    let other = replayed(&path, &under(PolicySet::FfPin));
    assert!(!other.same && !other.same_settings && other.inexact.is_empty());
    let first = other.first_difference_wall_ns.unwrap();
    assert!(
        other
            .differences
            .iter()
            .all(|difference| difference.wall_ns >= first)
    );
    let of = |only| {
        other
            .differences
            .iter()
            .filter(move |difference| difference.only == only)
    };
    assert!(of(Only::Recorded).count() > 0, "{other:#?}");
    assert!(
        of(Only::Replayed).all(|difference| difference.policy == "placement"),
        "{other:#?}"
    );
    let none = replayed(&path, &under(PolicySet::Default));
    assert_eq!((none.replayed_count, none.same_count), (0, 0));

    // A single setting differs.
    config.repatriate.vm_pages_per_cycle = Pages(64);
    let slower = replayed(
        &path,
        &Wanted {
            config: Some(config),
            ..Wanted::default()
        },
    );
    assert!(
        !slower.same_settings && !slower.same && slower.same_count > 0,
        "{slower:#?}"
    );
    assert!(
        slower
            .differences
            .iter()
            .all(|difference| difference.policy != "placement"),
        "{slower:#?}"
    );
}

#[test]
fn what_is_missing_of_a_run_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.sqlite");
    let vm = |name, workload| VmSpec::new(name, 1, Bytes::from_gib(1), workload).doing(1e6);
    let mut scenario = Scenario::of("long", vec![vm("web", "povray"), vm("db", "milc")]);
    scenario.duration = Ns::from_secs(400);
    record(&path, scenario, 400, &Config::default());
    let whole = replayed(&path, &Wanted::default());
    assert!(whole.same && whole.inexact.is_empty(), "{whole:#?}");

    // The oldest samples are pruned.
    let database = rusqlite::Connection::open(&path).unwrap();
    let first = "DELETE FROM block WHERE id IN (SELECT id FROM block WHERE kind = 1 ORDER BY id LIMIT 2)";
    assert_eq!(database.execute(first, []).unwrap(), 2);
    let late = replayed(&path, &Wanted::default());
    assert!(late.periods_count < whole.periods_count);
    assert!(
        late.inexact[0].contains("the first 1") && late.inexact[0].contains("homes of that time are used"),
        "{:?}",
        late.inexact
    );

    // One sample is missing, and one block is damaged.
    let hole = "DELETE FROM block WHERE id = (SELECT min(id) + 4 FROM block WHERE kind = 1)";
    assert_eq!(database.execute(hole, []).unwrap(), 1);
    let damage = "UPDATE block SET frames = x'00' WHERE id = (SELECT max(id) FROM block WHERE kind = 1)";
    assert_eq!(database.execute(damage, []).unwrap(), 1);
    let torn = replayed(&path, &Wanted::default());
    let said = torn.inexact.join("\n");
    assert!(
        said.contains("60 periods are missing in 1 places") && said.contains("cannot be read"),
        "{said}"
    );

    // No samples are left.
    database.execute("DELETE FROM block WHERE kind = 1", []).unwrap();
    let archive = Archive::open(&path).unwrap();
    let why = replay(&archive, &Wanted::default()).unwrap_err().to_string();
    assert!(why.contains("record.samples_hours"), "{why}");
    let wanted = Wanted {
        run: Some(9),
        ..Wanted::default()
    };
    let why = replay(&archive, &wanted).unwrap_err().to_string();
    assert!(why.contains("no run 9; it has 1"), "{why}");
}

#[test]
fn a_recorded_setting_of_any_size_reads_back() {
    let mut config = Config::default();
    config.record.max = Bytes((1 << 30) + 12_345);
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config, "{text}");
}

//! Checks that exactly what was written can be read, whatever happens to the writer, the disk and the clock.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use homenode_host::EventRecord;
use homenode_recorder::{
    Archive, Begin, Documents, Figures, Frame, Kind, Limits, Minute, RecordError, Recorder, Wanted, WhenFull,
    Which, prune,
};
use homenode_units::{Bytes, Ns, VmId};
use serde_json::{Value, json};

const SECOND: i64 = 1_000_000_000;
/// A day in 2026.
const NOON: i64 = 1_795_000_000 * SECOND;

fn begin() -> Begin {
    Begin {
        wall_ns: NOON,
        version: "0.1.0 (abc)".into(),
        host: "twin".into(),
        detail: json!({"machine": "r910"}),
    }
}

fn plenty() -> Limits {
    Limits {
        status: Ns::from_secs(86400 * 30),
        samples: Ns::from_secs(86400),
        samples_bytes: Bytes::from_gib(1),
        bytes: Bytes::from_gib(1),
    }
}

fn event(kind: &str, text: &str) -> (EventRecord, Value) {
    let record = EventRecord {
        at: Ns::ZERO,
        kind: kind.into(),
        vm: Some(VmId(0xa)),
        name: Some("a".into()),
        policy: Some("arrange".into()),
        action: None,
        outcome: Some("done".into()),
        text: text.into(),
    };
    (record, json!({"n": 1}))
}

/// A period with its documents.
#[derive(Clone)]
struct Period {
    at: Ns,
    wall_ns: i64,
    status: Value,
    sample: Option<Value>,
    events: Vec<(EventRecord, Value)>,
}

impl Period {
    fn put(self, documents: &mut Documents) -> homenode_recorder::Period {
        documents.put(Kind::Status, Figures::Whole, &self.status);
        if let Some(sample) = &self.sample {
            documents.put(Kind::Sample, Figures::Whole, sample);
        }
        let Period {
            at, wall_ns, events, ..
        } = self;
        homenode_recorder::Period { at, wall_ns, events }
    }
}

/// Returns the period of this second, with a wall clock that is wrong by `off` nanoseconds.
fn period(second: u64, off: i64) -> Period {
    let vm =
        |id: &str| json!({"id": id, "ran_ns": second * 700_000_000, "share": 0.125 * (second % 7) as f64});
    Period {
        at: Ns::from_secs(second),
        wall_ns: NOON + second.cast_signed() * SECOND + off,
        status: json!({"vms": [vm("a"), vm("b")], "second": second}),
        sample: Some(json!({"cpus": [second, 2 * second]})),
        events: Vec::new(),
    }
}

fn record(path: &Path, periods: impl Iterator<Item = Period>) {
    let mut recorder = Recorder::begin(path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    for period in periods {
        // Hands periods over slowly, as a loop does, so that none is left out.
        keep(&mut recorder, period);
    }
    recorder.close();
    assert_eq!(recorder.take_notices(), Vec::<String>::new());
}

fn keep(recorder: &mut Recorder, period: Period) {
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    recorder.keep(period.at, move |documents| {
        drop(done);
        period.put(documents)
    });
    let _ = is_done.recv();
}

fn frames(path: &Path, kind: Kind) -> Vec<Frame> {
    let mut frames = Vec::new();
    let every = (i64::MIN, i64::MAX);
    let archive = Archive::open(path).unwrap();
    archive
        .frames(kind, every, |frame| {
            frames.push(frame);
            true
        })
        .unwrap();
    frames
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/history.sqlite");
    (dir, path)
}

#[test]
fn every_period_comes_back_as_it_was() {
    let (_dir, path) = place();
    record(&path, (0..200).map(|second| period(second, 0)));
    for kind in Kind::ALL {
        let back = frames(&path, kind);
        assert_eq!(back.len(), 200);
        for (second, frame) in (0..).zip(back) {
            let was = period(second, 0);
            let value = match kind {
                Kind::Status => was.status,
                Kind::Sample => was.sample.unwrap(),
            };
            assert_eq!(
                (frame.at, frame.wall_ns, frame.value),
                (was.at, was.wall_ns, value)
            );
        }
    }
    let archive = Archive::open(&path).unwrap();
    assert_eq!(
        archive.span(Kind::Status).unwrap(),
        Some((NOON, NOON + 199 * SECOND))
    );
    let run = &archive.runs().unwrap()[0];
    assert_eq!((run.host.as_str(), &run.detail), ("twin", &begin().detail));
    // Reads between two times, across blocks.
    let mut seen = Vec::new();
    archive
        .frames(Kind::Status, (NOON + 58 * SECOND, NOON + 61 * SECOND), |frame| {
            seen.push(frame.at);
            true
        })
        .unwrap();
    assert_eq!(seen, [58, 59, 60, 61].map(Ns::from_secs));
}

#[test]
fn periods_that_are_wanted_far_apart_are_the_first_after_each_gap_of_every_run() {
    let (_dir, path) = place();
    // Records blocks of a minute and a tail that is not a block yet, then another run.
    record(&path, (0..145).map(|second| period(second, 0)));
    record(&path, (150..170).map(|second| period(second, 0)));
    let archive = Archive::open(&path).unwrap();
    let all = archive.iter(None, Kind::Sample, (i64::MIN, i64::MAX)).unwrap();
    let seen = all.apart(Ns::from_secs(25)).map(|frame| frame.unwrap());
    let seen: Vec<(i64, Frame)> = seen.map(|frame| (frame.run, frame)).collect();
    let told: Vec<(i64, u64)> = seen
        .iter()
        .map(|(run, frame)| (*run, frame.at.0 / 1_000_000_000))
        .collect();
    assert_eq!(
        told,
        [(1, 0), (1, 25), (1, 50), (1, 75), (1, 100), (1, 125), (2, 150)]
    );
    for ((_, second), (_, frame)) in told.iter().zip(&seen) {
        assert_eq!(frame.value, period(*second, 0).sample.unwrap());
    }
}

#[test]
fn what_happens_again_is_one_row_and_decisions_are_each_their_own() {
    let (_dir, path) = place();
    let with = |second, kind, text: &str| Period {
        events: vec![event(kind, text)],
        ..period(second, 0)
    };
    let periods = (0..5).map(|second| with(second, "found", "node 0 is full"));
    let more = [
        with(5, "decided", "to node 1"),
        with(6, "decided", "to node 1"),
        with(500, "found", "node 0 is full"),
    ];
    record(&path, periods.chain(more));
    let archive = Archive::open(&path).unwrap();
    let events = archive.events(&Wanted::default()).unwrap();
    let told: Vec<(&str, i64)> = events
        .iter()
        .map(|event| (event.record.kind.as_str(), event.count))
        .collect();
    assert_eq!(told, [("found", 5), ("decided", 1), ("decided", 1), ("found", 1)]);
    assert_eq!(events[0].last_wall_ns - events[0].wall_ns, 4 * SECOND);
    let ids: BTreeSet<i64> = events.iter().map(|event| event.id).collect();
    assert_eq!(ids.len(), 4);
    let wanted = Wanted {
        vm: Some("a".into()),
        kind: Some("decided".into()),
        limit: Some(1),
        ..Wanted::default()
    };
    assert_eq!(archive.events(&wanted).unwrap(), events[2..3]);
    let none = Wanted {
        vm: Some("b".into()),
        ..Wanted::default()
    };
    assert_eq!(archive.events(&none).unwrap(), []);
}

#[test]
fn a_clock_that_is_set_back_loses_no_period_and_mixes_up_none() {
    let (_dir, path) = place();
    let clock = |second| if second < 100 { 0 } else { -3600 * SECOND };
    record(&path, (0..200).map(|second| period(second, clock(second))));
    let back = frames(&path, Kind::Status);
    let at: Vec<Ns> = back.iter().map(|frame| frame.at).collect();
    assert_eq!(at, (0..200).map(Ns::from_secs).collect::<Vec<_>>());
    // On the wall clock an hour occurred twice; both are returned.
    let archive = Archive::open(&path).unwrap();
    let mut seen = Vec::new();
    archive
        .frames(Kind::Status, (NOON - 3600 * SECOND, NOON), |frame| {
            seen.push(frame.at);
            true
        })
        .unwrap();
    assert_eq!(
        seen,
        std::iter::once(0)
            .chain(100..200)
            .map(Ns::from_secs)
            .collect::<Vec<_>>()
    );
}

/// Acts as an agent in a process of its own, which the next test starts and kills. Writes until it is killed.
#[test]
fn write_until_killed() {
    let Some(path) = std::env::var_os("HOMENODE_TEST_HISTORY").map(PathBuf::from) else {
        return;
    };
    let first: u64 = std::env::var("HOMENODE_TEST_FIRST")
        .expect("set by the test")
        .parse()
        .unwrap();
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    for second in first.. {
        keep(&mut recorder, period(second, 0));
    }
}

#[test]
fn an_agent_that_is_killed_while_it_writes_leaves_whole_periods() {
    let (_dir, path) = place();
    let mut first = 0;
    for round in 0..5u32 {
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "write_until_killed"])
            .env("HOMENODE_TEST_HISTORY", &path)
            .env("HOMENODE_TEST_FIRST", first.to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let written = || {
            if path.exists() {
                Archive::open(&path).map_or(0, |_| frames(&path, Kind::Status).len() as u64)
            } else {
                0
            }
        };
        // Kills the agent at a different point of its work each time.
        while written() < first + 70 {
            assert!(writer.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(7 + u64::from(round)));
        }
        writer.kill().unwrap();
        writer.wait().unwrap();
        let back = frames(&path, Kind::Status);
        for (second, frame) in (0..).zip(&back) {
            assert_eq!(frame.value, period(second, 0).status, "round {round}");
        }
        assert_eq!(frames(&path, Kind::Sample).len(), back.len(), "round {round}");
        first = back.len() as u64;
    }
    // The next run turns the periods of the last minute into blocks.
    record(&path, (first..first + 3).map(|second| period(second, 0)));
    assert_eq!(frames(&path, Kind::Status).len() as u64, first + 3);
    assert_eq!(Archive::open(&path).unwrap().runs().unwrap().len(), 6);
}

#[test]
fn a_history_that_is_torn_anywhere_gives_what_is_whole_and_is_set_aside() {
    let (dir, path) = place();
    record(&path, (0..130).map(|second| period(second, 0)));
    let whole = std::fs::read(&path).unwrap();
    let torn = dir.path().join("torn.sqlite");
    for length in (0..whole.len())
        .step_by(whole.len() / 40)
        .chain([whole.len() - 1])
    {
        std::fs::write(&torn, &whole[..length]).unwrap();
        // Everything that can be read must be correct.
        if let Ok(archive) = Archive::open(&torn) {
            let _ = archive.frames(Kind::Status, (i64::MIN, i64::MAX), |frame| {
                let second = frame.at.0 / 1_000_000_000;
                assert_eq!(frame.value, period(second, 0).status, "torn at {length}");
                true
            });
        }
        // An agent must continue to record, or report that the file is not a history.
        match Recorder::begin(&torn, &begin(), plenty(), WhenFull::LeaveOut) {
            Ok(mut recorder) => {
                keep(&mut recorder, period(500, 0));
                recorder.close();
                assert_eq!(
                    frames(&torn, Kind::Status).last().unwrap().at,
                    Ns::from_secs(500),
                    "torn at {length}"
                );
            }
            Err(error) => assert!(
                matches!(error, RecordError::Foreign { .. }),
                "torn at {length}: {error}"
            ),
        }
        for entry in std::fs::read_dir(dir.path()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().starts_with("torn") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
}

#[test]
fn a_damaged_block_takes_no_other_with_it() {
    for damage in ["substr(frames, 2)", "'text'", "0", "zeroblob(99)"] {
        let (_dir, path) = place();
        record(&path, (0..200).map(|second| period(second, 0)));
        let connection = rusqlite::Connection::open(&path).unwrap();
        let which = "(SELECT min(id) + 2 FROM block)";
        let sql = format!("UPDATE block SET frames = {damage} WHERE id = {which}");
        connection.execute(&sql, []).unwrap();
        drop(connection);
        let mut seen = 0;
        let archive = Archive::open(&path).unwrap();
        let every = (i64::MIN, i64::MAX);
        let error = archive
            .frames(Kind::Status, every, |_| {
                seen += 1;
                true
            })
            .unwrap_err();
        assert!(matches!(error, RecordError::Damaged { .. }), "{damage}: {error}");
        assert_eq!(seen, 140, "{damage}");
        // Moving from minute to minute skips the damaged block.
        let (mut minute, mut count) = (archive.minute(Kind::Status, Which::First).unwrap(), 0);
        while let Some(here) = minute {
            count += here.frames.len();
            minute = archive.minute(Kind::Status, Which::After(&here)).unwrap();
        }
        assert_eq!(count, 140, "{damage}");
    }
}

#[test]
fn a_period_that_is_no_json_costs_itself_alone_and_is_said() {
    let (_dir, path) = place();
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    for second in 0..90 {
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        recorder.keep(Ns::from_secs(second), move |documents| {
            drop(done);
            let kept = period(second, 0).put(documents);
            if second == 30 {
                // The keys of JSON objects must be texts.
                documents.put(Kind::Status, Figures::Whole, &BTreeMap::from([((1, 2), 3)]));
            }
            kept
        });
        let _ = is_done.recv();
    }
    recorder.close();
    assert!(recorder.take_notices()[0].contains("is not recorded"));
    let seen: Vec<u64> = frames(&path, Kind::Status)
        .iter()
        .map(|frame| frame.at.0 / 1_000_000_000)
        .collect();
    assert_eq!(seen, (0..90).filter(|second| *second != 30).collect::<Vec<_>>());
}

#[test]
fn going_on_ends_where_the_clock_was_set_back_in_the_last_minute() {
    let (_dir, path) = place();
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    for second in 0..150 {
        let off = if second < 140 { 0 } else { -3600 * SECOND };
        keep(&mut recorder, period(second, off));
    }
    // The writer is still open, and has written everything. A minute that has grown meanwhile is returned again.
    let archive = Archive::open(&path).unwrap();
    let is_written = |at: Ns| {
        let last = archive.minute(Kind::Status, Which::Last).unwrap();
        last.is_some_and(|minute| minute.frames.last().is_some_and(|frame| frame.at == at))
    };
    while !is_written(period(149, 0).at) {
        std::thread::yield_now();
    }
    let mut minute = archive.minute(Kind::Status, Which::First).unwrap();
    let mut seen = Vec::new();
    while let Some(here) = minute {
        seen.extend(here.frames.iter().map(|frame| frame.at));
        assert!(seen.len() <= 200, "{seen:?}");
        minute = archive.minute(Kind::Status, Which::After(&here)).unwrap();
    }
    let each: BTreeSet<Ns> = seen.iter().copied().collect();
    assert!(each.len() == seen.len() && seen.len() == 150, "{seen:?}");
}

#[test]
fn a_clock_that_is_far_ahead_for_a_while_makes_nothing_old() {
    let (_dir, path) = place();
    let ahead = |second| {
        if (700..880).contains(&second) {
            90 * 86400 * SECOND
        } else {
            0
        }
    };
    record(&path, (0..1500).map(|second| period(second, ahead(second))));
    assert_eq!(frames(&path, Kind::Status).len(), 1500);
}

#[test]
fn what_is_too_old_or_too_much_goes_first_and_the_file_stays_small() {
    let (_dir, path) = place();
    let limits = Limits {
        status: Ns::from_secs(1800),
        samples: Ns::from_secs(600),
        ..plenty()
    };
    let mut recorder = Recorder::begin(&path, &begin(), limits, WhenFull::LeaveOut).unwrap();
    for second in 0..3600 {
        keep(
            &mut recorder,
            Period {
                events: vec![event("decided", "x")],
                ..period(second, 0)
            },
        );
    }
    recorder.close();
    let oldest = |kind| frames(&path, kind)[0].at;
    assert!(
        (1680..=1800).contains(&(oldest(Kind::Status).0 / 1_000_000_000)),
        "{:?}",
        oldest(Kind::Status)
    );
    assert!(oldest(Kind::Sample) >= Ns::from_secs(2880));
    let archive = Archive::open(&path).unwrap();
    assert!(archive.events(&Wanted::default()).unwrap()[0].wall_ns >= NOON + 1680 * SECOND);
    let before = std::fs::metadata(&path).unwrap().len();
    prune(&path, None, Some(Bytes(200_000))).unwrap();
    let after = std::fs::metadata(&path).unwrap().len();
    assert!(
        after < before && after <= 300_000,
        "{before} bytes before, {after} after"
    );
    assert!(!frames(&path, Kind::Status).is_empty(), "the newest stay");
}

#[test]
fn decisions_that_are_written_are_told_by_the_numbers_of_their_rows() {
    let (_dir, path) = place();
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    let decided = |second: u64| {
        let mut decision = event("decided", "VM a: home 1");
        decision.0.action = Some("set-home".into());
        Period {
            // The same finding occurs each time, so it is one row with a count.
            events: vec![event("found", "VM a is slow"), decision],
            ..period(second, 0)
        }
    };
    for second in 0..3 {
        keep(&mut recorder, decided(second));
    }
    recorder.close();
    let told = recorder.take_written();
    assert_eq!(recorder.take_written(), []);
    let archive = Archive::open(&path).unwrap();
    assert_eq!(told.len(), 3);
    for (second, written) in (0..).zip(told) {
        let wanted = Wanted {
            id: Some(written.id),
            ..Wanted::default()
        };
        let rows = archive.events(&wanted).unwrap();
        assert_eq!((rows.len(), rows[0].record.kind.as_str()), (1, "decided"));
        assert_eq!(written.wall_ns, NOON + second * SECOND);
        assert_eq!(rows[0].wall_ns, written.wall_ns);
        let said = [written.policy, written.action, written.outcome];
        assert_eq!(said, ["arrange", "set-home", "done"]);
    }
}

#[test]
fn a_disk_that_fills_up_costs_periods_that_are_counted_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |arguments: &[&str]| {
        Command::new("mount")
            .args(arguments)
            .arg(dir.path())
            .status()
            .is_ok_and(|s| s.success())
    };
    if !mount(&["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs"]) {
        return; // like the tests of the guard: mounting requires root
    }
    let path = dir.path().join("history.sqlite");
    let filler = dir.path().join("filler");
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    let mut notices = Vec::new();
    for second in 0..60 {
        match second {
            20 => drop(std::fs::write(&filler, vec![0; 1 << 20])),
            40 => std::fs::remove_file(&filler).unwrap(),
            _ => {}
        }
        keep(
            &mut recorder,
            Period {
                status: noise(second),
                ..period(second, 0)
            },
        );
        notices.extend(recorder.take_notices());
    }
    recorder.close();
    let back = frames(&path, Kind::Status);
    let gaps = Wanted {
        kind: Some("gap".into()),
        ..Wanted::default()
    };
    let gaps = Archive::open(&path).unwrap().events(&gaps).unwrap();
    let umount = Command::new("umount").arg(dir.path()).status().unwrap();
    assert!(umount.success());
    for frame in &back {
        assert_eq!(frame.value, noise(frame.at.0 / 1_000_000_000));
    }
    let missed = gaps
        .iter()
        .map(|gap| gap.detail["missed_count"].as_u64().unwrap())
        .sum::<u64>();
    assert!(
        missed > 0 && back.len() as u64 + missed == 60,
        "{} there, {missed} said to be missing",
        back.len()
    );
    assert_eq!(back.last().unwrap().at, Ns::from_secs(59));
    assert!(
        notices[0].contains("not recorded") && notices[1].contains("again"),
        "{notices:?}"
    );
}

/// Returns data that does not compress.
fn noise(second: u64) -> Value {
    let mut state = second + 1;
    let number = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 20
    };
    (0..500).map(number).collect::<Vec<_>>().into()
}

#[test]
fn a_host_never_waits_for_the_disk_and_a_simulated_one_loses_nothing() {
    let (_dir, path) = place();
    let stuck = |when_full| {
        let mut recorder = Recorder::begin(&path, &begin(), plenty(), when_full).unwrap();
        let (release, released) = std::sync::mpsc::channel::<()>();
        recorder.keep(Ns(0), move |documents| {
            let _ = released.recv();
            period(0, 0).put(documents)
        });
        (recorder, release)
    };
    let (mut recorder, release) = stuck(WhenFull::LeaveOut);
    for second in 1..200 {
        recorder.keep(Ns::from_secs(second), move |documents| {
            period(second, 0).put(documents)
        });
    }
    drop(release);
    recorder.close();
    let of_host = frames(&path, Kind::Status).len();
    assert!((1..100).contains(&of_host), "{of_host}");

    let (mut recorder, release) = stuck(WhenFull::Wait);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(release);
        });
        for second in 1..200 {
            recorder.keep(Ns::from_secs(second), move |documents| {
                period(second, 0).put(documents)
            });
        }
    });
    recorder.close();
    assert_eq!(frames(&path, Kind::Status).len(), of_host + 200);
}

/// Returns the seconds of all periods, walking to the end or to the beginning.
fn walk(archive: &Archive, from: Which<'_>, on: fn(&Minute) -> Which<'_>) -> Vec<u64> {
    let mut seconds = Vec::new();
    let mut now = archive.minute(Kind::Status, from).unwrap();
    while let Some(minute) = now {
        seconds.extend(
            minute
                .frames
                .iter()
                .map(|frame| frame.value["second"].as_u64().unwrap()),
        );
        now = archive.minute(Kind::Status, on(&minute)).unwrap();
    }
    seconds.sort_unstable();
    seconds
}

#[test]
fn going_to_and_fro_passes_every_period_once_also_where_the_clock_was_set_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.sqlite");
    record(
        &path,
        (0..400).map(|s| period(s, if s < 200 { 0 } else { -150 * SECOND })),
    );
    let archive = Archive::open(&path).unwrap();
    let all: Vec<u64> = (0..400).collect();
    assert_eq!(walk(&archive, Which::First, |minute| Which::After(minute)), all);
    assert_eq!(walk(&archive, Which::Last, |minute| Which::Before(minute)), all);
    let found = archive
        .minute(Kind::Status, Which::At(NOON + 20 * SECOND))
        .unwrap()
        .unwrap();
    assert!(
        found
            .frames
            .iter()
            .any(|frame| frame.wall_ns == NOON + 20 * SECOND)
    );
    assert_eq!(
        archive
            .minute(Kind::Status, Which::At(NOON + 900 * SECOND))
            .unwrap(),
        None
    );
}

#[test]
fn the_minute_that_is_being_written_is_the_last_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.sqlite");
    let mut recorder = Recorder::begin(&path, &begin(), plenty(), WhenFull::LeaveOut).unwrap();
    (0..70).for_each(|second| keep(&mut recorder, period(second, 0)));
    // Another period is queued while this one is written.
    keep(&mut recorder, period(70, 0));
    let archive = Archive::open(&path).unwrap();
    let last = archive.minute(Kind::Status, Which::Last).unwrap().unwrap();
    assert_eq!(last.frames[0].value["second"], 60);
    (71..130).for_each(|second| keep(&mut recorder, period(second, 0)));
    recorder.close();
    let next = archive
        .minute(Kind::Status, Which::After(&last))
        .unwrap()
        .unwrap();
    assert!(
        next.frames.iter().any(|frame| frame.value["second"] == 71),
        "{next:?}"
    );
    assert_eq!(
        archive
            .minute(Kind::Status, Which::After(&next))
            .unwrap()
            .unwrap()
            .frames[0]
            .value["second"],
        120
    );
}

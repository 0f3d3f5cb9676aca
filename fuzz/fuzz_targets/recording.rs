//! Fuzzes a history, whose rows are the input (see `homenode_fuzz::history`), with the code of `why`, `replay`, `record
//! scenario`, `record export` and `top --at`. A damaged minute must not affect any other minute, and nothing may be shown that
//! was not recorded.

#![no_main]

use std::cell::RefCell;

use axum::body::Body;
use axum::http::Request;
use homenode_agent::history::read_recorded;
use homenode_agent::http::Came;
use homenode_agent::past::Place;
use homenode_agent::replay::{Wanted, replay};
use homenode_agent::role::Role;
use homenode_agent::{trace, why};
use homenode_calibrate::recorded::{About, Purpose, Recorded, Seen};
use homenode_fuzz::history::{History, WHOLE_COUNT, WHOLE_RUN, machine, whole};
use homenode_fuzz::site::Served;
use homenode_recorder::columns::{read, unpack, unpack_at};
use homenode_recorder::table::{COLUMNS, From, Parquet, vms};
use homenode_recorder::{Archive, Frame, Kind, Pick, RecordError, Which};
use homenode_twin::Scenario;
use homenode_units::Ns;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const ALWAYS: (i64, i64) = (i64::MIN, i64::MAX);
/// Maximum number of minutes; more than an input can have.
const MINUTES_MAX: usize = 100;
/// Number of periods in a column that is read without a history.
const COUNT: usize = 3;

/// HTTP requests that read the history.
const PATHS: [&str; 4] = [
    "/v1/history?vm=web&from=1970-01-01T00:00:00Z&to=1970-01-01T00:02:00Z",
    "/v1/overview?at=1970-01-01T00:00:30Z",
    "/v1/decisions?limit=10",
    "/v1/vms/web/why",
];

thread_local! {
    static KEPT: RefCell<(History, Served)> = RefCell::new({
        let history = History::new();
        let served = Served::new(None, Some(&history.path())).expect("nothing is wrong");
        (history, served)
    });
}

/// Requests all `PATHS` from an agent, which must answer or report a problem.
fn served(served: &mut Served) {
    for path in PATHS {
        let request = Request::builder().uri(path).body(Body::empty());
        let came = Came::Socket(Role::Viewer);
        served.answer(came, request.expect("a path")).is_one(true, false);
    }
}

fn frames(archive: &Archive, run: Option<i64>, kind: Kind) -> Vec<Frame> {
    let mut frames = Vec::new();
    match archive.frames_of(run, kind, ALWAYS, |frame| {
        frames.push(frame);
        true
    }) {
        Ok(()) | Err(RecordError::Damaged { .. }) => frames,
        Err(error) => panic!("rows that are damaged keep others from being read: {error}"),
    }
}

/// Checks that reading only some keys or places of a column gives the same values as reading all of it.
fn picks_agree(column: &[u8]) {
    let Ok(whole) = read(column, Pick::All) else {
        return;
    };
    let all = unpack(&whole, COUNT);
    if let Some(all) = &all {
        let places: Vec<usize> = (0..COUNT).step_by(2).collect();
        let some = places.iter().map(|place| all[*place].clone()).collect();
        assert_eq!(unpack_at(&whole, COUNT, &places), Some(some));
    }
    let of_vm = Pick::Keys(&[("id", Pick::All), ("name", Pick::All)]);
    for pick in [
        Pick::Keys(&[("at_ns", Pick::All)]),
        Pick::Keys(&[("vms", Pick::Called("web", &of_vm))]),
        Pick::Called("web", &Pick::All),
    ] {
        let picked = read(column, pick).ok().and_then(|column| unpack(&column, COUNT));
        let (Some(all), Some(picked)) = (&all, picked) else {
            continue;
        };
        for (all, picked) in all.iter().zip(&picked) {
            assert!(picked.get("at_ns").is_none_or(|at| all.get("at_ns") == Some(at)));
        }
    }
}

/// Checks that the undamaged minute is read, whatever the other rows are.
fn is_whole(archive: &Archive) {
    for kind in Kind::ALL {
        for run in [Some(WHOLE_RUN), None] {
            let mut given = frames(archive, run, kind);
            given.retain(|frame| frame.run == WHOLE_RUN);
            let given: Vec<(Ns, Value)> = given.into_iter().map(|frame| (frame.at, frame.value)).collect();
            let wanted: Vec<_> = (0..WHOLE_COUNT)
                .map(|at| (Ns(at.unsigned_abs()), whole(at)))
                .collect();
            assert_eq!(given, wanted);
        }
        let mut minutes = 0;
        let mut seen = 0;
        let mut at = archive.minute(kind, Which::First).expect("it can be read");
        while let Some(minute) = at {
            minutes += 1;
            assert!(minutes <= MINUTES_MAX, "going on never ends");
            seen += usize::from(minute.frames[0].run == WHOLE_RUN);
            at = archive
                .minute(kind, Which::After(&minute))
                .expect("it can be read");
        }
        assert_eq!(seen, 1, "the whole minute among {minutes}");
        let _ = (archive.size(kind), archive.span(kind));
    }
}

/// Shows the host at several times in the past.
fn past(archive: &Archive) {
    let span = archive.span(Kind::Status).expect("it can be read");
    let (first, last) = span.expect("there is a minute");
    for wall_ns in [first, i64::midpoint(first, last), last, i64::MIN, i64::MAX] {
        let Some(mut place) = Place::at(archive, wall_ns).expect("it can be read") else {
            continue;
        };
        for by in [0, -1, 2, -3] {
            if place.step(archive, by).expect("it can be read") {
                let _ = place.overview();
            }
        }
    }
}

/// Exports the history as `record export` does.
fn exported(archive: &Archive, frames: &[Frame], history: &History) {
    let mut parquet = Parquet::new(Vec::new()).expect("columns are possible");
    for frame in frames {
        for vm in vms(frame, None) {
            for column in COLUMNS {
                if let From::Status(pointer) = column.from {
                    let _ = vm.pointer(pointer);
                }
            }
        }
        parquet.frame(frame, None).expect("memory is not full");
    }
    parquet.finish().expect("memory is not full");
    match trace::export(archive, ALWAYS, &history.path().with_extension("pftrace")) {
        Ok(_) | Err(trace::TraceError::Record(RecordError::Damaged { .. })) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Makes a scenario from the samples as `record scenario` does.
fn simulated(samples: &[Frame]) {
    let machine = machine();
    let mut seen = Seen::new(&machine);
    for frame in samples.iter().filter(|frame| frame.run == 1) {
        if let Ok((sample, _)) = read_recorded(frame.value.clone()) {
            seen.take(sample);
        }
    }
    let Ok(recorded) = Recorded::of(&machine, &seen) else {
        return;
    };
    let about = About {
        machine: machine.name.clone(),
        policies: vec!["tavo".to_owned()],
        ..About::default()
    };
    for purpose in [Purpose::File, Purpose::Fit] {
        let text = recorded.text(&about, purpose);
        Scenario::from_toml("scenario.toml", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

fn asked(archive: &Archive) {
    for (vm, at) in [("web", None), ("db", Some(30_000_000_000))] {
        if let Err(error) = why::ask(archive, vm, (at, Ns::from_secs(20)), None) {
            assert!(!error.to_string().is_empty());
        }
    }
    for run in [None, Some(1)] {
        let wanted = Wanted {
            run,
            ..Wanted::default()
        };
        if let Ok(report) = replay(archive, &wanted) {
            assert!(report.same_count <= report.recorded_count.min(report.replayed_count));
            assert_eq!(report.same, report.first_difference_wall_ns.is_none());
        }
    }
}

fuzz_target!(|text: &str| {
    picks_agree(
        text.split_once('\n')
            .map_or(text, |(_, column)| column)
            .as_bytes(),
    );
    KEPT.with_borrow_mut(|(history, agent)| {
        let archive = history.fill(text);
        is_whole(&archive);
        past(&archive);
        let (statuses, samples) = (
            frames(&archive, None, Kind::Status),
            frames(&archive, None, Kind::Sample),
        );
        exported(&archive, &statuses, history);
        simulated(&samples);
        asked(&archive);
        served(agent);
    });
});

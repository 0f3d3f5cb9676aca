//! Traces for Perfetto, read by the protobufs of Perfetto's own Python package where it is installed (`pip install perfetto`,
//! `HOMENODE_PYTHON` names the Python that has it). What a trace is made of, `homenode-trace` tests itself.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{run, stdout};

/// Counts kinds of packets and lanes; fields that Perfetto does not know are an error.
const READER: &str = r#"
import sys
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
trace = pb.Trace()
with open(sys.argv[1], "rb") as file:
    trace.ParseFromString(file.read())
assert len(trace.packet) > 100
kinds, names, begun = {}, {}, set()
for packet in trace.packet:
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        names[track.uuid] = track.name
        assert track.parent_uuid == 0 or track.parent_uuid in names
    elif packet.HasField("track_event"):
        event = packet.track_event
        assert packet.HasField("timestamp") and event.track_uuid in names
        kind = pb.TrackEvent.Type.Name(event.type)
        kinds[kind] = kinds.get(kind, 0) + 1
        begun.update(event.flow_ids)
        assert begun.issuperset(event.terminating_flow_ids)
    else:
        raise SystemExit(f"unknown packet {packet}")
    for note in packet.track_event.debug_annotations:
        assert note.name and note.string_value
again = pb.Trace()
again.ParseFromString(trace.SerializeToString())
assert again == trace
print(sorted(kinds), len(names), len(begun) > 0, "vCPU 0" in names.values(), "links" in names.values())
"#;

fn perfetto(trace: &Path) -> Option<Output> {
    let python = std::env::var("HOMENODE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has = Command::new(&python)
        .args(["-c", "import perfetto.protos"])
        .output()
        .ok()?;
    if !has.status.success() {
        return None;
    }
    Command::new(&python)
        .args(["-c", READER])
        .arg(trace)
        .output()
        .ok()
}

/// What the trace's reader says; where there is none, that the file is there.
fn check(trace: &Path) {
    assert!(std::fs::metadata(trace).unwrap().len() > 10_000);
    let Some(read) = perfetto(trace) else { return };
    let said = String::from_utf8_lossy(&read.stdout);
    let complaint = String::from_utf8_lossy(&read.stderr);
    assert!(read.status.success(), "{complaint}");
    for kind in [
        "TYPE_COUNTER",
        "TYPE_INSTANT",
        "TYPE_SLICE_BEGIN",
        "TYPE_SLICE_END",
    ] {
        assert!(said.contains(kind), "{said}");
    }
    assert!(said.trim_end().ends_with("True True True"), "{said}");
}

#[test]
fn perfettos_own_protobufs_read_the_traces_of_runs_simulations_and_histories() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let done = |args: &[&str]| {
        let ran = run(args);
        assert!(ran.status.success(), "{args:?}: {ran:?}");
        ran
    };
    let [ran, simulated, exported, history] = ["run", "sim", "export", "history.sqlite"].map(path);
    done(&[
        "run",
        "--host",
        "twin",
        "--fast",
        "--duration",
        "30s",
        "--trace",
        &ran,
        "--history",
        &history,
        "--policies",
        "tavo",
        "--json",
    ]);
    done(&[
        "sim", "churn", "--policy", "tavo", "--policy", "homenode", "--trace", &simulated, "--json",
    ]);
    let said = done(&["record", "export", "--trace", &exported, "--history", &history]);
    assert!(
        stdout(&said).contains("30 periods") || stdout(&said).contains("31 periods"),
        "{}",
        stdout(&said)
    );
    for trace in [ran, simulated, exported] {
        check(Path::new(&trace));
    }
    let nowhere = path("none/trace");
    let refused = run(&["sim", "churn", "--trace", &nowhere]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(2) && said.contains("none/trace"),
        "{said}"
    );
}

#[test]
fn a_trace_that_cannot_be_written_is_said_at_once_and_the_run_goes_on() {
    let ran = run(&[
        "run",
        "--host",
        "twin",
        "--fast",
        "--duration",
        "60s",
        "--trace",
        "/dev/full",
        "--json",
    ]);
    assert!(ran.status.success(), "{ran:?}");
    let lines = stdout(&ran);
    let lines: Vec<&str> = lines.lines().collect();
    let said: Vec<usize> = (0..lines.len())
        .filter(|at| lines[*at].contains("/dev/full"))
        .collect();
    let last = lines.iter().rposition(|line| line.contains("\"epoch/1\""));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(lines[said[0]].contains("not traced"), "{}", lines[said[0]]);
    assert!(said[0] + 10 < last.unwrap(), "{said:?} {last:?}");
}

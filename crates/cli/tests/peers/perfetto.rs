//! Traces, read with Perfetto's own Python package.
//!
//! Not part of `cargo test`: `scripts/http-setup.sh` fetches the package, and `make http` runs these tests. `homenode-trace`
//! itself tests the contents of traces.

use std::process::Command;

use crate::common::{fetched, run, stdout, text};

/// Script that counts the kinds of packets and lanes, and fails on fields that Perfetto does not know.
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

/// Checks that the reader accepts the trace.
fn is_read(trace: &str) {
    let read = Command::new(fetched("perfetto/bin/python3"))
        .args(["-c", READER, trace])
        .output()
        .expect("Python can be started");
    let said = text(&read);
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
        is_read(&trace);
    }
}

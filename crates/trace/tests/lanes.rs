//! A trace of the simulator, read back: every slice ends, time goes forward, and arrows lead from decisions to their effects.

use std::collections::{BTreeMap, BTreeSet};

use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_host::Host;
use homenode_trace::proto::{Trace, TracePacket, TrackDescriptor, TrackEvent, Type};
use homenode_trace::{Happened, Lanes, Period};
use homenode_twin::{Scenario, Twin};
use homenode_units::Ns;
use prost::Message;

/// Traces a scenario under two sets of policies, as two runs in one trace.
fn traced(name: &str, seconds: u64) -> Vec<u8> {
    let scenario = Scenario::builtin(name).unwrap();
    let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap_or("r910")).unwrap();
    let mut bytes = Vec::new();
    let mut lanes = Lanes::new(&mut bytes, "tavo", &machine).unwrap();
    for policies in [PolicySet::Tavo, PolicySet::Homenode] {
        if policies == PolicySet::Homenode {
            lanes.next_run("homenode", &machine).unwrap();
        }
        let config = Config {
            policies,
            ..Config::default()
        };
        let mut twin = Twin::new(machine.clone(), &scenario, 1).unwrap();
        let mut control = Control::new(config, Mode::Act);
        for _ in 0..seconds {
            twin.wait(Ns::from_secs(1));
            let cycle = control.step(&mut twin).unwrap();
            let happened: Vec<Happened> = cycle.events.iter().map(Happened::from).collect();
            let period = Period {
                at: cycle.status.at_ns,
                status: &cycle.status,
                sample: control.sample(),
                happened: &happened,
            };
            lanes.period(period).unwrap();
        }
    }
    lanes.finish().unwrap();
    bytes
}

struct Read {
    tracks: BTreeMap<u64, TrackDescriptor>,
    events: Vec<(u64, TrackEvent)>,
}

fn read(bytes: &[u8]) -> Read {
    let trace = Trace::decode(bytes).unwrap();
    let mut read = Read {
        tracks: BTreeMap::new(),
        events: Vec::new(),
    };
    assert_eq!(trace.packet[0].sequence_flags, Some(1));
    for packet in trace.packet {
        let TracePacket {
            timestamp,
            track_event,
            track_descriptor,
            ..
        } = packet;
        if let Some(track) = track_descriptor {
            let parent = track
                .parent_uuid
                .is_none_or(|parent| read.tracks.contains_key(&parent));
            assert!(parent, "{track:?} is in a lane that there is not");
            assert!(read.tracks.insert(track.uuid.unwrap(), track).is_none());
        }
        read.events
            .extend(track_event.map(|event| (timestamp.unwrap(), event)));
    }
    read
}

impl Read {
    fn path(&self, track: u64) -> String {
        let lane = &self.tracks[&track];
        let above = lane
            .parent_uuid
            .map(|parent| self.path(parent) + " / ")
            .unwrap_or_default();
        above + lane.name()
    }
}

#[test]
fn what_begins_ends_and_time_goes_forward_on_each_lane() {
    let read = read(&traced("churn", 90));
    let (mut open, mut last): (BTreeMap<u64, u32>, BTreeMap<u64, u64>) = Default::default();
    let mut values = 0;
    for (at, event) in &read.events {
        let track = event.track_uuid();
        let is_counter = read.tracks[&track].counter.is_some();
        assert_eq!(
            is_counter,
            event.r#type() == Type::Counter,
            "{}",
            read.path(track)
        );
        let before = last.insert(track, *at).unwrap_or_default();
        assert!(before <= *at, "{}: {at} after {before}", read.path(track));
        let open = open.entry(track).or_default();
        match event.r#type() {
            Type::SliceBegin => *open += 1,
            Type::SliceEnd => *open = open.checked_sub(1).expect("nothing began"),
            Type::Counter => {
                values += 1;
                assert!(event.double_counter_value().is_finite());
            }
            _ => {}
        }
    }
    let left: Vec<String> = open
        .iter()
        .filter(|(_, open)| **open > 0)
        .map(|(track, _)| read.path(*track))
        .collect();
    assert!(
        left.is_empty() && values > 1000,
        "{values} values; these never end: {left:?}"
    );
    let paths: BTreeSet<String> = read.tracks.keys().map(|track| read.path(*track)).collect();
    for wanted in [
        "tavo / node 0 / CPUs busy",
        "homenode / node 1 / memory traffic",
        "homenode / links / 0 → 1",
    ] {
        assert!(paths.contains(wanted), "{paths:#?}");
    }
    assert!(
        paths
            .iter()
            .any(|path| path.contains(" / VM ") && path.ends_with(" / vCPU 0")),
        "{paths:#?}"
    );
}

#[test]
fn arrows_lead_from_decisions_to_what_they_led_to() {
    let read = read(&traced("churn", 90));
    let mut begun: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut led_to: BTreeMap<String, u32> = BTreeMap::new();
    for (at, event) in &read.events {
        for flow in &event.flow_ids {
            assert!(read.path(event.track_uuid()).ends_with(" / decisions"));
            begun.insert(*flow, (event.track_uuid(), *at));
        }
        for flow in &event.terminating_flow_ids {
            let (decision, then) = begun[flow];
            let (from, to) = (&read.tracks[&decision], &read.tracks[&event.track_uuid()]);
            assert_eq!(from.parent_uuid, to.parent_uuid, "an arrow leads to another VM");
            assert!(
                *at >= then && *at <= then + 2_000_000_000,
                "{} ns later",
                at - then
            );
            let kind = to.name().split(' ').next().unwrap().to_owned();
            *led_to.entry(kind).or_default() += 1;
        }
    }
    for kind in ["home", "pages", "vCPU"] {
        assert!(led_to.contains_key(kind), "no arrow leads to {kind}: {led_to:?}");
    }
}

#[test]
fn a_writer_that_fails_is_told() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let machine = homenode_machine_files::preset("r420").unwrap();
    assert!(Lanes::new(Full, "full", &machine).is_err());
}

//! Writes packets one after the other, and keeps none of them.

use std::io::{self, Write};

use homenode_units::Ns;
use prost::Message;

use crate::proto::{
    CLEARED, CounterDescriptor, DebugAnnotation, Ordering, Trace, TracePacket, TrackDescriptor, TrackEvent,
    Type,
};

/// A track's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Track(pub u64);

/// An arrow between two events, by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Flow(pub u64);

/// Further data of an event.
#[derive(Debug, Default)]
pub(crate) struct More<'a> {
    /// The arrow that begins at the event.
    pub begins: Option<Flow>,
    /// The arrows that end at the event.
    pub ends: Vec<Flow>,
    /// Named texts.
    pub notes: Vec<(&'a str, String)>,
}

/// The writer's id, which all packets have.
const SEQUENCE: u32 = 1;

/// Writes packets.
#[derive(Debug)]
pub(crate) struct Packets<W> {
    to: W,
    last_number: u64,
    buffer: Vec<u8>,
    is_first: bool,
}

impl<W: Write> Packets<W> {
    pub(crate) fn new(to: W) -> Packets<W> {
        Packets {
            to,
            last_number: 0,
            buffer: Vec::new(),
            is_first: true,
        }
    }

    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn flow(&mut self) -> Flow {
        Flow(self.number())
    }

    fn write(&mut self, packet: TracePacket) -> io::Result<()> {
        let first = std::mem::take(&mut self.is_first);
        let packet = TracePacket {
            trusted_packet_sequence_id: Some(SEQUENCE),
            sequence_flags: first.then_some(CLEARED),
            ..packet
        };
        self.buffer.clear();
        let trace = Trace { packet: vec![packet] };
        trace.encode(&mut self.buffer).map_err(io::Error::other)?;
        self.to.write_all(&self.buffer)
    }

    /// Creates a track with this rank among its siblings.
    pub(crate) fn track(&mut self, name: &str, parent: Option<Track>, rank: i32) -> io::Result<Track> {
        self.described(name, parent, rank, None)
    }

    /// Creates a track of values.
    pub(crate) fn counter(&mut self, name: &str, parent: Track, rank: i32, unit: &str) -> io::Result<Track> {
        let counter = CounterDescriptor {
            unit_name: Some(unit.to_owned()),
        };
        self.described(name, Some(parent), rank, Some(counter))
    }

    fn described(
        &mut self,
        name: &str,
        parent: Option<Track>,
        rank: i32,
        counter: Option<CounterDescriptor>,
    ) -> io::Result<Track> {
        let track = Track(self.number());
        let descriptor = TrackDescriptor {
            uuid: Some(track.0),
            name: Some(name.to_owned()),
            parent_uuid: parent.map(|parent| parent.0),
            counter,
            child_ordering: Some(Ordering::Explicit.into()),
            sibling_order_rank: Some(rank),
        };
        self.write(TracePacket {
            track_descriptor: Some(descriptor),
            ..TracePacket::default()
        })?;
        Ok(track)
    }

    fn event(&mut self, at: Ns, track: Track, kind: Type, event: TrackEvent) -> io::Result<()> {
        let event = TrackEvent {
            r#type: Some(kind.into()),
            track_uuid: Some(track.0),
            ..event
        };
        self.write(TracePacket {
            timestamp: Some(at.0),
            track_event: Some(event),
            ..TracePacket::default()
        })
    }

    fn named(&mut self, at: Ns, track: Track, kind: Type, name: &str, more: More<'_>) -> io::Result<()> {
        let note = |(name, text): (&str, String)| DebugAnnotation {
            name: Some(name.to_owned()),
            string_value: Some(text),
        };
        let event = TrackEvent {
            name: Some(name.to_owned()),
            categories: vec!["homenode".to_owned()],
            debug_annotations: more.notes.into_iter().map(note).collect(),
            flow_ids: more.begins.into_iter().map(|flow| flow.0).collect(),
            terminating_flow_ids: more.ends.into_iter().map(|flow| flow.0).collect(),
            ..TrackEvent::default()
        };
        self.event(at, track, kind, event)
    }

    /// Begins a slice.
    pub(crate) fn begin(&mut self, at: Ns, track: Track, name: &str, more: More<'_>) -> io::Result<()> {
        self.named(at, track, Type::SliceBegin, name, more)
    }

    /// Ends the innermost open slice of a track.
    pub(crate) fn end(&mut self, at: Ns, track: Track) -> io::Result<()> {
        self.event(at, track, Type::SliceEnd, TrackEvent::default())
    }

    /// Writes an instantaneous event.
    pub(crate) fn instant(&mut self, at: Ns, track: Track, name: &str, more: More<'_>) -> io::Result<()> {
        self.named(at, track, Type::Instant, name, more)
    }

    /// Sets the value that is in force from now on.
    pub(crate) fn value(&mut self, at: Ns, track: Track, value: f64) -> io::Result<()> {
        let event = TrackEvent {
            double_counter_value: Some(value),
            ..TrackEvent::default()
        };
        self.event(at, track, Type::Counter, event)
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

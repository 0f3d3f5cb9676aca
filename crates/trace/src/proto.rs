//! The part of Perfetto's trace format that is written: messages and field numbers as in its public
//! `protos/perfetto/trace/trace_packet.proto` and `track_event/*.proto`. What is not used is left out, as protobuf has it.

use prost::Message;

/// A file is one of these; since fields that repeat may be written one after the other, so is each packet of it.
#[derive(Clone, PartialEq, Message)]
pub struct Trace {
    /// Everything.
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<TracePacket>,
}

/// One thing that is said.
#[derive(Clone, PartialEq, Message)]
pub struct TracePacket {
    /// When, in nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// Whose it is: all are the same writer's.
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    /// Something that happens on a track.
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    /// [`CLEARED`] with the first packet: nothing was said before.
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    /// What a track is.
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
}

/// `SEQ_INCREMENTAL_STATE_CLEARED`.
pub const CLEARED: u32 = 1;

/// A lane, or a lane of lanes.
#[derive(Clone, PartialEq, Message)]
pub struct TrackDescriptor {
    /// Its number, by which events name it.
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    /// As it is shown.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// The lane that it is in.
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    /// That its events are values.
    #[prost(message, optional, tag = "8")]
    pub counter: Option<CounterDescriptor>,
    /// How lanes in it are ordered.
    #[prost(enumeration = "Ordering", optional, tag = "11")]
    pub child_ordering: Option<i32>,
    /// Its place among them, the least first.
    #[prost(int32, optional, tag = "12")]
    pub sibling_order_rank: Option<i32>,
}

/// How lanes are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
pub enum Ordering {
    /// Not said.
    Unknown = 0,
    /// By name.
    Lexicographic = 1,
    /// By their first event.
    Chronological = 2,
    /// By `sibling_order_rank`.
    Explicit = 3,
}

/// A lane of values.
#[derive(Clone, PartialEq, Message)]
pub struct CounterDescriptor {
    /// What is counted, by its own name.
    #[prost(string, optional, tag = "6")]
    pub unit_name: Option<String>,
}

/// Something that happens.
#[derive(Clone, PartialEq, Message)]
pub struct TrackEvent {
    /// What kind of thing.
    #[prost(enumeration = "Type", optional, tag = "9")]
    pub r#type: Option<i32>,
    /// On which track.
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    /// By which it can be chosen.
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    /// As it is shown.
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    /// More about it.
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<DebugAnnotation>,
    /// The value of a counter.
    #[prost(double, optional, tag = "44")]
    pub double_counter_value: Option<f64>,
    /// Arrows that begin here, or go through.
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub flow_ids: Vec<u64>,
    /// Arrows that end here.
    #[prost(fixed64, repeated, packed = "false", tag = "48")]
    pub terminating_flow_ids: Vec<u64>,
}

/// What kind of thing happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
pub enum Type {
    /// Not said.
    Unspecified = 0,
    /// Something begins that lasts.
    SliceBegin = 1,
    /// The last of those that last on this track ends.
    SliceEnd = 2,
    /// Something at one moment.
    Instant = 3,
    /// A value.
    Counter = 4,
}

/// A figure or text about an event.
#[derive(Clone, PartialEq, Message)]
pub struct DebugAnnotation {
    /// Text.
    #[prost(string, optional, tag = "6")]
    pub string_value: Option<String>,
    /// What it is.
    #[prost(string, optional, tag = "10")]
    pub name: Option<String>,
}

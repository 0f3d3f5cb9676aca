//! The part of Perfetto's trace format that we use. Messages and field numbers are those of its public
//! `protos/perfetto/trace/trace_packet.proto` and `track_event/*.proto`. Unused fields are left out, as protobuf permits.

use prost::Message;

/// A whole file. In protobuf, repeated fields can be concatenated, so each packet is written as a file of its own.
#[derive(Clone, PartialEq, Message)]
pub struct Trace {
    /// All packets.
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<TracePacket>,
}

/// A packet of the trace.
#[derive(Clone, PartialEq, Message)]
pub struct TracePacket {
    /// Time, in nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// Id of the writer, which is the same in all packets.
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    /// An event on a track.
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    /// Set to [`CLEARED`] in the first packet, which says that there is no earlier state.
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    /// The description of a track.
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
}

/// `SEQ_INCREMENTAL_STATE_CLEARED`.
pub const CLEARED: u32 = 1;

/// A track, or a group of tracks.
#[derive(Clone, PartialEq, Message)]
pub struct TrackDescriptor {
    /// Id of the track, to which events refer.
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    /// The track's displayed name.
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    /// The track that contains this one.
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    /// Present in a track that shows values.
    #[prost(message, optional, tag = "8")]
    pub counter: Option<CounterDescriptor>,
    /// How the child tracks are ordered.
    #[prost(enumeration = "Ordering", optional, tag = "11")]
    pub child_ordering: Option<i32>,
    /// The track's rank among its siblings, lowest first.
    #[prost(int32, optional, tag = "12")]
    pub sibling_order_rank: Option<i32>,
}

/// The order of child tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
pub enum Ordering {
    /// Unspecified.
    Unknown = 0,
    /// By name.
    Lexicographic = 1,
    /// By their first event.
    Chronological = 2,
    /// By `sibling_order_rank`.
    Explicit = 3,
}

/// Describes a track of values.
#[derive(Clone, PartialEq, Message)]
pub struct CounterDescriptor {
    /// The name of the unit.
    #[prost(string, optional, tag = "6")]
    pub unit_name: Option<String>,
}

/// An event.
#[derive(Clone, PartialEq, Message)]
pub struct TrackEvent {
    /// The event's type.
    #[prost(enumeration = "Type", optional, tag = "9")]
    pub r#type: Option<i32>,
    /// The event's track.
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    /// Categories to filter by.
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    /// The event's displayed name.
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    /// Further data.
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<DebugAnnotation>,
    /// The value of a counter.
    #[prost(double, optional, tag = "44")]
    pub double_counter_value: Option<f64>,
    /// Arrows that begin here, or pass through.
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub flow_ids: Vec<u64>,
    /// Arrows that end here.
    #[prost(fixed64, repeated, packed = "false", tag = "48")]
    pub terminating_flow_ids: Vec<u64>,
}

/// Types of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
pub enum Type {
    /// Unspecified.
    Unspecified = 0,
    /// A slice begins.
    SliceBegin = 1,
    /// The innermost open slice of this track ends.
    SliceEnd = 2,
    /// An instantaneous event.
    Instant = 3,
    /// A value of a counter.
    Counter = 4,
}

/// A named text about an event.
#[derive(Clone, PartialEq, Message)]
pub struct DebugAnnotation {
    /// Text.
    #[prost(string, optional, tag = "6")]
    pub string_value: Option<String>,
    /// The annotation's name.
    #[prost(string, optional, tag = "10")]
    pub name: Option<String>,
}

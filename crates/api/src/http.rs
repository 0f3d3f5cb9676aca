//! Requests and answers over HTTP, below `/v1`. Where commands print the same answer, they share its type. [`openapi`] describes
//! all of the types.

mod openapi;

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;

use homenode_control::{LinkStatus, Mode, NodeStatus, Status};
use homenode_policy::arrange::Beside;
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeSet, Ns, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::answer::{CrowdedHome, Overview, PlacedFigures};
use crate::why::WallSpan;

pub use crate::time::WallTime;
pub use openapi::openapi;

/// Default and largest number of decisions on a page.
pub const DECISIONS: (u32, u32) = (100, 1000);
/// Most points in a VM's history.
pub const POINTS_MAX: u64 = 2000;
/// The longest span that one request reads.
pub const HISTORY_MAX: Ns = Ns::from_secs(24 * 3600);

/// An address to listen at. Addresses other than loopback need TLS and passwords, which the agent checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(SocketAddr);

impl Listen {
    /// Returns the address. Port 0 means any free port.
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

/// A text that is not an address and port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an address and port: write `127.0.0.1:9464` or `[::1]:9464`")]
pub struct NoAddress(String);

impl FromStr for Listen {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Listen, NoAddress> {
        let resolved = match text.strip_prefix("localhost:") {
            // `localhost` is not looked up, since a resolver's answers cannot be trusted.
            Some(port) => format!("127.0.0.1:{port}").to_socket_addrs().ok(),
            None => text
                .parse::<SocketAddr>()
                .ok()
                .map(|address| vec![address].into_iter()),
        };
        let address = resolved.and_then(|mut all| all.next());
        address.map(Listen).ok_or_else(|| NoAddress(text.to_owned()))
    }
}

/// The agent, and the host at the last sample.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HostStatus {
    /// Time of the last sample.
    pub time: WallTime,
    /// When the agent started.
    pub started: WallTime,
    /// The agent's version.
    pub version: String,
    /// Commit of the build.
    pub commit: String,
    /// The host that the agent runs on.
    pub host: String,
    /// Whether plans are carried out.
    pub mode: Mode,
    /// The active policies.
    pub policies: String,
    /// Time between cycles.
    pub period_ns: Ns,
    /// Number of cycles so far.
    pub cycle_count: u64,
    /// Why the host cannot be read at present; `null` if it can. If it cannot, the other values are older.
    pub trouble: Option<String>,
    /// Nodes, links and VMs.
    #[serde(flatten)]
    pub status: Status,
}

/// The time of which to show the host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverviewQuery {
    /// A time in the history; default: now.
    pub at: Option<WallTime>,
}

/// The host on one page, now or in the past: what `homenode top` shows.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Pictured {
    /// When the host was in this state: the last cycle at or before the requested time.
    pub time: WallTime,
    /// The span of time that can be requested; `null` if no history is kept, or the history is empty.
    pub recorded: Option<WallSpan>,
    /// Nodes, links, VMs, and recent events.
    #[serde(flatten)]
    pub overview: Overview,
}

/// The host's nodes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Nodes {
    /// The nodes, ascending.
    pub nodes: Vec<NodeStatus>,
}

/// Traffic between nodes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Links {
    /// The links, if counted.
    pub links: Vec<LinkStatus>,
}

/// Which decisions to list.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DecisionsQuery {
    /// Decisions on the VM with this name or UUID.
    pub vm: Option<String>,
    /// Decisions of this policy.
    pub policy: Option<String>,
    /// Decisions at or after this time.
    pub from: Option<WallTime>,
    /// Decisions at or before this time.
    pub to: Option<WallTime>,
    /// Where to continue: the value of `next` on the previous page.
    #[schemars(extend("pattern" = "^[0-9]{1,18}$"))]
    pub cursor: Option<String>,
    /// Most decisions to return.
    #[schemars(range(min = 1, max = 1000))]
    pub limit: Option<u32>,
}

/// Decisions, newest first.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Decisions {
    /// The decisions; at most as many as requested.
    pub decisions: Vec<DecisionRow>,
    /// The cursor for older decisions; `null` if there are none.
    pub next: Option<String>,
}

/// A decision and its outcome.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DecisionRow {
    /// Number of the decision in this history.
    pub id: i64,
    /// When the decision was made.
    pub time: WallTime,
    /// The VM's UUID.
    pub vm: Option<String>,
    /// The VM's name at that time.
    pub name: Option<String>,
    /// The policy that decided.
    pub policy: Option<String>,
    /// The action.
    pub action: Option<String>,
    /// The outcome.
    pub outcome: Option<String>,
    /// A sentence for people.
    pub text: String,
    /// The whole event, as `homenode run --json` prints it.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub detail: Value,
}

/// Which part of a VM's history to return.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HistoryQuery {
    /// The VM's name or UUID.
    #[schemars(length(min = 1))]
    pub vm: String,
    /// Start; by default an hour before the end.
    pub from: Option<WallTime>,
    /// End; by default now. The answer leaves out what is more than a day after the start, or cannot be read in 5 seconds. Its
    /// `to` then says how far it goes; use that as `from` of the next request.
    pub to: Option<WallTime>,
    /// Duration of a point, such as `10s` or `5min`; by default such that there are at most 300 points. If there would be more
    /// than 2000 points, a longer duration is used; `step_ns` in the answer says which.
    #[schemars(extend("pattern" = "^[1-9][0-9]{0,5}(ms|s|min|h)$"))]
    pub step: Option<String>,
}

/// Which slowdown to explain.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WhyQuery {
    /// When the VM was slow; by default in the last recorded window.
    pub at: Option<WallTime>,
    /// Length of the window around that time, such as `60s` or `10m`, from ten seconds to six hours; by default five minutes.
    #[schemars(extend("pattern" = "^([1-9][0-9]{1,3}s|[1-9][0-9]?(min|m)|[1-6]h)$"))]
    pub window: Option<String>,
}

/// A VM's history.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VmHistory {
    /// The VM, as named in the request.
    pub vm: String,
    /// Start.
    pub from: WallTime,
    /// End.
    pub to: WallTime,
    /// Duration of a point.
    pub step_ns: Ns,
    /// The points in which the VM was seen, oldest first.
    pub points: Vec<HistoryPoint>,
}

/// A point of a VM's history: means over the periods in the point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct HistoryPoint {
    /// Start of the point.
    pub time: WallTime,
    /// Number of periods in which the VM was seen.
    pub periods_count: u64,
    /// CPUs used.
    pub cpus_used: Option<f64>,
    /// vCPUs that waited.
    pub vcpus_waiting: Option<f64>,
    /// Instructions per second of all vCPUs.
    pub instructions_per_s: Option<f64>,
    /// Unhalted cycles per instruction.
    pub cycles_per_instruction: Option<f64>,
    /// Speed: instructions per second of CPU time that the VM wanted.
    pub instructions_per_cpu_s: Option<f64>,
    /// Speed divided by the usual speed, as the agent knew it at that time.
    pub speed_ratio: Option<f64>,
    /// LLC misses divided by references.
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that were local.
    pub local_access_ratio: Option<f64>,
    /// Memory traffic.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Touched memory on each node, at the end of the point.
    pub memory_by_node: Option<Vec<NodeMemory>>,
    /// Home nodes, at the end of the point.
    pub home: Option<NodeSet>,
}

/// Memory on a node.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NodeMemory {
    /// The node.
    pub node: u64,
    /// The amount.
    pub memory_bytes: Bytes,
}

/// A VM for which to find a place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Evaluate {
    /// Number of the VM's vCPUs.
    #[schemars(range(min = 1, max = 65536))]
    #[serde(deserialize_with = "whole::vcpus")]
    pub vcpus: u32,
    /// The VM's memory.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(deserialize_with = "whole::bytes")]
    pub memory_bytes: Bytes,
    /// The bandwidth that the VM needs, if known.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(default, deserialize_with = "whole::bandwidth")]
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Size of the huge pages that back all of the memory; absent for ordinary pages.
    #[schemars(extend("minimum" = 8192, "maximum" = whole::MAX))]
    #[serde(
        default,
        deserialize_with = "whole::huge_page",
        skip_serializing_if = "Option::is_none"
    )]
    pub huge_page_bytes: Option<Bytes>,
}

/// Reads whole numbers in every form that JSON has: `4.0` is a whole number.
mod whole {
    use homenode_units::{Bytes, BytesPerSec, Ns};
    use serde::{Deserialize, Deserializer, de::Error};
    use serde_json::Number;

    /// The largest whole number that every program can represent exactly.
    pub(super) const MAX: u64 = 1 << 53;

    fn whole<E: Error>(number: &Number, (least, most): (u64, u64)) -> Result<u64, E> {
        let exact = number.as_u64();
        let float = number
            .as_f64()
            .filter(|float| float.fract() == 0.0 && (0.0..=MAX as f64).contains(float));
        let whole = exact.or(float.map(|float| float as u64));
        let within = whole.filter(|whole| (least..=most).contains(whole));
        within.ok_or_else(|| E::custom(format!("{number} is not a whole number from {least} to {most}")))
    }

    pub(super) fn vcpus<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
        let whole = whole::<D::Error>(&Number::deserialize(d)?, (1, 65536))?;
        u32::try_from(whole).map_err(D::Error::custom)
    }

    pub(super) fn bytes<'de, D: Deserializer<'de>>(d: D) -> Result<Bytes, D::Error> {
        whole(&Number::deserialize(d)?, (0, MAX)).map(Bytes)
    }

    pub(super) fn time<'de, D: Deserializer<'de>>(d: D) -> Result<Ns, D::Error> {
        whole(&Number::deserialize(d)?, (0, MAX)).map(Ns)
    }

    pub(super) fn floor<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Bytes>, D::Error> {
        let number = Option::<Number>::deserialize(d)?;
        number
            .map(|number| whole(&number, (0, MAX)).map(Bytes))
            .transpose()
    }

    pub(super) fn huge_page<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Bytes>, D::Error> {
        let number = Option::<Number>::deserialize(d)?;
        number
            .map(|number| whole(&number, (8192, MAX)).map(Bytes))
            .transpose()
    }

    pub(super) fn bandwidth<'de, D: Deserializer<'de>>(d: D) -> Result<Option<BytesPerSec>, D::Error> {
        let number = Option::<Number>::deserialize(d)?;
        number
            .map(|number| whole(&number, (0, MAX)).map(BytesPerSec))
            .transpose()
    }
}

/// Whether and where a VM fits. Nothing is reserved.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Evaluated {
    /// Whether the VM fits.
    pub fits: bool,
    /// The share of the home's scarcest resource that stays free with the VM there (for CPU: of free hyperthreads), divided by
    /// the number of the home's nodes, times the speeds in `beside`: from 0 to 1; 0 if the VM does not fit.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub score: f64,
    /// The nodes.
    pub nodes: Option<NodeSet>,
    /// Reasons, in sentences.
    pub reasons: Vec<String>,
    /// Predicted speeds of the VM and of its neighbours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// If the VM fits nowhere but its memory does: the best home, with its price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crowded: Option<CrowdedHome>,
    /// The numbers behind the reasons.
    pub figures: PlacedFigures,
}

impl Evaluated {
    /// Evaluates a placement.
    pub fn of(placed: crate::answer::Placed) -> Evaluated {
        let score = match &placed.figures {
            PlacedFigures::Fits {
                needs,
                left,
                cpus_stay,
                ..
            } => {
                let pairs = [
                    (needs.memory_share, left.memory_share),
                    (needs.bandwidth_share, left.bandwidth_share),
                ];
                // A need of zero means that the resource is not counted, so it does not affect the score.
                let counted = pairs.iter().filter(|(needs, _)| *needs > 0.0);
                let stay = counted.map(|(needs, left)| 1.0 - needs / left);
                // With memory interleaved over n nodes, one access in n is local.
                let nodes = placed.nodes.as_ref().map_or(1, NodeSet::len).max(1);
                let speed = placed
                    .beside
                    .map_or(1.0, |beside| beside.own * beside.worst_neighbour);
                stay.fold(*cpus_stay, f64::min).clamp(0.0, 1.0) / nodes as f64 * speed.clamp(0.0, 1.0)
            }
            PlacedFigures::Short { .. } => 0.0,
        };
        Evaluated {
            fits: placed.nodes.is_some(),
            score: if score.is_finite() { score } else { 0.0 },
            nodes: placed.nodes,
            reasons: placed.reasons,
            beside: placed.beside,
            crowded: placed.crowded,
            figures: placed.figures,
        }
    }
}

/// The settings of a VM that operators can change while it runs. They are set all at once; `null` means not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("required" = ["permit", "memory_policy", "memory_floor_bytes"]))]
pub struct VmSettings {
    /// The permit that the VM books, and that the agent enforces.
    #[serde(deserialize_with = "Option::deserialize")]
    pub permit: Option<Permit>,
    /// How the VM's memory is placed and moved; if not set, the agent chooses.
    #[serde(deserialize_with = "Option::deserialize")]
    pub memory_policy: Option<MemoryPolicy>,
    /// The least memory that the VM keeps; if not set, the agent takes none of it.
    #[serde(deserialize_with = "whole::floor")]
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    pub memory_floor_bytes: Option<Bytes>,
}

impl VmSettings {
    /// Extracts these settings from all settings of a VM.
    pub fn of(settings: &homenode_host::VmSettings) -> VmSettings {
        VmSettings {
            permit: settings.permit,
            memory_policy: settings.memory_policy,
            memory_floor_bytes: settings.memory_floor,
        }
    }
}

/// How long the agent is to change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseFor {
    /// Length of the pause from now; zero ends a pause.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(deserialize_with = "whole::time")]
    pub span_ns: Ns,
}

/// The result of reloading settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reloaded {
    /// Keys of settings that changed.
    pub changed: Vec<String>,
    /// Keys of settings that differ in the file, and take effect at the next start.
    pub at_next_start: Vec<String>,
}

impl fmt::Display for Reloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.changed.as_slice() {
            [] => f.write_str("settings were reloaded, and none has changed")?,
            changed => write!(f, "settings were reloaded; changed: {}", changed.join(", "))?,
        }
        match self.at_next_start.as_slice() {
            [] => Ok(()),
            waiting => write!(
                f,
                "; a running agent cannot change {}: restart it for that",
                waiting.join(", ")
            ),
        }
    }
}

/// Why there is no answer, in the format of RFC 9457.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// The kind of problem: `urn:homenode:problem:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    /// Title of the problem, for people.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The mistake in this request, and the remedy.
    pub detail: String,
}

/// The data of an event in the stream.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Told {
    /// Wall-clock time.
    pub time: WallTime,
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// The VM's UUID, if the event is about a VM.
    pub vm: Option<VmId>,
    /// A sentence for people.
    pub text: String,
    /// The whole event, as `homenode run --json` prints it.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub detail: Value,
}

/// A cycle is over: answers from now on are newer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Looked {
    /// Wall-clock time.
    pub time: WallTime,
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// Number of cycles so far.
    pub cycle_count: u64,
}

/// Events are missing at this point of the stream.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Missed {
    /// Number of missing events; `null` if unknown, since another run sent them.
    pub missed_count: Option<u64>,
}

#[cfg(test)]
mod tests {
    use homenode_policy::demand::BandwidthFrom;
    use homenode_policy::placement::Match;

    use super::*;
    use crate::answer::{Placed, Shares};

    #[test]
    fn where_to_listen_is_an_address_and_a_port() {
        let listen = |text: &str| text.parse::<Listen>();
        for good in ["127.0.0.1:0", "0.0.0.0:9464", "[::1]:9464", "localhost:80"] {
            assert!(listen(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "9464",
            "127.0.0.1",
            "example.org:80",
            "localhost:x",
            "127.0.0.1:99999",
        ] {
            assert!(
                listen(bad).unwrap_err().to_string().contains("is not an address"),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_score_is_what_is_left_of_the_scarcest_resource() {
        let shares = |[cpu, memory, bandwidth]: [f64; 3]| Shares::from([cpu, memory, bandwidth]);
        let score_beside = |beside, nodes: &str, needs, left| {
            let figures = PlacedFigures::Fits {
                matched: Match::Room,
                needs: shares(needs),
                left: shares(left),
                // A core has two hyperthreads.
                cpus_stay: 1.0 - needs[0] / 2.0 / left[0],
                bandwidth_from: BandwidthFrom::Unknown,
            };
            let (nodes, reasons) = (Some(nodes.parse().unwrap()), vec![]);
            Evaluated::of(Placed {
                nodes,
                reasons,
                beside,
                crowded: None,
                figures,
            })
            .score
        };
        let score_on = |nodes, needs, left| score_beside(None, nodes, needs, left);
        let score = |needs, left| score_on("1", needs, left);
        // The share of memory that stays, 1 - .1/.2, is less than that of hyperthreads, 1 - .05/.4.
        assert!((score([0.1, 0.1, 0.0], [0.4, 0.2, 0.0]) - 0.5).abs() < 1e-9);
        assert_eq!(score([0.1, 0.2, 0.0], [1.0, 0.2, 1.0]), 0.0);
        // Each vCPU gets a core, and no core is left, but the second hyperthreads of the cores are.
        assert_eq!(score([0.2, 0.0, 0.0], [0.2, 1.0, 1.0]), 0.5);
        // A home of two nodes that keeps everything is as good as one node that keeps half: half of its accesses are remote.
        assert_eq!(score_on("0-1", [0.0; 3], [1.0; 3]), 0.5);
        // Everything stays free, but the VM is half as fast next to the others.
        let slow = Beside {
            own: 0.5,
            worst_neighbour: 1.0,
        };
        assert_eq!(score_beside(Some(slow), "1", [0.0; 3], [1.0; 3]), 0.5);
        let figures = PlacedFigures::Short { shortages: vec![] };
        let short = Placed {
            nodes: None,
            reasons: vec![],
            beside: None,
            crowded: None,
            figures,
        };
        assert_eq!(
            (Evaluated::of(short.clone()).score, Evaluated::of(short).fits),
            (0.0, false)
        );
    }
}

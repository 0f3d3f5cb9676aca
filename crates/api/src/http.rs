//! What is asked and answered over HTTP, below `/v1`. Types that commands print too are the same; [`openapi`] describes all.

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

use crate::answer::{Overview, PlacedFigures};
use crate::why::WallSpan;

pub use crate::time::WallTime;
pub use openapi::openapi;

/// What a page of decisions holds unless it is said otherwise, and at most.
pub const DECISIONS: (u32, u32) = (100, 1000);
/// Most points of a history.
pub const POINTS_MAX: u64 = 2000;
/// The longest stretch that one request reads.
pub const HISTORY_MAX: Ns = Ns::from_secs(24 * 3600);

/// Where to listen. What else than loopback takes is for the agent to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(SocketAddr);

impl Listen {
    /// The address; port 0 takes one that is free.
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        let resolved = match text.strip_prefix("localhost:") {
            // Not asked of a resolver, which may be told anything.
            Some(port) => format!("127.0.0.1:{port}").to_socket_addrs().ok(),
            None => text
                .parse::<SocketAddr>()
                .ok()
                .map(|address| vec![address].into_iter()),
        };
        let address = resolved.and_then(|mut all| all.next());
        let address = address.ok_or_else(|| {
            format!("`{text}` is no address and port: write `127.0.0.1:9464` or `[::1]:9464`")
        })?;
        Ok(Listen(address))
    }
}

/// The agent, and the host as it was last seen.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HostStatus {
    /// When the host was last seen.
    pub time: WallTime,
    /// Since when the agent runs.
    pub started: WallTime,
    /// Its version.
    pub version: String,
    /// Of which commit it is.
    pub commit: String,
    /// What it runs on.
    pub host: String,
    /// Whether it acts.
    pub mode: Mode,
    /// Which policies decide.
    pub policies: String,
    /// Time between looks at the host.
    pub period_ns: Ns,
    /// How often it has looked.
    pub epoch_count: u64,
    /// Why the host could not be read the last time, if so: what follows is older then.
    pub trouble: Option<String>,
    /// Nodes, links and VMs.
    #[serde(flatten)]
    pub status: Status,
}

/// Of when the host is to be shown.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverviewQuery {
    /// As it was then, by the history; as it is, unless it is said.
    pub at: Option<WallTime>,
}

/// The host on one page, as it is or as it was: what `homenode top` shows.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Pictured {
    /// When it was seen so: the last time it was looked at before the time that was asked for.
    pub time: WallTime,
    /// From when to when it can be asked for; `null` where no history is kept, or nothing is in it yet.
    pub recorded: Option<WallSpan>,
    /// Nodes, links, VMs, and what had happened lately.
    #[serde(flatten)]
    pub overview: Overview,
}

/// The host's nodes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Nodes {
    /// Ascending.
    pub nodes: Vec<NodeStatus>,
}

/// Traffic between nodes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Links {
    /// Where counted.
    pub links: Vec<LinkStatus>,
}

/// Which decisions.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DecisionsQuery {
    /// About the VM of this name or UUID.
    pub vm: Option<String>,
    /// Of this policy.
    pub policy: Option<String>,
    /// Not before this.
    pub from: Option<WallTime>,
    /// Not after this.
    pub to: Option<WallTime>,
    /// Before these: what the last page said is next.
    #[schemars(extend("pattern" = "^[0-9]{1,18}$"))]
    pub cursor: Option<String>,
    /// At most so many.
    #[schemars(range(min = 1, max = 1000))]
    pub limit: Option<u32>,
}

/// What was decided, the newest first.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Decisions {
    /// Up to as many as were asked for.
    pub decisions: Vec<DecisionRow>,
    /// The cursor of those before these; `null` where there are none.
    pub next: Option<String>,
}

/// A decision, and what became of it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DecisionRow {
    /// Its number in this history.
    pub id: i64,
    /// When.
    pub time: WallTime,
    /// The VM's UUID.
    pub vm: Option<String>,
    /// Its name then.
    pub name: Option<String>,
    /// Who decided.
    pub policy: Option<String>,
    /// What was to be done.
    pub action: Option<String>,
    /// What came of it.
    pub outcome: Option<String>,
    /// In a sentence.
    pub text: String,
    /// All of it, as `homenode run --json` tells it.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub detail: Value,
}

/// Which stretch of a VM's history.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HistoryQuery {
    /// The VM's name or UUID.
    #[schemars(length(min = 1))]
    pub vm: String,
    /// From when; an hour before the end unless it is said.
    pub from: Option<WallTime>,
    /// To when; now unless it is said. What is more than a day after the start is left out, and what cannot be read in 5
    /// seconds: `to` of the answer says so, and is where to ask from next.
    pub to: Option<WallTime>,
    /// Time that a point stands for, such as `10s` or `5min`; unless it is said, so that there are 300 points or less. It is
    /// longer where there would be more than 2000, and `step_ns` of the answer says so.
    #[schemars(extend("pattern" = "^[1-9][0-9]{0,5}(ms|s|min|h)$"))]
    pub step: Option<String>,
}

/// About which time it is asked why a VM was slow.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WhyQuery {
    /// When it was slow; unless it is said, the last that was recorded.
    pub at: Option<WallTime>,
    /// How long a stretch around that, such as `60s` or `10m`, from ten seconds to six hours; five minutes unless it is said.
    #[schemars(extend("pattern" = "^([1-9][0-9]{1,3}s|[1-9][0-9]?(min|m)|[1-6]h)$"))]
    pub window: Option<String>,
}

/// What a VM did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VmHistory {
    /// Which, as it was asked for.
    pub vm: String,
    /// From when.
    pub from: WallTime,
    /// To when.
    pub to: WallTime,
    /// Time that a point stands for.
    pub step_ns: Ns,
    /// Stretches in which the VM was seen, the first first.
    pub points: Vec<HistoryPoint>,
}

/// A stretch of a VM's history: means over the periods in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct HistoryPoint {
    /// When it begins.
    pub time: WallTime,
    /// Periods in it that saw the VM.
    pub periods_count: u64,
    /// CPUs used.
    pub cpus_used: Option<f64>,
    /// vCPUs that waited.
    pub vcpus_waiting: Option<f64>,
    /// LLC misses over references.
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that were local.
    pub local_access_ratio: Option<f64>,
    /// Memory traffic.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Touched memory on each node, at the end of the stretch.
    pub memory_by_node: Option<Vec<NodeMemory>>,
    /// Home nodes, at the end of the stretch.
    pub home: Option<NodeSet>,
}

/// Memory on a node.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NodeMemory {
    /// Which.
    pub node: u64,
    /// How much.
    pub memory_bytes: Bytes,
}

/// A VM that is to start somewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Evaluate {
    /// Its vCPUs.
    #[schemars(range(min = 1, max = 65536))]
    #[serde(deserialize_with = "whole::vcpus")]
    pub vcpus: u32,
    /// Its memory.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(deserialize_with = "whole::bytes")]
    pub memory_bytes: Bytes,
    /// The bandwidth it needs, where known.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(default, deserialize_with = "whole::bandwidth")]
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Size of the huge pages that all of its memory lies in; none where it lies in ordinary pages.
    #[schemars(extend("minimum" = 8192, "maximum" = whole::MAX))]
    #[serde(
        default,
        deserialize_with = "whole::huge_page",
        skip_serializing_if = "Option::is_none"
    )]
    pub huge_page_bytes: Option<Bytes>,
}

/// Whole numbers as JSON has them: `4.0` is one.
mod whole {
    use homenode_units::{Bytes, BytesPerSec, Ns};
    use serde::{Deserialize, Deserializer, de::Error};
    use serde_json::Number;

    /// The largest that is exact in every program.
    pub(super) const MAX: u64 = 1 << 53;

    fn whole<E: Error>(number: &Number, (least, most): (u64, u64)) -> Result<u64, E> {
        let exact = number.as_u64();
        let float = number
            .as_f64()
            .filter(|float| float.fract() == 0.0 && (0.0..=MAX as f64).contains(float));
        let whole = exact.or(float.map(|float| float as u64));
        let within = whole.filter(|whole| (least..=most).contains(whole));
        within.ok_or_else(|| E::custom(format!("{number} is no whole number from {least} to {most}")))
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

/// Whether and where it fits; nothing is promised.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Evaluated {
    /// Whether it fits.
    pub fits: bool,
    /// The share of the scarcest resource of its home that it leaves (of CPU: of free hyperthreads), over the home's nodes, times
    /// the speeds of `beside`: from 0 to 1; 0 where it does not fit.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub score: f64,
    /// Where.
    pub nodes: Option<NodeSet>,
    /// Why, in sentences.
    pub reasons: Vec<String>,
    /// What is predicted of it beside the VMs that run, and of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// The same in figures.
    pub figures: PlacedFigures,
}

impl Evaluated {
    /// What is thought of where a VM would go.
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
                // What is not counted is needed by nothing.
                let counted = pairs.iter().filter(|(needs, _)| *needs > 0.0);
                let stay = counted.map(|(needs, left)| 1.0 - needs / left);
                // Of n nodes one is near: with memory interleaved, so is one access of n.
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
            figures: placed.figures,
        }
    }
}

/// What an operator may set of a VM while it runs: all of it at once, `null` for what is not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("required" = ["permit", "memory_policy", "memory_floor_bytes"]))]
pub struct VmSettings {
    /// What it books: it is held to it.
    #[serde(deserialize_with = "Option::deserialize")]
    pub permit: Option<Permit>,
    /// How its memory is placed and moved; the agent chooses where it is not set.
    #[serde(deserialize_with = "Option::deserialize")]
    pub memory_policy: Option<MemoryPolicy>,
    /// How little memory it may be left with; the agent takes none of it where it is not set.
    #[serde(deserialize_with = "whole::floor")]
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    pub memory_floor_bytes: Option<Bytes>,
}

impl VmSettings {
    /// Of all that is set of a VM.
    pub fn of(settings: &homenode_host::VmSettings) -> VmSettings {
        VmSettings {
            permit: settings.permit,
            memory_policy: settings.memory_policy,
            memory_floor_bytes: settings.memory_floor,
        }
    }
}

/// How long nothing is to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseFor {
    /// From now on; zero ends a pause.
    #[schemars(extend("minimum" = 0, "maximum" = whole::MAX))]
    #[serde(deserialize_with = "whole::time")]
    pub span_ns: Ns,
}

/// What came of reading settings anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reloaded {
    /// Settings that changed.
    pub changed: Vec<String>,
    /// Settings that differ in the file and wait for the next start.
    pub at_next_start: Vec<String>,
}

impl fmt::Display for Reloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.changed.as_slice() {
            [] => f.write_str("settings were read anew, and none has changed")?,
            changed => write!(f, "settings were read anew; changed: {}", changed.join(", "))?,
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

/// Why there is no answer, as RFC 9457 has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// What kind of problem: `urn:homenode:problem:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    /// The same for people.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What is wrong here, and what to do about it.
    pub detail: String,
}

/// What an event of the stream carries.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Told {
    /// When.
    pub time: WallTime,
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// The VM's UUID, where it is about one.
    pub vm: Option<VmId>,
    /// In a sentence.
    pub text: String,
    /// All of it, as `homenode run --json` tells it.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub detail: Value,
}

/// A look at the host is over: what is asked from now on is newer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Looked {
    /// When.
    pub time: WallTime,
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// How often it has looked.
    pub epoch_count: u64,
}

/// Events are missing here.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Missed {
    /// How many; `null` where that is not known, since another run told them.
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
            assert!(listen(bad).unwrap_err().contains("no address"), "{bad}");
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
                // Two hyperthreads a core.
                cpus_stay: 1.0 - needs[0] / 2.0 / left[0],
                bandwidth_from: BandwidthFrom::Unknown,
            };
            let (nodes, reasons) = (Some(nodes.parse().unwrap()), vec![]);
            Evaluated::of(Placed {
                nodes,
                reasons,
                beside,
                figures,
            })
            .score
        };
        let score_on = |nodes, needs, left| score_beside(None, nodes, needs, left);
        let score = |needs, left| score_on("1", needs, left);
        // 1 - .1/.2 of memory is less than 1 - .05/.1 of hyperthreads.
        assert!((score([0.1, 0.1, 0.0], [0.4, 0.2, 0.0]) - 0.5).abs() < 1e-9);
        assert_eq!(score([0.1, 0.2, 0.0], [1.0, 0.2, 1.0]), 0.0);
        // A core for each vCPU, and no core left: the cores' second hyperthreads are.
        assert_eq!(score([0.2, 0.0, 0.0], [0.2, 1.0, 1.0]), 0.5);
        // One node with half left is as good as a home of two that has all left: half of the accesses there are remote.
        assert_eq!(score_on("0-1", [0.0; 3], [1.0; 3]), 0.5);
        // Half empty, and half as fast beside others.
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
            figures,
        };
        assert_eq!(
            (Evaluated::of(short.clone()).score, Evaluated::of(short).fits),
            (0.0, false)
        );
    }
}

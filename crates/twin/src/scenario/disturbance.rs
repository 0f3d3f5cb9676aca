//! Deliberate errors of a simulated host. An agent's decisions must hold on a host that differs from the agent's picture of it.
//!
//! Waits and replacement change the simulated hardware, and the agent is not told. Noise and hidden figures change only what an
//! agent sees.

use std::fmt;
use std::str::FromStr;

use homenode_machine::{Machine, Replacement};
use homenode_units::Candidates;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Scenario;

/// How a simulated host differs from its machine file and from what an agent sees.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Disturbance {
    /// Factor applied to the time that threads wait for memory according to the machine's figures, from 0.1 to 10.
    pub memory_waits: f64,
    /// How all last-level caches choose the line to evict; absent if they do as the machine's file says.
    pub replacement: Option<Replacement>,
    /// Error in every reported increment of a counter (instructions, cycles, LLC references and misses, accesses): standard
    /// deviation over the increment, from 0 to 0.5. Cut off at three standard deviations, so that counters never run backwards.
    pub noise: f64,
    /// Whether the bandwidths of nodes and links are hidden from an agent.
    pub no_bandwidth: bool,
    /// Whether the counters of vCPUs and the accesses of VMs are hidden from an agent. They are hidden together, because perf
    /// counts a group of events as a whole or not at all, and every group contains LLC events.
    pub no_llc_counters: bool,
}

impl Default for Disturbance {
    /// No disturbance.
    fn default() -> Self {
        Disturbance {
            memory_waits: 1.0,
            replacement: None,
            noise: 0.0,
            no_bandwidth: false,
            no_llc_counters: false,
        }
    }
}

type Set = fn(&mut Disturbance);

/// Names of usual disturbances, and what each sets.
const USUAL: [(&str, Set); 5] = [
    ("memory-waits", |d| d.memory_waits = 2.0),
    ("replacement", |d| d.replacement = Some(Replacement::Random)),
    ("noise", |d| d.noise = 0.1),
    ("no-bandwidth", |d| d.no_bandwidth = true),
    ("no-llc-counters", |d| d.no_llc_counters = true),
];

impl Disturbance {
    /// Returns the names that [`Disturbance::from_str`] accepts.
    pub fn names() -> [&'static str; USUAL.len()] {
        USUAL.map(|(name, _)| name)
    }

    /// Whether there is no disturbance.
    pub fn is_none(&self) -> bool {
        *self == Disturbance::default()
    }

    /// Returns the machine as it really is.
    pub(crate) fn real(&self, machine: &Machine) -> Machine {
        let mut machine = machine.clone();
        if let Some(replacement) = self.replacement {
            for llc in &mut machine.llcs {
                llc.replacement = Some(replacement);
            }
        }
        machine
    }

    /// Returns the machine as an agent sees it.
    pub(crate) fn told(&self, machine: &Machine) -> Machine {
        let mut machine = machine.clone();
        if self.no_bandwidth {
            for (_, node) in machine.nodes.iter_mut() {
                node.memory_bandwidth = None;
            }
            for link in &mut machine.links {
                link.bandwidth = None;
            }
        }
        machine
    }

    /// Returns the key of the first value that is out of bounds, and a message.
    pub(super) fn complaint(&self) -> Option<(&'static str, String)> {
        let bounds = [
            ("memory_waits", self.memory_waits, 0.1, 10.0),
            ("noise", self.noise, 0.0, 0.5),
        ];
        bounds.into_iter().find_map(|(key, value, least, most)| {
            let message = format!("it is {value}; it must lie between {least} and {most}");
            (!(least..=most).contains(&value)).then_some((key, message))
        })
    }
}

/// A name is not the name of a disturbance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no disturbance is named `{name}`{candidates}")]
pub struct UnknownDisturbance {
    name: String,
    candidates: Candidates,
}

impl FromStr for Disturbance {
    type Err = UnknownDisturbance;

    /// Parses usual disturbances by name, separated by commas: for example waits twice as long, random replacement, a tenth of
    /// noise.
    fn from_str(text: &str) -> Result<Disturbance, UnknownDisturbance> {
        let mut disturbance = Disturbance::default();
        for name in text.split(',').map(str::trim) {
            let (_, set) =
                USUAL
                    .iter()
                    .find(|(known, _)| *known == name)
                    .ok_or_else(|| UnknownDisturbance {
                        name: name.to_owned(),
                        candidates: Candidates::of(name, Disturbance::names()),
                    })?;
            set(&mut disturbance);
        }
        Ok(disturbance)
    }
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hardware = [
            (self.memory_waits != 1.0).then(|| format!("memory waits times {}", self.memory_waits)),
            self.replacement
                .map(|replacement| format!("{} replacement", replacement.name())),
        ];
        let told = [
            (self.noise > 0.0).then(|| format!("{} percent of noise", self.noise * 100.0)),
            self.no_bandwidth.then(|| "no bandwidths".to_owned()),
            self.no_llc_counters.then(|| "no counters".to_owned()),
        ];
        let all: Vec<String> = hardware.into_iter().chain(told).flatten().collect();
        match all.is_empty() {
            true => f.write_str("nothing"),
            false => f.write_str(&all.join(", ")),
        }
    }
}

impl Scenario {
    /// Applies a disturbance to the scenario's host.
    #[must_use]
    pub fn disturbed(mut self, disturbance: Disturbance) -> Scenario {
        self.disturbance = disturbance;
        self
    }
}

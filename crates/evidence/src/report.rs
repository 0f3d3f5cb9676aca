//! What a run leaves: what was measured, by what plan, and what follows from it.

use std::collections::BTreeSet;

use homenode_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::crossover::{Block, Crossover};
use crate::effect::{Judged, judge};
use crate::section::{Section, Topic};

/// What a host's figures can say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Hardware {
    /// A machine of its own: figures are those of silicon.
    Silicon,
    /// A guest whose instructions run on the CPU: caches and memory are silicon's, shared with other guests.
    Guest,
    /// An emulated machine: every step runs, and times and speeds mean nothing.
    Emulated,
    /// Not known.
    #[default]
    Unknown,
}

/// The host, without what names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// What it is.
    #[serde(default)]
    pub hardware: Hardware,
    /// The CPU's model, as `/proc/cpuinfo` has it.
    #[serde(default)]
    pub cpu_model: Option<String>,
    /// Number of NUMA nodes.
    pub nodes: usize,
    /// Number of CPUs.
    pub cpus: usize,
    /// Memory of all nodes.
    pub memory_bytes: Bytes,
    /// The kernel's release.
    pub kernel: String,
    /// Number of VMs that the agent sees; 0 without an agent.
    pub vms: usize,
}

/// A report, complete or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// Version of the program.
    pub version: String,
    /// Commit of the program's sources.
    pub commit: String,
    /// The host.
    pub host: HostFacts,
    /// The agent on and off; `None` if that was not tried.
    pub crossover: Option<Trial>,
    /// What else was measured, or why it was not, at most one of each topic, in their order.
    pub sections: Vec<Section>,
    /// What was left out to show the report to others; empty if nothing was.
    #[serde(default)]
    pub left_out: Vec<String>,
}

/// The agent on and off, complete or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Trial {
    /// The VMs that it is about.
    pub about: BTreeSet<String>,
    /// The plan.
    pub plan: Crossover,
    /// What was measured, in the order of the plan. Fewer than planned if the trial is not complete.
    pub blocks: Vec<Block>,
    /// What follows from it.
    #[serde(flatten)]
    pub judged: Judged,
}

impl Report {
    /// Begins a report, in which nothing is measured yet.
    pub fn begun(version: &str, commit: &str, host: HostFacts) -> Report {
        Report {
            version: version.to_owned(),
            commit: commit.to_owned(),
            host,
            crossover: None,
            sections: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Takes over the agent on and off.
    #[must_use]
    pub fn with_crossover(self, trial: Trial) -> Report {
        let crossover = Some(trial);
        Report { crossover, ..self }
    }

    /// Takes over a section, in place of an earlier one of its topic.
    #[must_use]
    pub fn with_section(mut self, section: Section) -> Report {
        self.sections.retain(|other| other.topic != section.topic);
        self.sections.push(section);
        self.sections.sort_by_key(|section| section.topic);
        self
    }

    /// Returns the section of a topic.
    pub fn section(&self, topic: Topic) -> Option<&Section> {
        self.sections.iter().find(|section| section.topic == topic)
    }
}

impl Trial {
    /// Begins a trial, in which nothing is measured yet.
    pub fn begun(about: BTreeSet<String>, plan: Crossover) -> Trial {
        Trial {
            about,
            plan,
            blocks: Vec::new(),
            judged: judge(&[], false),
        }
    }

    /// Takes over what was measured, and judges it.
    #[must_use]
    pub fn with_blocks(mut self, blocks: Vec<Block>) -> Trial {
        self.blocks = blocks;
        self.judged = judge(&self.blocks, self.is_complete());
        self
    }

    /// Returns the number of pairs of blocks that were measured.
    pub fn pairs_done(&self) -> usize {
        self.blocks.len().saturating_sub(1) / 2
    }

    /// Returns true if all blocks were measured.
    pub fn is_complete(&self) -> bool {
        self.blocks.len() >= self.plan.blocks.len()
    }
}

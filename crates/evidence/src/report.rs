//! What a run leaves: its plan, what was measured, and what follows from it.

use std::collections::{BTreeMap, BTreeSet};

use homenode_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::crossover::{Block, Crossover};
use crate::effect::{Judged, judge};

/// The host, without what names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// Number of NUMA nodes.
    pub nodes: usize,
    /// Number of CPUs.
    pub cpus: usize,
    /// Memory of all nodes.
    pub memory_bytes: Bytes,
    /// The kernel's release.
    pub kernel: String,
    /// Number of VMs that the agent sees.
    pub vms: usize,
}

/// A run, complete or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// Version of the program.
    pub version: String,
    /// Commit of the program's sources.
    pub commit: String,
    /// The host.
    pub host: HostFacts,
    /// The VMs that it is about.
    pub about: BTreeSet<String>,
    /// The plan.
    pub plan: Crossover,
    /// What was measured, in the order of the plan. Fewer than planned if the run is not complete.
    pub blocks: Vec<Block>,
    /// What follows from it.
    #[serde(flatten)]
    pub judged: Judged,
}

impl Report {
    /// Begins a report, in which nothing is measured yet.
    pub fn begun(
        version: &str,
        commit: &str,
        host: HostFacts,
        about: BTreeSet<String>,
        plan: Crossover,
    ) -> Report {
        Report {
            version: version.to_owned(),
            commit: commit.to_owned(),
            host,
            about,
            plan,
            blocks: Vec::new(),
            judged: judge(&[], false),
        }
    }

    /// Takes over what was measured, and judges it.
    #[must_use]
    pub fn with_blocks(mut self, blocks: Vec<Block>) -> Report {
        self.blocks = blocks;
        self.judged = judge(&self.blocks, self.is_complete());
        self
    }

    /// Returns true if all blocks were measured.
    pub fn is_complete(&self) -> bool {
        self.blocks.len() >= self.plan.blocks.len()
    }

    /// Returns the report with `vm-1`, `vm-2` and so on for the VMs' names, to show it to others.
    pub fn without_names(self) -> Report {
        let measured = self.blocks.iter().flat_map(|block| block.speeds.keys());
        let names: BTreeSet<&String> = self.about.iter().chain(measured).collect();
        let numbered = names.into_iter().enumerate();
        let named: BTreeMap<String, String> = numbered
            .map(|(at, name)| (name.clone(), format!("vm-{:03}", at + 1)))
            .collect();
        let blocks = self.blocks.iter().map(|block| Block {
            speeds: block
                .speeds
                .iter()
                .map(|(name, speed)| (named[name].clone(), *speed))
                .collect(),
            ..block.clone()
        });
        let blocks = blocks.collect();
        let about = self.about.iter().map(|name| named[name].clone()).collect();
        Report { about, ..self }.with_blocks(blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crossover::Acting;
    use homenode_units::Ns;

    #[test]
    fn a_report_without_names_has_no_name_and_the_same_effects() {
        let plan = Crossover::of(Ns::from_secs(3600), 3, 3).unwrap();
        let names = ["acme-payroll", "zeta", "acme-web"];
        let speed = |at: usize, acting| at as f64 + if acting == Acting::Acts { 200.0 } else { 100.0 };
        let block = |(at, acting): (usize, &Acting)| Block {
            acting: *acting,
            counted_ns: Ns::from_secs(20),
            in_force: 1,
            speeds: names
                .iter()
                .map(|name| ((*name).to_owned(), speed(at, *acting)))
                .collect(),
        };
        let blocks = plan.blocks.iter().enumerate().map(block).collect();
        let about = names.map(str::to_owned).into();
        let report = Report::begun("1", "c", HostFacts::default(), about, plan).with_blocks(blocks);
        let shown = report.clone().without_names();
        let text = serde_json::to_string(&shown).unwrap();
        assert!(names.iter().all(|name| !text.contains(name)), "{text}");
        assert_eq!(shown.judged.all, report.judged.all);
        assert_eq!(shown.judged.vms["vm-001"], report.judged.vms["acme-payroll"]);
        assert_eq!(shown.judged.vms.len(), 3);
        assert!(matches!(shown.judged.verdict, crate::Verdict::Gains { .. }));
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), shown);
    }
}

//! What came of it: the same VMs and seed under the default scheduler, first-fit pinning and Homenode.

use homenode_agent::Show;
use homenode_control::{Config, PolicySet};
use homenode_twin::Setup;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::output::{Output, Style};
use crate::trial::{self, Trial};

#[derive(Debug, Serialize, JsonSchema)]
pub struct Summary {
    policies: Vec<Trial>,
}

/// What is compared: the host's own scheduler, two usual baselines and all of Homenode.
const COMPARED: [PolicySet; 4] = [
    PolicySet::Default,
    PolicySet::FfPin,
    PolicySet::Numad,
    PolicySet::Homenode,
];

/// Runs the scenario to its end under each set of policies and shows the runtimes side by side.
///
/// # Errors
/// When the twin cannot start.
pub fn compare(spec: &Setup, config: &Config, output: &mut Output) -> anyhow::Result<()> {
    output.text(format_args!("\nThe same VMs and seed, each program run to its end, under:"));
    let mut shown = None;
    let policies = trial::run_all(spec, config, &COMPARED, |policies, _| {
        if shown.replace(policies) != Some(policies) && output.style() == Style::Terminal {
            output.line(&format!("  … {}", policies.name()));
        }
    })?;
    output.text(format_args!("{}", trial::side_by_side(&policies)));
    for sentence in trial::sentences(&policies) {
        output.line(&sentence);
    }
    output.object("summary", json!(Summary { policies }));
    Ok(())
}

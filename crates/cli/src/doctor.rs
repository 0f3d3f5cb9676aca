//! `homenode doctor`: what this host has for each thing that the agent can do, and what it lacks.

use std::path::Path;

use homenode_agent::doctor::{Examined, Places, examine};
use homenode_linux::LibvirtHost;

use crate::options::AgentArgs;
use crate::output::print_json;

/// Carries out `homenode doctor`. What it finds is no failure.
///
/// # Errors
/// When it cannot be said.
pub fn run(args: &AgentArgs) -> anyhow::Result<()> {
    let found = examine(&Places {
        root: Path::new("/").to_owned(),
        state: args.dir().to_owned(),
        uri: LibvirtHost::DEFAULT_URI.to_owned(),
    });
    if args.json() {
        return print_json("doctor", &found);
    }
    show(&found);
    Ok(())
}

fn show(found: &Examined) {
    let has = found.features.iter().filter(|feature| feature.has).count();
    let machine = found.machine.as_deref().unwrap_or("a host that cannot be read");
    say!("{machine}: {has} of {} features are there", found.features.len());
    for feature in &found.features {
        let mark = if feature.has { "yes" } else { "no" };
        say!("{:<18} {mark:<4} {}", feature.feature, feature.found);
        if let (Some(costs), Some(remedy)) = (feature.costs, &feature.remedy) {
            say!("{:23} without it {costs}; {remedy}", "");
        }
    }
}

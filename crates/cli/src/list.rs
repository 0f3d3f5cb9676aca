//! `homenode list`: what comes with the program.

use homenode_control::PolicySet;
use homenode_twin::Scenario;
use homenode_twin::workload;
use schemars::JsonSchema;
use serde::Serialize;

use crate::options::ShownArgs;
use crate::print::print_json;

/// Options of `list`.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// What to list
    #[arg(value_enum)]
    pub what: What,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// What comes with the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// Hosts of published experiments and current hosts, for `--machine` and `--host twin:NAME`
    Machines,
    /// Programs that the VMs of a scenario can run
    Workloads,
    /// Scenarios for `sim`, `search` and `--host twin:NAME`
    Scenarios,
    /// Sets of policies for `--policy` and `--policies`
    Policies,
}

/// A list of what comes with the program.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Listed {
    /// What is listed.
    what: What,
    /// The entries, by name.
    entries: Vec<Entry>,
}

/// An entry.
#[derive(Debug, Serialize, JsonSchema)]
struct Entry {
    /// Its name on command lines and in files.
    name: &'static str,
    /// What it is, in a line.
    about: String,
}

/// `homenode list`.
///
/// # Errors
/// None but of writing JSON.
pub(crate) fn run(args: &ListArgs) -> anyhow::Result<()> {
    let listed = Listed {
        what: args.what,
        entries: entries(args.what),
    };
    if args.shown.json {
        return print_json("list", &listed);
    }
    let width = listed
        .entries
        .iter()
        .map(|entry| entry.name.len())
        .max()
        .unwrap_or(0);
    for Entry { name, about } in &listed.entries {
        say!("{name:width$}  {about}");
    }
    Ok(())
}

fn entries(what: What) -> Vec<Entry> {
    match what {
        What::Machines => {
            let names = homenode_machine_files::preset_names();
            names
                .map(|name| Entry {
                    name,
                    about: machine(name),
                })
                .collect()
        }
        What::Workloads => {
            let about = |name| workload::builtin(name).map_or_else(String::new, |workload| workload.about);
            workload::names()
                .map(|name| Entry {
                    name,
                    about: about(name),
                })
                .collect()
        }
        What::Scenarios => {
            let about = |name| Scenario::builtin(name).map_or_else(String::new, |scenario| scenario.about);
            Scenario::names()
                .map(|name| Entry {
                    name,
                    about: about(name),
                })
                .collect()
        }
        What::Policies => {
            let about = |set: PolicySet| Entry {
                name: set.name(),
                about: set.about().to_owned(),
            };
            PolicySet::ALL.map(about).into()
        }
    }
}

/// Returns a machine's size in a line.
fn machine(name: &str) -> String {
    let machine = homenode_machine_files::preset(name).expect("a test reads all presets");
    let memory = machine
        .nodes
        .values()
        .map(|node| node.memory_bytes)
        .sum::<homenode_units::Bytes>();
    let counted = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    format!(
        "{}, {}, {}, {memory}",
        counted(machine.nodes.len(), "node"),
        counted(machine.cpus.len(), "CPU"),
        counted(machine.llcs.len(), "last-level cache")
    )
}

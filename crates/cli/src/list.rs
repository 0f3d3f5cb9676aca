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
pub(crate) struct Entry {
    /// Its name on command lines and in files.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: String,
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
            let machine =
                |name: &str| homenode_machine_files::preset(name).expect("a test reads all presets");
            named(homenode_machine_files::preset_names(), |name| {
                homenode_machine_files::render_summary(&machine(name))
            })
        }
        What::Workloads => named(workload::names(), |name| {
            workload::builtin(name).map_or_else(String::new, |workload| workload.about)
        }),
        What::Scenarios => scenarios(),
        What::Policies => {
            let about = |set: PolicySet| Entry {
                name: set.name(),
                about: set.about().to_owned(),
            };
            PolicySet::ALL.map(about).into()
        }
    }
}

/// Returns the built-in scenarios.
pub(crate) fn scenarios() -> Vec<Entry> {
    named(Scenario::names(), |name| {
        Scenario::builtin(name).map_or_else(String::new, |scenario| scenario.about)
    })
}

fn named(names: impl Iterator<Item = &'static str>, about: impl Fn(&str) -> String) -> Vec<Entry> {
    let entry = |name| Entry {
        name,
        about: about(name),
    };
    names.map(entry).collect()
}

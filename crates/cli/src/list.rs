//! `homenode list`: what comes with the program.

use clap::ValueEnum as _;
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
    /// The list to show; without it, show which lists there are
    #[arg(value_enum)]
    pub what: Option<What>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// A list of entries that come with the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    /// Hosts of published experiments and current hosts, for `--machine` and `--host twin:NAME`
    #[value(alias = "machine")]
    Machines,
    /// Programs that the VMs of a scenario can run
    #[value(alias = "workload")]
    Workloads,
    /// Scenarios for `sim`, `search` and `--host twin:NAME`
    #[value(alias = "scenario")]
    Scenarios,
    /// Sets of policies for `--policy` and `--policies`
    #[value(alias = "policy")]
    Policies,
}

/// A list of what comes with the program.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Listed {
    /// The list; `null` if the entries are the lists themselves.
    what: Option<What>,
    /// The entries, by name.
    entries: Vec<Entry>,
}

/// An entry.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Entry {
    /// The entry's name on command lines and in files.
    pub name: String,
    /// A description of the entry, in a line.
    pub about: String,
}

/// `homenode list`.
///
/// # Errors
///
/// If JSON cannot be written.
pub(crate) fn run(args: &ListArgs) -> anyhow::Result<()> {
    let listed = Listed {
        what: args.what,
        entries: args.what.map_or_else(lists, entries),
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
    if args.what.is_none() {
        say!("\n`homenode list NAME` shows one of these lists.");
    }
    Ok(())
}

/// Returns the lists, each with the number of its entries.
fn lists() -> Vec<Entry> {
    let list = |what: &What| {
        let value = what.to_possible_value().expect("no list is hidden");
        let help = value.get_help().map(ToString::to_string).unwrap_or_default();
        Entry {
            name: value.get_name().to_owned(),
            about: format!("{help} ({})", entries(*what).len()),
        }
    };
    What::value_variants().iter().map(list).collect()
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
                name: set.name().to_owned(),
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
    let entry = |name: &'static str| Entry {
        name: name.to_owned(),
        about: about(name),
    };
    names.map(entry).collect()
}

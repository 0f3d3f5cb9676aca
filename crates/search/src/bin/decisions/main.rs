//! Scores policies over cases, draws cases, sweeps loads, keeps the best known decisions, and writes docs/DECISIONS.md:
//! `decisions --help`.

#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

mod document;
mod known;
mod operations;
mod scores;
mod swept;

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, ensure};
use clap::{Args, Parser, Subcommand};
use homenode_machine_files::file::read_text_file;
use homenode_reproduce::jobs;
use homenode_search::contender::Contender;
use homenode_search::generate;
use homenode_twin::{Disturbance, Scenario, Setup, named};

/// Score policies over cases × seeds against `default`
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "Examples:
  decisions --seeds 1-5 --policy homenode --policy tavo -v CASE.toml ...   scores, VM by VM
  decisions generate --seeds 1-24 --out DIR                                cases to look at
  decisions sweep --policy homenode --policy ff-pin                        one program, from one VM to a full host
  decisions lone --below 0.98                                              one VM alone
  decisions known --evaluations 300 data/decisions/cases/*.toml            what is known best
  decisions held-out --keep data/decisions/held-out.toml                   cases not looked at before
  decisions operations --commit look --cases 8 --seeds 1 --policy homenode VMs as in operation, to look at")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    scores: scores::Scores,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write cases drawn by seeds into a folder
    Generate {
        /// Seeds of the cases, such as 1-24 (1-40 are for training)
        #[arg(long, value_parser = seeds)]
        seeds: RangeInclusive<u64>,
        /// Folder that the cases are written into
        #[arg(long)]
        out: PathBuf,
    },
    /// Run one program in VMs of 4 vCPUs, from one VM to a full host, on each preset with several nodes
    Sweep(swept::Swept),
    /// Run one VM of 4 and of 8 vCPUs alone on each preset with several nodes
    Lone(swept::Swept),
    /// Search for the best decisions in cases, and keep improvements in files
    Known(known::Search),
    /// Run cases that follow from the id of the last commit that changed the policies, and add the result to a list
    HeldOut(document::Held),
    /// Score policies on VMs like those of an operator, on stock kernels, by class of hosts and fullness
    Operations(operations::Operations),
    /// Write the scoreboard as a document, and its figure next to it
    Document(document::Document),
}

/// Options of most commands.
#[derive(Debug, Args)]
struct Common {
    /// Seeds, such as 1-5 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Policies to compare with the baseline `default`; `autonuma` is the kernel's NUMA balancing alone (repeatable) [default:
    /// homenode]
    #[arg(long = "policy")]
    policies: Vec<Contender>,
    /// Make the simulated host differ from its description: memory-waits, replacement, noise, no-bandwidth, no-llc-counters, or
    /// several with commas
    #[arg(long)]
    disturb: Option<Disturbance>,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

impl Common {
    /// Returns the requested contenders without `default`, which is the baseline.
    fn contenders(&self) -> Vec<Contender> {
        let mut named: Vec<Contender> = Vec::new();
        for contender in &self.policies {
            if *contender != Contender::DEFAULT && !named.contains(contender) {
                named.push(contender.clone());
            }
        }
        if named.is_empty() {
            named.push(Contender::OURS);
        }
        named
    }

    fn disturbance(&self) -> Disturbance {
        self.disturb.unwrap_or_default()
    }
}

fn seeds(text: &str) -> anyhow::Result<RangeInclusive<u64>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| {
        text.parse()
            .map_err(|_| anyhow!("`{text}` is not a seed; write 1-5, or 7"))
    };
    let (first, last) = (number(first)?, number(last)?);
    ensure!(
        first <= last,
        "{first}-{last} contains no seeds; write the smaller number first"
    );
    Ok(first..=last)
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    match cli.command {
        None => scores::print(&cli.scores),
        Some(Command::Generate { seeds, out }) => write_all(
            &out,
            seeds.map(|seed| (generate::name(seed), generate::case(seed))),
        ),
        Some(Command::Sweep(args)) => swept::sweep(&args),
        Some(Command::Lone(args)) => swept::lone(&args),
        Some(Command::Known(args)) => known::search(&args),
        Some(Command::HeldOut(args)) => document::held_out(&args),
        Some(Command::Operations(args)) => operations::run(&args),
        Some(Command::Document(args)) => document::write(&args),
    }
}

/// Writes cases, each with its name, into a folder.
fn write_all(folder: &Path, cases: impl Iterator<Item = (String, String)>) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, text) in cases {
        let path = folder.join(format!("{name}.toml"));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Reads a scenario together with its machine, which is a preset or a file in the same folder.
fn read(path: &Path) -> anyhow::Result<Setup> {
    let text = read_text_file(path)?;
    let path = path.display().to_string();
    let scenario = Scenario::from_toml(&path, &text)?;
    let machine = named::machine_for(&scenario, &path, None)?;
    Ok(Setup::new(machine, scenario, 1))
}

fn show(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
        assert_eq!(seeds("1-3").unwrap(), 1..=3);
        assert_eq!(seeds("7").unwrap(), 7..=7);
        let said = |text: &str| seeds(text).unwrap_err().to_string();
        assert!(said("3-1").contains("the smaller number first"));
        assert!(said("one").contains("is not a seed"));
    }
}

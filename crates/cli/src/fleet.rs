//! `homenode fleet top`: options, the agents' answers over HTTP, and the page as text or JSON.

mod hosts;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use homenode_agent::wall_clock::now_ns;
use homenode_api::document::document;
use homenode_screens::fleet::{self, Summary};
use homenode_screens::pictures::Host;
use homenode_screens::table::Colours;
use homenode_screens::wall::{self, Wall};
use homenode_screens::{printable, terminal};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;

use crate::options::interval;
use crate::print::print;
use hosts::{Address, Asker, Login};

/// Commands about many hosts.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum FleetCommand {
    /// Show many hosts on one page: the worst VM, pressure, headroom and findings of each
    #[command(after_help = HELP)]
    Top(FleetTopArgs),
}

/// The end of `homenode fleet --help`, after the options.
pub(crate) const HELP: &str = "\
Agents are asked over HTTP (docs/API.md). A HOST is a name, with a port where that is not 9464, or an address with http:// or
https://; without one it is https, and http on loopback. Hosts past most limits stand first. Enter opens a host's own page,
as `homenode top` shows it there; Esc leads back.

Examples:
  homenode fleet top host1 host2 host3 --ca fleet.crt --user ops --password-file pw
  homenode fleet top 127.0.0.1:9464 127.0.0.1:9465
  homenode fleet top $(cat hosts) --once | head
  homenode fleet top $(cat hosts) --json";

/// Options of `fleet top`.
#[derive(Debug, clap::Args)]
pub(crate) struct FleetTopArgs {
    /// Hosts to show
    #[arg(value_name = "HOST", required = true)]
    hosts: Vec<Address>,
    /// Print one snapshot as text, with all columns, and exit
    #[arg(long)]
    once: bool,
    /// Print one snapshot as JSON, and exit
    #[arg(long)]
    json: bool,
    /// Time between updates
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    every: Ns,
    /// CA certificate (PEM) that signed the agents' certificates, if they are not signed by a public CA
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A user named in the agents' web.yml
    #[arg(long, requires = "password_file")]
    user: Option<String>,
    /// File with the password of --user
    #[arg(long, value_name = "FILE", requires = "user")]
    password_file: Option<PathBuf>,
}

/// The document of `homenode fleet top --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Fleet {
    /// Time of this document, by the local clock.
    at: String,
    /// The hosts. The host that exceeds the most limits comes first.
    hosts: Vec<Shown>,
}

/// A host.
#[derive(Debug, Serialize, JsonSchema)]
struct Shown {
    /// The host's name as given on the command line.
    host: String,
    /// Why the host's agent did not answer; `null` if it did.
    trouble: Option<String>,
    /// When the host was last seen, by the host's own clock.
    seen_at: Option<String>,
    /// Summary of the host's last answer.
    summary: Option<Summary>,
}

/// Runs `homenode fleet`.
///
/// # Errors
/// A certificate or a password that cannot be read; no terminal.
pub(crate) fn run(command: &FleetCommand) -> anyhow::Result<ExitCode> {
    let FleetCommand::Top(args) = command;
    let login = Login::read(
        args.ca.as_deref(),
        args.user.as_deref(),
        args.password_file.as_deref(),
    )?;
    let asker = Asker::new(&login);
    if args.once || args.json {
        let all = hosts::ask_all(&asker, &args.hosts)?;
        show(args, &all)?;
        // The command fails only if no host answered, since a silent host is shown as such.
        let is_any = all.iter().any(|host| host.picture.is_some());
        return Ok(if is_any {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let asked = args.hosts.iter().map(|host| {
        let (asker, address) = (asker.clone(), host.clone());
        (host.name(), move || asker.ask(&address))
    });
    fleet::run(asked.collect(), Duration::from_nanos(args.every.0), wall::local)
}

fn show(args: &FleetTopArgs, all: &[Host]) -> anyhow::Result<()> {
    let rows = fleet::rows(all);
    if args.json {
        let shown = rows.iter().map(|row| Shown {
            host: row.host.name.clone(),
            trouble: row.host.trouble.clone(),
            seen_at: row
                .host
                .picture
                .as_ref()
                .map(|picture| Wall(picture.wall_ns).to_string()),
            summary: row.summary.clone(),
        });
        let fleet = Fleet {
            at: Wall(now_ns()).to_string(),
            hosts: shown.collect(),
        };
        let document = document("fleet", serde_json::to_value(&fleet)?);
        print(format_args!("{}\n", printable::json(&document.to_string())));
        return Ok(());
    }
    print(format_args!(
        "{}",
        fleet::plain(&rows, terminal::width(), Colours::Off)
    ));
    Ok(())
}

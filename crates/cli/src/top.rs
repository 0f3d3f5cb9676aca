//! `homenode top`: options, pictures from the agent or a history, and the page as text or JSON.

mod past;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use homenode_agent::wall_clock::now_ns;
use homenode_api::answer::{Happened, Overview};
use homenode_api::document::document;
use homenode_api::{ApiError, AskError, Request};
use homenode_recorder::Which;
use homenode_screens::pictures::Picture;
use homenode_screens::table::Colours;
use homenode_screens::top::{self, Choice, History as _, Session, Sort, View, When};
use homenode_screens::wall::{self, Time, Wall};
use homenode_screens::{printable, terminal};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;

use crate::ask::ask_agent;
use crate::options::{StateArgs, interval};
use crate::print::print;
use crate::record::place_beside;
use past::Past;

/// How many times to ask an agent that has not sampled its host yet, before that is an error.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);
/// Maximum number of events that the first printed snapshot has.
const EVENTS_PRINTED: usize = 20;

/// Options of `top`.
#[derive(Debug, clap::Args)]
pub(crate) struct TopArgs {
    /// Begin at this time in the history: 03:12, '2026-11-23 03:12', or how long ago, such as 15m
    #[arg(long, value_name = "TIME")]
    at: Option<Time>,
    /// Show this history instead of the agent, from its first period on
    #[arg(long, alias = "replay", value_name = "FILE")]
    history: Option<PathBuf>,
    /// Print one snapshot as text, with all columns, and exit
    #[arg(long)]
    once: bool,
    /// Print this many snapshots as text, and exit
    #[arg(long, value_name = "N", conflicts_with = "once", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Print JSON, one object per line; without --once and --batch, one snapshot
    #[arg(long)]
    json: bool,
    /// Time between updates
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    every: Ns,
    /// Sort VMs by: worst, name, home, cpus, wait, local, llc, used, memory
    #[arg(long, value_name = "COLUMN", default_value = "worst")]
    sort: Sort,
    /// Show only VMs with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
    #[command(flatten)]
    state: StateArgs,
}

/// The document of `homenode top --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Shown<'a> {
    /// Time of the picture, by the wall clock.
    at: String,
    #[serde(flatten)]
    overview: &'a Overview,
}

/// Runs `homenode top`.
///
/// # Errors
/// No agent, no history, no such time, no terminal.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let history = args
        .history
        .clone()
        .unwrap_or_else(|| place_beside(&args.state.dir));
    let mut message = None;
    let past = match (&args.at, &args.history) {
        (None, None) => None,
        (at, _) => {
            let mut past = Past::open(&history, Which::First)?;
            if let Some(time) = at {
                message = past.go_to_time(time)?;
            }
            Some(past)
        }
    };
    let choice = Choice {
        sort: args.sort,
        filter: args.filter.clone(),
        is_reversed: false,
    };
    let when = match &past {
        None => When::Now,
        Some(past) => When::Then {
            span: past.span()?,
            is_playing: false,
        },
    };
    let mut view = View::new(when, choice, Colours::of_environment(), wall::local);
    let every = Duration::from_nanos(args.every.0);
    let count = match (args.batch, args.once || args.json) {
        (Some(count), _) => count,
        (None, true) => 1,
        (None, false) => {
            view.message = message;
            // A missing agent is an error only at the start; later the agent may come back.
            let view = first(view, args, past.is_some())?;
            let state = args.state.dir.clone();
            return top::run(Session {
                view,
                ask: Arc::new(move || ask_once(&state).map_err(|error| format!("{error:#}"))),
                open: Box::new(move || Past::open(&history, Which::Last)),
                every,
                past,
            });
        }
    };
    if let Some(message) = message {
        complain!("{message}");
    }
    print_pictures(args, view, past, count, every)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds the first picture to the view, if the picture comes from the agent and is shown on a terminal.
fn first(mut view: View, args: &TopArgs, is_past: bool) -> anyhow::Result<View> {
    if !is_past && std::io::stdout().is_terminal() {
        view.show(ask_patiently(&args.state.dir)?);
    }
    Ok(view)
}

/// Prints one picture after another: of an agent at intervals, of a history period by period.
fn print_pictures(
    args: &TopArgs,
    mut view: View,
    mut past: Option<Past>,
    count: u32,
    every: Duration,
) -> anyhow::Result<()> {
    let width = terminal::width();
    let mut last_at: Option<Ns> = None;
    for number in 0..count {
        let picture = match &mut past {
            Some(past) => {
                if number > 0 && !past.step(1)? {
                    break;
                }
                past.picture()?
            }
            None => {
                if number > 0 {
                    std::thread::sleep(every);
                }
                ask_patiently(&args.state.dir)?
            }
        };
        if args.json {
            let shown = Shown {
                at: Wall(picture.wall_ns).to_string(),
                overview: &picture.overview,
            };
            let document = document("overview", serde_json::to_value(&shown)?);
            print(format_args!("{}\n", printable::json(&document.to_string())));
            continue;
        }
        let at = picture.overview.status.at_ns;
        view.show(picture.clone());
        let text = top::plain(&view, &picture, new_events(&picture, last_at), width);
        let between = if number > 0 { "\n" } else { "" };
        print(format_args!("{between}{text}"));
        last_at = Some(at);
    }
    Ok(())
}

/// Returns the events since the last picture, or recent events if there was no picture.
fn new_events(picture: &Picture, last_at: Option<Ns>) -> &[Happened] {
    let events = &picture.overview.events;
    let from = match last_at {
        Some(last) => events
            .iter()
            .position(|event| event.at_ns > last)
            .unwrap_or(events.len()),
        None => events.len().saturating_sub(EVENTS_PRINTED),
    };
    &events[from..]
}

/// Asks the agent for a picture.
fn ask_once(state: &Path) -> anyhow::Result<Picture> {
    let overview: Overview = ask_agent(state, &Request::Overview)?;
    Ok(Picture {
        wall_ns: now_ns(),
        overview,
    })
}

/// Asks the agent for a picture, again and again while it has not sampled its host yet.
fn ask_patiently(state: &Path) -> anyhow::Result<Picture> {
    let is_not_yet = |error: &anyhow::Error| {
        matches!(
            error.downcast_ref(),
            Some(AskError::Agent(ApiError::NotYet { .. }))
        )
    };
    for _ in 0..TRIES {
        match ask_once(state) {
            Err(error) if is_not_yet(&error) => std::thread::sleep(BETWEEN_TRIES),
            asked => return asked,
        }
    }
    ask_once(state)
}

/// The end of `homenode top --help`, after the options.
pub(crate) fn help() -> String {
    format!(
        "\
Nodes, links and VMs of the running agent on one page, with what it decides; or of any time that it
recorded, with the same keys. Before 03:12 lies 03:11: ← goes back in time from now, too.

{}
Examples:
  homenode top                                   what is now
  homenode top --at 03:12                        what was then
  homenode top --history web7.sqlite             a history from elsewhere
  homenode top --once --sort local | head        for scripts
  homenode top --at 03:12 --batch 60 --json      a minute, a period a line",
        top::help()
    )
}

//! `homenode replay`: replays the decisions of a recorded run.

use std::path::PathBuf;

use homenode_agent::replay::{Difference, Only, ReplayError, Report, Wanted, replay};
use homenode_control::PolicySet;
use homenode_screens::wall::Wall;

use crate::bad_input;
use crate::options::ShownArgs;
use crate::print::print_json;
use crate::record::{HistoryArgs, open};

/// Maximum number of differences shown to people; programs get all.
const SHOWN_MAX: usize = 100;

/// Options of `replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    /// The history's file [default: that of this host's agent]
    #[arg(conflicts_with_all = ["history", "state"])]
    recording: Option<PathBuf>,
    /// Number of the run (`record show --json`) [default: the last run with samples]
    #[arg(long, value_name = "N")]
    run: Option<i64>,
    /// Decide with these policies: `default` (none), `ff-pin`, `numad`, `memory`, `tavo` or `homenode` [default: the run's]
    #[arg(long)]
    policies: Option<PolicySet>,
    /// Decide with this configuration file (TOML), except for its period [default: the run's settings]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    history: HistoryArgs,
    #[command(flatten)]
    shown: ShownArgs,
}

/// Runs `homenode replay`.
///
/// # Errors
/// No history, or no run in it that can be replayed.
pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let path = args.recording.clone().unwrap_or_else(|| args.history.place());
    let config = args.config.as_ref();
    let config = config.map(|path| homenode_machine_files::file::read_toml_file(path).map_err(bad_input));
    let wanted = Wanted {
        run: args.run,
        config: config.transpose()?,
        policies: args.policies,
    };
    let report = replay(&open(&path)?, &wanted).map_err(|error| match error {
        ReplayError::Nothing(why) => bad_input(format!("{}: {why}", path.display())),
        ReplayError::Record(error) => error.into(),
    })?;
    if args.shown.json {
        return print_json("replay", &report);
    }
    show(&report);
    Ok(())
}

fn show(report: &Report) {
    let settings = match (report.same_settings, report.policies == report.policies_recorded) {
        (true, _) => format!("policies {} and the recorded settings", report.policies.name()),
        (false, true) => format!("policies {} with other settings", report.policies.name()),
        (false, false) => format!(
            "policies {} instead of {}",
            report.policies.name(),
            report.policies_recorded.name()
        ),
    };
    say!(
        "run {} on {}, recorded by {}",
        report.run,
        report.host,
        report.version
    );
    say!(
        "{} periods from {} to {}, {settings}",
        report.periods_count,
        Wall(report.wall_ns),
        Wall(report.last_wall_ns)
    );
    for sentence in &report.inexact {
        say!("not exact: {sentence}");
    }
    say!(
        "{} decisions recorded, {} in the replay, {} the same",
        report.recorded_count,
        report.replayed_count,
        report.same_count
    );
    let Some(first) = report.first_difference_wall_ns else {
        say!("every plan is exactly the same");
        return;
    };
    say!(
        "the first difference is at {}; later decisions are based on the host as recorded, not as it would have become",
        Wall(first)
    );
    if report.other_reason_count > 0 {
        say!(
            "{} of the same decisions have a different reason",
            report.other_reason_count
        );
    }
    for difference in report.differences.iter().take(SHOWN_MAX) {
        say!("{}", line(difference));
    }
    let more = report.differences.len().saturating_sub(SHOWN_MAX);
    if more > 0 {
        say!("and {more} more; --json shows all");
    }
}

fn line(difference: &Difference) -> String {
    let Difference {
        only,
        name,
        policy,
        reason,
        wall_ns,
        last_wall_ns,
        count,
        ..
    } = difference;
    let only = match only {
        Only::Recorded => "only recorded",
        Only::Replayed => "only replayed",
    };
    let again = match count {
        1 => String::new(),
        count => format!(" ({count} times until {})", Wall(*last_wall_ns)),
    };
    format!("{}  {only}  {policy}: VM {name}: {reason}{again}", Wall(*wall_ns))
}

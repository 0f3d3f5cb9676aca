//! `homenode why`: explains why a VM was slow.

use std::fmt::{self, Write as _};

use homenode_agent::wall_clock::now_ns;
use homenode_agent::why::AskError;
use homenode_api::why::{Answer, WINDOW};
use homenode_screens::printable::Lines;
use homenode_screens::wall::{Time, Wall};
use homenode_units::Ns;
use homenode_why::{Cause, Measure};

use crate::bad_input;
use crate::options::ShownArgs;
use crate::print::{print, print_json};
use crate::record::{HistoryArgs, open};

/// Options of `homenode why`.
#[derive(Debug, clap::Args)]
pub(crate) struct WhyArgs {
    /// The VM's name or UUID
    vm: String,
    /// When the VM was slow: 03:12, '2026-11-23 03:12', or how long ago, such as 15m [default: the last recorded time]
    #[arg(long, value_name = "TIME")]
    at: Option<Time>,
    /// Length of the time to explain, around --at. The VM's speed in it is compared with that before it, over four times as long
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    window: Ns,
    #[command(flatten)]
    history: HistoryArgs,
    #[command(flatten)]
    shown: ShownArgs,
}

/// Runs `homenode why`.
///
/// # Errors
/// No history, a time outside it, or a VM that was not running then.
pub(crate) fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let window = WINDOW.checked(args.window);
    let window = window.map_err(|error| bad_input(format!("--window: {error}")))?;
    let at = args.at.map(|at| at.ns(now_ns())).transpose()?;
    let archive = open(&args.history.place())?;
    let answer = homenode_agent::why::ask(&archive, &args.vm, (at, window), None);
    let answer = answer.map_err(|error| match error {
        AskError::Outside { recorded } => {
            let (from, to) = (Wall(recorded.from.0), Wall(recorded.to.0));
            bad_input(format!("samples are recorded from {from} to {to} only"))
        }
        AskError::Nothing(_) | AskError::Why(_) | AskError::Vm(_) => bad_input(error.to_string()),
        AskError::Record(error) => error.into(),
    })?;
    if args.shown.json {
        return print_json("why", &answer);
    }
    let mut text = String::new();
    tell(&answer, &mut text)?;
    print(format_args!("{}", Lines(format_args!("{text}"))));
    Ok(())
}

/// Tells first how fast the VM was, then the causes.
fn tell(answer: &Answer, out: &mut String) -> fmt::Result {
    let told = &answer.explanation;
    let (from, to) = (Wall(answer.slow.from.0), Wall(answer.slow.to.0));
    let (before, name) = (Wall(answer.compared_from.0), &told.name);
    let speed = &told.speed;
    let of = |value: f64| match speed.measure {
        Measure::InstructionsPerCpuS => format!("{:.2}", value / 1e9),
        Measure::ShareRan => format!("{:.0}", 100.0 * value),
    };
    let (verb, what, unit) = match speed.measure {
        Measure::InstructionsPerCpuS => ("ran at", "speed", "billion instructions per CPU-second"),
        Measure::ShareRan => (
            "got",
            "share of CPU time",
            "percent of the CPU time that it wanted",
        ),
    };
    match speed.usual.zip(speed.ratio) {
        Some((usual, ratio)) => {
            let no_drop = if told.lost == 0.0 {
                "had no drop of speed; it "
            } else {
                ""
            };
            writeln!(
                out,
                "VM {name} {no_drop}{verb} {:.0}% of its usual {what} from {from} to {to} ({} -> {} {unit})",
                100.0 * ratio,
                of(usual),
                of(speed.then),
            )?;
            writeln!(out, "   usual: since {before}")?;
        }
        None => writeln!(
            out,
            "VM {name} {verb} {} {unit} from {from} to {to}; its history is too short to tell whether that is usual",
            of(speed.then)
        )?,
    }
    if speed.measure == Measure::ShareRan {
        writeln!(
            out,
            "   its instructions are not counted, so its share of CPU time is compared"
        )?;
    }
    for (rank, cause) in (1..).zip(&told.causes) {
        tell_cause(rank, cause, out)?;
    }
    told.notes
        .iter()
        .try_for_each(|note| writeln!(out, "\nnote: {note}"))
}

fn tell_cause(rank: usize, cause: &Cause, out: &mut String) -> fmt::Result {
    let (code, percent) = (cause.code.text(), 100.0 * cause.lost);
    writeln!(
        out,
        "\n{rank}. {code}: {percent:.0} percent, by {}",
        cause.culprit
    )?;
    let short = |value: f64| match value.abs() < 10.0 {
        true => format!("{value:.2}"),
        false => format!("{value:.0}"),
    };
    for figure in &cause.figures {
        let (before, during) = (short(figure.before), short(figure.during));
        writeln!(out, "   {}: {before} before, {during} then", figure.what)?;
    }
    match cause.followed.id {
        Some(id) => writeln!(out, "   then: {} (event {id})", cause.followed.text),
        None => writeln!(out, "   then: {}", cause.followed.text),
    }
}

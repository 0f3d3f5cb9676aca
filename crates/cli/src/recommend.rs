//! `homenode recommend`, `mode` and `reservations`: list what waits for the operator, how far the agent may go, and what it has
//! reserved.

mod walk;

#[cfg(test)]
pub(crate) use walk::tests::recommendation;

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::path::Path;

use clap::Subcommand;
use homenode_agent::standalone;
use homenode_api::answer::{
    ModeSet, OpenReservation, Recommendation, Recommendations, ReservationDropped, Reservations,
};
use homenode_api::http::WallTime;
use homenode_api::{Request, ask};
use homenode_control::Mode;
use homenode_control::recommendations::State;
use homenode_screens::printable::OneLine;
use homenode_screens::wall::local;
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;

use crate::ask::{ask_agent, vms};
use crate::options::{AgentArgs, OrNone};
use crate::print::{or_dash, print_done, print_json, say_vms, span, table};

/// The end of `recommend`'s help.
pub(crate) const HELP: &str = "In mode `recommend` (of the run, of a policy, or of a VM: `homenode mode`) each decision waits for you. An approved decision is
carried out as long as its policy wants it, at most for an hour; a rejected one is not proposed again for a day. A change that
protects a VM, or restores its earlier settings, needs no approval.

Examples:
  homenode recommend                   open recommendations
  homenode recommend walk              one after the other: apply, reject or skip each
  homenode recommend --all             closed ones, too
  homenode recommend apply 7 8         approve two
  homenode recommend reject 7          reject one
  homenode recommend --json            the same, as JSON";

/// The end of `mode`'s help.
pub(crate) const MODE_HELP: &str = "There is a mode of the run (`homenode run --mode`), of each policy (settings `[modes]`) and of each VM; the most careful of
the three is in force. In modes `observe` and `recommend` a VM is still restored: limits are lifted at once, and under
`observe` the home, too.

Examples:
  homenode mode                        how far the agent goes with each VM
  homenode mode web recommend          decisions on VM web wait for you; that is stored with the VM
  homenode mode web none               as far as the run and its policies go
  homenode mode web observe --for 1h   hands off for an hour, then as before: nothing is stored";

/// The end of `reservations`' help.
pub(crate) const RESERVATIONS_HELP: &str = "When libvirt asks for nodes for a VM that is about to start (`numad`), these nodes are reserved for it. They count as used
until the VM runs, at most for two minutes. Without a running agent this shows the reservations in the ledger file.

Examples:
  homenode reservations                open reservations
  homenode reservations drop 3 4       cancel two; their nodes are free at once";

/// Options of `recommend`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RecommendArgs {
    #[command(subcommand)]
    pub command: Option<RecommendCommand>,
    /// Show closed recommendations, too
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// The operator's answers to recommendations.
#[derive(Debug, Subcommand)]
pub(crate) enum RecommendCommand {
    /// Approve recommendations; the agent carries them out from its next sample on
    #[command(after_help = "Examples:\n  homenode recommend apply 7\n  homenode recommend apply 7 8 9")]
    Apply(IdArgs),
    /// Reject recommendations; the agent does not propose them again for a day
    #[command(after_help = "Examples:\n  homenode recommend reject 7")]
    Reject(IdArgs),
    /// Show open recommendations one after the other, and ask whether to apply or reject each
    #[command(
        after_help = "Answers are lines of standard input: a, r, s or q, or the whole word. Enter alone skips; the end of the input quits.\n\nExamples:\n  homenode recommend walk\n  printf 'a\\ns\\n' | homenode recommend walk --json"
    )]
    Walk(AgentArgs),
}

/// Recommendations or reservations, by number.
#[derive(Debug, clap::Args)]
pub(crate) struct IdArgs {
    /// Numbers that the list shows
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<u64>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `mode`.
#[derive(Debug, clap::Args)]
pub(crate) struct ModeArgs {
    /// The VM's name; without one, show all
    pub vm: Option<String>,
    /// How far the agent may go with the VM: `observe`, `recommend`, `act`, or `none` for the run's mode
    pub mode: Option<OrNone<Mode>>,
    /// Set the mode only for this long, such as `10min`, and then return to the VM's own mode. Works only with `observe`; `0s`
    /// ends it
    #[arg(long = "for", value_name = "TIME", requires = "mode")]
    pub span: Option<Ns>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `reservations`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ReservationsArgs {
    #[command(subcommand)]
    pub command: Option<ReservationsCommand>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Commands about reservations.
#[derive(Debug, Subcommand)]
pub(crate) enum ReservationsCommand {
    /// Drop reservations, and free their nodes at once
    #[command(after_help = "Examples:\n  homenode reservations drop 3")]
    Drop(IdArgs),
}

/// `homenode recommend`.
///
/// # Errors
/// No agent, or no open recommendation with this number.
pub(crate) fn recommend(args: &RecommendArgs) -> anyhow::Result<()> {
    match &args.command {
        None => list(args),
        Some(RecommendCommand::Apply(args)) => judge(args, |id| Request::RecommendationApply { id }),
        Some(RecommendCommand::Reject(args)) => judge(args, |id| Request::RecommendationReject { id }),
        Some(RecommendCommand::Walk(args)) => walk::walk(args, std::io::stdin().lock()),
    }
}

/// Returns the recommendations that the agent in this directory remembers, closed ones included.
///
/// # Errors
/// No agent.
pub(crate) fn remembered(dir: &Path) -> anyhow::Result<Vec<Recommendation>> {
    let all: Recommendations = ask_agent(dir, &Request::Recommendations)?;
    Ok(all.recommendations)
}

fn list(args: &RecommendArgs) -> anyhow::Result<()> {
    let mut recommendations = remembered(args.agent.dir())?;
    let introduction = walk::introduction(&recommendations).filter(|_| std::io::stdout().is_terminal());
    let is_live = |one: &Recommendation| matches!(one.state, State::Open | State::Approved);
    recommendations.retain(|one| args.all || is_live(one));
    if args.agent.json() {
        return print_json("recommendations", &Recommendations { recommendations });
    }
    if recommendations.is_empty() {
        say!("no recommendations");
        return Ok(());
    }
    if let Some(introduction) = introduction {
        say!("{introduction}\n");
    }
    let rows = recommendations.iter().map(|one| {
        vec![
            one.id.to_string(),
            one.text.clone(),
            or_dash(one.gain, |gain| format!("{:+.0} %", 100.0 * gain)),
            one.policy.clone(),
            one.state.name().to_owned(),
            until(one.expires),
            one.reason.clone(),
        ]
    });
    say!(
        "{}",
        table(&["id", "what", "gain", "policy", "state", "until", "why"], rows)
    );
    let is_open = |one: &&Recommendation| one.state == State::Open;
    for one in recommendations
        .iter()
        .filter(is_open)
        .filter(|one| !one.together.is_empty())
    {
        let others: Vec<String> = one.together.iter().map(u64::to_string).collect();
        say!(
            "{}: its predicted gain is for applying it together with {}",
            one.id,
            others.join(", ")
        );
    }
    match introduction {
        Some(_) if std::io::stdin().is_terminal() => walk::offer(&args.agent),
        _ => Ok(()),
    }
}

fn judge(args: &IdArgs, request: impl Fn(u64) -> Request) -> anyhow::Result<()> {
    let mut recommendations: Vec<Recommendation> = Vec::new();
    let mut judge_one = |id: u64| -> anyhow::Result<()> {
        let answer: Recommendation = ask_agent(args.agent.dir(), &request(id))?;
        if !args.agent.json() {
            say!(
                "{} is {}: {}",
                answer.id,
                answer.state.name(),
                OneLine(&answer.text)
            );
        }
        recommendations.push(answer);
        Ok(())
    };
    let done = args.ids.iter().try_for_each(|id| judge_one(*id));
    match args.agent.json() && (done.is_ok() || !recommendations.is_empty()) {
        true => print_done("recommendations", &Recommendations { recommendations }, done),
        false => done.and_then(|()| say_partners(&recommendations, &args.agent)),
    }
}

/// Says which open recommendations were predicted together with those that were just approved.
fn say_partners(decided: &[Recommendation], agent: &AgentArgs) -> anyhow::Result<()> {
    let is_one_of_several = |one: &Recommendation| one.state == State::Approved && !one.together.is_empty();
    if decided.iter().any(is_one_of_several)
        && let Some(partners) = partners(decided, &remembered(agent.dir())?)
    {
        say!("{partners}");
    }
    Ok(())
}

/// Returns a sentence about the open recommendations with which approved ones were predicted; `None` if there are none.
fn partners(decided: &[Recommendation], all: &[Recommendation]) -> Option<String> {
    let of = |one: &Recommendation| -> Vec<u64> {
        let is_open = |id: &u64| all.iter().any(|one| one.id == *id && one.state == State::Open);
        one.together.iter().copied().filter(is_open).collect()
    };
    let approved = decided.iter().filter(|one| one.state == State::Approved);
    let (with, left): (Vec<u64>, Vec<Vec<u64>>) = approved
        .map(|one| (one.id, of(one)))
        .filter(|(_, left)| !left.is_empty())
        .unzip();
    let left: BTreeSet<u64> = left.into_iter().flatten().collect();
    (!left.is_empty()).then(|| {
        format!(
            "the predicted gain of {} is for applying {} together with {}; apply the rest with \
             `homenode recommend apply {}`",
            list_of(&with, ", "),
            if with.len() == 1 { "it" } else { "them" },
            list_of(&left, ", "),
            list_of(&left, " ")
        )
    })
}

fn list_of<'a>(ids: impl IntoIterator<Item = &'a u64>, separator: &str) -> String {
    let ids: Vec<String> = ids.into_iter().map(u64::to_string).collect();
    ids.join(separator)
}

/// `homenode mode`.
///
/// # Errors
/// No agent, no such VM, or a mode that could not be saved.
pub(crate) fn mode(args: &ModeArgs) -> anyhow::Result<()> {
    let (Some(vm), Some(mode)) = (&args.vm, args.mode) else {
        return modes(args);
    };
    let mode = mode.into_option();
    let request = Request::ModeSet {
        vm: vm.clone(),
        mode,
        span_ns: args.span,
    };
    let answer: ModeSet = ask_agent(args.agent.dir(), &request)?;
    if args.agent.json() {
        return print_json("mode-set", &answer);
    }
    match (mode, args.span) {
        (Some(_), Some(Ns::ZERO)) => say!("{} has its own mode again", OneLine(vm)),
        (Some(mode), Some(time)) => say!(
            "{} has mode {mode} for {}, then its own again",
            OneLine(vm),
            span(time)
        ),
        (Some(mode), None) => say!("{} has mode {mode}", OneLine(vm)),
        (None, _) => say!("{} has the mode of the run and its policies", OneLine(vm)),
    }
    if let Some(note) = &answer.note {
        say!("note: {}", OneLine(note));
    }
    Ok(())
}

fn modes(args: &ModeArgs) -> anyhow::Result<()> {
    let answer = vms(args.agent.dir(), args.vm.as_deref())?;
    if args.agent.json() {
        return print_json("vms", &answer);
    }
    let rows = answer.vms.iter().map(|vm| {
        let chosen = or_dash(vm.mode_chosen, |mode| mode.to_string());
        vec![
            vm.name.clone(),
            vm.mode.to_string(),
            chosen,
            match vm.observed_for_ns {
                Some(left) => format!("for another {}", span(left)),
                None => vm.left_alone.clone().unwrap_or_default(),
            },
        ]
    });
    say_vms(&["VM", "mode", "chosen", ""], rows);
    Ok(())
}

/// `homenode reservations`: shows those of the running agent, or those in the ledger if there is no agent.
///
/// # Errors
/// A ledger that cannot be used; no open reservation with this number.
pub(crate) fn reservations(args: &ReservationsArgs) -> anyhow::Result<()> {
    if let Some(ReservationsCommand::Drop(args)) = &args.command {
        return drop_reservations(args);
    }
    let answer: Reservations = match ask(args.agent.dir(), &Request::Reservations)? {
        Some(answer) => answer,
        None => standalone::reservations(args.agent.dir())?,
    };
    if args.agent.json() {
        return print_json("reservations", &answer);
    }
    if answer.reservations.is_empty() {
        say!("nothing is reserved");
        return Ok(());
    }
    let rows = answer.reservations.iter().map(|reservation: &OpenReservation| {
        vec![
            reservation.id.to_string(),
            reservation.vm.clone().unwrap_or_else(|| "-".to_owned()),
            reservation.nodes.clone(),
            reservation.vcpus.to_string(),
            reservation.memory_bytes.to_string(),
            until(reservation.made),
            until(reservation.expires),
        ]
    });
    say!(
        "{}",
        table(&["id", "VM", "nodes", "vCPUs", "memory", "made", "until"], rows)
    );
    Ok(())
}

/// Reservations that were dropped.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Dropped {
    /// The reservations' numbers.
    ids: Vec<u64>,
}

fn drop_reservations(args: &IdArgs) -> anyhow::Result<()> {
    let mut ids: Vec<u64> = Vec::new();
    let mut drop_one = |id: u64| -> anyhow::Result<()> {
        let dropped: ReservationDropped = match ask(args.agent.dir(), &Request::ReservationDrop { id })? {
            Some(dropped) => dropped,
            None => standalone::drop_reservation(args.agent.dir(), id)?,
        };
        if !args.agent.json() {
            say!("reservation {id} is cancelled");
        }
        ids.push(dropped.id);
        Ok(())
    };
    let done = args.ids.iter().try_for_each(|id| drop_one(*id));
    match args.agent.json() && (done.is_ok() || !ids.is_empty()) {
        true => print_done("reservations-dropped", &Dropped { ids }, done),
        false => done,
    }
}

/// Formats a time of day, in the host's time zone.
fn until(time: WallTime) -> String {
    local(time.0).format("%H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_approved_recommendation_names_its_open_partners_and_the_command_that_applies_them() {
        let decided = [recommendation(6, State::Approved, &[14, 7, 15])];
        let open = |id| recommendation(id, State::Open, &[]);
        let all = [
            open(7),
            open(14),
            recommendation(15, State::Rejected, &[]),
            open(16),
        ];
        assert_eq!(
            partners(&decided, &all).unwrap(),
            "the predicted gain of 6 is for applying it together with 7, 14; apply the rest with \
             `homenode recommend apply 7 14`"
        );
        // The same command approved the other recommendations, or no recommendation was approved.
        assert_eq!(partners(&decided, &[open(16)]), None);
        assert_eq!(partners(&[recommendation(6, State::Rejected, &[14])], &all), None);
    }
}

//! `homenode status`: what the agent does now, what is in force, what waits for the operator, what is wrong.

use std::collections::BTreeMap;

use homenode_api::Request;
use homenode_api::answer::{Happened, Overview, Recommendation, Reservations};
use homenode_control::VmStatus;
use homenode_control::recommendations::State;
use homenode_host::{EventRecord, Mode};
use homenode_units::{NodeSet, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::print::{print_json, span};
use crate::recommend::remembered;

/// The end of `status`'s help.
pub(crate) const HELP: &str = "Examples:
  homenode status                      ten lines; `homenode top` shows more, and keeps showing it
  homenode status --json               the same, as JSON";

/// Maximum number of lines of one kind; beyond it, only their number is shown.
const LINES_MAX: usize = 3;
/// Names of VMs shown on a line.
const NAMES_MAX: usize = 4;
/// Trouble older than this is over.
const RECENT: Ns = Ns::from_secs(600);

/// Options of `status`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// The state of the agent and its VMs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Shown {
    /// The host's clock.
    at_ns: Ns,
    /// Time until a pause ends; `null` if the agent is not paused.
    paused_for_ns: Option<Ns>,
    /// Nodes that are being emptied of VMs.
    drained: NodeSet,
    /// How far decisions about VMs may go, most VMs first.
    modes: Vec<Group>,
    /// Settings of the agent that are in force.
    in_force: Vec<Group>,
    /// Decisions and reservations that wait, as sentences.
    waiting: Vec<String>,
    /// Trouble of the last ten minutes, as sentences.
    wrong: Vec<String>,
    /// CPU time that running VMs saved through changes of their homes; `null` if no trial has measured one yet.
    time_gained_ns: Option<Ns>,
    /// CPU time that running VMs lost through changes of their homes.
    time_lost_ns: Option<Ns>,
    /// The last decision that was carried out.
    last: Option<Happened>,
}

/// VMs that have something in common.
#[derive(Debug, Serialize, JsonSchema)]
struct Group {
    /// What the VMs have in common, such as `a home`.
    what: String,
    /// The VMs' names.
    vms: Vec<String>,
}

/// `homenode status`.
///
/// # Errors
/// No agent.
pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let dir = args.agent.dir();
    let overview: Overview = ask_agent(dir, &Request::Overview)?;
    let recommended = remembered(dir)?;
    let reserved: Reservations = ask_agent(dir, &Request::Reservations)?;
    let shown = Shown::of(&overview, &recommended, &reserved);
    if args.agent.json() {
        return print_json("status", &shown);
    }
    shown.show(&overview);
    Ok(())
}

impl Shown {
    fn of(overview: &Overview, recommended: &[Recommendation], reserved: &Reservations) -> Shown {
        let vms = &overview.status.vms;
        let drained = overview.status.nodes.iter().filter(|node| node.is_drained);
        let open = recommended.iter();
        let open = open.filter(|one| one.state == State::Open);
        let open = open.map(|one| {
            format!(
                "recommendation {}: {} (`homenode recommend apply {}`)",
                one.id, one.text, one.id
            )
        });
        let reserved = reserved.reservations.iter().map(|one| {
            let vm = one
                .vm
                .as_deref()
                .map_or_else(|| "a VM".to_owned(), |name| format!("VM {name}"));
            format!(
                "node {} is reserved for {vm} (`homenode reservations`)",
                one.nodes
            )
        });
        let events = || overview.events.iter().rev();
        Shown {
            at_ns: overview.status.at_ns,
            paused_for_ns: overview.status.paused_for_ns,
            drained: drained.map(|node| node.node).collect(),
            modes: modes(vms),
            in_force: in_force(vms),
            waiting: open.chain(reserved).collect(),
            wrong: wrong(vms)
                .chain(
                    events()
                        .filter(|event| is_trouble(event))
                        .map(|event| event.text.clone()),
                )
                .collect(),
            time_gained_ns: sum(vms, |vm| vm.time_gained_ns),
            time_lost_ns: sum(vms, |vm| vm.time_lost_ns),
            last: events()
                .find(|event| EventRecord::is_carried_out(&event.kind, event.outcome.as_deref()))
                .cloned(),
        }
    }

    fn show(&self, overview: &Overview) {
        let nodes = &overview.status.nodes;
        let busy: f64 = nodes.iter().filter_map(|node| node.cpus_busy).sum();
        let cpus: usize = nodes.iter().map(|node| node.cpus).sum();
        let load = format!("{} nodes, {busy:.1} of {cpus} CPUs busy", nodes.len());
        match self.modes.as_slice() {
            [] => say!("agent     no VMs; {load}"),
            modes => {
                let modes = modes
                    .iter()
                    .map(|group| format!("{} {}", group.what, group.named()));
                say!("agent     {}; {load}", modes.collect::<Vec<_>>().join(", "));
            }
        }
        if let Some(left) = self.paused_for_ns {
            say!(
                "          paused for another {} (`homenode pause --end` ends that)",
                span(left)
            );
        }
        if !self.drained.is_empty() {
            say!(
                "          node {} is kept empty of VMs (`homenode drain`)",
                self.drained
            );
        }
        let of_group = |group: &Group| format!("{}: {}", group.what, group.named());
        let in_force: Vec<String> = self.in_force.iter().map(of_group).collect();
        lines("in force", &in_force, "nothing");
        lines("waiting", &self.waiting, "nothing");
        lines("wrong", &self.wrong, "nothing in the last ten minutes");
        match self.time_gained_ns.zip(self.time_lost_ns) {
            Some((gained, lost)) => say!(
                "time      changes of homes gained {} of CPU time and lost {} (`homenode report`)",
                span(gained),
                span(lost)
            ),
            None => say!("time      no change of a home was measured yet"),
        }
        match &self.last {
            Some(last) => say!("last      {} ago: {}", span(last.age_ns), last.text),
            None => say!("last      nothing was changed yet"),
        }
    }
}

impl Group {
    /// Returns the names of the group's VMs, or their number and the first few names.
    fn named(&self) -> String {
        let shown = self
            .vms
            .iter()
            .take(NAMES_MAX)
            .cloned()
            .collect::<Vec<_>>()
            .join(", ");
        match self.vms.len() {
            all if all <= NAMES_MAX => shown,
            all => format!("{all} VMs ({shown}, …)"),
        }
    }
}

/// Prints lines under a heading, at most [`LINES_MAX`] of them.
fn lines(heading: &str, lines: &[String], if_none: &str) {
    if lines.is_empty() {
        say!("{heading:9} {if_none}");
    }
    for (at, line) in lines.iter().take(LINES_MAX).enumerate() {
        say!("{:9} {line}", if at == 0 { heading } else { "" });
    }
    if lines.len() > LINES_MAX {
        say!("{:9} and {} more", "", lines.len() - LINES_MAX);
    }
}

/// The sum of a time over the VMs of which it is known; `None` if there are none.
fn sum(vms: &[VmStatus], of: fn(&VmStatus) -> Option<Ns>) -> Option<Ns> {
    let known = vms.iter().filter_map(of);
    known.reduce(|sum, time| Ns(sum.0.saturating_add(time.0)))
}

fn modes(vms: &[VmStatus]) -> Vec<Group> {
    let mut modes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for vm in vms {
        let what = match vm.mode {
            Mode::Act => "acts on",
            Mode::Recommend => "recommends for",
            Mode::Observe => "only observes",
        };
        modes.entry(what).or_default().push(vm.name.clone());
    }
    let mut groups: Vec<Group> = modes
        .into_iter()
        .map(|(what, vms)| Group {
            what: what.to_owned(),
            vms,
        })
        .collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.vms.len()));
    groups
}

fn in_force(vms: &[VmStatus]) -> Vec<Group> {
    let group = |what: &str, holds: fn(&VmStatus) -> bool| Group {
        what: what.to_owned(),
        vms: vms
            .iter()
            .filter(|vm| holds(vm))
            .map(|vm| vm.name.clone())
            .collect(),
    };
    let mut groups = vec![
        group("a home", |vm| vm.home.is_some()),
        group("a CPU quota", |vm| vm.permit.quota.is_some()),
        group("a memory policy of its own", |vm| {
            vm.memory_policy_chosen.is_some()
        }),
        group("less memory than its maximum", |vm| {
            vm.memory.limit_bytes.is_some()
        }),
    ];
    groups.retain(|group| !group.vms.is_empty());
    groups
}

/// Returns the troubles that keep the agent from managing VMs as their operators chose.
fn wrong(vms: &[VmStatus]) -> impl Iterator<Item = String> {
    vms.iter().flat_map(|vm| {
        let name = &vm.name;
        let left_alone = vm
            .left_alone
            .as_ref()
            .map(|why| format!("VM {name} is left alone: {why}"));
        let unmetered = vm
            .permit
            .unmetered
            .as_ref()
            .filter(|_| vm.permit.permit.is_some());
        let unmetered = unmetered.map(|why| format!("VM {name} is not held to its permit: {why}"));
        let caution = vm
            .memory_policy_caution
            .as_ref()
            .map(|caution| format!("VM {name}: {caution}"));
        [left_alone, unmetered, caution].into_iter().flatten()
    })
}

/// Whether an event reports a recent failure.
fn is_trouble(event: &Happened) -> bool {
    let failed = event
        .outcome
        .as_deref()
        .is_some_and(|outcome| outcome == "failed");
    event.age_ns <= RECENT && (failed || event.kind == "refused")
}

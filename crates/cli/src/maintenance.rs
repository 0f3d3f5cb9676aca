//! `homenode drain` and `pause`: keep nodes free of VMs, or stop all changes, for as long as the operator wants.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use homenode_api::Request;
use homenode_api::answer::{Maintenance, Recommendation};
use homenode_control::LeftBehind;
use homenode_control::recommendations::State;
use homenode_host::Lever;
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_units::{Bytes, NodeSet, Ns};

use crate::ask::ask_agent;
use crate::options::AgentArgs;
use crate::print::{or_dash, print_json, span, table};
use crate::recommend::remembered;

/// The end of `drain`'s help.
pub(crate) const DRAIN_HELP: &str = "VMs that have their home on the node get another; unplaced VMs get a home elsewhere as long as the drain lasts. Their memory
follows, and no VM gets a home on the node. A drain lasts until you end it or the host restarts; it survives a restart of the
agent. Memory that cannot move, VMs whose operator chose that node, and VMs that need your approval to move (mode `recommend`)
stay; the command lists them with the reasons, and its exit status is 1. Interrupting the command ends only the waiting.

Examples:
  homenode drain 1                     empty node 1, and wait until it is
  homenode drain 1-2 --no-wait         begin, and look later
  homenode drain                       nodes that are being emptied, and what is left on them
  homenode drain 1 --end               VMs may live there again";

/// The end of `pause`'s help.
pub(crate) const PAUSE_HELP: &str = "While paused, the agent makes no change to any VM, not even an approved one. Homes stay; limits are lifted and memory is
returned at once. A change that proves to cost a VM speed is still undone, and lent vCPUs return home if there is room. The
agent goes on observing, and reports what it would do. A pause ends after its time, or when the agent stops.

Examples:
  homenode pause                       whether the agent is paused, and for how long
  homenode pause --for 10min           pause it; repeated, the time counts from now
  homenode pause --end                 go on";

/// Time between polls of what is left.
const LOOK: Duration = Duration::from_secs(1);
/// Waiting ends if what is left has not shrunk for this long, and for this many of the agent's samples.
const PATIENCE: Duration = Duration::from_secs(20);
const PATIENCE_LOOKS: u32 = 10;
/// Number of the agent's samples after which each VM on the nodes has its recommendation, if it needs one.
const RECOMMENDED_LOOKS: u32 = 3;

/// Options of `drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    /// Nodes to empty, such as `1` or `0,2-3`; without any, show the drains in progress
    pub nodes: Option<NodeSet>,
    /// End the drain: VMs may live on these nodes again
    #[arg(long, requires = "nodes", conflicts_with = "no_wait")]
    pub end: bool,
    /// Do not wait until the nodes are empty
    #[arg(long, requires = "nodes")]
    pub no_wait: bool,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `pause`.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    /// The same as `--for TIME`
    #[arg(value_name = "TIME", hide = true, conflicts_with_all = ["span", "end"])]
    pub time: Option<Ns>,
    /// Pause for this long; without it, show whether the agent is paused
    #[arg(long = "for", value_name = "TIME")]
    pub span: Option<Ns>,
    /// Resume now
    #[arg(long, conflicts_with = "span")]
    pub end: bool,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `homenode drain`. Fails if it has waited and VMs are left on the nodes.
///
/// # Errors
/// No agent; nodes that do not exist; policies that assign no homes.
pub(crate) fn drain(args: &DrainArgs) -> anyhow::Result<ExitCode> {
    let Some(nodes) = &args.nodes else {
        let now: Maintenance = ask_agent(args.agent.dir(), &Request::Maintenance)?;
        show(args, &now)?;
        return Ok(ExitCode::SUCCESS);
    };
    let request = Request::Drain {
        nodes: nodes.clone(),
        is_on: !args.end,
    };
    let begun: Maintenance = ask_agent(args.agent.dir(), &request)?;
    if let Some(note) = begun.note.as_ref().filter(|_| !args.agent.json()) {
        say!("note: {}", OneLine(note));
    }
    if args.end || args.no_wait {
        match args.agent.json() {
            true => print_json("maintenance", &begun)?,
            false if args.end => say!("VMs may live on node {nodes} again"),
            false => say!("node {nodes} is being emptied; `homenode drain` shows the progress"),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (end, waiting) = wait(args, nodes, begun)?;
    let is_empty = left(&end, nodes).next().is_none();
    match (args.agent.json(), is_empty) {
        (true, _) => print_json("maintenance", &end)?,
        (false, true) => {
            say!("node {nodes} is empty; VMs are kept off it until `homenode drain {nodes} --end`");
        }
        (false, false) => {
            show(args, &end)?;
            if waiting > 0 {
                say!("{}", wait_for_approval(waiting));
            }
            say!("what is left on node {nodes} will not move by itself; new VMs are kept off it");
        }
    }
    Ok(ExitCode::from(u8::from(!is_empty)))
}

fn wait_for_approval(count: usize) -> String {
    let wait = if count == 1 {
        "recommendation waits"
    } else {
        "recommendations wait"
    };
    format!("{count} {wait} for your approval: `homenode recommend` lists them")
}

/// Waits until one of these holds: the nodes are empty, what is left on them no longer shrinks, another client ended the drain,
/// or VMs move only once the operator approves that. Also returns the number of recommendations that wait for approval.
fn wait(args: &DrainArgs, nodes: &NodeSet, begun: Maintenance) -> anyhow::Result<(Maintenance, usize)> {
    let (started, at_first) = (Instant::now(), memory(&begun, nodes));
    let of = |drains: &Maintenance| (left(drains, nodes).count(), memory(drains, nodes));
    let progress = Progress::new("");
    let mut least = of(&begun);
    let (mut last, mut changed, mut looks, mut samples) = (begun, started, 0, 0);
    loop {
        let vms = left(&last, nodes).count();
        let is_over = last.drains.iter().all(|drain| !nodes.contains(drain.node));
        if vms == 0 || is_over || changed.elapsed() >= PATIENCE && looks >= PATIENCE_LOOKS {
            let waiting = if is_over {
                0
            } else {
                waiting(&last, nodes, &remembered(args.agent.dir())?)
            };
            return Ok((last, waiting));
        }
        if samples >= RECOMMENDED_LOOKS && left(&last, nodes).all(|vm| vm.why.is_some()) {
            let waiting = waiting(&last, nodes, &remembered(args.agent.dir())?);
            if waiting > 0 {
                return Ok((last, waiting));
            }
        }
        let (now, spent) = (memory(&last, nodes), started.elapsed().as_secs_f64());
        let rate = at_first.saturating_sub(now).as_f64() / spent.max(1e-3);
        let rest = match rate > 0.0 {
            true => format!(", about {}", span(Ns((now.as_f64() / rate * 1e9) as u64))),
            false => String::new(),
        };
        progress.show(&format!("node {nodes}: {now} of {vms} VMs still to move{rest}"));
        sleep(LOOK);
        let next: Maintenance = ask_agent(args.agent.dir(), &Request::Maintenance)?;
        looks += u32::from(next.at_ns != last.at_ns);
        samples += u32::from(next.at_ns != last.at_ns);
        // NUMA balancing moves pages of a VM that stays back and forth, so only a new minimum counts as progress.
        let now = of(&next);
        if now.0 < least.0 || now.1 < least.1 {
            least = (now.0.min(least.0), now.1.min(least.1));
            (changed, looks) = (Instant::now(), 0);
        }
        last = next;
    }
}

/// Returns the number of open recommendations that would move VMs that are left on these nodes.
fn waiting(of: &Maintenance, nodes: &NodeSet, all: &[Recommendation]) -> usize {
    let is_left = |one: &Recommendation| left(of, nodes).any(|vm| vm.id == one.vm_id);
    let moves = |one: &Recommendation| matches!(one.action.lever(), Lever::Home | Lever::Pages);
    let is_open = |one: &&Recommendation| one.state == State::Open && moves(one) && is_left(one);
    all.iter().filter(is_open).count()
}

/// Returns the VMs that are left on these nodes.
fn left<'a>(of: &'a Maintenance, nodes: &'a NodeSet) -> impl Iterator<Item = &'a LeftBehind> {
    let drains = of.drains.iter().filter(|drain| nodes.contains(drain.node));
    drains.flat_map(|drain| &drain.vms)
}

fn memory(of: &Maintenance, nodes: &NodeSet) -> Bytes {
    let bytes = left(of, nodes).filter_map(|vm| vm.memory_bytes);
    Bytes(bytes.map(|bytes| bytes.0).sum())
}

fn show(args: &DrainArgs, now: &Maintenance) -> anyhow::Result<()> {
    if args.agent.json() {
        return print_json("maintenance", now);
    }
    if now.drains.is_empty() {
        say!("no node is being drained");
    }
    for drain in now.drains.iter().filter(|drain| drain.vms.is_empty()) {
        say!("node {} is empty", drain.node);
    }
    let rows = now.drains.iter().flat_map(|drain| {
        drain.vms.iter().map(|vm| {
            vec![
                drain.node.to_string(),
                vm.name.clone(),
                or_dash(vm.memory_bytes, |bytes| bytes.to_string()),
                vm.vcpus.to_string(),
                vm.why.clone().unwrap_or_default(),
            ]
        })
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        say!(
            "{}",
            table(&["node", "VM", "memory", "vCPUs", "why it stays"], rows)
        );
    }
    if let Some(left) = now.paused_for_ns {
        say!("the agent is paused for another {}", span(left));
    }
    Ok(())
}

/// `homenode pause`.
///
/// # Errors
/// No agent.
pub(crate) fn pause(args: &PauseArgs) -> anyhow::Result<()> {
    let span_ns = if args.end {
        Some(Ns::ZERO)
    } else {
        args.span.or(args.time)
    };
    let request = span_ns.map_or(Request::Maintenance, |span_ns| Request::Pause { span_ns });
    let now: Maintenance = ask_agent(args.agent.dir(), &request)?;
    match (args.agent.json(), now.paused_for_ns) {
        (true, _) => print_json("maintenance", &now)?,
        (false, Some(left)) => say!("the agent is paused for another {}", span(left)),
        (false, None) if args.end => say!("the agent is no longer paused"),
        (false, None) => say!("the agent is not paused; `homenode pause --for 10min` pauses it"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use homenode_control::DrainStatus;
    use homenode_units::{NodeId, VmId};

    use super::*;
    use crate::recommend::recommendation;

    #[test]
    fn what_waits_is_open_and_moves_a_vm_that_is_left_on_the_nodes() {
        let vm = |id: u128| LeftBehind {
            name: "web".to_owned(),
            id: VmId(id),
            memory_bytes: None,
            vcpus: 1,
            why: Some("mode recommend is in force for it".to_owned()),
        };
        let maintenance = |id| Maintenance {
            at_ns: Ns(1),
            drains: vec![DrainStatus {
                node: NodeId(1),
                vms: vec![vm(id)],
            }],
            paused_for_ns: None,
            note: None,
        };
        // These settings give VM 1 a home.
        let all = [
            recommendation(1, State::Open, &[]),
            recommendation(2, State::Expired, &[]),
        ];
        let node = |node| NodeSet::one(NodeId(node));
        assert_eq!(waiting(&maintenance(1), &node(1), &all), 1);
        assert_eq!(waiting(&maintenance(2), &node(1), &all), 0);
        assert_eq!(waiting(&maintenance(1), &node(2), &all), 0);
        assert!(wait_for_approval(1).starts_with("1 recommendation waits"));
        assert!(wait_for_approval(16).starts_with("16 recommendations wait"));
    }
}

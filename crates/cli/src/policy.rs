//! `homenode memory-policy`: each VM's memory policy, and where its pages are.

use clap::Subcommand;
use homenode_api::Request;
use homenode_api::answer::{PolicyAdvice, PolicySet};
use homenode_control::NodePages;
use homenode_screens::printable::OneLine;
use homenode_units::MemoryPolicy;

use crate::ask::{ask_agent, vms};
use crate::options::{AgentArgs, OrNone, ShowArgs, SuggestArgs};
use crate::print::{counted, or_dash, or_none, percent, print_json, say_vms};

/// Options of `memory-policy`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct PolicyArgs {
    #[command(subcommand)]
    pub command: Option<PolicyCommand>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Commands about memory policies.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Choose a VM's memory policy, or leave the choice to the agent
    #[command(
        after_help = "Examples:\n  homenode memory-policy set web first-touch\n  homenode memory-policy set web round-4k+carrefour\n  homenode memory-policy set web none"
    )]
    Set(PolicySetArgs),
    /// Show memory policies, and where pages are
    Show(ShowArgs),
    /// Advise on a memory policy for a VM, from its behaviour
    Advise(SuggestArgs),
}

/// Options of `memory-policy set`.
#[derive(Debug, clap::Args)]
pub(crate) struct PolicySetArgs {
    /// The VM's name
    pub vm: String,
    /// `first-touch`, `round-4k`, either of them with `+carrefour`, or `none` for the agent's choice
    pub policy: OrNone<MemoryPolicy>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `homenode memory-policy`.
///
/// # Errors
/// No agent, no such VM, or a policy that the VM cannot have.
pub(crate) fn run(args: &PolicyArgs) -> anyhow::Result<()> {
    match &args.command {
        None => show(None, &args.agent),
        Some(PolicyCommand::Show(args)) => show(args.vm.as_deref(), &args.agent),
        Some(PolicyCommand::Set(args)) => set(args),
        Some(PolicyCommand::Advise(args)) => advise(args),
    }
}

fn set(args: &PolicySetArgs) -> anyhow::Result<()> {
    let policy = args.policy.into_option();
    let vm = args.vm.clone();
    let answer: PolicySet = ask_agent(args.agent.dir(), &Request::PolicySet { vm, policy })?;
    if args.agent.json() {
        return print_json("policy-set", &answer);
    }
    match policy {
        Some(policy) => say!("{} has memory policy {policy}", OneLine(&args.vm)),
        None => say!("the agent chooses the memory policy of {}", OneLine(&args.vm)),
    }
    answer
        .notes
        .iter()
        .for_each(|note| say!("note: {}", OneLine(note)));
    Ok(())
}

fn advise(args: &SuggestArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    let answer: PolicyAdvice = ask_agent(args.agent.dir(), &Request::PolicyAdvise { vm })?;
    if args.agent.json() {
        return print_json("policy-advice", &answer);
    }
    let why = &answer.advice.why;
    match answer.advice.policy {
        None => say!("no advice: {why}"),
        Some(policy) if policy == answer.memory_policy => say!("{policy}, which it has already: {why}"),
        Some(policy) => {
            say!("{policy}: {why}");
            say!(
                "\nchoose it with: homenode memory-policy set {} {policy}",
                OneLine(&args.vm)
            );
        }
    }
    Ok(())
}

fn show(vm: Option<&str>, agent: &AgentArgs) -> anyhow::Result<()> {
    let answer = vms(agent.dir(), vm)?;
    if agent.json() {
        return print_json("vms", &answer);
    }
    let rows = answer.vms.iter().map(|vm| {
        vec![
            vm.name.clone(),
            counted(vm.memory_policy.to_string(), vm.pages_sampled_by),
            or_dash(vm.memory_policy_chosen, |chosen| chosen.to_string()),
            or_none(vm.home.as_ref()),
            or_dash(vm.pages_by_node.as_deref(), pages),
            or_dash(vm.local_access_ratio, percent),
        ]
    });
    say_vms(&["VM", "policy", "chosen", "home", "MiB on nodes", "local"], rows);
    for vm in &answer.vms {
        let name = OneLine(&vm.name);
        if let Some(caution) = &vm.memory_policy_caution {
            say!("{name}: {}", OneLine(caution));
        }
        if let Some(why) = &vm.memory_fixed {
            say!("{name}: its pages cannot move: {why}");
        }
    }
    Ok(())
}

/// Formats the MiB on each node that has any, as in `0: 120  3: 8`.
fn pages(on: &[NodePages]) -> String {
    const PAGES_PER_MIB: u64 = 256;
    let some = on.iter().map(|on| (on.node, on.pages.0 / PAGES_PER_MIB));
    let some = some.filter(|(_, mib)| *mib > 0);
    let each: Vec<String> = some.map(|(node, mib)| format!("{node}: {mib}")).collect();
    each.join("  ")
}

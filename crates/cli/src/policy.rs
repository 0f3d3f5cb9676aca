//! `homenode policy`: which memory policy a VM has, and how its pages lie.

use homenode_api::Request;
use homenode_api::answer::{PolicyAdvice, PolicySet, Vms};
use homenode_control::VmStatus;
use homenode_host::CountedBy;
use homenode_units::{MemoryPolicy, NodeId, NodeSet, Pages, VmId};
use serde::Serialize;

use crate::args::{PolicyCommand, PolicySetArgs, ShowArgs, SuggestArgs};
use crate::output::{counted, or_dash, or_free, percent, print_json, table};
use crate::query::{ask_agent, vms};

/// `homenode policy`.
///
/// # Errors
/// No agent, no such VM, or a policy that the VM cannot have.
pub fn run(command: &PolicyCommand) -> anyhow::Result<()> {
    match command {
        PolicyCommand::Set(args) => set(args),
        PolicyCommand::Show(args) => show(args),
        PolicyCommand::Advise(args) => advise(args),
    }
}

fn set(args: &PolicySetArgs) -> anyhow::Result<()> {
    let policy = args.policy.into_option();
    let vm = args.vm.clone();
    let answer: PolicySet = ask_agent(&args.state, &Request::PolicySet { vm, policy })?;
    if args.json {
        return print_json(&answer);
    }
    match policy {
        Some(policy) => say!("{} has memory policy {policy}", args.vm),
        None => say!("the memory policy of {} is the agent's choice", args.vm),
    }
    answer.notes.iter().for_each(|note| say!("note: {note}"));
    Ok(())
}

fn advise(args: &SuggestArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    let answer: PolicyAdvice = ask_agent(&args.state, &Request::PolicyAdvise { vm })?;
    if args.json {
        return print_json(&answer);
    }
    let why = &answer.advice.why;
    match answer.advice.policy {
        None => say!("no advice: {why}"),
        Some(policy) if policy == answer.memory_policy => say!("{policy}, as it has: {why}"),
        Some(policy) => {
            say!("{policy}: {why}");
            say!("\nchoose it with: homenode policy set {} {policy}", args.vm);
        }
    }
    Ok(())
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let Vms { vms, .. } = vms(&args.state, args.vm.as_deref())?;
    let layouts: Vec<Layout> = vms.into_iter().map(Layout::of).collect();
    if args.json {
        return print_json(&layouts);
    }
    let rows = layouts.iter().map(|vm| {
        vec![
            vm.name.clone(),
            counted(vm.memory_policy.to_string(), vm.pages_sampled_by),
            or_dash(vm.memory_policy_chosen, |chosen| chosen.to_string()),
            or_free(vm.home.as_ref()),
            or_dash(vm.pages_on.as_deref(), pages),
            or_dash(vm.local_access_ratio, percent),
        ]
    });
    let header = ["VM", "policy", "chosen", "home", "MiB on nodes", "local"];
    say!("{}", table(&header, rows));
    for vm in &layouts {
        let name = &vm.name;
        if let Some(caution) = &vm.memory_policy_caution {
            say!("{name}: {caution}");
        }
        if let Some(why) = &vm.memory_fixed {
            say!("{name}: its pages cannot move: {why}");
        }
    }
    Ok(())
}

/// Of what is known of a VM, what concerns the layout of its memory.
#[derive(Serialize)]
struct Layout {
    name: String,
    id: VmId,
    memory_policy: MemoryPolicy,
    memory_policy_chosen: Option<MemoryPolicy>,
    pages_sampled_by: Option<CountedBy>,
    memory_policy_caution: Option<String>,
    memory_fixed: Option<String>,
    home: Option<NodeSet>,
    pages_on: Option<Vec<(NodeId, Pages)>>,
    local_access_ratio: Option<f64>,
}

impl Layout {
    fn of(vm: VmStatus) -> Layout {
        Layout {
            name: vm.name,
            id: vm.id,
            memory_policy: vm.memory_policy,
            memory_policy_chosen: vm.memory_policy_chosen,
            pages_sampled_by: vm.pages_sampled_by,
            memory_policy_caution: vm.memory_policy_caution,
            memory_fixed: vm.memory_fixed,
            home: vm.home,
            pages_on: vm.pages_on,
            local_access_ratio: vm.local_access_ratio,
        }
    }
}

/// `0: 120  3: 8`: MiB on each node that has any.
fn pages(on: &[(NodeId, Pages)]) -> String {
    const PAGES_PER_MIB: u64 = 256;
    let some = on.iter().map(|(node, pages)| (node, pages.0 / PAGES_PER_MIB));
    let some = some.filter(|(_, mib)| *mib > 0);
    let each: Vec<String> = some.map(|(node, mib)| format!("{node}: {mib}")).collect();
    each.join("  ")
}

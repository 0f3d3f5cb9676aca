//! `homenode topology`: what VMs' guests were told about their nodes.

use homenode_control::{NodePages, TopologyStatus, VirtualNodeStatus, VmStatus};
use homenode_screens::printable::OneLine;
use homenode_units::{NodeId, Pages};

use crate::ask::vms;
use crate::options::ShowArgs;
use crate::print::{or_dash, print_json, say_vms, table};

/// Describes when the agent last told a VM's guest about its nodes, or why it tells the guest nothing.
fn standing(vm: &VmStatus) -> String {
    match (&vm.topology.why_not, vm.topology.published_age_ns) {
        (Some(why), None) => format!("told nothing: {why}"),
        (Some(why), Some(age)) => {
            format!("told {:.0} s ago, and nothing since: {why}", age.as_secs_f64())
        }
        (None, Some(age)) => format!("told {:.0} s ago", age.as_secs_f64()),
        (None, None) => "told nothing yet".to_owned(),
    }
}

/// `homenode topology`.
///
/// # Errors
/// No agent, or no such VM.
pub(crate) fn run(args: &ShowArgs) -> anyhow::Result<()> {
    let answer = vms(args.agent.dir(), args.vm.as_deref())?;
    if args.agent.json() {
        return print_json("vms", &answer);
    }
    let vms = &answer.vms;
    match args.vm {
        Some(_) => vms.iter().for_each(show),
        None => say_vms(&["VM", "virtual nodes", "its guest was"], vms.iter().map(row)),
    }
    Ok(())
}

fn row(vm: &VmStatus) -> Vec<String> {
    let nodes = vm.topology.virtual_nodes.len().max(1);
    vec![vm.name.clone(), nodes.to_string(), standing(vm)]
}

fn show(vm: &VmStatus) {
    say!("{}: {}", OneLine(&vm.name), OneLine(&standing(vm)));
    let TopologyStatus {
        virtual_nodes,
        published,
        vcpus_believed_on,
        ..
    } = &vm.topology;
    if let Some(published) = published {
        let vcpus = published.topology.vcpus.iter().zip(vcpus_believed_on).enumerate();
        let rows =
            vcpus.map(|(vcpu, (node, believed))| vec![vcpu.to_string(), on(*node), believed.to_string()]);
        say!(
            "{}",
            table(&["vCPU", "told to run on", "so it assumes virtual node"], rows)
        );
    }
    if !virtual_nodes.is_empty() {
        let told_on = |at: usize| {
            published
                .as_ref()
                .and_then(|published| published.topology.memory.get(at).copied().flatten())
        };
        let rows = virtual_nodes.iter().enumerate();
        let rows = rows.map(|(at, node)| memory_row(at, node, told_on(at)));
        let header = [
            "virtual node",
            "vCPUs at boot",
            "memory",
            "told to be on",
            "should be on",
            "is on",
        ];
        say!("{}", table(&header, rows));
    }
}

fn memory_row(at: usize, node: &VirtualNodeStatus, told: Option<NodeId>) -> Vec<String> {
    let vcpus: Vec<String> = node.vcpus.iter().map(u16::to_string).collect();
    vec![
        at.to_string(),
        vcpus.join(","),
        node.memory_bytes.to_string(),
        on(told),
        on(node.home),
        or_dash(node.pages_by_node.as_deref(), lies),
    ]
}

fn on(node: Option<NodeId>) -> String {
    or_dash(node, |node| format!("node {node}"))
}

fn lies(pages: &[NodePages]) -> String {
    let some = pages.iter().filter(|on| on.pages > Pages::ZERO);
    let each: Vec<String> = some
        .map(|on| format!("node {}: {}", on.node, on.pages.to_bytes()))
        .collect();
    each.join(", ")
}

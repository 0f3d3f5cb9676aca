//! `homenode topology`: what VMs' guests are told of where they are.

use homenode_control::{TopologyStatus, VirtualNodeStatus, VmStatus};
use homenode_units::{NodeId, Pages};
use serde::Serialize;

use crate::args::ShowArgs;
use crate::output::{or_dash, print_json, table};
use crate::query::vms;
use homenode_api::answer::Vms;

/// A VM in the agent's answer.
#[derive(Debug, Serialize)]
struct VmTopology {
    name: String,
    topology: TopologyStatus,
}

impl VmTopology {
    /// Why its guest is told nothing, or when it was told last.
    fn standing(&self) -> String {
        let TopologyStatus {
            told_age_ns, why_not, ..
        } = &self.topology;
        match (why_not, told_age_ns) {
            (Some(why), None) => format!("told nothing: {why}"),
            (Some(why), Some(age)) => {
                format!("told {:.0} s ago, and nothing since: {why}", age.as_secs_f64())
            }
            (None, Some(age)) => format!("told {:.0} s ago", age.as_secs_f64()),
            (None, None) => "told nothing yet".to_owned(),
        }
    }
}

/// `homenode topology`.
///
/// # Errors
/// No agent, or no such VM.
pub fn run(args: &ShowArgs) -> anyhow::Result<()> {
    let Vms { vms, feed_idle } = vms(&args.state, args.vm.as_deref())?;
    let of = |mut vm: VmStatus| {
        vm.topology.why_not = vm.topology.why_not.or_else(|| feed_idle.clone());
        VmTopology {
            name: vm.name,
            topology: vm.topology,
        }
    };
    let vms: Vec<VmTopology> = vms.into_iter().map(of).collect();
    if args.json {
        return print_json(&vms);
    }
    match args.vm {
        Some(_) => vms.iter().for_each(show),
        None => say!(
            "{}",
            table(&["VM", "virtual nodes", "its guest was"], vms.iter().map(row))
        ),
    }
    Ok(())
}

fn row(vm: &VmTopology) -> Vec<String> {
    let nodes = vm.topology.virtual_nodes.len().max(1);
    vec![vm.name.clone(), nodes.to_string(), vm.standing()]
}

fn show(vm: &VmTopology) {
    say!("{}: {}", vm.name, vm.standing());
    let TopologyStatus {
        virtual_nodes,
        told,
        vcpus_believed_on,
        ..
    } = &vm.topology;
    if let Some(told) = told {
        let vcpus = told.topology.vcpus.iter().zip(vcpus_believed_on).enumerate();
        let rows =
            vcpus.map(|(vcpu, (node, believed))| vec![vcpu.to_string(), on(*node), believed.to_string()]);
        say!(
            "{}",
            table(&["vCPU", "told to run on", "so takes it for virtual node"], rows)
        );
    }
    if !virtual_nodes.is_empty() {
        let told_on = |at: usize| {
            told.as_ref()
                .and_then(|told| told.topology.memory.get(at).copied().flatten())
        };
        let rows = virtual_nodes.iter().enumerate();
        let rows = rows.map(|(at, node)| memory_row(at, node, told_on(at)));
        let header = [
            "virtual node",
            "vCPUs at boot",
            "memory",
            "told to be on",
            "is to be on",
            "lies on",
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
        or_dash(node.pages_on.as_deref(), lies),
    ]
}

fn on(node: Option<NodeId>) -> String {
    or_dash(node, |node| format!("node {node}"))
}

fn lies(pages: &[(NodeId, Pages)]) -> String {
    let some = pages.iter().filter(|(_, pages)| *pages > Pages::ZERO);
    let each: Vec<String> = some
        .map(|(node, pages)| format!("node {node}: {}", pages.to_bytes()))
        .collect();
    each.join(", ")
}

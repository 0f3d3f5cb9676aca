//! Checks whether an act is possible for a VM: the refusals that all hosts share.

use homenode_machine::Machine;
use homenode_units::{Bytes, CpuSet, NodeSet, Ns};

use crate::action::{Act, FrameMove, WINDOW_MAX, WINDOW_MIN};
use crate::limit::{Limit, Percent};
use crate::refusal::Impossible;
use crate::sample::VmSample;
use crate::topology::GuestTopology;

impl Act {
    /// Checks whether the act is possible for this VM.
    ///
    /// # Errors
    /// Returns the first reason why the act is impossible.
    pub fn check(&self, machine: &Machine, vm: &VmSample) -> Result<(), Impossible> {
        if self.lease() == Some(Ns::ZERO) {
            return Err(Impossible::NoLease);
        }
        let usable = |nodes: &NodeSet| usable(nodes, machine);
        match self {
            Act::PinVcpus { vcpus, cpus } => pins(vcpus, cpus, machine, vm),
            Act::SetHome { nodes } => usable(nodes),
            Act::MovePages { from, to, .. } => {
                usable(to)?;
                if !from.is_empty() {
                    usable(from)?;
                }
                apart(from, to)
            }
            Act::MoveFrames { moves } => moves.iter().try_for_each(|&FrameMove { from, to, .. }| {
                let (from, to) = (NodeSet::one(from), NodeSet::one(to));
                usable(&from)?;
                usable(&to)?;
                apart(&from, &to)
            }),
            Act::MoveVirtualNode { virtual_node, to, .. } => {
                usable(&NodeSet::one(*to))?;
                let (virtual_node, count) = (*virtual_node, vm.virtual_nodes.len());
                let why = || Impossible::UnknownVirtualNode { virtual_node, count };
                possible(usize::from(virtual_node) < count, why)
            }
            Act::PublishTopology { topology } => published(topology, machine, vm),
            Act::Limit { limit, .. } => within(limit, vm),
            Act::Watch { window_ns, .. } => {
                let window_ns = *window_ns;
                let is_so = (WINDOW_MIN..=WINDOW_MAX).contains(&window_ns);
                possible(is_so, || Impossible::Window { window_ns })
            }
            Act::Lift { lever } => possible(lever.can_be_lifted(), || Impossible::NoLimit { lever: *lever }),
            // Any other act can be tried on any VM, and the host reports what it cannot do.
            _ => Ok(()),
        }
    }
}

fn possible(is_so: bool, why: impl FnOnce() -> Impossible) -> Result<(), Impossible> {
    if is_so { Ok(()) } else { Err(why()) }
}

fn usable(nodes: &NodeSet, machine: &Machine) -> Result<(), Impossible> {
    let usable = machine.memory_nodes();
    let is_so = !nodes.is_empty() && nodes.is_subset(&usable);
    possible(is_so, || Impossible::Nodes {
        nodes: nodes.clone(),
        usable,
    })
}

fn apart(from: &NodeSet, to: &NodeSet) -> Result<(), Impossible> {
    let is_so = from.intersection(to).is_empty();
    possible(is_so, || Impossible::SameNodes {
        from: from.clone(),
        to: to.clone(),
    })
}

fn pins(vcpus: &[u16], cpus: &CpuSet, machine: &Machine, vm: &VmSample) -> Result<(), Impossible> {
    if let Some(&index) = vcpus.iter().find(|index| vm.vcpu(**index).is_none()) {
        return Err(Impossible::UnknownVcpu { index });
    }
    // No plan may pin vCPUs to CPUs that the VM may not use.
    let usable = match &vm.settings.cpus_allowed {
        Some(allowed) => machine.cpu_set().intersection(allowed),
        None => machine.cpu_set(),
    };
    let is_so = !cpus.is_empty() && cpus.is_subset(&usable);
    possible(is_so, || Impossible::Cpus {
        cpus: cpus.clone(),
        usable,
    })
}

fn published(topology: &GuestTopology, machine: &Machine, vm: &VmSample) -> Result<(), Impossible> {
    let GuestTopology { vcpus, memory } = topology;
    let count = vm.virtual_nodes.len();
    let is_whole = memory.len() == count && !vcpus.is_empty() && memory.iter().any(Option::is_some);
    let mut named = vcpus.iter().chain(memory).flatten();
    let are_nodes = named.all(|node| machine.nodes.get(*node).is_some());
    let (vcpus, memory) = (vcpus.len(), memory.len());
    possible(is_whole && are_nodes, || Impossible::Topology {
        vcpus,
        memory,
        count,
    })
}

fn within(limit: &Limit, vm: &VmSample) -> Result<(), Impossible> {
    match *limit {
        Limit::CpuQuota(quota) => possible(quota.is_possible(), || Impossible::Quota { quota }),
        Limit::CacheWays(Percent(percent)) | Limit::MemoryBandwidth(Percent(percent)) => {
            possible((1..=100).contains(&percent), || Impossible::Part { percent })
        }
        Limit::Memory(memory) => {
            let maximum = vm.balloon.map(|balloon| balloon.maximum);
            let is_so = memory > Bytes::ZERO && maximum.is_some_and(|maximum| memory <= maximum);
            possible(is_so, || Impossible::Memory { memory, maximum })
        }
    }
}

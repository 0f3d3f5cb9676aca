//! Counts how often VMs and their vCPUs go to other nodes, and how much of their memory was moved.
//!
//! # Algorithm
//! A VM's counts begin with the first sample that has it. Each sample is compared with the one before: a vCPU whose CPU is on
//! another node was moved, by the agent or by the kernel. After each cycle the VM's home is compared with that before. Moved
//! memory is what the host reported for the agent's decisions; pages that the kernel moves by itself are not counted.

use std::collections::BTreeMap;

use homenode_host::{Outcome, Sample};
use homenode_machine::Machine;
use homenode_units::{Bytes, NodeId, NodeSet, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Migrations of a VM within the host, since this agent first saw the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Migrations {
    /// Changes of its home; a home that was given or lifted counts as one.
    pub home_changes_count: u64,
    /// Memory that the agent moved between nodes.
    pub moved_bytes: Bytes,
    /// How often one of its vCPUs was on another node than at the sample before. A vCPU that left and returned between two
    /// samples is not counted.
    pub vcpu_moves_count: u64,
}

/// What is known of one VM.
#[derive(Debug)]
struct Seen {
    migrations: Migrations,
    home: Option<NodeSet>,
    /// Node on which each vCPU last was, by the vCPU's index.
    on: BTreeMap<u16, NodeId>,
}

/// Counts of all VMs that run.
#[derive(Debug, Default)]
pub(crate) struct Counts(BTreeMap<VmId, Seen>);

impl Counts {
    /// Takes in a sample: forgets VMs that are gone, and counts vCPUs that are on other nodes than before.
    pub(crate) fn observe(&mut self, machine: &Machine, sample: &Sample, homes: &BTreeMap<VmId, NodeSet>) {
        self.0.retain(|id, _| sample.vm(*id).is_some());
        for vm in &sample.vms {
            let seen = self.0.entry(vm.id).or_insert_with(|| Seen {
                migrations: Migrations::default(),
                home: homes.get(&vm.id).cloned(),
                on: BTreeMap::new(),
            });
            for vcpu in &vm.vcpus {
                let Some(node) = vcpu.cpu.and_then(|cpu| machine.node_of(cpu)) else {
                    continue;
                };
                let before = seen.on.insert(vcpu.index, node);
                let is_moved = before.is_some_and(|before| before != node);
                seen.migrations.vcpu_moves_count += u64::from(is_moved);
            }
        }
    }

    /// Takes in what became of a decision on a VM.
    pub(crate) fn outcome(&mut self, vm: VmId, outcome: &Outcome) {
        if let (Some(seen), Outcome::Moved { moved, .. }) = (self.0.get_mut(&vm), outcome) {
            let bytes = seen.migrations.moved_bytes.0.saturating_add(moved.to_bytes().0);
            seen.migrations.moved_bytes = Bytes(bytes);
        }
    }

    /// Takes in the homes at the end of a cycle.
    pub(crate) fn homes(&mut self, homes: &BTreeMap<VmId, NodeSet>) {
        for (id, seen) in &mut self.0 {
            let home = homes.get(id);
            if seen.home.as_ref() != home {
                seen.migrations.home_changes_count += 1;
                seen.home = home.cloned();
            }
        }
    }

    /// Returns the counts of a VM.
    pub(crate) fn of(&self, vm: VmId) -> Migrations {
        self.0.get(&vm).map(|seen| seen.migrations).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use homenode_host::{VcpuSample, VmSample};
    use homenode_units::Pages;

    use super::*;

    const VM: VmId = VmId(1);

    /// Returns a sample with a VM whose vCPUs are on the first CPU of these nodes.
    fn sample(machine: &Machine, nodes: &[u16]) -> Sample {
        let on = |(index, node): (usize, &u16)| VcpuSample {
            index: index as u16,
            cpu: machine.nodes[NodeId(*node)].cpus.iter().next(),
            ..VcpuSample::default()
        };
        let mut vm = VmSample::new(VM, "web");
        vm.vcpus = nodes.iter().enumerate().map(on).collect();
        Sample {
            vms: vec![vm],
            ..Sample::default()
        }
    }

    #[test]
    fn vcpus_on_other_nodes_and_changed_homes_count_from_the_first_sample_on() {
        let machine = homenode_machine_files::preset("r910").unwrap();
        let home = |node: u16| BTreeMap::from([(VM, [NodeId(node)].into_iter().collect::<NodeSet>())]);
        let mut counts = Counts::default();
        counts.observe(&machine, &sample(&machine, &[0, 1]), &home(3));
        counts.homes(&home(3));
        assert_eq!(
            counts.of(VM),
            Migrations::default(),
            "an adopted home is no change"
        );
        counts.observe(&machine, &sample(&machine, &[2, 1]), &home(3));
        counts.observe(&machine, &sample(&machine, &[0, 0]), &home(3));
        counts.homes(&home(2));
        counts.homes(&home(2));
        counts.homes(&BTreeMap::new());
        let moved = Outcome::Moved {
            moved: Pages(256),
            left: Pages(9),
            busy: Pages(0),
        };
        counts.outcome(VM, &moved);
        counts.outcome(VM, &moved);
        counts.outcome(VmId(2), &moved);
        let expected = Migrations {
            home_changes_count: 2,
            moved_bytes: Bytes::from_mib(2),
            vcpu_moves_count: 3,
        };
        assert_eq!(counts.of(VM), expected);
        counts.observe(&machine, &Sample::default(), &BTreeMap::new());
        assert_eq!(
            counts.of(VM),
            Migrations::default(),
            "a VM that is gone is forgotten"
        );
    }
}

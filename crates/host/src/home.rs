//! The home that the agent has in force on a VM, as its host tells it.

use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeSet};
use serde::{Deserialize, Serialize};

/// What a host tells of the home that the agent has in force on a VM. The host knows it across restarts of the agent, from its
/// journal or from the VM itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum HomeInForce {
    /// The host does not tell, as in recordings of earlier versions.
    #[default]
    Untold,
    /// No home is in force.
    Unplaced,
    /// A home is in force ([`crate::Act::SetHome`]).
    On {
        /// The home nodes.
        nodes: NodeSet,
        /// CPUs of these nodes on which the home keeps the vCPUs ([`crate::Plan::cpus_with_home`]); empty if it is all of them.
        #[serde(default, skip_serializing_if = "CpuSet::is_empty")]
        cpus: CpuSet,
    },
}

impl HomeInForce {
    /// Returns the home on these nodes, given by a plan that pins vCPUs of the VM to `pinned` ([`crate::Plan::cpus_with_home`]).
    pub fn on(machine: &Machine, nodes: &NodeSet, pinned: &CpuSet) -> HomeInForce {
        let all = machine.cpus_of(nodes);
        let is_whole = all.is_subset(pinned);
        HomeInForce::On {
            nodes: nodes.clone(),
            cpus: if is_whole {
                CpuSet::new()
            } else {
                pinned.intersection(&all)
            },
        }
    }

    /// Returns true if the host does not tell.
    pub fn is_untold(&self) -> bool {
        *self == HomeInForce::Untold
    }

    /// Returns the home nodes, if a home is in force.
    pub fn nodes(&self) -> Option<&NodeSet> {
        match self {
            HomeInForce::On { nodes, .. } => Some(nodes),
            HomeInForce::Untold | HomeInForce::Unplaced => None,
        }
    }

    /// Returns the CPUs on which the home keeps the VM's vCPUs, if these are only a part of its nodes' CPUs.
    pub fn part(&self) -> Option<&CpuSet> {
        match self {
            HomeInForce::On { cpus, .. } if !cpus.is_empty() => Some(cpus),
            _ => None,
        }
    }

    /// Takes in a pin of vCPUs to these CPUs by a later plan. If it reaches beyond the part of its nodes on which the home kept
    /// the vCPUs, but includes that part, the home is all of its nodes' CPUs from now on. Returns whether the home has changed.
    pub fn widen(&mut self, pinned: &CpuSet) -> bool {
        match self {
            HomeInForce::On { cpus, .. } if cpus.is_subset(pinned) && cpus != pinned && !cpus.is_empty() => {
                *cpus = CpuSet::new();
                true
            }
            _ => false,
        }
    }
}

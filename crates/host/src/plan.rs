//! Plans of policies, and the host's receipts.

use std::collections::BTreeSet;

use homenode_machine::Machine;
use homenode_units::{CpuSet, Pages, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::action::{Act, Action};
use crate::refusal::{ActionError, Refusal};
use crate::sample::{Sample, Version};

/// An action and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Decision {
    /// The policy that decided (`placement`, `balance`, …).
    pub policy: &'static str,
    /// The action.
    #[serde(flatten)]
    pub action: Action,
    /// The reason, in a sentence for the operator.
    pub reason: String,
}

/// A policy's message to the operator that leads to no action, such as a VM that fits nowhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// The policy that found it.
    pub policy: &'static str,
    /// The VM that the message is about, if any.
    pub vm: Option<VmId>,
    /// The message, and what to do about it.
    pub message: String,
}

/// The decisions of policies, from one view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Version of the view that the plan was made from.
    pub version: Version,
    /// Decisions, in order of execution.
    pub decisions: Vec<Decision>,
    /// Messages that lead to no action.
    pub findings: Vec<Finding>,
}

/// A host's report on a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Version of the host after the commit.
    pub version: Version,
    /// The outcome of each decision, in the plan's order.
    pub outcomes: Vec<Outcome>,
}

/// Result of one decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// Done, and confirmed by reading back.
    Done,
    /// The setting was already in force, as reading back showed. Only its lease was renewed.
    Renewed,
    /// Pages were moved, and their nodes were read back.
    Moved {
        /// Pages that are now on the wanted nodes.
        moved: Pages,
        /// Pages that are still on the nodes that they should leave.
        left: Pages,
        /// Pages that the kernel refused to move this time because they were in use. A later move may succeed.
        busy: Pages,
    },
    /// Not tried, only reported (mode `observe`, `--dry-run`).
    DryRun,
    /// Tried and failed; the VM is unchanged.
    Failed(ActionError),
}

impl Outcome {
    pub(crate) const MOVED: &str = "moved";

    /// Returns the outcome's name in JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Renewed => "renewed",
            Outcome::Moved { .. } => Outcome::MOVED,
            Outcome::DryRun => "dry-run",
            Outcome::Failed(_) => "failed",
        }
    }
}

impl Plan {
    /// Returns an empty plan for this version.
    pub fn new(version: Version) -> Plan {
        Plan {
            version,
            ..Plan::default()
        }
    }

    /// Adds an action with its reason.
    pub fn decide(&mut self, policy: &'static str, action: Action, reason: String) {
        self.decisions.push(Decision {
            policy,
            action,
            reason,
        });
    }

    /// Adds a finding.
    pub fn find(&mut self, policy: &'static str, vm: Option<VmId>, message: String) {
        self.findings.push(Finding { policy, vm, message });
    }

    /// Returns the VMs with decisions.
    pub fn vms(&self) -> BTreeSet<VmId> {
        self.decisions.iter().map(|decision| decision.action.vm).collect()
    }

    /// Returns the CPUs to which the plan pins vCPUs of a VM; empty if it pins none. If the plan also gives the VM a home, they
    /// are the part of the home on which its vCPUs are kept ([`crate::HomeInForce`]). A host that has given the home tells them
    /// for as long as it is in force, so that later pins for a while are not mistaken for the home.
    pub fn cpus_with_home(&self, vm: VmId) -> CpuSet {
        let of_vm = self.decisions.iter().filter(|decision| decision.action.vm == vm);
        let pinned = of_vm.filter_map(|decision| match &decision.action.act {
            Act::PinVcpus { cpus, .. } => Some(cpus),
            _ => None,
        });
        pinned.fold(CpuSet::new(), |all, cpus| all.union(cpus))
    }

    /// Checks whether a host whose present sample is `now` could carry out the plan. Every host calls this first in `commit`.
    ///
    /// # Errors
    /// Returns the first thing that is stale or impossible.
    pub fn check(&self, machine: &Machine, now: &Sample) -> Result<(), Refusal> {
        if self.version != now.version {
            return Err(Refusal::Stale {
                planned: self.version,
                current: now.version,
            });
        }
        for Decision { action, .. } in &self.decisions {
            let Action { vm, act } = action;
            let vm = now.vm(*vm).ok_or(Refusal::UnknownVm { vm: *vm })?;
            act.check(machine, vm).map_err(|why| Refusal::Vm {
                name: vm.name.clone(),
                why,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

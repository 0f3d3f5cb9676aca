//! What policies ask of a host, and what the host answers.

use std::collections::BTreeSet;

use homenode_machine::Machine;
use homenode_units::{Pages, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::refusal::{ActionError, Refusal};
use crate::sample::{Sample, Version};

/// An action and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Decision {
    /// Policy that decided (`placement`, `balance`, …).
    pub policy: &'static str,
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
    /// Why, in a sentence for the operator.
    pub reason: String,
}

/// Something that a policy wants the operator to know, and that nobody acts on (a VM that fits nowhere).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// Policy that found it.
    pub policy: &'static str,
    /// The VM it is about, if it is about one.
    pub vm: Option<VmId>,
    /// What, and what to do about it.
    pub message: String,
}

/// What policies want done, from one view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Version of the view it was made from.
    pub version: Version,
    /// In the order to carry out.
    pub decisions: Vec<Decision>,
    /// What nobody acts on.
    pub findings: Vec<Finding>,
}

/// What a host did about a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Version of the host after it.
    pub version: Version,
    /// One per decision, in the plan's order.
    pub outcomes: Vec<Outcome>,
}

/// What became of one decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// Done, and read back.
    Done,
    /// It was in force already, as reading back showed; only its lease is new.
    Renewed,
    /// Pages were moved, and where they are was read back.
    Moved {
        /// Now on the wanted nodes.
        moved: Pages,
        /// Still where they should leave, known afterwards.
        left: Pages,
        /// Refused by the kernel this time because somebody used them; may succeed later.
        busy: Pages,
    },
    /// Not tried: it is only told (mode `observe`, `--dry-run`).
    DryRun,
    /// Tried and failed; the VM is as it was.
    Failed(ActionError),
}

impl Outcome {
    /// What it is called in JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Renewed => "renewed",
            Outcome::Moved { .. } => "moved",
            Outcome::DryRun => "dry-run",
            Outcome::Failed(_) => "failed",
        }
    }
}

impl Plan {
    /// The empty plan for a version.
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

    /// VMs that something is decided about.
    pub fn vms(&self) -> BTreeSet<VmId> {
        self.decisions.iter().map(|decision| decision.action.vm).collect()
    }

    /// Whether the host that said `now` could carry this out: every host calls it first in `commit`.
    ///
    /// # Errors
    /// The first thing that is stale or impossible.
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

//! A policy from outside the workspace: a planner that decides in each cycle, in place of the stages.
//!
//! # Problem
//! A researcher wants to try a policy without writing Rust. Such a policy must be judged like the agent's own policies, and must
//! not be able to do anything that they cannot do.
//!
//! # Approach
//! ```text
//!   View ─▶ ViewDocument ─▶ Planner ─▶ PlanDocument ─▶ checked ─▶ gate ─▶ levers::merge ─▶ host.commit()
//!               ▲ last: its outcome ◀──────────────────────┴──────────────────────────────────────┘
//! ```
//! 1. Only the planner decides; no stage plans next to it. VMs stay protected: leases end, operators' modes and pauses apply
//!    (`gate`), and what may no longer stay in force is lifted.
//! 2. A plan is checked in the way a host checks it, and also against operators' settings, which the agent's own policies obey
//!    without a check. The whole plan is carried out, or the whole plan is refused with a reason. The planner's next view says
//!    which.
//! 3. A planner has failed if it ends, hangs, or answers with something that is not a plan. It then gets no more requests,
//!    everything that it set is lifted in that cycle, and its run is over ([`crate::Control::failed_planner`]). Pages stay where
//!    they are.
//!
//! # Properties (`tests/control/external.rs`)
//! - `a_plan_is_carried_out_whole_or_refused_whole`
//! - `a_planner_reads_what_became_of_its_plan`
//! - `a_planner_that_fails_leaves_nothing_in_force`
//! - `what_operators_said_holds_for_planners_from_outside`
//! - `the_same_planner_and_seed_give_the_same_bytes`

mod plan;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use homenode_host::{Act, Decision, Lever, Mode, Outcome, Plan, Receipt, Refusal, Version, View, VmSample};
use homenode_units::{MemoryPolicy, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use plan::{ACTIONS_MAX, NoPlan, PLAN_BYTES_MAX, PlanDocument, PlanSchema, PlannedAction};
pub use view::{
    ChosenDocument, NodeAccesses, NodeDocument, PageUseDocument, VIEW_SCHEMA, VcpuDocument, ViewDocument,
    VmDocument,
};

use crate::gate::InForce;

/// The name of this policy in decisions.
pub const POLICY: &str = "external";

/// Why a planner cannot decide: a sentence to be read after the planner's name.
pub type PlannerError = Box<dyn std::error::Error + Send + Sync>;

/// A planner from outside the workspace.
pub trait Planner: Send {
    /// Returns the planner's name in errors.
    fn name(&self) -> &str;

    /// Decides from a view. Called once in each cycle, in order.
    ///
    /// # Errors
    /// If the planner cannot decide: why. It is not called again then. A refused plan is not an error.
    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError>;
}

/// Why a planner is no longer called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy {name}: {why}")]
pub struct PlannerFailed {
    /// The planner's name.
    pub name: String,
    /// What went wrong.
    pub why: String,
}

/// The fate of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum LastPlan {
    /// The host tried all of the plan.
    CarriedOut {
        /// Version of the view from which the plan was made.
        version: Version,
        /// Outcome of each action, in the plan's order; `None` if the action waits for the operator (mode `recommend`).
        outcomes: Vec<Option<Outcome>>,
    },
    /// Nothing of the plan was done.
    Refused {
        /// The version that the plan named.
        version: Version,
        /// Why the plan was refused.
        #[serde(flatten)]
        refusal: Refusal,
        /// The reason in a sentence.
        message: String,
    },
}

impl LastPlan {
    fn refused(version: Version, refusal: &Refusal) -> LastPlan {
        LastPlan::Refused {
            version,
            refusal: refusal.clone(),
            message: refusal.to_string(),
        }
    }
}

/// A planner, and what the agent remembers of it.
pub(crate) struct External {
    planner: Box<dyn Planner>,
    /// The planner's decisions in this cycle.
    decided: Vec<Decision>,
    last: Option<LastPlan>,
    /// Whether the planner's plan of this cycle was refused before it reached the host.
    is_refused: bool,
    /// The refusal, until it is reported.
    refused: Option<Refusal>,
    failed: Option<PlannerFailed>,
    /// VMs whose vCPUs the planner pinned. Their pins are lifted like a home.
    pinned: BTreeSet<VmId>,
    /// Memory policies that were in force before the planner changed them.
    memory_policies: BTreeMap<VmId, MemoryPolicy>,
}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External")
            .field("planner", &self.planner.name())
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl External {
    pub(crate) fn new(planner: Box<dyn Planner>) -> External {
        External {
            planner,
            decided: Vec::new(),
            last: None,
            is_refused: false,
            refused: None,
            failed: None,
            pinned: BTreeSet::new(),
            memory_policies: BTreeMap::new(),
        }
    }

    /// Calls the planner, unless it has failed. If its plan is refused, returns an empty plan; if it fails, lifts everything that
    /// it set.
    pub(crate) fn plan(
        &mut self,
        view: &View<'_>,
        in_force: &InForce,
        mode: impl Fn(&VmSample) -> Mode,
    ) -> Plan {
        self.decided.clear();
        self.is_refused = false;
        let mut plan = Plan::new(view.version);
        if self.failed.is_some() {
            return plan;
        }
        let document = ViewDocument::of(view, self.last.as_ref(), mode);
        let answer = self.planner.plan(&document);
        match answer {
            Err(why) => {
                self.failed = Some(PlannerFailed {
                    name: self.planner.name().to_owned(),
                    why: why.to_string(),
                });
                self.last = None;
                self.give_back(view, in_force, &mut plan);
            }
            Ok(answer) => {
                let version = answer.version;
                match answer.checked(view) {
                    Ok(decisions) => {
                        self.note_memory_policies(view, &decisions);
                        self.decided.clone_from(&decisions);
                        plan.decisions = decisions;
                    }
                    Err(refusal) => {
                        self.last = Some(LastPlan::refused(version, &refusal));
                        self.is_refused = true;
                        self.refused = Some(refusal);
                    }
                }
            }
        }
        plan
    }

    fn note_memory_policies(&mut self, view: &View<'_>, decisions: &[Decision]) {
        for Decision { action, .. } in decisions {
            if let (Act::SetMemoryPolicy { .. }, Some(vm)) = (&action.act, view.sample.vm(action.vm)) {
                self.memory_policies.entry(vm.id).or_insert(vm.memory_policy);
            }
        }
    }

    fn give_back(&self, view: &View<'_>, in_force: &InForce, plan: &mut Plan) {
        let why = || "lifted: the policy that set it has failed".to_owned();
        let mut levers: BTreeSet<(VmId, Lever)> = in_force.levers().collect();
        levers.extend(self.pinned.iter().map(|vm| (*vm, Lever::Home)));
        for (vm, lever) in levers {
            if view.sample.vm(vm).is_some() {
                plan.decide(POLICY, Act::Lift { lever }.on(vm), why());
            }
        }
        for (id, policy) in &self.memory_policies {
            let policy = *policy;
            if view.sample.vm(*id).is_some_and(|vm| vm.memory_policy != policy) {
                plan.decide(POLICY, Act::SetMemoryPolicy { policy }.on(*id), why());
            }
        }
    }

    /// Returns the refusal of the planner's plan, once, if the plan was refused before it reached the host.
    pub(crate) fn take_refusal(&mut self) -> Option<Refusal> {
        self.refused.take()
    }

    /// Returns why the planner has failed, if it has.
    pub(crate) fn failed(&self) -> Option<&PlannerFailed> {
        self.failed.as_ref()
    }

    /// Takes in the outcomes of a cycle's decisions, which include the planner's.
    pub(crate) fn answered(
        &mut self,
        version: Version,
        decisions: &[Decision],
        answer: &Result<Receipt, Refusal>,
    ) {
        let outcomes = match answer {
            Ok(receipt) => &receipt.outcomes,
            Err(refusal) => {
                self.last = Some(LastPlan::refused(version, refusal));
                return;
            }
        };
        let mut pairs: Vec<Option<(&Decision, &Outcome)>> =
            decisions.iter().zip(outcomes).map(Some).collect();
        for (Decision { action, .. }, outcome) in pairs.iter().flatten() {
            match (&action.act, outcome) {
                (Act::PinVcpus { .. }, Outcome::Done) => self.pinned.insert(action.vm),
                (Act::Lift { lever: Lever::Home }, Outcome::Done) => self.pinned.remove(&action.vm),
                _ => continue,
            };
        }
        if self.is_refused {
            return;
        }
        let outcome = |own: &Decision| {
            let place = pairs
                .iter_mut()
                .find(|pair| pair.is_some_and(|(decision, _)| decision == own))?;
            place.take().map(|(_, outcome)| outcome.clone())
        };
        let outcomes = self.decided.iter().map(outcome).collect();
        self.last = Some(LastPlan::CarriedOut { version, outcomes });
    }
}

//! A plan as a document, and the checks that may refuse it.

use homenode_host::{Act, Action, Decision, Limit, Plan, Refusal, Version, View, VmView};
use homenode_policy::{levers, placement};
use homenode_units::NodeSet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::POLICY;

/// Largest size of a plan's text. Like the next limit it bounds memory, and is not a setting.
pub const PLAN_BYTES_MAX: usize = 1 << 20;
/// Largest number of actions.
pub const ACTIONS_MAX: usize = 4096;

/// A planner's plan for one cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanDocument {
    /// Kind and version of the plan's form, if it names them: `plan/1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<PlanSchema>,
    /// Version of the view from which the plan was made.
    pub version: Version,
    /// Actions in the order in which to carry them out; empty if nothing is to be done.
    pub actions: Vec<PlannedAction>,
}

/// Forms of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PlanSchema {
    /// The only form so far.
    #[serde(rename = "plan/1")]
    One,
}

/// One action and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedAction {
    /// The VM, and what to do to it.
    #[serde(flatten)]
    pub action: Action,
    /// The reason, in a sentence for the operator.
    pub why: String,
}

/// Why a text is not a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    /// The text has too many bytes.
    #[error("the planner's answer has more than {PLAN_BYTES_MAX} bytes")]
    TooLarge,
    /// The text cannot be parsed; gives the reason and the place in the text.
    #[error("the planner's answer is not a plan: {0}")]
    Malformed(String),
    /// The plan has too many actions.
    #[error("the plan has {0} actions, more than the {ACTIONS_MAX} allowed")]
    TooMany(usize),
}

impl PlanDocument {
    /// Reads a plan.
    ///
    /// # Errors
    /// If the text is not a plan, or has more than [`PLAN_BYTES_MAX`] bytes or [`ACTIONS_MAX`] actions.
    pub fn from_json(text: &[u8]) -> Result<PlanDocument, NoPlan> {
        if text.len() > PLAN_BYTES_MAX {
            return Err(NoPlan::TooLarge);
        }
        let plan = serde_json::from_slice(text);
        let plan: PlanDocument = plan.map_err(|error| NoPlan::Malformed(error.to_string()))?;
        match plan.actions.len() {
            0..=ACTIONS_MAX => Ok(plan),
            count => Err(NoPlan::TooMany(count)),
        }
    }

    /// Returns the plan's decisions if a host could carry them out and no operator's setting forbids them.
    pub(super) fn checked(self, view: &View<'_>) -> Result<Vec<Decision>, Refusal> {
        let decision = |planned: PlannedAction| Decision {
            policy: POLICY,
            action: planned.action,
            reason: planned.why,
        };
        let plan = Plan {
            version: self.version,
            decisions: self.actions.into_iter().map(decision).collect(),
            findings: Vec::new(),
        };
        plan.check(view.machine, view.sample)?;
        against_operators(view, &plan)?;
        let merged = levers::merge(view, vec![plan]);
        match merged.findings.into_iter().next() {
            None => Ok(merged.decisions),
            Some(finding) => Err(Refusal::Forbidden { why: finding.message }),
        }
    }
}

/// Refuses the first action that goes against an operator's setting for a VM or node. For each action, the homes assigned by
/// earlier actions count. The agent's own policies obey these settings when they decide.
fn against_operators(view: &View<'_>, plan: &Plan) -> Result<(), Refusal> {
    let mut view = view.clone();
    for Decision { action, .. } in &plan.decisions {
        let Some(at) = view.vms.iter().position(|vm| vm.sample.id == action.vm) else {
            return Err(Refusal::UnknownVm { vm: action.vm });
        };
        if let Some(why) = objection(&view, &view.vms[at], &action.act) {
            let name = &view.vms[at].sample.name;
            return Err(Refusal::Forbidden {
                why: format!("VM {name}: {why}"),
            });
        }
        if let Act::SetHome { nodes } = &action.act {
            view.vms[at].home = Some(nodes);
        }
    }
    Ok(())
}

fn objection(view: &View<'_>, vm: &VmView<'_>, act: &Act) -> Option<String> {
    let settings = &vm.sample.settings;
    match act {
        Act::SetHome { nodes } => {
            if let Some(own) = settings.home.as_ref().filter(|own| *own != nodes) {
                return Some(format!(
                    "its operator chose nodes {own} for its home, not {nodes}"
                ));
            }
            let allowed = placement::allowed_nodes(view, vm).unwrap_or_else(|| view.homes());
            let of_operator = settings.home.is_some();
            (!of_operator && !nodes.is_subset(&allowed))
                .then(|| format!("nodes {nodes} cannot all be its home: allowed are {{{allowed}}}"))
        }
        Act::PinVcpus { cpus, .. } => (!cpus.is_subset(&view.cpus))
            .then(|| format!("its vCPUs cannot run on {cpus}: CPUs for VMs are {}", view.cpus)),
        Act::MovePages { to, .. } => onto_drained(view, to),
        Act::MoveVirtualNode { to, .. } => onto_drained(view, &NodeSet::one(*to)),
        Act::MoveFrames { moves } => onto_drained(view, &moves.iter().map(|each| each.to).collect()),
        Act::SetMemoryPolicy { policy } => {
            let own = settings.memory_policy.filter(|own| own != policy);
            own.map(|own| format!("its operator chose memory policy {own}, not {policy}"))
        }
        Act::Limit {
            limit: Limit::Memory(memory),
            ..
        } => match settings.memory_floor {
            None => Some("no memory may be taken from it: its operator set no memory floor".to_owned()),
            Some(floor) if *memory < floor => Some(format!(
                "{memory} is less than its operator's memory floor, {floor}"
            )),
            Some(_) => None,
        },
        _ => None,
    }
}

fn onto_drained(view: &View<'_>, to: &NodeSet) -> Option<String> {
    let drained = to.intersection(&view.drained);
    (!drained.is_empty()).then(|| format!("pages may not move to node {drained}, which is being drained"))
}

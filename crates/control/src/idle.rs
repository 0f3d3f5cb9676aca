//! Why the agent does not do what a policy would, derived from the table of stages.

use homenode_policy::{arrange, memory, overcommit, permits, topology_feed, working_set};

use crate::{Control, Mode, stages};

impl Control {
    /// Why permits are kept in mind only, if they are.
    pub fn permits_idle(&self) -> Option<String> {
        self.idle(permits::POLICY, "hold nobody to a permit")
    }

    /// Why memory policies are kept in mind only, if they are.
    pub fn memory_policies_idle(&self) -> Option<String> {
        self.idle(memory::POLICY, "set no memory policy")
    }

    /// Why memory floors are kept in mind only, if they are.
    pub fn memory_floors_idle(&self) -> Option<String> {
        self.idle(overcommit::POLICY, "take nobody's memory")
    }

    /// Why no VM's memory is watched now, if so.
    pub fn watching_idle(&self) -> Option<String> {
        let not = "watch nobody's memory, since that takes clearing what tells of its use";
        self.idle(working_set::POLICY, not)
    }

    /// Why no guest is told where it is, if so.
    pub fn topology_idle(&self) -> Option<String> {
        self.idle(topology_feed::POLICY, "tell guests nothing")
    }

    /// Why no prediction is proven by a trial, if so.
    pub fn trials_idle(&self) -> Option<String> {
        self.idle(arrange::POLICY, "try nothing")
    }

    /// Why there are no predictions, if so; a dry run has them.
    pub fn predictions_idle(&self) -> Option<String> {
        self.without(arrange::POLICY, "keep no predictions")
    }

    /// Why nothing comes of a policy; `not` says what, as in "the policies hold nobody to a permit".
    pub(crate) fn idle(&self, policy: &str, not: &str) -> Option<String> {
        let of_policy = self.config.modes.of(policy) == Some(Mode::Observe);
        let why = match self.mode {
            Mode::Observe => Some(format!(
                "the agent only observes (--dry-run, mode = \"observe\"): its policies {not}"
            )),
            _ if of_policy => Some(format!(
                "the policy {policy} only observes (setting modes.{policy}): its decisions {not}"
            )),
            _ => None,
        };
        why.or_else(|| self.without(policy, not))
    }

    /// Why a policy does not even plan.
    fn without(&self, policy: &str, not: &str) -> Option<String> {
        let plans = stages::of(self.config.policies).any(|stage| stage.policy == policy);
        (!plans).then(|| format!("the policies of this agent {not}; run it with --policies homenode"))
    }
}

//! Says why the agent does not carry out what a policy would do, according to the table of stages.

use homenode_policy::{arrange, memory, overcommit, permits, topology_feed, working_set};
use homenode_units::VmId;

use crate::recommendations::most_careful;
use crate::{Control, Mode, stages};

impl Control {
    /// Returns why permits are recorded but not enforced, or `None` if they are enforced.
    pub fn permits_idle(&self) -> Option<String> {
        self.idle(permits::POLICY, "hold no VM to a permit")
    }

    /// Returns that a VM's permit is enforced only after approval, or `None` if it needs none.
    pub fn permit_waits(&self, vm: VmId) -> Option<String> {
        self.waits(permits::POLICY, vm, "holding it to the permit")
    }

    /// Returns that a VM's memory policy is applied only after approval, or `None` if it needs none.
    pub fn memory_policy_waits(&self, vm: VmId) -> Option<String> {
        self.waits(memory::POLICY, vm, "applying the memory policy")
    }

    /// Returns that a VM's memory is taken only after approval, or `None` if it needs none.
    pub fn memory_floor_waits(&self, vm: VmId) -> Option<String> {
        self.waits(overcommit::POLICY, vm, "taking its memory")
    }

    fn waits(&self, policy: &str, vm: VmId, what: &str) -> Option<String> {
        let of_vm = self.settings(vm)?.mode;
        let mode = most_careful(self.mode, self.config.modes.of(policy), of_vm);
        (mode == Mode::Recommend).then(|| {
            format!(
                "mode {mode} is in force for it: {what} waits as a recommendation for your approval (`homenode recommend`)"
            )
        })
    }

    /// Returns why memory policies are recorded but not applied, or `None` if they are applied.
    pub fn memory_policies_idle(&self) -> Option<String> {
        self.idle(memory::POLICY, "set no memory policy")
    }

    /// Returns why memory floors are recorded but not used, or `None` if they are used.
    pub fn memory_floors_idle(&self) -> Option<String> {
        self.idle(overcommit::POLICY, "take no VM's memory")
    }

    /// Returns why no VM's memory is watched, or `None` if it can be watched.
    pub fn watching_idle(&self) -> Option<String> {
        let not = "watch no VM's memory, because that would clear the kernel's accessed bits";
        self.idle(working_set::POLICY, not)
    }

    /// Returns why no guest is notified of where it is, or `None` if guests are notified.
    pub fn topology_idle(&self) -> Option<String> {
        self.idle(topology_feed::POLICY, "tell guests nothing")
    }

    /// Returns why no prediction is tested by a trial, or `None` if trials are made.
    pub fn trials_idle(&self) -> Option<String> {
        self.idle(arrange::POLICY, "run no trials")
    }

    /// Returns why there are no predictions, or `None` if there are. A dry run has predictions.
    pub fn predictions_idle(&self) -> Option<String> {
        self.without(arrange::POLICY, "make no predictions")
    }

    /// Returns why a policy has no effect, if it has none. `not` names the missing effect, as in "the policies set no memory
    /// policy".
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

    /// Returns why a policy does not plan at all, if it does not.
    fn without(&self, policy: &str, not: &str) -> Option<String> {
        let plans = stages::of(self.config.policies).any(|stage| stage.policy == policy);
        (!plans).then(|| format!("the policies of this agent {not}; run it with --policies homenode"))
    }
}

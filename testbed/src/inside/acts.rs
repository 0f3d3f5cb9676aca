//! Single acts, like those in an agent's plan.

use anyhow::Context as _;
use homenode_host::{Act, Host, Outcome, Plan, VmSample};
use homenode_units::VmId;

/// Finds the VM of this name in a fresh sample.
///
/// # Errors
/// When there is no such VM, or the host cannot be sampled.
pub fn find(host: &mut impl Host, name: &str) -> anyhow::Result<VmSample> {
    let vms = host.sample()?.vms;
    let found = vms.into_iter().find(|vm| vm.name == name);
    found.with_context(|| format!("{name} is not in the sample"))
}

/// Commits a plan with only this act, and returns its outcomes.
///
/// # Errors
/// When the host cannot be sampled, or refuses the plan.
pub fn commit(host: &mut impl Host, vm: VmId, act: Act) -> anyhow::Result<Vec<Outcome>> {
    let mut plan = Plan::new(host.sample()?.version);
    plan.decide("testbed", act.on(vm), "a case".into());
    Ok(host.commit(&plan)?.outcomes)
}

//! Single acts, as an agent's plan has them.

use anyhow::Context as _;
use homenode_host::{Act, Host, Outcome, Plan, VmSample};
use homenode_units::VmId;

/// The VM of this name in a fresh sample.
///
/// # Errors
/// When it is not there, or the host cannot be sampled.
pub fn find(host: &mut impl Host, name: &str) -> anyhow::Result<VmSample> {
    let vms = host.sample()?.vms;
    let found = vms.into_iter().find(|vm| vm.name == name);
    found.with_context(|| format!("{name} is not in the sample"))
}

/// What came of a plan of this act alone.
///
/// # Errors
/// When the host cannot be sampled, or refuses the plan.
pub fn commit(host: &mut impl Host, vm: VmId, act: Act) -> anyhow::Result<Vec<Outcome>> {
    let mut plan = Plan::new(host.sample()?.version);
    plan.decide("testbed", act.on(vm), "a case".into());
    Ok(host.commit(&plan)?.outcomes)
}

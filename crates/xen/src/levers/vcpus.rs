//! Where vCPUs may run: their hard affinity, which is read back from the hypervisor.

use homenode_host::{Act, Lever, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::{CpuSet, VmId};

use super::{After, Xen, has};
use crate::XenHost;
use crate::changed::{Pins, newest, read};
use crate::error::{CallError, LeverError};

struct OfDomain(Vec<&'static str>);

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain(has::<Pins>(entry)))
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::VcpuPlacement
    }

    fn what(&self, _act: &Act) -> &'static str {
        "pinning vCPUs"
    }

    fn set(&mut self, host: &mut XenHost, vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        match act {
            Act::PinVcpus { vcpus, cpus } => pin(host, *vm, vcpus, cpus),
            _ => Ok(Outcome::Done),
        }
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.0.clone()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), LeverError> {
        if after.domain.is_none() {
            return Ok(());
        }
        // If one vCPU cannot be restored, the others still are.
        let mut failed = None;
        for (index, ours) in read::<Pins>(after.entry)?.unwrap_or_default().0 {
            failed = unpin(after, index, &ours).err().or(failed);
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

/// Pins vCPUs of a domain.
///
/// # Errors
/// Returns what failed. The journal lists what may be in force.
pub(crate) fn pin(host: &mut XenHost, vm: VmId, vcpus: &[u16], cpus: &CpuSet) -> Result<Outcome, LeverError> {
    host.begin(vm)?;
    let mut pins: Pins = host.written(vm)?.unwrap_or_default();
    for index in vcpus {
        newest(pins.0.entry(*index).or_default(), cpus.clone());
    }
    host.write(vm, &pins)?;
    let domid = host.domid(vm);
    for &index in vcpus {
        host.hypervisor.pin(domid, index, cpus)?;
        let seen = host.hypervisor.affinity(domid, index)?;
        if seen != *cpus {
            return Err(LeverError::Vcpu {
                index,
                seen,
                wanted: cpus.clone(),
            });
        }
        pins.0.insert(index, vec![cpus.clone()]);
    }
    // The state in force is known now, so earlier CPU sets no longer count as the agent's.
    host.write(vm, &pins)?;
    Ok(Outcome::Done)
}

/// Restores the CPUs that a vCPU had, unless another program has pinned it since.
fn unpin(after: &After<'_>, index: u16, ours: &[CpuSet]) -> Result<(), CallError> {
    let Some(domain) = after.domain else { return Ok(()) };
    if !ours.contains(&after.hypervisor.affinity(domain.domid, index)?) {
        return Ok(());
    }
    let there = after.hypervisor.pool(domain.pool)?.cpus;
    let before = after
        .entry
        .before
        .vcpus
        .get(&index)
        .filter(|before| !before.intersection(&there).is_empty());
    after
        .hypervisor
        .pin(domain.domid, index, before.unwrap_or(&there))
}

//! How long a domain may run: its cap in the credit schedulers. The agent never sets it above the operator's cap.

use homenode_host::{Act, Lever, Limit, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::VmId;

use super::{After, Xen, has};
use crate::XenHost;
use crate::changed::{self, Cap, newest};
use crate::domain::cap_of;
use crate::error::LeverError;

struct OfDomain(Vec<&'static str>);

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain(has::<Cap>(entry)))
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::CpuQuota
    }

    fn what(&self, _act: &Act) -> &'static str {
        "setting the cap"
    }

    fn set(&mut self, host: &mut XenHost, vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        let Act::Limit {
            limit: Limit::CpuQuota(quota),
            ..
        } = *act
        else {
            return Ok(Outcome::Done);
        };
        let vm = *vm;
        // Do this first, because the cap may be one that an earlier run of the domain left.
        host.begin(vm)?;
        let domain = host.domains.get(&vm).ok_or(LeverError::Ended)?;
        let (domid, pool) = (domain.run.runtime_id, domain.pool.clone());
        let written: Option<Cap> = host.written(vm)?;
        let now = host.hypervisor.cap(domid, &pool)?;
        let before = match &written {
            Some(cap) if cap.ours.contains(&now) => cap.before,
            // Another program set this cap, so it is the one to restore.
            _ => now,
        };
        // If the operator's cap is below the requested one, it stays in force.
        let wanted = match (cap_of(quota, domain.vcpus.len()), before) {
            (0, before) | (before, 0) => before,
            (ours, before) => ours.min(before),
        };
        let is_ours = written.as_ref().is_some_and(|cap| cap.ours.contains(&now));
        if now == wanted && is_ours {
            return Ok(Outcome::Renewed);
        }
        let mut cap = written.unwrap_or(Cap {
            before,
            ours: Vec::new(),
        });
        cap.before = before;
        newest(&mut cap.ours, wanted);
        host.write(vm, &cap)?;
        host.hypervisor.set_cap(domid, &pool, wanted)?;
        match host.hypervisor.cap(domid, &pool)? {
            seen if seen == wanted => {
                let ours = vec![wanted];
                host.write(vm, &Cap { before, ours }).map(|()| Outcome::Done)
            }
            seen => Err(LeverError::Cap { seen, wanted }),
        }
    }

    fn lift(&mut self, host: &mut XenHost, vm: &mut VmId) -> Result<(), LeverError> {
        host.undo(*vm, |lever| lever == Lever::CpuQuota)
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.0.clone()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), LeverError> {
        changed::lift::<Cap>(after.hypervisor, after.journal, after.entry)
    }
}

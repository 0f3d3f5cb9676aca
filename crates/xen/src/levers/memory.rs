//! The memory of domains, set through their balloons. A guest's target is in xenstore. `xl mem-set` changes it together with
//! everything that depends on it: the hypervisor's own bound and, except for PV domains, the pages that are populated on demand.
//!
//! Each guest decides how fast its balloon follows. So reading the target back only shows what was requested, and the domain's
//! pages show the progress. A target that the agent did not set is its operator's, and is not touched.

use homenode_host::{Act, Balloon, Lever, Limit, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::{Bytes, Pages, VmId};

use super::{After, Xen, has};
use crate::XenHost;
use crate::balloon::target_of;
use crate::changed::{self, Target, newest};
use crate::error::LeverError;

/// Xenstore's unit of memory.
const KIB: u64 = 1024;

/// Returns the balloon for a sample of a domain with this target and this many pages.
pub(crate) fn sample(target: u64, pages: u64, entry: Option<&Entry>) -> Balloon {
    let ours = entry.and_then(Entry::get::<Target>);
    let ours = ours.filter(|ours| ours.ours.contains(&target));
    let bytes = |kib: u64| Bytes(kib.saturating_mul(KIB));
    Balloon {
        current: Pages(pages).to_bytes(),
        maximum: bytes(ours.as_ref().map_or(target, |ours| ours.before)),
        limit: ours.map(|_| bytes(target)),
        // Xen's balloon driver sends no reports.
        guest: None,
    }
}

struct OfDomain(Vec<&'static str>);

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain(has::<Target>(entry)))
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::Memory
    }

    fn what(&self, _act: &Act) -> &'static str {
        "setting the memory"
    }

    /// Sets the balloon's target, at most to what the operator gave the domain.
    fn set(&mut self, host: &mut XenHost, vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        let Act::Limit {
            limit: Limit::Memory(memory),
            ..
        } = *act
        else {
            return Ok(Outcome::Done);
        };
        let vm = *vm;
        host.begin(vm)?;
        let domid = host.domid(vm);
        let asked = |host: &mut XenHost| target_of(&mut host.store, domid)?.ok_or(LeverError::NoBalloon);
        let now = asked(host)?;
        let written: Option<Target> = host.written(vm)?;
        let ours = written.filter(|target| target.ours.contains(&now));
        let wanted = |before: u64| (memory.0 / KIB).min(before);
        // A target that the agent did not set is the operator's, which is restored later.
        let mut target = match ours {
            Some(ours) if wanted(ours.before) == now => return Ok(Outcome::Renewed),
            Some(ours) => ours,
            None => Target {
                before: now,
                ours: Vec::new(),
            },
        };
        let (before, wanted) = (target.before, wanted(target.before));
        newest(&mut target.ours, wanted);
        host.write(vm, &target)?;
        host.hypervisor.set_memory(domid, wanted)?;
        let seen = asked(host)?;
        if let Some(domain) = host.domains.get_mut(&vm) {
            domain.target = Some(seen);
        }
        if seen != wanted {
            return Err(LeverError::Memory { seen, wanted });
        }
        let ours = vec![wanted];
        host.write(vm, &Target { before, ours }).map(|()| Outcome::Done)
    }

    fn lift(&mut self, host: &mut XenHost, vm: &mut VmId) -> Result<(), LeverError> {
        host.undo(*vm, |lever| lever == Lever::Memory)?;
        if let Some(domain) = host.domains.get_mut(vm)
            && domain.target.is_some()
            && let Ok(target) = target_of(&mut host.store, domain.run.runtime_id)
        {
            domain.target = target;
        }
        Ok(())
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.0.clone()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), LeverError> {
        changed::lift::<Target>(after.hypervisor, after.journal, after.entry)
    }
}

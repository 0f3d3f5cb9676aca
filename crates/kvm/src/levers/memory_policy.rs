//! How a VM's pages are placed and moved. Linux places a page on the node where it is first touched; only the agent spreads or
//! moves pages.

use homenode_host::{Act, ActionError, Failure, Lever, Outcome, VmSample};
use homenode_undo::journal::Entry;
use homenode_units::{MemoryPolicy, Migration, Placing};

use super::{Kvm, LeverState};
use crate::context::HostContext;
use crate::vm::Vm;

/// The policy that the agent set. It ends with the agent, since only the agent acts on it.
struct OfVm(MemoryPolicy);

pub(super) fn state(_entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    Box::new(OfVm(MemoryPolicy::default()))
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::MemoryPolicy
    }

    fn what(&self, _act: &Act) -> &'static str {
        "setting the memory policy"
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        if let Act::SetMemoryPolicy { policy } = act {
            is_possible(context, &vm.run.name, *policy)?;
            self.0 = *policy;
        }
        Ok(Outcome::Done)
    }

    fn tell(&mut self, _context: &mut HostContext, _vm: &mut Vm, sample: &mut VmSample) {
        sample.memory_policy = self.0;
    }
}

/// Checks that this host can carry out a policy.
pub(crate) fn is_possible(
    context: &HostContext,
    name: &str,
    policy: MemoryPolicy,
) -> Result<(), ActionError> {
    let why = if policy.placing == Placing::Round1g {
        "it places memory when a VM is created, and on this host only the kernel can do that; use round-4k"
    } else {
        match policy.migration {
            Migration::None => return Ok(()),
            Migration::Carrefour => match &context.no_page_uses {
                Some(why) => why,
                None => return Ok(()),
            },
            Migration::AutoNuma => {
                "the kernel balances all processes or none; set the sysctl kernel.numa_balancing instead"
            }
        }
    };
    let why = why.to_owned();
    Err(Failure::MemoryPolicy { policy, why }.on(name))
}

//! Shares of caches and memory bandwidth: one resctrl group per confined VM. The group outlives the VM.

use homenode_host::{Act, ActionError, Lever, Limit, Outcome, VmSample};
use homenode_kernel::confine::Confiner;
use homenode_undo::journal::{Entry, Written};
use serde::{Deserialize, Serialize};

use super::{After, Kvm, LeverState, UndoError, failed};
use crate::context::HostContext;
use crate::vm::Vm;

/// The share of caches or memory bandwidth to which a resctrl group confines the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Confined(pub Limit);

impl Written for Confined {
    const KEY: &'static str = "resctrl";
}

const CONFINE: &str = "limiting the cache share or memory bandwidth";
const FREE: &str = "lifting the limit on the cache share or memory bandwidth";

struct OfVm {
    confined: Option<Confined>,
}

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    let confined = entry.and_then(Entry::get);
    Box::new(OfVm { confined })
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Resctrl
    }

    fn what(&self, act: &Act) -> &'static str {
        match act {
            Act::Lift { .. } => FREE,
            _ => CONFINE,
        }
    }

    fn holds(&self, context: &HostContext, vm: &Vm, act: &Act) -> Result<bool, ActionError> {
        match act {
            Act::Limit { limit, .. } if self.confined == Some(Confined(*limit)) => is_confined(context, vm),
            _ => Ok(false),
        }
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::Limit { limit, .. } = *act else {
            return Ok(Outcome::Done);
        };
        let confined = Confined(limit);
        context.set(vm, CONFINE, &confined)?;
        self.confined = Some(confined);
        let tids: Vec<i32> = vm.vcpu_tids().collect();
        let done = Confiner::new(&context.root).confine(vm.run.vm, &tids, limit);
        done.map_err(|e| failed(vm, CONFINE, &e.to_string()))?;
        match is_confined(context, vm)? {
            true => Ok(Outcome::Done),
            false => Err(failed(vm, CONFINE, "its vCPUs are not in the group")),
        }
    }

    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        if self.confined.is_some() {
            let released = Confiner::new(&context.root).release(vm.run.vm);
            released.map_err(|e| failed(vm, FREE, &e.to_string()))?;
            self.confined = None;
            context.clear::<Confined>(vm);
        }
        Ok(())
    }

    fn tell(&mut self, _context: &mut HostContext, _vm: &mut Vm, sample: &mut VmSample) {
        sample.confined = self.limit();
    }

    fn limit(&self) -> Option<Limit> {
        self.confined.map(|Confined(limit)| limit)
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.confined.map(|_| Confined::KEY).into_iter().collect()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), UndoError> {
        Ok(Confiner::new(after.root).release(after.run.vm)?)
    }
}

fn is_confined(context: &HostContext, vm: &Vm) -> Result<bool, ActionError> {
    let tids: Vec<i32> = vm.vcpu_tids().collect();
    let holds = Confiner::new(&context.root).holds(vm.run.vm, &tids);
    holds.map_err(|e| failed(vm, CONFINE, &e.to_string()))
}

//! Moves pages with `move_pages(2)`, as many as the budget allows, and then reads again where they are.

use homenode_host::{Act, ActionError, Failure, FrameMove, Immovable, Lever, Outcome};
use homenode_kernel::now;
use homenode_kernel::pages::{Linux, MoveError};
use homenode_undo::journal::{self, Entry, Written};
use homenode_units::{NodeSet, Ns, Pages};
use serde::{Deserialize, Serialize};

use super::home::{narrow_if_little_is_left, set_memory_nodes};
use super::{Kvm, LeverState, failed};
use crate::context::HostContext;
use crate::vm::{Part, Vm, Which};

/// The nodes to which pages are moving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moving(pub NodeSet);

impl Written for Moving {
    const KEY: &'static str = journal::MOVING;
}

const MOVE: &str = "moving memory";
const NO_MAPPING: &str = "no mapping of its QEMU has the size of its memory";

/// Moved pages stay where they are, so this lever has nothing in force and nothing to undo.
struct OfVm;

pub(super) fn state(_entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    Box::new(OfVm)
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Pages
    }

    fn what(&self, _act: &Act) -> &'static str {
        MOVE
    }

    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        match act {
            Act::MovePages { from, to, pages_max } => {
                move_pages(context, vm, Which::Whole, from, to, *pages_max)
            }
            Act::MoveVirtualNode {
                virtual_node,
                to,
                pages_max,
            } => {
                let to = NodeSet::one(*to);
                let from = context.machine.memory_nodes().difference(&to);
                move_pages(
                    context,
                    vm,
                    Which::VirtualNode(*virtual_node),
                    &from,
                    &to,
                    *pages_max,
                )
            }
            Act::MoveFrames { moves } => move_frames(context, vm, moves),
            _ => Ok(Outcome::Done),
        }
    }
}

/// Checks that no known reason keeps this VM's memory from these nodes.
fn check_movable(context: &HostContext, vm: &Vm, to: &NodeSet) -> Result<(), ActionError> {
    match &vm.immovable {
        // Memory can still move within the nodes that it is bound to.
        Some(Immovable::BoundAtStart { nodes }) if to.is_subset(nodes) => {}
        Some(why) => return Err(fixed(vm, why.to_string())),
        None => {}
    }
    // The current binding counts: the last read may be newer than the sample.
    match vm.binding(&context.machine.memory_nodes()) {
        Some(bound) if !to.is_subset(&bound.common) => Err(fixed(vm, bound.reason().to_string())),
        _ => Ok(()),
    }
}

fn fixed(vm: &Vm, why: String) -> ActionError {
    Failure::MemoryFixed { why }.on(&vm.run.name)
}

fn move_pages(
    context: &mut HostContext,
    vm: &mut Vm,
    which: Which,
    from: &NodeSet,
    to: &NodeSet,
    budget: Pages,
) -> Result<Outcome, ActionError> {
    check_movable(context, vm, to)?;
    look_again(context, vm)?;
    check_movable(context, vm, to)?;
    if let Some(set) = vm.restrictive_nodes().filter(|set| !to.is_subset(set)) {
        let wider = set.union(to);
        set_memory_nodes(context, vm, &wider)?;
    }
    // Each destination is journalled once.
    let moving = Moving(to.clone());
    if context.journalled(vm).as_ref() != Some(&moving) {
        context.set(vm, MOVE, &moving)?;
    }
    let process = vm.run.process();
    let mut go_on = || context.goes_on(process);
    let part = vm.memory.part(which).filter(|part| part.pages.is_some());
    let Some(Part {
        mover,
        pages: Some(before),
        ..
    }) = part
    else {
        return Err(failed(vm, MOVE, NO_MAPPING));
    };
    let result = mover.advance(&mut Linux, from, to, before, budget, &mut go_on);
    let progress = result.map_err(|error| move_error(vm, error))?;
    look_again(context, vm)?;
    let after = vm.memory.part(which).and_then(|part| part.pages.as_ref());
    let after = after.ok_or_else(|| Failure::VmGone.on(&vm.run.name))?;
    let left = after.iter().filter(|(node, _)| from.contains(*node));
    let left: Pages = left.map(|(_, pages)| *pages).sum();
    if progress.moved == Pages::ZERO && progress.busy == Pages::ZERO && progress.refused > Pages::ZERO {
        let refused = progress.refused;
        let why = format!("the kernel refuses to move {refused} (pinned, or shared with another process)");
        return Err(fixed(vm, why));
    }
    if left == Pages::ZERO {
        context.clear::<Moving>(vm);
    }
    narrow_if_little_is_left(context, vm)?;
    // Read the pages again with the next sample, since the guest keeps touching memory.
    vm.forget_pages();
    Ok(Outcome::Moved {
        moved: progress.moved,
        left,
        busy: progress.busy,
    })
}

/// Reads from the kernel where the VM's pages are.
fn look_again(context: &HostContext, vm: &mut Vm) -> Result<(), ActionError> {
    vm.forget_pages();
    let looked = vm.refresh_pages(&context.root, now(), Ns::ZERO);
    looked.map(drop).map_err(|e| failed(vm, MOVE, &e.to_string()))
}

/// Moves single pages to the nodes from which the guest currently accesses them. Not journalled, since there is nothing to undo.
fn move_frames(context: &mut HostContext, vm: &mut Vm, moves: &[FrameMove]) -> Result<Outcome, ActionError> {
    let to: NodeSet = moves.iter().map(|each| each.to).collect();
    check_movable(context, vm, &to)?;
    let looked = vm.refresh_pages(&context.root, now(), Ns::ZERO);
    looked.map_err(|e| failed(vm, MOVE, &e.to_string()))?;
    check_movable(context, vm, &to)?;
    let Some(mover) = vm.memory.mover() else {
        return Err(failed(vm, MOVE, NO_MAPPING));
    };
    let process = vm.run.process();
    let moved = mover.move_frames(&mut Linux, moves, &mut || context.goes_on(process));
    let progress = moved.map_err(|error| move_error(vm, error))?;
    let wanted: Pages = moves.iter().map(|each| each.pages).sum();
    vm.forget_pages();
    Ok(Outcome::Moved {
        moved: progress.moved,
        left: wanted - progress.moved.min(wanted),
        busy: progress.busy,
    })
}

fn move_error(vm: &Vm, error: MoveError) -> ActionError {
    let failure = match error {
        MoveError::Gone => Failure::VmGone,
        MoveError::NoMemory { nodes } => Failure::NoMemory { nodes },
        MoveError::NodeNotAllowed { .. } | MoveError::BudgetBelowHugePage { .. } => {
            return fixed(vm, error.to_string());
        }
        MoveError::NotPermitted | MoveError::Os { .. } => return failed(vm, MOVE, &error.to_string()),
    };
    failure.on(&vm.run.name)
}

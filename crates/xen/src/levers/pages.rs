//! Moves all of a domain's memory to another node, using a local migration.

use homenode_host::{Act, Failure, Lever, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::VmId;

use super::Xen;
use crate::XenHost;
use crate::error::LeverError;

/// Why parts of a domain's memory do not move.
pub(crate) const ALL_OR_NONE: &str = "Xen can only move all of a domain's memory at once, to one node";

/// Memory stays where it was moved, so nothing is in force and nothing is undone.
struct OfDomain;

pub(super) fn state(_entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain)
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::Pages
    }

    fn what(&self, _act: &Act) -> &'static str {
        "changing something"
    }

    fn set(&mut self, host: &mut XenHost, vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        let done = match act {
            Act::MovePages { from, to, pages_max } => host.move_pages(*vm, (from, to), *pages_max),
            _ => Err(Failure::MemoryFixed {
                why: ALL_OR_NONE.to_owned(),
            }),
        };
        done.map_err(LeverError::Refused)
    }
}

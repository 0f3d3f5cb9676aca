//! How pages are placed and sampled. Only Xen's own policy is possible, for which nothing is set.

use homenode_host::{Act, Failure, Lever, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::{MemoryPolicy, VmId};

use super::Xen;
use crate::XenHost;
use crate::error::LeverError;
use crate::features::NO_MOVES;

struct OfDomain;

pub(super) fn state(_entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain)
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::MemoryPolicy
    }

    fn what(&self, _act: &Act) -> &'static str {
        "changing something"
    }

    fn set(&mut self, _host: &mut XenHost, _vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        if let Act::SetMemoryPolicy { policy } = act {
            is_possible(*policy).map_err(LeverError::Refused)?;
        }
        Ok(Outcome::Done)
    }
}

/// Checks whether a domain can have this memory policy.
///
/// # Errors
/// Returns why it cannot.
pub(crate) fn is_possible(policy: MemoryPolicy) -> Result<(), Failure> {
    match policy == MemoryPolicy::default() {
        true => Ok(()),
        false => Err(Failure::MemoryPolicy {
            policy,
            why: NO_MOVES.to_owned(),
        }),
    }
}

//! Answers about drained nodes and pauses.

use homenode_api::ApiError;
use homenode_api::answer::Maintenance;
use homenode_control::{Control, NotDrained};
use homenode_machine::Machine;
use homenode_units::{NodeSet, Ns};

use crate::drain_file::DrainFile;

/// Returns the drained nodes, the VMs still on them, and whether the agent is paused.
pub(crate) fn maintenance(control: &Control, machine: &Machine) -> Maintenance {
    Maintenance {
        at_ns: control.sample().map_or(Ns::ZERO, |sample| sample.at),
        drains: control.drains(machine),
        paused_for_ns: control.paused_for(),
        note: None,
    }
}

/// Starts or ends draining nodes.
///
/// # Errors
/// If a node does not exist, a node to be released is not drained, no node would be left, or no active policy drains nodes.
pub(crate) fn drain(
    control: &mut Control,
    machine: &Machine,
    file: &DrainFile,
    (nodes, is_on): (&NodeSet, bool),
) -> Result<Maintenance, ApiError> {
    let before = control.drained().clone();
    if nodes.is_empty() {
        let why = "name at least one node; `homenode machine` lists them".to_owned();
        return Err(ApiError::BadInput { why });
    }
    let other = nodes.difference(&before);
    if !is_on && !other.is_empty() {
        return Err(no_such("drained node", &other, &before));
    }
    let after = match is_on {
        true => before.union(nodes),
        false => before.difference(nodes),
    };
    control
        .drain(machine, after.clone())
        .map_err(|error| match &error {
            NotDrained::NoSuchNode { missing, there } => no_such("node", missing, there),
            NotDrained::NoneLeft { .. } | NotDrained::Idle(_) => ApiError::Conflict {
                why: error.to_string(),
            },
        })?;
    Ok(Maintenance {
        note: file.write(&after).err().map(|error| error.to_string()),
        ..maintenance(control, machine)
    })
}

fn no_such(what: &str, missing: &NodeSet, known: &NodeSet) -> ApiError {
    ApiError::NoSuchId {
        what: what.to_owned(),
        // The error names one node, so it names the first.
        id: missing.first().map_or(0, |node| u64::from(node.0)),
        known: known.iter().map(|node| u64::from(node.0)).collect(),
    }
}

/// Pauses all changes for `span`; zero ends a pause.
pub(crate) fn pause(control: &mut Control, machine: &Machine, span: Ns) -> Maintenance {
    control.pause(span);
    maintenance(control, machine)
}

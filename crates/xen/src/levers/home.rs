//! A domain's home: the nodes that its memory comes from. Lifting the home unpins vCPUs too.

use homenode_host::{Act, Lever, Outcome};
use homenode_undo::journal::Entry;
use homenode_undo::levers::LeverState;
use homenode_units::{NodeSet, VmId};

use super::{After, Xen, has};
use crate::XenHost;
use crate::changed::{Home, newest, read};
use crate::error::LeverError;

struct OfDomain(Vec<&'static str>);

pub(super) fn state(entry: Option<&Entry>) -> Box<dyn LeverState<Xen>> {
    Box::new(OfDomain(has::<Home>(entry)))
}

impl LeverState<Xen> for OfDomain {
    fn lever(&self) -> Lever {
        Lever::Home
    }

    fn what(&self, _act: &Act) -> &'static str {
        "setting the home"
    }

    fn set(&mut self, host: &mut XenHost, vm: &mut VmId, act: &Act) -> Result<Outcome, LeverError> {
        match act {
            Act::SetHome { nodes } => set(host, *vm, nodes),
            _ => Ok(Outcome::Done),
        }
    }

    fn lift(&mut self, host: &mut XenHost, vm: &mut VmId) -> Result<(), LeverError> {
        host.undo(*vm, |lever| !lever.is_leased())
    }

    fn journalled(&self) -> Vec<&'static str> {
        self.0.clone()
    }

    fn undo(&self, after: &mut After<'_>) -> Result<(), LeverError> {
        let Some(domain) = after.domain else { return Ok(()) };
        let ours = read::<Home>(after.entry)?.map_or_else(Vec::new, |home| home.0);
        if !ours.contains(&after.hypervisor.node_affinity(domain.domid)?) {
            return Ok(());
        }
        Ok(match &after.entry.before.nodes {
            Some(before) => after.hypervisor.set_node_affinity(domain.domid, before),
            None => after.hypervisor.follow_cpus(domain.domid),
        }?)
    }
}

/// Makes a domain's memory come from these nodes.
///
/// # Errors
/// Returns what failed. The journal lists what may be in force.
pub(crate) fn set(host: &mut XenHost, vm: VmId, nodes: &NodeSet) -> Result<Outcome, LeverError> {
    host.begin(vm)?;
    let mut home: Home = host.written(vm)?.unwrap_or_default();
    newest(&mut home.0, nodes.clone());
    host.write(vm, &home)?;
    let domid = host.domid(vm);
    host.hypervisor.set_node_affinity(domid, nodes)?;
    let seen = host.hypervisor.node_affinity(domid)?;
    match seen == *nodes {
        true => host.write(vm, &Home(vec![nodes.clone()])).map(|()| Outcome::Done),
        false => Err(LeverError::Nodes {
            seen,
            wanted: nodes.clone(),
        }),
    }
}

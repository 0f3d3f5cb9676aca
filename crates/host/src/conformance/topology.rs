//! The topology that guests see.

use homenode_units::{NodeId, VmId};

use super::{Breach, Check, PERIOD, Verdict, commit_one, expect, refused, sample_of};
use crate::{Act, Failure, GuestTopology, Host, Impossible, Outcome, VmSample};

pub(super) static PUBLISHED: Check = Check {
    name: "what a guest is told is seen, with a new sequence each time, and stays until it is told otherwise",
    run: guest_is_told,
};

fn guest_is_told(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let first = sample_of(host, vm)?;
    let nodes: Vec<NodeId> = host.machine().memory_nodes().iter().take(2).collect();
    // Puts all vCPUs and memory on one node. That is enough, since only the told topology can be observed.
    let all_on = |node: NodeId, virtual_nodes: usize| GuestTopology {
        vcpus: vec![Some(node); first.vcpus.len()],
        memory: vec![Some(node); virtual_nodes],
    };
    let count = first.virtual_nodes.len();
    for topology in [all_on(nodes[0], count + 1), GuestTopology::default()] {
        refused(host, vm, Act::PublishTopology { topology }, |why| {
            matches!(why, Impossible::Topology { .. })
        })?;
    }
    if let Some(why) = &first.no_topology_device {
        return cannot_be_told(host, vm, &first, all_on(nodes[0], count))
            .map(|()| Verdict::Skipped(why.clone()));
    }
    let mut sequence = first.published.map_or(0, |published| published.sequence);
    for node in nodes {
        let topology = all_on(node, count);
        let act = Act::PublishTopology {
            topology: topology.clone(),
        };
        let outcome = commit_one(host, vm, act)?;
        expect(outcome == Outcome::Done, || {
            format!("expected the guest to be told, saw {outcome:?}")
        })?;
        let published = sample_of(host, vm)?.published.ok_or("nothing was told")?;
        expect(
            published.topology == topology && published.sequence > sequence,
            || format!("told {topology:?} after sequence {sequence}, seen is {published:?}"),
        )?;
        host.wait(PERIOD);
        let later = sample_of(host, vm)?.published;
        expect(later.as_ref() == Some(&published), || {
            format!("told {published:?}, later seen is {later:?}")
        })?;
        sequence = published.sequence;
    }
    Ok(Verdict::Passed)
}

/// Checks a guest with virtual nodes that cannot be told of them: the host must report this, and tell the guest nothing.
fn cannot_be_told(
    host: &mut dyn Host,
    vm: VmId,
    first: &VmSample,
    topology: GuestTopology,
) -> Result<(), Breach> {
    if !first.virtual_nodes.is_empty() {
        let outcome = commit_one(host, vm, Act::PublishTopology { topology })?;
        let is_said = matches!(&outcome, Outcome::Failed(error) if matches!(error.why, Failure::NoTopologyDevice { .. }));
        expect(is_said, || {
            format!("expected a failure, as the guest cannot be told; saw {outcome:?}")
        })?;
    }
    let published = sample_of(host, vm)?.published;
    expect(published == first.published, || {
        format!("nothing was told, but seen is {published:?}")
    })
}

//! Tells a guest on which nodes its vCPUs and its memory are, as these change.
//!
//! # Problem
//! A guest never updates its boot tables, but its host moves vCPUs and memory all the time, and no node information is better
//! than outdated information [XPV, section 4.1]. Updates cost, too: the guest rebuilds its scheduler domains, and its
//! programs use other memory. A topology that flickers is worse than one that is a little late.
//!
//! # Terms
//! - *Virtual node*: a node as the guest sees it. In a stock guest, a page belongs to the same virtual node for ever.
//! - *Fact*: the node of one vCPU, or of one virtual node's memory.
//! - *Follows*: a VM follows if its guest can be told ([`homenode_host::VmSample::no_topology_device`]), its operator did not
//!   opt it out, and its memory policy does not move single pages.
//! - *Layout*: the home node that is to hold all memory of each virtual node ([`Layouts`]).
//!
//! # Algorithm
//! 1. Each VM that follows and has a home gets a layout: virtual nodes are dealt out evenly over the home nodes, each to the
//!    node with most of its memory if there is room. The layout holds until the home changes. [`crate::balance`] confines
//!    each vCPU to one home node, at first the one with its virtual node's memory. [`crate::repatriate`] moves each virtual
//!    node's memory to its node, and brings strays back.
//! 2. A vCPU's node is the one to which its affinity confines it, or else the one on which it ran last. The node of a virtual
//!    node's memory is the one with over half of its touched pages. If there is none, it is the node published before, else
//!    the layout's, else the one with most pages.
//! 3. A guest that was told nothing yet is told everything at once. Later, a fact is published once it has been unchanged for
//!    [`Config::settle`]. All facts that are due go together, with at most one version per [`Config::interval`].
//!
//! # Properties (tests of the same name)
//! - `what_is_told_is_what_is_so_once_it_has_settled`
//! - `a_fact_that_flickers_is_not_told_and_keeps_no_other_back`
//! - `at_most_one_version_in_an_interval`
//! - `virtual_nodes_are_dealt_out_evenly_and_stay_where_they_lie`
//! - `a_layout_holds_until_the_home_changes`
//! - `a_vm_whose_pages_follow_their_users_does_not_follow_and_that_is_said_once`
//!
//! # Departures from the source, and why
//! - The paper interrupts a guest at once whenever one of its vCPUs changes node [XPV, section 4.3.1], and the guest's handler
//!   takes 368 cycles (section 4.4.6). A stock kernel takes 27 ms to rebuild what depends on a CPU's node, or 290 to 604 ms with
//!   hotplug (docs/TOPOLOGY.md). At one version in five seconds that is half a percent of one CPU, or 12 percent at worst.
//! - Memory moves only by whole virtual nodes, because a stock kernel cannot change a page's node.

mod layout;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, GuestTopology, HandsOff, Management, Plan, View, VirtualNode, VmSample, VmView};
use homenode_units::{MemoryPolicy, Migration, NodeId, NodeMap, Ns, Pages, Placing, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::{PAUSE, SPAN};

pub use layout::Layouts;

/// Name of this policy in plans.
pub const POLICY: &str = "topology-feed";

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How long a fact must have been unchanged before it is published.
    #[serde(with = "homenode_units::text")]
    pub settle: Ns,
    /// Least time between two versions for one guest.
    #[serde(with = "homenode_units::text")]
    pub interval: Ns,
}

impl Default for Config {
    /// A fact settles for two seconds, because a vCPU that [`crate::balance`] lends often returns in the next cycle. Versions
    /// are five seconds apart because of their cost (see above).
    fn default() -> Self {
        Config {
            settle: Ns::from_secs(2),
            interval: Ns::from_secs(5),
        }
    }
}

homenode_units::settings! { Config { settle: PAUSE, interval: SPAN } }

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    vms: BTreeMap<VmId, Facts>,
    said: BTreeSet<VmId>,
}

/// Current facts, each with the time of its last change.
#[derive(Clone, Debug, Default)]
struct Facts {
    vcpus: Vec<Fact>,
    memory: Vec<Fact>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fact {
    node: Option<NodeId>,
    since: Ns,
}

impl Facts {
    fn observe(&mut self, seen: &GuestTopology, now: Ns) {
        let take_in = |facts: &mut Vec<Fact>, seen: &[Option<NodeId>]| {
            let unseen = Fact {
                node: None,
                since: now,
            };
            facts.resize(seen.len(), unseen);
            for (fact, &node) in facts.iter_mut().zip(seen) {
                if fact.node != node {
                    *fact = Fact { node, since: now };
                }
            }
        };
        take_in(&mut self.vcpus, &seen.vcpus);
        take_in(&mut self.memory, &seen.memory);
    }

    /// Returns the published topology, updated with the facts that have settled since.
    fn settled(&self, published: &GuestTopology, settle: Ns, now: Ns) -> GuestTopology {
        let merge = |facts: &[Fact], published: &[Option<NodeId>]| {
            let published = published.iter().copied().chain(std::iter::repeat(None));
            let of =
                |(fact, published): (&Fact, Option<NodeId>)| match now.saturating_sub(fact.since) >= settle {
                    true => fact.node,
                    false => published,
                };
            facts.iter().zip(published).map(of).collect()
        };
        GuestTopology {
            vcpus: merge(&self.vcpus, &published.vcpus),
            memory: merge(&self.memory, &published.memory),
        }
    }
}

/// Returns why a VM's guest is told nothing; `None` if the VM follows.
pub fn why_not(vm: &VmSample) -> Option<String> {
    if vm.settings.management == Management::Ignored {
        return Some("its operator opted it out (manage='no' in its metadata)".to_owned());
    }
    if vm.no_topology_device.is_some() {
        return vm.no_topology_device.clone();
    }
    let policy = vm.settings.memory_policy.unwrap_or(vm.memory_policy);
    moves_pages_singly(policy).then(|| {
        format!(
            "its memory policy, {policy}, moves single pages, which cannot be reported to a guest; choose first-touch (homenode memory-policy \
             set {} first-touch)",
            vm.name
        )
    })
}

/// Whether pages of one virtual node may end up on several nodes.
fn moves_pages_singly(policy: MemoryPolicy) -> bool {
    policy.placing != Placing::FirstTouch || policy.migration != Migration::None
}

/// Publishes changed facts to guests.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.vms.retain(|id, _| view.sample.vm(*id).is_some());
    state.said.retain(|id| view.sample.vm(*id).is_some());
    for vm in &view.vms {
        let (id, sample) = (vm.sample.id, vm.sample);
        // Where a vCPU runs during a measuring window of some seconds is not reported to the guest.
        if vm.hands_off == Some(HandsOff::Isolating) {
            continue;
        }
        if let Some(why) = why_not(sample) {
            state.vms.remove(&id);
            if sample.no_topology_device.is_none() && vm.managed() && state.said.insert(id) {
                plan.find(
                    POLICY,
                    Some(id),
                    format!("the guest of VM {} gets no topology updates: {why}", sample.name),
                );
            }
            continue;
        }
        state.said.remove(&id);
        let published = sample.published.as_ref();
        let seen = seen(view, vm);
        let facts = state.vms.entry(id).or_default();
        facts.observe(&seen, view.at);
        let (topology, reason) = match published {
            None => (seen, "its guest has not been told its topology yet".to_owned()),
            Some(published) if view.at.saturating_sub(published.at) < config.interval => continue,
            Some(published) => {
                let topology = facts.settled(&published.topology, config.settle, view.at);
                let reason = what_changed(&published.topology, &topology);
                (topology, reason)
            }
        };
        let is_news = published.is_none_or(|published| published.topology != topology);
        if is_news && topology.memory.iter().any(Option::is_some) {
            plan.decide(POLICY, Act::PublishTopology { topology }.on(id), reason);
        }
    }
    plan
}

/// Step 2: returns on which nodes a VM's vCPUs and memory are now.
fn seen(view: &View<'_>, vm: &VmView<'_>) -> GuestTopology {
    let sample = vm.sample;
    let count = sample.vcpus.last().map_or(0, |vcpu| usize::from(vcpu.index) + 1);
    let mut vcpus = vec![None; count];
    for vcpu in &sample.vcpus {
        let mut nodes = vcpu.affinity.iter().filter_map(|cpu| view.machine.node_of(cpu));
        let first = nodes.next();
        let confined = first.filter(|first| nodes.all(|node| node == *first));
        let ran_on = || vcpu.cpu.and_then(|cpu| view.machine.node_of(cpu));
        vcpus[usize::from(vcpu.index)] = confined.or_else(ran_on);
    }
    let published = sample.published.as_ref().map(|published| &published.topology);
    let memory = sample.virtual_nodes.iter().enumerate().map(|(at, virtual_node)| {
        let laid_out = vm.layout.and_then(|nodes| nodes.get(at).copied());
        let published = published.and_then(|published| published.memory.get(at).copied().flatten());
        memory_node(virtual_node, published.or(laid_out))
    });
    GuestTopology {
        memory: memory.collect(),
        vcpus,
    }
}

/// Returns the node of a virtual node's memory; if no node has over half of it, `otherwise`.
fn memory_node(virtual_node: &VirtualNode, otherwise: Option<NodeId>) -> Option<NodeId> {
    if virtual_node.memory_bytes.0 == 0 {
        return None;
    }
    let on = virtual_node.pages.iter().flat_map(NodeMap::iter);
    let most = on.max_by_key(|(node, pages)| (**pages, std::cmp::Reverse(*node)));
    let Some((node, pages)) = most.filter(|(_, pages)| **pages > Pages::ZERO) else {
        return otherwise;
    };
    let all: Pages = virtual_node.pages.iter().flat_map(NodeMap::values).copied().sum();
    match 2 * pages.0 > all.0 {
        true => Some(node),
        false => otherwise.or(Some(node)),
    }
}

/// Returns the facts that differ, in words.
fn what_changed(published: &GuestTopology, now: &GuestTopology) -> String {
    let differ = |what: &str, published: &[Option<NodeId>], now: &[Option<NodeId>]| {
        let published = published.iter().copied().chain(std::iter::repeat(None));
        let words = |(at, (now, published)): (usize, (&Option<NodeId>, Option<NodeId>))| {
            let where_ = |node: Option<NodeId>| {
                node.map_or("an unknown node".to_owned(), |node| format!("node {node}"))
            };
            (*now != published)
                .then(|| format!("{what} {at} is on {}, not {}", where_(*now), where_(published)))
        };
        now.iter()
            .zip(published)
            .enumerate()
            .filter_map(words)
            .collect::<Vec<_>>()
    };
    let mut changes = differ("vCPU", &published.vcpus, &now.vcpus);
    changes.extend(differ(
        "the memory of virtual node",
        &published.memory,
        &now.memory,
    ));
    changes.join("; ")
}

//! Moves of pages: any pages of a VM, pages of a virtual node, and named pages.

use homenode_units::{MemoryPolicy, Migration, NodeId, NodeMap, NodeSet, Pages, VmId};

use super::{
    Breach, Check, PERIOD, Verdict, commit_one, expect, fullest_and_other, no_node, refused, sample,
    sample_of,
};
use crate::{Act, Action, Failure, FrameMove, Host, Impossible, Outcome, PageUse, VmSample};

pub(super) static MOVED: Check = Check {
    name: "pages move within the budget, and the sample agrees with the receipt",
    run: pages_move,
};

pub(super) static NAMED: Check = Check {
    name: "named pages move from where they are said to lie, and the sample agrees with the receipt",
    run: frames_move,
};

pub(super) static OF_VIRTUAL_NODE: Check = Check {
    name: "a virtual node's memory moves within the budget, and no other's with it",
    run: virtual_node_moves,
};

const UNKNOWN: &str = "the host does not know where the VM's pages are";
/// Pages to name in each MiB if the host does not locate single pages.
const PROBED: Pages = Pages(16);
const PAGES_PER_MIB: usize = 256;
/// The most named pages to move, and how many readings to take until the host has sampled some.
const NAMED_MAX: usize = 64;
const LOOKS: usize = 10;

/// Compares the receipt of an act that moves pages onto `target` with the pages on it in samples before and after.
fn moves(
    host: &mut dyn Host,
    vm: VmId,
    act: Act,
    target: NodeId,
    of: &dyn Fn(&VmSample) -> Option<NodeMap<Pages>>,
) -> Result<Verdict, Breach> {
    let on_target = |host: &mut dyn Host| {
        let pages = of(&sample_of(host, vm)?).and_then(|pages| pages.get(target).copied());
        Ok::<_, Breach>(pages.unwrap_or_default())
    };
    let budget = act.pages_max();
    let before = on_target(host)?;
    let moved = match commit_one(host, vm, act)? {
        Outcome::Moved { moved, .. } => moved,
        Outcome::Failed(error) if matches!(error.why, Failure::MemoryFixed { .. }) => {
            return Ok(Verdict::Skipped(error.to_string()));
        }
        other => return Err(format!("expected pages to be moved, saw {other:?}").into()),
    };
    expect(moved <= budget, || {
        format!("{moved} moved under a budget of {budget}")
    })?;
    let gained = on_target(host)?.0 as f64 - before.0 as f64;
    // A running guest may touch new pages meanwhile, so allow a tenth either way.
    let tolerance = 0.1 * moved.as_f64() + 64.0;
    expect((gained - moved.as_f64()).abs() <= tolerance, || {
        format!("the receipt says {moved} moved to node {target}, the sample says {gained}")
    })?;
    expect(moved > Pages::ZERO, || "nothing moved".into())?;
    Ok(Verdict::Passed)
}

fn pages_move(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let seen = sample_of(host, vm)?;
    let nodes = host.machine().memory_nodes();
    let elsewhere = NodeSet::one(no_node(host));
    let act = |from: &NodeSet, to: &NodeSet, pages_max| Act::MovePages {
        from: from.clone(),
        to: to.clone(),
        pages_max,
    };
    refused(host, vm, act(&nodes, &nodes, Pages(1)), is_same)?;
    refused(host, vm, act(&nodes, &elsewhere, Pages(1)), is_no_node)?;
    refused(host, vm, act(&elsewhere, &nodes, Pages(1)), is_no_node)?;
    let Some(pages) = &seen.pages else {
        return Ok(Verdict::Skipped(UNKNOWN.to_owned()));
    };
    let (_, target) = fullest_and_other(host, pages)?;
    let to = NodeSet::one(target);
    let outside = seen.pages_outside(&to).unwrap_or_default();
    let budget = Pages((outside.0 / 4).max(1));
    let act = Action::gather(host.machine(), vm, to, budget).act;
    moves(host, vm, act, target, &|vm| vm.pages.clone())
}

fn is_same(why: &Impossible) -> bool {
    matches!(why, Impossible::SameNodes { .. })
}

fn is_no_node(why: &Impossible) -> bool {
    matches!(why, Impossible::Nodes { .. })
}

fn frames_move(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let seen = sample_of(host, vm)?;
    let Some(pages) = &seen.pages else {
        return Ok(Verdict::Skipped(UNKNOWN.to_owned()));
    };
    let (from, to) = fullest_and_other(host, pages)?;
    impossible_frames(host, vm, from, to)?;
    let of = |vm: &VmSample| vm.pages.clone();
    let Some(uses) = page_uses(host, vm)? else {
        // The host does not locate single pages. So name some pages of each MiB, and move them to the node with the fewest pages.
        let to = host
            .machine()
            .memory_nodes()
            .iter()
            .min_by_key(|node| pages.get(*node));
        let to = to.ok_or("the host has no memory")?;
        let moves_all = Act::MoveFrames {
            moves: scattered(&seen, pages, to),
        };
        return moves(host, vm, moves_all, to, &of);
    };
    let from = uses.first().map_or(from, |first| first.on);
    let to = host.machine().memory_nodes().iter().find(|node| *node != from);
    let to = to.ok_or("the host has one node only")?;
    let there = uses.iter().filter(|each| each.on == from).take(NAMED_MAX);
    let named = there.map(|each| FrameMove {
        frame: each.frame,
        pages: each.pages,
        from,
        to,
    });
    let act = Act::MoveFrames {
        moves: named.collect(),
    };
    moves(host, vm, act, to, &of)
}

/// Checks that impossible moves are refused, and that naming a frame that the guest lacks moves nothing.
fn impossible_frames(host: &mut dyn Host, vm: VmId, from: NodeId, to: NodeId) -> Result<(), Breach> {
    let act = |frame, from, to| Act::MoveFrames {
        moves: vec![FrameMove {
            frame,
            pages: Pages(1),
            from,
            to,
        }],
    };
    let nowhere = no_node(host);
    refused(host, vm, act(0, to, to), is_same)?;
    refused(host, vm, act(0, from, nowhere), is_no_node)?;
    let outcome = commit_one(host, vm, act(u64::MAX / 2, from, to))?;
    let is_nothing = match &outcome {
        Outcome::Moved { moved, .. } => *moved == Pages::ZERO,
        // If the VM's memory cannot move at all, neither can a frame that does not exist.
        Outcome::Failed(error) => matches!(error.why, Failure::MemoryFixed { .. }),
        _ => false,
    };
    expect(is_nothing, || {
        format!("expected no page moved for a frame that does not exist, saw {outcome:?}")
    })
}

/// Returns moves onto `to` of some pages in each MiB of a VM's memory, from each other node that has pages.
fn scattered(vm: &VmSample, pages: &NodeMap<Pages>, to: NodeId) -> Vec<FrameMove> {
    let others = pages
        .iter()
        .filter(|(from, pages)| *from != to && **pages > Pages::ZERO);
    let others: Vec<NodeId> = others.map(|(from, _)| from).collect();
    let frames = (0..vm.memory_bytes.to_pages().0).step_by(PAGES_PER_MIB);
    let of_all = |frame| {
        others.iter().map(move |from| FrameMove {
            frame,
            pages: PROBED,
            from: *from,
            to,
        })
    };
    frames.flat_map(of_all).collect()
}

/// Returns the pages that the host has sampled, or `None` if it does not locate single pages.
fn page_uses(host: &mut dyn Host, vm: VmId) -> Result<Option<Vec<PageUse>>, Breach> {
    let before = sample(host)?;
    let policy = sample_of(host, vm)?.memory_policy;
    if before.no_page_uses.is_some() {
        return Ok(None);
    }
    let set = |host: &mut dyn Host, policy| match commit_one(host, vm, Act::SetMemoryPolicy { policy })? {
        Outcome::Done => Ok(()),
        other => Err(Breach::Seen(format!(
            "expected the memory policy to be set, saw {other:?}"
        ))),
    };
    let migration = Migration::Carrefour;
    set(host, MemoryPolicy { migration, ..policy })?;
    for _ in 0..LOOKS {
        host.wait(PERIOD);
        let uses = sample_of(host, vm)?.page_uses.filter(|uses| !uses.is_empty());
        if uses.is_some() {
            set(host, policy)?;
            return Ok(uses);
        }
    }
    Err(format!("in {LOOKS} looks no page was sampled").into())
}

fn virtual_node_moves(host: &mut dyn Host, vm: VmId) -> Result<Verdict, Breach> {
    let seen = sample_of(host, vm)?;
    let count = seen.virtual_nodes.len() as u16;
    let act = |virtual_node, to, pages_max| Act::MoveVirtualNode {
        virtual_node,
        to,
        pages_max,
    };
    let nodes = host.machine().memory_nodes();
    let first = nodes.iter().next().ok_or("the host has no memory")?;
    refused(host, vm, act(count, first, Pages(1)), |why| {
        matches!(why, Impossible::UnknownVirtualNode { .. })
    })?;
    let nowhere = act(0, no_node(host), Pages(1));
    refused(host, vm, nowhere, is_no_node)?;
    let touched = |number: u16| {
        let pages = seen.virtual_nodes[usize::from(number)].pages.as_ref();
        pages.map_or(Pages::ZERO, |pages| pages.values().copied().sum())
    };
    let Some(number) = (0..count).max_by_key(|number| touched(*number)) else {
        return Ok(Verdict::Skipped(
            "the host does not report the VM's virtual nodes".into(),
        ));
    };
    let Some(pages) = &seen.virtual_nodes[usize::from(number)].pages else {
        return Ok(Verdict::Skipped(UNKNOWN.to_owned()));
    };
    let (_, target) = fullest_and_other(host, pages)?;
    let elsewhere: Pages = pages
        .iter()
        .filter(|(node, _)| *node != target)
        .map(|(_, pages)| *pages)
        .sum();
    let others = |seen: &VmSample| -> Pages {
        let nodes = (0..).zip(&seen.virtual_nodes);
        let others = nodes.filter(|(other, _)| *other != number);
        let on_target = others.filter_map(|(_, node)| node.pages.as_ref()?.get(target).copied());
        on_target.sum()
    };
    let budget = Pages((elsewhere.0 / 4).max(1));
    let of = |vm: &VmSample| vm.virtual_nodes.get(usize::from(number))?.pages.clone();
    let verdict = moves(host, vm, act(number, target, budget), target, &of)?;
    let (before, after) = (others(&seen), others(&sample_of(host, vm)?));
    expect(after.0 <= before.0 + budget.0 / 10 + 64, || {
        format!("pages of other virtual nodes moved too: {before} were there before, {after} are now")
    })?;
    Ok(verdict)
}

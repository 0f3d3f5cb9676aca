//! Where pages lie: any of a VM's, those of a virtual node, and named ones.

use homenode_units::{MemoryPolicy, Migration, NodeId, NodeMap, NodeSet, Pages, VmId};

use super::{
    Check, PERIOD, Verdict, commit_one, expect, fullest_and_other, no_node, refused, sample, sample_of,
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

const UNKNOWN: &str = "the host does not know where the VM's pages lie";
/// Guest frames that are in use where a kernel runs: 16 MiB of its image and of what it allocated first.
const KERNEL_FRAMES: (u64, Pages) = (4096, Pages(4096));
/// How many named pages are moved, and how long to wait for names.
const NAMED_MAX: usize = 64;
const LOOKS: usize = 10;

/// The receipt of an act that moves at most `budget` pages onto `target`, compared with two samples of what moves.
fn moves(
    host: &mut dyn Host,
    vm: VmId,
    act: Act,
    target: NodeId,
    of: &dyn Fn(&VmSample) -> Option<NodeMap<Pages>>,
) -> Result<Result<Pages, String>, String> {
    let on_target = |host: &mut dyn Host| {
        let pages = of(&sample_of(host, vm)?).and_then(|pages| pages.get(target).copied());
        Ok::<_, String>(pages.unwrap_or_default())
    };
    let budget = act.pages_max();
    let before = on_target(host)?;
    let moved = match commit_one(host, vm, act)? {
        Outcome::Moved { moved, .. } => moved,
        Outcome::Failed(error) if matches!(error.why, Failure::MemoryFixed { .. }) => {
            return Ok(Err(error.to_string()));
        }
        other => return Err(format!("moving pages gave {other:?}")),
    };
    expect(moved <= budget, || {
        format!("{moved} moved under a budget of {budget}")
    })?;
    let gained = on_target(host)?.0 as f64 - before.0 as f64;
    // A running guest may touch new pages meanwhile: a tenth of the budget either way.
    let tolerance = 0.1 * budget.as_f64() + 64.0;
    expect((gained - moved.as_f64()).abs() <= tolerance, || {
        format!("the receipt says {moved} moved to node {target}, the sample says {gained}")
    })?;
    Ok(Ok(moved))
}

fn some(moved: Result<Pages, String>) -> Result<Verdict, String> {
    match moved {
        Ok(Pages::ZERO) => Err("nothing moved".into()),
        Ok(_) => Ok(Verdict::Passed),
        Err(why) => Ok(Verdict::Skipped(why)),
    }
}

fn pages_move(host: &mut dyn Host, vm: VmId) -> Result<Verdict, String> {
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
    some(moves(host, vm, act, target, &|vm| vm.pages.clone())?)
}

fn is_same(why: &Impossible) -> bool {
    matches!(why, Impossible::SameNodes { .. })
}

fn is_no_node(why: &Impossible) -> bool {
    matches!(why, Impossible::Nodes { .. })
}

fn frames_move(host: &mut dyn Host, vm: VmId) -> Result<Verdict, String> {
    let Some(pages) = sample_of(host, vm)?.pages else {
        return Ok(Verdict::Skipped(UNKNOWN.to_owned()));
    };
    let (fullest, target) = fullest_and_other(host, &pages)?;
    let (frame, pages) = KERNEL_FRAMES;
    let step = |frame, pages, from, to| FrameMove {
        frame,
        pages,
        from,
        to,
    };
    let act = |step| Act::MoveFrames { moves: vec![step] };
    refused(host, vm, act(step(frame, Pages(1), target, target)), is_same)?;
    let nowhere = act(step(frame, Pages(1), fullest, no_node(host)));
    refused(host, vm, nowhere, is_no_node)?;
    let of = |vm: &VmSample| vm.pages.clone();
    // A frame that the guest lacks: there is nothing to move.
    let beyond = act(step(u64::MAX / 2, Pages(1), fullest, target));
    let outcome = commit_one(host, vm, beyond)?;
    let is_nothing = matches!(
        outcome,
        Outcome::Moved {
            moved: Pages::ZERO,
            ..
        }
    );
    expect(is_nothing, || {
        format!("a frame that is not there gave {outcome:?}")
    })?;
    let named = page_uses(host, vm)?;
    let from = match &named {
        Some(uses) => uses.first().map_or(fullest, |first| first.on),
        None => fullest,
    };
    let target = if from == target { fullest } else { target };
    let steps: Vec<FrameMove> = match &named {
        Some(uses) => {
            let there = uses.iter().filter(|each| each.on == from).take(NAMED_MAX);
            there
                .map(|each| step(each.frame, each.pages, from, target))
                .collect()
        }
        None => vec![step(frame, pages, from, target)],
    };
    let moved = moves(host, vm, Act::MoveFrames { moves: steps }, target, &of)?;
    match (moved, named) {
        (Ok(Pages::ZERO), None) => Ok(Verdict::Skipped(
            "the host does not say where a page lies, and none of the kernel's lay where most do".into(),
        )),
        (moved, _) => some(moved),
    }
}

/// Pages of which the host knows where they lie, where it does: those that were sampled.
fn page_uses(host: &mut dyn Host, vm: VmId) -> Result<Option<Vec<PageUse>>, String> {
    let before = sample(host)?;
    let policy = sample_of(host, vm)?.memory_policy;
    if before.no_page_uses.is_some() {
        return Ok(None);
    }
    let set = |host: &mut dyn Host, policy| match commit_one(host, vm, Act::SetMemoryPolicy { policy })? {
        Outcome::Done => Ok(()),
        other => Err(format!("sampling pages gave {other:?}")),
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
    Err(format!("in {LOOKS} looks no page was sampled"))
}

fn virtual_node_moves(host: &mut dyn Host, vm: VmId) -> Result<Verdict, String> {
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
        return Ok(Verdict::Skipped("the host names no virtual nodes of it".into()));
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
    let verdict = some(moves(host, vm, act(number, target, budget), target, &of)?)?;
    let (before, after) = (others(&seen), others(&sample_of(host, vm)?));
    expect(after.0 <= before.0 + budget.0 / 10 + 64, || {
        format!("pages of other virtual nodes went along: {before} lay there, {after} do")
    })?;
    Ok(verdict)
}

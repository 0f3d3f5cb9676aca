//! Permits on a Xen host (KS4Xen): two domUs share a last-level cache, each with a separate CPU. credit1's cap holds the
//! polluter, and the agent in dom0 sets it using the counters. The effect on misses is read from the model's page, not from
//! the agent.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use homenode_formats::pmu_region::Page;
use homenode_kernel::modelled_pmu;
use homenode_testbed_guest::Behaviour;

use super::agent::{SOON, start_acting};
use super::counted::{
    NEAR_PERCENT, PERMIT_PART, Seen, VICTIM_PERCENT, counts, wait_counted, wait_held, watch,
};
use super::permits::permit;
use crate::inside::Inside;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::outside::emulated::{HostKind, LLC_BYTES};

/// CPUs of the node that dom0 does not run on. They share a cache.
const CPUS: [u32; 2] = [2, 3];
/// Memory of the victim. It has more than the thrasher, so that the number of its frames identifies its tag.
const VICTIM_MIB: u64 = 160;
/// Number of windows for which the thrasher is watched once it is held.
const LASTING: usize = 4;
/// Percentage of a domU's misses that must be counted on its one CPU. The rest is work of Xen and dom0 in the domU's memory.
const OWN_PERCENT: u64 = 90;

/// Walks eight times what the cache holds, so that each line evicts another.
fn thrasher(kind: Kind) -> DomuSpec {
    let walk = Behaviour::walking(((8 * LLC_BYTES) >> 10) as u32, 0);
    DomuSpec::new("thrasher", kind, &CPUS[0].to_string()).doing(walk)
}

/// Walks half of what the cache holds, so slowly that the thrasher evicts it between two rounds.
fn victim(kind: Kind) -> DomuSpec {
    let walk = Behaviour::walking(((LLC_BYTES / 2) >> 10) as u32, 20);
    let mut spec = DomuSpec::new("victim", kind, &CPUS[1].to_string()).doing(walk);
    spec.memory_mib = VICTIM_MIB;
    spec
}

/// Frames per node of the emulated host.
const NODE_FRAMES: u64 = 1 << 18;

/// Finds each domU's tag: the one that, on each node, has about as many frames as Xen counts pages of the domU.
fn tags_of(page: Page<'_>, domus: [&Domu; 2]) -> anyhow::Result<[u8; 2]> {
    let nodes = HostKind::XenCounted.distance_matrix().len() as u64;
    let mut frames = vec![vec![0_u64; nodes as usize]; 256];
    for frame in 0..nodes * NODE_FRAMES {
        frames[usize::from(page.tag(frame))][(frame / NODE_FRAMES) as usize] += 1;
    }
    let mut tags = [0; 2];
    for (tag, domu) in tags.iter_mut().zip(domus) {
        let pages = domu.pages_by_node()?;
        let room = pages.iter().sum::<u64>() / 50;
        let is_its = |frames: &Vec<u64>| frames.iter().zip(&pages).all(|(a, b)| a.abs_diff(*b) <= room);
        let found = (1..=255_u8).find(|tag| is_its(&frames[usize::from(*tag)]));
        *tag = found.with_context(|| {
            let tagged = frames[1..]
                .iter()
                .filter(|frames| frames.iter().any(|count| *count > 0));
            let tagged: Vec<_> = tagged.collect();
            format!(
                "{} has pages {pages:?}, and tags have frames {tagged:?}",
                domu.spec.name
            )
        })?;
    }
    Ok(tags)
}

/// Checks that a domU's misses are counted on its CPU, and notes their share of all misses on that CPU.
fn expect_attributed(inside: &Inside, page: Page<'_>, tags: [u8; 2]) -> anyhow::Result<()> {
    for (tag, cpu) in tags.into_iter().zip(CPUS) {
        let all = counts(page, tag).misses;
        let there = page.counts(cpu.into(), tag).unwrap_or_default().misses;
        let by_all: u64 = (0..=255)
            .filter_map(|tag| page.counts(cpu.into(), tag))
            .map(|counts| counts.misses)
            .sum();
        let (own, of_cpu) = (there * 100 / all.max(1), there * 100 / by_all.max(1));
        inside.note(format!(
            "of {all} misses in the frames of tag {tag} {own} percent were on CPU {cpu}, where they are {of_cpu} percent of all"
        ));
        ensure!(
            own >= OWN_PERCENT,
            "expected {OWN_PERCENT} percent of the misses on the domU's CPU, saw {own}"
        );
    }
    Ok(())
}

fn wait_cap(domu: &Domu, what: &str, accept: impl Fn(u32) -> bool) -> anyhow::Result<u32> {
    wait_until(what, SOON, || {
        let cap = domu.cap()?;
        Ok(match accept(cap) {
            true => Look::Done(cap),
            false => Look::NotYet(format!("a cap of {cap}")),
        })
    })
}

/// Checks that over the following windows, on average, the thrasher misses as much as it booked, and the victim less.
fn expect_lasting(
    inside: &Inside,
    (page, tags): (Page<'_>, [u8; 2]),
    booked: u64,
    free: &Seen,
) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    for _ in 0..LASTING {
        let held = watch(page, tags);
        inside.note(format!("it lasts: {held}"));
        seen.push(held);
    }
    let mean = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>() / LASTING as u64;
    let (thrasher, victim) = (mean(|seen| seen.thrasher), mean(|seen| seen.victim));
    ensure!(
        thrasher.abs_diff(booked) * 100 <= booked * NEAR_PERCENT
            && victim * 100 <= free.victim * VICTIM_PERCENT,
        "expected {booked} misses per slice of the thrasher, and fewer than {} of the victim, saw {thrasher} and {victim} on average",
        free.victim
    );
    Ok(())
}

fn start(inside: &Inside) -> anyhow::Result<Program> {
    start_acting(inside, "xen", &[])
}

/// Checks that a cap that the agent sets holds a thrasher to its permit, that its neighbour then misses less, and that the cap is
/// lifted when the agent is killed.
pub(super) fn permit_held(inside: &mut Inside) -> anyhow::Result<()> {
    let page = modelled_pmu::find(Path::new("/"))?.context("this host has no modelled PMU")?;
    // The model rests first: a killed agent may have left it running, and domUs boot faster without it.
    page.rest();
    let thrasher = inside.create_domu(&thrasher(Kind::Pv), Toolstack::Xl)?;
    let victim = inside.create_domu(&victim(Kind::Pv), Toolstack::Libvirt)?;
    // From now on the model runs, and makes everything a few times slower.
    let mut agent = start(inside)?;
    wait_counted(inside, ["thrasher", "victim"])?;
    let tags = tags_of(page, [&thrasher, &victim])?;
    let free = watch(page, tags);
    inside.note(format!("without a permit {free}"));
    expect_attributed(inside, page, tags)?;

    let booked = free.thrasher / PERMIT_PART;
    permit(inside, &["set", "thrasher", &booked.to_string()])?;
    let cap = wait_cap(&thrasher, "the thrasher to be capped", |cap| cap > 0)?;
    inside.note(format!("a permit of {booked}: a cap of {cap} percent"));
    let held = wait_held(inside, (page, tags), booked, &free)?;
    expect_lasting(inside, (page, tags), booked, &free)?;
    let cap = thrasher.cap()?;
    ensure!(
        victim.cap()? == 0,
        "expected the victim to have no cap, saw {}",
        victim.cap()?
    );
    inside.note(format!("with it {held}; a cap of {cap} percent"));

    agent.kill()?;
    let begin = Instant::now();
    wait_cap(
        &thrasher,
        "the guard of the killed agent to lift the cap",
        |cap| cap == 0,
    )?;
    inside.note(format!(
        "the agent was killed: lifted after {:.1} s",
        begin.elapsed().as_secs_f64()
    ));
    let freed = wait_until("the thrasher to be free again", SOON, || {
        let freed = watch(page, tags);
        Ok(match freed.thrasher > 2 * booked {
            true => Look::Done(freed),
            false => Look::NotYet(freed.to_string()),
        })
    })?;
    inside.note(format!("free again {freed}"));
    page.rest();
    inside.destroy_domu(&thrasher)?;
    inside.destroy_domu(&victim)
}

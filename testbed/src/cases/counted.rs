//! Cases that need counters, here those of the modelled PMU.
//!
//! Permits: two guests share a last-level cache, each with a separate CPU. The kernel holds the polluter (`cpu.max`). The
//! effect on misses is read from the model's page, not from the agent.
//!
//! Carrefour: a guest's memory is on a node where it does not run. `numa_maps` shows where its pages are in the end, and the
//! model's samples which node served its misses, before and after.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_formats::pmu_region::{Counts, Page};
use homenode_kernel::memory_blocks::{self, MemoryBlocks};
use homenode_kernel::{modelled_pmu, pagemap};
use homenode_testbed_guest::Behaviour;
use homenode_units::{NodeId, Permit};

use super::agent::{SOON, home_of_operator, start_agent, start_agent_with, stop};
use super::basics::in_mib;
use super::memory::{pages_on, policy, wait_known};
use super::permits::{permit, wait_limits};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec};
use crate::inside::pages::PAGE_BYTES;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// How long misses are counted, before the permit and with it.
const WINDOW: Duration = Duration::from_secs(10);
/// The permit is this fraction of the thrasher's misses without one.
pub(super) const PERMIT_PART: u64 = 5;
/// How far the thrasher may miss its permit over a window, in percent. The agent samples once a second, and under emulation
/// each sample is late by a fraction of that.
pub(super) const NEAR_PERCENT: u64 = 35;
/// Time in which a thrasher repays what it owes once the agent limits it: seconds for a real guest, minutes for an emulated one
/// on a busy machine.
const REPAID: Duration = Duration::from_secs(400);
/// Most misses of the victim next to a thrasher that the agent holds to its permit, in percent of its misses next to an unlimited
/// one.
pub(super) const VICTIM_PERCENT: u64 = 70;

/// Walks eight times what the cache holds, so that each line evicts another.
fn thrasher() -> GuestSpec {
    walker("thrasher", 8 * LLC_BYTES, 0, "0")
}

/// Walks half of what the cache holds, so slowly that the thrasher evicts it between two rounds.
fn victim() -> GuestSpec {
    walker("victim", LLC_BYTES / 2, 20, "1")
}

fn walker(name: &str, bytes: u64, think: u32, cpu: &str) -> GuestSpec {
    GuestSpec::new(name)
        .doing(Behaviour::walking((bytes >> 10) as u32, think))
        .cpus(Cpus::Pinned(vec![cpu.to_owned()]))
        .nodes("strict", "0")
}

/// Returns the machine frames of a guest's RAM that no other process maps.
fn frames(guest: &Guest) -> anyhow::Result<Vec<u64>> {
    let ram = guest.ram()?;
    let pid = i32::try_from(guest.process.0)?;
    let places = pagemap::read(Path::new("/"), pid, ram.begin, (ram.bytes / PAGE_BYTES) as usize)?;
    let own = |place| match place {
        pagemap::Place::Own(frame) => Some(frame),
        _ => None,
    };
    Ok(places
        .context("the guest's QEMU process has ended")?
        .into_iter()
        .filter_map(own)
        .collect())
}

/// Returns the tag that most of a guest's frames have; `None` until the agent has tagged the guest.
pub(super) fn tag(page: Page<'_>, guest: &Guest) -> anyhow::Result<Option<u8>> {
    let mut frames_of = [0; 256];
    for frame in frames(guest)? {
        frames_of[usize::from(page.tag(frame))] += 1;
    }
    let (tag, frames) = frames_of
        .iter()
        .enumerate()
        .max_by_key(|(_, frames)| **frames)
        .unwrap_or((0, &0));
    Ok((tag > 0 && *frames > 0).then_some(tag as u8))
}

/// LLC misses in a window.
pub(super) struct Seen {
    /// The thrasher's misses, per slice.
    pub(super) thrasher: u64,
    /// The victim's misses, per slice.
    pub(super) victim: u64,
    /// Percentage of the victim's references that missed.
    victim_percent: u64,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen {
            thrasher,
            victim,
            victim_percent,
        } = self;
        write!(
            f,
            "the thrasher misses {thrasher} per slice, the victim {victim}, {victim_percent} percent of its references"
        )
    }
}

/// Returns the counts so far for memory with this tag, summed over all CPUs.
pub(super) fn counts(page: Page<'_>, tag: u8) -> Counts {
    let counts = (0..page.layout().cpus).filter_map(|cpu| page.counts(cpu, tag));
    counts.fold(Counts::default(), |sum, counts| Counts {
        references: sum.references.wrapping_add(counts.references),
        misses: sum.misses.wrapping_add(counts.misses),
    })
}

pub(super) fn watch(page: Page<'_>, tags: [u8; 2]) -> Seen {
    let of = |tag| counts(page, tag);
    let (before, begin) = (tags.map(of), Instant::now());
    std::thread::sleep(WINDOW);
    let (after, took) = (tags.map(of), begin.elapsed());
    let slices = took.as_nanos() as f64 / Permit::SLICE.as_f64();
    let per_slice = |at: usize| ((after[at].misses - before[at].misses) as f64 / slices) as u64;
    let references = (after[1].references - before[1].references).max(1);
    Seen {
        thrasher: per_slice(0),
        victim: per_slice(1),
        victim_percent: (after[1].misses - before[1].misses) * 100 / references,
    }
}

/// Waits until the agent reports these guests' misses.
pub(super) fn wait_counted(inside: &Inside, names: [&str; 2]) -> anyhow::Result<()> {
    wait_until("the agent to count both guests", SOON, || {
        let shown = permit(inside, &["show"]).unwrap_or_default();
        let is_counted = |name: &str| {
            let vms = shown["vms"].as_array().into_iter().flatten();
            vms.filter(|vm| vm["name"] == name)
                .any(|vm| vm["units_per_slice"].as_u64() > Some(0) && vm["counted_by"] == "model")
        };
        Ok(match names.into_iter().all(is_counted) {
            true => Look::Done(()),
            false => Look::NotYet(shown.to_string()),
        })
    })
}

/// Checks that a thrasher is held to its permit, that its neighbour then misses less, and that everything is restored after the
/// agent has died.
pub(super) fn permit_held(inside: &mut Inside) -> anyhow::Result<()> {
    let page = modelled_pmu::find(Path::new("/"))?.context("this host has no modelled PMU")?;
    let guests = inside.create_at_once(&[thrasher(), victim()])?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    // From now on the model runs, and makes everything a few times slower.
    let mut agent = start_agent(inside)?;
    wait_counted(inside, ["thrasher", "victim"])?;
    let tag = |guest: &Guest| {
        tag(page, guest)?.with_context(|| format!("no memory frame of guest {} has a tag", guest.spec.name))
    };
    let tags = [tag(&guests[0])?, tag(&guests[1])?];
    ensure!(tags[0] != tags[1], "expected a tag for each guest, saw {tags:?}");
    let free = watch(page, tags);
    inside.note(format!("without a permit {free}"));

    let booked = free.thrasher / PERMIT_PART;
    permit(inside, &["set", "thrasher", &booked.to_string()])?;
    let found = wait_limits(&guests[0], "the thrasher to be throttled", |found| {
        !found.is_empty()
    })?;
    inside.note(format!("a permit of {booked}: {found:?}"));
    let held = wait_held(inside, (page, tags), booked, &free)?;
    let found = super::agent::limits(&guests[0])?;
    inside.note(format!("with it {held}; {found:?}"));

    agent.kill()?;
    wait_limits(
        &guests[0],
        "the guard of the killed agent to lift the quota",
        <[String]>::is_empty,
    )?;
    let freed = wait_until("the thrasher to be free again", SOON, || {
        let freed = watch(page, tags);
        Ok(if freed.thrasher > 2 * booked {
            Look::Done(freed)
        } else {
            Look::NotYet(freed.to_string())
        })
    })?;
    inside.note(format!("the guard lifted it: {freed}"));
    Ok(())
}

/// Waits until the thrasher has repaid what it owed and misses as much as it booked, while its neighbour misses less than
/// before.
pub(super) fn wait_held(
    inside: &Inside,
    (page, tags): (Page<'_>, [u8; 2]),
    booked: u64,
    free: &Seen,
) -> anyhow::Result<Seen> {
    wait_until("the thrasher to have repaid what it owes", REPAID, || {
        let shown = permit(inside, &["show", "thrasher"])?["vms"][0].clone();
        Ok(match shown["standing"] == "UNDER" {
            true => Look::Done(()),
            false => Look::NotYet(shown.to_string()),
        })
    })?;
    // Repeated, because neither guest can do much in a window in which the host is busy with other work.
    wait_until(
        "the thrasher to miss as it booked, and the victim less",
        SOON,
        || {
            let held = watch(page, tags);
            let is_near = held.thrasher.abs_diff(booked) * 100 <= booked * NEAR_PERCENT;
            let is_spared = held.victim * 100 <= free.victim * VICTIM_PERCENT;
            Ok(match is_near && is_spared {
                true => Look::Done(held),
                false => Look::NotYet(format!(
                    "a permit of {booked}, {} victim's misses before: {held}",
                    free.victim
                )),
            })
        },
    )
}

/// Memory that the follower walks through all the time: four times what a cache holds.
const HOT_KIB: u64 = (4 * LLC_BYTES) >> 10;
/// Memory that the follower wrote once.
const COLD_MIB: u32 = 20;
/// Percentage of the pages that the follower uses that must have come to its node.
const HOT_PERCENT: u64 = 90;

/// CPUs of the follower, all on its node.
const ITS_CPUS: [u64; 2] = [2, 3];
/// The node where the follower runs.
const ITS_NODE: NodeId = NodeId(1);
/// Least percentage of the follower's misses that the other node serves at first.
const REMOTE_BEFORE_PERCENT: u64 = 80;
/// Most percentage of the follower's misses that other nodes serve in the end.
const REMOTE_AFTER_PERCENT: u64 = 20;
/// Fewest sampled misses that a percentage is taken of.
const SAMPLES_MIN: u64 = 20;

/// Returns the percentage of the follower's misses over a window that other nodes served. The model's samples and the guest's
/// frames are read without the agent's help, except that the agent asks for samples. Frames are read after the window, so
/// pages that moved in it may be missed.
fn remote_percent(page: Page<'_>, guest: &Guest, blocks: &MemoryBlocks) -> anyhow::Result<u64> {
    let mut since = ITS_CPUS.map(|cpu| page.samples_taken(cpu));
    std::thread::sleep(WINDOW);
    let frames: BTreeSet<u64> = frames(guest)?.into_iter().collect();
    let (mut all, mut remote) = (0, 0);
    for (cpu, since) in ITS_CPUS.into_iter().zip(&mut since) {
        let samples = page.take_samples(cpu, since).samples;
        for sample in samples.iter().filter(|sample| frames.contains(&sample.frame)) {
            all += 1;
            remote += u64::from(blocks.node_of(sample.frame) != Some(ITS_NODE));
        }
    }
    ensure!(
        all >= SAMPLES_MIN,
        "only {all} of the guest's misses were sampled"
    );
    Ok(remote * 100 / all)
}

/// Sets the policy, which the agent refuses while the guest is paused.
fn set_carrefour(inside: &Inside, guest: &Guest) -> anyhow::Result<()> {
    let set = || policy(inside, &["set", "follower", "first-touch+carrefour"]);
    let failed = |error: virt::error::Error| anyhow!("{}", error.message());
    guest.domain.suspend().map_err(failed)?;
    wait_until("the agent to refuse a policy for a paused guest", SOON, || {
        Ok(match set()? {
            Err(why) if why.contains("paused") => Look::Done(()),
            other => Look::NotYet(format!("{other:?}")),
        })
    })?;
    guest.domain.resume().map_err(failed)?;
    let answer = wait_until("the agent to accept it again", SOON, || {
        Ok(match set()? {
            Ok(answer) => Look::Done(answer),
            Err(why) => Look::NotYet(why),
        })
    })?;
    ensure!(
        answer["notes"].to_string().contains("estimated with a model"),
        "expected the answer to say that a model estimates misses, saw {answer}"
    );
    Ok(())
}

/// The pages that a guest uses come to the node where it runs, and its other pages stay. While the guest is paused, the agent
/// refuses the policy.
pub(super) fn carrefour(inside: &mut Inside) -> anyhow::Result<()> {
    // The model rests first: a killed agent may have left it running, and guests boot faster without it.
    let page = modelled_pmu::find(Path::new("/"))?.context("this host has no modelled PMU")?;
    page.rest();
    let nodes = "0-1".parse()?;
    let blocks =
        memory_blocks::read(Path::new("/"), &nodes)?.context("this kernel lists no memory blocks")?;
    // The follower's vCPU has the CPUs of node 1, but is not pinned.
    let mut spec = GuestSpec::new("follower")
        .doing(Behaviour::walking(HOT_KIB as u32, 0).with_touch(COLD_MIB))
        .cpus(Cpus::Set("2-3".to_owned()));
    spec.extra_xml = home_of_operator("0-1");
    let guest = inside.create(&spec)?;
    guest.move_to(0)?;
    inside.note(format!("before: {:?} MiB", in_mib(&guest.pages_per_node()?)));
    // An emulated host makes a hundredth of the accesses that Carrefour's threshold is meant for.
    let settings = inside.dir().join("carrefour.toml");
    std::fs::write(&settings, "[memory.carrefour]\naccesses_per_us_min = 0.001\n")?;
    let agent = start_agent_with(inside, &["--config", &settings.display().to_string()])?;
    wait_known(inside, "follower")?;
    let remote_before = remote_percent(page, &guest, &blocks)?;
    ensure!(
        remote_before >= REMOTE_BEFORE_PERCENT,
        "expected node 0 to serve the guest's misses at first, saw {remote_before} percent from other nodes than its own"
    );

    set_carrefour(inside, &guest)?;
    wait_until("pages to be sampled", SOON, || {
        let shown = policy(inside, &["show", "follower"])?.map_err(|why| anyhow!(why))?["vms"][0].clone();
        let is_sampled =
            shown["memory_policy"] == "first-touch+carrefour" && shown["pages_sampled_by"] == "model";
        Ok(match is_sampled {
            true => Look::Done(()),
            false => Look::NotYet(shown.to_string()),
        })
    })?;
    let hot = HOT_KIB / 4;
    let begin = Instant::now();
    wait_until("the pages that the guest uses to be on its node", SOON, || {
        let there = pages_on(&guest, 1)?;
        Ok(match there * 100 >= hot * HOT_PERCENT {
            true => Look::Done(()),
            false => Look::NotYet(format!("{there} of {hot} pages")),
        })
    })?;
    let pages = guest.pages_per_node()?;
    inside.note(format!(
        "{:.1} s later: {:?} MiB, of which it uses {} MiB",
        begin.elapsed().as_secs_f64(),
        in_mib(&pages),
        HOT_KIB >> 10
    ));
    let remote = remote_percent(page, &guest, &blocks)?;
    inside.note(format!(
        "misses that other nodes served: {remote_before} percent before, {remote} after"
    ));
    ensure!(
        remote <= REMOTE_AFTER_PERCENT,
        "expected the guest's own node to serve its misses, saw {remote} percent from other nodes"
    );
    let stayed = pages_on(&guest, 0)?;
    ensure!(
        stayed * PAGE_BYTES >= u64::from(COLD_MIB) << 20,
        "expected the {COLD_MIB} MiB that the guest does not use still on node 0, saw {pages:?} pages"
    );
    stop(agent)
}

//! A small version of a stock host: two nodes of two last-level caches of two CPUs each, and a kernel that balances. As in
//! `arrange`, each boot first has an agent that only observes, which stands for no agent, and then an agent that decides.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use homenode_testbed_guest::Behaviour;

use super::agent::{start_agent_with, stop};
use super::arrange::{DECIDED, Seen, decisions, note, resting_model, status, wait_counted, watch};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec};
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// CPUs per last-level cache.
const CPUS_PER_CACHE: u32 = 2;
/// All CPUs, as a bit mask for libvirt.
const ALL_CPUS: u8 = 0xff;
/// Most misses of the victims once polluters are elsewhere, in percent of their misses next to polluters.
const PARTED_PERCENT: u64 = 70;
/// How long the kernel's balancing, or an agent, may take to bring the guest's memory to it. The agent first leaves the guest
/// to the kernel for a minute of work, and under emulation cycles and scans are slow.
const BROUGHT: Duration = Duration::from_secs(900);
/// For how long the guest's accesses must then stay local.
const PEACE: Duration = Duration::from_secs(60);
/// Least share of a guest's accesses that is local if the guest runs next to its memory.
const LOCAL_MIN: f64 = 0.8;
/// Most moves of each of the guest's pages meanwhile, on average: once, and more for pages that the guest's kernel frees and
/// allocates again.
const MOVED_MAX: f64 = 1.25;

/// A guest with two busy vCPUs: one thread computes, one walks memory.
fn busy_walker(name: &str, bytes: u64, think: u32, cpus: [u32; 2]) -> GuestSpec {
    let doing = Behaviour {
        busy: 1,
        ..Behaviour::walking((bytes >> 10) as u32, think)
    };
    let pins = cpus.map(|cpu| cpu.to_string()).to_vec();
    GuestSpec::new(name)
        .vcpus(2)
        .doing(doing)
        .cpus(Cpus::Pinned(pins))
}

/// Returns the caches of the CPUs on which a guest's vCPUs ran last.
fn caches_of(guest: &Guest) -> anyhow::Result<Vec<u32>> {
    let cpus = guest.process.vcpu_last_cpu()?;
    let mut caches: Vec<u32> = cpus.into_values().map(|cpu| cpu / CPUS_PER_CACHE).collect();
    caches.sort_unstable();
    caches.dedup();
    Ok(caches)
}

/// On a full host, each cache has a vCPU of a polluter and a vCPU of a victim. Checks that the agent gives the polluters caches
/// of their own.
pub(super) fn polluters_parted(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    let specs = [
        busy_walker("polluter0", 8 * LLC_BYTES, 0, [0, 2]),
        busy_walker("victim0", LLC_BYTES / 2, 20, [1, 3]),
        busy_walker("polluter1", 8 * LLC_BYTES, 0, [4, 6]),
        busy_walker("victim1", LLC_BYTES / 2, 20, [5, 7]),
    ];
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    for guest in &guests {
        guest.run_on(ALL_CPUS)?;
    }
    let all: Vec<&Guest> = guests.iter().collect();
    let victims = [all[1], all[3]];
    let watcher = start_agent_with(inside, &["--policies", "default"])?;
    wait_counted(inside, &all)?;
    let before = watch(inside, page, &victims)?;
    note(inside, "stock kernel", &victims, &before);
    stop(watcher)?;

    let agent = start_agent_with(inside, &[])?;
    wait_counted(inside, &all)?;
    let begin = Instant::now();
    let parted = wait_until("polluters on caches of their own", DECIDED, || {
        let on: Vec<Vec<u32>> = all
            .iter()
            .map(|guest| caches_of(guest))
            .collect::<Result<_, _>>()?;
        let shared = |at: usize| {
            let others = (0..on.len()).filter(|other| *other != at);
            others
                .flat_map(|other| &on[other])
                .any(|cache| on[at].contains(cache))
        };
        if shared(0) || shared(2) {
            return Ok(Look::NotYet(format!("they run on caches {on:?}")));
        }
        let seen = watch(inside, page, &victims)?;
        let is_less = |(before, now): (&Seen, &Seen)| {
            now.misses_percent * 100 <= before.misses_percent * PARTED_PERCENT
        };
        Ok(match before.iter().zip(&seen).all(is_less) {
            true => Look::Done(seen),
            false => Look::NotYet(format!("on caches {on:?}: {} and {}", seen[0], seen[1])),
        })
    });
    for guest in &all {
        for [policy, action, reason] in decisions(&agent, guest) {
            inside.note(format!("{}: {policy} {action}: {reason}", guest.spec.name));
        }
    }
    note(inside, "beside the agent", &victims, &parted?);
    inside.note(format!(
        "{:.0} s after it took over",
        begin.elapsed().as_secs_f64()
    ));
    stop(agent)
}

/// Waits until a guest's accesses have been local for some time. Returns the page moves between nodes since `last`, divided by
/// the number of pages. The result may be small, since pages that the kernel never sees used stay where they are.
fn brought_home(inside: &Inside, guest: &Guest, mut last: BTreeMap<u32, u64>) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let mut came = 0;
    let mut look = || -> anyhow::Result<u64> {
        let now = guest.pages_per_node()?;
        let grown = |(node, pages): (&u32, &u64)| pages.saturating_sub(last.get(node).copied().unwrap_or(0));
        came += now.iter().map(grown).sum::<u64>();
        last = now;
        Ok(came)
    };
    let mut local_since = None;
    wait_until("a guest to run beside its memory for a minute", BROUGHT, || {
        look()?;
        let local = status(inside, guest)?["local_access_ratio"].as_f64();
        if local.is_none_or(|local| local < LOCAL_MIN) {
            local_since = None;
        } else {
            local_since.get_or_insert_with(Instant::now);
        }
        Ok(match local_since {
            Some(since) if since.elapsed() >= PEACE => Look::Done(()),
            _ => Look::NotYet(format!(
                "of its accesses {local:?} are local, on {:?}",
                guest.process.vcpu_last_cpu()?
            )),
        })
    })?;
    let moved = look()? as f64 / guest.pages_per_node()?.values().sum::<u64>().max(1) as f64;
    inside.note(format!(
        "local for a minute {:.0} s later; {moved:.2} times its pages moved",
        begin.elapsed().as_secs_f64()
    ));
    Ok(moved)
}

/// Checks that a guest that runs away from its memory gets together with it, by the kernel or by the agent, and that its pages
/// move at most once.
pub(super) fn brought_once(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    let away = |name: &str, cpu: &str| {
        GuestSpec::new(name)
            .doing(Behaviour::walking(((2 * LLC_BYTES) >> 10) as u32, 0))
            .cpus(Cpus::Pinned(vec![cpu.to_owned()]))
    };
    for (who, arguments) in [
        ("stock kernel", &["--policies", "default"][..]),
        ("beside the agent", &[][..]),
    ] {
        let guests = inside.create_at_once(&[away("away", "0"), away("other", "4")])?;
        for guest in &guests {
            guest.wait_ready()?;
        }
        let [guest, _] = guests.as_slice() else {
            bail!("expected two guests");
        };
        guest.move_to(1)?;
        // Moves count from here on, because the kernel may bring the guest and its memory together before the agent counts the
        // guest.
        let begun = guest.pages_per_node()?;
        guest.run_on(ALL_CPUS)?;
        let agent = start_agent_with(inside, arguments)?;
        wait_counted(inside, &[guest])?;
        let seen = watch(inside, page, &[guest])?;
        note(inside, who, &[guest], &seen);
        let moved = brought_home(inside, guest, begun);
        for [policy, action, reason] in decisions(&agent, guest) {
            inside.note(format!("{policy} {action}: {reason}"));
        }
        let moved = moved?;
        let seen = watch(inside, page, &[guest])?;
        note(inside, who, &[guest], &seen);
        stop(agent)?;
        ensure!(
            moved <= MOVED_MAX,
            "expected each page to move at most once, {who}; pages moved {moved:.2} times on average"
        );
        for guest in &guests {
            inside.destroy(guest)?;
        }
    }
    Ok(())
}

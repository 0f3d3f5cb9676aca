//! Own misses on a real kernel, with counters of the modelled PMU: a victim and a thrasher are at home on one node and share its
//! cache, and the victim's permit covers what it misses alone, but not what it misses beside the thrasher.
//!
//! An agent that charges all counted misses comes first, and throttles the victim. An agent that counts the victim's own misses
//! comes second. Cases judge by the kernel: the CPUs of the thrasher's vCPU, and the victim's `cpu.max` and `cpu.stat`.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;
use serde_json::Value;

use super::agent::{SOON, home_of_operator, limits, start_agent_with, stop};
use super::arrange::{DECIDED, resting_model};
use super::counted::wait_counted;
use super::permits::{permit, ran_ns, throttled_us, wait_limits};
use crate::inside::Inside;
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// CPUs of the node on which both guests are at home, and of the other.
const HOME: [u32; 2] = [0, 1];
const AWAY: [u32; 2] = [2, 3];
/// For how long the victim is watched under each agent.
const WATCHED: Duration = Duration::from_secs(40);
/// The victim's permit is this fraction of its misses beside the thrasher.
const PERMIT_PART: u64 = 3;
/// Upper limit for the CPU time of a throttled victim, as a share of its CPU time without a limit.
const THROTTLED_MAX: f64 = 0.8;
const FREE_MIN: f64 = 0.9;

/// A guest at home on node 0 that reads this much memory repeatedly.
fn walker(name: &str, bytes: u64, think: u32) -> GuestSpec {
    let mut spec = GuestSpec::new(name).doing(Behaviour::walking((bytes >> 10) as u32, think));
    spec.extra_xml = home_of_operator("0");
    spec
}

/// Starts an agent that charges these misses. Emulation is slow, so the settings have lower thresholds and longer windows.
fn start(inside: &Inside, charged: &str) -> anyhow::Result<Program> {
    let path = inside.dir().join(format!("{charged}.toml"));
    std::fs::write(
        &path,
        format!(
            "[permits.attribution]\ncharged = \"{charged}\"\naway_share = 0.12\nfew_per_ms = 20.0\nwindow_most = \"60s\"\n"
        ),
    )?;
    start_agent_with(inside, &["--config", &path.display().to_string()])
}

fn is_on(guest: &Guest, cpus: [u32; 2]) -> anyhow::Result<bool> {
    let affinity = guest.process.vcpu_affinity()?;
    let is_within = |on: &Vec<u32>| !on.is_empty() && on.iter().all(|cpu| cpus.contains(cpu));
    Ok(affinity.values().all(is_within))
}

fn wait_on(what: &str, limit: Duration, guests: &[&Guest], cpus: [u32; 2]) -> anyhow::Result<()> {
    wait_until(what, limit, || {
        let mut found = Vec::new();
        for guest in guests {
            if !is_on(guest, cpus)? {
                found.push(format!(
                    "{}: {:?}",
                    guest.spec.name,
                    guest.process.vcpu_affinity()?
                ));
            }
        }
        Ok(match found.is_empty() {
            true => Look::Done(()),
            false => Look::NotYet(found.join(", ")),
        })
    })
}

/// The CPU time that the kernel gave the victim, and how it was limited.
struct Got {
    /// Share of the time in which the victim's vCPU ran.
    ran: f64,
    throttled_us: u64,
    /// Share of the time in which the thrasher was away.
    away: f64,
}

impl fmt::Display for Got {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the victim ran {:.1} percent of the time and was throttled {} us; the thrasher was away {:.1} percent of it",
            100.0 * self.ran,
            self.throttled_us,
            100.0 * self.away
        )
    }
}

fn watch(victim: &Guest, thrasher: &Guest) -> anyhow::Result<Got> {
    let (ran, throttled, begin) = (ran_ns(victim)?, throttled_us(victim)?, Instant::now());
    let (mut looks, mut away) = (0_u32, 0_u32);
    while begin.elapsed() < WATCHED {
        looks += 1;
        away += u32::from(is_on(thrasher, AWAY)?);
        std::thread::sleep(Duration::from_millis(500));
    }
    let took = begin.elapsed().as_nanos() as f64;
    Ok(Got {
        ran: (ran_ns(victim)? - ran) as f64 / took,
        // The cgroup's counter starts at zero again if libvirt creates the cgroup again.
        throttled_us: throttled_us(victim)?.saturating_sub(throttled),
        away: f64::from(away) / f64::from(looks.max(1)),
    })
}

fn shown(inside: &Inside) -> anyhow::Result<Value> {
    Ok(permit(inside, &["show", "victim"])?["vms"][0].clone())
}

/// A victim beside a thrasher keeps its permit's full CPU if its own misses are charged, and is throttled if all counted misses
/// are. A kill in a window brings the thrasher back.
pub(super) fn own_misses(inside: &mut Inside) -> anyhow::Result<()> {
    resting_model()?;
    let specs = [
        walker("victim", LLC_BYTES / 2, 20),
        walker("thrasher", 8 * LLC_BYTES, 0),
    ];
    let guests = inside.create_at_once(&specs)?;
    let [victim, thrasher] = guests.as_slice() else {
        anyhow::bail!("expected two guests, saw {}", guests.len());
    };
    for guest in [victim, thrasher] {
        guest.wait_ready()?;
        guest.move_to(0)?;
    }
    let agent = start(inside, "counted")?;
    wait_counted(inside, ["thrasher", "victim"])?;
    wait_on("both to run at home", SOON, &[victim, thrasher], HOME)?;
    let free = watch(victim, thrasher)?;
    let beside = shown(inside)?["units_per_slice"]
        .as_u64()
        .context("the victim's misses are not counted")?;
    inside.note(format!("without a permit: {beside} misses per slice; {free}"));

    let booked = (beside / PERMIT_PART).max(1);
    permit(inside, &["set", "victim", &booked.to_string()])?;
    let found = wait_limits(victim, "the victim to be throttled", |found| !found.is_empty())?;
    inside.note(format!(
        "all counted misses are charged, permit {booked}: {found:?}"
    ));
    let counted = watch(victim, thrasher)?;
    inside.note(format!("all counted misses are charged: {counted}"));
    ensure!(
        counted.throttled_us > 0 && counted.ran < THROTTLED_MAX * free.ran && counted.away == 0.0,
        "expected the victim throttled and no thrasher moved to another cache: {counted}; without a permit {free}"
    );
    stop(agent)?;

    // The kill in a window comes first, because the hourly budget allows only one window of emulated length.
    let mut agent = start(inside, "own")?;
    wait_on("the thrasher to leave the cache", DECIDED, &[thrasher], AWAY)?;
    agent.kill()?;
    wait_back(thrasher)?;
    inside.note("killed in a window: the guard brought the thrasher back");

    let agent = start(inside, "own")?;
    wait_on("both to run at home again", SOON, &[victim, thrasher], HOME)?;
    wait_on(
        "the thrasher to leave the cache again",
        DECIDED,
        &[thrasher],
        AWAY,
    )?;
    let own = wait_until("the victim's own misses to be counted", DECIDED, || {
        let shown = shown(inside)?;
        let charged = shown["charged"].as_str().unwrap_or_default();
        Ok(
            match charged.contains("percent of its misses") && limits(victim)?.is_empty() {
                true => Look::Done(format!(
                    "{} misses per slice: {charged}",
                    shown["units_per_slice"]
                )),
                false => Look::NotYet(shown.to_string()),
            },
        )
    })?;
    inside.note(format!("own misses are charged: {own}"));
    let kept = watch(victim, thrasher)?;
    inside.note(format!("own misses are charged: {kept}"));
    ensure!(
        kept.throttled_us == 0 && limits(victim)?.is_empty() && kept.ran > FREE_MIN * free.ran,
        "expected the victim to use its full CPU: {kept}; without a permit {free}"
    );

    stop(agent)
}

/// Waits until the guard of a killed agent has let a guest run on all CPUs again.
fn wait_back(guest: &Guest) -> anyhow::Result<()> {
    wait_until(
        "the guard of the killed agent to bring the thrasher back",
        SOON,
        || {
            let affinity = guest.process.vcpu_affinity()?;
            let is_free = affinity.values().all(|on| on.len() == HOME.len() + AWAY.len());
            Ok(match is_free {
                true => Look::Done(()),
                false => Look::NotYet(format!("{affinity:?}")),
            })
        },
    )
}

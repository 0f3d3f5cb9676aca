//! Homes decided from counters, here those of the modelled PMU. Each case compares two agents in one boot: first an agent that
//! only observes and counts, which stands for no agent, and then an agent that decides. Cases judge by where the kernel ran
//! and placed guests, and by the model's counts; the agent's statements are checked against those.
//!
//! Two guests are busy at a time, which is as many as the emulated host can handle.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_formats::pmu_region::{Counts, Page};
use homenode_kernel::modelled_pmu;
use homenode_kvm::domain::NAMESPACE;
use homenode_testbed_guest::Behaviour;
use serde_json::{Value, json};
use virt::sys;

use super::agent::{SOON, home_of_operator, start_agent_with, stop, wait_memory};
use super::counted::{counts, tag};
use crate::inside::Inside;
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// Length of a window in which accesses are counted.
const WINDOW: Duration = Duration::from_secs(20);
/// How long the agent must leave a lone guest alone.
const MINUTE: Duration = Duration::from_secs(60);
/// Memory that the lone guest wrote once, in MiB.
const COLD_MIB: u32 = 20;
/// How long the agent may take to notice a problem, try a remedy and judge it: under emulation a cycle takes seconds.
pub(super) const DECIDED: Duration = Duration::from_secs(420);
/// Most misses of a polluter once the two are on different caches, in percent of its misses while they shared one.
const PARTED_PERCENT: u64 = 50;
/// CPUs per node of this host.
const CPUS_PER_NODE: u32 = 2;
/// How long the agent must not try a move again after it did not pay.
const PEACE: Duration = Duration::from_secs(30);
/// Actions that restrict where a guest's vCPUs or memory may be.
const PLACING: [&str; 3] = ["set-home", "pin-vcpus", "move-pages"];

/// A guest that reads this much memory repeatedly.
fn walker(name: &str, bytes: u64) -> GuestSpec {
    GuestSpec::new(name).doing(Behaviour::walking((bytes >> 10) as u32, 0))
}

/// A guest's activity in a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    misses_per_s: u64,
    /// Percentage of the guest's references to the cache that missed.
    pub(super) misses_percent: u64,
    /// Percentage of the guest's accesses to memory that were remote; `None` if unknown.
    remote_percent: Option<u64>,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen {
            misses_per_s,
            misses_percent,
            ..
        } = self;
        let remote = self
            .remote_percent
            .map_or("unknown".to_owned(), |n| format!("{n}%"));
        write!(
            f,
            "{misses_per_s} misses/s, {misses_percent}% of references, remote {remote}"
        )
    }
}

/// Returns the model of caches that a case counts with. It rests until an agent starts it, since guests boot faster without
/// it.
pub(super) fn resting_model() -> anyhow::Result<Page<'static>> {
    let page = modelled_pmu::find(Path::new("/"))?.context("this host has no modelled PMU")?;
    page.rest();
    Ok(page)
}

/// Returns what the agent reports about a guest.
pub(super) fn status(inside: &Inside, guest: &Guest) -> anyhow::Result<Value> {
    Ok(inside.told("vm", &[&guest.spec.name])?["vms"][0].clone())
}

/// Waits until the agent counts these guests' cache misses.
pub(super) fn wait_counted(inside: &Inside, guests: &[&Guest]) -> anyhow::Result<()> {
    for guest in guests {
        let what = format!("the misses of {} to be counted", guest.spec.name);
        wait_until(&what, SOON, || {
            let seen = match inside.ask("vm", &[&guest.spec.name])? {
                Ok(answer) => answer["vms"][0].clone(),
                Err((_, said)) => return Ok(Look::NotYet(said)),
            };
            Ok(match seen["llc_miss_rate"].as_f64() {
                Some(_) if seen["counted_by"] == "model" => Look::Done(()),
                _ => Look::NotYet(seen.to_string()),
            })
        })?;
    }
    Ok(())
}

/// Watches these guests for a window. Misses come from the model's page, remote shares from the agent, sampled during the
/// window.
pub(super) fn watch(inside: &Inside, page: Page<'_>, guests: &[&Guest]) -> anyhow::Result<Vec<Seen>> {
    let tags = guests.iter().map(|guest| {
        tag(page, guest)?.with_context(|| format!("no memory frame of guest {} has a tag", guest.spec.name))
    });
    let tags = tags.collect::<anyhow::Result<Vec<u8>>>()?;
    let all = || -> Vec<Counts> { tags.iter().map(|tag| counts(page, *tag)).collect() };
    let (before, begin) = (all(), Instant::now());
    let mut local = vec![Vec::new(); guests.len()];
    while begin.elapsed() < WINDOW {
        for (guest, local) in guests.iter().zip(&mut local) {
            local.extend(status(inside, guest)?["local_access_ratio"].as_f64());
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    let (after, took) = (all(), begin.elapsed());
    let grown = before.iter().zip(&after).zip(&local);
    let seen = grown.map(|((before, after), local)| {
        let misses = after.misses.wrapping_sub(before.misses);
        let references = after.references.wrapping_sub(before.references);
        let mean = local.iter().sum::<f64>() / local.len().max(1) as f64;
        Seen {
            misses_per_s: (misses as f64 / took.as_secs_f64()) as u64,
            misses_percent: misses * 100 / references.max(1),
            remote_percent: (!local.is_empty()).then(|| ((1.0 - mean) * 100.0).round() as u64),
        }
    });
    Ok(seen.collect())
}

pub(super) fn note(inside: &Inside, when: &str, guests: &[&Guest], seen: &[Seen]) {
    for (guest, seen) in guests.iter().zip(seen) {
        inside.note(format!("{when}: {} {seen}", guest.spec.name));
    }
}

/// Returns the policy, action and reason of each of the agent's decisions about a guest so far.
pub(super) fn decisions(agent: &Program, guest: &Guest) -> Vec<[String; 3]> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let lines = agent.json();
    let events = lines
        .iter()
        .flat_map(|line| line["events"].as_array().into_iter().flatten());
    let decided = events.filter(|event| event["event"] == "decided" && event["name"] == guest.spec.name);
    let told = |event: &Value| ["policy", "action", "reason"].map(|key| text(&event[key]));
    decided.map(told).collect()
}

/// Nodes on which a guest's vCPUs ran last.
fn runs_on(guest: &Guest) -> anyhow::Result<BTreeSet<u32>> {
    let cpus = guest.process.vcpu_last_cpu()?;
    Ok(cpus.into_values().map(|cpu| cpu / CPUS_PER_NODE).collect())
}

/// Returns the CPUs that a guest's vCPUs and its QEMU's main thread may run on, and the memory policy of its RAM.
fn freedom(guest: &Guest) -> anyhow::Result<String> {
    let vcpus = guest.process.vcpu_affinity()?;
    let emulator = std::fs::read_to_string(format!("/proc/{}/status", guest.process.0))?;
    let emulator = emulator
        .lines()
        .find(|line| line.starts_with("Cpus_allowed_list"));
    let policy = guest.memory_policy()?;
    Ok(format!("vCPUs {vcpus:?}, emulator {emulator:?}, memory {policy}"))
}

/// Checks that a lone guest that gains nothing from a home keeps, for a minute, the affinity that it has without an agent. The
/// memory that it reads fits into the cache. Any other guest would gain from a home if its memory happened to be away from where
/// it runs, which the kernel may cause.
pub(super) fn alone_free(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    let doing = Behaviour {
        busy: 1,
        ..Behaviour::walking(((LLC_BYTES / 4) >> 10) as u32, 0)
    };
    let guest = inside.create(&GuestSpec::new("alone").vcpus(2).doing(doing.with_touch(COLD_MIB)))?;
    let before = freedom(&guest)?;
    let watcher = start_agent_with(inside, &["--policies", "default"])?;
    wait_counted(inside, &[&guest])?;
    let none = watch(inside, page, &[&guest])?;
    note(inside, "without an agent", &[&guest], &none);
    stop(watcher)?;

    let agent = start_agent_with(inside, &[])?;
    wait_counted(inside, &[&guest])?;
    let begin = Instant::now();
    while begin.elapsed() < MINUTE {
        let (now, said) = (freedom(&guest)?, status(inside, &guest)?);
        ensure!(
            now == before,
            "expected the guest's affinity as before, {before}; saw {now}"
        );
        ensure!(said["home"].is_null(), "expected no home, the agent says {said}");
        std::thread::sleep(Duration::from_secs(2));
    }
    let placed = decisions(&agent, &guest);
    let placed = placed
        .iter()
        .find(|[_, action, _]| PLACING.contains(&action.as_str()));
    ensure!(
        placed.is_none(),
        "expected the agent to leave the only guest alone, saw {placed:?}"
    );
    let table = std::process::Command::new(inside.homenode()?)
        .arg("vm")
        .output()?;
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    let row = table
        .lines()
        .find(|line| line.contains("alone"))
        .unwrap_or_default();
    ensure!(
        row.split_whitespace().any(|word| word == "none"),
        "expected `homenode vm` to show no home of the guest, saw {row:?}"
    );
    let with = watch(inside, page, &[&guest])?;
    note(inside, "beside the agent", &[&guest], &with);
    stop(agent)
}

/// Two guests on one node.
struct Together {
    guests: Vec<Guest>,
    /// The CPUs and memory policy of each guest before it had a home.
    free: Vec<String>,
    /// How each guest used the cache on that node.
    seen: Vec<Seen>,
}

/// Creates two guests for which the operator chose node 0 as home, where they run and have their memory. Then the operator
/// lifts that choice, so the next agent finds both on node 0.
fn together(inside: &Inside, page: Page<'_>, bytes: u64) -> anyhow::Result<Together> {
    let specs = ["left", "right"].map(|name| {
        let mut spec = walker(name, bytes);
        spec.extra_xml = home_of_operator("0");
        spec
    });
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
        guest.move_to(0)?;
    }
    let free = guests.iter().map(freedom).collect::<anyhow::Result<_>>()?;
    // The published policy keeps a home that the operator chose, so this has the same effect as pinning both guests there without
    // an agent.
    let agent = start_agent_with(inside, &["--policies", "tavo", "--keep"])?;
    let both: Vec<&Guest> = guests.iter().collect();
    for guest in &guests {
        wait_memory(inside, guest, 0, SOON)?;
    }
    wait_until("both to run on node 0", SOON, || {
        let nodes = [runs_on(&guests[0])?, runs_on(&guests[1])?];
        Ok(match nodes.iter().all(|nodes| nodes.iter().eq([&0])) {
            true => Look::Done(()),
            false => Look::NotYet(format!("{nodes:?}")),
        })
    })?;
    wait_counted(inside, &both)?;
    let seen = watch(inside, page, &both)?;
    note(inside, "together", &both, &seen);
    stop(agent)?;
    for guest in &guests {
        let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
        let live = sys::VIR_DOMAIN_AFFECT_LIVE;
        let cleared = guest.domain.set_metadata(kind, None, None, Some(NAMESPACE), live);
        cleared.map_err(|error| anyhow!("{}", error.message()))?;
    }
    Ok(Together { guests, free, seen })
}

/// Two guests that evict each other from one cache are parted, and then have few misses.
pub(super) fn polluters_parted(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    // One of these guests fits into a node's cache, two do not.
    let Together {
        guests, seen: before, ..
    } = together(inside, page, LLC_BYTES / 8 * 5)?;
    let both: Vec<&Guest> = guests.iter().collect();
    let agent = start_agent_with(inside, &[])?;
    wait_counted(inside, &both)?;
    let begin = Instant::now();
    let after = wait_until("both to miss less, on nodes of their own", DECIDED, || {
        let nodes = [runs_on(both[0])?, runs_on(both[1])?];
        if !nodes[0].is_disjoint(&nodes[1]) {
            return Ok(Look::NotYet(format!("they run on nodes {nodes:?}")));
        }
        let seen = watch(inside, page, &both)?;
        let is_less = before.iter().zip(&seen).all(|(before, seen)| {
            let misses = seen.misses_per_s * 100 <= before.misses_per_s * PARTED_PERCENT;
            misses && seen.misses_percent * 100 <= before.misses_percent * PARTED_PERCENT
        });
        Ok(match is_less {
            true => Look::Done(seen),
            false => Look::NotYet(format!("on nodes {nodes:?}: {} and {}", seen[0], seen[1])),
        })
    })?;
    note(inside, "parted", &both, &after);
    inside.note(format!(
        "{:.0} s after the agent took over",
        begin.elapsed().as_secs_f64()
    ));
    let reasons: Vec<_> = both.iter().flat_map(|guest| decisions(&agent, guest)).collect();
    ensure!(
        reasons.iter().any(|[policy, ..]| policy == "arrange"),
        "expected the agent to have parted the two guests; it decided {reasons:?}"
    );
    for [policy, action, reason] in reasons {
        inside.note(format!("{policy} {action}: {reason}"));
    }
    stop(agent)
}

/// Waits until the agent makes a decision about one of these guests whose reason contains this text; returns the guest.
fn wait_reason<'a>(agent: &Program, guests: &[&'a Guest], text: &str) -> anyhow::Result<&'a Guest> {
    let what = format!("a decision with `{text}` in its reason");
    wait_until(&what, DECIDED, || {
        let of = |guest: &&&Guest| {
            let decided = decisions(agent, guest);
            decided
                .iter()
                .any(|[policy, _, reason]| policy == "arrange" && reason.contains(text))
        };
        Ok(guests.iter().find(of).map_or_else(
            || {
                Look::NotYet(format!(
                    "{:?}",
                    guests
                        .iter()
                        .map(|guest| decisions(agent, guest))
                        .collect::<Vec<_>>()
                ))
            },
            |guest| Look::Done(*guest),
        ))
    })
}

/// Two guests that miss as often apart as together are put on different nodes on trial. That does not pay, so the move is undone
/// and, for now, not tried again.
pub(super) fn move_undone(inside: &mut Inside) -> anyhow::Result<()> {
    let page = resting_model()?;
    // The guests read more than any cache holds. A larger share of a cache does not help them, but no counter shows that
    // beforehand.
    let Together {
        guests,
        free,
        seen: before,
    } = together(inside, page, 8 * LLC_BYTES)?;
    let both: Vec<&Guest> = guests.iter().collect();
    let agent = start_agent_with(inside, &[])?;
    let tried = wait_reason(&agent, &both, "trial")?;
    inside.note(format!("{} is tried elsewhere", tried.spec.name));
    let undone = wait_reason(&agent, &both, "undone:")?;
    for guest in &both {
        for [policy, action, reason] in decisions(&agent, guest) {
            inside.note(format!("{}: {policy} {action}: {reason}", guest.spec.name));
        }
    }
    let at = both
        .iter()
        .position(|guest| std::ptr::eq(*guest, undone))
        .unwrap_or_default();
    let is_back = || -> anyhow::Result<Look<String>> {
        let (said, now) = (status(inside, undone)?, freedom(undone)?);
        let home = &said["home"];
        // The guest has no home and is free again, or has the home where the agent found it.
        let is_back = (home.is_null() && now == free[at]) || *home == json!([0]);
        Ok(match is_back {
            true => Look::Done(home.to_string()),
            false => Look::NotYet(format!("home {home}, {now}; free it had {}", free[at])),
        })
    };
    let back = wait_until("the guest to be back where it was", SOON, is_back)?;
    inside.note(format!("{} is back, its home {back}", undone.spec.name));
    // Stray pages may still come home. Only decisions of the policy `arrange` count as trying again.
    let arranged = || {
        let all = both.iter().flat_map(|guest| decisions(&agent, guest));
        all.filter(|[policy, ..]| policy == "arrange").count()
    };
    let (decided, begin) = (arranged(), Instant::now());
    let after = watch(inside, page, &both)?;
    note(inside, "undone", &both, &after);
    note(inside, "before", &both, &before);
    std::thread::sleep(PEACE.saturating_sub(begin.elapsed()));
    ensure!(
        arranged() == decided,
        "expected no further decision after a move that did not pay, saw {}",
        arranged() - decided
    );
    stop(agent)
}

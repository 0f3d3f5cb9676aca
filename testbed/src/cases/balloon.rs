//! Memory that the agent takes from a guest through its balloon, and returns. Cases judge by libvirt's figures for the
//! balloon.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::Behaviour;
use serde_json::Value;

use super::agent::{SOON, home_of_operator, start_agent_with, stop};
use super::memory::wait_known;
use crate::inside::Inside;
use crate::inside::guest::{Balloon, Guest, GuestSpec};
use crate::inside::wait::{Look, wait_until};

/// Memory of the guest, and how much of it the guest touches, in MiB.
const MEMORY_MIB: u64 = 256;
const TOUCHED_MIB: u32 = 120;
/// The least memory that the operator lets the guest keep.
const FLOOR_MIB: u64 = 176;
/// A guest with only this much unused memory is under pressure.
const LEFT_MIB: u64 = 6;
/// After this time the guest has reported its memory again.
const REPORTED: Duration = Duration::from_secs(10);
/// How long taking memory may last: it is taken in steps, and only once the estimate has settled.
const TAKEN: Duration = Duration::from_secs(240);

fn spec(name: &str) -> GuestSpec {
    let mut spec = GuestSpec::new(name).doing(Behaviour::idle().with_touch(TOUCHED_MIB));
    spec.memory_mib = MEMORY_MIB;
    spec.extra_xml = home_of_operator("1");
    spec
}

/// Guests from which the agent can take nothing, whatever their operator allows, and the agent's reasons.
const UNWILLING: [(&str, Balloon, &str); 2] = [
    (
        "undriven",
        Balloon::Undriven,
        "is virtio_balloon loaded in the guest?",
    ),
    ("bare", Balloon::Missing, "has a memory floor and no balloon"),
];
/// Memory of each of these guests.
const UNWILLING_MIB: u64 = 128;

/// Returns the guest's memory, as libvirt reports it.
pub(super) fn has_mib(guest: &Guest) -> anyhow::Result<u64> {
    let info = guest.domain.info();
    Ok(info.map_err(|error| anyhow!("{}", error.message()))?.memory >> 10)
}

fn wait_has(guest: &Guest, what: &str, limit: Duration, is_so: impl Fn(u64) -> bool) -> anyhow::Result<u64> {
    wait_until(what, limit, || {
        let has = has_mib(guest)?;
        Ok(if is_so(has) {
            Look::Done(has)
        } else {
            Look::NotYet(format!("{has} MiB"))
        })
    })
}

/// Checks that guests that do not follow a balloon still have all their memory.
fn ensure_untouched(unwilling: &[Guest]) -> anyhow::Result<()> {
    for guest in unwilling {
        let has = has_mib(guest)?;
        let name = &guest.spec.name;
        ensure!(
            has == UNWILLING_MIB,
            "expected {UNWILLING_MIB} MiB with {name}, saw {has}"
        );
    }
    Ok(())
}

/// The agent takes memory that a guest does not use, and returns it when the guest needs it. When the agent is killed, its guard
/// returns the memory. From guests without a balloon or a balloon driver, the agent takes nothing, and says why.
pub(super) fn overcommit(inside: &mut Inside) -> anyhow::Result<()> {
    let unwilling = UNWILLING.map(|(name, balloon, _)| GuestSpec {
        balloon,
        memory_mib: UNWILLING_MIB,
        ..GuestSpec::new(name)
    });
    let unwilling = inside.create_at_once(&unwilling)?;
    let guest = inside.create(&spec("thrifty"))?;
    guest.switch_to(Behaviour::idle())?;
    let path = inside.dir().join("overcommit.toml");
    std::fs::write(
        &path,
        "[working_set]\nwindow = \"4s\"\ncpu_share_max = 1.0\n[overcommit]\nwhen = \"always\"\nreserve_min = \"24MiB\"\n\
         step = 0.2\nstep_wait = \"4s\"\nbackoff = \"300s\"\n",
    )?;
    let config = path.display().to_string();
    let mut agent = start_agent_with(inside, &["--config", &config])?;
    wait_known(inside, "thrifty")?;
    inside.told("memory", &["set", "thrifty", &format!("{FLOOR_MIB}MiB")])?;
    for (name, ..) in UNWILLING {
        inside.told("memory", &["set", name, &format!("{}MiB", UNWILLING_MIB / 2)])?;
    }
    let begin = Instant::now();
    let is_least = |has| has <= FLOOR_MIB + 2;
    let has = wait_has(&guest, "memory to be taken", TAKEN, is_least)?;
    inside.note(format!(
        "{has} MiB left after {:.0} s",
        begin.elapsed().as_secs_f64()
    ));
    ensure!(
        has >= FLOOR_MIB,
        "expected the guest to have at least its floor, saw {has} MiB"
    );
    for (name, _, said) in UNWILLING {
        let about = |value: &Value| {
            let text = value.to_string();
            text.contains(&format!("VM {name} ")) && text.contains(said)
        };
        agent.wait_json(said, SOON, about)?;
    }
    ensure_untouched(&unwilling)?;
    // The guest reports every 2 s. A report from before the last step shows more memory than the guest now has.
    std::thread::sleep(REPORTED);
    let shown = inside.told("memory", &["show", "thrifty"])?;
    let usable = shown["vms"][0]["memory"]["usable_bytes"]
        .as_u64()
        .with_context(|| format!("no usable_bytes in {shown}"))?
        >> 20;
    let begin = Instant::now();
    let nearly_all = u32::try_from(usable.saturating_sub(LEFT_MIB))?;
    guest.switch_to(Behaviour::idle().with_touch(nearly_all).with_every(1000))?;
    let grown = wait_has(&guest, "memory to be returned", SOON, |now| now >= has + 30)?;
    inside.note(format!(
        "{grown} MiB {:.1} s after it began to use {nearly_all} of {usable} MiB",
        begin.elapsed().as_secs_f64()
    ));
    agent.kill()?;
    wait_has(&guest, "the guard to return all of it", SOON, |now| {
        now >= MEMORY_MIB
    })?;
    inside.note("the guard returned everything");
    ensure_untouched(&unwilling)?;
    stop(start_agent_with(inside, &["--config", &config])?)
}

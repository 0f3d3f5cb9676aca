//! `homenode why` about real guests: one is throttled, one is separated from its memory, one has its cache filled by a
//! neighbour.
//!
//! The test causes all of this, and the agent only records: its data come from the host, and its counters from the model. Only
//! one thing happens at a time, and the same guests are busy before and after it. The emulated CPUs share two real ones, and
//! the model distributes instructions by time, so a third guest's start would change the figures of the others.

use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::ensure;
use homenode_testbed_guest::Behaviour;
use serde_json::Value;

use super::agent::{SOON, start_agent_with, stop};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, GuestSpec};
use crate::inside::libvirtd::run;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::LLC_BYTES;

/// Length of the stretch of time that the test asks about. For four times as long before it, nothing happens.
const WINDOW: Duration = Duration::from_secs(30);
/// Least share of its speed that each guest must have lost to the cause.
const LOST_MIN: f64 = 0.03;
/// Steps of arithmetic that the polluted guest does after each line it reads. Its round through memory must take so long that
/// the polluter goes through the whole cache meanwhile: a guest that reads as fast as the polluter keeps its lines.
const LEISURE: u32 = 20;

fn walking(bytes: u64, think: u32) -> Behaviour {
    Behaviour::walking((bytes >> 10) as u32, think)
}

/// A guest that walks through this much memory, on a CPU of its own, next to its memory.
fn walker(name: &str, bytes: u64, think: u32, cpu: u32) -> GuestSpec {
    GuestSpec::new(name)
        .doing(walking(bytes, think))
        .cpus(Cpus::Pinned(vec![cpu.to_string()]))
        .nodes("preferred", &(cpu / 2).to_string())
}

/// Checks that `homenode why` names the right first cause and the right culprit.
pub(super) fn causes_named(inside: &mut Inside) -> anyhow::Result<()> {
    let specs = [
        walker("polluted", LLC_BYTES / 2, LEISURE, 0).doing(Behaviour::idle()),
        walker("polluter", 8 * LLC_BYTES, 0, 2).doing(Behaviour::idle()),
        walker("throttled", LLC_BYTES / 4, 0, 2),
        walker("parted", 4 * LLC_BYTES, 0, 3).doing(Behaviour::idle()),
    ];
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    let [polluted, polluter, throttled, parted] = guests.as_slice() else {
        anyhow::bail!("expected four guests, saw {}", guests.len());
    };
    // In memory: the history's file system must let processes share a file, which the host's does not.
    let history = std::env::temp_dir().join("why.sqlite").display().to_string();
    let agent = start_agent_with(inside, &["--policies", "default", "--history", &history])?;
    wait_until("the agent to record", SOON, || {
        Ok(match inside.ask("record", &["show", "--history", &history])? {
            Ok(_) => Look::Done(()),
            Err((_, said)) => Look::NotYet(said),
        })
    })?;

    let quota = ["vcpu_quota=30000", "vcpu_period=100000"];
    let throttle = [&["schedinfo", "throttled", "--live"], &quota[..]].concat();
    let planted = when_done(&throttle)?;
    expect_named(inside, &history, planted, ("throttled", "quota", "somebody"))?;

    // Moves the vCPU away from the memory, which is immediate; moving the memory instead takes a minute and a half here.
    throttled.switch_to(Behaviour::idle())?;
    parted.switch_to(walking(4 * LLC_BYTES, 0))?;
    let planted = when_done(&["vcpupin", "parted", "0", "1", "--live"])?;
    expect_named(inside, &history, planted, ("parted", "remote-memory", "somebody"))?;

    // The polluter first works on the other node, and then comes to the victim's node.
    parted.switch_to(Behaviour::idle())?;
    polluted.switch_to(walking(LLC_BYTES / 2, LEISURE))?;
    polluter.switch_to(walking(8 * LLC_BYTES, 0))?;
    let planted = when_done(&["vcpupin", "polluter", "0", "1", "--live"])?;
    expect_named(
        inside,
        &history,
        planted,
        ("polluted", "llc-pollution", "polluter"),
    )?;
    // No other VM may be named as the culprit for the VM that slowed others down.
    if let Ok(said) = asked(inside, &history, "polluter", planted)? {
        let is_others = said["causes"].to_string().contains("\"who\":\"vm\"");
        ensure!(
            !is_others,
            "`why` blames another VM for the polluter's speed: {said}"
        );
    }
    stop(agent)
}

/// Lets time pass for a baseline, runs virsh, and lets its effect last for the stretch; returns when virsh was done.
fn when_done(arguments: &[&str]) -> anyhow::Result<SystemTime> {
    thread::sleep(4 * WINDOW);
    run("virsh", arguments)?;
    let done = SystemTime::now();
    thread::sleep(WINDOW);
    Ok(done)
}

/// Returns the answer about a VM in the stretch that began at `planted`.
fn asked(
    inside: &Inside,
    history: &str,
    vm: &str,
    planted: SystemTime,
) -> anyhow::Result<Result<Value, (i32, String)>> {
    let middle = (planted + WINDOW / 2).duration_since(SystemTime::UNIX_EPOCH)?;
    let middle = run(
        "date",
        &["-u", "-d", &format!("@{}", middle.as_secs()), "+%FT%TZ"],
    )?;
    let window = format!("{}s", WINDOW.as_secs());
    inside.ask(
        "why",
        &[
            vm,
            "--at",
            middle.trim(),
            "--window",
            &window,
            "--history",
            history,
        ],
    )
}

fn expect_named(
    inside: &Inside,
    history: &str,
    planted: SystemTime,
    (vm, code, culprit): (&str, &str, &str),
) -> anyhow::Result<()> {
    let is_right = |said: &Value| {
        let (first, lost) = (&said["causes"][0], said["lost"].as_f64().unwrap_or(0.0));
        let by = &first["culprit"];
        lost >= LOST_MIN && first["code"] == code && (by["who"] == culprit || by["name"] == culprit)
    };
    // The last periods may not be recorded yet.
    let said = wait_until(&format!("why to name what slowed {vm}"), SOON, || {
        Ok(match asked(inside, history, vm, planted)? {
            Ok(said) if is_right(&said) => Look::Done(said),
            other => Look::NotYet(format!("{other:?}")),
        })
    })?;
    inside.note(format!("{vm}: lost {}, {}", said["lost"], said["causes"][0]));
    Ok(())
}

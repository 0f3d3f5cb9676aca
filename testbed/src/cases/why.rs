//! `homenode why` about real guests: one is throttled, one is parted from its memory, one has its cache filled by a neighbour.
//!
//! All of it is done by somebody else than the agent, which only records: what it knows it has from the host, and counters from
//! the model. Two guests are busy at a time, before it is done and after: the emulated CPUs share two real ones, and with a third
//! all would be slower for a reason that no guest and no agent can see.

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

/// How long a stretch is asked about; four times as long before it nothing happens.
const WINDOW: Duration = Duration::from_secs(30);
/// Of its cause each guest must have lost so much of its speed.
const LOST_MIN: f64 = 0.03;
/// Steps of arithmetic of the polluted guest after each line that it reads: so long does a round through its memory take that the
/// polluter goes through the whole cache meanwhile. A guest that reads at the polluter's pace keeps its lines.
const LEISURE: u32 = 20;

/// What lies in a private cache.
const SMALL_BYTES: u64 = 16 << 10;

fn walking(bytes: u64, think: u32) -> Behaviour {
    Behaviour::walking((bytes >> 10) as u32, think)
}

/// Walks through so much memory, on a CPU of its own, with its memory beside it.
fn walker(name: &str, bytes: u64, think: u32, cpu: u32) -> GuestSpec {
    GuestSpec::new(name)
        .doing(walking(bytes, think))
        .cpus(Cpus::Pinned(vec![cpu.to_string()]))
        .nodes("preferred", &(cpu / 2).to_string())
}

/// What `why` must say of a guest: the code, and who did it.
type Expected = (&'static str, &'static str, &'static str);

/// The first cause is the right one, and so is who is blamed.
pub fn causes_named(inside: &mut Inside) -> anyhow::Result<()> {
    let specs = [
        walker("polluted", LLC_BYTES / 2, LEISURE, 0).doing(Behaviour::idle()),
        walker("polluter", SMALL_BYTES, 0, 1).doing(Behaviour::idle()),
        walker("throttled", LLC_BYTES / 4, 0, 2),
        walker("parted", 4 * LLC_BYTES, 0, 3),
    ];
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    let [polluted, polluter, throttled, parted] = guests.as_slice() else {
        anyhow::bail!("expected four guests, saw {}", guests.len());
    };
    // In memory: a history wants a file system that processes can share, which the host's is not.
    let history = std::env::temp_dir().join("why.sqlite").display().to_string();
    let agent = start_agent_with(inside, &["--policies", "default", "--history", &history])?;
    wait_until("the agent to record", SOON, || {
        Ok(match inside.ask("record", &["show", "--history", &history])? {
            Ok(_) => Look::Done(()),
            Err((_, said)) => Look::NotYet(said),
        })
    })?;

    let planted = planted(|| {
        let quota = ["vcpu_quota=30000", "vcpu_period=100000"];
        run(
            "virsh",
            &[&["schedinfo", "throttled", "--live"], &quota[..]].concat(),
        )?;
        // The guest goes and leaves its memory behind, at once; the other way round takes a minute and a half here.
        run("virsh", &["vcpupin", "parted", "0", "1", "--live"])?;
        Ok(())
    })?;
    let expected = [
        ("throttled", "quota", "somebody"),
        ("parted", "remote-memory", "somebody"),
    ];
    all_named(inside, &history, planted, &expected)?;

    throttled.switch_to(Behaviour::idle())?;
    parted.switch_to(Behaviour::idle())?;
    polluted.switch_to(walking(LLC_BYTES / 2, LEISURE))?;
    polluter.switch_to(walking(SMALL_BYTES, 0))?;
    let planted = self::planted(|| polluter.switch_to(walking(8 * LLC_BYTES, 0)))?;
    let expected = [("polluted", "llc-pollution", "polluter")];
    all_named(inside, &history, planted, &expected)?;
    // Who made others slow has nobody to blame.
    if let Ok(said) = asked(inside, &history, "polluter", planted)? {
        let is_others = said["causes"].to_string().contains("\"who\":\"vm\"");
        ensure!(!is_others, "the polluter is said to be slowed by another: {said}");
    }
    stop(agent)
}

/// Lets all be as it is for as long as is compared with, does something, and waits until it has lasted for what is asked about;
/// when it was done.
fn planted(deed: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<SystemTime> {
    thread::sleep(4 * WINDOW);
    deed()?;
    let planted = SystemTime::now();
    thread::sleep(WINDOW);
    Ok(planted)
}

/// What is said of a VM in the stretch that began then.
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

fn all_named(
    inside: &Inside,
    history: &str,
    planted: SystemTime,
    expected: &[Expected],
) -> anyhow::Result<()> {
    for (vm, code, culprit) in expected {
        // The last periods may not be recorded yet.
        let said = wait_until(&format!("why to name what slowed {vm}"), SOON, || {
            Ok(match asked(inside, history, vm, planted)? {
                Ok(said) if is_named(&said, code, culprit) => Look::Done(said),
                other => Look::NotYet(format!("{other:?}")),
            })
        })?;
        inside.note(format!("{vm}: lost {}, {}", said["lost"], said["causes"][0]));
    }
    Ok(())
}

fn is_named(said: &Value, code: &str, culprit: &str) -> bool {
    let (first, lost) = (&said["causes"][0], said["lost"].as_f64().unwrap_or(0.0));
    let by = &first["culprit"];
    lost >= LOST_MIN && first["code"] == code && (by["who"] == culprit || by["name"] == culprit)
}

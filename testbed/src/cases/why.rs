//! `homenode why` about real guests: one is throttled, one is parted from its memory, one has its cache filled by a neighbour.
//!
//! All of it is done by somebody else than the agent, which only records: what it knows it has from the host, and counters from
//! the model. On node 0 run the polluted guest and its polluter, on node 1 the other two, each on a CPU of its own.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use homenode_testbed_guest::Behaviour;
use serde_json::Value;

use super::agent::{SOON, start_agent_with, stop};
use super::basics::in_mib;
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

/// Walks through so much memory, on a CPU of its own, with its memory beside it.
fn walker(name: &str, bytes: u64, think: u32, cpu: u32) -> GuestSpec {
    GuestSpec::new(name)
        .doing(Behaviour::walking((bytes >> 10) as u32, think))
        .cpus(Cpus::Pinned(vec![cpu.to_string()]))
        .nodes("preferred", &(cpu / 2).to_string())
}

/// Guests, and what `why` must say of each: the code, and who did it.
const EXPECTED: [(&str, &str, &str); 3] = [
    ("polluted", "llc-pollution", "polluter"),
    ("throttled", "quota", "somebody"),
    ("parted", "remote-memory", "somebody"),
];

/// The first cause is the right one, and so is who is blamed.
pub fn causes_named(inside: &mut Inside) -> anyhow::Result<()> {
    let specs = [
        walker("polluted", LLC_BYTES / 2, LEISURE, 0),
        walker("polluter", 8 * LLC_BYTES, 0, 1).doing(Behaviour::idle()),
        walker("throttled", LLC_BYTES / 4, 0, 2),
        walker("parted", 4 * LLC_BYTES, 0, 3),
    ];
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    let [_, polluter, _, parted] = guests.as_slice() else {
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
    thread::sleep(4 * WINDOW);

    let planted = Instant::now();
    polluter.switch_to(Behaviour::walking(((8 * LLC_BYTES) >> 10) as u32, 0))?;
    let quota = ["vcpu_quota=30000", "vcpu_period=100000"];
    run(
        "virsh",
        &[&["schedinfo", "throttled", "--live"], &quota[..]].concat(),
    )?;
    parted.move_to(0)?;
    inside.note(format!("moved: {:?} MiB", in_mib(&parted.pages_per_node()?)));
    thread::sleep(WINDOW.saturating_sub(planted.elapsed()));

    let window = format!("{}s", WINDOW.as_secs());
    let asked = |vm: &str| {
        // The stretch that began when all was done, however long ago that is by now.
        let middle = format!("{}s", planted.elapsed().saturating_sub(WINDOW / 2).as_secs());
        let place = ["--at", &middle, "--window", &window, "--history", &history];
        inside.ask("why", &[&[vm], &place[..]].concat())
    };
    for (vm, code, culprit) in EXPECTED {
        let said = wait_until(&format!("why to name what slowed {vm}"), SOON, || {
            Ok(match asked(vm)? {
                Ok(said) if is_named(&said, code, culprit) => Look::Done(said),
                other => Look::NotYet(format!("{other:?}")),
            })
        })?;
        inside.note(format!("{vm}: lost {}, {}", said["lost"], said["causes"][0]));
    }
    // Whoever made others slow has nobody to blame.
    let of_polluter = asked("polluter")?;
    if let Ok(said) = of_polluter {
        let is_others = said["causes"].to_string().contains("\"who\":\"vm\"");
        ensure!(!is_others, "the polluter is said to be slowed by another: {said}");
    }
    stop(agent)
}

fn is_named(said: &Value, code: &str, culprit: &str) -> bool {
    let (first, lost) = (&said["causes"][0], said["lost"].as_f64().unwrap_or(0.0));
    let by = &first["culprit"];
    lost >= LOST_MIN && first["code"] == code && (by["who"] == culprit || by["name"] == culprit)
}

//! Working sets that a running agent measures of real guests under KVM, compared with the guests' known use.
//!
//! A guest writes 64 MiB once. Then it repeatedly writes 16 MiB in one stretch, or 16 MiB as every fourth page, or nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_host::observation::{Tracker, Used};
use homenode_kernel::numa_maps;
use homenode_kernel::trackers::{self, Runs, Target};
use homenode_testbed_guest::Behaviour;
use homenode_units::{Bytes, Ns, Pages};
use serde_json::Value;

use super::agent::{SOON, start_agent_with, stop};
use crate::inside::Inside;
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::wait::{Look, wait_until};

const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";
const TOUCHED_MIB: u32 = 64;
const HOT_MIB: u32 = 16;
/// If a guest scatters its hot pages, it writes every `STRIDE`-th page.
const STRIDE: u32 = 4;
/// Pause between two passes, far shorter than a window.
const PASS_MS: u32 = 100;
const WINDOW: &str = "4s";
/// How much more memory a guest's kernel uses when woken ten times a second than when idle: its timer, its scheduler, our
/// thread's stack.
const KERNEL_MORE_BYTES: u64 = 2 << 20;

/// A guest that has touched its memory and uses none of it now.
fn idle() -> Behaviour {
    Behaviour::idle().with_touch(TOUCHED_MIB)
}

/// A guest that uses its hot set repeatedly: every `stride`-th page.
fn hot(stride: u32) -> Behaviour {
    idle().with_every(PASS_MS).with_hot(HOT_MIB, stride)
}

/// A guest at work on a contiguous hot set.
fn worker(inside: &mut Inside) -> anyhow::Result<Guest> {
    let mut spec = GuestSpec::new("worker").doing(hot(1));
    spec.memory_mib = 256;
    let guest = inside.create(&spec)?;
    guest.wait_ready()?;
    Ok(guest)
}

/// Returns the guest's next figure, and its least, size and most.
fn figure(inside: &Inside, name: &str) -> anyhow::Result<(Value, [u64; 3])> {
    let begin = Instant::now();
    let figure = wait_until("a working set", SOON, || {
        Ok(match inside.ask("wss", &[name, "--window", WINDOW])? {
            Ok(figure) => Look::Done(figure),
            // Before its first cycle the agent knows no VM.
            Err((_, why)) => Look::NotYet(why),
        })
    })?;
    let bytes = |key: &str| {
        figure[key]
            .as_u64()
            .with_context(|| format!("no {key} in {figure}"))
    };
    let ends = [bytes("least_bytes")?, bytes("size_bytes")?, bytes("most_bytes")?];
    let tracker = figure["tracker"].as_str().unwrap_or("no tracker").to_owned();
    inside.note(format!(
        "{tracker}: {:.2} MiB, {:.2} to {:.2}, window {:.1} s, cost {:.0} ms, after {:.1} s",
        mib(ends[1]),
        mib(ends[0]),
        mib(ends[2]),
        bytes("window_ns")? as f64 / 1e9,
        bytes("cost_ns")? as f64 / 1e6,
        begin.elapsed().as_secs_f64()
    ));
    Ok((figure, ends))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Runs a tracker of this host on a guest for some windows. Returns, for the last window, the bytes found used in at least half
/// of the readings, and in any reading (twice).
fn watch(
    inside: &Inside,
    guest: &Guest,
    what: &str,
    tracker: Tracker,
    windows: u32,
) -> anyhow::Result<[u64; 3]> {
    let root = Path::new("/");
    let pid = i32::try_from(guest.process.0)?;
    let sizes = [Bytes(guest.spec.memory_mib << 20)];
    let ranges = numa_maps::guest_ram(root, pid, &sizes)?.context("guest RAM was not found")?;
    let target = Target {
        pid,
        ranges,
        vcpus: 1,
        runs: Runs::Kvm,
    };
    let window = Ns::from_secs(4);
    let mut look = trackers::look(root, tracker, &target, window)?;
    let mut last = [0; 3];
    for number in 1..=windows {
        look.begin()?;
        std::thread::sleep(Duration::from_nanos((window - look.early()).0));
        let pages = match look.end()?.found {
            Used::Amount { used, .. } => [used.0; 3],
            Used::Regions { regions, looks } => {
                let in_least = |least: u32| regions.iter().filter(move |region| region.found >= least);
                let sum = |least| in_least(least).map(|region| region.pages.0).sum();
                [sum(looks / 2), sum(1), sum(1)]
            }
            Used::Frames { frames } => [frames.len() as u64; 3],
        };
        last = pages.map(|pages| Pages(pages).to_bytes().0);
        inside.note(format!(
            "{what}, {}, window {number}: hot {:.2} MiB, used {:.2}",
            tracker.name(),
            mib(last[0]),
            mib(last[2])
        ));
    }
    Ok(last)
}

/// Returns every file of the kernel's DAMON, with its contents if readable.
fn damon_files() -> BTreeMap<PathBuf, String> {
    let mut dirs = vec![PathBuf::from(DAMON)];
    let mut files = BTreeMap::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                files.insert(path, text);
            }
        }
    }
    files
}

/// On a kernel with DAMON, compares both trackers with a guest's known use. If another program owns a DAMON context, the agent
/// and the tracker leave it unchanged.
pub(super) fn trackers(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = worker(inside)?;
    let known = u64::from(HOT_MIB) << 20;
    for (what, behaviour) in [
        ("in one stretch", hot(1)),
        ("scattered", hot(STRIDE)),
        ("idle", idle()),
    ] {
        guest.switch_to(behaviour)?;
        std::thread::sleep(Duration::from_secs(2));
        let exact = watch(inside, &guest, what, Tracker::Invalidation, 2)?;
        let sampled = watch(inside, &guest, what, Tracker::Damon, 8)?;
        ensure!(
            fs::read_to_string(format!("{DAMON}/nr_kdamonds"))?.trim() == "0",
            "expected DAMON taken down with the watch"
        );
        if behaviour == idle() {
            continue;
        }
        for (tracker, [least, _, most]) in [("invalidation", exact), ("damon", sampled)] {
            ensure!(
                least <= known + 2 * KERNEL_MORE_BYTES && most >= known,
                "expected {HOT_MIB} MiB {what} within the bounds of {tracker}, saw {:.2} to {:.2} MiB",
                mib(least),
                mib(most)
            );
        }
    }

    let set = |file: &str, value: &str| {
        let path = format!("{DAMON}/{file}");
        fs::write(&path, value).with_context(|| format!("cannot write {value} to {path}"))
    };
    set("nr_kdamonds", "1")?;
    set("0/contexts/nr_contexts", "1")?;
    set("0/contexts/0/operations", "paddr")?;
    let theirs = damon_files();
    let agent = start_agent_with(inside, &["--policies", "default"])?;
    let (said, _) = figure(inside, "worker")?;
    let why = said["trackers"].to_string();
    ensure!(
        said["tracker"] == "invalidation" && why.contains("another owner"),
        "expected DAMON in use by another owner, saw {why}"
    );
    let refused = watch(inside, &guest, "taken", Tracker::Damon, 1);
    ensure!(
        refused.is_err(),
        "expected the agent to refuse DAMON, saw {refused:?}"
    );
    stop(agent)?;
    ensure!(
        damon_files() == theirs,
        "the agent changed DAMON settings of another owner"
    );
    set("nr_kdamonds", "0")
}

/// Checks that the intervals that the agent reports contain the guest's known use: in one stretch, scattered, and none.
pub(super) fn known_hot_sets(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = worker(inside)?;
    // The host is slow, and so is each look. The limit on the tracker's share of a CPU is lifted, as it is not under test
    // here.
    let config = inside.dir().join("watching.toml");
    fs::write(&config, "[working_set]\ncpu_share_max = 1.0\n")?;
    let agent = start_agent_with(
        inside,
        &["--policies", "default", "--config", &config.display().to_string()],
    )?;

    let (said, contiguous) = figure(inside, "worker")?;
    let next = |behaviour| -> anyhow::Result<[u64; 3]> {
        guest.switch_to(behaviour)?;
        // A window that was running when the guest changed must end first.
        std::thread::sleep(Duration::from_secs(5));
        Ok(figure(inside, "worker")?.1)
    };
    let (scattered, alone) = (next(hot(STRIDE))?, next(idle())?);

    let known = u64::from(HOT_MIB) << 20;
    // The figure includes the guest's kernel, so it may exceed the program's use by this much.
    let kernel = alone[1] + KERNEL_MORE_BYTES;
    for (what, [least, size, most]) in [("in one stretch", contiguous), ("scattered", scattered)] {
        ensure!(
            least <= known + kernel && known <= most && (known..=known + kernel).contains(&size),
            "expected {HOT_MIB} MiB {what} and at most {:.2} MiB of a kernel, saw {:.2} MiB, {:.2} to {:.2}",
            mib(kernel),
            mib(size),
            mib(least),
            mib(most)
        );
    }
    ensure!(
        alone[1] < contiguous[1] / 2 && alone[1] < scattered[1] / 2,
        "expected the idle guest to use less than half, saw {:.2} MiB",
        mib(alone[1])
    );
    ensure!(
        said["tracker"] == "invalidation" && said["window_ns"].as_u64() >= Some(4_000_000_000),
        "expected invalidation on this kernel, in windows of 4 s, saw {said}"
    );
    let nobody = inside.ask("wss", &["absent"])?;
    ensure!(
        nobody
            .as_ref()
            .is_err_and(|(status, why)| *status == 2 && why.contains("there are: worker")),
        "expected an error that lists the VMs, saw {nobody:?}"
    );
    let listed = inside.ask("wss", &[])?;
    ensure!(
        listed.as_ref().is_ok_and(
            |all| all["vms"][0]["vm"] == "worker" && all["vms"][0]["working_set"]["size_bytes"].is_u64()
        ),
        "expected the VM's last figure, saw {listed:?}"
    );
    stop(agent)
}

//! Compares page logs that the plugin writes of a real guest with what this machine's kernel sees and what the guest does.
//!
//! The programs are those of [PRL, figure 9]: 400 MB, tau 50, omega 4 intervals. Only time is scaled. The paper has 17 passes
//! in an interval of 30 s; here an interval (mu) is the time that 17 passes take in this run.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_formats::page_log::{Log, Marks};
use homenode_testbed_guest::{Behaviour, MARKER_PHASE, MARKER_READY, MARKER_REPORT, MARKER_SWEPT, Sweep};
use serde_json::Value;

use crate::outside::plain::{Outside, PlainGuest, next_window, whole_log};

/// Size of the array, as in the paper (section 5.2).
const ARRAY_MIB: u32 = 400;
const GUEST_MIB: u32 = 1024;
/// Memory that is used repeatedly while this machine's kernel watches as well.
const HOT_MIB: u32 = 64;
const WATCHED: Duration = Duration::from_secs(3);
/// Passes in each half of a program: five intervals. A page is hot in the third interval, and PRL's loop ends four intervals
/// later.
const PASSES: u32 = 85;
/// Passes in an interval of the estimator. By the paper's table 1, 30 s have this number of passes.
const PASSES_OF_MU: u32 = 17;
/// Largest allowed difference between the exact set and the accessed bits, as a share.
const APART: f64 = 0.02;
/// The claim's margin (prl.accuracy-synthetic), and how far one half of a program may differ from PML's ideal.
const MARGIN_MB: f64 = 1.0;

const PROGRAMS: [(&str, [Sweep; 2]); 3] = [
    ("rwrw", [Sweep::ReadWrite, Sweep::ReadWrite]),
    ("rrww", [Sweep::Read, Sweep::Write]),
    ("wwrr", [Sweep::Write, Sweep::Read]),
];

/// A guest and its page log.
pub(super) struct Logged {
    pub(super) guest: PlainGuest,
    pub(super) log: PathBuf,
    control: PathBuf,
}

impl Logged {
    fn boot(outside: &mut Outside<'_>, name: &str, first: Behaviour, how: &str) -> anyhow::Result<Logged> {
        let initramfs = outside.workshop.initramfs.clone();
        Logged::boot_from(outside, &initramfs, name, first, how)
    }

    /// Boots a guest. Nothing is logged before the first [`Logged::next`].
    pub(super) fn boot_from(
        outside: &mut Outside<'_>,
        initramfs: &Path,
        name: &str,
        first: Behaviour,
        how: &str,
    ) -> anyhow::Result<Logged> {
        let (log, control) = (
            outside.dir.join(format!("{name}.pages")),
            outside.dir.join(format!("{name}.control")),
        );
        let arguments = format!(
            "pages={},control={},begin=announced,frames={},core=i7_pml,{how}",
            log.display(),
            control.display(),
            GUEST_MIB * 256
        );
        let plugin = outside.workshop.plugin()?.to_owned();
        let guest = outside.boot_from(initramfs, name, GUEST_MIB, first, Some((&plugin, &arguments)))?;
        outside.wait_for(&guest, MARKER_READY)?;
        Ok(Logged { guest, log, control })
    }

    /// Closes the window and names the next.
    pub(super) fn next(&self, label: &str) -> anyhow::Result<()> {
        next_window(&self.control, &self.log, label)
    }

    /// Runs one half of a program, in windows of this label; returns how long it took.
    fn half(&mut self, outside: &Outside<'_>, label: &str, sweep: Sweep) -> anyhow::Result<Duration> {
        self.next(label)?;
        let begin = Instant::now();
        self.guest
            .say(&Behaviour::sweeping(ARRAY_MIB, sweep, PASSES).to_string())?;
        outside.wait_for(&self.guest, MARKER_SWEPT)?;
        let took = begin.elapsed();
        self.next("between")?;
        Ok(took)
    }
}

/// Checks PRL's estimates, and the plugin's exact set against what this machine's kernel sees.
pub(super) fn log(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let first = Behaviour {
        touch_mib: HOT_MIB,
        every_ms: 1,
        ..Behaviour::idle()
    };
    let mut logged = Logged::boot(outside, "prl", first, "logs=walks,exact=yes,window-ms=200")?;
    let accessed_kib = watched(&logged)?;
    logged
        .guest
        .say(&Behaviour::idle().with_touch(ARRAY_MIB).to_string())?;
    outside.wait_for(&logged.guest, MARKER_PHASE)?;
    let mut took = [Duration::ZERO; PROGRAMS.len()];
    for ((name, halves), took) in PROGRAMS.into_iter().zip(&mut took) {
        for sweep in halves {
            *took += logged.half(outside, name, sweep)?;
        }
    }
    outside.end(logged.guest)?;

    let log = whole_log(&logged.log)?;
    ensure!(log.header.fetches, "the plugin did not find the guest's memory");
    let used_kib = 4 * frames(&log, "watched", Marks::used);
    let apart = (used_kib as f64 - accessed_kib as f64) / accessed_kib as f64;
    outside.note(format!(
        "{HOT_MIB} MiB in use: the plugin has {used_kib} KiB, accessed bits {accessed_kib} KiB, {:.2} % apart",
        100.0 * apart
    ));
    ensure!(
        apart.abs() <= APART,
        "expected figures at most {APART} apart, saw {apart}"
    );
    for ((name, _), took) in PROGRAMS.into_iter().zip(took) {
        let mu = took * PASSES_OF_MU / (2 * PASSES);
        let said = estimates(outside, &logged.log, name, mu)?;
        let (estimate, truth) = (
            program_mb(&said, "prl")?,
            mb(&said["truth"]["program_data_bytes"])?,
        );
        let kernel = mb(&of(&said, "prl")?["kernel_bytes"])?;
        outside.note(format!(
            "{name}: PRL {estimate:.2} MB, the program's true frames {truth:.2} MB, kernel apart {kernel:.2} MB, mu {:.2} s",
            mu.as_secs_f64()
        ));
        ensure!(
            (estimate - truth).abs() <= MARGIN_MB,
            "{name}: expected PRL's estimate within {MARGIN_MB} MB of {truth} MB, saw {estimate}"
        );
    }
    Ok(())
}

/// Returns the KiB of memory that this machine's kernel saw used while a window was open.
fn watched(logged: &Logged) -> anyhow::Result<u64> {
    // The first command begins the log, for which the guest's code is translated again; hence the warm-up.
    logged.next("warm-up")?;
    thread::sleep(Duration::from_secs(1));
    logged.next("watched")?;
    logged.guest.clear_accessed()?;
    thread::sleep(WATCHED);
    let accessed_kib = logged.guest.accessed_kib()?;
    logged.next("between")?;
    Ok(accessed_kib)
}

/// Checks what PML logs, half by half.
pub(super) fn pml(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let first = Behaviour::idle().with_touch(ARRAY_MIB);
    let (name, halves) = PROGRAMS[1];
    let mut logged = Logged::boot(outside, "pml", first, "logs=writes,exact=yes,window-ms=200")?;
    logged.next("warm-up")?;
    let mut took = Duration::ZERO;
    for (sweep, label) in halves.into_iter().zip(["rr", "ww"]) {
        took += logged.half(outside, label, sweep)?;
    }
    let mu = took * PASSES_OF_MU / (2 * PASSES);
    outside.end(logged.guest)?;
    for (label, least, most) in [("rr", 0.0, 0.05), ("ww", 0.95, 1.05)] {
        let said = estimates(outside, &logged.log, label, mu)?;
        let (estimate, truth) = (
            program_mb(&said, "pml")?,
            mb(&said["truth"]["program_data_bytes"])?,
        );
        outside.note(format!(
            "{name}, {label}: PML {estimate:.2} MB, the program's true frames {truth:.2} MB"
        ));
        ensure!(
            (least * truth..=most * truth + MARGIN_MB).contains(&estimate),
            "expected PML's estimate with {label} pages near {truth} MB, saw {estimate}"
        );
    }
    Ok(())
}

/// The most of the log that the plugin keeps for a reader that follows it, in MiB.
const FEED_MIB: u64 = 1;
const FED: Duration = Duration::from_secs(10);

/// A log in shared memory that `homenode wss --follow` reads never exceeds its limit.
pub(super) fn live(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let first = Behaviour {
        touch_mib: 16,
        every_ms: 1,
        ..Behaviour::idle()
    };
    // The directory is in shared memory, outside the case's own, and is removed when the case ends.
    let shared = tempfile::tempdir_in("/dev/shm").context("cannot make a directory in /dev/shm")?;
    let feed = shared.path().join("guest.pages");
    let arguments = format!(
        "pages={},frames={},exact=yes,window-ms=100,keep-mib={FEED_MIB}",
        feed.display(),
        128 * 256
    );
    let plugin = outside.workshop.plugin()?.to_owned();
    let guest = outside.boot("live", 128, first, Some((&plugin, &arguments)))?;
    outside.wait_for(&guest, MARKER_READY)?;
    let lines = outside.dir.join("live.json");
    let mut follower = Command::new(outside.workshop.homenode()?)
        .args(["wss", "--follow", "--json", "--mu", "1", "--log"])
        .arg(&feed)
        .stdout(fs::File::create(&lines)?)
        .spawn()
        .context("cannot start homenode")?;
    let begin = Instant::now();
    let mut largest = 0;
    while begin.elapsed() < FED {
        largest = largest.max(fs::metadata(&feed)?.blocks() * 512);
        thread::sleep(Duration::from_millis(50));
    }
    outside.end(guest)?;
    let status = follower.wait()?;
    ensure!(status.success(), "homenode wss --follow: {status}");
    let text = fs::read_to_string(&lines)?;
    let said: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let last = said
        .last()
        .context("homenode wss printed nothing about the feed")?;
    let (exact, length) = (program_mb(last, "exact")?, fs::metadata(&feed)?.len());
    outside.note(format!(
        "followed: {} estimates, the last {exact:.2} MB of the 16 MB that the program writes, {} windows missed; {length} bytes were written, \
         at most {largest} kept",
        said.len(),
        last["given_up"]
    ));
    ensure!(
        said.len() >= 3,
        "expected at least 3 estimates in {FED:?}, saw {}",
        said.len()
    );
    ensure!(
        (16.0..17.0).contains(&exact),
        "expected an exact set of 16 to 17 MB, saw {exact}"
    );
    // A new window may exceed the limit before the oldest is dropped, and the header's page always stays.
    ensure!(
        largest < length && largest < (FEED_MIB << 20) + (1 << 18),
        "expected the feed to stay below {FEED_MIB} MiB, saw {largest} bytes of {length}"
    );
    Ok(())
}

/// A guest's speed, with or without a plugin.
struct Pace {
    boot_s: f64,
    walk_passes: f64,
    sweep_s: f64,
}

/// Times whole guests: without a plugin, under ours, and under a plugin designed like QEMU's own
/// (`qemu-plugin/examples/hotpages.rs`).
pub(super) fn speed(outside: &mut Outside<'_>) -> anyhow::Result<()> {
    let ours = outside.workshop.plugin()?.to_owned();
    let programs = std::env::current_exe()?;
    let hotpages = programs.with_file_name("examples").join("libhotpages.so");
    ensure!(
        hotpages.exists(),
        "{} is missing: run cargo build -p homenode-qemu-plugin --example hotpages",
        hotpages.display()
    );
    let log = outside.dir.join("speed.pages");
    let arguments = |logs: &str| {
        let (file, frames) = (log.display(), GUEST_MIB * 256);
        format!("pages={file},frames={frames},logs={logs},exact=yes,window-ms=1000")
    };
    let (walks, nothing) = (arguments("walks"), arguments("nothing"));
    let runs = [
        ("plain", None),
        ("PRL and exact set", Some((ours.as_path(), walks.as_str()))),
        ("exact set", Some((ours.as_path(), nothing.as_str()))),
        ("hotpages", Some((hotpages.as_path(), ""))),
    ];
    let mut paces: Vec<Pace> = Vec::new();
    for (name, plugin) in runs {
        let pace = pace(outside, name, plugin)?;
        let plain = paces.first().unwrap_or(&pace);
        outside.note(format!(
            "{name}: boot {:.1} s ({:.2} times plain), a walk of 256 KiB {:.0} passes/s ({:.2}), 400 passes over 16 MiB {:.2} s ({:.2})",
            pace.boot_s,
            pace.boot_s / plain.boot_s,
            pace.walk_passes,
            plain.walk_passes / pace.walk_passes,
            pace.sweep_s,
            pace.sweep_s / plain.sweep_s
        ));
        paces.push(pace);
    }
    Ok(())
}

fn pace(outside: &mut Outside<'_>, name: &str, plugin: Option<(&Path, &str)>) -> anyhow::Result<Pace> {
    let begin = Instant::now();
    let mut guest = outside.boot(&name.replace(' ', "-"), GUEST_MIB, Behaviour::idle(), plugin)?;
    outside.wait_for(&guest, MARKER_READY)?;
    let boot_s = begin.elapsed().as_secs_f64();
    guest.say(&Behaviour::walking(256, 4).to_string())?;
    outside.wait_for(&guest, MARKER_PHASE)?;
    let mut passes = || -> anyhow::Result<f64> {
        guest.say("report")?;
        let report = outside.wait_for(&guest, MARKER_REPORT)?;
        let (_, passes) = report
            .split_once("passes=")
            .context("the guest reported no passes")?;
        Ok(passes.parse()?)
    };
    thread::sleep(Duration::from_secs(1));
    let (before, since) = (passes()?, Instant::now());
    thread::sleep(Duration::from_secs(6));
    let walk_passes = (passes()? - before) / since.elapsed().as_secs_f64();
    guest.say(&Behaviour::idle().with_touch(16).to_string())?;
    outside.wait_for(&guest, MARKER_PHASE)?;
    let since = Instant::now();
    guest.say(&Behaviour::sweeping(16, Sweep::ReadWrite, 400).to_string())?;
    outside.wait_for(&guest, MARKER_SWEPT)?;
    let sweep_s = since.elapsed().as_secs_f64();
    outside.end(guest)?;
    Ok(Pace {
        boot_s,
        walk_passes,
        sweep_s,
    })
}

/// Returns the number of distinct frames whose marks are `wanted`, in the windows of a label.
fn frames(log: &Log, label: &str, wanted: impl Fn(Marks) -> bool) -> u64 {
    let windows = log.windows.iter().filter(|window| window.label == label);
    let rows = windows
        .flat_map(|window| &window.rows)
        .filter(|row| wanted(row.marks));
    let distinct: std::collections::BTreeSet<u32> = rows.map(|row| row.frame).collect();
    distinct.len() as u64
}

/// Returns the estimates of `homenode wss` for the windows of a label.
pub(super) fn estimates(
    outside: &Outside<'_>,
    log: &Path,
    label: &str,
    mu: Duration,
) -> anyhow::Result<Value> {
    let output = Command::new(outside.workshop.homenode()?)
        .args(["wss", "--json", "--label", label, "--mu"])
        .arg(mu.as_secs_f64().to_string())
        .arg("--log")
        .arg(log)
        .output()
        .context("cannot start homenode")?;
    ensure!(
        output.status.success(),
        "homenode wss: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).context("homenode wss --json gives no JSON")
}

pub(super) fn of<'a>(said: &'a Value, estimator: &str) -> anyhow::Result<&'a Value> {
    let all = said["estimates"]
        .as_array()
        .context("the output has no estimates")?;
    let found = all.iter().find(|estimate| estimate["estimator"] == estimator);
    found.with_context(|| format!("the output has no estimate by {estimator}: {said}"))
}

fn program_mb(said: &Value, estimator: &str) -> anyhow::Result<f64> {
    mb(&of(said, estimator)?["program_bytes"])
}

fn mb(bytes: &Value) -> anyhow::Result<f64> {
    let bytes = bytes
        .as_f64()
        .with_context(|| format!("{bytes} is not a number of bytes"))?;
    Ok(bytes / (1 << 20) as f64)
}

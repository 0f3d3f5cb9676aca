//! The agent, its guard and libvirtd are killed, stopped or lose their files, in ten ways. Afterwards, as the kernel and libvirt
//! report it, the guest runs where it ran before, has no limit and carries no mark.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::Behaviour;
use rustix::process::{Pid, Signal, kill_process};

use super::agent::{SOON, limits, start_agent, start_placing, stop, wait_home};
use crate::inside::Inside;
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::libvirtd::{self, run};
use crate::inside::proc::Process;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::outside::emulated::NODES;

/// The agent's default state directory.
const STATE: &str = "/run/homenode";
/// The time within which the agent promises to undo everything, once the processes that this needs answer.
const UNDONE_WITHIN: Duration = Duration::from_secs(30);
/// How long the guard takes to notice a hung agent: 20 s of silence, and 7 more if the guard was stopped together with the
/// agent.
const NOTICED_WITHIN: Duration = Duration::from_secs(27);

/// A guest, and the agent that has confined the guest's vCPUs to one node.
struct Scene<'a> {
    inside: &'a mut Inside,
    guest: Guest,
    agent: Program,
}

/// A kill point: its name, the action, and how long undoing everything may then take.
type Point = (&'static str, fn(&mut Scene<'_>) -> anyhow::Result<()>, Duration);

const POINTS: [Point; 10] = [
    ("the agent is killed", |scene| scene.agent.kill(), UNDONE_WITHIN),
    (
        "the agent is stopped for ever",
        |scene| scene.agent.signal(Signal::STOP),
        NOTICED_WITHIN.saturating_add(UNDONE_WITHIN),
    ),
    (
        "the guard is killed, and the agent once another is there",
        replaced_guard,
        UNDONE_WITHIN,
    ),
    (
        "libvirtd is killed, then the agent; libvirtd comes back",
        without_libvirtd,
        UNDONE_WITHIN,
    ),
    (
        "libvirtd is stopped, the agent killed; libvirtd goes on",
        libvirtd_stopped,
        UNDONE_WITHIN,
    ),
    (
        "agent and guard are killed; 'homenode release'",
        released,
        UNDONE_WITHIN,
    ),
    (
        "agent and guard are killed; the next agent",
        followed,
        UNDONE_WITHIN,
    ),
    (
        "agent and guard are killed, their files gone; 'homenode release'",
        released_without_files,
        UNDONE_WITHIN,
    ),
    (
        "the agent is killed, and its files are removed",
        files_removed,
        UNDONE_WITHIN,
    ),
    (
        "agent and guard are killed, a journal flipped; 'homenode release'",
        damaged,
        UNDONE_WITHIN,
    ),
];

/// Runs all kill points, one after the other, on one guest.
pub(super) fn kill_points(inside: &mut Inside) -> anyhow::Result<()> {
    let mut guest =
        inside.create(&GuestSpec::new("held").doing(Behaviour::busy(1).with_duty(30).with_touch(16)))?;
    for (what, happens, limit) in POINTS {
        let agent = start_placing(inside, &[])?;
        wait_home(inside, &guest, SOON)?;
        ensure!(
            is_marked(inside)?,
            "expected a mark in the guest's metadata while it is pinned"
        );
        let mut scene = Scene { inside, guest, agent };
        happens(&mut scene).with_context(|| what.to_owned())?;
        let begin = Instant::now();
        // Under emulation the same instructions take many times as long, so the limit is four times the promise. The note has
        // the real figure.
        wait_given_back(scene.inside, &scene.guest, limit * 4).with_context(|| what.to_owned())?;
        scene.inside.note(format!(
            "{what}: undone after {:.1} s",
            begin.elapsed().as_secs_f64()
        ));
        wait_until("all guards to end", SOON, || {
            let guards = guards()?;
            Ok(if guards.is_empty() {
                Look::Done(())
            } else {
                Look::NotYet(format!("{guards:?}"))
            })
        })?;
        guest = scene.guest;
        let _ = scene.agent.signal(Signal::KILL);
    }
    Ok(())
}

/// A guest is saved while an agent holds it, and restored when both agent and guard are gone. libvirt restores the pins, and
/// the next agent recognises them as an agent's.
pub(super) fn saved(inside: &mut Inside) -> anyhow::Result<()> {
    let mut guest =
        inside.create(&GuestSpec::new("held").doing(Behaviour::busy(1).with_duty(30).with_touch(16)))?;
    let agent = start_placing(inside, &[])?;
    wait_home(inside, &guest, SOON)?;
    let mut scene = Scene { inside, guest, agent };
    scene.kill_both()?;
    let file = scene.inside.dir().join("saved");
    run("virsh", &["save", "held", &file.display().to_string()])?;
    run("virsh", &["restore", &file.display().to_string()])?;
    let Scene {
        inside,
        guest: former,
        ..
    } = scene;
    let domain = inside.connection.lookup_domain_by_name("held");
    guest = Guest::of(
        &former.spec,
        domain.map_err(|error| anyhow!("{}", error.message()))?,
    )?;
    inside.note(format!(
        "restored, its vCPUs run on {:?}",
        guest.process.vcpu_affinity()?
    ));
    ensure!(is_marked(inside)?, "expected the mark to be saved with the guest");
    let mut agent = start_agent(inside)?;
    wait_given_back(inside, &guest, SOON)?;
    agent.wait_json("that it came with what was changed", SOON, |line| {
        line["message"]
            .as_str()
            .is_some_and(|text| text.contains("where it ran before"))
    })?;
    stop(agent)
}

fn replaced_guard(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    let first = guards()?;
    for guard in &first {
        signal(*guard, Signal::KILL)?;
    }
    wait_until("another guard", SOON, || {
        let now = guards()?;
        Ok(if now.iter().any(|guard| !first.contains(guard)) {
            Look::Done(())
        } else {
            Look::NotYet(format!("{now:?}"))
        })
    })?;
    scene.agent.kill()
}

fn without_libvirtd(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.inside.kill_libvirtd()?;
    scene.agent.kill()?;
    // This time is longer than the guard waits for another agent.
    std::thread::sleep(Duration::from_secs(15));
    scene.inside.restart_libvirtd()?;
    scene.inside.refresh(&mut scene.guest)
}

fn libvirtd_stopped(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    let daemon = libvirtd::daemon().context("libvirtd is not running")?;
    signal(daemon, Signal::STOP)?;
    scene.agent.kill()?;
    std::thread::sleep(Duration::from_secs(15));
    signal(daemon, Signal::CONT)
}

fn released(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.kill_both()?;
    scene.release()
}

fn followed(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.kill_both()?;
    stop(start_agent(scene.inside)?)
}

fn released_without_files(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.kill_both()?;
    fs::remove_dir_all(STATE)?;
    scene.release()
}

fn files_removed(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.agent.kill()?;
    Ok(fs::remove_dir_all(STATE)?)
}

fn damaged(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.kill_both()?;
    let journal = Path::new(STATE).join("private/journal");
    let mut bytes = fs::read(&journal)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&journal, bytes)?;
    scene.release()
}

impl Scene<'_> {
    /// Kills the guard first, because it would undo everything once the agent is gone.
    fn kill_both(&mut self) -> anyhow::Result<()> {
        self.agent.signal(Signal::STOP)?;
        for guard in guards()? {
            signal(guard, Signal::KILL)?;
        }
        self.agent.kill()?;
        ensure!(
            is_marked(self.inside)?,
            "expected the guest still limited and marked"
        );
        Ok(())
    }

    fn release(&self) -> anyhow::Result<()> {
        let said = run(&self.inside.homenode()?.display().to_string(), &["release"])?;
        self.inside.note(said.trim());
        Ok(())
    }
}

fn signal(process: Process, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(process.0)
        .ok()
        .and_then(Pid::from_raw)
        .context("no valid process number")?;
    kill_process(pid, signal).with_context(|| format!("cannot send a signal to {}", process.0))
}

/// Returns the running guards.
fn guards() -> anyhow::Result<BTreeSet<Process>> {
    let mut guards = BTreeSet::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        let is_ours = words
            .next()
            .is_some_and(|program| program.windows(8).any(|part| part == b"homenode"));
        if is_ours && words.next() == Some(b"guard") && Process(pid).alive() {
            guards.insert(Process(pid));
        }
    }
    Ok(guards)
}

/// Whether the guest's live XML contains the agent's mark.
fn is_marked(inside: &Inside) -> anyhow::Result<bool> {
    let domain = inside.connection.lookup_domain_by_name("held");
    let xml = domain.and_then(|domain| domain.xml_desc(0));
    let xml = xml.map_err(|error| anyhow!("libvirt returns no XML of the guest: {}", error.message()))?;
    Ok(xml.contains(homenode_kvm::mark::NAMESPACE))
}

/// Waits until a guest is as if no agent had ever run.
fn wait_given_back(inside: &Inside, guest: &Guest, limit: Duration) -> anyhow::Result<()> {
    let anywhere: Vec<u32> = (0..NODES).collect();
    wait_until("everything restored", limit, || {
        let affinity = guest.process.vcpu_affinity()?;
        let (limits, is_marked) = (limits(guest)?, is_marked(inside)?);
        let is_free = affinity.values().all(|cpus| *cpus == anywhere);
        Ok(if is_free && limits.is_empty() && !is_marked {
            Look::Done(())
        } else {
            Look::NotYet(format!(
                "vCPUs on {affinity:?}, limits {limits:?}, marked: {is_marked}"
            ))
        })
    })
}

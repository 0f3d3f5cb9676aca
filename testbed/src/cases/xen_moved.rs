//! DomUs whose memory is away from their vCPUs. The agent moves the memory by migrating the domUs within the host.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::{Behaviour, MARKER_CHECKED};
use rustix::process::{Pid, Signal, kill_process};

use super::agent::{start_acting, stop};
use crate::inside::Inside;
use crate::inside::console::count;
use crate::inside::libvirtd::run;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack, Vcpu};
use crate::inside::xen::{domains, userdata, xl};

/// Node of the domUs' memory at first, the node to whose CPU their vCPUs are then pinned, and a node that one domU fills.
const FROM: u32 = 3;
pub(super) const TO: u32 = 2;
const FULL: u32 = 1;
/// Part of a node's 1 GiB that is filled, in MiB, so that another domU finds no room.
const FILLING_MIB: u64 = 848;
/// Limit for a move, which takes 10 to 20 s on an idle machine and minutes on a busy one.
const MOVED_WITHIN: Duration = Duration::from_secs(900);
/// Memory that a moved domU holds, in MiB, and how often the domU writes it.
const TOUCHED_MIB: u32 = 40;
const WRITE_EVERY_MS: u32 = 150;
/// Directory in which the agent notes moves.
const MOVES: &str = "/run/homenode/private";
/// The suffix that `xl` gives to a domain that has left.
const LEFT: &str = "--migratedaway";
/// The limits are long, because under emulation a domU is stopped for longer than any real one should be.
const SETTINGS: &str = "[local_migration]\nallow = \"paused\"\ntime_max = \"3000s\"\npause_max = \"1500s\"\ninterval = \"3600s\"\n";

/// The behaviour of a domU that is moved.
pub(super) fn writing() -> Behaviour {
    Behaviour {
        touch_mib: TOUCHED_MIB,
        every_ms: WRITE_EVERY_MS,
        ..Behaviour::busy(1).with_duty(60)
    }
}

/// Creates this domU with its memory on one node, and then pins its vCPU to the CPU of another.
pub(super) fn split(inside: &Inside, mut spec: DomuSpec, to: u32, by: Toolstack) -> anyhow::Result<Domu> {
    spec.cpus = vec![FROM.to_string()];
    let domu = inside.create_domu(&spec, by)?;
    domu.pin(0, &to.to_string())?;
    Ok(domu)
}

/// Like [`split`], but for a domU without devices.
fn plain(inside: &Inside, name: &str, to: u32, (kind, by): (Kind, Toolstack)) -> anyhow::Result<Domu> {
    split(inside, DomuSpec::anywhere(name, kind).doing(writing()), to, by)
}

/// Starts an agent that may move domUs.
pub(super) fn start(inside: &Inside) -> anyhow::Result<Program> {
    let config = inside.dir().join("moves.toml");
    fs::write(&config, SETTINGS).context("cannot write the agent's settings")?;
    let config = config.display().to_string();
    start_acting(inside, "xen", &["--policies", "tavo", "--config", &config])
}

/// Waits for a line of the agent's output that contains these words.
pub(super) fn wait_said(agent: &mut Program, words: &[&str]) -> anyhow::Result<String> {
    let has = |text: &str| words.iter().all(|word| text.contains(word));
    agent.wait_json(&words.join(" … "), MOVED_WITHIN, |line| has(&line.to_string()))?;
    let lines = agent.lines();
    let said = lines.iter().find(|line| has(line));
    said.cloned().context("the agent's output no longer has the line")
}

/// Waits until the domU is another domain, the only one of its name, and has all its pages on this node.
pub(super) fn wait_moved(inside: &Inside, domu: &mut Domu, node: u32) -> anyhow::Result<()> {
    let (name, before) = (domu.spec.name.clone(), domu.id);
    let begin = Instant::now();
    let id = wait_until(&format!("{name} to be another domain"), MOVED_WITHIN, || {
        let all = domains()?;
        let of_it: Vec<&(u32, String)> = all.iter().filter(|(_, other)| other.starts_with(&name)).collect();
        Ok(match of_it[..] {
            [(id, found)] if *id != before && *found == name => Look::Done(*id),
            _ => Look::NotYet(format!("{of_it:?}")),
        })
    })?;
    domu.arrived(id);
    let pages = domu.pages_by_node()?;
    let elsewhere = pages.iter().sum::<u64>() - pages[node as usize];
    inside.note(format!(
        "{name}: domain {before} is domain {id}, seen after {:.1} s; pages by node {pages:?}",
        begin.elapsed().as_secs_f64()
    ));
    ensure!(
        elsewhere == 0 && pages[node as usize] >= domu.spec.memory_mib * 256,
        "expected all pages of {name} on node {node}, saw {pages:?}"
    );
    Ok(())
}

/// Checks that the domU continues to compute, and that its memory is as written.
pub(super) fn expect_whole(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let (before, _) = domu.progress()?;
    let checked = domu.command("check", MARKER_CHECKED)?;
    let (pages, wrong) = (count(&checked, "pages=")?, count(&checked, "wrong=")?);
    let (loops, _) = domu.progress()?;
    let name = &domu.spec.name;
    inside.note(format!("{name}: {checked}, {} loops meanwhile", loops - before));
    ensure!(
        pages == u64::from(TOUCHED_MIB) * 256 && wrong == 0 && loops > before,
        "expected {name} to continue with unchanged memory, saw {checked}, loops {before} to {loops}"
    );
    Ok(())
}

/// Checks that the operator's settings of the domU are restored, and that `xl`'s configuration of it names no nodes.
fn expect_as_before(domu: &Domu, cpus: u32) -> anyhow::Result<()> {
    let vcpus = domu.vcpus()?;
    let is_so = |vcpu: &Vcpu| vcpu.hard == cpus.to_string() && vcpu.soft == FROM.to_string();
    let name = &domu.spec.name;
    ensure!(
        vcpus.iter().all(is_so),
        "expected {name} on CPU {cpus}, with a preference for CPU {FROM} as in xl's file, saw {vcpus:?}"
    );
    let kept = userdata(domu.id)?;
    ensure!(
        kept.len() == 1 && kept[0].contains("vcpu_hard_affinity") && !kept[0].contains("nodemap"),
        "expected xl's notes on {name} without nodes, saw {kept:?}"
    );
    Ok(())
}

/// Returns the domains of this UUID, each as `xl` lists it.
fn of_uuid(uuid: &str) -> anyhow::Result<Vec<String>> {
    let text = xl(&["list", "-v"])?;
    let lines = text.lines().filter(|line| line.contains(uuid));
    Ok(lines.map(str::to_owned).collect())
}

pub(super) fn uuid(domu: &Domu) -> anyhow::Result<String> {
    let path = run("xenstore-read", &[&format!("/local/domain/{}/vm", domu.id)])?;
    let uuid = path.trim().rsplit('/').next().map(str::to_owned);
    uuid.context("xenstore has no UUID of the domU")
}

/// Checks that one domain of this UUID is left, and that the move left no file of its plan, no process, and no lock of `xl`.
pub(super) fn expect_one(inside: &Inside, domu: &Domu, uuid: &str) -> anyhow::Result<()> {
    let left = of_uuid(uuid)?;
    ensure!(
        left.len() == 1 && left[0].starts_with(&format!("{} ", domu.spec.name)),
        "expected one {} of UUID {uuid}, saw {left:?}",
        domu.spec.name
    );
    let mut files = Vec::new();
    for dir in [MOVES, "/var/lib/xen"] {
        let entries = fs::read_dir(dir).with_context(|| format!("cannot read {dir}"))?;
        let names = entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned());
        files.extend(names.filter(|name| {
            let is_note = name.starts_with("move.") || name.starts_with("userdata-l.");
            is_note || name.contains("homenode-new") || name.contains(LEFT)
        }));
    }
    ensure!(
        files.is_empty(),
        "expected no leftover files of a move, saw {files:?}"
    );
    let movers = movers();
    ensure!(
        movers.is_empty(),
        "expected no leftover mover process, saw {movers:?}"
    );
    inside.note(format!(
        "{}: one domain of its UUID, no file, lock or process of the move is left",
        domu.spec.name
    ));
    Ok(())
}

/// A process: its number, its session's number, and its command line.
type Running = (Pid, i32, String);

fn processes() -> impl Iterator<Item = Running> {
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok());
    numbers.filter_map(|number| {
        let bytes = fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let session = stat.rsplit(')').next()?.split_whitespace().nth(3)?.parse().ok()?;
        let line = String::from_utf8_lossy(&bytes).replace('\0', " ");
        Some((Pid::from_raw(number)?, session, line))
    })
}

/// Returns the processes that move a domain. `xl restore` is not one of them: it stays to watch the domain, as after any
/// creation.
fn movers() -> Vec<Running> {
    let is_mover = |line: &str| {
        ["move-domain", "move-stream", "xl save"]
            .iter()
            .any(|word| line.contains(word))
    };
    processes().filter(|(_, _, line)| is_mover(line)).collect()
}

/// Waits until part of a domU is copied.
fn wait_copied() -> anyhow::Result<()> {
    wait_until("some of the domU to be copied", MOVED_WITHIN, || {
        let copied = fs::read_to_string(format!("{MOVES}/move.copied")).unwrap_or_default();
        Ok(match copied.trim().parse::<u64>() {
            Ok(1..) => Look::Done(()),
            _ => Look::NotYet(format!("copied: {copied}")),
        })
    })
}

/// Watches, twice a second in a separate thread, whether a domU is ever paused, suspended or doubled.
struct Watched {
    name: String,
    is_over: Arc<AtomicBool>,
    looks: JoinHandle<anyhow::Result<usize>>,
}

impl Watched {
    fn begin(name: &str) -> Self {
        let (is_over, named) = (Arc::new(AtomicBool::new(false)), name.to_owned());
        let ends = Arc::clone(&is_over);
        let looks = std::thread::spawn(move || {
            let mut looks = 0;
            while !ends.load(Ordering::Relaxed) {
                let list = xl(&["list"])?;
                let states: Vec<&str> = list
                    .lines()
                    .filter(|line| line.starts_with(&named))
                    .filter_map(|line| line.split_whitespace().nth(4))
                    .collect();
                let runs = states.len() == 1 && !states[0].contains(['p', 's']);
                ensure!(runs, "expected {named} to be the only domU, saw {list}");
                looks += 1;
                std::thread::sleep(Duration::from_millis(500));
            }
            Ok(looks)
        });
        Self {
            name: name.to_owned(),
            is_over,
            looks,
        }
    }

    fn end(self, inside: &Inside) -> anyhow::Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        let looks = self
            .looks
            .join()
            .map_err(|_| anyhow!("the thread that watches the domU panicked"))??;
        inside.note(format!(
            "{} ran, alone of its name, at each of {looks} looks",
            self.name
        ));
        Ok(())
    }
}

/// Waits until the agent says why it does not move the domU.
pub(super) fn expect_refused(
    inside: &Inside,
    agent: &mut Program,
    domu: &Domu,
    why: &str,
) -> anyhow::Result<()> {
    let name = domu.spec.name.as_str();
    wait_said(agent, &[name, why])?;
    inside.note(format!("the agent said of {name}: {why}"));
    expect_stayed(inside, domu)
}

fn expect_stayed(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let pages = domu.pages_by_node()?;
    ensure!(
        pages.iter().sum::<u64>() == pages[FROM as usize],
        "expected {} to stay on node {FROM}, saw {pages:?}",
        domu.spec.name
    );
    expect_whole(inside, domu)
}

/// Checks that the memory of a PV and a PVH domU moves to their vCPUs' node, even if the agent or the mover is killed meanwhile,
/// and that the agent says why other domUs cannot be moved.
pub(super) fn moved(inside: &mut Inside) -> anyhow::Result<()> {
    let mut pv = plain(inside, "still", TO, (Kind::Pv, Toolstack::Xl))?;
    let mut pvh = plain(inside, "roams", TO, (Kind::Pvh, Toolstack::Xl))?;
    let theirs = plain(inside, "theirs", TO, (Kind::Pv, Toolstack::Libvirt))?;
    let filler = DomuSpec {
        memory_mib: FILLING_MIB,
        ..DomuSpec::new("filler", Kind::Pv, &FULL.to_string())
    };
    let filler = inside.create_domu(&filler, Toolstack::Xl)?;
    let crowded = plain(inside, "crowded", FULL, (Kind::Pv, Toolstack::Xl))?;
    let ids = [uuid(&pv)?, uuid(&pvh)?];

    let watched = Watched::begin("crowded");
    let mut agent = start(inside)?;
    for domu in [&mut pv, &mut pvh] {
        wait_moved(inside, domu, TO)?;
        let name = &domu.spec.name;
        let said = wait_said(&mut agent, &[&format!("domain {name} has arrived on node {TO}")])?;
        inside.note(said);
    }
    for (domu, id) in [&pv, &pvh].into_iter().zip(&ids) {
        expect_whole(inside, domu)?;
        expect_one(inside, domu, id)?;
    }
    expect_refused(inside, &mut agent, &crowded, "no-memory")?;
    expect_refused(inside, &mut agent, &theirs, "the domain was not created by xl")?;
    watched.end(inside)?;
    expect_as_before(&pvh, TO)?;
    for domu in [theirs, crowded, filler, pvh] {
        inside.destroy_domu(&domu)?;
    }
    let orphan = orphaned(inside, agent)?;
    for domu in [&pv, &orphan] {
        wait_until(
            &format!("{} to be as before", domu.spec.name),
            MOVED_WITHIN,
            || {
                Ok(match expect_as_before(domu, TO) {
                    Ok(()) => Look::Done(()),
                    Err(error) => Look::NotYet(format!("{error:#}")),
                })
            },
        )?;
    }
    let cut = cut_off(inside)?;
    // The next agent finds the domUs at home, and moves none.
    let agent = start(inside)?;
    std::thread::sleep(Duration::from_secs(15));
    let lines = agent.lines();
    stop(agent)?;
    let again = lines
        .iter()
        .find(|line| line.contains("is on its way") && !line.contains("cut"));
    ensure!(again.is_none(), "expected no second move, saw {again:?}");
    for domu in [&pv, &orphan] {
        expect_as_before(domu, TO)?;
        inside.destroy_domu(domu)?;
    }
    inside.destroy_domu(&cut)
}

/// Checks that a move continues when the agent dies in the middle of it.
fn orphaned(inside: &Inside, mut agent: Program) -> anyhow::Result<Domu> {
    let mut orphan = plain(inside, "orphan", TO, (Kind::Pv, Toolstack::Xl))?;
    let id = uuid(&orphan)?;
    wait_said(&mut agent, &["orphan is on its way"])?;
    wait_copied()?;
    agent.kill()?;
    inside.note("the agent was killed while the domU was being copied".to_owned());
    wait_moved(inside, &mut orphan, TO)?;
    expect_whole(inside, &orphan)?;
    wait_until("the mover to end", MOVED_WITHIN, || {
        Ok(match expect_one(inside, &orphan, &id) {
            Ok(()) => Look::Done(()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
    })?;
    Ok(orphan)
}

/// Everything that moves a domU is killed, and so are the agent and its guard. Checks that `homenode release` leaves one domU,
/// which continues.
fn cut_off(inside: &Inside) -> anyhow::Result<Domu> {
    let mut cut = plain(inside, "cut", TO, (Kind::Pv, Toolstack::Xl))?;
    let id = uuid(&cut)?;
    let mut agent = start(inside)?;
    wait_said(&mut agent, &["cut is on its way"])?;
    wait_copied()?;
    let begin = Instant::now();
    // Kills the mover, and everything that it started.
    let mover = movers()
        .into_iter()
        .find(|(_, _, line)| line.contains("move-domain"));
    let (_, session, _) = mover.context("the domU arrived before the test could cut the move off")?;
    let of_it: Vec<Running> = processes().filter(|(_, of, _)| *of == session).collect();
    for (pid, ..) in &of_it {
        let _ = kill_process(*pid, Signal::KILL);
    }
    let lines: Vec<&str> = of_it.iter().map(|(_, _, line)| line.trim()).collect();
    inside.note(format!("killed in the midst of a move: {lines:?}"));
    inside.note(format!("left: {:?}", of_uuid(&id)?));
    let said = wait_said(&mut agent, &["cut", "a move was cut off in the middle"])?;
    inside.note(said);
    let left = of_uuid(&id)?;
    inside.note(format!("{:.1} s later: {left:?}", begin.elapsed().as_secs_f64()));
    stop(agent)?;
    let number = |line: &String| line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    match (left.len(), left.first().and_then(number)) {
        (1, Some(id)) if id != cut.id => cut.arrived(id),
        _ => {}
    }
    expect_one(inside, &cut, &id)?;
    expect_whole(inside, &cut)?;
    Ok(cut)
}

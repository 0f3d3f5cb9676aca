//! Memory of domUs that lies elsewhere than their vCPUs run: the agent moves it, by migrating them to where they are.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::{Behaviour, MARKER_CHECKED};

use super::agent::{SOON, stop};
use crate::inside::Inside;
use crate::inside::console::count;
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack, Vcpu};
use crate::inside::xen::{domains, userdata};

/// Where domUs' memory is at first, where their vCPUs may run then, and a node that a domU fills.
const FROM: u32 = 3;
const TO: u32 = 2;
const FULL: u32 = 1;
/// Of 1 GiB a node has, so that another domU finds no room.
const FILLING_MIB: u64 = 848;
/// A move takes 10 to 20 s where nothing else runs, and minutes where much does.
const MOVED_WITHIN: Duration = Duration::from_secs(900);
/// What holds memory, writes it, and computes.
const TOUCHED_MIB: u32 = 40;
const WRITE_EVERY_MS: u32 = 150;
/// Emulated, a domU that stands still takes longer than any real one should.
const SETTINGS: &str = "[local_migration]\nallow = \"paused\"\ntime_max = \"3000s\"\npause_max = \"1500s\"\ninterval = \"3600s\"\n";

/// A domU whose memory is on one node, and whose vCPU was then pinned to another.
fn split(inside: &Inside, name: &str, to: u32, (kind, by): (Kind, Toolstack)) -> anyhow::Result<Domu> {
    let writes = Behaviour {
        touch_mib: TOUCHED_MIB,
        every_ms: WRITE_EVERY_MS,
        ..Behaviour::busy(1).with_duty(60)
    };
    let domu = inside.create_domu(&DomuSpec::new(name, kind, &FROM.to_string()).doing(writes), by)?;
    domu.pin(0, &to.to_string())?;
    Ok(domu)
}

/// An agent that may move them.
fn start(inside: &Inside) -> anyhow::Result<Program> {
    let config = inside.dir().join("moves.toml");
    fs::write(&config, SETTINGS).context("cannot write the agent's settings")?;
    let config = config.display().to_string();
    let arguments = [
        "run",
        "--host",
        "xen",
        "--json",
        "--policies",
        "tavo",
        "--config",
        &config,
    ];
    let mut agent = inside.start_homenode(&arguments)?;
    agent.wait_json("anything", SOON, |_| true)?;
    Ok(agent)
}

/// Waits until the agent has said a sentence with these words.
fn wait_said(agent: &mut Program, words: &[&str]) -> anyhow::Result<String> {
    let has = |text: &str| words.iter().all(|word| text.contains(word));
    agent.wait_json(&words.join(" … "), MOVED_WITHIN, |line| has(&line.to_string()))?;
    let lines = agent.lines();
    let said = lines.iter().find(|line| has(line));
    said.cloned().context("what was said is gone")
}

/// Waits until it is another domain of its name, alone, and all its pages are on a node.
fn wait_moved(inside: &Inside, domu: &mut Domu, node: u32) -> anyhow::Result<()> {
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

/// Its guest goes on, and its memory is as it wrote it.
fn expect_whole(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let (before, _) = domu.progress()?;
    let checked = domu.command("check", MARKER_CHECKED)?;
    let (pages, wrong) = (count(&checked, "pages=")?, count(&checked, "wrong=")?);
    let (loops, _) = domu.progress()?;
    let name = &domu.spec.name;
    inside.note(format!("{name}: {checked}, {} loops meanwhile", loops - before));
    ensure!(
        pages == u64::from(TOUCHED_MIB) * 256 && wrong == 0 && loops > before,
        "expected {name} to go on with its memory as it was, saw {checked}, loops {before} to {loops}"
    );
    Ok(())
}

/// It is as its operator had it, and what `xl` keeps of it names no nodes.
fn expect_as_before(domu: &Domu, cpus: u32) -> anyhow::Result<()> {
    let vcpus = domu.vcpus()?;
    let is_so = |vcpu: &Vcpu| vcpu.hard == cpus.to_string() && vcpu.soft == FROM.to_string();
    let name = &domu.spec.name;
    ensure!(
        vcpus.iter().all(is_so),
        "expected {name} on CPU {cpus}, preferring CPU {FROM} as xl was told, saw {vcpus:?}"
    );
    let kept = userdata(domu.id)?;
    ensure!(
        kept.len() == 1 && kept[0].contains("vcpu_hard_affinity") && !kept[0].contains("nodemap"),
        "expected xl's notes on {name} without nodes, saw {kept:?}"
    );
    Ok(())
}

/// See the row of cases.
pub fn moved(inside: &mut Inside) -> anyhow::Result<()> {
    let pvh = split(inside, "roams", TO, (Kind::Pvh, Toolstack::Xl))?;
    let mut pv = split(inside, "still", TO, (Kind::Pv, Toolstack::Xl))?;
    let theirs = split(inside, "theirs", TO, (Kind::Pv, Toolstack::Libvirt))?;
    let filler = DomuSpec {
        memory_mib: FILLING_MIB,
        ..DomuSpec::new("filler", Kind::Pv, &FULL.to_string())
    };
    let filler = inside.create_domu(&filler, Toolstack::Xl)?;
    let crowded = split(inside, "crowded", FULL, (Kind::Pv, Toolstack::Xl))?;

    let mut agent = start(inside)?;
    wait_moved(inside, &mut pv, TO)?;
    let said = wait_said(&mut agent, &[&format!("domain still has arrived on node {TO}")])?;
    inside.note(said);
    expect_whole(inside, &pv)?;
    let said = wait_said(&mut agent, &["roams", "illegal instruction"])?;
    inside.note(said);
    let said = wait_said(&mut agent, &["crowded", "no-memory"])?;
    inside.note(said);
    let said = wait_said(&mut agent, &["theirs", "xl did not make it"])?;
    inside.note(said);
    for domu in [&theirs, &crowded, &pvh] {
        let pages = domu.pages_by_node()?;
        ensure!(
            pages.iter().sum::<u64>() == pages[FROM as usize],
            "expected {} to stay on node {FROM}, saw {pages:?}",
            domu.spec.name
        );
        expect_whole(inside, domu)?;
    }
    for domu in [theirs, crowded, filler, pvh] {
        inside.destroy_domu(&domu)?;
    }

    // The agent dies in the midst of a move, which goes on without it.
    let mut orphan = split(inside, "orphan", TO, (Kind::Pv, Toolstack::Xl))?;
    wait_said(&mut agent, &["orphan is on its way"])?;
    agent.kill()?;
    inside.note("the agent was killed while the domU was on its way".to_owned());
    wait_moved(inside, &mut orphan, TO)?;
    expect_whole(inside, &orphan)?;
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
    // Another agent finds them at home.
    let agent = start(inside)?;
    std::thread::sleep(Duration::from_secs(15));
    let lines = agent.lines();
    stop(agent)?;
    let again = lines.iter().find(|line| line.contains("is on its way"));
    ensure!(again.is_none(), "expected nothing to move again, saw {again:?}");
    for domu in [&pv, &orphan] {
        expect_as_before(domu, TO)?;
        inside.destroy_domu(domu)?;
    }
    Ok(())
}

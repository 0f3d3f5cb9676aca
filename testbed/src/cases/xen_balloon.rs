//! Memory that is taken from domUs through their balloons. Cases judge by Xen's count of a domain's pages, and by what the
//! domUs' own programs find in their memory.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::{Act, Host as _, Limit, Outcome};
use homenode_testbed_guest::{Behaviour, MARKER_CHECKED};
use homenode_undo::RealHost as _;
use homenode_undo::{Heartbeat, Options, guard};
use homenode_units::{Bytes, Ns};
use homenode_xen::XenHost;

use super::agent::SOON;
use crate::inside::Inside;
use crate::inside::acts::{commit, find};
use crate::inside::console::count;
use crate::inside::libvirtd::run;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::inside::xen::{IMAGE_DIR, domains, xl};

/// Memory of a domU, the agent's limit on it, and how much of it the domU writes and checks, in MiB.
const MEMORY_MIB: u64 = 192;
const HELD_MIB: u64 = 136;
const TOUCHED_MIB: u32 = 40;
/// How far from its target a balloon may come to rest, in pages: PVH domains have some pages in addition to their memory.
const NEAR_PAGES: u64 = 512;
/// How long a guard here waits for another agent after its own has died.
const GRACE: &str = "2s";

fn create(inside: &Inside, name: &str, (kind, by): (Kind, Toolstack)) -> anyhow::Result<Domu> {
    let writes = Behaviour {
        touch_mib: TOUCHED_MIB,
        every_ms: 500,
        ..Behaviour::busy(1).with_duty(20)
    };
    let mut spec = DomuSpec::new(name, kind, "2").doing(writes);
    spec.memory_mib = MEMORY_MIB;
    inside.create_domu(&spec, by)
}

fn target_kib(domu: &Domu) -> anyhow::Result<u64> {
    let text = run(
        "xenstore-read",
        &[&format!("/local/domain/{}/memory/target", domu.id)],
    )?;
    text.trim()
        .parse()
        .context("the domU's balloon target is not a number")
}

/// Waits until the domU has this much memory, as Xen counts it.
fn wait_has(inside: &Inside, domu: &Domu, mib: u64) -> anyhow::Result<()> {
    let (name, begin) = (&domu.spec.name, Instant::now());
    let pages = wait_until(&format!("{name} to have {mib} MiB"), SOON, || {
        let pages: u64 = domu.pages_by_node()?.iter().sum();
        Ok(match pages.abs_diff(mib * 256) <= NEAR_PAGES {
            true => Look::Done(pages),
            false => Look::NotYet(format!("{pages} pages")),
        })
    })?;
    inside.note(format!(
        "{name} has {pages} pages, seen after {:.1} s",
        begin.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Checks that the domU still answers, and that its memory is as written.
fn expect_whole(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let checked = domu.command("check", MARKER_CHECKED)?;
    let (pages, wrong) = (count(&checked, "pages=")?, count(&checked, "wrong=")?);
    inside.note(format!("{}: {checked}", domu.spec.name));
    ensure!(
        pages == u64::from(TOUCHED_MIB) * 256 && wrong == 0,
        "expected the memory of {} to be unchanged, saw {checked}",
        domu.spec.name
    );
    Ok(())
}

fn hold(host: &mut XenHost, name: &str) -> anyhow::Result<()> {
    let vm = find(host, name)?;
    let balloon = vm.balloon.with_context(|| format!("{name} has no balloon"))?;
    ensure!(
        balloon.maximum == Bytes::from_mib(MEMORY_MIB),
        "expected the maximum to be what the operator gave the domU, saw {balloon:?}"
    );
    let limit = Act::Limit {
        limit: Limit::Memory(Bytes::from_mib(HELD_MIB)),
        lease_ns: Ns::from_secs(3600),
    };
    let outcomes = commit(host, vm.id, limit)?;
    ensure!(
        outcomes == [Outcome::Done],
        "expected the memory limit of {name} to be set, saw {outcomes:?}"
    );
    Ok(())
}

/// Connects to the host and starts a guard for it, as the agent does.
fn guarded(inside: &Inside) -> anyhow::Result<(XenHost, guard::Guard)> {
    let (state, heartbeat) = (inside.dir().join("state"), Heartbeat::default());
    let options = Options {
        state_dir: state.clone(),
        heartbeat: heartbeat.clone(),
        ..Options::new(XenHost::machine_here(Path::new("/"))?)
    };
    let host = XenHost::connect(options).map_err(|error| anyhow!(error))?;
    let state = state.display().to_string();
    let arguments = ["guard", "--host", "xen", "--state", &state, "--grace", GRACE];
    let guard = guard::spawn(&inside.homenode()?, &arguments.map(Into::into), &heartbeat)?;
    Ok((host, guard))
}

/// Checks that the agent's memory limit on two domUs takes effect, that it is undone when the agent is gone, and that the domUs
/// keep what they wrote.
pub(super) fn held(inside: &mut Inside) -> anyhow::Result<()> {
    let mut pv = create(inside, "pv", (Kind::Pv, Toolstack::Xl))?;
    let pvh = create(inside, "pvh", (Kind::Pvh, Toolstack::Libvirt))?;
    let (mut host, guard) = guarded(inside)?;
    for domu in [&pv, &pvh] {
        hold(&mut host, &domu.spec.name)?;
    }
    for domu in [&pv, &pvh] {
        wait_has(inside, domu, HELD_MIB)?;
        expect_whole(inside, domu)?;
    }
    // Dropping the host looks as if the agent had died: its lock and its end of the guard's pipe are gone, but it has not told
    // the guard to end.
    drop(host);
    drop(guard);
    for domu in [&pv, &pvh] {
        wait_has(inside, domu, MEMORY_MIB)?;
        expect_whole(inside, domu)?;
        let target = target_kib(domu)?;
        ensure!(
            target == MEMORY_MIB << 10,
            "expected the operator's memory target of {} again, saw {target} KiB",
            domu.spec.name
        );
    }
    inside.destroy_domu(&pvh)?;
    saved(inside, &mut pv)?;
    inside.destroy_domu(&pv)
}

/// Checks that a domU that `xl` saved together with the agent's limit gets its operator's memory back once it is restored.
fn saved(inside: &Inside, domu: &mut Domu) -> anyhow::Result<()> {
    let mut host = super::xen_agent::host(inside)?;
    let name = domu.spec.name.clone();
    hold(&mut host, &name)?;
    wait_has(inside, domu, HELD_MIB)?;
    let file = format!("{IMAGE_DIR}/{name}.save");
    xl(&["save", &name, &file])?;
    host.sample()?;
    xl(&["restore", &file])?;
    fs::remove_file(&file)?;
    domu.id = wait_until("the domU to be back", Duration::from_secs(60), || {
        let found = domains()?.into_iter().find(|(_, other)| *other == name);
        Ok(found.map_or_else(|| Look::NotYet("it is not".to_owned()), |(id, _)| Look::Done(id)))
    })?;
    inside.note(format!("restored it is to come to {} KiB", target_kib(domu)?));
    wait_until("the agent to return its memory", SOON, || {
        host.sample()?;
        let target = target_kib(domu)?;
        Ok(match target == MEMORY_MIB << 10 {
            true => Look::Done(()),
            false => Look::NotYet(format!("it is to come to {target} KiB")),
        })
    })?;
    wait_has(inside, domu, MEMORY_MIB)?;
    expect_whole(inside, domu)?;
    let failures = host.restore().failures;
    ensure!(
        failures.is_empty(),
        "expected every domain restored, saw {failures:?}"
    );
    Ok(())
}

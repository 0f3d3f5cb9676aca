//! The agent's levers on a domU that is paused, renamed, saved, restored and rebooted, and while xenstored is stopped.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::{Act, CpuQuota, Host as _, Immovable, Limit, Outcome};
use homenode_testbed_guest::Behaviour;
use homenode_undo::RealHost as _;
use homenode_units::{Ns, VmId};
use homenode_xen::XenHost;

use super::agent::SOON;
use super::xen_agent::host;
use crate::inside::Inside;
use crate::inside::acts::{commit, find};
use crate::inside::process::{Ended, Program};
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::inside::xen::{IMAGE_DIR, Stopped, domains, node_affinity, xl};

/// The operator's cap, and the agent's, in percent.
const OPERATORS: u32 = 80;
const OURS: u32 = 30;
/// Time within which the agent must continue if xenstored does not answer.
const WITHOUT_STORE: Duration = Duration::from_secs(20);

fn does(host: &mut XenHost, vm: VmId, act: &Act) -> anyhow::Result<()> {
    let outcomes = commit(host, vm, act.clone())?;
    ensure!(
        matches!(outcomes[..], [Outcome::Done | Outcome::Renewed]),
        "expected {act:?} to be done, saw {outcomes:?}"
    );
    Ok(())
}

/// Gives the domU a home on node 3, and a cap below its operator's.
fn hold(host: &mut XenHost, name: &str) -> anyhow::Result<VmId> {
    let vm = find(host, name)?.id;
    let nodes = "3".parse().map_err(|error| anyhow!("{error}"))?;
    does(host, vm, &Act::SetHome { nodes })?;
    let cpus = "3".parse().map_err(|error| anyhow!("{error}"))?;
    does(host, vm, &Act::PinVcpus { vcpus: vec![0], cpus })?;
    let quota = CpuQuota::of(f64::from(OURS) / 100.0, Ns::from_millis(30));
    let limit = Act::Limit {
        limit: Limit::CpuQuota(quota),
        lease_ns: Ns::from_secs(3600),
    };
    does(host, vm, &limit)?;
    Ok(vm)
}

/// Waits until the domU has another number, and runs.
fn again(domu: &mut Domu) -> anyhow::Result<()> {
    let (name, before) = (domu.spec.name.clone(), domu.id);
    domu.id = wait_until("another run of the domU", SOON, || {
        let found = domains()?
            .into_iter()
            .find(|(id, other)| *other == name && *id != before);
        Ok(found.map_or_else(
            || Look::NotYet("there is none".to_owned()),
            |(id, _)| Look::Done(id),
        ))
    })?;
    wait_until("the domU to run", SOON, || {
        let cpu = domu.vcpus()?.first().and_then(|vcpu| vcpu.cpu);
        let is_paused = xl(&["list", &name])?
            .lines()
            .last()
            .is_some_and(|line| line.contains("--p"));
        Ok(match cpu {
            Some(_) if !is_paused => Look::Done(()),
            _ => Look::NotYet("it does not".to_owned()),
        })
    })
}

fn is_operators(domu: &Domu) -> anyhow::Result<()> {
    let cap = domu.cap()?;
    ensure!(
        cap == OPERATORS,
        "expected the operator's cap of {OPERATORS} percent, saw {cap}"
    );
    Ok(())
}

fn release(inside: &Inside) -> anyhow::Result<Program> {
    let state = inside.dir().join("state");
    let state = state.to_str().context("a path is not UTF-8")?;
    inside.start_homenode(&["release", "--host", "xen", "--state", state])
}

/// Checks the agent's changes to a domU while that domU is paused, renamed, saved, restored and rebooted, and while xenstored is
/// stopped.
pub(super) fn lives(inside: &mut Inside) -> anyhow::Result<()> {
    let spec = DomuSpec::new("lives", Kind::Pv, "1-3").doing(Behaviour::busy(1));
    let mut domu = inside.create_domu(&spec.that_reboots(), Toolstack::Xl)?;
    domu.set_credit(512, OPERATORS)?;
    let mut host = host(inside)?;
    hold(&mut host, "lives")?;
    paused_and_renamed(&mut host, &domu)?;
    saved_and_restored(inside, &mut host, &mut domu)?;
    stood_still(inside, &mut host, &domu)?;
    hold(&mut host, "lives")?;
    for notice in host.take_notices() {
        inside.note(notice);
    }
    // Dropping the host looks as if the agent and its guard had died. Then the domain reboots.
    drop(host);
    xl(&["reboot", "lives"])?;
    again(&mut domu)?;
    inside.note(format!(
        "booted again it has a cap of {}, and vCPUs {:?}",
        domu.cap()?,
        domu.vcpus()?
    ));
    let ended = release(inside)?.wait_end(SOON)?;
    ensure!(
        ended == Ended::Status(0),
        "expected `release` to end with status 0, saw {ended:?}"
    );
    is_operators(&domu)?;
    released_without_xenstored(inside, &domu)?;
    inside.destroy_domu(&domu)
}

fn paused_and_renamed(host: &mut XenHost, domu: &Domu) -> anyhow::Result<()> {
    xl(&["pause", "lives"])?;
    let paused = find(host, "lives")?;
    xl(&["unpause", "lives"])?;
    ensure!(
        paused.immovable == Some(Immovable::Paused),
        "expected the sample to show the domU as paused, saw {:?}",
        paused.immovable
    );
    xl(&["rename", "lives", "renamed"])?;
    let renamed = find(host, "renamed")?;
    ensure!(
        renamed.id == paused.id && renamed.settings == paused.settings,
        "expected the same domU under another name, saw {renamed:?} after {paused:?}"
    );
    xl(&["rename", "renamed", "lives"])?;
    ensure!(domu.cap()? == OURS, "expected the agent's cap to stay");
    Ok(())
}

/// Saves and restores the domU. `xl` writes the agent's cap into the file.
fn saved_and_restored(inside: &Inside, host: &mut XenHost, domu: &mut Domu) -> anyhow::Result<()> {
    let file = format!("{IMAGE_DIR}/lives.save");
    xl(&["save", "lives", &file])?;
    ensure!(
        host.sample()?.vms.is_empty(),
        "expected no domU while it is saved"
    );
    xl(&["restore", &file])?;
    std::fs::remove_file(&file)?;
    again(domu)?;
    let cap = domu.cap()?;
    inside.note(format!(
        "restored it has a cap of {cap}, and vCPUs {:?}",
        domu.vcpus()?
    ));
    ensure!(
        cap == OURS,
        "expected `xl` to have restored the cap of {OURS} percent that it saved, saw {cap}"
    );
    let settings = find(host, "lives")?.settings;
    is_operators(domu)?;
    let share = settings.quota.map(CpuQuota::share);
    ensure!(
        share.is_some_and(|share| (share - 0.8).abs() < 0.01),
        "expected the agent to see the operator's cap, saw {settings:?}"
    );
    Ok(())
}

/// While xenstored is stopped, the agent uses the names that it already knows.
fn stood_still(inside: &Inside, host: &mut XenHost, domu: &Domu) -> anyhow::Result<()> {
    host.sample()?;
    for notice in host.take_notices() {
        inside.note(notice);
    }
    let begun = Instant::now();
    let stopped = Stopped::xenstored()?;
    find(host, "lives")?;
    let first = begun.elapsed();
    find(host, "lives")?;
    hold(host, "lives")?;
    let took = begun.elapsed();
    stopped.goes_on()?;
    inside.note(format!(
        "without xenstored a look took {:.1} s, and all of it {:.1} s",
        first.as_secs_f64(),
        took.as_secs_f64()
    ));
    ensure!(
        took < WITHOUT_STORE,
        "expected the agent to continue within {WITHOUT_STORE:?}, saw {took:?}"
    );
    let said = host.take_notices();
    let count = said.iter().filter(|text| text.contains("xenstored")).count();
    ensure!(count == 1, "expected one notice about xenstored, saw {said:?}");
    ensure!(domu.cap()? == OURS, "expected the agent's cap to be in force");
    wait_until("xenstored to answer the agent", SOON, || {
        xl(&["rename", "lives", "awake"])?;
        let is_seen = find(host, "awake").is_ok();
        xl(&["rename", "awake", "lives"])?;
        Ok(if is_seen {
            Look::Done(())
        } else {
            Look::NotYet("it has the old name".to_owned())
        })
    })
}

/// `homenode release` works without xenstored.
fn released_without_xenstored(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let mut host = host(inside)?;
    hold(&mut host, "lives")?;
    drop(host);
    let begun = Instant::now();
    let stopped = Stopped::xenstored()?;
    let ended = release(inside)?.wait_end(SOON);
    let took = begun.elapsed();
    stopped.goes_on()?;
    let ended = ended?;
    ensure!(
        ended == Ended::Status(0),
        "expected `release` to end with status 0, saw {ended:?}"
    );
    inside.note(format!(
        "released without xenstored after {:.1} s",
        took.as_secs_f64()
    ));
    is_operators(domu)?;
    let hard = &domu.vcpus()?[0].hard;
    ensure!(hard == "1-3", "expected CPUs 1-3 for its vCPU, saw {hard}");
    Ok(())
}

/// Checks that after its release a domU whose memory followed its CPUs follows them again, and that one with explicit nodes keeps
/// its nodes.
pub(super) fn nodes(inside: &mut Inside) -> anyhow::Result<()> {
    let follows = inside.create_domu(&DomuSpec::new("follows", Kind::Pv, "1-3"), Toolstack::Xl)?;
    let placed = inside.create_domu(&DomuSpec::anywhere("placed", Kind::Pv), Toolstack::Xl)?;
    let seen = |what: &str| {
        let seen = (node_affinity("follows")?, node_affinity("placed")?);
        inside.note(format!("{what}: node affinities {} and {}", seen.0, seen.1));
        anyhow::Ok(seen)
    };
    let before = seen("as created")?;
    let mut host = host(inside)?;
    for name in ["follows", "placed"] {
        let vm = find(&mut host, name)?.id;
        let nodes = "0".parse().map_err(|error| anyhow!("{error}"))?;
        does(&mut host, vm, &Act::SetHome { nodes })?;
        let cpus = "2".parse().map_err(|error| anyhow!("{error}"))?;
        does(&mut host, vm, &Act::PinVcpus { vcpus: vec![0], cpus })?;
    }
    let at_home = seen("at home on node 0, on CPU 2")?;
    ensure!(
        at_home == ("0".into(), "0".into()),
        "expected both domUs on node 0, saw {at_home:?}"
    );
    let failures = host.restore().failures;
    ensure!(
        failures.is_empty(),
        "expected every domain restored, saw {failures:?}"
    );
    let after = seen("released")?;
    ensure!(
        after == before,
        "expected node affinity {before:?} again, saw {after:?}"
    );
    for domu in [&follows, &placed] {
        domu.pin(0, "1")?;
    }
    let pinned = seen("pinned to CPU 1 by the operator")?;
    ensure!(
        pinned == ("1".into(), before.1.clone()),
        "expected the first domU alone to follow to node 1, saw {pinned:?}"
    );
    for domu in [&follows, &placed] {
        inside.destroy_domu(domu)?;
    }
    Ok(())
}

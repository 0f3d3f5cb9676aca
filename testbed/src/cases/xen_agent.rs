//! The agent in dom0: the host contract on real domUs, homes and pins, and what remains when the agent is killed.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::conformance::CHECKS;
use homenode_host::{Act, CpuQuota, Host as _, Limit, Outcome};
use homenode_testbed_guest::Behaviour;
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use homenode_units::Ns;
use homenode_xen::XenHost;

use super::agent::{SOON, start_acting, stop};
use super::conformance;
use crate::inside::Inside;
use crate::inside::acts::{commit, find};
use crate::inside::process::{Ended, Program};
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};

/// CPUs that domUs may use: dom0 has CPU 0.
const CPUS: &str = "1-3";
/// Time in which the guard must undo everything. It first waits 10 s for another agent, and under emulation the same
/// instructions take many times as long.
const UNDONE_WITHIN: Duration = Duration::from_secs(120);
/// Checks that stock Xen does not let dom0 pass, on either kind of domU. Each is refused with the reason.
const NOT_HERE: [&str; 8] = [
    "a memory policy is seen once it is set, and one that the host cannot have leaves the one before",
    "a home holds no vCPU, moves no page, and keeps what was brought there",
    "pages move within the budget, and the sample agrees with the receipt",
    "named pages move from where they are said to lie, and the sample agrees with the receipt",
    "a virtual node's memory moves within the budget, and no other's with it",
    "a part of caches or bandwidth is seen, can be renewed and lifted, and ends with its lease",
    "a watched VM's memory is seen once a window, and no more once the lease is over",
    "what a guest is told is seen, with a new sequence each time, and stays until it is told otherwise",
];

/// Connects to the host, for a case that acts like the agent's loop.
pub(super) fn host(inside: &Inside) -> anyhow::Result<XenHost> {
    let options = Options {
        state_dir: inside.dir().join("state"),
        ..Options::new(XenHost::machine_here(Path::new("/"))?)
    };
    XenHost::connect(options).map_err(|error| anyhow!(error))
}

/// Runs every check of the host contract on two domUs, which cover both kinds and both toolstacks.
pub(super) fn contract(inside: &mut Inside) -> anyhow::Result<()> {
    let mut host = super::xen_waiting::host(inside)?;
    let busy = Behaviour::busy(1).with_duty(60).with_touch(20);
    for (name, kind, by) in [
        ("pv", Kind::Pv, Toolstack::Libvirt),
        ("pvh", Kind::Pvh, Toolstack::Xl),
    ] {
        let domu = inside.create_domu(&DomuSpec::new(name, kind, CPUS).doing(busy), by)?;
        let skipped = conformance::check(inside, &mut host, name, CHECKS)?;
        let skipped: Vec<&str> = skipped.iter().map(|check| check.name).collect();
        let other: Vec<&&str> = skipped.iter().filter(|name| !NOT_HERE.contains(name)).collect();
        ensure!(
            other.is_empty(),
            "expected these checks not to be skipped: {other:?}"
        );
        let sample = host.sample()?;
        let vcpus = sample.vms.iter().flat_map(|vm| &vm.vcpus);
        ensure!(
            vcpus.clone().count() == 1 && vcpus.clone().all(|vcpu| vcpu.waiting_ns.is_some()),
            "expected a waiting time of {name}, saw {:?}",
            vcpus.collect::<Vec<_>>()
        );
        inside.destroy_domu(&domu)?;
    }
    let failures = host.restore().failures;
    ensure!(
        failures.is_empty(),
        "expected every domain restored, saw {failures:?}"
    );
    Ok(())
}

/// Starts an agent that gives domUs homes as published (TAVO).
pub(super) fn start(inside: &Inside) -> anyhow::Result<Program> {
    start_acting(inside, "xen", &["--policies", "tavo"])
}

fn affinities(domu: &Domu) -> anyhow::Result<Vec<String>> {
    Ok(domu.vcpus()?.into_iter().map(|vcpu| vcpu.hard).collect())
}

fn wait_affinity(domu: &Domu, cpus: &str, limit: Duration) -> anyhow::Result<()> {
    let what = format!("all vCPUs of {} to be allowed CPUs {cpus}", domu.spec.name);
    wait_until(&what, limit, || {
        let seen = affinities(domu)?;
        let is_so = seen.iter().all(|seen| seen == cpus);
        Ok(if is_so {
            Look::Done(())
        } else {
            Look::NotYet(format!("{seen:?}"))
        })
    })
}

/// Creates a domU whose memory is on one node and whose vCPU may run on three.
fn strayed(inside: &Inside, name: &str, node: u32, (kind, by): (Kind, Toolstack)) -> anyhow::Result<Domu> {
    let busy = Behaviour::busy(1).with_touch(20);
    let domu = inside.create_domu(&DomuSpec::new(name, kind, &node.to_string()).doing(busy), by)?;
    domu.pin(0, CPUS)?;
    Ok(domu)
}

/// Checks that vCPUs come to the node that has the memory, and that they have their operator's CPUs again once the agent is
/// killed or stopped.
pub(super) fn homes(inside: &mut Inside) -> anyhow::Result<()> {
    let pv = strayed(inside, "pv", 3, (Kind::Pv, Toolstack::Libvirt))?;
    let pvh = strayed(inside, "pvh", 2, (Kind::Pvh, Toolstack::Xl))?;
    let at_home = |inside: &Inside| {
        for (domu, node) in [(&pv, "3"), (&pvh, "2")] {
            wait_affinity(domu, node, SOON)?;
            let pages = domu.pages_by_node()?;
            inside.note(format!(
                "{} is at home on node {node}: pages {pages:?}",
                domu.spec.name
            ));
        }
        anyhow::Ok(())
    };
    let mut agent = start(inside)?;
    at_home(inside)?;
    agent.kill()?;
    let begin = Instant::now();
    for domu in [&pv, &pvh] {
        wait_affinity(domu, CPUS, UNDONE_WITHIN)?;
    }
    inside.note(format!(
        "the agent was killed: undone after {:.1} s",
        begin.elapsed().as_secs_f64()
    ));

    let agent = start(inside)?;
    at_home(inside)?;
    // A pin that another program sets is left alone, and remains.
    pvh.pin(0, "1-2")?;
    stop(agent)?;
    wait_affinity(&pv, CPUS, Duration::from_secs(5))?;
    wait_affinity(&pvh, "1-2", Duration::from_secs(5))?;
    for domu in [&pv, &pvh] {
        inside.destroy_domu(domu)?;
    }
    Ok(())
}

/// Checks that `homenode release` lifts the cap of an agent that died without a guard, and that the operator's cap is in force
/// again.
pub(super) fn caps(inside: &mut Inside) -> anyhow::Result<()> {
    let domu = inside.create_domu(
        &DomuSpec::new("held", Kind::Pv, "3").doing(Behaviour::busy(1)),
        Toolstack::Xl,
    )?;
    domu.set_credit(256, 80)?;
    let mut host = host(inside)?;
    let vm = find(&mut host, "held")?;
    let quota = CpuQuota::of(0.3, Ns::from_millis(30));
    let limit = Act::Limit {
        limit: Limit::CpuQuota(quota),
        lease_ns: Ns::from_secs(600),
    };
    let outcomes = commit(&mut host, vm.id, limit)?;
    ensure!(
        outcomes == [Outcome::Done],
        "expected the cap to be set, saw {outcomes:?}"
    );
    let begun = host.sample()?;
    host.wait(Ns::from_secs(5));
    let ended = host.sample()?;
    let ran = |sample: &homenode_host::Sample| {
        sample
            .vms
            .iter()
            .find(|found| found.id == vm.id)
            .map(|found| found.vcpus[0].running_ns.as_f64())
    };
    let (Some(before), Some(after)) = (ran(&begun), ran(&ended)) else {
        return Err(anyhow!("the domU ended before it could be measured"));
    };
    let share = (after - before) / ended.at.saturating_sub(begun.at).as_f64();
    inside.note(format!(
        "held to 30 percent it ran {:.1} percent of 5 s",
        share * 100.0
    ));
    ensure!(
        (0.15..=0.33).contains(&share),
        "expected the capped domU to use 0.15 to 0.33 of a CPU, saw {share:.3}"
    );
    // Dropping the host looks as if the agent and its guard had died.
    drop(host);
    let state = inside.dir().join("state");
    let state = state.to_str().context("a path is not UTF-8")?;
    let mut release = inside.start_homenode(&["release", "--host", "xen", "--state", state])?;
    let ended = release.wait_end(SOON)?;
    ensure!(
        ended == Ended::Status(0),
        "expected `release` to end with status 0, saw {ended:?}"
    );
    let cap = domu.cap()?;
    ensure!(
        cap == 80,
        "expected the domU's own cap of 80 percent again, saw {cap}"
    );
    inside.destroy_domu(&domu)
}

/// Compares where three busy domUs are when Xen's toolstack places them, and when they are given the two lines that we print.
/// With our lines each domU has its memory on one node, and a CPU to itself. The comparison is noted, not judged.
pub(super) fn placed(inside: &mut Inside) -> anyhow::Result<()> {
    let busy = Behaviour::busy(1).with_touch(20);
    let mut homes = Vec::new();
    for is_ours in [false, true] {
        let mut domus = Vec::new();
        for number in 0..3 {
            let name = format!("start{number}");
            let spec = match is_ours {
                false => DomuSpec::anywhere(&name, Kind::Pv),
                true => DomuSpec::new(&name, Kind::Pv, &advice(inside, "128MiB")?),
            };
            let domu = inside.create_domu(&spec.doing(busy), Toolstack::Xl)?;
            let (pages, vcpus) = (domu.pages_by_node()?, domu.vcpus()?);
            let whose = if is_ours { "ours" } else { "xl's own" };
            inside.note(format!(
                "{whose}: {name} may run on {}, prefers {}, pages {pages:?}",
                vcpus[0].hard, vcpus[0].soft
            ));
            if is_ours {
                let on: Vec<usize> = (0..pages.len()).filter(|node| pages[*node] > 0).collect();
                ensure!(
                    on.len() == 1,
                    "expected all pages of {name} on one node, saw {pages:?}"
                );
                ensure!(
                    vcpus[0].hard == on[0].to_string(),
                    "expected the domU's vCPU on node {}, saw {vcpus:?}",
                    on[0]
                );
                homes.push(on[0]);
            }
            domus.push(domu);
        }
        for domu in &domus {
            inside.destroy_domu(domu)?;
        }
    }
    homes.sort_unstable();
    homes.dedup();
    ensure!(
        homes.len() == 3,
        "expected three nodes for three busy domUs, saw {homes:?}"
    );
    let doctor = inside.told("doctor", &[])?;
    let features = doctor["features"]
        .as_array()
        .context("doctor names no features")?;
    let has = |name: &str| {
        features
            .iter()
            .find(|one| one["feature"] == name)
            .map(|one| one["has"] == true)
    };
    ensure!(
        ["Xen", "caps", "page moves"].map(has) == [Some(true); 3],
        "expected Xen, caps and page moves to be there, saw {doctor}"
    );
    Ok(())
}

/// Returns the CPUs that `homenode place --xl` prints for a domU of one vCPU and this much memory.
pub(super) fn advice(inside: &Inside, memory: &str) -> anyhow::Result<String> {
    let output = Command::new(inside.homenode()?)
        .args(["place", "--vcpus", "1", "--memory", memory, "--xl"])
        .output()
        .context("cannot run homenode place")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let of = |key: &str| {
        let mut lines = text
            .lines()
            .filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'));
        lines.next().map(str::to_owned)
    };
    match (of("cpus"), of("cpus_soft")) {
        (Some(hard), Some(soft)) if hard == soft => Ok(hard),
        _ => Err(anyhow!(
            "expected `cpus` and `cpus_soft`, saw {text}{}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

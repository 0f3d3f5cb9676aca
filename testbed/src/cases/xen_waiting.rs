//! How long vCPUs wait for a CPU, as the host reads it from Xen's trace, compared with the guests' steal; and who may use the
//! trace.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::{Host as _, Sample};
use homenode_testbed_guest::Behaviour;
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use homenode_units::Ns;
use homenode_xen::XenHost;

use super::agent::{SOON, start_acting};
use crate::inside::Inside;
use crate::inside::libvirtd::run;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};

/// The CPU that the first two domUs share; dom0 has CPU 0.
const CPU: &str = "3";
/// How long the domUs are watched.
const WATCHED: Ns = Ns::from_secs(15);
/// How far waiting may differ from the guest's steal, as a share of the time. A guest counts in ticks of 4 ms, and is asked a
/// little earlier or later.
const NEAR: f64 = 0.05;
/// The cap of the third domU, in percent.
const CAP: u32 = 40;

/// Connects to the host, with its trace.
pub(super) fn host(inside: &Inside) -> anyhow::Result<XenHost> {
    let options = Options {
        state_dir: inside.dir().join("state"),
        trace_waiting: true,
        ..Options::new(XenHost::machine_here(Path::new("/"))?)
    };
    XenHost::connect(options).map_err(|error| anyhow!(error))
}

/// Runs `xentrace` for a second, as an operator would. Returns whether it could.
fn operator() -> anyhow::Result<bool> {
    let mut command = Command::new("xentrace");
    command.args(["-D", "-e", "0x21000", "-T", "1", "/run/operator.trace"]);
    let output = command.output().context("cannot run xentrace")?;
    Ok(output.status.success())
}

/// Returns the processes of this name.
fn named(name: &str) -> Vec<i32> {
    let output = run("pidof", &[name]).unwrap_or_default();
    output
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// Returns the CPU time that a process has used so far.
fn cpu_time(pid: i32) -> anyhow::Result<Ns> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?;
    let mut sum = Ns::ZERO;
    for task in tasks {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let ran = text.split_whitespace().next().and_then(|ran| ran.parse().ok());
        sum += Ns(ran.context("schedstat has no time")?);
    }
    Ok(sum)
}

/// Checks that waiting matches the guests' steal, that the part due to a cap is reported, and that the operator can use the trace
/// once the host is gone.
pub(super) fn waiting(inside: &mut Inside) -> anyhow::Result<()> {
    let busy = Behaviour::busy(1);
    let mut domus = Vec::new();
    for (name, kind) in [("first", Kind::Pv), ("second", Kind::Pvh)] {
        domus.push(inside.create_domu(&DomuSpec::new(name, kind, CPU).doing(busy), Toolstack::Xl)?);
    }
    let spec = DomuSpec::new("capped", Kind::Pv, "2").doing(busy);
    domus.push(inside.create_domu(&spec, Toolstack::Xl)?);
    domus[2].set_credit(256, CAP)?;

    let mut host = host(inside)?;
    let mut notices = Vec::new();
    wait_until("the trace to tell of all vCPUs", SOON, || {
        let sample = host.sample()?;
        notices.extend(host.take_notices());
        let is_told = |vm: &homenode_host::VmSample| vm.vcpus.iter().all(|vcpu| vcpu.waiting_ns.is_some());
        Ok(
            match sample.vms.len() == domus.len() && sample.vms.iter().all(is_told) {
                true => Look::Done(()),
                false => Look::NotYet(format!("{} domUs; {notices:?}", sample.vms.len())),
            },
        )
    })?;
    ensure!(
        !operator()?,
        "expected the operator's xentrace not to start beside ours"
    );
    compare(inside, &mut host, &domus)?;
    drop(host);
    ensure!(
        named("xentrace").is_empty(),
        "expected xentrace to end with the host"
    );
    ensure!(
        operator()?,
        "expected the operator's xentrace to run after the agent's host was dropped"
    );

    killed(inside)?;
    for domu in &domus {
        inside.destroy_domu(domu)?;
    }
    Ok(())
}

/// Compares the host's figures with each guest's over the same time, and notes what the trace costs.
fn compare(inside: &Inside, host: &mut XenHost, domus: &[Domu]) -> anyhow::Result<()> {
    let steal = |domu: &Domu| anyhow::Ok((Instant::now(), domu.progress()?.1));
    let tracer = *named("xentrace").first().context("xentrace does not run")?;
    let before = (
        host.sample()?,
        domus.iter().map(steal).collect::<Result<Vec<_>, _>>()?,
    );
    let (begin, cost) = (Instant::now(), cpu_time(tracer)?);
    host.wait(WATCHED);
    let took = begin.elapsed();
    let cost = cpu_time(tracer)?.saturating_sub(cost);
    let after = (
        host.sample()?,
        domus.iter().map(steal).collect::<Result<Vec<_>, _>>()?,
    );
    inside.note(format!(
        "xentrace took {:.2} percent of dom0's CPU",
        100.0 * cost.as_secs_f64() / took.as_secs_f64()
    ));
    for (at, domu) in domus.iter().enumerate() {
        let name = domu.spec.name.as_str();
        let vcpu = |sample: &Sample| {
            let vm = sample.vms.iter().find(|vm| vm.name == name);
            let vcpu = vm.and_then(|vm| vm.vcpus.first()).context("no vCPU")?;
            let waiting = vcpu
                .waiting_ns
                .with_context(|| format!("the waiting time of {name} is unknown"))?;
            anyhow::Ok((waiting.as_secs_f64(), vcpu.throttled_ns.as_secs_f64()))
        };
        let time = after.0.at.saturating_sub(before.0.at).as_secs_f64();
        let (begun, ended) = (vcpu(&before.0)?, vcpu(&after.0)?);
        let (waited, throttled) = ((ended.0 - begun.0) / time, (ended.1 - begun.1) / time);
        let stolen = (after.1[at].1 - before.1[at].1).as_secs_f64()
            / after.1[at].0.duration_since(before.1[at].0).as_secs_f64();
        inside.note(format!(
            "{name} waited {:.1} percent, of it {:.1} for its cap; its kernel counts {:.1}",
            100.0 * waited,
            100.0 * throttled,
            100.0 * stolen
        ));
        ensure!(
            (waited - stolen).abs() <= NEAR,
            "expected {name} to wait as long as its kernel counts, {stolen:.3}, saw {waited:.3}"
        );
        let of_cap = if name == "capped" {
            1.0 - f64::from(CAP) / 100.0
        } else {
            0.0
        };
        ensure!(
            (throttled - of_cap).abs() <= 2.0 * NEAR,
            "expected a cap to keep {name} off for {of_cap:.2} of the time, saw {throttled:.3}"
        );
    }
    Ok(())
}

/// Checks that the xentrace of an agent ends when the agent is killed.
fn killed(inside: &Inside) -> anyhow::Result<()> {
    let mut agent = start_acting(inside, "xen", &["--trace-waiting"])?;
    ensure!(
        named("xentrace").len() == 1,
        "expected the agent's xentrace, saw {:?}",
        named("xentrace")
    );
    agent.kill()?;
    let begin = Instant::now();
    wait_until(
        "xentrace to end with the killed agent",
        Duration::from_secs(30),
        || {
            let left = named("xentrace");
            Ok(match left.is_empty() {
                true => Look::Done(()),
                false => Look::NotYet(format!("{left:?}")),
            })
        },
    )?;
    inside.note(format!(
        "the agent was killed: xentrace ended {:.1} s later",
        begin.elapsed().as_secs_f64()
    ));
    ensure!(
        operator()?,
        "expected the operator's xentrace to run after the agent was killed"
    );
    Ok(())
}

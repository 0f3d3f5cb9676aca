//! CPU quotas and permits on a real kernel. Cases judge by `cpu.max` and `cpu.stat` of the vCPUs' cgroups.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use homenode_host::{Act, CpuQuota, Limit, Outcome};
use homenode_kvm::{KvmHost, Vms};
use homenode_testbed_guest::Behaviour;
use homenode_undo::{Options, guard};
use homenode_units::Ns;
use serde_json::Value;

use super::agent::{SOON, limits, start_agent, stop};
use crate::inside::Inside;
use crate::inside::acts::{commit, find};
use crate::inside::guest::{Guest, GuestSpec};
use crate::inside::wait::{Look, wait_until};

/// How long a guard here waits for another agent after its own has died.
const GRACE: &str = "2s";
/// How long a throttled guest is watched.
const WATCHED: Duration = Duration::from_secs(5);

/// A guest that is always busy, so that a quota throttles it.
fn thrasher(name: &str) -> GuestSpec {
    GuestSpec::new(name).doing(Behaviour::busy(1).with_touch(40))
}

pub(super) fn wait_limits(
    guest: &Guest,
    what: &str,
    accept: impl Fn(&[String]) -> bool,
) -> anyhow::Result<Vec<String>> {
    wait_until(what, SOON, || {
        let found = limits(guest)?;
        Ok(if accept(&found) {
            Look::Done(found)
        } else {
            Look::NotYet(format!("limits {found:?}"))
        })
    })
}

/// Returns for how long the kernel has throttled the vCPUs, in microseconds.
pub(super) fn throttled_us(guest: &Guest) -> anyhow::Result<u64> {
    let mut sum = 0;
    for thread in guest.process.vcpu_threads()?.into_values() {
        let cgroup = std::fs::read_to_string(format!("/proc/{thread}/cgroup"))?;
        let path = cgroup.trim().rsplit("::").next().unwrap_or("").to_owned();
        let stat = std::fs::read_to_string(format!("/sys/fs/cgroup{path}/cpu.stat"))?;
        let value = stat.lines().find_map(|line| line.strip_prefix("throttled_usec "));
        sum += value
            .context("no throttled_usec in cpu.stat")?
            .trim()
            .parse::<u64>()?;
    }
    Ok(sum)
}

pub(super) fn ran_ns(guest: &Guest) -> anyhow::Result<u64> {
    Ok(guest.process.vcpu_schedstat()?.values().map(|(ran, _)| ran).sum())
}

/// Checks that a quota set through libvirt takes effect and throttles, and that the guard lifts it when the agent is gone.
pub(super) fn quota(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = inside.create(&thrasher("throttled"))?;
    let state = inside.dir().join("state");
    let machine = homenode_machine_files::sysfs::read(Path::new("/"))?;
    let heartbeat = homenode_undo::Heartbeat::default();
    let options = Options {
        state_dir: state.clone(),
        heartbeat: heartbeat.clone(),
        ..Options::new(machine)
    };
    let mut host = KvmHost::connect(&Vms::of_libvirt(), options)?;
    let state = state.display().to_string();
    let arguments = ["guard", "--host", "libvirt", "--state", &state, "--grace", GRACE];
    let guard = guard::spawn(&inside.homenode()?, &arguments.map(Into::into), &heartbeat)?;
    let vm = find(&mut host, &guest.spec.name)?.id;
    let quota = CpuQuota::of(0.1, Ns::from_millis(30));
    let limit = Act::Limit {
        limit: Limit::CpuQuota(quota),
        lease_ns: Ns::from_secs(3600),
    };
    let outcomes = commit(&mut host, vm, limit)?;
    ensure!(
        outcomes == [Outcome::Done],
        "expected the quota to be set, saw {outcomes:?}"
    );
    wait_limits(&guest, "cpu.max of the vCPU to be 3000 30000", |found| {
        found.iter().any(|line| line.ends_with("3000 30000"))
    })?;
    let before = (ran_ns(&guest)?, throttled_us(&guest)?, std::time::Instant::now());
    std::thread::sleep(WATCHED);
    let (ran, throttled) = (ran_ns(&guest)? - before.0, throttled_us(&guest)? - before.1);
    let share = ran as f64 / before.2.elapsed().as_nanos() as f64;
    inside.note(format!(
        "held to {quota}: ran {:.1} percent, throttled {throttled} us",
        share * 100.0
    ));
    ensure!(share < 0.13, "expected at most a tenth of a CPU, saw {share:.3}");
    ensure!(throttled > 0, "expected throttled time in cpu.stat, saw none");
    // Dropping the host looks as if the agent had died: its lock and its end of the guard's pipe are gone, but it has not told
    // the guard to end.
    drop(host);
    drop(guard);
    wait_limits(&guest, "the guard to lift the quota", <[String]>::is_empty)?;
    inside.note("the guard lifted it");
    Ok(())
}

/// Runs `homenode permit` and returns its JSON.
pub(super) fn permit(inside: &Inside, arguments: &[&str]) -> anyhow::Result<Value> {
    inside.told("permit", arguments)
}

/// Checks that a permit set over the agent's socket is kept in the domain's metadata. With counters, the guest is throttled until
/// the agent is killed. Without counters no guest is throttled, and the agent says why.
pub(super) fn permit_set(inside: &mut Inside) -> anyhow::Result<()> {
    let mut agent = start_agent(inside)?;
    let guest = inside.create(&thrasher("thrasher"))?;
    wait_until("the agent to know the guest", SOON, || {
        Ok(match permit(inside, &["show", "thrasher"]) {
            Ok(_) => Look::Done(()),
            Err(error) => Look::NotYet(error.to_string()),
        })
    })?;
    let answer = permit(inside, &["set", "thrasher", "1k"])?;
    ensure!(answer["permit"] == "1k", "expected a permit of 1k, saw {answer}");
    let found = inside.connection.lookup_domain_by_name("thrasher");
    let xml = found
        .and_then(|domain| domain.xml_desc(0))
        .map_err(|error| anyhow!("{}", error.message()))?;
    ensure!(
        xml.contains(r#"permit="1k""#),
        "expected the permit in the metadata, saw {xml}"
    );
    let metered = wait_until("the agent to know whether pollution is counted", SOON, || {
        let shown = permit(inside, &["show", "thrasher"])?["vms"][0].clone();
        Ok(if shown["unmetered"].is_string() {
            Look::Done(false)
        } else if shown["units_per_slice"]
            .as_u64()
            .is_some_and(|units| units > 1_000)
        {
            Look::Done(true)
        } else {
            Look::NotYet(shown.to_string())
        })
    })?;
    if !metered {
        let about_permit = |line: &Value| {
            let events = line["events"].as_array();
            let said = |event: &Value| {
                event["policy"] == "permits"
                    && event["message"]
                        .as_str()
                        .is_some_and(|text| text.contains("not held to its permit"))
            };
            events.is_some_and(|events| events.iter().any(said))
        };
        agent.wait_json("why the guest is not held", SOON, about_permit)?;
        let found = limits(&guest)?;
        ensure!(
            found.is_empty(),
            "expected no limit without counters, saw {found:?}"
        );
        inside.note("no counters: reported, and no guest is throttled");
        return stop(agent);
    }
    let found = wait_limits(&guest, "the thrasher to be throttled", |found| !found.is_empty())?;
    inside.note(format!("throttled: {found:?}"));
    agent.kill()?;
    wait_limits(
        &guest,
        "the guard of the killed agent to lift the quota",
        <[String]>::is_empty,
    )?;
    inside.note("the guard lifted it");
    let agent = start_agent(inside)?;
    wait_limits(&guest, "a new agent to throttle it again", |found| {
        !found.is_empty()
    })?;
    stop(agent)?;
    let found = limits(&guest)?;
    ensure!(
        found.is_empty(),
        "expected no limit after the agent stopped normally, saw {found:?}"
    );
    Ok(())
}

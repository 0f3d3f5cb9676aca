//! The agent on a real host. Cases judge by the affinity and numa_maps that the kernel reports, using their own readers. The
//! agent's own statements are only noted.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure};
use homenode_testbed_guest::Behaviour;
use homenode_undo::guard::SILENCE_MAX;
use rustix::process::{Pid, Signal};

use super::basics::in_mib;
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec, mib};
use crate::inside::pages::expect_share;
use crate::inside::process::{Ended, Program};
use crate::inside::wait::{Look, wait_until};

/// The agent samples once a second; under emulation a sample can itself take seconds.
pub(super) const SOON: Duration = Duration::from_secs(150);
/// Share of memory that must be home, in percent: QEMU may fault a few pages elsewhere at any time.
const HOME_PERCENT: u64 = 90;
/// 8 MiB per cycle. With this budget a move of 40 MiB takes several cycles, so a case can act in the middle of it.
const SMALL_BUDGET_PAGES: u32 = 2048;

/// Starts an agent with its default settings, and waits for its first output.
pub(super) fn start_agent(inside: &Inside) -> anyhow::Result<Program> {
    start_agent_with(inside, &[])
}

/// Starts an agent with further arguments, and waits for its first output.
pub(super) fn start_agent_with(inside: &Inside, arguments: &[&str]) -> anyhow::Result<Program> {
    let begin = Instant::now();
    let agent = start_acting(inside, "libvirt", arguments)?;
    inside.note(format!(
        "the agent spoke after {:.1} s",
        begin.elapsed().as_secs_f64()
    ));
    Ok(agent)
}

/// Starts an agent that acts on a host, with further arguments, and waits for its first output.
pub(super) fn start_acting(inside: &Inside, host: &str, arguments: &[&str]) -> anyhow::Result<Program> {
    let all = [&["run", "--host", host, "--mode", "act", "--json"], arguments].concat();
    let mut agent = inside.start_homenode(&all)?;
    agent.wait_json("anything", SOON, |_| true)?;
    Ok(agent)
}

/// Starts an agent that gives each guest a home at once, as published (TAVO). By default a guest gets a home only once that
/// pays, and without counters, as here, it never pays.
pub(super) fn start_placing(inside: &Inside, arguments: &[&str]) -> anyhow::Result<Program> {
    let mut all = vec!["--policies", "tavo"];
    all.extend_from_slice(arguments);
    start_agent_with(inside, &all)
}

/// Writes a configuration file that makes page moves slow.
pub(super) fn slow_moves(inside: &Inside) -> anyhow::Result<String> {
    let path = inside.dir().join("slow.toml");
    std::fs::write(
        &path,
        format!(
            "[repatriate]\nvm_pages_per_cycle = {SMALL_BUDGET_PAGES}\nhost_pages_per_cycle = {SMALL_BUDGET_PAGES}\n"
        ),
    )?;
    Ok(path.display().to_string())
}

/// Returns metadata by which the operator chooses these nodes as the guest's home.
pub(super) fn home_of_operator(nodes: &str) -> String {
    format!(
        "<metadata><homenode:vm xmlns:homenode='https://homenode.dev/xmlns/vm/1' home='{nodes}'/></metadata>"
    )
}

/// A guest that is lightly busy and has 40 MiB of memory.
fn ordinary(name: &str) -> GuestSpec {
    GuestSpec::new(name).doing(Behaviour::busy(1).with_duty(30).with_touch(40))
}

/// Returns the node to which all of a guest's vCPUs are confined, if there is exactly one. CPU `n` is node `n` in the testbed.
fn node_of_vcpus(affinity: &BTreeMap<u32, Vec<u32>>) -> Option<u32> {
    let mut nodes = affinity.values();
    let first = nodes.next()?;
    match first.as_slice() {
        [node] if nodes.all(|other| other == first) => Some(*node),
        _ => None,
    }
}

/// Waits until the agent has confined a guest's vCPUs to one node.
pub(super) fn wait_home(inside: &Inside, guest: &Guest, limit: Duration) -> anyhow::Result<u32> {
    let what = format!("the vCPUs of {} to be on one node", guest.spec.name);
    let home = wait_until(&what, limit, || {
        let affinity = guest.process.vcpu_affinity()?;
        Ok(node_of_vcpus(&affinity)
            .map_or_else(|| Look::NotYet(format!("affinity {affinity:?}")), Look::Done))
    })?;
    inside.note(format!("{} is at home on node {home}", guest.spec.name));
    Ok(home)
}

/// Waits until a guest's memory is on a node.
pub(super) fn wait_memory(inside: &Inside, guest: &Guest, node: u32, limit: Duration) -> anyhow::Result<()> {
    let begin = Instant::now();
    let what = format!(
        "{HOME_PERCENT} percent of the memory of {} to be on node {node}",
        guest.spec.name
    );
    wait_until(&what, limit, || {
        let pages = guest.pages_per_node()?;
        Ok(match expect_share(&pages, node, HOME_PERCENT) {
            Ok(()) => Look::Done(()),
            Err(_) => Look::NotYet(format!("{:?} MiB", in_mib(&pages))),
        })
    })?;
    let pages = in_mib(&guest.pages_per_node()?);
    inside.note(format!(
        "{}: memory {pages:?} after {:.1} s",
        guest.spec.name,
        begin.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Waits until part of a guest's memory has moved to `node`.
fn wait_mid_move(guest: &Guest, node: u32, before: u64, limit: Duration) -> anyhow::Result<u64> {
    let what = format!("pages of {} to be moving to node {node}", guest.spec.name);
    wait_until(&what, limit, || {
        let pages = guest.pages_per_node()?;
        let there = pages.get(&node).copied().unwrap_or(0);
        Ok(if there > before + u64::from(SMALL_BUDGET_PAGES) / 2 {
            Look::Done(there)
        } else {
            Look::NotYet(format!("{:?} MiB", in_mib(&pages)))
        })
    })
}

/// Stops the agent with SIGTERM, and checks that it ends normally.
pub(super) fn stop(mut agent: Program) -> anyhow::Result<()> {
    agent.expect_running()?;
    let ended = agent.stop(Duration::from_secs(60))?;
    ensure!(
        ended == Ended::Status(0),
        "expected the agent to end with status 0 when asked to, saw {ended:?}"
    );
    Ok(())
}

/// Checks that scattered memory comes home, and never faster than the budget allows.
pub(super) fn bring_home(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = inside.create(&ordinary("scattered"))?;
    guest.scatter(&[0, 1, 2, 3])?;
    inside.note(format!("scattered: {:?} MiB", in_mib(&guest.pages_per_node()?)));
    let config = slow_moves(inside)?;
    let agent = start_placing(inside, &["--config", &config])?;
    let home = wait_home(inside, &guest, SOON)?;
    let begin = Instant::now();
    let before = guest.pages_per_node()?.get(&home).copied().unwrap_or(0);
    wait_memory(inside, &guest, home, Duration::from_secs(240))?;
    let moved = guest
        .pages_per_node()?
        .get(&home)
        .copied()
        .unwrap_or(0)
        .saturating_sub(before);
    let rate = moved as f64 / begin.elapsed().as_secs_f64();
    inside.note(format!(
        "{} MiB came home, {rate:.0} pages per second",
        mib(moved)
    ));
    // A cycle takes at least a second. Two budgets are added, because a cycle may overlap each end of the measurement.
    let allowed = (begin.elapsed().as_secs_f64() + 2.0) * f64::from(SMALL_BUDGET_PAGES);
    ensure!(
        (moved as f64) <= allowed,
        "expected at most {allowed:.0} pages moved within the budget, saw {moved}"
    );
    stop(agent)
}

/// Creates a guest whose home has one CPU, and a second guest that is pinned to that CPU and can compete for it.
fn two_on_one_cpu(inside: &Inside, lent: &GuestSpec) -> anyhow::Result<(Program, Guest, Guest, u32)> {
    let agent = start_placing(inside, &[])?;
    let lent = inside.create(lent)?;
    let home = wait_home(inside, &lent, SOON)?;
    let pinned = GuestSpec::new("pinned").cpus(Cpus::Pinned(vec![home.to_string()]));
    let pinned = inside.create(&pinned.nodes("preferred", &home.to_string()))?;
    Ok((agent, lent, pinned, home))
}

fn wait_away(inside: &Inside, guest: &Guest, home: u32) -> anyhow::Result<u32> {
    let what = format!("{} to be lent by its home, node {home}", guest.spec.name);
    let node = wait_until(&what, SOON, || {
        let affinity = guest.process.vcpu_affinity()?;
        Ok(match node_of_vcpus(&affinity) {
            Some(node) if node != home => Look::Done(node),
            _ => Look::NotYet(format!(
                "affinity {affinity:?}, run and wait {:?} ns",
                guest.process.vcpu_schedstat()?
            )),
        })
    })?;
    inside.note(format!("{} runs on node {node}", guest.spec.name));
    Ok(node)
}

/// Checks that a busy vCPU that shares its CPU with another is lent to an idle CPU, and returns when there is room.
pub(super) fn lend_and_return(inside: &mut Inside) -> anyhow::Result<()> {
    // The operator chooses the home: otherwise a long absence would give the guest a new one.
    let mut spec = ordinary("lent");
    spec.extra_xml = home_of_operator("1");
    let (agent, lent, pinned, home) = two_on_one_cpu(inside, &spec)?;
    ensure!(home == 1, "expected the operator's home, node 1, saw node {home}");
    wait_memory(inside, &lent, home, SOON)?;
    pinned.switch_to(Behaviour::busy(1))?;
    lent.switch_to(Behaviour::busy(1).with_touch(40))?;
    wait_away(inside, &lent, home)?;
    let pages = lent.pages_per_node()?;
    expect_share(&pages, home, 80).map_err(|error| anyhow!("memory of a lent vCPU stays home: {error}"))?;
    pinned.switch_to(Behaviour::idle())?;
    let what = "the lent vCPU to return to node 1";
    wait_until(what, SOON, || {
        let affinity = lent.process.vcpu_affinity()?;
        Ok(match node_of_vcpus(&affinity) {
            Some(1) => Look::Done(()),
            _ => Look::NotYet(format!("affinity {affinity:?}")),
        })
    })?;
    stop(agent)
}

/// Checks that a guest gets a new home after it was away from home for more than 8 of 10 cycles, and that its memory follows.
pub(super) fn rehome(inside: &mut Inside) -> anyhow::Result<()> {
    let (agent, moved, pinned, home) = two_on_one_cpu(inside, &ordinary("moved"))?;
    // The boot of the second guest keeps the CPU busy, so the first guest may already have been lent, and even re-homed.
    pinned.switch_to(Behaviour::busy(1))?;
    moved.switch_to(Behaviour::busy(1).with_touch(40))?;
    let away = wait_away(inside, &moved, home)?;
    inside.note(format!(
        "lent to node {away}; waiting for the memory to follow to whichever node becomes home"
    ));
    let new_home = wait_until(
        "most memory to be on a node other than the old home",
        Duration::from_secs(240),
        || {
            let pages = moved.pages_per_node()?;
            let total: u64 = pages.values().sum();
            let there = pages
                .iter()
                .find(|(node, count)| **node != home && **count * 100 >= total * HOME_PERCENT);
            Ok(there.map_or_else(
                || Look::NotYet(format!("{:?} MiB", in_mib(&pages))),
                |(node, _)| Look::Done(*node),
            ))
        },
    )?;
    wait_until("vCPUs to be where the memory is", SOON, || {
        let affinity = moved.process.vcpu_affinity()?;
        Ok(match node_of_vcpus(&affinity) {
            Some(node) if node == new_home => Look::Done(()),
            _ => Look::NotYet(format!("memory on node {new_home}, affinity {affinity:?}")),
        })
    })?;
    stop(agent)
}

/// Two guests are on two nodes. One ends while its pages move. Checks that the other guest's memory still follows.
pub(super) fn destroyed_in_move(inside: &mut Inside) -> anyhow::Result<()> {
    let guests = inside.create_at_once(&[ordinary("doomed"), ordinary("other")])?;
    let [doomed, other] = guests.as_slice() else {
        bail!("expected two guests, saw {}", guests.len());
    };
    doomed.wait_ready()?;
    other.wait_ready()?;
    doomed.scatter(&[0, 1, 2, 3])?;
    other.scatter(&[0, 1, 2, 3])?;
    let before = doomed.pages_per_node()?;
    let config = slow_moves(inside)?;
    let mut agent = start_placing(inside, &["--config", &config])?;
    let home = wait_home(inside, doomed, SOON)?;
    wait_mid_move(doomed, home, before.get(&home).copied().unwrap_or(0), SOON)?;
    let other_home = wait_home(inside, other, SOON)?;
    ensure!(
        home != other_home,
        "expected two different nodes, saw both guests on node {home}"
    );
    inside.destroy(doomed)?;
    agent.expect_running()?;
    wait_memory(inside, other, other_home, Duration::from_secs(240))?;
    stop(agent)
}

/// Checks that the agent keeps working when libvirtd is killed and restarted, for guests created before and after.
pub(super) fn libvirtd_restarted(inside: &mut Inside) -> anyhow::Result<()> {
    let mut agent = start_placing(inside, &[])?;
    let old = inside.create(&ordinary("old"))?;
    let home = wait_home(inside, &old, SOON)?;
    inside.kill_libvirtd()?;
    thread::sleep(Duration::from_secs(5));
    agent.expect_running()?;
    inside.restart_libvirtd()?;
    let new = inside.create(&ordinary("new"))?;
    let new_home = wait_home(inside, &new, SOON)?;
    ensure!(
        new_home != home,
        "expected the new guest on another node than {home}"
    );
    let affinity = old.process.vcpu_affinity()?;
    ensure!(
        node_of_vcpus(&affinity) == Some(home),
        "expected the old guest still on node {home}, saw {affinity:?}"
    );
    stop(agent)
}

/// Returns the CPU limits that the kernel applies to a guest's threads.
pub(super) fn limits(guest: &Guest) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for (thread, name) in guest.process.threads()? {
        let cgroup = std::fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap_or_default();
        let path = cgroup.trim().rsplit("::").next().unwrap_or("").to_owned();
        let max = std::fs::read_to_string(format!("/sys/fs/cgroup{path}/cpu.max")).unwrap_or_default();
        if !max.is_empty() && !max.starts_with("max") {
            found.push(format!("{name}: {}", max.trim()));
        }
    }
    Ok(found)
}

/// Kills the agent with SIGKILL in the middle of a move, and then starts a successor.
pub(super) fn agent_killed(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = inside.create(&ordinary("orphan"))?;
    guest.scatter(&[0, 1, 2, 3])?;
    let before = guest.pages_per_node()?;
    let config = slow_moves(inside)?;
    let mut agent = start_placing(inside, &["--config", &config])?;
    let home = wait_home(inside, &guest, SOON)?;
    let there = wait_mid_move(&guest, home, before.get(&home).copied().unwrap_or(0), SOON)?;
    agent.kill()?;
    inside.note(format!("killed with {} MiB on node {home}", mib(there)));
    wait_until("no CPU limit to be left", Duration::from_secs(30), || {
        let found = limits(&guest)?;
        Ok(if found.is_empty() {
            Look::Done(())
        } else {
            Look::NotYet(found.join(", "))
        })
    })?;
    let successor = start_placing(inside, &[])?;
    let home = wait_home(inside, &guest, SOON)?;
    wait_memory(inside, &guest, home, Duration::from_secs(240))?;
    stop(successor)
}

/// Checks that the agent continues while no program reads its output, and that its guard does not treat it as hung.
pub(super) fn output_not_read(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = inside.create(&ordinary("watched"))?;
    let (reader, writer) = std::io::pipe()?;
    // The pipe is so small that the output of the first cycles fills it.
    rustix::pipe::fcntl_setpipe_size(&writer, 4096)?;
    let mut command = std::process::Command::new(inside.homenode()?);
    command.args([
        "run",
        "--host",
        "libvirt",
        "--mode",
        "act",
        "--json",
        "--policies",
        "tavo",
    ]);
    let mut agent = command.stdout(writer).spawn()?;
    // Dropping the command also closes this process's end of the pipe.
    drop(command);
    wait_home(inside, &guest, SOON)?;
    let settled = Instant::now();
    while settled.elapsed() < 3 * SILENCE_MAX {
        thread::sleep(Duration::from_secs(5));
        if let Some(ended) = agent.try_wait()? {
            bail!("expected the agent to continue though no program reads its output; it ended with {ended}");
        }
    }
    // A pipe may have some free bytes because the next line does not fit, so the check is that the pipe takes no more.
    let full = rustix::io::ioctl_fionread(&reader)?;
    thread::sleep(Duration::from_secs(5));
    let still_full = rustix::io::ioctl_fionread(&reader)?;
    ensure!(
        full > 0 && still_full == full,
        "expected the agent's full pipe to stay full, saw {full} bytes in it and {still_full} a while later"
    );
    inside.told("vm", &[])?;
    rustix::process::kill_process(Pid::from_child(&agent), Signal::TERM)?;
    let ended = wait_until("the unread agent to end", Duration::from_secs(60), || {
        Ok(agent
            .try_wait()?
            .map_or_else(|| Look::NotYet("it runs".to_owned()), Look::Done))
    })?;
    ensure!(
        ended.success(),
        "expected the agent whose output is not read to end with status 0, saw {ended}"
    );
    let affinity = guest.process.vcpu_affinity()?;
    ensure!(
        node_of_vcpus(&affinity).is_none(),
        "expected the guest's vCPUs to be free again, saw {affinity:?}"
    );
    Ok(())
}

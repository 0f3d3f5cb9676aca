//! Nodes that are emptied: by an operator who drains them, or by the kernel, which takes their CPUs offline.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;
use serde_json::Value;

use super::agent::{SOON, start_placing, stop, wait_home, wait_memory};
use super::basics::in_mib;
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec};
use crate::inside::process::Program;
use crate::inside::wait::{Look, wait_until};

/// A guest that is lightly busy and has 40 MiB of memory.
fn ordinary(name: &str) -> GuestSpec {
    GuestSpec::new(name).doing(Behaviour::busy(1).with_duty(30).with_touch(40))
}

/// Keeps a CPU offline while this value lives. CPU `n` is node `n` in the testbed.
struct Offline(u32);

impl Offline {
    fn take(cpu: u32) -> anyhow::Result<Offline> {
        switch(cpu, "0")?;
        Ok(Offline(cpu))
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        let _ = switch(self.0, "1");
    }
}

fn switch(cpu: u32, to: &str) -> anyhow::Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    fs::write(&path, to).with_context(|| path.clone())
}

fn left_on(guest: &Guest, node: u32) -> anyhow::Result<u64> {
    Ok(guest.pages_per_node()?.get(&node).copied().unwrap_or(0))
}

/// Checks that the agent does not report that another program changed what it had set.
fn expect_nobody_else(agent: &Program) -> anyhow::Result<()> {
    let text = agent.json().iter().map(Value::to_string).collect::<String>();
    ensure!(
        !text.contains("changed-by-other"),
        "the agent blames another program: {text}"
    );
    Ok(())
}

/// Checks that a guest leaves the drained node to its last page, that a guest that starts meanwhile goes to another node, and
/// that the next agent still knows of the drain.
pub(super) fn drained(inside: &mut Inside) -> anyhow::Result<()> {
    // An earlier try may have stopped midway because a guest vanished, and left this file.
    let _ = fs::remove_file("/run/homenode/private/drained");
    let agent = start_placing(inside, &[])?;
    let guest = inside.create(&ordinary("leaves"))?;
    let node = wait_home(inside, &guest, SOON)?;
    wait_memory(inside, &guest, node, SOON)?;
    let told = inside.told("drain", &[&node.to_string()])?;
    inside.note(format!("drained: {told}"));
    let pages = guest.pages_per_node()?;
    ensure!(
        left_on(&guest, node)? == 0,
        "expected no page on node {node}, saw {:?} MiB",
        in_mib(&pages)
    );
    let home = wait_home(inside, &guest, SOON)?;
    ensure!(home != node, "the guest's vCPUs still run on node {node}");
    stop(agent)?;
    let agent = start_placing(inside, &[])?;
    let other = inside.create(&ordinary("comes"))?;
    let home = wait_home(inside, &other, SOON)?;
    ensure!(
        home != node,
        "the new guest runs on node {node}, which is drained"
    );
    let now = inside.told("drain", &[])?;
    ensure!(
        now["drains"][0]["node"] == node,
        "the next agent does not know of the drain of node {node}: {now}"
    );
    inside.told("drain", &[&node.to_string(), "--end"])?;
    let now = inside.told("drain", &[])?;
    ensure!(
        now["drains"] == serde_json::json!([]),
        "node {node} is still drained: {now}"
    );
    expect_nobody_else(&agent)?;
    stop(agent)
}

/// A node's only CPU goes offline under a guest. The guest gets another home, and its memory follows. Once the CPU is back, it
/// is used again.
pub(super) fn offline(inside: &mut Inside) -> anyhow::Result<()> {
    let agent = start_placing(inside, &[])?;
    // The guest may not use CPU 0, which cannot go offline.
    let guest = inside.create(&ordinary("hops").cpus(Cpus::Set("1-3".into())))?;
    let node = wait_home(inside, &guest, SOON)?;
    let gone = Offline::take(node)?;
    inside.note(format!("CPU {node} is offline"));
    let what = format!("the vCPUs of hops to be elsewhere than on node {node}");
    let home = wait_until(&what, SOON, || {
        let affinity = guest.process.vcpu_affinity()?;
        let is_elsewhere = |cpus: &Vec<u32>| cpus.len() == 1 && cpus[0] != node;
        Ok(match affinity.values().next() {
            Some(cpus) if affinity.values().all(is_elsewhere) => Look::Done(cpus[0]),
            _ => Look::NotYet(format!("affinity {affinity:?}")),
        })
    })?;
    wait_memory(inside, &guest, home, Duration::from_secs(240))?;
    drop(gone);
    let other = inside.create(&ordinary("uses-it").nodes("preferred", &node.to_string()))?;
    wait_home(inside, &other, SOON)?;
    expect_nobody_else(&agent)?;
    stop(agent)
}

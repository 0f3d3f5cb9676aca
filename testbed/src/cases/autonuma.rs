//! The agent beside the kernel's own automatic NUMA balancing.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::agent::{start_agent, stop, wait_home, wait_memory};
use super::basics::in_mib;
use super::memory::drifted;
use crate::inside::Inside;

/// A guest whose memory has drifted comes home, and the kernel's balancing does not take it away again.
pub fn bring_home(inside: &mut Inside) -> anyhow::Result<()> {
    let path = "/proc/sys/kernel/numa_balancing";
    let balancing = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    ensure!(
        balancing.trim() == "1",
        "expected automatic NUMA balancing to be on, saw {}",
        balancing.trim()
    );
    let guest = drifted(inside)?;
    std::thread::sleep(Duration::from_secs(30));
    inside.note(format!(
        "30 s of the kernel's balancing alone: {:?} MiB",
        in_mib(&guest.pages_per_node()?)
    ));
    let agent = start_agent(inside)?;
    let home = wait_home(inside, &guest, Duration::from_secs(150))?;
    wait_memory(inside, &guest, home, Duration::from_secs(240))?;
    std::thread::sleep(Duration::from_secs(30));
    inside.note(format!("30 s later: {:?} MiB", in_mib(&guest.pages_per_node()?)));
    let affinity = guest.process.vcpu_affinity()?;
    ensure!(
        affinity.values().all(|cpus| cpus == &[home]),
        "expected the vCPU still on node {home}, saw {affinity:?}"
    );
    wait_memory(inside, &guest, home, Duration::from_secs(60))?;
    stop(agent)
}

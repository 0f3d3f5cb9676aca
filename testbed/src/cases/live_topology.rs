//! On a real host, the agent tells a guest its topology, and the guest's kernel follows what the host does with its vCPUs.
//! Pages that come and go one by one stay with their virtual node.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_kernel::numa_maps;
use homenode_testbed_guest::{Behaviour, MARKER_FOLLOWS, MARKER_HOLDS, MARKER_NODES};
use homenode_units::{Bytes, NodeId, NodeMap, Pages};
use serde_json::{Value, json};

use super::agent::{SOON, home_of_operator, slow_moves, start_agent, start_agent_with, stop};
use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec, mib};
use crate::inside::wait::{Look, wait_until};

const NAME: &str = "told";
/// Memory that the guest touches at a time, and how much of it must be found on the expected node. The program has other memory,
/// too.
const TOUCH_MIB: u32 = 24;
const FOUND_MIB: u64 = 20;
/// Least share of a virtual node's memory that must be on its host node, in percent.
const WHOLE_PERCENT: u64 = 90;

/// Returns the host's view of each virtual node's memory.
fn memory(guest: &Guest) -> anyhow::Result<Vec<NodeMap<Pages>>> {
    let (root, pid) = (Path::new("/"), i32::try_from(guest.process.0)?);
    let count = guest.spec.virtual_nodes.len();
    let sizes = vec![Bytes((guest.spec.memory_mib << 20) / count as u64); count];
    let ranges = numa_maps::guest_ram(root, pid, &sizes)?.context("guest RAM was not found")?;
    let pages =
        numa_maps::pages_per_node(root, pid, &ranges)?.context("the guest's QEMU process has ended")?;
    let objects = numa_maps::objects(&ranges, &sizes);
    Ok(objects.into_iter().map(|at| pages[at].clone()).collect())
}

/// Lets the guest allocate memory from a vCPU; returns the MiB of it on host nodes 0 and 1. The guest reports on which virtual
/// nodes the memory is, and the host where each virtual node is.
fn touched_from(guest: &Guest, vcpu: u32, touch_mib: u32) -> anyhow::Result<[u64; 2]> {
    guest.switch_to(Behaviour::busy(1).with_touch(touch_mib).with_touch_on(vcpu))?;
    for (node, pages) in (0..).map(NodeId).zip(memory(guest)?) {
        let there = pages.get(node).map_or(0, |pages| pages.0);
        let all: u64 = pages.values().map(|pages| pages.0).sum();
        ensure!(
            there * 100 >= all * WHOLE_PERCENT,
            "expected virtual node {node} on node {node}, saw {there} of {all} pages there"
        );
    }
    let line = guest.command("holds", MARKER_HOLDS)?;
    let count = |key: &str| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(key)?.parse().ok())
    };
    let counts = count("node0=").zip(count("node1="));
    let (first, second) = counts.with_context(|| format!("the guest's answer has no counts: {line}"))?;
    Ok([mib(first), mib(second)])
}

/// Waits until the guest's kernel has each vCPU on the virtual node of the same number as the host node to which the vCPU is
/// confined. CPU `n` is node `n` in the testbed.
fn wait_follows(inside: &Inside, guest: &Guest) -> anyhow::Result<()> {
    let seen = wait_until("the guest's kernel to follow", SOON, || {
        let affinity = guest.process.vcpu_affinity()?;
        let on = |node: u32| {
            let there = affinity.iter().filter(|(_, cpus)| **cpus == [node]);
            let vcpus: Vec<String> = there.map(|(vcpu, _)| vcpu.to_string()).collect();
            format!(" node{node}={}", vcpus.join("-"))
        };
        let expected = format!("{MARKER_NODES}{}{}", on(0), on(1));
        let nodes = guest.command("nodes", MARKER_NODES)?;
        Ok(if nodes == expected {
            Look::Done(nodes)
        } else {
            Look::NotYet(format!("{nodes} instead of {expected}"))
        })
    })?;
    inside.note(format!("the guest's kernel: {seen}"));
    Ok(())
}

/// Waits until the vCPUs are confined in this way.
fn wait_seats(guest: &Guest, what: &str, is_so: impl Fn([u32; 2]) -> bool) -> anyhow::Result<()> {
    wait_until(what, SOON, || {
        let affinity = guest.process.vcpu_affinity()?;
        let seat = |vcpu: u32| match affinity.get(&vcpu).map(Vec::as_slice) {
            Some([node]) => Some(*node),
            _ => None,
        };
        Ok(match seat(0).zip(seat(1)).filter(|(a, b)| is_so([*a, *b])) {
            Some(_) => Look::Done(()),
            None => Look::NotYet(format!("affinity {affinity:?}")),
        })
    })
}

/// Waits until `homenode topology` reports that the agent has told the guest these nodes of its vCPUs, and nodes 0 and 1 of its
/// memory. Returns that report.
fn wait_told(inside: &Inside, name: &str, expected: [u64; 2]) -> anyhow::Result<Value> {
    let what = format!("the agent to tell guest {name} of vCPUs on {expected:?}");
    let vm = wait_until(&what, SOON, || {
        let mut answer = inside.told("topology", &[name])?;
        let topology = answer["vms"][0]["topology"].take();
        let told = &topology["told"]["topology"];
        let is_so = told["vcpus"] == json!(expected) && told["memory"] == json!([0, 1]);
        Ok(if is_so {
            Look::Done(topology)
        } else {
            Look::NotYet(topology.to_string())
        })
    })?;
    inside.note(format!("told: {}", vm["told"]));
    Ok(vm["told"].clone())
}

/// The agent moves a vCPU between the two nodes of the guest's home. Until the guest's kernel follows, it allocates memory on
/// the vCPU's old node, and afterwards on the new one. An agent that takes over from a killed one continues to update the
/// page.
pub(super) fn live_topology(inside: &mut Inside) -> anyhow::Result<()> {
    let mut agent = start_agent(inside)?;
    let mut spec = GuestSpec::new(NAME).vcpus(2).cpus(Cpus::Set("0-1".to_owned()));
    spec = spec.virtual_nodes(&[0, 1]);
    (spec.memory_mib, spec.extra_xml) = (256, home_of_operator("0-1"));
    let guest = inside.create(&spec)?;
    wait_seats(
        &guest,
        "each vCPU to sit with the memory of its virtual node",
        |seats| seats == [0, 1],
    )?;
    wait_told(inside, NAME, [0, 1])?;

    // The operator pins another guest to CPU 0, where it competes with the first guest's busy vCPU.
    let rival = GuestSpec::new("rival").cpus(Cpus::Pinned(vec!["0".to_owned()]));
    let rival = inside.create(&rival.nodes("preferred", "0"))?;
    rival.switch_to(Behaviour::busy(1))?;
    guest.switch_to(Behaviour::busy(1))?;
    wait_seats(&guest, "vCPU 0 to move to its other home node", |seats| {
        seats == [1, 1]
    })?;
    wait_told(inside, NAME, [1, 1])?;

    let came = touched_from(&guest, 0, TOUCH_MIB)?;
    inside.note(format!(
        "believing what it saw at boot, vCPU 0 on node 1 took {came:?} MiB from nodes 0 and 1"
    ));
    ensure!(
        came[0] >= FOUND_MIB,
        "expected over {FOUND_MIB} MiB on node 0, where vCPU 0 ran at boot; saw {came:?}"
    );
    guest.command("follow", MARKER_FOLLOWS)?;
    wait_follows(inside, &guest)?;
    let came = touched_from(&guest, 0, TOUCH_MIB + 1)?;
    inside.note(format!("following, it took {came:?} MiB"));
    ensure!(
        came[1] >= FOUND_MIB,
        "expected over {FOUND_MIB} MiB on node 1, where vCPU 0 runs now; saw {came:?}"
    );

    agent.kill()?;
    let agent = start_agent(inside)?;
    wait_told(inside, NAME, [1, 1])?;
    // Now both guests compete for CPU 1, and CPU 0 idles.
    rival.switch_to(Behaviour::idle())?;
    guest.switch_to(Behaviour::busy(2))?;
    wait_seats(&guest, "one vCPU to move back to node 0", |seats| {
        seats[0] != seats[1]
    })?;
    wait_follows(inside, &guest)?;
    stop(agent)
}

/// Memory of a guest that gives half of it to its balloon, and what it touches before and after, in MiB. If one vCPU touches all
/// of it, that is more than the vCPU's virtual node has, so the guest takes the rest from the other virtual node.
const LENDING_MIB: u64 = 256;
const LENT_TOUCH_MIB: u32 = 140;
/// The guest has at most this much while the balloon has the rest.
const LENT_MIB_MAX: u64 = 160;
/// The most memory off its virtual node's host node that counts as none, and the least that counts as scattered, in MiB. QEMU and
/// the guest's kernel touch a few pages at any time.
const STRAY_MIB_MAX: u64 = 6;
const SCATTERED_MIB: u64 = 20;

/// Returns how much memory is off the host node that the guest was told for its virtual node, in MiB.
fn strays(guest: &Guest) -> anyhow::Result<u64> {
    let memory = memory(guest)?;
    let off = (0..).map(NodeId).zip(&memory).flat_map(|(told, pages)| {
        pages
            .iter()
            .filter(move |(node, _)| *node != told)
            .map(|(_, pages)| pages.0)
    });
    Ok(mib(off.sum()))
}

fn wait_no_strays(guest: &Guest) -> anyhow::Result<()> {
    let what = format!(
        "each page of {} to be on its virtual node's host node",
        guest.spec.name
    );
    wait_until(&what, SOON, || {
        let strays = strays(guest)?;
        Ok(match strays <= STRAY_MIB_MAX {
            true => Look::Done(()),
            false => Look::NotYet(format!("{strays} MiB elsewhere")),
        })
    })
}

/// Creates a guest at home on nodes 0 and 1, with QEMU's memory policy for these nodes. It touches memory from vCPU 0, gives it
/// to the balloon, and touches it again. Returns how much then is on another node than the guest was told.
fn scattered_by_balloon(inside: &Inside, name: &str, policy: [u32; 2]) -> anyhow::Result<u64> {
    let mut spec = GuestSpec::new(name).vcpus(2).cpus(Cpus::Set("0-1".to_owned()));
    spec = spec.virtual_nodes(&policy);
    (spec.memory_mib, spec.extra_xml) = (LENDING_MIB, home_of_operator("0-1"));
    let guest = inside.create(&spec)?;
    let told = wait_told(inside, name, [0, 1])?;
    let touching = Behaviour::idle().with_touch(LENT_TOUCH_MIB).with_touch_on(0);
    guest.switch_to(touching)?;
    wait_no_strays(&guest)?;
    let balloon = |mib: u64| {
        let done = guest.domain.set_memory(mib << 10);
        done.map_err(|error| anyhow!("cannot set the balloon of {name}: {}", error.message()))
    };
    guest.switch_to(Behaviour::idle())?;
    balloon(LENDING_MIB / 2)?;
    wait_until("the balloon to take its half", SOON, || {
        let nodes = memory(&guest)?;
        let pages = nodes
            .iter()
            .flat_map(|pages| pages.iter().map(|(_, pages)| pages.0));
        let left = mib(pages.sum());
        Ok(match left <= LENT_MIB_MAX {
            true => Look::Done(()),
            false => Look::NotYet(format!("{left} MiB are left")),
        })
    })?;
    balloon(LENDING_MIB)?;
    // The balloon may return memory a little later.
    std::thread::sleep(Duration::from_secs(3));
    guest.switch_to(touching)?;
    let scattered = strays(&guest)?;
    let begin = Instant::now();
    wait_no_strays(&guest)?;
    inside.note(format!(
        "{name}, QEMU's policy for nodes {policy:?}: {scattered} MiB came back elsewhere, and were home {:.1} s later",
        begin.elapsed().as_secs_f64()
    ));
    let now = wait_told(inside, name, [0, 1])?;
    ensure!(
        now["topology"] == told["topology"],
        "expected nothing new for the guest, saw {now} instead of {told}"
    );
    inside.destroy(&guest)?;
    Ok(scattered)
}

/// A page that a balloon took comes back on the node of QEMU's policy, whichever vCPU touches it. That node is the right one
/// unless the agent has moved the virtual node since the start; then the agent brings the page to the new node. The guest is told
/// nothing meanwhile, because its knowledge of the virtual node becomes true again.
pub(super) fn live_pages(inside: &mut Inside) -> anyhow::Result<()> {
    let config = slow_moves(inside)?;
    let agent = start_agent_with(inside, &["--config", &config])?;
    let kept = scattered_by_balloon(inside, "kept", [0, 1])?;
    ensure!(
        kept <= STRAY_MIB_MAX,
        "expected each page on the host node of its virtual node, saw {kept} MiB elsewhere"
    );
    let moved = scattered_by_balloon(inside, "moved", [2, 3])?;
    ensure!(
        moved >= SCATTERED_MIB,
        "expected over {SCATTERED_MIB} MiB on the nodes of QEMU's policy, saw {moved}"
    );
    stop(agent)
}

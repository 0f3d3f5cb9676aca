//! Tests the basis of all other cases: the host, libvirt, guests, moving pages. No agent is involved.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use homenode_testbed_guest::Behaviour;

use crate::inside::Inside;
use crate::inside::guest::{Cpus, Guest, GuestSpec, Memory, mib};
use crate::inside::libvirtd::run;
use crate::inside::pages::expect_share;
use crate::inside::proc::parse_list;
use crate::outside::emulated::NODES;

/// Checks that the host has four nodes with their distances, cgroup v2 and KVM.
pub(super) fn boot(inside: &mut Inside) -> anyhow::Result<()> {
    let read = |path: &str| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    let online = parse_list(&read("/sys/devices/system/node/online")?)?;
    ensure!(
        online == [0, 1, 2, 3],
        "expected nodes 0-3 online, saw {online:?}"
    );
    let distances = read("/sys/devices/system/node/node0/distance")?;
    ensure!(
        distances.trim() == "10 16 16 22",
        "expected distances 10 16 16 22 of node 0, saw {distances}"
    );
    for node in 0..NODES {
        let cpus = read(&format!("/sys/devices/system/node/node{node}/cpulist"))?;
        ensure!(
            parse_list(&cpus)? == [node],
            "expected CPU {node} on node {node}, saw {cpus}"
        );
    }
    ensure!(
        Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
        "expected cgroup v2 at /sys/fs/cgroup"
    );
    ensure!(Path::new("/dev/kvm").exists(), "expected /dev/kvm");
    inside.note(format!(
        "transparent huge pages: {}",
        read("/sys/kernel/mm/transparent_hugepage/enabled")?.trim()
    ));
    inside.note(format!(
        "automatic NUMA balancing: {}",
        read("/proc/sys/kernel/numa_balancing")?.trim()
    ));
    Ok(())
}

/// libvirt answers, and knows the nodes.
pub(super) fn libvirt(inside: &mut Inside) -> anyhow::Result<()> {
    let version = inside
        .connection
        .lib_version()
        .map_err(|error| anyhow!("libvirt reports no version: {}", error.message()))?;
    inside.note(format!(
        "libvirt {}.{}.{}",
        version / 1_000_000,
        version / 1000 % 1000,
        version % 1000
    ));
    let begin = Instant::now();
    let capabilities = inside
        .connection
        .capabilities()
        .map_err(|error| anyhow!("libvirt reports no capabilities: {}", error.message()))?;
    inside.note(format!("capabilities in {:.1} s", begin.elapsed().as_secs_f64()));
    ensure!(
        capabilities.contains("<cells num='4'>"),
        "expected 4 cells in libvirt's capabilities: {capabilities}"
    );
    ensure!(
        capabilities.contains("<domain type='kvm'"),
        "expected KVM in libvirt's capabilities: {capabilities}"
    );
    Ok(())
}

/// Checks that pages spread over four nodes are seen on all four, and after a move to one node only there.
pub(super) fn scattered_memory(inside: &mut Inside) -> anyhow::Result<()> {
    let spec = GuestSpec::new("scattered").doing(Behaviour::idle().with_touch(40));
    let begin = Instant::now();
    let guest = inside.create(&spec)?;
    inside.note(format!(
        "ready {:.1} s after the create began",
        begin.elapsed().as_secs_f64()
    ));
    inside.note(format!(
        "as the kernel placed it: {:?}",
        in_mib(&guest.pages_per_node()?)
    ));

    let spread = guest.scatter(&[0, 1, 2, 3])?;
    inside.note(format!(
        "spread: {} pages, {:.0} per second",
        spread.present(),
        spread.pages_per_second()
    ));
    let pages = guest.pages_per_node()?;
    inside.note(format!("after spreading: {:?}", in_mib(&pages)));
    let total: u64 = pages.values().sum();
    ensure!(
        mib(total) >= 40,
        "expected at least the 40 MiB that the guest touched, saw {pages:?} pages"
    );
    for node in 0..NODES {
        let there = pages.get(&node).copied().unwrap_or(0);
        ensure!(
            there * 100 >= total * 20,
            "expected at least 20 percent of {total} pages on node {node}, saw {pages:?}"
        );
    }

    let moved = guest.move_to(3)?;
    inside.note(format!(
        "moved: {} pages, {:.0} per second",
        moved.present(),
        moved.pages_per_second()
    ));
    let pages = guest.pages_per_node()?;
    inside.note(format!("after moving: {:?}", in_mib(&pages)));
    expect_share(&pages, 3, 95)?;
    let begin = Instant::now();
    inside.destroy(&guest)?;
    inside.note(format!("destroyed in {:.1} s", begin.elapsed().as_secs_f64()));
    Ok(())
}

/// Checks that guests survive the end of their libvirtd, and that a new libvirtd manages them.
pub(super) fn libvirtd_killed(inside: &mut Inside) -> anyhow::Result<()> {
    let mut guest = inside.create(&GuestSpec::new("survivor").doing(Behaviour::busy(1).with_duty(50)))?;
    inside.kill_libvirtd()?;
    ensure!(
        guest.process.alive(),
        "expected the guest to run on without libvirtd"
    );
    let took = inside.restart_libvirtd()?;
    inside.note(format!(
        "libvirtd answers {:.1} s after its restart",
        took.as_secs_f64()
    ));
    inside.refresh(&mut guest)?;
    let before = guest.progress()?;
    guest
        .domain
        .pin_vcpu(0, &[0b0100])
        .map_err(|error| anyhow!("cannot pin vCPU 0: {}", error.message()))?;
    let affinity = guest.process.vcpu_affinity()?;
    ensure!(
        affinity.get(&0) == Some(&vec![2]),
        "expected vCPU 0 on CPU 2, saw {affinity:?}"
    );
    let after = guest.progress()?;
    ensure!(
        after.0 > before.0,
        "expected the guest to keep computing, saw {} loops, then {}",
        before.0,
        after.0
    );
    Ok(())
}

/// Records which moves the kernel refuses, by memory mode, and what a move costs.
pub(super) fn page_moves(inside: &mut Inside) -> anyhow::Result<()> {
    let variants = [
        ("none", Memory::Default),
        (
            "strict",
            Memory::Nodes {
                mode: "strict",
                nodeset: "1".to_owned(),
            },
        ),
        (
            "restrictive",
            Memory::Nodes {
                mode: "restrictive",
                nodeset: "1".to_owned(),
            },
        ),
        (
            "preferred",
            Memory::Nodes {
                mode: "preferred",
                nodeset: "1".to_owned(),
            },
        ),
    ];
    for (name, memory) in variants {
        let spec = GuestSpec::new(name)
            .memory(memory)
            .doing(Behaviour::idle().with_touch(40));
        let guest = inside.create(&spec)?;
        inside.note(format!(
            "{name}: policy {}, Mems_allowed {:?}, pages {:?}",
            guest.memory_policy()?,
            guest.process.mems_allowed()?,
            guest.pages_per_node()?
        ));
        for (thread, comm) in guest.process.threads()? {
            let cgroup = fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap_or_default();
            let path = cgroup.trim().rsplit("::").next().unwrap_or("").to_owned();
            let mems = fs::read_to_string(format!("/sys/fs/cgroup{path}/cpuset.mems")).unwrap_or_default();
            inside.note(format!(
                "{name}: thread '{comm}' in {path}, cpuset.mems '{}'",
                mems.trim()
            ));
        }
        for node in [3, 1] {
            let moved = guest.move_to(node)?;
            inside.note(format!(
                "{name}: to node {node}: on {:?}, refused {:?}, call error {:?}, {:.0} pages per second",
                moved.on_node,
                moved.refused,
                moved.call_error,
                moved.pages_per_second()
            ));
        }
        if guest.process.mems_allowed()? == [1] {
            ways_around(inside, &guest)?;
        }
        inside.destroy(&guest)?;
    }
    Ok(())
}

/// Tries ways to move a guest's pages to a node outside its cpuset.
fn ways_around(inside: &Inside, guest: &Guest) -> anyhow::Result<()> {
    let (name, pid) = (&guest.spec.name, guest.process.0.to_string());
    let begin = Instant::now();
    let outcome =
        run("migratepages", &[&pid, "1", "3"]).map_or_else(|error| format!("{error:#}"), |_| "worked".into());
    let pages = guest.pages_per_node()?;
    inside.note(format!(
        "{name}: migrate_pages to node 3: {outcome}, {:.1} s, pages {pages:?}, policy {}",
        begin.elapsed().as_secs_f64(),
        guest.memory_policy()?
    ));
    let mut wider = BTreeMap::new();
    for thread in guest.process.threads()?.keys() {
        let cgroup = fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap_or_default();
        let path = cgroup.trim().rsplit("::").next().unwrap_or("").to_owned();
        wider.insert(
            path.clone(),
            fs::write(format!("/sys/fs/cgroup{path}/cpuset.mems"), "1,3"),
        );
    }
    inside.note(format!("{name}: after writing '1,3' to cpuset.mems: {wider:?}"));
    for node in [3, 1] {
        let moved = guest.move_to(node)?;
        inside.note(format!(
            "{name}: then to node {node}: on {:?}, call error {:?}, policy {}",
            moved.on_node,
            moved.call_error,
            guest.memory_policy()?
        ));
    }
    Ok(())
}

/// Runs three busy guests at once, a load that has crashed emulated hosts with other kernel options.
pub(super) fn busy_guests(inside: &mut Inside) -> anyhow::Result<()> {
    let load = Behaviour::busy(1).with_touch(40).with_every(1000);
    let specs: Vec<GuestSpec> = (0..3)
        .map(|number| {
            GuestSpec::new(&format!("busy{number}"))
                .cpus(Cpus::Any)
                .doing(load)
        })
        .collect();
    let guests = inside.create_at_once(&specs)?;
    for guest in &guests {
        guest.wait_ready()?;
    }
    let mut before = Vec::new();
    for guest in &guests {
        before.push(guest.progress()?);
    }
    thread::sleep(Duration::from_secs(60));
    for (guest, before) in guests.iter().zip(before) {
        let after = guest.progress()?;
        let name = &guest.spec.name;
        inside.note(format!(
            "{name}: {} loops, {} passes in a minute",
            after.0 - before.0,
            after.1 - before.1
        ));
        ensure!(
            after.0 > before.0,
            "expected guest {name} to keep computing, saw {before:?}, then {after:?}"
        );
    }
    Ok(())
}

/// Converts pages per node to MiB, for people.
pub(super) fn in_mib(pages: &BTreeMap<u32, u64>) -> BTreeMap<u32, u64> {
    pages.iter().map(|(node, pages)| (*node, mib(*pages))).collect()
}

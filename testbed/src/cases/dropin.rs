//! Our numad as a drop-in replacement for the real one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;

use super::agent::{start_agent, stop};
use super::basics::in_mib;
use super::numad::{NumadReplaced, write_script};
use crate::inside::Inside;
use crate::inside::device::Device;
use crate::inside::guest::{Cpus, GuestSpec};
use crate::inside::pages::expect_share;
use crate::outside::emulated::DEVICE_NODE;

/// Installs libvirt's hook, and our numad; returns the path of our numad.
fn put_in_place(inside: &mut Inside) -> anyhow::Result<PathBuf> {
    // The binary answers as numad when it is called by that name.
    let numad = PathBuf::from("/run/homenode-testbed/numad");
    fs::copy(inside.homenode()?, &numad).context("cannot copy the homenode binary")?;
    // The hook tells the agent which guest libvirt is about to ask for. libvirtd looks for hooks when it starts.
    let hook = format!("#!/bin/sh\nexec {} hook \"$@\"\n", inside.homenode()?.display());
    write_script(Path::new("/etc/libvirt/hooks/qemu.d/homenode"), &hook)?;
    inside.kill_libvirtd()?;
    inside.restart_libvirtd()?;
    Ok(numad)
}

/// Three guests started at once with `placement='auto'` get three different nodes, because the answers come from the agent's
/// ledger.
pub(super) fn three_starts(inside: &mut Inside) -> anyhow::Result<()> {
    let numad = put_in_place(inside)?;
    let agent = start_agent(inside)?;
    let _replaced = NumadReplaced::with(&numad)?;
    let specs: Vec<GuestSpec> = (0..3)
        .map(|number| {
            GuestSpec::new(&format!("auto{number}"))
                .cpus(Cpus::Auto)
                .doing(Behaviour::idle().with_touch(40))
        })
        .collect();
    let guests = inside.create_at_once(&specs)?;
    let mut nodes = Vec::new();
    for guest in &guests {
        // The advice is in force as soon as the guest is created, so it does not matter whether the guest's kernel then boots.
        let advice = inside.numad_advice(&guest.spec.name)?;
        inside.note(format!("{}: our numad said {advice:?}", guest.spec.name));
        ensure!(
            advice.len() == 1,
            "expected one node for {}, saw {advice:?}",
            guest.spec.name
        );
        nodes.extend(advice);
    }
    let distinct: BTreeSet<u32> = nodes.iter().copied().collect();
    ensure!(
        distinct.len() == guests.len(),
        "expected three different nodes, saw {nodes:?}"
    );
    stop(agent)
}

/// libvirt asks our numad about a guest with a PCI device. The guest gets the device's node, though all nodes have equal room.
/// Its memory, which the device pins, is on that node from the start.
pub(super) fn near_its_device(inside: &mut Inside) -> anyhow::Result<()> {
    let device = Device::take()?;
    inside.note(format!("{} is on node {DEVICE_NODE}", device.address));
    let numad = put_in_place(inside)?;
    let agent = start_agent(inside)?;
    let _replaced = NumadReplaced::with(&numad)?;
    for (name, devices_xml) in [("given", device.hostdev()), ("not-given", String::new())] {
        let mut spec = GuestSpec::new(name)
            .cpus(Cpus::Auto)
            .doing(Behaviour::idle().with_touch(40));
        spec.devices_xml = devices_xml;
        let guest = inside.create(&spec)?;
        let (advice, pages) = (inside.numad_advice(name)?, guest.pages_per_node()?);
        inside.note(format!(
            "{name}: our numad said {advice:?}, {:?} MiB",
            in_mib(&pages)
        ));
        let is_near = advice == [DEVICE_NODE];
        ensure!(
            is_near == (name == "given"),
            "guest {name}: unexpected nodes from our numad: {advice:?}"
        );
        if is_near {
            expect_share(&pages, DEVICE_NODE, 100)?;
        }
    }
    stop(agent)
}

//! DomUs that have a disk and a NIC, and whose memory is moved. For a moment each domU exists twice, and dom0 serves both.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::{MARKER_DISK, MARKER_UP};

use super::agent::stop;
use super::xen_moved::{
    TO, expect_one, expect_refused, expect_whole, split, start, uuid, wait_moved, wait_said, writing,
};
use crate::inside::Inside;
use crate::inside::console::count;
use crate::inside::libvirtd::run;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};
use crate::outside::xen::DISKS;

/// The bridge in dom0 that the domUs' NICs are on.
const BRIDGE: &str = "xenbr0";
/// Size of the part of its disk that each domU writes repeatedly, in MiB.
const WRITTEN_MIB: u32 = 2;
/// How long a NIC may take to answer after its domU resumes. It announces itself once its driver has connected.
const ANSWERS_WITHIN: Duration = Duration::from_secs(90);

/// Creates a domU that writes its memory, and its disk if one is left for it, and that answers on the bridge.
fn create(inside: &Inside, at: usize, (name, kind): (&str, Kind), more: &str) -> anyhow::Result<Domu> {
    let mut spec = DomuSpec::anywhere(name, kind).doing(writing());
    if let Some(disk) = DISKS.get(at) {
        spec.disk = Some(format!("phy:/dev/{disk},xvda,w"));
        spec = spec.doing(writing().with_disk(WRITTEN_MIB));
    }
    spec.nic = Some(format!("mac={},bridge={BRIDGE}{more}", mac(at)));
    let domu = split(inside, spec, TO, Toolstack::Xl)?;
    expect_mac(&domu, at)?;
    Ok(domu)
}

fn mac(at: usize) -> String {
    format!("00:16:3e:00:00:{:02x}", at + 1)
}

/// Returns the address that follows from the domU's MAC.
fn address(at: usize) -> String {
    format!("fe80::216:3eff:fe00:{:x}", at + 1)
}

/// Waits until the domU's NIC answers.
fn expect_answers(inside: &Inside, domu: &Domu, at: usize) -> anyhow::Result<()> {
    let (name, address) = (&domu.spec.name, address(at));
    wait_until(&format!("{name} to answer as {address}"), ANSWERS_WITHIN, || {
        let mut ping = Command::new("busybox");
        ping.args(["ping6", "-c", "1", "-W", "2", "-I", BRIDGE, &address]);
        let said = ping.output().context("cannot start busybox")?;
        Ok(match said.status.success() {
            true => Look::Done(()),
            false => Look::NotYet(String::from_utf8_lossy(&said.stdout).into_owned()),
        })
    })?;
    inside.note(format!("{name} answers as {address}"));
    Ok(())
}

/// Checks that the disk has the blocks that the domU wrote last, and that the domU continues to write to it.
fn expect_disk(inside: &Inside, domu: &Domu) -> anyhow::Result<()> {
    let name = &domu.spec.name;
    let look = || {
        let said = domu.command("disk", MARKER_DISK)?;
        let (written, wrong) = (count(&said, "written=")?, count(&said, "wrong=")?);
        ensure!(
            wrong == 0,
            "expected the blocks that {name} wrote to be on its disk, saw {said}"
        );
        anyhow::Ok(written)
    };
    let before = look()?;
    let written = wait_until(&format!("{name} to write on"), ANSWERS_WITHIN, || {
        let written = look()?;
        Ok(match written > before {
            true => Look::Done(written),
            false => Look::NotYet(format!("{written} blocks")),
        })
    })?;
    inside.note(format!(
        "{name} has written {before} blocks of 4 KiB, then {written}: all that it wrote last is there"
    ));
    Ok(())
}

/// Checks that dom0 serves one connected disk and one connected NIC of each domU, and no device of the domains that they were
/// before the move.
fn expect_served_once(domus: [&Domu; 2]) -> anyhow::Result<()> {
    for (kind, number) in [("vbd", "51712"), ("vif", "0")] {
        let all = format!("/local/domain/0/backend/{kind}");
        let listed = run("xenstore-list", &[&all])?;
        let mut seen: Vec<&str> = listed.lines().collect();
        let mut expected = domus.map(|domu| domu.id.to_string());
        seen.sort_unstable();
        expected.sort_unstable();
        ensure!(
            seen == expected,
            "expected {all} to have {expected:?}, saw {seen:?}"
        );
        for domu in domus {
            let path = format!("{all}/{}/{number}/state", domu.id);
            let state = run("xenstore-read", &[&path])?;
            ensure!(
                state.trim() == "4",
                "expected {path} to be 4 (connected), saw {state}"
            );
        }
    }
    Ok(())
}

/// Checks that the domU's NIC has its configured MAC.
fn expect_mac(domu: &Domu, at: usize) -> anyhow::Result<()> {
    let up = domu.command("up", MARKER_UP)?;
    ensure!(
        up.contains(&mac(at)),
        "expected {} to have MAC {}, saw {up}",
        domu.spec.name,
        mac(at)
    );
    Ok(())
}

/// Returns the bridge's ports.
fn ports() -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(format!("/sys/class/net/{BRIDGE}/brif")).context("dom0 has no bridge")?;
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names.map(|name| name.to_string_lossy().into_owned()).collect())
}

/// Checks that the memory of a PV and a PVH domU with a disk and a NIC moves to their vCPUs' node, that what they wrote is on
/// their disks, and that they answer on the bridge.
pub(super) fn moved(inside: &mut Inside) -> anyhow::Result<()> {
    if !fs::exists(format!("/sys/class/net/{BRIDGE}"))? {
        run("ip", &["link", "add", BRIDGE, "type", "bridge"])?;
    }
    run("ip", &["link", "set", BRIDGE, "up"])?;
    let mut pv = create(inside, 0, ("still", Kind::Pv), "")?;
    let mut pvh = create(inside, 1, ("roams", Kind::Pvh), "")?;
    // The domU `named` cannot be moved: a NIC with a fixed name in dom0 cannot exist twice.
    let named = create(inside, 2, ("named", Kind::Pv), ",vifname=named0")?;
    for (at, domu) in [&pv, &pvh].into_iter().enumerate() {
        expect_answers(inside, domu, at)?;
        expect_disk(inside, domu)?;
    }
    let ids = [uuid(&pv)?, uuid(&pvh)?];

    let mut agent = start(inside)?;
    expect_refused(inside, &mut agent, &named, "without a name set by `vifname`")?;
    inside.destroy_domu(&named)?;
    for (at, domu) in [&mut pv, &mut pvh].into_iter().enumerate() {
        wait_moved(inside, domu, TO)?;
        let name = &domu.spec.name;
        let said = wait_said(&mut agent, &[&format!("domain {name} has arrived on node {TO}")])?;
        inside.note(said);
        expect_answers(inside, domu, at)?;
        expect_disk(inside, domu)?;
        expect_mac(domu, at)?;
        expect_whole(inside, domu)?;
    }
    expect_served_once([&pv, &pvh])?;
    for (domu, id) in [&pv, &pvh].into_iter().zip(&ids) {
        expect_one(inside, domu, id)?;
    }
    let mut expected: Vec<String> = [&pv, &pvh]
        .iter()
        .map(|domu| format!("vif{}.0", domu.id))
        .collect();
    let mut seen = ports()?;
    expected.sort();
    seen.sort();
    ensure!(
        seen == expected,
        "expected the bridge to have ports {expected:?}, saw {seen:?}"
    );
    stop(agent)?;
    for domu in [&pv, &pvh] {
        expect_disk(inside, domu)?;
        inside.destroy_domu(domu)?;
    }
    run("ip", &["link", "del", BRIDGE]).map(drop)
}

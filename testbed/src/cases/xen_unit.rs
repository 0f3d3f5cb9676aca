//! The agent as a service of dom0's systemd, with the package's unit and the drop-in that dom0 needs.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;

use super::agent::SOON;
use crate::inside::Inside;
use crate::inside::libvirtd::run;
use crate::inside::wait::{Look, wait_until};
use crate::inside::xen::domu::{Domu, DomuSpec, Kind, Toolstack};

const UNIT: &str = include_str!("../../../deploy/systemd/homenode.service");
const DROP_IN: &str = include_str!("../../../deploy/systemd/xen.conf");
const UNIT_AT: &str = "/lib/systemd/system/homenode.service";
const DROP_IN_AT: &str = "/etc/systemd/system/homenode.service.d/xen.conf";
const SETTINGS_AT: &str = "/etc/homenode/homenode.toml";
/// The limits are long, because under emulation a domU is stopped for longer than any real one should be.
const SETTINGS: &str = "mode = \"act\"\npolicies = \"tavo\"\n[local_migration]\nallow = \"paused\"\ntime_max = \"1000s\"\npause_max = \"500s\"\n";

fn write(path: &str, text: &str) -> anyhow::Result<()> {
    let dir = Path::new(path)
        .parent()
        .context("a file to write has no directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {path}"))
}

fn systemctl(arguments: &[&str]) -> anyhow::Result<String> {
    run("systemctl", arguments)
}

fn property(name: &str) -> anyhow::Result<String> {
    let value = systemctl(&["show", "-P", name, "homenode"])?;
    Ok(value.trim().to_owned())
}

/// Returns the service's latest output.
fn said() -> String {
    let arguments = ["-u", "homenode", "-n", "12", "--no-pager", "-o", "cat"];
    run("journalctl", &arguments).unwrap_or_default()
}

fn wait_runs_on(domu: &Domu, cpus: &str) -> anyhow::Result<()> {
    let what = format!("{} to be allowed CPUs {cpus}", domu.spec.name);
    wait_until(&what, SOON, || {
        let vcpus = domu.vcpus()?;
        Ok(match vcpus.iter().all(|vcpu| vcpu.hard == cpus) {
            true => Look::Done(()),
            false => Look::NotYet(format!("{vcpus:?}; {}", said())),
        })
    })
}

/// Installs the package's files for the service.
fn install(inside: &Inside) -> anyhow::Result<()> {
    fs::copy(inside.homenode()?, "/usr/bin/homenode").context("cannot copy homenode")?;
    write(UNIT_AT, UNIT)?;
    write(SETTINGS_AT, SETTINGS)?;
    fs::create_dir_all("/etc/homenode/vms")?;
    run("groupadd", &["--system", "--force", "homenode"])?;
    systemctl(&["daemon-reload"]).map(drop)
}

/// Checks the agent's unit with its drop-in for dom0: the unit becomes ready, brings a domU home, and restores the domU when the
/// unit is killed or stopped.
pub(super) fn unit(inside: &mut Inside) -> anyhow::Result<()> {
    let busy = Behaviour::busy(1).with_touch(20);
    let domu = inside.create_domu(&DomuSpec::new("tenant", Kind::Pv, "3").doing(busy), Toolstack::Xl)?;
    domu.pin(0, "1-3")?;
    install(inside)?;
    let begin = Instant::now();
    let alone = systemctl(&["start", "homenode"]);
    inside.note(format!(
        "the unit alone: {} after {:.1} s; it said: {}",
        if alone.is_ok() {
            "it starts"
        } else {
            "it does not start"
        },
        begin.elapsed().as_secs_f64(),
        said().lines().last().unwrap_or_default()
    ));
    ensure!(
        alone.is_err(),
        "expected the unit not to start in dom0 without its drop-in, but it did"
    );
    systemctl(&["stop", "homenode"])?;

    write(DROP_IN_AT, DROP_IN)?;
    // Without a restart of the service, its guard has something to restore.
    write(
        "/run/systemd/system/homenode.service.d/tried.conf",
        "[Service]\nRestart=no\n",
    )?;
    systemctl(&["daemon-reload"])?;
    for how in ["killed", "stopped"] {
        let begin = Instant::now();
        systemctl(&["start", "homenode"]).with_context(said)?;
        inside.note(format!(
            "with its drop-in: {} after {:.1} s, {}",
            property("ActiveState")?,
            begin.elapsed().as_secs_f64(),
            property("StatusText")?
        ));
        wait_runs_on(&domu, "3")?;
        let scopes = systemctl(&["list-units", "--no-legend", "--plain", "--type=scope"])?;
        ensure!(
            scopes.contains("homenode-guard"),
            "expected the guard in a scope of its own, saw {scopes}"
        );
        let begin = Instant::now();
        match how {
            "killed" => systemctl(&["kill", "--signal=KILL", "homenode"])?,
            _ => systemctl(&["stop", "homenode"])?,
        };
        wait_runs_on(&domu, "1-3")?;
        inside.note(format!(
            "{how}: released after {:.1} s",
            begin.elapsed().as_secs_f64()
        ));
        wait_until("the guard to end", Duration::from_secs(90), || {
            let scopes = systemctl(&["list-units", "--no-legend", "--plain", "--type=scope"])?;
            Ok(match scopes.contains("homenode-guard") {
                false => Look::Done(()),
                true => Look::NotYet(scopes),
            })
        })?;
        let _ = systemctl(&["reset-failed", "homenode"]);
    }
    moved(inside, domu)
}

/// A domain's memory comes to its vCPU's node. The mover runs in a separate unit, without the agent's confinement.
fn moved(inside: &Inside, mut domu: Domu) -> anyhow::Result<()> {
    domu.pin(0, "2")?;
    systemctl(&["start", "homenode"])?;
    let (name, before) = (domu.spec.name.clone(), domu.id);
    let id = wait_until("the domU to be another domain", Duration::from_secs(600), || {
        let all = crate::inside::xen::domains()?;
        let found: Vec<u32> = all
            .into_iter()
            .filter(|(_, other)| *other == name)
            .map(|(id, _)| id)
            .collect();
        Ok(match found[..] {
            [id] if id != before => Look::Done(id),
            _ => Look::NotYet(format!("{found:?}; {}", said())),
        })
    })?;
    domu.arrived(id);
    let pages = domu.pages_by_node()?;
    inside.note(format!(
        "under the service {name} is domain {id}, pages by node {pages:?}"
    ));
    ensure!(
        pages.iter().sum::<u64>() == pages[2],
        "expected all pages of the domU on node 2, saw {pages:?}"
    );
    systemctl(&["stop", "homenode"])?;
    wait_runs_on(&domu, "2")?;
    inside.destroy_domu(&domu)
}

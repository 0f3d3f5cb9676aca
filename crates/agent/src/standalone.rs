//! Answers without an agent: samples the host directly, and keeps reservations in a small locked file, so VMs that start together
//! still get different nodes.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::answers::{self, Predictions};
use crate::usage_file::Clock;
use anyhow::Context;
use homenode_api::AskError;
use homenode_api::answer::{Placed, ReservationDropped, Reservations};
use homenode_control::{Config, Control, Mode, Request as Ask, Reserved};
use homenode_host::{CpuSample, NodeSample, Sample};
use homenode_kernel::{meminfo, now, proc_stat};
use homenode_machine::Machine;
use homenode_policy::placement::{Announcement, Asked, Ledger};
use homenode_undo::state_dir::StateDir;
use homenode_undo::{Acting, Options};
use homenode_units::{NodeId, NodeSet};

use crate::drain_file::DrainFile;
use crate::managed::{Managed, machine_here};
use crate::wall_clock::WallClock;

/// Time between the two samples that show how busy CPUs are: ten of the kernel's ticks.
const LOOK: Duration = Duration::from_millis(100);
const LEDGER: &str = "ledger.json";
/// How long to wait for the lock: other processes hold it for about [`LOOK`].
const LOCK_MAX: Duration = Duration::from_millis(800);
const LOCK_AGAIN: Duration = Duration::from_millis(10);
/// Most bytes of the ledger. On a full host it has a few hundred kilobytes.
const LEDGER_BYTES_MAX: u64 = 16 << 20;

/// Returns the nodes where a VM would be placed on this host.
pub fn place(state: &Path, ask: &Ask) -> anyhow::Result<Placed> {
    // Without permission to read the state directory the ledger counts as empty, but the question can still be answered.
    let ledger = open_ledger(state).map(|(_, ledger)| ledger).unwrap_or_default();
    let machine = machine_here()?;
    let control = look(state, &machine, ledger)?;
    Ok(answers::placed(&control, &machine, ask, Predictions::Unknown))
}

/// Reserves nodes in the ledger for a VM that is about to start, and returns them. Always returns nodes, with an error if one
/// occurred.
pub fn reserve(state: &Path, asked: Asked) -> (NodeSet, Option<anyhow::Error>) {
    let machine = match machine_here() {
        Ok(machine) => machine,
        Err(error) => return (NodeSet::one(NodeId(0)), Some(error)),
    };
    match try_reserve(state, &machine, asked) {
        Ok(reserved) => {
            let why = reserved.unplaceable.filter(|_| asked.huge_page_bytes.is_some());
            (reserved.nodes, why.map(anyhow::Error::from))
        }
        Err(error) => (
            machine.home_nodes(),
            Some(error.context("cannot choose nodes for the VM, so all nodes are advised")),
        ),
    }
}

fn try_reserve(state: &Path, machine: &Machine, asked: Asked) -> anyhow::Result<Reserved> {
    let (mut file, ledger) = open_ledger(state)?;
    let mut control = look(state, machine, ledger)?;
    let reserved = control.reserve(machine, asked);
    save(&mut file, control.ledger())?;
    Ok(reserved)
}

/// Announces a VM that is about to start.
///
/// # Errors
/// If the ledger cannot be written; the VM's nodes are then chosen without what was announced.
pub fn announce(state: &Path, announcement: Announcement) -> anyhow::Result<()> {
    let (mut file, mut ledger) = open_ledger(state)?;
    ledger.announce(announcement, now());
    save(&mut file, &ledger)
}

/// Returns the open reservations in the ledger.
///
/// # Errors
/// If the ledger cannot be read.
pub fn reservations(state: &Path) -> anyhow::Result<Reservations> {
    // Listing reservations must not create the directory.
    let ledger = match state.try_exists() {
        Ok(false) => Ledger::default(),
        _ => open_ledger(state)?.1,
    };
    let now = now();
    Ok(answers::reservations::reservations(
        ledger.open(now),
        WallClock::start(Clock::Wall),
        now,
    ))
}

/// Removes a reservation from the ledger.
///
/// # Errors
/// If there is no reservation with this number, or the ledger cannot be written.
pub fn drop_reservation(state: &Path, id: u64) -> anyhow::Result<ReservationDropped> {
    let (mut file, mut ledger) = open_ledger(state)?;
    let known = ledger.open(now()).map(|reservation| reservation.id).collect();
    if !ledger.drop_reservation(id, now()) {
        return Err(AskError::Agent(answers::reservations::no_such(id, known)).into());
    }
    save(&mut file, &ledger)?;
    Ok(ReservationDropped { id })
}

/// Returns a control loop that has sampled the host twice.
fn look(state: &Path, machine: &Machine, ledger: Ledger) -> anyhow::Result<Control> {
    // If this file is damaged, only the agent reports that.
    let drained = DrainFile::of(Some(state)).read().unwrap_or_default();
    let control = Control::new(Config::default(), Mode::Observe).with_ledger(ledger);
    let mut control = control.with_drained(drained);
    let mut sample = sampler(machine)?;
    control.begin(machine, sample()?);
    std::thread::sleep(LOOK);
    control.begin(machine, sample()?);
    Ok(control)
}

/// Returns the function that samples this host: from the hypervisor in dom0, else from the kernel.
fn sampler(machine: &Machine) -> anyhow::Result<Box<dyn FnMut() -> anyhow::Result<Sample> + '_>> {
    let root = Path::new("/");
    if !homenode_xen::is_dom0(root)? {
        return Ok(Box::new(move || sample(root, machine)));
    }
    let options = Options {
        acting: Acting::DryRun,
        ..Options::new(machine.clone())
    };
    let mut host = Managed::Xen.connect(options)?;
    Ok(Box::new(move || Ok(host.sample()?)))
}

/// Samples CPUs and nodes, but not VMs, from the kernel.
fn sample(root: &Path, machine: &Machine) -> anyhow::Result<Sample> {
    let usable = machine.cpu_set();
    let busy = proc_stat::read(root)?
        .into_iter()
        .filter(|(id, _)| usable.contains(*id));
    let cpus = busy.map(|(id, busy_ns)| CpuSample { id, busy_ns }).collect();
    let mut nodes = homenode_units::NodeMap::new();
    for node in machine.nodes.keys() {
        let memory = meminfo::read(root, node)?;
        let huge_pages = meminfo::huge_pages(root, node).ok();
        let sample = memory.map_or_else(NodeSample::default, |memory| NodeSample {
            memory_total_bytes: memory.total_bytes,
            memory_free_bytes: memory.free_bytes,
            memory_traffic_bytes: None,
            huge_pages,
        });
        nodes.insert(node, sample);
    }
    Ok(Sample {
        at: now(),
        cpus,
        nodes,
        ..Sample::default()
    })
}

/// Opens and locks the ledger's file; dropping the file releases the lock. A damaged ledger counts as empty, since reservations
/// are short-lived.
fn open_ledger(state: &Path) -> anyhow::Result<(File, Ledger)> {
    let dir = StateDir::open(state)?;
    let mut file = dir.open_to_write(LEDGER)?;
    lock(&file).with_context(|| format!("cannot lock {}", dir.path_of(LEDGER).display()))?;
    let mut text = String::new();
    let readable = (&mut file)
        .take(LEDGER_BYTES_MAX)
        .read_to_string(&mut text)
        .is_ok();
    let ledger = readable
        .then(|| serde_json::from_str(&text).ok())
        .flatten()
        .unwrap_or_default();
    Ok((file, ledger))
}

/// Waits until other processes release the lock, but not long, since a VM is about to start.
fn lock(file: &File) -> std::io::Result<()> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if begun.elapsed() >= LOCK_MAX => {
                return Err(std::io::Error::other(
                    "another process has held the lock for too long",
                ));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_AGAIN),
        }
    }
}

/// Overwrites the ledger in the locked file.
fn save(file: &mut File, ledger: &Ledger) -> anyhow::Result<()> {
    let text = serde_json::to_vec(ledger)?;
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(&text))
        .context("cannot write the ledger")
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_policy::placement::Shape;
    use homenode_units::VmId;

    #[test]
    fn announcements_survive_from_one_process_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape {
            vcpus: 2,
            memory_mib: 128,
        };
        let announcement = Announcement {
            vm: VmId(7),
            name: "seven".into(),
            shape,
            bandwidth: None,
            home: None,
            device_nodes: homenode_units::NodeSet::one(homenode_units::NodeId(1)),
            huge_pages: Vec::new(),
        };
        announce(dir.path(), announcement.clone()).unwrap();
        let (_, mut ledger) = open_ledger(dir.path()).unwrap();
        assert_eq!(ledger.announced(shape, now()), Some(announcement));
    }

    #[test]
    fn looking_for_reservations_makes_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("typo");
        assert!(reservations(&state).unwrap().reservations.is_empty());
        assert!(!state.exists());
    }

    #[test]
    fn a_damaged_ledger_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = StateDir::open(dir.path()).unwrap().open_to_write(LEDGER).unwrap();
        file.write_all(b"{\"announced\": [\xff\xff").unwrap();
        let (_, ledger) = open_ledger(dir.path()).unwrap();
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn a_vm_starts_though_somebody_holds_the_ledger() {
        let dir = tempfile::tempdir().unwrap();
        let (held, _) = open_ledger(dir.path()).unwrap();
        let shape = Shape {
            vcpus: 2,
            memory_mib: 128,
        };
        let begun = Instant::now();
        let (nodes, trouble) = reserve(dir.path(), shape.into());
        assert!(begun.elapsed() < Duration::from_secs(5) && !nodes.is_empty());
        let said = format!("{:#}", trouble.unwrap());
        assert!(
            said.contains("ledger.json") && said.contains("has held the lock"),
            "{said}"
        );
        drop(held);
        assert!(reserve(dir.path(), shape.into()).1.is_none());
    }

    #[test]
    fn this_host_can_be_looked_at() {
        let machine = homenode_machine_files::sysfs::read(Path::new("/")).unwrap();
        let sample = sample(Path::new("/"), &machine).unwrap();
        assert_eq!(sample.cpus.len(), machine.cpus.len());
        assert!(sample.nodes.values().any(|node| node.memory_free_bytes.0 > 0));
    }
}

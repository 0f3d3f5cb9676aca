//! What the agent has changed of domains, in its journal, and how that is undone: by the agent, by its guard, by
//! `homenode release`. Only what still reads as the agent's is undone; what somebody else set since is left alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_linux::Undone;
use homenode_linux::journal::{Before, Entry, Journal, Run, Written};
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::{Deserialize, Serialize};

use crate::hypervisor::{CallError, Hypervisor, Listed, XenError};
use crate::trace;

/// CPUs that each vCPU may have been left pinned to, the newest first: several where an agent ended while it changed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "xen-vcpus";
}

/// Nodes that a domain's memory may have been told to come from, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home(pub Vec<NodeSet>);

impl Written for Home {
    const KEY: &'static str = "xen-home";
}

/// Its operator's cap, and caps that it may have been left with, the newest first; percent of a CPU, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cap {
    /// Its operator's.
    pub before: u16,
    /// The agent's.
    pub ours: Vec<u16>,
}

impl Written for Cap {
    const KEY: &'static str = "xen-cap";
}

/// More changes in a row without an answer are not told apart.
const KEPT: usize = 8;

/// Puts what is about to be set before what may have been left.
pub fn newest<T: PartialEq>(ours: &mut Vec<T>, new: T) {
    ours.retain(|old| *old != new);
    ours.insert(0, new);
    ours.truncate(KEPT);
}

/// Keys of what places a domain: while one is there, how the domain was before is known.
pub const PLACING: [&str; 2] = [Pins::KEY, Home::KEY];

/// Which part is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Pins and home.
    Placing,
    /// The cap: what must not outlast the agent.
    Limits,
}

/// The domain that a run is of; `None` once that run is over.
///
/// # Errors
/// When the hypervisor cannot be asked.
pub fn alive(hypervisor: &Hypervisor, run: &Run) -> Result<Option<Listed>, CallError> {
    let found = hypervisor.domain(run.runtime_id)?;
    let is_it =
        |found: &Listed| found.vm == run.vm && !found.is_dying && run.start_ticks == hypervisor.boot();
    Ok(found.filter(is_it))
}

/// Undoes a part of what the journal says of a domain, and strikes it out. `Ok` also where that run of it is over.
///
/// # Errors
/// What could not be undone; it stays in the journal.
pub fn undo(hypervisor: &Hypervisor, journal: &mut Journal, vm: VmId, parts: &[Part]) -> Result<(), String> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let domain = alive(hypervisor, &entry.run).map_err(|error| error.to_string())?;
    let mut failures = Vec::new();
    for part in parts {
        let (keys, done): (&[&str], _) = match part {
            Part::Placing => (
                &PLACING,
                domain.map_or(Ok(()), |of| place_back(hypervisor, of, &entry)),
            ),
            Part::Limits => (
                &[Cap::KEY],
                domain.map_or(Ok(()), |of| lift_cap(hypervisor, of, &entry)),
            ),
        };
        match done {
            Ok(()) => journal.clear(vm, keys),
            // It may have ended meanwhile.
            Err(_) if matches!(alive(hypervisor, &entry.run), Ok(None)) => journal.clear(vm, keys),
            Err(error) => failures.push(error.to_string()),
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

fn place_back(hypervisor: &Hypervisor, domain: Listed, entry: &Entry) -> Result<(), CallError> {
    // One that fails keeps no other from being given back.
    let mut failed = None;
    for (index, ours) in entry.get::<Pins>().unwrap_or_default().0 {
        failed = unpin(hypervisor, domain, entry, index, &ours).err().or(failed);
    }
    if let (Some(Home(ours)), Some(before)) = (entry.get(), &entry.before.nodes)
        && ours.contains(&hypervisor.node_affinity(domain.domid)?)
    {
        hypervisor.set_node_affinity(domain.domid, before)?;
    }
    failed.map_or(Ok(()), Err)
}

/// Gives a vCPU back the CPUs that it had, unless somebody else pinned it since.
fn unpin(
    hypervisor: &Hypervisor,
    domain: Listed,
    entry: &Entry,
    index: u16,
    ours: &[CpuSet],
) -> Result<(), CallError> {
    if !ours.contains(&hypervisor.affinity(domain.domid, index)?) {
        return Ok(());
    }
    let there = hypervisor.pool(domain.pool)?.cpus;
    let before = entry
        .before
        .vcpus
        .get(&index)
        .filter(|before| !before.intersection(&there).is_empty());
    hypervisor.pin(domain.domid, index, before.unwrap_or(&there))
}

fn lift_cap(hypervisor: &Hypervisor, domain: Listed, entry: &Entry) -> Result<(), CallError> {
    let Some(Cap { before, ours }) = entry.get() else {
        return Ok(());
    };
    let pool = hypervisor.pool(domain.pool)?;
    // It was moved to where there are none, and lost its cap with that.
    if !pool.has_caps() {
        return Ok(());
    }
    match ours.contains(&hypervisor.cap(domain.domid, &pool)?) {
        true => hypervisor.set_cap(domain.domid, &pool, before),
        false => Ok(()),
    }
}

/// Undoes all that the journal says.
pub fn undo_all(hypervisor: &Hypervisor, journal: &mut Journal) -> Undone {
    let mut undone = Undone::default();
    let entries = journal.entries().iter();
    let in_force = entries.filter(|(_, entry)| is_in_force(entry));
    let all: Vec<(VmId, String)> = in_force
        .map(|(vm, entry)| (*vm, entry.run.name.clone()))
        .collect();
    for (vm, name) in all {
        match undo(hypervisor, journal, vm, &[Part::Placing, Part::Limits]) {
            Ok(()) => {
                journal.clear_all(vm);
                undone.vms.push(vm);
            }
            Err(cause) => undone
                .failures
                .push(format!("domain {name} could not be restored: {cause}")),
        }
    }
    undone
}

/// Whether something is to be undone.
pub fn is_in_force(entry: &Entry) -> bool {
    entry.has(&PLACING) || entry.has(&[Cap::KEY])
}

/// How a domain is, to be written down before it is touched.
///
/// # Errors
/// When the hypervisor cannot be asked.
pub fn before(hypervisor: &Hypervisor, domid: u32, vcpus: &[u16]) -> Result<Before, CallError> {
    let affinities = vcpus
        .iter()
        .map(|&index| Ok((index, hypervisor.affinity(domid, index)?)));
    let affinities: BTreeMap<u16, CpuSet> = affinities.collect::<Result<_, _>>()?;
    Ok(Before {
        vcpus: affinities,
        nodes: Some(hypervisor.node_affinity(domid)?),
        ..Before::default()
    })
}

/// What an agent that is no more left behind, for its guard to undo.
#[derive(Debug)]
pub struct Legacy {
    root: PathBuf,
    hypervisor: Option<Hypervisor>,
}

impl Legacy {
    /// That of an agent of this host; the hypervisor is opened when it is needed.
    pub fn new(root: &Path) -> Legacy {
        Legacy {
            root: root.to_owned(),
            hypervisor: None,
        }
    }

    /// Undoes all that the journal says. What fails is worth another try.
    pub fn undo(&mut self, journal: &mut Journal) -> Undone {
        let opened = match self.hypervisor.take() {
            Some(hypervisor) => Ok(hypervisor),
            None => Hypervisor::open(&self.root),
        };
        match opened {
            Ok(hypervisor) => {
                let mut undone = undo_all(&hypervisor, journal);
                undone
                    .failures
                    .extend(trace::stop_leftover(&hypervisor, &self.root).err());
                self.hypervisor = Some(hypervisor);
                undone
            }
            // Rebooted without Xen: no domain is left to be undone.
            Err(XenError::NotDom0 { .. }) => Undone::default(),
            Err(error) => Undone {
                vms: Vec::new(),
                failures: vec![error.to_string()],
            },
        }
    }
}

//! The agent's changes to domains, as journalled, and how to undo them: by the agent, by its guard, by `homenode release`.
//! Only what still reads as the agent's is undone; what another program set since is not touched. An unreadable entry is a
//! failure, and stays in the journal.
//!
//! Limits outlive the run that they were set for: when a domain reboots, or is restored or migrated, `xl` gives it its cap
//! and its balloon's target again. So they are lifted from any domain that has the UUID; if there is none at that moment,
//! they are remembered until there is ([`Past`]).

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use homenode_undo::Undone;
use homenode_undo::journal::{self, Entry, Journal, Run, Written};
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::{Deserialize, Serialize};

use crate::balloon::Target;
use crate::error::{CallError, XenError};
use crate::hypervisor::{Hypervisor, Listed};
use crate::trace;

/// CPUs that each vCPU may have been left pinned to, the newest first: several if an agent ended while it changed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "xen-vcpus";
}

/// Nodes that a domain's memory may have been set to come from, the newest first. If [`journal::Before`] names no nodes, the
/// domain's memory came from the nodes of its CPUs, and does so again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home(pub Vec<NodeSet>);

impl Written for Home {
    const KEY: &'static str = "xen-home";
}

/// The operator's cap, and caps that it may have been left with, the newest first; percent of a CPU, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cap {
    /// The operator's.
    pub before: u16,
    /// The agent's.
    pub ours: Vec<u16>,
}

impl Written for Cap {
    const KEY: &'static str = "xen-cap";
}

/// Limits of ended runs: of a domain that was saved, or that is about to boot again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// The domain's CPU cap; `None` if no cap is remembered.
    pub cap: Option<Cap>,
    /// Its balloon's target.
    pub memory: Option<Target>,
}

impl Written for Past {
    const KEY: &'static str = journal::PAST;
}

/// A limit that `xl` gives to a domain's next run too.
trait Outlasting: Written {
    /// Restores a domain's operator's limit. Returns whether it had one of ours.
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String>;
    fn put(self, past: &mut Past);
}

impl Outlasting for Cap {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String> {
        let say = |error: CallError| error.to_string();
        let pool = hypervisor.pool(of.pool).map_err(say)?;
        // In a pool without caps: it was moved there, and lost its cap.
        let has_ours = pool.has_caps() && self.ours.contains(&hypervisor.cap(of.domid, &pool).map_err(say)?);
        if has_ours {
            hypervisor.set_cap(of.domid, &pool, self.before).map_err(say)?;
        }
        Ok(has_ours)
    }

    fn put(self, past: &mut Past) {
        past.cap = Some(self);
    }
}

impl Outlasting for Target {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String> {
        Target::give_back(self, hypervisor, of)
    }

    fn put(self, past: &mut Past) {
        past.memory = Some(self);
    }
}

/// Most domains that ended with a limit and are remembered.
const PAST_MAX: usize = 1024;

/// The most changes in a row without an answer that are told apart.
const KEPT: usize = 8;

/// Puts the value to be set before those that may have been left.
pub fn newest<T: PartialEq>(ours: &mut Vec<T>, new: T) {
    ours.retain(|old| *old != new);
    ours.insert(0, new);
    ours.truncate(KEPT);
}

/// Keys of what places a domain: while one has an entry, the domain's former state is known.
pub const PLACING: [&str; 2] = [Pins::KEY, Home::KEY];

/// A part of the changes to undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Pins and home.
    Placing,
    /// The cap.
    Cap,
    /// Its balloon's target.
    Memory,
}

impl Part {
    /// In the order in which they are undone.
    const ALL: [Part; 3] = [Part::Placing, Part::Cap, Part::Memory];
    /// Parts that must not outlast the agent.
    pub const LIMITS: [Part; 2] = [Part::Cap, Part::Memory];

    /// The journal keys of a part.
    const fn keys(self) -> &'static [&'static str] {
        match self {
            Part::Placing => &PLACING,
            Part::Cap => &[Cap::KEY],
            Part::Memory => &[Target::KEY],
        }
    }
}

/// The domain of a run; `None` once that run has ended.
///
/// # Errors
/// When the hypervisor cannot be called.
pub fn alive(hypervisor: &Hypervisor, run: &Run) -> Result<Option<Listed>, CallError> {
    let found = hypervisor.domain(run.runtime_id)?;
    let is_it =
        |found: &Listed| found.vm == run.vm && !found.is_dying && run.start_ticks == hypervisor.boot();
    Ok(found.filter(is_it))
}

/// The agent's limits that are in force.
pub fn limits(entry: &Entry) -> impl Iterator<Item = Part> + '_ {
    Part::LIMITS.into_iter().filter(|part| entry.has(part.keys()))
}

/// Reads a journal entry; an error if it is there and cannot be read.
///
/// # Errors
/// A sentence that names the key.
pub fn read<T: Written>(entry: &Entry) -> Result<Option<T>, String> {
    match entry.get() {
        None if entry.has(&[T::KEY]) => Err(unreadable(T::KEY)),
        read => Ok(read),
    }
}

fn unreadable(key: &str) -> String {
    format!(
        "what the journal has under {key} cannot be read: another version of homenode wrote it, or it is damaged"
    )
}

/// Undoes a part of a domain's journalled changes, and strikes it out. Also `Ok` if that run of it has ended.
///
/// # Errors
/// What could not be undone; that stays in the journal.
pub fn undo(hypervisor: &Hypervisor, journal: &mut Journal, vm: VmId, parts: &[Part]) -> Result<(), String> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let say = |error: CallError| error.to_string();
    let domain = alive(hypervisor, &entry.run).map_err(say)?;
    let mut failures = Vec::new();
    for key in parts.iter().flat_map(|part| part.keys()) {
        let done = match (*key, domain) {
            _ if !entry.has(&[key]) => continue,
            (Cap::KEY, _) => lift::<Cap>(hypervisor, journal, &entry),
            (Target::KEY, _) => lift::<Target>(hypervisor, journal, &entry),
            (_, None) => Ok(()),
            (Pins::KEY, Some(of)) => unpin_all(hypervisor, of, &entry),
            (_, Some(of)) => leave_home(hypervisor, of, &entry),
        };
        match done {
            Ok(()) => journal.clear(vm, &[key]),
            // The domain may have ended meanwhile.
            Err(_) if PLACING.contains(key) && matches!(alive(hypervisor, &entry.run), Ok(None)) => {
                journal.clear(vm, &[key]);
            }
            Err(error) => failures.push(error),
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

fn unpin_all(hypervisor: &Hypervisor, domain: Listed, entry: &Entry) -> Result<(), String> {
    // If one fails, the others are still restored.
    let mut failed = None;
    for (index, ours) in read::<Pins>(entry)?.unwrap_or_default().0 {
        failed = unpin(hypervisor, domain, entry, index, &ours).err().or(failed);
    }
    failed.map_or(Ok(()), |error| Err(error.to_string()))
}

fn leave_home(hypervisor: &Hypervisor, domain: Listed, entry: &Entry) -> Result<(), String> {
    let say = |error: CallError| error.to_string();
    let ours = read::<Home>(entry)?.map_or_else(Vec::new, |home| home.0);
    if !ours.contains(&hypervisor.node_affinity(domain.domid).map_err(say)?) {
        return Ok(());
    }
    match &entry.before.nodes {
        Some(before) => hypervisor.set_node_affinity(domain.domid, before).map_err(say),
        None => hypervisor.follow_cpus(domain.domid).map_err(say),
    }
}

/// Restores the CPUs that a vCPU had, unless another program pinned it since.
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

/// Restores the operator's limit on all domains with the UUID that have one of ours. If none has the UUID at that moment, or
/// one is on its way, the limit is remembered.
fn lift<T: Outlasting>(hypervisor: &Hypervisor, journal: &mut Journal, entry: &Entry) -> Result<(), String> {
    let vm = entry.run.vm;
    let domains = of_uuid(hypervisor, vm).map_err(|error| error.to_string())?;
    let limit = match read::<T>(entry) {
        // No domain has it any more.
        Err(_) if domains.is_empty() => None,
        read => read?,
    };
    let Some(limit) = limit else { return Ok(()) };
    let own = (entry.run.start_ticks == hypervisor.boot()).then_some(entry.run.runtime_id);
    if !give_back(hypervisor, &domains, own, &limit)? {
        remember(journal, hypervisor.boot(), vm, limit);
    }
    Ok(())
}

/// Domains with a UUID: one, or two during a local migration.
fn of_uuid(hypervisor: &Hypervisor, vm: VmId) -> Result<Vec<Listed>, CallError> {
    let mut domains = hypervisor.domains()?;
    domains.retain(|listed| listed.vm == vm && !listed.is_dying);
    Ok(domains)
}

/// Lifts a limit from domains with a UUID. Returns whether that settles it: a domain being built gets its limit at the end,
/// and a suspended one may be about to be saved with it. `own` is the domain that the limit was set for.
fn give_back<T: Outlasting>(
    hypervisor: &Hypervisor,
    domains: &[Listed],
    own: Option<u32>,
    limit: &T,
) -> Result<bool, String> {
    let lift = |of: &Listed| {
        let has_ours = limit.give_back(hypervisor, of)?;
        let is_built = has_ours || !of.is_paused || Some(of.domid) == own;
        Ok::<bool, String>(is_built && !of.is_shut_down)
    };
    let (mut is_settled, mut failures) = (!domains.is_empty(), Vec::new());
    for of in domains {
        match lift(of) {
            Ok(of_it) => is_settled &= of_it,
            // A domain that has ended meanwhile has no limit any more.
            Err(_) if matches!(hypervisor.domain(of.domid), Ok(None)) => is_settled = false,
            Err(error) => failures.push(error),
        }
    }
    match failures.is_empty() {
        true => Ok(is_settled),
        false => Err(failures.join("; ")),
    }
}

/// Remembers the limit that a domain may come back with. If it cannot be written it is forgotten, and takes no room later.
fn remember<T: Outlasting>(journal: &mut Journal, boot: u64, vm: VmId, limit: T) {
    let past = journal
        .entries()
        .iter()
        .filter(|(other, entry)| **other != vm && entry.has(&[Past::KEY]));
    if past.clone().count() >= PAST_MAX {
        // Numbers ascend within a boot.
        let oldest = past.min_by_key(|(_, entry)| (entry.run.start_ticks == boot, entry.run.runtime_id));
        if let Some(oldest) = oldest.map(|(vm, _)| *vm) {
            journal.clear_all(oldest);
        }
    }
    let known = journal.entry(vm).and_then(Entry::get::<Past>);
    let mut past = known.unwrap_or_default();
    limit.put(&mut past);
    let _ = journal.set(vm, &past);
}

/// Settles the journal entry of an ended run of a domain, or one that another run has followed: remaining limits are lifted
/// or remembered, all else is forgotten.
///
/// # Errors
/// What could not be undone; that stays in the journal.
pub fn settle(hypervisor: &Hypervisor, journal: &mut Journal, vm: VmId) -> Result<(), String> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let done = [
        lift::<Cap>(hypervisor, journal, &entry),
        lift::<Target>(hypervisor, journal, &entry),
    ];
    all_done(done)?;
    if let Some(Past { cap, memory }) = journal.entry(vm).and_then(Entry::get) {
        let domains = of_uuid(hypervisor, vm).map_err(|error| error.to_string())?;
        let cap = cap.map_or(Ok(true), |cap| give_back(hypervisor, &domains, None, &cap));
        let memory = memory.map_or(Ok(true), |memory| give_back(hypervisor, &domains, None, &memory));
        let is_settled = matches!((&cap, &memory), (Ok(true), Ok(true)));
        all_done([cap.map(drop), memory.map(drop)])?;
        if !is_settled {
            let others: Vec<&str> = entry.keys().filter(|key| *key != Past::KEY).collect();
            journal.clear(vm, &others);
            return Ok(());
        }
    }
    journal.forget(vm);
    Ok(())
}

/// Combines the results of both.
fn all_done(done: [Result<(), String>; 2]) -> Result<(), String> {
    let failures: Vec<String> = done.into_iter().filter_map(Result::err).collect();
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

/// Undoes everything in the journal.
pub fn undo_all(hypervisor: &Hypervisor, journal: &mut Journal) -> Undone {
    let mut undone = Undone::default();
    let all: Vec<(VmId, Entry)> = journal
        .entries()
        .iter()
        .map(|(vm, entry)| (*vm, entry.clone()))
        .collect();
    for (vm, entry) in all {
        let was_in_force = entry.is_in_force();
        if !was_in_force && !entry.has(&[Past::KEY]) {
            continue;
        }
        let run_is_over = matches!(alive(hypervisor, &entry.run), Ok(None));
        let done = match run_is_over {
            true => settle(hypervisor, journal, vm),
            false => undo(hypervisor, journal, vm, &Part::ALL).and_then(|()| {
                let key = journal
                    .entry(vm)
                    .and_then(|left| left.keys().find(|key| *key != Past::KEY));
                key.map_or(Ok(()), |key| Err(unreadable(key)))
            }),
        };
        match done {
            Ok(()) if was_in_force => undone.vms.push(vm),
            Ok(()) => {}
            Err(cause) => undone.failures.push(format!(
                "domain {} could not be restored: {cause}",
                entry.run.name
            )),
        }
    }
    undone
}

/// What an ended agent left behind, for its guard to undo.
#[derive(Debug)]
pub struct Leftovers {
    root: PathBuf,
    hypervisor: Option<Hypervisor>,
}

impl Leftovers {
    /// What an agent of this host left behind; opens the hypervisor only when needed.
    pub fn new(root: &Path) -> Leftovers {
        Leftovers {
            root: root.to_owned(),
            hypervisor: None,
        }
    }

    /// Undoes everything in the journal. Failures are worth a retry.
    pub fn undo(&mut self, journal: &mut Journal) -> Undone {
        let opened = match self.hypervisor.take() {
            Some(hypervisor) => Ok(hypervisor),
            None => Hypervisor::open(&self.root),
        };
        match opened {
            Ok(hypervisor) => {
                if let Some(said) = crate::moving::recover(&hypervisor) {
                    // A guard has no other place to report it.
                    let _ = writeln!(std::io::stderr(), "{said}");
                }
                let mut undone = undo_all(&hypervisor, journal);
                undone
                    .failures
                    .extend(trace::stop_leftover(&hypervisor, &self.root).err());
                self.hypervisor = Some(hypervisor);
                undone
            }
            // Rebooted without Xen: no domain is left to restore.
            Err(XenError::NotDom0 { .. }) => Undone::default(),
            Err(error) => Undone {
                vms: Vec::new(),
                failures: vec![error.to_string()],
            },
        }
    }
}

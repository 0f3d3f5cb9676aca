//! The agent's changes to domains, as journalled, and how to undo them: by the agent, by its guard, by `homenode release`.
//! Only what still reads as the agent's is undone; what another program set since is not touched. An unreadable entry is a
//! failure, and stays in the journal.
//!
//! Limits outlive the run that they were set for: when a domain reboots, or is restored or migrated, `xl` gives it its cap
//! and its balloon's target again. So they are lifted from any domain that has the UUID; if there is none at that moment,
//! they are remembered until there is ([`Past`]).

use std::collections::BTreeMap;

use homenode_undo::journal::{self, Entry, Journal, Run, Unreadable, Written};
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::{Deserialize, Serialize};

use crate::balloon::target_of;
use crate::error::{CallError, LeverError};
use crate::hypervisor::{Hypervisor, Listed};

/// CPUs that each vCPU may have been left pinned to, the newest first: several if an agent ended while it changed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "xen-vcpus";
}

/// Nodes that a domain's memory may have been set to come from, the newest first. If
/// [`journal::Before`] names no nodes, the domain's memory came from the nodes of its CPUs, and does
/// so again.
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

/// The operator's target, and targets that it may have been left with, the newest first; KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The operator's.
    pub before: u64,
    /// The agent's.
    pub ours: Vec<u64>,
}

impl Written for Target {
    const KEY: &'static str = "xen-memory";
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
pub trait Outlasting: Written {
    /// Restores a domain's operator's limit. Returns whether it had one of ours.
    ///
    /// # Errors
    /// Why the limit is not known, or could not be restored.
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, LeverError>;
    /// Puts it among the limits of ended runs.
    fn put(self, past: &mut Past);
}

impl Outlasting for Cap {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, LeverError> {
        let pool = hypervisor.pool(of.pool)?;
        // In a pool without caps: it was moved there, and lost its cap.
        let has_ours = pool.has_caps() && self.ours.contains(&hypervisor.cap(of.domid, &pool)?);
        if has_ours {
            hypervisor.set_cap(of.domid, &pool, self.before)?;
        }
        Ok(has_ours)
    }

    fn put(self, past: &mut Past) {
        past.cap = Some(self);
    }
}

impl Outlasting for Target {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, LeverError> {
        let now = target_of(&mut hypervisor.store(), of.domid)?;
        if !now.is_some_and(|now| self.ours.contains(&now)) {
            return Ok(false);
        }
        hypervisor.set_memory(of.domid, self.before)?;
        Ok(true)
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

/// Reads a journal entry; an error if it is there and cannot be read.
///
/// # Errors
/// [`LeverError::Unreadable`].
pub fn read<T: Written>(entry: &Entry) -> Result<Option<T>, LeverError> {
    match entry.get() {
        None if entry.has(&[T::KEY]) => Err(Unreadable(T::KEY.to_owned()).into()),
        read => Ok(read),
    }
}

/// Restores the operator's limit on all domains with the UUID that have one of ours. If none has the UUID at that moment, or
/// one is on its way, the limit is remembered.
///
/// # Errors
/// What could not be lifted.
pub fn lift<T: Outlasting>(
    hypervisor: &Hypervisor,
    journal: &mut Journal,
    entry: &Entry,
) -> Result<(), LeverError> {
    let vm = entry.run.vm;
    let domains = of_uuid(hypervisor, vm)?;
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
) -> Result<bool, LeverError> {
    let lift = |of: &Listed| {
        let has_ours = limit.give_back(hypervisor, of)?;
        let is_built = has_ours || !of.is_paused || Some(of.domid) == own;
        Ok::<bool, LeverError>(is_built && !of.is_shut_down)
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
    LeverError::joined(failures).map(|()| is_settled)
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
pub fn settle(hypervisor: &Hypervisor, journal: &mut Journal, vm: VmId) -> Result<(), LeverError> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let done = [
        lift::<Cap>(hypervisor, journal, &entry),
        lift::<Target>(hypervisor, journal, &entry),
    ];
    all_done(done)?;
    if let Some(Past { cap, memory }) = journal.entry(vm).and_then(Entry::get) {
        let domains = of_uuid(hypervisor, vm)?;
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
fn all_done(done: [Result<(), LeverError>; 2]) -> Result<(), LeverError> {
    LeverError::joined(done.into_iter().filter_map(Result::err).collect())
}

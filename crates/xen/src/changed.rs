//! The agent's changes to domains, as the journal lists them, and how the agent, its guard or `homenode release` undoes them. A
//! setting is undone only if it still reads as the agent set it; settings that another program changed since are not touched. An
//! unreadable entry is a failure, and stays in the journal.
//!
//! Limits outlive the run of a domain that they were set for. When the domain reboots, or is restored or migrated, `xl` gives it
//! the same cap and balloon target again. So limits are lifted from any domain that has the UUID. If there is none at that
//! moment, they are remembered until there is one ([`Past`]).

use std::collections::BTreeMap;

use homenode_undo::journal::{self, Entry, Journal, Run, Unreadable, Written};
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::{Deserialize, Serialize};

use crate::balloon::target_of;
use crate::error::{CallError, LeverError};
use crate::hypervisor::{Hypervisor, Listed};

/// CPUs that the agent may have left each vCPU pinned to, the newest first. There are several if an agent ended while it changed
/// them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "xen-vcpus";
}

/// Nodes from which the agent may have made a domain's memory come, the newest first. If [`journal::Before`] names no nodes, the
/// memory came from the nodes of the domain's CPUs, and undoing makes it so again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Home(pub Vec<NodeSet>);

impl Written for Home {
    const KEY: &'static str = "xen-home";
}

/// The operator's cap, and the caps that the agent may have left, the newest first. In percent of a CPU; 0 means no cap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cap {
    /// The operator's cap.
    pub before: u16,
    /// The agent's caps.
    pub ours: Vec<u16>,
}

impl Written for Cap {
    const KEY: &'static str = "xen-cap";
}

/// The operator's balloon target, and the targets that the agent may have left, the newest first. In KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Target {
    /// The operator's target.
    pub before: u64,
    /// The agent's targets.
    pub ours: Vec<u64>,
}

impl Written for Target {
    const KEY: &'static str = "xen-memory";
}

/// Limits of ended runs, for a domain that was saved or is about to boot again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Past {
    /// The domain's CPU cap; `None` if no cap is remembered.
    pub cap: Option<Cap>,
    /// The target of the domain's balloon; `None` if no target is remembered.
    pub memory: Option<Target>,
}

impl Written for Past {
    const KEY: &'static str = journal::PAST;
}

/// A limit that `xl` also gives to a domain's next run.
pub(crate) trait Outlasting: Written {
    /// Restores the operator's limit on a domain. Returns true if the domain had one of the agent's limits.
    ///
    /// # Errors
    /// If the limit is not known, or could not be restored.
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, LeverError>;
    /// Adds this limit to the limits of ended runs.
    fn put(self, past: &mut Past);
}

impl Outlasting for Cap {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, LeverError> {
        let pool = hypervisor.pool(of.pool)?;
        // A domain that was moved to a pool without caps has lost its cap.
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

/// The most ended domains whose limits are remembered.
const PAST_MAX: usize = 1024;

/// The most of the agent's values that an entry keeps, if one change after another got no answer.
const KEPT: usize = 8;

/// Puts the value that is about to be set before the values that may have been left.
pub(crate) fn newest<T: PartialEq>(ours: &mut Vec<T>, new: T) {
    ours.retain(|old| *old != new);
    ours.insert(0, new);
    ours.truncate(KEPT);
}

/// Returns the domain of a run; `None` once that run has ended.
///
/// # Errors
/// If the hypervisor cannot be called.
pub(crate) fn alive(hypervisor: &Hypervisor, run: &Run) -> Result<Option<Listed>, CallError> {
    let found = hypervisor.domain(run.runtime_id)?;
    let is_it =
        |found: &Listed| found.vm == run.vm && !found.is_dying && run.start_ticks == hypervisor.boot();
    Ok(found.filter(is_it))
}

/// Reads a journal entry. An entry that exists but cannot be read is an error.
///
/// # Errors
/// [`LeverError::Unreadable`].
pub(crate) fn read<T: Written>(entry: &Entry) -> Result<Option<T>, LeverError> {
    match entry.get() {
        None if entry.has(&[T::KEY]) => Err(Unreadable(T::KEY.to_owned()).into()),
        read => Ok(read),
    }
}

/// Restores the operator's limit on every domain with the UUID that has one of the agent's limits. The limit is remembered if
/// there is no such domain at that moment, or if one is on its way.
///
/// # Errors
/// Returns what could not be lifted.
pub(crate) fn lift<T: Outlasting>(
    hypervisor: &Hypervisor,
    journal: &mut Journal,
    entry: &Entry,
) -> Result<(), LeverError> {
    let vm = entry.run.vm;
    let domains = of_uuid(hypervisor, vm)?;
    let limit = match read::<T>(entry) {
        // No domain has the limit any more.
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

/// Returns the domains with a UUID: one, or two during a local migration.
fn of_uuid(hypervisor: &Hypervisor, vm: VmId) -> Result<Vec<Listed>, CallError> {
    let mut domains = hypervisor.domains()?;
    domains.retain(|listed| listed.vm == vm && !listed.is_dying);
    Ok(domains)
}

/// Lifts a limit from domains with a UUID. Returns true if nothing remains to be done. A domain that is being built gets its
/// limit only at the end, and a suspended domain may be about to be saved with its limit. `own` is the domain that the limit was
/// set for.
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

/// Remembers the limit that a domain may return with. If the journal cannot be written, the limit is forgotten, and takes no room
/// later.
fn remember<T: Outlasting>(journal: &mut Journal, boot: u64, vm: VmId, limit: T) {
    let past = journal
        .entries()
        .iter()
        .filter(|(other, entry)| **other != vm && entry.has(&[Past::KEY]));
    if past.clone().count() >= PAST_MAX {
        // Domain numbers ascend within a boot.
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

/// Settles the journal entry of a domain's run that has ended, or that another run has followed. Remaining limits are lifted or
/// remembered, and everything else is forgotten.
///
/// # Errors
/// Returns what could not be undone; this stays in the journal.
pub(crate) fn settle(hypervisor: &Hypervisor, journal: &mut Journal, vm: VmId) -> Result<(), LeverError> {
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

/// Returns all errors of the two results as one.
fn all_done(done: [Result<(), LeverError>; 2]) -> Result<(), LeverError> {
    LeverError::joined(done.into_iter().filter_map(Result::err).collect())
}

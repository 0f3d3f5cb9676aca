//! What the agent has changed of domains, in its journal, and how that is undone: by the agent, by its guard, by
//! `homenode release`. Only what still reads as the agent's is undone; what somebody else set since is left alone. What the
//! journal says and cannot be read is a failure, and stays there.
//!
//! Limits outlive the run that they were set for: `xl` gives a cap, and the memory that its balloon was to come to, to the domain
//! again when it reboots, restores or migrates it. So they are lifted from whatever domain has the UUID; where there is none just
//! then, they are remembered until there is ([`Past`]).

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

/// CPUs that each vCPU may have been left pinned to, the newest first: several where an agent ended while it changed them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "xen-vcpus";
}

/// Nodes that a domain's memory may have been told to come from, the newest first. Where [`journal::Before`] names no nodes,
/// the domain's memory came from wherever its CPUs were, and does so again.
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

/// Limits of runs that are over: of a domain that was saved, or that is about to boot again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// Its cap.
    pub cap: Option<Cap>,
    /// The memory that its balloon was to come to.
    pub memory: Option<Target>,
}

impl Written for Past {
    const KEY: &'static str = journal::PAST;
}

/// What `xl` gives to a domain's next run, too.
trait Outlasting: Written {
    /// Gives a domain its operator's back. Whether it had one of ours.
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String>;
    fn put(self, past: &mut Past);
}

impl Outlasting for Cap {
    fn give_back(&self, hypervisor: &Hypervisor, of: &Listed) -> Result<bool, String> {
        let say = |error: CallError| error.to_string();
        let pool = hypervisor.pool(of.pool).map_err(say)?;
        // It was moved to where there are none, and lost its cap with that.
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

/// Of more domains that ended with a limit none is remembered.
const PAST_MAX: usize = 1024;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Pins and home.
    Placing,
    /// The cap.
    Cap,
    /// The memory that its balloon is to come to.
    Memory,
}

impl Part {
    /// In the order in which they are undone.
    const ALL: [Part; 3] = [Part::Placing, Part::Cap, Part::Memory];
    /// What must not outlast the agent.
    pub const LIMITS: [Part; 2] = [Part::Cap, Part::Memory];

    /// Keys of what it is about.
    const fn keys(self) -> &'static [&'static str] {
        match self {
            Part::Placing => &PLACING,
            Part::Cap => &[Cap::KEY],
            Part::Memory => &[Target::KEY],
        }
    }
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

/// Which limits of the agent's are in force.
pub fn limits(entry: &Entry) -> impl Iterator<Item = Part> + '_ {
    Part::LIMITS.into_iter().filter(|part| entry.has(part.keys()))
}

/// What the journal has under a key; an error where that is there and cannot be read.
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

/// Undoes a part of what the journal says of a domain, and strikes it out. `Ok` also where that run of it is over.
///
/// # Errors
/// What could not be undone; it stays in the journal.
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
            // It may have ended meanwhile.
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
    // One that fails keeps no other from being given back.
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

/// Gives whatever domains have the UUID back what their operator had set, where they have one of ours. Where none has the UUID
/// just then, or one is on its way, that is remembered.
fn lift<T: Outlasting>(hypervisor: &Hypervisor, journal: &mut Journal, entry: &Entry) -> Result<(), String> {
    let vm = entry.run.vm;
    let domains = of_uuid(hypervisor, vm).map_err(|error| error.to_string())?;
    let limit = match read::<T>(entry) {
        // Nothing has it any more.
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

/// Domains of a UUID: one, or two while it is migrated to where it is.
fn of_uuid(hypervisor: &Hypervisor, vm: VmId) -> Result<Vec<Listed>, CallError> {
    let mut domains = hypervisor.domains()?;
    domains.retain(|listed| listed.vm == vm && !listed.is_dying);
    Ok(domains)
}

/// Lifts a limit from domains of a UUID. Whether that settles it: one that is being built gets its own at the end, and one that
/// is suspended may be so in order to be saved with it. `own` is the one that it was set for.
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
            // One that has ended meanwhile has none any more.
            Err(_) if matches!(hypervisor.domain(of.domid), Ok(None)) => is_settled = false,
            Err(error) => failures.push(error),
        }
    }
    match failures.is_empty() {
        true => Ok(is_settled),
        false => Err(failures.join("; ")),
    }
}

/// Remembers what limit a domain may come back with. Where that cannot be written it is forgotten: it takes no room from what is.
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

/// Settles what the journal says of a run of a domain that is over, or that another run of it has followed: limits that it left
/// are lifted or remembered, all else is forgotten.
///
/// # Errors
/// What could not be undone; it stays in the journal.
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

/// That both were done, or what failed of them.
fn all_done(done: [Result<(), String>; 2]) -> Result<(), String> {
    let failures: Vec<String> = done.into_iter().filter_map(Result::err).collect();
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

/// Undoes all that the journal says.
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
                if let Some(said) = crate::moving::recover(&hypervisor) {
                    // A guard has no other place to say it.
                    let _ = writeln!(std::io::stderr(), "{said}");
                }
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

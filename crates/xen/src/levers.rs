//! The levers: what the agent can change on a domain. Each lever's file sets it, lifts it when its lease ends, and undoes it
//! after the agent. Each change is journalled, made, and read back. A new lever needs its own file and a line in [`all`]. Levers
//! that Xen lacks are refused ([`refusal`]), and need nothing.

mod cap;
mod home;
mod memory;
mod memory_policy;
mod pages;
mod vcpus;

use homenode_host::{Act, Failure, Lever, Outcome};
use homenode_undo::journal::{Entry, Journal, Written};
use homenode_undo::levers::{HostKind, LeverState};
use homenode_units::VmId;

use crate::XenHost;
use crate::changed::{self, Home, Pins};
use crate::error::LeverError;
use crate::features::{NO_PARTS, NO_TOPOLOGY, NO_TRACKER};
use crate::hypervisor::{Hypervisor, Listed};

pub(crate) use home::set as set_home;
pub(crate) use memory::sample as balloon;
pub(crate) use memory_policy::is_possible as memory_policy_is_possible;
pub(crate) use pages::ALL_OR_NONE;
pub(crate) use vcpus::pin;

/// Marks Xen hosts, and names the types that their levers work on.
#[derive(Debug)]
pub(crate) enum Xen {}

impl HostKind for Xen {
    type Context = XenHost;
    type Vm = VmId;
    type After<'a> = After<'a>;
    type Error = LeverError;
    type UndoError = LeverError;

    fn levers<'a>(host: &'a mut XenHost, vm: &'a mut VmId) -> &'a mut Levers {
        host.levers.entry(*vm).or_insert_with(|| of_domain(None))
    }
}

/// What the agent can change on a domain and undo.
pub(crate) type Levers = homenode_undo::levers::Levers<Xen>;

/// A domain whose changes are undone, by its agent or after its agent has ended.
pub(crate) struct After<'a> {
    pub hypervisor: &'a Hypervisor,
    pub journal: &'a mut Journal,
    pub entry: &'a Entry,
    /// The domain; `None` once the journalled run has ended.
    pub domain: Option<Listed>,
}

/// Returns every lever, in the order in which they are undone.
pub(crate) fn all(entry: Option<&Entry>) -> Vec<Box<dyn LeverState<Xen>>> {
    vec![
        vcpus::state(entry),
        home::state(entry),
        cap::state(entry),
        memory::state(entry),
        pages::state(entry),
        memory_policy::state(entry),
    ]
}

/// Returns a domain's levers, restored from an earlier agent's journal entry.
pub(crate) fn of_domain(entry: Option<&Entry>) -> Levers {
    Levers::new(all(entry), true)
}

/// Keys of the levers that place a domain. While one of them has an entry, the domain's former state is known.
pub(crate) const PLACING: [&str; 2] = [Pins::KEY, Home::KEY];

/// Returns this key if the entry has it.
fn has<T: Written>(entry: Option<&Entry>) -> Vec<&'static str> {
    let has = entry.is_some_and(|entry| entry.has(&[T::KEY]));
    has.then_some(T::KEY).into_iter().collect()
}

/// Returns how Xen answers an act on a lever that it lacks. Lifting succeeds, since nothing of the agent's is in force there.
fn refusal(act: &Act) -> Result<Outcome, Failure> {
    match act {
        Act::Lift { .. } => Ok(Outcome::Done),
        Act::Watch { .. } => Err(Failure::NoTracker {
            why: NO_TRACKER.to_owned(),
        }),
        Act::PublishTopology { .. } => Err(Failure::NoTopologyDevice {
            why: NO_TOPOLOGY.to_owned(),
        }),
        Act::Limit { .. } => Err(failed(act, NO_PARTS)),
        _ => Err(failed(act, "Xen has no such lever")),
    }
}

/// Returns the error of an act that failed.
pub(crate) fn failed(act: &Act, cause: &str) -> Failure {
    let levers = all(None);
    let lever = levers.iter().find(|state| state.lever() == act.lever());
    Failure::Host {
        what: lever
            .map_or("changing something", |state| state.what(act))
            .to_owned(),
        cause: cause.to_owned(),
    }
}

/// Returns true if some of the agent's limits are in force.
pub(crate) fn has_limits(entry: &Entry) -> bool {
    let levers = all(Some(entry));
    let mut limits = levers.iter().filter(|state| state.lever().is_leased());
    limits.any(|state| !state.journalled().is_empty())
}

/// Undoes a domain's journalled changes on the chosen levers, and removes them from the journal. Also `Ok` if that run of the
/// domain has ended.
///
/// # Errors
/// Returns what could not be undone; this stays in the journal.
pub(crate) fn undo(
    hypervisor: &Hypervisor,
    journal: &mut Journal,
    vm: VmId,
    is_meant: impl Fn(Lever) -> bool,
) -> Result<(), LeverError> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let domain = changed::alive(hypervisor, &entry.run)?;
    let mut failures = Vec::new();
    for state in all(Some(&entry)) {
        let keys = state.journalled();
        if keys.is_empty() || !is_meant(state.lever()) {
            continue;
        }
        let done = state.undo(&mut After {
            hypervisor,
            journal: &mut *journal,
            entry: &entry,
            domain,
        });
        match done {
            Ok(()) => journal.clear(vm, &keys),
            // The domain may have ended meanwhile. Then only its limits remain to be undone, because they outlive it.
            Err(_)
                if !state.lever().is_leased()
                    && matches!(changed::alive(hypervisor, &entry.run), Ok(None)) =>
            {
                journal.clear(vm, &keys);
            }
            Err(error) => failures.push(error),
        }
    }
    LeverError::joined(failures)
}

impl XenHost {
    /// Carries out an act on a domain.
    pub(crate) fn pull(&mut self, mut vm: VmId, act: &Act) -> Result<Outcome, Failure> {
        let done = Levers::act(self, &mut vm, act);
        self.forget_unleased(vm);
        match done {
            None => refusal(act),
            Some(done) => done.map_err(|error| match error {
                LeverError::Refused(failure) => failure,
                error => failed(act, &error.to_string()),
            }),
        }
    }

    /// Forgets a domain's levers if none has a lease. The journal has everything else.
    pub(crate) fn forget_unleased(&mut self, vm: VmId) {
        if self
            .levers
            .get(&vm)
            .is_some_and(|levers| levers.next_lease_end().is_none())
        {
            self.levers.remove(&vm);
        }
    }

    /// Lifts all limits on a domain.
    pub(crate) fn lift_limits_of(&mut self, mut vm: VmId) -> Result<(), LeverError> {
        let levers = all(None).into_iter().map(|state| state.lever());
        for lever in levers.filter(|lever| lever.is_leased()) {
            Levers::act(self, &mut vm, &Act::Lift { lever }).transpose()?;
        }
        self.forget_unleased(vm);
        Ok(())
    }

    /// Undoes the changes to the chosen levers of a domain.
    fn undo(&mut self, vm: VmId, is_meant: impl Fn(Lever) -> bool) -> Result<(), LeverError> {
        match &mut self.journal {
            Some(journal) => undo(&self.hypervisor, journal, vm, is_meant),
            None => Ok(()),
        }
    }

    /// Journals a domain's state before the agent touches it. This is done the first time, and again whenever nothing of the
    /// agent's is in force. Otherwise takes in what other programs have set since.
    fn begin(&mut self, vm: VmId) -> Result<(), LeverError> {
        let (Some(domain), Some(journal)) = (self.domains.get(&vm), &mut self.journal) else {
            return Ok(());
        };
        if journal.entry(vm).is_some_and(|entry| entry.run != domain.run) {
            changed::settle(&self.hypervisor, journal, vm)?;
            if journal.entry(vm).is_some() {
                return Err(LeverError::BeingBuilt);
            }
        }
        if journal.entry(vm).is_some_and(|entry| entry.has(&PLACING)) {
            self.look_at_pins(vm)?;
            return self.take_in_others(vm);
        }
        let (run, before) = (domain.run.clone(), self.before(domain)?);
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        if journal.entry(vm).is_some_and(|entry| entry.before == before) {
            return Ok(());
        }
        Ok(journal.begin(run, before)?)
    }

    fn domid(&self, vm: VmId) -> u32 {
        // No domain has this number, so a call on it fails.
        self.domains
            .get(&vm)
            .map_or(u32::MAX, |domain| domain.run.runtime_id)
    }

    /// Reads where the domain's vCPUs may run, just before a change: the agent may have pinned them since the last reading.
    fn look_at_pins(&mut self, vm: VmId) -> Result<(), LeverError> {
        let Some(domain) = self.domains.get_mut(&vm) else {
            return Ok(());
        };
        for (index, vcpu) in &mut domain.vcpus {
            vcpu.affinity = self.hypervisor.affinity(domain.run.runtime_id, *index)?;
        }
        Ok(())
    }

    /// Reads a journal entry of this run of a domain.
    fn written<T: Written>(&self, vm: VmId) -> Result<Option<T>, LeverError> {
        let run = self.domains.get(&vm).map(|domain| &domain.run);
        let entry = run.and_then(|run| self.entry_of(run));
        entry.map_or(Ok(None), changed::read)
    }

    fn write<T: Written>(&mut self, vm: VmId, entry: &T) -> Result<(), LeverError> {
        match &mut self.journal {
            Some(journal) => Ok(journal.set(vm, entry)?),
            None => Ok(()),
        }
    }
}

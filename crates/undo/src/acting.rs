//! Takes the right to act on a host, ends leases while the agent waits, and says which VMs the agent must not touch.

use std::path::Path;
use std::time::Duration;

use homenode_host::{Act, Management, VmSample, WakeSignal};
use homenode_kernel::now;
use homenode_units::{Ns, VmId};

use crate::heartbeat::Heartbeat;
use crate::holder::JournalWas;
use crate::journal::{self, Journal, JournalError};
use crate::lock::{ActingLock, Lock, Waits};
use crate::state_dir::StateError;

/// How long a limit left by an earlier agent may stay unless this agent renews it.
pub const CARRIED_LEASE: Ns = Ns::from_secs(10);
/// How long to wait before retrying a limit that could not be lifted.
pub const RETRY: Ns = Ns::from_secs(1);
/// Reason reported for every action that a dry run does not carry out.
pub const DRY_RUN: &str = "this agent runs with --dry-run and touches nothing";
/// Longest wait without a heartbeat: the guard assumes that a silent agent hangs.
const BEAT_AT_LEAST: Ns = Ns::from_secs(5);
/// How long a new agent waits for a guard that is undoing.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Why an agent cannot take the right to act.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeOverError {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Another agent holds the right to act, or the state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
}

/// The right to act on a host and to write its journal, for as long as this lives.
#[derive(Debug)]
pub struct Locks {
    lock: Lock,
    acting: ActingLock,
    /// Why the journal is incomplete, if it does not list everything that an earlier agent changed.
    lost: Option<String>,
}

impl Locks {
    /// Whether both lock files are still where another agent would look for them. If the state directory was removed or moved,
    /// they are not: another agent may then act without finding this agent's journal.
    pub fn are_there(&self) -> bool {
        self.lock.is_there() && self.acting.is_there()
    }

    /// Records whether this process has a guard.
    pub fn set_guarded(&mut self, is_guarded: bool) {
        self.lock.set_guarded(is_guarded);
    }

    /// Records that everything in the journal is undone: the next agent does not need the journal.
    pub fn set_undone(&mut self) {
        self.set_journal(JournalWas::Over);
    }

    /// Why the journal is incomplete, if it does not list everything that an earlier agent changed.
    pub fn lost_journal(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    fn set_journal(&mut self, journal: JournalWas) {
        self.lock.set_journal(journal);
        self.acting.set_journal(self.lock.process(), journal);
    }
}

/// Takes the right to act on this host, and opens the journal in this state directory. Kills the stopped or hung guard of a dead
/// agent. The journal's warnings tell the operator what happened.
///
/// # Errors
/// When another agent has the right to act, or the directory cannot be used.
pub fn take_over(root: &Path, state_dir: &Path) -> Result<(Journal, Locks), TakeOverError> {
    take_over_within(root, state_dir, LOCK_PATIENCE.into())
}

/// As [`take_over`], with other waiting times.
///
/// # Errors
/// When another agent has the right to act, or the directory cannot be used.
pub fn take_over_within(
    root: &Path,
    state_dir: &Path,
    waits: Waits,
) -> Result<(Journal, Locks), TakeOverError> {
    // The state directory's lock is taken first: a dead agent's guard releases the host once it sees a successor.
    let mut lock = Lock::take(state_dir, waits)?;
    let mut acting = ActingLock::take(root, state_dir, waits)?;
    let mut journal = Journal::open(state_dir)?;
    let former = [lock.former_journal(), acting.former_journal()];
    let was_lost = former.contains(&JournalWas::Lost);
    let is_missing = !journal.was_there() && former.contains(&JournalWas::Kept);
    let lost = (was_lost || is_missing).then(|| journal::lost_at(state_dir));
    let ended = lock.take_ended().into_iter().chain(acting.take_ended());
    journal.warnings.extend(ended.chain(lost.clone()));
    // The loss is reported again until everything was undone once: this process may end before the operator reads the warning.
    let now = match lost {
        Some(_) => JournalWas::Lost,
        None => JournalWas::Kept,
    };
    let mut locks = Locks { lock, acting, lost };
    locks.set_journal(now);
    Ok((journal, locks))
}

/// Result of undoing everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undone {
    /// VMs that are restored.
    pub vms: Vec<VmId>,
    /// Why the other VMs are not restored, or why their state is unknown.
    pub failures: Vec<String>,
}

/// An agent's right to act on its host: its locks, and whether its guard would undo its changes.
#[derive(Debug)]
pub struct RightToAct {
    /// Absent in a dry run.
    locks: Option<Locks>,
    is_guarded: bool,
}

impl RightToAct {
    /// Creates the right of an agent that holds these locks; a dry run has none. The agent counts as guarded until
    /// [`RightToAct::set_guarded`] says otherwise, because the conformance suite acts without a guard.
    pub fn new(locks: Option<Locks>) -> RightToAct {
        RightToAct {
            locks,
            is_guarded: true,
        }
    }

    /// Records whether a guard would undo the changes if this process ended. An agent without a guard may only restore.
    pub fn set_guarded(&mut self, is_guarded: bool) {
        if let Some(locks) = &mut self.locks {
            locks.set_guarded(is_guarded);
            self.is_guarded = is_guarded;
        }
    }

    /// Whether the lock files are still where another agent would look for them. If the state directory was removed or moved,
    /// they are not: another agent may then act without finding this agent's journal.
    pub fn owns_its_state(&self) -> bool {
        self.locks.as_ref().is_none_or(Locks::are_there)
    }

    /// Why the journal is incomplete, if it does not list everything that an earlier agent changed.
    pub fn lost_journal(&self) -> Option<&str> {
        self.locks.as_ref()?.lost_journal()
    }

    /// Records the result of undoing everything. If nothing is left, the next agent does not need the journal.
    pub fn note_undone(&mut self, undone: &Undone) {
        if let Some(locks) = self.locks.as_mut().filter(|_| undone.failures.is_empty()) {
            locks.set_undone();
        }
    }

    /// Why the agent must not carry out this act on a VM, if it must not.
    pub fn kept_from(&self, vm: Option<&VmSample>, act: &Act) -> Option<&'static str> {
        let is_ignored = vm.is_some_and(|vm| vm.settings.management == Management::Ignored);
        if is_ignored {
            return Some("its operator opted it out; the agent only watches it");
        }
        // The host checks whether a setting is still the agent's when it reads the VM.
        if vm.is_some_and(|vm| vm.is_unread) {
            return Some("it could not be read for the last sample");
        }
        let is_lifting = matches!(act, Act::Lift { .. });
        (!self.is_guarded && !is_lifting).then_some("there is no guard process to undo it if the agent dies")
    }
}

/// A host whose limits have leases.
pub trait Leases {
    /// When the next lease expires; `None` if no lease is running.
    fn next_lease_end(&self) -> Option<Ns>;
    /// Lifts the limits whose leases have expired.
    fn end_leases(&mut self);
}

/// Waits for a period or until the wake signal is set. Meanwhile ends expired leases and sends heartbeats. Returns the time
/// waited.
pub fn wait(host: &mut impl Leases, (wake_signal, heartbeat): (&WakeSignal, &Heartbeat), period: Ns) -> Ns {
    let begun = now();
    let end = Ns(begun.0.saturating_add(period.0));
    let mut at = begun;
    while at < end && !wake_signal.is_stopping() {
        let lease = host.next_lease_end();
        heartbeat.beat();
        let until = lease.map_or(end, |lease| lease.min(end)).min(at + BEAT_AT_LEAST);
        let was_woken = homenode_kernel::wait(wake_signal, Duration::from_nanos(until.saturating_sub(at).0));
        host.end_leases();
        at = now();
        if was_woken {
            break;
        }
    }
    at - begun
}

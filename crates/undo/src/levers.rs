//! A *lever* is one kind of setting that the agent changes on a VM and can undo, such as the CPUs that the VM may use. This
//! module holds what the levers of every host have in common: leases, the backoff after refusals, and the order in which they are
//! called.
//!
//! ```text
//!               journal, set            lease over, or Lift
//!   operator's ────────────▶ ours … ────────────────────────▶ operator's
//!                              │ another program changed it
//!                              └────────────────────────────▶ theirs, not touched
//! ```
//!
//! A lever of one VM is a [`LeverState`], defined in the host's crate. Its state is read from the journal, both by the agent that
//! first sees the VM and by the guard that undoes: what an agent has in force is exactly what must be undone after it.

use homenode_host::{Act, Lever, Limit, Outcome, VmSample};
use homenode_kernel::now;
use homenode_units::Ns;

use crate::acting::{CARRIED_LEASE, RETRY};

/// A kind of host, defined by the types that its levers work on.
pub trait HostKind: Sized + 'static {
    /// What a lever needs from its host.
    type Context;
    /// A VM.
    type Vm;
    /// A VM whose agent has ended, for undoing.
    type After<'a>;
    /// Why a lever could not be set or lifted.
    type Error: Clone;
    /// Why a lever could not be undone after the agent's end.
    type UndoError;

    /// Returns the levers of a VM.
    fn levers<'a>(context: &'a mut Self::Context, vm: &'a mut Self::Vm) -> &'a mut Levers<Self>;
}

/// One lever of one VM, and the agent's setting in force on it.
pub trait LeverState<K: HostKind> {
    /// Returns which lever this is.
    fn lever(&self) -> Lever;

    /// Returns the name of this act in errors.
    fn what(&self, act: &Act) -> &'static str;

    /// Whether the act is in force already, so that only its lease must be renewed.
    ///
    /// # Errors
    /// If what is in force cannot be read.
    fn holds(&self, _context: &K::Context, _vm: &K::Vm, _act: &Act) -> Result<bool, K::Error> {
        Ok(false)
    }

    /// Journals the act, carries it out, and reads the result back.
    ///
    /// # Errors
    /// Why the act is not in force.
    fn set(&mut self, context: &mut K::Context, vm: &mut K::Vm, act: &Act) -> Result<Outcome, K::Error>;

    /// Restores the operator's setting if the agent's is in force.
    ///
    /// # Errors
    /// Why it is not restored; the entry stays in the journal.
    fn lift(&mut self, _context: &mut K::Context, _vm: &mut K::Vm) -> Result<(), K::Error> {
        Ok(())
    }

    /// Ends settings that have no lease but must not outlast the agent.
    ///
    /// # Errors
    /// Why a setting does not end; its entry stays in the journal.
    fn leave(&mut self, _context: &mut K::Context, _vm: &mut K::Vm) -> Result<(), K::Error> {
        Ok(())
    }

    /// Whether the kernel may refuse the same act every time, such as a pin outside a cpuset. Such an act is retried with
    /// backoff.
    fn may_be_refused_for_good(&self) -> bool {
        false
    }

    /// Updates the state to what other programs changed since the last reading.
    fn reconcile(&mut self, _context: &mut K::Context, _vm: &mut K::Vm, _is_first: bool) {}

    /// Adds what is in force to a sample.
    fn tell(&mut self, _context: &mut K::Context, _vm: &mut K::Vm, _sample: &mut VmSample) {}

    /// The limit that is in force.
    fn limit(&self) -> Option<Limit> {
        None
    }

    /// Journal keys that have something to undo.
    fn journalled(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Undoes what a dead agent journalled. Also `Ok` if that run of the VM has ended.
    ///
    /// # Errors
    /// What could not be undone; its entry stays in the journal.
    fn undo(&self, _after: &mut K::After<'_>) -> Result<(), K::UndoError> {
        Ok(())
    }
}

/// A lever of a VM, and when its lease expires.
struct Leased<K: HostKind> {
    state: Box<dyn LeverState<K>>,
    until: Option<Ns>,
    refused: Option<Refused<K::Error>>,
}

/// Consecutive failures of the same act.
struct Refused<E> {
    act: Act,
    error: E,
    count: u32,
    /// When the act may be tried again.
    until: Ns,
}

/// How many times the same act may fail on a VM before it is retried less often.
const TRIES: u32 = 3;
/// Shortest and longest pause before a failed act is tried again.
const PAUSES: (Ns, Ns) = (Ns::from_secs(10), Ns::from_secs(600));

impl<E> Refused<E> {
    /// Counts one more failure of the same act, or the first failure of another.
    fn again(before: Option<Refused<E>>, act: &Act, error: E, at: Ns) -> Refused<E> {
        let before = before.filter(|refused| refused.act == *act);
        let count = before.map_or(0, |refused| refused.count) + 1;
        let pause = match count.checked_sub(TRIES) {
            Some(more) => Ns(PAUSES.0.0.saturating_mul(1 << more.min(16))).min(PAUSES.1),
            None => Ns::ZERO,
        };
        Refused {
            act: act.clone(),
            error,
            count,
            until: at + pause,
        }
    }
}

impl<K: HostKind> Leased<K> {
    fn act(&mut self, context: &mut K::Context, vm: &mut K::Vm, act: &Act) -> Result<Outcome, K::Error> {
        if let Act::Lift { .. } = act {
            return self.lift(context, vm).map(|()| Outcome::Done);
        }
        let Some(lease) = act.lease() else {
            return self.set(context, vm, act);
        };
        let until = Some(Ns(now().0.saturating_add(lease.0)));
        if self.state.holds(context, vm, act)? {
            self.until = until;
            return Ok(Outcome::Renewed);
        }
        let done = self.state.set(context, vm, act);
        self.until = until;
        if done.is_err() {
            // Whatever failed: either lifting restores the VM now, or it is tried again when the lease expires.
            let _ = self.lift(context, vm);
        }
        done
    }

    /// Sets what has no lease. A pin or a home that the host refused several times is retried with backoff.
    fn set(&mut self, context: &mut K::Context, vm: &mut K::Vm, act: &Act) -> Result<Outcome, K::Error> {
        let waits = |refused: &&Refused<K::Error>| refused.act == *act && now() < refused.until;
        if let Some(refused) = self.refused.as_ref().filter(waits) {
            return Err(refused.error.clone());
        }
        let done = self.state.set(context, vm, act);
        let before = self.refused.take();
        self.refused = match &done {
            Err(error) if self.state.may_be_refused_for_good() => {
                Some(Refused::again(before, act, error.clone(), now()))
            }
            _ => None,
        };
        done
    }

    fn lift(&mut self, context: &mut K::Context, vm: &mut K::Vm) -> Result<(), K::Error> {
        self.state.lift(context, vm)?;
        self.until = None;
        Ok(())
    }
}

/// The levers of a VM, in the order in which they are undone.
pub struct Levers<K: HostKind> {
    /// A lever is taken out while it is in use.
    all: Vec<Option<Leased<K>>>,
}

impl<K: HostKind> std::fmt::Debug for Levers<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let leases = self.in_place().map(|leased| (leased.state.lever(), leased.until));
        f.debug_map().entries(leases).finish()
    }
}

impl<K: HostKind> Levers<K> {
    /// Creates the levers of a VM. What an earlier agent left on them gets a lease, except in a dry run (`acts` is false).
    pub fn new(states: Vec<Box<dyn LeverState<K>>>, acts: bool) -> Levers<K> {
        let carried = acts.then(|| now() + CARRIED_LEASE);
        let leased = |state: Box<dyn LeverState<K>>| {
            let is_carried = state.lever().is_leased() && !state.journalled().is_empty();
            Some(Leased {
                until: carried.filter(|_| is_carried),
                state,
                refused: None,
            })
        };
        Levers {
            all: states.into_iter().map(leased).collect(),
        }
    }

    fn in_place(&self) -> impl Iterator<Item = &Leased<K>> {
        self.all.iter().flatten()
    }

    /// Returns the name of this act in errors; `None` if the host has no such lever.
    pub fn what(&self, act: &Act) -> Option<&'static str> {
        let lever = self.in_place().find(|leased| leased.state.lever() == act.lever());
        lever.map(|leased| leased.state.what(act))
    }

    /// Limits that are in force.
    pub fn limits(&self) -> impl Iterator<Item = Limit> {
        self.in_place().filter_map(|leased| leased.state.limit())
    }

    /// When the next lease expires.
    pub fn next_lease_end(&self) -> Option<Ns> {
        self.in_place().filter_map(|leased| leased.until).min()
    }

    /// Runs a closure on each lever of a VM; each is taken out while the closure runs.
    fn for_each(
        context: &mut K::Context,
        vm: &mut K::Vm,
        mut with: impl FnMut(&mut Leased<K>, &mut K::Context, &mut K::Vm),
    ) {
        for at in 0..K::levers(context, vm).all.len() {
            Self::with_one(context, vm, at, &mut with);
        }
    }

    fn with_one<T>(
        context: &mut K::Context,
        vm: &mut K::Vm,
        at: usize,
        with: impl FnOnce(&mut Leased<K>, &mut K::Context, &mut K::Vm) -> T,
    ) -> Option<T> {
        let mut leased = K::levers(context, vm).all.get_mut(at)?.take()?;
        let done = with(&mut leased, context, vm);
        if let Some(place) = K::levers(context, vm).all.get_mut(at) {
            *place = Some(leased);
        }
        Some(done)
    }

    /// Carries out an act on the VM; `None` if the host has no lever for it.
    pub fn act(context: &mut K::Context, vm: &mut K::Vm, act: &Act) -> Option<Result<Outcome, K::Error>> {
        let is_it = |leased: &Leased<K>| leased.state.lever() == act.lever();
        let mut all = K::levers(context, vm).all.iter();
        let at = all.position(|leased| leased.as_ref().is_some_and(is_it))?;
        Self::with_one(context, vm, at, |leased, context, vm| {
            leased.act(context, vm, act)
        })
    }

    /// Updates each lever to what other programs changed since the last reading.
    pub fn reconcile(context: &mut K::Context, vm: &mut K::Vm, is_first: bool) {
        Self::for_each(context, vm, |leased, context, vm| {
            leased.state.reconcile(context, vm, is_first);
        });
    }

    /// Adds what is in force to a sample.
    pub fn tell(context: &mut K::Context, vm: &mut K::Vm, sample: &mut VmSample) {
        Self::for_each(context, vm, |leased, context, vm| {
            leased.state.tell(context, vm, sample);
        });
    }

    /// Ends what must not outlast the agent. Returns what could not be ended, which stays in the journal.
    pub fn lift_limits(context: &mut K::Context, vm: &mut K::Vm) -> Vec<K::Error> {
        Self::lift_some(context, vm, |leased| leased.until.is_some())
    }

    /// Restores everything that is in force. Returns what could not be restored, which stays in the journal.
    pub fn restore(context: &mut K::Context, vm: &mut K::Vm) -> Vec<K::Error> {
        Self::lift_some(context, vm, |_| true)
    }

    fn lift_some(
        context: &mut K::Context,
        vm: &mut K::Vm,
        is_meant: impl Fn(&Leased<K>) -> bool,
    ) -> Vec<K::Error> {
        let mut failures = Vec::new();
        Self::for_each(context, vm, |leased, context, vm| {
            if is_meant(leased) {
                failures.extend(leased.lift(context, vm).err());
            }
            failures.extend(leased.state.leave(context, vm).err());
        });
        failures
    }

    /// Lifts the settings whose leases have expired at `at`. Returns what could not be lifted, which will be tried again.
    pub fn end_leases(context: &mut K::Context, vm: &mut K::Vm, at: Ns) -> Vec<K::Error> {
        let mut failures = Vec::new();
        Self::for_each(context, vm, |leased, context, vm| {
            if leased.until.is_some_and(|until| until <= at)
                && let Err(error) = leased.lift(context, vm)
            {
                failures.push(error);
                leased.until = Some(at + RETRY);
            }
        });
        failures
    }
}

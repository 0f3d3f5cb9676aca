//! A lever of one VM, and what all levers have in common: leases, the journal, taking over.

use std::path::Path;

use homenode_host::{Act, ActionError, HandsOff, Lever, Limit, Outcome, VmSample};
use homenode_kernel::{now, task};
use homenode_undo::acting::{CARRIED_LEASE, RETRY};
use homenode_undo::journal::{Before, Entry, JournalError, Run};
use homenode_units::{Ns, VmId};

use super::{Vm, failed};
use crate::context::HostContext;
use crate::manager::Manager;
use crate::reach::Reach;

/// One lever of one VM, and the agent's setting in force on it.
pub(crate) trait LeverState {
    /// Which lever it is.
    fn lever(&self) -> Lever;

    /// The name of this act in errors.
    fn what(&self, act: &Act) -> &'static str;

    /// Whether that is in force already, so that only its lease must be renewed.
    fn holds(&self, _context: &HostContext, _vm: &Vm, _act: &Act) -> Result<bool, ActionError> {
        Ok(false)
    }

    /// Journals it, does it, and reads it back.
    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError>;

    /// Restores the operator's setting, if something of the agent's is in force.
    fn lift(&mut self, _context: &mut HostContext, _vm: &mut Vm) -> Result<(), ActionError> {
        Ok(())
    }

    /// Ends what must not outlast the agent and has no lease.
    fn leave(&mut self, _context: &mut HostContext, _vm: &mut Vm) -> Result<(), ActionError> {
        Ok(())
    }

    /// Whether the kernel may refuse the same act each time, such as a pin outside a cpuset: it is then retried with
    /// backoff.
    fn may_be_refused_for_good(&self) -> bool {
        false
    }

    /// Takes account of what others did since the last look.
    fn reconcile(&mut self, _context: &mut HostContext, _vm: &mut Vm, _is_first: bool) {}

    /// Adds what is in force to a sample.
    fn tell(&mut self, _context: &mut HostContext, _vm: &mut Vm, _sample: &mut VmSample) {}

    /// The limit that is in force.
    fn limit(&self) -> Option<Limit> {
        None
    }

    /// Journal keys with something to undo; empty if there is nothing.
    fn journalled(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Undoes what a dead agent journalled. Also `Ok` if that run of the VM has ended.
    fn undo(&self, _after: &mut After<'_>) -> Result<(), String> {
        Ok(())
    }
}

/// A lever of a VM, and until when its lease lasts.
struct Leased {
    state: Box<dyn LeverState>,
    until: Option<Ns>,
    refused: Option<Refused>,
}

/// Recent failures in a row of the same act.
struct Refused {
    act: Act,
    error: ActionError,
    count: u32,
    /// Until when it is not retried.
    until: Ns,
}

/// How often the same act may fail on a VM before it is retried less often.
const TRIES: u32 = 3;
/// Shortest and longest pause of that backoff.
const PAUSES: (Ns, Ns) = (Ns::from_secs(10), Ns::from_secs(600));

impl Refused {
    /// Counts one more failure of the same act, or the first of another.
    fn again(before: Option<Refused>, act: &Act, error: ActionError, at: Ns) -> Refused {
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

impl Leased {
    fn act(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
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
            // On any failure: either the VM is restored now, or the lease's end tries again.
            let _ = self.lift(context, vm);
        }
        done
    }

    /// Sets what has no lease. A pin or a home that the host refused several times is retried with backoff.
    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let waits = |refused: &&Refused| refused.act == *act && now() < refused.until;
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

    fn lift(&mut self, context: &mut HostContext, vm: &mut Vm) -> Result<(), ActionError> {
        self.state.lift(context, vm)?;
        self.until = None;
        Ok(())
    }
}

/// The levers of a VM.
#[derive(Default)]
pub(crate) struct Levers {
    all: Vec<Leased>,
    /// Journal keys of the levers that place a VM: while one has an entry, the VM's former state is known.
    placing: &'static [&'static str],
}

impl Levers {
    /// These levers; those with the keys `placing` place a VM. What an earlier agent left on them ends with a lease, except
    /// in a dry run.
    pub fn new(grips: Vec<Box<dyn LeverState>>, placing: &'static [&'static str], acts: bool) -> Levers {
        let carried = acts.then(|| now() + CARRIED_LEASE);
        let leased = |state: Box<dyn LeverState>| Leased {
            until: carried.filter(|_| state.lever().is_leased() && !state.journalled().is_empty()),
            state,
            refused: None,
        };
        Levers {
            all: grips.into_iter().map(leased).collect(),
            placing,
        }
    }
}

impl Vm {
    /// Runs a closure on the VM and each of its levers, which are taken out meanwhile.
    fn with_levers<T>(&mut self, with: impl FnOnce(&mut Vm, &mut [Leased]) -> T) -> T {
        let mut levers = std::mem::take(&mut self.levers.all);
        let done = with(self, &mut levers);
        self.levers.all = levers;
        done
    }

    /// Journals the VM's state before it is touched: for the first time, or again if nothing of the agent's is in force and
    /// another program changed it since.
    pub fn begin(&self, context: &mut HostContext) -> Result<(), JournalError> {
        let Some(journal) = &mut context.journal else {
            return Ok(());
        };
        let threads = context.manager.told_vcpus(self.run.vm);
        let entry = journal.entry(self.run.vm).filter(|entry| entry.run == self.run);
        let before = match entry.filter(|entry| entry.has(self.levers.placing)) {
            // A vCPU may have been added since, and its thread must be known too.
            Some(placed) => Before {
                threads: placed.before.threads.clone().into_iter().chain(threads).collect(),
                ..placed.before.clone()
            },
            None => Before {
                threads,
                ..self.before()
            },
        };
        if entry.is_some_and(|entry| entry.before == before) {
            return Ok(());
        }
        journal.begin(self.run.clone(), before)
    }

    /// Carries out an act on the VM.
    pub fn act(&mut self, context: &mut HostContext, act: &Act) -> Result<Outcome, ActionError> {
        let begun = self.begin(context);
        self.with_levers(|vm, levers| {
            let lever = levers
                .iter_mut()
                .find(|leased| leased.state.lever() == act.lever());
            let Some(lever) = lever else {
                return Err(failed(vm, "pulling a lever", "this host has none of this kind"));
            };
            if vm.is_migrating() {
                return Err(failed(
                    vm,
                    lever.state.what(act),
                    &HandsOff::Migrating.to_string(),
                ));
            }
            begun.map_err(|e| failed(vm, lever.state.what(act), &e.to_string()))?;
            lever.act(context, vm, act)
        })
    }

    /// The name of this act in errors.
    pub fn what(&self, act: &Act) -> &'static str {
        let mut of = self
            .levers
            .all
            .iter()
            .filter(|leased| leased.state.lever() == act.lever());
        of.next()
            .map_or("changing something", |leased| leased.state.what(act))
    }

    /// Takes account of what others did since the last look.
    pub fn reconcile(&mut self, context: &mut HostContext, is_first: bool) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                leased.state.reconcile(context, vm, is_first);
            }
        });
    }

    /// Adds what is in force to a sample.
    pub fn tell(&mut self, context: &mut HostContext, sample: &mut VmSample) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                leased.state.tell(context, vm, sample);
            }
        });
    }

    /// Limits that are in force.
    pub fn limits(&self) -> impl Iterator<Item = Limit> + '_ {
        self.levers.all.iter().filter_map(|leased| leased.state.limit())
    }

    /// Ends what must not outlast the agent. Returns what could not be ended; that stays journalled.
    pub fn lift_limits(&mut self, context: &mut HostContext) -> Vec<ActionError> {
        self.with_levers(|vm, levers| {
            let mut failures = Vec::new();
            for leased in levers {
                if leased.until.is_some() {
                    failures.extend(leased.lift(context, vm).err());
                }
                failures.extend(leased.state.leave(context, vm).err());
            }
            failures
        })
    }

    /// Restores everything that is in force. Returns what could not be restored; that stays journalled.
    pub fn give_back(&mut self, context: &mut HostContext) -> Vec<ActionError> {
        if !context.entry(self).is_some_and(Entry::is_in_force) {
            return Vec::new();
        }
        self.look_soon();
        self.with_levers(|vm, levers| {
            let mut failures = Vec::new();
            for leased in levers {
                failures.extend(leased.lift(context, vm).err());
                failures.extend(leased.state.leave(context, vm).err());
            }
            failures
        })
    }

    /// When the next lease that can be ended expires.
    pub fn next_lease_end(&self) -> Option<Ns> {
        if self.is_migrating() {
            return None;
        }
        self.levers.all.iter().filter_map(|leased| leased.until).min()
    }

    /// Whether a lease has expired.
    pub fn has_leases_over(&self, at: Ns) -> bool {
        self.next_lease_end().is_some_and(|until| until <= at)
    }

    /// Lifts what is held by expired leases.
    pub fn end_leases(&mut self, context: &mut HostContext, at: Ns) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                if leased.until.is_some_and(|until| until <= at)
                    && let Err(error) = leased.lift(context, vm)
                {
                    context.notice(format!("{error}; tried again"));
                    leased.until = Some(at + RETRY);
                }
            }
        });
    }
}

/// A VM whose agent has ended, for the guard or the next agent to undo what is left.
pub(crate) struct After<'a> {
    pub manager: &'a mut dyn Manager,
    pub root: &'a Path,
    pub run: &'a Run,
    /// How it was before the agent touched it.
    pub before: &'a Before,
    is_found: bool,
}

impl<'a> After<'a> {
    /// What is left to undo on this run.
    pub fn new(manager: &'a mut dyn Manager, root: &'a Path, run: &'a Run, before: &'a Before) -> After<'a> {
        After {
            manager,
            root,
            run,
            before,
            is_found: false,
        }
    }

    /// Whether that run of the VM has ended.
    pub fn is_over(&self) -> bool {
        !task::is_alive(self.root, self.run.process())
    }

    /// What its cgroups leave the VM now.
    pub fn reach(&self) -> Reach {
        Reach::of_process(self.root, self.run.pid)
    }

    /// The VM; `None` once that run of it has ended.
    pub fn vm(&mut self) -> Result<Option<VmId>, String> {
        if self.is_over() {
            return Ok(None);
        }
        if !self.is_found {
            let known = self.manager.knows(self.run);
            self.is_found = known.map_err(|e| e.cause().to_owned())?;
            if self.is_found {
                self.manager.recall_vcpus(self.run, &self.before.threads);
            }
        }
        match self.is_found {
            true => Ok(Some(self.run.vm)),
            false if self.is_over() => Ok(None),
            false => Err("its QEMU runs and is not listed where VMs are asked for".into()),
        }
    }
}

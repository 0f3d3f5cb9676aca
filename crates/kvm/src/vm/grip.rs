//! A lever of one VM, whatever it changes, and what all levers have in common: leases, the journal, taking over.

use std::path::Path;

use homenode_host::{Act, ActionError, HandsOff, Lever, Limit, Outcome, VmSample};
use homenode_kernel::{now, task};
use homenode_undo::acting::{CARRIED_LEASE, RETRY};
use homenode_undo::journal::{Before, Entry, JournalError, Run};
use homenode_units::{Ns, VmId};

use super::{Vm, failed};
use crate::hands::Hands;
use crate::manager::Manager;
use crate::reach::Reach;

/// One lever of one VM, and what of the agent's is in force on it.
pub(crate) trait Grip {
    /// Which.
    fn lever(&self) -> Lever;

    /// What doing this is called in errors.
    fn what(&self, act: &Act) -> &'static str;

    /// Whether that is in force already, so that only its lease is to be renewed.
    fn holds(&self, _hands: &Hands, _vm: &Vm, _act: &Act) -> Result<bool, ActionError> {
        Ok(false)
    }

    /// Writes it down, does it, and reads it back.
    fn set(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError>;

    /// Gives the VM back what its operator had set, if something of the agent's is in force.
    fn lift(&mut self, _hands: &mut Hands, _vm: &mut Vm) -> Result<(), ActionError> {
        Ok(())
    }

    /// Ends what must not outlast the agent and has no lease.
    fn leave(&mut self, _hands: &mut Hands, _vm: &mut Vm) -> Result<(), ActionError> {
        Ok(())
    }

    /// Whether the kernel may refuse the same act each time, as a pin outside a cpuset: it is then tried less and less often.
    fn may_be_refused_for_good(&self) -> bool {
        false
    }

    /// Takes in what others did since the last look.
    fn reconcile(&mut self, _hands: &mut Hands, _vm: &mut Vm, _is_first: bool) {}

    /// Tells a sample what is in force.
    fn tell(&mut self, _hands: &mut Hands, _vm: &mut Vm, _sample: &mut VmSample) {}

    /// The limit that is in force.
    fn limit(&self) -> Option<Limit> {
        None
    }

    /// Keys in the journal under which something is to be undone; none where nothing is.
    fn journalled(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Undoes what was journalled of an agent that is no more. `Ok` also where that run of the VM is over.
    fn undo(&self, _after: &mut After<'_>) -> Result<(), String> {
        Ok(())
    }
}

/// A lever of a VM, and until when it is held.
struct Leased {
    grip: Box<dyn Grip>,
    until: Option<Ns>,
    refused: Option<Refused>,
}

/// What failed the last times that it was tried, one after the other.
struct Refused {
    act: Act,
    error: ActionError,
    count: u32,
    /// Until when it is not tried again.
    until: Ns,
}

/// How often the same act may fail on a VM before it is tried less often.
const TRIES: u32 = 3;
/// How long it is not tried then: at first, and at most.
const PAUSES: (Ns, Ns) = (Ns::from_secs(10), Ns::from_secs(600));

impl Refused {
    /// The same act failed once more, or another one did.
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
    fn act(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        if let Act::Lift { .. } = act {
            return self.lift(hands, vm).map(|()| Outcome::Done);
        }
        let Some(lease) = act.lease() else {
            return self.set(hands, vm, act);
        };
        let until = Some(Ns(now().0.saturating_add(lease.0)));
        if self.grip.holds(hands, vm, act)? {
            self.until = until;
            return Ok(Outcome::Renewed);
        }
        let done = self.grip.set(hands, vm, act);
        self.until = until;
        if done.is_err() {
            // Whatever came of it: the VM is as it was, or the lease's end tries again.
            let _ = self.lift(hands, vm);
        }
        done
    }

    /// Sets what has no lease. A pin or a home that the host refused again and again is tried less and less often.
    fn set(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let waits = |refused: &&Refused| refused.act == *act && now() < refused.until;
        if let Some(refused) = self.refused.as_ref().filter(waits) {
            return Err(refused.error.clone());
        }
        let done = self.grip.set(hands, vm, act);
        let before = self.refused.take();
        self.refused = match &done {
            Err(error) if self.grip.may_be_refused_for_good() => {
                Some(Refused::again(before, act, error.clone(), now()))
            }
            _ => None,
        };
        done
    }

    fn lift(&mut self, hands: &mut Hands, vm: &mut Vm) -> Result<(), ActionError> {
        self.grip.lift(hands, vm)?;
        self.until = None;
        Ok(())
    }
}

/// The levers of a VM.
#[derive(Default)]
pub(crate) struct Levers {
    all: Vec<Leased>,
    /// Keys in the journal of those that place a VM: while one is there, how the VM was before is known.
    placing: &'static [&'static str],
}

impl Levers {
    /// These levers, of which those with these keys place a VM. What an earlier agent left on them ends with a lease, unless this
    /// one only watches.
    pub fn new(grips: Vec<Box<dyn Grip>>, placing: &'static [&'static str], acts: bool) -> Levers {
        let carried = acts.then(|| now() + CARRIED_LEASE);
        let leased = |grip: Box<dyn Grip>| Leased {
            until: carried.filter(|_| grip.lever().is_leased() && !grip.journalled().is_empty()),
            grip,
            refused: None,
        };
        Levers {
            all: grips.into_iter().map(leased).collect(),
            placing,
        }
    }
}

impl Vm {
    /// Does something with the VM and each of its levers, which are taken out meanwhile.
    fn with_levers<T>(&mut self, with: impl FnOnce(&mut Vm, &mut [Leased]) -> T) -> T {
        let mut levers = std::mem::take(&mut self.levers.all);
        let done = with(self, &mut levers);
        self.levers.all = levers;
        done
    }

    /// Writes down how it is before it is touched: for the first time, or again where nothing of the agent's is in force and
    /// another program changed it since.
    pub fn begin(&self, hands: &mut Hands) -> Result<(), JournalError> {
        let Some(journal) = &mut hands.journal else {
            return Ok(());
        };
        let threads = hands.manager.told_vcpus(self.run.vm);
        let entry = journal.entry(self.run.vm).filter(|entry| entry.run == self.run);
        let before = match entry.filter(|entry| entry.has(self.levers.placing)) {
            // A vCPU may have come since, which has to be found again, too.
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

    /// Carries out what is asked of the VM.
    pub fn act(&mut self, hands: &mut Hands, act: &Act) -> Result<Outcome, ActionError> {
        let begun = self.begin(hands);
        self.with_levers(|vm, levers| {
            let lever = levers
                .iter_mut()
                .find(|leased| leased.grip.lever() == act.lever());
            let Some(lever) = lever else {
                return Err(failed(vm, "pulling a lever", "this host has none of this kind"));
            };
            if vm.is_migrating() {
                return Err(failed(vm, lever.grip.what(act), &HandsOff::Migrating.to_string()));
            }
            begun.map_err(|e| failed(vm, lever.grip.what(act), &e.to_string()))?;
            lever.act(hands, vm, act)
        })
    }

    /// What doing this to the VM is called in errors.
    pub fn what(&self, act: &Act) -> &'static str {
        let mut of = self
            .levers
            .all
            .iter()
            .filter(|leased| leased.grip.lever() == act.lever());
        of.next()
            .map_or("changing something", |leased| leased.grip.what(act))
    }

    /// Takes in what others did since the last look.
    pub fn reconcile(&mut self, hands: &mut Hands, is_first: bool) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                leased.grip.reconcile(hands, vm, is_first);
            }
        });
    }

    /// Tells a sample what is in force.
    pub fn tell(&mut self, hands: &mut Hands, sample: &mut VmSample) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                leased.grip.tell(hands, vm, sample);
            }
        });
    }

    /// Limits that are in force.
    pub fn limits(&self) -> impl Iterator<Item = Limit> + '_ {
        self.levers.all.iter().filter_map(|leased| leased.grip.limit())
    }

    /// Ends what must not outlast the agent; what could not be ended is said and stays journalled.
    pub fn lift_limits(&mut self, hands: &mut Hands) -> Vec<ActionError> {
        self.with_levers(|vm, levers| {
            let mut failures = Vec::new();
            for leased in levers {
                if leased.until.is_some() {
                    failures.extend(leased.lift(hands, vm).err());
                }
                failures.extend(leased.grip.leave(hands, vm).err());
            }
            failures
        })
    }

    /// Gives back everything that is in force; what could not be is said and stays journalled.
    pub fn give_back(&mut self, hands: &mut Hands) -> Vec<ActionError> {
        if !hands.entry(self).is_some_and(Entry::is_in_force) {
            return Vec::new();
        }
        self.look_soon();
        self.with_levers(|vm, levers| {
            let mut failures = Vec::new();
            for leased in levers {
                failures.extend(leased.lift(hands, vm).err());
                failures.extend(leased.grip.leave(hands, vm).err());
            }
            failures
        })
    }

    /// When the next lease is over that can be ended.
    pub fn next_lease_end(&self) -> Option<Ns> {
        if self.is_migrating() {
            return None;
        }
        self.levers.all.iter().filter_map(|leased| leased.until).min()
    }

    /// Whether a lease is over.
    pub fn has_leases_over(&self, at: Ns) -> bool {
        self.next_lease_end().is_some_and(|until| until <= at)
    }

    /// Lifts what is held by leases that are over.
    pub fn end_leases(&mut self, hands: &mut Hands, at: Ns) {
        self.with_levers(|vm, levers| {
            for leased in levers {
                if leased.until.is_some_and(|until| until <= at)
                    && let Err(error) = leased.lift(hands, vm)
                {
                    hands.notice(format!("{error}; tried again"));
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
    /// What is left to undo of this run.
    pub fn new(manager: &'a mut dyn Manager, root: &'a Path, run: &'a Run, before: &'a Before) -> After<'a> {
        After {
            manager,
            root,
            run,
            before,
            is_found: false,
        }
    }

    /// Whether that run of the VM is over.
    pub fn is_over(&self) -> bool {
        !task::is_alive(self.root, self.run.process())
    }

    /// What its cgroups leave the VM now.
    pub fn reach(&self) -> Reach {
        Reach::of_process(self.root, self.run.pid)
    }

    /// The VM; `None` once that run of it is over.
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

//! What the levers of a VM on KVM work on, and what an ended agent left of it to undo.

use std::path::Path;

use homenode_host::{Act, ActionError, HandsOff, Outcome};
use homenode_kernel::confine::ConfineError;
use homenode_kernel::task;
use homenode_kernel::trackers::TrackerError;
use homenode_undo::journal::{Before, Entry, Helper, JournalError, Run, Unreadable, Written as _};
use homenode_undo::levers::HostKind;
use homenode_units::{CpuSet, Ns, VmId};

use super::{Vm, failed};
use crate::context::HostContext;
use crate::levers::{HelperPins, Home, is_placed};
use crate::manager::Manager;
use crate::reach::Reach;

/// KVM hosts, defined by the types that their levers work on.
pub(crate) enum Kvm {}

impl HostKind for Kvm {
    type Context = HostContext;
    type Vm = Vm;
    type After<'a> = After<'a>;
    type Error = ActionError;
    type UndoError = UndoError;

    fn levers<'a>(_context: &'a mut HostContext, vm: &'a mut Vm) -> &'a mut Levers {
        &mut vm.levers
    }
}

/// What the agent can change on a VM on KVM, and undo.
pub(crate) type Levers = homenode_undo::levers::Levers<Kvm>;

/// Why a change of an ended agent could not be undone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UndoError {
    #[error("{}", join(.0))]
    Steps(Vec<Step>),
    #[error("the VM's QEMU is running, but the list of VMs does not contain the VM")]
    NotListed,
    #[error("{0}")]
    Call(String),
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    #[error(transparent)]
    Confine(#[from] ConfineError),
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("the VM's own mark: {0}")]
    Mark(String),
    #[error("{}", join(.0))]
    Several(Vec<UndoError>),
}

/// A failed step of undoing a lever.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Step {
    #[error("{what}: {cause}")]
    Failed { what: String, cause: String },
    #[error("{what} cannot be read: {cause}")]
    Unknown { what: &'static str, cause: String },
}

fn join(all: &[impl ToString]) -> String {
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    all.join("; ")
}

impl Vm {
    /// Journals the VM's state before it is touched for the first time. Journals it again if another program changed the VM
    /// since, as far as the agent has nothing in force there.
    pub(crate) fn begin(&self, context: &mut HostContext) -> Result<(), JournalError> {
        let Some(journal) = &mut context.journal else {
            return Ok(());
        };
        let threads = context.manager.told_vcpus(self.run.vm);
        let entry = journal.entry(self.run.vm).filter(|entry| entry.run == self.run);
        let before = match entry.filter(|entry| is_placed(entry)) {
            // A vCPU may have been added since, and its thread must be known too.
            Some(placed) => Before {
                threads: placed.before.threads.clone().into_iter().chain(threads).collect(),
                ..self.before_placed(placed)
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

    /// Returns the state before a VM was placed, with what other programs changed since: the CPUs of the threads that the agent
    /// has not pinned. A set of which the kernel applies a part for now is kept.
    fn before_placed(&self, placed: &Entry) -> Before {
        let mut before = placed.before.clone();
        let now = self.before();
        let is_changed = |was: &CpuSet, now: &CpuSet| !now.is_empty() && self.reach.in_force(was) != *now;
        // A vCPU that was added since has no state before: it may have started where the agent put the emulator.
        for (index, was) in &mut before.vcpus {
            let cpus = now
                .vcpus
                .get(index)
                .filter(|_| !self.pins.ours.contains_key(index));
            if let Some(cpus) = cpus.filter(|cpus| is_changed(was, cpus)) {
                was.clone_from(cpus);
            }
        }
        // A pin that another program made since must not look like one that restoring left.
        before.operator_pins.clone_from(&now.operator_pins);
        // A home without such sets is from an earlier version, which did not write them.
        let ours: Option<HelperPins> = match placed.has(&[Home::KEY]) {
            true => placed.get(),
            false => Some(HelperPins::default()),
        };
        let Some(ours) = ours else { return before };
        if !ours.has(Helper::Emulator) && is_changed(&before.emulator, &now.emulator) {
            before.emulator = now.emulator;
        }
        for (id, was) in &mut before.iothreads {
            let cpus = now.iothreads.get(id).filter(|_| !ours.has(Helper::IoThread(*id)));
            if let Some(cpus) = cpus.filter(|cpus| is_changed(was, cpus)) {
                was.clone_from(cpus);
            }
        }
        before
    }

    /// Carries out an act on the VM.
    pub(crate) fn act(&mut self, context: &mut HostContext, act: &Act) -> Result<Outcome, ActionError> {
        let begun = self.begin(context);
        if self.is_migrating() {
            return Err(failed(self, self.what(act), &HandsOff::Migrating.to_string()));
        }
        begun.map_err(|e| failed(self, self.what(act), &e.to_string()))?;
        let done = Levers::act(context, self, act);
        done.unwrap_or_else(|| Err(failed(self, self.what(act), "this host has no such lever")))
    }

    /// The name of this act in errors.
    pub(crate) fn what(&self, act: &Act) -> &'static str {
        self.levers.what(act).unwrap_or("changing something")
    }

    /// Restores everything that is in force. Returns what could not be restored, which stays in the journal.
    pub(crate) fn give_back(&mut self, context: &mut HostContext) -> Vec<ActionError> {
        if !context.entry(self).is_some_and(Entry::is_in_force) {
            return Vec::new();
        }
        self.look_soon();
        Levers::restore(context, self)
    }

    /// When the next lease that can be ended expires; none can be during a migration.
    pub(crate) fn next_lease_end(&self) -> Option<Ns> {
        self.levers.next_lease_end().filter(|_| !self.is_migrating())
    }
}

/// A VM whose agent has ended, for the guard or the next agent to undo what is left in force.
pub(crate) struct After<'a> {
    pub manager: &'a mut dyn Manager,
    pub root: &'a Path,
    pub run: &'a Run,
    /// The VM's state before the agent touched it.
    pub before: &'a Before,
    is_found: bool,
}

impl<'a> After<'a> {
    /// Creates the view of this run for undoing.
    pub(crate) fn new(
        manager: &'a mut dyn Manager,
        root: &'a Path,
        run: &'a Run,
        before: &'a Before,
    ) -> After<'a> {
        After {
            manager,
            root,
            run,
            before,
            is_found: false,
        }
    }

    /// Whether this run of the VM has ended.
    pub(crate) fn is_over(&self) -> bool {
        !task::is_alive(self.root, self.run.process())
    }

    /// Returns what the VM's cgroups leave it now.
    pub(crate) fn reach(&self) -> Reach {
        Reach::of_process(self.root, self.run.pid)
    }

    /// Returns the VM; `None` once this run of it has ended.
    pub(crate) fn vm(&mut self) -> Result<Option<VmId>, UndoError> {
        if self.is_over() {
            return Ok(None);
        }
        if !self.is_found {
            let known = self.manager.knows(self.run);
            self.is_found = known.map_err(|e| UndoError::Call(e.cause().to_owned()))?;
            if self.is_found {
                self.manager.recall_vcpus(self.run, &self.before.threads);
            }
        }
        match self.is_found {
            true => Ok(Some(self.run.vm)),
            false if self.is_over() => Ok(None),
            false => Err(UndoError::NotListed),
        }
    }
}

//! What the agent can change of a VM: a file per lever, which holds how it is set, renewed, lifted with its lease, and undone
//! when the agent is no more.
//!
//! ```text
//!              journal, set            lease over, or Lift
//!   operator's ────────────▶ ours … ────────────────────────▶ operator's
//!                              │ somebody else changed it
//!                              └────────────────────────────▶ theirs, left alone
//! ```
//!
//! A lever of one VM is a [`Grip`]. It is made from what the journal says, by the agent that first sees the VM and by the
//! guard that undoes: what an agent has in force and what is to be undone after it are the same thing. A new lever is its
//! file and a line of [`all`]; docs/ARCHITECTURE.md has an example.

mod home;
pub(crate) mod memory;
mod memory_policy;
mod pages;
pub(crate) mod quota;
mod resctrl;
pub(crate) mod topology;
pub(crate) mod vcpus;
mod watching;

use std::path::Path;

use homenode_host::{Act, ActionError, Failure, Lever, Limit, Outcome, VmSample};
use homenode_units::{Ns, VmId};

use crate::hands::Hands;
use crate::journal::{Before, Entry, Journal, Run, Written};
use crate::libvirt::{CallError, Libvirt};
use crate::vm::Vm;
use crate::{now, task};

pub use home::{Home, MemoryNodes};
pub use memory::{Shrink, StatsPeriod};
pub use memory_policy::is_possible as memory_policy_is_possible;
pub use pages::Moving;
pub use quota::Quotas;
pub use resctrl::Confined;
pub use vcpus::Pins;
pub use watching::Watched;

/// How long a limit that an earlier agent left may stay unless this one decides for it.
pub(crate) const CARRIED_LEASE: Ns = Ns::from_secs(10);
/// How long to wait before what could not be lifted is tried again.
const RETRY: Ns = Ns::from_secs(1);

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

    /// Takes in what somebody else did since the last look.
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

/// Every lever, in the order in which they are undone: first what outlives the VM.
fn all(entry: Option<&Entry>) -> Vec<Box<dyn Grip>> {
    vec![
        watching::grip(entry),
        resctrl::grip(entry),
        vcpus::grip(entry),
        home::grip(entry),
        quota::grip(entry),
        memory::grip(entry),
        pages::grip(entry),
        memory_policy::grip(entry),
        topology::grip(entry),
    ]
}

/// Whether pins, a home or memory nodes are to be restored.
pub(crate) fn is_placed(entry: &Entry) -> bool {
    entry.has(&[Pins::KEY, Home::KEY, MemoryNodes::KEY])
}

/// Whether anything is to be undone. Where pages were moving to is nothing.
pub(crate) fn is_in_force(entry: &Entry) -> bool {
    all(Some(entry)).iter().any(|grip| !grip.journalled().is_empty())
}

/// VMs on which something is to be undone.
pub fn in_force(journal: &Journal) -> Vec<VmId> {
    let entries = journal.entries().iter().filter(|(_, entry)| is_in_force(entry));
    entries.map(|(vm, _)| *vm).collect()
}

/// A lever of a VM, and until when it is held.
struct Leased {
    grip: Box<dyn Grip>,
    until: Option<Ns>,
}

impl Leased {
    fn act(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        if let Act::Lift { .. } = act {
            return self.lift(hands, vm).map(|()| Outcome::Done);
        }
        let Some(lease) = act.lease() else {
            return self.grip.set(hands, vm, act);
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

    fn lift(&mut self, hands: &mut Hands, vm: &mut Vm) -> Result<(), ActionError> {
        self.grip.lift(hands, vm)?;
        self.until = None;
        Ok(())
    }
}

/// The levers of a VM.
#[derive(Default)]
pub(crate) struct Levers(Vec<Leased>);

impl Levers {
    /// Of a VM of which an earlier agent wrote this down. Who only watches ends nothing of that.
    pub fn of(entry: Option<&Entry>, acts: bool) -> Levers {
        let carried = acts.then(|| now() + CARRIED_LEASE);
        let leased = |grip: Box<dyn Grip>| Leased {
            until: carried.filter(|_| grip.lever().is_leased() && !grip.journalled().is_empty()),
            grip,
        };
        Levers(all(entry).into_iter().map(leased).collect())
    }
}

impl Vm {
    /// Does something with the VM and each of its levers, which are taken out meanwhile.
    fn with_levers<T>(&mut self, with: impl FnOnce(&mut Vm, &mut [Leased]) -> T) -> T {
        let mut levers = std::mem::take(&mut self.levers);
        let done = with(self, &mut levers.0);
        self.levers = levers;
        done
    }

    /// Carries out what is asked of the VM.
    pub fn act(&mut self, hands: &mut Hands, act: &Act) -> Result<Outcome, ActionError> {
        let begun = hands.begin(self);
        self.with_levers(|vm, levers| {
            let lever = levers
                .iter_mut()
                .find(|leased| leased.grip.lever() == act.lever());
            let Some(lever) = lever else {
                return Err(failed(vm, "pulling a lever", "this host has none of this kind"));
            };
            begun.map_err(|e| failed(vm, lever.grip.what(act), &e.to_string()))?;
            lever.act(hands, vm, act)
        })
    }

    /// What doing this to the VM is called in errors.
    pub fn what(&self, act: &Act) -> &'static str {
        let mut of = self
            .levers
            .0
            .iter()
            .filter(|leased| leased.grip.lever() == act.lever());
        of.next()
            .map_or("changing something", |leased| leased.grip.what(act))
    }

    /// Takes in what somebody else did since the last look.
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
        self.levers.0.iter().filter_map(|leased| leased.grip.limit())
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

    /// When the next lease is over.
    pub fn next_lease_end(&self) -> Option<Ns> {
        self.levers.0.iter().filter_map(|leased| leased.until).min()
    }

    /// Whether a lease is over.
    pub fn has_leases_over(&self, at: Ns) -> bool {
        self.levers
            .0
            .iter()
            .any(|leased| leased.until.is_some_and(|until| until <= at))
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
    pub libvirt: &'a mut Libvirt,
    pub root: &'a Path,
    pub run: &'a Run,
    /// How it was before the agent touched it.
    pub before: &'a Before,
    found: Option<virt::domain::Domain>,
}

impl After<'_> {
    /// Whether that run of the VM is over.
    fn is_over(&self) -> bool {
        !task::is_alive(self.root, self.run.process())
    }

    /// The VM; `None` once that run of it is over.
    pub fn domain(&mut self) -> Result<Option<virt::domain::Domain>, String> {
        if self.is_over() {
            return Ok(None);
        }
        if self.found.is_none() {
            let found = self.libvirt.find(&self.run.vm.to_string());
            let found = found.map_err(|e| e.cause().to_owned())?;
            self.found = found.filter(|domain| domain.id() == Some(self.run.runtime_id));
        }
        match &self.found {
            Some(domain) => Ok(Some(domain.clone())),
            None if self.is_over() => Ok(None),
            None => Err("its QEMU runs and libvirt does not list it".into()),
        }
    }
}

/// Undoes what the journal says is in force on a VM, lever by lever: one that fails keeps no other from being undone, and stays
/// journalled. `Ok` also when that run of the VM is over.
pub(crate) fn undo(
    libvirt: &mut Libvirt,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
) -> Result<(), String> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let mut after = After {
        libvirt,
        root,
        run: &entry.run,
        before: &entry.before,
        found: None,
    };
    let (mut undone, mut failures) = (Vec::new(), Vec::<String>::new());
    for grip in all(Some(&entry)) {
        let keys = grip.journalled();
        if keys.is_empty() {
            continue;
        }
        let result = match grip.undo(&mut after) {
            // It may have ended meanwhile.
            Err(_) if after.is_over() => grip.undo(&mut after),
            result => result,
        };
        match result {
            Ok(()) => undone.extend(keys),
            Err(cause) if failures.contains(&cause) => {}
            Err(cause) => failures.push(cause),
        }
    }
    let cleared = match failures.is_empty() {
        true => journal.clear_all(vm),
        false => journal.clear(vm, &undone),
    };
    failures.extend(cleared.err().map(|e| e.to_string()));
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

/// Collects what failed of an undo that has several steps.
#[derive(Default)]
struct Steps(Vec<String>);

impl Steps {
    fn note(&mut self, what: &str, result: Result<(), CallError>) {
        self.0
            .extend(result.err().map(|e| format!("{what}: {}", e.cause())));
    }

    fn done(self) -> Result<(), String> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(self.0.join("; ")),
        }
    }
}

/// Something that the host did not do.
pub(crate) fn failed(vm: &Vm, what: &str, cause: &str) -> ActionError {
    let (what, cause) = (what.to_owned(), cause.to_owned());
    Failure::Host { what, cause }.on(&vm.run.name)
}

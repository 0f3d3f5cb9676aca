//! The mark in a VM's own metadata: a second record of an agent's changes, in addition to the journal. It moves with the VM.
//!
//! ```text
//!   <metadata><homenode-mark:changed xmlns:homenode-mark="…" host="…" boot="…">lines of the journal</…></metadata>
//!
//!   the mark is on     and the journal has          then
//!   the run it names   its levers                   nothing: the journal is written before the mark
//!   the run it names   not its levers               they are added to the journal, which was lost
//!   another run        (saved and restored, or      what libvirt carried with the VM is added as changed
//!   or another host     migrated)                   on this run, and undone at once
//! ```
//!
//! The mark is written before a lever is used, and removed when the change is undone. A VM whose driver keeps no metadata has
//! only the journal. Only the running VM is marked, never its definition, since the agent's changes end with the run too.

use std::collections::BTreeMap;
use std::path::Path;

use homenode_kernel::read::{self, ReadError};
use homenode_undo::journal::{self, Before, Entry, Journal, Run};
use homenode_units::{CpuSet, VmId};

use crate::domain::Domain;
use crate::levers;
use crate::manager::{CallError, Manager};
use crate::xml::Element;

/// Namespace of the metadata element.
pub const NAMESPACE: &str = "https://homenode.dev/xmlns/mark/1";
/// Prefix of the namespace, which libvirt also requires.
pub(crate) const PREFIX: &str = "homenode-mark";
const NAME: &str = "changed";

/// Identity of this host and its boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Here {
    host: String,
    boot: String,
}

/// Why a VM's mark cannot be added to the journal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MarkError {
    /// The mark was not written by an agent for this VM.
    #[error(
        "VM {0} carries a mark of an agent's changes, and the mark cannot be read; compare the VM's pins, quota and memory with \
         its definition (virsh dumpxml --inactive)"
    )]
    Unreadable(String),
    /// The VM's process cannot be looked at.
    #[error(transparent)]
    Process(#[from] ReadError),
}

impl Here {
    /// Reads the identity below `root`. Missing parts are empty, for example on a host without a machine id.
    pub fn read(root: &Path) -> Here {
        let text = |path| {
            read::text_if_there(&root.join(path), read::SMALL_BYTES)
                .ok()
                .flatten()
        };
        let line = |path| text(path).unwrap_or_default().trim().to_owned();
        Here {
            host: line("etc/machine-id"),
            boot: line("proc/sys/kernel/random/boot_id"),
        }
    }
}

/// A mark in a domain's XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    by: Here,
    /// Lines of the journal.
    lines: String,
}

impl Mark {
    /// Returns the mark in a domain's root element.
    pub(crate) fn of(root: &Element) -> Option<Mark> {
        let elements = root
            .child("metadata")
            .into_iter()
            .flat_map(|metadata| &metadata.children);
        let mut marks = elements.filter(|e| e.name == NAME && e.namespace.as_deref() == Some(NAMESPACE));
        let mark = marks.next()?;
        let word = |name| mark.attribute(name).unwrap_or_default().to_owned();
        Some(Mark {
            by: Here {
                host: word("host"),
                boot: word("boot"),
            },
            // libvirt may indent the text that it returns.
            lines: mark
                .text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .map(|line| format!("{line}\n"))
                .collect(),
        })
    }

    /// Creates the mark for a journal entry; `None` if nothing is in force.
    pub(crate) fn for_entry(here: &Here, entry: Option<&Entry>) -> Option<Mark> {
        let entry = entry.filter(|entry| entry.is_in_force())?;
        Some(Mark {
            by: here.clone(),
            lines: entry.written(journal::is_undone),
        })
    }

    pub(crate) fn element(&self) -> String {
        let [host, boot, lines] = [&self.by.host, &self.by.boot, &self.lines].map(quick_xml::escape::escape);
        format!("<{NAME} host='{host}' boot='{boot}'>\n{lines}</{NAME}>")
    }

    /// Returns what the mark says about the VM's current run.
    fn said_of(
        &self,
        run: &Run,
        here: &Here,
        cpus: impl FnOnce() -> Option<CpuSet>,
    ) -> Result<Said, MarkError> {
        let Some(entry) = Entry::from_written(&self.lines).filter(|entry| entry.run.vm == run.vm) else {
            return Err(MarkError::Unreadable(run.name.clone()));
        };
        if self.by == *here && entry.run == *run {
            return Ok(Said::OfThisRun(entry));
        }
        let mut entry = entry.only(levers::is_carried_by_libvirt);
        entry.run = run.clone();
        if self.by.host != here.host {
            entry.before = elsewhere(entry.before, &cpus().unwrap_or_default());
        }
        Ok(Said::OfAnother(entry))
    }
}

/// What a mark says about the current run.
enum Said {
    OfThisRun(Entry),
    /// An entry of another run or host, rewritten to be undone on this run.
    OfAnother(Entry),
}

/// Adapts a VM's former state to another host with these CPUs. Threads that the operator had not pinned may use all CPUs, and the
/// former host's nodes mean nothing here.
fn elsewhere(before: Before, cpus: &CpuSet) -> Before {
    let vcpus = before.vcpus.into_iter().map(|(index, was)| {
        let is_bound = before.operator_pins.contains(&index);
        (index, if is_bound { was } else { cpus.clone() })
    });
    Before {
        vcpus: vcpus.collect(),
        emulator: cpus.clone(),
        iothreads: before
            .iothreads
            .into_keys()
            .map(|id| (id, cpus.clone()))
            .collect(),
        nodes: None,
        ..before
    }
}

/// Result of comparing a mark with the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TakenIn {
    /// There is no mark, or nothing new in it.
    Known,
    /// The mark was new to the journal, and is now in it.
    New,
    /// Another run of the VM was changed, and libvirt carried the change to this run: it must be undone.
    Carried,
}

/// Adds the contents of a VM's mark to the journal.
///
/// # Errors
/// When the mark cannot be read.
pub(crate) fn take_in(
    here: &Here,
    journal: &mut Journal,
    root: &Path,
    (domain, run): (&Domain, &Run),
) -> Result<TakenIn, MarkError> {
    let Some(mark) = &domain.mark else {
        return Ok(TakenIn::Known);
    };
    let everywhere = || {
        let online =
            read::text_if_there(&root.join("sys/devices/system/cpu/online"), read::SMALL_BYTES).ok()??;
        let online: CpuSet = online.trim().parse().ok()?;
        Some(
            domain
                .cpuset
                .as_ref()
                .map_or(online.clone(), |allowed| allowed.intersection(&online)),
        )
    };
    let (entry, taken) = match mark.said_of(run, here, everywhere)? {
        Said::OfThisRun(entry) => (entry, TakenIn::New),
        Said::OfAnother(entry) => (entry, TakenIn::Carried),
    };
    let had = journal.entry(run.vm).cloned();
    journal.take_in(&entry);
    let is_new = journal.entry(run.vm) != had.as_ref();
    Ok(if is_new || taken == TakenIn::Carried {
        taken
    } else {
        TakenIn::Known
    })
}

/// Adds the marks of all running VMs to the journal of an ended agent.
///
/// # Errors
/// What could not be read or added; [`CallError::Lost`] if the manager does not answer.
pub(crate) fn take_in_all(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
) -> Result<(), CallError> {
    let here = Here::read(root);
    let mut failures = Vec::new();
    for vm in manager.list()? {
        let (name, why) = match manager.describe(vm) {
            Ok(domain) => {
                let taken = take_in_one(manager, (&here, root), journal, &domain);
                (domain.name.clone(), taken.err().map(|e| e.to_string()))
            }
            Err(CallError::Lost(cause)) => return Err(CallError::Lost(cause)),
            // The VM has ended since it was listed.
            Err(CallError::Refused(_)) if manager.is_gone(vm) => continue,
            Err(CallError::Refused(cause) | CallError::Unclear(cause)) => (vm.to_string(), Some(cause)),
        };
        failures.extend(why.map(|why| format!("VM {name} cannot be checked for a mark: {why}")));
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CallError::Refused(failures.join("; "))),
    }
}

fn take_in_one(
    manager: &mut dyn Manager,
    (here, root): (&Here, &Path),
    journal: &mut Journal,
    domain: &Domain,
) -> Result<(), MarkError> {
    if domain.mark.is_none() {
        return Ok(());
    }
    match run_of(manager, domain)? {
        Some(run) => take_in(here, journal, root, (domain, &run)).map(drop),
        None => Ok(()),
    }
}

/// The current run of a domain; `None` if it has no process.
///
/// # Errors
/// When `/proc` cannot be read.
pub(crate) fn run_of(manager: &mut dyn Manager, domain: &Domain) -> Result<Option<Run>, ReadError> {
    let Some(runtime_id) = domain.runtime_id else {
        return Ok(None);
    };
    let process = manager.process(domain)?;
    Ok(process.map(|process| Run {
        vm: domain.id,
        name: domain.name.clone(),
        runtime_id,
        pid: process.pid,
        start_ticks: process.start_ticks,
    }))
}

/// Marks of the running VMs, and whether each must be written again.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    here: Here,
    of_vms: BTreeMap<VmId, Standing>,
}

/// A VM's mark.
#[derive(Debug, Default)]
struct Standing {
    mark: Option<Mark>,
    /// Whether the mark may differ from the journal.
    is_to_be_compared: bool,
}

impl Marks {
    pub(crate) fn new(root: &Path) -> Marks {
        Marks {
            here: Here::read(root),
            of_vms: BTreeMap::new(),
        }
    }

    pub(crate) fn here(&self) -> &Here {
        &self.here
    }

    /// Notes the mark found in a VM's XML.
    pub(crate) fn saw(&mut self, vm: VmId, mark: Option<Mark>) {
        let standing = Standing {
            mark,
            is_to_be_compared: true,
        };
        self.of_vms.insert(vm, standing);
    }

    /// Whether a VM's mark may differ from the journal.
    pub(crate) fn is_to_be_compared(&self, vm: VmId) -> bool {
        self.of_vms
            .get(&vm)
            .is_some_and(|standing| standing.is_to_be_compared)
    }

    /// Forgets all VMs for which `is_there` returns false.
    pub(crate) fn keep_only(&mut self, is_there: impl Fn(VmId) -> bool) {
        self.of_vms.retain(|vm, _| is_there(*vm));
    }

    /// Writes a VM's mark from its current journal entry.
    pub(crate) fn write(
        &mut self,
        manager: &mut dyn Manager,
        vm: VmId,
        entry: Option<&Entry>,
    ) -> Result<(), CallError> {
        let standing = self.of_vms.entry(vm).or_default();
        let mark = Mark::for_entry(&self.here, entry);
        standing.is_to_be_compared = mark != standing.mark;
        if standing.is_to_be_compared {
            manager.set_mark(vm, mark.as_ref().map(Mark::element).as_deref())?;
            *standing = Standing {
                mark,
                is_to_be_compared: false,
            };
        }
        Ok(())
    }
}

/// Updates a VM's mark to what is left to undo; removes it if nothing is left.
///
/// # Errors
/// Why libvirt refused.
pub(crate) fn leave(
    manager: &mut dyn Manager,
    root: &Path,
    vm: VmId,
    left: Option<&Entry>,
) -> Result<(), CallError> {
    let domain = manager.describe(vm)?;
    let mut marks = Marks::new(root);
    marks.saw(vm, domain.mark.clone());
    marks.write(manager, vm, left)
}

//! Which processes of the host run VMs.

use std::collections::BTreeSet;
use std::io::Read;
use std::sync::Arc;

use homenode_units::VmId;
use rustix::fs::OFlags;

use super::command_line::{CommandLine, is_qemu};
use super::{Heard, Ns, Qemu, Vm, monitor};
use crate::cgroup::Hierarchy;
use crate::manager::CallError;
use crate::read::{self, Dir, ReadError};
use crate::task;

/// Until a process has been looked at so often, running no VM each time, it may just be starting one.
const LOOKS: u8 = 3;
/// Afterwards it is looked at in one scan of so many: it may still become a QEMU (`exec`).
const SCANS: i32 = 20;
/// A command line of a VM with many devices has tens of kilobytes.
const COMMAND_LINE_MAX: u64 = 2 << 20;
/// More processes than any host has.
const PROCESSES_MAX: usize = 1 << 20;

/// Whether what a user calls a VM is taken for one: another user could have the agent move its own memory and fill its lists.
/// Services have users below 1000, or nobody's, which Incus takes.
fn may_run_vms(user: u32) -> bool {
    user < 1000 || user == 65534 || user == rustix::process::geteuid().as_raw()
}

impl Qemu {
    /// Looks through all processes for VMs that are new; at those that long ran none only now and then, unless it is to be
    /// `whole`.
    pub(super) fn scan(&mut self, whole: bool) -> Result<(), CallError> {
        let lost = |e: ReadError| CallError::Lost(e.to_string());
        self.groups = Hierarchy::read(&self.root).ok();
        self.ordinary = task::affinity(&self.root, 1, 1).ok().flatten();
        let mut pids = Vec::new();
        if let Some(proc) = Dir::open(&self.root.join("proc")).map_err(lost)? {
            proc.numbers(PROCESSES_MAX, &mut pids).map_err(lost)?;
        }
        let known: BTreeSet<i32> = self.vms.values().map(|vm| vm.process.pid).collect();
        let before = std::mem::take(&mut self.others);
        let mut strangers = BTreeSet::new();
        self.scan_count = (self.scan_count + 1) % SCANS;
        for pid in pids.into_iter().filter(|pid| !known.contains(pid)) {
            let looks = before.binary_search_by_key(&pid, |(other, _)| *other);
            let looks = looks.map_or(0, |at| before[at].1);
            if looks >= LOOKS && pid % SCANS != self.scan_count && !whole {
                self.others.push((pid, looks));
                continue;
            }
            match self.look_at(pid, &mut strangers) {
                Ok(None) => self.others.push((pid, looks.saturating_add(1))),
                Ok(Some((id, vm))) => {
                    if let Some(other) = self.vms.get(&id) {
                        let (first, second) = (other.process.pid, pid);
                        self.notices.push(format!(
                            "processes {first} and {second} both run VM {id} ({}): only the first is watched. Give each a UUID of its own (-uuid)",
                            vm.name
                        ));
                    } else {
                        self.vms.insert(id, vm);
                    }
                }
                Err(why) => self.notices.push(format!("process {pid} is left out: {why}")),
            }
        }
        for user in strangers {
            self.notices.push(format!(
                "QEMUs of user {user} are left out: who may log in may run anything by that name. Run VMs as root or as a service's user"
            ));
        }
        Ok(())
    }

    /// The VM that a process runs, if it runs one. `strangers` gets the user of a process that may not run any.
    fn look_at(&self, pid: i32, strangers: &mut BTreeSet<u32>) -> Result<Option<(VmId, Vm)>, String> {
        let path = self.root.join(format!("proc/{pid}/cmdline"));
        // Of a process that may not be read nothing can be changed either.
        let Ok(Some(words)) = read::text_if_there(&path, COMMAND_LINE_MAX) else {
            return Ok(None);
        };
        let mut words = words.split_terminator('\0');
        if !words.next().is_some_and(is_qemu) {
            return Ok(None);
        }
        let Some(users) = task::users(&self.root, pid).map_err(|e| e.to_string())? else {
            return Ok(None);
        };
        // A program with root's rights can be called anything by who starts it.
        let stranger = users.into_iter().find(|user| !may_run_vms(*user));
        if stranger.is_some() || !self.runs_qemu(pid) {
            strangers.extend(stranger);
            return Ok(None);
        }
        let Some(process) = task::process(&self.root, pid).map_err(|e| e.to_string())? else {
            return Ok(None);
        };
        let mut line = CommandLine::of(words);
        for path in line.read_configs().map(str::to_owned).collect::<Vec<_>>() {
            match self.config(pid, &path) {
                Ok(text) => line.take_in_config(&text),
                Err(cause) => return Err(format!("its options in {path} cannot be read: {cause}")),
            }
        }
        let told = line.told();
        if told.has_no_machine {
            return Ok(None);
        }
        let name = told.name.clone().unwrap_or_else(|| format!("qemu-{pid}"));
        if name.contains(['/', '\0'])
            || name.starts_with('.')
            || name.chars().any(char::is_control)
            || name.len() > 200
        {
            return Err("its name (-name) cannot be a file's; start it with another".to_owned());
        }
        let of_libvirt = self.root.join("run/libvirt/qemu").join(format!("{name}.pid"));
        if read::value_if_there(&of_libvirt, "a process id") == Ok(Some(pid)) {
            return Err(format!(
                "libvirt runs VM {name}, and changes it; manage it with `--host libvirt`"
            ));
        }
        let given = told
            .uuid
            .as_deref()
            .map(|uuid| VmId::parse(uuid).ok_or_else(|| format!("its UUID `{uuid}` is none")));
        // Without one, its name is what stays when it is started again.
        let id = given.unwrap_or_else(|| {
            Ok(VmId(
                uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, name.as_bytes()).as_u128(),
            ))
        })?;
        let described = Arc::new(self.domain(id, &name, process, &told, None));
        let heard = Heard::default();
        Ok(Some((
            id,
            Vm {
                process,
                tasks: task::Tasks::new(&self.root, pid),
                name,
                told,
                described,
                next_look: Ns::ZERO,
                heard,
            },
        )))
    }

    /// Whether a process's program is a QEMU, as far as that can be seen: an upgrade may have taken its file away.
    fn runs_qemu(&self, pid: i32) -> bool {
        let Ok(program) = std::fs::read_link(self.root.join(format!("proc/{pid}/exe"))) else {
            return true;
        };
        let name = program
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.contains("qemu") || name.starts_with("kvm"))
    }

    /// A file of options, as the process saw it.
    fn config(&self, pid: i32, path: &str) -> std::io::Result<String> {
        let file = monitor::open_as_seen_by(&self.root, pid, path, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let mut text = String::new();
        std::fs::File::from(file)
            .take(1 << 20)
            .read_to_string(&mut text)?;
        Ok(text)
    }
}

//! Finds the host's processes that run VMs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use homenode_kernel::cgroup::Hierarchy;
use homenode_kernel::read::{self, Dir, ReadError};
use homenode_kernel::task::{self, Process};
use homenode_undo::journal::Run;
use homenode_units::VmId;

use super::command_line::{CommandLine, Told, is_qemu};
use super::seen::Eyes;
use super::{Heard, Ns, Qemu, Vm};
use crate::manager::CallError;

/// How many scans look at a new process that runs no VM: it may be about to start one.
const LOOKS: u8 = 3;
/// After the first [`LOOKS`] scans of a process, only one in this many scans looks at it, since it may still become a QEMU
/// (`exec`).
const SCANS: i32 = 20;
/// Ample, since the command line of a VM with many devices has tens of kilobytes.
const COMMAND_LINE_MAX: u64 = 2 << 20;
/// More processes than any host has.
const PROCESSES_MAX: usize = 1 << 20;

/// Whether a QEMU of this user is accepted as a VM. Other users could make the agent move their own memory, and fill its lists.
/// Services run as users below 1000, or as `nobody`, as with Incus.
fn may_run_vms(user: u32) -> bool {
    user < 1000 || user == 65534 || user == rustix::process::geteuid().as_raw()
}

/// Why a process that may run a VM is left out.
#[derive(Debug, thiserror::Error)]
enum LeftOut {
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    #[error("the VM's options in {path} cannot be read: {cause}")]
    Options { path: String, cause: std::io::Error },
    #[error("the VM's name (-name) cannot be a file name; start the VM with another")]
    Name,
    #[error("the VM's UUID `{0}` is not valid")]
    Uuid(String),
    #[error("libvirt runs VM {0} and changes it itself; manage it with `--host libvirt`")]
    OfLibvirt(String),
}

/// A process that claims to run a VM.
struct Claim {
    id: VmId,
    vm: Vm,
}

impl Vm {
    /// Returns true if each user whose rights the process has is root or the user that the agent runs as.
    fn is_roots(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.users.iter().all(|user| *user == 0 || *user == own)
    }

    /// The user that the process runs as, for messages.
    fn user(&self) -> u32 {
        self.users.iter().max().copied().unwrap_or_default()
    }
}

/// The identity that a process claims.
struct Said {
    id: VmId,
    name: String,
    pid: i32,
    user: u32,
    is_roots: bool,
    /// Whether the VM was accepted before.
    is_known: bool,
}

impl Said {
    fn by(id: VmId, vm: &Vm, is_known: bool) -> Said {
        Said {
            id,
            name: vm.name.clone(),
            pid: vm.process.pid,
            user: vm.user(),
            is_roots: vm.is_roots(),
            is_known,
        }
    }

    /// Whether another process claims to be this VM, or has its name.
    fn is_rival_of(&self, id: VmId, vm: &Vm) -> bool {
        self.pid != vm.process.pid && (self.id == id || self.name == vm.name)
    }

    /// Describes the dispute.
    fn dispute(&self, vm: &Vm) -> String {
        let managed = match self.is_roots || vm.is_roots() {
            true => "only root's is managed",
            false => "neither is managed",
        };
        format!(
            "processes {} (user {}) and {} (user {}) both claim to be VM {}, by its name (-name) or its UUID (-uuid): {managed}; give each a name \
             and a UUID of its own",
            self.pid,
            self.user,
            vm.process.pid,
            vm.user(),
            vm.name
        )
    }
}

impl Qemu {
    /// Looks at all processes to find new VMs. Unless `whole` is set, looks only now and then at old processes without a VM.
    pub(super) fn scan(&mut self, whole: bool) -> Result<(), CallError> {
        let lost = |e: ReadError| CallError::Lost(e.to_string());
        self.look_around();
        let mut pids = Vec::new();
        if let Some(proc) = Dir::open(&self.root.join("proc")).map_err(lost)? {
            proc.numbers(PROCESSES_MAX, &mut pids).map_err(lost)?;
        }
        let known: BTreeSet<i32> = self.vms.values().map(|vm| vm.process.pid).collect();
        let before = std::mem::take(&mut self.others);
        let mut strangers = BTreeSet::new();
        let mut claims = Vec::new();
        self.scan_count = (self.scan_count + 1) % SCANS;
        for pid in pids.into_iter().filter(|pid| !known.contains(pid)) {
            let looks = before.binary_search_by_key(&pid, |(other, _)| *other);
            let looks = looks.map_or(0, |at| before[at].1);
            if looks >= LOOKS && pid % SCANS != self.scan_count && !whole {
                self.others.push((pid, looks));
                continue;
            }
            let looked = self.look_at(pid, &mut strangers);
            if !matches!(looked, Ok(Some(_))) {
                self.others.push((pid, looks.saturating_add(1)));
            }
            match looked {
                Ok(claim) => claims.extend(claim),
                Err(why) => self.notices.push(format!("process {pid} is left out: {why}")),
            }
        }
        self.settle(claims);
        for user in strangers {
            self.notices.push(format!(
                "QEMUs of user {user} are skipped: a user who can log in can run any program under that name. Run VMs as root or as a service's user"
            ));
        }
        Ok(())
    }

    /// Reads where control groups are mounted, and which CPUs every program may use.
    fn look_around(&mut self) {
        self.groups = Hierarchy::read(&self.root).ok();
        self.ordinary = task::affinity(&self.root, 1, 1).ok().flatten();
    }

    /// Accepts the VMs of new processes, unless another process has the same name or UUID, since a service's user can give its
    /// process any name and UUID. Root's VM keeps its own. If two of root's VMs have one UUID, the known one stays, or the older.
    /// If neither VM is root's, neither is managed.
    fn settle(&mut self, mut claims: Vec<Claim>) {
        if claims.is_empty() && self.vms.values().all(|vm| vm.claimed.is_none()) {
            return;
        }
        claims.sort_by_key(|claim| {
            (
                !claim.vm.is_roots(),
                claim.vm.process.start_ticks,
                claim.vm.process.pid,
            )
        });
        let known = self.vms.iter().map(|(id, vm)| Said::by(*id, vm, true));
        let new = claims.iter().map(|claim| Said::by(claim.id, &claim.vm, false));
        let all: Vec<Said> = known.chain(new).collect();
        for (id, vm) in &mut self.vms {
            let rivals = all.iter().filter(|said| said.is_rival_of(*id, vm));
            let rival = rivals.max_by_key(|said| said.is_roots).filter(|_| !vm.is_roots());
            let claimed = rival.map(|rival| rival.dispute(vm));
            if claimed != vm.claimed {
                (vm.claimed, vm.next_look) = (claimed, Ns::ZERO);
            }
        }
        for Claim { id, vm } in claims {
            let rivals = all.iter().filter(|said| said.is_rival_of(id, &vm));
            if vm.is_roots() {
                let notices = rivals
                    .filter(|said| said.is_known && !said.is_roots)
                    .map(|said| said.dispute(&vm));
                self.notices.extend(notices);
                match self.vms.get(&id).filter(|first| first.is_roots()) {
                    None => {
                        // The settings file of this name may have been used for another VM.
                        for other in self.vms.values_mut().filter(|other| other.name == vm.name) {
                            other.next_look = Ns::ZERO;
                        }
                        self.vms.insert(id, vm);
                    }
                    Some(first) => {
                        let (first, second) = (first.process.pid, vm.process.pid);
                        self.notices.push(format!(
                            "processes {first} and {second} both run VM {id} ({}): only the first is watched. Give each a UUID of its own (-uuid)",
                            vm.name
                        ));
                    }
                }
            } else if let Some(rival) = rivals.max_by_key(|said| said.is_roots) {
                self.notices.push(rival.dispute(&vm));
            } else {
                self.vms.insert(id, vm);
            }
        }
    }

    /// Makes the process in the journal the VM. Its current command line is trusted like any VM's; if it says nothing, the
    /// process is still accepted so that its pins can be restored.
    pub(super) fn take_on(&mut self, run: &Run) -> Result<(), CallError> {
        let lost = |e: ReadError| CallError::Lost(e.to_string());
        let process = run.process();
        if task::process(&self.root, run.pid).map_err(lost)? != Some(process) {
            return Ok(());
        }
        // Changes to libvirt's VMs are undone through libvirt, since libvirt would not know about them otherwise.
        let of_libvirt = homenode_units::file_name(&run.name, ".pid").ok();
        let of_libvirt = of_libvirt.map(|file| self.root.join("run/libvirt/qemu").join(file));
        let pid_in = |path: &Path| read::value_if_there::<i32>(path, "a process id");
        let is_libvirts = |path: &Path| pid_in(path).is_ok_and(|pid| pid == Some(run.pid));
        if of_libvirt.as_deref().is_some_and(is_libvirts) {
            return Ok(());
        }
        self.look_around();
        let Some(users) = task::users(&self.root, run.pid).map_err(lost)? else {
            return Ok(());
        };
        let line = self.command_line(run.pid).unwrap_or_default();
        let name = match run.name.is_empty() {
            true => format!("qemu-{}", run.pid),
            false => run.name.clone(),
        };
        let vm = self.vm_of((run.vm, name), (process, users), line.told());
        // The process may have been known as another VM.
        self.vms.retain(|_, known| known.process != process);
        self.vms.insert(run.vm, vm);
        Ok(())
    }

    fn vm_of(&self, (id, name): (VmId, String), (process, users): (Process, [u32; 4]), told: Told) -> Vm {
        let described = Arc::new(self.domain(id, (&name, None), process, &told, None));
        Vm {
            process,
            tasks: task::Tasks::new(&self.root, process.pid),
            users,
            name,
            claimed: None,
            told,
            described,
            next_look: Ns::ZERO,
            heard: Heard::default(),
        }
    }

    /// Returns the options of a QEMU process, including those in files; empty if the process is not a QEMU.
    fn command_line(&self, pid: i32) -> Result<CommandLine, LeftOut> {
        let path = self.root.join(format!("proc/{pid}/cmdline"));
        // If a process may not be read, it cannot be changed either.
        let Ok(Some(words)) = read::text_if_there(&path, COMMAND_LINE_MAX) else {
            return Ok(CommandLine::default());
        };
        let mut words = words.split_terminator('\0');
        if !words.next().is_some_and(is_qemu) {
            return Ok(CommandLine::default());
        }
        let mut line = CommandLine::of(words);
        let eyes = Eyes {
            root: self.root.clone(),
            pid,
            changes_root: line.changes_root(),
        };
        let pid_file = line.pid_file().map(str::to_owned);
        let place = std::fs::read_link(self.root.join(format!("proc/{pid}/cwd")));
        let place = place.ok().filter(|_| !line.leaves_directory());
        // The process's number in its own namespace.
        let own = task::innermost_id(&self.root, pid, pid).unwrap_or(pid);
        line.read_files(|path| {
            let text = match &place {
                _ if path.starts_with('/') => eyes.text_in_time(path, pid_file.as_deref(), own),
                Some(dir) => {
                    let path = dir.join(path).display().to_string();
                    eyes.text_in_time(&path, pid_file.as_deref(), own)
                }
                None => Err(std::io::Error::other(
                    "it has left the directory that it was started in; give the absolute path of the file",
                )),
            };
            text.map_err(|cause| LeftOut::Options {
                path: path.to_owned(),
                cause,
            })
        })?;
        Ok(line)
    }

    /// Returns the VM that a process runs, if it runs one. If its user may not run VMs, adds that user to `strangers`.
    fn look_at(&self, pid: i32, strangers: &mut BTreeSet<u32>) -> Result<Option<Claim>, LeftOut> {
        let Some(words) = self.words_of_qemu(pid) else {
            return Ok(None);
        };
        // The process may be a QEMU's own child, forked with the same command line: for `-daemonize`, or to free QEMU's memory
        // (`async-teardown`).
        let parent = task::parent(&self.root, pid).ok().flatten();
        if parent.and_then(|parent| self.words_of_qemu(parent)) == Some(words) {
            return Ok(None);
        }
        // The process's identity is checked before and after, so that everything read in between belongs to it.
        let Some(process) = task::process(&self.root, pid)? else {
            return Ok(None);
        };
        let Some(users) = task::users(&self.root, pid)? else {
            return Ok(None);
        };
        // The user who starts a setuid program can give it any name, so all of the process's users count.
        let stranger = users.into_iter().find(|user| !may_run_vms(*user));
        if stranger.is_some() || !self.runs_qemu(pid) {
            strangers.extend(stranger);
            return Ok(None);
        }
        let told = self.command_line(pid)?.told();
        if told.has_no_machine || !task::is_alive(&self.root, process) {
            return Ok(None);
        }
        let name = told.name.clone().unwrap_or_else(|| format!("qemu-{pid}"));
        if name.contains(['/', '\0'])
            || name.starts_with('.')
            || name.chars().any(char::is_control)
            || name.len() > 200
        {
            return Err(LeftOut::Name);
        }
        let of_libvirt = self.root.join("run/libvirt/qemu").join(format!("{name}.pid"));
        if read::value_if_there(&of_libvirt, "a process id") == Ok(Some(pid)) {
            return Err(LeftOut::OfLibvirt(name));
        }
        let given = told
            .uuid
            .as_deref()
            .map(|uuid| VmId::parse(uuid).ok_or_else(|| LeftOut::Uuid(uuid.to_owned())));
        // Without a UUID, only the VM's name persists across restarts.
        let id = given.unwrap_or_else(|| {
            Ok(VmId(
                uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, name.as_bytes()).as_u128(),
            ))
        })?;
        let vm = self.vm_of((id, name), (process, users), told);
        Ok(Some(Claim { id, vm }))
    }

    /// The command line of a process that has the name of a QEMU.
    fn words_of_qemu(&self, pid: i32) -> Option<String> {
        let path = self.root.join(format!("proc/{pid}/cmdline"));
        let words = read::text_if_there(&path, COMMAND_LINE_MAX).ok().flatten()?;
        words.split('\0').next().is_some_and(is_qemu).then_some(words)
    }

    /// Whether a process runs a QEMU binary. Returns true if that cannot be seen, since an upgrade may have removed the file.
    fn runs_qemu(&self, pid: i32) -> bool {
        let Ok(program) = std::fs::read_link(self.root.join(format!("proc/{pid}/exe"))) else {
            return true;
        };
        let name = program
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.contains("qemu") || name.starts_with("kvm"))
    }
}

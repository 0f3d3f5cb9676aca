//! VMs with nothing between QEMU and the agent: Proxmox, Incus, KubeVirt's pods seen from their host, plain QEMU.
//!
//! ```text
//!   /proc/PID/cmdline ─ what it was told ─┐
//!   its settings file ─ what its operator says ─┤─▶ Domain
//!   its monitor (QMP) ─ state, balloon ─┘
//!   pins: sched_setaffinity(2) · quota: cpu.max of its own cgroup · balloon: its monitor
//! ```
//!
//! What its owner sets is respected: a vCPU that may not run on all CPUs of its cgroup is pinned by hand, a cgroup that is not
//! the VM's alone is not written to, and a monitor is left as soon as its answer is there. There is no place for a mark: the
//! journal is the only witness.

mod command_line;
mod monitor;
mod options;
mod processes;
mod seen;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use homenode_host::{CpuQuota, GuestMemory, HostError, Immovable};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, VmId};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::cgroup::{CpuGroup, CpuMax, Hierarchy};
use crate::clock::now;
use crate::domain::{Change, Domain};
use crate::journal::Run;
use crate::manager::{CallError, Manager};
use crate::read::ReadError;
use crate::settings_file::{self, Whose};
use crate::task::{self, Process, Role, Tasks, Thread};
use crate::vm;
use command_line::Told;
use monitor::{Command, MonitorError};

/// How often all processes are looked through for new VMs.
const SCAN_EVERY: Ns = Ns::from_secs(3);
/// How often a VM's state and balloon are asked for.
const ASK_EVERY: Ns = Ns::from_secs(2);
/// How often its settings and what its owner leaves it are looked up.
const LOOK_EVERY: Ns = Ns::from_secs(10);
/// How long a monitor that was of no use is left in peace.
const PATIENCE: Ns = Ns::from_secs(5);
const ENDED: &str = "its QEMU has ended";

/// The VMs of a host, found by their processes.
#[derive(Debug)]
pub(crate) struct Qemu {
    root: PathBuf,
    /// Where control groups are mounted, as of the last scan.
    groups: Option<Hierarchy>,
    /// CPUs of the host's first process, as of the last scan.
    ordinary: Option<CpuSet>,
    vms: BTreeMap<VmId, Vm>,
    next_scan: Ns,
    scan_count: i32,
    /// Processes that run no VM, ascending, and how often that was looked at.
    others: Vec<(i32, u8)>,
    notices: Vec<String>,
}

/// A QEMU that runs a VM.
#[derive(Debug)]
struct Vm {
    process: Process,
    tasks: Tasks,
    /// The users whose rights it has or may take.
    users: [u32; 4],
    name: String,
    /// Why it cannot be told whose name and UUID these are, where another process claims them, too.
    claimed: Option<String>,
    told: Told,
    described: Arc<Domain>,
    /// When it is to be described anew.
    next_look: Ns,
    heard: Heard,
}

/// What its monitor said last.
#[derive(Clone, Debug, Default, PartialEq)]
struct Heard {
    next: Ns,
    standstill: Option<Immovable>,
    balloon: Option<Bytes>,
    /// Where the balloon is among QEMU's objects, once it was looked for.
    balloon_path: Option<String>,
    /// What threads without a name of their own do, by their number on this host.
    roles: BTreeMap<i32, Role>,
    next_roles: Ns,
}

/// A VM that no libvirt of this host manages, and what of it cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuVm {
    /// Its name.
    pub name: String,
    /// Why it can have no CPU quota, if so.
    pub no_quota: Option<String>,
    /// Why neither its state is known nor its balloon set, if so.
    pub no_monitor: Option<String>,
}

/// The VMs below a root that no libvirt manages.
pub fn vms(root: &Path) -> Vec<QemuVm> {
    let mut qemu = Qemu::new(root);
    // What cannot be listed is not there.
    let listed = qemu.list().unwrap_or_default();
    let looked = listed.into_iter().filter_map(|vm| {
        let known = qemu.vms.get(&vm)?;
        Some(QemuVm {
            name: known.name.clone(),
            no_quota: qemu.own_group(known.process.pid).err(),
            no_monitor: qemu.ask(vm, &[]).err().map(|error| error.to_string()),
        })
    });
    looked.collect()
}

impl Qemu {
    /// VMs below a root (`/`).
    pub fn new(root: &Path) -> Qemu {
        Qemu {
            root: root.to_owned(),
            groups: None,
            ordinary: None,
            vms: BTreeMap::new(),
            next_scan: Ns::ZERO,
            scan_count: 0,
            others: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// What is to be known of a VM; `before` is what was known, and keeps what was true when it was first seen.
    fn domain(
        &self,
        id: VmId,
        (name, claimed): (&str, Option<&str>),
        process: Process,
        told: &Told,
        before: Option<(&Domain, &Heard)>,
    ) -> Domain {
        let current = before.and_then(|(_, heard)| heard.balloon).unwrap_or(told.memory);
        let cpuset = self.allowed(process.pid);
        let emulator_pin = match before {
            Some((domain, _)) => domain.emulator_pin.clone(),
            None => {
                let main = task::affinity(&self.root, process.pid, process.pid)
                    .ok()
                    .flatten();
                let is_known = cpuset.is_some() || self.ordinary.is_some();
                main.filter(|affinity| is_known && !self.is_free(cpuset.as_ref(), affinity))
            }
        };
        Domain {
            id,
            name: name.to_owned(),
            runtime_id: u32::try_from(process.pid).ok(),
            memory_kib: told.memory.0 / 1024,
            memory_current_bytes: current,
            vcpus_current: told.vcpus,
            cpuset,
            placed_by_advice: false,
            vcpu_pins: BTreeMap::new(),
            emulator_pin,
            iothread_pins: BTreeMap::new(),
            iothreads: Vec::new(),
            numatune: None,
            binding: told.binding.clone(),
            huge_pages: told.huge_pages,
            locked: told.locked,
            encrypted: told.encrypted.clone(),
            balloon: told.balloon.filter(|_| !told.monitors.is_empty()),
            free_pages: told.free_pages,
            cells: told.cells.clone(),
            topology_socket: told.topology_socket.clone(),
            ram_sizes: told.ram_sizes.clone(),
            assigned_devices: told.assigned_devices.clone(),
            settings: match claimed {
                Some(why) => Err(why.to_owned()),
                None => self.with_names(id, name, |whose| settings_file::read(&self.root, whose)),
            },
            mark: None,
        }
    }

    /// Has something done for a VM that knows which other VMs have its name.
    fn with_names<T>(&self, vm: VmId, name: &str, done: impl FnOnce(Whose<'_>) -> T) -> T {
        // One whose name is disputed has no settings: root's VM keeps its own.
        let has_it = |(id, other): &(&VmId, &Vm)| **id != vm && other.name == name && other.claimed.is_none();
        let others = self.vms.iter().filter(has_it);
        let namesakes: Vec<VmId> = others.map(|(id, _)| *id).collect();
        done(Whose {
            vm,
            name,
            namesakes: &namesakes,
        })
    }

    /// Whether a thread has these CPUs without having been pinned: they are all that its cgroup leaves it, or all of the host's
    /// first process, which every program inherits (`isolcpus=`, systemd's `CPUAffinity=`).
    fn is_free(&self, allowed: Option<&CpuSet>, cpus: &CpuSet) -> bool {
        let bounds = [allowed, self.ordinary.as_ref()];
        bounds.into_iter().flatten().any(|bound| bound.is_subset(cpus))
    }

    /// CPUs that the owner of its cgroup leaves it, where that is to be seen.
    fn allowed(&self, pid: i32) -> Option<CpuSet> {
        self.groups.as_ref()?.cpuset_of(pid).ok()?.cpus
    }

    fn vm(&self, vm: VmId) -> Result<&Vm, CallError> {
        let known = self
            .vms
            .get(&vm)
            .filter(|vm| task::is_alive(&self.root, vm.process));
        known.ok_or_else(|| CallError::Refused(ENDED.to_owned()))
    }

    /// Asks a VM's monitor; the first that is its own and free.
    fn ask(&self, vm: VmId, commands: &[Command]) -> Result<Vec<Value>, MonitorError> {
        let none = MonitorError::Broken {
            path: "(none)".to_owned(),
            cause: "it was started without one; start it with `-qmp unix:/run/…,server=on,wait=off`"
                .to_owned(),
        };
        let Some(known) = self.vms.get(&vm) else {
            return Err(none);
        };
        let mut why = none;
        for path in &known.told.monitors {
            match monitor::ask(&self.root, known.process.pid, path, commands) {
                Err(error @ MonitorError::Refused { .. }) => return Err(error),
                Err(error) => why = error,
                Ok(answers) => return Ok(answers),
            }
        }
        Err(why)
    }

    /// The same for a change.
    fn command(&self, vm: VmId, command: Command) -> Result<Value, CallError> {
        self.vm(vm)?;
        let answers = self
            .ask(vm, &[command])
            .map_err(|e| CallError::Refused(e.to_string()))?;
        Ok(answers.into_iter().next().unwrap_or(Value::Null))
    }

    /// Something of a VM was just changed: it is described anew next time.
    fn look_soon(&mut self, vm: VmId) {
        if let Some(known) = self.vms.get_mut(&vm) {
            (known.next_look, known.heard.next) = (Ns::ZERO, Ns::ZERO);
        }
    }

    /// Hears a VM's monitor again, where that is due; whether it says something else.
    fn hear(&mut self, id: VmId) -> bool {
        let at = now();
        let Some(vm) = self
            .vms
            .get(&id)
            .filter(|vm| at >= vm.heard.next && !vm.told.monitors.is_empty())
        else {
            return false;
        };
        let before = vm.heard.balloon;
        let mut commands = vec![("query-status", json!({})), ("query-migrate", json!({}))];
        if vm.told.balloon.is_some() {
            commands.push(("query-balloon", json!({})));
        }
        let heard = self.ask(id, &commands);
        let Some(vm) = self.vms.get_mut(&id) else {
            return false;
        };
        match heard {
            Ok(answers) => {
                let text = |at: usize| answers.get(at).and_then(|answer| answer.get("status")?.as_str());
                vm.heard.standstill = standstill(text(0), text(1));
                let balloon = answers.get(2).and_then(|answer| answer.get("actual")?.as_u64());
                vm.heard.balloon = balloon
                    .map(Bytes)
                    .filter(|bytes| bytes.0 > 0 && *bytes <= vm.told.memory);
                vm.heard.next = at + ASK_EVERY;
            }
            Err(error) => {
                vm.heard.next = at + PATIENCE;
                // One that is in use now is free in a moment, and nobody needs to know.
                if !matches!(error, MonitorError::Busy { .. }) {
                    self.notices.push(format!(
                        "what VM {} does is not known to the end: {error}",
                        vm.name
                    ));
                }
            }
        }
        vm.heard.balloon != before
    }

    /// What threads do that bear no names, by what the monitor says.
    fn roles_told(&mut self, vm: VmId, threads: &[Thread]) -> BTreeMap<i32, Role> {
        let at = now();
        let Some(known) = self.vms.get(&vm).filter(|vm| at >= vm.heard.next_roles) else {
            return self
                .vms
                .get(&vm)
                .map(|vm| vm.heard.roles.clone())
                .unwrap_or_default();
        };
        let pid = known.process.pid;
        let asked = self.ask(vm, &[("query-cpus-fast", json!({}))]);
        let roles = asked.map(|answers| {
            let cpus = answers
                .first()
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default();
            let inner = cpus.iter().filter_map(|cpu| {
                let index = u16::try_from(cpu.get("cpu-index")?.as_u64()?).ok()?;
                Some((i32::try_from(cpu.get("thread-id")?.as_u64()?).ok()?, index))
            });
            let inner: BTreeMap<i32, u16> = inner.collect();
            // It counts its threads as its own namespace does.
            let role = |thread: &Thread| {
                let told = task::innermost_id(&self.root, pid, thread.tid)?;
                Some((thread.tid, Role::Vcpu(*inner.get(&told)?)))
            };
            threads
                .iter()
                .filter(|thread| thread.tid != pid)
                .filter_map(role)
                .collect()
        });
        let Some(known) = self.vms.get_mut(&vm) else {
            return BTreeMap::new();
        };
        known.heard.next_roles = at + PATIENCE;
        match roles {
            Ok(roles) => known.heard.roles = roles,
            Err(error) => self.notices.push(format!(
                "which threads run the vCPUs of VM {} is not known: they bear no names (start it with `-name {},debug-threads=on`), and {error}",
                known.name, known.name
            )),
        }
        known.heard.roles.clone()
    }

    /// Has threads run on these CPUs.
    fn pin(&self, tids: &[i32], cpus: &CpuSet) -> Result<(), CallError> {
        let mut set = rustix::thread::CpuSet::new();
        for cpu in cpus.iter() {
            let index = cpu.0 as usize;
            if index >= rustix::thread::CpuSet::MAX_CPU {
                return Err(CallError::Refused(format!(
                    "CPU {cpu} is beyond what can be pinned to"
                )));
            }
            set.set(index);
        }
        for tid in tids {
            match rustix::thread::sched_setaffinity(Pid::from_raw(*tid), &set) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(CallError::Refused(format!("thread {tid}: {error}"))),
            }
        }
        Ok(())
    }

    fn threads_of(&mut self, vm: VmId) -> Result<(Process, Vec<Thread>), CallError> {
        let process = self.vm(vm)?.process;
        let run = Run {
            vm,
            name: String::new(),
            runtime_id: 0,
            pid: process.pid,
            start_ticks: process.start_ticks,
        };
        let threads = self
            .threads(&run)
            .map_err(|e| CallError::Refused(e.to_string()))?;
        Ok((process, threads))
    }

    /// Where its balloon is among QEMU's objects.
    fn balloon_path(&mut self, vm: VmId) -> Result<String, CallError> {
        if let Some(path) = self.vm(vm)?.heard.balloon_path.clone() {
            return Ok(path);
        }
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let listed = self.command(vm, ("qom-list", json!({"path": folder})))?;
            let is_balloon = |entry: &&Value| {
                let kind = entry.get("type").and_then(Value::as_str);
                kind.is_some_and(|kind| kind.starts_with("child<virtio-balloon"))
            };
            let found = listed
                .as_array()
                .and_then(|all| all.iter().find(is_balloon)?.get("name")?.as_str());
            if let Some(name) = found {
                let path = format!("{folder}/{name}");
                if let Some(known) = self.vms.get_mut(&vm) {
                    known.heard.balloon_path = Some(path.clone());
                }
                return Ok(path);
            }
        }
        Err(CallError::Refused("it has no balloon".to_owned()))
    }

    /// Its cgroup, where it is alone there and has a quota.
    fn own_group(&self, pid: i32) -> Result<CpuGroup, String> {
        let groups = self
            .groups
            .as_ref()
            .ok_or("where cgroups are mounted is not known")?;
        let group = groups.group_of(pid, pid).map_err(|e| e.to_string())?;
        let group = group.ok_or_else(|| "its cgroup is not to be seen from here".to_owned())?;
        group.check_own(&self.root, pid)?;
        Ok(group)
    }
}

fn set_max(groups: &[CpuGroup], max: CpuMax) -> Result<(), CallError> {
    let mut set = groups.iter().map(|group| group.set_max(max));
    set.try_for_each(|result| result.map_err(CallError::Refused))
}

/// Why memory should be left where it is, by what a monitor says of run and migration.
fn standstill(run: Option<&str>, migration: Option<&str>) -> Option<Immovable> {
    let is_over = |status: &str| matches!(status, "none" | "completed" | "failed" | "cancelled");
    if migration.is_some_and(|status| !is_over(status)) {
        return Some(Immovable::Migrating);
    }
    match run? {
        "inmigrate" | "finish-migrate" | "postmigrate" => Some(Immovable::Migrating),
        "running" | "debug" | "watchdog" | "colo" => None,
        _ => Some(Immovable::Paused),
    }
}

impl Manager for Qemu {
    fn list(&mut self) -> Result<Vec<VmId>, CallError> {
        self.vms.retain(|_, vm| vm.tasks.is_alive(vm.process));
        if now() >= self.next_scan {
            self.scan(false)?;
            self.next_scan = now() + SCAN_EVERY;
        }
        Ok(self.vms.keys().copied().collect())
    }

    fn describe(&mut self, vm: VmId) -> Result<Arc<Domain>, CallError> {
        let at = now();
        let ended = || CallError::Refused(ENDED.to_owned());
        let has_heard = self.hear(vm);
        let known = self.vms.get(&vm).ok_or_else(ended)?;
        if at < known.next_look && !has_heard {
            return Ok(Arc::clone(&known.described));
        }
        let before = Some((known.described.as_ref(), &known.heard));
        let who = (known.name.as_str(), known.claimed.as_deref());
        let described = self.domain(vm, who, known.process, &known.told, before);
        let known = self.vms.get_mut(&vm).ok_or_else(ended)?;
        known.next_look = at + LOOK_EVERY;
        if described != *known.described {
            known.described = Arc::new(described);
        }
        Ok(Arc::clone(&known.described))
    }

    fn process(&mut self, domain: &Domain) -> Result<Option<Process>, ReadError> {
        Ok(self.vms.get(&domain.id).map(|vm| vm.process))
    }

    fn threads(&mut self, run: &Run) -> Result<Vec<Thread>, ReadError> {
        let mut threads = task::threads(&self.root, run.pid)?;
        self.roles(run, &mut threads);
        Ok(threads)
    }

    fn roles(&mut self, run: &Run, threads: &mut [Thread]) {
        if threads.iter().any(|thread| matches!(thread.role, Role::Vcpu(_))) {
            return;
        }
        let roles = self.roles_told(run.vm, threads);
        for thread in threads {
            thread.role = roles.get(&thread.tid).copied().unwrap_or(thread.role);
        }
    }

    fn pins(&mut self, _domain: &Domain, threads: &[Thread]) -> BTreeMap<u16, CpuSet> {
        vm::affinities(threads).collect()
    }

    fn is_unpinned(&self, domain: &Domain, cpus: &CpuSet) -> bool {
        self.is_free(domain.cpuset.as_ref(), cpus)
    }

    fn shows_affinities(&self) -> bool {
        true
    }

    fn vcpus_inherit(&self) -> bool {
        true
    }

    /// By the journal's own process, whatever that is called by now, and whoever else claims its name: from here on the VM is
    /// this process.
    fn knows(&mut self, run: &Run) -> Result<bool, CallError> {
        let is_known = |vm: &Vm| vm.process == run.process();
        if !self.vms.get(&run.vm).is_some_and(is_known) {
            self.take_on(run)?;
        }
        Ok(self.vms.get(&run.vm).is_some_and(is_known))
    }

    fn is_gone(&mut self, vm: VmId) -> bool {
        self.vm(vm).is_err()
    }

    fn standstill(&mut self, vm: VmId) -> Result<Option<Immovable>, CallError> {
        let known = self
            .vms
            .get(&vm)
            .ok_or_else(|| CallError::Refused(ENDED.to_owned()))?;
        Ok(known.heard.standstill.clone())
    }

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError> {
        let (_, threads) = self.threads_of(vm)?;
        let thread = threads.iter().find(|thread| thread.role == Role::Vcpu(index));
        let thread = thread.ok_or_else(|| CallError::Refused("it has no thread".to_owned()))?;
        self.pin(&[thread.tid], cpus)
    }

    /// All threads but the vCPUs': those that the first one starts run where it does. One that somebody else pinned is left.
    fn pin_emulator(&mut self, vm: VmId, cpus: &CpuSet) -> Result<(), CallError> {
        let (process, threads) = self.threads_of(vm)?;
        let main = threads.iter().find(|thread| thread.tid == process.pid);
        let Some(before) = main.map(|thread| thread.affinity.clone()) else {
            return Err(CallError::Refused("it has no threads".to_owned()));
        };
        let helps = |thread: &&Thread| !matches!(thread.role, Role::Vcpu(_)) && thread.affinity == before;
        let tids: Vec<i32> = threads.iter().filter(helps).map(|thread| thread.tid).collect();
        self.pin(&tids, cpus)
    }

    fn pin_iothread(&mut self, _vm: VmId, _id: u32, _cpus: &CpuSet) -> Result<(), CallError> {
        Err(CallError::Refused(
            "I/O threads go where the emulator goes".to_owned(),
        ))
    }

    fn set_memory_nodes(&mut self, _vm: VmId, _nodes: &NodeSet) -> Result<(), CallError> {
        Err(CallError::Refused(
            "QEMU cannot change what its memory is bound to".to_owned(),
        ))
    }

    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError> {
        let known = self.vm(vm)?;
        if let Some(why) = &known.claimed {
            return Err(CallError::Refused(why.clone()));
        }
        let name = known.name.clone();
        self.look_soon(vm);
        self.with_names(vm, &name, |whose| {
            settings_file::change(&self.root, whose, change)
        })
        .map_err(CallError::Refused)
    }

    /// A process carries nothing that could be one.
    fn set_mark(&mut self, _vm: VmId, _element: Option<&str>) -> Result<(), CallError> {
        Ok(())
    }

    fn check_groups(&self, vm: VmId, groups: &[CpuGroup]) -> Result<(), String> {
        let known = self.vms.get(&vm).ok_or(ENDED)?;
        groups
            .iter()
            .try_for_each(|group| group.check_own(&self.root, known.process.pid))
    }

    fn hold(&mut self, _vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError> {
        set_max(groups, CpuMax::Quota(quota))
    }

    fn lift(&mut self, _vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError> {
        set_max(held, before.map_or(CpuMax::Unlimited, CpuMax::Quota))
    }

    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<(), CallError> {
        self.command(vm, ("balloon", json!({"value": memory.0})))
            .map(drop)?;
        self.look_soon(vm);
        Ok(())
    }

    fn set_stats_period(&mut self, vm: VmId, seconds: u32) -> Result<(), CallError> {
        let path = self.balloon_path(vm)?;
        let arguments = json!({"path": path, "property": "guest-stats-polling-interval", "value": seconds});
        self.command(vm, ("qom-set", arguments)).map(drop)
    }

    fn guest_memory(&mut self, vm: VmId) -> Result<Option<(u64, GuestMemory)>, CallError> {
        let path = self.balloon_path(vm)?;
        let said = self.command(vm, ("qom-get", json!({"path": path, "property": "guest-stats"})))?;
        let spoke = said
            .get("last-update")
            .and_then(Value::as_u64)
            .filter(|seconds| *seconds > 0);
        // What the guest does not say is the largest number there is.
        let value = |name: &str| {
            said.get("stats")?
                .get(name)?
                .as_u64()
                .filter(|value| *value != u64::MAX)
        };
        let bytes = |name: &str| value(name).map(Bytes);
        let memory = GuestMemory {
            age: None,
            total: bytes("stat-total-memory"),
            usable: bytes("stat-available-memory"),
            unused: bytes("stat-free-memory"),
            swapped_in: bytes("stat-swap-in"),
            swapped_out: bytes("stat-swap-out"),
            major_faults: value("stat-major-faults"),
        };
        Ok(spoke.map(|stamp_s| (stamp_s, memory)))
    }

    fn unreachable(&self, cause: &str) -> HostError {
        HostError::Unreachable {
            service: "the host's list of processes".to_owned(),
            cause: cause.to_owned(),
        }
    }

    fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }
}

#[cfg(test)]
mod tests;

//! VMs managed by QEMU without libvirt: Proxmox, Incus, KubeVirt's pods as seen from their host, plain QEMU.
//!
//! ```text
//!   /proc/PID/cmdline ─ its options ─────────────┐
//!   its settings file ─ its operator's settings ─┼─▶ Domain
//!   its monitor (QMP) ─ state, balloon ──────────┘   asked by a separate thread: [`asker`]
//!   pins: sched_setaffinity(2) · quota: cpu.max of its own cgroup · balloon: its monitor
//! ```
//!
//! The VM owner's own settings are respected. A vCPU that may not run on all CPUs of its cgroup counts as pinned by hand. A
//! cgroup that the VM shares is not written to. The agent disconnects from a monitor as soon as it has the answer. A process has
//! no place for a mark, so the journal is the only record of changes.
//!
//! Sampling a VM never waits for its monitor. Commands do wait, for a short time that all VMs share. Everything except the
//! balloon is restored without the monitor: threads are found by their names, or in the journal.

mod asker;
mod command_line;
mod hearing;
mod monitor;
mod options;
mod processes;
mod questions;
mod seen;
mod visits;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use homenode_host::{CpuQuota, GuestMemory, HostError, Immovable};
use homenode_kernel::cgroup::{CpuGroup, CpuMax, GroupError, Hierarchy};
use homenode_kernel::now;
use homenode_kernel::read::{self, ReadError};
use homenode_kernel::task::{self, Process, Role, Tasks, Thread};
use homenode_undo::journal::{Run, VcpuThread};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, VmId};
use homenode_vm_settings::Change;
use homenode_vm_settings::file::{self, Whose};
use serde_json::{Value, json};

use crate::domain::{Domain, NoSettings};
use crate::manager::{CallError, Manager};
use crate::vm;
use asker::Asker;
use command_line::Told;
use hearing::Heard;

/// How often to look through all processes for new VMs.
const SCAN_EVERY: Ns = Ns::from_secs(3);
/// How often to read a VM's settings and the CPUs that its owner's cgroup leaves it.
const LOOK_EVERY: Ns = Ns::from_secs(10);
/// Time for all monitor commands from one sample of the host to the next: a tenth of a usual period.
const COMMANDS_MAX: Ns = Ns(100_000_000);
/// Time for all commands while restoring, when no sample waits for them.
const RESTORING_MAX: Ns = Ns::from_secs(2);
/// Time in which all monitors must answer one question (`doctor`).
const EXAMINING_MAX: Duration = Duration::from_secs(1);
const ENDED: &str = "the VM's QEMU has ended";

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
    /// Processes that run no VM, ascending, and how many times each was looked at.
    others: Vec<(i32, u8)>,
    notices: Vec<String>,
    asker: Asker,
    /// Whether to ask all monitors regularly. If not, a monitor is asked only if restoring needs it.
    is_asking: bool,
    /// Time left for monitor commands.
    time_left: Ns,
}

/// A QEMU that runs a VM.
#[derive(Debug)]
struct Vm {
    process: Process,
    tasks: Tasks,
    /// The users whose rights the process has or can take.
    users: [u32; 4],
    name: String,
    /// Why the VM's name and UUID are disputed, if another process claims them too.
    claimed: Option<String>,
    told: Told,
    described: Arc<Domain>,
    /// When to describe the VM again.
    next_look: Ns,
    heard: Heard,
}

/// A VM that no libvirt of this host manages, and what cannot be changed on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuVm {
    /// The VM's name.
    pub name: String,
    /// Why the VM can have no CPU quota; `None` if it can.
    pub no_quota: Option<String>,
    /// Why the VM's state is unknown and its balloon cannot be set; `None` if its monitor answers.
    pub no_monitor: Option<String>,
}

/// Whether any VM that no libvirt manages runs below `root`.
pub(crate) fn has_vms(root: &Path) -> bool {
    let listed = Qemu::for_restoring(root).list();
    listed.is_ok_and(|listed| !listed.is_empty())
}

/// Returns the VMs below `root` that no libvirt manages. Asks all monitors at the same time, and waits once for all answers.
pub fn vms(root: &Path) -> Vec<QemuVm> {
    let mut qemu = Qemu::new(root);
    // If the list cannot be read, there are no VMs.
    let listed = qemu.list().unwrap_or_default();
    let has_monitor = |vm: &&VmId| {
        qemu.vms
            .get(vm)
            .is_some_and(|known| !known.told.monitors.is_empty())
    };
    let asked: Vec<VmId> = listed.iter().filter(has_monitor).copied().collect();
    qemu.asker.wait_for(&asked, EXAMINING_MAX);
    let looked = listed.into_iter().filter_map(|vm| {
        qemu.hear(vm);
        let known = qemu.vms.get(&vm)?;
        Some(QemuVm {
            name: known.name.clone(),
            no_quota: qemu.own_group(known.process.pid).err().map(|e| e.to_string()),
            no_monitor: known.no_monitor(),
        })
    });
    looked.collect()
}

impl Qemu {
    /// Creates the manager of the VMs below a root (`/`).
    pub(crate) fn new(root: &Path) -> Qemu {
        Qemu {
            root: root.to_owned(),
            groups: None,
            ordinary: None,
            vms: BTreeMap::new(),
            next_scan: Ns::ZERO,
            scan_count: 0,
            others: Vec::new(),
            notices: Vec::new(),
            asker: Asker::new(root),
            is_asking: true,
            time_left: COMMANDS_MAX,
        }
    }

    /// Creates a manager for restoring an agent's changes: it asks a monitor only if nothing else works.
    pub(crate) fn for_restoring(root: &Path) -> Qemu {
        Qemu {
            is_asking: false,
            ..Qemu::new(root)
        }
    }

    /// Describes a VM. `before` is the last description and, if known, the memory that the balloon leaves the VM. Facts that are
    /// only true when a VM is first seen are kept from `before`.
    fn domain(
        &self,
        id: VmId,
        (name, claimed): (&str, Option<&str>),
        process: Process,
        told: &Told,
        before: Option<(&Domain, Option<Bytes>)>,
    ) -> Domain {
        let balloon = before.and_then(|(_, balloon)| balloon);
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
            memory_current_bytes: balloon.unwrap_or(told.memory),
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
            // While the balloon's size is unknown, the VM counts as having no balloon: its size could not be restored.
            balloon: told.balloon.filter(|_| balloon.is_some()),
            free_pages: told.free_pages,
            cells: told.cells.clone(),
            topology_socket: told.topology_socket.clone(),
            ram_sizes: told.ram_sizes.clone(),
            assigned_devices: told.assigned_devices.clone(),
            settings: match claimed {
                Some(why) => Err(NoSettings::Disputed(why.to_owned())),
                None => {
                    let read = self.with_names(id, name, |whose| file::read(&self.root, whose));
                    read.map_err(NoSettings::from)
                }
            },
            mark: None,
        }
    }

    /// Runs a closure with a VM's identity and the other VMs of the same name.
    fn with_names<T>(&self, vm: VmId, name: &str, done: impl FnOnce(Whose<'_>) -> T) -> T {
        // A VM whose name is disputed has no settings, so that root's VM keeps its own.
        let has_it = |(id, other): &(&VmId, &Vm)| **id != vm && other.name == name && other.claimed.is_none();
        let others = self.vms.iter().filter(has_it);
        let namesakes: Vec<VmId> = others.map(|(id, _)| *id).collect();
        done(Whose {
            vm,
            name,
            namesakes: &namesakes,
            keeps_uuid: true,
        })
    }

    /// Whether a thread with these CPUs is unpinned: it has all CPUs of its cgroup, or all of the host's first process, whose
    /// affinity every program inherits (`isolcpus=`, systemd's `CPUAffinity=`).
    fn is_free(&self, allowed: Option<&CpuSet>, cpus: &CpuSet) -> bool {
        let bounds = [allowed, self.ordinary.as_ref()];
        bounds.into_iter().flatten().any(|bound| bound.is_subset(cpus))
    }

    /// Returns the CPUs of the process's cgroup, if known.
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

    /// Pins threads to these CPUs.
    fn pin(&self, tids: &[i32], cpus: &CpuSet) -> Result<(), CallError> {
        for tid in tids {
            match task::set_affinity(*tid, cpus) {
                Err(error) if !read::is_absence(&error) => {
                    return Err(CallError::Refused(format!("thread {tid}: {error}")));
                }
                _ => {}
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

    /// Returns the VM's cgroup, if no other process is in it and it can have a quota.
    fn own_group(&self, pid: i32) -> Result<CpuGroup, CallError> {
        let no = |why: &str| CallError::Refused(why.to_owned());
        let groups = self.groups.as_ref();
        let groups = groups.ok_or_else(|| no("cannot tell where cgroups are mounted"))?;
        let group = groups.group_of(pid, pid).map_err(GroupError::from)?;
        let group = group.ok_or_else(|| no("the VM's cgroup is not visible from here"))?;
        group.check_own(&self.root, pid)?;
        Ok(group)
    }
}

fn set_max(groups: &[CpuGroup], max: CpuMax) -> Result<(), CallError> {
    Ok(groups.iter().try_for_each(|group| group.set_max(max))?)
}

impl Manager for Qemu {
    fn list(&mut self) -> Result<Vec<VmId>, CallError> {
        self.time_left = COMMANDS_MAX;
        self.vms.retain(|_, vm| vm.tasks.is_alive(vm.process));
        if now() >= self.next_scan {
            self.scan(false)?;
            self.next_scan = now() + SCAN_EVERY;
        }
        self.asker.keep_only(|vm| self.vms.contains_key(&vm));
        let listed: Vec<VmId> = self.vms.keys().copied().collect();
        if self.is_asking {
            listed.iter().for_each(|vm| self.watch(*vm));
        }
        Ok(listed)
    }

    fn describe(&mut self, vm: VmId) -> Result<Arc<Domain>, CallError> {
        let at = now();
        let ended = || CallError::Refused(ENDED.to_owned());
        self.hear(vm);
        let known = self.vms.get(&vm).ok_or_else(ended)?;
        if at < known.next_look && known.is_as_described() {
            return Ok(Arc::clone(&known.described));
        }
        let before = Some((known.described.as_ref(), known.balloon()));
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
        self.roles_told(run.vm, threads);
        let Some(known) = self.vms.get(&run.vm) else {
            return;
        };
        for thread in threads.iter_mut().filter(|thread| thread.tid != run.pid) {
            if let Some((_, index)) = known.heard.vcpus.get(&thread.tid) {
                thread.role = Role::Vcpu(*index);
            }
        }
    }

    fn told_vcpus(&self, vm: VmId) -> BTreeMap<u16, VcpuThread> {
        let told = self.vms.get(&vm).map(|known| known.heard.vcpus.values());
        told.into_iter()
            .flatten()
            .map(|(thread, index)| (*index, *thread))
            .collect()
    }

    fn recall_vcpus(&mut self, run: &Run, vcpus: &BTreeMap<u16, VcpuThread>) {
        let its = |vm: &&mut Vm| vm.process == run.process() && vm.heard.vcpus.is_empty();
        if let Some(known) = self.vms.get_mut(&run.vm).filter(its) {
            known.heard.vcpus = vcpus
                .iter()
                .map(|(index, vcpu)| (vcpu.tid, (*vcpu, *index)))
                .collect();
            known.heard.next_check = Ns::ZERO;
        }
    }

    fn take_time(&mut self) {
        self.time_left = RESTORING_MAX;
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

    /// Finds the run by the process in the journal, even if its name has changed or another process claims it. From here on, this
    /// process is the VM.
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
        Ok(known.heard.said.heard.standstill.clone())
    }

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError> {
        let (_, threads) = self.threads_of(vm)?;
        let thread = threads.iter().find(|thread| thread.role == Role::Vcpu(index));
        let thread = thread.ok_or_else(|| CallError::Refused("it has no thread".to_owned()))?;
        self.pin(&[thread.tid], cpus)
    }

    /// Pins the threads other than vCPUs' that have the main thread's CPUs, since new threads inherit these. A thread that
    /// another program pinned elsewhere stays there.
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
            "I/O threads are pinned together with the emulator".to_owned(),
        ))
    }

    fn set_memory_nodes(&mut self, _vm: VmId, _nodes: &NodeSet) -> Result<(), CallError> {
        Err(CallError::Refused(
            "QEMU cannot change the nodes that its memory is bound to".to_owned(),
        ))
    }

    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError> {
        let known = self.vm(vm)?;
        if let Some(why) = &known.claimed {
            return Err(CallError::Refused(why.clone()));
        }
        let name = known.name.clone();
        self.look_soon(vm);
        self.with_names(vm, &name, |whose| file::change(&self.root, whose, change))
            .map_err(|e| CallError::Refused(e.to_string()))
    }

    /// A process has no place for a mark.
    fn set_mark(&mut self, _vm: VmId, _element: Option<&str>) -> Result<(), CallError> {
        Ok(())
    }

    fn check_groups(&self, vm: VmId, groups: &[CpuGroup]) -> Result<(), CallError> {
        let ended = || CallError::Refused(ENDED.to_owned());
        let pid = self.vms.get(&vm).ok_or_else(ended)?.process.pid;
        Ok(groups
            .iter()
            .try_for_each(|group| group.check_own(&self.root, pid))?)
    }

    fn hold(&mut self, _vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError> {
        set_max(groups, CpuMax::Quota(quota))
    }

    fn lift(&mut self, _vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError> {
        set_max(held, before.map_or(CpuMax::Unlimited, CpuMax::Quota))
    }

    fn memory_now(&mut self, vm: VmId) -> Result<Bytes, CallError> {
        let said = self.command(vm, ("query-balloon", json!({})))?;
        let actual = said.get("actual").and_then(Value::as_u64);
        let unclear = || {
            CallError::Unclear(
                "the VM's monitor does not say how much memory the balloon leaves the VM".to_owned(),
            )
        };
        actual.map(Bytes).ok_or_else(unclear)
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
        self.hear(vm);
        self.want(vm, |wants| wants.guest = true);
        let heard = &self.vm(vm)?.heard.said.heard;
        let age = Some(now().saturating_sub(heard.at));
        Ok(heard
            .guest
            .map(|(stamp_s, memory)| (stamp_s, GuestMemory { age, ..memory })))
    }

    fn unreachable(&self, cause: &str) -> HostError {
        HostError::Unreachable {
            service: "the host's list of processes".to_owned(),
            cause: cause.to_owned(),
        }
    }

    fn take_notices(&mut self) -> Vec<String> {
        self.notices.extend(self.asker.take_notices());
        std::mem::take(&mut self.notices)
    }
}

#[cfg(test)]
mod tests;

//! A real KVM host behind the host contract.
//!
//! Every change to a VM goes through its manager, such as libvirt, so that the manager's view of the VM stays true. Only pages
//! are moved without it, with `move_pages(2)`, because libvirt has no throttled call for that. Settings are read back from the
//! kernel. In resctrl, only the agent's own groups are written.
//!
//! ```text
//!   sample ─ VMs and their settings (their manager) ─ threads, cgroups, numa_maps (/proc) ─ perf, uncore ─▶ Sample
//!   commit ─ Plan::check ─ as sampled? ─ journal ─ act ─ read back ─▶ Receipt
//! ```

mod commit;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use homenode_host::{
    ActionError, Balloons, CPUS_SETTLE, CountedBy, CpuSample, Failure, HandsOff, Holds, Host, HostError,
    KernelSettings, NodeSample, Plan, Receipt, Refusal, Sample, Setting, VmSample,
};
use homenode_kernel::attribution::{Attribution, Sampler};
use homenode_kernel::cgroup::Hierarchy;
use homenode_kernel::ibs::{self, Ibs};
use homenode_kernel::memory_blocks::MemoryBlocks;
use homenode_kernel::perf::{Perf, Selection};
use homenode_kernel::resctrl::Resctrl;
use homenode_kernel::uncore::{self, Uncore};
use homenode_kernel::{
    kernel_settings, meminfo, memory_blocks, modelled_pmu, now, proc_stat, read, task, trackers,
};
use homenode_machine::Machine;
use homenode_undo::acting::{self, Leases, RightToAct};
use homenode_undo::{Acting, CarriedOver, Options, RealHost, Undone, journal};
use homenode_units::{Bytes, CpuId, CpuSet, Migration, NodeMap, Ns, VmId};
use homenode_vm_settings::Change;

use crate::connect::{ConnectError, Vms};
use crate::context::HostContext;
use crate::leftovers;
use crate::levers::{self, Home, Moving, Pins};
use crate::manager::CallError;
use crate::topology_pages::TopologyPages;
use crate::vm::{Levers, Vm};
use commit::Fingerprint;

/// A host that runs VMs under KVM.
pub struct KvmHost {
    context: HostContext,
    right: RightToAct,
    /// What an earlier agent had in force when this agent started.
    carried: BTreeMap<VmId, journal::Entry>,
    cgroups: Hierarchy,
    perf: Perf,
    /// The PMU model of an emulated host without a PMU.
    modelled: Option<Attribution>,
    /// The processor's sampling of pages, or why there is none.
    ibs: Result<Ibs, String>,
    uncore: Uncore,
    resctrl: Option<Resctrl>,
    vms: BTreeMap<VmId, Vm>,
    busy: BTreeMap<CpuId, Ns>,
    /// CPUs that were online in the last sample.
    online: Option<CpuSet>,
    fingerprint: Fingerprint,
    last: Sample,
    look_every: LookEvery,
    /// When to read the kernel's own settings next.
    kernel_due: Ns,
    /// Reused read buffer.
    room: Vec<u8>,
}

/// How often to read what rarely changes on a VM and is slow to read.
#[derive(Clone, Copy, Debug)]
struct LookEvery {
    /// The vCPUs' affinities (also read before and after a plan is committed), and the kernel's settings.
    affinities: Ns,
    /// Names, groups and affinities of all threads.
    all: Ns,
    /// The nodes of the VM's pages; read at once after the agent moved pages.
    pages: Ns,
}

const LOOK_EVERY: LookEvery = LookEvery {
    affinities: Ns::from_secs(10),
    all: Ns::from_secs(60),
    pages: Ns::from_secs(10),
};

/// Opens the PMU model of an emulated host, if it has one. A dry run has none, because using it sets its tags.
fn open_model(
    root: &Path,
    machine: &Machine,
    acting: Acting,
) -> Result<Option<Attribution>, read::ReadError> {
    if matches!(acting, Acting::DryRun) {
        return Ok(None);
    }
    let clock_hz = machine.hardware.as_ref().map(|hardware| hardware.clock_hz);
    let attribution = |page| {
        let sampler = blocks(root, machine).map(|blocks| Sampler::new(page, machine, blocks));
        Attribution::new(page, clock_hz, sampler)
    };
    Ok(modelled_pmu::find(root)?.map(attribution))
}

/// Finds the processor's sampling of pages. It interrupts VMs, so a dry run has none.
fn find_ibs(root: &Path, machine: &Machine, acting: Acting) -> Result<Ibs, String> {
    if matches!(acting, Acting::DryRun) {
        return Err("a dry run does not sample which node uses a page".to_owned());
    }
    let device = ibs::Device::find(root).map_err(|error| error.to_string())?;
    Ok(Ibs::new(device, machine, blocks(root, machine)?))
}

fn blocks(root: &Path, machine: &Machine) -> Result<MemoryBlocks, String> {
    match memory_blocks::read(root, &machine.node_set()) {
        Ok(Some(blocks)) => Ok(blocks),
        Ok(None) => Err(NO_BLOCKS.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl KvmHost {
    /// Finds the host's VMs, and takes over the journal.
    ///
    /// # Errors
    /// Each error is a sentence that says what to do.
    pub fn connect(vms: &Vms, options: Options) -> Result<KvmHost, ConnectError> {
        let Options {
            machine,
            reserved_cpus,
            root,
            state_dir,
            topology_socket,
            acting,
            wake_signal,
            heartbeat,
            local_migration: _,
            trace_waiting: _,
        } = options;
        let manager = vms.open(&root, heartbeat.clone())?;
        let cgroups = Hierarchy::read(&root)?;
        let mut notices = Vec::new();
        let (journal, locks, carried) = match acting {
            Acting::DryRun => (None, None, journal::peek(&state_dir)),
            Acting::Live => {
                let (mut journal, locks) = acting::take_over(&root, &state_dir)?;
                notices.append(&mut journal.warnings);
                let carried = journal.entries().clone();
                (Some(journal), Some(locks), carried)
            }
        };
        raise_file_limit();
        let selection = Selection::discover(&root).unwrap_or_else(|error| {
            notices.push(format!("LLC misses of VMs are not counted: {error}"));
            Selection::default()
        });
        let layout = uncore::discover(&root, &machine).unwrap_or_else(|error| {
            notices.push(format!("memory controllers and links are not counted: {error}"));
            uncore::Layout::default()
        });
        let uncore = Uncore::open(layout);
        notices.extend(uncore.notes.iter().cloned());
        let resctrl = Resctrl::open(&root, &machine).unwrap_or_else(|error| {
            notices.push(format!("resctrl is not read: {error}"));
            None
        });
        let modelled = open_model(&root, &machine, acting).unwrap_or_else(|error| {
            notices.push(format!("the modelled PMU is not used: {error}"));
            None
        });
        let ibs = find_ibs(&root, &machine, acting);
        let pages = TopologyPages::open(topology_socket, acting);
        notices.extend(pages.trouble(acting));
        let mut context = HostContext::new(
            manager,
            journal,
            root,
            (machine, reserved_cpus),
            (wake_signal, heartbeat),
            pages,
        );
        for notice in notices {
            context.notice(notice);
        }
        Ok(KvmHost {
            context,
            right: RightToAct::new(locks),
            carried,
            cgroups,
            perf: Perf::new(selection),
            modelled,
            ibs,
            uncore,
            resctrl,
            vms: BTreeMap::new(),
            busy: BTreeMap::new(),
            online: None,
            fingerprint: Fingerprint::new(),
            last: Sample::default(),
            look_every: LOOK_EVERY,
            kernel_due: Ns::ZERO,
            room: Vec::new(),
        })
    }

    /// The modelled PMU, if it stands in for a real one.
    fn model(&mut self) -> Option<&mut Attribution> {
        self.modelled.as_mut().filter(|_| self.perf.absence().is_some())
    }

    /// Why it is unknown which node uses a page; `None` if it is known.
    fn no_page_uses(&self) -> Option<String> {
        let model = self.modelled.as_ref().filter(|_| self.perf.absence().is_some());
        let why = match (model, &self.ibs) {
            (Some(model), _) => model.no_samples(),
            (None, Ok(ibs)) => ibs.absence(),
            (None, Err(why)) => Some(why.as_str()),
        };
        why.map(str::to_owned)
    }

    /// Reads the samples of pages since the last reading.
    fn sample_pages(&mut self) {
        if let Ok(ibs) = &mut self.ibs {
            let looked = ibs.look();
            if looked.lost > looked.samples {
                self.context.notice(LOST.to_owned());
            }
        }
    }

    /// Samples every running VM, and forgets those that ended.
    fn sample_vms(&mut self, at: Ns) -> Result<Vec<VmSample>, HostError> {
        let listed = match self.context.manager.list() {
            Ok(listed) => listed,
            Err(error) => return Err(self.context.manager.unreachable(error.cause())),
        };
        let mut samples = Vec::with_capacity(listed.len());
        let mut seen = BTreeSet::new();
        for vm in listed {
            let described = match self.context.manager.describe(vm) {
                Ok(described) => described,
                Err(CallError::Lost(cause)) => return Err(self.context.manager.unreachable(&cause)),
                Err(CallError::Refused(_)) => continue, // it ended since it was listed
                Err(CallError::Unclear(why)) => {
                    self.context.notice(format!("a VM is left out: {why}"));
                    continue;
                }
            };
            match self.watch(described, at) {
                Ok(Some(sample)) => {
                    seen.insert(sample.id);
                    samples.push(sample);
                }
                Ok(None) => {}
                Err(left_out) => self.context.notice(left_out.to_string()),
            }
        }
        for notice in self.context.manager.take_notices() {
            self.context.notice(notice);
        }
        // A VM that could not be sampled is kept for as long as it runs: its leases still end.
        let is_gone = |(id, vm): &(&VmId, &Vm)| {
            !seen.contains(id) && !task::is_alive(&self.context.root, vm.run.process())
        };
        let gone: Vec<VmId> = self.vms.iter().filter(is_gone).map(|(id, _)| *id).collect();
        for vm in gone {
            self.vms.remove(&vm);
        }
        samples.extend(self.unread(&seen));
        samples.sort_by_key(|vm| vm.id);
        self.forget_ended();
        self.context.marks.keep_only(|vm| self.vms.contains_key(&vm));
        let tids: BTreeSet<i32> = self.vms.values().flat_map(Vm::vcpu_tids).collect();
        self.perf.keep_only(&tids);
        if let Some(modelled) = &mut self.modelled {
            modelled.keep_only(|vm| self.vms.contains_key(&vm));
        }
        if let Ok(ibs) = &mut self.ibs {
            let wants = |vm: &VmSample| vm.memory_policy.migration == Migration::Carrefour;
            ibs.keep_only(|vm| samples.iter().any(|sample| sample.id == vm && wants(sample)));
        }
        Ok(samples)
    }

    /// Returns the VMs that run but could not be read this time, as they were last read: the agent's changes to them are still in
    /// force.
    fn unread(&self, seen: &BTreeSet<VmId>) -> Vec<VmSample> {
        let missing = self.vms.keys().filter(|vm| !seen.contains(vm));
        let last = missing.filter_map(|vm| self.last.vm(*vm));
        let unread = last.map(|vm| VmSample {
            is_unread: true,
            page_uses: None,
            ..vm.clone()
        });
        unread.collect()
    }

    /// Drops VMs whose QEMU ended from the journal. VMs that are merely not listed (libvirt may be restarting) stay.
    fn forget_ended(&mut self) {
        let HostContext {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.context
        else {
            return;
        };
        // The VMs in `self.vms` have just been checked.
        let runs = |(vm, e): &(&VmId, &journal::Entry)| {
            self.vms
                .get(*vm)
                .is_some_and(|known| known.run.process() == e.process())
        };
        let over = journal.entries().iter();
        let over = over.filter(|entry| !runs(entry) && !task::is_alive(root, entry.1.process()));
        let over: Vec<VmId> = over.map(|(vm, _)| *vm).collect();
        let mut notices = Vec::new();
        for vm in over {
            self.carried.remove(&vm);
            // If something that outlives the VM could not be undone, it is tried again with the next sample.
            match levers::undo(manager.as_mut(), root, journal, vm) {
                Ok(()) => journal.forget(vm),
                Err(cause) => notices.push(cause.to_string()),
            }
        }
        for notice in notices {
            self.context.notice(notice);
        }
    }

    /// Returns the settings of what the kernel does on its own, such as AutoNUMA. Adds a notice about changes since the last
    /// reading.
    fn kernel_settings(&mut self, at: Ns) -> KernelSettings {
        if at < self.kernel_due {
            return self.last.kernel;
        }
        self.kernel_due = Ns(at.0 + self.look_every.affinities.0);
        let mut troubles = Vec::new();
        let now = kernel_settings::read(&self.context.root, |error| troubles.push(error.to_string()));
        if self.last.at > Ns::ZERO {
            troubles.extend(now.changes(&self.last.kernel));
        }
        for said in troubles {
            self.context.notice(said);
        }
        now
    }

    fn sample_cpus(&mut self) -> Result<Vec<CpuSample>, HostError> {
        // Online CPUs only. A CPU that came online since the start is not part of the machine.
        let online = proc_stat::read(&self.context.root)?;
        self.busy.extend(online.iter().copied());
        let ids: CpuSet = online.iter().map(|(id, _)| *id).collect();
        self.context.offline = self.context.machine.cpu_set().difference(&ids);
        if self
            .online
            .replace(ids.clone())
            .is_some_and(|before| before != ids)
        {
            self.context.kernels_until = now() + CPUS_SETTLE;
            if let Ok(ibs) = &mut self.ibs {
                ibs.restart();
            }
        }
        let known = online
            .into_iter()
            .filter(|(id, _)| self.context.machine.cpu(*id).is_some());
        Ok(known.map(|(id, busy_ns)| CpuSample { id, busy_ns }).collect())
    }

    fn sample_nodes(&mut self) -> Result<(NodeMap<NodeSample>, Vec<homenode_host::LinkSample>), HostError> {
        let (mut traffic, links) = self.uncore.read();
        if traffic.is_empty()
            && let Some(resctrl) = &mut self.resctrl
        {
            match resctrl.read() {
                Ok(bytes) => traffic = bytes.unwrap_or_default(),
                Err(error) => {
                    resctrl.note = Some(format!("resctrl is no longer read: {error}"));
                }
            }
            if let Some(note) = resctrl.note.clone() {
                self.context.notice(note);
            }
        }
        if traffic.is_empty()
            && let Some(model) = self.model()
        {
            traffic = model.traffic();
        }
        let mut nodes = NodeMap::new();
        for node in self.context.machine.node_set().iter() {
            let memory = meminfo::read(&self.context.root, node)?;
            let huge_pages = meminfo::huge_pages(&self.context.root, node).ok();
            nodes.insert(
                node,
                NodeSample {
                    memory_total_bytes: memory.map_or(Bytes::ZERO, |m| m.total_bytes),
                    memory_free_bytes: memory.map_or(Bytes::ZERO, |m| m.free_bytes),
                    memory_traffic_bytes: traffic.get(node).copied(),
                    huge_pages,
                },
            );
        }
        Ok((nodes, links))
    }
}

impl RealHost for KvmHost {
    fn right(&self) -> &RightToAct {
        &self.right
    }

    fn right_mut(&mut self) -> &mut RightToAct {
        &mut self.right
    }

    fn take_notices(&mut self) -> Vec<String> {
        self.context.take_notices()
    }

    fn carried_over(&self) -> Vec<CarriedOver> {
        let in_force = self
            .carried
            .iter()
            .filter(|(_, e)| e.is_in_force() || e.get::<Moving>().is_some());
        let alive = in_force.filter(|(_, e)| task::is_alive(&self.context.root, e.process()));
        let carried = alive.map(|(&vm, e)| CarriedOver {
            vm,
            home: e.get().and_then(|home: Home| home.nodes().cloned()),
            pins: e
                .get()
                .map(|Pins(pins)| {
                    pins.into_iter()
                        .filter_map(|(index, sets)| Some((index, sets.first()?.clone())))
                        .collect()
                })
                .unwrap_or_default(),
            moving: e.get().map(|Moving(to)| to),
        });
        carried.collect()
    }

    fn restore(&mut self) -> Undone {
        // The watching threads end before their trackers are taken down.
        self.vms.clear();
        let HostContext {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.context
        else {
            return Undone::default();
        };
        let undone = leftovers::undo_all(manager.as_mut(), root, journal, &mut false);
        for vm in &undone.vms {
            self.carried.remove(vm);
        }
        self.right.note_undone(&undone);
        undone
    }

    fn lift_limits(&mut self) -> Vec<String> {
        self.context.manager.take_time();
        let failures = self
            .vms
            .values_mut()
            .flat_map(|vm| Levers::lift_limits(&mut self.context, vm));
        let mut failures: Vec<String> = failures.map(|error| error.to_string()).collect();
        // Limits of an earlier agent may be on VMs that this agent could not sample.
        let HostContext {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.context
        else {
            return failures;
        };
        for vm in journal
            .in_force()
            .into_iter()
            .filter(|vm| !self.vms.contains_key(vm))
        {
            let undone = levers::undo_limits(manager.as_mut(), root, journal, vm);
            failures.extend(undone.err().map(|error| error.to_string()));
        }
        failures
    }
}

impl Leases for KvmHost {
    fn next_lease_end(&self) -> Option<Ns> {
        self.vms.values().filter_map(Vm::next_lease_end).min()
    }

    fn end_leases(&mut self) {
        let at = now();
        let is_over = |vm: &&mut Vm| vm.next_lease_end().is_some_and(|until| until <= at);
        for vm in self.vms.values_mut().filter(is_over) {
            for error in Levers::end_leases(&mut self.context, vm, at) {
                self.context.notice(format!("{error}; retrying"));
            }
        }
    }
}

impl Host for KvmHost {
    fn machine(&self) -> &Machine {
        &self.context.machine
    }

    fn wait(&mut self, period: Ns) -> Ns {
        let (wake_signal, heartbeat) = (self.context.wake_signal.clone(), self.context.heartbeat.clone());
        acting::wait(self, (&wake_signal, &heartbeat), period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.end_leases();
        let at = now();
        let cpus = self.sample_cpus()?;
        let busy = self.busy.values().copied().sum();
        if let Some(model) = self.model() {
            model.begin(busy);
        }
        self.sample_pages();
        let vms = self.sample_vms(at)?;
        let (nodes, links) = self.sample_nodes()?;
        let mut counted_by = CountedBy::Hardware;
        if let Some(why) = self.perf.absence().map(str::to_owned) {
            let instead = if self.modelled.is_some() {
                counted_by = CountedBy::Model;
                "LLC misses of VMs are counted by the emulator's model of caches, not by hardware"
            } else {
                "LLC miss rates of VMs are unknown"
            };
            self.context
                .notice(format!("no hardware counters: {why}; {instead}"));
        }
        if let Some(refusal) = self.context.topology.take_refusal() {
            self.context.notice(refusal);
        }
        if let Some(note) = self.perf.note() {
            self.context.notice(note.to_owned());
        }
        let version = self.version_of(&vms);
        self.context.no_page_uses = self.no_page_uses();
        let kernel = self.kernel_settings(at);
        self.last = Sample {
            at,
            version,
            counted_by,
            balloons: Balloons::Virtio,
            cpus,
            nodes,
            links,
            no_page_uses: self.context.no_page_uses.clone(),
            trackers: trackers::choices(&self.context.root, trackers::Runs::Kvm),
            kernel,
            vms,
        };
        Ok(self.last.clone())
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        let pinned = plan.vms().into_iter().map(|vm| (vm, plan.cpus_with_home(vm)));
        self.context.pinned_with_home = pinned.collect();
        homenode_undo::commit(self, plan)
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        let Some(known) = self.vms.get(&vm) else {
            return Err(Failure::VmGone.on(&vm.to_string()));
        };
        let name = known.run.name.clone();
        let failed = |cause: String| Failure::to_set(settings, cause).on(&name);
        if self.context.journal.is_none() {
            return Err(failed(acting::DRY_RUN.to_owned()));
        }
        if known.is_migrating() {
            return Err(failed(HandsOff::Migrating.to_string()));
        }
        for setting in settings {
            if let Setting::MemoryPolicy(Some(policy)) = setting {
                levers::memory_policy_is_possible(&self.context, &name, *policy)?;
            }
        }
        let change = Change { settings, holds };
        let changed = self.context.manager.change_settings(vm, &change);
        changed.map_err(|error| failed(error.cause().to_owned()))
    }
}

/// Said if the processor's samples do not fit.
const LOST: &str =
    "IBS loses more than half of the samples of memory accesses: Carrefour moves fewer pages than it could";
/// Why it is unknown which node uses a page although accesses are sampled.
const NO_BLOCKS: &str =
    "the kernel does not say which frames are on which node (no memory blocks in /sys/devices/system/memory)";

/// Raises the soft limit of open files to the hard one: each vCPU needs four descriptors for its counters.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If the kernel refuses, counters fail with "too many open files", which is reported.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

#[cfg(test)]
mod tests;

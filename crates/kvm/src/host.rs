//! A real KVM host behind the host contract.
//!
//! Everything that changes a VM goes through who manages it, libvirt say, so that its idea of the VM stays true; only
//! pages move past it, with `move_pages(2)`, which libvirt has no throttled call for. What was set is read back from
//! the kernel. Of resctrl only groups of the agent's own are written.
//!
//! ```text
//!   sample ─ VMs and what they are (their manager) ─ threads, cgroups, numa_maps (/proc) ─ perf, uncore ─▶ Sample
//!   commit ─ Plan::check ─ as sampled? ─ journal ─ act ─ read back ─▶ Receipt
//! ```

mod commit;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{
    ActionError, Balloons, CPUS_SETTLE, CountedBy, CpuSample, Failure, HandsOff, Host, HostError,
    KernelSettings, NodeSample, Plan, Receipt, Refusal, Sample, Setting, VmSettings,
};
use homenode_kernel::attribution::{Attribution, Sampler};
use homenode_kernel::cgroup::Hierarchy;
use homenode_kernel::perf::Perf;
use homenode_kernel::resctrl::Resctrl;
use homenode_kernel::uncore::{self, Uncore};
use homenode_kernel::{
    kernel_settings, meminfo, memory_blocks, modelled_pmu, now, proc_stat, read, task, trackers,
};
use homenode_machine::Machine;
use homenode_undo::acting::{self, Leases, RightToAct};
use homenode_undo::{Acting, CarriedOver, Options, RealHost, Undone, journal};
use homenode_units::{Bytes, CpuId, CpuSet, NodeMap, Ns, VmId};
use homenode_vm_settings::Change;

use crate::connect::{ConnectError, Vms};
use crate::hands::Hands;
use crate::legacy;
use crate::levers::{self, Home, Moving, Pins};
use crate::manager::CallError;
use crate::topology_pages::TopologyPages;
use crate::vm::Vm;
use commit::Fingerprint;

/// A host that runs VMs under KVM.
pub struct KvmHost {
    hands: Hands,
    right: RightToAct,
    /// What was in force when this agent started.
    carried: BTreeMap<VmId, journal::Entry>,
    cgroups: Hierarchy,
    perf: Perf,
    /// Of an emulated host, for where it has no other; its tags are who acts' alone.
    modelled: Option<Attribution>,
    uncore: Uncore,
    resctrl: Option<Resctrl>,
    vms: BTreeMap<VmId, Vm>,
    busy: BTreeMap<CpuId, Ns>,
    /// CPUs that were online last.
    online: Option<CpuSet>,
    fingerprint: Fingerprint,
    last: Sample,
    look_every: LookEvery,
    /// When what the kernel does by itself is read next.
    kernel_due: Ns,
    /// For what is read, again and again.
    room: Vec<u8>,
}

/// How often is looked up anew what rarely changes of a VM, and takes the kernel long to tell.
#[derive(Clone, Copy, Debug)]
struct LookEvery {
    /// Where vCPUs may run: they are looked at before a plan is carried out, too, and after it. And the kernel's settings.
    affinities: Ns,
    /// Names and groups of all threads, and where those may run.
    all: Ns,
    /// Where its pages lie: after the agent moved some they are looked at at once.
    pages: Ns,
}

const LOOK_EVERY: LookEvery = LookEvery {
    affinities: Ns::from_secs(10),
    all: Ns::from_secs(60),
    pages: Ns::from_secs(10),
};

impl KvmHost {
    /// Finds the host's VMs, and takes over the journal.
    ///
    /// # Errors
    /// Each is a sentence with its remedy.
    pub fn connect(vms: &Vms, options: Options) -> Result<KvmHost, ConnectError> {
        let Options {
            machine,
            reserved_cpus,
            root,
            state_dir,
            topology_socket,
            acting,
            bell,
            beat,
            local_migration: _,
            trace_waiting: _,
        } = options;
        let manager = vms.open(&root, beat.clone())?;
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
        let cpuinfo = read::text_if_there(&root.join("proc/cpuinfo"), 16 << 20)?.unwrap_or_default();
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
        let clock_hz = machine.hardware.as_ref().map(|hardware| hardware.clock_hz);
        let modelled = match acting {
            Acting::Live => modelled_pmu::find(&root).unwrap_or_else(|error| {
                notices.push(format!("the modelled PMU is not used: {error}"));
                None
            }),
            Acting::DryRun => None,
        };
        let modelled = modelled.map(|page| {
            let sampler = match memory_blocks::read(&root, &machine.node_set()) {
                Ok(Some(blocks)) => Ok(Sampler::new(page, &machine, blocks)),
                Ok(None) => Err(NO_BLOCKS.to_owned()),
                Err(error) => Err(error.to_string()),
            };
            Attribution::new(page, clock_hz, sampler)
        });
        let pages = TopologyPages::open(topology_socket, acting);
        notices.extend(pages.trouble(acting));
        let mut hands = Hands::new(
            manager,
            journal,
            root,
            (machine, reserved_cpus),
            (bell, beat),
            pages,
        );
        for notice in notices {
            hands.notice(notice);
        }
        Ok(KvmHost {
            hands,
            right: RightToAct::new(locks),
            carried,
            cgroups,
            perf: Perf::new(&cpuinfo),
            modelled,
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

    /// The modelled PMU, where it stands in for one.
    fn model(&mut self) -> Option<&mut Attribution> {
        self.modelled.as_mut().filter(|_| self.perf.absence().is_some())
    }

    /// Why nobody is known to use a page, if so.
    fn no_page_uses(&self) -> Option<String> {
        match self.modelled.as_ref().filter(|_| self.perf.absence().is_some()) {
            Some(model) => model.no_samples().map(str::to_owned),
            None => Some(NO_PAGE_USES.to_owned()),
        }
    }

    /// Looks at every running VM, and forgets those that ended.
    fn sample_vms(&mut self, at: Ns) -> Result<Vec<homenode_host::VmSample>, HostError> {
        let listed = match self.hands.manager.list() {
            Ok(listed) => listed,
            Err(error) => return Err(self.hands.manager.unreachable(error.cause())),
        };
        let mut samples = Vec::with_capacity(listed.len());
        let mut seen = BTreeSet::new();
        for vm in listed {
            let described = match self.hands.manager.describe(vm) {
                Ok(described) => described,
                Err(CallError::Lost(cause)) => return Err(self.hands.manager.unreachable(&cause)),
                Err(CallError::Refused(_)) => continue, // it ended since it was listed
                Err(CallError::Unclear(why)) => {
                    self.hands.notice(format!("a VM is left out: {why}"));
                    continue;
                }
            };
            match self.watch(described, at) {
                Ok(Some(sample)) => {
                    seen.insert(sample.id);
                    samples.push(sample);
                }
                Ok(None) => {}
                Err(text) => self.hands.notice(text),
            }
        }
        samples.sort_by_key(|vm| vm.id);
        for notice in self.hands.manager.take_notices() {
            self.hands.notice(notice);
        }
        // One that could not be looked at this time is known as long as it runs: its leases go on to end.
        let is_gone = |(id, vm): &(&VmId, &Vm)| {
            !seen.contains(id) && !task::is_alive(&self.hands.root, vm.run.process())
        };
        let gone: Vec<VmId> = self.vms.iter().filter(is_gone).map(|(id, _)| *id).collect();
        for vm in gone {
            self.vms.remove(&vm);
        }
        self.forget_ended();
        self.hands.marks.keep_only(|vm| self.vms.contains_key(&vm));
        let tids: BTreeSet<i32> = self.vms.values().flat_map(Vm::vcpu_tids).collect();
        self.perf.keep_only(&tids);
        if let Some(modelled) = &mut self.modelled {
            modelled.keep_only(|vm| self.vms.contains_key(&vm));
        }
        Ok(samples)
    }

    /// Drops VMs from the journal whose QEMU ended. One that is merely not listed (libvirt is restarting) stays.
    fn forget_ended(&mut self) {
        let Hands {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.hands
        else {
            return;
        };
        // Of those that are watched it was just asked.
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
            // What outlives a VM is tried again with the next sample.
            match levers::undo(manager.as_mut(), root, journal, vm) {
                Ok(()) => journal.forget(vm),
                Err(cause) => notices.push(cause),
            }
        }
        for notice in notices {
            self.hands.notice(notice);
        }
    }

    /// What the kernel does by itself now; a change since the last look is said.
    fn kernel_settings(&mut self, at: Ns) -> KernelSettings {
        if at < self.kernel_due {
            return self.last.kernel;
        }
        self.kernel_due = Ns(at.0 + self.look_every.affinities.0);
        let mut troubles = Vec::new();
        let now = kernel_settings::read(&self.hands.root, |error| troubles.push(error.to_string()));
        if self.last.at > Ns::ZERO {
            troubles.extend(now.changes(&self.last.kernel));
        }
        for said in troubles {
            self.hands.notice(said);
        }
        now
    }

    fn sample_cpus(&mut self) -> Result<Vec<CpuSample>, HostError> {
        // Those that are online. One that came online since the start is none of the machine's.
        let online = proc_stat::read(&self.hands.root)?;
        self.busy.extend(online.iter().copied());
        let ids: CpuSet = online.iter().map(|(id, _)| *id).collect();
        self.hands.offline = self.hands.machine.cpu_set().difference(&ids);
        if self
            .online
            .replace(ids.clone())
            .is_some_and(|before| before != ids)
        {
            self.hands.kernels_until = now() + CPUS_SETTLE;
        }
        let known = online
            .into_iter()
            .filter(|(id, _)| self.hands.machine.cpu(*id).is_some());
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
                    resctrl.note = Some(format!("resctrl is not read any more: {error}"));
                }
            }
            if let Some(note) = resctrl.note.clone() {
                self.hands.notice(note);
            }
        }
        if traffic.is_empty()
            && let Some(model) = self.model()
        {
            traffic = model.traffic();
        }
        let mut nodes = NodeMap::new();
        for node in self.hands.machine.node_set().iter() {
            let memory = meminfo::read(&self.hands.root, node)?;
            let huge_pages = meminfo::huge_pages(&self.hands.root, node).ok();
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
        self.hands.take_notices()
    }

    fn carried_over(&self) -> Vec<CarriedOver> {
        let in_force = self
            .carried
            .iter()
            .filter(|(_, e)| e.is_in_force() || e.get::<Moving>().is_some());
        let alive = in_force.filter(|(_, e)| task::is_alive(&self.hands.root, e.process()));
        let carried = alive.map(|(&vm, e)| CarriedOver {
            vm,
            home: e.get().map(|Home(nodes)| nodes),
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
        // Threads that watch end before what they watch with is taken down.
        self.vms.clear();
        let Hands {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.hands
        else {
            return Undone::default();
        };
        let undone = legacy::undo_all(manager.as_mut(), root, journal, &mut false);
        for vm in &undone.vms {
            self.carried.remove(vm);
        }
        self.right.note_undone(&undone);
        undone
    }

    fn lift_limits(&mut self) -> Vec<String> {
        self.hands.manager.take_time();
        let failures = self
            .vms
            .values_mut()
            .flat_map(|vm| vm.lift_limits(&mut self.hands));
        let mut failures: Vec<String> = failures.map(|error| error.to_string()).collect();
        // Those of an earlier agent, of VMs that this one could not look at.
        let Hands {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.hands
        else {
            return failures;
        };
        for vm in journal
            .in_force()
            .into_iter()
            .filter(|vm| !self.vms.contains_key(vm))
        {
            failures.extend(levers::undo_limits(manager.as_mut(), root, journal, vm).err());
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
        for vm in self.vms.values_mut().filter(|vm| vm.has_leases_over(at)) {
            vm.end_leases(&mut self.hands, at);
        }
    }
}

impl Host for KvmHost {
    fn machine(&self) -> &Machine {
        &self.hands.machine
    }

    fn wait(&mut self, period: Ns) -> Ns {
        let (bell, beat) = (self.hands.bell.clone(), self.hands.beat.clone());
        acting::wait(self, (&bell, &beat), period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.end_leases();
        let at = now();
        let cpus = self.sample_cpus()?;
        let busy = self.busy.values().copied().sum();
        if let Some(model) = self.model() {
            model.begin(busy);
        }
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
            self.hands
                .notice(format!("no hardware counters: {why}; {instead}"));
        }
        if let Some(refusal) = self.hands.topology.take_refusal() {
            self.hands.notice(refusal);
        }
        if let Some(note) = self.perf.note() {
            self.hands.notice(note.to_owned());
        }
        let version = self.version_of(&vms);
        self.hands.no_page_uses = self.no_page_uses();
        let kernel = self.kernel_settings(at);
        self.last = Sample {
            at,
            version,
            counted_by,
            balloons: Balloons::Virtio,
            cpus,
            nodes,
            links,
            no_page_uses: self.hands.no_page_uses.clone(),
            trackers: trackers::choices(&self.hands.root, trackers::Runs::Kvm),
            kernel,
            vms,
        };
        Ok(self.last.clone())
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        homenode_undo::commit(self, plan)
    }

    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        self.set_where(vm, &[setting], &|_| true).map(drop)
    }

    fn set_where(
        &mut self,
        vm: VmId,
        settings: &[Setting],
        holds: &dyn Fn(&VmSettings) -> bool,
    ) -> Result<bool, ActionError> {
        let Some(known) = self.vms.get(&vm) else {
            return Err(Failure::VmGone.on(&vm.to_string()));
        };
        let name = known.run.name.clone();
        let failed = |cause: String| Failure::to_set(settings, cause).on(&name);
        if self.hands.journal.is_none() {
            return Err(failed(acting::DRY_RUN.to_owned()));
        }
        if known.is_migrating() {
            return Err(failed(HandsOff::Migrating.to_string()));
        }
        for setting in settings {
            if let Setting::MemoryPolicy(Some(policy)) = setting {
                levers::memory_policy_is_possible(&self.hands, &name, *policy)?;
            }
        }
        let change = Change { settings, holds };
        let changed = self.hands.manager.change_settings(vm, &change);
        changed.map_err(|error| failed(error.cause().to_owned()))
    }
}

/// Why nobody is known to use a page on hosts of hardware: what was never run is not written.
const NO_PAGE_USES: &str = "which node uses a page is not sampled here: that takes memory sampling of the processor (IBS, PEBS), which \
                            is not read yet; accessed bits and DAMON do not say who";
/// Why nobody is, where a model could say it.
const NO_BLOCKS: &str =
    "the kernel does not say which frames lie on which node (no memory blocks in /sys/devices/system/memory)";

/// Each vCPU needs four descriptors for its counters: raises the soft limit to the hard one.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Refused at worst, and then counters end with "too many open files", which is said.
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

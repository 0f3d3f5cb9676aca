//! Samples one VM: its threads, its operator's settings, where its memory is, and what is in force on its levers.

use std::collections::BTreeMap;
use std::sync::Arc;

use homenode_host::{HomeInForce, Immovable, Management, PageUse, VcpuSample, VmSample};
use homenode_kernel::attribution::Seen;
use homenode_kernel::cgroup::{CpuMax, GroupsRead};
use homenode_kernel::now;
use homenode_kernel::read::ReadError;
use homenode_kernel::task::{self, Depth, Tasks};
use homenode_undo::journal::{Entry, Helper, Run};
use homenode_units::{CpuSet, Migration, Ns};

use super::KvmHost;
use crate::context::HostContext;
use crate::domain::{Domain, FreePages};
use crate::levers::{self, Home};
use crate::mark::{self, TakenIn};
use crate::reach::Reach;
use crate::vm::{Found, Levers, Memory, Pinned, UndoError, Vm, vcpu_index};

/// What the domain needs if its guest keeps its free pages.
const NO_RELEASES: &str = "its guest does not report the pages that it frees; put <memballoon model='virtio' freePageReporting='on'/> \
                           into its <devices> (virsh edit), and start it again";

/// Why a VM is missing in a sample.
#[derive(Debug, thiserror::Error)]
#[error("VM {name} is left out: {cause}")]
pub(crate) struct LeftOut {
    name: String,
    cause: ReadError,
}

impl KvmHost {
    /// Samples one domain. `None` if it has no QEMU process with vCPUs (it is starting or ending).
    pub(crate) fn watch(&mut self, domain: Arc<Domain>, at: Ns) -> Result<Option<VmSample>, LeftOut> {
        let (id, name) = (domain.id, domain.name.clone());
        let failed = |cause: ReadError| LeftOut {
            name: name.clone(),
            cause,
        };
        let former = self.vms.remove(&id);
        let had_former = former.is_some();
        let known = former.and_then(|mut vm| {
            let process = vm.run.process();
            (Some(vm.run.runtime_id) == domain.runtime_id && vm.tasks.is_alive(process)).then_some(vm)
        });
        // A new run of the VM has none of the agent's changes to the former run, and its counters begin again. A sample without
        // the VM tells policies so.
        if had_former && known.is_none() {
            return Ok(None);
        }
        let is_first = known.is_none();
        // If the state is unknown, acting will show it.
        let standstill = self.context.manager.standstill(id).unwrap_or_default();
        let mut vm = match known {
            Some(vm) if Arc::ptr_eq(&vm.described, &domain) => vm,
            Some(vm) => {
                self.context.marks.saw(id, domain.mark.clone());
                Vm {
                    domain: Domain::clone(&domain),
                    described: domain,
                    // A pin in the new XML is in force by now.
                    next_looks: (Ns::ZERO, Ns::ZERO),
                    ..vm
                }
            }
            // The VM has not fully arrived, and nothing about it can be changed.
            None if standstill == Some(Immovable::Migrating) => return Ok(None),
            None => match self.first_sight(domain).map_err(failed)? {
                Some(vm) => vm,
                None => return Ok(None),
            },
        };
        vm.standstill = standstill;
        let seen = self.look(&mut vm, at, is_first).map_err(failed);
        // Kept even if reading failed: what is in force on the VM is known, and its leases must end.
        if !is_first || matches!(seen, Ok(Some(_))) {
            self.vms.insert(id, vm);
        }
        seen
    }

    /// Samples a VM's activity; `None` if it has no vCPUs.
    fn look(&mut self, vm: &mut Vm, at: Ns, is_first: bool) -> Result<Option<VmSample>, ReadError> {
        let name = vm.run.name.clone();
        let is_whole = at >= vm.next_looks.1;
        self.look_at_threads(vm, at)?;
        if vm.vcpu_tids().next().is_none() {
            return Ok(None);
        }
        let usable = self.context.machine.cpu_set();
        match vm.refresh_pages(&self.context.root, at, self.look_every.pages) {
            Ok(Found::Memory | Found::NotLooked) => {}
            Ok(Found::None) => self.context.notice(format!("cannot tell where the memory of VM {name} is: no mapping of its QEMU has the size of its memory")),
            Err(error) => {
                vm.memory.parts().for_each(|part| part.pages = None);
                self.context
                    .notice(format!("cannot tell where the memory of VM {name} is: {error}"));
            }
        }
        self.find_groups(vm, is_whole)?;
        if !vm.is_migrating() {
            Levers::reconcile(&mut self.context, vm, is_first);
            self.context.keep_marked(vm);
            self.give_up_what_is_out_of_reach(vm);
        }
        let sample = self.vm_sample(vm, &usable)?;
        if sample.settings.management == Management::Ignored && !vm.is_migrating() {
            for error in vm.give_back(&mut self.context) {
                self.context.notice(error.to_string());
            }
        }
        Ok(Some(sample))
    }

    /// Lifts the home and pins of a VM whose operator changed its bounds. Policies then decide again within the new bounds.
    fn give_up_what_is_out_of_reach(&mut self, vm: &mut Vm) {
        let left = vm.left(&self.context);
        if self.context.journal.is_none() || !vm.is_out_of_reach(&self.context, &left) {
            return;
        }
        let name = vm.run.name.clone();
        let left = match left.cpus.is_empty() {
            true => left.why_nothing(),
            false => format!("it may now use only CPUs {}", left.cpus),
        };
        let done = vm.act(&mut self.context, &levers::NO_HOME);
        self.context.notice(match done {
            Ok(_) => format!("home and pins of VM {name} are lifted: its bounds were changed, and {left}"),
            Err(error) => {
                format!("{error}; retrying: the bounds of VM {name} were changed, and {left}")
            }
        });
        vm.look_soon();
    }

    /// Reads a VM's threads, in as much detail as is due.
    pub(super) fn look_at_threads(&mut self, vm: &mut Vm, at: Ns) -> Result<(), ReadError> {
        let (affinities, all) = &mut vm.next_looks;
        let depth = match () {
            () if at >= *all => Depth::Whole,
            () if at >= *affinities => Depth::Affinities,
            () => Depth::Counters,
        };
        vm.tasks.look(depth, &mut vm.threads)?;
        if depth >= Depth::Affinities {
            *affinities = at + self.look_every.affinities;
        }
        // Read after the affinities: a cpuset that shrank in between then explains an affinity that has not shrunk yet.
        if depth >= Depth::Affinities {
            vm.reach = Reach::read(&self.cgroups, vm.run.pid, &vm.domain)?;
        }
        if depth == Depth::Whole {
            *all = at + self.look_every.all;
        }
        self.context.manager.roles(&vm.run, &mut vm.threads);
        Ok(())
    }

    /// Starts watching a VM: finds its process and its operator's pins, which later cannot be told from the agent's.
    fn first_sight(&mut self, mut domain: Arc<Domain>) -> Result<Option<Vm>, ReadError> {
        let Some(run) = mark::run_of(self.context.manager.as_mut(), &domain)? else {
            return Ok(None);
        };
        if let Err(cause) = self.undo_former(&run) {
            let name = &domain.name;
            self.context.notice(format!(
                "VM {name} is left out until the changes to the process that was taken for it before are undone: \
                 {cause}; retrying"
            ));
            return Ok(None);
        }
        if self.take_in(&domain, &run)
            && let Ok(again) = self.context.manager.describe(run.vm)
        {
            domain = again;
        }
        self.context.marks.saw(run.vm, domain.mark.clone());
        if let Err(why) = &domain.settings {
            let text = format!(
                "VM {} is watched only: its homenode settings are wrong: {why}",
                domain.name
            );
            self.context.notice(text);
        }
        let reach = Reach::read(&self.cgroups, run.pid, &domain)?;
        let journal = self.context.journal.as_ref();
        let entry = journal.map_or_else(|| self.carried.get(&run.vm), |journal| journal.entry(run.vm));
        let entry = entry.filter(|entry| entry.run == run);
        let operator_helpers = match entry {
            Some(entry) => entry.before.operator_helpers.iter().copied().collect(),
            None => {
                let iothreads = domain.iothread_pins.keys().map(|id| Helper::IoThread(*id));
                // A pin to everything that the VM may use limits nothing; an agent that restored the VM leaves such a pin.
                let is_pin = |cpus: &&CpuSet| !reach.is_no_limit(&self.context.machine, cpus);
                let emulator = domain.emulator_pin.as_ref().filter(is_pin);
                let emulator = emulator.map(|_| Helper::Emulator);
                iothreads.chain(emulator).collect()
            }
        };
        Ok(Some(Vm {
            pins: Pinned::of(entry),
            home: entry.and_then(Entry::get::<Home>),
            levers: levers::of_vm(entry, journal.is_some()),
            tasks: Tasks::new(&self.context.root, run.pid),
            next_looks: (Ns::ZERO, Ns::ZERO),
            run,
            domain: Domain::clone(&domain),
            described: domain,
            reach,
            operator_helpers,
            threads: Vec::new(),
            groups: BTreeMap::new(),
            memory: Memory::default(),
            immovable: None,
            standstill: None,
        }))
    }

    /// Undoes what is in force on another process that was mistaken for this VM and still runs. This happens if a service's user
    /// gave that process the name or the UUID of root's VM.
    fn undo_former(&mut self, run: &Run) -> Result<(), UndoError> {
        let HostContext {
            manager,
            journal: Some(journal),
            root,
            ..
        } = &mut self.context
        else {
            return Ok(());
        };
        let is_former = |entry: &&Entry| {
            let other = entry.process();
            other != run.process() && entry.is_in_force() && task::is_alive(root, other)
        };
        if journal.entry(run.vm).filter(is_former).is_none() {
            return Ok(());
        }
        let undone = levers::undo(manager.as_mut(), root, journal, run.vm);
        // From here on, this process is the VM again.
        let known = manager
            .knows(run)
            .map_err(|e| UndoError::Call(e.cause().to_owned()));
        undone.and(known.map(drop))
    }

    /// Adds what a VM's mark records to the journal. Returns whether changes were undone, in which case the VM's description has
    /// changed.
    fn take_in(&mut self, domain: &Domain, run: &Run) -> bool {
        let HostContext {
            manager,
            journal: Some(journal),
            marks,
            root,
            ..
        } = &mut self.context
        else {
            return false;
        };
        let name = &domain.name;
        let (said, is_undone) = match mark::take_in(marks.here(), journal, root, (domain, run)) {
            Ok(TakenIn::Known) => return false,
            Ok(TakenIn::New) => (
                format!(
                    "the journal had lost the changes to VM {name}; they were read from the mark that the VM carries"
                ),
                false,
            ),
            Ok(TakenIn::Carried) => match levers::undo(manager.as_mut(), root, journal, run.vm) {
                Ok(()) => (
                    format!(
                        "VM {name} arrived with changes that an agent made where it ran before; they were undone"
                    ),
                    true,
                ),
                Err(cause) => (
                    format!(
                        "VM {name} arrived with changes that an agent made where it ran before; they could not be undone: {cause}"
                    ),
                    true,
                ),
            },
            Err(cause) => (cause.to_string(), false),
        };
        self.context.notice(said);
        is_undone
    }

    /// Finds the cgroups of new vCPUs, or of all vCPUs if `looks_again` is set and the first vCPU has moved: moving a VM moves
    /// all threads.
    fn find_groups(&self, vm: &mut Vm, looks_again: bool) -> Result<(), ReadError> {
        let first = vm.vcpu_tids().next().filter(|_| looks_again);
        let known = first.and_then(|tid| Some((tid, vm.groups.get(&tid)?)));
        if let Some((tid, known)) = known
            && self.cgroups.group_of(vm.run.pid, tid)? != *known
        {
            vm.groups.clear();
        }
        vm.groups
            .retain(|tid, _| vm.threads.iter().any(|t| t.tid == *tid));
        let is_new = |tid: &i32| !vm.groups.contains_key(tid);
        let new: Vec<i32> = vm.vcpu_tids().filter(is_new).collect();
        for tid in new {
            let group = self.cgroups.group_of(vm.run.pid, tid)?;
            let group = group.map(|group| group.one_with(vm.groups.values().flatten()));
            vm.groups.insert(tid, group);
        }
        Ok(())
    }

    /// Fills in the counts of a modelled PMU, on a host without a real one.
    fn count_by_model(&mut self, vm: &Vm, vcpus: &mut [VcpuSample]) {
        let Some(mover) = vm.memory.mover() else { return };
        let root = self.context.root.clone();
        let Some(modelled) = self.model() else { return };
        let seen = Seen {
            id: vm.run.vm,
            process: vm.run.process(),
            ranges: mover.ranges(),
            ran: &vcpus.iter().map(|vcpu| (vcpu.index, vcpu.running_ns)).collect(),
        };
        match modelled.counters(&root, now(), seen) {
            Ok(counters) => {
                let counters = counters.unwrap_or_default();
                for vcpu in vcpus {
                    vcpu.counters = counters.get(&vcpu.index).copied();
                }
            }
            Err(why) => self
                .context
                .notice(format!("LLC misses of VM {} are not counted: {why}", vm.run.name)),
        }
    }

    /// Returns which nodes used which pages of a VM since the last sample.
    fn page_uses(&mut self, vm: &Vm) -> Option<Vec<PageUse>> {
        if let Some(model) = self.model() {
            return model.page_uses(vm.run.vm);
        }
        let memory = (vm.run.process(), vm.memory.mover()?.ranges());
        let ibs = self.ibs.as_mut().ok()?;
        let uses = ibs.page_uses(&self.context.root, now(), vm.run.vm, memory);
        uses.unwrap_or_else(|error| {
            let name = &vm.run.name;
            self.context.notice(format!(
                "which node uses the pages of VM {name} is unknown: {error}"
            ));
            None
        })
    }

    fn vm_sample(&mut self, vm: &mut Vm, usable: &CpuSet) -> Result<VmSample, ReadError> {
        let groups = GroupsRead::read(vm.vcpu_tids().map(|tid| vm.group(tid)), &mut self.room)?;
        let mut vcpus = Vec::with_capacity(vm.threads.len());
        for thread in &vm.threads {
            let Some(index) = vcpu_index(&thread.role) else {
                continue;
            };
            let (throttled_ns, max) = groups.of(vm.group(thread.tid));
            vcpus.push(VcpuSample {
                index,
                running_ns: thread.running_ns,
                waiting_ns: Some(thread.waiting_ns),
                throttled_ns,
                cpu: thread.cpu.filter(|cpu| usable.contains(*cpu)),
                affinity: thread.affinity.intersection(usable),
                quota: max.and_then(CpuMax::quota),
                counters: self.perf.counters(thread.tid),
            });
        }
        vcpus.sort_by_key(|vcpu| vcpu.index);
        self.count_by_model(vm, &mut vcpus);
        let memory_nodes = self.context.machine.memory_nodes();
        let left = vm.left(&self.context);
        let mut settings = vm.domain.settings(
            left.limit(&self.context.machine),
            vm.pins.operator.iter().copied().collect(),
        );
        if left.cpus.is_empty() {
            settings.management = Management::Ignored;
            let (name, why) = (&vm.domain.name, left.why_nothing());
            self.context.notice(format!("VM {name} is watched only: {why}"));
        }
        if let Some(home) = settings
            .home
            .clone()
            .filter(|home| !home.is_subset(&memory_nodes))
        {
            settings.management = Management::Ignored;
            settings.home = None;
            let name = &vm.domain.name;
            self.context.notice(format!("VM {name} is watched only: its home {home} is not among this host's nodes with memory {memory_nodes}"));
        }
        vm.immovable = vm.why_immovable(&self.context.root, &memory_nodes)?;
        let mut sample = VmSample {
            vcpus,
            memory_bytes: vm.domain.memory_current_bytes,
            pages: vm.memory.pages().cloned(),
            huge_page_bytes: vm.memory.huge_page_bytes(),
            virtual_nodes: vm.virtual_nodes(),
            accesses: self.model().and_then(|model| model.accesses(vm.run.vm)),
            immovable: vm.immovable.clone(),
            bound_to: vm.bound_to(&memory_nodes),
            no_releases: (vm.domain.free_pages == FreePages::Kept).then(|| NO_RELEASES.to_owned()),
            device_nodes: vm.domain.device_nodes(&self.context.root),
            home: vm
                .home
                .as_ref()
                .map_or(HomeInForce::Unplaced, |home| home.0.clone()),
            settings,
            ..VmSample::new(vm.run.vm, vm.domain.name.clone())
        };
        Levers::tell(&mut self.context, vm, &mut sample);
        if sample.memory_policy.migration == Migration::Carrefour {
            sample.page_uses = self.page_uses(vm);
        }
        Ok(sample)
    }
}

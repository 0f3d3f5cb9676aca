//! One VM as the host watches it: who its threads are, what its operator did, where its memory lies.

use std::collections::btree_map;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use homenode_host::{Immovable, Told, VcpuSample, VirtualNode, VmSample};
use homenode_units::{Bytes, CpuSet, MemoryPolicy, Migration, NodeMap, NodeSet, Ns, PAGE_BYTES, Pages};

use super::balloon::Shrunk;
use super::confine::Confined;
use super::lease::CARRIED_LEASE;
use super::quota::Held;
use super::watching::Watching;
use super::{LibvirtHost, now};
use crate::attribution::Seen;
use crate::cgroup::{CpuGroup, CpuMax};
use crate::domain::{Cell, Domain, FreePages};
use crate::journal::{self, Entry, Helper, Pins, Run, StatsPeriod};
use crate::numa_maps::Range;
use crate::pages::Mover;
use crate::read::{self, ReadError};
use crate::task::{self, Process, Role, Thread};
use crate::{meminfo, numa_maps};

/// Reading `numa_maps` may take this part of one CPU's time per VM: it stops the VM's page faults while it walks.
const PAGES_COST_SHARE: u64 = 20;
/// What a domain lacks whose guest keeps its free pages.
const NO_RELEASES: &str = "its guest does not report the pages that it frees; put <memballoon model='virtio' freePageReporting='on'/> \
                           into its <devices> (virsh edit), and start it anew";
/// How often memory that could not be found is looked for again.
const RAM_RETRY: Ns = Ns::from_secs(10);

/// One run of one VM.
pub(super) struct Vm {
    pub run: Run,
    pub handle: virt::domain::Domain,
    xml: String,
    pub domain: Domain,
    /// What it was when first seen; the live XML shows our own pins later.
    pub cpus_allowed: Option<CpuSet>,
    pub operator_helpers: BTreeSet<Helper>,
    pub operator_pins: BTreeSet<u16>,
    /// CPUs of its vCPUs before an agent first touched it; restoring leaves them as pins in the XML.
    pub restored: BTreeMap<u16, CpuSet>,
    /// What the agent pinned last.
    pub ours: BTreeMap<u16, CpuSet>,
    pub threads: Vec<Thread>,
    groups: BTreeMap<i32, Option<CpuGroup>>,
    pub memory: Memory,
    pub home: Option<NodeSet>,
    /// Memory policy that an agent set.
    pub memory_policy: MemoryPolicy,
    /// CPU quota that an agent set, while it is in force.
    pub held: Option<Held>,
    /// Part of caches or memory bandwidth that an agent confined it to, while that is in force.
    pub confined: Option<Confined>,
    /// Watch on the use of its memory, while there is one.
    pub watching: Option<Watching>,
    /// Memory that an agent gave it, while less than the operator's is in force.
    pub shrunk: Option<Shrunk>,
    /// How often its guest was asked for memory statistics before an agent changed that, in seconds.
    pub asked_before: Option<u32>,
    /// Why its memory is to be left where it is for now.
    standstill: Option<Immovable>,
    /// What its guest was told last.
    pub told: Option<Told>,
}

/// Where a VM's memory lies.
#[derive(Default)]
pub(super) struct Memory {
    sizes: Vec<Bytes>,
    /// All of it, once it was found.
    whole: Option<Part>,
    /// Each node that the guest sees, if it has memory.
    virtual_nodes: Vec<Option<Part>>,
    next_read: Ns,
}

/// Memory that is moved by itself.
pub(super) struct Part {
    pub mover: Mover,
    pub pages: Option<NodeMap<Pages>>,
}

/// Which part of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Whole,
    VirtualNode(u16),
}

impl Memory {
    /// Memory that was found in these ranges.
    fn found(pid: i32, sizes: Vec<Bytes>, ranges: Vec<Range>, cells: &[Cell]) -> Memory {
        let part = |ranges| Part {
            mover: Mover::new(pid, ranges),
            pages: None,
        };
        // Memory objects come in the order of the cells that have memory.
        let mut objects = numa_maps::objects(&ranges, &sizes).into_iter();
        let of_cell = |cell: &Cell| {
            let object = (cell.memory_bytes > Bytes::ZERO).then(|| objects.next())??;
            Some(part(vec![ranges.get(object)?.clone()]))
        };
        Memory {
            virtual_nodes: cells.iter().map(of_cell).collect(),
            sizes,
            whole: Some(part(ranges)),
            next_read: Ns::ZERO,
        }
    }

    /// The walk over all of it, once it was found.
    pub fn mover(&self) -> Option<&Mover> {
        self.whole.as_ref().map(|whole| &whole.mover)
    }

    /// Where all of it lies, where that is known.
    pub fn pages(&self) -> Option<&NodeMap<Pages>> {
        self.whole.as_ref()?.pages.as_ref()
    }

    /// A part of it, where it was found.
    pub fn part(&mut self, which: Which) -> Option<&mut Part> {
        match which {
            Which::Whole => self.whole.as_mut(),
            Which::VirtualNode(at) => self.virtual_nodes.get_mut(usize::from(at))?.as_mut(),
        }
    }

    fn parts(&mut self) -> impl Iterator<Item = &mut Part> {
        self.whole
            .iter_mut()
            .chain(self.virtual_nodes.iter_mut().flatten())
    }
}

impl Run {
    /// Its QEMU process.
    pub(super) fn process(&self) -> Process {
        Process {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
}

impl Entry {
    /// Its QEMU process.
    pub(super) fn process(&self) -> Process {
        self.run.process()
    }
}

impl Vm {
    /// Threads that run vCPUs.
    pub fn vcpu_tids(&self) -> impl Iterator<Item = i32> + '_ {
        self.threads
            .iter()
            .filter(|t| matches!(t.role, Role::Vcpu(_)))
            .map(|t| t.tid)
    }

    /// The thread that runs this vCPU.
    pub fn vcpu_thread(&self, index: u16) -> Option<&Thread> {
        self.threads.iter().find(|t| t.role == Role::Vcpu(index))
    }

    /// The cgroup that limits a thread's CPU time, where it is known.
    pub fn group(&self, tid: i32) -> Option<&CpuGroup> {
        self.groups.get(&tid)?.as_ref()
    }

    /// Whether libvirt can change its memory nodes while it runs.
    pub fn restrictive_nodes(&self) -> Option<&NodeSet> {
        let tune = self
            .domain
            .numatune
            .as_ref()
            .filter(|tune| tune.mode == "restrictive")?;
        tune.nodes.as_ref()
    }

    /// Takes in what someone else did to its pins since the last look; says what, for the operator.
    fn reconcile_pins(&mut self, usable: &CpuSet, is_first: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let name = self.domain.name.clone();
        let indices: Vec<u16> = self.threads.iter().filter_map(|t| vcpu_index(&t.role)).collect();
        for index in indices {
            let written = self
                .domain
                .vcpu_pins
                .get(&index)
                .map(|pin| pin.intersection(usable));
            let in_force = self
                .vcpu_thread(index)
                .map(|t| t.affinity.intersection(usable))
                .unwrap_or_default();
            if let Some(ours) = self.ours.get(&index) {
                let differs = written.as_ref().is_some_and(|w| w != ours) || in_force != *ours;
                if !differs {
                    continue;
                }
                self.ours.remove(&index);
                // An agent that died between journal and pin leaves a pin that never came into force.
                if is_first && (written.is_none() || written == self.restored_affinity(index, usable)) {
                    continue;
                }
                if in_force != *usable {
                    self.operator_pins.insert(index);
                    notes.push(format!("vCPU {index} of VM {name} was pinned to CPUs {in_force} by someone else; the agent leaves it alone"));
                }
            } else {
                let is_pinned = written.as_ref().is_some_and(|w| w != usable)
                    && (written != self.restored_affinity(index, usable)
                        || self.operator_pins.contains(&index));
                if is_pinned && self.operator_pins.insert(index) && !is_first {
                    notes.push(format!("vCPU {index} of VM {name} was pinned to CPUs {in_force} by someone else; the agent leaves it alone"));
                }
                if !is_pinned && self.operator_pins.remove(&index) {
                    notes.push(format!(
                        "vCPU {index} of VM {name} is no longer pinned by hand; the agent manages it"
                    ));
                }
            }
        }
        notes
    }

    /// The pin that restoring this vCPU left behind, if the operator had none.
    fn restored_affinity(&self, index: u16, usable: &CpuSet) -> Option<CpuSet> {
        self.restored.get(&index).map(|cpus| cpus.intersection(usable))
    }

    /// Why its memory cannot move, if it cannot.
    fn immovable(&self, root: &Path, memory_nodes: &NodeSet) -> Result<Option<Immovable>, ReadError> {
        if !self.domain.assigned_devices.is_empty() {
            return Ok(Some(Immovable::Vfio));
        }
        if self.standstill.is_some() {
            return Ok(self.standstill.clone());
        }
        if self.domain.locked.is_some() {
            return Ok(Some(Immovable::Locked));
        }
        if self.restrictive_nodes().is_none() {
            let limits = [
                self.threads.first().map(|t| t.memory_nodes.clone()),
                self.domain
                    .numatune
                    .as_ref()
                    .filter(|t| t.mode == "strict")
                    .and_then(|t| t.nodes.clone()),
            ];
            let allowed = limits
                .into_iter()
                .flatten()
                .fold(memory_nodes.clone(), |a, b| a.intersection(&b));
            if allowed != *memory_nodes {
                return Ok(Some(Immovable::BoundAtStart { nodes: allowed }));
            }
        }
        let page_bytes = self
            .memory
            .mover()
            .into_iter()
            .flat_map(Mover::ranges)
            .map(|r| r.page_bytes)
            .max();
        match page_bytes.filter(|bytes| bytes.0 > PAGE_BYTES) {
            Some(page_bytes) if !self.huge_pages_fit_elsewhere(root, memory_nodes, page_bytes)? => {
                Ok(Some(Immovable::HugePages { page_bytes }))
            }
            _ => Ok(None),
        }
    }

    /// Whether some node that does not hold the whole VM has enough free huge pages for the rest of it.
    fn huge_pages_fit_elsewhere(
        &self,
        root: &Path,
        nodes: &NodeSet,
        page_bytes: Bytes,
    ) -> Result<bool, ReadError> {
        let Some(pages) = self.memory.pages() else {
            return Ok(false);
        };
        let total: Pages = pages.values().copied().sum();
        for node in nodes.iter() {
            let rest = total.saturating_sub(pages.get(node).copied().unwrap_or_default());
            let sizes = meminfo::huge_pages(root, node)?;
            let free = sizes
                .iter()
                .find(|size| size.page_bytes == page_bytes)
                .map_or(0, |size| size.free_count);
            if rest > Pages::ZERO && free.saturating_mul(page_bytes.0 / PAGE_BYTES) >= rest.0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads where its pages lie, if that is due.
    pub fn refresh_pages(&mut self, root: &Path, at: Ns) -> Result<(), ReadError> {
        let pid = self.run.pid;
        if self.memory.sizes != self.domain.ram_sizes {
            self.memory = Memory {
                sizes: self.domain.ram_sizes.clone(),
                ..Memory::default()
            }; // a DIMM came or went
        }
        if at < self.memory.next_read {
            return Ok(());
        }
        let start = now();
        if self.memory.whole.is_none()
            && let Some(ranges) = numa_maps::guest_ram(root, pid, &self.memory.sizes)?
        {
            let sizes = std::mem::take(&mut self.memory.sizes);
            self.memory = Memory::found(pid, sizes, ranges, &self.domain.cells);
        }
        let Some(mover) = self.memory.mover() else {
            self.memory.next_read = at + RAM_RETRY;
            return Ok(());
        };
        let ranges = mover.ranges().to_vec();
        let pages = numa_maps::pages_per_node(root, pid, &ranges)?;
        for part in self.memory.parts() {
            part.pages = pages.as_ref().map(|pages| {
                let is_own = |(range, _): &(&Range, &NodeMap<Pages>)| part.mover.ranges().contains(range);
                let own = ranges.iter().zip(pages).filter(is_own);
                numa_maps::sum(own.map(|(_, pages)| pages))
            });
        }
        let cost = now().saturating_sub(start);
        self.memory.next_read = at + Ns(cost.0.saturating_mul(PAGES_COST_SHARE));
        Ok(())
    }

    /// The nodes that its guest sees, if they are several.
    fn virtual_nodes(&self) -> Vec<VirtualNode> {
        let cells = &self.domain.cells;
        let node = |(at, cell): (usize, &Cell)| VirtualNode {
            vcpus: cell.vcpus.clone(),
            memory_bytes: cell.memory_bytes,
            pages: self
                .memory
                .virtual_nodes
                .get(at)
                .and_then(|part| part.as_ref()?.pages.clone()),
        };
        let several = cells.iter().enumerate().filter(|_| cells.len() > 1);
        several.map(node).collect()
    }

    /// Has the next look at its pages come from the kernel.
    pub fn forget_pages(&mut self) {
        self.memory.next_read = Ns::ZERO;
    }
}

fn vcpu_index(role: &Role) -> Option<u16> {
    match role {
        Role::Vcpu(index) => Some(*index),
        _ => None,
    }
}

impl LibvirtHost {
    /// Looks at one domain. `None` where it has no QEMU process with vCPUs (it is just starting, or ending).
    pub(super) fn watch(
        &mut self,
        handle: virt::domain::Domain,
        xml: String,
        at: Ns,
    ) -> Result<Option<VmSample>, String> {
        let domain = Domain::parse(&xml).map_err(|e| format!("a domain is left out: {e}"))?;
        let (id, name) = (domain.id, domain.name.clone());
        let failed = |e: ReadError| format!("VM {name} is left out: {e}");
        let known = self.vms.remove(&id).filter(|vm| {
            Some(vm.run.runtime_id) == domain.runtime_id && task::is_alive(&self.root, vm.run.process())
        });
        let is_first = known.is_none();
        let mut vm = match known {
            Some(vm) if vm.xml == xml => Vm { handle, ..vm },
            Some(vm) => Vm {
                handle,
                xml,
                domain,
                ..vm
            },
            None => match self.first_sight(handle, xml, domain).map_err(failed)? {
                Some(vm) => vm,
                None => return Ok(None),
            },
        };
        vm.threads = task::threads(&self.root, vm.run.pid).map_err(failed)?;
        if vm.vcpu_tids().next().is_none() {
            return Ok(None);
        }
        // Where libvirt does not say, acting will.
        vm.standstill = self.libvirt.standstill(&vm.handle).unwrap_or_default();
        let usable = self.machine.cpu_set();
        for note in vm.reconcile_pins(&usable, is_first) {
            self.notice(note);
        }
        if let Err(error) = vm.refresh_pages(&self.root, at) {
            vm.memory.parts().for_each(|part| part.pages = None);
            self.notice(format!("where the memory of VM {name} lies is unknown: {error}"));
        } else if vm.memory.whole.is_none() {
            self.notice(format!("where the memory of VM {name} lies is unknown: no mapping of its QEMU has the size of its memory"));
        }
        self.find_groups(&mut vm).map_err(failed)?;
        self.reconcile_quota(&mut vm, is_first);
        self.reconcile_memory(&mut vm);
        self.question(&mut vm);
        let sample = self.vm_sample(&mut vm, &usable).map_err(failed)?;
        self.vms.insert(id, vm);
        Ok(Some(sample))
    }

    /// Gets to know a VM: its process, and what its operator wants, which later cannot be told from our own pins.
    fn first_sight(
        &mut self,
        handle: virt::domain::Domain,
        xml: String,
        domain: Domain,
    ) -> Result<Option<Vm>, ReadError> {
        let Some(runtime_id) = domain.runtime_id else {
            return Ok(None);
        };
        let Some(process) = self.qemu_of(&domain)? else {
            return Ok(None);
        };
        let Process { pid, start_ticks } = process;
        let run = Run {
            vm: domain.id,
            name: domain.name.clone(),
            runtime_id,
            pid,
            start_ticks,
        };
        if let Err(why) = &domain.settings {
            let text = format!(
                "VM {} is watched only: its homenode metadata is wrong: {why}",
                domain.name
            );
            self.notice(text);
        }
        let usable = self.machine.cpu_set();
        let cpus_allowed = domain.cpuset.as_ref().map(|set| set.intersection(&usable));
        let cpus_allowed = cpus_allowed.filter(|set| !set.is_empty() && *set != usable);
        let (mut operator_pins, mut ours, mut restored) = (BTreeSet::new(), BTreeMap::new(), BTreeMap::new());
        let (mut home, mut held, mut confined) = (None, None, None);
        let (mut shrunk, mut asked_before) = (None, None);
        let mut operator_helpers: BTreeSet<Helper> = domain
            .iothread_pins
            .keys()
            .map(|id| Helper::IoThread(*id))
            .collect();
        operator_helpers.extend(domain.emulator_pin.as_ref().map(|_| Helper::Emulator));
        let entry = self
            .acts
            .as_ref()
            .map_or_else(|| self.carried.get(&run.vm), |a| a.journal.entry(run.vm));
        if let Some(entry) = entry.filter(|entry| entry.run == run) {
            operator_pins = entry.before.operator_pins.iter().copied().collect();
            ours = entry.get::<Pins>().unwrap_or_default().0;
            home = entry.get().map(|journal::Home(nodes)| nodes);
            restored = entry.before.vcpus.clone();
            let until = now() + CARRIED_LEASE;
            held = entry.get().map(|quotas| Held { quotas, until });
            confined = entry
                .get()
                .map(|journal::Confined(limit)| Confined { limit, until });
            shrunk = entry.get().map(|shrink| Shrunk {
                shrink,
                until,
                is_there: false,
                memory_kib: domain.memory_kib,
            });
            asked_before = entry.get().map(|StatsPeriod { before_s }| before_s);
            operator_helpers = entry.before.operator_helpers.iter().copied().collect();
        }
        Ok(Some(Vm {
            run,
            handle,
            xml,
            domain,
            cpus_allowed,
            operator_helpers,
            operator_pins,
            restored,
            ours,
            threads: Vec::new(),
            groups: BTreeMap::new(),
            memory: Memory::default(),
            home,
            memory_policy: MemoryPolicy::default(),
            held,
            confined,
            watching: None,
            shrunk,
            asked_before,
            standstill: None,
            told: None,
        }))
    }

    /// The QEMU process of a domain: from libvirt's pid file, else by its command line.
    fn qemu_of(&self, domain: &Domain) -> Result<Option<Process>, ReadError> {
        let uuid = domain.id.to_string();
        let path = self
            .root
            .join("run/libvirt/qemu")
            .join(format!("{}.pid", domain.name));
        if let Some(pid) = read::value_if_there(&path, "a process id")?
            && task::is_qemu_of(&self.root, pid, &uuid)
        {
            return task::process(&self.root, pid);
        }
        task::find_qemu(&self.root, &uuid)
    }

    /// Finds the cgroups of vCPUs that are new.
    fn find_groups(&self, vm: &mut Vm) -> Result<(), ReadError> {
        vm.groups
            .retain(|tid, _| vm.threads.iter().any(|t| t.tid == *tid));
        let tids: Vec<i32> = vm.vcpu_tids().collect();
        for tid in tids {
            if let btree_map::Entry::Vacant(vacant) = vm.groups.entry(tid) {
                vacant.insert(self.cgroups.group_of(vm.run.pid, tid)?);
            }
        }
        Ok(())
    }

    /// Fills in what a modelled PMU counts, on a host that has no other.
    fn count_by_model(&mut self, vm: &Vm, vcpus: &mut [VcpuSample]) {
        let Some(mover) = vm.memory.mover() else { return };
        let root = self.root.clone();
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
            Err(why) => self.notice(format!("LLC misses of VM {} are not counted: {why}", vm.run.name)),
        }
    }

    fn vm_sample(&mut self, vm: &mut Vm, usable: &CpuSet) -> Result<VmSample, ReadError> {
        let vcpu_count = vm.vcpu_tids().count();
        let mut vcpus = Vec::with_capacity(vcpu_count);
        for thread in &vm.threads {
            let Some(index) = vcpu_index(&thread.role) else {
                continue;
            };
            let group = vm.group(thread.tid);
            let throttled = match group {
                Some(group) => group.throttled()?.unwrap_or_default(),
                None => Default::default(),
            };
            vcpus.push(VcpuSample {
                index,
                running_ns: thread.running_ns,
                waiting_ns: thread.waiting_ns,
                throttled_ns: throttled.per_vcpu(vcpu_count),
                cpu: thread.cpu.filter(|cpu| usable.contains(*cpu)),
                affinity: thread.affinity.intersection(usable),
                quota: group.map_or(Ok(None), CpuGroup::max)?.and_then(CpuMax::quota),
                counters: self.perf.counters(thread.tid),
            });
        }
        vcpus.sort_by_key(|vcpu| vcpu.index);
        self.count_by_model(vm, &mut vcpus);
        let memory_nodes = self.machine.memory_nodes();
        let mut settings = vm.domain.settings(
            vm.cpus_allowed.clone(),
            vm.operator_pins.iter().copied().collect(),
        );
        settings.quota = match vm.held {
            Some(held) => held.quotas.before,
            None => vcpus.first().and_then(|vcpu| vcpu.quota),
        };
        if let Some(home) = settings
            .home
            .clone()
            .filter(|home| !home.is_subset(&memory_nodes))
        {
            settings.management = homenode_host::Management::Ignored;
            settings.home = None;
            let name = &vm.domain.name;
            self.notice(format!("VM {name} is watched only: its home {home} is not among this host's nodes with memory {memory_nodes}"));
        }
        Ok(VmSample {
            id: vm.run.vm,
            name: vm.domain.name.clone(),
            vcpus,
            memory_bytes: vm.domain.memory_current_bytes,
            balloon: self.balloon(vm),
            pages: vm.memory.pages().cloned(),
            virtual_nodes: vm.virtual_nodes(),
            no_feed: self.no_feed(vm),
            told: vm.told.clone(),
            accesses: self.model().and_then(|model| model.accesses(vm.run.vm)),
            memory_policy: vm.memory_policy,
            observed: self.observed(vm),
            page_uses: match vm.memory_policy.migration {
                Migration::Carrefour => self.model().and_then(|model| model.page_uses(vm.run.vm)),
                Migration::None | Migration::AutoNuma => None,
            },
            immovable: vm.immovable(&self.root, &memory_nodes)?,
            no_releases: (vm.domain.free_pages == FreePages::Kept).then(|| NO_RELEASES.to_owned()),
            confined: vm.confined.map(|confined| confined.limit),
            device_nodes: vm.domain.device_nodes(&self.root),
            settings,
        })
    }
}

//! A real KVM host behind the host contract.
//!
//! Everything that changes a VM goes through libvirt, so that libvirt's idea of the VM stays true; only pages
//! move past it, with `move_pages(2)`, which libvirt has no throttled call for. What was set is read back from
//! the kernel. No cgroup or cpuset file is ever written, and of resctrl only groups of the agent's own.
//!
//! ```text
//!   sample ─ list of domains, their XML (libvirt) ─ threads, cgroups, numa_maps (/proc) ─ perf, uncore ─▶ Sample
//!   commit ─ Plan::check ─ as sampled? ─ journal ─ act ─ read back ─▶ Receipt
//! ```

mod act;
mod balloon;
mod confine;
mod connection;
mod feed;
mod home;
mod lease;
mod quota;
mod vm;
mod watching;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use homenode_host::{
    ActionError, CountedBy, CpuQuota, CpuSample, Failure, Host, HostError, NodeSample, Outcome, Plan,
    Receipt, Refusal, Sample, Setting, Version, VmSettings,
};
use homenode_machine::Machine;
use homenode_units::{Bytes, CpuId, CpuSet, MemoryPolicy, Migration, NodeMap, NodeSet, Ns, Placing, VmId};

use crate::attribution::{Attribution, Sampler};
use crate::carriers::damon::Damon;
use crate::cgroup::Hierarchy;
use crate::confine::Confiner;
use crate::domain::Domain;
use crate::journal::{self, Journal, JournalError, Lock, Moving, Pins, StatsPeriod, Undo};
use crate::perf::Perf;
use crate::read::ReadError;
use crate::resctrl::Resctrl;
use crate::uncore::{self, Uncore};
use crate::{carriers, meminfo, memory_blocks, modelled_pmu, proc_stat, read, task};

use connection::{CallError, Libvirt};
use feed::Feed;
use vm::Vm;

/// Where an agent serves topology pages.
pub const TOPOLOGY_SOCKET: &str = "/run/homenode/topology.sock";

/// Whether the host carries out plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acting {
    /// It does.
    Live,
    /// It checks plans and answers [`Outcome::DryRun`]; it takes no lock and writes no journal.
    DryRun,
}

/// How to watch and act on a host.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the host is.
    pub machine: Machine,
    /// Root of `/proc`, `/sys` and `/run`: `/`, but in tests.
    pub root: PathBuf,
    /// Where the journal and the lock lie.
    pub state_dir: PathBuf,
    /// Where guests' QEMUs find their topology pages.
    pub topology_socket: PathBuf,
    /// Whether plans are carried out.
    pub acting: Acting,
    /// Set to end waiting and moving early (a signal came).
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// A live host with its usual places.
    pub fn new(machine: Machine) -> Options {
        Options {
            machine,
            root: PathBuf::from("/"),
            state_dir: PathBuf::from(journal::STATE_DIR),
            topology_socket: PathBuf::from(TOPOLOGY_SOCKET),
            acting: Acting::Live,
            stop: Arc::new(AtomicBool::new(false)),
        }
    }
}

/// Why a host cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers.
    #[error(
        "no libvirt at {uri}: {cause}. Is libvirtd (or virtqemud) running? Start it with `systemctl start libvirtd`, or install it (Debian: libvirt-daemon-system)"
    )]
    NoLibvirt {
        /// The address.
        uri: String,
        /// What libvirt's library said.
        cause: String,
    },
    /// It answers, but not to us.
    #[error("libvirt at {uri} refuses this user: {cause}. Run as root, or join the group `libvirt`")]
    NotPermitted {
        /// The address.
        uri: String,
        /// What it said.
        cause: String,
    },
    /// No libvirt could have this address.
    #[error("`{uri}` is not an address that libvirt knows: {cause}. KVM on this host is `qemu:///system`")]
    BadUri {
        /// The address.
        uri: String,
        /// What libvirt's library said.
        cause: String,
    },
    /// The journal or its lock cannot be had.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A kernel file that every host has is missing or malformed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// What the journal of an earlier agent says of a VM that still runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedOver {
    /// The VM.
    pub vm: VmId,
    /// Its home.
    pub home: Option<NodeSet>,
    /// CPUs that it gave vCPUs.
    pub pins: BTreeMap<u16, CpuSet>,
    /// Where its pages were moving to when that agent ended.
    pub moving: Option<NodeSet>,
}

/// What a plan relies on: two samples with equal views have equal versions.
type Fingerprint = BTreeMap<
    VmId,
    (
        u32,
        Vec<(u16, CpuSet, Option<CpuQuota>)>,
        Option<Bytes>,
        VmSettings,
    ),
>;

/// Where plans are written down before they are carried out.
struct Acts {
    journal: Journal,
    _lock: Lock,
}

/// A host whose VMs libvirt runs under KVM.
pub struct LibvirtHost {
    machine: Machine,
    root: PathBuf,
    stop: Arc<AtomicBool>,
    libvirt: Libvirt,
    /// Absent in a dry run.
    acts: Option<Acts>,
    /// What was in force when this agent started.
    carried: BTreeMap<VmId, journal::Entry>,
    cgroups: Hierarchy,
    perf: Perf,
    /// Of an emulated host, for where it has no other; its tags are who acts' alone.
    modelled: Option<Attribution>,
    uncore: Uncore,
    resctrl: Option<Resctrl>,
    feed: Feed,
    vms: BTreeMap<VmId, Vm>,
    busy: BTreeMap<CpuId, Ns>,
    fingerprint: Fingerprint,
    last: Sample,
    said: BTreeSet<String>,
    notices: Vec<String>,
}

/// Notices that are remembered in order to be said once.
const SAID_MAX: usize = 4096;
/// How long a new agent waits for a guard that is just undoing.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

impl LibvirtHost {
    /// Address of the system's KVM hosts.
    pub const DEFAULT_URI: &str = "qemu:///system";

    /// Whether libvirt answers at `uri`.
    ///
    /// # Errors
    /// As [`LibvirtHost::connect`], without looking at journal or kernel.
    pub fn probe(uri: &str) -> Result<(), ConnectError> {
        Libvirt::open(uri).map(drop)
    }

    /// Connects to libvirt at `uri` (`qemu:///system`), and takes over the journal.
    ///
    /// # Errors
    /// Each is a sentence with its remedy.
    pub fn connect(uri: &str, options: Options) -> Result<LibvirtHost, ConnectError> {
        let Options {
            machine,
            root,
            state_dir,
            topology_socket,
            acting,
            stop,
        } = options;
        let libvirt = Libvirt::open(uri)?;
        let cgroups = Hierarchy::read(&root)?;
        let mut notices = Vec::new();
        let (acts, carried) = match acting {
            Acting::DryRun => (None, journal::peek(&state_dir)),
            Acting::Live => {
                let lock = Lock::take(&state_dir, LOCK_PATIENCE)?;
                let mut journal = Journal::open(&state_dir)?;
                notices.append(&mut journal.warnings);
                let carried = journal.entries().clone();
                (Some(Acts { journal, _lock: lock }), carried)
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
        let feed = Feed::open(topology_socket, acting);
        notices.extend(feed.trouble(acting));
        Ok(LibvirtHost {
            machine,
            root,
            stop,
            libvirt,
            acts,
            carried,
            cgroups,
            perf: Perf::new(&cpuinfo),
            modelled,
            uncore,
            resctrl,
            feed,
            vms: BTreeMap::new(),
            busy: BTreeMap::new(),
            fingerprint: Fingerprint::new(),
            last: Sample::default(),
            said: BTreeSet::new(),
            notices,
        })
    }

    /// What the operator should know and no sample carries: missing counters, broken settings, changes made by
    /// someone else. Each is given once.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Homes, pins and unfinished moves that an earlier agent left, of VMs that still run.
    pub fn carried_over(&self) -> Vec<CarriedOver> {
        let in_force = self
            .carried
            .iter()
            .filter(|(_, e)| e.is_in_force() || e.get::<Moving>().is_some());
        let alive = in_force.filter(|(_, e)| task::is_alive(&self.root, e.process()));
        let carried = alive.map(|(&vm, e)| CarriedOver {
            vm,
            home: e.get().map(|journal::Home(nodes)| nodes),
            pins: e.get::<Pins>().unwrap_or_default().0,
            moving: e.get().map(|Moving(to)| to),
        });
        carried.collect()
    }

    /// Restores every VM that was touched, as the guard would; what cannot be restored is said and stays journalled.
    pub fn restore(&mut self) -> Vec<String> {
        let Some(acts) = &mut self.acts else {
            return Vec::new();
        };
        // Threads that watch end before what they watch with is taken down.
        self.vms.clear();
        let mut failures = Vec::new();
        for step in acts.journal.undo() {
            let undone = restore_vm(&mut self.libvirt, &self.root, &step);
            let vm = step.run.vm;
            match undone.and_then(|()| acts.journal.clear_all(vm).map_err(|e| e.to_string())) {
                Ok(()) => drop(self.carried.remove(&vm)),
                Err(cause) => failures.push(format!("VM {} could not be restored: {cause}", step.run.name)),
            }
        }
        failures
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

    fn notice(&mut self, text: String) {
        if self.said.len() < SAID_MAX && self.said.insert(text.clone()) {
            self.notices.push(text);
        }
    }

    /// Looks at every running domain, and forgets those that ended.
    fn sample_vms(&mut self, at: Ns) -> Result<Vec<homenode_host::VmSample>, HostError> {
        let domains = match self.libvirt.list() {
            Ok(domains) => domains,
            Err(error) => return Err(self.libvirt.unreachable(error.cause())),
        };
        let mut samples = Vec::with_capacity(domains.len());
        let mut seen = BTreeSet::new();
        for handle in domains {
            let xml = match self.libvirt.xml(&handle) {
                Ok(xml) => xml,
                Err(CallError::Lost(cause)) => return Err(self.libvirt.unreachable(&cause)),
                Err(CallError::Refused(_)) => continue, // it ended since it was listed
            };
            match self.watch(handle, xml, at) {
                Ok(Some(sample)) => {
                    seen.insert(sample.id);
                    samples.push(sample);
                }
                Ok(None) => {}
                Err(text) => self.notice(text),
            }
        }
        samples.sort_by_key(|vm| vm.id);
        let gone: Vec<VmId> = self.vms.keys().filter(|vm| !seen.contains(vm)).copied().collect();
        for vm in gone {
            self.vms.remove(&vm);
        }
        self.forget_ended();
        let tids: BTreeSet<i32> = self.vms.values().flat_map(Vm::vcpu_tids).collect();
        self.perf.keep_only(&tids);
        if let Some(modelled) = &mut self.modelled {
            modelled.keep_only(|vm| self.vms.contains_key(&vm));
        }
        Ok(samples)
    }

    /// Drops VMs from the journal whose QEMU ended. A VM that libvirt merely does not list (it is restarting) stays.
    fn forget_ended(&mut self) {
        let Some(acts) = &mut self.acts else { return };
        let over = acts
            .journal
            .entries()
            .iter()
            .filter(|(_, e)| !task::is_alive(&self.root, e.process()));
        let over: Vec<VmId> = over.map(|(vm, _)| *vm).collect();
        for vm in over {
            self.carried.remove(&vm);
            let entry = acts.journal.entry(vm);
            if entry.is_some_and(|entry| entry.get::<journal::Confined>().is_some())
                && let Err(error) = Confiner::new(&self.root).release(vm)
            {
                self.notices.push(error.to_string());
            }
            if let Some(pid) = entry
                .filter(|entry| entry.get::<journal::Watched>().is_some())
                .map(|entry| entry.run.pid)
                && let Err(error) = Damon::new(&self.root).end(pid)
            {
                self.notices.push(error.to_string());
            }
            if let Err(error) = acts.journal.forget(vm) {
                self.notices.push(error.to_string());
                return;
            }
        }
    }

    fn sample_cpus(&mut self) -> Result<Vec<CpuSample>, HostError> {
        self.busy.extend(proc_stat::read(&self.root)?);
        // A CPU that went offline keeps what it had: the list of CPUs does not change while the host value lives.
        let busy = |id: CpuId| self.busy.get(&id).copied().unwrap_or_default();
        Ok(self
            .machine
            .cpus
            .iter()
            .map(|cpu| CpuSample {
                id: cpu.id,
                busy_ns: busy(cpu.id),
            })
            .collect())
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
                self.notice(note);
            }
        }
        if traffic.is_empty()
            && let Some(model) = self.model()
        {
            traffic = model.traffic();
        }
        let mut nodes = NodeMap::new();
        for node in self.machine.node_set().iter() {
            let memory = meminfo::read(&self.root, node)?;
            nodes.insert(
                node,
                NodeSample {
                    memory_total_bytes: memory.map_or(Bytes::ZERO, |m| m.total_bytes),
                    memory_free_bytes: memory.map_or(Bytes::ZERO, |m| m.free_bytes),
                    memory_traffic_bytes: traffic.get(node).copied(),
                },
            );
        }
        Ok((nodes, links))
    }

    /// Gives the version of this view: a new one where it differs from the last.
    fn version_of(&mut self, vms: &[homenode_host::VmSample]) -> Version {
        let view = |vm: &homenode_host::VmSample| {
            let vcpus = vm.vcpus.iter();
            let affinities = vcpus.map(|v| (v.index, v.affinity.clone(), v.quota)).collect();
            let runtime = self.vms.get(&vm.id).map_or(0, |known| known.run.runtime_id);
            let limit = vm.balloon.and_then(|balloon| balloon.limit);
            (vm.id, (runtime, affinities, limit, vm.settings.clone()))
        };
        let now: Fingerprint = vms.iter().map(view).collect();
        if now != self.fingerprint || self.last.version == Version::default() {
            self.fingerprint = now;
            self.last.version = Version(self.last.version.0 + 1);
        }
        self.last.version
    }
}

impl Host for LibvirtHost {
    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn wait(&mut self, period: Ns) {
        let slice = Ns::from_millis(50);
        let end = now() + period;
        while now() < end && !self.stop.load(Ordering::Relaxed) {
            let rest = end.saturating_sub(now()).min(slice);
            std::thread::sleep(Duration::from_nanos(rest.0));
            self.end_leases();
        }
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.end_leases();
        let at = now();
        let cpus = self.sample_cpus()?;
        if let Some(model) = self.model() {
            model.begin(cpus.iter().map(|cpu| cpu.busy_ns).sum());
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
            self.notice(format!("no hardware counters: {why}; {instead}"));
        }
        if let Some(refusal) = self.feed.take_refusal() {
            self.notice(refusal);
        }
        if let Some(note) = self.perf.note() {
            self.notice(note.to_owned());
        }
        let version = self.version_of(&vms);
        self.last = Sample {
            at,
            version,
            counted_by,
            cpus,
            nodes,
            links,
            no_page_uses: self.no_page_uses(),
            carriers: carriers::choices(&self.root, carriers::Runs::Kvm),
            vms,
        };
        Ok(self.last.clone())
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        plan.check(&self.machine, &self.last)?;
        self.refuse_changed(plan)?;
        let mut outcomes = Vec::with_capacity(plan.decisions.len());
        for decision in &plan.decisions {
            outcomes.push(match self.acts {
                Some(_) => self.act(&decision.action).unwrap_or_else(Outcome::Failed),
                None => Outcome::DryRun,
            });
        }
        let touched: BTreeSet<VmId> = plan.decisions.iter().map(|d| d.action.vm).collect();
        self.take_in_changes(&touched);
        Ok(Receipt {
            version: self.last.version,
            outcomes,
        })
    }

    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        let Some(known) = self.vms.get(&vm) else {
            return Err(Failure::VmGone.on(&vm.to_string()));
        };
        let name = known.run.name.clone();
        let failed = |cause: String| {
            let what = format!("setting the {}", setting.name());
            Failure::Host { what, cause }.on(&name)
        };
        if self.acts.is_none() {
            return Err(failed(
                "this agent runs with --dry-run and touches nothing".into(),
            ));
        }
        if let Setting::MemoryPolicy(Some(policy)) = setting {
            memory_policy_is_possible(&name, policy, self.no_page_uses().as_deref())?;
        }
        let element = match &known.domain.settings {
            Ok(said) => said.with(setting),
            Err(why) => return Err(failed(format!("its homenode metadata is wrong: {why}"))),
        };
        let handle = known.handle.clone();
        self.libvirt
            .set_metadata(&handle, element.as_deref())
            .map_err(|e| failed(e.cause().to_owned()))
    }
}

/// Restores one VM for the guard. `Ok` also when that run of the VM is over.
///
/// # Errors
/// When libvirt does not answer or refuses; worth another try.
pub fn undo(uri: &str, root: &Path, step: &Undo) -> Result<(), String> {
    let mut libvirt = Libvirt::open(uri).map_err(|e| e.to_string())?;
    restore_vm(&mut libvirt, root, step)
}

fn restore_vm(libvirt: &mut Libvirt, root: &Path, step: &Undo) -> Result<(), String> {
    let over = || !task::is_alive(root, step.run.process());
    if step.is_watched {
        // DAMON outlives the VM that it watched.
        Damon::new(root).end(step.run.pid).map_err(|e| e.to_string())?;
    }
    if step.is_confined {
        // A group outlives the VM whose it was.
        Confiner::new(root)
            .release(step.run.vm)
            .map_err(|e| e.to_string())?;
    }
    if over() {
        return Ok(());
    }
    let said = |e: CallError| e.cause().to_owned();
    let found = libvirt.find(&step.run.vm.to_string()).map_err(said)?;
    let Some(domain) = found.filter(|domain| domain.id() == Some(step.run.runtime_id)) else {
        return if over() {
            Ok(())
        } else {
            Err("its QEMU runs and libvirt does not list it".into())
        };
    };
    let mut failures = Vec::new();
    let mut note = |what: String, result: Result<(), CallError>| {
        failures.extend(result.err().map(|e| format!("{what}: {}", e.cause())));
    };
    for (&index, cpus) in step.vcpus.iter().filter(|(_, cpus)| !cpus.is_empty()) {
        note(format!("vCPU {index}"), libvirt.pin_vcpu(&domain, index, cpus));
    }
    for cpus in step.emulator.iter().filter(|cpus| !cpus.is_empty()) {
        note("emulator".into(), libvirt.pin_emulator(&domain, cpus));
    }
    for (&id, cpus) in step.iothreads.iter().filter(|(_, cpus)| !cpus.is_empty()) {
        note(
            format!("I/O thread {id}"),
            libvirt.pin_iothread(&domain, id, cpus),
        );
    }
    if let Some(quotas) = step.quotas {
        // What somebody else set meanwhile is left alone.
        let seen = quota::of_process(root, step.run.process());
        if seen.is_ok_and(|seen| quotas.is_left_in(seen)) {
            note("CPU quota".into(), libvirt.lift(&domain, quotas.before));
        }
    }
    if let Some(shrink) = step.shrunk {
        // Somebody who gave it more meanwhile wants it so.
        let current = libvirt.xml(&domain).ok().and_then(|xml| Domain::parse(&xml).ok());
        if current.is_none_or(|domain| domain.memory_current_bytes < shrink.before) {
            note("memory".into(), libvirt.set_memory(&domain, shrink.before));
        }
    }
    if let Some(StatsPeriod { before_s }) = step.stats_period {
        note(
            "memory statistics".into(),
            libvirt.set_stats_period(&domain, before_s),
        );
    }
    if let Some(nodes) = &step.nodes {
        note("memory nodes".into(), libvirt.set_memory_nodes(&domain, nodes));
    }
    if failures.is_empty() || over() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

/// Why nobody is known to use a page on hosts of hardware: what was never run is not written.
const NO_PAGE_USES: &str = "which node uses a page is not sampled here: that takes memory sampling of the processor (IBS, PEBS), which \
                            is not read yet; accessed bits and DAMON do not say who";
/// Why nobody is, where a model could say it.
const NO_BLOCKS: &str =
    "the kernel does not say which frames lie on which node (no memory blocks in /sys/devices/system/memory)";

/// What this host can have of memory policies. Linux places a page where it is touched first; spreading and moving are the
/// agent's.
fn memory_policy_is_possible(
    name: &str,
    policy: MemoryPolicy,
    no_page_uses: Option<&str>,
) -> Result<(), ActionError> {
    let why = match policy {
        MemoryPolicy {
            placing: Placing::Round1g,
            ..
        } => {
            "it deals out memory when a VM is created, which on this host is the kernel's to do; use round-4k"
        }
        MemoryPolicy {
            migration: Migration::Carrefour,
            ..
        } => match no_page_uses {
            Some(why) => why,
            None => return Ok(()),
        },
        MemoryPolicy {
            migration: Migration::AutoNuma,
            ..
        } => "the kernel balances all processes or none; set the sysctl kernel.numa_balancing instead",
        MemoryPolicy {
            migration: Migration::None,
            ..
        } => return Ok(()),
    };
    let why = why.to_owned();
    Err(Failure::MemoryPolicy { policy, why }.on(name))
}

/// The monotonic clock: what [`Sample::at`] says of a real host.
pub fn now() -> Ns {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

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

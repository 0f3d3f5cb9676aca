//! What a host said at one moment. Counters are cumulative and never reset while a VM lives; what a host lacks
//! is `None`. Nothing here is derived: that is what [`crate::Rates`] is for.

use homenode_units::{
    Bytes, BytesPerSec, CpuId, CpuSet, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, Pages, Permit, VmId,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::balloon::{Balloon, Balloons};
use crate::kernel::KernelSettings;
use crate::limit::{CpuQuota, Limit};
use crate::observation::{Observation, TrackerChoice};
use crate::topology::{Published, VirtualNode};

/// Generation of everything a plan relies on: which VMs there are, their vCPUs, affinities, quotas and settings. It
/// grows when one of these changes, by a commit or by somebody else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Version(pub u64);

/// What a host said at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The host's monotonic clock.
    pub at: Ns,
    /// Generation of VMs, affinities and settings.
    pub version: Version,
    /// Who counts [`Counters`].
    pub counted_by: CountedBy,
    /// Whose balloons VMs have.
    #[serde(default, skip_serializing_if = "Balloons::is_virtio")]
    pub balloons: Balloons,
    /// Every usable CPU that is online, ascending.
    pub cpus: Vec<CpuSample>,
    /// Every node.
    pub nodes: NodeMap<NodeSample>,
    /// Directed traffic between nodes, where the host counts it.
    pub links: Vec<LinkSample>,
    /// Why the host cannot say which node uses which page, if it cannot: then no VM has [`VmSample::page_uses`].
    pub no_page_uses: Option<String>,
    /// Who can tell which memory VMs use, best first: the first that can is asked by [`crate::Act::Watch`].
    pub trackers: Vec<TrackerChoice>,
    /// What the host's kernel does with memory by itself; nothing is known where that is no Linux.
    #[serde(default, skip_serializing_if = "KernelSettings::is_unknown")]
    pub kernel: KernelSettings,
    /// VMs that run, ascending by id.
    pub vms: Vec<VmSample>,
}

/// One logical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSample {
    /// Which.
    pub id: CpuId,
    /// Time spent not idle since boot.
    pub busy_ns: Ns,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSample {
    /// Memory that the kernel manages on the node.
    pub memory_total_bytes: Bytes,
    /// Memory that could be given to a VM now: free, or page cache that can be dropped.
    pub memory_free_bytes: Bytes,
    /// Bytes that the node's memory controllers have moved, where counted.
    pub memory_traffic_bytes: Option<u64>,
    /// Its pools of huge pages, by size ascending; `None` where the host does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<Vec<HugePages>>,
}

/// A node's pool of huge pages of one size. They are no part of the node's free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Size of one.
    pub page_bytes: Bytes,
    /// Pages of the pool.
    pub total_count: u64,
    /// Those that nothing uses.
    pub free_count: u64,
}

/// Memory that lies in huge pages of one size, or shall.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HugeMemory {
    /// Size of a page.
    pub page_bytes: Bytes,
    /// How much.
    pub memory_bytes: Bytes,
}

/// Directed traffic from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSample {
    /// Where data came from.
    pub from: NodeId,
    /// Where it went.
    pub to: NodeId,
    /// Bytes moved.
    pub bytes: u64,
}

/// One running VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmSample {
    /// UUID.
    pub id: VmId,
    /// Name, unique on the host.
    pub name: String,
    /// Online vCPUs, by index; an offline vCPU has no entry.
    pub vcpus: Vec<VcpuSample>,
    /// Memory that the guest may use now (after ballooning).
    pub memory_bytes: Bytes,
    /// Its balloon, where it has one.
    pub balloon: Option<Balloon>,
    /// Where the guest's touched memory lies, where known.
    pub pages: Option<NodeMap<Pages>>,
    /// Size of the huge pages that its memory lies in; `None` where it lies in ordinary ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_bytes: Option<Bytes>,
    /// The nodes that its guest sees; none where it sees a single one.
    pub virtual_nodes: Vec<VirtualNode>,
    /// Why its guest cannot be told where it is, with the remedy; `None` where it can ([`crate::Act::PublishTopology`]).
    #[serde(rename = "no_feed")]
    pub no_topology_device: Option<String>,
    /// What this agent told its guest last.
    #[serde(rename = "told")]
    pub published: Option<Published>,
    /// Memory accesses that missed the LLC, by where they went, where counted.
    pub accesses: Option<Accesses>,
    /// How its pages are placed and sampled now.
    pub memory_policy: MemoryPolicy,
    /// What was seen of the use of its pages since the sample before, while its memory policy has them sampled. The one thing
    /// here that is not cumulative: events, not counts.
    pub page_uses: Option<Vec<PageUse>>,
    /// What was seen of the use of its memory in the last complete window while it is watched ([`crate::Act::Watch`]): fresh
    /// once per window, as [`Observation::at`] tells. `None` before the first window's end, and while its memory is not watched.
    pub observed: Option<Observation>,
    /// Why the VM's memory cannot move, if it cannot.
    pub immovable: Option<Immovable>,
    /// Nodes on which its memory stays by its operator's will: it is bound to them, or lies there in huge pages of a pool. `None`
    /// where its memory may follow its vCPUs, or where what keeps it is not the operator's will alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_to: Option<NodeSet>,
    /// All of its memory moves to one node or none of it does, in the background and whatever its size: what is planned is all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves_whole: bool,
    /// Why the host never learns which pages the guest releases, with the remedy; `None` where it does.
    pub no_releases: Option<String>,
    /// Limit of the agent's on its part of caches or memory bandwidth, while it is in force.
    pub confined: Option<Limit>,
    /// Nodes of devices assigned to the VM.
    pub device_nodes: NodeSet,
    /// What the operator said of this VM.
    pub settings: VmSettings,
}

impl VmSample {
    /// A VM of which nothing is known but its name: no vCPUs, no memory, nothing counted.
    pub fn new(id: VmId, name: impl Into<String>) -> VmSample {
        VmSample {
            id,
            name: name.into(),
            vcpus: Vec::new(),
            memory_bytes: Bytes::ZERO,
            balloon: None,
            pages: None,
            huge_page_bytes: None,
            virtual_nodes: Vec::new(),
            no_topology_device: None,
            published: None,
            accesses: None,
            memory_policy: MemoryPolicy::default(),
            page_uses: None,
            observed: None,
            immovable: None,
            bound_to: None,
            moves_whole: false,
            no_releases: None,
            confined: None,
            device_nodes: NodeSet::new(),
            settings: VmSettings::default(),
        }
    }
}

/// One online vCPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VcpuSample {
    /// Position in the VM, from 0.
    pub index: u16,
    /// Time it ran.
    pub running_ns: Ns,
    /// Time it was runnable and did not run: run-queue delay, throttled time included; `None` where the host cannot tell.
    pub waiting_ns: Option<Ns>,
    /// Time it was kept from running by a CPU quota.
    pub throttled_ns: Ns,
    /// CPU it last ran on.
    pub cpu: Option<CpuId>,
    /// CPUs it may run on: what is in force, not what was asked for.
    pub affinity: CpuSet,
    /// CPU quota in force on it, whoever set it; `None` where there is none, or the host cannot tell.
    pub quota: Option<CpuQuota>,
    /// Hardware counters of its thread, where the host has them.
    pub counters: Option<Counters>,
}

/// Who counts [`Counters`]: whoever shows them says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CountedBy {
    /// The PMU of the host; on the twin what stands for it.
    #[default]
    Hardware,
    /// A model of caches beside a host that has no PMU, as an emulator's plugin has.
    Model,
}

/// Hardware counters of one vCPU, corrected for multiplexing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Instructions retired.
    pub instructions: u64,
    /// Cycles not halted.
    pub cycles: u64,
    /// LLC references.
    pub llc_references: u64,
    /// LLC misses.
    pub llc_misses: u64,
}

/// Memory accesses of a VM, counted as the node of the accessing vCPU at the time relates to the page's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accesses {
    /// To the node that the vCPU ran on.
    pub local: u64,
    /// To another node.
    pub remote: u64,
    /// All of them, by the node of the page.
    pub on: NodeMap<u64>,
}

/// Which nodes use some pages, as memory sampling saw it (IBS, PEBS). A real host says so of single pages; the twin at once of
/// all pages of one kind that lie on one node and were sampled alike. A page that no sample hit is not among them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageUse {
    /// Guest frame of the first of them.
    pub frame: u64,
    /// How many pages: 1 on a real host.
    pub pages: Pages,
    /// Where they lie.
    pub on: NodeId,
    /// Samples of accesses to each of them from the CPUs of each node; nodes without any are missing.
    pub samples: NodeMap<u32>,
    /// How many of a page's samples wrote.
    pub writes: u32,
}

/// Why a VM's memory cannot be moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Immovable {
    /// A device assigned by VFIO reads and writes it: every page is pinned for the VM's life.
    Vfio,
    /// The VM's memory is locked (`<memoryBacking><locked/>`).
    Locked,
    /// It is encrypted for the guest alone: the kernel moves no page of it.
    Encrypted {
        /// By what, as QEMU or libvirt calls it: `sev-snp-guest`, `tdx`.
        kind: String,
    },
    /// It lies in huge pages, of which other nodes have too few free.
    HugePages {
        /// Size of one huge page.
        page_bytes: Bytes,
    },
    /// It lies in huge pages of its nodes' pools, and its operator did not say that they may move.
    HugePagePool {
        /// Size of one huge page.
        page_bytes: Bytes,
    },
    /// The VM is bound to its nodes in a mode that libvirt cannot change while it runs.
    BoundAtStart {
        /// Nodes it is bound to.
        nodes: NodeSet,
    },
    /// Its parts are bound to different nodes, cell by cell or page by page (interleaved).
    BoundInParts {
        /// Nodes that some part is bound to.
        nodes: NodeSet,
    },
    /// The hypervisor moves no page of a VM that runs.
    Hypervisor {
        /// Which, and what can be done instead.
        reason: String,
    },
    /// The VM is paused: nobody waits for its memory, and whoever paused it may be about to save it.
    Paused,
    /// It is on its way to another host or from there: what moves here would be copied twice.
    Migrating,
}

impl std::fmt::Display for Immovable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Immovable::Vfio => write!(f, "a device assigned through VFIO pins all of its memory"),
            Immovable::Locked => write!(f, "its memory is locked (<memoryBacking><locked/>)"),
            Immovable::Encrypted { kind } => {
                write!(
                    f,
                    "its memory is encrypted for its guest alone ({kind}), and no page of it can move"
                )
            }
            Immovable::HugePages { page_bytes } => {
                write!(
                    f,
                    "it lies in huge pages of {page_bytes} and too few are free elsewhere; reserve some there"
                )
            }
            Immovable::HugePagePool { page_bytes } => write!(
                f,
                "it lies in huge pages of {page_bytes} of its nodes' pools, on which others may count; say hugepages=\"move\" in the VM's settings to let it move"
            ),
            Immovable::BoundInParts { nodes } => write!(
                f,
                "its parts were bound to nodes {nodes} at start, each to its own (strict cells, or interleaving); define the VM with <memory mode='restrictive'> and without <memnode> to let it move"
            ),
            Immovable::BoundAtStart { nodes } => write!(
                f,
                "it was bound to node {nodes} at start; define the VM with <memory mode='restrictive'> to let it move"
            ),
            Immovable::Hypervisor { reason } => f.write_str(reason),
            Immovable::Paused => write!(f, "the VM is paused; they can again once it runs"),
            Immovable::Migrating => {
                write!(
                    f,
                    "the VM is being migrated between hosts; they can again when that is over"
                )
            }
        }
    }
}

/// Whether the agent may act on a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Management {
    /// The agent places, schedules and moves it.
    #[default]
    Managed,
    /// The agent watches it and never touches it.
    Ignored,
}

/// How far decisions go. Where several are said, for the run, a policy and a VM, the most careful holds: that is the least of
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// They are made and explained; nothing is touched.
    // As recordings before 0.2 have it.
    #[serde(alias = "dry-run")]
    Observe,
    /// Each waits as a recommendation until the operator applies it.
    Recommend,
    /// They are carried out.
    #[default]
    Act,
}

impl Mode {
    /// All of them, the most careful first.
    pub const ALL: [Mode; 3] = [Mode::Observe, Mode::Recommend, Mode::Act];

    /// Name in settings, metadata and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Observe => "observe",
            Mode::Recommend => "recommend",
            Mode::Act => "act",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Mode {
    type Err = String;
    fn from_str(text: &str) -> Result<Mode, String> {
        let named = Mode::ALL.into_iter().find(|mode| mode.name() == text);
        named.ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            format!("`{shown}` is no mode; there are observe, recommend and act")
        })
    }
}

/// What the operator said of a VM. Lives with the VM (libvirt metadata), so it survives restarts and migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSettings {
    /// Whether the agent may act on it.
    pub management: Management,
    /// How far decisions about it go at most; `None` where that is as the run and its policies go.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose; the agent keeps the VM there and never re-homes it.
    pub home: Option<NodeSet>,
    /// VMs that name the same word here share no home node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart: Option<String>,
    /// VMs that name the same word here have one home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<String>,
    /// Memory bandwidth that the VM is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// CPUs that everything that its operator set leaves it (cpusets of its cgroups, `<vcpu cpuset>`, its affinity from before
    /// the agent, and `isolcpus=`); `None` where it may use every CPU that all VMs may use.
    pub cpus_allowed: Option<CpuSet>,
    /// vCPUs that the operator pinned by hand (`<vcpupin>`): the agent leaves them alone.
    pub pinned_vcpus: Vec<u16>,
    /// Memory policy that the operator chose; `None` leaves the choice to the agent.
    pub memory_policy: Option<MemoryPolicy>,
    /// What it booked: it is held to it.
    pub permit: Option<Permit>,
    /// Memory below which its balloon never takes it; without one the agent takes none of its memory.
    pub memory_floor: Option<Bytes>,
    /// CPU quota of each vCPU that the operator set (`<cputune><quota>`): a limit of the agent's is lifted to it.
    pub quota: Option<CpuQuota>,
}

/// One of [`VmSettings`] that can be set while the VM runs; none takes back what was set before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// What it books.
    Permit(Option<Permit>),
    /// How its memory is placed and moved.
    MemoryPolicy(Option<MemoryPolicy>),
    /// How little memory it may be left with.
    MemoryFloor(Option<Bytes>),
    /// How far decisions about it go.
    Mode(Option<Mode>),
}

impl Setting {
    /// What it is, as in "the permit of VM web".
    pub fn name(self) -> &'static str {
        match self {
            Setting::Permit(_) => "permit",
            Setting::MemoryPolicy(_) => "memory policy",
            Setting::MemoryFloor(_) => "memory floor",
            Setting::Mode(_) => "mode",
        }
    }
}

impl VmSettings {
    /// Whether a setting is as it was set.
    pub fn has(&self, setting: Setting) -> bool {
        match setting {
            Setting::Permit(permit) => self.permit == permit,
            Setting::MemoryPolicy(policy) => self.memory_policy == policy,
            Setting::MemoryFloor(floor) => self.memory_floor == floor,
            Setting::Mode(mode) => self.mode == mode,
        }
    }

    /// Takes in a setting.
    pub fn set(&mut self, setting: Setting) {
        match setting {
            Setting::Permit(permit) => self.permit = permit,
            Setting::MemoryPolicy(policy) => self.memory_policy = policy,
            Setting::MemoryFloor(floor) => self.memory_floor = floor,
            Setting::Mode(mode) => self.mode = mode,
        }
    }
}

impl Sample {
    /// The VM with this id, if it was running.
    pub fn vm(&self, id: VmId) -> Option<&VmSample> {
        self.vms
            .binary_search_by_key(&id, |vm| vm.id)
            .ok()
            .map(|at| &self.vms[at])
    }
}

impl VmSample {
    /// The vCPU with this index, if it is online.
    pub fn vcpu(&self, index: u16) -> Option<&VcpuSample> {
        self.vcpus.iter().find(|vcpu| vcpu.index == index)
    }

    /// Touched pages that lie outside `nodes`; `None` where the host does not know where pages lie.
    pub fn pages_outside(&self, nodes: &NodeSet) -> Option<Pages> {
        let pages = self.pages.as_ref()?;
        Some(
            pages
                .iter()
                .filter(|(node, _)| !nodes.contains(*node))
                .map(|(_, pages)| *pages)
                .sum(),
        )
    }

    /// Touched pages that lie on `nodes`; `None` where the host does not know where pages lie.
    pub fn pages_on(&self, nodes: &NodeSet) -> Option<Pages> {
        let pages = self.pages.as_ref()?;
        let there = pages.iter().filter(|(node, _)| nodes.contains(*node));
        Some(there.map(|(_, pages)| *pages).sum())
    }

    /// Touched pages in all; `None` where the host does not know.
    pub fn pages_touched(&self) -> Option<Pages> {
        self.pages.as_ref().map(|pages| pages.values().copied().sum())
    }
}

//! A host's state at one moment. Counters are cumulative and never reset while a VM lives. What a host does not know is `None`.
//! Nothing here is derived; [`crate::Rates`] does that.

use homenode_units::{
    Bytes, BytesPerSec, CpuId, CpuSet, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, Pages, Permit, VmId,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::balloon::{Balloon, Balloons};
use crate::home::HomeInForce;
use crate::kernel::KernelSettings;
use crate::limit::{CpuQuota, Limit};
use crate::observation::{Observation, TrackerChoice};
use crate::topology::{Published, VirtualNode};

/// Generation of everything that a plan relies on: the VMs, their vCPUs, affinities, quotas and settings. It grows whenever one
/// of these changes, whether the agent or another program changed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Version(pub u64);

/// A host's state at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The host's monotonic clock.
    pub at: Ns,
    /// Generation of VMs, affinities and settings.
    pub version: Version,
    /// Source of [`Counters`].
    pub counted_by: CountedBy,
    /// Kind of the VMs' balloons.
    #[serde(default, skip_serializing_if = "Balloons::is_virtio")]
    pub balloons: Balloons,
    /// Every usable CPU that is online, ascending.
    pub cpus: Vec<CpuSample>,
    /// Every node.
    pub nodes: NodeMap<NodeSample>,
    /// Directed traffic between nodes, if the host counts it.
    pub links: Vec<LinkSample>,
    /// Why the host does not know which node uses which page; `None` if it does. If set, no VM has [`VmSample::page_uses`].
    pub no_page_uses: Option<String>,
    /// Trackers of memory use, best first: [`crate::Act::Watch`] uses the first one available.
    pub trackers: Vec<TrackerChoice>,
    /// Memory management by the host's kernel; unknown if the kernel is not Linux.
    #[serde(default, skip_serializing_if = "KernelSettings::is_unknown")]
    pub kernel: KernelSettings,
    /// Running VMs, ascending by id.
    pub vms: Vec<VmSample>,
}

/// One logical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSample {
    /// The CPU.
    pub id: CpuId,
    /// Time since boot in which the CPU was not idle.
    pub busy_ns: Ns,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSample {
    /// Memory that the kernel manages on the node.
    pub memory_total_bytes: Bytes,
    /// Memory that a VM could get now: free memory, and page cache that can be dropped.
    pub memory_free_bytes: Bytes,
    /// Bytes that the node's memory controllers have moved, if counted.
    pub memory_traffic_bytes: Option<u64>,
    /// The node's pools of huge pages, by size ascending; `None` if the host does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<Vec<HugePages>>,
}

/// A node's pool of huge pages of one size. Pool pages are not part of the node's free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Size of one page.
    pub page_bytes: Bytes,
    /// Number of pages in the pool.
    pub total_count: u64,
    /// Number of unused pages.
    pub free_count: u64,
}

/// Memory that is in huge pages of one size, or is meant to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HugeMemory {
    /// Size of a page.
    pub page_bytes: Bytes,
    /// Amount of memory.
    pub memory_bytes: Bytes,
}

/// Directed traffic from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSample {
    /// Source of the data.
    pub from: NodeId,
    /// Destination of the data.
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
    /// Online vCPUs, by index. Offline vCPUs have no entry.
    pub vcpus: Vec<VcpuSample>,
    /// Memory that the guest may use now (after ballooning).
    pub memory_bytes: Bytes,
    /// The VM's balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// The guest's touched memory by node, if known.
    pub pages: Option<NodeMap<Pages>>,
    /// Size of the huge pages that hold the VM's memory; `None` if ordinary pages hold it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_bytes: Option<Bytes>,
    /// The virtual nodes that the guest sees; empty if the guest sees a single node.
    pub virtual_nodes: Vec<VirtualNode>,
    /// Why the guest cannot be told its topology ([`crate::Act::PublishTopology`]), with the remedy; `None` if it can.
    #[serde(rename = "no_feed")]
    pub no_topology_device: Option<String>,
    /// The topology that this agent last told the guest.
    #[serde(rename = "told")]
    pub published: Option<Published>,
    /// Memory accesses that missed the LLC, by the node that served them, if counted.
    pub accesses: Option<Accesses>,
    /// How the VM's pages are placed and sampled now.
    pub memory_policy: MemoryPolicy,
    /// Use of the VM's pages observed since the last sample, if the memory policy samples them. This is the only field with
    /// events instead of cumulative counts.
    pub page_uses: Option<Vec<PageUse>>,
    /// Use of the VM's memory in the last complete window, while the memory is watched ([`crate::Act::Watch`]). There is a new
    /// observation once per window, as [`Observation::at`] shows. `None` before the first window ends, and while the memory is
    /// not watched.
    pub observed: Option<Observation>,
    /// Why the VM's memory cannot move; `None` if it can.
    pub immovable: Option<Immovable>,
    /// Nodes on which the operator keeps the VM's memory: it is bound to them, or is in their pools of huge pages. `None` if its
    /// memory may follow its vCPUs, or if something else than the operator's choice keeps it in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_to: Option<NodeSet>,
    /// Whether the host can only move all of the VM's memory to one node, or none of it. Such a move runs in the background, so a
    /// plan covers all memory whatever its size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves_whole: bool,
    /// Why the host does not learn which pages the guest releases, with the remedy; `None` if it does.
    pub no_releases: Option<String>,
    /// The agent's limit on the VM's part of caches or memory bandwidth, while the limit is in force.
    pub confined: Option<Limit>,
    /// Nodes of devices assigned to the VM.
    pub device_nodes: NodeSet,
    /// The home nodes that the agent has in force on the VM.
    #[serde(default, skip_serializing_if = "HomeInForce::is_untold")]
    pub home: HomeInForce,
    /// Whether the host could not read the VM for this sample, although it runs. Everything in it is then from the last sample
    /// for which the VM was read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_unread: bool,
    /// The operator's settings for this VM.
    pub settings: VmSettings,
}

impl VmSample {
    /// Returns a VM with only a name: no vCPUs, no memory, and no counters.
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
            home: HomeInForce::Untold,
            is_unread: false,
            settings: VmSettings::default(),
        }
    }
}

/// One online vCPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VcpuSample {
    /// Position in the VM, from 0.
    pub index: u16,
    /// Time for which the vCPU ran.
    pub running_ns: Ns,
    /// Time for which the vCPU was runnable and did not run: run-queue delay, including throttled time. `None` if the host does
    /// not know.
    pub waiting_ns: Option<Ns>,
    /// Time for which a CPU quota throttled the vCPU.
    pub throttled_ns: Ns,
    /// CPU on which the vCPU last ran.
    pub cpu: Option<CpuId>,
    /// CPUs that the vCPU may run on: those in force, not those requested.
    pub affinity: CpuSet,
    /// CPU quota that is in force on the vCPU, from any source; `None` if there is none, or the host does not know.
    pub quota: Option<CpuQuota>,
    /// Hardware counters of the vCPU's thread, if the host has them.
    pub counters: Option<Counters>,
}

/// Source of [`Counters`], which is shown next to their figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CountedBy {
    /// The host's PMU, or the twin's substitute for it.
    #[default]
    Hardware,
    /// A model of caches on a host without a PMU, such as an emulator's plugin.
    Model,
}

/// Hardware counters of one vCPU, corrected for multiplexing. Where the PMU has no event that counts at the LLC, the figures of
/// the LLC are `None`, and events of a nearer cache do not stand in for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Instructions retired.
    pub instructions: u64,
    /// Unhalted cycles.
    pub cycles: u64,
    /// LLC references, if counted.
    pub llc_references: Option<u64>,
    /// LLC misses, if counted.
    pub llc_misses: Option<u64>,
}

/// A VM's memory accesses, by where the accessing vCPU ran at the time and where the page was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accesses {
    /// Accesses to the node that the vCPU ran on.
    pub local: u64,
    /// Accesses to other nodes.
    pub remote: u64,
    /// All accesses, by the node of the page.
    pub on: NodeMap<u64>,
}

/// How some pages are used from each node, found by memory sampling (IBS, PEBS). A real host reports single pages. The simulator
/// combines all pages of one kind that are on one node and have the same samples. Pages without samples are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageUse {
    /// Guest frame of the first page.
    pub frame: u64,
    /// Number of pages: 1 on a real host.
    pub pages: Pages,
    /// The node that the pages are on.
    pub on: NodeId,
    /// For each node, the number of samples of each page that came from its CPUs; nodes without samples are missing.
    pub samples: NodeMap<u32>,
    /// How many of a page's samples were writes.
    pub writes: u32,
}

/// Why a VM's memory cannot be moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Immovable {
    /// A device assigned through VFIO reads and writes the VM's memory, so every page is pinned for the VM's life.
    Vfio,
    /// The VM's memory is locked (`<memoryBacking><locked/>`).
    Locked,
    /// The memory is encrypted for the guest, and the kernel moves none of its pages.
    Encrypted {
        /// The mechanism, as QEMU or libvirt calls it: `sev-snp-guest`, `tdx`.
        kind: String,
    },
    /// The memory is in huge pages, of which the other nodes have too few free.
    HugePages {
        /// Size of one huge page.
        page_bytes: Bytes,
    },
    /// The memory is in huge pages from its nodes' pools, and the operator did not allow moving them.
    HugePagePool {
        /// Size of one huge page.
        page_bytes: Bytes,
    },
    /// The VM is bound to its nodes in a mode that libvirt cannot change while the VM runs.
    BoundAtStart {
        /// Nodes that the VM is bound to.
        nodes: NodeSet,
    },
    /// Parts of the memory are bound to different nodes, guest cell by guest cell or page by page (interleaved).
    BoundInParts {
        /// All nodes that some part is bound to.
        nodes: NodeSet,
    },
    /// The hypervisor cannot move pages of a running VM.
    Hypervisor {
        /// The hypervisor, and what to do instead.
        reason: String,
    },
    /// The VM is paused: it gains nothing from a move, and may be about to be saved.
    Paused,
    /// The VM is migrating to or from another host, so pages that are moved here would be copied twice.
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
                    "its memory is encrypted for the guest ({kind}), so none of its pages can move"
                )
            }
            Immovable::HugePages { page_bytes } => {
                write!(
                    f,
                    "its memory is in huge pages of {page_bytes}, and too few are free elsewhere; reserve some there"
                )
            }
            Immovable::HugePagePool { page_bytes } => write!(
                f,
                "its memory is in huge pages of {page_bytes} of its nodes' pools, which other programs may rely on; set hugepages=\"move\" in the VM's settings to let it move"
            ),
            Immovable::BoundInParts { nodes } => write!(
                f,
                "its memory was bound in parts to nodes {nodes} at start (strict cells, or interleaving); define the VM with <memory mode='restrictive'> and without <memnode> to let it move"
            ),
            Immovable::BoundAtStart { nodes } => write!(
                f,
                "its memory was bound to node {nodes} at start; define the VM with <memory mode='restrictive'> to let it move"
            ),
            Immovable::Hypervisor { reason } => f.write_str(reason),
            Immovable::Paused => write!(f, "the VM is paused; moves are possible again once it runs"),
            Immovable::Migrating => {
                write!(
                    f,
                    "the VM is being migrated between hosts; moves are possible again when that is over"
                )
            }
        }
    }
}

/// Whether the agent may act on a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Management {
    /// The agent places, schedules and moves the VM.
    #[default]
    Managed,
    /// The agent watches the VM and never touches it.
    Ignored,
}

/// How far the agent goes with its decisions. The run, a policy and a VM may each have a mode. The most careful of them applies,
/// which is the first listed here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Decisions are made and explained; nothing is changed.
    // The name in recordings from before 0.2.
    #[serde(alias = "dry-run")]
    Observe,
    /// Each decision waits as a recommendation until the operator applies it.
    Recommend,
    /// Decisions are carried out.
    #[default]
    Act,
}

impl Mode {
    /// All modes, the most careful first.
    pub const ALL: [Mode; 3] = [Mode::Observe, Mode::Recommend, Mode::Act];

    /// Returns the mode's name in settings, metadata and JSON.
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
    type Err = UnknownMode;
    fn from_str(text: &str) -> Result<Mode, UnknownMode> {
        let named = Mode::ALL.into_iter().find(|mode| mode.name() == text);
        named.ok_or_else(|| UnknownMode(text.chars().take(40).collect()))
    }
}

/// The error for a text that names no [`Mode`]. Holds the text's first 40 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a mode; use observe, recommend or act")]
pub struct UnknownMode(String);

/// The operator's settings of a VM. They live with the VM (libvirt metadata), so they survive restarts and migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSettings {
    /// Whether the agent may act on the VM.
    pub management: Management,
    /// The furthest that decisions about the VM may go; `None` if only the modes of the run and its policies apply.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose. The agent keeps the VM there and never gives it another home.
    pub home: Option<NodeSet>,
    /// VMs with the same value here share no home node.
    #[serde(default, alias = "apart", skip_serializing_if = "Option::is_none")]
    pub anti_affinity: Option<String>,
    /// VMs with the same value here have one home.
    #[serde(default, alias = "together", skip_serializing_if = "Option::is_none")]
    pub affinity: Option<String>,
    /// Memory bandwidth that the VM is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// CPUs that the VM may use according to all of its operator's settings: its cgroups' cpusets, `<vcpu cpuset>`, its affinity
    /// from before the agent, and `isolcpus=`. `None` if it may use every CPU that all VMs may use.
    pub cpus_allowed: Option<CpuSet>,
    /// vCPUs that the operator pinned by hand (`<vcpupin>`): the agent leaves them alone.
    pub pinned_vcpus: Vec<u16>,
    /// Memory policy that the operator chose; `None` if the agent may choose.
    pub memory_policy: Option<MemoryPolicy>,
    /// The permit that the operator booked for the VM, and that the agent holds the VM to.
    pub permit: Option<Permit>,
    /// The least memory that the balloon must leave the VM. Without a floor, the agent takes none of the VM's memory.
    pub memory_floor: Option<Bytes>,
    /// Memory that the guest's kernel takes for itself, as the operator measured it: epsilon of [PRL, section 4.4]. `None` if
    /// unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_footprint: Option<Bytes>,
    /// CPU quota that the operator set for each vCPU (`<cputune><quota>`). It is in force again once the agent's limit is lifted.
    pub quota: Option<CpuQuota>,
}

/// A setting in [`VmSettings`] that can be changed while the VM runs. Changing one leaves the others unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The VM's permit.
    Permit(Option<Permit>),
    /// How the VM's memory is placed and moved.
    MemoryPolicy(Option<MemoryPolicy>),
    /// The VM's memory floor.
    MemoryFloor(Option<Bytes>),
    /// How far decisions about the VM may go.
    Mode(Option<Mode>),
}

impl Setting {
    /// Returns the setting's name, as in "the permit of VM web".
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
    /// Returns true if a setting has this value.
    pub fn has(&self, setting: Setting) -> bool {
        match setting {
            Setting::Permit(permit) => self.permit == permit,
            Setting::MemoryPolicy(policy) => self.memory_policy == policy,
            Setting::MemoryFloor(floor) => self.memory_floor == floor,
            Setting::Mode(mode) => self.mode == mode,
        }
    }

    /// Changes a setting.
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
    /// Returns the VM with this id, if it ran at the time of the sample.
    pub fn vm(&self, id: VmId) -> Option<&VmSample> {
        self.vms
            .binary_search_by_key(&id, |vm| vm.id)
            .ok()
            .map(|at| &self.vms[at])
    }
}

impl VmSample {
    /// Returns the vCPU with this index, if it is online.
    pub fn vcpu(&self, index: u16) -> Option<&VcpuSample> {
        self.vcpus.iter().find(|vcpu| vcpu.index == index)
    }

    /// Returns the number of touched pages outside `nodes`; `None` if the host does not locate pages.
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

    /// Returns the number of touched pages on `nodes`; `None` if the host does not locate pages.
    pub fn pages_on(&self, nodes: &NodeSet) -> Option<Pages> {
        let pages = self.pages.as_ref()?;
        let there = pages.iter().filter(|(node, _)| nodes.contains(*node));
        Some(there.map(|(_, pages)| *pages).sum())
    }

    /// Returns the number of all touched pages; `None` if the host does not know.
    pub fn pages_touched(&self) -> Option<Pages> {
        self.pages.as_ref().map(|pages| pages.values().copied().sum())
    }
}

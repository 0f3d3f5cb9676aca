//! A host's state at one moment. Counters are cumulative and never reset while a VM lives; what a host lacks is `None`.
//! Nothing here is derived: that is the task of [`crate::Rates`].

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

/// Generation of everything a plan relies on: the VMs, their vCPUs, affinities, quotas and settings. It grows when one of
/// these changes, by a commit or by others.
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
    /// Why the host does not know which node uses which page, if so: then no VM has [`VmSample::page_uses`].
    pub no_page_uses: Option<String>,
    /// Trackers of memory use, best first: [`crate::Act::Watch`] uses the first one available.
    pub trackers: Vec<TrackerChoice>,
    /// Memory management by the host's kernel; unknown if that is not Linux.
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
    /// Time spent not idle since boot.
    pub busy_ns: Ns,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSample {
    /// Memory that the kernel manages on the node.
    pub memory_total_bytes: Bytes,
    /// Memory available to a VM now: free, or page cache that can be dropped.
    pub memory_free_bytes: Bytes,
    /// Bytes that the node's memory controllers have moved, if counted.
    pub memory_traffic_bytes: Option<u64>,
    /// Its pools of huge pages, by size ascending; `None` if the host does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<Vec<HugePages>>,
}

/// A node's pool of huge pages of one size. They are not part of the node's free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePages {
    /// Size of one page.
    pub page_bytes: Bytes,
    /// Pages in the pool.
    pub total_count: u64,
    /// Unused pages.
    pub free_count: u64,
}

/// Memory in huge pages of one size, or intended for them.
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
    /// Online vCPUs, by index; an offline vCPU has no entry.
    pub vcpus: Vec<VcpuSample>,
    /// Memory that the guest may use now (after ballooning).
    pub memory_bytes: Bytes,
    /// Its balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// The guest's touched memory by node, if known.
    pub pages: Option<NodeMap<Pages>>,
    /// Size of the huge pages that hold its memory; `None` for ordinary ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_bytes: Option<Bytes>,
    /// The nodes that its guest sees; empty if it sees a single one.
    pub virtual_nodes: Vec<VirtualNode>,
    /// Why its guest cannot be told its topology, with the remedy; `None` if it can ([`crate::Act::PublishTopology`]).
    #[serde(rename = "no_feed")]
    pub no_topology_device: Option<String>,
    /// The topology that this agent last told its guest.
    #[serde(rename = "told")]
    pub published: Option<Published>,
    /// Memory accesses that missed the LLC, by destination, if counted.
    pub accesses: Option<Accesses>,
    /// How its pages are placed and sampled now.
    pub memory_policy: MemoryPolicy,
    /// Observed use of its pages since the last sample, while its memory policy has them sampled. The only field that is not
    /// cumulative: events, not counts.
    pub page_uses: Option<Vec<PageUse>>,
    /// Observed use of its memory in the last complete window while it is watched ([`crate::Act::Watch`]): fresh once per
    /// window, as [`Observation::at`] shows. `None` before the first window's end, and while its memory is not watched.
    pub observed: Option<Observation>,
    /// Why the VM's memory cannot move, if it cannot.
    pub immovable: Option<Immovable>,
    /// Nodes on which its memory stays by its operator's choice: it is bound to them, or is there in huge pages of a pool.
    /// `None` if its memory may follow its vCPUs, or if it is kept for other reasons than the operator's choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_to: Option<NodeSet>,
    /// Whether all of its memory moves to one node or none of it does, in the background and whatever its size: a plan is for
    /// all of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves_whole: bool,
    /// Why the host never learns which pages the guest releases, with the remedy; `None` if it does.
    pub no_releases: Option<String>,
    /// The agent's limit on its part of caches or memory bandwidth, while it is in force.
    pub confined: Option<Limit>,
    /// Nodes of devices assigned to the VM.
    pub device_nodes: NodeSet,
    /// The operator's settings for this VM.
    pub settings: VmSettings,
}

impl VmSample {
    /// Returns a VM with only a name: no vCPUs, no memory, nothing counted.
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
    /// Time it was runnable and did not run: run-queue delay, throttled time included; `None` if the host does not know.
    pub waiting_ns: Option<Ns>,
    /// Time it was throttled by a CPU quota.
    pub throttled_ns: Ns,
    /// CPU it last ran on.
    pub cpu: Option<CpuId>,
    /// CPUs it may run on: those in force, not those requested.
    pub affinity: CpuSet,
    /// CPU quota in force on it, from any source; `None` if there is none, or the host does not know.
    pub quota: Option<CpuQuota>,
    /// Hardware counters of its thread, if the host has them.
    pub counters: Option<Counters>,
}

/// Source of [`Counters`], which is shown along with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CountedBy {
    /// The PMU of the host; on the twin its substitute.
    #[default]
    Hardware,
    /// A model of caches next to a host without a PMU, as in an emulator's plugin.
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

/// Memory accesses of a VM, by the relation of the accessing vCPU's node at the time to the page's node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accesses {
    /// To the node that the vCPU ran on.
    pub local: u64,
    /// To another node.
    pub remote: u64,
    /// All of them, by the node of the page.
    pub on: NodeMap<u64>,
}

/// Use of some pages by node, from memory sampling (IBS, PEBS). A real host reports single pages; the twin combines all pages
/// of one kind that are on one node and were sampled alike. A page without samples is not included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageUse {
    /// Guest frame of the first page.
    pub frame: u64,
    /// Number of pages: 1 on a real host.
    pub pages: Pages,
    /// Their node.
    pub on: NodeId,
    /// Samples of accesses to each of them from the CPUs of each node; nodes without samples are missing.
    pub samples: NodeMap<u32>,
    /// Number of a page's samples that were writes.
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
    /// It is encrypted for the guest: the kernel moves no page of it.
    Encrypted {
        /// The mechanism, as QEMU or libvirt calls it: `sev-snp-guest`, `tdx`.
        kind: String,
    },
    /// It is in huge pages, and other nodes have too few of them free.
    HugePages {
        /// Size of one huge page.
        page_bytes: Bytes,
    },
    /// It is in huge pages of its nodes' pools, and its operator did not allow moving them.
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
    /// The hypervisor moves no page of a running VM.
    Hypervisor {
        /// The hypervisor, and an alternative.
        reason: String,
    },
    /// The VM is paused: it does not wait for its memory, and may be about to be saved.
    Paused,
    /// It is migrating to or from another host: pages moved here would be copied twice.
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

/// How far decisions go. Among several modes, for the run, a policy and a VM, the most careful applies, which is the least of
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// They are made and explained; nothing is changed.
    // As in recordings before 0.2.
    #[serde(alias = "dry-run")]
    Observe,
    /// Each waits as a recommendation until the operator applies it.
    Recommend,
    /// They are carried out.
    #[default]
    Act,
}

impl Mode {
    /// All modes, the most careful first.
    pub const ALL: [Mode; 3] = [Mode::Observe, Mode::Recommend, Mode::Act];

    /// Returns its name in settings, metadata and JSON.
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

/// A text that names no [`Mode`]: its first 40 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no mode; there are observe, recommend and act")]
pub struct UnknownMode(String);

/// The operator's settings of a VM. They live with the VM (libvirt metadata), so they survive restarts and migration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSettings {
    /// Whether the agent may act on it.
    pub management: Management,
    /// How far decisions about it go at most; `None` for the mode of the run and its policies.
    pub mode: Option<Mode>,
    /// Home nodes that the operator chose; the agent keeps the VM there and never re-homes it.
    pub home: Option<NodeSet>,
    /// VMs with the same value here share no home node.
    #[serde(default, alias = "apart", skip_serializing_if = "Option::is_none")]
    pub anti_affinity: Option<String>,
    /// VMs with the same value here have one home.
    #[serde(default, alias = "together", skip_serializing_if = "Option::is_none")]
    pub affinity: Option<String>,
    /// Memory bandwidth that the VM is declared to need.
    pub bandwidth: Option<BytesPerSec>,
    /// CPUs that it may use by all of its operator's settings (cpusets of its cgroups, `<vcpu cpuset>`, its affinity from
    /// before the agent, and `isolcpus=`); `None` if it may use every CPU that all VMs may use.
    pub cpus_allowed: Option<CpuSet>,
    /// vCPUs that the operator pinned by hand (`<vcpupin>`): the agent leaves them alone.
    pub pinned_vcpus: Vec<u16>,
    /// Memory policy that the operator chose; `None` leaves the choice to the agent.
    pub memory_policy: Option<MemoryPolicy>,
    /// The permit that it booked and is held to.
    pub permit: Option<Permit>,
    /// Least memory that its balloon leaves it; without one the agent takes none of its memory.
    pub memory_floor: Option<Bytes>,
    /// CPU quota of each vCPU that the operator set (`<cputune><quota>`): lifting an agent's limit restores it.
    pub quota: Option<CpuQuota>,
}

/// One of [`VmSettings`] that can be set while the VM runs; setting one leaves the others unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Its permit.
    Permit(Option<Permit>),
    /// How its memory is placed and moved.
    MemoryPolicy(Option<MemoryPolicy>),
    /// Its memory floor.
    MemoryFloor(Option<Bytes>),
    /// How far decisions about it go.
    Mode(Option<Mode>),
}

impl Setting {
    /// Returns its name, as in "the permit of VM web".
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
    /// Whether a setting has this value.
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
    /// Returns the VM with this id, if it was running.
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

    /// Returns the touched pages outside `nodes`; `None` if the host does not locate pages.
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

    /// Returns the touched pages on `nodes`; `None` if the host does not locate pages.
    pub fn pages_on(&self, nodes: &NodeSet) -> Option<Pages> {
        let pages = self.pages.as_ref()?;
        let there = pages.iter().filter(|(node, _)| nodes.contains(*node));
        Some(there.map(|(_, pages)| *pages).sum())
    }

    /// Returns all touched pages; `None` if the host does not know.
    pub fn pages_touched(&self) -> Option<Pages> {
        self.pages.as_ref().map(|pages| pages.values().copied().sum())
    }
}

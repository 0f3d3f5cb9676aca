//! A small host in a few lines, for the tests of every policy. It is built from the same types as a real host.

use crate::arrange::Settings;
use crate::near::Near;
use crate::predict::{CacheShape, Character, NodeShape, Shape};
use crate::{arrange, placement, predict, trial};
use homenode_host::observation::Observation;
use homenode_host::{
    Accesses, Balloon, Balloons, Barred, CountedBy, CpuQuota, CpuSample, HandsOff, HomeInForce, HugePages,
    Immovable, KernelSettings, LinkSample, NodeSample, PageUse, Published, Rates, Sample, VcpuSample,
    Version, View, VirtualNode, VmSample, VmSettings, VmView,
};
use homenode_machine::{Cpu, Distances, Link, Machine, Node};
use homenode_units::{
    Bytes, BytesPerSec, CpuId, CpuSet, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, PAGE_BYTES, Pages, VmId,
};

/// A node as a guest sees it: its vCPUs at boot, and its pages by node.
pub(crate) type SeenNode<'a> = (&'a [u16], &'a [(u16, u64)]);

/// Returns the id of the n-th VM of a scene.
pub(crate) fn vm_id(n: u128) -> VmId {
    VmId(n)
}

/// Period between the two samples of a scene.
const PERIOD: Ns = Ns::from_secs(1);

/// A host with VMs over one period. Its fields determine the rates.
pub(crate) struct Scene {
    pub machine: Machine,
    pub at: Ns,
    pub vms: Vec<SceneVm>,
    /// Busy share of each CPU, beyond what VMs run.
    pub host_busy: Vec<f64>,
    pub links: Vec<(NodeId, NodeId, u64)>,
    pub traffic: NodeMap<u64>,
    pub huge_pages: NodeMap<Vec<HugePages>>,
    pub no_page_uses: Option<String>,
    pub kernel: KernelSettings,
    pub balloons: Balloons,
    pub reserved_cpus: CpuSet,
    pub offline: CpuSet,
    pub drained: NodeSet,
}

pub(crate) struct SceneVm {
    n: u128,
    memory: Bytes,
    vcpus: Vec<SceneVcpu>,
    home: Option<NodeSet>,
    home_told: HomeInForce,
    pages: NodeMap<Pages>,
    huge_page_bytes: Option<Bytes>,
    misses_per_s: Option<u64>,
    memory_policy: MemoryPolicy,
    page_uses: Option<Vec<PageUse>>,
    observed: Option<Observation>,
    local: Option<f64>,
    accesses_on: Vec<u64>,
    instructions_per_s: u64,
    has_llc: bool,
    immovable: Option<Immovable>,
    bound_to: Option<NodeSet>,
    moves_whole: bool,
    no_releases: Option<String>,
    hands_off: Option<HandsOff>,
    quota_hands_off: Option<HandsOff>,
    settings: VmSettings,
    quota: Option<CpuQuota>,
    device_nodes: NodeSet,
    balloon: Option<Balloon>,
    virtual_nodes: Vec<VirtualNode>,
    follows: bool,
    published: Option<Published>,
    layout: Option<Vec<NodeId>>,
}

pub(crate) struct SceneVcpu {
    pub cpu: u32,
    pub running: f64,
    pub waiting: f64,
    pub throttled: f64,
    pub affinity: CpuSet,
    pub miss_rate: Option<f64>,
}

impl Scene {
    /// Four fully linked nodes. Each has this many CPUs, 16 GiB and 16 GB/s; links have 8 GB/s.
    pub(crate) fn four_nodes(cpus: u32) -> Scene {
        Scene::nodes(4, cpus)
    }

    pub(crate) fn nodes(nodes: u16, cpus: u32) -> Scene {
        let ids = || (0..nodes).map(NodeId);
        let of = |node: NodeId| {
            (0..cpus)
                .map(|c| CpuId(u32::from(node.0) * cpus + c))
                .collect::<CpuSet>()
        };
        let machine = Machine {
            name: "scene".into(),
            nodes: ids()
                .map(|id| {
                    let memory_bandwidth = Some(BytesPerSec(16_000_000_000));
                    (
                        id,
                        Node {
                            cpus: of(id),
                            memory_bytes: Bytes::from_gib(16),
                            memory_bandwidth,
                            memory_ns: None,
                            socket: Some(id.0),
                        },
                    )
                })
                .collect(),
            memory_allowed: ids().collect(),
            isolated: CpuSet::new(),
            cpus: ids()
                .flat_map(|node| {
                    of(node)
                        .iter()
                        .map(move |id| Cpu {
                            id,
                            node,
                            socket: node.0,
                            core: id.0,
                            llc: None,
                        })
                        .collect::<Vec<_>>()
                })
                .collect(),
            llcs: vec![],
            distances: Distances {
                rows: ids()
                    .map(|a| ids().map(|b| if a == b { 10 } else { 20 }).collect())
                    .collect(),
            },
            links: ids()
                .flat_map(|a| ids().filter(move |b| *b != a).map(move |b| (a, b)))
                .map(|(from, to)| Link {
                    hop_ns: None,
                    from,
                    to,
                    bandwidth: Some(BytesPerSec(8_000_000_000)),
                })
                .collect(),
            routes: vec![],
            devices: vec![],
            notes: vec![],
            hardware: None,
        };
        let machine = machine.checked().expect("a scene is a possible machine");
        let host_busy = vec![0.0; machine.cpus.len()];
        Scene {
            machine,
            at: Ns::from_secs(100),
            vms: vec![],
            host_busy,
            links: vec![],
            traffic: NodeMap::new(),
            huge_pages: NodeMap::new(),
            no_page_uses: None,
            kernel: KernelSettings::default(),
            balloons: Balloons::Virtio,
            reserved_cpus: CpuSet::new(),
            offline: CpuSet::new(),
            drained: NodeSet::new(),
        }
    }

    /// Sockets of `nodes` nodes of `cpus` CPUs, with these distances within a socket and across.
    pub(crate) fn sockets(sockets: u16, nodes: u16, cpus: u32, (within, across): (u32, u32)) -> Scene {
        let mut scene = Scene::nodes(sockets * nodes, cpus);
        let socket = |node: usize| node / usize::from(nodes);
        for (from, row) in scene.machine.distances.rows.iter_mut().enumerate() {
            for (to, distance) in row.iter_mut().enumerate().filter(|(to, _)| *to != from) {
                *distance = if socket(from) == socket(to) {
                    within
                } else {
                    across
                };
            }
        }
        for cpu in &mut scene.machine.cpus {
            cpu.socket = cpu.node.0 / nodes;
        }
        for (id, node) in scene.machine.nodes.iter_mut() {
            node.socket = Some(id.0 / nodes);
        }
        scene
    }

    /// Lets each group of `per_core` CPUs of a node share a core.
    pub(crate) fn hyperthreads(&mut self, per_core: u32) {
        for cpu in &mut self.machine.cpus {
            cpu.core = cpu.id.0 / per_core;
        }
    }

    /// Adds a pool of huge pages of this size to a node, with total and free counts.
    pub(crate) fn pool(&mut self, node: u16, page_bytes: Bytes, (total_count, free_count): (u64, u64)) {
        if self.huge_pages.get(NodeId(node)).is_none() {
            self.huge_pages.insert(NodeId(node), Vec::new());
        }
        self.huge_pages[NodeId(node)].push(HugePages {
            page_bytes,
            total_count,
            free_count,
        });
    }

    /// Adds an idle VM that may run anywhere. Its vCPUs are on the CPUs of `node` in turn.
    pub(crate) fn add_vm(&mut self, n: u128, vcpus: u32, memory: Bytes, node: u16) -> &mut SceneVm {
        let cpus = &self.machine.nodes[NodeId(node)].cpus;
        let vcpus = (0..vcpus)
            .map(|i| SceneVcpu {
                cpu: cpus
                    .iter()
                    .nth(i as usize % cpus.len())
                    .expect("a node has CPUs")
                    .0,
                running: 0.0,
                waiting: 0.0,
                throttled: 0.0,
                affinity: self.machine.cpu_set(),
                miss_rate: None,
            })
            .collect();
        self.vms.push(SceneVm {
            n,
            memory,
            vcpus,
            home: None,
            home_told: HomeInForce::Untold,
            pages: NodeMap::new(),
            huge_page_bytes: None,
            misses_per_s: None,
            memory_policy: MemoryPolicy::default(),
            page_uses: None,
            observed: None,
            local: None,
            accesses_on: Vec::new(),
            instructions_per_s: 0,
            has_llc: true,
            immovable: None,
            bound_to: None,
            moves_whole: false,
            no_releases: None,
            hands_off: None,
            quota_hands_off: None,
            settings: VmSettings::default(),
            quota: None,
            device_nodes: NodeSet::new(),
            balloon: None,
            virtual_nodes: Vec::new(),
            follows: false,
            published: None,
            layout: None,
        });
        self.vms.sort_by_key(|vm| vm.n);
        self.vms.iter_mut().find(|vm| vm.n == n).expect("just added")
    }

    pub(crate) fn vm(&mut self, n: u128) -> &mut SceneVm {
        self.vms
            .iter_mut()
            .find(|vm| vm.n == n)
            .expect("a VM of the scene")
    }

    /// Builds the two samples, their rates and the view, and calls `f` with the view.
    pub(crate) fn with_view<T>(&mut self, f: impl FnOnce(&View<'_>) -> T) -> T {
        self.with_view_after(1, f)
    }

    /// Like `with_view`, but after this number of equal periods, at least 1.
    pub(crate) fn with_view_after<T>(&mut self, periods: u64, f: impl FnOnce(&View<'_>) -> T) -> T {
        let (before, after) = (self.sample((periods - 1) as f64), self.sample(periods as f64));
        let rates = Rates::between(&self.machine, &before, &after);
        let rates = rates.as_ref();
        let vms = after
            .vms
            .iter()
            .zip(&self.vms)
            .map(|(sample, vm)| VmView {
                sample,
                rates: rates.and_then(|r| r.vm(sample.id)),
                home: vm.home.as_ref(),
                layout: vm.layout.as_deref(),
                hands_off: vm.hands_off,
                quota_hands_off: vm.quota_hands_off,
            })
            .collect();
        let barred = Barred {
            cpus: Some(&self.reserved_cpus),
            nodes: Some(&self.drained),
        };
        let view = View::new(&self.machine, &after, rates, barred, vms);
        f(&view)
    }

    fn sample(&self, periods: f64) -> Sample {
        let mut busy = self.host_busy.clone();
        for vcpu in self.vms.iter().flat_map(|vm| &vm.vcpus) {
            busy[vcpu.cpu as usize] += vcpu.running;
        }
        let ns = |share: f64| Ns((share * periods * PERIOD.as_f64()) as u64);
        let cpus = self.machine.cpus.iter().zip(busy);
        let cpus = cpus.filter(|(cpu, _)| !self.offline.contains(cpu.id));
        let cpus = cpus.map(|(cpu, busy)| CpuSample {
            id: cpu.id,
            busy_ns: ns(busy.min(1.0)),
        });
        let nodes = self.machine.nodes.map(|id, node| {
            let used: u64 = self
                .vms
                .iter()
                .filter(|vm| vm.huge_page_bytes.is_none())
                .filter_map(|vm| vm.pages.get(id))
                .map(|p| p.0 * PAGE_BYTES)
                .sum();
            NodeSample {
                huge_pages: self.huge_pages.get(id).cloned(),
                memory_total_bytes: node.memory_bytes,
                memory_free_bytes: node.memory_bytes.saturating_sub(Bytes(used)),
                memory_traffic_bytes: Some(
                    (self.traffic.get(id).copied().unwrap_or(0) as f64 * periods) as u64,
                ),
            }
        });
        let links = self
            .links
            .iter()
            .map(|(from, to, rate)| LinkSample {
                from: *from,
                to: *to,
                bytes: (*rate as f64 * periods) as u64,
            })
            .collect();
        let vms = self.vms.iter().map(|vm| vm.sample(ns, periods)).collect();
        let at = self.at + ns(1.0);
        Sample {
            at,
            version: Version(7),
            counted_by: CountedBy::Hardware,
            balloons: self.balloons,
            cpus: cpus.collect(),
            nodes,
            links,
            no_page_uses: self.no_page_uses.clone(),
            trackers: Vec::new(),
            kernel: self.kernel,
            vms,
        }
    }
}

impl SceneVm {
    pub(crate) fn vcpus_busy(&mut self, running: f64) -> &mut Self {
        self.vcpus.iter_mut().for_each(|vcpu| vcpu.running = running);
        self
    }

    pub(crate) fn vcpus_waiting(&mut self, waiting: f64) -> &mut Self {
        self.vcpus.iter_mut().for_each(|vcpu| vcpu.waiting = waiting);
        self
    }

    pub(crate) fn vcpu(&mut self, index: usize) -> &mut SceneVcpu {
        &mut self.vcpus[index]
    }

    pub(crate) fn home(&mut self, node: u16) -> &mut Self {
        self.home = Some(NodeSet::one(NodeId(node)));
        self
    }

    /// Makes the host tell that the VM's home is on these nodes and, if there are any, kept on these CPUs of them.
    pub(crate) fn home_told(&mut self, nodes: &str, cpus: &str) -> &mut Self {
        self.home_told = HomeInForce::On {
            nodes: nodes.parse().expect("a node list"),
            cpus: cpus.parse().expect("a CPU list"),
        };
        self.homes(nodes)
    }

    pub(crate) fn homes(&mut self, nodes: &str) -> &mut Self {
        self.home = Some(nodes.parse().expect("a node list"));
        self
    }

    pub(crate) fn in_force(&mut self, policy: MemoryPolicy) -> &mut Self {
        self.memory_policy = policy;
        self
    }

    pub(crate) fn chosen(&mut self, policy: MemoryPolicy) -> &mut Self {
        self.settings.memory_policy = Some(policy);
        self
    }

    pub(crate) fn affinity(&mut self, cpus: &CpuSet) -> &mut Self {
        self.vcpus
            .iter_mut()
            .for_each(|vcpu| vcpu.affinity = cpus.clone());
        self
    }

    pub(crate) fn pages(&mut self, node: u16, pages: u64) -> &mut Self {
        self.pages.insert(NodeId(node), Pages(pages));
        self
    }

    pub(crate) fn misses_per_s(&mut self, misses: u64) -> &mut Self {
        self.misses_per_s = Some(misses);
        self
    }

    /// Sets the result of memory sampling.
    pub(crate) fn page_uses(&mut self, uses: Vec<PageUse>) -> &mut Self {
        self.page_uses = Some(uses);
        self
    }

    pub(crate) fn observed(&mut self, observed: Option<Observation>) -> &mut Self {
        self.observed = observed;
        self
    }

    /// Sets the accesses per second to the memory of each node; a quarter of them are local by default.
    pub(crate) fn accesses_on(&mut self, on: &[u64]) -> &mut Self {
        self.accesses_on = on.to_vec();
        self.local.get_or_insert(0.25);
        self
    }

    /// The PMU of this machine counts instructions and cycles, and nothing at the LLC.
    pub(crate) fn without_llc(&mut self) -> &mut Self {
        self.has_llc = false;
        self
    }

    pub(crate) fn instructions_per_s(&mut self, count: u64) -> &mut Self {
        self.instructions_per_s = count;
        self
    }

    /// Sets the share of the VM's accesses that are local.
    pub(crate) fn local(&mut self, share: f64) -> &mut Self {
        self.local = Some(share);
        self
    }

    pub(crate) fn miss_rate(&mut self, rate: f64) -> &mut Self {
        self.vcpus.iter_mut().for_each(|vcpu| vcpu.miss_rate = Some(rate));
        self
    }

    /// Puts the VM's memory in huge pages of this size.
    pub(crate) fn in_huge_pages(&mut self, page_bytes: Bytes) -> &mut Self {
        self.huge_page_bytes = Some(page_bytes);
        self
    }

    pub(crate) fn moves_whole(&mut self) -> &mut Self {
        self.moves_whole = true;
        self
    }

    pub(crate) fn immovable(&mut self, why: Immovable) -> &mut Self {
        self.immovable = Some(why);
        self
    }

    pub(crate) fn movable(&mut self) -> &mut Self {
        self.immovable = None;
        self
    }

    /// Binds parts of the VM's memory to these nodes.
    pub(crate) fn bound_to(&mut self, nodes: &str) -> &mut Self {
        let nodes: NodeSet = nodes.parse().expect("a list of nodes");
        self.bound_to = Some(nodes.clone());
        self.immovable(Immovable::BoundInParts { nodes })
    }

    pub(crate) fn no_releases(&mut self, why: &str) -> &mut Self {
        self.no_releases = Some(why.to_owned());
        self
    }

    pub(crate) fn hands_off(&mut self, why: HandsOff) -> &mut Self {
        self.hands_off = Some(why);
        self
    }

    /// Sets the quota in force.
    pub(crate) fn quota(&mut self, quota: CpuQuota) -> &mut Self {
        self.quota = Some(quota);
        self
    }

    pub(crate) fn quota_hands_off(&mut self, why: HandsOff) -> &mut Self {
        self.quota_hands_off = Some(why);
        self
    }

    pub(crate) fn allowed(&mut self, cpus: &str) -> &mut Self {
        self.settings.cpus_allowed = Some(cpus.parse().expect("a CPU list"));
        self
    }

    pub(crate) fn settings(&mut self) -> &mut VmSettings {
        &mut self.settings
    }

    pub(crate) fn balloon(&mut self, balloon: Balloon) -> &mut Self {
        self.balloon = Some(balloon);
        self
    }

    /// Lets the guest be told its location. Each virtual node has these vCPUs, and pages by node.
    pub(crate) fn follows(&mut self, virtual_nodes: &[SeenNode<'_>]) -> &mut Self {
        let virtual_node = |(vcpus, pages): &SeenNode<'_>| VirtualNode {
            vcpus: vcpus.to_vec(),
            memory_bytes: Bytes::from_gib(1),
            pages: Some(
                pages
                    .iter()
                    .map(|(node, pages)| (NodeId(*node), Pages(*pages)))
                    .collect(),
            ),
        };
        self.virtual_nodes = virtual_nodes.iter().map(virtual_node).collect();
        self.follows = true;
        self
    }

    /// Sets the topology that was last published to the guest.
    pub(crate) fn published(&mut self, published: Option<Published>) -> &mut Self {
        self.published = published;
        self
    }

    /// Sets the intended node of each virtual node.
    pub(crate) fn layout(&mut self, nodes: Option<&[NodeId]>) -> &mut Self {
        self.layout = nodes.map(<[NodeId]>::to_vec);
        self
    }

    pub(crate) fn device_on(&mut self, node: u16) -> &mut Self {
        self.device_nodes.insert(NodeId(node));
        self
    }

    fn sample(&self, ns: impl Fn(f64) -> Ns, periods: f64) -> VmSample {
        let vcpus = self.vcpus.iter().enumerate().map(|(index, vcpu)| VcpuSample {
            index: index as u16,
            running_ns: ns(vcpu.running),
            waiting_ns: Some(ns(vcpu.waiting + vcpu.throttled)),
            throttled_ns: ns(vcpu.throttled),
            cpu: Some(CpuId(vcpu.cpu)),
            affinity: vcpu.affinity.clone(),
            quota: self.quota,
            counters: self.counters(vcpu, periods),
        });
        VmSample {
            id: vm_id(self.n),
            name: format!("vm{}", self.n),
            vcpus: vcpus.collect(),
            memory_bytes: self.memory,
            balloon: self.balloon,
            pages: Some(self.pages.clone()),
            huge_page_bytes: self.huge_page_bytes,
            virtual_nodes: self.virtual_nodes.clone(),
            no_topology_device: (!self.follows).then(|| "it has no topology device".to_owned()),
            published: self.published.clone(),
            accesses: self.local.map(|share| Accesses {
                local: (share * periods * 1e6) as u64,
                remote: ((1.0 - share) * periods * 1e6) as u64,
                on: (0..)
                    .map(NodeId)
                    .zip(self.accesses_on.iter().map(|on| (*on as f64 * periods) as u64))
                    .collect(),
            }),
            memory_policy: self.memory_policy,
            page_uses: self.page_uses.clone(),
            observed: self.observed.clone(),
            immovable: self.immovable.clone(),
            bound_to: self.bound_to.clone(),
            moves_whole: self.moves_whole,
            no_releases: self.no_releases.clone(),
            confined: None,
            device_nodes: self.device_nodes.clone(),
            home: self.home_told.clone(),
            is_unread: false,
            settings: self.settings.clone(),
        }
    }

    fn counters(&self, vcpu: &SceneVcpu, periods: f64) -> Option<homenode_host::Counters> {
        let counted = self.misses_per_s.or(vcpu.miss_rate.map(|_| 1_000_000));
        let counted = counted.or((self.instructions_per_s > 0).then_some(0));
        let per_s = counted? as f64 * periods;
        let references = per_s / vcpu.miss_rate.unwrap_or(0.5);
        Some(homenode_host::Counters {
            instructions: (self.instructions_per_s as f64 * periods) as u64,
            cycles: (vcpu.running * periods * 2e9) as u64,
            llc_references: self.has_llc.then_some(references as u64),
            llc_misses: self.has_llc.then_some(per_s as u64),
        })
    }
}

/// A character with this many threads, and this many misses per thousand instructions.
pub(crate) fn character(threads: f64, misses_per_kilo: f64) -> Character {
    Character {
        threads,
        share: 1.0,
        clock: 2e9,
        core: 0.5,
        stall: 40.0,
        references: misses_per_kilo / 500.0,
        miss_ratio: 0.5,
        capacity: 8e6,
        slope: 0.4,
        bytes_per_miss: 85.0,
        local_free: 0.7,
        found: None,
        memory: None,
        at_home: 1.0,
        when_unplaced: 1.0,
    }
}

/// Nodes with this many cores and CPUs, each with one cache of 16 MB and 16 GB/s, all equally far from each other.
pub(crate) fn shape(nodes: u16, cores: f64, cpus: f64) -> Shape {
    shape_of_caches(nodes, 1, cores, cpus)
}

/// Nodes with `per_node` caches each; each cache has this many cores and CPUs.
pub(crate) fn shape_of_caches(nodes: u16, per_node: u32, cores: f64, cpus: f64) -> Shape {
    let each = f64::from(per_node);
    let node = |id| NodeShape {
        id: NodeId(id),
        cores: cores * each,
        cpus: cpus * each,
        bandwidth: 16e9,
        caches: ((1 << per_node) - 1) << (u32::from(id) * per_node),
    };
    let cache = |at: u32| CacheShape {
        node: (at / per_node) as usize,
        cpu_set: (0..cpus as u32)
            .map(|cpu| CpuId(at * cpus as u32 + cpu))
            .collect(),
        cpus,
        cores,
        bytes: 16e6,
    };
    let latency = |from, to| if from == to { 1.0 } else { 1.6 };
    Shape {
        nodes: (0..nodes).map(node).collect(),
        caches: (0..u32::from(nodes) * per_node).map(cache).collect(),
        latency: (0..nodes)
            .flat_map(|from| (0..nodes).map(move |to| latency(from, to)))
            .collect(),
        smt_stretch: predict::Config::default().smt_stretch,
        near: Near::by(usize::from(nodes), |_, _| 20),
    }
}

/// All settings that concern homes.
#[derive(Clone, Debug, Default)]
pub(crate) struct OfHomes {
    pub placement: placement::Config,
    pub predict: predict::Config,
    pub arrange: arrange::Config,
    pub trial: trial::Config,
}

impl OfHomes {
    pub(crate) fn of_trials(&self) -> trial::Settings<'_> {
        trial::Settings {
            placement: &self.placement,
            predict: &self.predict,
            trial: &self.trial,
        }
    }

    pub(crate) fn settings(&self) -> Settings<'_> {
        Settings {
            placement: &self.placement,
            predict: &self.predict,
            arrange: &self.arrange,
            trial: &self.trial,
        }
    }
}

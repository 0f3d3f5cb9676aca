//! The resources that nodes have left, and the bins into which a VM could go.

use std::borrow::Cow;

use homenode_host::{HugeMemory, View, VmSample, VmView};
use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId, NodeMap, NodeSet, PAGE_BYTES, VmId};

use super::pools::{self, Pools};
use super::{Config, Ledger};
use crate::demand::{Demand, History};
use crate::near::{self, Near, positions};

/// CPU, memory and bandwidth, either as absolute amounts (CPUs, bytes, bytes/s) or as shares of the host's totals.
pub(super) type Vector = [f64; 3];
pub(super) const CPU: usize = 0;
pub(super) const MEMORY: usize = 1;
pub(super) const BANDWIDTH: usize = 2;

/// Most nodes that can be homes, because a bin is a bit mask over nodes. If more nodes have memory, only the first of them
/// are used.
const MASK_NODES_MAX: usize = 64;
/// Most bins of one size and span that are tried. Eight nodes have at most 70 bins of one size. Beyond about 14 fully connected
/// nodes, this limit keeps the sets with the lowest node numbers and drops the rest. It bounds work, and is not a setting.
const BINS_OF_ONE_SIZE_MAX: usize = 4096;

/// The free resources of every node that can be a home.
#[derive(Clone, Debug)]
pub struct Supply {
    pub(super) nodes: Vec<NodeSupply>,
    /// Totals of the host, by which amounts are divided to get shares.
    pub(super) total: Vector,
    /// CPUs of the host if each hyperthread counts.
    total_threads: f64,
    /// Whether CPU is counted in hyperthreads here, and not in cores.
    pub(super) counts_threads: bool,
    /// Whether every node's bandwidth is known. If not, placement packs in two dimensions.
    pub(super) bandwidth_known: bool,
    /// For each node, the other nodes to which it has a quiet link, as a mask of positions.
    quiet: Vec<u64>,
    /// Distances between nodes, by position.
    pub(super) near: Near,
    /// Huge pages that are left on the nodes.
    pools: Pools,
    /// Which memory [`NodeSupply::left`] counts: huge pages of this size, or ordinary memory if `None`.
    memory_of: Option<Bytes>,
    /// Other kinds of memory that the VM to be placed needs ([`Supply::counting`]).
    pub(super) rest: Vec<Rest>,
}

/// A part of a VM's memory other than the one counted as [`MEMORY`].
#[derive(Clone, Debug)]
pub(super) struct Rest {
    /// Size of its huge pages; `None` for ordinary memory.
    pub page_bytes: Option<Bytes>,
    /// Bytes needed.
    pub needed: f64,
    /// Bytes left on each node, by position.
    pub left: Vec<f64>,
}

/// What one node has left.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeSupply {
    pub node: NodeId,
    pub left: Vector,
    /// CPUs left if each hyperthread counts.
    pub threads: f64,
}

/// A node's free resources for a VM that does not run yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeLeft {
    /// The node.
    pub node: NodeId,
    /// CPUs, counted in hyperthreads.
    pub cpus: f64,
    /// Memory.
    pub memory: Bytes,
    /// Bandwidth of its controllers; `None` if it is not known for every node, because placement then does not count it.
    pub bandwidth: Option<BytesPerSec>,
}

/// One or more nodes, as a mask of positions in [`Supply::nodes`], with what they have left together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin {
    pub mask: u64,
    /// What is left, as shares of the host's totals.
    pub left: Vector,
    /// Memory that fits if it is interleaved. Interleaving fills all nodes evenly, so the node with least memory left limits it.
    pub memory_if_interleaved: f64,
    /// Sum of the distances between its nodes ([`crate::near::Near::sum`]).
    pub distance: u32,
    /// Whether there is room, interleaved too, for the other parts of the VM's memory ([`Supply::rest`]).
    pub has_rest: bool,
}

impl Supply {
    /// Returns what the view's host has left after all reservations: for VMs with a home, and for VMs that have not appeared.
    /// VMs in `without` are those that seek a home; they count as if they did not run, until nodes are reserved for them.
    pub fn new<'a>(
        view: &View<'a>,
        history: &History,
        ledger: &'a Ledger,
        config: &Config,
        without: &'a [VmId],
    ) -> Supply {
        let machine = view.machine;
        let mut nodes: Vec<NodeSupply> = Vec::with_capacity(machine.nodes.len());
        let homes = view.homes();
        let counted = Counted { ledger, without };
        let (mut total, mut total_threads) = ([0.0; 3], 0.0);
        let mut bandwidth_known = true;
        for (id, node) in machine
            .nodes
            .iter()
            .filter(|(id, _)| homes.contains(*id))
            .take(MASK_NODES_MAX)
        {
            let cpus = node.cpus.intersection(&view.cpus);
            let (cores, threads) = (near::cores(machine, &cpus) as f64, cpus.len() as f64);
            let free = view
                .sample
                .nodes
                .get(id)
                .map_or(0.0, |n| n.memory_free_bytes.as_f64());
            let rates = view.rates.and_then(|rates| rates.nodes.get(id));
            let used = rates.and_then(|rates| rates.bandwidth).unwrap_or_default();
            let unplaced = unplaced_running(view, &counted, id);
            bandwidth_known &= node.memory_bandwidth.is_some();
            let bandwidth = node.memory_bandwidth.unwrap_or_default();
            // Rounded, because daemons that use less than half a CPU displace no vCPU.
            let busy = history.host_cpus(id).round() + unplaced;
            nodes.push(NodeSupply {
                node: id,
                threads: threads - busy,
                left: [
                    cores - busy,
                    free - config.reserved_memory.as_f64(),
                    bandwidth.saturating_sub(used).as_f64(),
                ],
            });
            total[CPU] += cores;
            total_threads += threads;
            total[MEMORY] += node.memory_bytes.as_f64();
            total[BANDWIDTH] += bandwidth.as_f64();
        }
        let ids: Vec<NodeId> = nodes.iter().map(|of| of.node).collect();
        let mut supply = Supply {
            nodes,
            total,
            total_threads,
            counts_threads: false,
            bandwidth_known,
            quiet: Vec::new(),
            near: Near::of(machine, &ids),
            pools: pools_of(view, &ids),
            memory_of: None,
            rest: Vec::new(),
        };
        supply.charge_vms(view, history, &counted);
        supply.charge_pending(view, ledger);
        for node in &mut supply.nodes {
            node.left = node.left.map(|left| left.max(0.0));
            node.threads = node.threads.max(0.0);
        }
        supply.quiet = quiet_links(view, config, &supply.nodes);
        supply
    }

    /// Charges nodes with the reservations for VMs that do not run yet.
    fn charge_pending(&mut self, view: &View<'_>, ledger: &Ledger) {
        for reservation in ledger.pending(view) {
            let demand = &reservation.demand;
            let bandwidth = demand.bandwidth.unwrap_or_default();
            self.charge(
                &reservation.nodes,
                [demand.cpus, demand.ordinary_bytes().as_f64(), bandwidth.as_f64()],
            );
            for part in &demand.huge_pages {
                self.charge_pool(&reservation.nodes, *part);
            }
        }
    }

    /// Returns this supply with CPU counted in hyperthreads.
    pub(super) fn by_threads(&self) -> Supply {
        let mut supply = self.clone();
        supply.counts_threads = true;
        supply.total[CPU] = self.total_threads;
        for node in &mut supply.nodes {
            node.left[CPU] = node.threads;
        }
        supply
    }

    /// Returns the share of these nodes' free hyperthreads that remains once this number of CPUs is taken, 0 to 1.
    pub(super) fn cpus_stay(&self, mask: u64, cpus: f64) -> f64 {
        let free: f64 = positions(mask).map(|at| self.nodes[at].threads).sum();
        (1.0 - cpus / free.max(cpus).max(1.0)).clamp(0.0, 1.0)
    }

    /// Whether cores have several hyperthreads on this host.
    pub(super) fn has_threads(&self) -> bool {
        self.total_threads > self.total[CPU]
    }

    /// Returns what each node has left for [`super::place`] to assign, in ascending order of nodes.
    pub fn left(&self) -> impl Iterator<Item = NodeLeft> {
        self.nodes.iter().map(|of| NodeLeft {
            node: of.node,
            cpus: of.threads,
            memory: Bytes(of.left[MEMORY] as u64),
            bandwidth: self
                .bandwidth_known
                .then_some(BytesPerSec(of.left[BANDWIDTH] as u64)),
        })
    }

    /// Charges nodes for every VM that has a home, or a reservation, with what it needs there beyond the measured figures.
    /// The room of its pages elsewhere counts as free, because they will move home.
    fn charge_vms<'a>(&mut self, view: &View<'a>, history: &History, counted: &Counted<'a>) {
        for vm in &view.vms {
            let measured = vm
                .rates
                .and_then(homenode_host::VmRates::bandwidth)
                .unwrap_or_default();
            if counted.left_out(vm) {
                self.give_back(vm.sample, &NodeSet::new(), measured);
                continue;
            }
            let Some(home) = counted.home(vm) else { continue };
            if vm.memory_fixed().is_none() {
                self.give_back(vm.sample, home, measured);
            }
            let vcpus = vm.sample.vcpus.len();
            let outside = vm.sample.pages_outside(home).unwrap_or_default();
            let on_home = vm
                .sample
                .pages_touched()
                .unwrap_or_default()
                .saturating_sub(outside)
                .as_f64();
            let mut untouched = (vm.sample.memory_bytes.as_f64() - on_home * PAGE_BYTES as f64).max(0.0);
            if let Some(page_bytes) = vm.sample.huge_page_bytes {
                self.charge_pool(home, pools::untouched(vm.sample, page_bytes, on_home));
                untouched = 0.0;
            }
            let (expected, _) = history.bandwidth(Some(vm.sample.id), vcpus, vm.sample.settings.bandwidth);
            let there =
                measured.as_f64() * on_home / vm.sample.pages_touched().unwrap_or_default().as_f64().max(1.0);
            let more = (expected.unwrap_or_default().as_f64() - there).max(0.0);
            self.charge(home, [history.cpus(vm.sample.id, vcpus), untouched, more]);
        }
    }

    /// Releases a VM's measured memory and traffic on all nodes except `but`.
    fn give_back(&mut self, vm: &VmSample, but: &NodeSet, measured: BytesPerSec) {
        let touched = vm.pages_touched().unwrap_or_default().as_f64().max(1.0);
        for (node, pages) in vm
            .pages
            .iter()
            .flat_map(NodeMap::iter)
            .filter(|(node, _)| !but.contains(*node))
        {
            let Some(at) = self.position(node) else { continue };
            let bytes = match vm.huge_page_bytes {
                Some(page_bytes) => {
                    self.pools.give_back(page_bytes, at, *pages);
                    0.0
                }
                None => pages.as_f64() * PAGE_BYTES as f64,
            };
            let node = &mut self.nodes[at];
            node.left[MEMORY] += bytes;
            node.left[BANDWIDTH] += measured.as_f64() * pages.as_f64() / touched;
        }
    }

    /// Subtracts an amount, split evenly over these nodes.
    fn charge(&mut self, nodes: &NodeSet, amount: Vector) {
        let parts = nodes.len().max(1) as f64;
        for node in nodes.iter() {
            if let Some(node) = self.node_mut(node) {
                node.threads -= amount[CPU] / parts;
                for (left, amount) in node.left.iter_mut().zip(amount) {
                    *left -= amount / parts;
                }
            }
        }
    }

    fn charge_pool(&mut self, nodes: &NodeSet, part: HugeMemory) {
        let at: Vec<usize> = nodes.iter().filter_map(|node| self.position(node)).collect();
        self.pools.charge(part, &at);
    }

    fn position(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |n| n.node).ok()
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut NodeSupply> {
        self.position(id).map(|at| &mut self.nodes[at])
    }

    /// Returns this supply with [`MEMORY`] counted in the kind of memory that most of the VM's memory has: ordinary memory,
    /// or huge pages of one size. The other parts are checked separately ([`Bin::has_rest`]).
    pub(super) fn counting(&self, demand: &Demand) -> Cow<'_, Supply> {
        let Some(largest) = demand.huge_pages.iter().max_by_key(|part| part.memory_bytes) else {
            return Cow::Borrowed(self);
        };
        let mut supply = self.clone();
        let ordinary = demand.ordinary_bytes();
        let is_huge = largest.memory_bytes >= ordinary;
        if is_huge {
            let on = |at: usize| self.pool_of(largest.page_bytes, at);
            let left: Vec<f64> = (0..supply.nodes.len()).map(|at| on(at).left).collect();
            supply.total[MEMORY] = (0..supply.nodes.len()).map(|at| on(at).total).sum();
            for (node, left) in supply.nodes.iter_mut().zip(left) {
                node.left[MEMORY] = left;
            }
            supply.memory_of = Some(largest.page_bytes);
        }
        let others = demand.huge_pages.iter();
        let others = others.filter(|part| Some(part.page_bytes) != supply.memory_of);
        let huge = others.map(|part| Rest {
            page_bytes: Some(part.page_bytes),
            needed: pools::whole(*part) as f64 * part.page_bytes.as_f64(),
            left: (0..self.nodes.len())
                .map(|at| self.pool_of(part.page_bytes, at).left)
                .collect(),
        });
        supply.rest = huge.collect();
        if is_huge && ordinary > Bytes::ZERO {
            supply.rest.push(Rest {
                page_bytes: None,
                needed: ordinary.as_f64(),
                left: self.nodes.iter().map(|node| node.left[MEMORY]).collect(),
            });
        }
        Cow::Owned(supply)
    }

    /// Returns a node's pool of huge pages of this size; what is left is never below 0.
    pub(super) fn pool_of(&self, page_bytes: Bytes, at: usize) -> pools::PoolOfNode {
        let of = self
            .pools
            .get(page_bytes)
            .map_or_else(Default::default, |pool| pool.nodes[at]);
        pools::PoolOfNode {
            left: of.left.max(0.0),
            ..of
        }
    }

    /// Returns the bytes that a demand needs of the kind of memory counted here, in whole pages.
    pub(super) fn memory_needed(&self, demand: &Demand) -> f64 {
        let part = demand
            .huge_pages
            .iter()
            .find(|part| Some(part.page_bytes) == self.memory_of);
        match part {
            Some(part) => pools::whole(*part) as f64 * part.page_bytes.as_f64(),
            None => demand.ordinary_bytes().as_f64(),
        }
    }

    /// Returns the size of the huge pages in which memory is counted here; `None` if ordinary memory is counted.
    pub(super) fn memory_of(&self) -> Option<Bytes> {
        self.memory_of
    }

    /// Returns a demand as shares of the host's totals; each is in [0, 1] if the VM is not larger than the host. If the host
    /// has no memory of the kind counted, any need for it is infinite.
    pub(super) fn normalise(&self, demand: &Demand) -> Vector {
        let bandwidth = demand.bandwidth.unwrap_or(BytesPerSec(0)).as_f64();
        let memory = self.memory_needed(demand);
        let mut need = self.share([demand.cpus, memory, bandwidth]);
        if self.total[MEMORY] <= 0.0 && memory > 0.0 {
            need[MEMORY] = f64::INFINITY;
        }
        need
    }

    fn share(&self, amount: Vector) -> Vector {
        std::array::from_fn(|i| {
            if self.total[i] > 0.0 {
                amount[i] / self.total[i]
            } else {
                0.0
            }
        })
    }

    /// Returns the nodes of a mask.
    pub(super) fn nodes_of(&self, mask: u64) -> NodeSet {
        positions(mask).map(|at| self.nodes[at].node).collect()
    }

    /// Returns the bin of a mask.
    pub(super) fn bin(&self, mask: u64) -> Bin {
        let mut left = [0.0; 3];
        let mut least_memory = f64::INFINITY;
        for at in positions(mask) {
            for (sum, own) in left.iter_mut().zip(self.nodes[at].left) {
                *sum += own;
            }
            least_memory = least_memory.min(self.nodes[at].left[MEMORY]);
        }
        let count = f64::from(mask.count_ones());
        let memory_if_interleaved = least_memory * count / self.total[MEMORY].max(1.0);
        let fits = |rest: &Rest| positions(mask).all(|at| rest.left[at] * count >= rest.needed);
        Bin {
            mask,
            left: self.share(left),
            memory_if_interleaved,
            distance: self.near.sum(mask),
            has_rest: self.rest.iter().all(fits),
        }
    }

    /// Returns this supply limited to the CPUs that a VM may use: no node has more CPUs for it than those.
    pub(super) fn within(mut self, view: &View<'_>, allowed: Option<&CpuSet>) -> Supply {
        if allowed.is_none() {
            return self;
        }
        let usable = view.cpus_for(allowed);
        for node in &mut self.nodes {
            let cpus = view
                .machine
                .cpus_of(&NodeSet::one(node.node))
                .intersection(&usable);
            node.threads = node.threads.min(cpus.len() as f64);
            node.left[CPU] = node.left[CPU].min(crate::near::cores(view.machine, &cpus) as f64);
        }
        self
    }

    /// Returns every node as a bin.
    pub(super) fn single_bins(&self) -> Vec<Bin> {
        (0..self.nodes.len()).map(|at| self.bin(1 << at)).collect()
    }

    /// Returns the bins that are one node larger than those in `smaller`, connected by quiet links, and of at most this span.
    pub(super) fn grow(&self, smaller: &[Bin], span: u32) -> Vec<Bin> {
        let mut masks: Vec<u64> = Vec::new();
        for bin in smaller {
            let neighbours = positions(bin.mask).fold(0, |all, at| all | self.quiet[at]) & !bin.mask;
            let near = neighbours & self.near.within(bin.mask, span);
            masks.extend(positions(near).map(|at| bin.mask | 1 << at));
        }
        masks.sort_unstable();
        masks.dedup();
        masks.truncate(BINS_OF_ONE_SIZE_MAX);
        masks.into_iter().map(|mask| self.bin(mask)).collect()
    }

    /// Returns the CPUs of these nodes that a VM may use.
    pub fn cpus_for(view: &View<'_>, nodes: &NodeSet, allowed: Option<&CpuSet>) -> CpuSet {
        view.machine.cpus_of(nodes).intersection(&view.cpus_for(allowed))
    }
}

/// Tells which VMs count by their reservations instead of their measured use.
struct Counted<'a> {
    ledger: &'a Ledger,
    without: &'a [VmId],
}

impl<'a> Counted<'a> {
    /// Returns the home that is reserved for a VM in this cycle, or else the one that it has.
    fn home(&self, vm: &VmView<'a>) -> Option<&'a NodeSet> {
        let home = || vm.home.filter(|_| !self.without.contains(&vm.sample.id));
        self.ledger.reserved(vm.sample.id).or_else(home)
    }

    /// Whether a VM counts as not running.
    fn left_out(&self, vm: &VmView<'a>) -> bool {
        self.without.contains(&vm.sample.id) && self.home(vm).is_none()
    }
}

/// Returns the number of a node's CPUs that VMs without a home keep busy.
fn unplaced_running<'a>(view: &View<'a>, counted: &Counted<'a>, node: NodeId) -> f64 {
    let vms = view
        .vms
        .iter()
        .filter(|vm| !counted.left_out(vm) && counted.home(vm).is_none());
    let vcpus = vms.flat_map(|vm| vm.rates.iter().flat_map(|rates| &rates.vcpus));
    vcpus
        .filter(|vcpu| vcpu.node == Some(node))
        .map(|vcpu| vcpu.running)
        .sum()
}

fn quiet_links(view: &View<'_>, config: &Config, nodes: &[NodeSupply]) -> Vec<u64> {
    let quiet = |a: NodeId, b: NodeId| {
        view.machine.adjacent(a, b)
            && view.link_below(a, b, config.link_busy_max)
            && view.link_below(b, a, config.link_busy_max)
    };
    nodes
        .iter()
        .map(|a| {
            nodes
                .iter()
                .enumerate()
                .filter(|(_, b)| a.node != b.node && quiet(a.node, b.node))
                .fold(0, |mask, (at, _)| mask | 1 << at)
        })
        .collect()
}

/// Returns the pools that the view shows on these nodes.
fn pools_of(view: &View<'_>, nodes: &[NodeId]) -> Pools {
    let said = nodes.iter().enumerate().flat_map(|(at, node)| {
        let node = view.sample.nodes.get(*node);
        let pages = node.and_then(|node| node.huge_pages.as_ref());
        pages.into_iter().flatten().map(move |pages| (at, pages))
    });
    Pools::new(nodes.len(), said)
}

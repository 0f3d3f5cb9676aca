//! Results of the measurements of a host.

use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId};
use serde::Serialize;

use crate::fit::{self, FittedCurve};
use crate::host::CacheSizes;
use crate::noise::Noise;
use crate::stats::{NOISY, Spread};

/// Two CPUs whose throughput together, relative to one, is less than this share something that the host does not state.
const SHARING: f64 = 1.7;

/// Latency of a chase over a number of bytes.
#[derive(Clone, Debug, Serialize)]
pub struct SizePoint {
    /// Size of the chase in bytes.
    pub bytes: usize,
    /// Nanoseconds per access.
    pub latency_ns: Spread,
}

/// Bandwidth with a number of CPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Bandwidth {
    /// Number of streaming CPUs.
    pub cpus: usize,
    /// Bytes read per second.
    pub bytes_per_s: Spread,
}

/// Measurements with the CPUs of one node and the memory of one node.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// Node of the CPUs.
    pub cpu_node: NodeId,
    /// Node of the memory.
    pub memory_node: NodeId,
    /// Idle latency, with memory in huge pages if the kernel has them.
    pub latency_ns: Spread,
    /// Share of the memory for this latency that was in huge pages.
    pub huge_share: Option<f64>,
    /// Bandwidth of reads, by number of CPUs.
    pub read: Vec<Bandwidth>,
    /// Bandwidth of updates with all CPUs: reads and writes in equal parts.
    pub mixed_bytes_per_s: Option<Spread>,
}

impl Pair {
    /// Returns the highest total bandwidth of the node's CPUs, in bytes per second.
    pub fn bandwidth(&self) -> Option<Spread> {
        let read = self.read.last().map(|read| read.bytes_per_s);
        read.into_iter()
            .chain(self.mixed_bytes_per_s)
            .max_by(|a, b| a.median.total_cmp(&b.median))
    }
}

/// Latency under a load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadPoint {
    /// Total bytes per second that memory served.
    pub bytes_per_s: Spread,
    /// These bytes per second as a share of the sustained bandwidth.
    pub load: f64,
    /// Latency of a chase under this load.
    pub latency_ns: Spread,
}

/// All measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// The machine as the host's kernel describes it.
    pub machine: Machine,
    /// Date and time by the system clock (UTC).
    pub date: String,
    /// Duration of the calibration.
    pub seconds: f64,
    /// Whether the calibration used small buffers and few repetitions.
    pub quick: bool,
    /// Whether a hypervisor runs below this kernel.
    pub under_hypervisor: bool,
    /// Other activity on the host during the calibration.
    pub noise: Option<Noise>,
    /// Node whose CPUs measured everything except the pairs of nodes.
    pub home: NodeId,
    /// CPU that measured everything that needs only one.
    pub cpu: CpuId,
    /// Caches of that CPU, as the kernel states them.
    pub caches: CacheSizes,
    /// Whether the LLC holds everything that inner caches hold, according to the processor.
    pub llc_inclusive: Option<bool>,
    /// Core clock.
    pub clock_hz: Spread,
    /// Ticks of the processor's time stamp.
    pub time_stamp_hz: Option<Spread>,
    /// Latency of an L1 hit.
    pub l1_ns: Spread,
    /// Latency of an L2 hit.
    pub l2_ns: Spread,
    /// Latency of an LLC hit.
    pub llc_ns: Spread,
    /// Latency of a chase by its size.
    pub curve: Vec<SizePoint>,
    /// Part of the LLC that this CPU could use; `None` if the curve does not show where the LLC ends.
    pub llc_effective_bytes: Option<Spread>,
    /// Measurements of each pair of nodes.
    pub pairs: Vec<Pair>,
    /// Idle latency of the home's own memory in base pages. The difference from the pair's latency shows the cost of TLB
    /// misses.
    pub latency_base_pages_ns: Spread,
    /// Misses in flight of parallel chases.
    pub misses_in_flight: Spread,
    /// Misses in flight of one stream: its bandwidth times the idle latency, prefetchers included.
    pub stream_in_flight: Spread,
    /// Number of entries of the TLB for base pages.
    pub tlb_entries_base: Option<Spread>,
    /// Number of entries of the TLB for huge pages.
    pub tlb_entries_huge: Option<Spread>,
    /// Largest number of huge pages tried.
    pub tlb_huge_tried: usize,
    /// Throughput of two hyperthreads over that of one; `None` without siblings.
    pub smt_throughput: Option<Spread>,
    /// Throughput of two CPUs over that of one, for CPUs that the host says are on different cores.
    pub two_cores_throughput: Option<Spread>,
    /// Time to interrupt another CPU and receive its answer.
    pub interrupt_ns: Option<Spread>,
    /// Latency of the home's own memory under load.
    pub loaded: Vec<LoadPoint>,
    /// The curve that fits the latencies in `loaded`; `None` if there is only one core, or if loads stayed too low.
    pub load_curve: Option<FittedCurve>,
    /// Warnings about the figures.
    pub warnings: Vec<String>,
}

impl Calibration {
    /// Returns the pair of the home's CPUs with the home's memory, or with the nearest memory.
    pub fn home_pair(&self) -> &Pair {
        let own = self
            .pairs
            .iter()
            .find(|pair| (pair.cpu_node, pair.memory_node) == (self.home, self.home));
        own.unwrap_or(&self.pairs[0])
    }
}

pub(super) fn warn(calibration: &mut Calibration) {
    let c = &*calibration;
    let pairs = c.pairs.iter().flat_map(|pair| {
        let name = format!("from node {} to node {}", pair.memory_node, pair.cpu_node);
        let bandwidth = pair
            .bandwidth()
            .map(|spread| (format!("bandwidth {name}"), spread));
        std::iter::once((format!("latency {name}"), pair.latency_ns)).chain(bandwidth)
    });
    let optional = [
        ("effective LLC size", c.llc_effective_bytes),
        ("TLB entries for base pages", c.tlb_entries_base),
        ("TLB entries for huge pages", c.tlb_entries_huge),
        ("hyperthread throughput", c.smt_throughput),
        ("throughput of two cores", c.two_cores_throughput),
        ("interrupt", c.interrupt_ns),
    ];
    let figures = [
        ("core clock", c.clock_hz),
        ("L1 latency", c.l1_ns),
        ("L2 latency", c.l2_ns),
        ("LLC latency", c.llc_ns),
        ("memory latency in base pages", c.latency_base_pages_ns),
        ("misses in flight", c.misses_in_flight),
    ];
    let named = figures.into_iter().chain(
        optional
            .into_iter()
            .filter_map(|(name, spread)| Some((name, spread?))),
    );
    let named = named.map(|(name, spread)| (name.to_owned(), spread));
    let noisy = named.chain(pairs).filter(|(_, spread)| spread.noisy()).map(|(name, spread)| {
        let percent = spread.relative() * 100.0;
        format!("{name}: quartiles are {percent:.0} percent apart (the limit is {:.0}); measure again on a quieter host", NOISY * 100.0)
    });
    let mut warnings: Vec<String> = noisy.collect();
    let loads = c.loaded.iter().filter(|point| point.latency_ns.noisy()).count();
    if loads > 0 {
        let all = c.loaded.len();
        warnings.push(format!(
            "latency under load: quartiles are too far apart at {loads} of {all} loads"
        ));
    }
    if let Some(noise) = c
        .noise
        .filter(|noise| noise.steal_share + noise.others_share > 0.02)
    {
        warnings.push(format!(
            "during the measurement, other processes used {:.0} percent of CPU time, and a hypervisor stole {:.0} percent",
            noise.others_share * 100.0,
            noise.steal_share * 100.0
        ));
    }
    if let Some(two) = c.two_cores_throughput.filter(|two| two.median < SHARING) {
        warnings.push(format!(
            "two CPUs that the kernel calls separate cores do {:.2} times the work of one: they share a core, or are slowed down",
            two.median
        ));
    }
    if c.pairs
        .iter()
        .any(|pair| pair.huge_share.is_none_or(|share| share < 0.9))
    {
        warnings
            .push("huge pages were not available for all memory: latencies include TLB misses".to_owned());
    }
    if c.load_curve.is_none() {
        let least = fit::LOAD_LEAST * 100.0;
        warnings.push(format!(
            "no load went above {least:.0} percent of the bandwidth: the load curve is an estimate"
        ));
    }
    if c.load_curve.is_some_and(|fitted| !fitted.beta_fitted) {
        warnings.push(
            "the streams did not come near the sustained bandwidth: beta of the load curve is an estimate"
                .to_owned(),
        );
    }
    calibration.warnings.extend(warnings);
}

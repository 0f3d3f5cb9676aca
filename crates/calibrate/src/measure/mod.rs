//! Runs the measurements in order, and collects the results.

pub(crate) mod cache;
mod cpu;
pub(crate) mod memory;
pub(crate) mod meter;
mod results;

use std::io;
use std::time::{Duration, Instant};

use homenode_machine::Machine;
use homenode_units::{CpuId, CpuSet, NodeId, NodeSet};

use crate::fit::{self, FittedCurve};
use crate::host::{self, CacheSizes};
use crate::noise::{self, Watch};
use crate::stats::Spread;
use crate::sys::{self, HUGE_BYTES, LINE_BYTES, Memory, Pages};
use memory::Place;
use meter::Meter;
use results::warn;

pub use results::{Bandwidth, Calibration, LoadPoint, Pair, SizePoint};

/// The memory of buffers is at most a node's free memory divided by this.
const MEMORY_SHARE: u64 = 4;
/// LLC size in bytes that is assumed if the host does not state one. Buffers are multiples of the LLC size.
const LLC_ASSUMED: u64 = 32 << 20;
/// An access with more extra core cycles than this must have walked page tables, because a hit in a second-level TLB is
/// cheaper.
const WALK_CYCLES_MIN: f64 = 12.0;

/// What is measured, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// If set, measures only this node's CPUs and memory, and assumes that the others are equal.
    pub node: Option<NodeId>,
    /// Approximate time budget.
    pub budget: Duration,
    /// Whether to use smaller buffers and fewer repetitions.
    pub quick: bool,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum CalibrateError {
    #[error(
        "this process may not use the CPUs and memory of node {node}; the nodes that it may use are {usable}"
    )]
    Node { node: NodeId, usable: NodeSet },
    #[error("no node has memory that this process may use")]
    NoMemory,
    #[error("node {node} has {bytes} bytes of free memory, but measuring needs at least {needed}; free some")]
    LittleMemory { node: NodeId, bytes: u64, needed: u64 },
    #[error("CPU {cpu} cannot be used: {error}")]
    Cpu { cpu: CpuId, error: io::Error },
    #[error("{what}: {error}")]
    Memory { what: String, error: io::Error },
}

/// The CPUs and nodes that take part.
struct Cast {
    home: NodeId,
    cpu: CpuId,
    /// Pairs of CPU node and memory node. Those with the CPUs of the home come first, ordered by distance.
    pairs: Vec<(NodeId, NodeId)>,
}

impl Cast {
    fn of(machine: &Machine, only: Option<NodeId>) -> Result<Cast, CalibrateError> {
        let with_memory = machine.memory_nodes();
        if with_memory.is_empty() {
            return Err(CalibrateError::NoMemory);
        }
        let with_cpus: Vec<NodeId> = machine
            .nodes
            .iter()
            .filter(|(_, node)| !node.cpus.is_empty())
            .map(|(id, _)| id)
            .collect();
        let complete: NodeSet = with_cpus
            .iter()
            .copied()
            .filter(|id| with_memory.contains(*id))
            .collect();
        if let Some(node) = only {
            return match machine.nodes.get(node).and_then(|found| found.cpus.iter().next()) {
                Some(cpu) if complete.contains(node) => Ok(Cast {
                    home: node,
                    cpu,
                    pairs: vec![(node, node)],
                }),
                _ => Err(CalibrateError::Node {
                    node,
                    usable: complete,
                }),
            };
        }
        // A checked machine has a CPU, so some node has CPUs.
        let home = complete.iter().next().unwrap_or(with_cpus[0]);
        let cpu = machine.nodes[home]
            .cpus
            .iter()
            .next()
            .unwrap_or(machine.cpus[0].id);
        let mut pairs: Vec<(NodeId, NodeId)> = with_cpus
            .iter()
            .flat_map(|cpus| with_memory.iter().map(|memory| (*cpus, memory)))
            .collect();
        let order = |(cpus, memory): &(NodeId, NodeId)| {
            (*cpus != home, machine.distance(*cpus, *memory), *cpus, *memory)
        };
        pairs.sort_by_key(order);
        Ok(Cast { home, cpu, pairs })
    }
}

/// Buffer sizes: multiples of the LLC as far as free memory allows.
struct Sizes {
    llc: usize,
    chase: usize,
    stream_total: usize,
}

impl Sizes {
    fn of(
        caches: &CacheSizes,
        node: NodeId,
        quick: bool,
        warnings: &mut Vec<String>,
    ) -> Result<Sizes, CalibrateError> {
        let llc = caches.llc_bytes.unwrap_or(LLC_ASSUMED);
        let available = host::memory_available(node);
        let most = available / MEMORY_SHARE;
        let needed = 64 << 20;
        if most < needed {
            return Err(CalibrateError::LittleMemory {
                node,
                bytes: available,
                needed: needed * MEMORY_SHARE,
            });
        }
        let wanted = (llc * if quick { 4 } else { 8 }).max(needed);
        if most < 4 * llc {
            warnings.push(format!(
                "node {node} has {} MiB free: buffers are only {:.1} times the last-level cache, so memory latency and bandwidth \
                 include cache hits",
                available >> 20,
                most as f64 / llc as f64
            ));
        }
        let bytes = |bytes: u64| usize::try_from(bytes.min(most)).unwrap_or(usize::MAX / 4);
        Ok(Sizes {
            llc: bytes(llc),
            chase: bytes(wanted),
            stream_total: bytes((4 * llc).max(needed)),
        })
    }
}

/// Measures this host. The calling thread is pinned to one CPU after another, and unpinned at the end.
///
/// `progress` is called for each step with its number, the number of steps, and what the step measures.
///
/// # Errors
/// A node that cannot be measured; unavailable CPUs or memory.
pub fn calibrate(
    machine: &Machine,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Calibration, CalibrateError> {
    let cast = Cast::of(machine, options.node)?;
    let pin = |cpu: CpuId| sys::pin_to(cpu).map_err(|error| CalibrateError::Cpu { cpu, error });
    pin(cast.cpu)?;
    let calibration = Run::new(machine, options, cast, progress)?.measure();
    // Failure is harmless: the thread only stays pinned.
    let _ = sys::pin(&machine.cpu_set());
    calibration
}

struct Run<'a> {
    machine: &'a Machine,
    cast: Cast,
    quick: bool,
    caches: CacheSizes,
    sizes: Sizes,
    meter: Meter<'a>,
    warnings: Vec<String>,
}

impl<'a> Run<'a> {
    fn new(
        machine: &'a Machine,
        options: &Options,
        cast: Cast,
        progress: &'a mut dyn FnMut(usize, usize, &str),
    ) -> Result<Run<'a>, CalibrateError> {
        let mut warnings = Vec::new();
        let caches = host::cache_sizes(cast.cpu);
        if caches.llc_bytes.is_none() {
            warnings
                .push("the kernel states no cache sizes; buffers are sized for a cache of 32 MiB".to_owned());
        }
        let sizes = Sizes::of(&caches, cast.pairs[0].1, options.quick, &mut warnings)?;
        // The 13 steps that every host has, and two per pair of nodes.
        let steps = 13 + 2 * cast.pairs.len();
        let meter = Meter::new(options.budget, steps, options.quick, progress);
        Ok(Run {
            machine,
            cast,
            quick: options.quick,
            caches,
            sizes,
            meter,
            warnings,
        })
    }

    fn map(&self, bytes: usize, pages: Pages, memory: NodeId) -> Result<Memory, CalibrateError> {
        let what = || format!("{} MiB of memory on node {memory}", bytes >> 20);
        Memory::map(bytes, pages, self.bound(memory))
            .map_err(|error| CalibrateError::Memory { what: what(), error })
    }

    /// Returns the node to bind memory to; `None` if there is only one node with memory.
    fn bound(&self, memory: NodeId) -> Option<NodeId> {
        (self.machine.memory_nodes().len() > 1).then_some(memory)
    }

    fn measure(mut self) -> Result<Calibration, CalibrateError> {
        let (watch, begin) = (Watch::begin(), Instant::now());
        let (home_memory, window) = (self.cast.pairs[0].1, self.meter.window);
        let clocks = self.meter.step_of("core clock", || {
            let (clock, stamp) = cpu::clock(window);
            Ok::<_, CalibrateError>(std::iter::once(clock).chain(stamp).collect())
        })?;
        let clock_hz = clocks[0];

        let mut big = self.map(self.sizes.chase, Pages::Huge, home_memory)?;
        big.words_mut().fill(0);
        let huge_share = big.huge_share();
        let (l1, l2) = (
            self.caches.l1_bytes.unwrap_or(32 << 10),
            self.caches.l2_bytes.unwrap_or(512 << 10),
        );
        let inside_llc = inside_llc(l2, self.sizes.llc as u64);
        let l1_ns = self.at("L1 latency", &mut big, l1 / 2);
        let l2_ns = self.at("L2 latency", &mut big, (l2 / 2).max(l1));
        let llc_ns = self.at("LLC latency", &mut big, inside_llc);
        let (curve, sweeps) = self.curve(&mut big)?;
        let tlb_entries_base = self.tlb_base(home_memory, &mut big, clock_hz.median)?;
        let (tlb_entries_huge, tlb_huge_tried) = self.tlb_huge(&mut big, huge_share, clock_hz.median)?;

        // From here on the buffer contains one chase through all of it, laid again so that its beginning is the oldest part.
        let lines = big.words().len() * 8 / LINE_BYTES;
        let first = crate::kernels::lay_chase(big.words_mut(), lines, crate::kernels::Places::EachLine);
        let mut at = [first];
        let [latency_ns, misses_in_flight, stream] = self.alone(&big, &mut at);
        let latency_base_pages_ns = self.base_pages(home_memory)?;
        let (smt_throughput, two_cores_throughput, interrupt_ns) = self.others();
        let home_pair = self.pair_bandwidth(self.cast.pairs[0], latency_ns, huge_share)?;
        let loaded = self.loaded(&home_pair, &big, at[0])?;
        drop(big);
        let mut pairs = vec![home_pair];
        for at in 1..self.cast.pairs.len() {
            pairs.push(self.pair(self.cast.pairs[at])?);
        }
        // The capacity is derived from each sweep separately, to know its spread.
        let memory_ns = pairs[0].latency_ns.median;
        let from = inside_llc as f64 / 2.0;
        let end = |sweep| fit::capacity(&beyond(sweep, from), llc_ns.median, memory_ns);
        let ends: Vec<f64> = sweeps.iter().filter_map(|sweep| end(sweep)).collect();
        let (loaded, load_curve) = curve_of(&pairs[0], loaded);
        let mut calibration = Calibration {
            machine: self.machine.clone(),
            date: host::date_now(),
            seconds: begin.elapsed().as_secs_f64(),
            quick: self.quick,
            under_hypervisor: noise::under_hypervisor(),
            noise: watch.seen(),
            home: self.cast.home,
            cpu: self.cast.cpu,
            caches: self.caches,
            llc_inclusive: sys::llc_inclusive(),
            clock_hz,
            time_stamp_hz: clocks.get(1).copied(),
            l1_ns,
            l2_ns,
            llc_ns,
            curve,
            llc_effective_bytes: Spread::of(&ends).filter(|_| ends.len() * 2 > sweeps.len()),
            latency_base_pages_ns,
            misses_in_flight,
            stream_in_flight: stream.map(|rate| rate * memory_ns / 1e9 / LINE_BYTES as f64),
            pairs,
            tlb_entries_base,
            tlb_entries_huge,
            tlb_huge_tried,
            smt_throughput,
            two_cores_throughput,
            interrupt_ns,
            loaded,
            load_curve,
            warnings: self.warnings,
        };
        warn(&mut calibration);
        Ok(calibration)
    }

    /// Measures memory from one CPU: the latency of a chase that continues at `at`, its misses in flight, and the rate of
    /// one stream.
    fn alone(&mut self, big: &Memory, at: &mut [usize; 1]) -> [Spread; 3] {
        let window = self.meter.window;
        let latency_ns = self
            .meter
            .step("memory latency", || cache::chase_ns(big.words(), at, window));
        let misses_in_flight = self.meter.step("misses in flight", || {
            cache::misses_in_flight(big.words(), window)
        });
        let mut next = 0;
        let stream = self.meter.step("bandwidth of one stream", || {
            stream_rate(big.words(), &mut next, window)
        });
        [latency_ns, misses_in_flight, stream]
    }

    fn at(&mut self, what: &str, memory: &mut Memory, bytes: u64) -> Spread {
        let window = self.meter.window;
        self.meter.step(what, || {
            cache::latency_at(memory.words_mut(), bytes as usize, window)
        })
    }

    /// Measures the latency curve. Also returns each of its sweeps as points of (bytes, nanoseconds).
    #[allow(clippy::type_complexity)] // points and sweeps, named above
    fn curve(
        &mut self,
        memory: &mut Memory,
    ) -> Result<(Vec<SizePoint>, Vec<Vec<(f64, f64)>>), CalibrateError> {
        let sizes = cache::curve_sizes(self.sizes.chase, if self.quick { 1 } else { 2 });
        let (window, mut sweeps) = (self.meter.window / 2, Vec::new());
        let spreads = self.meter.step_of("latency by size", || {
            let of = |bytes: &usize| cache::latency_at(memory.words_mut(), *bytes, window);
            let values: Vec<f64> = sizes.iter().map(of).collect();
            sweeps.push(
                sizes
                    .iter()
                    .map(|bytes| *bytes as f64)
                    .zip(values.iter().copied())
                    .collect(),
            );
            Ok::<_, CalibrateError>(values)
        })?;
        let point = |(bytes, latency_ns): (&usize, Spread)| SizePoint {
            bytes: *bytes,
            latency_ns,
        };
        Ok((sizes.iter().zip(spreads).map(point).collect(), sweeps))
    }

    fn tlb_base(
        &mut self,
        memory: NodeId,
        near: &mut Memory,
        clock_hz: f64,
    ) -> Result<Option<Spread>, CalibrateError> {
        let words = sys::page_bytes() / 8;
        let pages = cache::tlb_pages(8192);
        let mut far = self.map(8192 * words * 8, Pages::Base, memory)?;
        Ok(self.tlb(
            "TLB for base pages",
            (far.words_mut(), words),
            near.words_mut(),
            &pages,
            clock_hz,
        ))
    }

    /// Returns the number of TLB entries for huge pages, and the largest number of pages that was tried.
    fn tlb_huge(
        &mut self,
        big: &mut Memory,
        huge_share: Option<f64>,
        clock_hz: f64,
    ) -> Result<(Option<Spread>, usize), CalibrateError> {
        let words = HUGE_BYTES / 8;
        // `near` has a line for each huge page of `big`, but side by side, so that few pages hold them all.
        let most = (big.words().len() / words).min(8192);
        let mut near = self.map(most * LINE_BYTES, Pages::Huge, self.cast.pairs[0].1)?;
        let pages = cache::tlb_pages(most);
        let spread = self.tlb(
            "TLB for huge pages",
            (big.words_mut(), words),
            near.words_mut(),
            &pages,
            clock_hz,
        );
        let tried = pages.last().copied().unwrap_or(0);
        // If the memory was not in huge pages, the TLB for base pages was measured.
        Ok((
            spread.filter(|_| huge_share.is_some_and(|share| share > 0.9)),
            tried,
        ))
    }

    fn tlb(
        &mut self,
        what: &str,
        (far, page_words): (&mut [u64], usize),
        near: &mut [u64],
        pages: &[usize],
        clock_hz: f64,
    ) -> Option<Spread> {
        let (window, mut found) = (self.meter.window / 8, Vec::new());
        let none = self.meter.step_of(what, || {
            let extra = cache::tlb_extra_ns(far, page_words, near, pages, window);
            let cycles = |(pages, ns): (&usize, f64)| (*pages as f64, ns * clock_hz / 1e9);
            let points: Vec<(f64, f64)> = pages.iter().zip(extra).map(cycles).collect();
            found.extend(fit::tlb_entries(&points, WALK_CYCLES_MIN));
            Ok::<_, CalibrateError>(Vec::new())
        });
        debug_assert!(none.is_ok_and(|spreads| spreads.is_empty()));
        Spread::of(&found)
    }

    fn base_pages(&mut self, memory: NodeId) -> Result<Spread, CalibrateError> {
        let mut small = self.map(self.sizes.chase, Pages::Base, memory)?;
        let lines = small.words().len() * 8 / LINE_BYTES;
        let mut at = [crate::kernels::lay_chase(
            small.words_mut(),
            lines,
            crate::kernels::Places::EachLine,
        )];
        let window = self.meter.window;
        Ok(self.meter.step("memory latency in base pages", || {
            cache::chase_ns(small.words(), &mut at, window)
        }))
    }

    /// Measures hyperthreads, two cores, and an interrupt to another CPU.
    fn others(&mut self) -> (Option<Spread>, Option<Spread>, Option<Spread>) {
        let (window, here) = (self.meter.window, self.cast.cpu);
        let core = |id: CpuId| self.machine.cpu(id).map(|cpu| cpu.core);
        let same_llc = |id: CpuId| {
            self.machine.cpu(id).and_then(|cpu| cpu.llc) == self.machine.cpu(here).and_then(|cpu| cpu.llc)
        };
        let others: Vec<CpuId> = self
            .machine
            .cpus
            .iter()
            .map(|cpu| cpu.id)
            .filter(|id| *id != here)
            .collect();
        let sibling = others.iter().copied().find(|id| core(*id) == core(here));
        let neighbour = others
            .iter()
            .copied()
            .find(|id| core(*id) != core(here) && same_llc(*id));
        let smt = sibling.map(|other| {
            self.meter
                .step("hyperthreads", || cpu::together(here, other, window))
        });
        let cores = neighbour.map(|other| {
            self.meter
                .step("two cores", || cpu::together(here, other, window))
        });
        let other = neighbour.or(sibling).or(others.first().copied());
        let interrupt = other.map(|other| self.meter.step("interrupt", || cpu::interrupt(other, window)));
        (smt, cores, interrupt.filter(|spread| spread.count > 0))
    }

    fn pair(&mut self, (cpus, memory): (NodeId, NodeId)) -> Result<Pair, CalibrateError> {
        let cpu = self.machine.nodes[cpus]
            .cpus
            .iter()
            .next()
            .unwrap_or(self.cast.cpu);
        sys::pin_to(cpu).map_err(|error| CalibrateError::Cpu { cpu, error })?;
        let mut chase = self.map(self.sizes.chase, Pages::Huge, memory)?;
        let lines = chase.words().len() * 8 / LINE_BYTES;
        let mut at = [crate::kernels::lay_chase(
            chase.words_mut(),
            lines,
            crate::kernels::Places::EachLine,
        )];
        let window = self.meter.window;
        let what = format!("latency from node {cpus} to node {memory}");
        let latency = self
            .meter
            .step(&what, || cache::chase_ns(chase.words(), &mut at, window));
        let huge_share = chase.huge_share();
        drop(chase);
        self.pair_bandwidth((cpus, memory), latency, huge_share)
    }

    fn pair_bandwidth(
        &mut self,
        (cpus, memory): (NodeId, NodeId),
        latency_ns: Spread,
        huge_share: Option<f64>,
    ) -> Result<Pair, CalibrateError> {
        let all: Vec<CpuId> = self.machine.nodes[cpus].cpus.iter().collect();
        let place = Place {
            cpus: &all,
            node: self.bound(memory),
            bytes_each: self.sizes.stream_total / all.len().max(1),
            cached_bytes: self.sizes.llc,
        };
        let what = format!("bandwidth from node {memory} to node {cpus}");
        let rates =
            memory::bandwidth(&mut self.meter, &what, &place).map_err(|error| CalibrateError::Memory {
                what: what.clone(),
                error,
            })?;
        let read = rates
            .read
            .into_iter()
            .map(|(cpus, bytes_per_s)| Bandwidth { cpus, bytes_per_s });
        Ok(Pair {
            cpu_node: cpus,
            memory_node: memory,
            latency_ns,
            huge_share,
            read: read.collect(),
            mixed_bytes_per_s: rates.mixed,
        })
    }

    /// Returns points of (bytes per second, nanoseconds), measured while other CPUs of the home stream. Empty if the home
    /// has only one core.
    fn loaded(
        &mut self,
        pair: &Pair,
        chase: &Memory,
        first: usize,
    ) -> Result<Vec<(Spread, Spread)>, CalibrateError> {
        let here = self.cast.cpu;
        let core = |id: CpuId| self.machine.cpu(id).map(|cpu| cpu.core);
        let node: CpuSet = self.machine.nodes[pair.cpu_node].cpus.clone();
        let others: Vec<CpuId> = node.iter().filter(|id| core(*id) != core(here)).collect();
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let place = Place {
            cpus: &others,
            node: self.bound(pair.memory_node),
            bytes_each: self.sizes.stream_total / others.len(),
            cached_bytes: self.sizes.llc,
        };
        let what = "latency under load";
        memory::loaded_latency(&mut self.meter, what, &place, chase.words(), first).map_err(|error| {
            CalibrateError::Memory {
                what: what.to_owned(),
                error,
            }
        })
    }
}

/// Returns the points of at least this size. Smaller ones say nothing about the end of the LLC.
fn beyond(sweep: &[(f64, f64)], bytes: f64) -> Vec<(f64, f64)> {
    sweep.iter().copied().filter(|(size, _)| *size >= bytes).collect()
}

/// Returns the loads as shares of the sustained bandwidth, and the curve that fits the latencies at these loads.
fn curve_of(pair: &Pair, loaded: Vec<(Spread, Spread)>) -> (Vec<LoadPoint>, Option<FittedCurve>) {
    let most = loaded
        .iter()
        .map(|(rate, _)| rate.median)
        .chain(pair.bandwidth().map(|spread| spread.median));
    let capacity = most.fold(0.0, f64::max);
    let point = |(bytes_per_s, latency_ns): (Spread, Spread)| LoadPoint {
        bytes_per_s,
        load: bytes_per_s.median / capacity,
        latency_ns,
    };
    let points: Vec<LoadPoint> = loaded.into_iter().map(point).collect();
    // The first point is idle: the chase runs without streams, and its own load is small.
    let idle_ns = points.first().map_or(f64::NAN, |point| point.latency_ns.median);
    let relative: Vec<(f64, f64)> = points
        .iter()
        .skip(1)
        .map(|point| (point.load, point.latency_ns.median / idle_ns))
        .collect();
    let fitted = fit::load_curve(&relative).filter(|fitted| fitted.load_max >= fit::LOAD_LEAST);
    (points, fitted)
}

/// Returns the bytes that one thread reads per second of CPU time, over about `window`. It starts at block `next`, and
/// advances it.
fn stream_rate(words: &[u64], next: &mut usize, window: Duration) -> f64 {
    const BLOCK_WORDS: usize = 1 << 17;
    let (begin, from, mut bytes) = (Instant::now(), sys::cpu_time(), 0);
    while begin.elapsed() < window || bytes == 0 {
        let at = *next % (words.len() / BLOCK_WORDS).max(1);
        let block = &words[at * BLOCK_WORDS..((at + 1) * BLOCK_WORDS).min(words.len())];
        crate::kernels::read(block);
        bytes += block.len() * 8;
        *next = at + 1;
    }
    bytes as f64 / (sys::cpu_time() - from).as_secs_f64()
}
/// Returns a size that is much larger than L2, and much smaller than the part of the LLC that this CPU may get.
fn inside_llc(l2: u64, llc: u64) -> u64 {
    let (l2, llc) = (l2 as f64, llc as f64);
    (l2 * llc).sqrt().max(4.0 * l2).min(llc / 2.0) as u64
}

#[cfg(test)]
mod tests;

//! Measures the bandwidth of a node's memory, and its latency under load.

use std::io;
use std::thread;
use std::time::Duration;

use homenode_units::{CpuId, NodeId};

use super::cache;
use super::meter::Meter;
use crate::stats::Spread;
use crate::streams::{FULL, Holder, Streams, Traffic};
use crate::sys;

/// Time for streams to reach their rate.
const SETTLE: Duration = Duration::from_millis(3);
/// Stream rates at which latency is measured, in thousandths of full.
const DUTIES: [u32; 7] = [0, 100, 250, 400, 600, 800, FULL];

/// CPUs and memory of the streams.
pub(crate) struct Place<'a> {
    /// CPUs on which one stream each runs.
    pub cpus: &'a [CpuId],
    /// Node of the streams' memory; `None` if the host has only one.
    pub node: Option<NodeId>,
    /// Buffer size of each thread.
    pub bytes_each: usize,
    /// Bytes that caches may hold. If all buffers together have less than twice this, they say nothing about memory.
    pub cached_bytes: usize,
}

/// Measured bandwidths.
pub(crate) struct Rates {
    /// Bandwidth of reads, by number of CPUs.
    pub read: Vec<(usize, Spread)>,
    /// Bandwidth of updates with all CPUs, reads and writes together.
    pub mixed: Option<Spread>,
}

/// Returns the bytes per second that one CPU up to all CPUs of a place move. Seconds are the CPU time of the streams, so
/// time that other processes take does not count.
///
/// # Errors
/// Unavailable CPUs or memory.
pub(crate) fn bandwidth(meter: &mut Meter<'_>, what: &str, place: &Place<'_>) -> io::Result<Rates> {
    let all = place.cpus.len();
    let doubled = std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count < all);
    let counts: Vec<usize> = doubled
        .filter(|count| count * place.bytes_each >= 2 * place.cached_bytes)
        .chain([all])
        .collect();
    let holder = Holder::of(all);
    thread::scope(|scope| {
        let streams = Streams::start(scope, &holder, place.cpus, place.node, place.bytes_each)?;
        let window = meter.window;
        let rate = |count: usize, traffic: Traffic| {
            streams.load(count, traffic, FULL);
            thread::sleep(SETTLE);
            streams.rate_of_cpu_time(count, window)
        };
        let mut spreads = meter.step_of(what, || {
            let reads = counts.iter().map(|count| rate(*count, Traffic::Read));
            let values: Vec<f64> = reads
                .collect::<Vec<_>>()
                .into_iter()
                .chain([rate(all, Traffic::Update)])
                .collect();
            streams.load(0, Traffic::Read, 0);
            io::Result::Ok(values)
        })?;
        let mixed = spreads.pop();
        Ok(Rates {
            read: counts.iter().copied().zip(spreads).collect(),
            mixed,
        })
    })
}

/// Returns the latency of a chase on this thread while streams run, at each of their rates in rising order. Each item is the
/// bytes per second that memory served, including the chase, and the latency in nanoseconds.
///
/// # Errors
/// Unavailable CPUs or memory.
pub(crate) fn loaded_latency(
    meter: &mut Meter<'_>,
    what: &str,
    place: &Place<'_>,
    chase: &[u64],
    first: usize,
) -> io::Result<Vec<(Spread, Spread)>> {
    let holder = Holder::of(place.cpus.len());
    thread::scope(|scope| {
        let streams = Streams::start(scope, &holder, place.cpus, place.node, place.bytes_each)?;
        let (window, mut at) = (meter.window, [first]);
        let spreads = meter.step_of(what, || {
            let mut values = Vec::new();
            for duty in DUTIES {
                streams.load(place.cpus.len(), Traffic::Read, duty);
                thread::sleep(SETTLE);
                let (rate, ns) = streams.rate_during(|| cache::chase_ns(chase, &mut at, window));
                values.extend([rate + sys::LINE_BYTES as f64 * 1e9 / ns, ns]);
            }
            streams.load(0, Traffic::Read, 0);
            io::Result::Ok(values)
        })?;
        Ok(spreads.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    })
}

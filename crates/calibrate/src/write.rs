//! Writes measurements as a machine file: a [`Machine`], with the source of each figure as a comment.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use homenode_machine::{Hardware, Ipi, Latency, Link, LinkTiming, Llc, LoadCurve, Machine, PageWalk};
use homenode_machine_files::{Comments, LoadError, from_toml, to_toml};
use homenode_units::{Bytes, BytesPerSec, CpuId, NodeId};

use crate::fit::BETA_ESTIMATE;
use crate::measure::{Calibration, Pair};
use crate::stats::Spread;

/// Cost of an interrupt between vCPUs beyond that of a native one, measured on a four-socket Opteron under Xen.
const VIRTUAL_IPI_EXTRA_NS: f64 = 10_000.0;

/// A machine file and the machine it describes.
#[derive(Clone, Debug)]
pub struct MachineFile {
    /// The file's text.
    pub text: String,
    /// The machine parsed from it.
    pub machine: Machine,
}

/// Returns the machine file of a calibration. If the format cannot express how CPUs share cores or caches on this host, the
/// file has the closest match and notes it.
///
/// # Errors
/// A measured figure that no machine can have, such as a clock of 0 from a host that never let the measurement run.
pub fn machine_file(calibration: &Calibration) -> Result<MachineFile, LoadError> {
    let (mut machine, comments) = described(calibration);
    let write = |machine: &Machine| {
        let text = format!("{}{}", head(calibration), to_toml(machine, &comments));
        from_toml("the machine file made from the measurement", &text)
            .map(|read| MachineFile { text, machine: read })
    };
    let file = write(&machine)?;
    if groups(&file.machine) != groups(&machine) {
        machine.notes.push(
            "CPUs share cores or caches in a way that this format cannot express: the file has the closest match"
                .to_owned(),
        );
        return write(&machine);
    }
    Ok(file)
}

/// Returns the groups of CPUs that share a core, and those that share an LLC, regardless of the numbering.
fn groups(machine: &Machine) -> (BTreeSet<Vec<CpuId>>, BTreeSet<Vec<CpuId>>) {
    let mut cores: BTreeMap<u32, Vec<CpuId>> = BTreeMap::new();
    for cpu in &machine.cpus {
        cores.entry(cpu.core).or_default().push(cpu.id);
    }
    (
        cores.into_values().collect(),
        machine.llcs.iter().map(|llc| llc.cpus.iter().collect()).collect(),
    )
}

fn head(c: &Calibration) -> String {
    let mut text = format!(
        "# Measured on host {} on {} UTC in {:.0} seconds",
        c.machine.name, c.date, c.seconds
    );
    text.push_str(if c.quick {
        " with `homenode calibrate --quick`.\n"
    } else {
        " with `homenode calibrate`.\n"
    });
    text.push_str(
        "# Figures are medians; the comment beside each gives the number of readings, the least and the greatest.\n",
    );
    if c.under_hypervisor {
        text.push_str("# The host is itself a virtual machine: its CPUs, caches and memory are what its hypervisor gave it at the time.\n");
    }
    if let Some(noise) = c.noise {
        let _ = writeln!(
            text,
            "# During the measurement, other processes used {:.1} percent of CPU time, and a hypervisor stole {:.1} percent.",
            noise.others_share * 100.0,
            noise.steal_share * 100.0
        );
    }
    for warning in &c.warnings {
        let _ = writeln!(text, "# Warning: {}", warning.replace(char::is_control, " "));
    }
    text.push('\n');
    text
}

fn measured(spread: &Spread, unit: &str) -> String {
    let noisy = if spread.noisy() { "; noisy" } else { "" };
    format!("measured: {}{noisy}", spread.in_words(unit))
}

pub(crate) fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

/// Rounds to whole MB/s, at least one.
fn rate(bytes_per_s: f64) -> BytesPerSec {
    BytesPerSec((bytes_per_s / 1e6).round().max(1.0) as u64 * 1_000_000)
}

fn gb(spread: &Spread) -> Spread {
    spread.map(|bytes| bytes / 1e9)
}

/// Returns the machine with the measured figures, and the source of each figure.
fn described(c: &Calibration) -> (Machine, Comments) {
    let (mut machine, mut comments) = (c.machine.clone(), Comments::default());
    if machine.memory_allowed != machine.node_set() {
        machine.notes.push(format!(
            "measured by a process that may use memory of nodes {} only",
            machine.memory_allowed
        ));
        machine.memory_allowed = machine.node_set();
    }
    bandwidths(c, &mut machine, &mut comments);
    links(c, &mut machine, &mut comments);
    llcs(c, &mut machine, &mut comments);
    machine.hardware = Some(hardware(c, &mut comments));
    (machine, comments)
}

fn bandwidths(c: &Calibration, machine: &mut Machine, comments: &mut Comments) {
    let of = |node: NodeId| {
        let own = c
            .pairs
            .iter()
            .find(|pair| (pair.cpu_node, pair.memory_node) == (node, node));
        let any = c.pairs.iter().filter(|pair| pair.memory_node == node);
        own.or_else(|| any.max_by(|a, b| median(a).total_cmp(&median(b))))
            .and_then(Pair::bandwidth)
    };
    let home = c.home_pair().bandwidth();
    let ids: Vec<NodeId> = machine.nodes.keys().collect();
    for id in ids {
        let node = &mut machine.nodes[id];
        if node.memory_bytes == Bytes::ZERO {
            node.memory_bandwidth = None;
            continue;
        }
        let key = format!("node.{id}.memory_bandwidth");
        match (of(id), home) {
            (Some(spread), _) => {
                node.memory_bandwidth = Some(rate(spread.median));
                let words = measured(&gb(&spread), "GB/s");
                comments.set(
                    key,
                    format!("{words}; by all usable CPUs, so the controllers may be capable of more"),
                );
            }
            (None, Some(spread)) => {
                node.memory_bandwidth = Some(rate(spread.median));
                comments.set(
                    key,
                    format!("estimate: same as node {}; this node was not measured", c.home),
                );
            }
            (None, None) => {}
        }
    }
}

fn median(pair: &Pair) -> f64 {
    pair.bandwidth().map_or(0.0, |spread| spread.median)
}

/// Sets one link for each direction between two nodes. A direction that could not be measured, because one node has no
/// memory to send, gets the figures of the opposite direction.
fn links(c: &Calibration, machine: &mut Machine, comments: &mut Comments) {
    machine.links.clear();
    let ids: Vec<NodeId> = machine.nodes.keys().collect();
    let between = |from: NodeId, to: NodeId| {
        let pair = c
            .pairs
            .iter()
            .find(|pair| (pair.memory_node, pair.cpu_node) == (from, to));
        pair.and_then(Pair::bandwidth)
    };
    if !c.pairs.iter().any(|pair| pair.cpu_node != pair.memory_node) {
        return;
    }
    for (from, to) in ids
        .iter()
        .flat_map(|from| ids.iter().map(|to| (*from, *to)))
        .filter(|(from, to)| from != to)
    {
        let key = format!("links.{from}.{to}");
        let bandwidth = match (between(from, to), between(to, from)) {
            (Some(spread), _) => {
                comments.set(
                    key,
                    format!(
                        "{}; as if this pair had a link of its own",
                        measured(&gb(&spread), "GB/s")
                    ),
                );
                Some(rate(spread.median))
            }
            (None, Some(spread)) => {
                comments.set(
                    key,
                    "estimate: same as the other direction; this one cannot be measured",
                );
                Some(rate(spread.median))
            }
            (None, None) => {
                comments.set(key, "not measured: bandwidth is not known");
                None
            }
        };
        let hop_ns = None;
        machine.links.push(Link {
            from,
            to,
            bandwidth,
            hop_ns,
        });
    }
}

fn llcs(c: &Calibration, machine: &mut Machine, comments: &mut Comments) {
    let stated = machine.llcs.iter().map(|llc| llc.size_bytes).max();
    let grain = |llc: &Llc| u64::from(llc.ways.unwrap_or(1)) * u64::from(llc.line_bytes);
    let says = stated.map_or("the kernel states no size".to_owned(), |size| {
        format!("the kernel says {size}")
    });
    if machine.llcs.is_empty() {
        // The simulator needs an LLC, so each node with CPUs gets one, as on most hosts.
        let size_bytes = Bytes(
            c.llc_effective_bytes
                .map_or(32 << 20, |spread| spread.median as u64),
        );
        for (id, node) in machine.nodes.iter().filter(|(_, node)| !node.cpus.is_empty()) {
            let llc = machine.llcs.len() as u32;
            machine.llcs.push(Llc {
                cpus: node.cpus.clone(),
                size_bytes,
                ways: None,
                line_bytes: 64,
                replacement: None,
            });
            machine
                .cpus
                .iter_mut()
                .filter(|cpu| cpu.node == id)
                .for_each(|cpu| cpu.llc = Some(llc));
        }
    }
    match c.llc_effective_bytes {
        Some(spread) => {
            for llc in &mut machine.llcs {
                let (grain, most) = (grain(llc), stated.map_or(u64::MAX, |size| size.0));
                llc.size_bytes = Bytes(((spread.median as u64).min(most) / grain).max(1) * grain);
            }
            let words = measured(&spread.map(|bytes| bytes / f64::from(1 << 20)), "MiB");
            comments.set(
                "llc.size",
                format!("{words} of effective capacity, used up to the stated size; {says}"),
            );
        }
        None if stated.is_some() => comments.set(
            "llc.size",
            "the kernel's figure: the latency curve does not show where the cache ends",
        ),
        None => comments.set(
            "llc.size",
            "estimate: 32 MiB; the kernel states no size and the latency curve shows no end",
        ),
    }
}

fn hardware(c: &Calibration, comments: &mut Comments) -> Hardware {
    let clock_hz = (c.clock_hz.median / 1e6).round() as u64 * 1_000_000;
    let ghz = clock_hz as f64 / 1e9;
    let stamp = c.time_stamp_hz.map_or(String::new(), |hz| {
        format!("; time stamp {:.2} GHz", hz.median / 1e9)
    });
    comments.set(
        "hardware.clock",
        format!("{}{stamp}", measured(&c.clock_hz.map(|hz| hz / 1e9), "GHz")),
    );
    match c.llc_inclusive {
        Some(_) => comments.set("hardware.llc_inclusive", "as the processor states (CPUID)"),
        None => comments.set(
            "hardware.llc_inclusive",
            "estimate: most LLCs since 2017 are not inclusive; the processor does not say",
        ),
    }
    let cycles = |comments: &mut Comments, key: &str, spread: &Spread| {
        comments.set(key, measured(spread, "ns"));
        round(spread.median * ghz, 1)
    };
    let l1_cycles = cycles(comments, "hardware.latency.l1_cycles", &c.l1_ns);
    let l2_cycles = cycles(comments, "hardware.latency.l2_cycles", &c.l2_ns);
    let llc_cycles = cycles(comments, "hardware.latency.llc_cycles", &c.llc_ns);
    let memory_ns = memory_ns(c, comments);
    Hardware {
        clock_hz,
        latency: Latency {
            l1_cycles,
            l2_cycles,
            llc_cycles,
            memory_ns,
        },
        llc_inclusive: c.llc_inclusive.unwrap_or(false),
        misses_in_flight_max: in_flight(c, comments),
        memory_curve: memory_curve(c, comments),
        link: link_timing(c, memory_ns, comments),
        scattered_throughput: None, // not measured
        smt_throughput: smt_throughput(c, comments),
        tlb_entries_4k: tlb_base(c, comments),
        tlb_entries_2m: tlb_huge(c, comments),
        l2_bytes: l2_bytes(c, comments),
        prefetcher: None, // not measured
        walk: walk(comments),
        ipi: ipi(c, comments),
        wake: None, // it takes a guest to measure
    }
}

fn memory_ns(c: &Calibration, comments: &mut Comments) -> f64 {
    let own: Vec<Spread> = c
        .pairs
        .iter()
        .filter(|pair| pair.cpu_node == pair.memory_node)
        .map(|pair| pair.latency_ns)
        .collect();
    let spread = c.home_pair().latency_ns;
    let medians: Vec<f64> = own.iter().map(|spread| spread.median).collect();
    let value = Spread::of(&medians).map_or(spread.median, |all| all.median);
    let nodes = if own.len() > 1 {
        format!("; {} nodes, their median", own.len())
    } else {
        String::new()
    };
    let base = c.latency_base_pages_ns.median;
    let words = measured(&spread, "ns");
    comments.set(
        "hardware.latency.memory_ns",
        format!("{words} in huge pages ({base:.0} ns in base pages: TLB misses){nodes}"),
    );
    round(value, 1)
}

fn in_flight(c: &Calibration, comments: &mut Comments) -> u32 {
    let (chases, stream) = (c.misses_in_flight, c.stream_in_flight);
    let words = format!(
        "{}, by parallel chases; one stream with prefetchers {:.1}",
        measured(&chases, "lines"),
        stream.median
    );
    comments.set("hardware.misses_in_flight_max", format!("{words}; the larger"));
    chases.median.max(stream.median).round().clamp(1.0, 1024.0) as u32
}

fn memory_curve(c: &Calibration, comments: &mut Comments) -> LoadCurve {
    let Some(fitted) = c.load_curve else {
        let text = "estimate: a measured Xeon E5-2670 with DDR3; loads here stayed too low to say anything";
        comments.set("hardware.memory_curve.alpha", text);
        comments.set("hardware.memory_curve.beta", text);
        return LoadCurve {
            alpha: 0.34,
            beta: BETA_ESTIMATE,
        };
    };
    let words = format!(
        "measured: fitted to {} loads up to {:.0} percent of the bandwidth, mean error {:.1} percent",
        c.loaded.len().saturating_sub(1),
        fitted.load_max * 100.0,
        fitted.error_mean * 100.0
    );
    let estimate = "estimate: measured Xeons with DDR3 and DDR4; loads here did not go near the bandwidth";
    comments.set(
        "hardware.memory_curve.beta",
        if fitted.beta_fitted {
            words.clone()
        } else {
            estimate.to_owned()
        },
    );
    comments.set("hardware.memory_curve.alpha", words);
    // The simulator's machine limits these values, and a fit through noise can exceed the limits.
    let bounded = |value: f64| round(value.clamp(0.0, 100.0), 4);
    LoadCurve {
        alpha: bounded(fitted.curve.alpha),
        beta: bounded(fitted.curve.beta),
    }
}

fn link_timing(c: &Calibration, memory_ns: f64, comments: &mut Comments) -> LinkTiming {
    if c.machine.nodes.len() == 1 {
        // A host of one node has no links, so the file omits their table.
        return LinkTiming {
            hop_ns: 0.0,
            curve: LoadCurve {
                alpha: 0.0,
                beta: 0.0,
            },
        };
    }
    let remote: Vec<f64> = c
        .pairs
        .iter()
        .filter(|pair| pair.cpu_node != pair.memory_node)
        .map(|pair| (pair.latency_ns.median - memory_ns).max(1.0))
        .collect();
    let hop_ns = match Spread::of(&remote) {
        Some(spread) => {
            let words = format!(
                "measured: over {} pairs of nodes {:.1} to {:.1} ns",
                remote.len(),
                spread.min,
                spread.max
            );
            comments.set(
                "hardware.link.hop_ns",
                format!("{words} more than the own node's memory"),
            );
            round(spread.median, 1)
        }
        None => {
            let farthest = c
                .machine
                .distances
                .rows
                .iter()
                .flatten()
                .max()
                .copied()
                .unwrap_or(20);
            comments.set(
                "hardware.link.hop_ns",
                "estimate: from the firmware's distances; no pair of nodes was measured",
            );
            round((memory_ns * (f64::from(farthest) / 10.0 - 1.0)).max(1.0), 1)
        }
    };
    // The values 0.54 and 0.034 were measured for the whole remote latency over UPI; the curve here is only for the hop.
    let scale = (memory_ns + hop_ns) / hop_ns;
    let text = "estimate: a measured UPI link (0.54 and 0.034 of a whole remote latency), scaled to the hop";
    comments.set("hardware.link.curve.alpha", text);
    comments.set("hardware.link.curve.beta", text);
    let curve = LoadCurve {
        alpha: round((0.54 * scale).min(100.0), 4),
        beta: round((0.034 * scale).min(100.0), 4),
    };
    LinkTiming { hop_ns, curve }
}

fn smt_throughput(c: &Calibration, comments: &mut Comments) -> f64 {
    match c.smt_throughput {
        Some(spread) => {
            comments.set("hardware.smt_throughput", measured(&spread, "times one thread"));
            round(spread.median.clamp(1.0, 2.0), 2)
        }
        None => {
            let two = c.two_cores_throughput.map_or(String::new(), |spread| {
                format!("; two cores do {:.2} times one", spread.median)
            });
            comments.set(
                "hardware.smt_throughput",
                format!("estimate: no hyperthreads to use, so never used{two}"),
            );
            1.0
        }
    }
}

/// Returns the measured number of TLB entries, or else an estimate that is marked as such.
fn tlb_entries(
    measured_entries: Option<Spread>,
    key: &str,
    estimate: (f64, String),
    comments: &mut Comments,
) -> u32 {
    let (entries, comment) = match measured_entries {
        Some(spread) => (spread.median, measured(&spread, "entries")),
        None => estimate,
    };
    comments.set(key, comment);
    entries.round().clamp(1.0, 1_048_576.0) as u32
}

fn tlb_base(c: &Calibration, comments: &mut Comments) -> u32 {
    let text = "estimate: second level of most cores since 2015; the chase shows no end";
    let estimate = (1536.0, text.to_owned());
    tlb_entries(c.tlb_entries_base, "hardware.tlb_entries_4k", estimate, comments)
}

fn tlb_huge(c: &Calibration, comments: &mut Comments) -> u32 {
    let tried = c.tlb_huge_tried;
    let text =
        format!("estimate: as for base pages, most second levels hold both; {tried} huge pages show no end");
    let estimate = (c.tlb_entries_base.map_or(1536.0, |spread| spread.median), text);
    tlb_entries(c.tlb_entries_huge, "hardware.tlb_entries_2m", estimate, comments)
}

fn l2_bytes(c: &Calibration, comments: &mut Comments) -> Bytes {
    match c.caches.l2_bytes.filter(|bytes| (1..=1 << 30).contains(bytes)) {
        Some(bytes) => {
            comments.set("hardware.l2", "as the kernel states");
            Bytes(bytes)
        }
        None => {
            comments.set("hardware.l2", "estimate: the kernel states no size");
            Bytes::from_mib(1)
        }
    }
}

fn walk(comments: &mut Comments) -> PageWalk {
    comments.set(
        "hardware.walk",
        "estimate: what page-walk caches leave of 4 and 24 references; not measured",
    );
    PageWalk {
        native_refs: 1.0,
        nested_refs: 4.0,
    }
}

fn ipi(c: &Calibration, comments: &mut Comments) -> Ipi {
    let here = if c.under_hypervisor {
        ", through the hypervisor below this host"
    } else {
        ""
    };
    let native_ns = match c.interrupt_ns {
        Some(spread) => {
            comments.set(
                "hardware.ipi.native_ns",
                format!(
                    "{}{here}, a round trip with a system call",
                    measured(&spread, "ns")
                ),
            );
            round(spread.median.clamp(0.0, 900_000.0), 0)
        }
        None => {
            comments.set(
                "hardware.ipi.native_ns",
                "estimate: a four-socket Opteron; there is no second CPU, or no system call for it",
            );
            900.0
        }
    };
    comments.set(
        "hardware.ipi.virtual_ns",
        "estimate: 10 us more, as on a four-socket Opteron under Xen; it cannot be measured here",
    );
    Ipi {
        native_ns,
        virtual_ns: native_ns + VIRTUAL_IPI_EXTRA_NS,
    }
}

#[cfg(test)]
mod tests;

//! `policies.latencies`: memory latency by distance, idle and with all threads on one node [Policies, table 3].
//!
//! # Choice, made before the experiment was run
//!
//! The paper says that 48 threads access the same node, not how. A latency is measured by loads of which each needs the one
//! before: one access in flight for each thread, every one a miss, nothing written. The alternatives keep two, four and eight
//! in flight, as streams do.

use std::collections::BTreeMap;

use homenode_control::PolicySet;
use homenode_machine::Machine;
use homenode_twin::{Hypervisor, Scenario, VmSpec, Workload};
use homenode_units::{Bytes, CpuSet, NodeId, NodeSet, Ns};

use super::table;
use crate::claims::published;
use crate::experiment::{Decision, Experiment};
use crate::figure::{Figure, PUBLISHED_SERIES, Shape};
use crate::run::Run;
use crate::stats::mean;
use crate::verdict::{Measured, show};
use crate::work::Outcomes;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "policies.latencies",
    runs: || {
        let loaded = IN_FLIGHT
            .into_iter()
            .map(|in_flight| run(in_flight, Threads::All));
        loaded
            .chain((0..3).map(|hops| run(1, Threads::One(hops))))
            .collect()
    },
    decide,
};

const MACHINE: &str = "amd48";
/// The node that everybody accesses; by the machine's symmetry any would do.
const TARGET: NodeId = NodeId(0);
const IN_FLIGHT: [u32; 4] = [1, 2, 4, 8];
const WORKLOAD: &str = "chase";

/// Names of the published values that are asked for, by hops.
const LOADED: [&str; 3] = ["local_loaded", "hop1_loaded", "hop2_loaded"];

fn published_loaded() -> [f64; 3] {
    LOADED.map(|name| published("policies.latencies", name).unwrap_or(f64::NAN))
}

/// Who accesses it.
#[derive(Clone, Copy)]
enum Threads {
    /// One thread, so many hops away.
    One(usize),
    /// A thread on every CPU.
    All,
}

fn machine() -> Machine {
    homenode_machine_files::preset(MACHINE).expect("it comes with the program")
}

/// Hops from a node to [`TARGET`], by breadth-first search over the links.
fn hops(machine: &Machine) -> BTreeMap<NodeId, usize> {
    let mut found = BTreeMap::from([(TARGET, 0)]);
    for distance in 0..machine.nodes.len() {
        let reached: Vec<NodeId> = found
            .iter()
            .filter(|(_, hops)| **hops == distance)
            .map(|(node, _)| *node)
            .collect();
        for link in machine.links.iter().filter(|link| reached.contains(&link.from)) {
            found.entry(link.to).or_insert(distance + 1);
        }
    }
    found
}

/// Loads that always miss, so many at a time.
fn chase(in_flight: u32) -> Workload {
    let text = format!(
        "name = \"{WORKLOAD}\"\nabout = \"Loads that miss, {in_flight} in flight\"\n\
         [program]\nthreads = \"one-copy-per-vcpu\"\ninstructions_g_per_thread = 1000.0\ncpi_core = 0.001\n\
         llc_accesses_per_kilo_instruction = 1000.0\nmisses_in_flight = {in_flight}.0\nhits_in_flight = 1.0\n\
         write_share = 0.0\n\
         [program.miss_ratio]\nm_inf = 1.0\nc0 = \"1MiB\"\nk = 1.0\n\
         [[program.regions]]\nkind = \"private\"\nsize = \"32MiB\"\naccess_share = 1.0\n"
    );
    Workload::from_toml(WORKLOAD, &text).expect("a workload of this module")
}

fn run(in_flight: u32, threads: Threads) -> Run {
    let machine = machine();
    let vm = |name: String, cpus: CpuSet| {
        VmSpec::new(&name, cpus.len() as u16, Bytes::from_gib(1), WORKLOAD)
            .on_cpus(cpus)
            .with_memory_on(NodeSet::one(TARGET))
    };
    let (name, vms) = match threads {
        Threads::All => {
            let vms = machine
                .nodes
                .iter()
                .map(|(id, node)| vm(format!("node{id}"), node.cpus.clone()));
            ("all threads on one node".to_owned(), vms.collect())
        }
        Threads::One(distance) => {
            let hops = hops(&machine);
            let from = hops
                .iter()
                .find(|(_, hops)| **hops == distance)
                .map_or(TARGET, |(node, _)| *node);
            let cpus = &machine.nodes.get(from).expect("a node of it").cpus;
            let one = cpus.first().map_or_else(CpuSet::new, CpuSet::one);
            (
                format!("one thread {distance} hops away"),
                vec![vm("one".to_owned(), one)],
            )
        }
    };
    let mut scenario = Scenario::of(&name, vms).with_workload(chase(in_flight));
    scenario.hypervisor = Hypervisor::Native;
    Run {
        warm_up: Ns::from_secs(5),
        until: Ns::from_secs(6),
        ..Run::to_end(MACHINE, scenario, PolicySet::Default, 1)
    }
}

/// Mean cycles of an access, by hops.
fn latencies(outcomes: &Outcomes, in_flight: u32, threads: Threads) -> Result<Vec<f64>, String> {
    let outcome = outcomes.of(&run(in_flight, threads))?;
    let hops = hops(&machine());
    let at = |distance: usize| {
        let cpus = outcome.window.vcpus.iter().filter(|vcpu| {
            let node = hops.iter().find(|(node, _)| u32::from(node.0) == vcpu.node);
            vcpu.llc_misses > 0 && node.is_some_and(|(_, hops)| *hops == distance)
        });
        let cycles = cpus.map(|vcpu| f64::from(in_flight) * vcpu.cycles as f64 / vcpu.llc_misses as f64);
        mean(&cycles.collect::<Vec<_>>())
            .ok_or_else(|| format!("nobody accessed memory over {distance} hops"))
    };
    match threads {
        Threads::One(distance) => Ok(vec![at(distance)?]),
        Threads::All => (0..3).map(at).collect(),
    }
}

fn decide(outcomes: &Outcomes) -> Result<Decision, String> {
    let machine = machine();
    let hardware = machine
        .hardware
        .as_ref()
        .ok_or("machine amd48 has no timing figures")?;
    let mut numbers = BTreeMap::from([
        ("l1".to_owned(), hardware.latency.l1_cycles),
        ("l2".to_owned(), hardware.latency.l2_cycles),
        ("l3".to_owned(), hardware.latency.llc_cycles),
    ]);
    let mut idle = Vec::new();
    for (distance, name) in ["local", "hop1", "hop2"].into_iter().enumerate() {
        let cycles = latencies(outcomes, 1, Threads::One(distance))?[0];
        numbers.insert(name.to_owned(), cycles);
        idle.push(cycles);
    }
    let inputs = numbers.keys().cloned().collect();
    let by_choice: Vec<Vec<f64>> = IN_FLIGHT
        .iter()
        .map(|n| latencies(outcomes, *n, Threads::All))
        .collect::<Result<_, _>>()?;
    let loaded = &by_choice[0];
    for (name, cycles) in ["local_loaded", "hop1_loaded", "hop2_loaded"]
        .into_iter()
        .zip(loaded)
    {
        numbers.insert(name.to_owned(), *cycles);
    }
    let rows = IN_FLIGHT.iter().zip(&by_choice).map(|(in_flight, cycles)| {
        // Little's law on what each thread sees.
        let per_access: Vec<f64> = cycles
            .iter()
            .map(|cycles| cycles / f64::from(*in_flight))
            .collect();
        (in_flight.to_string(), [cycles.clone(), per_access].concat())
    });
    let header = [
        "in flight",
        "local",
        "1 hop",
        "2 hops",
        "per access: local",
        "1 hop",
        "2 hops",
    ];
    let title = "Loaded latency in cycles by how many accesses a thread keeps in flight (chosen: 1), and time per access.";
    let names = ["local", "1 hop", "2 hops"].map(str::to_owned);
    let bars = |values: &[f64]| values.iter().copied().map(Some).collect::<Vec<_>>();
    Ok(Decision {
        measured: Measured {
            numbers,
            inputs,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(title, &header, rows)],
        figures: vec![Figure {
            name: "policies-latencies".to_owned(),
            title: "Memory latency with 48 threads on one node [Policies, table 3]".to_owned(),
            x_label: "distance".to_owned(),
            y_label: "cycles".to_owned(),
            shape: Shape::Bars(
                names.to_vec(),
                vec![
                    ("one thread".to_owned(), bars(&idle)),
                    ("48 threads".to_owned(), bars(loaded)),
                    (
                        format!("{PUBLISHED_SERIES}: 48 threads"),
                        bars(&published_loaded()),
                    ),
                ],
            ),
        }],
        why: vec![why(&machine)],
        ..Decision::default()
    })
}

/// By Little's law the published latencies say how much the node delivered.
fn why(machine: &Machine) -> String {
    let hops = hops(machine);
    let cpus = |distance: usize| {
        let nodes = hops
            .iter()
            .filter(|(_, hops)| **hops == distance)
            .map(|(node, _)| *node);
        let count: usize = nodes
            .filter_map(|node| machine.nodes.get(node))
            .map(|node| node.cpus.len())
            .sum();
        count as f64
    };
    let clock_ghz = machine
        .hardware
        .as_ref()
        .map_or(1.0, |hardware| hardware.clock_hz as f64 / 1e9);
    let rate = |(distance, cycles): (usize, &f64)| cpus(distance) * 64.0 * clock_ghz / cycles;
    let gb_per_s: f64 = published_loaded().iter().enumerate().map(rate).sum();
    let sustained = machine.nodes.get(TARGET).and_then(|node| node.memory_bandwidth);
    let sustained = sustained.map_or(f64::NAN, |rate| rate.as_f64() / 1e9);
    format!(
        "By Little's law 48 threads with one access in flight each, at the published latencies, get {} GB/s out of the node. \
         The machine file lets its controller sustain {} GB/s, the figure that the paper gives for the machine, and the \
         twin's do get that: as many accesses wait, and are served faster. Either a real controller delivers less for single \
         lines asked for from 48 sides than for streams (the twin knows neither banks nor DRAM pages), or the paper's \
         threads kept more than one access in flight: the table has what that would give.",
        show(gb_per_s),
        show(sustained)
    )
}

const SET_UP: &str = "Machine amd48 without a hypervisor; a thread on each of the 48 CPUs, all memory on node 0. Each load needs \
     the one before, always misses, and nothing is written: latency is then cycles per access. Idle values, from one thread, \
     are inputs of the machine file.";

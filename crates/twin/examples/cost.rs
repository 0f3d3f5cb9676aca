//! Measures what an epoch costs and how the cost grows: the table of docs/SPEED.md.
//!
//! `cargo run --release -p homenode-twin --example cost`
//!
//! The measure is this process's CPU time on one CPU, which neighbours on a shared machine disturb less than wall time.

#![allow(clippy::print_stdout)] // an example talks to a person

use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin, VmSpec, Workload};
use homenode_units::{Bytes, Ns};
use rustix::time::{ClockId, clock_gettime};

/// Simulated time measured, after an equal warm-up.
const SECONDS: u64 = 20;

/// Returns a machine of `nodes` nodes with `cores` cores each, and a link between every two nodes.
fn machine(nodes: u16, cores: u16) -> Machine {
    let pairs: Vec<String> = (0..nodes)
        .flat_map(|a| (a + 1..nodes).map(move |b| format!("[{a}, {b}]")))
        .collect();
    let links = if pairs.is_empty() {
        String::new()
    } else {
        format!(
            "[[links]]\nbandwidth = \"6GiB/s\"\nbetween = [{}]\n",
            pairs.join(", ")
        )
    };
    let text = format!(
        "name = \"cost\"\n[shape]\nsockets = {nodes}\ncores_per_node = {cores}\nmemory_per_node = \"64GiB\"\n\
         memory_bandwidth_per_node = \"13GiB/s\"\n[llc]\nsize = \"6MiB\"\nline_bytes = 64\n{links}[hardware]\n\
         clock = \"2.2GHz\"\nllc_inclusive = false\nmisses_in_flight_max = 8\nsmt_throughput = 1.0\n\
         tlb_entries_4k = 512\ntlb_entries_2m = 128\nl2 = \"512KiB\"\nwalk = {{ native_refs = 1.0, nested_refs = 4.0 }}\n\
         ipi = {{ native_ns = 900, virtual_ns = 10900 }}\n\
         latency = {{ l1_cycles = 5, l2_cycles = 16, llc_cycles = 48, memory_ns = 71 }}\n\
         memory_curve = {{ alpha = 0.34, beta = 0.015 }}\nlink = {{ hop_ns = 52, curve = {{ alpha = 1.27, beta = 0.08 }} }}\n"
    );
    homenode_machine_files::from_toml("cost.toml", &text).expect("a possible machine")
}

/// Returns a program without barriers that has this many regions.
fn program(regions: usize) -> Workload {
    let mut text = String::from(
        "name = \"program\"\nabout = \"cost\"\n[program]\nthreads = \"one-copy-per-vcpu\"\n\
         instructions_g_per_thread = 1000.0\ncpi_core = 0.7\nllc_accesses_per_kilo_instruction = 20.0\n\
         misses_in_flight = 4.0\nhits_in_flight = 6.0\nwrite_share = 0.3\n\
         miss_ratio = { m_inf = 0.3, c0 = \"2MiB\", k = 1.0 }\n",
    );
    for at in 0..regions {
        let share = if at + 1 == regions {
            1.0 - (regions - 1) as f64 / regions as f64
        } else {
            1.0 / regions as f64
        };
        text +=
            &format!("[[program.regions]]\nkind = \"private\"\nsize = \"4MiB\"\naccess_share = {share}\n");
    }
    Workload::from_toml("cost.toml", &text).expect("a possible workload")
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn main() {
    println!(
        "| nodes | vCPUs | VMs | regions per vCPU | every epoch solved, ns per epoch and vCPU | as a whole | times real time |"
    );
    println!("|---|---|---|---|---|---|---|");
    let rows = [
        (1, 6, 1, 1),
        (2, 6, 2, 1),
        (4, 6, 4, 1),
        (8, 6, 8, 1),
        (8, 12, 8, 1),
        (8, 6, 1, 1),
        (8, 6, 24, 1),
        (8, 6, 8, 4),
        (8, 6, 8, 16),
    ];
    for (nodes, cores, vms, regions) in rows {
        let machine = machine(nodes, cores);
        let vcpus = nodes * cores;
        let list =
            (0..vms).map(|at| VmSpec::new(&format!("vm{at}"), vcpus / vms, Bytes::from_gib(2), "program"));
        let scenario = Scenario::of("cost", list.collect()).with_workload(program(regions));
        let measure = |every_epoch: bool| {
            let mut twin = Twin::new(machine.clone(), &scenario, 1).expect("the scenario fits");
            if every_epoch {
                twin = twin.solving_every_epoch();
            }
            twin.run_to_end(Ns::from_secs(SECONDS));
            let before = cpu_seconds();
            twin.run_to_end(Ns::from_secs(2 * SECONDS));
            cpu_seconds() - before
        };
        let per_epoch = |seconds: f64| seconds * 1e9 / (SECONDS * 1000) as f64 / f64::from(vcpus);
        let (every, whole) = (measure(true), measure(false));
        println!(
            "| {nodes} | {vcpus} | {vms} | {regions} | {:.0} | {:.0} | {:.0} |",
            per_epoch(every),
            per_epoch(whole),
            SECONDS as f64 / whole
        );
    }
}

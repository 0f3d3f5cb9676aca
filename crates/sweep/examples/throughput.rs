//! Measures how much time a sweep adds to its runs: `cargo run --release --package homenode-sweep --example throughput`.
//!
//! - *Overhead*: CPU time of a sweep with a store on one thread, divided by that of the same runs in a loop, less 1.
//! - *Throughput*: time of two processes, each with half of the tasks, divided by that of one process with two threads.
//!
//! The compared runs alternate, so that other programs on the machine slow them equally. The median of all rounds counts.

#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a measurement that a developer reads"
)]

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use homenode_control::Config;
use homenode_reproduce::jobs::Progress;
use homenode_search::contender::Contender;
use homenode_sweep::{Plan, Program, Shard, Store, run};
use homenode_twin::{Scenario, Setup, named};
use homenode_units::Permit;
use homenode_units::stats::median;

const ROUNDS: usize = 9;
/// The plan of `permits`, with more runs: 40.
const PLAN: &str = "scenario = \"permits\"\nseeds = \"1..10\"\n[set]\nduration = \"200s\"\n\"vm.fluid.permit\" = \"250k,500k,1M,2M\"\n";

fn sweep(shard: Shard, jobs: usize, store: &Path) {
    let plan = Plan::parse("plan.toml", PLAN).unwrap();
    let store = Store::open(store, Program::of(|| Ok(Vec::new())).unwrap()).unwrap();
    black_box(
        run(
            &plan,
            &shard.tasks(&plan),
            jobs,
            Some(&store),
            &Progress::silent(),
        )
        .unwrap(),
    );
}

/// Makes the same runs without a sweep.
fn bare() {
    let machine = named::machine("e5_1603v3").unwrap();
    let mut scenario = Scenario::builtin("permits").unwrap();
    scenario.duration = homenode_units::Ns::from_secs(200);
    for permit in ["250k", "500k", "1M", "2M"] {
        let permit: Permit = permit.parse().unwrap();
        scenario.vms[2].permit = Some(permit);
        for seed in 1..=10 {
            let setup = Setup::new(machine.clone(), scenario.clone(), seed);
            let config = Config::default();
            black_box(Contender::DEFAULT.run(&setup, &config, |_, _| Ok(())).unwrap());
        }
    }
}

/// Returns the processor time of this process so far, in seconds.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap();
    let ns: f64 = stat.split_whitespace().next().unwrap().parse().unwrap();
    ns / 1e9
}

fn main() {
    if let Some(shard) = std::env::args().nth(1) {
        let store = std::env::args().nth(2).unwrap();
        sweep(shard.parse().unwrap(), 1, Path::new(&store));
        return;
    }
    let (mut overheads, mut throughputs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let folder = tempfile::tempdir().unwrap();
        let begin = cpu_s();
        bare();
        let middle = cpu_s();
        sweep(Shard::ALL, 1, &folder.path().join("one"));
        overheads.push((cpu_s() - middle) / (middle - begin) - 1.0);

        let begin = Instant::now();
        let half = |shard: &str| {
            let mut program = Command::new(std::env::current_exe().unwrap());
            program
                .arg(shard)
                .arg(folder.path().join("halves"))
                .spawn()
                .unwrap()
        };
        for mut child in ["1/2", "2/2"].map(half) {
            assert!(child.wait().unwrap().success());
        }
        let apart_s = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        sweep(Shard::ALL, 2, &folder.path().join("two"));
        throughputs.push(apart_s / begin.elapsed().as_secs_f64());
    }
    println!(
        "overhead {:.2} percent, {overheads:.4?}",
        100.0 * median(overheads.iter().copied()).unwrap()
    );
    println!(
        "throughput {:.1} percent, {throughputs:.3?}",
        100.0 * median(throughputs.iter().copied()).unwrap()
    );
}

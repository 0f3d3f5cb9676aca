//! Spread of a scenario's runs over seeds: no policy acts, against each VM pinned to one node.
//!
//! `cargo run --release -p homenode-twin --example spread [SEEDS]`

#![allow(clippy::print_stdout)] // an example talks to a person

use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_twin::{Scenario, Twin, TwinReport};
use homenode_units::stats::{mean, rsd_percent};
use homenode_units::{NodeSet, Ns};

fn main() {
    let seeds: u64 = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(5);
    let machine = preset("r910").expect("r910 comes with the machines");
    let free = Scenario::tavo_mixed();
    let pinned = pinned(&machine, &free);
    for (policy, scenario) in [("default", &free), ("pinned", &pinned)] {
        let reports: Vec<TwinReport> = (1..=seeds).map(|seed| run(&machine, scenario, seed)).collect();
        println!(
            "{policy}: runtime in seconds by seed, mean, relative standard deviation; local share, node changes, waiting"
        );
        for (at, vm) in scenario.vms.iter().enumerate() {
            let runtimes: Vec<f64> = reports
                .iter()
                .map(|report| report.vms[at].runtime_s.unwrap_or(f64::NAN))
                .collect();
            let first = &reports[0].vms[at];
            println!(
                "  {:8} {} mean {:6.1} rsd {:5.2} %  local {:.2} changes {} waited {:.1} s  LLC miss rate {:.2}",
                vm.name,
                runtimes.iter().map(|r| format!("{r:6.1}")).collect::<String>(),
                mean(runtimes.iter().copied()).unwrap_or(f64::NAN),
                rsd_percent(&runtimes).unwrap_or(0.0),
                first.local_access_ratio.unwrap_or(f64::NAN),
                first.node_changes,
                first.waiting_s,
                first.llc_miss_rate.unwrap_or(f64::NAN),
            );
        }
        println!(
            "  nodes, seed 1: {:?}",
            reports[0]
                .nodes
                .values()
                .map(|n| n.bandwidth_bytes_per_s.to_string())
                .collect::<Vec<_>>()
        );
    }
}

fn run(machine: &Machine, scenario: &Scenario, seed: u64) -> TwinReport {
    let mut twin = Twin::new(machine.clone(), scenario, seed).expect("the scenario fits the machine");
    twin.run_to_end(Ns::from_secs(1000));
    twin.report()
}

/// Binds VM after VM to node after node, two by two, as first fit by CPUs does.
fn pinned(machine: &Machine, scenario: &Scenario) -> Scenario {
    let mut scenario = scenario.clone();
    let nodes: Vec<_> = machine.nodes.keys().collect();
    for (at, vm) in scenario.vms.iter_mut().enumerate() {
        let node = NodeSet::one(nodes[at / 2 % nodes.len()]);
        vm.cpus = Some(machine.cpus_of(&node));
        vm.memory_nodes = Some(node);
    }
    scenario
}

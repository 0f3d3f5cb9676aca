//! Measures decisions of `arrange`. Target for 32 VMs on 8 nodes: a search takes at most 5 ms, and all decisions together at
//! most .05 percent of one CPU. Averaged over 10 minutes with a period of 1 s, that is 300 ms for 600 cycles, of which at
//! most 35 look at the whole arrangement ([`looks_per_hour`](homenode_policy::arrange::Config::looks_per_hour)). Target for
//! 1000 VMs: a cycle takes at most 100 ms, with or without a look.
//!
//! Measured on two CPUs of an EPYC server that other programs used too (in brackets: before a search's work was bounded):
//!
//! | cycle                     | 32 VMs           | 1000 VMs         |
//! |---------------------------|------------------|------------------|
//! | homes in force, no search | .018 ms (.034)   | .70 ms (1.5)     |
//! | a look, homes in force    | 3.3 ms (35)      | 37 ms (1100)     |
//! | a look, all unplaced      | 4.9 ms (53)      | 46 ms (18 000)   |
//!
//! For 32 VMs, ten minutes with as many looks as allowed take 130 ms.

#![allow(missing_docs)] // criterion's macros define undocumented functions

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use homenode_host::{
    Accesses, Balloons, Barred, CountedBy, Counters, CpuSample, NodeSample, Rates, Sample, VcpuSample,
    Version, View, VmSample, VmView,
};
use homenode_machine::Machine;
use homenode_policy::arrange::{Config, Settings, State, plan};
use homenode_policy::demand::History;
use homenode_policy::{placement, predict, trial};
use homenode_units::{Bytes, NodeId, NodeSet, Ns, Pages, VmId};
use std::hint::black_box;

const VCPUS: u16 = 4;

/// Where VMs live when a cycle begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lives {
    Unplaced,
    /// VM `n` lives on node `n` modulo the number of nodes.
    AtHome,
}

/// A host of 8 nodes whose VMs want all of their vCPUs' time and get half of it. No two are alike: they have 0.01 to 40 LLC
/// misses per thousand instructions.
struct Crowd {
    machine: Machine,
    before: Sample,
    now: Sample,
    homes: Vec<NodeSet>,
    lives: Lives,
}

impl Crowd {
    fn new(vms: u64, lives: Lives) -> Crowd {
        let machine = homenode_machine_files::preset("amd48").expect("a preset");
        let nodes: Vec<NodeId> = machine.nodes.keys().collect();
        let home = |n: u64| NodeSet::one(nodes[n as usize % nodes.len()]);
        Crowd {
            before: sample(&machine, vms, 1, lives),
            now: sample(&machine, vms, 2, lives),
            homes: (0..vms).map(home).collect(),
            machine,
            lives,
        }
    }

    /// Builds the view of a cycle at `at`; the rates are the same in every cycle.
    fn with_view<T>(&self, at: Ns, see: impl FnOnce(&View<'_>) -> T) -> T {
        let rates = Rates::between(&self.machine, &self.before, &self.now).expect("time passed");
        let vms = self.now.vms.iter().zip(&self.homes).map(|(vm, home)| VmView {
            sample: vm,
            rates: rates.vm(vm.id),
            layout: None,
            home: (self.lives == Lives::AtHome).then_some(home),
            hands_off: None,
            quota_hands_off: None,
        });
        let barred = Barred::default();
        see(&View {
            at,
            ..View::new(&self.machine, &self.now, Some(&rates), barred, vms.collect())
        })
    }
}

fn sample(machine: &Machine, vms: u64, seconds: u64, lives: Lives) -> Sample {
    let nodes: Vec<NodeId> = machine.nodes.keys().collect();
    let vm = |n: u64| {
        let node = nodes[n as usize % nodes.len()];
        let cpus = &machine.nodes[node].cpus;
        // Spreads the VMs over 0 to 1, in no particular order.
        let spread = (n + 1) as f64 * 0.618_034 % 1.0;
        let instructions = 2e9 - 1.8e9 * spread;
        let misses = instructions / 1e3 * 0.01 * 4000f64.powf(spread);
        let per_second = |rate: f64| rate as u64 * seconds;
        let vcpu = |index: u16| VcpuSample {
            index,
            running_ns: Ns::from_millis(500 * seconds),
            waiting_ns: Some(Ns::from_millis(500 * seconds)),
            throttled_ns: Ns::ZERO,
            cpu: cpus.iter().nth(usize::from(index) % cpus.len()),
            affinity: machine.cpu_set(),
            quota: None,
            counters: Some(Counters {
                instructions: per_second(instructions / 2.0),
                cycles: per_second(1e9),
                llc_references: Some(per_second(misses)),
                llc_misses: Some(per_second(misses / 2.0)),
            }),
        };
        VmSample {
            vcpus: (0..VCPUS).map(vcpu).collect(),
            memory_bytes: Bytes::from_mib(256),
            pages: Some([(node, Pages(2000))].into_iter().collect()),
            no_topology_device: Some("it has no topology device".to_owned()),
            accesses: Some(Accesses {
                local: if lives == Lives::Unplaced { 1_000 } else { 9_900 } * seconds,
                remote: if lives == Lives::Unplaced { 9_000 } else { 100 } * seconds,
                on: Default::default(),
            }),
            ..VmSample::new(VmId(u128::from(n)), format!("vm{n}"))
        }
    };
    Sample {
        at: Ns::from_secs(seconds),
        version: Version(1),
        counted_by: CountedBy::Hardware,
        balloons: Balloons::Virtio,
        cpus: machine
            .cpus
            .iter()
            .map(|cpu| CpuSample {
                id: cpu.id,
                busy_ns: Ns::from_secs(seconds),
            })
            .collect(),
        nodes: machine.nodes.map(|_, node| NodeSample {
            memory_total_bytes: node.memory_bytes,
            memory_free_bytes: Bytes(node.memory_bytes.0 / 2),
            memory_traffic_bytes: Some(9_000_000_000 * seconds),
            huge_pages: None,
        }),
        links: vec![],
        no_page_uses: None,
        trackers: Vec::new(),
        kernel: homenode_host::KernelSettings::default(),
        vms: (0..vms).map(vm).collect(),
    }
}

/// Runs one cycle with the given state; returns the number of decisions.
fn cycle(view: &View<'_>, history: &History, state: &mut State) -> usize {
    let placed = &mut placement::State::default();
    let settings = Settings {
        placement: &placement::Config::default(),
        predict: &predict::Config::default(),
        arrange: &Config::default(),
        trial: &trial::Config::default(),
    };
    let plan = plan(black_box(view), settings, history, placed, state);
    black_box(plan).decisions.len()
}

fn arrange(c: &mut Criterion) {
    let mut group = c.benchmark_group("arrange, one cycle, 8 nodes");
    for vms in [32, 1000] {
        for (lives, look) in [(Lives::AtHome, "at home"), (Lives::Unplaced, "unplaced")] {
            let crowd = Crowd::new(vms, lives);
            let mut state = State::default();
            let history = History::default();
            let started = Ns::from_secs(100);
            crowd.with_view(started, |view| {
                for _ in 0..predict::Config::default().known_cycles - 1 {
                    cycle(view, &history, &mut state);
                }
            });
            // The clock does not advance, so only the first cycle looks at the arrangement, and in that cycle no VM is known yet.
            if lives == Lives::AtHome {
                crowd.with_view(started, |view| {
                    group.bench_function(format!("{vms} VMs {look}, no search"), |b| {
                        b.iter(|| cycle(view, &history, &mut state));
                    });
                });
            }
            crowd.with_view(started + Ns::from_secs(60), |view| {
                group.bench_function(
                    format!("{vms} VMs {look}, a look at the whole arrangement"),
                    |b| {
                        b.iter_batched_ref(
                            || state.clone(),
                            |state| cycle(view, &history, state),
                            BatchSize::LargeInput,
                        );
                    },
                );
            });
        }
    }
    group.finish();
}

criterion_group!(benches, arrange);
criterion_main!(benches);

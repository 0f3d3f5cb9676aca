//! Measures decisions. Targets: a placement on an 8-node host that holds 200 VMs takes at most 50 microseconds; a period of
//! the permits' ledger for 1000 VMs takes at most 100 microseconds; a working-set estimate takes in 200 million logged frames
//! per second.

#![allow(missing_docs)] // criterion's macros define undocumented functions

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_host::{
    Balloons, Barred, CountedBy, CpuSample, NodeSample, Rates, Sample, VcpuSample, Version, View, VmSample,
    VmView,
};
use homenode_machine::Machine;
use homenode_policy::demand::{BandwidthFrom, Demand, History};
use homenode_policy::permits::{Ledger as Permits, Permit, Terms};
use homenode_policy::placement::{Config, Ledger, Supply, place};
use homenode_policy::working_set::{Estimator, Logged, ObservationRef, Tracker, UsedRef, logged};
use homenode_units::{Bytes, BytesPerSec, NodeId, NodeMap, NodeSet, Ns, Pages, VmId};
use std::hint::black_box;

const VMS: u64 = 200;

/// VMs are spread over the nodes in turn; each is busy a fifth of the time.
fn sample(machine: &Machine, seconds: u64) -> Sample {
    let nodes: Vec<NodeId> = machine.nodes.keys().collect();
    let vm = |n: u64| {
        let node = nodes[n as usize % nodes.len()];
        let cpus = &machine.nodes[node].cpus;
        VmSample {
            vcpus: vec![VcpuSample {
                index: 0,
                running_ns: Ns::from_millis(20 * seconds),
                waiting_ns: Some(Ns::ZERO),
                throttled_ns: Ns::ZERO,
                cpu: cpus.iter().nth(n as usize % cpus.len()),
                affinity: cpus.clone(),
                quota: None,
                counters: None,
            }],
            memory_bytes: Bytes::from_mib(256),
            pages: Some([(node, Pages(10_000))].into_iter().collect()),
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
                busy_ns: Ns::from_millis(200 * seconds),
            })
            .collect(),
        nodes: machine.nodes.map(|_, node| NodeSample {
            memory_total_bytes: node.memory_bytes,
            memory_free_bytes: Bytes(node.memory_bytes.0 / 2),
            memory_traffic_bytes: Some(1_000_000_000 * seconds),
            huge_pages: None,
        }),
        links: vec![],
        no_page_uses: None,
        trackers: Vec::new(),
        kernel: homenode_host::KernelSettings::default(),
        vms: (0..VMS).map(vm).collect(),
    }
}

fn placement(c: &mut Criterion) {
    let machine = homenode_machine_files::preset("amd48").expect("a preset");
    let (before, now) = (sample(&machine, 1), sample(&machine, 2));
    let rates = Rates::between(&machine, &before, &now).expect("time passed");
    let homes: NodeMap<NodeSet> = machine.nodes.map(|id, _| NodeSet::one(id));
    let vms = now.vms.iter().map(|vm| VmView {
        sample: vm,
        rates: rates.vm(vm.id),
        layout: None,
        home: vm
            .pages
            .as_ref()
            .and_then(|pages| pages.keys().next())
            .and_then(|node| homes.get(node)),
        hands_off: None,
        quota_hands_off: None,
    });
    let view = View::new(&machine, &now, Some(&rates), Barred::default(), vms.collect());
    let (history, ledger, config) = (History::default(), Ledger::default(), Config::default());
    let demand = |cpus, gib| Demand {
        cpus,
        memory_bytes: Bytes::from_gib(gib),
        bandwidth: Some(BytesPerSec(100_000_000)),
        bandwidth_from: BandwidthFrom::Declared,
        device_nodes: NodeSet::new(),
        huge_pages: Vec::new(),
    };
    let mut group = c.benchmark_group("placement, 8 nodes, 200 VMs");
    for (name, demand) in [
        ("fits one node", demand(1.0, 1)),
        ("fits nowhere: every bin is looked at", demand(48.0, 1000)),
    ] {
        group.bench_function(name, |b| {
            b.iter(|| {
                let supply = Supply::new(black_box(&view), &history, &ledger, &config, &[]);
                black_box(place(&supply, black_box(&demand), None, &config))
            });
        });
    }
    group.finish();
}

fn permits(c: &mut Criterion) {
    let mut group = c.benchmark_group("permits, one period");
    for vms in [100, 1_000, 10_000] {
        let mut ledger = Permits::new(Terms::default());
        let permit = Permit::pollution(250_000).expect("a permit");
        let used: Vec<(VmId, u64)> = (0..vms).map(|n| (VmId(n), 1_000 * n as u64)).collect();
        for (vm, _) in &used {
            ledger.book(*vm, permit);
        }
        let mut now = Ns::ZERO;
        group.bench_function(format!("{vms} VMs"), |b| {
            b.iter(|| {
                now += Permit::SLICE;
                let mut measured = black_box(&used).iter();
                ledger.settle(now, |vm| {
                    measured
                        .find(|(measured, _)| *measured >= vm)
                        .map(|(_, units)| *units)
                })
            });
        });
    }
    group.finish();
}

/// Full buffers of page reference logging, from a guest with 400 MiB of 1 GiB in use.
fn working_set(c: &mut Criterion) {
    const FRAMES: u64 = 1 << 18;
    const USED: u64 = 102_400;
    let mut group = c.benchmark_group("working set");
    let spread = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let logs: [(&str, Vec<u64>); 2] = [
        ("frames in order", (0..1 << 19).map(|at| at % USED).collect()),
        (
            "frames in no order",
            (0..1 << 19).map(|at| spread(at) % USED).collect(),
        ),
    ];
    for (name, log) in &logs {
        for (rule, config) in [
            ("plain", logged::Config::published()),
            ("repaired", logged::Config::repaired()),
        ] {
            let mut estimator = Logged::new(config);
            let mut at = Ns::ZERO;
            group.throughput(Throughput::Elements(log.len() as u64));
            group.bench_function(format!("{name}, {rule}"), |b| {
                b.iter(|| {
                    for buffer in black_box(log).chunks(511) {
                        at += Ns::from_millis(10);
                        let seen = ObservationRef {
                            tracker: Tracker::Prl,
                            at,
                            interval: Ns::from_millis(10),
                            memory: Pages(FRAMES),
                            frames: FRAMES,
                            seen: UsedRef::Frames(buffer),
                            lost: 0,
                            blind: Pages::ZERO,
                        };
                        black_box(estimator.observe(&seen)).expect("in order");
                    }
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, placement, permits, working_set);
criterion_main!(benches);

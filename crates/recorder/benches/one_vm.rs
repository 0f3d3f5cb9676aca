//! Measures the cost of reading an hour of one VM among 32 from a history, as `/v1/history` does. For comparison, reads all VMs.
//!
//! Statuses have the same fields as the agent's. Half of the fields change from period to period.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_recorder::{Archive, Begin, Figures, Kind, Limits, Period, Pick, Recorder, WhenFull};
use homenode_units::{Bytes, Ns};
use serde_json::{Value, json};

const VMS: u64 = 32;
const PERIODS: u64 = 3600;
const EVER: (i64, i64) = (0, i64::MAX);

/// Returns a value that varies with VM and time, rounded to three decimals.
fn figure(vm: u64, second: u64, most: f64) -> f64 {
    let part = (vm * 7919 + second * 104_729) % 997;
    (part as f64 / 997.0 * most * 1000.0).round() / 1000.0
}

fn vm(n: u64, second: u64) -> Value {
    let on = |node: u64| json!({"node": node, "pages": 100_000 + (n * 31 + second / 60 * node) % 5000});
    json!({
        "name": format!("vm{n}"),
        "id": format!("00000000-0000-0000-0000-{n:012x}"),
        "home": [n % 4],
        "vcpus_by_node": [{"node": n % 4, "vcpus": 1 + second % 2}],
        "memory_policy": "first-touch",
        "memory_policy_chosen": null,
        "pages_sampled_by": null,
        "memory_policy_caution": null,
        "memory_fixed": null,
        "pages_by_node": [on(0), on(1), on(2), on(3)],
        "memory_bytes": 1_u64 << 30,
        "cpus_used": figure(n, second, 2.0),
        "vcpus_waiting": figure(n, second, 0.5),
        "counted_by": "hardware",
        "llc_miss_rate": figure(n, second, 0.4),
        "local_access_ratio": figure(n, second, 1.0),
        "left_alone": null,
        "permit": {"permit": null, "units_per_slice": second * n % 10_000, "standing": null, "balance": null, "punished_count": 0},
        "memory": {"maximum_bytes": null, "limit_bytes": null, "floor_bytes": null, "need_bytes": null, "why": null},
        "topology": {"version": null, "told_ns": null, "why_not": "it has no page"},
    })
}

fn write(path: &std::path::Path) {
    let begin = Begin {
        wall_ns: 0,
        version: "bench".into(),
        host: "bench".into(),
        detail: json!({}),
    };
    let limits = Limits {
        status: Ns::from_secs(86400),
        samples: Ns::from_secs(86400),
        samples_bytes: Bytes::from_gib(1),
        bytes: Bytes::from_gib(1),
    };
    let mut recorder = Recorder::begin(path, &begin, limits, WhenFull::Wait).expect("a history");
    for second in 0..PERIODS {
        let at = Ns::from_secs(second);
        recorder.keep(at, move |documents| {
            let vms: Vec<Value> = (0..VMS).map(|n| vm(n, second)).collect();
            documents.put(Kind::Status, Figures::Whole, &json!({"at_ns": at, "vms": vms}));
            Period {
                at,
                wall_ns: at.0.cast_signed(),
                events: Vec::new(),
            }
        });
    }
    recorder.close();
}

fn read(archive: &Archive, pick: Pick<'_>) -> usize {
    let frames = archive.iter(None, Kind::Status, EVER).expect("a history");
    let read = frames.only(pick).map(|frame| frame.expect("a period"));
    read.filter(|frame| black_box(&frame.value).is_object()).count()
}

fn hour(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("history.sqlite");
    write(&path);
    let archive = Archive::open(&path).expect("a history");
    let keys = [
        "id",
        "name",
        "cpus_used",
        "vcpus_waiting",
        "llc_miss_rate",
        "local_access_ratio",
        "pages_by_node",
        "home",
    ];
    let of_vm = keys.map(|key| (key, Pick::All));
    let of_vm = Pick::Keys(&of_vm);
    let of_host = [("vms", Pick::Called("vm7", &of_vm))];
    let mut group = criterion.benchmark_group("an hour of 32 VMs");
    group.sample_size(10);
    group.bench_function("all of it", |bench| bench.iter(|| read(&archive, Pick::All)));
    group.bench_function("one VM", |bench| {
        bench.iter(|| read(&archive, Pick::Keys(&of_host)));
    });
    group.finish();
}

criterion_group!(benches, hour);
criterion_main!(benches);

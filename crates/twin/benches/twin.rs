//! Simulated time per time: how long one simulated second takes. The reciprocal of a result is simulated seconds per
//! second.

mod cases;

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_host::Host;
use homenode_units::Ns;

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("twin");
    group.sample_size(10);
    for case in cases::all() {
        let mut twin = case.twin();
        twin.wait(Ns::from_secs(10));
        group.bench_function(format!("{}: one simulated second", case.name), |b| {
            b.iter(|| twin.wait(Ns::from_secs(1)));
        });
    }
    let flipping = cases::flipping();
    let twin = flipping.twin();
    group.bench_function(flipping.name, |b| {
        b.iter(|| twin.clone().run_to_end(cases::FLIPPING_LASTS));
    });
    group.finish();
}

criterion_group!(twin, benches);
criterion_main!(twin);

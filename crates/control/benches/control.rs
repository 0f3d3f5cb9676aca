//! CPU time that policies take in one control step. Target: 200 microseconds for 32 VMs on the simulated host.

#![allow(missing_docs)] // criterion's macros define undocumented functions

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_control::{Config, Control, Mode};
use homenode_host::{Host, Rates};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};
use std::hint::black_box;

/// Measures a step with 32 one-vCPU VMs that have run under Homenode for a while.
fn step(c: &mut Criterion) {
    let machine = homenode_machine_files::preset("r910").expect("a preset");
    let vms = (0..32)
        .map(|n| {
            VmSpec::new(
                &format!("vm{n}"),
                1,
                Bytes::from_gib(1),
                ["soplex", "povray"][n % 2],
            )
        })
        .collect();
    let mut twin = Twin::new(machine.clone(), &Scenario::of("bench", vms), 1).expect("a possible scenario");
    let mut control = Control::new(Config::default(), Mode::Act);
    for _ in 0..5 {
        control.step(&mut twin).expect("a twin can be read");
        twin.wait(Ns::from_secs(1));
    }
    let before = twin.sample().expect("a twin can be read");
    twin.wait(Ns::from_secs(1));
    let now = twin.sample().expect("a twin can be read");
    c.bench_function("policy time of one step, 32 VMs", |b| {
        b.iter(|| {
            let rates = Rates::between(&machine, &before, &now);
            control.observe(&machine, &now, rates.as_ref());
            black_box(control.plan(&machine, &now, rates.as_ref()))
        });
    });
}

criterion_group!(benches, step);
criterion_main!(benches);

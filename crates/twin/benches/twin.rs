//! Simulated time per time: how long one simulated second takes. The reciprocal of a result is simulated seconds per
//! second.

use criterion::{Criterion, criterion_group, criterion_main};
use homenode_host::Host;
use homenode_machine::preset;
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns};

/// Eight VMs of four vCPUs on the R910: half of them meet at barriers, half do not.
fn eight() -> Scenario {
    let programs = ["cg.B", "sp.B", "lu.B", "ep.B", "soplex", "milc", "mcf", "povray"];
    let vms = programs.map(|name| VmSpec::new(name, 4, Bytes::from_gib(8), name).doing(100.0));
    Scenario::of("bench", vms.to_vec())
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("twin");
    group.sample_size(10);
    for (name, machine, scenario) in [
        ("r910, 8 VMs x 4 vCPUs", "r910", eight()),
        (
            "amd48, mixed",
            "amd48",
            Scenario::mixed_for(&preset("amd48").expect("a preset"), 1),
        ),
    ] {
        let machine = preset(machine).expect("a preset");
        let mut twin = Twin::new(machine, &scenario, 1).expect("the scenario fits");
        twin.wait(Ns::from_secs(10));
        group.bench_function(format!("{name}: one simulated second"), |b| {
            b.iter(|| twin.wait(Ns::from_secs(1)));
        });
    }
    group.finish();
}

criterion_group!(twin, benches);
criterion_main!(twin);

//! Fuzzes the agent's settings. Runs four cycles of the control loop on a small twin with each. Whatever the settings are, every
//! plan can be carried out, and no VM has more pages than memory.

#![no_main]

use homenode_control::{Config, Control, Mode};
use homenode_host::Host as _;
use homenode_machine_files::{file::read_toml, preset};
use homenode_twin::{Scenario, Twin, VmSpec};
use homenode_units::{Bytes, Ns, Pages};
use libfuzzer_sys::fuzz_target;

const CYCLES: usize = 4;

fuzz_target!(|text: &str| {
    let Ok(mut config) = read_toml::<Config>("homenode.toml", text) else {
        return;
    };
    let machine = preset("amd48").expect("a preset");
    let vms =
        ["cg.B", "povray", "soplex"].map(|program| VmSpec::new(program, 2, Bytes::from_gib(2), program));
    let mut twin = Twin::new(machine, &Scenario::of("fuzz", vms.to_vec()), 1).expect("a possible scenario");
    // A VM must count as known within four cycles, or no policy looks for a home.
    config.predict.known_cycles = config.predict.known_cycles.min(2);
    // Longer periods only repeat the same work.
    let period = config.period.clamp(Ns::from_millis(1), Ns::from_millis(200));
    let mut control = Control::new(config, Mode::Act);
    for _ in 0..CYCLES {
        control.step(&mut twin).expect("a twin can be read");
        twin.wait(period);
        for vm in &twin.sample().expect("a twin can be read").vms {
            let there: Pages = vm.pages.iter().flat_map(|pages| pages.values().copied()).sum();
            assert!(there <= vm.memory_bytes.to_pages(), "{} has {there}", vm.name);
        }
    }
});

//! Fuzzes scenario files: the twin either accepts a scenario that can be parsed, or refuses it with a message.

#![no_main]

use homenode_machine_files::preset;
use homenode_twin::{Scenario, Twin};
use libfuzzer_sys::fuzz_target;

/// Maximum number of vCPUs. More would only repeat the same work.
const VCPUS_MAX: u64 = 64;

fuzz_target!(|text: &str| {
    let Ok(scenario) = Scenario::from_toml("scenario.toml", text) else {
        return;
    };
    let vcpus: u64 = scenario.vms.iter().map(|vm| u64::from(vm.vcpus)).sum();
    if vcpus > VCPUS_MAX {
        return;
    }
    let machine = preset("r910").expect("a preset");
    match Twin::new(machine, &scenario, 1) {
        Ok(twin) => assert_eq!(twin.now().0, 0),
        Err(refused) => assert!(!refused.to_string().is_empty()),
    }
});

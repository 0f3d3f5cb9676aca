//! Fuzzes machine files: a machine that can be parsed is complete, and can be written and parsed again.

#![no_main]

use homenode_fuzz::reads_as_written;
use homenode_machine_files::from_toml;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(machine) = from_toml("machine.toml", text) {
        reads_as_written(machine);
    }
});

//! Fuzzes experiment files: a file is either refused with a message, or is an experiment whose runs can all be listed.

#![no_main]

use homenode_reproduce::Design;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match Design::embedded("fuzzed", text) {
        Ok(design) => {
            design.all_runs().expect("checked when it was read");
        }
        Err(refused) => assert!(!refused.to_string().is_empty()),
    }
});

//! Experiment files: what reads is an experiment all of whose runs can be listed, or is refused with a sentence.

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

//! Fuzzes profile logs: every figure in an accepted log is possible, and the log can be written and read again unchanged.

#![no_main]

use homenode_formats::profile_log::Log;
use homenode_fuzz::Tree;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(log) = Log::parse("profile.log", text) else {
        return;
    };
    assert!(log.rate > 0.0 && log.rate <= 1.0);
    assert!(
        log.curve
            .windows(2)
            .all(|pair| pair[0].bytes < pair[1].bytes && pair[0].miss_ratio >= pair[1].miss_ratio)
    );
    assert!(log.written_back <= log.llc_accesses);
    let tree = Tree::new();
    let path = tree.root().join("profile.log");
    log.write(&path).expect("a writable folder");
    assert_eq!(Log::read(&path).expect("it was written by us"), log);
});

//! Fuzzes files of measured programs: no part is larger than its whole, and a file that is written, parsed and written again
//! stays the same.

#![no_main]

use homenode_formats::measured::Measured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(measured) = Measured::parse("measured.toml", text) else {
        return;
    };
    assert!(
        measured
            .program
            .iter()
            .all(|program| program.written <= program.used)
    );
    let written = measured.to_toml();
    let again =
        Measured::parse("measured.toml", &written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again.to_toml(), written);
});

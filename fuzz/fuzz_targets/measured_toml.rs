//! Measured programs: parts are no larger than wholes, and the file is written as it was read.

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

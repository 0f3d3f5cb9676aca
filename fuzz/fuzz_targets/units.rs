//! Fuzzes quantities, sets, permits and policies as people write them: a value that can be parsed can be written and parsed
//! again.

#![no_main]

use std::fmt::Display;
use std::str::FromStr;

use homenode_units::{Bytes, BytesPerSec, CpuSet, MemoryPolicy, NodeSet, Ns, Permit, VmId};
use libfuzzer_sys::fuzz_target;

/// Checks a type whose written form is exact.
fn is_the_same_again<T: FromStr + Display + PartialEq>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let written = value.to_string();
        assert!(
            written.parse::<T>().is_ok_and(|again| again == value),
            "{text:?} became {written:?}"
        );
    }
}

/// Largest value for which rounding is checked. Sizes are written with two decimals, seconds with one; above this value, rounding
/// up may overflow the type.
const ROUNDED_MAX: u64 = 1 << 62;

fn is_nearly_the_same_again<T: FromStr + Display + Copy>(text: &str, number: impl Fn(T) -> u64) {
    let Some(value) = text
        .parse::<T>()
        .ok()
        .filter(|value| number(*value) < ROUNDED_MAX)
    else {
        return;
    };
    let written = value.to_string();
    let again = written.parse::<T>().ok().map(&number);
    let is_near = again.is_some_and(|again| again.abs_diff(number(value)) <= number(value) / 20);
    assert!(is_near, "{text:?} became {written:?}");
}

fuzz_target!(|text: &str| {
    is_the_same_again::<CpuSet>(text);
    is_the_same_again::<NodeSet>(text);
    is_the_same_again::<Permit>(text);
    is_the_same_again::<MemoryPolicy>(text);
    is_nearly_the_same_again::<Bytes>(text, |value| value.0);
    is_nearly_the_same_again::<BytesPerSec>(text, |value| value.0);
    is_nearly_the_same_again::<Ns>(text, |value| value.0);
    if let Some(id) = VmId::parse(text) {
        assert_eq!(VmId::parse(&id.to_string()), Some(id));
    }
});

//! Fuzzes Xen's trace of runstates: the result does not depend on how the bytes are split, and sums only grow.

#![no_main]

use homenode_xen::runstates::{Records, Runstates, Spent};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, u8)| {
    let (bytes, part) = input;
    let whole = Records::default().read(&bytes);
    let (mut records, mut runstates) = (Records::default(), Runstates::new(1e9));
    let (mut parts, mut before) = (Vec::new(), Spent::default());
    for part in bytes.chunks(usize::from(part).max(1)) {
        let changes = records.read(part);
        runstates.add(&changes);
        parts.extend(changes);
        if let Some(now) = runstates.spent(1, 0) {
            assert!(now.runnable >= before.runnable && now.offline >= before.offline);
            before = now;
        }
    }
    assert_eq!(whole, parts);
});

//! Fuzzes page logs. Their checksums are corrected, so that inputs reach the code after the checks.

#![no_main]

use homenode_formats::page_log::{Header, Log};
use libfuzzer_sys::fuzz_target;

/// Sizes in bytes of a record without rows, and of a row.
const RECORD_BYTES: usize = 96;
const ROW_BYTES: usize = 8;

fn put_right(bytes: &mut [u8]) {
    let Some((header, mut rest)) = bytes.split_at_mut_checked(Header::BYTES) else {
        return;
    };
    put_sum(header, Header::BYTES - 4);
    while let Some(rows) = rest.get(4..8) {
        let rows = u32::from_le_bytes(rows.try_into().expect("four bytes"));
        let length = RECORD_BYTES.saturating_add((rows as usize).saturating_mul(ROW_BYTES));
        let Some((record, after)) = rest.split_at_mut_checked(length) else {
            return;
        };
        let sum = crc32fast::hash(&record[RECORD_BYTES..]);
        record[88..92].copy_from_slice(&sum.to_le_bytes());
        put_sum(record, 92);
        rest = after;
    }
}

/// Writes at `at` the checksum of the bytes before it.
fn put_sum(bytes: &mut [u8], at: usize) {
    let sum = crc32fast::hash(&bytes[..at]);
    bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Log::parse("page.log", bytes);
    let mut bytes = bytes.to_vec();
    put_right(&mut bytes);
    let Ok(log) = Log::parse("page.log", &bytes) else {
        return;
    };
    let frames = log.header.frames + log.header.table_frames;
    for window in &log.windows {
        assert!(window.begin_ns <= window.end_ns);
        assert!(window.rows.iter().all(|row| u64::from(row.frame) < frames));
    }
    // A log may have no kept records; the offset of the first one may then be anywhere.
    let Some(head) = usize::try_from(log.header.kept.at)
        .ok()
        .filter(|at| *at <= bytes.len())
    else {
        assert!(log.windows.is_empty());
        return;
    };
    // The log can be written and parsed again unchanged.
    let mut written = log.header.to_bytes().to_vec();
    written.resize(head, 0);
    written.extend(
        log.windows
            .iter()
            .flat_map(homenode_formats::page_log::Window::to_bytes),
    );
    let again = Log::parse("page.log", &written).expect("it was written by us");
    assert_eq!((again.header, again.windows), (log.header, log.windows));
});

use super::*;
use proptest::prelude::*;

pub(super) fn header() -> Header {
    Header {
        logs: Logs::Walks,
        tables: Tables::Silent,
        exact: true,
        fetches: true,
        flush: false,
        core: "i7_pml".to_owned(),
        frames: 1000,
        table_frames: 24,
        vcpus: 1,
        blind: 1600,
        begun_unix_ns: 7,
        begun_ns: 8,
        entries: 512,
        kept: Kept::ALL,
    }
}

pub(super) fn windows(count: u64) -> Vec<Window> {
    let row = |frame| Row {
        frame,
        count: frame % 7,
        marks: Marks(frame as u8 & Marks::ALL),
    };
    let window = |number| Window {
        number,
        begin_ns: 10 * number,
        end_ns: 10 * number + 9,
        label: if number == 1 {
            "half".to_owned()
        } else {
            String::new()
        },
        walks: 5,
        logged: 4,
        lost: 3,
        filled: 2,
        outside: 1,
        rows: (0..20 * number as u32)
            .map(|at| row(3 * at + number as u32))
            .collect(),
    };
    (0..count).map(window).collect()
}

pub(super) fn bytes(windows: &[Window]) -> Vec<u8> {
    let mut bytes = header().to_bytes().to_vec();
    windows.iter().for_each(|window| bytes.extend(window.to_bytes()));
    bytes.extend(end(windows.len() as u64, 99));
    bytes
}

fn complaint(bytes: &[u8]) -> String {
    Log::parse("x.pages", bytes)
        .expect_err("it must not read")
        .to_string()
}

#[test]
fn a_log_reads_as_it_was_written() {
    let read = Log::parse("x", &bytes(&windows(3))).expect("whole");
    assert_eq!(
        (read.header, read.windows, read.missing),
        (header(), windows(3), None)
    );
    // The standard check value of this checksum.
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

#[test]
fn what_is_no_log_is_refused_with_what_is_wrong() {
    let whole = bytes(&windows(3));
    let with = |at: usize, value: u8| {
        let mut other = whole.clone();
        other[at] = value;
        complaint(&other)
    };
    assert!(complaint(b"").contains("not a log of pages"));
    assert!(complaint(b"HNPAG").contains("cut off within its header, after 5 bytes"));
    assert!(with(0, b'X').contains("not a log of pages"));
    assert!(with(8, 9).contains("the log has version 9, but this program reads 2"));
    assert!(with(40, 1).contains("corrupt at byte 0, the header: its checksum does not match"));
    assert!(with(Header::BYTES + 20, 1).contains("corrupt at byte 128, record 0: the checksum of its head"));
    let rows_of_1 = Header::BYTES + 2 * RECORD_BYTES + 5;
    assert!(with(rows_of_1, 77).contains("record 1: the checksum of its rows"));
    let mut other_order = whole.clone();
    other_order[12..16].reverse();
    assert!(complaint(&other_order).contains("the other byte order"));
    let [zero, one, two] = windows(3).try_into().expect("three");
    assert!(
        complaint(&bytes(&[zero.clone(), two, one.clone()])).contains("record 2 is in the place of record 1")
    );
    let unsorted = Window {
        rows: one.rows.iter().rev().copied().collect(),
        ..one.clone()
    };
    assert!(complaint(&bytes(&[zero.clone(), unsorted])).contains("not in ascending order"));
    let early = Window { begin_ns: 3, ..one };
    assert!(complaint(&bytes(&[zero, early])).contains("begins before the previous one ends"));
}

proptest! {
    #[test]
    fn a_log_that_is_cut_off_gives_all_whole_records_and_says_what_is_missing(at in 0_usize..2000) {
        let whole = bytes(&windows(4));
        prop_assume!(at < whole.len());
        match Log::parse("x", &whole[..at]) {
            Ok(log) => {
                prop_assert!(log.missing.is_some());
                prop_assert_eq!(&log.windows[..], &windows(4)[..log.windows.len()]);
                let read: usize = log.windows.iter().map(|window| window.to_bytes().len()).sum();
                let next = windows(4).get(log.windows.len()).map_or(RECORD_BYTES, |window| window.to_bytes().len());
                prop_assert!(Header::BYTES + read <= at && at < Header::BYTES + read + next);
            }
            Err(_) => prop_assert!(at < Header::BYTES),
        }
    }

    #[test]
    fn a_log_with_one_changed_byte_is_refused(at in 0_usize..2000, flip in 1_u8..=255) {
        let mut other = bytes(&windows(4));
        prop_assume!(at < other.len());
        other[at] ^= flip;
        prop_assert!(Log::parse("x", &other).is_err());
    }

    #[test]
    fn no_bytes_do_any_harm(
        junk in prop::collection::vec(any::<u8>(), 0..400), after in 0_usize..4, resealed: bool,
    ) {
        prop_assert!(Log::parse("x", &junk).is_err());
        // After good records, append one whose checksums are valid but whose figures are not.
        let mut begins = header().to_bytes().to_vec();
        windows(after as u64).iter().for_each(|window| begins.extend(window.to_bytes()));
        let mut tail = junk;
        if resealed && tail.len() >= RECORD_BYTES {
            tail[..4].copy_from_slice(WINDOW);
            let rows = (tail.len() - RECORD_BYTES) / Row::BYTES;
            tail.truncate(RECORD_BYTES + rows * Row::BYTES);
            tail[4..8].copy_from_slice(&(rows as u32).to_le_bytes());
            tail[8..16].copy_from_slice(&(after as u64).to_le_bytes());
            tail = seal(tail);
        }
        begins.extend(tail);
        let _ = Log::parse("x", &begins);
    }
}

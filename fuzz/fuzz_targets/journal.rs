//! Fuzzes journals, which may be torn, damaged or of another VM. A journal that is opened twice has the same entries both times,
//! and the second time no damage is reported.

#![no_main]

use homenode_fuzz::Tree;
use homenode_undo::journal::{Entry, Journal, peek};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The input is tried unchanged, and with the right checksum before each line.
    let mut with_sums = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        with_sums.extend(format!("{:08x} ", crc32fast::hash(line)).bytes());
        with_sums.extend(line);
        with_sums.push(b'\n');
    }
    for bytes in [bytes, &with_sums] {
        // A VM's own mark has entries in the same format.
        if let Some(entry) = std::str::from_utf8(bytes).ok().and_then(Entry::from_written) {
            assert_eq!(Entry::from_written(&entry.written(|_| true)), Some(entry));
        }
        let tree = Tree::new();
        tree.write("private/journal", bytes);
        let peeked = peek(tree.root());
        let first = Journal::open(tree.root()).expect("files can be made");
        assert_eq!(first.entries(), &peeked);
        assert!(
            first.entries().iter().all(|(vm, entry)| entry.run.vm == *vm),
            "another VM's run"
        );
        let second = Journal::open(tree.root()).expect("it was opened before");
        assert_eq!(second.entries(), first.entries());
        assert_eq!(second.warnings, Vec::<String>::new());
    }
});

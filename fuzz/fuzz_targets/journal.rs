//! Journals that are torn, damaged or of another: opening one twice finds the same, and the second time nothing is damaged.

#![no_main]

use homenode_fuzz::Tree;
use homenode_undo::journal::{Entry, Journal, peek};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // As it is, and each line behind the checksum that it should have.
    let mut with_sums = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        with_sums.extend(format!("{:08x} ", crc32fast::hash(line)).bytes());
        with_sums.extend(line);
        with_sums.push(b'\n');
    }
    for bytes in [bytes, &with_sums] {
        // The same lines in a VM's own mark.
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

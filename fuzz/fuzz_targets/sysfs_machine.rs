//! Fuzzes a host's `/sys` and `/proc`: a machine that was read from them is complete, and can be written and parsed again.

#![no_main]

use homenode_fuzz::{Tree, reads_as_written};
use homenode_machine_files::sysfs;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let tree = Tree::unpack(text);
    if let Ok(machine) = sysfs::read(tree.root()) {
        reads_as_written(machine);
    }
});

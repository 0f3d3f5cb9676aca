//! A host's `/sys` and `/proc`: a machine that was read is whole, and can be written and read again.

#![no_main]

use homenode_fuzz::Tree;
use homenode_machine_files::{Comments, from_toml, render_text, sysfs, to_toml};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let tree = Tree::unpack(text);
    let Ok(machine) = sysfs::read(tree.root()) else {
        return;
    };
    let _ = render_text(&machine);
    let machine = machine.checked().expect("what was read is whole");
    let written = to_toml(&machine, &Comments::default());
    let again = from_toml("machine.toml", &written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again.cpu_set(), machine.cpu_set());
    assert_eq!(again.node_set(), machine.node_set());
    assert_eq!(again.distances, machine.distances);
});

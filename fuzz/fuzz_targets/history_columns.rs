//! A block of a history, once it is decompressed: what is read whole can be packed and read again, and who asks for one VM gets
//! of it what all would have given.

#![no_main]

use homenode_recorder::Pick;
use homenode_recorder::columns::{pack, read, unpack};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const PERIODS: usize = 3;

/// The figure of the first of these VMs that is called `a`.
fn figure(vms: &Value) -> Option<&Value> {
    let vms: Vec<&Value> = match vms {
        Value::Array(vms) => vms.iter().collect(),
        Value::Object(vms) => vms.values().collect(),
        _ => Vec::new(),
    };
    vms.into_iter().find(|vm| vm["id"] == "a")?.get("n")
}

fuzz_target!(|text: &[u8]| {
    let of_vm = Pick::Keys(&[("id", Pick::All), ("name", Pick::All), ("n", Pick::All)]);
    let of_host = [("vms", Pick::Called("a", &of_vm))];
    let picked = read(text, Pick::Keys(&of_host));
    let picked = picked.ok().and_then(|column| unpack(&column, PERIODS));
    let whole = read(text, Pick::All);
    let Some(whole) = whole.ok().and_then(|column| unpack(&column, PERIODS)) else {
        return;
    };
    let written = serde_json::to_vec(&pack(&whole)).expect("values hold nothing that JSON cannot");
    let again = read(&written, Pick::All).expect("what was written is a column");
    assert_eq!(unpack(&again, PERIODS).as_ref(), Some(&whole));
    // Of what this program wrote, the part is of the whole.
    let part = read(&written, Pick::Keys(&of_host));
    let part = part.ok().and_then(|column| unpack(&column, PERIODS));
    if let Some(part) = part {
        for (part, whole) in part
            .iter()
            .zip(&whole)
            .filter(|(_, whole)| is_of_ids(&whole["vms"]))
        {
            assert_eq!(figure(&part["vms"]), figure(&whole["vms"]));
        }
    }
    drop(picked);
});

/// Whether each has another id, as those of VMs are.
fn is_of_ids(vms: &Value) -> bool {
    let Some(vms) = vms.as_array() else { return false };
    let mut ids: Vec<&str> = vms.iter().filter_map(|vm| vm["id"].as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids.len() == vms.len()
}

//! Carrefour is possible only if something says which node uses a page.

use homenode_units::Placing;

use super::*;

/// Returns why the host refuses Carrefour.
fn refusal(tree: &Tree) -> String {
    let mut host = connect(tree, Acting::Live);
    let policy = Placing::FirstTouch.with_carrefour();
    let outcome = commit(&mut host, Act::SetMemoryPolicy { policy }.on(vm()));
    assert!(host.last.no_page_uses.is_some() && host.last.vms[0].page_uses.is_none());
    match outcome {
        Outcome::Failed(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_processor_that_does_not_sample_guests_is_named() {
    for (vendor, part) in [("GenuineIntel", "PEBS"), ("AuthenticAMD", "ibs_op"), ("", "AMD")] {
        let tree = host("");
        tree.write(
            "proc/cpuinfo",
            &format!("processor\t: 0\nvendor_id\t: {vendor}\n"),
        );
        let why = refusal(&tree);
        assert!(
            why.contains("which node uses a page") && why.contains(part),
            "{why}"
        );
    }
}

#[test]
fn sampling_that_the_kernel_refuses_is_said() {
    let tree = host("");
    tree.write("sys/bus/event_source/devices/ibs_op/type", &u32::MAX.to_string());
    let why = refusal(&tree);
    assert!(why.contains("IBS cannot be used"), "{why}");
}

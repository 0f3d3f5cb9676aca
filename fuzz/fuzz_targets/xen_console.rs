//! What comes on Xen's console, where guests write, too: of a domain that is told, all pages are on nodes, and nothing that a guest
//! writes changes what Xen says.

#![no_main]

use homenode_xen::memory::by_node;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let found = by_node(text);
    for (domid, nodes) in &found {
        assert!(!nodes.is_empty());
        let total = nodes
            .values()
            .try_fold(0u64, |sum, pages| sum.checked_add(pages.0));
        let total = total.expect("more pages than can be counted");
        // Some line of Xen's own says that of it.
        let says = |line: &str| {
            line.starts_with("(XEN)")
                && line.contains(&format!("{domid} (total: "))
                && line.trim_end().ends_with("):")
        };
        assert!(text.lines().any(says), "{domid} has {total} pages");
    }
    // A guest's lines each carry its own mark.
    let guests: String = text.lines().map(|line| format!("(d1) {line}\n")).collect();
    assert!(by_node(&guests).is_empty());
    let whole: String = text.lines().map(|line| format!("{line}\n")).collect();
    assert_eq!(by_node(&format!("{guests}{whole}{guests}")), by_node(&whole));
});

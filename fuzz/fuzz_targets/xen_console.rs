//! Fuzzes the text on Xen's console after its debug key `u`. No guest's line there changes the page counts of domains. No sum of
//! counts overflows. Whatever the text is, Xen is not asked again soon.

#![no_main]

use std::collections::BTreeMap;

use homenode_units::Ns;
use homenode_xen::memory::by_node;
use homenode_xen::page_counts::PageCounts;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The agent reads the console in the same way.
    let text = String::from_utf8_lossy(bytes);
    let told = by_node(&text);

    let of_xen = text.lines().filter(|line| line.starts_with("(XEN)"));
    let of_xen: Vec<&str> = of_xen.collect();
    assert_eq!(by_node(&of_xen.join("\n")), told);
    // A guest repeats every line of Xen's.
    let said_again: String = text
        .lines()
        .map(|line| format!("{line}\n(d1) {line}\n"))
        .collect();
    assert_eq!(by_node(&said_again), told);

    // The counts of each domain can be added up. Domain 7 is asked for even if the console does not list it.
    let mut domains = BTreeMap::from([(7, 32_768)]);
    for (domid, of) in &told {
        let mut pages = of.values().map(|pages| pages.0);
        let pages = pages.try_fold(0, u64::checked_add);
        domains.insert(*domid, pages.expect("no more pages than can be counted"));
    }
    let mut counts = PageCounts::default();
    let mut at = Ns::from_secs(1000);
    for _ in 0..3 {
        counts.take_in(&text, &domains, (at, Ns::from_millis(100)));
        assert!(told.iter().all(|(domid, of)| counts.of(*domid) == Some(of)));
        at += Ns::from_secs(9);
        assert!(!counts.is_due(&domains, at));
    }
});

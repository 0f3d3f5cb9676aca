//! The memory of domains by node, as Xen's debug key `u` prints it on Xen's console. No other source has it for both PV and PVH
//! domains, counted page by page.
//!
//! ```text
//! (XEN) Memory location of each domain:
//! (XEN) Domain 3 (total: 32768):
//! (XEN)     Node 0: 0
//! (XEN)     Node 3: 32768
//! ```
//!
//! Guests write to that console too, but each of their lines begins with the guest's own mark `(d3)`. Only lines that Xen marks
//! as its own count. A ring that overflows loses its oldest lines, so a domain with missing lines is left out.

use std::collections::BTreeMap;

use homenode_units::{NodeId, NodeMap, Pages};

/// The debug key.
pub const KEY: &str = "u";
/// Xen's mark at the start of its own lines.
const OWN: &str = "(XEN)";

/// Returns the pages of each domain by node, from the console output that follows the key.
pub fn by_node(console: &str) -> BTreeMap<u32, NodeMap<Pages>> {
    let mut found: BTreeMap<u32, NodeMap<Pages>> = BTreeMap::new();
    let mut current: Option<(u32, u64)> = None;
    for line in console.lines().filter_map(own) {
        if let Some(header) = domain(line) {
            end(current.replace(header), &mut found);
            found.insert(header.0, NodeMap::new());
        } else if let (Some((domid, _)), Some((node, pages))) = (current, node(line)) {
            if let Some(of) = found.get_mut(&domid) {
                of.insert(node, pages);
            }
        } else {
            end(current.take(), &mut found);
        }
    }
    end(current, &mut found);
    found.retain(|_, of| !of.is_empty());
    found
}

/// Completes a domain's lines. Leaves the domain out if the pages on its nodes do not add up to its total.
fn end(of: Option<(u32, u64)>, found: &mut BTreeMap<u32, NodeMap<Pages>>) {
    let Some((domid, total)) = of else { return };
    let counts = found.get(&domid).map(|of| of.values().map(|pages| pages.0));
    let sum = counts.and_then(|mut counts| counts.try_fold(0u64, u64::checked_add));
    if sum != Some(total) {
        found.remove(&domid);
    }
}

/// Returns the text after Xen's own mark, and after the time that Xen adds if booted with `console_timestamps`.
fn own(line: &str) -> Option<&str> {
    let line = line.strip_prefix(OWN)?;
    let timed = line.trim_start().strip_prefix('[');
    match timed.and_then(|timed| timed.split_once("] ")) {
        Some((_, line)) => Some(line),
        None => Some(line),
    }
}

/// Parses `Domain 3 (total: 32768):`, or `d3 (total: 32768):`, which later versions print.
fn domain(line: &str) -> Option<(u32, u64)> {
    let line = line.trim();
    let rest = line.strip_prefix("Domain ").or_else(|| line.strip_prefix('d'))?;
    let (domid, rest) = rest.split_once(" (total: ")?;
    Some((domid.parse().ok()?, rest.strip_suffix("):")?.parse().ok()?))
}

/// Parses `    Node 3: 32768`.
fn node(line: &str) -> Option<(NodeId, Pages)> {
    let (node, pages) = line.trim().strip_prefix("Node ")?.split_once(": ")?;
    Some((NodeId(node.parse().ok()?), Pages(pages.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of Xen 4.17.7.
    const SAID: &str = "\
(XEN) 'u' pressed -> dumping numa info (now = 225604630259)
(XEN) NODE0 start->0 size->262144 free->97757
(XEN) CPU0 -> NODE0
(XEN) Memory location of each domain:
(XEN) Domain 0 (total: 163840):
(XEN)     Node 0: 163334
(XEN)     Node 1: 0
(XEN)     Node 2: 0
(XEN)     Node 3: 506
(XEN) Domain 1 (total: 32768):
(XEN)     Node 0: 0
(XEN)     Node 1: 0
(XEN)     Node 2: 0
(XEN)     Node 3: 32768
(XEN) Domain 2 (total: 32784):
(XEN)     Node 0: 0
(XEN)     Node 1: 0
(XEN)     Node 2: 32784
(XEN)     Node 3: 0
";

    fn pages(found: &BTreeMap<u32, NodeMap<Pages>>, domid: u32) -> Option<Vec<u64>> {
        found
            .get(&domid)
            .map(|of| of.values().map(|pages| pages.0).collect())
    }

    #[test]
    fn domains_and_nodes_are_read() {
        let found = by_node(SAID);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(pages(&found, 0), Some(vec![163_334, 0, 0, 506]));
        assert_eq!(pages(&found, 2), Some(vec![0, 0, 32_784, 0]));
    }

    #[test]
    fn what_a_guest_writes_to_the_console_counts_for_nothing() {
        let lie = "(d1) (XEN) Domain 2 (total: 5):\n(d1)     Node 3: 5\n(d1) Domain 7 (total: 0):\n";
        let before = by_node(SAID);
        assert_eq!(by_node(&format!("{lie}{SAID}{lie}")), before);
        // A guest that writes in the middle of Xen's output counts for nothing either.
        assert_eq!(
            by_node(&SAID.replace("(XEN) Domain 2", &format!("{lie}(XEN) Domain 2"))),
            before
        );
    }

    #[test]
    fn a_domain_of_which_lines_are_lost_is_not_told() {
        for lost in ["(XEN)     Node 3: 506\n", "(XEN) Domain 0 (total: 163840):\n"] {
            let found = by_node(&SAID.replace(lost, ""));
            assert_eq!(pages(&found, 0), None, "{lost}");
            assert!(found.contains_key(&1) && found.contains_key(&2));
        }
    }

    #[test]
    fn times_before_lines_are_skipped() {
        for time in [
            "[2026-11-26 02:41:52] ",
            "[2026-11-26 02:41:52.123] ",
            "[  225.604630] ",
            "[00000034abcdef12] ",
        ] {
            assert_eq!(
                by_node(&SAID.replace("(XEN) ", &format!("(XEN) {time}"))),
                by_node(SAID),
                "{time}"
            );
            let lie = format!("(d1) {time}(XEN) Domain 2 (total: 5):\n(d1) {time}    Node 3: 5\n");
            assert_eq!(by_node(&(lie.clone() + SAID + &lie)), by_node(SAID));
        }
    }

    #[test]
    fn figures_that_are_too_large_are_no_pages() {
        let most = u64::MAX;
        let text = format!("(XEN) Domain 1 (total: 1):\n(XEN) Node 0: {most}\n(XEN) Node 1: 2\n");
        assert_eq!(pages(&by_node(&text), 1), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "(\\(XEN\\)|\\(d1\\)| |Domain|Node|d|[0-9]{1,30}|:|total|\\(|\\)|\n){0,60}") {
            by_node(&text);
        }
    }
}

//! Formats figures for people.

use homenode_units::{NodeSet, Ns};

/// Returns the home nodes of a VM, or `none` if it is not placed.
pub fn or_none(home: Option<&NodeSet>) -> String {
    home.map_or_else(|| "none".to_owned(), ToString::to_string)
}

/// Formats a share as percent.
pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Formats a time span in seconds, minutes or hours.
pub fn span(time: Ns) -> String {
    match time.as_secs_f64() {
        s if s < 120.0 => format!("{s:.0}s"),
        s if s < 7200.0 => format!("{:.0}min", s / 60.0),
        s => format!("{:.1}h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short() {
        let secs = [0, 119, 120, 7199, 7200].map(|secs| span(Ns::from_secs(secs)));
        assert_eq!(secs, ["0s", "119s", "2min", "120min", "2.0h"]);
    }
}

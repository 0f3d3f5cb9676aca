//! Formats events as lines of the page.

use homenode_api::answer::Happened;
use ratatui::text::Line;

use crate::table::wrapped;
use crate::top::view::View;

/// Width of the time before an event's text, such as `03:12:07 `.
const TIME_WIDTH: usize = 9;

/// Returns an event as lines of this width.
pub(super) fn event(view: &View, wall_ns: i64, happened: &Happened, width: usize) -> Vec<Line<'static>> {
    let at = wall_ns.saturating_sub_unsigned(happened.age_ns.0);
    let time = (view.clock)(at).format("%H:%M:%S");
    let again = match happened.count {
        0 | 1 => String::new(),
        count => format!(" ({count} times)"),
    };
    let lines = wrapped(&format!("{time} {}{again}", happened.text), width, TIME_WIDTH);
    lines.into_iter().map(Line::raw).collect()
}

/// Returns the last events that fit, each of them whole. If even the last one does not fit, returns as many of its lines as fit.
pub(super) fn last_events<'a>(
    view: &View,
    wall_ns: i64,
    events: impl DoubleEndedIterator<Item = &'a Happened>,
    (width, room): (usize, usize),
) -> Vec<Line<'static>> {
    let mut shown: Vec<Vec<Line<'static>>> = Vec::new();
    let mut left = room;
    for happened in events.rev() {
        let mut lines = event(view, wall_ns, happened, width);
        if shown.is_empty() {
            lines.truncate(room);
        }
        if lines.len() > left {
            break;
        }
        left -= lines.len();
        shown.push(lines);
    }
    shown.into_iter().rev().flatten().collect()
}

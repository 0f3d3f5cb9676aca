//! Lays out the page as lines, from the view alone. It looks alike for present and past, on a terminal and in a pipe.
//!
//! ```text
//!   which host, which time
//!   nodes, and links beside them where there is room: a third of the height at most
//!   ── VMs ──
//!   a row each: all, or as many as fit, with the chosen one among them
//!   ── events ──
//!   the last ones, whole; beside the VMs where there is room for that
//!   keys
//! ```

use homenode_api::answer::Happened;
use homenode_control::{Status, VmStatus};
use homenode_host::CountedBy;
use ratatui::Frame;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::figures::span;
use crate::limits::{self, Level};
use crate::pictures::Picture;
use crate::printable::OneLine;
use crate::table::{Colours, UNBOUNDED, cut, width_of, wrapped};
use crate::top::events::{event, last_events};
use crate::top::view::{Page, Prompt, View, When};
use crate::top::{host, vm_page, vms};

/// The smallest terminal on which the page is shown.
pub(super) const SMALLEST: (u16, u16) = (40, 10);
/// Number of blanks between VMs and the events beside them.
const BETWEEN: usize = 3;
/// Smallest width of events that are shown beside VMs.
const EVENTS_WIDTH_MIN: usize = 60;
/// Width of the help.
const HELP_WIDTH: usize = 80;

/// Draws the page.
pub(crate) fn draw(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    let (width, height) = (area.width, area.height);
    let lines = if width < SMALLEST.0 || height < SMALLEST.1 {
        let (least_width, least_height) = SMALLEST;
        let text = format!(
            "{width}x{height} is too small: homenode top needs {least_width}x{least_height}. q quits"
        );
        let lines = wrapped(&text, usize::from(width.max(1)), 0);
        lines.into_iter().map(Line::raw).collect()
    } else {
        page(view, usize::from(width), usize::from(height))
    };
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns the page, at most `width` wide and exactly `height` high.
pub(super) fn page(view: &View, width: usize, height: usize) -> Vec<Line<'static>> {
    let mut lines = vec![title(view, width)];
    if let Some(message) = &view.message {
        let style = view.colours.style(Level::Bad);
        let message = wrapped(message, width, 2).into_iter().take(2);
        lines.extend(message.map(|line| Line::styled(line, style)));
    }
    let room = height.saturating_sub(lines.len() + 1);
    let body = match (view.page, &view.picture) {
        (Page::Help, _) => scrolled(help_lines(), view.scroll, room),
        (_, None) => vec![Line::raw("no data yet")],
        (Page::Vm, Some(picture)) => scrolled(vm_page::lines(view, picture, width), view.scroll, room),
        (Page::List, Some(picture)) => list(view, picture, width, room),
    };
    lines.extend(body);
    lines.resize(height.saturating_sub(1), Line::default());
    lines.push(footer(view, width));
    lines
}

/// Returns the lines from line `scroll` on that fit into `room`. Does not scroll past the end.
fn scrolled(mut lines: Vec<Line<'static>>, scroll: usize, room: usize) -> Vec<Line<'static>> {
    let count = lines.len();
    let above = scroll.min(count.saturating_sub(room));
    lines.drain(..above);
    if lines.len() > room {
        lines.truncate(room.saturating_sub(1));
        let left = count - above - lines.len();
        lines.push(dim(format!("{left} more lines: ↓")));
    }
    lines
}

fn bold(text: impl Into<String>) -> Span<'static> {
    Span::styled(text.into(), Style::new().add_modifier(Modifier::BOLD))
}

fn dim(text: impl Into<String>) -> Line<'static> {
    // The style is set on the text: a style of the whole line would be lost if the line is joined with another.
    Line::from(Span::styled(
        text.into(),
        Style::new().add_modifier(Modifier::DIM),
    ))
}

/// Returns a horizontal rule, with the heading of what is below it.
fn rule(text: &str, width: usize) -> Line<'static> {
    let text = cut(&format!("── {text} "), width);
    let rest = "─".repeat(width.saturating_sub(width_of(&text)).min(400));
    dim(text + &rest)
}

fn title(view: &View, width: usize) -> Line<'static> {
    let Some(picture) = &view.picture else {
        return Line::from(bold("homenode top"));
    };
    let stamp = |wall_ns| (view.clock)(wall_ns).format("%Y-%m-%d %H:%M:%S").to_string();
    let short = |wall_ns| (view.clock)(wall_ns).format("%m-%d %H:%M").to_string();
    let what = match view.when {
        When::Now => "now".to_owned(),
        When::Then {
            span: (from, to),
            is_playing,
        } => {
            let state = if is_playing { "playing" } else { "paused" };
            format!("replay ({state}), {} to {}", short(from), short(to))
        }
    };
    let status = &picture.overview.status;
    let cpus: usize = status.nodes.iter().map(|node| node.cpus).sum();
    let mut host = format!("{} nodes, {cpus} CPUs", status.nodes.len());
    if let Some(left) = status.paused_for_ns {
        host += &format!("  agent paused for another {}", span(left));
    }
    if let Some(balancing) = status.kernel.numa_balancing {
        host += &format!("  NUMA balancing {balancing}");
    }
    let left = stamp(picture.wall_ns);
    let rest = cut(
        &format!("  {what}  {host}"),
        width.saturating_sub(width_of(&left)),
    );
    Line::from(vec![bold(left), Span::raw(rest)])
}

fn footer(view: &View, width: usize) -> Line<'static> {
    let text = match &view.prompt {
        Some(Prompt::Filter(_)) => format!(
            "filter: {}▏  Enter keeps it, Esc cancels",
            OneLine(&view.choice.filter)
        ),
        Some(Prompt::Jump(text)) => format!("go to (03:12, 2026-11-23 03:12, 15m): {}▏", OneLine(text)),
        None => {
            let keys: &[&str] = match (view.page, view.when) {
                (Page::List, When::Now) => &[
                    "q quit",
                    "? help",
                    "↑↓ Enter a VM",
                    "/ filter",
                    "< > sort",
                    "r reverse",
                    "← back in time",
                ],
                (Page::List, When::Then { .. }) => &[
                    "q quit",
                    "? help",
                    "← → step",
                    "Space play",
                    "g go to",
                    "n now",
                    "↑↓ Enter a VM",
                    "/ filter",
                    "< > sort",
                ],
                (_, When::Now) => &["q quit", "Esc back", "↑↓ scroll", "← back in time"],
                (_, When::Then { .. }) => &[
                    "q quit",
                    "Esc back",
                    "← → step",
                    "Space play",
                    "g go to",
                    "n now",
                    "↑↓ scroll",
                ],
            };
            let mut text = String::new();
            for key in keys {
                let more = if text.is_empty() {
                    (*key).to_owned()
                } else {
                    format!("   {key}")
                };
                if width_of(&text) + width_of(&more) <= width {
                    text += &more;
                }
            }
            text
        }
    };
    dim(cut(&text, width))
}

/// Returns nodes, VMs and events as lines.
fn list(view: &View, picture: &Picture, width: usize, height: usize) -> Vec<Line<'static>> {
    let status = &picture.overview.status;
    let mut lines = host::lines(status, (width, height / 3), view.colours);
    let room = height.saturating_sub(lines.len());
    let events_min = (height / 5).max(2);
    // Besides the rows there are two rules and the line of column headings.
    let rows_max = room.saturating_sub(events_min + 3).max(1);
    let events = picture.overview.events.iter();
    let table = vms::table(&view.vms(), width);
    let beside = width.saturating_sub(table.width() + BETWEEN);
    if beside >= EVENTS_WIDTH_MIN {
        // On both sides the first line is a rule; on the left the second has the column headings.
        let left = vm_lines(view, status, table.width(), room.saturating_sub(2));
        let mut right = vec![rule("events", beside)];
        right.extend(last_events(
            view,
            picture.wall_ns,
            events,
            (beside, room.saturating_sub(1)),
        ));
        lines.extend(side_by_side(left, right, table.width() + BETWEEN));
        return lines;
    }
    lines.extend(vm_lines(view, status, width, rows_max));
    lines.push(rule("events", width));
    let room = height.saturating_sub(lines.len());
    lines.extend(last_events(view, picture.wall_ns, events, (width, room)));
    lines
}

/// Joins two columns of lines. The right one begins at column `at`.
fn side_by_side(left: Vec<Line<'static>>, right: Vec<Line<'static>>, at: usize) -> Vec<Line<'static>> {
    let count = left.len().max(right.len());
    let (mut left, mut right) = (left.into_iter(), right.into_iter());
    let joined = |_| {
        let mut line = left.next().unwrap_or_default();
        let pad = at.saturating_sub(line.width());
        line.push_span(Span::raw(" ".repeat(pad)));
        line.extend(right.next().unwrap_or_default().spans);
        line
    };
    (0..count).map(joined).collect()
}

fn vm_lines(view: &View, status: &Status, width: usize, rows_max: usize) -> Vec<Line<'static>> {
    let chosen = view.vms();
    let count = chosen.len();
    let row = view.chosen_row(&chosen);
    let first = row
        .unwrap_or(0)
        .saturating_sub(rows_max / 2)
        .min(count.saturating_sub(rows_max));
    let last = count.min(first + rows_max);
    let mut lines = vec![rule(&about_vms(view, status, (first, last, count)), width)];
    let table = vms::table(&chosen, width);
    lines.push(table.header());
    for number in first..last {
        let line = table.row(number, view.colours);
        lines.push(match row == Some(number) {
            true => line.patch_style(Style::new().add_modifier(Modifier::REVERSED)),
            false => line,
        });
    }
    lines
}

/// Describes which VMs are shown, how they are sorted and filtered, and whether a model counts their LLC misses.
fn about_vms(view: &View, status: &Status, (first, last, count): (usize, usize, usize)) -> String {
    let choice = &view.choice;
    let mut text = match last - first == count {
        true if count == 1 => "1 VM".to_owned(),
        true => format!("{count} VMs"),
        false => format!("VMs {} to {last} of {count}", first + 1),
    };
    text += &format!(" by {}", choice.sort.name());
    if choice.is_reversed {
        text += ", reversed";
    }
    if !choice.filter.is_empty() {
        text += &format!(
            ", matching `{}`, of {}",
            OneLine(&choice.filter),
            status.vms.len()
        );
    }
    if status
        .vms
        .iter()
        .any(|vm| vm.counted_by == Some(CountedBy::Model))
    {
        text += "; LLC misses and locality come from a model";
    }
    text
}

/// Returns the help: keys, limits, and what is left out if there is no room.
fn help_lines() -> Vec<Line<'static>> {
    help().lines().map(|line| Line::raw(line.to_owned())).collect()
}

/// Returns the help as text, which `homenode top --help` also shows.
pub fn help() -> String {
    let limits: String = limits::sentences()
        .iter()
        .map(|line| format!("  {line}\n"))
        .collect();
    let dropped = wrapped(&format!("  {}.", vms::dropped_in_order()), HELP_WIDTH, 2).join("\n");
    format!(
        "\
Keys:
  q quit   ? help   Esc back, or clear the filter
  ↑ ↓ PgUp PgDn     choose a VM, or scroll; Enter opens its page
  /                 show only VMs whose name contains a text
  < >               sort by the previous or next column; r reverses the order
  ← →               a period back or forward in the history; [ ] a minute
  Home End          the first or last recorded period
  Space             play or pause        g go to a time        n back to now

Yellow past the first limit, red past the second (with NO_COLOR: bold, and
underlined):
{limits}
Columns that do not fit are left out, in this order:
{dropped}
Empty columns are not shown.
"
    )
}

/// Returns the page as plain text, for pipes and for `homenode run`: nodes, VMs, then these events.
pub fn plain(view: &View, picture: &Picture, events: &[Happened], width: Option<usize>) -> String {
    let wide = width.unwrap_or(UNBOUNDED);
    let status = &picture.overview.status;
    let mut lines = vec![title(view, wide)];
    lines.extend(host::lines(status, (wide, usize::MAX), view.colours));
    lines.push(Line::default());
    let shown = view.vms();
    let table = vms::table(&shown, wide);
    lines.push(table.header());
    lines.extend((0..shown.len()).map(|row| table.row(row, view.colours)));
    lines.push(Line::default());
    lines.extend(
        events
            .iter()
            .flat_map(|happened| event(view, picture.wall_ns, happened, wide)),
    );
    text_of(&lines)
}

/// Returns nodes and VMs, within a terminal of this size. `homenode run` redraws this picture below its events.
pub fn glance(status: &Status, width: usize, height: usize) -> String {
    let mut lines = vec![Line::default()];
    lines.extend(host::lines(status, (width, height / 3), Colours::Off));
    lines.push(Line::default());
    let choice = vms::Choice::default();
    let mut shown: Vec<&VmStatus> = status.vms.iter().collect();
    // Leaves two lines: for the column headings, and for the cursor at the bottom.
    let rows = height.saturating_sub(lines.len() + 2).max(1);
    let left_out = shown
        .len()
        .checked_sub(rows)
        .filter(|more| *more > 0)
        .map(|more| more + 1);
    if let Some(more) = left_out {
        shown = choice.of(status);
        shown.truncate(status.vms.len() - more);
    }
    let table = vms::table(&shown, width);
    lines.push(table.header());
    lines.extend((0..shown.len()).map(|row| table.row(row, Colours::Off)));
    if let Some(more) = left_out {
        let text = format!("{more} more VMs, none worse than these: see `homenode top`");
        lines.push(Line::raw(cut(&text, width)));
    }
    text_of(&lines)
}

/// Returns lines as text, without trailing blanks.
pub(crate) fn text_of(lines: &[Line<'_>]) -> String {
    lines
        .iter()
        .map(|line| format!("{}\n", line.to_string().trim_end()))
        .collect()
}

//! Lines of styled text: tables that fit into a width, and word wrapping.
//!
//! A table that is too wide first loses the second space between columns, and then columns, the highest `rank` first. Cells that
//! may be cut are then cut to the remaining width, and end in `…`.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use crate::limits::Level;
use crate::printable::OneLine;

/// Width for a table of any width.
pub const UNBOUNDED: usize = usize::MAX;
/// Fewest characters that are left of a cut cell.
const CUT_LEAST: usize = 12;

/// Whether marked figures are shown in colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    /// Marked figures are yellow or red.
    On,
    /// Marked figures are bold, or bold and underlined (`NO_COLOR`).
    Off,
}

impl Colours {
    /// Returns the choice that the user's environment makes.
    pub fn of_environment() -> Colours {
        // https://no-color.org requires that the variable is set and not empty.
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if is_plain { Colours::Off } else { Colours::On }
    }

    /// Returns the style for a figure of this level.
    pub fn style(self, level: Level) -> Style {
        let plain = Style::new();
        match (self, level) {
            (_, Level::Fine) => plain,
            (Colours::On, Level::Warn) => plain.fg(Color::Yellow),
            (Colours::On, Level::Bad) => plain.fg(Color::Red).add_modifier(Modifier::BOLD),
            (Colours::Off, Level::Warn) => plain.add_modifier(Modifier::BOLD),
            (Colours::Off, Level::Bad) => plain.add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        }
    }
}

/// A cell of a table: one line of text, with terminal control characters escaped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    level: Level,
}

impl Cell {
    /// Returns a cell with this text, marked for this level.
    pub fn new(text: impl AsRef<str>, level: Level) -> Cell {
        Cell {
            text: OneLine(text.as_ref()).to_string(),
            level,
        }
    }

    /// Returns a cell with this text, without a mark.
    pub fn plain(text: impl AsRef<str>) -> Cell {
        Cell::new(text, Level::Fine)
    }

    /// Returns a cell for a value, or `-` if the value is unknown.
    pub fn or_dash<T>(value: Option<T>, of: impl FnOnce(T) -> Cell) -> Cell {
        value.map_or_else(|| Cell::plain("-"), of)
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() || self.text == "-"
    }
}

/// How a column of a table is laid out.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Order in which columns are left out to save width: the highest rank first, rank 0 never.
    pub rank: u8,
    /// How the column's cells are aligned.
    pub align: Align,
    /// Whether the column is shown even if all cells are empty.
    pub is_shown_empty: bool,
}

/// Alignment of a cell's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left-aligned; cut if there is no room.
    Left,
    /// Right-aligned; never cut.
    Right,
}

/// A column and its cells.
#[derive(Clone, Debug)]
pub struct Column {
    /// The column's heading.
    pub head: String,
    /// How the column is laid out.
    pub shape: Shape,
    /// The cells, one for each row.
    pub cells: Vec<Cell>,
}

/// Which columns are shown, and how wide each is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    gap: usize,
    /// Index and width of each column shown.
    columns: Vec<(usize, usize)>,
}

/// A table that is laid out for a width.
pub struct Table {
    columns: Vec<Column>,
    layout: Layout,
}

impl Table {
    /// Lays columns out. Their widths depend on all rows, even on those that will not be shown.
    pub fn new(columns: Vec<Column>, width: usize) -> Table {
        let layout = lay_out(&columns, width);
        Table { columns, layout }
    }

    /// Returns the table's width.
    pub fn width(&self) -> usize {
        let widths: usize = self.layout.columns.iter().map(|(_, width)| width).sum();
        widths + self.layout.gap * self.layout.columns.len().saturating_sub(1)
    }

    /// Returns the headings of the columns as a line.
    pub fn header(&self) -> Line<'static> {
        let style = Style::new().add_modifier(Modifier::BOLD);
        self.line(|column| (column.head.clone(), style))
    }

    /// Returns the row with this number as a line.
    pub fn row(&self, number: usize, colours: Colours) -> Line<'static> {
        self.line(|column| {
            let cell = column.cells.get(number).cloned().unwrap_or_default();
            (cell.text, colours.style(cell.level))
        })
    }

    fn line(&self, of: impl Fn(&Column) -> (String, Style)) -> Line<'static> {
        let mut spans = Vec::new();
        for (at, (number, width)) in self.layout.columns.iter().enumerate() {
            let column = &self.columns[*number];
            let (text, style) = of(column);
            let text = cut(&text, *width);
            let gap = " ".repeat(if at == 0 { 0 } else { self.layout.gap });
            let pad = " ".repeat(width.saturating_sub(width_of(&text)));
            let (before, after) = match column.shape.align {
                Align::Left => (gap, pad),
                Align::Right => (gap + &pad, String::new()),
            };
            // Styles only the text, because underlined blanks would be visible.
            spans.extend([Span::raw(before), Span::styled(text, style), Span::raw(after)]);
        }
        spans.retain(|span| !span.content.is_empty());
        Line::from(spans)
    }
}

fn lay_out(columns: &[Column], width: usize) -> Layout {
    let natural = |column: &Column| {
        let cells = column.cells.iter().map(|cell| width_of(&cell.text));
        cells.max().unwrap_or(0).max(width_of(&column.head))
    };
    let is_shown =
        |column: &Column| column.shape.is_shown_empty || column.cells.iter().any(|cell| !cell.is_empty());
    let mut shown: Vec<(usize, usize, usize)> = Vec::new();
    for (number, column) in columns.iter().enumerate().filter(|(_, column)| is_shown(column)) {
        let whole = natural(column);
        let least = match column.shape.align {
            Align::Left => whole.min(CUT_LEAST),
            Align::Right => whole,
        };
        shown.push((number, least, whole));
    }
    let needed = |shown: &[(usize, usize, usize)], gap: usize| {
        shown.iter().map(|(_, least, _)| least).sum::<usize>() + gap * shown.len().saturating_sub(1)
    };
    let gap = if needed(&shown, 2) <= width { 2 } else { 1 };
    while needed(&shown, gap) > width {
        let dropped = (0..shown.len()).max_by_key(|at| columns[shown[*at].0].shape.rank);
        match dropped.filter(|at| columns[shown[*at].0].shape.rank > 0) {
            Some(at) => drop(shown.remove(at)),
            None => break,
        }
    }
    let mut left = width.saturating_sub(needed(&shown, gap));
    let widths = shown.iter().map(|(number, least, whole)| {
        let more = (whole - least).min(left);
        left -= more;
        (*number, least + more)
    });
    Layout {
        gap,
        columns: widths.collect(),
    }
}

/// Returns the number of terminal cells that a text takes.
pub fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// Cuts a text to a width; a text that was cut ends in `…`.
pub fn cut(text: &str, width: usize) -> String {
    if width_of(text) <= width {
        return text.to_owned();
    }
    let mut short = String::new();
    for c in text.chars() {
        short.push(c);
        if width_of(&short) >= width {
            short.pop();
            break;
        }
    }
    if width > 0 {
        short.push('…');
    }
    short
}

/// Wraps a text to this width, at words if possible. All lines after the first are indented.
pub fn wrapped(text: &str, width: usize, indent: usize) -> Vec<String> {
    let text = OneLine(text).to_string();
    if width == UNBOUNDED {
        return vec![text];
    }
    let indent = if indent + CUT_LEAST > width { 0 } else { indent };
    let mut lines = vec![String::new()];
    // Blanks before the first word are kept, because `split` yields empty words for them.
    for word in text.split(' ') {
        let mut word = word;
        loop {
            let begun = lines.last().map_or(0, |line| width_of(line));
            let is_first = lines.last().is_none_or(|line| line.trim().is_empty());
            let gap = usize::from(!is_first);
            let Some(line) = lines.last_mut() else { break };
            if begun + gap + width_of(word) <= width {
                line.push_str(if is_first { "" } else { " " });
                line.push_str(word);
                break;
            }
            if is_first {
                // The word is longer than a line, so it is split.
                let head = head_of(word, width.saturating_sub(begun).max(1));
                line.push_str(head);
                word = &word[head.len()..];
            }
            lines.push(" ".repeat(indent));
        }
    }
    lines
}

/// Returns the longest prefix of a text that fits into a width; at least one character.
fn head_of(text: &str, width: usize) -> &str {
    let mut end = text.chars().next().map_or(0, char::len_utf8);
    for (at, c) in text.char_indices() {
        let next = at + c.len_utf8();
        if width_of(&text[..next]) > width {
            break;
        }
        end = end.max(next);
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(head: &'static str, rank: u8, align: Align, cell: &str) -> Column {
        let shape = Shape {
            rank,
            align,
            is_shown_empty: false,
        };
        Column {
            head: head.into(),
            shape,
            cells: vec![Cell::plain(cell)],
        }
    }

    fn table(width: usize) -> String {
        let columns = vec![
            column("VM", 0, Align::Left, "a-long-name-of-a-vm"),
            column("CPUs", 1, Align::Right, "12.5"),
            column("memory", 2, Align::Right, "4.0G"),
            column("quota", 1, Align::Right, "-"),
        ];
        Table::new(columns, width).row(0, Colours::On).to_string()
    }

    #[test]
    fn room_is_saved_between_columns_then_on_names_then_on_columns_by_rank() {
        assert_eq!(table(UNBOUNDED), "a-long-name-of-a-vm  12.5    4.0G");
        assert_eq!(table(26), "a-long-name…  12.5    4.0G");
        assert_eq!(table(24), "a-long-name… 12.5   4.0G");
        assert_eq!(table(20), "a-long-name-of… 12.5");
        assert_eq!(table(13), "a-long-name-…");
    }

    #[test]
    fn wide_characters_take_two_cells_and_nothing_is_wider_than_asked() {
        assert_eq!(cut("数据库服务器", 5), "数据…");
        assert_eq!(wrapped("one two three four", 14, 2), ["one two three", "  four"]);
        let long = wrapped(&"数".repeat(30), 20, 2);
        assert!(long.iter().all(|line| width_of(line) <= 20), "{long:?}");
        assert_eq!(long.concat().replace(' ', ""), "数".repeat(30));
    }

    #[test]
    fn what_a_terminal_obeys_is_shown_as_what_it_is() {
        assert_eq!(Cell::plain("a\u{1b}[2J\nb").text, "a\\u{1b}[2J\\nb");
        assert!(wrapped("a\u{1b}[2J", 40, 0).concat().is_ascii());
    }
}

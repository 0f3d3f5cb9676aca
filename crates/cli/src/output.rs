//! What commands print. `run` shows a picture on a terminal that is redrawn below the events, in a pipe the events alone, with
//! `--json` one object per line.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::{ExitCode, exit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use homenode_agent::{Notice, Show};
use homenode_api::document::document;
use homenode_control::{Epoch, Event};
use homenode_host::CountedBy;
use homenode_units::{NodeSet, Ns};
use serde::Serialize;
use serde_json::{Value, json};

use crate::backlog::{Backlog, Dropped, Entry};
use crate::journald::Journal;
use crate::printable::{self, Lines, OneLine};
use crate::quiet::Quiet;
use crate::record::now_ns;
use crate::wall;

/// Prints a line, or several, with nothing in it that a terminal obeys. As `println!`, but a reader that has gone (`| head`) ends
/// the command in silence, and a full disk with a sentence, where that panics.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::output::print(format_args!("{}\n", $crate::printable::Lines(format_args!($($arg)*))))
    };
}

/// Says on standard error what is wrong. As `eprintln!`, with nothing in it that a terminal obeys.
macro_rules! complain {
    ($($arg:tt)*) => { eprintln!("{}", $crate::printable::Sentence(&format!($($arg)*))) };
}

/// Whether something could not be written, other than for want of a reader.
static IS_CUT_SHORT: AtomicBool = AtomicBool::new(false);

/// Prints text as it is. Ends the process where it cannot.
pub fn print(text: fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(text) {
        unwritable(&error);
        exit(i32::from(IS_CUT_SHORT.load(Ordering::Relaxed)));
    }
}

/// The status of a command that ends: what it printed must have come to where it was to go.
pub fn flushed(code: ExitCode) -> ExitCode {
    if let Err(error) = std::io::stdout().flush() {
        unwritable(&error);
    }
    match IS_CUT_SHORT.load(Ordering::Relaxed) {
        true => ExitCode::FAILURE,
        false => code,
    }
}

fn unwritable(error: &std::io::Error) {
    if error.kind() != ErrorKind::BrokenPipe && !IS_CUT_SHORT.swap(true, Ordering::Relaxed) {
        // If this cannot be said either, the status says it.
        let _ = writeln!(
            std::io::stderr(),
            "homenode: cannot write to standard output: {error}"
        );
    }
}

/// Prints what programs read, as a document of this kind.
///
/// # Errors
/// What cannot be JSON.
pub fn print_json(kind: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let document = document(kind, serde_json::to_value(value)?);
    let text = serde_json::to_string_pretty(&document)?;
    print(format_args!("{}\n", printable::json(&text)));
    Ok(())
}

/// How to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Events scroll, tables stay below them.
    Terminal,
    /// Events as lines.
    Lines,
    /// JSON objects as lines.
    Json,
}

/// Where a run is shown.
pub struct Output {
    style: Style,
    to: To,
    /// What was said of what happens, and by which clock.
    quiet: Quiet,
    clock: Clock,
    /// The host's clock at the last epoch.
    at: Ns,
    /// Where lines are the journal's.
    journal: Option<Journal>,
}

/// By which clock events are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Seconds since a simulation began.
    Simulated,
    /// The wall clock, in the host's own zone.
    Wall,
}

impl Clock {
    /// What stands before an event.
    fn stamp(self, at: Ns) -> String {
        match self {
            Clock::Simulated => format!("[{:8.1}s]", at.as_secs_f64()),
            Clock::Wall => wall::local(now_ns()).format("[%Y-%m-%d %H:%M:%S]").to_string(),
        }
    }
}

/// How what is shown comes to standard output.
enum To {
    /// At once, however long that takes: nothing is lost.
    Here { screen: Screen, closed: bool },
    /// By a thread, from a backlog that drops what is too much.
    Thread(Backlog),
}

impl Output {
    /// JSON if asked for, else what standard output is.
    pub fn new(json: bool) -> Output {
        let style = match (json, std::io::stdout().is_terminal()) {
            (true, _) => Style::Json,
            (false, true) => Style::Terminal,
            (false, false) => Style::Lines,
        };
        let screen = Screen::new(style);
        Output {
            style,
            to: To::Here {
                screen,
                closed: false,
            },
            quiet: Quiet::default(),
            clock: Clock::Simulated,
            at: Ns::ZERO,
            journal: (style == Style::Lines).then(Journal::of_output).flatten(),
        }
    }

    /// The same by another clock.
    pub fn by(self, clock: Clock) -> Output {
        Output { clock, ..self }
    }

    /// Says what is counted and not said yet: no epoch comes any more.
    pub fn end_of_epochs(&mut self) {
        let said = self.quiet.end(self.at);
        for line in self.stamped(said) {
            self.text(format_args!("{line}"));
        }
    }

    /// What is to be said in lines of events; the journal takes them with what they can be found by.
    fn lines_to_say(&mut self, events: &[Event]) -> Vec<String> {
        let Some(journal) = &self.journal else {
            return self.quiet.of(self.at, events);
        };
        let said = self.quiet.with_events(self.at, events).into_iter();
        said.filter(|(text, event)| !journal.takes(&OneLine(text).to_string(), *event))
            .map(|(text, _)| text)
            .collect()
    }

    fn stamped(&self, said: Vec<String>) -> impl Iterator<Item = String> + use<> {
        let stamp = self.clock.stamp(self.at);
        said.into_iter()
            .map(move |text| format!("{stamp} {}", OneLine(&text)))
    }

    /// The same, but it never waits for its reader.
    ///
    /// # Errors
    /// When there can be no thread that does.
    pub fn unwaiting(self) -> anyhow::Result<Output> {
        // Not the library's own: whoever holds its lock while the reader sleeps keeps the process from ending.
        let mut file = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 0)?);
        let mut screen = Screen::new(self.style);
        let backlog = Backlog::start(move |dropped, entry| {
            let written = file.write_all(screen.render(dropped, entry).as_bytes());
            written.inspect_err(unwritable)
        });
        let to = To::Thread(backlog.context("cannot start the thread that writes what is shown")?);
        Ok(Output { to, ..self })
    }

    /// Gives a reader so long to take what is left; whether all was taken, or cannot be.
    pub fn drain(&self, patience: Duration) -> bool {
        match &self.to {
            To::Here { .. } => true,
            To::Thread(backlog) => backlog.drain(patience),
        }
    }

    /// How it shows.
    pub fn style(&self) -> Style {
        self.style
    }

    /// Says lines to people: tables, and what stands around them.
    pub fn text(&mut self, text: fmt::Arguments<'_>) {
        if self.style != Style::Json {
            self.write(Entry::Lines(format!("{}\n", Lines(text))));
        }
    }

    fn write(&mut self, entry: Entry) {
        match &mut self.to {
            To::Thread(backlog) => backlog.push(entry),
            To::Here { screen, closed } => {
                let text = screen.render(Dropped::default(), &entry);
                let mut out = std::io::stdout().lock();
                if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                    *closed = true;
                    unwritable(&error);
                }
            }
        }
    }
}

impl Show for Output {
    fn object(&mut self, kind: &str, object: Value) {
        if self.style == Style::Json {
            self.write(Entry::Lines(object_line(kind, object)));
        }
    }

    fn line(&mut self, text: &str) {
        self.text(format_args!("{}", OneLine(text)));
    }

    fn epoch(&mut self, epoch: &Epoch) {
        self.at = epoch.status.at_ns;
        let events = match self.style {
            Style::Json => object_line("epoch", json!(epoch)),
            Style::Terminal | Style::Lines => {
                let said = self.lines_to_say(&epoch.events);
                self.stamped(said).map(|line| format!("{line}\n")).collect()
            }
        };
        let picture = match self.style {
            Style::Terminal => {
                let (width, height) = crate::top::terminal_size();
                crate::top::screen::glance(&epoch.status, width, height)
            }
            Style::Json | Style::Lines => String::new(),
        };
        if !(events.is_empty() && picture.is_empty()) {
            self.write(Entry::Epoch { events, picture });
        }
    }

    fn is_closed(&self) -> bool {
        match &self.to {
            To::Here { closed, .. } => *closed,
            To::Thread(backlog) => backlog.is_closed(),
        }
    }
}

/// A document of a run, on a line of its own.
fn object_line(kind: &str, mut object: Value) -> String {
    if let Some(map) = object.as_object_mut() {
        map.insert("type".into(), kind.into());
    }
    format!("{}\n", printable::json(&document(kind, object).to_string()))
}

/// What is on the terminal, and what comes to it next.
struct Screen {
    style: Style,
    /// Widths of the lines of the picture that is on the terminal now.
    drawn: Vec<usize>,
}

impl Screen {
    fn new(style: Style) -> Screen {
        Screen {
            style,
            drawn: Vec::new(),
        }
    }

    /// What to write to show an entry, after saying what was dropped before it.
    fn render(&mut self, dropped: Dropped, entry: &Entry) -> String {
        let erase = erase(&std::mem::take(&mut self.drawn), crate::top::terminal_size().0);
        let missing = match (dropped == Dropped::default(), self.style) {
            (true, _) => String::new(),
            (false, Style::Json) => object_line("notice", json!(Notice::new(&dropped.sentence()))),
            (false, _) => format!("{}\n", dropped.sentence()),
        };
        match entry {
            Entry::Lines(lines) => format!("{erase}{missing}{lines}"),
            Entry::Epoch { events, picture } => {
                self.drawn = picture.lines().map(crate::top::width_of).collect();
                format!("{erase}{missing}{events}{picture}")
            }
        }
    }
}

/// What takes lines of these widths off a terminal of this one, which may have become narrower since.
fn erase(drawn: &[usize], width: usize) -> String {
    match drawn
        .iter()
        .map(|line| line.div_ceil(width.max(1)).max(1))
        .sum::<usize>()
    {
        0 => String::new(),
        lines => format!("\x1b[{lines}A\x1b[J"),
    }
}

/// A table in the project's look: right-aligned but for the first column. Whatever a cell holds is on one line of it.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row.iter().map(|cell| OneLine(cell).to_string()));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// `-` for what is not known.
pub fn or_dash<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// Home nodes of a VM, or that it is where the kernel puts it.
pub fn or_free(home: Option<&NodeSet>) -> String {
    home.map_or_else(|| "free".to_owned(), ToString::to_string)
}

/// A share as percent.
pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// A time in milliseconds.
pub fn millis(ms: f64) -> String {
    format!("{ms:.1}ms")
}

/// A figure that rests on counters; says so where a model counts them.
pub fn counted(figure: String, by: Option<CountedBy>) -> String {
    match by {
        Some(CountedBy::Model) => format!("{figure} modelled"),
        Some(CountedBy::Hardware) | None => figure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(events: &str) -> Entry {
        Entry::Epoch {
            events: events.into(),
            picture: "one\ntwo\n".into(),
        }
    }

    #[test]
    fn a_picture_is_taken_off_whole_where_the_terminal_became_narrower() {
        assert_eq!(erase(&[], 80), "");
        assert_eq!(erase(&[0, 80, 3], 80), "\x1b[3A\x1b[J");
        assert_eq!(erase(&[0, 80, 81], 40), "\x1b[6A\x1b[J");
    }

    #[test]
    fn what_was_dropped_is_said_in_its_place_and_no_picture_stays_behind() {
        let none = Dropped::default();
        let some = Dropped { epochs: 7, others: 0 };
        let mut terminal = Screen::new(Style::Terminal);
        assert_eq!(terminal.render(none, &drawn("a\n")), "a\none\ntwo\n");
        let second = terminal.render(some, &drawn("b\n"));
        let said = second
            .strip_prefix("\x1b[2A\x1b[J7 epochs are not shown")
            .expect(&second);
        assert!(said.ends_with("\nb\none\ntwo\n"), "{second}");
        assert_eq!(
            terminal.render(none, &Entry::Lines("end\n".into())),
            "\x1b[2A\x1b[Jend\n"
        );
        let json = Screen::new(Style::Json).render(some, &Entry::Lines("{}\n".into()));
        let notice: Value = serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
        assert!(
            notice["message"]
                .as_str()
                .is_some_and(|said| said.starts_with("7 epochs")),
            "{json}"
        );
        assert_eq!(json.lines().last(), Some("{}"));
    }
}

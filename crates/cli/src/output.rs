//! The output of commands. `run` prints events; on a terminal it also redraws a picture below them, and with `--json` it prints
//! one object per line.

use std::fmt;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::backlog::{Backlog, Dropped, Entry};
use homenode_agent::journald::Journal;
use homenode_agent::wall_clock::now_ns;
use homenode_agent::{Notice, Show};
use homenode_api::document::document;
use homenode_control::quiet::Quiet;
use homenode_control::{Cycle, Event};
use homenode_screens::printable::{self, Lines, OneLine};
use homenode_screens::table::width_of;
use homenode_screens::{terminal, top, wall};
use homenode_units::Ns;
use serde_json::{Value, json};

use crate::print::unwritable;

/// How output is formatted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Events scroll, with tables below the events.
    Terminal,
    /// Each event is a line.
    Lines,
    /// Each event is a JSON object on one line.
    Json,
}

/// The output of a run.
pub(crate) struct Output {
    style: Style,
    to: To,
    /// Recently printed events, to collapse repeats.
    quiet: Quiet,
    clock: Clock,
    /// The host's clock at the last cycle.
    at: Ns,
    /// The systemd journal, if standard output is connected to it.
    journal: Option<Journal>,
    /// Notices for programs that wait for the first document of the run.
    held: Vec<String>,
}

/// The clock that stamps events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// Seconds since a simulation began.
    Simulated,
    /// The wall clock, in the host's own zone.
    Wall,
}

impl Clock {
    /// The time stamp in front of an event.
    fn stamp(self, at: Ns) -> String {
        match self {
            Clock::Simulated => format!("[{:8.1}s]", at.as_secs_f64()),
            Clock::Wall => wall::local(now_ns()).format("[%Y-%m-%d %H:%M:%S]").to_string(),
        }
    }
}

/// How output reaches standard output.
enum To {
    /// Directly. Each write waits until the reader has taken all of it.
    Here { screen: Screen, closed: bool },
    /// Through a thread, from a backlog that drops what does not fit.
    Thread(Backlog),
}

impl Output {
    /// Creates an output of JSON if requested, else of text in the format that suits standard output.
    pub(crate) fn new(json: bool) -> Output {
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
            held: Vec::new(),
        }
    }

    /// Switches to another clock.
    pub(crate) fn by(self, clock: Clock) -> Output {
        Output { clock, ..self }
    }

    /// Prints, after the last cycle, the repeated events that were counted but not printed yet.
    pub(crate) fn end_of_cycles(&mut self) {
        let said = self.quiet.end(self.at);
        for line in self.stamped(said) {
            self.text(format_args!("{line}"));
        }
    }

    /// Returns the lines to print for these events. Lines that the journal accepts go there instead, with fields to search by.
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

    /// Returns an output that never waits for its reader, because a thread does the waiting.
    ///
    /// # Errors
    ///
    /// If the thread cannot start.
    pub(crate) fn unwaiting(self) -> anyhow::Result<Output> {
        // A duplicate of stdout: if the thread held the standard library's lock while the reader sleeps, the process could
        // not end.
        let mut file = File::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 0)?);
        let mut screen = Screen::new(self.style);
        let backlog = Backlog::start(move |dropped, entry| {
            let written = file.write_all(screen.render(dropped, entry).as_bytes());
            written.inspect_err(unwritable)
        });
        let to = To::Thread(backlog.context("cannot start the thread that writes the output")?);
        Ok(Output { to, ..self })
    }

    /// Waits up to `patience` until all output is written. Returns true if it is, or if it can no longer be written.
    pub(crate) fn drain(&self, patience: Duration) -> bool {
        match &self.to {
            To::Here { .. } => true,
            To::Thread(backlog) => backlog.drain(patience),
        }
    }

    /// The format of the output.
    pub(crate) fn style(&self) -> Style {
        self.style
    }

    /// Prints text for people: tables and the lines around them.
    pub(crate) fn text(&mut self, text: fmt::Arguments<'_>) {
        if self.style != Style::Json {
            self.write(Entry::Lines(format!("{}\n", Lines(text))));
        }
    }

    /// Prints a notice for the operator, in any format.
    pub(crate) fn notice(&mut self, text: &str) {
        self.line(text);
        self.object("notice", json!(Notice::new(text)));
    }

    /// Like [`Output::notice`], but before the run begins. A program gets the notice after the document `start`, which comes
    /// first.
    pub(crate) fn early_notice(&mut self, text: &str) {
        self.line(text);
        self.held.push(text.to_owned());
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
        if kind == "start" {
            for text in std::mem::take(&mut self.held) {
                self.object("notice", json!(Notice::new(&text)));
            }
        }
    }

    fn line(&mut self, text: &str) {
        self.text(format_args!("{}", OneLine(text)));
    }

    fn cycle(&mut self, cycle: &Cycle) {
        self.at = cycle.status.at_ns;
        let events = match self.style {
            Style::Json => object_line("cycle", json!(cycle)),
            Style::Terminal | Style::Lines => {
                let said = self.lines_to_say(&cycle.events);
                self.stamped(said).map(|line| format!("{line}\n")).collect()
            }
        };
        let picture = match self.style {
            Style::Terminal => {
                let (width, height) = terminal::size();
                top::glance(&cycle.status, width, height)
            }
            Style::Json | Style::Lines => String::new(),
        };
        if !(events.is_empty() && picture.is_empty()) {
            self.write(Entry::Cycle { events, picture });
        }
    }

    fn is_closed(&self) -> bool {
        match &self.to {
            To::Here { closed, .. } => *closed,
            To::Thread(backlog) => backlog.is_closed(),
        }
    }
}

/// Formats a document of a run as one line.
fn object_line(kind: &str, mut object: Value) -> String {
    if let Some(map) = object.as_object_mut() {
        map.insert("type".into(), kind.into());
    }
    format!("{}\n", printable::json(&document(kind, object).to_string()))
}

/// The picture that the terminal shows, so that it can be replaced.
struct Screen {
    style: Style,
    /// Widths of the lines of the picture that is now on the terminal.
    drawn: Vec<usize>,
}

impl Screen {
    fn new(style: Style) -> Screen {
        Screen {
            style,
            drawn: Vec::new(),
        }
    }

    /// Returns the text that shows an entry, after a line about entries dropped before it.
    fn render(&mut self, dropped: Dropped, entry: &Entry) -> String {
        let erase = erase(&std::mem::take(&mut self.drawn), terminal::size().0);
        let missing = match (dropped == Dropped::default(), self.style) {
            (true, _) => String::new(),
            (false, Style::Json) => object_line("notice", json!(Notice::new(&dropped.sentence()))),
            (false, _) => format!("{}\n", dropped.sentence()),
        };
        match entry {
            Entry::Lines(lines) => format!("{erase}{missing}{lines}"),
            Entry::Cycle { events, picture } => {
                self.drawn = picture.lines().map(width_of).collect();
                format!("{erase}{missing}{events}{picture}")
            }
        }
    }
}

/// The escape codes that erase lines of these widths from a terminal of this width, which may have become narrower since.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(events: &str) -> Entry {
        Entry::Cycle {
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
        let some = Dropped { cycles: 7, others: 0 };
        let mut terminal = Screen::new(Style::Terminal);
        assert_eq!(terminal.render(none, &drawn("a\n")), "a\none\ntwo\n");
        let second = terminal.render(some, &drawn("b\n"));
        let said = second
            .strip_prefix("\x1b[2A\x1b[J7 cycles are not shown")
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
                .is_some_and(|said| said.starts_with("7 cycles")),
            "{json}"
        );
        assert_eq!(json.lines().last(), Some("{}"));
    }
}

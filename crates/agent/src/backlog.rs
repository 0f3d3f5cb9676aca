//! Output for readers that may be slow, such as `homenode run | less`, or may never read.
//!
//! ```text
//!   loop ── push ─▶ backlog (16 MiB at most) ── writer's thread ─▶ standard output
//! ```
//!
//! The loop on a real host must not wait for a reader: VMs wait for the loop, and the guard treats a stalled agent as hung. So a
//! separate thread writes, and entries wait here for it. If they exceed the limit, the oldest cycles are dropped, since later
//! ones supersede them; lines and summaries are dropped only if no cycle is left. Before the next entry, the writer says how many
//! were dropped.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most bytes that may wait.
const BYTES_MAX: usize = 16 << 20;

/// Something to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Lines that readers should not miss.
    Lines(String),
    /// A cycle's events, and the picture after it, which replaces the previous picture.
    Cycle {
        /// The events, as lines.
        events: String,
        /// Tables; empty if the output is not a terminal.
        picture: String,
    },
}

impl Entry {
    /// Returns the memory that the entry takes while it waits.
    fn bytes(&self) -> usize {
        let text = match self {
            Entry::Lines(lines) => lines.len(),
            Entry::Cycle { events, picture } => events.len() + picture.len(),
        };
        size_of::<Entry>() + text
    }
}

/// How many entries were dropped since the last write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Dropped cycles.
    pub cycles: u64,
    /// Other dropped entries.
    pub others: u64,
}

impl Dropped {
    /// Returns the message that tells the reader how many entries were dropped.
    pub fn sentence(self) -> String {
        let others = match self.others {
            0 => String::new(),
            count => format!(" and {count} other lines"),
        };
        let cycles = self.cycles;
        format!("{cycles} cycles{others} are not shown, since the output was not read for a while")
    }
}

/// Entries that wait for a writer thread. The thread ends once this is dropped and everything is written.
pub struct Backlog {
    shared: Arc<Shared>,
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.shared.lock().is_last = true;
        self.shared.changed.notify_all();
    }
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    /// Signals that an entry was queued or written.
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    entries: VecDeque<Entry>,
    bytes: usize,
    dropped: Dropped,
    /// Whether the writer is writing an entry.
    is_writing: bool,
    /// Whether no more entries will come.
    is_last: bool,
    /// Whether writing has failed, so nothing more can be written.
    is_closed: bool,
}

impl Backlog {
    /// Starts the thread. `write` reports how many entries were dropped, and then writes the entry. After it has failed, it is
    /// not called again.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub fn start(
        mut write: impl FnMut(Dropped, &Entry) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Backlog> {
        let shared = Arc::new(Shared::default());
        let there = Arc::clone(&shared);
        let named = std::thread::Builder::new().name("output".into());
        named.spawn(move || {
            while let Some((dropped, entry)) = there.take() {
                let written = write(dropped, &entry);
                there.written(&written);
                if written.is_err() {
                    break;
                }
            }
        })?;
        Ok(Backlog { shared })
    }

    /// Queues an entry. Never waits.
    pub fn push(&self, entry: Entry) {
        let mut waiting = self.shared.lock();
        if !waiting.is_closed {
            waiting.push(entry);
            self.shared.changed.notify_all();
        }
    }

    /// Returns true if nothing more can be written.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().is_closed
    }

    /// Waits up to `patience` until everything is written, or writing has failed. Returns true if nothing waits any more.
    pub fn drain(&self, patience: Duration) -> bool {
        let waiting = self.shared.lock();
        let is_left = |waiting: &mut Waiting| !waiting.is_closed && waiting.is_left();
        let drained = self.shared.changed.wait_timeout_while(waiting, patience, is_left);
        !drained.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next entry; returns it with the number of entries dropped before it, or `None` after the last entry.
    fn take(&self) -> Option<(Dropped, Entry)> {
        let is_idle = |waiting: &mut Waiting| waiting.entries.is_empty() && !waiting.is_last;
        let waiting = self.changed.wait_while(self.lock(), is_idle);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        let entry = waiting.entries.pop_front()?;
        waiting.bytes -= entry.bytes();
        waiting.is_writing = true;
        Some((std::mem::take(&mut waiting.dropped), entry))
    }

    fn written(&self, written: &io::Result<()>) {
        let mut waiting = self.lock();
        waiting.is_writing = false;
        if written.is_err() {
            *waiting = Waiting {
                is_closed: true,
                ..Waiting::default()
            };
        }
        self.changed.notify_all();
    }
}

impl Waiting {
    fn is_left(&self) -> bool {
        self.is_writing || !self.entries.is_empty()
    }

    fn push(&mut self, entry: Entry) {
        self.bytes += entry.bytes();
        self.entries.push_back(entry);
        // Keeps the newest entry however long it is, unless only lines are left besides it, since lines matter more than a cycle.
        while self.bytes > BYTES_MAX && self.entries.len() > 1 {
            let is_cycle = |entry: &Entry| matches!(entry, Entry::Cycle { .. });
            let oldest = self.entries.iter().position(is_cycle);
            match oldest {
                Some(_) => self.dropped.cycles += 1,
                None => self.dropped.others += 1,
            }
            let dropped = self.entries.remove(oldest.unwrap_or(0));
            self.bytes -= dropped.as_ref().map_or(0, Entry::bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read as _, Write as _};

    /// Returns a backlog that writes to a pipe whose buffer holds far less than one entry.
    fn before_a_pipe() -> (Backlog, PipeReader) {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let backlog = Backlog::start(move |dropped, entry| {
            if dropped != Dropped::default() {
                writeln!(writer, "{}", dropped.sentence())?;
            }
            match entry {
                Entry::Lines(text) | Entry::Cycle { events: text, .. } => writer.write_all(text.as_bytes()),
            }
        });
        (backlog.expect("a thread"), reader)
    }

    fn cycle(number: u64) -> Entry {
        let events = format!("cycle {number} {}\n", "x".repeat(1 << 20));
        let picture = String::new();
        Entry::Cycle { events, picture }
    }

    fn line(text: &str) -> Entry {
        Entry::Lines(format!("{text}\n"))
    }

    fn read(mut reader: PipeReader) -> Vec<String> {
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        let first_words = |line: &str| line.trim_end_matches('x').trim_end().to_owned();
        text.lines().map(first_words).collect()
    }

    #[test]
    fn a_reader_that_does_not_read_is_not_waited_for_and_hears_what_it_missed() {
        let (backlog, reader) = before_a_pipe();
        backlog.push(line("start"));
        for number in 0..100 {
            backlog.push(cycle(number));
            if number % 10 == 0 {
                backlog.push(line(&format!("notice {number}")));
            }
        }
        backlog.push(line("summary"));
        assert!(!backlog.drain(Duration::from_millis(10)), "it is not read");
        assert!(!backlog.is_closed());
        let reading = std::thread::spawn(|| read(reader));
        assert!(backlog.drain(Duration::from_secs(60)), "it is read");
        drop(backlog);
        let shown = reading.join().expect("lines");
        let count = |what: &str| shown.iter().filter(|line| line.starts_with(what)).count();
        assert_eq!((shown[0].as_str(), count("notice")), ("start", 10));
        assert_eq!(&shown[shown.len() - 2..], ["cycle 99", "summary"]);
        let missed = shown
            .iter()
            .find_map(|line| line.split_once(" cycles are not shown"));
        let missed: usize = missed.expect("some were dropped").0.parse().expect("a count");
        // The entry that the writer holds does not count as waiting.
        assert_eq!(count("cycle"), 100 - missed);
        assert!(
            (BYTES_MAX >> 20) <= count("cycle") + 1 && count("cycle") <= (BYTES_MAX >> 20) + 1,
            "{shown:?}"
        );
    }

    #[test]
    fn lines_alone_are_bounded_too() {
        let (backlog, reader) = before_a_pipe();
        for number in 0..100 {
            backlog.push(line(&format!("notice {number} {}", "x".repeat(1 << 20))));
        }
        let reading = std::thread::spawn(|| read(reader));
        assert!(backlog.drain(Duration::from_secs(60)));
        drop(backlog);
        let shown = reading.join().expect("lines");
        assert!(
            shown
                .iter()
                .any(|line| line.contains("other lines are not shown")),
            "{shown:?}"
        );
        assert_eq!(shown.last().map(String::as_str), Some("notice 99"));
    }

    #[test]
    fn a_reader_that_has_gone_closes_it() {
        let (backlog, reader) = before_a_pipe();
        drop(reader);
        backlog.push(line("start"));
        assert!(backlog.drain(Duration::from_secs(60)));
        assert!(backlog.is_closed());
        backlog.push(cycle(1));
        assert!(!backlog.shared.lock().is_left());
    }
}

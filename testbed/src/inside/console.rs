//! A guest's console: the guest's output, which the process at the other end writes to a file, and its answers to commands.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use homenode_testbed_guest::MARKER_ERROR;

use super::wait::{Look, wait_until};

/// How long a guest may take to answer a command. Touching 64 MiB took over a minute while the machine built something else.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// Kernel messages about an init that died of an illegal instruction or an illegal access. Init is safe Rust and does neither,
/// so the emulation is at fault.
const INIT_DIED: [&str; 2] = [
    "Attempted to kill init! exitcode=0x00000004",
    "Attempted to kill init! exitcode=0x0000000b",
];

/// Message of a kernel that took a double fault. A stock kernel takes none by itself, so the emulation is at fault.
const DOUBLE_FAULT: &str = "PANIC: double fault";

/// A guest that ended or hangs for no reason of its own. Now and then a guest under emulated SVM suffers a double or triple
/// fault or takes no more interrupts, or the emulation ends its init. Then its case has shown nothing, neither good nor bad.
#[derive(Debug, thiserror::Error)]
#[error("guest {name} {what}; its console: {console}")]
pub struct GuestVanished {
    /// The guest.
    pub name: String,
    /// How the guest vanished.
    pub what: &'static str,
    /// The end of the guest's output.
    pub console: String,
}

/// The console of one guest.
#[derive(Debug, Clone)]
pub struct Console {
    /// The guest.
    pub guest: String,
    /// The file with the guest's output.
    pub log: PathBuf,
}

impl Console {
    /// Returns everything that the guest has printed.
    #[must_use]
    pub fn text(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Returns the error for a guest that has ended; `None` if its kernel printed a reason.
    #[must_use]
    pub fn vanished(&self) -> Option<GuestVanished> {
        self.unexplained("has vanished without a word of its kernel", "Kernel panic")
    }

    /// Returns the error for a guest whose init died of an error that init cannot make.
    #[must_use]
    pub fn lost_init(&self) -> Option<GuestVanished> {
        self.ended_by_emulation("has lost its only program to the emulation", &INIT_DIED)
    }

    /// Returns the error for a guest whose kernel took a double fault.
    #[must_use]
    pub fn double_fault(&self) -> Option<GuestVanished> {
        self.ended_by_emulation("took a double fault in the emulation", &[DOUBLE_FAULT])
    }

    /// Returns the error for a guest that printed one of these messages, for each of which the emulation is at fault.
    fn ended_by_emulation(&self, what: &'static str, messages: &[&str]) -> Option<GuestVanished> {
        let console = self.text();
        let has_ended = messages.iter().any(|message| console.contains(message));
        has_ended.then(|| self.gone(what, &console))
    }

    /// Returns the error for a guest in this state; `None` if it printed this explanation.
    #[must_use]
    pub fn unexplained(&self, what: &'static str, explanation: &str) -> Option<GuestVanished> {
        let console = self.text();
        (!console.contains(explanation)).then(|| self.gone(what, &console))
    }

    fn gone(&self, what: &'static str, console: &str) -> GuestVanished {
        GuestVanished {
            name: self.guest.clone(),
            what,
            console: tail(console),
        }
    }

    /// Waits for a line with this text, and returns the last such line. `lives` tells whether the guest is alive.
    ///
    /// # Errors
    /// When no such line comes in time, or the guest has ended.
    pub fn wait(&self, text: &str, limit: Duration, lives: impl Fn() -> bool) -> anyhow::Result<String> {
        let what = format!("guest {} to print {text}", self.guest);
        wait_until(&what, limit, || {
            let console = self.text();
            if let Some(line) = console.lines().rfind(|line| line.contains(text)) {
                return Ok(Look::Done(line.trim().to_owned()));
            }
            self.expect_healthy(&console, &lives)?;
            Ok(Look::NotYet(format!("console: {}", tail(&console))))
        })
    }

    /// Sends a command, and waits for its answer: a new line with this text.
    ///
    /// # Errors
    /// When the command cannot be sent, or is not answered in time.
    pub fn answer<T>(
        &self,
        command: &str,
        answer: &str,
        send: impl FnOnce(&str) -> anyhow::Result<T>,
        lives: impl Fn() -> bool,
    ) -> anyhow::Result<String> {
        let before = self.text().matches(answer).count();
        // Some transports, when closed, lose what the guest has not yet read, so this one stays open until the guest has
        // answered.
        let _open = send(command)?;
        let what = format!("guest {} to answer {command}", self.guest);
        wait_until(&what, ANSWER_LIMIT, || {
            let console = self.text();
            // Only complete lines count.
            let (whole, _) = console.rsplit_once('\n').unwrap_or_default();
            let last = whole.lines().rfind(|line| line.contains(answer));
            if let Some(line) = last.filter(|_| whole.matches(answer).count() > before) {
                return Ok(Look::Done(line.trim().to_owned()));
            }
            self.expect_healthy(&console, &lives)?;
            Ok(Look::NotYet(format!("console: {}", tail(&console))))
        })
    }

    /// Fails if the guest cannot be expected to print anything more.
    fn expect_healthy(&self, console: &str, lives: impl Fn() -> bool) -> anyhow::Result<()> {
        let trouble = console
            .lines()
            .find(|line| line.starts_with(MARKER_ERROR) || line.contains("Kernel panic"));
        if let Some(line) = trouble {
            bail!("guest {} failed: {}", self.guest, line.trim());
        }
        match self.vanished() {
            Some(vanished) if !lives() => Err(vanished.into()),
            _ => Ok(()),
        }
    }
}

/// Returns a count in a guest's answer, as in `loops=12`. `key` includes the equals sign.
///
/// # Errors
/// When the answer has no such count.
pub fn count(line: &str, key: &str) -> anyhow::Result<u64> {
    let mut words = line.split_whitespace();
    let found = words.find_map(|word| word.strip_prefix(key)?.parse().ok());
    found.with_context(|| format!("no {key} in: {line}"))
}

/// Returns the last lines of a text, for a message.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" / ")
}

//! The protocol between the two sides: files in a directory that both see.
//!
//! The outside writes jobs (`jobs/000001.json`). The inside appends events to `events.jsonl` and rewrites `heartbeat`. Files
//! need nothing in the emulated host except its shared directory, and the last events can still be read after that host has
//! died.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// Directory with what libvirt has learnt about QEMU. On the way in it is next to the programs, on the way out in the
/// exchange.
pub const CAPABILITIES_DIR: &str = "capabilities";

/// A job for the inside.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// Run this case.
    Case(String),
    /// Run a shell command that a developer entered, and send its output.
    Shell(String),
    /// Stop the emulated host.
    Finish,
}

/// The reports of the inside, in the order in which they happen.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The emulated host runs our program.
    Up {
        /// Release of the emulated host's kernel.
        kernel: String,
        /// Seconds since the emulated host's kernel started.
        uptime_s: f64,
    },
    /// libvirt answers; jobs are taken from now on.
    Ready {
        /// Seconds from `Up` to libvirt's first answer.
        seconds: f64,
    },
    /// The host could not be prepared; nothing can be run on it.
    Unusable {
        /// The reason.
        reason: String,
    },
    /// A job has begun.
    Begin {
        /// Number of the job file.
        job: u64,
    },
    /// A line that a case or command printed.
    Note {
        /// Number of the job file.
        job: u64,
        /// The line.
        text: String,
    },
    /// A job has ended.
    End {
        /// Number of the job file.
        job: u64,
        /// Seconds in the emulated host.
        seconds: f64,
        /// The error; absent if the job passed.
        error: Option<String>,
        /// Whether the emulation failed rather than the case: a guest vanished.
        infrastructure: bool,
    },
}

/// The shared directory.
#[derive(Debug, Clone)]
pub struct Exchange {
    root: PathBuf,
}

impl Exchange {
    /// Returns the exchange in this directory, which must exist.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Creates the directories of a new exchange.
    ///
    /// # Errors
    /// When a directory cannot be created.
    pub fn create(root: &Path) -> anyhow::Result<Self> {
        for part in ["jobs", "cases"] {
            let path = root.join(part);
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(Self::at(root))
    }

    /// The directory itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directory for the files of a case.
    #[must_use]
    pub fn case_dir(&self, case: &str) -> PathBuf {
        self.root.join("cases").join(case)
    }

    fn job_path(&self, number: u64) -> PathBuf {
        self.root.join("jobs").join(format!("{number:06}.json"))
    }

    /// Submits job `number` to the inside.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn submit(&self, number: u64, job: &Job) -> anyhow::Result<()> {
        write_whole(&self.job_path(number), &serde_json::to_string(job)?)
    }

    /// Reads job `number`, if it has been submitted.
    ///
    /// # Errors
    /// When the file exists but cannot be read as a job.
    pub fn job(&self, number: u64) -> anyhow::Result<Option<Job>> {
        let path = self.job_path(number);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(
                serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?,
            )),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Returns the first unused job number.
    #[must_use]
    pub fn next_job_number(&self) -> u64 {
        (1..).find(|number| !self.job_path(*number).exists()).unwrap_or(1)
    }

    /// Appends an event.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn report(&self, event: &Event) -> anyhow::Result<()> {
        let path = self.root.join("events.jsonl");
        let mut file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        // Written at once: the reader sees whole lines, or an incomplete last line that it leaves for later.
        file.write_all(format!("{}\n", serde_json::to_string(event)?).as_bytes())?;
        Ok(())
    }

    /// Writes a heartbeat, which shows that the inside is alive.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn beat(&self, count: u64) -> anyhow::Result<()> {
        let path = self.root.join("heartbeat");
        fs::write(&path, format!("{count}\n")).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns the last heartbeat, if there is one.
    #[must_use]
    pub fn last_beat(&self) -> Option<u64> {
        fs::read_to_string(self.root.join("heartbeat"))
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

/// Writes a file in a way that lets a reader see all of it or nothing.
fn write_whole(path: &Path, text: &str) -> anyhow::Result<()> {
    let partial = path.with_extension("partial");
    fs::write(&partial, text).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("cannot rename {}", partial.display()))
}

/// Follows `events.jsonl` from its beginning.
#[derive(Debug)]
pub struct Events {
    path: PathBuf,
    offset: u64,
}

impl Events {
    /// Creates a reader that starts with the first event.
    #[must_use]
    pub fn of(exchange: &Exchange) -> Self {
        Self {
            path: exchange.root.join("events.jsonl"),
            offset: 0,
        }
    }

    /// Returns the events since the last call.
    ///
    /// # Errors
    /// When a whole line is not an event.
    pub fn read(&mut self) -> anyhow::Result<Vec<Event>> {
        let Ok(mut file) = fs::File::open(&self.path) else {
            return Ok(Vec::new());
        };
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.offset))?;
        file.read_to_end(&mut bytes)?;
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        self.offset += end as u64 + 1;
        String::from_utf8_lossy(&bytes[..end])
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| format!("a line is not an event: {line}")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_and_events_cross() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let exchange = Exchange::create(dir.path())?;
        assert_eq!(exchange.job(1)?, None);
        exchange.submit(1, &Job::Case("boot".to_owned()))?;
        assert_eq!(exchange.job(1)?, Some(Job::Case("boot".to_owned())));
        assert_eq!(exchange.next_job_number(), 2);

        let mut events = Events::of(&exchange);
        assert!(events.read()?.is_empty());
        exchange.report(&Event::Begin { job: 1 })?;
        assert_eq!(events.read()?, vec![Event::Begin { job: 1 }]);
        assert!(events.read()?.is_empty());
        Ok(())
    }

    #[test]
    fn half_a_line_waits_for_its_end() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let exchange = Exchange::create(dir.path())?;
        let mut events = Events::of(&exchange);
        let path = dir.path().join("events.jsonl");
        fs::write(&path, r#"{"event":"begin","#)?;
        assert!(events.read()?.is_empty());
        fs::write(&path, "{\"event\":\"begin\",\"job\":7}\n")?;
        assert_eq!(events.read()?, vec![Event::Begin { job: 7 }]);
        Ok(())
    }
}

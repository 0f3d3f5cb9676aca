//! Keeps VMs' use of their permits on disk, next to the journal. The file survives the agent, and `kill -9` loses at most a
//! minute.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::bail;
use homenode_control::{Control, Hour, HourlyUsage, Line};
use homenode_undo::state_dir::StateDir;
use homenode_units::Ns;
use serde::{Deserialize, Serialize};

const FILE: &str = "usage.json";
const DAMAGED: &str = "usage.json.damaged";
/// Name of the file up to 0.2.0.
const FILE_BEFORE: &str = "bill.json";
/// Enough for 10,000 VMs for a month.
const LIMIT_BYTES: u64 = 4 << 30;
/// Time between two writes of the file.
const EVERY: Ns = Ns::from_secs(60);

/// The file's content.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    version: u32,
    lines: Vec<Line>,
}

const VERSION: u32 = 1;

/// The clock that determines the hour to which usage is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The wall clock: hours since 1970.
    Wall,
    /// The host's own clock: hours of simulated time.
    Host,
}

/// Keeps the usage on disk.
#[derive(Debug)]
pub struct UsageFile {
    /// `None` if there is no directory to keep the usage in: it then ends with the agent.
    dir: Option<PathBuf>,
    clock: Clock,
    written_at: Option<Ns>,
    trouble: Option<String>,
}

impl UsageFile {
    /// Opens the file in a directory, and returns the usage in it. If the file cannot be parsed, sets it aside, with a notice.
    pub fn open(dir: Option<&Path>, clock: Clock) -> (UsageFile, HourlyUsage) {
        let mut file = UsageFile {
            dir: dir.map(Path::to_owned),
            clock,
            written_at: None,
            trouble: None,
        };
        let hourly_usage = match dir.map(read) {
            None | Some(Ok(None)) => HourlyUsage::default(),
            Some(Ok(Some(hourly_usage))) => hourly_usage,
            Some(Err(trouble)) => {
                file.trouble = Some(trouble.to_string());
                HourlyUsage::default()
            }
        };
        (file, hourly_usage)
    }

    /// Adds up the usage until now, and writes it if it is time to. Returns a new error, if any.
    pub fn settle(&mut self, at: Ns, control: &Mutex<Control>) -> Option<String> {
        let is_due = self
            .written_at
            .is_none_or(|written| at.saturating_sub(written) >= EVERY);
        let hour = self.hour(at);
        let due = {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            control.settle_usage(hour);
            is_due.then(|| control.hourly_usage().clone())
        };
        if let Some(hourly_usage) = due {
            self.written_at = Some(at);
            self.write(&hourly_usage);
        }
        self.trouble.take()
    }

    /// Writes the usage for the last time. Returns the error, if any.
    pub fn close(&mut self, control: &Mutex<Control>) -> Option<String> {
        let hourly_usage = control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .hourly_usage()
            .clone();
        self.write(&hourly_usage);
        self.trouble.take()
    }

    fn hour(&self, at: Ns) -> Hour {
        match self.clock {
            Clock::Host => Hour::at(at),
            Clock::Wall => {
                let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                Hour(since.map_or(0, |since| since.as_secs() / 3600))
            }
        }
    }

    /// Writes a copy of the usage: a disk may take seconds, during which the caller must not hold the lock that clients need.
    fn write(&mut self, hourly_usage: &HourlyUsage) {
        if let Some(dir) = &self.dir
            && let Err(error) = replace(dir, hourly_usage)
        {
            self.trouble = Some(format!(
                "the usage in {} cannot be written: {error:#}; it is kept in memory",
                dir.display()
            ));
        }
    }
}

fn read(state: &Path) -> anyhow::Result<Option<HourlyUsage>> {
    let dir = StateDir::open(state)?;
    let path = dir.path_of(FILE);
    if !path.exists() && dir.path_of(FILE_BEFORE).exists() {
        dir.rename(FILE_BEFORE, FILE)?;
    }
    let parsed = match dir.read(FILE, LIMIT_BYTES) {
        Ok(None) => return Ok(None),
        Ok(Some(bytes)) => serde_json::from_slice::<Saved>(&bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.cause),
    };
    let why = match parsed {
        Ok(saved) if saved.version == VERSION => return Ok(Some(saved.lines.into_iter().collect())),
        Ok(saved) => format!(
            "it has version {}, but this program reads version {VERSION}",
            saved.version
        ),
        Err(why) => why,
    };
    let moved = match dir.rename(FILE, DAMAGED) {
        Ok(()) => format!("it was set aside as {}", dir.path_of(DAMAGED).display()),
        Err(error) => format!("it cannot be set aside ({})", error.cause),
    };
    bail!(
        "{} is not a valid usage file ({why}): {moved}; starting a new one",
        path.display()
    )
}

/// Writes a new file, and replaces the old one with it.
fn replace(state: &Path, hourly_usage: &HourlyUsage) -> anyhow::Result<()> {
    let saved = Saved {
        version: VERSION,
        lines: hourly_usage.lines().collect(),
    };
    StateDir::open(state)?.replace(FILE, &serde_json::to_vec(&saved)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_control::{Config, Mode};
    use homenode_policy::permits::Usage;
    use homenode_units::{Resource, VmId};

    fn example() -> HourlyUsage {
        let usage = Usage {
            used_units: 7,
            booked_units: 9,
            time_ns: Ns::from_secs(1),
            unmetered_ns: Ns::ZERO,
        };
        let mut hourly_usage = HourlyUsage::default();
        hourly_usage.add(Hour(3), VmId(1), "one", Resource::Pollution, usage);
        hourly_usage
    }

    #[test]
    fn usage_survives_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, empty) = UsageFile::open(Some(dir.path()), Clock::Host);
        assert_eq!(empty, HourlyUsage::default());
        let control = Mutex::new(Control::new(Config::default(), Mode::Act).with_usage(example()));
        assert_eq!(file.close(&control), None);
        let (_, again) = UsageFile::open(Some(dir.path()), Clock::Host);
        assert_eq!(again, example());
        // The name up to 0.2.0.
        let named = |name| dir.path().join("private").join(name);
        std::fs::rename(named(FILE), named(FILE_BEFORE)).unwrap();
        assert_eq!(UsageFile::open(Some(dir.path()), Clock::Host).1, example());
        assert!(named(FILE).exists() && !named(FILE_BEFORE).exists());
        // A crash while the new file is being written leaves the old one intact.
        std::fs::write(dir.path().join("private/usage.json.new"), "{\"ver").unwrap();
        assert_eq!(UsageFile::open(Some(dir.path()), Clock::Host).1, example());
    }

    #[test]
    fn what_is_no_usage_file_is_set_aside_and_said_once() {
        for bad in [
            "",
            "{\"version\":1}",
            "\u{0}\u{0}",
            "{\"version\":2,\"lines\":[]}",
            "[]",
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir(dir.path().join("private")).unwrap();
            std::fs::write(dir.path().join("private").join(FILE), bad).unwrap();
            let (mut file, empty) = UsageFile::open(Some(dir.path()), Clock::Host);
            assert_eq!(empty, HourlyUsage::default());
            let control = Mutex::new(Control::new(Config::default(), Mode::Act));
            let said = file.settle(Ns::from_secs(1), &control).unwrap();
            assert!(said.contains("set aside"), "{said}");
            assert_eq!(file.settle(Ns::from_secs(2), &control), None);
            let aside = dir.path().join("private").join(DAMAGED);
            assert_eq!(std::fs::read(aside).unwrap(), bad.as_bytes());
        }
    }

    #[test]
    fn usage_that_cannot_be_written_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        std::fs::write(&gone, "a file in the place of the directory").unwrap();
        let (mut file, _) = UsageFile::open(Some(&gone), Clock::Host);
        let control = Mutex::new(Control::new(Config::default(), Mode::Act));
        let said = file.close(&control).unwrap();
        assert!(said.contains("gone") && said.contains("kept in memory"), "{said}");
    }
}

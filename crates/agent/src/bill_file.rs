//! The bill on disk, next to the journal: it survives the agent, and `kill -9` loses a minute at most.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::bail;
use homenode_control::{Bill, Control, Hour, Line};
use homenode_undo::state_dir::StateDir;
use homenode_units::Ns;
use serde::{Deserialize, Serialize};

const FILE: &str = "bill.json";
const DAMAGED: &str = "bill.json.damaged";
/// 10,000 VMs for a month fit.
const LIMIT_BYTES: u64 = 4 << 30;
/// How often it is written.
const EVERY: Ns = Ns::from_secs(60);

/// The file's content.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    version: u32,
    lines: Vec<Line>,
}

const VERSION: u32 = 1;

/// The clock that bills use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The wall clock: hours since 1970.
    Wall,
    /// The host's own clock: hours of the simulation.
    Host,
}

/// Keeps the bill on disk.
#[derive(Debug)]
pub struct BillFile {
    /// `None` if there is nowhere to keep it: it then ends with the agent.
    dir: Option<PathBuf>,
    clock: Clock,
    written_at: Option<Ns>,
    trouble: Option<String>,
}

impl BillFile {
    /// Opens the file in a directory, and returns the bill in it. A file that cannot be parsed is set aside, with a notice.
    pub fn open(dir: Option<&Path>, clock: Clock) -> (BillFile, Bill) {
        let mut file = BillFile {
            dir: dir.map(Path::to_owned),
            clock,
            written_at: None,
            trouble: None,
        };
        let bill = match dir.map(read) {
            None | Some(Ok(None)) => Bill::default(),
            Some(Ok(Some(bill))) => bill,
            Some(Err(trouble)) => {
                file.trouble = Some(trouble.to_string());
                Bill::default()
            }
        };
        (file, bill)
    }

    /// Settles the bill up to now, and writes it if due. Returns a new error, if any.
    pub fn settle(&mut self, at: Ns, control: &Mutex<Control>) -> Option<String> {
        let is_due = self
            .written_at
            .is_none_or(|written| at.saturating_sub(written) >= EVERY);
        let hour = self.hour(at);
        let due = {
            let mut control = control.lock().unwrap_or_else(PoisonError::into_inner);
            control.settle_bill(hour);
            is_due.then(|| control.bill().clone())
        };
        if let Some(bill) = due {
            self.written_at = Some(at);
            self.write(&bill);
        }
        self.trouble.take()
    }

    /// Writes the bill for the last time. Returns the error, if any.
    pub fn close(&mut self, control: &Mutex<Control>) -> Option<String> {
        let bill = control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bill()
            .clone();
        self.write(&bill);
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

    /// Takes a copy: a disk may take seconds, and clients of the agent would wait for the lock meanwhile.
    fn write(&mut self, bill: &Bill) {
        if let Some(dir) = &self.dir
            && let Err(error) = replace(dir, bill)
        {
            self.trouble = Some(format!(
                "the bill in {} cannot be written: {error:#}; usage is kept in memory",
                dir.display()
            ));
        }
    }
}

fn read(state: &Path) -> anyhow::Result<Option<Bill>> {
    let dir = StateDir::open(state)?;
    let path = dir.path_of(FILE);
    let parsed = match dir.read(FILE, LIMIT_BYTES) {
        Ok(None) => return Ok(None),
        Ok(Some(bytes)) => serde_json::from_slice::<Saved>(&bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.cause),
    };
    let why = match parsed {
        Ok(saved) if saved.version == VERSION => return Ok(Some(saved.lines.into_iter().collect())),
        Ok(saved) => format!("it is of version {}, this program knows {VERSION}", saved.version),
        Err(why) => why,
    };
    let moved = match dir.rename(FILE, DAMAGED) {
        Ok(()) => format!("it is set aside as {}", dir.path_of(DAMAGED).display()),
        Err(error) => format!("it cannot be set aside either ({})", error.cause),
    };
    bail!("{} is no bill ({why}): {moved}, a new one begins", path.display())
}

/// Writes a new file, and replaces the old one with it.
fn replace(state: &Path, bill: &Bill) -> anyhow::Result<()> {
    let saved = Saved {
        version: VERSION,
        lines: bill.lines().collect(),
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

    fn bill() -> Bill {
        let usage = Usage {
            used_units: 7,
            booked_units: 9,
            time_ns: Ns::from_secs(1),
            unmetered_ns: Ns::ZERO,
        };
        let mut bill = Bill::default();
        bill.add(Hour(3), VmId(1), "one", Resource::Pollution, usage);
        bill
    }

    #[test]
    fn a_bill_survives_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, empty) = BillFile::open(Some(dir.path()), Clock::Host);
        assert_eq!(empty, Bill::default());
        let control = Mutex::new(Control::new(Config::default(), Mode::Act).with_bill(bill()));
        assert_eq!(file.close(&control), None);
        let (_, again) = BillFile::open(Some(dir.path()), Clock::Host);
        assert_eq!(again, bill());
        // A crash while writing leaves the old file.
        std::fs::write(dir.path().join("private/bill.json.new"), "{\"ver").unwrap();
        assert_eq!(BillFile::open(Some(dir.path()), Clock::Host).1, bill());
    }

    #[test]
    fn what_is_no_bill_is_set_aside_and_said_once() {
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
            let (mut file, empty) = BillFile::open(Some(dir.path()), Clock::Host);
            assert_eq!(empty, Bill::default());
            let control = Mutex::new(Control::new(Config::default(), Mode::Act));
            let said = file.settle(Ns::from_secs(1), &control).unwrap();
            assert!(said.contains("set aside"), "{said}");
            assert_eq!(file.settle(Ns::from_secs(2), &control), None);
            let aside = dir.path().join("private").join(DAMAGED);
            assert_eq!(std::fs::read(aside).unwrap(), bad.as_bytes());
        }
    }

    #[test]
    fn a_bill_that_cannot_be_written_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        std::fs::write(&gone, "a file in the place of the directory").unwrap();
        let (mut file, _) = BillFile::open(Some(&gone), Clock::Host);
        let control = Mutex::new(Control::new(Config::default(), Mode::Act));
        let said = file.close(&control).unwrap();
        assert!(said.contains("gone") && said.contains("kept in memory"), "{said}");
    }
}

//! Keeps finished work on disk, so that interrupted work can continue and repeated work is quick. Used for the runs of a
//! reproduction and the tasks of a sweep.
//!
//! Each result has a file, named after a hash of its description. The file contains the whole description and identifies the
//! program that made it. It is used only if both match, because another program may simulate differently, and hashes may
//! collide. Files are written under a temporary name and renamed, so a crash leaves the old file, the new file, or a
//! temporary file that is never read. Files are not synced to disk. If a power cut truncates a file, it does not parse, and
//! the work is done again.
//!
//! The files are untrusted: only regular files of bounded size are opened, links are not followed, and a file that does not
//! parse is skipped with a note.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum file size: a run of 200 VMs is about 300 kilobytes, and a task has up to 64 runs.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// A directory of finished runs, or of other results that depend only on a description.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    program: String,
    written: AtomicU64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry<S, T> {
    program: S,
    run: S,
    outcome: T,
}

/// Result of a lookup of a run.
#[derive(Debug, PartialEq)]
pub enum Found<T> {
    /// The run.
    Run(Box<T>),
    /// The cache has no result, or another program made it.
    Nothing,
    /// The file is not a finished run; the text says why.
    Unusable(String),
}

impl Cache {
    /// Opens a directory, and creates it if it does not exist. `program` is the content of the executable that simulates;
    /// the runs of other programs are not used.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn open(directory: &Path, program: &[u8]) -> std::io::Result<Cache> {
        fs::create_dir_all(directory)?;
        Ok(Cache {
            directory: directory.to_owned(),
            program: format!("{:016x}-{}", hash(program), program.len()),
            written: AtomicU64::new(0),
        })
    }

    /// Returns the path of the file for a result with this description.
    pub fn path(&self, description: &str) -> PathBuf {
        let name = format!("{:016x}.json", hash(description.as_bytes()));
        self.directory.join(name)
    }

    /// Returns the finished result with this description.
    pub fn find<T: DeserializeOwned>(&self, description: &str) -> Found<T> {
        let path = self.path(description);
        let unusable =
            |what: &str| Found::Unusable(format!("{}: {what}; simulating it again", path.display()));
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT) => return Found::Nothing,
            Err(rustix::io::Errno::LOOP) => return unusable("is a link"),
            Err(error) => return unusable(&error.to_string()),
        };
        match file.metadata() {
            Ok(about) if !about.is_file() => return unusable("is not a regular file"),
            Ok(about) if about.len() > FILE_BYTES_MAX => {
                return unusable("is too large to be a finished run");
            }
            Ok(_) => {}
            Err(error) => return unusable(&error.to_string()),
        }
        let mut text = String::new();
        if let Err(error) = file.take(FILE_BYTES_MAX).read_to_string(&mut text) {
            return unusable(&error.to_string());
        }
        match serde_json::from_str::<Entry<String, T>>(&text) {
            Ok(entry) if entry.program == self.program && entry.run == description => {
                Found::Run(Box::new(entry.outcome))
            }
            Ok(_) => Found::Nothing,
            Err(error) => unusable(&format!("is not a finished run ({error})")),
        }
    }

    /// Stores a finished run.
    ///
    /// # Errors
    /// The file cannot be written. The old file then remains.
    pub fn keep<T: Serialize>(&self, description: &str, outcome: &T) -> std::io::Result<()> {
        let entry = Entry {
            program: self.program.as_str(),
            run: description,
            outcome,
        };
        let text = serde_json::to_string(&entry)?;
        self.write(&self.path(description), &text)
    }

    /// Writes a file of the directory atomically, by renaming a temporary file.
    ///
    /// # Errors
    /// The file cannot be written. The old file then remains.
    pub fn write(&self, path: &Path, text: &str) -> std::io::Result<()> {
        let unique = self.written.fetch_add(1, Ordering::Relaxed);
        let beside = self
            .directory
            .join(format!(".{}-{unique}.tmp", std::process::id()));
        let written = File::create(&beside)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&beside, path));
        if written.is_err() {
            fs::remove_file(&beside).ok();
        }
        written
    }
}

/// FNV-1a with 64 bits; names files, and tells programs apart. It is not secure, but an attacker could just as well write a
/// false outcome.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use homenode_control::PolicySet;
    use homenode_twin::{Scenario, VmSpec};
    use homenode_units::Bytes;

    use super::*;
    use crate::run::{Outcome, Run};

    fn run(seed: u64) -> String {
        simulated(seed).description()
    }

    fn simulated(seed: u64) -> Run {
        let vm = VmSpec::new("a", 1, Bytes::from_gib(1), "povray").doing(0.0001);
        Run::to_end("r910", Scenario::of("cached", vec![vm]), PolicySet::Default, seed)
    }

    fn outcome() -> Outcome {
        let mut outcome = simulated(1).execute().unwrap();
        // Values that shortest decimals or a sloppy parser would not restore exactly.
        outcome.at_s = 0.1 + 0.2;
        outcome.vms[0].runtime_s = Some(f64::from_bits(0x3ff0_0000_0000_0001));
        outcome
    }

    #[test]
    fn a_kept_run_comes_back_to_the_last_bit() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path(), b"program").unwrap();
        assert_eq!(cache.find::<Outcome>(&run(1)), Found::Nothing);
        cache.keep(&run(1), &outcome()).unwrap();
        assert_eq!(cache.find(&run(1)), Found::Run(Box::new(outcome())));
        assert_eq!(cache.find::<Outcome>(&run(2)), Found::Nothing);
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file stays");
    }

    #[test]
    fn another_programs_runs_are_not_used_and_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        Cache::open(directory.path(), b"old")
            .unwrap()
            .keep(&run(1), &outcome())
            .unwrap();
        let cache = Cache::open(directory.path(), b"new").unwrap();
        assert_eq!(cache.find::<Outcome>(&run(1)), Found::Nothing);
        cache.keep(&run(1), &outcome()).unwrap();
        assert!(matches!(cache.find::<Outcome>(&run(1)), Found::Run(_)));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_finished_run_is_left_out_with_a_note() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path(), b"program").unwrap();
        let path = cache.path(&run(1));
        let note = || match cache.find::<Outcome>(&run(1)) {
            Found::Unusable(note) => note,
            other => panic!("{other:?}"),
        };
        cache.keep(&run(1), &outcome()).unwrap();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert!(note().contains("is not a finished run"));
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(note().contains("UTF-8"));
        fs::write(&path, "{\"program\": 1e999}").unwrap();
        assert!(note().contains("is not a finished run"));
        File::create(&path).unwrap().set_len(FILE_BYTES_MAX + 1).unwrap();
        assert!(note().contains("too large"));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(note().contains("is a link"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(note().contains("is not a regular file"));
    }
}

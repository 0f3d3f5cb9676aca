//! Files of a move: its locks, its job and its progress. Also `xl`'s own files, where it keeps a domain's configuration.
//!
//! The move's files are in the place that the host has for them, next to the acting lock. So a host moves one domain at a time,
//! wherever an agent's state directory is.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use homenode_undo::state_dir::{STATE_DIR, StateDir, StateError};
use homenode_units::VmId;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::Job;
use super::configuration::{BYTES_MAX, Configuration};
use super::error::FileError;
use crate::xl;

/// Lock that a process holds while it moves a domain.
pub(crate) const MOVING: &str = "moving.lock";
/// Lock that is held while a domain is being copied.
pub(crate) const COPYING: &str = "copying.lock";
const JOB: &str = "move.job";
const COPIED: &str = "move.copied";
/// File for the output of `xl`.
const SAID: &str = "move.said";
/// Where libxl keeps data about domains.
const USERDATA: &str = "/var/lib/xen";
/// Name of libxl's own file for each domain. Other programs, such as libvirt, keep files there too.
const KEPT: &str = "libxl-json";

fn place() -> Result<StateDir, StateError> {
    StateDir::open(Path::new(STATE_DIR))
}

/// Takes one of the locks; `None` if another process holds it. The lock is held until the file is closed.
///
/// # Errors
/// If the lock file cannot be opened.
pub(crate) fn lock(name: &str) -> Result<Option<File>, FileError> {
    let dir = place()?;
    let file = dir.open_to_write(name)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(FileError::at(&dir.path_of(name), error)),
    }
}

fn write(name: &str, text: &str) -> Result<(), FileError> {
    place()?.replace(name, text.as_bytes())?;
    Ok(())
}

/// Reads a file; `None` if there is none, or if it belongs to another user.
fn read(name: &str) -> Option<String> {
    let dir = StateDir::open_existing(Path::new(STATE_DIR)).ok()??;
    let bytes = dir.read(name, BYTES_MAX as u64).ok()??;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Writes the job to a file before it is started.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn begin(job: &Job) -> Result<(), FileError> {
    write(COPIED, "0")?;
    write(
        JOB,
        &serde_json::to_string(job).map_err(|error| FileError::System(error.to_string()))?,
    )
}

/// Returns the last job, if it was not completed.
pub(crate) fn job() -> Option<Job> {
    serde_json::from_str(&read(JOB)?).ok()
}

/// Marks the job as completed.
pub(crate) fn end() {
    if let Ok(dir) = place() {
        for name in [JOB, COPIED, SAID] {
            let _ = dir.remove(name);
        }
    }
}

/// Records how many pages were copied.
pub(crate) fn copied(pages: u64) {
    let _ = write(COPIED, &pages.to_string());
}

/// Reads how many pages were copied.
pub(crate) fn how_many_copied() -> u64 {
    read(COPIED)
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

/// Opens the file for `xl`'s output.
///
/// # Errors
/// If it cannot be opened.
pub(crate) fn for_what_is_said() -> Result<File, FileError> {
    let file = place()?.open_to_write(SAID)?;
    file.set_len(0)
        .map_err(|error| FileError::System(error.to_string()))?;
    Ok(file)
}

/// Returns the part of `xl`'s last output that tells why it failed.
pub(crate) fn what_was_said() -> String {
    xl::reason(&read(SAID).unwrap_or_default())
}

fn kept(domid: u32, vm: VmId, what: &str) -> PathBuf {
    Path::new(USERDATA).join(format!("userdata-d.{domid}.{vm}.{what}"))
}

/// Returns the names of other programs' notes on a domain, besides libxl's own.
///
/// # Errors
/// If libxl keeps nothing about the domain, or its directory cannot be read.
pub(crate) fn others_notes(domid: u32, vm: VmId) -> Result<Vec<String>, FileError> {
    let entries = fs::read_dir(USERDATA).map_err(|error| FileError::at(Path::new(USERDATA), error))?;
    let mine = format!("userdata-d.{domid}.{vm}.");
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut notes: Vec<String> = names
        .filter_map(|name| name.strip_prefix(&mine).map(str::to_owned))
        .collect();
    let before = notes.len();
    notes.retain(|note| note != KEPT);
    match before > notes.len() {
        true => Ok(notes),
        false => Err(FileError::NotKept),
    }
}

/// Reads libxl's configuration of a domain.
///
/// # Errors
/// Returns why it cannot be read, as the end of a sentence.
pub(crate) fn configuration(domid: u32, vm: VmId) -> Result<Configuration, FileError> {
    let path = kept(domid, vm, KEPT);
    let failed = |error: std::io::Error| FileError::at(&path, error);
    let mut text = Vec::new();
    let file = File::open(&path).map_err(failed)?;
    let read = file.take(BYTES_MAX as u64 + 1).read_to_end(&mut text);
    read.map_err(failed)?;
    Configuration::read(&text).map_err(|cause| FileError::Configuration {
        path: path.display().to_string(),
        cause,
    })
}

/// Changes libxl's configuration of a domain in the way that libxl does: under its lock, by replacing the file.
///
/// # Errors
/// If it cannot be changed. It then stays unchanged.
pub(crate) fn change(domid: u32, vm: VmId, change: impl FnOnce(&mut Configuration)) -> Result<(), FileError> {
    let lock = Path::new(USERDATA).join(format!("userdata-l.{domid}.{vm}.domain-userdata-lock"));
    let failed = |error: std::io::Error| FileError::at(&lock, error);
    let held = loop {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).mode(0o600);
        let file = options
            .custom_flags(libc::O_NOFOLLOW)
            .open(&lock)
            .map_err(failed)?;
        rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        // The previous holder removes the lock file when it releases the lock.
        let is_it = fs::metadata(&lock).is_ok_and(|there| {
            file.metadata()
                .is_ok_and(|own| (own.dev(), own.ino()) == (there.dev(), there.ino()))
        });
        if is_it {
            break file;
        }
    };
    let result = configuration(domid, vm).and_then(|mut of| {
        change(&mut of);
        let (path, new) = (
            kept(domid, vm, KEPT),
            kept(domid, vm, KEPT).with_extension("homenode-new"),
        );
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&new).and_then(|mut file| {
            use std::io::Write as _;
            file.write_all(&[of.written(), vec![0]].concat())
        });
        written
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| FileError::at(&path, error))
    });
    let _ = fs::remove_file(&lock);
    drop(held);
    result
}

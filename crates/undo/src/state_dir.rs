//! The agent's own files, in a directory that no other user can read, write or lock, even if such a user created its path
//! beforehand.
//!
//! ```text
//!   /run/homenode            open to all users: the sockets are here, each with its own permissions
//!   ├── agent.sock
//!   ├── topology.sock        QEMU's user connects to it
//!   └── private              0700: journal, locks, ledger, usage, each 0600
//! ```
//!
//! Everything in `private` is opened by name relative to that directory's descriptor, never through a link. Only a regular file
//! that we own and that has a single link is accepted, so that root cannot be tricked into overwriting another file. No other
//! user can move away the directories above `private` (`ancestors`).

mod ancestors;

use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

/// Default state directory: gone after a reboot, like the VMs.
pub const STATE_DIR: &str = "/run/homenode";
/// The part of the state directory that only the agent can use.
const PRIVATE: &str = "private";
const PRIVATE_MODE: Mode = Mode::RWXU;
pub(crate) const PUBLIC_MODE: Mode = Mode::from_raw_mode(0o755);
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
/// Mode bits that let other users change a directory.
pub(crate) const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why one of the agent's files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {what} {path}: {cause}")]
pub struct StateError {
    /// What the agent tried to do.
    pub what: &'static str,
    /// The file or directory.
    pub path: String,
    /// The system's error message, or what is wrong with the file.
    pub cause: String,
}

impl StateError {
    /// Creates the error for an attempt to do `what` to a file.
    pub(crate) fn new(what: &'static str, path: &Path, cause: impl Display) -> StateError {
        StateError {
            what,
            path: path.display().to_string(),
            cause: cause.to_string(),
        }
    }
}

/// One of the agent's own directories.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    dir: OwnedFd,
}

impl StateDir {
    /// Opens the private part of a state directory. Creates both directories if they are missing.
    ///
    /// # Errors
    /// When a directory cannot be created, belongs to another user, or can be changed by another user.
    pub fn open(state: &Path) -> Result<StateDir, StateError> {
        let public = made(state)?;
        let path = state.join(PRIVATE);
        make(&public, Path::new(PRIVATE), &path, PRIVATE_MODE)?;
        let dir = there(directory(&public, Path::new(PRIVATE), &path)?, &path)?;
        let mode = rustix::fs::fstat(&dir)
            .map_err(|e| StateError::new("open", &path, e))?
            .st_mode;
        // The mode is set only if it differs, since the disk may be read-only by now.
        if Mode::from_raw_mode(mode) != PRIVATE_MODE {
            rustix::fs::fchmod(&dir, PRIVATE_MODE).map_err(|e| StateError::new("protect", &path, e))?;
        }
        Ok(StateDir { path, dir })
    }

    /// Opens the state directory itself, for files that other users may look for. Creates it if it is missing.
    ///
    /// # Errors
    /// When a directory cannot be created, belongs to another user, or can be changed by another user.
    pub fn open_public(state: &Path) -> Result<StateDir, StateError> {
        StateDir::open(state)?;
        Ok(StateDir {
            path: state.to_owned(),
            dir: made(state)?,
        })
    }

    /// Like [`StateDir::open`], but creates and changes nothing; `None` if there is no such directory.
    ///
    /// # Errors
    /// When the directory cannot be opened, belongs to another user, or can be changed by another user.
    pub fn open_existing(state: &Path) -> Result<Option<StateDir>, StateError> {
        let Some(public) = existing(state)? else {
            return Ok(None);
        };
        let path = state.join(PRIVATE);
        let private = directory(&public, Path::new(PRIVATE), &path)?;
        Ok(private.map(|dir| StateDir { path, dir }))
    }

    /// Path of a file in this directory, for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a file; `None` if there is none.
    ///
    /// # Errors
    /// When the file is larger than `bytes_max`, not the agent's own, or cannot be read.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, StateError> {
        let Some(file) = self.open_file(name, OFlags::RDONLY)? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        let read = file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|e| self.failed("read", name, e))?;
        if bytes.len() as u64 > bytes_max {
            return Err(self.failed("read", name, format!("it is larger than {bytes_max} bytes")));
        }
        Ok(Some(bytes))
    }

    /// Opens a file to read; `None` if there is none.
    ///
    /// # Errors
    /// When the file is not the agent's own or cannot be opened.
    pub fn open_to_read(&self, name: &str) -> Result<Option<File>, StateError> {
        self.open_file(name, OFlags::RDONLY)
    }

    /// Opens a file to read and write; creates it if it is missing.
    ///
    /// # Errors
    /// When the file is not the agent's own, or can be neither opened nor created.
    pub fn open_to_write(&self, name: &str) -> Result<File, StateError> {
        self.create(name, OFlags::RDWR)
    }

    /// Opens a file to append to; creates it if it is missing.
    ///
    /// # Errors
    /// When the file is not the agent's own, or can be neither opened nor created.
    pub fn open_to_append(&self, name: &str) -> Result<File, StateError> {
        self.create(name, OFlags::WRONLY | OFlags::APPEND)
    }

    fn create(&self, name: &str, how: OFlags) -> Result<File, StateError> {
        let file = self.open_file(name, how | OFlags::CREATE)?;
        file.ok_or_else(|| self.failed("open", name, "it disappeared"))
    }

    /// Replaces a file atomically. Returns the new file, open to append.
    ///
    /// # Errors
    /// When the new file cannot be written; the old file then still exists.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<File, StateError> {
        let new = format!("{name}.new");
        // A crash at this point leaves such a file behind.
        self.remove(&new)?;
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL | SAFE;
        let file = rustix::fs::openat(&self.dir, &new, flags, FILE_MODE);
        let mut file = File::from(file.map_err(|e| self.failed("create", &new, e))?);
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        #[cfg(any(test, feature = "testing"))]
        let written =
            written.and_then(|()| homenode_kernel::fault::of_file(homenode_kernel::fault::Point::Write));
        if let Err(e) = written {
            // A half-written file takes room that others may need.
            let _ = self.remove(&new);
            return Err(self.failed("write", &new, e));
        }
        rustix::fs::renameat(&self.dir, &new, &self.dir, name)
            .map_err(|e| self.failed("replace", name, e))?;
        rustix::fs::fsync(&self.dir).map_err(|e| self.failed("sync", name, e))?;
        #[cfg(any(test, feature = "testing"))]
        homenode_kernel::fault::of_file(homenode_kernel::fault::Point::Written)
            .map_err(|e| self.failed("sync", name, e))?;
        Ok(file)
    }

    /// Renames a file, replacing any file of the new name.
    ///
    /// # Errors
    /// When the file cannot be renamed.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StateError> {
        rustix::fs::renameat(&self.dir, from, &self.dir, to).map_err(|e| self.failed("rename", from, e))
    }

    /// Removes a file, if there is one.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), StateError> {
        match rustix::fs::unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(self.failed("remove", name, e)),
        }
    }

    fn open_file(&self, name: &str, how: OFlags) -> Result<Option<File>, StateError> {
        let file = match rustix::fs::openat(&self.dir, name, how | SAFE, FILE_MODE) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(self.failed("open", name, "it is a link; remove it")),
            Err(e) => return Err(self.failed("open", name, e)),
        };
        let stat = rustix::fs::fstat(&file).map_err(|e| self.failed("open", name, e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink > 1 {
            return Err(self.failed("open", name, "it is not a file of the agent's; remove it"));
        }
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            let cause = format!("it belongs to user {}; remove it", stat.st_uid);
            return Err(self.failed("open", name, cause));
        }
        Ok(Some(file))
    }

    /// Names of files with this prefix.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let entries = rustix::fs::Dir::read_from(&self.dir)
            .into_iter()
            .flatten()
            .flatten();
        let names = entries.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// Opens the same directory again.
    ///
    /// # Errors
    /// When the process cannot open more files.
    pub(crate) fn again(&self) -> Result<StateDir, StateError> {
        let dir = self
            .dir
            .try_clone()
            .map_err(|e| StateError::new("open", &self.path, e))?;
        Ok(StateDir {
            path: self.path.clone(),
            dir,
        })
    }

    /// Whether the directory is still at the path where it was opened.
    pub(crate) fn is_in_place(&self) -> bool {
        let id = |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let own = rustix::fs::fstat(&self.dir).map(|stat| id(&stat));
        match rustix::fs::stat(&self.path) {
            Ok(there) => own == Ok(id(&there)),
            // If the path cannot be checked, the directory does not count as gone.
            Err(error) => !matches!(error, Errno::NOENT | Errno::NOTDIR),
        }
    }

    fn failed(&self, what: &'static str, name: &str, cause: impl Display) -> StateError {
        StateError::new(what, &self.path.join(name), cause)
    }
}

/// Opens a state directory itself; creates it if it is missing.
fn made(state: &Path) -> Result<OwnedFd, StateError> {
    let (above, name) = there(ancestors::above(state, true)?, state)?;
    make(&above, Path::new(&name), state, PUBLIC_MODE)?;
    there(directory(&above, Path::new(&name), state)?, state)
}

/// Opens a state directory itself, if it exists.
fn existing(state: &Path) -> Result<Option<OwnedFd>, StateError> {
    match ancestors::above(state, false)? {
        Some((above, name)) => directory(&above, Path::new(&name), state),
        None => Ok(None),
    }
}

fn there<T>(found: Option<T>, path: &Path) -> Result<T, StateError> {
    found.ok_or_else(|| StateError::new("open", path, "it disappeared"))
}

/// Open without following links, and without waiting for a pipe's other end.
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

pub(crate) fn make(
    below: impl std::os::fd::AsFd,
    name: &Path,
    path: &Path,
    mode: Mode,
) -> Result<(), StateError> {
    match rustix::fs::mkdirat(below, name, mode) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(StateError::new("create", path, with_remedy(e))),
    }
}

/// Opens a directory that belongs to this user or root and that no other user can change; `None` if it does not exist.
fn directory(below: impl std::os::fd::AsFd, name: &Path, path: &Path) -> Result<Option<OwnedFd>, StateError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | SAFE;
    let dir = match rustix::fs::openat(below, name, flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(StateError::new(
                "open",
                path,
                "it is a link or a file, not a directory; remove it",
            ));
        }
        Err(e) => return Err(StateError::new("open", path, with_remedy(e))),
    };
    let stat = rustix::fs::fstat(&dir).map_err(|e| StateError::new("open", path, e))?;
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid != own && stat.st_uid != 0 {
        let cause = format!(
            "it belongs to user {}, who could change what the agent relies on; remove it, or choose another with --state",
            stat.st_uid
        );
        return Err(StateError::new("use", path, cause));
    }
    if stat.st_mode & WRITABLE_BY_OTHERS != 0 {
        let cause = "other users can write to it; remove that permission (chmod go-w), or choose another with --state";
        return Err(StateError::new("use", path, cause));
    }
    Ok(Some(dir))
}

pub(crate) fn with_remedy(error: Errno) -> String {
    match error {
        Errno::ACCESS | Errno::PERM => {
            format!("{error}; run as root, or choose another directory with --state")
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn files_are_the_owners_alone_whatever_the_umask_was() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new/state");
        let private = StateDir::open(&state).unwrap();
        let _ = private.replace("one", b"1").unwrap();
        let _ = private.open_to_write("two").unwrap();
        assert_eq!(mode(&state.join("private")), 0o700);
        assert_eq!(mode(&private.path_of("one")), 0o600);
        assert_eq!(mode(&private.path_of("two")), 0o600);
        assert_eq!(private.read("one", 1).unwrap(), Some(b"1".to_vec()));
        assert_eq!(private.read("three", 1).unwrap(), None);
        assert!(private.read("one", 0).unwrap_err().cause.contains("larger"));
        // Meanwhile, root opened the directory to others.
        chmod(&state.join("private"), 0o755);
        StateDir::open(&state).unwrap();
        assert_eq!(mode(&state.join("private")), 0o700);
    }

    #[test]
    fn no_link_is_followed_and_what_it_leads_to_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        let state = dir.path().join("state");
        let private = StateDir::open(&state).unwrap();
        symlink(&victim, private.path_of("soft")).unwrap();
        std::fs::hard_link(&victim, private.path_of("hard")).unwrap();
        for name in ["soft", "hard"] {
            assert!(
                private
                    .open_to_append(name)
                    .unwrap_err()
                    .cause
                    .contains("remove it")
            );
            assert!(private.read(name, 100).is_err());
        }
        // A new file replaces a link, not the link's target.
        symlink(&victim, private.path_of("soft.new")).unwrap();
        private.replace("soft", b"mine").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(private.read("soft", 100).unwrap(), Some(b"mine".to_vec()));
    }

    #[test]
    fn a_directory_of_somebody_elses_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        chmod(&open, 0o777);
        let said = StateDir::open(&open).unwrap_err().to_string();
        assert!(said.contains("chmod go-w") && said.contains("open"), "{said}");
        let link = dir.path().join("link");
        symlink(dir.path(), &link).unwrap();
        let said = StateDir::open(&link).unwrap_err().to_string();
        assert!(said.contains("link"), "{said}");
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        symlink(dir.path(), state.join("private")).unwrap();
        let said = StateDir::open(&state).unwrap_err().to_string();
        assert!(said.contains("private"), "{said}");
        assert!(StateDir::open_existing(&state).is_err());
        if rustix::process::geteuid().is_root() {
            let theirs = dir.path().join("theirs");
            std::fs::create_dir(&theirs).unwrap();
            std::os::unix::fs::chown(&theirs, Some(12345), None).unwrap();
            let said = StateDir::open(&theirs).unwrap_err().to_string();
            assert!(said.contains("12345") && said.contains("--state"), "{said}");
        }
    }

    #[test]
    fn looking_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        assert!(StateDir::open_existing(&state).unwrap().is_none());
        assert!(!state.exists());
        std::fs::create_dir(&state).unwrap();
        assert!(StateDir::open_existing(&state).unwrap().is_none());
        assert_eq!(std::fs::read_dir(&state).unwrap().count(), 0);
    }
}

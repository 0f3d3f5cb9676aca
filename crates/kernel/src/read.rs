//! Reads small kernel files. Reads are bounded, every error names the path, and a missing file is told apart from a broken one.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use homenode_host::HostError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::files::Part;

/// Why a kernel file could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The kernel did not return the file.
    #[error("cannot read {path}: {cause}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        cause: String,
    },
    /// The file is larger than any sane kernel writes it.
    #[error("{path} is larger than {limit_bytes} bytes; refused")]
    TooLarge {
        /// The file.
        path: String,
        /// Most bytes to read.
        limit_bytes: u64,
    },
    /// The file is not in the expected form.
    #[error("{path}: expected {expected}, found `{found}`")]
    Malformed {
        /// The file.
        path: String,
        /// The expected form.
        expected: &'static str,
        /// The text found, shortened.
        found: String,
    },
    /// Several threads claim the same role.
    #[error(
        "{path}: cannot tell which thread is {what}: {count} threads have its name and no libvirt cgroup tells them apart: {tids}"
    )]
    Ambiguous {
        /// The folder of the threads.
        path: String,
        /// The role.
        what: String,
        /// Number of threads that claim it.
        count: usize,
        /// Ids of the first of these threads.
        tids: String,
    },
    /// The folder has more entries than the limit.
    #[error("{path} has more than {limit} entries; refused")]
    TooMany {
        /// The folder.
        path: String,
        /// Most entries to read.
        limit: usize,
    },
}

impl ReadError {
    /// Returns the error for a file that is not in the expected form.
    pub fn malformed(path: &Path, expected: &'static str, found: &str) -> ReadError {
        ReadError::Malformed {
            path: path.display().to_string(),
            expected,
            found: found.trim_end().chars().take(80).collect(),
        }
    }
}

impl From<ReadError> for HostError {
    fn from(error: ReadError) -> HostError {
        let said = error.to_string();
        match error {
            ReadError::Ambiguous { path, .. } | ReadError::TooMany { path, .. } => {
                let cause = said
                    .trim_start_matches(&path)
                    .trim_start_matches([':', ' '])
                    .to_owned();
                HostError::Unreadable { path, cause }
            }
            ReadError::Io { path, cause } => HostError::Unreadable { path, cause },
            ReadError::TooLarge { path, limit_bytes } => HostError::Unreadable {
                path,
                cause: format!("it is larger than {limit_bytes} bytes"),
            },
            ReadError::Malformed {
                path,
                expected,
                found,
            } => HostError::Unreadable {
                path,
                cause: format!("expected {expected}, found `{found}`"),
            },
        }
    }
}

/// Most bytes of one small file.
pub const SMALL_BYTES: u64 = 64 << 10;

/// Initial buffer size: most kernel files are smaller, and none reports its size.
const ROOM_BYTES: usize = 4 << 10;

/// Reads a file of at most `limit_bytes`; `None` if there is no such file, or if its task has ended.
pub fn text_if_there(path: &Path, limit_bytes: u64) -> Result<Option<String>, ReadError> {
    let mut room = Vec::new();
    let is_there = read_at(
        (rustix::fs::CWD, path),
        || path.to_owned(),
        limit_bytes,
        &mut room,
    )?;
    // Names of threads and files may hold any byte, so replace invalid ones; numbers are not affected.
    let text = |bytes| {
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    };
    Ok(is_there.then(|| text(room)))
}

/// Reads a file below an open directory into `room`, replacing its contents. Returns false if the file is not there.
fn read_at(
    (dir, path): (impl AsFd, &Path),
    full: impl Fn() -> PathBuf,
    limit_bytes: u64,
    room: &mut Vec<u8>,
) -> Result<bool, ReadError> {
    checked(full, limit_bytes, room, |room| {
        let file = rustix::fs::openat(dir, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let read = |room: &mut Vec<u8>| rustix::io::read(&file, rustix::buffer::spare_capacity(room));
        fill(room, limit_bytes, Text::InPieces, read)
    })
}

/// Reads into `room`, within the limit. Returns false if the source is not there.
fn checked(
    full: impl Fn() -> PathBuf,
    limit_bytes: u64,
    room: &mut Vec<u8>,
    read: impl FnOnce(&mut Vec<u8>) -> rustix::io::Result<()>,
) -> Result<bool, ReadError> {
    let io = |e: std::io::Error| ReadError::Io {
        path: full().display().to_string(),
        cause: e.to_string(),
    };
    #[cfg(any(test, feature = "testing"))]
    crate::fault::of_file(crate::fault::Point::Read).map_err(io)?;
    room.clear();
    #[cfg(any(test, feature = "testing"))]
    match before(&full) {
        Err(e) if is_absence(&e) => return Ok(false),
        answered => answered.map_err(io)?,
    }
    match read(room).map_err(std::io::Error::from) {
        Ok(()) if room.len() as u64 > limit_bytes => Err(ReadError::TooLarge {
            path: full().display().to_string(),
            limit_bytes,
        }),
        Ok(()) => Ok(true),
        Err(e) if is_absence(&e) => Ok(false),
        Err(e) => Err(io(e)),
    }
}

/// Tells a simulated kernel that this path is about to be read.
#[cfg(any(test, feature = "testing"))]
fn before(path: impl Fn() -> PathBuf) -> std::io::Result<()> {
    crate::system::simulated().map_or(Ok(()), |system| system.read(&path()))
}

/// Names of threads and files may hold any byte, so invalid ones are replaced; numbers are not affected.
fn readable(bytes: &[u8]) -> Cow<'_, str> {
    // Usually no byte needs replacing, and this check is faster.
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// How the kernel delivers a file's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    /// All at once: a short read is the whole text.
    Whole,
    /// In pieces of any size.
    InPieces,
}

/// Reads to a file's end, or past the limit.
fn fill(
    room: &mut Vec<u8>,
    limit_bytes: u64,
    made: Text,
    mut read: impl FnMut(&mut Vec<u8>) -> rustix::io::Result<usize>,
) -> rustix::io::Result<()> {
    while room.len() as u64 <= limit_bytes {
        if room.len() == room.capacity() {
            room.reserve(ROOM_BYTES.max(room.len()));
        }
        let asked = room.capacity() - room.len();
        match read(room) {
            Ok(0) => return Ok(()),
            Ok(count) if made == Text::Whole && count < asked => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A directory that is kept open. Reads in it concern the process or group that it was opened for, never a later one with the
/// same number or name. Its path is resolved only once.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens a directory; `None` if it does not exist.
    pub fn open(path: &Path) -> Result<Option<Dir>, ReadError> {
        Dir::open_at(rustix::fs::CWD, path, path.to_owned())
    }

    /// Opens a directory below this one; `None` if it does not exist.
    pub fn below(&self, name: &str) -> Result<Option<Dir>, ReadError> {
        Dir::open_at(&self.fd, Path::new(name), self.path.join(name))
    }

    fn open_at(dir: impl AsFd, name: &Path, path: PathBuf) -> Result<Option<Dir>, ReadError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(dir, name, flags, Mode::empty()).map_err(std::io::Error::from) {
            Ok(fd) => Ok(Some(Dir { fd, path })),
            Err(e) if is_absence(&e) => Ok(None),
            Err(e) => Err(ReadError::Io {
                path: path.display().to_string(),
                cause: e.to_string(),
            }),
        }
    }

    /// Returns the path that it was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a file of at most `limit_bytes` in this directory into `room`; `None` as in [`text_if_there`].
    pub fn text<'a>(
        &self,
        name: &str,
        limit_bytes: u64,
        room: &'a mut Vec<u8>,
    ) -> Result<Option<Cow<'a, str>>, ReadError> {
        let is_there = read_at(
            (&self.fd, Path::new(name)),
            || self.path.join(name),
            limit_bytes,
            room,
        )?;
        Ok(is_there.then(|| readable(room)))
    }

    /// Lists the entries whose names are numbers, ascending and at most `limit`. Empty if the directory is gone.
    pub fn numbers(&self, limit: usize, into: &mut Vec<i32>) -> Result<(), ReadError> {
        into.clear();
        let mut list = || -> std::io::Result<()> {
            #[cfg(any(test, feature = "testing"))]
            before(|| self.path.clone())?;
            rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::Start(0))?;
            let mut room = [std::mem::MaybeUninit::uninit(); ROOM_BYTES];
            let mut entries = rustix::fs::RawDir::new(&self.fd, &mut room);
            while let Some(entry) = entries.next().filter(|_| into.len() < limit) {
                let entry = entry?;
                let name = entry.file_name().to_str().ok();
                into.extend(name.and_then(|name| name.parse::<i32>().ok()));
            }
            Ok(())
        };
        match list() {
            Err(e) if !is_absence(&e) => Err(ReadError::Io {
                path: self.path.display().to_string(),
                cause: e.to_string(),
            }),
            _ => {
                into.sort_unstable();
                Ok(())
            }
        }
    }
}

/// A small file that is read regularly, and whose text the kernel delivers all at once. It is kept open as long as there are
/// plenty of descriptors, since finding a file is most of the cost of reading it. Kernel files of a process, thread or group that
/// is gone return nothing.
#[derive(Debug)]
pub struct Often {
    name: String,
    fd: OnceLock<OwnedFd>,
}

/// Number of files that this process keeps open.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Returns the most files to keep open.
fn kept_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| Part::KeptOpen.share(usize::MAX))
}

impl Often {
    /// Names a file, relative to the directory passed to each read.
    pub fn new(name: impl Into<String>) -> Often {
        let (name, fd) = (name.into(), OnceLock::new());
        Often { name, fd }
    }

    /// Like [`Dir::text`], with a limit of [`SMALL_BYTES`].
    pub fn text<'a>(&self, dir: &Dir, room: &'a mut Vec<u8>) -> Result<Option<Cow<'a, str>>, ReadError> {
        if self.fd.get().is_none() && KEPT.load(Ordering::Relaxed) >= kept_max() {
            return dir.text(&self.name, SMALL_BYTES, room);
        }
        let full = || dir.path.join(&self.name);
        let is_there = checked(full, SMALL_BYTES, room, |room| {
            let fd = match self.fd.get() {
                Some(fd) => fd,
                None => {
                    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                    let opened = rustix::fs::openat(&dir.fd, &self.name, flags, Mode::empty())?;
                    KEPT.fetch_add(1, Ordering::Relaxed);
                    self.fd.get_or_init(|| opened)
                }
            };
            fill(room, SMALL_BYTES, Text::Whole, |room| {
                let at = room.len() as u64;
                rustix::io::pread(fd, rustix::buffer::spare_capacity(room), at)
            })
        })?;
        Ok(is_there.then(|| readable(room)))
    }

    /// Returns true if the file was removed since its first read. Kernel files never are, so this is checked only in tests, whose
    /// trees are handmade.
    pub fn is_removed(&self) -> bool {
        if !cfg!(any(test, feature = "testing")) {
            return false;
        }
        let removed = |fd: &OwnedFd| rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_nlink == 0);
        self.fd.get().is_some_and(removed)
    }
}

impl Drop for Often {
    fn drop(&mut self) {
        if self.fd.get().is_some() {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Reads a file that every kernel has.
pub fn text(path: &Path, limit_bytes: u64) -> Result<String, ReadError> {
    text_if_there(path, limit_bytes)?.ok_or_else(|| ReadError::Io {
        path: path.display().to_string(),
        cause: "no such file".into(),
    })
}

/// Reads a file that holds one value.
pub fn value_if_there<T: FromStr>(path: &Path, expected: &'static str) -> Result<Option<T>, ReadError> {
    let Some(text) = text_if_there(path, SMALL_BYTES)? else {
        return Ok(None);
    };
    text.trim()
        .parse()
        .map(Some)
        .map_err(|_| ReadError::malformed(path, expected, &text))
}

/// Returns the names in a directory, sorted; empty if the directory does not exist. Keeps at most `limit`.
pub fn names(dir: &Path, limit: usize) -> Result<Vec<String>, ReadError> {
    let io = |e: std::io::Error| ReadError::Io {
        path: dir.display().to_string(),
        cause: e.to_string(),
    };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if is_absence(&e) => return Ok(Vec::new()),
        Err(e) => return Err(io(e)),
    };
    let mut names = Vec::new();
    for entry in entries.take(limit) {
        match entry {
            Ok(entry) => names.extend(entry.file_name().into_string()),
            Err(e) if is_absence(&e) => break,
            Err(e) => return Err(io(e)),
        }
    }
    names.sort();
    Ok(names)
}

/// Returns true if an error means that a file, task or device does not exist or is gone.
pub fn is_absence(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
        || matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENODEV))
}

/// Returns `path` below `root`, whether or not it has a leading slash.
pub fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    #[test]
    fn absent_is_none_and_too_large_is_an_error_with_the_path() {
        let tree = Tree::new(&[("a", "12\n"), ("b", "x")]);
        assert_eq!(text_if_there(&tree.root().join("none"), 9), Ok(None));
        assert_eq!(text_if_there(&tree.root().join("a/below-a-file"), 9), Ok(None));
        assert_eq!(
            value_if_there::<u32>(&tree.root().join("a"), "a number"),
            Ok(Some(12))
        );
        let error = value_if_there::<u32>(&tree.root().join("b"), "a number").unwrap_err();
        assert!(
            error.to_string().ends_with("/b: expected a number, found `x`"),
            "{error}"
        );
        let error = text(&tree.root().join("a"), 2).unwrap_err();
        assert!(
            matches!(error, ReadError::TooLarge { limit_bytes: 2, .. }),
            "{error}"
        );
        assert!(
            text(&tree.root().join("none"), 2)
                .unwrap_err()
                .to_string()
                .contains("/none")
        );
    }

    #[test]
    fn a_file_that_is_read_often_is_the_one_that_it_was_first() {
        let tree = Tree::new(&[("d/a", "one\n")]);
        let dir = Dir::open(&tree.root().join("d")).unwrap().unwrap();
        let (file, none) = (Often::new("a"), Often::new("none"));
        let mut room = Vec::new();
        assert_eq!(file.text(&dir, &mut room).unwrap().unwrap(), "one\n");
        assert_eq!(none.text(&dir, &mut room), Ok(None));
        let long = "x".repeat(3 * ROOM_BYTES);
        for text in ["another\n", "", &long] {
            tree.write("d/a", text);
            assert_eq!(file.text(&dir, &mut room).unwrap().unwrap(), text);
        }
        tree.write("d/a", &"x".repeat(SMALL_BYTES as usize + 1));
        let error = file.text(&dir, &mut room).unwrap_err();
        assert!(matches!(error, ReadError::TooLarge { .. }), "{error}");
        assert!(!file.is_removed());
        std::fs::remove_file(tree.root().join("d/a")).unwrap();
        tree.write("d/a", "of another process");
        assert!(file.is_removed());
        // As if the number of a process were reused.
        std::fs::rename(tree.root().join("d"), tree.root().join("before")).unwrap();
        tree.write("d/none", "of another process");
        assert_eq!(none.text(&dir, &mut room), Ok(None));
        assert_eq!(dir.below("none").map(|dir| dir.is_none()), Ok(true));
    }
}

//! Opens files as a QEMU process sees them: below its root, in its mount namespace, and, to be read, with its permissions.
//!
//! The process itself names the paths to open, and may name anything. So each component of a path is opened separately, without
//! following links (`O_PATH`). This has no effect on the file, and what was checked cannot be exchanged afterwards. The file at
//! the end of the path is opened for reading only if it is a regular file that the process's users may read.
//!
//! The agent's unit may not become another user (it has no `CAP_SETUID`), so permissions are checked from owners and modes.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, Stat};

use homenode_kernel::read;

/// Most links to follow on one path.
const LINKS_MAX: usize = 40;
/// Most components of one path.
const PARTS_MAX: usize = 256;
/// Ample, since the option file of a VM with many devices has tens of kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Time limit for reading a file, whose file system may be under another user's control.
const READ_MAX: Duration = Duration::from_millis(300);
/// Most files that may be waited for at once.
const WAITING_MAX: usize = 4;
/// Most ancestors of a process to look at.
const PARENTS_MAX: usize = 32;
/// File systems whose files belong to the kernel (proc, sysfs, debugfs, tracefs, cgroups): reading one may have side effects.
const OF_KERNEL: [i64; 6] = [
    0x9fa0,
    0x6265_6572,
    0x6462_6720,
    0x7472_6163,
    0x6367_7270,
    0x0027_e0eb,
];

const SEARCH: u32 = 0o1;
const READ: u32 = 0o4;
const CAP_DAC_OVERRIDE: u64 = 1 << 1;
const CAP_DAC_READ_SEARCH: u64 = 1 << 2;

/// A QEMU, and what is needed to open files as it sees them.
#[derive(Clone, Debug)]
pub(super) struct Eyes {
    /// Root of the host's own files.
    pub root: PathBuf,
    pub pid: i32,
    /// Whether the process has changed its root (`-chroot`) since it opened the files in its options.
    pub changes_root: bool,
}

impl Eyes {
    /// Returns the view of a process, judged by its current root and not by its command line.
    pub(super) fn of(root: &Path, pid: i32) -> Eyes {
        let its_root = std::fs::read_link(root.join(format!("proc/{pid}/root")));
        Eyes {
            root: root.to_owned(),
            pid,
            changes_root: its_root.is_ok_and(|path| path != Path::new("/")),
        }
    }

    fn process(&self, pid: impl std::fmt::Display) -> PathBuf {
        self.root.join(format!("proc/{pid}"))
    }

    /// Returns the roots below which a path of the command line may be, the likeliest first. A process that changed its root
    /// opened the path before that: its former root is the root of an ancestor in the same mount namespace.
    ///
    /// # Errors
    /// When the process's own root cannot be opened and the process has not changed its root.
    fn roots(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |path: PathBuf| -> io::Result<OwnedFd> {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            Ok(rustix::fs::open(path, flags, Mode::empty())?)
        };
        let own = open(self.process(self.pid).join("root"));
        if !self.changes_root {
            return Ok(vec![own?]);
        }
        let namespace =
            |pid: &dyn std::fmt::Display| std::fs::read_link(self.process(pid).join("ns/mnt")).ok();
        let theirs = namespace(&self.pid);
        let mut roots = Vec::new();
        let mut above = self.parent(self.pid);
        for _ in 0..PARENTS_MAX {
            let Some(pid) = above else { break };
            if theirs.is_some() && namespace(&pid) == theirs {
                roots.extend(open(self.process(pid).join("root")).ok());
            }
            above = self.parent(pid);
        }
        if theirs.is_some() && namespace(&"self") == theirs {
            roots.extend(open(self.root.clone()).ok());
        }
        roots.extend(own.ok());
        Ok(roots)
    }

    fn parent(&self, pid: i32) -> Option<i32> {
        let status = read::text_if_there(&self.process(pid).join("status"), read::SMALL_BYTES).ok()??;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        parent.trim().parse().ok().filter(|parent| *parent > 0)
    }

    /// Opens a file without any effect on it (`O_PATH`), regardless of permissions. Follows links as if the process's root were
    /// ours.
    ///
    /// # Errors
    /// When the file does not exist.
    pub(super) fn open(&self, path: &str) -> io::Result<OwnedFd> {
        self.find(path, |_| true).map(|found| found.file)
    }

    fn find(&self, path: &str, may_search: impl Fn(&OwnedFd) -> bool) -> io::Result<Found> {
        let mut first = None;
        for root in self.roots()? {
            match walk(root, path, &may_search) {
                Ok(found) => return Ok(found),
                Err(error) => first = first.or(Some(error)),
            }
        }
        let error = first.unwrap_or_else(|| io::ErrorKind::NotFound.into());
        match self.changes_root {
            true => Err(io::Error::other(format!(
                "{error}; it was started with -chroot, so a file that it opened before may be outside its root and that of \
                 the process that started it; put the file at the same path below the new root, too"
            ))),
            false => Err(error),
        }
    }

    /// Returns the text of an option file that the process was told to read. `pid_file` is the file to which it writes its
    /// process number, and `own` is its number in its own namespace.
    ///
    /// # Errors
    /// When the file does not exist, is not a regular file, or the process's users may not read it.
    pub(super) fn text(&self, path: &str, pid_file: Option<&str>, own: i32) -> io::Result<String> {
        let rights = Rights::of(self)?;
        let found = self.find(path, |dir| rights.permit(dir, SEARCH))?;
        let stat = checked_file(&found.file)?;
        let may_read = found.is_permitted && rights.permit(&found.file, READ);
        if !may_read && !found.is_given_by_root(&stat, pid_file, own) {
            return Err(io::Error::other(
                "the user that it runs as may not read it; let that user read the file and search the directories above it",
            ));
        }
        match u64::try_from(stat.st_size) {
            Ok(0) => Ok(String::new()),
            Ok(size) if size <= FILE_BYTES_MAX => text_of(&found.file),
            _ => Err(io::Error::other(format!(
                "it is larger than {FILE_BYTES_MAX} bytes"
            ))),
        }
    }

    /// Like [`Eyes::text`], with a time limit, since the file system may not answer.
    ///
    /// # Errors
    /// As for [`Eyes::text`], or when reading took too long.
    pub(super) fn text_in_time(&self, path: &str, pid_file: Option<&str>, own: i32) -> io::Result<String> {
        static WAITING: AtomicUsize = AtomicUsize::new(0);
        if WAITING.fetch_add(1, Ordering::AcqRel) >= WAITING_MAX {
            WAITING.fetch_sub(1, Ordering::AcqRel);
            return Err(io::Error::other(
                "the agent is still waiting for other such files, whose file systems do not answer",
            ));
        }
        let (eyes, path) = (self.clone(), path.to_owned());
        let pid_file = pid_file.map(str::to_owned);
        let (sender, receiver) = mpsc::sync_channel(1);
        let reader = std::thread::Builder::new().name("readconfig".to_owned());
        let started = reader.spawn(move || {
            let text = eyes.text(&path, pid_file.as_deref(), own);
            WAITING.fetch_sub(1, Ordering::AcqRel);
            // After the time limit the receiver is gone.
            let _ = sender.send(text);
        });
        if let Err(error) = started {
            WAITING.fetch_sub(1, Ordering::AcqRel);
            return Err(error);
        }
        receiver
            .recv_timeout(READ_MAX)
            .unwrap_or_else(|_| Err(io::Error::other("its file system does not answer")))
    }
}

/// Returns the status of a file; fails unless it is a regular file that does not belong to the kernel.
fn checked_file(file: &OwnedFd) -> io::Result<Stat> {
    let stat = rustix::fs::fstat(file)?;
    let kind = rustix::fs::fstatfs(file)?.f_type;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is not a regular file"));
    }
    // The field's type depends on the architecture.
    let is_kernels = |of: &i64| i128::from(*of) == i128::from(kind);
    match OF_KERNEL.iter().any(is_kernels) {
        true => Err(io::Error::other(
            "it is in a file system of the kernel, such as /proc",
        )),
        false => Ok(stat),
    }
}

/// Reads exactly the file that was checked.
fn text_of(file: &OwnedFd) -> io::Result<String> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// The end of a path.
struct Found {
    file: OwnedFd,
    /// The directory that contains the file.
    dir: OwnedFd,
    /// Whether every directory on the path may be searched.
    is_permitted: bool,
}

impl Found {
    /// Whether root put the file there for this very process, which had root's rights when it read the file and has given them up
    /// since (`-runas`, as Incus does). If so, only root can write to the file and its directory, and the directory contains the
    /// pid file that QEMU writes before it gives up root's rights.
    fn is_given_by_root(&self, stat: &Stat, pid_file: Option<&str>, own: i32) -> bool {
        let is_roots = |stat: &Stat| {
            let own = rustix::process::geteuid().as_raw();
            (stat.st_uid == 0 || stat.st_uid == own) && stat.st_mode & 0o022 == 0
        };
        let name = pid_file.and_then(|path| Path::new(path).file_name());
        let Some(name) = name.filter(|name| name.as_bytes().ends_with(b".pid")) else {
            return false;
        };
        let written = || {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?;
            let stat = checked_file(&file)?;
            match is_roots(&stat) && (1..64).contains(&stat.st_size) {
                true => text_of(&file),
                false => Err(io::ErrorKind::PermissionDenied.into()),
            }
        };
        is_roots(stat)
            && rustix::fs::fstat(&self.dir).is_ok_and(|stat| is_roots(&stat))
            && written().is_ok_and(|text| text.trim().parse() == Ok(own))
    }
}

/// Walks a path below a root, one component at a time.
fn walk(root: OwnedFd, path: &str, may_search: impl Fn(&OwnedFd) -> bool) -> io::Result<Found> {
    let parts_of = |path: &OsStr| -> VecDeque<OsString> {
        let parts = path.as_bytes().split(|byte| *byte == b'/');
        let named = parts.filter(|part| !part.is_empty() && *part != b".");
        named.map(|part| OsStr::from_bytes(part).to_owned()).collect()
    };
    let mut parts = parts_of(OsStr::new(path));
    let mut within = Vec::new();
    let (mut dir, mut is_permitted) = (root, true);
    let (mut links, mut steps) = (0, 0);
    while let Some(part) = parts.pop_front() {
        steps += 1;
        if steps > PARTS_MAX {
            return Err(rustix::io::Errno::NAMETOOLONG.into());
        }
        is_permitted &= may_search(&dir);
        if part == ".." {
            // The parent of the process's root is that root itself.
            dir = within.pop().unwrap_or(dir);
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(&dir, &part, flags, Mode::empty())?;
        match FileType::from_raw_mode(rustix::fs::fstat(&next)?.st_mode) {
            FileType::Directory => within.push(std::mem::replace(&mut dir, next)),
            FileType::Symlink => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(rustix::io::Errno::LOOP.into());
                }
                let target = OsString::from_vec(rustix::fs::readlinkat(&next, "", Vec::new())?.into_bytes());
                if target.as_bytes().starts_with(b"/") && !within.is_empty() {
                    dir = within.swap_remove(0);
                    within.clear();
                }
                let mut followed = parts_of(&target);
                followed.append(&mut parts);
                parts = followed;
            }
            _ if parts.is_empty() => {
                let file = next;
                return Ok(Found {
                    file,
                    dir,
                    is_permitted,
                });
            }
            _ => return Err(rustix::io::Errno::NOTDIR.into()),
        }
    }
    Err(rustix::io::Errno::ISDIR.into())
}

/// A process's permissions on files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rights {
    /// Users whose rights the process has or can take: each of them needs permission.
    users: Vec<u32>,
    groups: Vec<u32>,
    /// Whether the process may read any file, whatever its mode.
    is_free: bool,
}

impl Rights {
    fn of(eyes: &Eyes) -> io::Result<Rights> {
        let path = eyes.process(eyes.pid).join("status");
        let status = read::text_if_there(&path, read::SMALL_BYTES).map_err(io::Error::other)?;
        let status = status.ok_or(io::ErrorKind::NotFound)?;
        let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let numbers = |key: &str| -> Vec<u32> {
            let words = line(key).unwrap_or_default().split_ascii_whitespace();
            words.filter_map(|word| word.parse().ok()).collect()
        };
        let (users, own_groups) = (numbers("Uid:"), numbers("Gid:"));
        if users.len() != 4 {
            return Err(io::Error::other(
                "cannot tell which user's rights its process has",
            ));
        }
        let mut groups = numbers("Groups:");
        groups.extend(own_groups.get(3));
        let capabilities = line("CapEff:").and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        let has_some = capabilities.is_some_and(|all| all & (CAP_DAC_OVERRIDE | CAP_DAC_READ_SEARCH) != 0);
        // Any process has these capabilities in its own user namespace.
        let namespace = |path: PathBuf| std::fs::read_link(path.join("ns/user")).ok();
        let is_here = || namespace(eyes.process(eyes.pid)) == namespace(eyes.process("self"));
        Ok(Rights {
            is_free: users.iter().all(|user| *user == 0) && has_some && is_here(),
            users,
            groups,
        })
    }

    /// Whether the process may read a file, or search a directory.
    fn permit(&self, file: &OwnedFd, wanted: u32) -> bool {
        let Ok(stat) = rustix::fs::fstat(file) else {
            return false;
        };
        let may = |user: u32| {
            let shift = match () {
                () if user == stat.st_uid => 6,
                // Access control lists are not read: only the owner's rights do not depend on them.
                () if has_access_list(file) => return false,
                () if self.groups.contains(&stat.st_gid) => 3,
                () => 0,
            };
            stat.st_mode >> shift & wanted == wanted
        };
        self.is_free || self.users.iter().all(|user| may(*user))
    }
}

fn has_access_list(file: &OwnedFd) -> bool {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut none: [u8; 0] = [];
    rustix::fs::getxattr(path, c"system.posix_acl_access", &mut none).is_ok_and(|bytes| bytes > 0)
}

#[cfg(test)]
mod tests;

//! Checks the directories above one of the agent's own directories. A user who can rename one of them can take away everything
//! below it: the next agent would then find no journal, and undo nothing.
//!
//! Each component of the path is opened relative to the previous one and checked; a link is resolved component by component in
//! the same way. A directory is accepted if it belongs to root or the agent's user and no other user can write to it. A directory
//! with the sticky bit, such as `/tmp`, may be writable by others, because users can rename and remove only their own files
//! there. The next component of the path must then belong to root or the agent's user.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{PUBLIC_MODE, StateError, WRITABLE_BY_OTHERS, make, with_remedy};

/// Most links on a path; the kernel has the same limit.
const LINKS_MAX: usize = 40;
const STICKY: u32 = 0o1000;

/// Opens the parent of one of the agent's directories. Returns it and the directory's name in it; `None` if the parent does not
/// exist and `is_made` is false.
///
/// # Errors
/// When another user can change a directory on the path, or a directory cannot be opened or created.
pub(crate) fn above(path: &Path, is_made: bool) -> Result<Option<(OwnedFd, OsString)>, StateError> {
    let absolute = std::path::absolute(path).map_err(|e| StateError::new("use", path, e))?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        let cause = "it has no name of its own; choose a directory below it with --state";
        return Err(StateError::new("use", path, cause));
    };
    let mut walk = Walk::begin(path)?;
    walk.go_on_with(parent);
    while let Some(part) = walk.left.pop_front() {
        if !walk.enter(&part, is_made)? {
            return Ok(None);
        }
    }
    Ok(Some((walk.at, name.to_owned())))
}

/// A walk down to one of the agent's directories.
struct Walk<'a> {
    /// The agent's directory, for messages.
    of: &'a Path,
    /// The directory reached so far.
    at: OwnedFd,
    /// The path of `at`, without links.
    path: PathBuf,
    /// Components that are still to be entered.
    left: VecDeque<OsString>,
    link_count: usize,
}

impl Walk<'_> {
    fn begin(of: &Path) -> Result<Walk<'_>, StateError> {
        let (at, path) = root(of)?;
        Ok(Walk {
            of,
            at,
            path,
            left: VecDeque::new(),
            link_count: 0,
        })
    }

    /// Puts the components of a path before those that are left.
    fn go_on_with(&mut self, path: &Path) {
        let parts = path.components().filter_map(|part| match part {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
        });
        for (at, part) in parts.enumerate() {
            self.left.insert(at, part);
        }
    }

    /// Enters a directory, or follows a link; `false` if nothing of that name exists and `is_made` is false.
    fn enter(&mut self, part: &OsStr, is_made: bool) -> Result<bool, StateError> {
        let path = match part.as_encoded_bytes() {
            b".." => self.path.parent().unwrap_or(Path::new("/")).to_owned(),
            _ => self.path.join(part),
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.at, part, flags, Mode::empty());
        let found = match open() {
            Err(Errno::NOENT) if is_made => {
                make(&self.at, Path::new(part), &path, PUBLIC_MODE)?;
                open()
            }
            Err(Errno::NOENT) => return Ok(false),
            found => found,
        };
        let found = found.map_err(|e| StateError::new("open", &path, with_remedy(e)))?;
        let stat = rustix::fs::fstat(&found).map_err(|e| StateError::new("open", &path, e))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                check(&stat, &path, self.of)?;
                (self.at, self.path) = (found, path);
            }
            FileType::Symlink => {
                check_owner(&stat, &path, self.of)?;
                self.follow(part, &path)?;
            }
            _ => {
                let cause = format!("{} above it is not a directory", path.display());
                return Err(StateError::new("use", self.of, cause));
            }
        }
        Ok(true)
    }

    fn follow(&mut self, part: &OsStr, path: &Path) -> Result<(), StateError> {
        self.link_count += 1;
        if self.link_count > LINKS_MAX {
            return Err(StateError::new("open", path, Errno::LOOP));
        }
        let to = rustix::fs::readlinkat(&self.at, part, Vec::new());
        let to = to.map_err(|e| StateError::new("open", path, with_remedy(e)))?;
        let to = PathBuf::from(OsString::from_vec(to.into_bytes()));
        if to.is_absolute() {
            (self.at, self.path) = root(self.of)?;
        }
        self.go_on_with(&to);
        Ok(())
    }
}

fn root(of: &Path) -> Result<(OwnedFd, PathBuf), StateError> {
    let path = PathBuf::from("/");
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(CWD, &path, flags, Mode::empty());
    let at = opened.map_err(|e| StateError::new("open", &path, e))?;
    let stat = rustix::fs::fstat(&at).map_err(|e| StateError::new("open", &path, e))?;
    check(&stat, &path, of)?;
    Ok((at, path))
}

/// Checks that no other user can replace what is in a directory with this status.
fn check(stat: &Stat, path: &Path, of: &Path) -> Result<(), StateError> {
    check_owner(stat, path, of)?;
    if stat.st_mode & WRITABLE_BY_OTHERS == 0 || stat.st_mode & STICKY != 0 {
        return Ok(());
    }
    let (path, mode) = (path.display(), stat.st_mode & 0o7777);
    let cause = format!(
        "other users can write to {path} above it (owner {}, mode {mode:04o}) and so move it away, with the record of what to \
         undo; remove that permission (chmod go-w {path}), or choose another place with --state",
        stat.st_uid
    );
    Err(StateError::new("use", of, cause))
}

fn check_owner(stat: &Stat, path: &Path, of: &Path) -> Result<(), StateError> {
    let own = rustix::process::geteuid().as_raw();
    if stat.st_uid == own || stat.st_uid == 0 {
        return Ok(());
    }
    let (path, mode) = (path.display(), stat.st_mode & 0o7777);
    let cause = format!(
        "{path} above it belongs to user {} (mode {mode:04o}), who can move it away, with the record of what to undo; give it to \
         root (chown -h root {path}), or choose another place with --state",
        stat.st_uid
    );
    Err(StateError::new("use", of, cause))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};

    use super::super::StateDir;

    use super::*;

    /// Creates a directory that others can write to. If root runs the test, it belongs to another user instead.
    fn theirs(path: &Path) {
        std::fs::create_dir(path).unwrap();
        if rustix::process::geteuid().is_root() {
            lchown(path, Some(12345), None).unwrap();
        } else {
            chmod(path, 0o777);
        }
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn refusal(state: &Path) -> String {
        let said = StateDir::open(state).unwrap_err().to_string();
        assert_eq!(StateDir::open_existing(state).unwrap_err().to_string(), said);
        said
    }

    #[test]
    fn a_directory_below_somebody_elses_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let their = dir.path().join("theirs");
        theirs(&their);
        std::fs::create_dir(their.join("ours")).unwrap();
        for state in [
            "theirs/state",
            "theirs/ours/state",
            "theirs/ours/../ours/more/state",
        ] {
            let said = refusal(&dir.path().join(state));
            let named = format!("{} above it", their.display());
            assert!(said.contains(&named) && said.contains("--state"), "{said}");
            if rustix::process::geteuid().is_root() {
                assert!(
                    said.contains("user 12345 (mode 0755)") && said.contains("chown"),
                    "{said}"
                );
            }
        }
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        for mode in [0o777, 0o775, 0o757] {
            chmod(&open, mode);
            let said = refusal(&open.join("state"));
            assert!(
                said.contains("chmod go-w") && said.contains(&format!("mode 0{mode:o}")),
                "{said}"
            );
        }
        assert_eq!(
            std::fs::read_dir(&open).unwrap().count(),
            0,
            "nothing is made there"
        );
        // Like `/tmp`: others cannot rename our files.
        chmod(&open, 0o1777);
        StateDir::open(&open.join("state")).unwrap();
        theirs(&open.join("theirs"));
        refusal(&open.join("theirs/state"));
    }

    #[test]
    fn links_above_a_directory_are_followed_and_checked_part_by_part() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        theirs(&path("theirs"));
        for name in ["theirs/ours", "good", "good/more"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        symlink(path("theirs/ours"), path("whole")).unwrap();
        symlink("good/../theirs/ours", path("part")).unwrap();
        symlink("round", path("round")).unwrap();
        for link in ["whole/state", "part/state", "part/new/state"] {
            let said = refusal(&path(link));
            assert!(said.contains(&path("theirs").display().to_string()), "{said}");
        }
        let said = refusal(&path("round/state"));
        assert!(said.contains("round"), "{said}");
        symlink("good/more/..", path("fine")).unwrap();
        symlink(path("fine"), path("good/finer")).unwrap();
        StateDir::open(&path("good/finer/new/state")).unwrap();
        assert!(path("good/new/state/private").is_dir());
        assert!(
            StateDir::open_existing(&path("fine/new/state"))
                .unwrap()
                .is_some()
        );
        assert!(
            StateDir::open_existing(&path("fine/none/state"))
                .unwrap()
                .is_none()
        );
        if rustix::process::geteuid().is_root() {
            // The owner of a link can point the link elsewhere.
            lchown(path("fine"), Some(12345), None).unwrap();
            let said = refusal(&path("fine/new/state"));
            assert!(said.contains("fine above it belongs to user 12345"), "{said}");
        }
    }

    #[test]
    fn a_directory_without_a_name_of_its_own_is_refused() {
        for path in ["/", "/tmp/.."] {
            assert!(refusal(Path::new(path)).contains("--state"), "{path}");
        }
    }
}

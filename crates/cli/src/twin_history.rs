//! The temporary history of a run on the simulated host, which other commands of the same user find without being told its name.
//!
//! Each run has a directory `PID-…` in a directory of the user's own below the system's for temporary files. A run that was
//! killed leaves its directory behind, which the next run removes.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, geteuid, test_kill_process};
use tempfile::TempDir;

/// Name of the file.
const FILE: &str = "history.sqlite";

/// A run's history, removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct TwinHistory(TempDir);

impl TwinHistory {
    /// Creates the directory.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(crate) fn create() -> std::io::Result<TwinHistory> {
        TwinHistory::create_in(&std::env::temp_dir())
    }

    /// Creates a directory that other commands do not find without its name. Another user, who may have taken the usual
    /// directory's name, cannot prevent that.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(crate) fn create_aside() -> std::io::Result<TwinHistory> {
        let only_own = fs::Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new()
            .prefix("homenode-")
            .permissions(only_own)
            .tempdir()?;
        Ok(TwinHistory(directory))
    }

    fn create_in(temporary: &Path) -> std::io::Result<TwinHistory> {
        let all = of_user(temporary);
        // The directory may exist already. The next lines check whether it may be used.
        let _ = DirBuilder::new().mode(0o700).create(&all);
        if !is_own(&all) {
            let why = format!(
                "{} is not a directory that only this user may use: remove it",
                all.display()
            );
            return Err(std::io::Error::other(why));
        }
        for (process, directory) in runs(&all) {
            if !is_running(process) {
                // The directory is a leftover of a run that was killed.
                let _ = fs::remove_dir_all(directory);
            }
        }
        let own = format!("{}-", std::process::id());
        Ok(TwinHistory(
            tempfile::Builder::new().prefix(&own).tempdir_in(all)?,
        ))
    }

    /// Path of the history.
    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join(FILE)
    }
}

/// Returns the history of the user's run on a simulated host that began last, if one is in progress.
pub(crate) fn of_running_twin() -> Option<PathBuf> {
    of_running_twin_in(&std::env::temp_dir())
}

fn of_running_twin_in(temporary: &Path) -> Option<PathBuf> {
    let all = of_user(temporary);
    let runs = runs(&all).filter(|(process, _)| is_own(&all) && is_running(*process));
    let begun = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let histories = runs
        .map(|(_, directory)| directory.join(FILE))
        .filter(|path| path.is_file());
    histories.max_by_key(|path| path.parent().and_then(begun))
}

/// Returns the directory that has all of this user's runs.
fn of_user(temporary: &Path) -> PathBuf {
    temporary.join(format!("homenode-twin-{}", geteuid().as_raw()))
}

/// Whether this is a directory of this user, and closed to others. In a directory for temporary files, another user may have made
/// it.
fn is_own(directory: &Path) -> bool {
    fs::symlink_metadata(directory)
        .is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0)
}

/// Returns the runs that have a directory, each with its process.
fn runs(all: &Path) -> impl Iterator<Item = (Pid, PathBuf)> {
    let entries = fs::read_dir(all).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let process = name.split_once('-')?.0.parse().ok().and_then(Pid::from_raw)?;
        Some((process, entry.path()))
    })
}

fn is_running(process: Pid) -> bool {
    test_kill_process(process).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_in_progress_is_found_and_one_that_ended_or_was_killed_leaves_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let found = || of_running_twin_in(temporary.path());
        let own = TwinHistory::create_in(temporary.path()).unwrap();
        assert_eq!(found(), None, "nothing was recorded yet");
        fs::write(own.path(), "").unwrap();
        assert_eq!(found(), Some(own.path()));
        // Numbers of processes are below 2^22.
        let killed = of_user(temporary.path()).join("99999999-x");
        fs::create_dir(&killed).unwrap();
        fs::write(killed.join(FILE), "").unwrap();
        assert_eq!(found(), Some(own.path()));
        let second = TwinHistory::create_in(temporary.path()).unwrap();
        assert!(!killed.exists());
        drop((own, second));
        assert_eq!(fs::read_dir(of_user(temporary.path())).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_others_may_use_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let all = of_user(temporary.path());
        fs::create_dir(&all).unwrap();
        fs::set_permissions(&all, fs::Permissions::from_mode(0o777)).unwrap();
        fs::create_dir(all.join(format!("{}-x", std::process::id()))).unwrap();
        fs::write(all.join(format!("{}-x/{FILE}", std::process::id())), "").unwrap();
        assert_eq!(of_running_twin_in(temporary.path()), None);
        let refused = TwinHistory::create_in(temporary.path()).unwrap_err();
        assert!(refused.to_string().contains("remove it"), "{refused}");
        let aside = TwinHistory::create_aside().unwrap();
        let directory = aside.path().parent().unwrap().to_owned();
        assert!(is_own(&directory), "closed to others");
        drop(aside);
        assert!(!directory.exists());
    }
}

//! A cgroup of its own for a guest that the agent is to throttle: the agent sets no quota on a cgroup that others share.
//!
//! Where systemd runs, the cgroup is a transient scope, which systemd removes when the guest has ended. Elsewhere it is a
//! directory of this module's, made only if the kernel's quotas are already on for such directories.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Afterwards;

const CGROUPS: &str = "sys/fs/cgroup";
const SYSTEMD_RUN: &str = "usr/bin/systemd-run";
/// Removes a directory when its last process has ended, which may take a moment.
const REMOVE: &str = "n=0; while [ -d \"$1\" ] && ! rmdir \"$1\" 2>/dev/null && [ $n -lt 300 ]; do n=$((n+1)); sleep 0.1; done";

/// How a guest gets its own cgroup.
pub(super) enum Scope {
    /// By systemd, as a transient scope of this name.
    Systemd {
        /// systemd's program for that.
        program: PathBuf,
        /// Name of the scope.
        name: String,
    },
    /// As a directory, which is removed after the guest.
    Directory {
        /// The directory's list of processes.
        processes: File,
        /// Removes the directory.
        _remove: Afterwards,
    },
}

impl Scope {
    /// Returns how a guest of this name gets its own cgroup on the host whose files begin at `root`; `None` if it cannot.
    pub(super) fn find(root: &Path, name: &str) -> Option<Scope> {
        // A killed guest's scope may still exist, so its name is not used again.
        let name = format!("{name}-{}", std::process::id());
        let program = root.join(SYSTEMD_RUN);
        if root.join("run/systemd/system").is_dir() && program.is_file() {
            return Some(Scope::Systemd { program, name });
        }
        let cgroups = root.join(CGROUPS);
        let enabled = fs::read_to_string(cgroups.join("cgroup.subtree_control")).ok()?;
        if !enabled.split_whitespace().any(|controller| controller == "cpu") {
            return None;
        }
        let directory = cgroups.join(name);
        fs::create_dir(&directory).ok()?;
        let remove = Afterwards::run(REMOVE, [&directory]);
        let processes = OpenOptions::new()
            .write(true)
            .open(directory.join("cgroup.procs"));
        match (remove, processes) {
            (Ok(remove), Ok(processes)) => Some(Scope::Directory {
                processes,
                _remove: remove,
            }),
            (Ok(_), Err(_)) => None,
            (Err(_), _) => {
                // The directory is empty, so removing it can only fail if another process has removed it.
                let _ = fs::remove_dir(&directory);
                None
            }
        }
    }

    /// Returns the command that runs a program in the cgroup.
    pub(super) fn command(&self, program: &Path) -> Command {
        match self {
            Scope::Systemd { program: run, name } => {
                let mut command = Command::new(run);
                command
                    .args(["--scope", "--quiet", "--collect", "--slice=machine.slice"])
                    // A weight, even the usual one, makes systemd turn on the controller that quotas need.
                    .args(["--property=CPUWeight=100", &format!("--unit={name}.scope"), "--"])
                    .arg(program);
                command
            }
            Scope::Directory { processes, .. } => {
                let mut command = Command::new(program);
                join(&mut command, processes);
                command
            }
        }
    }
}

/// Makes a program join a cgroup before it begins.
#[allow(unsafe_code)] // what a child does between fork and exec
fn join(command: &mut Command, processes: &File) {
    let processes = processes.as_raw_fd();
    // SAFETY: one system call, on a descriptor that the caller keeps open until the child has begun; nothing allocates.
    unsafe {
        command.pre_exec(move || {
            let own = b"0";
            if libc::write(processes, own.as_ptr().cast(), own.len()) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(command: &Command) -> Vec<String> {
        let program = std::iter::once(command.get_program());
        let words = program.chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn systemd_makes_the_scope_where_it_runs() {
        let root = tempfile::tempdir().unwrap();
        for directory in ["run/systemd/system", "usr/bin"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        fs::write(root.path().join(SYSTEMD_RUN), "").unwrap();
        let scope = Scope::find(root.path(), "a").unwrap();
        let words = arguments(&scope.command(Path::new("/usr/bin/qemu")));
        assert!(words[0].ends_with(SYSTEMD_RUN), "{words:?}");
        assert!(
            words.contains(&format!("--unit=a-{}.scope", std::process::id())),
            "{words:?}"
        );
        assert_eq!(words[words.len() - 2..], ["--", "/usr/bin/qemu"]);
    }

    #[test]
    fn a_directory_is_made_only_where_quotas_are_on_and_goes_with_the_scope() {
        let root = tempfile::tempdir().unwrap();
        let cgroups = root.path().join(CGROUPS);
        fs::create_dir_all(&cgroups).unwrap();
        assert!(Scope::find(root.path(), "a").is_none());
        fs::write(cgroups.join("cgroup.subtree_control"), "cpuset memory\n").unwrap();
        assert!(Scope::find(root.path(), "a").is_none());
        fs::write(cgroups.join("cgroup.subtree_control"), "cpuset cpu\n").unwrap();
        // In an ordinary directory there is no list of processes, so it is not used, and goes.
        assert!(Scope::find(root.path(), "a").is_none());
        let left: Vec<_> = fs::read_dir(&cgroups).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}

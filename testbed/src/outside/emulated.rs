//! The emulated host: one QEMU, started by virtme-ng over this machine's own files.
//!
//! Its root is this machine's root, read-only, with a scratch layer over the directories that are written to. So a
//! program built here is there too; but a file that changes while the host runs may be seen half old, half new.
//! Each boot therefore gets copies of the programs in a directory of its own.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::guard::{Guard, end_group};
use super::guest_image::{Kernel, build_initramfs};
use crate::exchange::{CAPABILITIES_DIR, Exchange};

/// Nodes of the emulated host; each has one CPU.
pub const NODES: u32 = 4;
/// Memory of one node in MiB.
const NODE_MIB: u32 = 1024;

/// Kernel options of a boot: what distinguishes the groups of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostKind {
    /// Automatic NUMA balancing off, so that only the case itself moves anything.
    Plain,
    /// The kernel's automatic NUMA balancing on.
    AutoNuma,
}

impl HostKind {
    fn kernel_options(self) -> &'static [&'static str] {
        // Transparent huge pages: khugepaged has locked up the emulated host in a TLB flush. A panic must end the
        // boot soon, and an oops is no state to test in.
        match self {
            Self::Plain => &[
                "transparent_hugepage=never",
                "numa_balancing=disable",
                "panic=5 oops=panic",
            ],
            Self::AutoNuma => &[
                "transparent_hugepage=never",
                "numa_balancing=enable",
                "panic=5 oops=panic",
            ],
        }
    }
}

/// What does not change from boot to boot.
#[derive(Debug)]
pub struct Workshop {
    /// Directory for everything the testbed makes, `target/testbed`.
    pub dir: PathBuf,
    kernel: Kernel,
    vmlinux: PathBuf,
    initramfs: PathBuf,
    program: PathBuf,
    homenode: Option<PathBuf>,
}

impl Workshop {
    /// Finds or builds the kernels, the guest's init and the programs.
    ///
    /// # Errors
    /// When something is not installed or does not build.
    pub fn prepare(workspace: &Path, run_dir: &Path, homenode: Option<PathBuf>) -> anyhow::Result<Self> {
        let dir = workspace.join("target/testbed");
        if !dir.join("venv/bin/vng").exists() {
            bail!(
                "virtme-ng is not in {}: run scripts/testbed-setup.sh",
                dir.join("venv").display()
            );
        }
        let images = dir.join("images");
        fs::create_dir_all(&images).with_context(|| format!("cannot create {}", images.display()))?;
        let kernel = Kernel::find()?;
        let vmlinux = kernel.unpack(&images)?;
        let initramfs = run_dir.join("initramfs");
        build_initramfs(workspace, &kernel, &dir.join("guest-build"), &initramfs)?;
        // Copies: a build during the run replaces the originals.
        let keep = |from: &Path, name: &str| copy(from, &run_dir.join(name));
        let program = keep(
            &std::env::current_exe().context("cannot find this program's own file")?,
            "program",
        )?;
        let homenode = homenode.map(|from| keep(&from, "homenode")).transpose()?;
        Ok(Self {
            dir,
            kernel,
            vmlinux,
            initramfs,
            program,
            homenode,
        })
    }

    fn capabilities(&self) -> PathBuf {
        self.dir.join("images").join(CAPABILITIES_DIR)
    }
}

/// A running emulated host.
#[derive(Debug)]
pub struct EmulatedHost {
    /// The shared directory.
    pub exchange: Exchange,
    /// Everything this boot wrote.
    pub dir: PathBuf,
    capabilities: PathBuf,
    process: Child,
    group: u32,
    started: Instant,
}

impl EmulatedHost {
    /// Starts a boot in `dir`, which is new.
    ///
    /// # Errors
    /// When a file cannot be copied or vng cannot be started.
    pub fn boot(workshop: &Workshop, kind: HostKind, dir: &Path, guard: &mut Guard) -> anyhow::Result<Self> {
        let exchange = Exchange::create(&dir.join("exchange"))?;
        let program = install_programs(workshop, dir)?;
        let inside = format!("{} inside {}", program.display(), exchange.root().display());
        let venv_bin = workshop.dir.join("venv/bin");
        let path = std::env::var("PATH").unwrap_or_default();
        let log = |name: &str| {
            let path = dir.join(name);
            fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))
        };
        let mut command = Command::new(venv_bin.join("vng"));
        command.env("PATH", format!("{}:{path}", venv_bin.display()));
        // Without --verbose the console goes nowhere, and a panic looks like a clean end.
        command.args([
            "--verbose",
            "--disable-kvm",
            "--disable-microvm",
            "--force-9p",
            "--run",
        ]);
        command.arg(&workshop.kernel.image);
        command.args(["--cpus".to_owned(), NODES.to_string()]);
        command.args(["--memory".to_owned(), format!("{}M", NODES * NODE_MIB)]);
        for node in 0..NODES {
            command.args(["--numa".to_owned(), format!("{NODE_MIB}M,cpus={node}")]);
        }
        for (from, to, distance) in distances() {
            command.args(["--numa-distance".to_owned(), format!("{from},{to}={distance}")]);
        }
        command.arg(format!("--rwdir={0}={0}", exchange.root().display()));
        for option in kind.kernel_options() {
            command.args(["--append", option]);
        }
        let monitor = dir.join("monitor");
        let monitor_options = format!(
            "-chardev socket,id=testbed,path={},server=on,wait=off -mon testbed",
            monitor.display()
        );
        command
            .arg(format!("--qemu-opts=-cpu EPYC,+svm,+npt {monitor_options}"))
            .arg("--")
            .arg(inside);
        // The console and the program's output are two files: QEMU opens each anew, and would overwrite one with
        // the other in a shared one.
        command
            .stdin(Stdio::null())
            .stdout(log("stdout.log")?)
            .stderr(log("console.log")?);
        let process = command.process_group(0).spawn().context("cannot start vng")?;
        let group = process.id();
        guard.add(group)?;
        let capabilities = workshop.capabilities();
        Ok(Self {
            exchange,
            dir: dir.to_owned(),
            capabilities,
            process,
            group,
            started: Instant::now(),
        })
    }

    /// Time since the boot was started.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Why the host has ended, if it has.
    ///
    /// # Errors
    /// When its process cannot be waited for.
    pub fn ended(&mut self) -> anyhow::Result<Option<String>> {
        let Some(status) = self
            .process
            .try_wait()
            .context("cannot ask for the state of vng")?
        else {
            return Ok(None);
        };
        let how = match (status.code(), status.signal()) {
            (_, Some(signal)) => format!("vng ended by signal {signal}"),
            (code, None) => format!("vng ended with status {}", code.unwrap_or(-1)),
        };
        Ok(Some(match self.last_words() {
            Some(words) => format!("{how}; last kernel message of trouble: {words}"),
            None => format!("{how}, and the console shows no panic"),
        }))
    }

    /// The first line of the console that speaks of a crash.
    #[must_use]
    pub fn last_words(&self) -> Option<String> {
        let bytes = fs::read(self.dir.join("console.log")).ok()?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let trouble = [
            "Kernel panic",
            "Oops",
            "BUG:",
            "soft lockup",
            "rcu: INFO",
            "general protection",
        ];
        text.lines()
            .find(|line| trouble.iter().any(|word| line.contains(word)))
            .map(|line| line.trim().to_owned())
    }

    /// Asks QEMU what the CPUs of a host that is silent are doing, and writes it to `hang.txt`.
    ///
    /// # Errors
    /// When QEMU's monitor does not answer either.
    pub fn describe_hang(&self) -> anyhow::Result<()> {
        let mut monitor =
            UnixStream::connect(self.dir.join("monitor")).context("cannot reach QEMU's monitor")?;
        monitor.set_read_timeout(Some(Duration::from_secs(3)))?;
        monitor.write_all(b"info status\ninfo cpus\ninfo registers -a\n")?;
        let mut said = Vec::new();
        // The monitor never closes by itself: the time-out is the normal end.
        let _ = monitor.read_to_end(&mut said);
        fs::write(self.dir.join("hang.txt"), said).context("cannot write hang.txt")
    }

    /// Ends the host at once.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn end(mut self, guard: &mut Guard) -> anyhow::Result<()> {
        end_group(self.group);
        let _ = self.process.wait();
        // Only a saving of time for later boots.
        let _ = copy_files(&self.exchange.root().join(CAPABILITIES_DIR), &self.capabilities);
        // The programs are copies; what is worth keeping are the logs.
        let _ = fs::remove_dir_all(self.dir.join("bin"));
        guard.remove(self.group)
    }
}

/// Copies this program, `homenode` if it is there, and the guest's files to where the boot reads them.
fn install_programs(workshop: &Workshop, dir: &Path) -> anyhow::Result<PathBuf> {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
    copy(&workshop.vmlinux, &bin.join("vmlinux"))?;
    copy(&workshop.initramfs, &bin.join("initramfs"))?;
    if let Some(homenode) = &workshop.homenode {
        copy(homenode, &bin.join("homenode"))?;
    }
    copy_files(&workshop.capabilities(), &bin.join(CAPABILITIES_DIR))?;
    copy(&workshop.program, &bin.join("homenode-testbed"))
}

/// Copies the files of a directory, if it is there.
fn copy_files(from: &Path, to: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<PathBuf> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(to.to_owned())
}

/// A square of four nodes: neighbours at 16, the opposite corner at 22.
fn distances() -> impl Iterator<Item = (u32, u32, u32)> {
    (0..NODES).flat_map(|from| {
        (from + 1..NODES).map(move |to| (from, to, if from + to == NODES - 1 { 22 } else { 16 }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_two_neighbours_and_one_opposite() {
        for node in 0..NODES {
            let mut seen: Vec<u32> = distances()
                .filter(|(from, to, _)| *from == node || *to == node)
                .map(|(_, _, far)| far)
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, [16, 16, 22]);
        }
    }
}

//! The emulated host: one QEMU, which virtme-ng starts over this machine's own files.
//!
//! Its root is this machine's root, read-only, with a scratch layer over the directories that are written to. So a program
//! built here is there, too. But a file that changes while the host runs may be seen half old, half new; each boot therefore
//! gets copies of the programs in its own directory.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use homenode_formats::pmu_region::{Layout, SAMPLES, TAGS_MAX};

use super::Options;
use super::guard::{Guard, end_group};
use super::guest_image::{Kernel, build_initramfs};
use super::topology_guest::build_module;
use super::xen;
use crate::exchange::{CAPABILITIES_DIR, Exchange};

/// Number of nodes of the emulated host without counters, each with one CPU.
pub const NODES: u32 = 4;
/// Memory of one node in MiB.
pub(super) const NODE_MIB: u32 = 1024;
/// Size of each last-level cache of the modelled PMU. Half of it is little for a guest, and a few guests overflow it.
pub const LLC_BYTES: u64 = 2 << 20;
/// Size of the private cache of each CPU of the modelled PMU.
const PRIVATE_BYTES: u64 = 64 << 10;
/// Number of frames that the PMU can tag: 8 GiB, which covers the emulated host and its hole for devices.
const FRAMES: u64 = 1 << 21;

/// The CPU that the kernel of [`HostKind::Bounds`] keeps free.
pub const ISOLATED_CPU: u32 = 3;
/// Node of the device that the plain host has for a guest (`inside::device`).
pub const DEVICE_NODE: u32 = 2;
/// File name of the emulator's plugin, which is next to this program.
const PLUGIN: &str = "libhomenode_plugin.so";
/// File name of the program of the guests of `homenode evidence`, which `scripts/guest-load.sh` puts next to `homenode`.
pub(super) const GUEST_LOAD: &str = "homenode-guest-load-static";

/// The kinds of boots that groups of cases need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostKind {
    /// Four nodes of one CPU.
    Plain,
    /// Two nodes of two CPUs, and a modelled PMU, which counts accesses to a last-level cache that two guests can share.
    Counted,
    /// A small version of a stock host: two nodes of two last-level caches of two CPUs, a modelled PMU, and a kernel that
    /// balances.
    Caches,
    /// Two nodes of two CPUs.
    TwoNodes,
    /// Like the plain host, but with a kernel that has DAMON. The guests have the stock kernel.
    Damon,
    /// Two nodes of two CPUs. The kernel keeps the last CPU free (`isolcpus=`).
    Bounds,
    /// Four nodes of one CPU under Xen. The inside is its dom0.
    Xen,
    /// Like [`HostKind::Xen`], with systemd as dom0's first process.
    XenService,
    /// Like [`HostKind::Xen`], with two nodes of two CPUs and a modelled PMU.
    XenCounted,
}

impl HostKind {
    pub(super) fn nodes(self) -> u32 {
        match self {
            Self::Plain | Self::Damon | Self::Xen | Self::XenService => NODES,
            Self::Counted | Self::Caches | Self::TwoNodes | Self::Bounds | Self::XenCounted => 2,
        }
    }

    fn cpus_per_node(self) -> u32 {
        match self {
            Self::Plain | Self::Damon | Self::Xen | Self::XenService => 1,
            Self::Counted | Self::TwoNodes | Self::Bounds | Self::XenCounted => 2,
            Self::Caches => 4,
        }
    }

    /// Returns the number of last-level caches. For the emulated CPU, Linux assumes one per socket.
    fn llcs(self) -> u32 {
        match self {
            Self::Caches => 2 * self.nodes(),
            _ => self.nodes(),
        }
    }

    pub(super) fn cpus(self) -> u32 {
        self.nodes() * self.cpus_per_node()
    }

    /// Returns the list of a node's CPUs.
    pub(super) fn cpus_of(self, node: u32) -> String {
        let first = node * self.cpus_per_node();
        match self.cpus_per_node() {
            1 => first.to_string(),
            count => format!("{first}-{}", first + count - 1),
        }
    }

    /// Returns the distances between different nodes. Four nodes form a square, with 16 between neighbours and 22 between
    /// opposite corners. If there are only two nodes, they are neighbours.
    pub(super) fn distances(self) -> impl Iterator<Item = (u32, u32, u32)> {
        let nodes = self.nodes();
        (0..nodes).flat_map(move |from| {
            (from + 1..nodes).map(move |to| (from, to, if from + to == NODES - 1 { 22 } else { 16 }))
        })
    }
}

impl HostKind {
    /// Returns the distance from each node to each node.
    #[must_use]
    pub fn distance_matrix(self) -> Vec<Vec<u32>> {
        let count = self.nodes() as usize;
        let mut matrix = vec![vec![10; count]; count];
        for (from, to, distance) in self.distances() {
            let (from, to) = (from as usize, to as usize);
            matrix[from][to] = distance;
            matrix[to][from] = distance;
        }
        matrix
    }
}

/// Transparent huge pages are off, as khugepaged has locked up the emulated host in a TLB flush. A panic ends the boot soon.
/// An oops is a panic, because tests must not go on after it.
const KERNEL_OPTIONS: [&str; 3] = [
    "intel_iommu=on",
    "transparent_hugepage=never",
    "panic=5 oops=panic",
];

/// Files and settings that do not change between boots.
#[derive(Debug)]
pub struct Workshop {
    /// `target/testbed`, the directory of everything that the testbed makes.
    pub dir: PathBuf,
    pub(super) kernel: Kernel,
    /// The guests' kernel.
    pub vmlinux: PathBuf,
    /// The initramfs with the guests' only program.
    pub initramfs: PathBuf,
    program: PathBuf,
    homenode: Option<PathBuf>,
    guest_load: Option<PathBuf>,
    plugin: Option<PathBuf>,
    /// Whether all hosts boot the kernel of [`HostKind::Damon`].
    newer: bool,
}

impl Workshop {
    /// Finds or builds the kernels, the guest's init and the programs.
    ///
    /// # Errors
    /// When a requirement is not installed, or something does not build.
    pub fn prepare(options: &Options, run_dir: &Path) -> anyhow::Result<Self> {
        let workspace = &options.workspace;
        let dir = workspace.join("target/testbed");
        let images = dir.join("images");
        fs::create_dir_all(&images).with_context(|| format!("cannot create {}", images.display()))?;
        let kernel = Kernel::find()?;
        let vmlinux = kernel.unpack(&images)?;
        let initramfs = run_dir.join("initramfs");
        let module = build_module(&kernel.headers(), &run_dir.join("topology"))?;
        build_initramfs(workspace, &kernel, &module, &dir.join("guest-build"), &initramfs)?;
        // Copied, because a build during the run replaces the originals.
        let keep = |from: &Path, name: &str| copy(from, &run_dir.join(name));
        let program = keep(
            &std::env::current_exe().context("cannot find this program's own file")?,
            "program",
        )?;
        let homenode = options.homenode.as_deref();
        let guest_load = homenode.map(|homenode| homenode.with_file_name(GUEST_LOAD));
        let guest_load = guest_load.filter(|path| path.exists());
        let guest_load = guest_load.map(|from| keep(&from, GUEST_LOAD)).transpose()?;
        let homenode = homenode.map(|from| keep(from, "homenode")).transpose()?;
        let plugin = std::env::current_exe()?.with_file_name(PLUGIN);
        let plugin = plugin.exists().then(|| keep(&plugin, PLUGIN)).transpose()?;
        Ok(Self {
            dir,
            kernel,
            vmlinux,
            initramfs,
            program,
            homenode,
            guest_load,
            plugin,
            newer: options.newer,
        })
    }

    /// Returns the release of the guests' kernel, from `uname -r`.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.kernel.release
    }

    /// Returns QEMU's options for a modelled PMU that counts in `file`. The plugin makes the file, and the emulated host finds
    /// it as a device's memory.
    pub(super) fn pmu_options(&self, kind: HostKind, file: &Path) -> anyhow::Result<String> {
        let plugin = self.plugin()?;
        let layout = Layout {
            cpus: kind.cpus().into(),
            tags: TAGS_MAX,
            frames: FRAMES,
            line_bytes: 64,
            samples: SAMPLES,
        };
        let (plugin, file) = (plugin.display(), file.display());
        let (cpus, nodes, llcs) = (kind.cpus(), kind.nodes(), kind.llcs());
        let bytes = layout.bytes().next_power_of_two();
        Ok(format!(
            " -plugin {plugin},pmu={file},cpus={cpus},nodes={nodes},llcs={llcs},frames={FRAMES},llc-bytes={LLC_BYTES},private-bytes={PRIVATE_BYTES},node-mib={NODE_MIB}\
             \x20-object memory-backend-file,id=pmu,share=on,mem-path={file},size={bytes} -device ivshmem-plain,memdev=pmu"
        ))
    }

    /// Returns the kernel that a host boots. virtme-ng finds the modules next to it.
    fn image(&self, kind: HostKind) -> anyhow::Result<PathBuf> {
        if kind != HostKind::Damon && !self.newer {
            return Ok(self.kernel.image.clone());
        }
        let boot = self.dir.join("kernel-damon/boot");
        let images = fs::read_dir(&boot).into_iter().flatten().flatten();
        let mut images = images.map(|entry| entry.path());
        let is_image = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with("vmlinuz-")
        };
        images.find(is_image).with_context(|| {
            format!(
                "no kernel with DAMON in {}: run scripts/testbed-setup.sh --damon",
                boot.display()
            )
        })
    }

    /// Returns the path of the emulator's plugin.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn plugin(&self) -> anyhow::Result<&Path> {
        self.plugin.as_deref().with_context(|| {
            format!(
                "{PLUGIN} is not next to this program; build it with `cargo build -p homenode-qemu-plugin`"
            )
        })
    }

    /// Returns the path of the program under test.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn homenode(&self) -> anyhow::Result<&Path> {
        let built = self.homenode.as_deref();
        built.context("homenode is not next to this program; build it with `cargo build -p homenode-cli`")
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
    /// The directory of this boot.
    pub dir: PathBuf,
    capabilities: PathBuf,
    process: Child,
    group: u32,
    started: Instant,
}

impl EmulatedHost {
    /// Starts a boot in the new directory `dir`.
    ///
    /// # Errors
    /// When a file cannot be copied or the emulator cannot be started.
    pub fn boot(workshop: &Workshop, kind: HostKind, dir: &Path, guard: &mut Guard) -> anyhow::Result<Self> {
        let exchange = Exchange::create(&dir.join("exchange"))?;
        let program = install_programs(workshop, dir)?;
        let log = |name: &str| {
            let path = dir.join(name);
            fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))
        };
        let mut command = match kind {
            HostKind::Xen | HostKind::XenService | HostKind::XenCounted => {
                xen::emulator(workshop, kind, &program, dir, exchange.root())?
            }
            HostKind::Plain
            | HostKind::Counted
            | HostKind::Caches
            | HostKind::TwoNodes
            | HostKind::Damon
            | HostKind::Bounds => virtme(workshop, kind, &program, dir, exchange.root())?,
        };
        // Separate files for the console and the program's output: QEMU truncates each when it opens it, so in a shared file
        // one would overwrite the other.
        command
            .stdin(Stdio::null())
            .stdout(log("stdout.log")?)
            .stderr(log("console.log")?);
        let process = command
            .process_group(0)
            .spawn()
            .context("cannot start the emulated host")?;
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

    /// Returns the time since the boot started.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the reason why the host has ended, if it has.
    ///
    /// # Errors
    /// When its process cannot be waited for.
    pub fn ended(&mut self) -> anyhow::Result<Option<String>> {
        let Some(status) = self
            .process
            .try_wait()
            .context("cannot read the state of the emulated host")?
        else {
            return Ok(None);
        };
        let how = match (status.code(), status.signal()) {
            (_, Some(signal)) => format!("it ended by signal {signal}"),
            (code, None) => format!("it ended with status {}", code.unwrap_or(-1)),
        };
        Ok(Some(match self.last_words() {
            Some(words) => format!("{how}; last kernel message of trouble: {words}"),
            None => format!("{how}, and the console shows no panic"),
        }))
    }

    /// Returns the console's first line about a crash.
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
            "(XEN) Panic",
        ];
        text.lines()
            .find(|line| trouble.iter().any(|word| line.contains(word)))
            .map(|line| line.trim().to_owned())
    }

    /// Asks QEMU what the CPUs of a silent host are doing, and writes the answer to `hang.txt`.
    ///
    /// # Errors
    /// When QEMU's monitor does not answer either.
    pub fn describe_hang(&self) -> anyhow::Result<()> {
        let mut monitor =
            UnixStream::connect(self.dir.join("monitor")).context("cannot reach QEMU's monitor")?;
        monitor.set_read_timeout(Some(Duration::from_secs(3)))?;
        monitor.write_all(b"info status\ninfo cpus\ninfo registers -a\n")?;
        let mut said = Vec::new();
        // The monitor never closes the connection by itself, so reading normally ends with the timeout.
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
        // A failure is ignored, because the files only save time in later boots.
        let _ = copy_files(&self.exchange.root().join(CAPABILITIES_DIR), &self.capabilities);
        // The programs are copies. The logs stay, as they are worth keeping.
        let _ = fs::remove_dir_all(self.dir.join("bin"));
        let _ = fs::remove_file(self.dir.join("pmu"));
        guard.remove(self.group)
    }
}

/// Returns QEMU's options for the device for a guest, behind its own root port, and for an IOMMU.
fn device() -> String {
    format!(
        " -device intel-iommu,intremap=off -device pxb-pcie,id=far,bus=pcie.0,bus_nr=64,numa_node={DEVICE_NODE} \
         -device pcie-root-port,id=far-port,bus=far,chassis=1 -device edu,bus=far-port"
    )
}

/// Returns the command that starts the host with virtme-ng, and runs `program` in it.
fn virtme(
    workshop: &Workshop,
    kind: HostKind,
    program: &Path,
    dir: &Path,
    exchange: &Path,
) -> anyhow::Result<Command> {
    let venv_bin = workshop.dir.join("venv/bin");
    if !venv_bin.join("vng").exists() {
        bail!(
            "virtme-ng is not in {}: run scripts/testbed-setup.sh",
            venv_bin.display()
        );
    }
    let inside = format!("{} inside {}", program.display(), exchange.display());
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(venv_bin.join("vng"));
    command.env("PATH", format!("{}:{path}", venv_bin.display()));
    // Without --verbose the console's output is lost, and a panic looks like a clean end.
    command.args([
        "--verbose",
        "--disable-kvm",
        "--disable-microvm",
        "--force-9p",
        "--run",
    ]);
    command.arg(workshop.image(kind)?);
    command.args(["--cpus".to_owned(), kind.cpus().to_string()]);
    command.args(["--memory".to_owned(), format!("{}M", kind.nodes() * NODE_MIB)]);
    for node in 0..kind.nodes() {
        let cpus = kind.cpus_of(node);
        command.args(["--numa".to_owned(), format!("{NODE_MIB}M,cpus={cpus}")]);
    }
    for (from, to, distance) in kind.distances() {
        command.args(["--numa-distance".to_owned(), format!("{from},{to}={distance}")]);
    }
    command.arg(format!("--rwdir={0}={0}", exchange.display()));
    let isolated = format!("isolcpus={ISOLATED_CPU}");
    let isolated = (kind == HostKind::Bounds).then_some(isolated.as_str());
    let balancing = match kind {
        HostKind::Caches => "numa_balancing=enable",
        _ => "numa_balancing=disable",
    };
    for option in KERNEL_OPTIONS.into_iter().chain([balancing]).chain(isolated) {
        command.args(["--append", option]);
    }
    let monitor = dir.join("monitor");
    let monitor_options = format!(
        "-chardev socket,id=testbed,path={},server=on,wait=off -mon testbed",
        monitor.display()
    );
    let devices = match kind {
        HostKind::Counted => workshop.pmu_options(kind, &dir.join("pmu"))?,
        HostKind::Caches => {
            let (cpus, sockets) = (kind.cpus(), kind.llcs());
            let pmu = workshop.pmu_options(kind, &dir.join("pmu"))?;
            format!(
                " -smp {cpus},sockets={sockets},cores={},threads=1{pmu}",
                cpus / sockets
            )
        }
        HostKind::Plain => device(),
        _ => String::new(),
    };
    command
        .arg(format!(
            "--qemu-opts=-cpu EPYC,+svm,+npt {monitor_options}{devices}"
        ))
        .arg("--")
        .arg(inside);
    Ok(command)
}

/// Copies this program, `homenode` if it was built, and the guest's files to where the boot reads them.
fn install_programs(workshop: &Workshop, dir: &Path) -> anyhow::Result<PathBuf> {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
    copy(&workshop.vmlinux, &bin.join("vmlinux"))?;
    copy(&workshop.initramfs, &bin.join("initramfs"))?;
    if let Some(homenode) = &workshop.homenode {
        copy(homenode, &bin.join("homenode"))?;
    }
    if let Some(guest_load) = &workshop.guest_load {
        copy(guest_load, &bin.join(GUEST_LOAD))?;
    }
    copy_files(&workshop.capabilities(), &bin.join(CAPABILITIES_DIR))?;
    copy(&workshop.program, &bin.join("homenode-testbed"))
}

/// Copies the files of a directory, if the directory exists.
pub(super) fn copy_files(from: &Path, to: &Path) -> anyhow::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_two_neighbours_and_one_opposite() {
        for node in 0..NODES {
            let mut seen: Vec<u32> = HostKind::Plain
                .distances()
                .filter(|(from, to, _)| *from == node || *to == node)
                .map(|(_, _, far)| far)
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, [16, 16, 22]);
        }
    }
}

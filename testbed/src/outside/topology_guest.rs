//! A guest of a plain QEMU with four virtual nodes, the kernel module, and a topology page from the agent's own server.
//!
//! The guest's init is a shell that runs commands from the second serial port.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use homenode_formats::cpio::Archive;
use homenode_kvm::topology_server::{TopologyServer, region_of};
use homenode_topology_page::{Facts, Mapping, Publisher, Topology};
use homenode_units::NodeId;
use serde_json::json;

use super::guard::end_group;
use super::guest_image::Kernel;
use super::plain::Outside;
use super::qmp::{self, Qmp};
use super::runtimes::Files;

/// Number of virtual nodes, and of host nodes.
pub const NODES: u16 = 4;
/// Number of vCPUs: one for each node, and a second one on node 0.
pub const VCPUS: u32 = 5;
/// Memory of a virtual node, in MiB.
const NODE_MIB: u32 = 96;
/// Time limit for an answer. A loaded machine emulates slowly.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Marks the end of an answer, before the command's exit status.
const END: &str = "homenode-end";

const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox --install -s /bin
exec </dev/ttyS1 >/dev/ttyS1 2>&1
stty raw -echo
echo homenode-end 0
while read -r line; do
    eval \"$line\"
    echo homenode-end $?
done
poweroff -f
";

/// A kernel, and the headers for its modules.
#[derive(Debug, Clone)]
pub struct TestKernel {
    /// The image that QEMU boots.
    pub image: PathBuf,
    /// The headers for its modules.
    pub headers: PathBuf,
}

impl TestKernel {
    /// Returns this machine's kernel, which the other guests boot as well.
    ///
    /// # Errors
    /// When there is none.
    pub fn stock(outside: &Outside<'_>) -> anyhow::Result<TestKernel> {
        Ok(TestKernel {
            image: outside.workshop.vmlinux.clone(),
            headers: Kernel::find()?.headers(),
        })
    }

    /// Returns the kernel that `scripts/testbed-kernel.sh` fetches.
    ///
    /// # Errors
    /// When it has not been fetched.
    pub fn fetched(outside: &Outside<'_>) -> anyhow::Result<TestKernel> {
        let dir = outside.workshop.dir.join("kernel-6.12");
        ensure!(
            dir.join("image").exists(),
            "no kernel in {}: run scripts/testbed-kernel.sh",
            dir.display()
        );
        Ok(TestKernel {
            image: dir.join("image"),
            headers: dir.join("headers"),
        })
    }
}

/// Returns the directory of the sources from which this program was built.
pub(super) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
}

/// Builds the module for the kernel that has these headers, in a separate directory.
///
/// # Errors
/// When the headers are missing, or the module does not build.
pub fn build_module(headers: &Path, dir: &Path) -> anyhow::Result<PathBuf> {
    ensure!(
        headers.is_dir(),
        "{} has no kernel headers: run scripts/testbed-setup.sh",
        headers.display()
    );
    let module = dir.join("module");
    fs::create_dir_all(&module).with_context(|| format!("cannot make {}", module.display()))?;
    // The sources are copied, because the kernel's build writes next to them.
    for file in ["homenode_topology.c", "Kbuild", "Makefile"] {
        fs::copy(workspace().join("guest/module").join(file), module.join(file))
            .with_context(|| format!("cannot copy {file}"))?;
    }
    if !dir.join("include").exists() {
        symlink(workspace().join("guest/include"), dir.join("include"))?;
    }
    let output = Command::new("make")
        .arg("--directory")
        .arg(&module)
        .arg(format!("KERNEL={}", headers.display()))
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .output()
        .context("cannot start make")?;
    ensure!(
        output.status.success(),
        "the module does not build: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(module.join("homenode_topology.ko"))
}

/// Compiles the static program that inspects the guest.
fn build_probe(dir: &Path) -> anyhow::Result<PathBuf> {
    let (guest, probe) = (workspace().join("guest"), dir.join("probe"));
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O2",
            "-static",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
        ])
        .arg(guest.join("include"))
        .arg("-I")
        .arg(guest.join("runtime"))
        .args([guest.join("tests/probe.c"), guest.join("runtime/topology.c")])
        .arg("-o")
        .arg(&probe)
        .status()
        .context("cannot start cc")?;
    ensure!(status.success(), "the probe does not compile");
    Ok(probe)
}

fn pack(files: &Files, target: &Path) -> anyhow::Result<()> {
    let mut archive = Archive::default();
    let mut directories: BTreeSet<&Path> = ["dev", "proc", "sys", "bin", "tmp"].map(Path::new).into();
    directories.extend(files.keys().flat_map(|name| Path::new(name).ancestors().skip(1)));
    directories.remove(Path::new(""));
    // A directory must come before its contents.
    for directory in directories {
        archive.directory(&directory.display().to_string());
    }
    archive.file("init", 0o755, INIT.as_bytes());
    for (name, path) in files {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        archive.file(name, 0o755, &bytes);
    }
    fs::write(target, archive.finish()).with_context(|| format!("cannot write {}", target.display()))
}

/// The machine that QEMU emulates.
#[derive(Debug, Clone)]
struct Machine {
    dir: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    node_mib: u32,
}

impl Machine {
    fn socket(&self) -> PathBuf {
        self.dir.join("ivshmem")
    }

    /// Starts QEMU. If `incoming` is a socket, this QEMU waits there for the guest of another one.
    fn start(
        &self,
        outside: &mut Outside<'_>,
        name: &'static str,
        incoming: Option<&Path>,
    ) -> anyhow::Result<Process> {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-machine", "q35"]);
        command.args(["-display", "none", "-net", "none", "-no-reboot", "-smp"]);
        command.arg(format!("{VCPUS},sockets={VCPUS},cores=1,threads=1"));
        command.args(["-m", &format!("{}M", self.node_mib * u32::from(NODES))]);
        for node in 0..NODES {
            let cpus: Vec<String> = (0..VCPUS)
                .filter(|cpu| cpu % u32::from(NODES) == u32::from(node))
                .map(|cpu| format!(",cpus={cpu}"))
                .collect();
            command.arg("-object");
            command.arg(format!("memory-backend-ram,id=m{node},size={}M", self.node_mib));
            command.arg("-numa");
            command.arg(format!("node,nodeid={node},memdev=m{node}{}", cpus.concat()));
        }
        command.arg("-chardev");
        command.arg(format!("socket,id=iv,path={}", self.socket().display()));
        command.args([
            "-device",
            "ivshmem-doorbell,chardev=iv,vectors=1,ioeventfd=off,master=on",
        ]);
        let monitor = self.dir.join(format!("{name}.monitor"));
        command.arg("-qmp");
        command.arg(format!("unix:{},server=on,wait=off", monitor.display()));
        command.arg("-serial");
        command.arg(format!(
            "file:{}",
            self.dir.join(format!("{name}.console")).display()
        ));
        command.args([
            "-chardev",
            "stdio,id=orders,signal=off",
            "-serial",
            "chardev:orders",
        ]);
        command.arg("-kernel").arg(&self.kernel);
        command.arg("-initrd").arg(&self.initramfs);
        command.args([
            "-append",
            "console=ttyS0 panic=-1 oops=panic numa_balancing=disable loglevel=6",
        ]);
        if let Some(from) = incoming {
            command.arg("-incoming").arg(format!("unix:{}", from.display()));
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(self.dir.join(format!("{name}.stderr")))?)
            .process_group(0)
            .spawn()
            .context("cannot start qemu-system-x86_64: run scripts/testbed-setup.sh")?;
        outside.guard.add(child.id())?;
        let input = child.stdin.take().context("QEMU has no input pipe")?;
        let mut output = BufReader::new(child.stdout.take().context("QEMU has no output pipe")?);
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut line = Vec::new();
            while output.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                let text = String::from_utf8_lossy(&line).trim().to_owned();
                line.clear();
                if sender.send(text).is_err() {
                    break;
                }
            }
        });
        Ok(Process {
            child,
            input,
            lines,
            monitor,
        })
    }
}

/// A QEMU process.
struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    monitor: PathBuf,
}

impl Process {
    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    fn end(mut self, outside: &mut Outside<'_>) -> anyhow::Result<()> {
        end_group(self.child.id());
        let _ = self.child.wait();
        outside.guard.remove(self.child.id())
    }
}

/// A running guest, and the host's side of its topology page.
pub struct TopologyGuest {
    machine: Machine,
    process: Process,
    server: Option<TopologyServer>,
    /// The host node that each vCPU is on.
    pub vcpus: Vec<u16>,
}

impl TopologyGuest {
    /// Boots the guest, and waits until its shell listens. At boot, vCPU n is on node n modulo the number of nodes.
    ///
    /// # Errors
    /// When something cannot be built or started, or the guest does not come up.
    pub fn boot(outside: &mut Outside<'_>, kernel: &TestKernel) -> anyhow::Result<TopologyGuest> {
        TopologyGuest::boot_with(outside, kernel, Files::new(), NODE_MIB)
    }

    /// Like [`TopologyGuest::boot`], with further files, and this much memory on each virtual node.
    ///
    /// # Errors
    /// When something cannot be built or started, or the guest does not come up.
    pub fn boot_with(
        outside: &mut Outside<'_>,
        kernel: &TestKernel,
        mut files: Files,
        node_mib: u32,
    ) -> anyhow::Result<TopologyGuest> {
        let dir = outside.dir;
        files.insert("bin/busybox".to_owned(), PathBuf::from("/bin/busybox"));
        files.insert("bin/probe".to_owned(), build_probe(dir)?);
        files.insert(
            "homenode_topology.ko".to_owned(),
            build_module(&kernel.headers, dir)?,
        );
        let initramfs = dir.join("topology-initramfs");
        pack(&files, &initramfs)?;
        let machine = Machine {
            dir: dir.to_owned(),
            kernel: kernel.image.clone(),
            initramfs,
            node_mib,
        };
        let server = TopologyServer::listen(&machine.socket())?;
        let process = machine.start(outside, "topology", None)?;
        let mut guest = TopologyGuest {
            machine,
            process,
            server: Some(server),
            vcpus: (0..VCPUS).map(|cpu| (cpu % u32::from(NODES)) as u16).collect(),
        };
        guest.answer("booting")?;
        Ok(guest)
    }

    /// Ends the guest.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn end(self, outside: &mut Outside<'_>) -> anyhow::Result<()> {
        self.process.end(outside)
    }

    /// Boots the guest's kernel again, in the same QEMU, and waits until the guest's shell listens.
    ///
    /// # Errors
    /// When the guest does not come up.
    pub fn reboot(&mut self) -> anyhow::Result<()> {
        let mut monitor = Qmp::connect(&self.process.monitor)?;
        monitor.run("set-action", &json!({"reboot": "reset"}))?;
        writeln!(self.process.input, "reboot -f").context("the guest ended")?;
        self.answer("reboot -f")?;
        monitor.run("set-action", &json!({"reboot": "shutdown"}))?;
        Ok(())
    }

    /// Moves the running guest to another QEMU. The new server writes its page, with these nodes of the vCPUs, before the
    /// guest arrives. Returns the page's version.
    ///
    /// # Errors
    /// When QEMU cannot move the guest.
    pub fn migrate(&mut self, outside: &mut Outside<'_>, vcpus: Vec<u16>) -> anyhow::Result<u64> {
        let way = self.machine.dir.join("migration");
        let target = self.machine.start(outside, "topology-target", Some(&way))?;
        // The new QEMU's monitor answers once that QEMU waits for the guest.
        Qmp::connect(&target.monitor)?;
        let source = std::mem::replace(&mut self.process, target);
        self.vcpus = vcpus;
        let version = self.publish()?;
        qmp::migrate(&mut Qmp::connect(&source.monitor)?, &way)?;
        source.end(outside)?;
        Ok(version)
    }

    /// Ends the server, as when the agent is killed.
    pub fn stop_server(&mut self) {
        self.server = None;
    }

    /// Starts the server, which finds the guest again.
    ///
    /// # Errors
    /// When the server cannot listen, or does not find the guest.
    pub fn start_server(&mut self) -> anyhow::Result<()> {
        let server = TopologyServer::listen(&self.machine.socket())?;
        ensure!(
            server.serves(self.process.pid()),
            "the new server does not serve the guest's QEMU"
        );
        self.server = Some(server);
        Ok(())
    }

    fn topology(&self) -> anyhow::Result<Topology> {
        let distances = (0..NODES)
            .map(|from| (0..NODES).map(|to| if from == to { 10 } else { 20 }).collect())
            .collect();
        Ok(Topology::new(Facts {
            vcpu_pnode: self.vcpus.iter().map(|node| Some(NodeId(*node))).collect(),
            vnode_pnode: (0..NODES).map(|node| Some(NodeId(node))).collect(),
            distances,
        })?)
    }

    /// Tells the guest on which nodes its vCPUs are. The memory of virtual node n is on host node n.
    ///
    /// # Errors
    /// When the guest has no page, or there is no server.
    pub fn publish(&mut self) -> anyhow::Result<u64> {
        let server = self.server.as_ref().context("the server has been stopped")?;
        Ok(server.publish(self.process.pid(), &self.topology()?)?)
    }

    /// Overwrites these words of the guest's page, as root in the guest could. The rest of the page stays valid.
    ///
    /// # Errors
    /// When QEMU has no such memory.
    pub fn scribble(&mut self, words: impl Iterator<Item = (usize, u64)>) -> anyhow::Result<()> {
        let memory = region_of(self.process.pid())?.context("QEMU maps no topology page")?;
        let page = Mapping::new(&memory)?;
        Publisher::new(page.words(), 0).publish(&self.topology()?);
        for (at, value) in words {
            page.words()[at].store(value, std::sync::atomic::Ordering::SeqCst);
        }
        Ok(())
    }

    /// Runs a shell command in the guest, which must succeed, and returns its output.
    ///
    /// # Errors
    /// When the command fails, or the guest does not answer.
    pub fn sh(&mut self, command: &str) -> anyhow::Result<String> {
        let (text, status) = self.try_sh(command)?;
        ensure!(
            status == 0,
            "`{command}` failed in the guest with {status}: {text}"
        );
        Ok(text)
    }

    /// Runs a shell command in the guest, and returns its output and exit status.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn try_sh(&mut self, command: &str) -> anyhow::Result<(String, i32)> {
        writeln!(self.process.input, "{command}").context("the guest ended")?;
        self.answer(command)
    }

    fn answer(&mut self, command: &str) -> anyhow::Result<(String, i32)> {
        let mut text = Vec::new();
        loop {
            match self.process.lines.recv_timeout(ANSWER_LIMIT) {
                Ok(line) => match line.strip_prefix(END) {
                    Some(status) => return Ok((text.join("\n"), status.trim().parse()?)),
                    None => text.push(line),
                },
                Err(error) => bail!("no answer to `{command}`: {error}"),
            }
        }
    }
}

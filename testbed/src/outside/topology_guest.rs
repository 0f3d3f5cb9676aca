//! A guest of a plain QEMU with four virtual nodes, the kernel module, and a topology page that this program writes.
//!
//! Its init is a shell that carries out what it is told on the second serial port.

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
use homenode_linux::cpio::Archive;
use homenode_topology_page::{BYTES, Facts, Mapping, Publisher, Topology};
use homenode_units::NodeId;

use super::guard::end_group;
use super::guest_image::Kernel;
use super::ivshmem::Ivshmem;
use super::plain::Outside;

/// Virtual nodes, and host nodes.
pub const NODES: u16 = 4;
/// vCPUs: one for each node, and a second one on node 0.
pub const VCPUS: u32 = 5;
const NODE_MIB: u32 = 96;
/// An answer; a loaded machine emulates slowly.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Ends an answer, before the status of the command.
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

/// A kernel and what modules for it are built with.
#[derive(Debug, Clone)]
pub struct TestKernel {
    /// What QEMU boots.
    pub image: PathBuf,
    /// Its headers.
    pub headers: PathBuf,
}

impl TestKernel {
    /// This machine's, which the other guests boot as well.
    ///
    /// # Errors
    /// When there is none.
    pub fn stock(outside: &Outside<'_>) -> anyhow::Result<TestKernel> {
        let release = Kernel::find()?.release;
        Ok(TestKernel {
            image: outside.workshop.vmlinux.clone(),
            headers: PathBuf::from(format!("/usr/src/linux-headers-{release}")),
        })
    }

    /// The one that `scripts/testbed-kernel.sh` fetches.
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

/// The sources that this program was built from.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
}

/// Builds the module for a kernel, in a directory of its own.
fn build_module(kernel: &TestKernel, dir: &Path) -> anyhow::Result<PathBuf> {
    ensure!(
        kernel.headers.is_dir(),
        "no headers in {}: run scripts/testbed-setup.sh",
        kernel.headers.display()
    );
    let module = dir.join("module");
    fs::create_dir_all(&module).with_context(|| format!("cannot make {}", module.display()))?;
    // The kernel's build writes beside the sources.
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
        .arg(format!("KERNEL={}", kernel.headers.display()))
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

/// Compiles what looks around in the guest, static.
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

fn pack(files: &[(&str, &Path)], target: &Path) -> anyhow::Result<()> {
    let mut archive = Archive::default();
    for dir in ["dev", "proc", "sys", "bin"] {
        archive.directory(dir);
    }
    archive.file("init", 0o755, INIT.as_bytes());
    for (name, path) in files {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        archive.file(name, 0o755, &bytes);
    }
    fs::write(target, archive.finish()).with_context(|| format!("cannot write {}", target.display()))
}

/// A running guest, and the host's side of its page.
pub struct TopologyGuest {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    ivshmem: Ivshmem,
    mapping: Mapping,
    sequence: u64,
    /// The host node that each vCPU is on.
    pub vcpus: Vec<u16>,
}

impl TopologyGuest {
    /// Boots it, and waits until it listens. vCPU n is on node n modulo their number, as at boot.
    ///
    /// # Errors
    /// When something cannot be built or started, or the guest does not come up.
    pub fn boot(outside: &mut Outside<'_>, kernel: &TestKernel) -> anyhow::Result<TopologyGuest> {
        let dir = outside.dir;
        let module = build_module(kernel, dir)?;
        let probe = build_probe(dir)?;
        let initramfs = dir.join("topology-initramfs");
        pack(
            &[
                ("bin/busybox", Path::new("/bin/busybox")),
                ("bin/probe", &probe),
                ("homenode_topology.ko", &module),
            ],
            &initramfs,
        )?;
        let socket = dir.join("ivshmem");
        let ivshmem = Ivshmem::serve(&socket, BYTES as u64)?;
        let mapping = Mapping::new(&ivshmem.memory).context("cannot map the page")?;

        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-machine", "q35"]);
        command.args(["-display", "none", "-net", "none", "-no-reboot", "-smp"]);
        command.arg(format!("{VCPUS},sockets={VCPUS},cores=1,threads=1"));
        command.args(["-m", &format!("{}M", NODE_MIB * u32::from(NODES))]);
        for node in 0..NODES {
            let cpus: Vec<String> = (0..VCPUS)
                .filter(|cpu| cpu % u32::from(NODES) == u32::from(node))
                .map(|cpu| format!(",cpus={cpu}"))
                .collect();
            command.arg("-object");
            command.arg(format!("memory-backend-ram,id=m{node},size={NODE_MIB}M"));
            command.arg("-numa");
            command.arg(format!("node,nodeid={node},memdev=m{node}{}", cpus.concat()));
        }
        command.arg("-chardev");
        command.arg(format!("socket,id=iv,path={}", socket.display()));
        command.args(["-device", "ivshmem-doorbell,chardev=iv,vectors=1"]);
        command.arg("-serial");
        command.arg(format!("file:{}", dir.join("topology.console").display()));
        command.args([
            "-chardev",
            "stdio,id=orders,signal=off",
            "-serial",
            "chardev:orders",
        ]);
        command
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(&initramfs);
        command.args([
            "-append",
            "console=ttyS0 panic=-1 oops=panic numa_balancing=disable loglevel=6",
        ]);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(dir.join("topology.stderr"))?)
            .process_group(0)
            .spawn()
            .context("cannot start qemu-system-x86_64: run scripts/testbed-setup.sh")?;
        outside.guard.add(process.id())?;
        let input = process.stdin.take().context("no pipe to QEMU")?;
        let mut output = BufReader::new(process.stdout.take().context("no pipe from QEMU")?);
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
        let mut guest = TopologyGuest {
            process,
            input,
            lines,
            ivshmem,
            mapping,
            sequence: 0,
            vcpus: (0..VCPUS).map(|cpu| (cpu % u32::from(NODES)) as u16).collect(),
        };
        // Before its module looks for a page.
        guest.publish()?;
        guest.answer("booting")?;
        Ok(guest)
    }

    /// Ends it.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn end(mut self, outside: &mut Outside<'_>) -> anyhow::Result<()> {
        end_group(self.process.id());
        let _ = self.process.wait();
        outside.guard.remove(self.process.id())
    }

    /// Writes where the vCPUs are to the page and rings; the memory of virtual node n is on host node n.
    ///
    /// # Errors
    /// When the doorbell cannot be rung.
    pub fn publish(&mut self) -> anyhow::Result<u64> {
        let distances = (0..NODES)
            .map(|from| (0..NODES).map(|to| if from == to { 10 } else { 20 }).collect())
            .collect();
        let topology = Topology::new(Facts {
            vcpu_pnode: self.vcpus.iter().map(|node| Some(NodeId(*node))).collect(),
            vnode_pnode: (0..NODES).map(|node| Some(NodeId(node))).collect(),
            distances,
        })?;
        self.sequence = Publisher::new(self.mapping.words(), self.sequence).publish(&topology);
        self.ivshmem.ring()?;
        Ok(self.sequence)
    }

    /// Writes words over and rings, as whoever got hold of the page could.
    ///
    /// # Errors
    /// When the doorbell cannot be rung.
    pub fn scribble(&mut self, words: impl Iterator<Item = (usize, u64)>) -> anyhow::Result<()> {
        for (at, value) in words {
            self.mapping.words()[at].store(value, std::sync::atomic::Ordering::SeqCst);
        }
        self.ivshmem.ring()
    }

    /// What a shell command there says; it must succeed.
    ///
    /// # Errors
    /// When it fails, or the guest does not answer.
    pub fn sh(&mut self, command: &str) -> anyhow::Result<String> {
        let (text, status) = self.try_sh(command)?;
        ensure!(
            status == 0,
            "`{command}` failed in the guest with {status}: {text}"
        );
        Ok(text)
    }

    /// What a shell command there says, and its status.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn try_sh(&mut self, command: &str) -> anyhow::Result<(String, i32)> {
        writeln!(self.input, "{command}").context("the guest ended")?;
        self.answer(command)
    }

    fn answer(&mut self, command: &str) -> anyhow::Result<(String, i32)> {
        let mut text = Vec::new();
        loop {
            match self.lines.recv_timeout(ANSWER_LIMIT) {
                Ok(line) => match line.strip_prefix(END) {
                    Some(status) => return Ok((text.join("\n"), status.trim().parse()?)),
                    None => text.push(line),
                },
                Err(error) => bail!("no answer to `{command}`: {error}"),
            }
        }
    }
}

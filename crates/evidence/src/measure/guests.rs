//! VMs of this command: plain QEMUs whose only program is a worker.
//!
//! A guest boots this host's own kernel from an initramfs that is built in memory, and its console is the worker's input and
//! output. QEMU is killed when the thread that started it ends, whatever ends it; nothing is left on disk.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use homenode_formats::cpio::Archive;
use homenode_load::Kernel;
use homenode_load::sys;
use homenode_load::worker::{Worker, die_with_parent};
use homenode_units::{Bytes, CpuSet, NodeSet};

use super::Why;
use super::scope::Scope;
use crate::section::With;

/// The guest's program next to this one, as `scripts/guest-load.sh` puts it, and from there where packages have it.
const PROGRAMS: [&str; 2] = ["homenode-guest-load-static", "../lib/homenode/guest-load"];
const QEMUS: [&str; 2] = ["/usr/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm"];
/// How long a guest may take to boot and set up its memory, with KVM and without.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(240), Duration::from_secs(400));
/// Memory of a guest beyond what its program touches: for its kernel.
const KERNEL_BYTES: usize = 192 << 20;

/// What is needed to start guests.
pub(super) struct Guests {
    qemu: PathBuf,
    kernel: PathBuf,
    initramfs: OwnedFd,
    /// Whether guests run under KVM. The device may be there although the processor cannot run guests, which the first one shows.
    has_kvm: Cell<bool>,
}

/// A guest that boots; killed when dropped.
struct Booting(Option<Child>);

/// Guests that run. When dropped, they end before their cgroups are removed.
pub(super) struct Running {
    pub workers: Vec<Worker>,
    _scopes: Vec<Scope>,
}

impl Drop for Booting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Where a guest's memory is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Where the kernel puts it.
    Anywhere,
    /// On these nodes, and no others.
    Bound(NodeSet),
    /// Page by page on these nodes in turn.
    Interleaved(NodeSet),
}

/// A guest to start.
pub(super) struct Guest<'a> {
    /// Name that other programs, such as the agent, see.
    pub name: &'a str,
    /// Its UUID, if the agent is to have settings for it and to throttle it: then it also gets its own cgroup, where that is
    /// possible.
    pub uuid: Option<&'a str>,
    /// What its program runs, on each vCPU with memory of its own.
    pub load: Kernel,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// CPUs that all its threads may use.
    pub cpus: &'a CpuSet,
    /// Where its memory is to be.
    pub memory: Memory,
}

impl Guest<'_> {
    /// Returns the guest's memory.
    pub(super) fn bytes(&self) -> Bytes {
        let touched = self.load.footprint() * self.vcpus;
        // Page tables and the like take a sixteenth.
        Bytes(((touched + touched / 16 + KERNEL_BYTES) as u64).next_multiple_of(2 << 20))
    }
}

impl Guests {
    /// Finds QEMU, a kernel and the guest's program. `kernel` is the one that the user named.
    pub(super) fn find(program: &Path, kernel: Option<&Path>) -> Result<Guests, Why> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Why::of("VMs of this command run on x86-64 only"));
        }
        let qemu = QEMUS.into_iter().map(PathBuf::from).find(|path| path.is_file());
        let qemu = qemu.ok_or_else(|| Why::of("QEMU is not installed; install it to measure with VMs"))?;
        let kernel = match kernel {
            Some(kernel) => kernel.to_owned(),
            None => own_kernel(Path::new("/")).ok_or_else(|| {
                Why::of("there is no kernel image in /boot that can be read; name one with --kernel")
            })?,
        };
        Ok(Guests {
            qemu,
            kernel,
            initramfs: initramfs(&guest_program(program)?)?,
            has_kvm: Cell::new(OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()),
        })
    }

    /// What sections measured with these guests say of them.
    pub(super) fn with(&self) -> With {
        if self.has_kvm.get() {
            With::OwnVms
        } else {
            With::EmulatedVms
        }
    }

    /// Starts guests at the same time, and waits until their programs are ready. If KVM cannot run them, all guests from now on
    /// are emulated.
    pub(super) fn start(&self, guests: &[Guest<'_>]) -> Result<Running, Why> {
        let started = self.try_to_start(guests);
        if started.is_ok() || !self.has_kvm.replace(false) {
            return started;
        }
        self.try_to_start(guests)
    }

    /// Like [`Guests::start`], but emulates none: for what only guests under KVM can show.
    pub(super) fn start_on_kvm(&self, guests: &[Guest<'_>]) -> Result<Running, Why> {
        if !self.has_kvm.get() {
            return Err(Why::of("there is no KVM here"));
        }
        self.try_to_start(guests)
            .map_err(|why| Why::said("KVM cannot run guests here")(&why))
    }

    fn try_to_start(&self, guests: &[Guest<'_>]) -> Result<Running, Why> {
        let patience = match self.has_kvm.get() {
            true => PATIENCE.0,
            false => PATIENCE.1,
        };
        // Declared in this order, so that guests end before their cgroups are removed.
        let mut scopes = Vec::new();
        let mut booting = Vec::new();
        for guest in guests {
            let scope = guest.uuid.and_then(|_| Scope::find(Path::new("/"), guest.name));
            // What QEMU complains of goes to a file without a name.
            let complaints = memfd("complaints")?;
            let child = complaints
                .try_clone()
                .and_then(|file| self.command(guest, scope.as_ref()).stderr(file).spawn());
            let child = child.map_err(|error| Why::said("QEMU cannot be started")(&error))?;
            scopes.extend(scope);
            booting.push((Booting(Some(child)), complaints));
        }
        let ready = |(mut booting, complaints): (Booting, File)| {
            let child = booting
                .0
                .take()
                .ok_or_else(|| Why::of("a guest was started twice"))?;
            Worker::of(child, patience).map_err(|error| {
                let said = first_line(&complaints);
                let why = "a guest did not start; its kernel must have a serial console and unpack an initramfs (--kernel names \
                           another)";
                Why::said(why)(&format_args!("{error}; QEMU: {said}"))
            })
        };
        let workers = booting.into_iter().map(ready).collect::<Result<_, Why>>()?;
        Ok(Running {
            workers,
            _scopes: scopes,
        })
    }

    fn command(&self, guest: &Guest<'_>, scope: Option<&Scope>) -> Command {
        let mut command = match scope {
            Some(scope) => scope.command(&self.qemu),
            None => Command::new(&self.qemu),
        };
        let accelerator = if self.has_kvm.get() {
            "kvm"
        } else {
            "tcg,thread=multi"
        };
        command
            .args([
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
                "-monitor",
                "none",
            ])
            .args(["-serial", "stdio", "-machine", "q35", "-accel", accelerator])
            .args(["-name", &format!("{},debug-threads=on", guest.name)])
            .args(["-smp", &guest.vcpus.to_string()])
            .args(["-m", &format!("{}k", guest.bytes().0 / 1024)])
            .arg("-kernel")
            .arg(&self.kernel)
            .args([
                "-initrd",
                &format!("/proc/{}/fd/{}", std::process::id(), self.initramfs.as_raw_fd()),
            ])
            .args([
                "-append",
                &format!(
                    "console=ttyS0 quiet panic=-1 rdinit=/init homenode.load={}",
                    guest.load
                ),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A terminal's signals must reach only this program, whose end ends the guest.
            .process_group(0);
        if self.has_kvm.get() {
            command.args(["-cpu", "host"]);
        }
        if let Some(uuid) = guest.uuid {
            command.args(["-uuid", uuid]);
        }
        confine(&mut command, guest.cpus.clone(), guest.memory.clone());
        command
    }
}

/// Confines a program to CPUs and nodes before it begins, and makes it end with this one.
#[allow(unsafe_code)] // what a child does between fork and exec
fn confine(command: &mut Command, cpus: CpuSet, memory: Memory) {
    let policy = match memory {
        Memory::Anywhere => None,
        Memory::Bound(nodes) => Some((libc::MPOL_BIND, mask(&nodes))),
        Memory::Interleaved(nodes) => Some((libc::MPOL_INTERLEAVE, mask(&nodes))),
    };
    // SAFETY: only system calls, on values that were made before the fork; nothing allocates or takes a lock.
    unsafe {
        command.pre_exec(move || {
            die_with_parent()?;
            sys::pin(&cpus)?;
            if let Some((mode, mask)) = &policy {
                let bits = mask.len() * libc::c_ulong::BITS as usize;
                if libc::syscall(libc::SYS_set_mempolicy, *mode, mask.as_ptr(), bits) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
}

/// Words of a mask of nodes, as the kernel takes it: 1024 nodes, more than any host has.
const MASK_WORDS: usize = 16;

fn mask(nodes: &NodeSet) -> [libc::c_ulong; MASK_WORDS] {
    let mut mask = [0; MASK_WORDS];
    for node in nodes.iter() {
        let at = usize::from(node.0);
        if let Some(word) = mask.get_mut(at / 64) {
            *word |= 1 << (at % 64);
        }
    }
    mask
}

/// Returns the image of the running kernel, or else of another one in /boot.
fn own_kernel(root: &Path) -> Option<PathBuf> {
    let boot = root.join("boot");
    let release = fs::read_to_string(root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
    let own = boot.join(format!("vmlinuz-{}", release.trim()));
    if File::open(&own).is_ok() {
        return Some(own);
    }
    let mut others: Vec<PathBuf> = fs::read_dir(&boot)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
        })
        .filter(|path| File::open(path).is_ok())
        .collect();
    others.sort();
    others.pop()
}

fn guest_program(program: &Path) -> Result<Vec<u8>, Why> {
    let found = PROGRAMS
        .iter()
        .find_map(|place| fs::read(program.with_file_name(place)).ok());
    let found = found.ok_or_else(|| {
        Why::of(
            "the program for guests is missing; install the package, or build it with scripts/guest-load.sh",
        )
    })?;
    match is_static(&found) {
        true => Ok(found),
        false => Err(Why::of(
            "the program for guests is not linked statically; build it with scripts/guest-load.sh",
        )),
    }
}

/// Returns true for an ELF program of 64 bits that needs no program interpreter.
fn is_static(program: &[u8]) -> bool {
    const INTERPRETER: u32 = 3;
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(program.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(value))
    };
    let of = || {
        let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        let kinds = (0..count).map(|at| number(usize::try_from(table.checked_add(at * size)?).ok()?, 4));
        kinds.collect::<Option<Vec<u64>>>()
    };
    let is_elf = program.starts_with(b"\x7fELF\x02\x01");
    is_elf && of().is_some_and(|kinds| !kinds.is_empty() && !kinds.contains(&u64::from(INTERPRETER)))
}

fn memfd(name: &str) -> Result<File, Why> {
    let made = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC);
    let made = made.map_err(|error| Why::said("there is no memory for a guest's files")(&error))?;
    Ok(File::from(made))
}

/// Returns the beginning of the first line of a file.
fn first_line(file: &File) -> String {
    let mut bytes = [0; 200];
    let length = file.read_at(&mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..length]);
    let line = text.lines().next().unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).collect()
}

/// Makes an initramfs with this program, in a file that has no name.
fn initramfs(program: &[u8]) -> Result<OwnedFd, Why> {
    let failed = |error: &dyn std::fmt::Display| Why::said("no memory for the guest's file system")(error);
    let mut archive = Archive::default();
    for directory in ["proc", "sys", "dev"] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, program);
    let mut file = memfd("initramfs")?;
    file.write_all(&archive.finish())
        .map_err(|error| failed(&error))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_program_that_needs_no_other_file_is_given_to_a_guest() {
        // This test is linked dynamically.
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(own.starts_with(b"\x7fELF") && !is_static(&own));
        for bad in [&b""[..], b"\x7fELF\x02\x01", b"#!/bin/sh\n", &[0xff; 100]] {
            assert!(!is_static(bad));
        }
        let mut forged = own[..64].to_vec();
        forged[56..58].copy_from_slice(&[0xff, 0xff]);
        assert!(!is_static(&forged));
    }

    #[test]
    fn the_running_kernels_image_comes_first_and_then_the_newest_name() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(own_kernel(root.path()), None);
        write("boot/config-6.1", "");
        write("boot/vmlinuz-6.1.0-1", "");
        write("boot/vmlinuz-6.1.0-2", "");
        write("proc/sys/kernel/osrelease", "6.1.0-1\n");
        assert_eq!(
            own_kernel(root.path()).unwrap(),
            root.path().join("boot/vmlinuz-6.1.0-1")
        );
        write("proc/sys/kernel/osrelease", "6.18\n");
        assert_eq!(
            own_kernel(root.path()).unwrap(),
            root.path().join("boot/vmlinuz-6.1.0-2")
        );
    }

    #[test]
    fn a_guest_has_room_for_what_its_program_touches() {
        for mib in [1, 100, 5000] {
            let guest = Guest {
                name: "a",
                uuid: None,
                load: Kernel::Uniform(mib << 20),
                vcpus: 2,
                cpus: &CpuSet::default(),
                memory: Memory::Anywhere,
            };
            assert!(guest.bytes().0 > (2 * mib as u64 + 128) << 20);
        }
        let nodes: NodeSet = [0, 3, 70].into_iter().map(homenode_units::NodeId).collect();
        assert_eq!((mask(&nodes)[0], mask(&nodes)[1]), (0b1001, 1 << 6));
    }
}

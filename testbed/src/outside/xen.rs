//! The emulated host under Xen: one QEMU that boots the hypervisor, and its own dom0.
//!
//! `scripts/xen-setup.sh` makes dom0's disk and the hypervisor once. What changes between boots comes through a directory that
//! dom0 sees under the same path as this machine: programs, the domUs' kernel, jobs and events. dom0's kernel is this
//! machine's stock kernel. The modules that it needs are in its initramfs, so that the disk fits any kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use homenode_formats::cpio::Archive;

use super::emulated::{HostKind, NODE_MIB, Workshop};

/// Memory of dom0. It is enough for libvirt, the agent and the testbed's own program, and leaves some of node 0 for domUs.
const DOM0_MIB: u32 = 640;

/// An EPYC without the features that the emulator gets wrong for Xen. Without MONITOR, SMAP and SMEP, Xen neither panics nor
/// loses dom0. With AVX, each PVH domU whose vCPU had moved to another CPU died of an illegal instruction.
const CPU: &str = "EPYC,+svm,+npt,-monitor,-smap,-smep,-avx,-avx2,-fma,-f16c";

/// Options for the hypervisor. Deep idle states panic under emulation, so they are off.
const XEN_OPTIONS: &str = "console=com1 com1=115200,8n1 dom0_max_vcpus=1 dom0_nodes=0 sched=credit cpuidle=0 \
                           loglvl=warning guest_loglvl=warning";

/// Modules of dom0's kernel, in the order in which they must be loaded: for its disk, the shared directory, Xen's devices, and
/// the backends of domUs' disks and NICs.
const MODULES: [&str; 27] = [
    "arch/x86/crypto/crc32c-intel",
    "crypto/crc32c_generic",
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
    "fs/jbd2/jbd2",
    "fs/mbcache",
    "lib/crc16",
    "fs/ext4/ext4",
    "net/9p/9pnet",
    "net/9p/9pnet_virtio",
    "fs/netfs/netfs",
    "fs/fscache/fscache",
    "fs/9p/9p",
    "drivers/xen/xen-privcmd",
    "drivers/xen/xenfs/xenfs",
    "drivers/xen/xen-evtchn",
    "drivers/xen/xen-gntdev",
    "drivers/xen/xen-gntalloc",
    "drivers/block/xen-blkback/xen-blkback",
    "drivers/net/xen-netback/xen-netback",
    "net/llc/llc",
    "net/802/stp",
    "net/bridge/bridge",
];

/// Disks for domUs, which are empty at each boot, and their size.
pub const DISKS: [&str; 2] = ["vdb", "vdc"];
const DISK_BYTES: u64 = 16 << 20;

/// dom0's first program.
const INIT: &str = include_str!("dom0-init.sh");

/// Returns the command that starts the host, and runs `program` in its dom0 with the files in `dir`.
///
/// # Errors
/// When `scripts/xen-setup.sh` has not been run, or dom0's initramfs cannot be made.
pub(super) fn emulator(
    workshop: &Workshop,
    kind: HostKind,
    program: &Path,
    dir: &Path,
    exchange: &Path,
) -> anyhow::Result<Command> {
    let made = |name: &str| -> anyhow::Result<PathBuf> {
        let path = workshop.dir.join("xen").join(name);
        ensure!(
            path.exists(),
            "{} is missing: run scripts/xen-setup.sh",
            path.display()
        );
        Ok(path)
    };
    let (xen, disk) = (made("xen")?, made("dom0.img")?);
    // dom0's first program knows the files by these names.
    ensure!(
        program == dir.join("bin/homenode-testbed") && exchange == dir.join("exchange"),
        "the inside of a Xen host is not where dom0 looks for it"
    );
    let initramfs = dir.join("dom0-initramfs");
    build_initramfs(&workshop.kernel.release, &initramfs)?;

    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-accel", "tcg,thread=multi", "-cpu", CPU, "-machine", "q35"]);
    command.args(["-display", "none", "-net", "none", "-no-reboot"]);
    command.args(["-smp", &kind.cpus().to_string()]);
    command.args(["-m", &format!("{}M", kind.nodes() * NODE_MIB)]);
    for node in 0..kind.nodes() {
        command.args([
            "-object",
            &format!("memory-backend-ram,id=node{node},size={NODE_MIB}M"),
        ]);
        command.args([
            "-numa",
            &format!("node,nodeid={node},cpus={},memdev=node{node}", kind.cpus_of(node)),
        ]);
    }
    for (from, to, distance) in kind.distances() {
        command.args(["-numa", &format!("dist,src={from},dst={to},val={distance}")]);
    }
    let mut drive = |name: &str, path: &Path, how: &str| {
        let drive = format!("file={},format=raw,if=none,id={name}{how}", escaped(path));
        let device = format!("virtio-blk-pci,drive={name}");
        command.args(["-drive", &drive, "-device", &device]);
    };
    // With `snapshot=on`, each boot finds the disk as `scripts/xen-setup.sh` made it.
    drive("disk", &disk, ",snapshot=on");
    for name in DISKS {
        let path = dir.join(name);
        let made = fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
        made.with_context(|| format!("cannot make {}", path.display()))?;
        drive(name, &path, "");
    }
    let shared = format!("local,id=boot,path={},security_model=none", escaped(dir));
    command.args([
        "-fsdev",
        &shared,
        "-device",
        "virtio-9p-pci,fsdev=boot,mount_tag=boot",
    ]);
    let console = format!(
        "file,id=console,append=on,path={}",
        escaped(&dir.join("console.log"))
    );
    command.args(["-chardev", &console, "-serial", "chardev:console"]);
    let monitor = format!(
        "socket,id=testbed,path={},server=on,wait=off",
        escaped(&dir.join("monitor"))
    );
    command.args(["-chardev", &monitor, "-mon", "testbed"]);
    if kind == HostKind::XenCounted {
        let options = workshop.pmu_options(kind, &dir.join("pmu"))?;
        command.args(options.split_whitespace());
    }
    command.arg("-kernel").arg(xen);
    command.args([
        "-append",
        &format!("{XEN_OPTIONS} dom0_mem={DOM0_MIB}M,max:{DOM0_MIB}M"),
    ]);
    let first = match kind {
        HostKind::XenService => " homenode.systemd",
        _ => "",
    };
    let modules = format!(
        "{} console=hvc0 panic=-1 quiet{first} homenode.dir={},{}",
        escaped(&workshop.kernel.image),
        escaped(dir),
        escaped(&initramfs)
    );
    command.args(["-initrd", &modules]);
    Ok(command)
}

/// Returns a path, escaped for QEMU's comma-separated options.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Packs dom0's first program, a busybox for it and its kernel's modules.
fn build_initramfs(release: &str, target: &Path) -> anyhow::Result<()> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "proc", "sys", "disk", "modules"] {
        archive.directory(dir);
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("bin/busybox", 0o755, &read(Path::new("/bin/busybox"))?);
    let modules = PathBuf::from(format!("/lib/modules/{release}/kernel"));
    for (number, module) in MODULES.iter().enumerate() {
        let name = module.rsplit('/').next().unwrap_or(module);
        let bytes = read(&modules.join(format!("{module}.ko")))?;
        archive.file(&format!("modules/{number:02}-{name}.ko"), 0o644, &bytes);
    }
    fs::write(target, archive.finish()).with_context(|| format!("cannot write {}", target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_part_of_it() {
        assert_eq!(escaped(Path::new("/a,b/c")), "/a,,b/c");
    }
}

//! libvirt inside the emulated host: prepares, starts, kills and restarts its daemon.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process};
use virt::connect::Connect;

use super::proc::Process;
use super::wait::{Look, wait_until};
use super::xen;

/// Directory of guests' sockets and console logs.
pub const RUN_DIR: &str = "/run/homenode-testbed";
/// Directory of the guests' kernel and initramfs. It is in memory, because QEMU maps the kernel.
pub const IMAGE_DIR: &str = "/run/homenode-testbed/images";
const CAPABILITIES: &str = "/var/cache/libvirt/qemu/capabilities";
const PID_FILE: &str = "/run/libvirtd.pid";
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Directories that must be writable and empty, because libvirt's state on this machine must not be used.
const STATE_DIRS: [&str; 5] = [
    "/var/log/libvirt",
    "/var/lib/libvirt",
    "/var/cache/libvirt",
    "/etc/libvirt/qemu",
    "/run/libvirt",
];

/// Turns off confinement and the separate log daemon: neither is under test, and each costs seconds under emulation.
const QEMU_CONF: &str = r#"# written by the testbed
security_driver = "none"
user = "root"
group = "root"
stdio_handler = "file"
namespaces = []
"#;

/// Prepares mounts, modules and configuration; once per boot.
///
/// # Errors
/// When nested KVM does not work or a mount fails.
pub fn prepare(images_from: &Path) -> anyhow::Result<()> {
    run("modprobe", &["kvm_amd"])?;
    if !Path::new("/dev/kvm").exists() {
        bail!("no /dev/kvm after modprobe kvm_amd: the emulated CPU offers no SVM");
    }
    for dir in STATE_DIRS.iter().chain(&[RUN_DIR]) {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {dir}"))?;
        mount("tmpfs", *dir, "tmpfs", MountFlags::empty(), None)
            .with_context(|| format!("cannot mount {dir}"))?;
    }
    if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MountFlags::empty(), None)
            .context("cannot mount cgroup2")?;
    }
    fs::create_dir_all("/etc/libvirt/hooks/qemu.d").context("cannot create libvirt's hook directory")?;
    fs::write("/etc/libvirt/qemu.conf", QEMU_CONF).context("cannot write /etc/libvirt/qemu.conf")?;
    fs::create_dir_all(IMAGE_DIR).with_context(|| format!("cannot create {IMAGE_DIR}"))?;
    for name in ["vmlinux", "initramfs"] {
        let (from, to) = (images_from.join(name), Path::new(IMAGE_DIR).join(name));
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    Ok(())
}

/// Restores what libvirt learnt about QEMU in an earlier boot, since probing takes it half a minute. libvirt itself checks
/// that nothing has changed since.
///
/// # Errors
/// When a file cannot be copied.
pub fn restore_capabilities(from: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(CAPABILITIES).with_context(|| format!("cannot create {CAPABILITIES}"))?;
    copy_xml(from, Path::new(CAPABILITIES))
}

/// Saves what libvirt has learnt about QEMU, for later boots.
///
/// # Errors
/// When a file cannot be copied.
pub fn save_capabilities(to: &Path) -> anyhow::Result<()> {
    copy_xml(Path::new(CAPABILITIES), to)
}

fn copy_xml(from: &Path, to: &Path) -> anyhow::Result<()> {
    let files = fs::read_dir(from)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    for file in files.filter(|path| path.extension().is_some_and(|extension| extension == "xml")) {
        fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
        let name = file.file_name().unwrap_or_default();
        fs::copy(&file, to.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    Ok(())
}

/// Runs a helper program until it ends; returns its output.
///
/// # Errors
/// When it cannot be started or fails; the error contains what it printed.
pub fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{program} {}: {}; {}",
            arguments.join(" "),
            output.status,
            said.trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Starts the daemon and waits for its first answer.
///
/// # Errors
/// When it does not answer in time.
pub fn start() -> anyhow::Result<(Connect, Duration)> {
    let begin = Instant::now();
    run("libvirtd", &["-d"])?;
    let connection = connect_within(ANSWER_LIMIT)?;
    Ok((connection, begin.elapsed()))
}

/// Returns the URI of the daemon that has the domains.
fn uri() -> &'static str {
    if xen::is_dom0() {
        "xen:///system"
    } else {
        "qemu:///system"
    }
}

/// Returns a connection to the daemon as soon as it answers.
///
/// # Errors
/// When it does not answer in time.
pub fn connect_within(limit: Duration) -> anyhow::Result<Connect> {
    homenode_kvm::load_libvirt()?;
    wait_until("libvirt to answer", limit, || {
        match Connect::open(Some(uri())).and_then(|connection| connection.lib_version().map(|_| connection)) {
            Ok(connection) => Ok(Look::Done(connection)),
            Err(error) => Ok(Look::NotYet(error.message().to_owned())),
        }
    })
}

/// Returns the daemon's process, if it runs.
#[must_use]
pub fn daemon() -> Option<Process> {
    let process = Process(fs::read_to_string(PID_FILE).ok()?.trim().parse().ok()?);
    process.alive().then_some(process)
}

/// Kills the daemon at once, as a crash would. Guests keep running.
///
/// # Errors
/// When it does not run.
pub fn kill() -> anyhow::Result<()> {
    let process = daemon().context("libvirtd is not running")?;
    let pid = i32::try_from(process.0)
        .ok()
        .and_then(Pid::from_raw)
        .context("libvirtd has no valid process number")?;
    kill_process(pid, Signal::KILL).context("cannot kill libvirtd")?;
    wait_until("libvirtd to be gone", Duration::from_secs(20), || {
        Ok(if process.alive() {
            Look::NotYet("it is alive".to_owned())
        } else {
            Look::Done(())
        })
    })
}

/// Destroys every guest that a case left behind. Starts the daemon if it does not run.
///
/// # Errors
/// When libvirt does not answer.
pub fn clean_up() -> anyhow::Result<()> {
    let connection = if daemon().is_some() {
        connect_within(ANSWER_LIMIT)?
    } else {
        start()?.0
    };
    for domain in connection.list_all_domains(0).context("cannot list domains")? {
        // libvirt's Xen driver also lists dom0, whose number is 0.
        if domain.is_active().unwrap_or(false) && domain.id() != Some(0) {
            let _ = domain.destroy();
        }
        if domain.is_persistent().unwrap_or(false) {
            let _ = domain.undefine();
        }
    }
    for entry in fs::read_dir("/etc/libvirt/hooks/qemu.d")
        .into_iter()
        .flatten()
        .flatten()
    {
        let _ = fs::remove_file(entry.path());
    }
    if xen::is_dom0() {
        xen::clean_up()?;
    }
    Ok(())
}

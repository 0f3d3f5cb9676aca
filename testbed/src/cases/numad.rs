//! Records how libvirt calls numad, and what the real numad answers. Our drop-in relies on these facts.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use homenode_testbed_guest::Behaviour;
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::basics::in_mib;
use super::memory::drifted;
use crate::inside::guest::{Cpus, GuestSpec};
use crate::inside::{Inside, libvirtd};

const NUMAD: &str = "/usr/bin/numad";
const REAL_NUMAD: &str = "/run/homenode-testbed/numad.real";
const ORDER_LOG: &str = "/run/homenode-testbed/order.log";
const HOOK: &str = "/etc/libvirt/hooks/qemu.d/order";

/// Puts another program in numad's place until dropped.
pub(super) struct NumadReplaced;

impl NumadReplaced {
    /// Bind-mounts `program` over numad.
    ///
    /// # Errors
    /// When the mount fails.
    pub(super) fn with(program: &Path) -> anyhow::Result<Self> {
        if !Path::new(REAL_NUMAD).exists() {
            fs::copy(NUMAD, REAL_NUMAD).with_context(|| format!("cannot copy {NUMAD}"))?;
        }
        mount_bind(program, NUMAD)
            .with_context(|| format!("cannot put {} over {NUMAD}", program.display()))?;
        Ok(Self)
    }
}

impl Drop for NumadReplaced {
    fn drop(&mut self) {
        let _ = unmount(NUMAD, UnmountFlags::DETACH);
    }
}

/// Writes an executable script.
///
/// # Errors
/// When it cannot be written.
pub(super) fn write_script(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

/// Returns three guests with automatic placement.
fn auto_guests(prefix: &str) -> Vec<GuestSpec> {
    (0..3)
        .map(|number| {
            GuestSpec::new(&format!("{prefix}{number}"))
                .cpus(Cpus::Auto)
                .doing(Behaviour::idle().with_touch(40))
        })
        .collect()
}

/// Records when hook and numad run, first for one guest's start, then for three starts at once.
pub(super) fn order(inside: &mut Inside) -> anyhow::Result<()> {
    // The hook reads its standard input, as libvirt waits until it has.
    write_script(
        Path::new(HOOK),
        &format!(
            "#!/bin/bash\necho \"$EPOCHREALTIME hook-begin $1 $2 $3 pid=$$ ppid=$PPID\" >>{ORDER_LOG}\ncat >/dev/null\n\
             echo \"$EPOCHREALTIME hook-end $1 $2 $3 pid=$$\" >>{ORDER_LOG}\n"
        ),
    )?;
    let fake = inside.dir().join("fake-numad");
    write_script(
        &fake,
        &format!(
            "#!/bin/bash\necho \"$EPOCHREALTIME numad-begin $* pid=$$ ppid=$PPID\" >>{ORDER_LOG}\n\
             {REAL_NUMAD} \"$@\"; rc=$?\necho \"$EPOCHREALTIME numad-end $* pid=$$\" >>{ORDER_LOG}\nexit $rc\n"
        ),
    )?;
    // Installed below /run, because the exchange directory may be mounted noexec.
    let installed = Path::new("/run/homenode-testbed/fake-numad");
    fs::copy(&fake, installed).context("cannot copy the fake numad")?;
    let _numad = NumadReplaced::with(installed)?;
    // libvirtd looks for hooks when it starts.
    inside.kill_libvirtd()?;
    inside.restart_libvirtd()?;

    let single = inside.create(&GuestSpec::new("single").cpus(Cpus::Auto))?;
    let lines = take_order(inside, "one start")?;
    inside.destroy(&single)?;
    let position = |word: &str| lines.iter().position(|line| line.contains(word));
    let (hook, numad) = (position("hook-end single prepare"), position("numad-begin"));
    ensure!(
        hook.is_some(),
        "expected the hook to be called with 'prepare', saw {lines:?}"
    );
    ensure!(numad.is_some(), "expected libvirt to call numad, saw {lines:?}");
    let before = hook < numad;
    let word = if before { "before" } else { "after" };
    inside.note(format!("the prepare hook ran {word} numad was called"));
    // The hooks of the destroyed guest do not count.
    let _ = fs::remove_file(ORDER_LOG);

    let guests = inside.create_at_once(&auto_guests("order"))?;
    take_order(inside, "three starts at once")?;
    for guest in &guests {
        inside.note(format!(
            "{}: numad said {:?}",
            guest.spec.name,
            inside.numad_advice(&guest.spec.name)?
        ));
    }
    ensure!(
        before,
        "expected the prepare hook before numad: the drop-in learns the guest's name from it"
    );
    Ok(())
}

fn take_order(inside: &Inside, title: &str) -> anyhow::Result<Vec<String>> {
    let text = fs::read_to_string(ORDER_LOG).with_context(|| format!("cannot read {ORDER_LOG}"))?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    inside.note(format!("order of {title}:"));
    for line in &lines {
        inside.note(format!("  {line}"));
    }
    fs::remove_file(ORDER_LOG).with_context(|| format!("cannot remove {ORDER_LOG}"))?;
    Ok(lines)
}

/// Records how the real numad handles three starts at once.
pub(super) fn three_starts(inside: &mut Inside) -> anyhow::Result<()> {
    let guests = inside.create_at_once(&auto_guests("auto"))?;
    let mut advice = Vec::new();
    for guest in &guests {
        guest.wait_ready()?;
        let nodes = inside.numad_advice(&guest.spec.name)?;
        inside.note(format!(
            "{}: the real numad said {nodes:?}; policy {}, pages {:?}",
            guest.spec.name,
            guest.memory_policy()?,
            guest.pages_per_node()?
        ));
        advice.push(nodes);
    }
    let distinct: std::collections::BTreeSet<_> = advice.iter().collect();
    inside.note(format!(
        "three guests started at once are on {} distinct node sets",
        distinct.len()
    ));
    ensure!(libvirtd::daemon().is_some(), "expected libvirtd to have survived");
    Ok(())
}

/// numad's log.
const NUMAD_LOG: &str = "/var/log/numad.log";

/// Records how the real numad, as a daemon in charge of the guest, handles memory that drifted.
pub(super) fn drift(inside: &mut Inside) -> anyhow::Result<()> {
    let guest = drifted(inside)?;
    let numad = |arguments: &[&str]| {
        let status = Command::new(NUMAD).args(arguments).status();
        status.with_context(|| format!("cannot start {NUMAD}"))
    };
    let pid = guest.process.0.to_string();
    let started = numad(&["-i", "1:5", "-l", "6", "-p", &pid])?;
    ensure!(started.success(), "expected numad to start, saw {started}");
    for _ in 0..4 {
        thread::sleep(Duration::from_secs(20));
        inside.note(format!(
            "20 s later: {:?} MiB, vCPUs on {:?}",
            in_mib(&guest.pages_per_node()?),
            guest.process.vcpu_affinity()?
        ));
    }
    // An interval of 0 ends the daemon.
    numad(&["-i", "0"])?;
    let log = fs::read_to_string(NUMAD_LOG).unwrap_or_default();
    let about =
        |line: &&str| line.contains("Advising") || line.contains("Including") || line.contains("move");
    for line in log.lines().filter(about).take(20) {
        inside.note(format!("numad: {line}"));
    }
    Ok(())
}

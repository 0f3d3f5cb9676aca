//! VMs of others that are busy: they disturb what is measured, and measuring disturbs them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The share of a CPU from which on a VM is busy.
const BUSY: f64 = 0.05;
/// How long VMs are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Ticks of `/proc/PID/stat` per second, on all architectures of Linux.
const TICKS_PER_S: f64 = 100.0;

/// A process that runs a VM and is busy.
#[derive(Debug, PartialEq)]
pub(super) struct BusyVm {
    /// Its process id.
    pub pid: u32,
    /// How many CPUs it uses.
    pub cpus: f64,
}

/// Returns the busy VMs of this host, after a look of a second.
pub(super) fn busy_vms(root: &Path) -> Vec<BusyVm> {
    let before = ticks(root);
    if before.is_empty() {
        return Vec::new();
    }
    std::thread::sleep(LOOK);
    busy(&before, &ticks(root), LOOK)
}

fn busy(before: &BTreeMap<u32, u64>, after: &BTreeMap<u32, u64>, passed: Duration) -> Vec<BusyVm> {
    let used = after.iter().filter_map(|(pid, now)| {
        let ticks = now.saturating_sub(*before.get(pid)?);
        let cpus = ticks as f64 / TICKS_PER_S / passed.as_secs_f64();
        (cpus > BUSY).then_some(BusyVm { pid: *pid, cpus })
    });
    used.collect()
}

/// Returns the CPU time so far of each process that runs a VM.
fn ticks(root: &Path) -> BTreeMap<u32, u64> {
    let Ok(entries) = fs::read_dir(root.join("proc")) else {
        return BTreeMap::new();
    };
    let of = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (name, fields) = stat.rsplit_once(')')?;
        let (_, name) = name.split_once('(')?;
        let runs_a_vm = name.starts_with("qemu-system") || matches!(name, "qemu-kvm" | "kvm");
        let mut times = fields.split_ascii_whitespace().skip(11);
        let (user, system): (u64, u64) = (times.next()?.parse().ok()?, times.next()?.parse().ok()?);
        runs_a_vm.then_some((pid, user.saturating_add(system)))
    };
    entries.flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_idles_is_not_busy_and_another_program_is_no_vm() {
        let root = tempfile::tempdir().unwrap();
        let write = |pid: u32, name: &str, user: u64| {
            let dir = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&dir).unwrap();
            let stat = format!("{pid} ({name}) S 1 7 7 0 -1 4194304 100 0 0 0 {user} 7 33 44 20 0 1 0 100");
            fs::write(dir.join("stat"), stat).unwrap();
        };
        let all = |user: u64| {
            write(10, "qemu-system-x86", user);
            write(11, "kvm", 100);
            write(12, "postgres", user);
            write(13, "qemu-kvm", user / 2);
            ticks(root.path())
        };
        let (before, after) = (all(100), all(150));
        assert_eq!(before.keys().copied().collect::<Vec<_>>(), [10, 11, 13]);
        let found = busy(&before, &after, Duration::from_secs(1));
        let found: Vec<(u32, f64)> = found.iter().map(|vm| (vm.pid, vm.cpus)).collect();
        assert_eq!(found, [(10, 0.5), (13, 0.25)]);
    }
}

//! `/proc/stat`: for how long each CPU was busy since boot.
//!
//! All time except `idle` and `iowait` counts as busy: user, nice, system, irq, softirq and steal (a CPU that a hypervisor below
//! takes away is not idle). Guest time is already part of user time. The unit is USER_HZ, 1/100 s on every architecture that runs
//! KVM, whatever the kernel's own tick is.

use std::path::Path;

use homenode_units::{CpuId, Ns};

use crate::read::{self, ReadError};

const NS_PER_USER_HZ: u64 = 10_000_000;
/// Most bytes to read: plenty for 8192 CPUs of 120 bytes, and the interrupt line.
const LIMIT_BYTES: u64 = 4 << 20;

/// Reads the busy time of every online CPU, ascending by number. `root` is `/` on a live host.
///
/// # Errors
/// If the file does not exist (no `/proc`), or a CPU line is malformed.
pub fn read(root: &Path) -> Result<Vec<(CpuId, Ns)>, ReadError> {
    let path = root.join("proc/stat");
    let text = read::text(&path, LIMIT_BYTES)?;
    let mut cpus = Vec::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("cpu") else {
            continue;
        };
        if rest.starts_with(' ') {
            continue; // the sum over all CPUs
        }
        let busy = parse_cpu(rest);
        cpus.push(
            busy.ok_or_else(|| ReadError::malformed(&path, "`cpuN` and at least eight numbers", line))?,
        );
    }
    if cpus.is_empty() {
        return Err(ReadError::malformed(&path, "a line `cpuN …` per CPU", &text));
    }
    cpus.sort_unstable();
    if let Some(twice) = cpus.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let found = format!("cpu{} twice", twice[0].0);
        return Err(ReadError::malformed(&path, "each CPU once", &found));
    }
    Ok(cpus)
}

fn parse_cpu(rest: &str) -> Option<(CpuId, Ns)> {
    let mut words = rest.split_ascii_whitespace();
    let cpu = words.next()?.parse().ok()?;
    let mut fields = [0u64; 8];
    for field in &mut fields {
        *field = words.next()?.parse().ok()?;
    }
    let [user, nice, system, _idle, _iowait, irq, softirq, steal] = fields;
    let ticks = [user, nice, system, irq, softirq, steal]
        .into_iter()
        .try_fold(0u64, u64::checked_add)?;
    Some((CpuId(cpu), Ns(ticks.checked_mul(NS_PER_USER_HZ)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    #[test]
    fn busy_is_all_but_idle_and_iowait() {
        let tree = Tree::new(&[(
            "proc/stat",
            "cpu  9 9 9 9 9 9 9 9 9 9\ncpu10 1 2 3 400 500 6 7 8 1 0\ncpu2 1 0 0 5 5 0 0 0 0 0\nintr 5 5\nctxt 1\n",
        )]);
        let busy = read(tree.root()).unwrap();
        assert_eq!(busy, [(CpuId(2), Ns(10_000_000)), (CpuId(10), Ns(270_000_000))]);
    }

    #[test]
    fn absent_malformed_and_truncated_files_are_errors_with_the_path() {
        assert!(
            read(Tree::new(&[]).root())
                .unwrap_err()
                .to_string()
                .contains("proc/stat")
        );
        for bad in [
            "",
            "cpu  1 2 3\n",
            "cpu0 1 2 3",
            "cpu0 1 2 3 4 5 6 7 x",
            "cpux 1 2 3 4 5 6 7 8",
            "cpu0 18446744073709551615 1 1 1 1 1 1 1",
            "cpu0 1 1 1 1 1 1 1 1\ncpu0 2 1 1 1 1 1 1 1",
        ] {
            let error = read(Tree::new(&[("proc/stat", bad)]).root()).unwrap_err();
            assert!(matches!(error, ReadError::Malformed { .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn this_machine_reads() {
        assert!(!read(Path::new("/")).unwrap().is_empty());
    }
}

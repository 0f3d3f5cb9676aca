//! `/sys/fs/resctrl/homenode-UUID`: a control group for one VM, which gives it a share of the last-level caches' ways (CAT) or of
//! memory bandwidth (MBA).
//!
//! Only groups with names of this form are made, written or removed. If some of a VM's threads are in another program's group
//! (libvirt's `<cachetune>` makes one), confining the VM is refused, because leaving that group could not be undone.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use homenode_host::{Limit, Percent};
use homenode_units::VmId;

use crate::read::{self, ReadError};

pub(crate) const DIR: &str = "sys/fs/resctrl";
/// Most bytes to read from `tasks`: enough for a million threads.
const TASKS_BYTES: u64 = 8 << 20;

/// Why a VM could not be confined, or released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfineError {
    /// The host has no resctrl, or resctrl has no such resource.
    #[error("this host has no {what}: mount resctrl if the hardware supports it, or limit VMs by CPU quota")]
    Absent {
        /// The requested resource.
        what: &'static str,
    },
    /// Another program put the VM's threads into a group.
    #[error("thread {tid} is in another program's resctrl group, which is left alone")]
    Foreign {
        /// The thread.
        tid: i32,
    },
    /// The kernel refused the write.
    #[error("cannot write {path}: {cause}")]
    Refused {
        /// The file.
        path: String,
        /// The system's error, and resctrl's own message.
        cause: String,
    },
    /// A file is unreadable or malformed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// The control groups of this host.
#[derive(Clone, Debug)]
pub struct Confiner {
    base: PathBuf,
}

impl Confiner {
    /// Returns the control groups below a root, whether or not resctrl is mounted there.
    pub fn new(root: &Path) -> Confiner {
        Confiner { base: root.join(DIR) }
    }

    fn group(&self, vm: VmId) -> PathBuf {
        self.base.join(format!("homenode-{vm}"))
    }

    /// Confines these threads of a VM. The VM may already be confined.
    ///
    /// # Errors
    /// See [`ConfineError`]. After an error either the VM is unchanged, or its group must be [released](Confiner::release).
    pub fn confine(&self, vm: VmId, tids: &[i32], limit: Limit) -> Result<(), ConfineError> {
        let lines = self.schemata(limit)?;
        let group = self.group(vm);
        let (free, own) = (self.tasks(&self.base)?, self.tasks(&group)?);
        if let Some(&tid) = tids.iter().find(|tid| !free.contains(tid) && !own.contains(tid)) {
            return Err(ConfineError::Foreign { tid });
        }
        match std::fs::create_dir(&group) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(self.refused(&group, &error));
            }
            _ => {}
        }
        for line in &lines {
            self.append(&group.join("schemata"), line)?;
        }
        for tid in tids.iter().filter(|tid| !own.contains(tid)) {
            self.append(&group.join("tasks"), &tid.to_string())?;
        }
        Ok(())
    }

    /// Returns true if all of these threads are in the VM's group.
    ///
    /// # Errors
    /// If the group's threads cannot be read.
    pub fn holds(&self, vm: VmId, tids: &[i32]) -> Result<bool, ConfineError> {
        let own = self.tasks(&self.group(vm))?;
        Ok(!tids.is_empty() && tids.iter().all(|tid| own.contains(tid)))
    }

    /// Removes the VM's group, if there is one. Its threads then return to the default group.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn release(&self, vm: VmId) -> Result<(), ConfineError> {
        let group = self.group(vm);
        match std::fs::remove_dir(&group) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.refused(&group, &error)),
            _ => Ok(()),
        }
    }

    /// Returns the lines to write for a limit, one per resource.
    fn schemata(&self, limit: Limit) -> Result<Vec<String>, ConfineError> {
        let (what, prefix) = match limit {
            Limit::MemoryBandwidth(_) => ("memory bandwidth allocation", "MB"),
            _ => ("cache allocation", "L3"),
        };
        let absent = ConfineError::Absent { what };
        let path = self.base.join("schemata");
        let text = read::text_if_there(&path, read::SMALL_BYTES)?.ok_or_else(|| absent.clone())?;
        let mut lines = Vec::new();
        for line in text.lines() {
            let Some((resource, domains)) = line
                .trim()
                .split_once(':')
                .filter(|(name, _)| name.starts_with(prefix))
            else {
                continue;
            };
            let value = match limit {
                Limit::MemoryBandwidth(Percent(percent)) => self.bandwidth(resource, percent, domains)?,
                Limit::CacheWays(Percent(percent)) => self.ways(resource, percent)?,
                Limit::CpuQuota(_) | Limit::Memory(_) => return Err(absent),
            };
            let malformed = || ReadError::malformed(&path, "`RESOURCE:ID=VALUE;…`", line);
            let each = domains.split(';').map(|domain| {
                let (id, _) = domain.split_once('=').ok_or_else(malformed)?;
                Ok(format!("{}={value}", id.trim()))
            });
            let each: Vec<String> = each.collect::<Result<_, ReadError>>()?;
            lines.push(format!("{resource}:{}", each.join(";")));
        }
        if lines.is_empty() { Err(absent) } else { Ok(lines) }
    }

    /// Returns a mask with a cache's lowest ways.
    fn ways(&self, resource: &str, percent: u8) -> Result<String, ConfineError> {
        let info = self.base.join("info").join(resource);
        let path = info.join("cbm_mask");
        let text = read::text(&path, read::SMALL_BYTES)?;
        let mask = u64::from_str_radix(text.trim(), 16)
            .map_err(|_| ReadError::malformed(&path, "a mask of ways", &text))?;
        let least: u32 = read::value_if_there(&info.join("min_cbm_bits"), "a number of ways")?.unwrap_or(1);
        let all = mask.trailing_ones();
        let ways = (all * u32::from(percent)).div_ceil(100).max(least).min(all);
        Ok(format!("{:x}", u64::MAX.checked_shr(64 - ways).unwrap_or(0)))
    }

    /// Returns the share of memory bandwidth, rounded to what the hardware can set.
    fn bandwidth(&self, resource: &str, percent: u8, now: &str) -> Result<String, ConfineError> {
        // With the mount option `mba_MBps`, values are megabytes per second and not a share.
        let in_percent = |domain: &str| {
            domain
                .split_once('=')
                .is_none_or(|(_, v)| v.trim().parse().is_ok_and(|v: u64| v <= 100))
        };
        if !now.split(';').all(in_percent) {
            let what = "memory bandwidth allocation in percent";
            return Err(ConfineError::Absent { what });
        }
        let info = self.base.join("info").join(resource);
        let number = |file: &str| read::value_if_there::<u32>(&info.join(file), "a number of percent");
        let (least, step) = (
            number("min_bandwidth")?.unwrap_or(10),
            number("bandwidth_gran")?.unwrap_or(10).max(1),
        );
        Ok(u32::from(percent)
            .max(least)
            .next_multiple_of(step)
            .min(100)
            .to_string())
    }

    fn tasks(&self, group: &Path) -> Result<BTreeSet<i32>, ConfineError> {
        let text = read::text_if_there(&group.join("tasks"), TASKS_BYTES)?.unwrap_or_default();
        Ok(text.lines().filter_map(|line| line.trim().parse().ok()).collect())
    }

    fn append(&self, path: &Path, line: &str) -> Result<(), ConfineError> {
        let file = std::fs::File::options().append(true).create(true).open(path);
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
            .map_err(|error| self.refused(path, &error))
    }

    fn refused(&self, path: &Path, error: &std::io::Error) -> ConfineError {
        let status = read::text_if_there(&self.base.join("info/last_cmd_status"), read::SMALL_BYTES);
        let said = status.ok().flatten().unwrap_or_default();
        let said = said.trim();
        let cause = match error.raw_os_error() {
            Some(libc::ENOSPC) => {
                "all resctrl groups are in use (the hardware has few); remove one, or limit VMs by CPU quota"
                    .into()
            }
            _ if said.is_empty() || said == "ok" => error.to_string(),
            _ => format!("{error} ({said})"),
        };
        ConfineError::Refused {
            path: path.display().to_string(),
            cause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Tree, empty_group, mount_resctrl};

    const VM: VmId = VmId(7);

    fn schemata(tree: &Tree) -> String {
        std::fs::read_to_string(tree.root().join(format!("{DIR}/homenode-{VM}/schemata"))).unwrap()
    }

    #[test]
    fn a_vm_gets_a_group_of_its_own_and_gives_it_back() {
        let tree = Tree::new(&[]);
        mount_resctrl(&tree);
        let confiner = Confiner::new(tree.root());
        assert_eq!(confiner.holds(VM, &[41, 42]), Ok(false));
        confiner
            .confine(VM, &[41, 42], Limit::CacheWays(Percent(10)))
            .unwrap();
        assert_eq!(
            schemata(&tree),
            "L3:0=3;1=3\n",
            "two of eleven ways are the least"
        );
        assert_eq!(confiner.holds(VM, &[41, 42]), Ok(true));
        assert_eq!(confiner.holds(VM, &[41, 42, 43]), Ok(false));
        confiner
            .confine(VM, &[41, 42], Limit::CacheWays(Percent(50)))
            .unwrap();
        assert!(schemata(&tree).ends_with("L3:0=3f;1=3f\n"));
        empty_group(&tree, VM);
        confiner.release(VM).unwrap();
        confiner.release(VM).unwrap();
        confiner
            .confine(VM, &[41], Limit::MemoryBandwidth(Percent(25)))
            .unwrap();
        assert_eq!(schemata(&tree), "MB:0=30;1=30\n", "in steps of ten");
        let all = Limit::CacheWays(Percent(100));
        confiner.confine(VM, &[41], all).unwrap();
        assert!(schemata(&tree).ends_with("L3:0=7ff;1=7ff\n"));
    }

    #[test]
    fn what_is_not_there_not_ours_or_malformed_is_refused() {
        let tree = Tree::new(&[]);
        let confiner = Confiner::new(tree.root());
        let ways = Limit::CacheWays(Percent(10));
        let refused = |tids: &[i32], limit| confiner.confine(VM, tids, limit).unwrap_err().to_string();
        assert!(refused(&[41], ways).contains("no cache allocation"));
        mount_resctrl(&tree);
        assert!(refused(&[41, 77], ways).contains("thread 77 is in another program's resctrl group"));
        assert!(
            !tree.root().join(format!("{DIR}/homenode-{VM}")).exists(),
            "nothing was made"
        );
        tree.write(&format!("{DIR}/schemata"), "L3:0=7ff\n");
        assert!(
            refused(&[41], Limit::MemoryBandwidth(Percent(10))).contains("no memory bandwidth allocation")
        );
        tree.write(&format!("{DIR}/schemata"), "MB:0=5000\n");
        assert!(refused(&[41], Limit::MemoryBandwidth(Percent(10))).contains("in percent"));
        tree.write(&format!("{DIR}/schemata"), "L3:zero\n");
        assert!(refused(&[41], ways).contains("schemata"));
        tree.write(&format!("{DIR}/schemata"), "L3:0=7ff\n");
        tree.write(&format!("{DIR}/info/L3/cbm_mask"), "many\n");
        assert!(refused(&[41], ways).contains("cbm_mask"));
        // The group cannot be created.
        mount_resctrl(&tree);
        tree.write(&format!("{DIR}/homenode-{VM}"), "a file");
        assert!(refused(&[41], ways).contains("homenode-"));
    }
}

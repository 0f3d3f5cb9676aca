//! `/sys/fs/resctrl/homenode-UUID`: a control group for one VM, which gives it a share of the last-level caches' ways (CAT) or of
//! memory bandwidth (MBA).
//!
//! Only groups with names of this form are made, written or removed. If some of a VM's threads are in another program's group
//! (libvirt's `<cachetune>` makes one), confining the VM is refused, because leaving that group could not be undone.
//!
//! A VM's ways are adjacent, as most processors need. The kernel would refuse ways of an exclusive or pseudo-locked group
//! (`bit_usage`), so the VM gets others. Ways that devices fill too (`shareable_bits`) are taken last.
//!
//! Properties (tests of the same name):
//! - `the_kernels_rules_allow_every_mask_that_is_written`
//!
//! Neither QEMU nor the machines that Homenode is built on have this interface. So tests run on a fake tree, and hold what is
//! written against the kernel's rules, which `fake::resctrl_says` states.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Groups that share no ways hold too many of a cache.
    #[error(
        "exclusive or pseudo-locked resctrl groups leave no {ways} adjacent ways of {resource} cache {cache}: change their \
         schemata, or limit VMs by CPU quota"
    )]
    Taken {
        /// The resource, such as `L3`.
        resource: String,
        /// The kernel's number of the cache.
        cache: String,
        /// The least ways that a group may have.
        ways: u32,
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

/// What the kernel says of the caches of one resource.
struct Caches {
    resource: String,
    /// Number of ways.
    all: u32,
    /// Least ways that a group may have.
    least: u32,
    /// Ways of the cache that devices fill too.
    devices: u64,
    /// Ways of each cache that only one group may use.
    taken: BTreeMap<String, u64>,
}

impl Caches {
    fn read(base: &Path, resource: &str) -> Result<Caches, ReadError> {
        let info = base.join("info").join(resource);
        let mask = |file: &str, text: &str| {
            let path = info.join(file);
            u64::from_str_radix(text.trim(), 16)
                .map_err(|_| ReadError::malformed(&path, "a mask of ways", text))
        };
        let all = mask(
            "cbm_mask",
            &read::text(&info.join("cbm_mask"), read::SMALL_BYTES)?,
        )?;
        let devices = read::text_if_there(&info.join("shareable_bits"), read::SMALL_BYTES)?;
        let path = info.join("bit_usage");
        let usage = read::text_if_there(&path, read::SMALL_BYTES)?.unwrap_or_default();
        let mut taken = BTreeMap::new();
        for cache in usage.trim().split(';').filter(|cache| !cache.is_empty()) {
            let (id, letters) = cache
                .split_once('=')
                .filter(|(_, letters)| {
                    letters.len() <= 64 && letters.chars().all(|letter| "0HXSEP".contains(letter))
                })
                .ok_or_else(|| {
                    ReadError::malformed(&path, "`ID=` and a letter of `0HXSEP` for each way", &usage)
                })?;
            // The first letter is the highest way.
            let mask = letters.chars().fold(0, |mask, letter| {
                (mask << 1) | u64::from(matches!(letter, 'E' | 'P'))
            });
            taken.insert(id.trim().to_owned(), mask);
        }
        Ok(Caches {
            resource: resource.to_owned(),
            all: all.trailing_ones(),
            least: read::value_if_there(&info.join("min_cbm_bits"), "a number of ways")?.unwrap_or(1),
            devices: devices.map_or(Ok(0), |text| mask("shareable_bits", &text))?,
            taken,
        })
    }

    /// Returns a mask of adjacent ways for a share of a cache, rounded up. It has fewer ways if other groups leave no run of that
    /// length.
    fn ways(&self, cache: &str, percent: u8) -> Result<u64, ConfineError> {
        let wanted = (self.all * u32::from(percent)).div_ceil(100);
        let wanted = wanted.max(self.least).max(1).min(self.all);
        let taken = self.taken.get(cache).copied().unwrap_or(0);
        let least = self.least.max(1);
        for count in (least..=wanted).rev() {
            let run = u64::MAX >> (64 - count);
            let masks = (0..=self.all - count).map(|lowest| run << lowest);
            let free = masks.filter(|mask| mask & taken == 0);
            if let Some(best) = free.min_by_key(|mask| ((mask & self.devices).count_ones(), *mask)) {
                return Ok(best);
            }
        }
        Err(ConfineError::Taken {
            resource: self.resource.clone(),
            cache: cache.to_owned(),
            ways: least,
        })
    }
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

    /// Returns whether resctrl is mounted, whatever it can do on this processor.
    pub fn is_mounted(&self) -> bool {
        self.base.join("schemata").exists()
    }

    /// Returns whether parts of the last-level caches (CAT), and of memory bandwidth (MBA), can be given to VMs.
    pub fn allocates(&self) -> (bool, bool) {
        // With code and data prioritised apart (CDP), the caches are `L3CODE` and `L3DATA`.
        let has = |prefix: &str| {
            let resources = read::names(&self.base.join("info"), 256).unwrap_or_default();
            let is_it = |name: &String| name.starts_with(prefix) && !name.ends_with("_MON");
            resources.iter().any(is_it)
        };
        (has("L3"), has("MB"))
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
            let malformed = || ReadError::malformed(&path, "`RESOURCE:ID=VALUE;…`", line);
            let ids = domains.split(';').map(|domain| {
                let (id, _) = domain.split_once('=').ok_or_else(malformed)?;
                Ok(id.trim())
            });
            let ids: Vec<&str> = ids.collect::<Result<_, ReadError>>()?;
            let each: Vec<String> = match limit {
                Limit::MemoryBandwidth(Percent(percent)) => {
                    let value = self.bandwidth(resource, percent, domains)?;
                    ids.iter().map(|id| format!("{id}={value}")).collect()
                }
                Limit::CacheWays(Percent(percent)) => {
                    let caches = Caches::read(&self.base, resource)?;
                    let each = ids
                        .iter()
                        .map(|id| Ok(format!("{id}={:x}", caches.ways(id, percent)?)));
                    each.collect::<Result<_, ConfineError>>()?
                }
                Limit::CpuQuota(_) | Limit::Memory(_) => return Err(absent),
            };
            lines.push(format!("{resource}:{}", each.join(";")));
        }
        if lines.is_empty() { Err(absent) } else { Ok(lines) }
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
    use crate::fake::{Tree, empty_group, fake_resctrl, refuse_schemata, resctrl_says};
    use proptest::prelude::*;

    const VM: VmId = VmId(7);

    fn schemata(tree: &Tree) -> String {
        std::fs::read_to_string(tree.root().join(format!("{DIR}/homenode-{VM}/schemata"))).unwrap()
    }

    #[test]
    fn a_vm_gets_a_group_of_its_own_and_gives_it_back() {
        let tree = Tree::new(&[]);
        fake_resctrl(&tree);
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
        assert_eq!(resctrl_says(&tree, &schemata(&tree)), Ok(()));
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
        assert_eq!(resctrl_says(&tree, &schemata(&tree)), Ok(()));
    }

    #[test]
    fn what_is_not_there_not_ours_or_malformed_is_refused() {
        let tree = Tree::new(&[]);
        let confiner = Confiner::new(tree.root());
        let ways = Limit::CacheWays(Percent(10));
        let refused = |tids: &[i32], limit| confiner.confine(VM, tids, limit).unwrap_err().to_string();
        assert!(refused(&[41], ways).contains("no cache allocation"));
        fake_resctrl(&tree);
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
        for (file, text) in [
            ("bit_usage", "0=SSSSQ"),
            ("shareable_bits", "few"),
            ("cbm_mask", "many"),
        ] {
            tree.write(&format!("{DIR}/info/L3/{file}"), text);
            assert!(refused(&[41], ways).contains(file));
            fake_resctrl(&tree);
        }
        // The group cannot be created.
        tree.write(&format!("{DIR}/homenode-{VM}"), "a file");
        assert!(refused(&[41], ways).contains("homenode-"));
    }

    #[test]
    fn a_refusal_of_the_kernel_is_passed_on_with_its_reason() {
        let tree = Tree::new(&[]);
        fake_resctrl(&tree);
        let written = "L3:0=7;1=3\nL3:2=3\n";
        assert_eq!(
            resctrl_says(&tree, written),
            Err(String::new()),
            "there is no cache 2"
        );
        let message = resctrl_says(&tree, "L3:0=1;1=1\n").unwrap_err();
        refuse_schemata(&tree, VM, &message);
        let confiner = Confiner::new(tree.root());
        let refused = confiner.confine(VM, &[41], Limit::CacheWays(Percent(10)));
        let why = refused.unwrap_err().to_string();
        assert!(
            why.contains("Invalid argument") && why.contains("Need at least 2 bits in the mask"),
            "{why}"
        );
        assert_eq!(confiner.holds(VM, &[41]), Ok(false));
    }

    #[test]
    fn the_fake_follows_the_kernels_rules() {
        let tree = Tree::new(&[]);
        fake_resctrl(&tree);
        tree.write(
            &format!("{DIR}/info/L3/bit_usage"),
            "0=XXSSSSSSSEE;1=PPSSSSSSSSS\n",
        );
        let said = [
            ("L3:0=c;1=3\n", "fine"),
            ("MB:0=10\n", "fine"),
            ("L3:0=c", ""),
            ("L3\n", "Missing ':'"),
            ("L3:\n", "Missing 'L3' value"),
            ("L2:0=3\n", "Unknown or unsupported resource name 'L2'"),
            ("L3:zero\n", "Missing '=' or non-numeric domain"),
            ("L3:0=c;0=c\n", "Duplicate domain 0"),
            ("L3:0=ways\n", "Non-hex character in the mask ways"),
            ("L3:0=0\n", "Mask out of range"),
            ("L3:0=fff\n", "Mask out of range"),
            ("L3:0=5\n", "The mask 5 has non-consecutive 1-bits"),
            ("L3:0=4\n", "Need at least 2 bits in the mask"),
            ("L3:0=6\n", "Overlaps with exclusive group"),
            ("L3:1=600\n", "CBM overlaps with pseudo-locked region"),
            ("MB:0=all\n", "Invalid MB value all"),
            ("MB:0=5\n", "MB value 5 out of range [10,100]"),
        ];
        for (text, expected) in said {
            let answer = resctrl_says(&tree, text);
            assert_eq!(
                answer.map_or_else(|message| message, |()| "fine".to_owned()),
                expected,
                "{text}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn the_kernels_rules_allow_every_mask_that_is_written(
            ways in 1_u32..=32, least in 0_u32..4, devices: u32, held: [u32; 2], percent in 1_u8..=100,
        ) {
            let all = u32::MAX >> (32 - ways);
            let devices = devices & all;
            // Several ways in a row are held, as in real groups.
            let held = held.map(|held| ((held & (held >> 8)) | (held & (held >> 9))) & all);
            let letters = |held: u32| -> String {
                let letter = |way: u32| match ((held >> way) & 1, (devices >> way) & 1) {
                    (1, _) if way & 1 == 0 => 'E',
                    (1, _) => 'P',
                    (_, 1) => 'X',
                    _ => 'S',
                };
                (0..ways).rev().map(letter).collect()
            };
            let tree = Tree::new(&[]);
            fake_resctrl(&tree);
            for (file, text) in [
                ("schemata", format!("L3:0={all:x};1={all:x}\n")),
                ("info/L3/cbm_mask", format!("{all:x}\n")),
                ("info/L3/min_cbm_bits", format!("{least}\n")),
                ("info/L3/shareable_bits", format!("{devices:x}\n")),
                ("info/L3/bit_usage", format!("0={};1={}\n", letters(held[0]), letters(held[1]))),
            ] {
                tree.write(&format!("{DIR}/{file}"), &text);
            }
            let done = Confiner::new(tree.root()).confine(VM, &[41], Limit::CacheWays(Percent(percent)));
            let longest = held.map(|held| (0..=ways).rev().find(|count| {
                (0..=ways - count).any(|lowest| (u64::MAX >> (64 - count.max(&1)) << lowest) & u64::from(held) == 0)
            }));
            match done {
                Ok(()) => {
                    let written = schemata(&tree);
                    prop_assert_eq!(resctrl_says(&tree, &written), Ok(()), "{}", written);
                    let most = (ways * u32::from(percent)).div_ceil(100).max(least.max(1));
                    for (_, mask) in written.trim().trim_start_matches("L3:").split(';').filter_map(|one| one.split_once('=')) {
                        let mask = u64::from_str_radix(mask, 16).unwrap();
                        prop_assert!(mask.count_ones() <= most, "{}", written);
                    }
                }
                Err(ConfineError::Taken { .. }) => {
                    prop_assert!(longest.iter().any(|longest| longest.unwrap_or(0) < least.max(1)), "{:x?}", held);
                }
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            }
        }
    }
}

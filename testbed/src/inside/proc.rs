//! A QEMU process in /proc: its threads, their affinity, and the nodes of the guest's memory.
//!
//! Deliberately independent of the agent's own readers: a case must not trust the code that it tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::outside::emulated::NODES;

/// Parses a list such as `0-1,3`.
///
/// # Errors
/// When an item is neither a number nor a range.
pub fn parse_list(text: &str) -> anyhow::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let read = |text: &str| {
            text.parse::<u32>()
                .with_context(|| format!("'{part}' is not a range of numbers"))
        };
        numbers.extend(read(first)?..=read(last)?);
    }
    Ok(numbers)
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the value of a `Key:\tvalue` line in a status file.
fn status_field(text: &str, key: &str) -> Option<String> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .map(|value| value.trim().to_owned())
}

/// A process, identified by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process(pub u32);

impl Process {
    fn path(self, rest: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{rest}", self.0))
    }

    /// Whether the process exists and is not a zombie.
    #[must_use]
    pub fn alive(self) -> bool {
        fs::read_to_string(self.path("stat")).is_ok_and(|text| {
            !text
                .rsplit(')')
                .next()
                .unwrap_or("")
                .trim_start()
                .starts_with('Z')
        })
    }

    /// Returns the number and name of each thread.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn threads(self) -> anyhow::Result<BTreeMap<u32, String>> {
        let dir = self.path("task");
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(&dir)
            .with_context(|| format!("cannot list {}", dir.display()))?
            .flatten()
        {
            let Ok(number) = entry.file_name().to_string_lossy().parse() else {
                continue;
            };
            // A thread may end between the two reads.
            if let Ok(name) = fs::read_to_string(entry.path().join("comm")) {
                threads.insert(number, name.trim().to_owned());
            }
        }
        Ok(threads)
    }

    /// Returns the thread number of each vCPU.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn vcpu_threads(self) -> anyhow::Result<BTreeMap<u32, u32>> {
        let mut vcpus = BTreeMap::new();
        for (thread, name) in self.threads()? {
            let number = name.strip_prefix("CPU ").and_then(|rest| rest.split('/').next());
            if let Some(vcpu) = number.and_then(|text| text.parse().ok()) {
                vcpus.insert(vcpu, thread);
            }
        }
        Ok(vcpus)
    }

    /// Confines the process's vCPUs to one node, without telling libvirt. CPU `n` is node `n` in the testbed.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn run_vcpus_on(self, node: u32) -> anyhow::Result<()> {
        self.confine_vcpus(node..node + 1)
    }

    /// Lets the process's vCPUs run anywhere again.
    ///
    /// # Errors
    /// When QEMU has gone.
    pub fn run_vcpus_anywhere(self) -> anyhow::Result<()> {
        self.confine_vcpus(0..NODES)
    }

    fn confine_vcpus(self, cpus: std::ops::Range<u32>) -> anyhow::Result<()> {
        let mut set = rustix::thread::CpuSet::new();
        cpus.for_each(|cpu| set.set(cpu as usize));
        for thread in self.vcpu_threads()?.into_values() {
            let tid = rustix::thread::Pid::from_raw(thread.cast_signed());
            rustix::thread::sched_setaffinity(tid, &set).context("cannot confine a vCPU")?;
        }
        Ok(())
    }

    /// Returns the CPUs that each vCPU thread may run on.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn vcpu_affinity(self) -> anyhow::Result<BTreeMap<u32, Vec<u32>>> {
        let mut affinity = BTreeMap::new();
        for (vcpu, thread) in self.vcpu_threads()? {
            let text = read(&self.path(&format!("task/{thread}/status")))?;
            let list = status_field(&text, "Cpus_allowed_list").unwrap_or_default();
            affinity.insert(vcpu, parse_list(&list)?);
        }
        Ok(affinity)
    }

    /// Returns the CPU on which each vCPU thread ran last.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn vcpu_last_cpu(self) -> anyhow::Result<BTreeMap<u32, u32>> {
        let mut cpus = BTreeMap::new();
        for (vcpu, thread) in self.vcpu_threads()? {
            let text = read(&self.path(&format!("task/{thread}/stat")))?;
            // The name may contain spaces, so fields are counted from its closing bracket. Field 39 of proc(5) is the 37th
            // after it.
            let after = text.rsplit(')').next().unwrap_or("");
            let cpu = after
                .split_whitespace()
                .nth(36)
                .context("a stat file without a CPU field")?;
            cpus.insert(vcpu, cpu.parse()?);
        }
        Ok(cpus)
    }

    /// Returns how long each vCPU thread ran, and how long it waited for a CPU, in nanoseconds.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn vcpu_schedstat(self) -> anyhow::Result<BTreeMap<u32, (u64, u64)>> {
        let mut times = BTreeMap::new();
        for (vcpu, thread) in self.vcpu_threads()? {
            let text = read(&self.path(&format!("task/{thread}/schedstat")))?;
            let mut fields = text.split_whitespace().map(str::parse::<u64>);
            match (fields.next(), fields.next()) {
                (Some(Ok(run)), Some(Ok(wait))) => times.insert(vcpu, (run, wait)),
                _ => bail!("schedstat of thread {thread} has no two numbers: {text:?}"),
            };
        }
        Ok(times)
    }

    /// Returns the nodes that the process's cpuset lets it allocate from.
    ///
    /// # Errors
    /// When the process has gone.
    pub fn mems_allowed(self) -> anyhow::Result<Vec<u32>> {
        let text = read(&self.path("status"))?;
        parse_list(&status_field(&text, "Mems_allowed_list").unwrap_or_default())
    }

    /// Returns the mapping that is the guest's RAM: anonymous, writable, and exactly of its size.
    ///
    /// QEMU marks guest RAM in ways that keep the kernel from merging it with neighbouring mappings, so the size is exact.
    ///
    /// # Errors
    /// When there is no such mapping, or more than one.
    pub fn guest_ram(self, bytes: u64) -> anyhow::Result<RamMapping> {
        let maps = read(&self.path("maps"))?;
        let found: Vec<RamMapping> = maps
            .lines()
            .filter_map(parse_mapping)
            .filter(|mapping| mapping.bytes == bytes)
            .collect();
        match found.as_slice() {
            [mapping] => Ok(*mapping),
            other => bail!(
                "expected one writable anonymous mapping of {bytes} bytes in process {}, saw {}",
                self.0,
                other.len()
            ),
        }
    }

    /// Returns how many pages of a mapping are on each node, and its memory policy.
    ///
    /// # Errors
    /// When numa_maps has no such mapping.
    pub fn mapping_nodes(self, mapping: RamMapping) -> anyhow::Result<(BTreeMap<u32, u64>, String)> {
        let text = read(&self.path("numa_maps"))?;
        let start = format!("{:x}", mapping.begin);
        let line = text
            .lines()
            .find(|line| line.split_whitespace().next() == Some(&start))
            .with_context(|| format!("numa_maps of process {} has no mapping at {start}", self.0))?;
        let policy = line.split_whitespace().nth(1).unwrap_or("").to_owned();
        Ok((parse_nodes(line), policy))
    }
}

/// A range of addresses in another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamMapping {
    /// First address.
    pub begin: u64,
    /// Length.
    pub bytes: u64,
}

/// Parses a line of `maps`; returns an anonymous writable mapping, private or shared.
fn parse_mapping(line: &str) -> Option<RamMapping> {
    let mut fields = line.split_whitespace();
    let (begin, end) = fields.next()?.split_once('-')?;
    let access = fields.next()?;
    let file = fields.nth(3).unwrap_or("");
    if !access.starts_with("rw") || !(file.is_empty() || file.starts_with("/memfd:")) {
        return None;
    }
    let begin = u64::from_str_radix(begin, 16).ok()?;
    Some(RamMapping {
        begin,
        bytes: u64::from_str_radix(end, 16).ok()?.checked_sub(begin)?,
    })
}

/// Parses the `N0=12 N3=7` of a numa_maps line.
fn parse_nodes(line: &str) -> BTreeMap<u32, u64> {
    line.split_whitespace()
        .filter_map(|field| {
            let (node, pages) = field.strip_prefix('N')?.split_once('=')?;
            Some((node.parse().ok()?, pages.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() -> anyhow::Result<()> {
        assert_eq!(parse_list("0-1,3\n")?, [0, 1, 3]);
        assert!(parse_list("")?.is_empty());
        assert!(parse_list("0-x").is_err());
        Ok(())
    }

    #[test]
    fn guest_ram_is_anonymous_and_writable() {
        let ram = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 ";
        assert_eq!(
            parse_mapping(ram),
            Some(RamMapping {
                begin: 0x7f00_0000_0000,
                bytes: 128 << 20
            })
        );
        assert_eq!(
            parse_mapping("7f0000000000-7f0008000000 ---p 00000000 00:00 0 "),
            None
        );
        assert_eq!(
            parse_mapping("7f0000000000-7f0008000000 rw-p 00000000 00:2f 77 /run/vmlinux"),
            None
        );
    }

    #[test]
    fn nodes_of_a_numa_maps_line() {
        let line = "7fe3a0000000 bind:0 anon=1792 dirty=1792 N0=7 N3=1785 kernelpagesize_kB=4";
        assert_eq!(parse_nodes(line), BTreeMap::from([(0, 7), (3, 1785)]));
    }
}

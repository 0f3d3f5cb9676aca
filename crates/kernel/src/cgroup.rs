//! CPU quotas. Reads a thread's quota, and for how long it was throttled, from its cgroup of the cpu controller. The quotas of
//! libvirt's VMs are set through libvirt. A QEMU process without a manager may have a cgroup of its own, whose quota is written
//! here.
//!
//! Works with cgroup v2 (`cpu.max`, `cpu.stat` with `throttled_usec`) and v1 (`cpu.cfs_quota_us`, `cpu.stat` with
//! `throttled_time`, ns), on any mount point. libvirt gives every vCPU a cgroup (`…/vcpuN`, limited by `vcpu_quota`) below the
//! VM's cgroup (limited by `global_quota`), and both limits are in force at once. The throttled time of a thread's own cgroup is
//! exact. The VM's cgroup adds up the time of every CPU on which it was throttled, so a vCPU's share is that sum divided by the
//! number of vCPUs ([`Throttled`]).

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use homenode_host::CpuQuota;
use homenode_units::{CpuSet, Id, IdSet, NodeSet, Ns};

use crate::read::{self, Dir, Often, ReadError};
use crate::task;

/// Throttled time of a thread's cgroup and of the VM's cgroup above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Throttled time of the thread's own cgroup.
    pub own_ns: Ns,
    /// Throttled time of the cgroup above it, summed over CPUs. Zero unless the thread's own cgroup is a vCPU's.
    pub vm_ns: Ns,
}

impl Throttled {
    /// Returns for how long one vCPU was throttled. The VM has `vcpu_count` vCPUs, which share its limit evenly; `sharing` of
    /// them share this vCPU's own cgroup.
    pub fn per_vcpu(self, vcpu_count: usize, sharing: usize) -> Ns {
        let part = |ns: Ns, of: usize| ns.0 / of.max(1) as u64;
        Ns(part(self.own_ns, sharing).saturating_add(part(self.vm_ns, vcpu_count)))
    }
}

/// A mount point of a cgroup hierarchy that controls CPU time or cpusets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    /// The hierarchy's controllers, if it is v1.
    controllers: Vec<String>,
    /// Path within the hierarchy that is mounted here.
    from: PathBuf,
    /// Mount point.
    at: PathBuf,
    /// Version of the hierarchy.
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Where this host's CPU control groups are mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    root: PathBuf,
    mounts: Vec<Mount>,
}

/// The CPUs and nodes that a process may use according to its cgroups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpuset {
    /// CPUs, if known.
    pub cpus: Option<CpuSet>,
    /// Nodes that its memory may come from; `None` if unknown, or if they are all nodes of the hierarchy's top group.
    pub nodes: Option<NodeSet>,
}

/// A directory whose `cpu.stat` is about a thread. It is looked up once per thread, since threads rarely change cgroups. It is
/// kept open, and clones share it.
#[derive(Clone, Debug)]
pub struct CpuGroup {
    own: Arc<Group>,
    /// The VM's group, if this is a vCPU's group below it.
    above: Option<Arc<Group>>,
}

/// A group's directory, and the files to read in each period.
#[derive(Debug)]
struct Group {
    dir: Dir,
    stat: Often,
    max: Often,
}

impl Group {
    fn open(path: &Path) -> Result<Option<Group>, ReadError> {
        Ok(Dir::open(path)?.map(|dir| Group {
            dir,
            stat: Often::new("cpu.stat"),
            max: Often::new("cpu.max"),
        }))
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl PartialEq for CpuGroup {
    fn eq(&self, other: &CpuGroup) -> bool {
        Arc::ptr_eq(&self.own, &other.own) || self.own.path() == other.own.path()
    }
}

impl Eq for CpuGroup {}

impl Hierarchy {
    /// Reads this process's mount table. Without a cgroup mount, threads count as never throttled and all readings are `None`.
    ///
    /// # Errors
    /// If the mount table is unreadable or malformed.
    pub fn read(root: &Path) -> Result<Hierarchy, ReadError> {
        let path = root.join("proc/self/mountinfo");
        let text = read::text(&path, 8 << 20)?;
        let mut mounts = Vec::new();
        for line in text.lines() {
            let mount = parse_mount(line)
                .ok_or_else(|| ReadError::malformed(&path, "a line as in proc_pid_mountinfo(5)", line))?;
            mounts.extend(mount);
        }
        // If both versions are mounted (hybrid), each controller is on one of them only. v1 names its controllers, so try it
        // first.
        mounts.sort_by_key(|mount| mount.version == Version::V2);
        Ok(Hierarchy {
            root: root.to_owned(),
            mounts,
        })
    }

    /// Returns the directory of a thread's cpu controller; `None` if the thread is gone or the directory is not mounted here.
    ///
    /// # Errors
    /// If the thread's `cgroup` file is malformed.
    pub fn group_of(&self, pid: i32, tid: i32) -> Result<Option<CpuGroup>, ReadError> {
        for (_, dir) in self.directories(pid, tid, "cpu")? {
            if let Some(group) = CpuGroup::open(&dir)? {
                return Ok(Some(group));
            }
        }
        Ok(None)
    }

    /// Returns the directories that a thread's group for a controller may have, v1's first, each with its hierarchy's mount
    /// point. Empty if the thread is gone.
    fn directories(
        &self,
        pid: i32,
        tid: i32,
        controller: &str,
    ) -> Result<Vec<(PathBuf, PathBuf)>, ReadError> {
        let path = self.root.join(format!("proc/{pid}/task/{tid}/cgroup"));
        let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
            return Ok(Vec::new());
        };
        let mut groups = Vec::new();
        for line in text.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_id), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next())
            else {
                return Err(ReadError::malformed(&path, "lines `id:controllers:path`", line));
            };
            groups.push((controllers, group));
        }
        let directory = |mount: &Mount| {
            let (_, group) = groups.iter().find(|(controllers, _)| match mount.version {
                Version::V1 => controllers.split(',').any(|c| c == controller),
                Version::V2 => controllers.is_empty(),
            })?;
            let top = mount.directory(&self.root, &mount.from)?;
            Some((top, mount.directory(&self.root, Path::new(group))?))
        };
        let has = |mount: &&Mount| {
            mount.version == Version::V2 || mount.controllers.iter().any(|each| each == controller)
        };
        Ok(self.mounts.iter().filter(has).filter_map(directory).collect())
    }
}

impl Hierarchy {
    /// Returns the CPUs and memory nodes that a process may use according to its cgroups, up to the root. The nearest group with
    /// a list has what is in force, which is within the lists of the groups above it.
    ///
    /// Groups that libvirt makes for single threads of a VM are skipped: their cpusets are the VM's pins.
    ///
    /// # Errors
    /// If a file is malformed.
    pub fn cpuset_of(&self, pid: i32) -> Result<Cpuset, ReadError> {
        let mut cpuset = Cpuset::default();
        for (top, directory) in self.directories(pid, pid, "cpuset")? {
            let of_vm = match is_of_thread(&directory) {
                true => directory.parent().unwrap_or(&directory),
                false => &directory,
            };
            if cpuset.cpus.is_none() {
                cpuset.cpus = nearest(of_vm, &top, &CPUS_IN_FORCE, "a list of CPUs")?;
            }
            if cpuset.nodes.is_none() {
                let nodes = |group: &Path| nearest(group, &top, &NODES_IN_FORCE, "a list of nodes");
                let of_all = nodes(&top)?;
                cpuset.nodes = nodes(of_vm)?.filter(|nodes| Some(nodes) != of_all.as_ref());
            }
        }
        Ok(cpuset)
    }
}

/// Files that list what is in force: in v2, in v1, and in v1 before Linux 3.17.
const CPUS_IN_FORCE: [&str; 3] = ["cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"];
const NODES_IN_FORCE: [&str; 3] = ["cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems"];

/// Returns the list in force from the nearest group, at or above a directory, that has one.
fn nearest<T: Id>(
    directory: &Path,
    top: &Path,
    files: &[&str],
    expected: &'static str,
) -> Result<Option<IdSet<T>>, ReadError> {
    for group in directory.ancestors().take_while(|group| group.starts_with(top)) {
        for file in files {
            let listed: Option<IdSet<T>> = read::value_if_there(&group.join(file), expected)?;
            if let Some(listed) = listed.filter(|listed| !listed.is_empty()) {
                return Ok(Some(listed));
            }
        }
    }
    Ok(None)
}

impl Mount {
    /// Returns the path of a group's directory, if this mount shows it.
    fn directory(&self, root: &Path, group: &Path) -> Option<PathBuf> {
        // Paths outside this cgroup namespace begin with `/..` and are not visible from here.
        if group.components().any(|c| c == Component::ParentDir) {
            return None;
        }
        let rest = group.strip_prefix(&self.from).ok()?;
        Some(read::below(root, self.at.to_str()?).join(rest))
    }
}

impl CpuGroup {
    /// Returns the group's directory.
    pub fn path(&self) -> &Path {
        self.own.path()
    }

    /// Returns true if libvirt made the group for one vCPU.
    pub fn is_of_vcpu(&self) -> bool {
        is_of_vcpu(self.path())
    }

    /// Opens the group with this directory; `None` if the directory does not exist.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Option<CpuGroup>, ReadError> {
        let Some(own) = Group::open(path)? else {
            return Ok(None);
        };
        let above = path
            .parent()
            .filter(|_| is_of_vcpu(path))
            .map(Group::open)
            .transpose()?;
        Ok(Some(CpuGroup {
            own: Arc::new(own),
            above: above.flatten().map(Arc::new),
        }))
    }

    /// Returns this group, but shares what it can with known groups, so that a shared group is read only once.
    pub fn one_with<'a>(mut self, known: impl IntoIterator<Item = &'a CpuGroup>) -> CpuGroup {
        for other in known {
            if *other == self {
                return other.clone();
            }
            let path = |group: &CpuGroup| group.above.as_ref().map(|above| above.path().to_owned());
            if path(&self) == path(other) {
                self.above.clone_from(&other.above);
            }
        }
        self
    }

    /// Returns the throttled time until now; `None` if the group is gone or its kernel does not count it.
    ///
    /// # Errors
    /// If `cpu.stat` is malformed.
    pub fn throttled(&self) -> Result<Option<Throttled>, ReadError> {
        self.throttled_beside(&mut None, &mut Vec::new())
    }

    /// Like [`CpuGroup::throttled`]. `of_vm` keeps the reading of the VM's group for the next call.
    fn throttled_beside(
        &self,
        of_vm: &mut Option<(Arc<Group>, Ns)>,
        room: &mut Vec<u8>,
    ) -> Result<Option<Throttled>, ReadError> {
        let Some(own_ns) = read_stat(&self.own, room)? else {
            return Ok(None);
        };
        let vm_ns = match (&self.above, &of_vm) {
            (Some(vm), Some((known, ns))) if Arc::ptr_eq(vm, known) => *ns,
            (Some(vm), _) => {
                let ns = read_stat(vm, room)?.unwrap_or_default();
                *of_vm = Some((Arc::clone(vm), ns));
                ns
            }
            (None, _) => Ns::ZERO,
        };
        Ok(Some(Throttled { own_ns, vm_ns }))
    }
}

/// Readings of the groups of a VM's vCPUs.
#[derive(Debug)]
pub struct GroupsRead<'a> {
    vcpu_count: usize,
    groups: Vec<GroupRead<'a>>,
}

#[derive(Debug)]
struct GroupRead<'a> {
    group: &'a CpuGroup,
    throttled: Throttled,
    max: Option<CpuMax>,
    /// Number of the VM's vCPUs in this group.
    sharing: usize,
}

impl<'a> GroupsRead<'a> {
    /// Reads the groups of these vCPUs, each group once.
    pub fn read(
        of_vcpus: impl Iterator<Item = Option<&'a CpuGroup>>,
        room: &mut Vec<u8>,
    ) -> Result<GroupsRead<'a>, ReadError> {
        let mut read = GroupsRead {
            vcpu_count: 0,
            groups: Vec::new(),
        };
        let mut of_vm = None;
        for group in of_vcpus {
            read.vcpu_count += 1;
            let Some(group) = group else { continue };
            match read.groups.iter_mut().find(|known| known.group == group) {
                Some(known) => known.sharing += 1,
                None => read.groups.push(GroupRead {
                    group,
                    throttled: group.throttled_beside(&mut of_vm, room)?.unwrap_or_default(),
                    max: group.max_in(room)?,
                    sharing: 1,
                }),
            }
        }
        Ok(read)
    }

    /// Returns for how long a vCPU in this group was throttled, and its share of the group's quota.
    pub fn of(&self, group: Option<&CpuGroup>) -> (Ns, Option<CpuMax>) {
        let read = group.and_then(|group| self.groups.iter().find(|read| read.group == group));
        read.map_or((Ns::ZERO, None), |read| {
            let max = read.max.map(|max| max.divided(read.sharing as u64));
            (read.throttled.per_vcpu(self.vcpu_count, read.sharing), max)
        })
    }
}

/// CPU time that a cgroup may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuMax {
    /// All the time that there is.
    Unlimited,
    /// At most this quota.
    Quota(CpuQuota),
}

impl CpuMax {
    /// Returns the share of each of `by` members.
    pub fn divided(self, by: u64) -> CpuMax {
        match self {
            CpuMax::Quota(quota) if by > 1 => CpuMax::Quota(CpuQuota {
                run_ns: Ns(quota.run_ns.0 / by),
                ..quota
            }),
            max => max,
        }
    }

    /// Returns the quota, if there is one.
    pub fn quota(self) -> Option<CpuQuota> {
        match self {
            CpuMax::Unlimited => None,
            CpuMax::Quota(quota) => Some(quota),
        }
    }
}

/// Why a cgroup cannot limit a VM to a quota, as the end of a sentence about the VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The kernel does not list the group's processes.
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    /// The VM's process has left the cgroup.
    #[error("the VM is no longer in cgroup {}", .group.display())]
    Left {
        /// The cgroup.
        group: PathBuf,
    },
    /// Other processes are in it.
    #[error(
        "the VM's cgroup {} also contains other processes; start the VM in a scope of its own (systemd-run --scope)",
        .group.display()
    )]
    Shared {
        /// The cgroup.
        group: PathBuf,
    },
    /// The cgroup has no quota.
    #[error("the VM's cgroup {} has no cpu.max: a quota needs cgroup v2 with the cpu controller", .group.display())]
    NoQuota {
        /// The cgroup.
        group: PathBuf,
    },
    /// The kernel refused the quota.
    #[error("{}: {cause}", .file.display())]
    NotWritten {
        /// The file of the quota.
        file: PathBuf,
        /// The system's error.
        cause: String,
    },
}

impl CpuGroup {
    /// Checks that this process is alone in the cgroup, and that the cgroup has a quota (v2). Kernel threads, such as KVM's and
    /// vhost's, may be in it too.
    ///
    /// # Errors
    /// Returns what is missing, as the end of a sentence.
    pub fn check_own(&self, root: &Path, pid: i32) -> Result<(), GroupError> {
        let path = self.path();
        let group = || path.to_owned();
        let procs = read::text_if_there(&path.join("cgroup.procs"), 1 << 20)?;
        let procs = procs.iter().flat_map(|procs| procs.lines());
        let procs: Vec<Option<i32>> = procs.map(|other| other.trim().parse().ok()).collect();
        if !procs.contains(&Some(pid)) {
            return Err(GroupError::Left { group: group() });
        }
        let is_its =
            |other: &Option<i32>| other.is_some_and(|other| other == pid || task::is_of_kernel(root, other));
        if !procs.iter().all(is_its) {
            return Err(GroupError::Shared { group: group() });
        }
        match path.join("cpu.max").exists() {
            true => Ok(()),
            false => Err(GroupError::NoQuota { group: group() }),
        }
    }

    /// Sets the cgroup's quota (v2).
    ///
    /// # Errors
    /// Returns why it cannot be set, as the end of a sentence.
    pub fn set_max(&self, max: CpuMax) -> Result<(), GroupError> {
        let path = self.own.path().join("cpu.max");
        let text = match max {
            CpuMax::Unlimited => format!("max {}", PERIOD_DEFAULT.0 / 1000),
            CpuMax::Quota(CpuQuota { run_ns, period_ns }) => {
                format!("{} {}", run_ns.0 / 1000, period_ns.0 / 1000)
            }
        };
        #[cfg(any(test, feature = "testing"))]
        let written = crate::system::simulated().map_or(Ok(()), |system| system.write(&path, &text));
        #[cfg(not(any(test, feature = "testing")))]
        let written = Ok(());
        written
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|cause| GroupError::NotWritten {
                file: path,
                cause: cause.to_string(),
            })
    }

    /// Returns the CPU time that the thread's own cgroup may use; `None` if the cgroup is gone or its kernel has no quotas.
    ///
    /// # Errors
    /// If a file is malformed.
    pub fn max(&self) -> Result<Option<CpuMax>, ReadError> {
        self.max_in(&mut Vec::new())
    }

    fn max_in(&self, room: &mut Vec<u8>) -> Result<Option<CpuMax>, ReadError> {
        if let Some(text) = self.own.max.text(&self.own.dir, room)? {
            let parsed = text.trim().split_once(' ').and_then(|(run, period)| {
                let run = if run == "max" { -1 } else { run.parse().ok()? };
                cpu_max(run, period.parse().ok()?)
            });
            let expected = "`max PERIOD` or `QUOTA PERIOD`, in microseconds";
            let path = || self.own.path().join("cpu.max");
            return match parsed {
                Some(max) => Ok(Some(max)),
                None => Err(ReadError::malformed(&path(), expected, &text)),
            };
        }
        let number =
            |file: &str| read::value_if_there(&self.own.path().join(file), "a number of microseconds");
        let (Some(run), Some(period)) = (number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?) else {
            return Ok(None);
        };
        Ok(cpu_max(run, period))
    }
}

fn is_of_vcpu(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("vcpu"))
}

/// Returns true if libvirt made the group for one thread of a VM, or for its helper threads.
fn is_of_thread(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name == "emulator" || name.starts_with("vcpu") || name.starts_with("iothread"))
}

/// Default period of a cgroup.
pub const PERIOD_DEFAULT: Ns = Ns::from_millis(100);
/// The largest quota that the kernel accepts, which is in effect no limit.
pub const QUOTA_MAX_US: i64 = 17_592_186_044_415;

/// Converts the kernel's microseconds to a quota. A negative run time means no limit.
fn cpu_max(run_us: i64, period_us: i64) -> Option<CpuMax> {
    let ns = |us: i64| u64::try_from(us).ok()?.checked_mul(1000).map(Ns);
    let period_ns = ns(period_us).filter(|period| *period > Ns::ZERO)?;
    if !(0..QUOTA_MAX_US).contains(&run_us) {
        return Some(CpuMax::Unlimited);
    }
    let run_ns = ns(run_us)?;
    Some(CpuMax::Quota(CpuQuota { run_ns, period_ns }))
}

fn read_stat(group: &Group, room: &mut Vec<u8>) -> Result<Option<Ns>, ReadError> {
    let Some(text) = group.stat.text(&group.dir, room)? else {
        return Ok(None);
    };
    for line in text.lines() {
        let Some((key, value)) = line.split_once(' ') else {
            continue;
        };
        let factor = match key {
            "throttled_usec" => 1000,
            "throttled_time" => 1,
            _ => continue,
        };
        let ns = value
            .trim()
            .parse::<u64>()
            .ok()
            .and_then(|v| v.checked_mul(factor));
        return ns.map(|ns| Some(Ns(ns))).ok_or_else(|| {
            ReadError::malformed(&group.path().join("cpu.stat"), "a time after its name", line)
        });
    }
    Ok(None)
}

/// Parses one line of a mount table. The outer `None` means a malformed line, the inner one a mount of another kind.
fn parse_mount(line: &str) -> Option<Option<Mount>> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (from, at) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (fs, _source) = (kind.next()?, kind.next()?);
    let options = kind.next().unwrap_or("");
    let version = match fs {
        "cgroup2" => Version::V2,
        "cgroup" if options.split(',').any(|o| o == "cpu" || o == "cpuset") => Version::V1,
        _ => return Some(None),
    };
    Some(Some(Mount {
        controllers: options.split(',').map(str::to_owned).collect(),
        from: unescape(from).into(),
        at: unescape(at).into(),
        version,
    }))
}

/// Decodes the octal escapes that the kernel writes for space, tab, newline and backslash.
fn unescape(text: &str) -> String {
    let mut out = text.to_owned();
    for (code, plain) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        out = out.replace(code, plain);
    }
    out
}

#[cfg(test)]
mod tests;

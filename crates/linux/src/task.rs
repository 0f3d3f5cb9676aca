//! `/proc/PID/task/TID/{cgroup,comm,stat,schedstat,status}`: the threads of a QEMU process, told apart.
//!
//! libvirt puts each vCPU's thread into a cgroup `vcpuN` and each I/O thread into `iothreadN`, which only root can leave. Where a
//! process has such groups they alone say what a thread does. What a thread in there starts is in there too (io_uring's
//! workers), and younger: of several the oldest is the one that libvirt put there.
//!
//! Where libvirt made no groups (no cgroups, a session's libvirt) names must do. QEMU names its threads when libvirt starts
//! it (`debug-threads=on`, always): `CPU n/KVM` or `CPU n/TCG` is vCPU n, `IO iothreadN` an I/O thread. Names are QEMU's to
//! change, so that a VM is refused where two threads bear one.
//!
//! The first thread is the emulator's main loop, whatever its name, and all else helps it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_units::{CpuId, CpuSet, NodeSet, Ns};

use crate::read::{self, ReadError};

/// Threads that are read of one process: 4096 vCPUs and as many helpers.
const THREADS_MAX: usize = 8192;

/// What a thread of a QEMU process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Runs the vCPU with this index.
    Vcpu(u16),
    /// The process's first thread: QEMU's main loop.
    Emulator,
    /// The I/O thread that libvirt gave this number (`iothread1` in QEMU).
    IoThread(u32),
    /// Anything else; belongs to the emulator's cgroup.
    Other,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Role::Vcpu(index) => write!(f, "vCPU {index}"),
            Role::Emulator => f.write_str("the emulator"),
            Role::IoThread(id) => write!(f, "I/O thread {id}"),
            Role::Other => f.write_str("a helper"),
        }
    }
}

/// One thread at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Kernel's thread id.
    pub tid: i32,
    /// What it does.
    pub role: Role,
    /// Time it ran (`schedstat`, first number).
    pub running_ns: Ns,
    /// Time it waited on a run queue (`schedstat`, second number).
    pub waiting_ns: Ns,
    /// CPU it last ran on.
    pub cpu: Option<CpuId>,
    /// CPUs it may run on now, as the scheduler has it.
    pub affinity: CpuSet,
    /// Nodes that its memory may come from, as cpusets limit it.
    pub memory_nodes: NodeSet,
}

/// Identity of a process: its number may be used again, its number and start time together may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Kernel's process id.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

fn process_dir(root: &Path, pid: i32) -> PathBuf {
    root.join(format!("proc/{pid}"))
}

/// Identity of a process that runs now; `None` where there is none, or only its remains (zombie).
///
/// # Errors
/// When its `stat` is malformed or may not be read.
pub fn process(root: &Path, pid: i32) -> Result<Option<Process>, ReadError> {
    let path = process_dir(root, pid).join("stat");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let stat = parse_stat(&text).ok_or_else(|| ReadError::malformed(&path, STAT, &text))?;
    Ok((!matches!(stat.state, 'Z' | 'X' | 'x')).then_some(Process {
        pid,
        start_ticks: stat.start_ticks,
    }))
}

/// Whether this very process still runs. One that cannot be looked at (no descriptor left, say) is not taken for ended:
/// what is in force for it would be forgotten.
pub fn is_alive(root: &Path, who: Process) -> bool {
    match process(root, who.pid) {
        Ok(now) => now == Some(who),
        Err(_) => true,
    }
}

/// Whether a process was started for the VM with this UUID: libvirt always passes `-uuid`.
pub fn is_qemu_of(root: &Path, pid: i32, uuid: &str) -> bool {
    // A command line of a VM with many devices has tens of kilobytes.
    let Ok(Some(cmdline)) = read::text_if_there(&process_dir(root, pid).join("cmdline"), 2 << 20) else {
        return false;
    };
    let mut words = cmdline.split('\0');
    words.any(|word| word == "-uuid") && words.next() == Some(uuid)
}

/// The QEMU process of a VM, found by looking at every process's command line: slow, for when there is no pid file.
///
/// # Errors
/// When `/proc` cannot be listed.
pub fn find_qemu(root: &Path, uuid: &str) -> Result<Option<Process>, ReadError> {
    for name in read::names(&root.join("proc"), 1 << 20)? {
        let Ok(pid) = name.parse::<i32>() else { continue };
        if is_qemu_of(root, pid, uuid) {
            return process(root, pid);
        }
    }
    Ok(None)
}

/// All threads of a process, ascending by id; threads that end while being read are left out. Empty where the
/// process is gone. No two are the same vCPU or I/O thread.
///
/// # Errors
/// When a file is malformed, or may not be read; when there are more than any QEMU has, or several of a name with nothing else to
/// tell them apart.
pub fn threads(root: &Path, pid: i32) -> Result<Vec<Thread>, ReadError> {
    let dir = process_dir(root, pid).join("task");
    let names = read::names(&dir, THREADS_MAX + 1)?;
    if names.len() > THREADS_MAX {
        return Err(ReadError::TooMany {
            path: dir.display().to_string(),
            limit: THREADS_MAX,
        });
    }
    let mut tids: Vec<i32> = names.iter().filter_map(|n| n.parse().ok()).collect();
    tids.sort_unstable();
    let mut seen = Vec::with_capacity(tids.len());
    for tid in tids {
        seen.extend(thread(&dir.join(tid.to_string()), tid)?);
    }
    let roles = roles(&dir, pid, &seen)?;
    let with_role = |(seen, role): (Seen, Role)| Thread { role, ..seen.thread };
    Ok(seen.into_iter().zip(roles).map(with_role).collect())
}

/// A thread, and what says what it does.
struct Seen {
    /// Of no role yet.
    thread: Thread,
    start_ticks: u64,
    by_name: Role,
    /// Where it is in a group that libvirt makes for one thread.
    by_group: Option<Role>,
}

/// What each thread does.
fn roles(dir: &Path, pid: i32, seen: &[Seen]) -> Result<Vec<Role>, ReadError> {
    let has_groups = seen.iter().any(|each| each.by_group.is_some());
    let mut claims: BTreeMap<Role, Vec<usize>> = BTreeMap::new();
    for (at, each) in seen.iter().enumerate().filter(|(_, each)| each.thread.tid != pid) {
        let role = match has_groups {
            true => each.by_group.unwrap_or(Role::Other),
            false => each.by_name,
        };
        claims.entry(role).or_default().push(at);
    }
    let mut roles: Vec<Role> = seen
        .iter()
        .map(|each| {
            if each.thread.tid == pid {
                Role::Emulator
            } else {
                Role::Other
            }
        })
        .collect();
    claims.remove(&Role::Other);
    for (role, claimed) in claims {
        if !has_groups && claimed.len() > 1 {
            let tids: Vec<String> = claimed
                .iter()
                .take(8)
                .map(|&at| seen[at].thread.tid.to_string())
                .collect();
            return Err(ReadError::Ambiguous {
                path: dir.display().to_string(),
                what: role.to_string(),
                count: claimed.len(),
                tids: tids.join(", ") + if claimed.len() > 8 { ", …" } else { "" },
            });
        }
        // Threads ascend by id, so of those that are as old the lowest is taken.
        if let Some(oldest) = claimed.into_iter().min_by_key(|&at| seen[at].start_ticks) {
            roles[oldest] = role;
        }
    }
    Ok(roles)
}

/// Whether QEMU emulates the vCPU of this thread, instead of having KVM run it; no for a thread that has ended.
pub fn is_emulated(root: &Path, pid: i32, tid: i32) -> bool {
    let comm = read::text_if_there(
        &process_dir(root, pid).join(format!("task/{tid}/comm")),
        read::SMALL_BYTES,
    );
    comm.is_ok_and(|comm| comm.is_some_and(|comm| comm.trim_end().ends_with("/TCG")))
}

/// CPUs that one thread may run on now; `None` where the thread has ended.
///
/// # Errors
/// When its `status` is malformed or may not be read.
pub fn affinity(root: &Path, pid: i32, tid: i32) -> Result<Option<CpuSet>, ReadError> {
    let path = process_dir(root, pid).join(format!("task/{tid}/status"));
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    parse_status(&text)
        .map(|(cpus, _)| Some(cpus))
        .ok_or_else(|| ReadError::malformed(&path, STATUS, &text))
}

/// Whether a process is a thread of the kernel's, all of which are children of the second process.
pub fn is_of_kernel(root: &Path, pid: i32) -> bool {
    let text = read::text_if_there(&process_dir(root, pid).join("stat"), read::SMALL_BYTES);
    let parent = |text: String| {
        text.rsplit_once(')')?
            .1
            .split_ascii_whitespace()
            .nth(1)?
            .parse()
            .ok()
    };
    text.ok().flatten().and_then(parent) == Some(2)
}

/// The user whose rights a process has; `None` where it has ended.
///
/// # Errors
/// When its `status` is malformed or may not be read.
pub fn user(root: &Path, pid: i32) -> Result<Option<u32>, ReadError> {
    let path = process_dir(root, pid).join("status");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = ids.and_then(|ids| ids.split_ascii_whitespace().nth(1)?.parse().ok());
    effective
        .map(Some)
        .ok_or_else(|| ReadError::malformed(&path, "a line `Uid:` with four users", &text))
}

/// A thread's number in the innermost namespace that it is in, by which the process itself knows it.
pub fn innermost_id(root: &Path, pid: i32, tid: i32) -> Option<i32> {
    let path = process_dir(root, pid).join(format!("task/{tid}/status"));
    let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
    let ids = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

const STAT: &str = "`TID (name) state …` with at least 39 fields";
const STATUS: &str = "lines `Cpus_allowed_list:` and `Mems_allowed_list:`";

fn thread(dir: &Path, tid: i32) -> Result<Option<Seen>, ReadError> {
    let file = |name: &str| read::text_if_there(&dir.join(name), read::SMALL_BYTES);
    let (Some(comm), Some(stat), Some(status)) = (file("comm")?, file("stat")?, file("status")?) else {
        return Ok(None);
    };
    let parsed = parse_stat(&stat).ok_or_else(|| ReadError::malformed(&dir.join("stat"), STAT, &stat))?;
    let (affinity, memory_nodes) =
        parse_status(&status).ok_or_else(|| ReadError::malformed(&dir.join("status"), STATUS, &status))?;
    // A kernel without CONFIG_SCHED_INFO has no schedstat: then running time comes in ticks, waiting time not at all.
    let (running_ns, waiting_ns) = match file("schedstat")? {
        Some(text) => parse_schedstat(&text).ok_or_else(|| {
            ReadError::malformed(
                &dir.join("schedstat"),
                "three numbers: ran, waited, slices",
                &text,
            )
        })?,
        None => (parsed.cpu_time, Ns::ZERO),
    };
    // A kernel without cgroups has no such file.
    let by_group = file("cgroup")?.and_then(|text| grouped(&text));
    let thread = Thread {
        tid,
        role: Role::Other,
        running_ns,
        waiting_ns,
        cpu: parsed.cpu,
        affinity,
        memory_nodes,
    };
    Ok(Some(Seen {
        thread,
        start_ticks: parsed.start_ticks,
        by_name: named(comm.trim_end_matches('\n')),
        by_group,
    }))
}

/// A number as programs write it: no sign, no leading zeros.
fn plain<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    let number: T = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// What a thread does, by its name.
fn named(comm: &str) -> Role {
    if let Some((index, "KVM" | "TCG")) = comm.strip_prefix("CPU ").and_then(|rest| rest.split_once('/')) {
        return plain(index).map_or(Role::Other, Role::Vcpu);
    }
    let iothread = comm.strip_prefix("IO iothread");
    iothread.and_then(plain).map_or(Role::Other, Role::IoThread)
}

/// What a thread does, by the last part of one of its cgroups (one for each hierarchy; libvirt uses them alike).
fn grouped(text: &str) -> Option<Role> {
    text.lines().find_map(|line| {
        let group = line.splitn(3, ':').nth(2)?.rsplit('/').next()?;
        let vcpu = group.strip_prefix("vcpu").and_then(plain).map(Role::Vcpu);
        vcpu.or_else(|| group.strip_prefix("iothread").and_then(plain).map(Role::IoThread))
    })
}

struct Stat {
    state: char,
    cpu_time: Ns,
    start_ticks: u64,
    cpu: Option<CpuId>,
}

/// Reads `/proc/…/stat`. The name may hold spaces and parentheses, so fields count from the last parenthesis.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at - 3)?.parse::<u64>().ok(); // `at` as in proc(5); the state is field 3
    let ticks = number(14)?.checked_add(number(15)?)?;
    Some(Stat {
        state: fields.first()?.chars().next()?,
        cpu_time: Ns(ticks.checked_mul(10_000_000)?),
        start_ticks: number(22)?,
        cpu: u32::try_from(number(39)?).ok().map(CpuId),
    })
}

fn parse_schedstat(text: &str) -> Option<(Ns, Ns)> {
    let mut numbers = text
        .split_ascii_whitespace()
        .map(|word| word.parse().ok().map(Ns));
    let (ran, waited) = (numbers.next()??, numbers.next()??);
    numbers.next()??;
    Some((ran, waited))
}

fn parse_status(text: &str) -> Option<(CpuSet, NodeSet)> {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let cpus = value("Cpus_allowed_list:")?.parse().ok()?;
    let nodes = value("Mems_allowed_list:")?.parse().ok()?;
    Some((cpus, nodes))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fake::Tree;

    /// A `stat` line with this name, state, start time and CPU.
    pub(crate) fn stat(tid: i32, comm: &str, state: char, start_ticks: u64, cpu: u32) -> String {
        format!(
            "{tid} ({comm}) {state} 1 1 1 0 -1 0 0 0 0 0 70 30 0 0 20 0 9 0 {start_ticks} 1000 10 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0 0 0 0\n"
        )
    }

    /// Writes one thread of a process into a tree.
    pub(crate) fn write_thread(tree: &Tree, pid: i32, tid: i32, comm: &str, cpus: &str) {
        let dir = format!("proc/{pid}/task/{tid}");
        tree.write(&format!("{dir}/comm"), &format!("{comm}\n"));
        tree.write(&format!("{dir}/stat"), &stat(tid, comm, 'S', 77, 1));
        tree.write(&format!("{dir}/schedstat"), "5000 700 3\n");
        tree.write(
            &format!("{dir}/status"),
            &format!("Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n"),
        );
    }

    fn qemu() -> Tree {
        let tree = Tree::new(&[
            ("proc/40/stat", &stat(40, "qemu) (x", 'S', 77, 0)),
            ("proc/40/cmdline", "qemu\0-name\0guest=a\0-uuid\0u-u\0-m\0"),
        ]);
        for (tid, comm) in [
            (40, "qemu-system-x86"),
            (41, "call_rcu"),
            (43, "CPU 0/KVM"),
            (44, "CPU 12/TCG"),
            (45, "IO iothread1"),
            (46, "CPU x/KVM"),
        ] {
            write_thread(&tree, 40, tid, comm, "0-3");
        }
        tree
    }

    #[test]
    fn threads_are_told_apart_by_name_where_there_are_no_groups() {
        let seen = threads(qemu().root(), 40).unwrap();
        let roles: Vec<_> = seen.iter().map(|t| (t.tid, t.role)).collect();
        let io = Role::IoThread(1);
        assert_eq!(
            roles,
            [
                (40, Role::Emulator),
                (41, Role::Other),
                (43, Role::Vcpu(0)),
                (44, Role::Vcpu(12)),
                (45, io),
                (46, Role::Other)
            ]
        );
        assert_eq!(
            (seen[2].running_ns, seen[2].waiting_ns, seen[2].cpu),
            (Ns(5000), Ns(700), Some(CpuId(1)))
        );
        assert_eq!(
            (seen[2].affinity.to_string(), seen[2].memory_nodes.to_string()),
            ("0-3".into(), "0-1".into())
        );
    }

    /// Has these threads in these cgroups, as libvirt puts them there.
    fn put_in_groups(tree: &Tree, groups: &[(i32, &str)]) {
        for (tid, group) in groups {
            let text = format!("0::/machine.slice/machine-qemu.scope/libvirt/{group}\n");
            tree.write(&format!("proc/40/task/{tid}/cgroup"), &text);
        }
    }

    fn roles_in(tree: &Tree) -> Vec<(i32, Role)> {
        let seen = threads(tree.root(), 40).unwrap();
        seen.into_iter().map(|t| (t.tid, t.role)).collect()
    }

    #[test]
    fn a_name_never_chooses_the_thread_of_a_vcpu_where_libvirt_made_groups() {
        let tree = qemu();
        // QEMU may name its threads as it likes; it may not leave the groups in which libvirt put them.
        for tid in 100..200 {
            write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
            put_in_groups(&tree, &[(tid, "emulator")]);
        }
        write_thread(&tree, 40, 44, "harmless", "0-3");
        write_thread(&tree, 40, 45, "CPU 0/KVM", "0-3");
        write_thread(&tree, 40, 40, "CPU 5/KVM", "0-3");
        let groups = [(40, "emulator"), (41, "emulator"), (46, "emulator")];
        put_in_groups(&tree, &groups);
        put_in_groups(&tree, &[(43, "vcpu0"), (44, "vcpu12"), (45, "iothread1")]);
        let named: Vec<_> = roles_in(&tree)
            .into_iter()
            .filter(|(_, role)| *role != Role::Other)
            .collect();
        let expected = [
            (40, Role::Emulator),
            (43, Role::Vcpu(0)),
            (44, Role::Vcpu(12)),
            (45, Role::IoThread(1)),
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn of_the_threads_in_a_vcpus_group_the_oldest_is_the_vcpus() {
        let tree = qemu();
        put_in_groups(
            &tree,
            &[
                (40, "emulator"),
                (41, "emulator"),
                (45, "emulator"),
                (46, "emulator"),
                (44, "vcpu12"),
            ],
        );
        // What a vCPU's thread starts (a worker of io_uring, a thread under its name) is in its group, and younger.
        for (tid, start) in [(42, 90), (47, 77)] {
            write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
            tree.write(
                &format!("proc/40/task/{tid}/stat"),
                &stat(tid, "CPU 0/KVM", 'S', start, 1),
            );
            put_in_groups(&tree, &[(tid, "vcpu0")]);
        }
        put_in_groups(&tree, &[(43, "vcpu0")]);
        tree.write("proc/40/task/43/comm", "worker\n");
        let vcpus: Vec<_> = roles_in(&tree)
            .into_iter()
            .filter(|(_, role)| *role == Role::Vcpu(0))
            .collect();
        assert_eq!(vcpus, [(43, Role::Vcpu(0))]);
    }

    #[test]
    fn threads_of_one_name_are_refused_where_nothing_else_tells_them_apart() {
        let tree = qemu();
        for tid in 100..140 {
            write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
        }
        let error = threads(tree.root(), 40).expect_err("41 of vCPU 0").to_string();
        assert!(
            error.contains("proc/40/task") && error.contains("vCPU 0"),
            "{error}"
        );
        assert!(
            error.contains("43, 100, 101") && error.contains("41 threads"),
            "{error}"
        );
    }

    #[test]
    fn more_threads_than_any_qemu_has_are_refused_and_not_cut_off() {
        let tree = qemu();
        for tid in 100..100 + THREADS_MAX {
            std::fs::create_dir(tree.root().join(format!("proc/40/task/{tid}"))).unwrap();
        }
        let error = threads(tree.root(), 40).expect_err("too many").to_string();
        assert!(
            error.contains("proc/40/task") && error.contains("8192"),
            "{error}"
        );
    }

    #[test]
    fn numbers_in_names_are_read_as_qemu_writes_them() {
        for name in [
            "CPU +1/KVM",
            "CPU 01/KVM",
            "CPU /KVM",
            "CPU 65536/KVM",
            "IO iothread01",
            "IO other",
        ] {
            assert_eq!(named(name), Role::Other, "{name}");
        }
        assert_eq!(named("CPU 10/TCG"), Role::Vcpu(10));
        assert_eq!(named("IO iothread2"), Role::IoThread(2));
    }

    #[test]
    fn a_process_is_found_by_uuid_and_known_by_its_start_time() {
        let tree = qemu();
        let found = find_qemu(tree.root(), "u-u").unwrap().unwrap();
        assert_eq!(
            found,
            Process {
                pid: 40,
                start_ticks: 77
            }
        );
        assert_eq!(find_qemu(tree.root(), "other"), Ok(None));
        assert!(is_alive(tree.root(), found));
        tree.write("proc/40/stat", &stat(40, "qemu", 'S', 78, 0));
        assert!(!is_alive(tree.root(), found), "the number was used again");
        tree.write("proc/40/stat", &stat(40, "qemu", 'Z', 77, 0));
        assert_eq!(process(tree.root(), 40), Ok(None), "a zombie runs no VM");
    }

    #[test]
    fn a_thread_that_ends_is_left_out_and_no_process_has_no_threads() {
        let tree = qemu();
        std::fs::remove_file(tree.root().join("proc/40/task/43/status")).unwrap();
        assert_eq!(threads(tree.root(), 40).unwrap().len(), 5);
        assert_eq!(threads(tree.root(), 99), Ok(vec![]));
        assert_eq!(affinity(tree.root(), 40, 43), Ok(None));
        assert_eq!(affinity(tree.root(), 40, 44).unwrap().unwrap().to_string(), "0-3");
    }

    #[test]
    fn malformed_and_truncated_files_are_errors_with_the_path() {
        for (file, bad) in [
            ("stat", "40 (CPU 0/KVM S 1"),
            ("stat", "40 (CPU 0/KVM) S 1 2 3"),
            ("schedstat", "5 x 1"),
            ("schedstat", "5 6"),
            ("status", "Cpus_allowed_list:\t0-3\n"),
            ("status", "Cpus_allowed_list:\t3-0\nMems_allowed_list:\t0\n"),
        ] {
            let tree = qemu();
            tree.write(&format!("proc/40/task/43/{file}"), bad);
            let error = threads(tree.root(), 40).unwrap_err();
            assert!(error.to_string().contains(&format!("task/43/{file}")), "{error}");
        }
    }

    #[test]
    fn without_schedstat_running_time_comes_in_ticks() {
        let tree = qemu();
        std::fs::remove_file(tree.root().join("proc/40/task/43/schedstat")).unwrap();
        let seen = threads(tree.root(), 40).unwrap();
        assert_eq!(
            (seen[2].running_ns, seen[2].waiting_ns),
            (Ns::from_secs(1), Ns::ZERO)
        );
    }

    #[test]
    fn this_process_reads() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let seen = threads(Path::new("/"), pid).unwrap();
        assert!(
            seen.iter()
                .any(|t| t.tid == pid && t.role == Role::Emulator && !t.affinity.is_empty())
        );
    }
}

//! `/proc/PID/task/TID/{comm,stat,schedstat,status}`: the threads of a QEMU process, told apart by their names.
//!
//! QEMU names its threads when libvirt starts it (`debug-threads=on`, always): `CPU n/KVM` or `CPU n/TCG` is vCPU n,
//! `IO name` an I/O thread, the first thread is the emulator's main loop, all else helps the emulator.

use std::path::{Path, PathBuf};

use homenode_units::{CpuId, CpuSet, NodeSet, Ns};

use crate::read::{self, ReadError};

/// Threads that are read of one process: 4096 vCPUs and as many helpers.
const THREADS_MAX: usize = 8192;

/// What a thread of a QEMU process does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs the vCPU with this index.
    Vcpu(u16),
    /// The process's first thread: QEMU's main loop.
    Emulator,
    /// An I/O thread; its object's name in QEMU (`iothread1`).
    IoThread(String),
    /// Anything else; belongs to the emulator's cgroup.
    Other,
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
/// process is gone.
///
/// # Errors
/// When a file is malformed, or may not be read.
pub fn threads(root: &Path, pid: i32) -> Result<Vec<Thread>, ReadError> {
    let dir = process_dir(root, pid).join("task");
    let mut tids: Vec<i32> = read::names(&dir, THREADS_MAX)?
        .iter()
        .filter_map(|n| n.parse().ok())
        .collect();
    tids.sort_unstable();
    let mut threads = Vec::with_capacity(tids.len());
    for tid in tids {
        threads.extend(thread(&dir.join(tid.to_string()), pid, tid)?);
    }
    Ok(threads)
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

const STAT: &str = "`TID (name) state …` with at least 39 fields";
const STATUS: &str = "lines `Cpus_allowed_list:` and `Mems_allowed_list:`";

fn thread(dir: &Path, pid: i32, tid: i32) -> Result<Option<Thread>, ReadError> {
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
    let role = role(comm.trim_end_matches('\n'), pid, tid);
    Ok(Some(Thread {
        tid,
        role,
        running_ns,
        waiting_ns,
        cpu: parsed.cpu,
        affinity,
        memory_nodes,
    }))
}

/// What a thread does, by its name.
fn role(comm: &str, pid: i32, tid: i32) -> Role {
    let vcpu = comm.strip_prefix("CPU ").and_then(|rest| rest.split_once('/'));
    if let Some((index, "KVM" | "TCG")) = vcpu
        && let Ok(index) = index.parse()
    {
        return Role::Vcpu(index);
    }
    match comm.strip_prefix("IO ") {
        _ if tid == pid => Role::Emulator,
        Some(name) => Role::IoThread(name.to_owned()),
        None => Role::Other,
    }
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
    fn threads_are_told_apart_by_name() {
        let seen = threads(qemu().root(), 40).unwrap();
        let roles: Vec<_> = seen.iter().map(|t| (t.tid, t.role.clone())).collect();
        let io = Role::IoThread("iothread1".into());
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

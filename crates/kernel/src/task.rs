//! `/proc/PID/task/TID/{cgroup,comm,stat,schedstat,status}`: the threads of a QEMU process, and their roles.
//!
//! libvirt puts each vCPU's thread into a cgroup `vcpuN` and each I/O thread into `iothreadN`, and only root can move a thread
//! out. If a process has such groups, they alone determine its threads' roles. A thread that was started by one of these threads
//! (such as an io_uring worker) is in the same group, but younger. So the oldest thread is the one that libvirt put there.
//!
//! If libvirt made no groups (no cgroups, or a session's libvirt), names are used. If libvirt starts QEMU (`debug-threads=on`,
//! always), QEMU names its threads: `CPU n/KVM` or `CPU n/TCG` is vCPU n, and `IO iothreadN` is an I/O thread. QEMU can change
//! names, so a VM is refused if two of its threads have the same role.
//!
//! The first thread is the emulator's main loop, whatever its name. All other threads are its helpers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_units::{CpuId, CpuSet, NodeSet, Ns};

use crate::read::{self, Dir, Often, ReadError};

/// The most threads to read from one process: 4096 vCPUs and as many helpers.
const THREADS_MAX: usize = 8192;

/// The role of a thread of a QEMU process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Runs the vCPU with this index.
    Vcpu(u16),
    /// The process's first thread: QEMU's main loop.
    Emulator,
    /// The I/O thread that libvirt gave this number (`iothread1` in QEMU).
    IoThread(u32),
    /// Any other thread; it belongs to the emulator's cgroup.
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
    /// The kernel's thread id.
    pub tid: i32,
    /// The thread's role.
    pub role: Role,
    /// Time for which it ran (`schedstat`, first number).
    pub running_ns: Ns,
    /// Time for which it waited on a run queue (`schedstat`, second number).
    pub waiting_ns: Ns,
    /// CPU on which it last ran.
    pub cpu: Option<CpuId>,
    /// CPUs that the scheduler lets it run on now.
    pub affinity: CpuSet,
    /// Nodes that cpusets let its memory come from.
    pub memory_nodes: NodeSet,
}

/// Identity of a process. Its process id may be reused, but not the pair of process id and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Process {
    /// The kernel's process id.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

fn process_dir(root: &Path, pid: i32) -> PathBuf {
    root.join(format!("proc/{pid}"))
}

/// Returns the identity of a running process; `None` if there is no such process, or only a zombie is left.
///
/// # Errors
/// If the process's `stat` is malformed or may not be read.
pub fn process(root: &Path, pid: i32) -> Result<Option<Process>, ReadError> {
    Ok(stat(root, pid)?.and_then(|stat| stat.process(pid)))
}

/// Returns a process's parent, which may be one that adopted it; `None` if there is no such process.
///
/// # Errors
/// If the process's `stat` is malformed or may not be read.
pub fn parent(root: &Path, pid: i32) -> Result<Option<i32>, ReadError> {
    Ok(stat(root, pid)?.map(|stat| stat.parent))
}

fn stat(root: &Path, pid: i32) -> Result<Option<Stat>, ReadError> {
    let path = process_dir(root, pid).join("stat");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let stat = parse_stat(&text).ok_or_else(|| ReadError::malformed(&path, STAT.1, &text))?;
    Ok(Some(stat))
}

/// Returns true if exactly this process still runs. If this cannot be checked (for lack of descriptors, say), it returns true:
/// otherwise the agent would forget what is in force for the process.
pub fn is_alive(root: &Path, who: Process) -> bool {
    match process(root, who.pid) {
        Ok(now) => now == Some(who),
        Err(_) => true,
    }
}

/// Returns true if the process was started for the VM with this UUID: libvirt always passes `-uuid`.
pub fn is_qemu_of(root: &Path, pid: i32, uuid: &str) -> bool {
    // The command line of a VM with many devices is tens of kilobytes long.
    let Ok(Some(cmdline)) = read::text_if_there(&process_dir(root, pid).join("cmdline"), 2 << 20) else {
        return false;
    };
    let mut words = cmdline.split('\0');
    words.any(|word| word == "-uuid") && words.next() == Some(uuid)
}

/// Finds a VM's QEMU process by looking at every process's command line. This is slow; use it only if there is no pid file.
///
/// # Errors
/// If `/proc` cannot be listed.
pub fn find_qemu(root: &Path, uuid: &str) -> Result<Option<Process>, ReadError> {
    for name in read::names(&root.join("proc"), 1 << 20)? {
        let Ok(pid) = name.parse::<i32>() else { continue };
        if is_qemu_of(root, pid, uuid) {
            return process(root, pid);
        }
    }
    Ok(None)
}

/// Returns all threads of a process, ascending by id. Threads that end while they are read are left out. Empty if the process is
/// gone. No two threads have the role of the same vCPU or I/O thread.
///
/// # Errors
/// If a file is malformed or may not be read; if there are more threads than any QEMU has; or if several threads have the same
/// role by name and have no groups to tell them apart.
pub fn threads(root: &Path, pid: i32) -> Result<Vec<Thread>, ReadError> {
    let mut threads = Vec::new();
    Tasks::new(root, pid).look(Depth::Whole, &mut threads)?;
    Ok(threads)
}

/// How much of known threads to read again, from little to all. Most of what the kernel formats for a full read rarely changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// For how long and where vCPUs ran, and how long they waited. Threads are listed only if their number has changed.
    Counters,
    /// Also where vCPUs and the emulator may run. Threads are listed.
    Affinities,
    /// Everything about every thread.
    Whole,
}

/// The threads of a process that is read regularly.
#[derive(Debug)]
pub struct Tasks {
    pid: i32,
    path: PathBuf,
    /// The process's directory, once found. After that, a later process with the same number is never read by mistake.
    process: Option<Dir>,
    stat: Often,
    /// The process's `task` directory.
    task: Option<Dir>,
    seen: Vec<Seen>,
    /// Number of threads when the process was last checked to be running.
    count: Option<usize>,
    /// Buffer that every look reuses.
    tids: Vec<i32>,
    room: Vec<u8>,
}

impl Tasks {
    /// Prepares to read the process that has this number at the first reading.
    pub fn new(root: &Path, pid: i32) -> Tasks {
        Tasks {
            pid,
            path: process_dir(root, pid),
            process: None,
            stat: Often::new("stat"),
            task: None,
            seen: Vec::new(),
            count: None,
            tids: Vec::new(),
            room: Vec::new(),
        }
    }

    /// Like [`is_alive`], for the process that was found.
    pub fn is_alive(&mut self, who: Process) -> bool {
        let stat = self.stat();
        self.count = stat.as_ref().ok().and_then(|stat| stat.as_ref()?.thread_count);
        // If it cannot be checked, it counts as alive.
        stat.map_or(true, |stat| {
            stat.and_then(|stat| stat.process(who.pid)) == Some(who)
        })
    }

    /// Reads the process's `stat`; `None` if there is no such process.
    fn stat(&mut self) -> Result<Option<Stat>, ReadError> {
        let Some(process) = found(&mut self.process, || Dir::open(&self.path))? else {
            return Ok(None);
        };
        let text = self.stat.text(process, &mut self.room)?;
        let text = text.filter(|_| !self.stat.is_removed());
        let parsed = text.map(|text| {
            let path = || process.path().join("stat");
            parse_stat(&text).ok_or_else(|| ReadError::malformed(&path(), STAT.1, &text))
        });
        parsed.transpose()
    }

    /// Lists the threads, unless the known threads are still all of them. Empty if there is no such process.
    fn list(&mut self, depth: Depth, has_vcpus: bool) -> Result<(), ReadError> {
        let is_settled = has_vcpus && self.seen.iter().all(|seen| seen.looks >= LOOKS);
        if depth == Depth::Counters && is_settled && self.count == Some(self.seen.len()) {
            self.tids.clear();
            self.tids.extend(self.seen.iter().map(|seen| seen.thread.tid));
            return Ok(());
        }
        self.tids.clear();
        let Some(process) = found(&mut self.process, || Dir::open(&self.path))? else {
            return Ok(());
        };
        let Some(task) = found(&mut self.task, || process.below("task"))? else {
            return Ok(());
        };
        task.numbers(THREADS_MAX + 1, &mut self.tids)?;
        match self.tids.len() {
            0..=THREADS_MAX => Ok(()),
            _ => Err(ReadError::TooMany {
                path: task.path().display().to_string(),
                limit: THREADS_MAX,
            }),
        }
    }

    /// Reads the threads in the form that [`threads`] returns: new threads in full, the others to this depth. `into` must hold
    /// the result of the previous look, or nothing.
    ///
    /// # Errors
    /// If a file is malformed or may not be read, or if the roles of several threads cannot be told apart.
    pub fn look(&mut self, depth: Depth, into: &mut Vec<Thread>) -> Result<(), ReadError> {
        // If no thread is known to run a vCPU, any of them may.
        let has_vcpus = self.seen.iter().any(Seen::runs_vcpu);
        self.list(depth, has_vcpus)?;
        let Some(task) = &self.task else {
            into.clear();
            return Ok(());
        };
        // If an error occurs, everything is read again next time.
        let before = std::mem::take(&mut self.seen);
        let before_count = before.len();
        let mut before = before.into_iter().peekable();
        let mut seen = Vec::with_capacity(self.tids.len());
        let mut kept_count = 0;
        for &tid in &self.tids {
            while before.next_if(|before| before.thread.tid < tid).is_some() {}
            let known = before.next_if(|before| before.thread.tid == tid);
            let is_read_whole = depth == Depth::Whole || !has_vcpus;
            let kept = match known {
                Some(known) if !is_read_whole && known.looks >= LOOKS => {
                    known.later(task, depth, &mut self.room)?
                }
                known => {
                    seen.extend(thread(task, tid, known, &mut self.room)?);
                    continue;
                }
            };
            kept_count += usize::from(kept.is_some());
            match kept {
                Some(kept) => seen.push(kept),
                None => seen.extend(thread(task, tid, None, &mut self.room)?),
            }
        }
        let are_as_before = kept_count == seen.len() && kept_count == before_count;
        if !are_as_before {
            let roles = roles(task.path(), self.pid, &seen)?;
            let all = seen.iter_mut().zip(roles);
            all.for_each(|(seen, role)| seen.thread.role = role);
        }
        self.seen = seen;
        if are_as_before && depth == Depth::Counters && into.len() == self.seen.len() {
            let pairs = into.iter_mut().zip(&self.seen);
            pairs.for_each(|(known, seen)| known.take_counters(&seen.thread));
        } else {
            into.clear();
            into.extend(self.seen.iter().map(|seen| seen.thread.clone()));
        }
        Ok(())
    }
}

impl Thread {
    /// Copies the run time, the wait time and the last CPU.
    fn take_counters(&mut self, of: &Thread) {
        (self.running_ns, self.waiting_ns, self.cpu) = (of.running_ns, of.waiting_ns, of.cpu);
    }
}

/// Opens a directory unless it is already open.
fn found(
    dir: &mut Option<Dir>,
    open: impl FnOnce() -> Result<Option<Dir>, ReadError>,
) -> Result<Option<&Dir>, ReadError> {
    if dir.is_none() {
        *dir = open()?;
    }
    Ok(dir.as_ref())
}

/// How many times a new thread is read in full before its name and group are taken as final. Its creator sets both a little after
/// the thread starts.
const LOOKS: u8 = 3;

/// A thread, and what its role is derived from.
#[derive(Debug)]
struct Seen {
    /// The thread. Its role is set only after it was read.
    thread: Thread,
    start_ticks: u64,
    by_name: Role,
    /// The thread's role, if it is in a group that libvirt makes for one thread.
    by_group: Option<Role>,
    /// How many times the thread was read in full.
    looks: u8,
    schedstat: Often,
    stat: Often,
}

impl Seen {
    fn runs_vcpu(&self) -> bool {
        matches!(self.thread.role, Role::Vcpu(_))
    }

    /// Reads it again to this depth. `None` if it has ended, or its counters are not available separately.
    fn later(mut self, task: &Dir, depth: Depth, room: &mut Vec<u8>) -> Result<Option<Seen>, ReadError> {
        let tid = self.thread.tid;
        if depth >= Depth::Affinities && (self.runs_vcpu() || self.thread.role == Role::Emulator) {
            let Some(text) = task.text(&format!("{tid}/status"), read::SMALL_BYTES, room)? else {
                return Ok(None);
            };
            (self.thread.affinity, self.thread.memory_nodes) = parsed(task, (tid, "status"), &text, STATUS)?;
        }
        if !self.runs_vcpu() {
            return Ok(Some(self));
        }
        let Some(text) = self.schedstat.text(task, room)? else {
            return Ok(None);
        };
        let (running_ns, waiting_ns) = parsed(task, (tid, "schedstat"), &text, SCHEDSTAT)?;
        // A thread that did not run is still on the same CPU.
        if running_ns != self.thread.running_ns {
            let Some(text) = self.stat.text(task, room)? else {
                return Ok(None);
            };
            let stat = parsed(task, (tid, "stat"), &text, STAT)?;
            if stat.start_ticks != self.start_ticks {
                return Ok(None);
            }
            self.thread.cpu = stat.cpu;
        }
        (self.thread.running_ns, self.thread.waiting_ns) = (running_ns, waiting_ns);
        Ok(Some(self))
    }
}

/// Returns the role of each thread.
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
        // Threads ascend by id, so among equally old ones the lowest id is taken.
        if let Some(oldest) = claimed.into_iter().min_by_key(|&at| seen[at].start_ticks) {
            roles[oldest] = role;
        }
    }
    Ok(roles)
}

/// Returns true if QEMU emulates this thread's vCPU, and false if KVM runs it or the thread has ended.
pub fn is_emulated(root: &Path, pid: i32, tid: i32) -> bool {
    let comm = read::text_if_there(
        &process_dir(root, pid).join(format!("task/{tid}/comm")),
        read::SMALL_BYTES,
    );
    comm.is_ok_and(|comm| comm.is_some_and(|comm| comm.trim_end().ends_with("/TCG")))
}

/// Returns the CPUs that a thread may run on now; `None` if the thread has ended.
///
/// # Errors
/// If the process's `status` is malformed or may not be read.
pub fn affinity(root: &Path, pid: i32, tid: i32) -> Result<Option<CpuSet>, ReadError> {
    let path = process_dir(root, pid).join(format!("task/{tid}/status"));
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    parse_status(&text)
        .map(|(cpus, _)| Some(cpus))
        .ok_or_else(|| ReadError::malformed(&path, STATUS.1, &text))
}

/// Lets a thread run on these CPUs only.
///
/// # Errors
/// The system's error; a CPU's number may be too high for the call.
pub fn set_affinity(tid: i32, cpus: &CpuSet) -> std::io::Result<()> {
    #[cfg(any(test, feature = "testing"))]
    if let Some(system) = crate::system::simulated() {
        return system.set_affinity(tid, cpus);
    }
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus.iter() {
        let index = cpu.0 as usize;
        if index >= rustix::thread::CpuSet::MAX_CPU {
            let cause = format!("the number of CPU {cpu} is too high to pin to");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, cause));
        }
        set.set(index);
    }
    Ok(rustix::thread::sched_setaffinity(
        rustix::process::Pid::from_raw(tid),
        &set,
    )?)
}

/// Returns when a thread started, in clock ticks since boot; `None` if it has ended, or the time cannot be read.
pub fn thread_start(root: &Path, pid: i32, tid: i32) -> Option<u64> {
    let path = process_dir(root, pid).join(format!("task/{tid}/stat"));
    let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
    Some(parse_stat(&text)?.start_ticks)
}

/// Returns true if a process is a kernel thread. All kernel threads are children of process 2.
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

/// Returns the ids of the users whose rights a process has or can take: real, effective, saved and file system; `None` if it has
/// ended.
///
/// # Errors
/// If the process's `status` is malformed or may not be read.
pub fn users(root: &Path, pid: i32) -> Result<Option<[u32; 4]>, ReadError> {
    let path = process_dir(root, pid).join("status");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    let ids = ids.map(|ids| ids.split_ascii_whitespace().map_while(|id| id.parse().ok()));
    let ids = ids.and_then(|ids| <[u32; 4]>::try_from(ids.collect::<Vec<u32>>()).ok());
    ids.map(Some)
        .ok_or_else(|| ReadError::malformed(&path, "a line `Uid:` with four users", &text))
}

/// Returns a thread's number in its innermost namespace, which is the number that the process itself knows.
pub fn innermost_id(root: &Path, pid: i32, tid: i32) -> Option<i32> {
    let path = process_dir(root, pid).join(format!("task/{tid}/status"));
    let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
    let ids = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// A parser for a file's text, and the form that it expects.
type Form<T> = (fn(&str) -> Option<T>, &'static str);

const STAT: Form<Stat> = (parse_stat, "`TID (name) state …` with at least 39 fields");
const STATUS: Form<(CpuSet, NodeSet)> = (
    parse_status,
    "lines `Cpus_allowed_list:` and `Mems_allowed_list:`",
);
const SCHEDSTAT: Form<(Ns, Ns)> = (parse_schedstat, "three numbers: ran, waited, slices");

/// Parses the text of a thread's file.
fn parsed<T>(
    task: &Dir,
    (tid, name): (i32, &str),
    text: &str,
    (parse, expected): Form<T>,
) -> Result<T, ReadError> {
    let path = || task.path().join(format!("{tid}/{name}"));
    parse(text).ok_or_else(|| ReadError::malformed(&path(), expected, text))
}

/// Reads a thread in full, whether or not it was known before.
fn thread(task: &Dir, tid: i32, known: Option<Seen>, room: &mut Vec<u8>) -> Result<Option<Seen>, ReadError> {
    let mut file = |name: &'static str| {
        let text = task.text(&format!("{tid}/{name}"), read::SMALL_BYTES, room)?;
        Ok(text.map(std::borrow::Cow::into_owned))
    };
    let (Some(comm), Some(stat), Some(status)) = (file("comm")?, file("stat")?, file("status")?) else {
        return Ok(None);
    };
    let stat = parsed(task, (tid, "stat"), &stat, STAT)?;
    let (affinity, memory_nodes) = parsed(task, (tid, "status"), &status, STATUS)?;
    // A kernel without CONFIG_SCHED_INFO has no schedstat. Then running time is in ticks, and waiting time unknown.
    let (running_ns, waiting_ns) = match file("schedstat")? {
        Some(text) => parsed(task, (tid, "schedstat"), &text, SCHEDSTAT)?,
        None => (stat.cpu_time, Ns::ZERO),
    };
    // A kernel without cgroups has no such file.
    let by_group = file("cgroup")?.and_then(|text| grouped(&text));
    let thread = Thread {
        tid,
        role: Role::Other,
        running_ns,
        waiting_ns,
        cpu: stat.cpu,
        affinity,
        memory_nodes,
    };
    let new = || {
        (
            0,
            Often::new(format!("{tid}/schedstat")),
            Often::new(format!("{tid}/stat")),
        )
    };
    let known = known.filter(|known| known.start_ticks == stat.start_ticks);
    let (looks, often_schedstat, often_stat) =
        known.map_or_else(new, |known| (known.looks, known.schedstat, known.stat));
    Ok(Some(Seen {
        thread,
        start_ticks: stat.start_ticks,
        by_name: named(comm.trim_end_matches('\n')),
        by_group,
        looks: looks.saturating_add(1),
        schedstat: often_schedstat,
        stat: often_stat,
    }))
}

/// Parses a number in its plain form: no sign, no leading zeros.
fn plain<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    let number: T = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Returns the role that a thread's name says.
fn named(comm: &str) -> Role {
    if let Some((index, "KVM" | "TCG")) = comm.strip_prefix("CPU ").and_then(|rest| rest.split_once('/')) {
        return plain(index).map_or(Role::Other, Role::Vcpu);
    }
    let iothread = comm.strip_prefix("IO iothread");
    iothread.and_then(plain).map_or(Role::Other, Role::IoThread)
}

/// Returns the role that the last part of one of a thread's cgroups says. Each hierarchy has a cgroup, and libvirt names them
/// alike.
fn grouped(text: &str) -> Option<Role> {
    text.lines().find_map(|line| {
        let group = line.splitn(3, ':').nth(2)?.rsplit('/').next()?;
        let vcpu = group.strip_prefix("vcpu").and_then(plain).map(Role::Vcpu);
        vcpu.or_else(|| group.strip_prefix("iothread").and_then(plain).map(Role::IoThread))
    })
}

struct Stat {
    state: char,
    parent: i32,
    cpu_time: Ns,
    /// Number of threads of the whole process.
    thread_count: Option<usize>,
    start_ticks: u64,
    cpu: Option<CpuId>,
}

impl Stat {
    /// Returns the process; `None` for a zombie.
    fn process(&self, pid: i32) -> Option<Process> {
        (!matches!(self.state, 'Z' | 'X' | 'x')).then_some(Process {
            pid,
            start_ticks: self.start_ticks,
        })
    }
}

/// Parses `/proc/…/stat`. The name may contain spaces and parentheses, so fields are counted from the last parenthesis.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?; // field 3 in proc(5)
    let parent = fields.next()?.parse::<i32>().ok()?;
    let mut number = |skipped: usize| fields.nth(skipped)?.parse::<u64>().ok();
    let ticks = number(14 - 5)?.checked_add(number(0)?)?;
    let thread_count = number(20 - 16)?;
    let start_ticks = number(22 - 21)?;
    let cpu = number(39 - 23)?;
    Some(Stat {
        state,
        parent,
        cpu_time: Ns(ticks.checked_mul(10_000_000)?),
        thread_count: usize::try_from(thread_count).ok(),
        start_ticks,
        cpu: u32::try_from(cpu).ok().map(CpuId),
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
mod tests;

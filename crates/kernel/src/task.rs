//! `/proc/PID/task/TID/{cgroup,comm,stat,schedstat,status}`: the threads of a QEMU process, and their roles.
//!
//! libvirt puts each vCPU's thread into a cgroup `vcpuN` and each I/O thread into `iothreadN`, which only root can leave. If
//! a process has such groups only they determine a thread's role. Threads started by a thread in there are in there too
//! (io_uring's workers), and younger: the oldest is the one that libvirt put there.
//!
//! If libvirt made no groups (no cgroups, a session's libvirt) names are used. QEMU names its threads when libvirt starts it
//! (`debug-threads=on`, always): `CPU n/KVM` or `CPU n/TCG` is vCPU n, `IO iothreadN` an I/O thread. QEMU can change names,
//! so a VM is refused if two threads have the same one.
//!
//! The first thread is the emulator's main loop, whatever its name, and all others are its helpers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_units::{CpuId, CpuSet, NodeSet, Ns};

use crate::read::{self, Dir, Often, ReadError};

/// Most threads to read of one process: 4096 vCPUs and as many helpers.
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
    /// Its role.
    pub role: Role,
    /// Time it ran (`schedstat`, first number).
    pub running_ns: Ns,
    /// Time it waited on a run queue (`schedstat`, second number).
    pub waiting_ns: Ns,
    /// CPU it last ran on.
    pub cpu: Option<CpuId>,
    /// CPUs it may run on now, according to the scheduler.
    pub affinity: CpuSet,
    /// Nodes that its memory may come from, as limited by cpusets.
    pub memory_nodes: NodeSet,
}

/// Identity of a process: its number may be reused, its number and start time together may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Process {
    /// Kernel's process id.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

fn process_dir(root: &Path, pid: i32) -> PathBuf {
    root.join(format!("proc/{pid}"))
}

/// Identity of a running process; `None` if there is none, or only its remains (zombie).
///
/// # Errors
/// When its `stat` is malformed or may not be read.
pub fn process(root: &Path, pid: i32) -> Result<Option<Process>, ReadError> {
    Ok(stat(root, pid)?.and_then(|stat| stat.process(pid)))
}

/// The parent of a process, possibly the one that adopted it; `None` if there is no such process.
///
/// # Errors
/// When its `stat` is malformed or may not be read.
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

/// Whether exactly this process still runs. If it cannot be checked (for lack of descriptors, say) it does not count as
/// ended: what is in force for it would be forgotten.
pub fn is_alive(root: &Path, who: Process) -> bool {
    match process(root, who.pid) {
        Ok(now) => now == Some(who),
        Err(_) => true,
    }
}

/// Whether a process was started for the VM with this UUID: libvirt always passes `-uuid`.
pub fn is_qemu_of(root: &Path, pid: i32, uuid: &str) -> bool {
    // The command line of a VM with many devices has tens of kilobytes.
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

/// All threads of a process, ascending by id; threads that end while being read are left out. Empty if the process is gone.
/// No two are the same vCPU or I/O thread.
///
/// # Errors
/// When a file is malformed, or may not be read; when there are more than any QEMU has, or several with one name and nothing
/// else to tell them apart.
pub fn threads(root: &Path, pid: i32) -> Result<Vec<Thread>, ReadError> {
    let mut threads = Vec::new();
    Tasks::new(root, pid).look(Depth::Whole, &mut threads)?;
    Ok(threads)
}

/// How much to read again of known threads, from little to all. What rarely changes is most of what the kernel has to
/// format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// How long and where vCPUs ran, and how long they waited. Threads are listed only if the process has a different number
    /// of them.
    Counters,
    /// Also where they and the emulator may run. Threads are listed.
    Affinities,
    /// Everything.
    Whole,
}

/// The threads of a process that is read regularly.
#[derive(Debug)]
pub struct Tasks {
    pid: i32,
    path: PathBuf,
    /// Its directory, once found: from then on no other process of this number is read.
    process: Option<Dir>,
    stat: Often,
    /// Its `task` directory.
    task: Option<Dir>,
    seen: Vec<Seen>,
    /// Number of threads when the process was last checked to be running.
    count: Option<usize>,
    /// Buffer, reused by each look.
    tids: Vec<i32>,
    room: Vec<u8>,
}

impl Tasks {
    /// Threads of the process that has this number at the first look.
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

    /// As [`is_alive`], for the process that was found.
    pub fn is_alive(&mut self, who: Process) -> bool {
        let stat = self.stat();
        self.count = stat.as_ref().ok().and_then(|stat| stat.as_ref()?.thread_count);
        // If it cannot be checked it does not count as ended.
        stat.map_or(true, |stat| {
            stat.and_then(|stat| stat.process(who.pid)) == Some(who)
        })
    }

    /// Status of the process; `None` if there is none.
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

    /// Lists the threads, unless the known ones are still all; empty if there is no such process.
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

    /// Reads the threads as [`threads`] returns them: new ones completely, the others to this depth. `into` has the result
    /// of the previous look, or nothing.
    ///
    /// # Errors
    /// As [`threads`].
    pub fn look(&mut self, depth: Depth, into: &mut Vec<Thread>) -> Result<(), ReadError> {
        // If none is known to run a vCPU it may be any.
        let has_vcpus = self.seen.iter().any(Seen::runs_vcpu);
        self.list(depth, has_vcpus)?;
        let Some(task) = &self.task else {
            into.clear();
            return Ok(());
        };
        // After an error everything is read next time.
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
    /// Copies how long it ran and waited, and where.
    fn take_counters(&mut self, of: &Thread) {
        (self.running_ns, self.waiting_ns, self.cpu) = (of.running_ns, of.waiting_ns, of.cpu);
    }
}

/// Opens a directory unless it is open.
fn found(
    dir: &mut Option<Dir>,
    open: impl FnOnce() -> Result<Option<Dir>, ReadError>,
) -> Result<Option<&Dir>, ReadError> {
    if dir.is_none() {
        *dir = open()?;
    }
    Ok(dir.as_ref())
}

/// How often a new thread is read completely: its creator names it and puts it into its group a little later.
const LOOKS: u8 = 3;

/// A thread, and the sources of its role.
#[derive(Debug)]
struct Seen {
    /// Without a role when it was just read.
    thread: Thread,
    start_ticks: u64,
    by_name: Role,
    /// The role, if it is in a group that libvirt makes for one thread.
    by_group: Option<Role>,
    /// How often it was read completely.
    looks: u8,
    schedstat: Often,
    stat: Often,
}

impl Seen {
    fn runs_vcpu(&self) -> bool {
        matches!(self.thread.role, Role::Vcpu(_))
    }

    /// Updates it to this depth. `None` if it has ended, or its counters are not available separately.
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
        // If it did not run it is on the same CPU.
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

/// The role of each thread.
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
        // Threads ascend by id, so of equally old ones the lowest is taken.
        if let Some(oldest) = claimed.into_iter().min_by_key(|&at| seen[at].start_ticks) {
            roles[oldest] = role;
        }
    }
    Ok(roles)
}

/// Whether QEMU emulates the vCPU of this thread, instead of KVM running it; false for a thread that has ended.
pub fn is_emulated(root: &Path, pid: i32, tid: i32) -> bool {
    let comm = read::text_if_there(
        &process_dir(root, pid).join(format!("task/{tid}/comm")),
        read::SMALL_BYTES,
    );
    comm.is_ok_and(|comm| comm.is_some_and(|comm| comm.trim_end().ends_with("/TCG")))
}

/// CPUs that one thread may run on now; `None` if the thread has ended.
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
        .ok_or_else(|| ReadError::malformed(&path, STATUS.1, &text))
}

/// When a thread started, in clock ticks since boot; `None` if it has ended or that cannot be read.
pub fn thread_start(root: &Path, pid: i32, tid: i32) -> Option<u64> {
    let path = process_dir(root, pid).join(format!("task/{tid}/stat"));
    let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
    Some(parse_stat(&text)?.start_ticks)
}

/// Whether a process is a kernel thread, all of which are children of the second process.
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

/// The users whose rights a process has or can take: real, effective, saved and of files; `None` if it has ended.
///
/// # Errors
/// When its `status` is malformed or may not be read.
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

/// A thread's number in its innermost namespace, by which the process itself knows it.
pub fn innermost_id(root: &Path, pid: i32, tid: i32) -> Option<i32> {
    let path = process_dir(root, pid).join(format!("task/{tid}/status"));
    let text = read::text_if_there(&path, read::SMALL_BYTES).ok()??;
    let ids = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().last()?.parse().ok()
}

/// Parser of a file's text, and the form it expects.
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

/// Reads a thread completely, whether it was known before or not.
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
    // A kernel without CONFIG_SCHED_INFO has no schedstat: then running time is in ticks, and waiting time unknown.
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

/// A number in its plain form: no sign, no leading zeros.
fn plain<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    let number: T = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// A thread's role by its name.
fn named(comm: &str) -> Role {
    if let Some((index, "KVM" | "TCG")) = comm.strip_prefix("CPU ").and_then(|rest| rest.split_once('/')) {
        return plain(index).map_or(Role::Other, Role::Vcpu);
    }
    let iothread = comm.strip_prefix("IO iothread");
    iothread.and_then(plain).map_or(Role::Other, Role::IoThread)
}

/// A thread's role by the last part of one of its cgroups (one for each hierarchy; libvirt uses them alike).
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
    /// Threads of the whole process.
    thread_count: Option<usize>,
    start_ticks: u64,
    cpu: Option<CpuId>,
}

impl Stat {
    /// The process; `None` for a zombie.
    fn process(&self, pid: i32) -> Option<Process> {
        (!matches!(self.state, 'Z' | 'X' | 'x')).then_some(Process {
            pid,
            start_ticks: self.start_ticks,
        })
    }
}

/// Parses `/proc/…/stat`. The name may contain spaces and parentheses, so fields count from the last parenthesis.
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

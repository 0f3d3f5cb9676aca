//! Init of a testbed guest, and the guest's only process besides those that `run` starts.
//!
//! It mounts /proc and /dev, loads the modules of the initramfs, starts the behaviour on the kernel command line, and prints
//! `READY`. Then it obeys the console. A line with a [`Behaviour`] replaces the present one. The other commands are:
//!
//! - `report` prints counters;
//! - `check` says whether the memory that it holds is as written, and `disk` whether the disk is;
//! - `nodes` lists the CPUs of each node, and `holds` the nodes that its memory is on;
//! - `up` brings the NIC up, and `follow` loads the topology page's module;
//! - `run LINE` runs a shell command line, and `poweroff` ends the guest.
//!
//! Init never exits: that would panic the guest's kernel.

#![allow(clippy::print_stdout, reason = "the console is how the guest speaks")]

mod devices;

use std::fs;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use devices::Disk;
use homenode_testbed_guest::{
    Behaviour, COMMAND_RUN, MARKER_CHECKED, MARKER_DISK, MARKER_ERROR, MARKER_FOLLOWS, MARKER_HOLDS,
    MARKER_NODES, MARKER_PHASE, MARKER_RAN, MARKER_READY, MARKER_REPORT, MARKER_SWEPT, MARKER_UP, Orders,
    Sweep,
};
use rustix::mount::{MountFlags, mount};

const PERIOD: Duration = Duration::from_millis(20);
const PAGE_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;
/// The bytes of a page that hold its number.
const NUMBER: std::ops::Range<usize> = 8..16;
/// Memory left to the guest's kernel, for page tables and the threads of the next behaviour.
const MEMORY_MARGIN_MIB: u32 = 4;
/// Directory of the kernel modules in the initramfs; they are loaded in the order of their names.
const MODULES: &str = "/modules";

/// The kernel module that follows the topology page; loaded on command.
const TOPOLOGY_MODULE: &str = "/topology/homenode_topology.ko";

/// Counts that `report` prints.
#[derive(Default)]
struct Counters {
    loops: AtomicU64,
    passes: AtomicU64,
}

/// The state that stays when one behaviour replaces another.
#[derive(Clone, Default)]
struct Held {
    memory: Arc<Mutex<Vec<u8>>>,
    disk: Arc<Mutex<Option<Disk>>>,
}

/// The threads of one behaviour; they end when `stop` is set.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Load {
    fn start(behaviour: Behaviour, held: &Held, counters: &Arc<Counters>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let Held { memory, disk } = held;
        let mut threads = Vec::new();
        resize(memory, behaviour);
        for index in 0..behaviour.busy {
            let (stop, counters) = (Arc::clone(&stop), Arc::clone(counters));
            threads.push(thread::spawn(move || {
                if behaviour.pinned {
                    pin([index as usize % cpu_count()]);
                }
                compute(behaviour.duty_percent, &stop, &counters);
            }));
        }
        if behaviour.touch_mib > 0 && behaviour.every_ms > 0 {
            let (stop, counters, memory) = (Arc::clone(&stop), Arc::clone(counters), Arc::clone(memory));
            let pause = Duration::from_millis(u64::from(behaviour.every_ms));
            threads.push(thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    write_pages(behaviour, &memory, &counters);
                    thread::sleep(pause);
                }
            }));
        }
        if behaviour.sweep != Sweep::Off {
            let (stop, memory) = (Arc::clone(&stop), Arc::clone(memory));
            threads.push(thread::spawn(move || sweep(behaviour, &memory, &stop)));
        }
        if behaviour.walk_kib > 0 {
            let (stop, counters) = (Arc::clone(&stop), Arc::clone(counters));
            threads.push(thread::spawn(move || walk(behaviour, &stop, &counters)));
        }
        if behaviour.disk_mib > 0 {
            let (stop, disk) = (Arc::clone(&stop), Arc::clone(disk));
            threads.push(thread::spawn(move || {
                if let Err(error) = devices::write_disk(&disk, behaviour.disk_mib, &stop) {
                    say(&format!("{MARKER_ERROR} the disk cannot be written: {error}"));
                }
            }));
        }
        Self { stop, threads }
    }

    fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that panicked has already reported that on the console.
            let _ = thread.join();
        }
    }
}

/// Makes the guest hold the behaviour's memory, writes each page of it, and releases the rest to the guest's kernel. A sweep
/// does not rewrite memory that is already held.
fn resize(memory: &Mutex<Vec<u8>>, behaviour: Behaviour) {
    let mut held = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mib = behaviour.touch_mib;
    let bytes = mib as usize * 1024 * 1024;
    if held.len() == bytes && behaviour.sweep != Sweep::Off {
        return;
    }
    if held.len() != bytes {
        *held = Vec::new();
        if let Some(available) =
            memory_available_mib().filter(|available| mib + MEMORY_MARGIN_MIB > *available)
        {
            // Without this check the kernel would panic when memory runs out, as there is no other process to kill.
            println!(
                "{MARKER_ERROR} touch={mib} MiB asked for, {available} MiB available: give the guest more memory"
            );
            return;
        }
        *held = vec![0; bytes];
    }
    // Threads started later inherit the affinity of the current thread.
    let anywhere = behaviour.touch_on.map(|vcpu| {
        let anywhere = cpu_count();
        pin([vcpu as usize]);
        anywhere
    });
    // `vec![0]` only maps memory: a page is allocated when it is first written.
    for (number, page) in held.chunks_mut(PAGE_BYTES).enumerate() {
        page[0] = number as u8;
        page[NUMBER].copy_from_slice(&number.to_le_bytes());
    }
    if let Some(anywhere) = anywhere {
        pin(0..anywhere);
    }
}

/// Returns the memory that the guest's kernel reports as available.
fn memory_available_mib() -> Option<u32> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u32 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib / 1024)
}

fn write_pages(behaviour: Behaviour, memory: &Mutex<Vec<u8>>, counters: &Counters) {
    let mut held = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let pages = match behaviour.hot_mib {
        0 => usize::MAX,
        mib => mib as usize * 1024 * 1024 / PAGE_BYTES,
    };
    let every = held.chunks_mut(PAGE_BYTES).step_by(behaviour.stride as usize);
    for page in every.take(pages) {
        page[0] = page[0].wrapping_add(1);
    }
    counters.passes.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of pages held, and how many of them are not as written. Each page holds its number; its first byte is
/// the number's lowest byte, plus one for each pass.
fn check(memory: &Mutex<Vec<u8>>) -> (usize, usize) {
    let held = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let passes = held.first().copied().unwrap_or_default();
    let pages = held.chunks(PAGE_BYTES).enumerate();
    let is_wrong = |(number, page): &(usize, &[u8])| {
        page[NUMBER] != number.to_le_bytes() || page[0] != (*number as u8).wrapping_add(passes)
    };
    (held.len() / PAGE_BYTES, pages.filter(is_wrong).count())
}

/// Makes the passes of a sweep over the memory, touching one byte of each page, and reports when they are done.
fn sweep(behaviour: Behaviour, memory: &Mutex<Vec<u8>>, stop: &AtomicBool) {
    let mut held = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut sum = 0_u8;
    let mut made = 0;
    while made < behaviour.passes && !stop.load(Ordering::Relaxed) {
        for page in held.chunks_mut(PAGE_BYTES) {
            if behaviour.sweep != Sweep::Write {
                sum = sum.wrapping_add(std::hint::black_box(page[0]));
            }
            if behaviour.sweep != Sweep::Read {
                page[0] = std::hint::black_box(sum);
            }
        }
        made += 1;
    }
    say(&format!("{MARKER_SWEPT} passes={made}"));
}

/// Computes for a share of each period until told to stop.
fn compute(duty_percent: u32, stop: &AtomicBool, counters: &Counters) {
    let on = PERIOD * duty_percent / 100;
    let mut state = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        while begin.elapsed() < on {
            for _ in 0..2000 {
                state = step(state);
            }
            std::hint::black_box(state);
            counters.loops.fetch_add(1, Ordering::Relaxed);
        }
        if duty_percent < 100 {
            thread::sleep(PERIOD - on);
        }
    }
}

/// Makes one step of arithmetic.
fn step(state: u64) -> u64 {
    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1)
}

/// Reads memory of its own line by line, repeatedly, until told to stop.
fn walk(behaviour: Behaviour, stop: &AtomicBool, counters: &Counters) {
    // Filled with ones, because the kernel uses a single page of zeroes for all memory that was never written.
    let memory = vec![1_u8; behaviour.walk_kib as usize * 1024];
    let burst = Duration::from_millis(u64::from(behaviour.burst_ms));
    let mut begun = Instant::now();
    let mut state = 1_u64;
    while !stop.load(Ordering::Relaxed) {
        for page in memory.chunks(PAGE_BYTES) {
            // Checked at each page, because a pass over all memory may take longer than a burst.
            if !burst.is_zero() && begun.elapsed() >= burst {
                thread::sleep(burst);
                begun = Instant::now();
            }
            for line in page.chunks(LINE_BYTES) {
                state = state.wrapping_add(u64::from(line[0]));
                for _ in 0..behaviour.think {
                    state = step(state);
                }
            }
        }
        std::hint::black_box(state);
        counters.passes.fetch_add(1, Ordering::Relaxed);
    }
}

fn cpu_count() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Confines the calling thread to these vCPUs.
fn pin(cpus: impl IntoIterator<Item = usize>) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.into_iter().for_each(|cpu| set.set(cpu));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        println!("{MARKER_ERROR} cannot pin a thread to vCPUs: {error}");
    }
}

/// Returns the CPUs of each node, as the kernel reports them now.
fn nodes() -> String {
    let list = |node: usize| {
        let path = format!("/sys/devices/system/node/node{node}/cpulist");
        let cpus = fs::read_to_string(path).ok()?;
        Some(format!(" node{node}={}", cpus.trim()))
    };
    (0..).map_while(list).collect()
}

/// Returns how many pages of nodes 0 and 1 belong to this program.
fn holds() -> [u64; 2] {
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let anonymous = maps.lines().filter(|line| line.contains(" anon="));
    let words = anonymous.flat_map(str::split_whitespace);
    let counts = words.filter_map(|word| word.strip_prefix('N')?.split_once('='));
    let mut pages = [0; 2];
    for (node, count) in counts {
        let place = node.parse().ok().and_then(|node: usize| pages.get_mut(node));
        if let (Some(sum), Ok(count)) = (place, count.parse::<u64>()) {
            *sum += count;
        }
    }
    pages
}

/// Mounts file systems and loads modules. A missing one is only reported, as most cases need none of them.
fn prepare() {
    for (source, target, kind) in [
        ("proc", "/proc", "proc"),
        ("sysfs", "/sys", "sysfs"),
        ("devtmpfs", "/dev", "devtmpfs"),
    ] {
        let _ = fs::create_dir_all(target);
        if let Err(error) = mount(source, target, kind, MountFlags::empty(), None) {
            println!("{MARKER_ERROR} cannot mount {target}: {error}");
        }
    }
    let Ok(entries) = fs::read_dir(MODULES) else {
        return;
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if let Err(error) = load_module(&path) {
            println!("{MARKER_ERROR} cannot load module {}: {error}", path.display());
        }
    }
}

fn load_module(path: &Path) -> std::io::Result<()> {
    let file = fs::File::open(path)?;
    match rustix::system::finit_module(&file, c"", 0) {
        Err(rustix::io::Errno::EXIST) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Reads the console's lines in a separate thread, so that a phase can begin while no line arrives.
fn console_lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
        // The guest continues when its input ends.
        loop {
            thread::sleep(Duration::from_secs(3600));
            if sender.send(String::new()).is_err() {
                return;
            }
        }
    });
    receiver
}

fn say(text: &str) {
    println!("{text}");
    let _ = std::io::stdout().flush();
}

fn main() {
    prepare();
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let orders = Orders::from_cmdline(&cmdline).unwrap_or_else(|error| {
        say(&format!("{MARKER_ERROR} {error}"));
        Orders::default()
    });
    let held = Held::default();
    let counters = Arc::new(Counters::default());
    let mut load = Load::start(orders.first, &held, &counters);
    let ready = Instant::now();
    say(&format!("{MARKER_READY} cpus={} {}", cpu_count(), orders.first));

    let lines = console_lines();
    let mut phases = orders.phases.into_iter().peekable();
    loop {
        let wait = phases.peek().map_or(Duration::from_secs(3600), |phase| {
            Duration::from_secs(u64::from(phase.at_s)).saturating_sub(ready.elapsed())
        });
        let next = match lines.recv_timeout(wait) {
            Ok(line) => follow(line.trim(), &counters, &held),
            Err(RecvTimeoutError::Timeout) => phases.next().map(|phase| phase.behaviour),
            Err(RecvTimeoutError::Disconnected) => None,
        };
        if let Some(behaviour) = next {
            load.finish();
            load = Load::start(behaviour, &held, &counters);
            say(&format!("{MARKER_PHASE} {behaviour}"));
        }
    }
}

/// Returns how long vCPUs wanted to run but did not, as the guest's kernel counts it, in ticks of 10 ms.
fn steal_ms() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let all = text.lines().next().unwrap_or_default();
    let ticks = all
        .split_whitespace()
        .nth(8)
        .and_then(|ticks| ticks.parse::<u64>().ok());
    ticks.unwrap_or(0) * 10
}

/// Runs a console command. If the line is a behaviour, returns it for the caller to begin.
fn follow(line: &str, counters: &Counters, held: &Held) -> Option<Behaviour> {
    match line {
        "" => None,
        "report" => {
            let (loops, passes) = (&counters.loops, &counters.passes);
            say(&format!(
                "{MARKER_REPORT} loops={} passes={} steal_ms={}",
                loops.load(Ordering::Relaxed),
                passes.load(Ordering::Relaxed),
                steal_ms()
            ));
            None
        }
        "check" => {
            let (pages, wrong) = check(&held.memory);
            say(&format!("{MARKER_CHECKED} pages={pages} wrong={wrong}"));
            None
        }
        "disk" => {
            let disk = held
                .disk
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            match disk.as_ref().map(Disk::check) {
                Some(Ok((written, wrong))) => say(&format!("{MARKER_DISK} written={written} wrong={wrong}")),
                Some(Err(error)) => say(&format!("{MARKER_ERROR} the disk cannot be read: {error}")),
                None => say(&format!("{MARKER_DISK} written=0 wrong=0")),
            }
            None
        }
        "up" => {
            match devices::bring_up() {
                Ok(mac) => say(&format!("{MARKER_UP} mac={mac}")),
                Err(error) => say(&format!("{MARKER_ERROR} the NIC cannot be brought up: {error}")),
            }
            None
        }
        "nodes" => {
            say(&format!("{MARKER_NODES}{}", nodes()));
            None
        }
        "holds" => {
            let [first, second] = holds();
            say(&format!("{MARKER_HOLDS} node0={first} node1={second}"));
            None
        }
        "follow" => {
            match load_module(Path::new(TOPOLOGY_MODULE)) {
                Ok(()) => say(MARKER_FOLLOWS),
                Err(error) => say(&format!("{MARKER_ERROR} cannot load {TOPOLOGY_MODULE}: {error}")),
            }
            None
        }
        "poweroff" => {
            let done = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
            say(&format!("{MARKER_ERROR} cannot power off: {done:?}"));
            None
        }
        text if text.starts_with(COMMAND_RUN) => {
            run(&text[COMMAND_RUN.len()..]);
            None
        }
        text => match text.parse() {
            Ok(behaviour) => Some(behaviour),
            Err(error) => {
                say(&format!("{MARKER_ERROR} {error}"));
                None
            }
        },
    }
}

/// Runs a shell command line until it ends, without access to the console's input.
fn run(line: &str) {
    let status = Command::new("/bin/busybox")
        .args(["sh", "-c", line])
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .status();
    match status {
        // A program ended by a signal has no status.
        Ok(status) => say(&format!("{MARKER_RAN} status={}", status.code().unwrap_or(-1))),
        Err(error) => say(&format!("{MARKER_ERROR} cannot start /bin/busybox: {error}")),
    }
}

//! The plugin as a page observer. Window by window, it writes what the `page_model` of `homenode-meter` makes of a machine's
//! accesses.
//!
//! ```text
//! qemu-system-x86_64 -plugin libhomenode_plugin.so,pages=FILE,frames=262144,core=i7_pml,logs=walks,window-ms=1000 \
//!     -object memory-backend-memfd,id=m,size=1G,share=on -machine pc,memory-backend=m -m 1G ...
//! ```
//!
//! With `control=FIFO`, each line written to the FIFO closes the window and names the next one. With `begin=announced`,
//! nothing is instrumented before the first such line, so a guest boots as fast as without the plugin. The file grows by whole
//! records, and `homenode wss --log FILE --follow` can read it meanwhile. With `keep-mib=SIZE` older records are dropped, so
//! the file takes little more space than that; on `/dev/shm` it is a feed through shared memory.
//!
//! # What the interface reports, and how the rest is derived
//!
//! - *Address spaces.* Version 1 of the interface does not report changed translations, but it provides each instruction's
//!   bytes when its block is translated. Instructions that change translations ([`change`]) get a callback of their own.
//! - *Instructions.* A block's pages are counted by an addition that QEMU compiles into the block. Their guest frames follow
//!   from QEMU's mapping of the guest's memory, if that is one memfd; otherwise fetches are not seen, and the log says so.
//! - *Frames* are numbered as in QEMU 7.2: by offset in guest memory, which equals the guest-physical address up to the hole
//!   below 4 GiB.

use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use homenode_formats::page_log::{self, Header, Kept, Marks, Window};
use homenode_meter::page_model::{Config, Cpu, Machine};
use homenode_tracking::tlb::Access;

use crate::complaint::Complaint;
use crate::per_vcpu::PerVcpu;
use crate::qemu::{self, Id, Insn, MemInfo, Tb};

/// Options of a page log, in addition to the model's.
pub(crate) struct PagesOptions {
    /// File of the log.
    pub file: PathBuf,
    /// What to model.
    pub config: Config,
    /// Length of a window; `None` if only orders close windows.
    pub window: Option<Duration>,
    /// FIFO from which orders are read.
    pub control: Option<PathBuf>,
    /// Whether observation waits for the first order.
    pub announced: bool,
    /// How much of the log is kept; `None` for all of it.
    pub keep_bytes: Option<u64>,
}

static CPUS: PerVcpu<Cpu> = PerVcpu::new();
static RUN: OnceLock<Run> = OnceLock::new();
/// Whether an access reads or writes, indexed by QEMU's description of it. 0 means not looked up yet.
static KINDS: [AtomicU8; 1 << 18] = [const { AtomicU8::new(0) }; 1 << 18];
const READS: u8 = 1;
const WRITES: u8 = 2;
/// How long a running vCPU may take to notice a new window.
const NOTICE: Duration = Duration::from_millis(10);

struct Run {
    machine: Machine,
    options: PagesOptions,
    vcpus: u32,
    /// Whether observation is requested, and whether it has begun.
    wanted: AtomicBool,
    begun: AtomicBool,
    /// How many times code in each frame was executed, separately for the lower and upper half of addresses.
    fetches: OnceLock<Option<Fetches>>,
    log: Mutex<Option<Log>>,
}

/// The log being written.
struct Log {
    file: File,
    started: Instant,
    number: u64,
    begin_ns: u64,
    label: String,
    /// Counts of fetches at the end of the last window.
    fetched: Vec<u64>,
    /// The header, as it is in the file.
    header: Option<Header>,
    length: u64,
    /// Locations of the records that are kept. The oldest may have to be dropped.
    records: VecDeque<Kept>,
}

/// QEMU's mapping of the guest's memory, and how many times code in it was executed.
struct Fetches {
    memory: std::ops::Range<usize>,
    counts: Vec<AtomicU64>,
}

/// Creates the model and the file.
///
/// # Errors
/// The file or the FIFO cannot be opened, or the plugin is loaded twice.
pub(crate) fn begin(options: PagesOptions, vcpus: u32) -> Result<(), Complaint> {
    let complain = |error: io::Error| format!("{}: {error}", options.file.display());
    let file = File::create(&options.file).map_err(complain)?;
    let control = options.control.as_deref().map(open_control).transpose()?;
    let run = Run {
        machine: Machine::new(options.config),
        vcpus,
        wanted: AtomicBool::new(!options.announced),
        begun: AtomicBool::new(false),
        fetches: OnceLock::new(),
        log: Mutex::new(Some(Log {
            file,
            started: Instant::now(),
            number: 0,
            begin_ns: 0,
            label: String::new(),
            fetched: Vec::new(),
            header: None,
            length: 0,
            records: VecDeque::new(),
        })),
        options,
    };
    RUN.set(run).map_err(|_| "loaded twice; once is enough")?;
    // Signals are for QEMU's threads, so the new thread starts with all of them blocked.
    // SAFETY: a set of signals may be all zeros.
    let mut all = unsafe { std::mem::zeroed::<libc::sigset_t>() };
    let mut before = all;
    // SAFETY: both sets are local; a thread inherits the blocked signals.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
    }
    let started = thread::Builder::new().spawn(move || keep_windows(control));
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    started.map_err(|error| format!("cannot start a thread: {error}"))?;
    Ok(())
}

fn open_control(path: &Path) -> Result<File, Complaint> {
    let complain = |error: io::Error| Complaint::from(format!("{}: {error}", path.display()));
    let name =
        std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| "a path with a zero")?;
    // SAFETY: the name ends with a zero.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(complain(error));
        }
    }
    // Opened for writing too: otherwise reading would end when a program that sends orders closes the FIFO.
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    opened.map_err(complain)
}

/// Runs the thread that closes windows, when their time is over and on orders.
fn keep_windows(mut control: Option<File>) {
    let Some(run) = RUN.get() else {
        return;
    };
    let mut orders = Vec::new();
    if run.options.announced {
        let label = next_order(control.as_mut(), &mut orders, None);
        run.wanted.store(true, Ordering::Release);
        while !run.begun.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(1));
        }
        run.open(label.unwrap_or_default());
    } else {
        run.open(String::new());
    }
    loop {
        let label = next_order(control.as_mut(), &mut orders, run.options.window);
        if let Err(error) = run.close(label) {
            eprintln!("homenode plugin: cannot write what was seen of pages: {error}");
            return;
        }
    }
}

/// Returns the control file's next line; `None` if none arrives within the limit.
fn next_order(control: Option<&mut File>, orders: &mut Vec<u8>, limit: Option<Duration>) -> Option<String> {
    let Some(control) = control else {
        thread::sleep(limit.unwrap_or(Duration::from_secs(3600)));
        return None;
    };
    let until = limit.map(|limit| Instant::now() + limit);
    loop {
        if let Some(at) = orders.iter().position(|byte| *byte == b'\n') {
            let line = orders.drain(..=at).collect::<Vec<u8>>();
            return Some(String::from_utf8_lossy(&line).trim().to_owned());
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return None;
        }
        let mut waits = libc::pollfd {
            fd: control.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let wait_ms = left.map_or(-1, |left| left.as_millis().clamp(1, 1 << 30) as libc::c_int);
        // SAFETY: one local poll descriptor.
        unsafe { libc::poll(&raw mut waits, 1, wait_ms) };
        let mut bytes = [0; 256];
        if let Ok(count) = control.read(&mut bytes) {
            orders.extend(&bytes[..count]);
        }
    }
}

impl Run {
    /// Writes the header and begins the first window.
    fn open(&self, label: String) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the result is local.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        let monotonic_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let header = self.machine.header(
            self.vcpus,
            self.fetches().is_some(),
            since_1970.as_nanos() as u64,
            monotonic_ns,
        );
        if let Ok(mut log) = self.log.lock()
            && let Some(log) = log.as_mut()
        {
            log.started = Instant::now();
            log.label = label;
            log.length = Header::BYTES as u64;
            if let Err(error) = log.file.write_all(&header.to_bytes()) {
                eprintln!("homenode plugin: cannot write what was seen of pages: {error}");
            }
            log.header = Some(header);
        }
    }

    /// Closes the window. The next window gets this label, or keeps the current one.
    fn close(&self, label: Option<String>) -> io::Result<()> {
        let Ok(mut log) = self.log.lock() else {
            return Ok(());
        };
        let Some(log) = log.as_mut() else {
            return Ok(());
        };
        let end_ns = log.started.elapsed().as_nanos() as u64;
        self.machine.turn();
        let turned = Instant::now();
        while !self.machine.is_settled() && turned.elapsed() < NOTICE {
            thread::sleep(Duration::from_micros(200));
        }
        self.write(log, end_ns)?;
        if let Some(label) = label {
            log.label = label;
        }
        Ok(())
    }

    /// Writes the window that has just closed.
    fn write(&self, log: &mut Log, end_ns: u64) -> io::Result<()> {
        if let Some(fetches) = self.fetches() {
            log.fetched.resize(fetches.counts.len(), 0);
            for (at, (count, before)) in fetches.counts.iter().zip(&mut log.fetched).enumerate() {
                let count = count.load(Ordering::Relaxed);
                if count != std::mem::replace(before, count) {
                    let marks = if at % 2 == 0 {
                        Marks::FETCHED
                    } else {
                        Marks::KERNEL_FETCHED
                    };
                    self.machine.fetched(at as u64 / 2, marks);
                }
            }
        }
        let window = Window {
            number: log.number,
            begin_ns: log.begin_ns,
            end_ns: end_ns.max(log.begin_ns + 1),
            label: log.label.clone(),
            ..self.machine.take()
        };
        log.number += 1;
        log.begin_ns = window.end_ns;
        log.append(&window.to_bytes(), window.number, self.options.keep_bytes)
    }

    /// Returns the counts of fetches, if the guest's memory was found.
    fn fetches(&self) -> Option<&Fetches> {
        let frames = self.options.config.frames;
        self.fetches.get_or_init(|| Fetches::of(frames)).as_ref()
    }
}

impl Log {
    /// Writes a record, and drops records so old that the log exceeds `keep_bytes`. The latest record is always kept.
    fn append(&mut self, record: &[u8], number: u64, keep_bytes: Option<u64>) -> io::Result<()> {
        self.file.write_all(record)?;
        let at = self.length;
        self.length += record.len() as u64;
        let (Some(keep_bytes), Some(header)) = (keep_bytes, &mut self.header) else {
            return Ok(());
        };
        self.records.push_back(Kept { at, number });
        while self.records.len() > 1 && self.length - self.records[0].at > keep_bytes {
            self.records.pop_front();
        }
        let (before, kept) = (header.kept, self.records[0]);
        if kept == before {
            return Ok(());
        }
        header.kept = kept;
        self.file.write_all_at(&header.to_bytes(), 0)?;
        give_up(&self.file, before.at, kept.at)
    }
}

const PAGE_BYTES: u64 = 4096;

/// Releases the whole pages in this part of the file to the system. Keeps the first page, which has the header.
fn give_up(file: &File, from: u64, to: u64) -> io::Result<()> {
    let begin = (from / PAGE_BYTES * PAGE_BYTES).max(PAGE_BYTES);
    let end = to / PAGE_BYTES * PAGE_BYTES;
    if begin >= end {
        return Ok(());
    }
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (begin, length) = (begin.cast_signed(), (end - begin).cast_signed());
    // SAFETY: the caller's file, and numbers.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, begin, length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Fetches {
    /// Finds the guest's memory: the only mapped memfd of at least this size.
    fn of(frames: u64) -> Option<Fetches> {
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let mut found = maps.lines().filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (begin, end) = range.split_once('-')?;
            let begin = usize::from_str_radix(begin, 16).ok()?;
            let end = usize::from_str_radix(end, 16).ok()?;
            (rest.contains("/memfd:") && (end - begin) as u64 >= frames << 12).then_some(begin..end)
        });
        let memory = found.next().filter(|_| found.next().is_none())?;
        let counts = (0..frames * 2).map(|_| AtomicU64::new(0)).collect();
        Some(Fetches { memory, counts })
    }

    /// Returns the count for the frame at `place`, where QEMU's memory holds an instruction of the guest.
    fn count(&self, place: *mut c_void, address: u64) -> Option<&AtomicU64> {
        let offset = place
            .addr()
            .checked_sub(self.memory.start)
            .filter(|_| place.addr() < self.memory.end)?;
        self.counts.get((offset >> 12) * 2 + (address >> 63) as usize)
    }
}

pub(crate) extern "C" fn vcpu_begins(_: Id, at: c_uint) {
    if let Some(run) = RUN.get() {
        CPUS.begin(at, || run.machine.cpu());
    }
}

/// Called before observation is requested, when a block is translated or a vCPU wakes.
pub(crate) extern "C" fn translated_before(id: Id, _: *mut Tb) {
    begin_if_wanted(id);
}

pub(crate) extern "C" fn resumed_before(id: Id, _: c_uint) {
    begin_if_wanted(id);
}

fn begin_if_wanted(id: Id) {
    static ASKED: AtomicBool = AtomicBool::new(false);
    if RUN.get().is_some_and(|run| run.wanted.load(Ordering::Acquire)) && !ASKED.swap(true, Ordering::Relaxed)
    {
        // SAFETY: this is a vCPU's thread, as QEMU requires; it calls back when no vCPU runs and all blocks are discarded.
        unsafe { qemu::qemu_plugin_reset(id, wanted) };
    }
}

extern "C" fn wanted(id: Id) {
    // SAFETY: the functions have the types that the interface declares and live as long as the process.
    unsafe {
        qemu::qemu_plugin_register_vcpu_init_cb(id, vcpu_begins);
        qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
        qemu::qemu_plugin_register_atexit_cb(id, ended, ptr::null_mut());
    }
    if let Some(run) = RUN.get() {
        run.begun.store(true, Ordering::Release);
    }
}

/// What an instruction changes of the address translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Pages,
    Space,
    All,
}

/// Finds out from its bytes whether an instruction changes translations: INVLPG, INVPCID, writes of CR0, CR3 and CR4, LMSW,
/// RSM and virtual-machine instructions.
fn change(bytes: &[u8]) -> Option<Change> {
    let prefix = |byte: &u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let begin = bytes.iter().position(|byte| !prefix(byte))?;
    match *bytes.get(begin..)? {
        [0x0f, 0x22, modrm, ..] => match modrm >> 3 & 7 {
            0 => Some(Change::Pages),
            3 => Some(Change::Space),
            4 => Some(Change::All),
            _ => None,
        },
        [0x0f, 0x01, modrm, ..] => match (modrm >> 6, modrm >> 3 & 7) {
            (3, 7) if modrm == 0xf8 || modrm == 0xf9 => None, // SWAPGS, RDTSCP
            (3, 3) | (3, 7) => Some(Change::All),             // SVM's
            (3, 0) if matches!(modrm, 0xc2 | 0xc3) => Some(Change::All), // VMX's
            (3, 6) | (0..=2, 6 | 7) => Some(Change::Pages),
            _ => None,
        },
        [0x0f, 0x38, 0x80..=0x82, ..] | [0x0f, 0xaa, ..] => Some(Change::All),
        _ => None,
    }
}

/// Returns the bytes of an instruction.
fn bytes_of(insn: *const Insn, room: &mut [u8; 16]) -> &[u8] {
    // SAFETY: the instruction is alive while its block is translated. Until QEMU 9.0 the function returns a pointer to the
    // bytes and ignores further arguments; from 9.1 on it copies them and returns their number: no pointer is that small.
    unsafe {
        let size = qemu::qemu_plugin_insn_size(insn).min(room.len());
        let given = qemu::qemu_plugin_insn_data(insn, room.as_mut_ptr().cast(), size);
        if given.addr() > room.len() {
            ptr::copy_nonoverlapping(given.cast::<u8>(), room.as_mut_ptr(), size);
        }
        &room[..size]
    }
}

/// Type of `qemu_plugin_register_vcpu_tb_exec_inline`, which version 2 of the interface no longer has.
type RegisterInline = unsafe extern "C" fn(*mut Tb, c_uint, *mut c_void, u64);
const ADD_U64: c_uint = 0;

fn register_inline() -> Option<RegisterInline> {
    static FOUND: OnceLock<Option<RegisterInline>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the name ends with a zero, and if there is such a function it has this type.
        unsafe {
            let found = libc::dlsym(
                libc::RTLD_DEFAULT,
                c"qemu_plugin_register_vcpu_tb_exec_inline".as_ptr(),
            );
            (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, RegisterInline>(found))
        }
    })
}

pub(crate) extern "C" fn translated(_: Id, tb: *mut Tb) {
    let Some(run) = RUN.get() else {
        return;
    };
    // SAFETY: the block and its instructions are alive during the call; functions and counts as long as the process.
    unsafe {
        let instructions = qemu::qemu_plugin_tb_n_insns(tb);
        let mut last = None;
        for at in 0..instructions {
            let insn = qemu::qemu_plugin_tb_get_insn(tb, at);
            let (none, rw) = (ptr::null_mut(), qemu::MEM_RW);
            qemu::qemu_plugin_register_vcpu_mem_cb(insn, accesses, qemu::NO_REGS, rw, none);
            if let Some(change) = change(bytes_of(insn, &mut [0; 16])) {
                let what = ptr::without_provenance_mut(change as usize);
                qemu::qemu_plugin_register_vcpu_insn_exec_cb(insn, changes, qemu::NO_REGS, what);
            }
            let count = run.fetches().and_then(|fetches| {
                let (place, address) = (
                    qemu::qemu_plugin_insn_haddr(insn),
                    qemu::qemu_plugin_insn_vaddr(insn),
                );
                fetches.count(place, address)
            });
            if let Some(count) = count.filter(|count| last != Some(count.as_ptr())) {
                last = Some(count.as_ptr());
                match register_inline() {
                    Some(register) => register(tb, ADD_U64, count.as_ptr().cast(), 1),
                    None => {
                        qemu::qemu_plugin_register_vcpu_tb_exec_cb(
                            tb,
                            fetches,
                            qemu::NO_REGS,
                            count.as_ptr().cast(),
                        );
                    }
                }
            }
        }
    }
}

extern "C" fn fetches(_: c_uint, count: *mut c_void) {
    // SAFETY: a count that lives as long as the process.
    let count = unsafe { AtomicU64::from_ptr(count.cast()) };
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

extern "C" fn changes(at: c_uint, what: *mut c_void) {
    if let Some(cpu) = CPUS.get(at) {
        match what.addr() {
            what if what == Change::Pages as usize => cpu.translations_changed(),
            what if what == Change::Space as usize => cpu.space_changed(),
            _ => cpu.all_changed(),
        }
    }
}

extern "C" fn accesses(at: c_uint, info: MemInfo, address: u64, _: *mut c_void) {
    let (Some(run), Some(cpu)) = (RUN.get(), CPUS.get(at)) else {
        return;
    };
    let access = direction(info);
    cpu.access(&run.machine, address, access, || frame(info, address));
    // No access is larger than 64 bytes. An access that ends in the next page uses that page too.
    if address & 0xfff > 0x1000 - 64 {
        // SAFETY: only decodes the number.
        let last = address + (1 << unsafe { qemu::qemu_plugin_mem_size_shift(info) }) - 1;
        if last >> 12 != address >> 12 {
            cpu.access(&run.machine, last, access, || frame(info, last));
        }
    }
}

fn frame(info: MemInfo, address: u64) -> Option<u64> {
    qemu::machine_address(info, address).map(|address| address >> 12)
}

/// Returns whether an access reads or writes. Asks QEMU only once for each description.
#[inline(always)]
fn direction(info: MemInfo) -> Access {
    match KINDS.get(info as usize).map(|kind| kind.load(Ordering::Relaxed)) {
        Some(READS) => Access::Read,
        Some(WRITES) => Access::Write,
        _ => ask_direction(info),
    }
}

#[cold]
fn ask_direction(info: MemInfo) -> Access {
    // SAFETY: only decodes the number.
    let is_store = unsafe { qemu::qemu_plugin_mem_is_store(info) };
    if let Some(kind) = KINDS.get(info as usize) {
        kind.store(if is_store { WRITES } else { READS }, Ordering::Relaxed);
    }
    if is_store { Access::Write } else { Access::Read }
}

pub(crate) extern "C" fn ended(_: Id, _: *mut c_void) {
    let Some(run) = RUN.get() else {
        return;
    };
    // A panic must not reach QEMU.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let Some(mut log) = run.log.lock().ok().and_then(|mut log| log.take()) else {
            return;
        };
        // QEMU has stopped all vCPUs, so this thread owns their state.
        CPUS.all().for_each(|cpu| cpu.end(&run.machine));
        let end_ns = log.started.elapsed().as_nanos() as u64;
        run.machine.turn();
        let written = run
            .write(&mut log, end_ns)
            .and_then(|()| log.file.write_all(&page_log::end(log.number, log.begin_ns)));
        if let Err(error) = written {
            eprintln!("homenode plugin: cannot write what was seen of pages: {error}");
        }
    }));
}

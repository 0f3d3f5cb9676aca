//! A QEMU plugin that passes emulated memory accesses to `homenode-meter`.
//!
//! `homenode profile` starts QEMU with this plugin. To load it by hand:
//!
//! ```text
//! qemu-x86_64 -plugin libhomenode_plugin.so,log=FILE,private-bytes=262144,line-bytes=64,rate-min=0.01 PROGRAM
//! ```
//!
//! This also works for `qemu-system-x86_64`: cache lines are then lines of physical memory, and device registers are ignored.
//! The same file supports QEMU 7.2 and all later versions with plugins. It calls only functions that all of them have (module
//! `qemu`). They differ in one number, which is chosen when the file is loaded (`choose_version`).
//!
//! With `pmu=FILE` instead of `log=FILE` the plugin is a PMU for the emulated machine (module `pmu`). With `pages=FILE` it
//! logs the pages that the machine uses, like PML and PRL (module `pages`).
//!
//! # State
//!
//! QEMU runs each vCPU in a thread of its own, or all vCPUs in one thread, and passes the vCPU's number to every callback. A
//! vCPU's state is indexed by that number and used only by its thread, so an access takes no lock.

#![allow(unsafe_code)] // a C interface; each use says why it is sound
#![allow(clippy::print_stderr)] // QEMU's users read complaints there

mod complaint;
mod options;
mod pages;
mod per_vcpu;
mod pmu;
mod qemu;

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use homenode_meter::profile::{Config, Profile, Vcpu};
use homenode_tracking::filter::Use;

use crate::complaint::Complaint;
use crate::options::{Options, What};
use crate::per_vcpu::PerVcpu;
use crate::qemu::{Id, Info, MemInfo, Tb};

/// Version of the plugin interface. QEMU checks it before it calls the plugin.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static mut qemu_plugin_version: c_int = 1;

/// QEMU up to 8.2 accepts only version 1, QEMU from 9.0 on only 2 or later. A function introduced with version 2 reveals which
/// one QEMU accepts.
extern "C" fn choose_version() {
    // SAFETY: the name ends with a zero; the loader runs this once, before any code can read the number.
    unsafe {
        if !libc::dlsym(libc::RTLD_DEFAULT, c"qemu_plugin_scoreboard_new".as_ptr()).is_null() {
            qemu_plugin_version = 2;
        }
    }
}

/// The loader calls the functions in this section once it has loaded the file.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = choose_version;

static VCPUS: PerVcpu<Vcpu> = PerVcpu::new();
static RUN: OnceLock<Run> = OnceLock::new();
/// Whether accesses are counted. With `begin=announced` counting starts only when the program announces it.
static COUNTING: AtomicBool = AtomicBool::new(true);

/// What is measured, and the output file.
struct Run {
    profile: Profile,
    log: PathBuf,
    /// Id of the process in which QEMU started. Processes that the program forks have a copy of this struct.
    process: u32,
    forks: AtomicU64,
    execs: AtomicU64,
}

/// QEMU's entry point: returns 0 if the plugin can work.
///
/// # Safety
/// QEMU calls this function once, with `argc` strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: Id,
    info: *const Info,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    // SAFETY: QEMU's description is alive during the call.
    let system = unsafe { (*info).system_emulation };
    // SAFETY: by this function's contract.
    let options = match unsafe { Options::of(argc, argv) } {
        Ok(options) => options,
        Err(complaint) => {
            eprintln!("homenode plugin: {complaint}");
            return 1;
        }
    };
    // SAFETY: as above.
    let (vcpus, version) = unsafe { ((*info).max_vcpus, (*info).version_cur) };
    let begun = match options.what {
        What::Pmu(_) | What::Pages(_) if !system => {
            Err("a PMU or pages are modelled for a machine, and this QEMU runs a program".into())
        }
        What::Pmu(pmu) => pmu::begin(&pmu, options.config, version).map(|()| {
            // SAFETY: the functions have the types that the interface declares and live as long as the process.
            unsafe {
                qemu::qemu_plugin_register_vcpu_init_cb(id, pmu::vcpu_begins);
                qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, pmu::translated_before);
            }
        }),
        What::Pages(pages) => pages::begin(pages, vcpus.max(1).unsigned_abs()).map(|()| {
            // SAFETY: as above.
            unsafe {
                qemu::qemu_plugin_register_vcpu_init_cb(id, pages::vcpu_begins);
                qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, pages::translated_before);
                qemu::qemu_plugin_register_vcpu_resume_cb(id, pages::resumed_before);
            }
        }),
        What::Profile(log) => begin(options.config, &log, system, options.announced).map(|()| {
            let translated = if system {
                machine_translated
            } else {
                program_translated
            };
            // SAFETY: as above.
            unsafe {
                qemu::qemu_plugin_register_vcpu_init_cb(id, vcpu_begins);
                qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
                qemu::qemu_plugin_register_vcpu_syscall_cb(id, system_call);
                qemu::qemu_plugin_register_atexit_cb(id, ended, ptr::null_mut());
            }
        }),
    };
    if let Err(complaint) = begun {
        eprintln!("homenode plugin: {complaint}");
        return 1;
    }
    0
}

fn begin(mut config: Config, log: &Path, system: bool, announced: bool) -> Result<(), Complaint> {
    COUNTING.store(!announced, Ordering::Relaxed);
    config.read = if system { machine_memory } else { program_memory };
    let run = Run {
        profile: Profile::new(config),
        log: log.to_owned(),
        process: std::process::id(),
        forks: AtomicU64::new(0),
        execs: AtomicU64::new(0),
    };
    RUN.set(run).map_err(|_| "loaded twice; once is enough".into())
}

extern "C" fn vcpu_begins(_: Id, at: c_uint) {
    if let Some(run) = RUN.get() {
        VCPUS.begin(at, || Some(run.profile.vcpu()));
    }
}

extern "C" fn program_translated(_: Id, tb: *mut Tb) {
    translated(tb, block_begins, program_accesses);
}

extern "C" fn machine_translated(_: Id, tb: *mut Tb) {
    translated(tb, block_begins, machine_accesses);
}

fn translated(tb: *mut Tb, begins: qemu::ExecCallback, accesses: qemu::MemCallback) {
    // SAFETY: the block and its instructions are alive during the call; the functions as long as the process.
    unsafe {
        let instructions = qemu::qemu_plugin_tb_n_insns(tb);
        let count = ptr::without_provenance_mut(instructions);
        qemu::qemu_plugin_register_vcpu_tb_exec_cb(tb, begins, qemu::NO_REGS, count);
        for at in 0..instructions {
            let insn = qemu::qemu_plugin_tb_get_insn(tb, at);
            qemu::qemu_plugin_register_vcpu_mem_cb(
                insn,
                accesses,
                qemu::NO_REGS,
                qemu::MEM_RW,
                // The number of instructions that follow this one in the block.
                ptr::without_provenance_mut(instructions - 1 - at),
            );
        }
    }
}

extern "C" fn block_begins(at: c_uint, instructions: *mut c_void) {
    if COUNTING.load(Ordering::Relaxed)
        && let Some(vcpu) = VCPUS.get(at)
    {
        vcpu.instructions(instructions.addr() as u64);
    }
}

extern "C" fn program_accesses(at: c_uint, info: MemInfo, address: u64, left: *mut c_void) {
    access(at, info, address, left);
}

extern "C" fn machine_accesses(at: c_uint, info: MemInfo, address: u64, left: *mut c_void) {
    if let Some(address) = qemu::machine_address(info, address) {
        access(at, info, address, left);
    }
}

#[inline]
fn access(at: c_uint, info: MemInfo, address: u64, left: *mut c_void) {
    if !COUNTING.load(Ordering::Relaxed) {
        return;
    }
    let (Some(run), Some(vcpu)) = (RUN.get(), VCPUS.get(at)) else {
        return;
    };
    let (wanted, left) = (wanted(info), left.addr() as u64);
    vcpu.access(&run.profile, address, wanted, left);
    // An access that extends into the next line uses that line too. No access is larger than 64 bytes.
    if address % 64 > 32 {
        // SAFETY: only decodes the number.
        let bytes = 1 << unsafe { qemu::qemu_plugin_mem_size_shift(info) };
        if address % 64 + bytes > 64 {
            vcpu.touch(&run.profile, address + bytes - 1, wanted, left);
        }
    }
}

#[inline]
fn wanted(info: MemInfo) -> Use {
    // SAFETY: only decodes the number.
    match unsafe { qemu::qemu_plugin_mem_is_store(info) } {
        true => Use::Write,
        false => Use::Read,
    }
}

/// Number of reads that the kernel checked. All of them found memory; after a read that did not, this is [`ELSEWHERE`].
static CHECKED: AtomicU64 = AtomicU64::new(0);
/// After this many checked reads the program's memory is assumed to be at its own addresses in this process.
const CHECKS: u64 = 256;
const ELSEWHERE: u64 = u64::MAX;

/// Returns the 64 bytes at an address that the emulated program has just used. The program's memory is part of this process,
/// at the same addresses unless QEMU had to move it. So the first reads go through the kernel, which reports unmapped memory.
fn program_memory(address: u64) -> Option<[u64; 8]> {
    match CHECKED.load(Ordering::Relaxed) {
        ELSEWHERE => None,
        CHECKS.. => {
            let words = ptr::with_exposed_provenance::<u64>(usize::try_from(address).ok()?);
            // SAFETY: the line was used by the instruction of this callback, so it is mapped and readable; another thread of
            // the program may write it meanwhile, which a volatile read of whole words tolerates.
            Some(std::array::from_fn(|at| unsafe { words.add(at).read_volatile() }))
        }
        _ => {
            let found = checked_memory(address);
            let count =
                |count| (count != ELSEWHERE).then_some(if found.is_some() { count + 1 } else { ELSEWHERE });
            // Fails only if another thread has already stored [`ELSEWHERE`].
            let _ = CHECKED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
            found
        }
    }
}

/// Like [`program_memory`], but reads through the kernel, which checks the address.
fn checked_memory(address: u64) -> Option<[u64; 8]> {
    let mut words = [0_u64; 8];
    let bytes = size_of_val(&words);
    let into = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: bytes,
    };
    let from = libc::iovec {
        iov_base: ptr::without_provenance_mut(usize::try_from(address).ok()?),
        iov_len: bytes,
    };
    // SAFETY: one destination of sufficient length; the kernel checks the source.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &into, 1, &from, 1, 0) };
    usize::try_from(read)
        .is_ok_and(|read| read == bytes)
        .then_some(words)
}

/// Returns `None`: QEMU does not reveal where a machine's physical memory is in this process.
fn machine_memory(_: u64) -> Option<[u64; 8]> {
    None
}

/// Not the number of any system call. A program calls it when its set-up is done, and counting starts over.
const BEGIN: i64 = 0x686f_6d65;

/// x86-64's numbers of `fork` and `vfork`; QEMU has no `clone3`.
const FORKS: [i64; 2] = [57, 58];
const CLONE: i64 = 56;
/// With this flag, a clone is a thread.
const CLONE_VM: u64 = 0x100;
/// `execve` and `execveat`.
const EXECS: [i64; 2] = [59, 322];

#[allow(clippy::too_many_arguments)] // QEMU's
extern "C" fn system_call(
    _: Id,
    at: c_uint,
    number: i64,
    first: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
    _: u64,
) {
    let Some(run) = RUN.get() else {
        return;
    };
    if FORKS.contains(&number) || (number == CLONE && first & CLONE_VM == 0) {
        run.forks.fetch_add(1, Ordering::Relaxed);
    }
    if number == BEGIN
        && let Some(vcpu) = VCPUS.get(at)
    {
        run.profile.restart(vcpu);
        COUNTING.store(true, Ordering::Relaxed);
    }
    if EXECS.contains(&number) {
        run.execs.fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" fn ended(_: Id, _: *mut c_void) {
    let Some(run) = RUN.get().filter(|run| run.process == std::process::id()) else {
        return;
    };
    // QEMU has stopped all vCPUs, so this thread owns their state.
    let written = catch_unwind(AssertUnwindSafe(|| {
        VCPUS.all().for_each(|vcpu| run.profile.hand_on(vcpu));
        let mut log = run.profile.log(VCPUS.all().map(|vcpu| &*vcpu));
        log.forks = run.forks.load(Ordering::Relaxed);
        log.execs = run.execs.load(Ordering::Relaxed);
        log.write(&run.log)
    }));
    if let Ok(Err(error)) = written {
        eprintln!("homenode plugin: cannot write what was measured: {error}");
    }
}

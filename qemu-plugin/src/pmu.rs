//! The plugin as a PMU: models the last-level caches of the emulated machine, and counts into a file that the machine maps.
//!
//! The machine maps the file as a device's memory:
//!
//! ```text
//! qemu-system-x86_64 -plugin libhomenode_plugin.so,pmu=FILE,cpus=4,nodes=4,node-mib=1024,frames=2097152,llc-bytes=8388608 \
//!     -object memory-backend-file,id=pmu,share=on,mem-path=FILE,size=SIZE -device ivshmem-plain,memdev=pmu ...
//! ```
//!
//! The plugin creates the file before QEMU opens it; its size is the smallest sufficient power of two. A machine has one LLC
//! per node, or N LLCs with `llcs=N`. CPUs are assigned to LLCs in blocks.
//!
//! Until software in the machine requests counts, nothing is instrumented, and the machine runs as fast as without the plugin:
//! an instrumented machine takes minutes to boot. When counts are requested, QEMU discards its translations and translates
//! everything again, and does so once more when the request ends.

use std::ffi::{c_int, c_uint, c_void};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use homenode_formats::pmu_region::{Layout, Page, SAMPLES, TAGS_MAX};
use homenode_meter::pmu::{self, Cpu, Pmu};
use homenode_meter::profile::Config;
use homenode_tracking::cache::{Replacement, Shape};

use crate::complaint::Complaint;
use crate::options::PmuOptions;
use crate::per_vcpu::PerVcpu;
use crate::qemu::{self, Id, MemInfo, Tb};
use crate::{translated, wanted};

static CPUS: PerVcpu<Cpu> = PerVcpu::new();
static RUN: OnceLock<Run> = OnceLock::new();

struct Run {
    pmu: Pmu<'static>,
    page: Page<'static>,
    begun: AtomicBool,
    config: Config,
    cpus: u64,
    llcs: u64,
    node_bytes: u64,
    /// Whether QEMU adds the start of a node's memory to an address twice.
    is_doubled: bool,
}

/// The interface version of QEMU 7.2, which adds the start of a node's memory to an address twice.
const DOUBLED: c_int = 1;

/// Creates the file and the empty caches.
///
/// # Errors
/// The file cannot be created or mapped, or the plugin is loaded twice.
pub(crate) fn begin(options: &PmuOptions, config: Config, version: c_int) -> Result<(), Complaint> {
    let layout = Layout {
        cpus: options.cpus,
        tags: TAGS_MAX,
        frames: options.frames,
        line_bytes: config.line_bytes,
        samples: SAMPLES,
    };
    let page = map(&options.file, layout).map_err(|error| format!("{}: {error}", options.file.display()))?;
    page.begin();
    let lines = (options.llc_bytes / config.line_bytes) as usize;
    let shape = Shape::of_lines(lines, options.llc_ways as usize, Replacement::default());
    let llcs = options.llcs();
    let run = Run {
        pmu: Pmu::new(llcs as usize, shape, page),
        page,
        begun: AtomicBool::new(false),
        config,
        cpus: options.cpus,
        llcs,
        node_bytes: options.node_bytes,
        is_doubled: version == DOUBLED && options.nodes > 1,
    };
    RUN.set(run).map_err(|_| "loaded twice; once is enough".into())
}

/// Creates the file and maps it for as long as the process lives.
fn map(path: &Path, layout: Layout) -> io::Result<Page<'static>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    let bytes = layout.bytes().next_power_of_two();
    file.set_len(bytes)?;
    // SAFETY: a new mapping of a file of that length; nothing else refers to it.
    let start = unsafe {
        let (access, share) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        libc::mmap(
            ptr::null_mut(),
            bytes as usize,
            access,
            share,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let tags_at = layout.tags_at() as usize;
    // SAFETY: both parts are inside the mapping, which is never unmapped and page-aligned; they are atomic because the
    // emulated machine writes at the same time.
    unsafe {
        let words = slice::from_raw_parts(start.cast::<AtomicU64>(), tags_at / 8);
        let tags = slice::from_raw_parts(start.byte_add(tags_at).cast::<AtomicU8>(), layout.frames as usize);
        Ok(Page::new(layout, words, tags))
    }
}

pub(crate) extern "C" fn vcpu_begins(_: Id, at: c_uint) {
    // CPUs that the page has no room for get no state.
    let number = u64::from(at);
    let Some(run) = RUN.get().filter(|run| number < run.cpus) else {
        return;
    };
    CPUS.begin(at, || {
        let llc = number * run.llcs / run.cpus;
        let lines = (run.config.private_bytes / run.config.line_bytes) as usize;
        Some(run.pmu.cpu(number, llc as usize, lines, run.config.private_ways))
    });
}

/// Called when a block is translated while no counts are requested.
pub(crate) extern "C" fn translated_before(id: Id, _: *mut Tb) {
    let Some(run) = RUN.get() else {
        return;
    };
    if run.page.is_wanted() && !run.begun.swap(true, Ordering::Relaxed) {
        // SAFETY: this is a vCPU's thread, as QEMU requires; it calls back when no vCPU runs and all blocks are discarded.
        unsafe { qemu::qemu_plugin_reset(id, counts_wanted) };
    }
}

extern "C" fn counts_wanted(id: Id) {
    // SAFETY: the function has the type that the interface declares and lives as long as the process.
    unsafe { qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, machine_translated) };
}

/// Called when a block is translated while counts are requested.
extern "C" fn machine_translated(id: Id, tb: *mut Tb) {
    let is_wanted = RUN.get().is_some_and(|run| run.page.is_wanted());
    if !is_wanted
        && RUN
            .get()
            .is_some_and(|run| run.begun.swap(false, Ordering::Relaxed))
    {
        // SAFETY: as in `translated_before`.
        unsafe { qemu::qemu_plugin_reset(id, counts_not_wanted) };
    }
    translated(tb, block_begins, accesses);
}

extern "C" fn counts_not_wanted(id: Id) {
    // SAFETY: as in `counts_wanted`.
    unsafe { qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, translated_before) };
}

extern "C" fn block_begins(at: c_uint, instructions: *mut c_void) {
    if let (Some(run), Some(cpu)) = (RUN.get(), CPUS.get(at)) {
        run.pmu.instructions(cpu, instructions.addr() as u64);
    }
}

extern "C" fn accesses(at: c_uint, info: MemInfo, address: u64, _: *mut c_void) {
    let (Some(run), Some(cpu)) = (RUN.get(), CPUS.get(at)) else {
        return;
    };
    if let Some(said) = qemu::machine_address(info, address) {
        let address = match run.is_doubled {
            true => pmu::undoubled(said, run.node_bytes),
            false => said,
        };
        run.pmu.access(cpu, address, wanted(info));
    }
}

//! IBS, the memory sampling of AMD's processors: which nodes use which pages of VMs ([Policies, section 3.4] samples with it).
//!
//! # Approach
//! 1. While a VM needs samples, each CPU has an event of the PMU `ibs_op` (`perf_event_open(2)`), which marks one op per period
//!    and writes what became of it into a ring buffer. No VM needs samples unless its memory policy is Carrefour, so usually
//!    nothing is sampled.
//! 2. A look reads the rings where they lie ([`ring`]) and keeps the frames of accesses that reached memory, with the node of the
//!    ring's CPU.
//! 3. A frame is a VM's page if the VM's `pagemap` says so ([`crate::attribution`] reads it in the same way). Samples of other
//!    frames, the host's own memory among them, are ignored.
//!
//! # Cost
//! A sample is an interrupt, and an exit if a guest runs. Before Zen 4 each marked op is one: 2,900 per second on a CPU with 3
//! billion ops, since [`PERIOD_MAX`] is then the only period. From Zen 4 on only ops that missed the L3 are (`l3missonly`): at
//! most 3,100 per second on a core that misses 200 million times (12.8 GB), at [`PERIOD_MIN`]. The period then follows the
//! fullest ring: it doubles if a ring is half full or lost samples, and halves if all are less than an eighth full. A ring holds
//! at most 3,640 samples; the kernel counts those that it drops. A look ends after [`LOOK_MAX`] and continues with the next ring
//! at the next look.
//!
//! # Guests
//! - The event samples host and guests alike: Linux refuses `exclude_host` and `exclude_guest` for IBS (`perf_ibs_init`).
//! - The address is a machine's, not a guest's: [Policies, section 4.3] ran Carrefour inside Xen on what vCPUs access, and Linux
//!   passes `IBS_DC_PHYSADDR` on as a physical address (`perf_ibs_parse_ld_st_data`).
//! - A confidential guest can forbid its host to sample it (`MSR_AMD64_SNP_PREVENT_HOST_IBS`). It then has no samples.
//!
//! **Not verified:** this never ran on an AMD processor, so no address of a guest's access was seen, and the cost is not
//! measured. The tests use records made from the published layout. If a record is not of that layout, sampling ends and says so.
//!
//! # Properties (tests of the same names)
//! - `accesses_to_memory_are_kept_and_all_others_left_out`
//! - `records_that_the_rings_end_cuts_are_read`
//! - `whatever_a_ring_contains_reading_ends`
//! - `lost_samples_are_counted`
//! - `samples_go_to_the_page_that_has_the_frame`
//! - `the_period_stays_within_its_bounds`

pub mod ring;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use homenode_host::PageUse;
use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId, Ns, VmId};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::attribution::{Frames, Samples};
use crate::memory_blocks::MemoryBlocks;
use crate::now;
use crate::numa_maps::Range;
use crate::perf::{self, Attr, Scope};
use crate::processor::{Processor, Vendor};
use crate::read::{self, ReadError};
use crate::task::Process;
use ring::{Access, Drained};

/// Shortest period, in ops, if only misses interrupt: Carrefour's usual period of 0xFFF8, in units of 16 as IBS has them.
pub const PERIOD_MIN: u64 = 0xFFF0;
/// Longest period that every processor with IBS has, in ops.
pub const PERIOD_MAX: u64 = 0xF_FFF0;
/// Longest time for one look at all rings.
pub const LOOK_MAX: Ns = Ns::from_millis(20);
/// Size of a CPU's ring buffer of samples, in bytes.
const RING_BYTES: u64 = 256 << 10;
/// Size of the page before a ring, which has its positions. Machines with IBS have pages of this size.
const HEAD_BYTES: u64 = 4096;
/// Places of `data_head`, `data_tail`, `data_offset` and `data_size` in `perf_event_mmap_page`, in words.
const DATA_HEAD: usize = 128;
const DATA_TAIL: usize = 129;
const DATA_OFFSET: usize = 130;
const DATA_SIZE: usize = 131;
const PERF_SAMPLE_RAW: u64 = 1 << 10;
const IOC_ENABLE: u32 = 0x2400;
const IOC_PERIOD: u32 = 0x4008_2404;
/// Where sysfs describes the PMU, below a root.
const PMU: &str = "sys/bus/event_source/devices/ibs_op";
const SPE: &str = "sys/bus/event_source/devices/arm_spe_0";

/// Why the processor does not sample which node uses a page.
#[derive(Debug, thiserror::Error)]
pub enum NotSampled {
    /// sysfs cannot be read.
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    /// There is no IBS, and nothing that could stand in for it.
    #[error("it is unknown which node uses a page: {0}")]
    NoIbs(&'static str),
    /// The kernel refuses the event.
    #[error("IBS cannot be used: {0}")]
    Refused(String),
}

/// The PMU, as sysfs describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    kind: u32,
    config: u64,
    period_min: u64,
}

impl Device {
    /// Finds the PMU below `root`, and checks that this process may use it.
    ///
    /// # Errors
    /// [`NotSampled`].
    pub fn find(root: &Path) -> Result<Device, NotSampled> {
        let device = Device::read(root)?;
        let device = device.ok_or_else(|| NotSampled::NoIbs(why_not(root)))?;
        // A processor with IBS is an x86, whose CPU 0 cannot be offline.
        match perf::open(&device.attr(PERIOD_MAX), Scope::Cpu(0), None) {
            Ok(_) => Ok(device),
            Err(error) => Err(NotSampled::Refused(
                perf::absence(&error).unwrap_or_else(|| error.to_string()),
            )),
        }
    }

    fn read(root: &Path) -> Result<Option<Device>, ReadError> {
        let dir = root.join(PMU);
        let Some(kind) = read::value_if_there(&dir.join("type"), "the number of a PMU type")? else {
            return Ok(None);
        };
        // Ops rather than cycles, since an op that waits would be marked too often; only misses of the L3 if it can.
        let (mut config, mut period_min) = (0, PERIOD_MAX);
        for (name, shortest) in [("cnt_ctl", PERIOD_MAX), ("l3missonly", PERIOD_MIN)] {
            let path = dir.join("format").join(name);
            if let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? {
                let bit = text
                    .trim()
                    .strip_prefix("config:")
                    .and_then(|bit| bit.parse().ok());
                let bit: u32 = bit
                    .filter(|bit| *bit < 64)
                    .ok_or_else(|| ReadError::malformed(&path, "`config:` and a bit", &text))?;
                config |= 1 << bit;
                period_min = period_min.min(shortest);
            }
        }
        Ok(Some(Device {
            kind,
            config,
            period_min,
        }))
    }

    fn attr(self, period: u64) -> Attr {
        Attr::sampling(self.kind, self.config, period, PERF_SAMPLE_RAW)
    }
}

/// Returns why a host without IBS cannot tell which node uses a page.
///
/// Intel: `intel_guest_get_msrs` takes the host's PEBS events off while a guest runs, and `perf_virt_to_phys` looks an address
/// up in the page tables of the process that runs (Linux commits 9b545c04abd4, fc7ce9c74c3a). ARM: KVM clears the bits of
/// `PMSCR_EL1` that profile a guest (commit efad60e46057).
fn why_not(root: &Path) -> &'static str {
    let vendor = Processor::read(root).unwrap_or_default().vendor;
    match vendor {
        _ if root.join(SPE).exists() => "ARM's memory sampling (SPE) is off while a guest runs",
        Vendor::Intel => {
            "Intel's memory sampling (PEBS) is off while a guest runs, and has no physical addresses of guests"
        }
        Vendor::Amd => "the kernel has no ibs_op in /sys/bus/event_source/devices, as in a VM",
        Vendor::Other => "that needs the memory sampling of an AMD processor (IBS)",
    }
}

/// What a look found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Samples read, accesses to memory or not.
    pub samples: u64,
    /// Samples that there was no room for.
    pub lost: u64,
}

/// Samples which nodes use which pages of VMs.
#[derive(Debug)]
pub struct Ibs {
    device: Device,
    cpus: Vec<(CpuId, NodeId)>,
    samples: Samples,
    /// Empty while no VM needs samples.
    rings: Vec<Ring>,
    /// The ring to begin the next look with.
    first: usize,
    period: u64,
    absence: Option<String>,
    vms: BTreeMap<VmId, Frames>,
}

impl Ibs {
    /// Prepares sampling on all CPUs of a machine, without starting it.
    pub fn new(device: Device, machine: &Machine, blocks: MemoryBlocks) -> Ibs {
        Ibs {
            device,
            cpus: machine.cpus.iter().map(|cpu| (cpu.id, cpu.node)).collect(),
            samples: Samples::new(blocks),
            rings: Vec::new(),
            first: 0,
            period: PERIOD_MAX,
            absence: None,
            vms: BTreeMap::new(),
        }
    }

    /// Returns why sampling ended; `None` if it works, or was not needed yet.
    pub fn absence(&self) -> Option<&str> {
        self.absence.as_deref()
    }

    /// Reads the samples since the last reading, and adapts the period.
    pub fn look(&mut self) -> Looked {
        self.samples.clear();
        let (begin, count) = (now(), self.rings.len());
        let (mut all, mut fullest) = (Drained::default(), 0);
        let mut read = 0;
        while read < count {
            if now().saturating_sub(begin) > LOOK_MAX {
                // Rings that were not read fill up.
                fullest = RING_BYTES;
                break;
            }
            let ring = &self.rings[(self.first + read) % count];
            let (node, samples) = (ring.node, &mut self.samples);
            let mut note = |access: Access| samples.note(access.frame, node, access.is_write);
            let (bytes, drained) = ring.drain(&mut note);
            fullest = fullest.max(bytes);
            all.samples += drained.samples;
            all.lost = all.lost.saturating_add(drained.lost);
            all.malformed += drained.malformed;
            read += 1;
        }
        self.first = if count > 0 { (self.first + read) % count } else { 0 };
        self.samples.settle();
        if all.malformed > 0 {
            self.end("the kernel's records of IBS are not of the published layout");
        } else if count > 0 {
            self.adapt(fullest, all.lost);
        }
        Looked {
            samples: all.samples,
            lost: all.lost,
        }
    }

    fn adapt(&mut self, fullest: u64, lost: u64) {
        let period = next_period(self.period, self.device.period_min, fullest, lost);
        if period == self.period {
            return;
        }
        let set = self.rings.iter().try_for_each(|ring| ring.set_period(period));
        match set {
            Ok(()) => self.period = period,
            Err(error) => self.end(&format!("its period cannot be set: {error}")),
        }
    }

    /// Returns which nodes used which pages of a VM between the last two readings; `None` if the VM's process is gone, or samples
    /// are absent. Starts sampling if this VM is the first. Pages that were not read yet are not returned.
    ///
    /// # Errors
    /// If the VM's frames cannot be read.
    pub fn page_uses(
        &mut self,
        root: &Path,
        at: Ns,
        vm: VmId,
        (process, ranges): (Process, &[Range]),
    ) -> Result<Option<Vec<PageUse>>, ReadError> {
        if self.rings.is_empty() && self.absence.is_none() {
            self.start();
        }
        if self.absence.is_some() {
            return Ok(None);
        }
        if !self
            .vms
            .get(&vm)
            .is_some_and(|known| known.is_of(process, ranges))
        {
            self.vms.insert(vm, Frames::new(process, ranges));
        }
        let frames = self.vms.get_mut(&vm).expect("there, or just put there");
        let found = frames.follow(root, at, u64::MAX, &mut |_, _| ())?;
        Ok(found.map(|()| self.samples.uses(frames)))
    }

    /// Stops following the VMs for which `vms` returns false, and stops sampling if none is left.
    pub fn keep_only(&mut self, vms: impl Fn(VmId) -> bool) {
        self.vms.retain(|vm, _| vms(*vm));
        if self.vms.is_empty() {
            self.restart();
        }
    }

    /// Stops sampling until a VM needs samples. Call this if CPUs went offline or came back, since their events are gone.
    pub fn restart(&mut self) {
        if !self.rings.is_empty() {
            self.rings.clear();
            self.samples.make_room(0);
        }
    }

    /// Opens and enables the events of all CPUs.
    fn start(&mut self) {
        self.period = PERIOD_MAX;
        let attr = self.device.attr(self.period);
        for &(cpu, node) in &self.cpus {
            match Ring::open(&attr, cpu, node) {
                Ok(ring) => self.rings.push(ring),
                // The CPU is offline.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                // Without one CPU's samples, its node would seem to use nothing.
                Err(error) => {
                    let why = perf::absence(&error).unwrap_or_else(|| error.to_string());
                    return self.end(&format!("IBS of CPU {cpu} cannot be used: {why}"));
                }
            }
        }
        if self.rings.is_empty() {
            return self.end("no CPU is online");
        }
        let most = RING_BYTES / ring::SAMPLE_BYTES;
        self.samples.make_room(self.rings.len() * most as usize);
        if let Err(error) = self.rings.iter().try_for_each(Ring::enable) {
            self.end(&format!("IBS cannot be enabled: {error}"));
        }
    }

    /// Ends sampling for good.
    fn end(&mut self, why: &str) {
        self.absence = Some(format!("it is unknown which node uses a page: {why}"));
        self.rings.clear();
        self.samples.make_room(0);
    }
}

/// Returns the period to use after a reading in which the fullest ring had this many bytes.
fn next_period(period: u64, period_min: u64, fullest: u64, lost: u64) -> u64 {
    let next = match fullest {
        _ if lost > 0 => period * 2,
        bytes if bytes > RING_BYTES / 2 => period * 2,
        bytes if bytes < RING_BYTES / 8 => period / 2,
        _ => period,
    };
    // IBS counts in units of 16.
    next.clamp(period_min, PERIOD_MAX) & !0xF
}

/// An event of one CPU, and its ring.
#[derive(Debug)]
struct Ring {
    node: NodeId,
    /// The event; `None` in tests.
    event: Option<File>,
    start: NonNull<AtomicU64>,
}

#[allow(unsafe_code)] // memory that the kernel writes to
// SAFETY: the mapping belongs to this value alone, and is used only through atomics.
unsafe impl Send for Ring {}

#[allow(unsafe_code)] // memory that the kernel writes to, and system calls without wrappers
impl Ring {
    fn open(attr: &Attr, cpu: CpuId, node: NodeId) -> std::io::Result<Ring> {
        let event = perf::open(attr, Scope::Cpu(cpu.0), None)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the event's pages, which this process uses only through the atomics below.
        let start = unsafe {
            let bytes = (HEAD_BYTES + RING_BYTES) as usize;
            mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &event, 0)?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| std::io::Error::other("mapped at 0"))?;
        let ring = Ring {
            node,
            event: Some(event),
            start,
        };
        let head = ring.words(0, HEAD_BYTES);
        let place = [DATA_OFFSET, DATA_SIZE].map(|at| head[at].load(Ordering::Relaxed));
        match place {
            // Kernels before 4.1 do not report the data's position and size.
            [0, 0] | [HEAD_BYTES, RING_BYTES] => Ok(ring),
            other => Err(std::io::Error::other(format!(
                "its ring is at {other:?}, not at {HEAD_BYTES}"
            ))),
        }
    }

    /// Returns words of the mapping. Both arguments are bytes within it, and multiples of 8.
    fn words(&self, from: u64, bytes: u64) -> &[AtomicU64] {
        debug_assert!(from + bytes <= HEAD_BYTES + RING_BYTES);
        // SAFETY: the mapping begins at a page, has HEAD_BYTES + RING_BYTES, and lasts as long as this value.
        unsafe {
            let start = self.start.as_ptr().byte_add(from as usize);
            slice::from_raw_parts(start, (bytes / 8) as usize)
        }
    }

    /// Reads all records and frees their room. Returns how many bytes they had, and what they were.
    fn drain(&self, note: &mut dyn FnMut(Access)) -> (u64, Drained) {
        let positions = self.words(0, HEAD_BYTES);
        let ring = self.words(HEAD_BYTES, RING_BYTES);
        // The kernel writes records before the head, and only we write the tail.
        let head = positions[DATA_HEAD].load(Ordering::Acquire);
        let tail = positions[DATA_TAIL].load(Ordering::Relaxed);
        let drained = ring::drain(ring, tail, head, note);
        positions[DATA_TAIL].store(head, Ordering::Release);
        (head.wrapping_sub(tail), drained)
    }

    fn enable(&self) -> std::io::Result<()> {
        let Some(event) = &self.event else { return Ok(()) };
        // SAFETY: an ioctl of this descriptor that takes no argument.
        match unsafe { libc::ioctl(event.as_raw_fd(), IOC_ENABLE as _, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    fn set_period(&self, period: u64) -> std::io::Result<()> {
        let Some(event) = &self.event else { return Ok(()) };
        // SAFETY: an ioctl that reads a u64, which lives until the call returns.
        match unsafe { libc::ioctl(event.as_raw_fd(), IOC_PERIOD as _, &raw const period) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

impl Drop for Ring {
    #[allow(unsafe_code)] // the end of the mapping
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone, and has this size. If the call fails, it stays mapped, which harms nothing.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), (HEAD_BYTES + RING_BYTES) as usize) };
    }
}

#[cfg(test)]
mod tests;

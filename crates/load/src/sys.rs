//! Makes direct requests to the kernel and the processor: memory with a given page size on a node, pinned threads, time
//! stamps.
//!
//! This is the only module of the crate with `unsafe` code: it maps memory, binds it to a node, and uses some instructions.
#![allow(unsafe_code)] // each use says why it is sound

use std::io;
use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use homenode_units::{CpuId, CpuSet, NodeId};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::{CpuSet as Mask, MembarrierCommand, membarrier};
use rustix::time::{ClockId, clock_gettime};

/// Size of the pages that x86 and most others call huge.
pub const HUGE_BYTES: usize = 2 << 20;
/// Words of 8 bytes in one cache line of 64.
pub const LINE_WORDS: usize = 8;
/// Bytes of a cache line.
pub const LINE_BYTES: usize = 8 * LINE_WORDS;

/// Page size to request from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Base pages only.
    Base,
    /// Huge pages if the kernel has them.
    Huge,
}

/// Zeroed private memory, aligned to a huge page; unmapped when dropped.
#[derive(Debug)]
pub struct Memory {
    mapped: NonNull<u64>,
    mapped_bytes: usize,
    start: NonNull<u64>,
    words: usize,
}

// SAFETY: the mapping is private to this value, and reached only through borrows of it.
unsafe impl Send for Memory {}
// SAFETY: shared borrows give only shared slices.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps at least `bytes`, bound to a node if one is given. Pages are populated on first touch.
    ///
    /// # Errors
    /// No address space, or a node that this process may not use.
    pub fn map(bytes: usize, pages: Pages, node: Option<NodeId>) -> io::Result<Memory> {
        let bytes = bytes.max(LINE_BYTES).next_multiple_of(HUGE_BYTES);
        let mapped_bytes = bytes + HUGE_BYTES;
        // SAFETY: this creates a new anonymous mapping where the kernel chooses; nothing else refers to it.
        let mapped = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        let skip = (mapped as usize).next_multiple_of(HUGE_BYTES) - mapped as usize;
        // SAFETY: the mapping is longer than `bytes` by a huge page, and `skip` is less than one.
        let start = unsafe { mapped.byte_add(skip) };
        let nonnull = |pointer: *mut std::ffi::c_void| {
            NonNull::new(pointer.cast::<u64>()).ok_or(io::ErrorKind::OutOfMemory)
        };
        let memory = Memory {
            mapped: nonnull(mapped)?,
            mapped_bytes,
            start: nonnull(start)?,
            words: bytes / 8,
        };
        let advice = match pages {
            Pages::Base => Advice::LinuxNoHugepage,
            Pages::Huge => Advice::LinuxHugepage,
        };
        // A kernel without huge pages refuses; `huge_share` reports the result later.
        // SAFETY: advice on our own mapping, which changes no contents.
        let _ = unsafe { rustix::mm::madvise(start, bytes, advice) };
        if let Some(node) = node {
            memory.bind(node)?;
        }
        Ok(memory)
    }

    fn bind(&self, node: NodeId) -> io::Result<()> {
        const WORD_BITS: usize = libc::c_ulong::BITS as usize;
        let at = usize::from(node.0);
        let mut mask = vec![0 as libc::c_ulong; at / WORD_BITS + 1];
        mask[at / WORD_BITS] |= 1 << (at % WORD_BITS);
        // The kernel reads one bit less than the stated number.
        let bits = mask.len() * WORD_BITS + 1;
        // SAFETY: this sets the policy of our own mapping; the mask is alive and has the stated length.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.words * 8,
                libc::MPOL_BIND,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the memory as words.
    pub fn words(&self) -> &[u64] {
        // SAFETY: the words are mapped, aligned, and zeroed by the kernel, as long as `self` is borrowed.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    /// Returns the address of the first word.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Returns the memory as mutable words.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }

    /// Returns the share of the memory now in huge pages, if the kernel reports it.
    pub fn huge_share(&self) -> Option<f64> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let address = self.start.as_ptr() as usize;
        let (mut inside, mut huge_kib, mut resident_kib) = (false, 0.0, 0.0);
        for line in maps.lines() {
            let mut fields = line.split_ascii_whitespace();
            let first = fields.next().unwrap_or_default();
            if let Some((from, to)) = first.split_once('-') {
                let parse = |text| usize::from_str_radix(text, 16).ok();
                if let (Some(from), Some(to)) = (parse(from), parse(to)) {
                    inside = from < address + self.words * 8 && address < to;
                }
            } else if inside {
                let kib: f64 = fields.next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
                match first {
                    "AnonHugePages:" => huge_kib += kib,
                    "Rss:" => resident_kib += kib,
                    _ => {}
                }
            }
        }
        (resident_kib > 0.0).then(|| (huge_kib / resident_kib).min(1.0))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this unmaps our own mapping as a whole, and nothing can refer to it any more.
        let _ = unsafe { rustix::mm::munmap(self.mapped.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Pins the calling thread to these CPUs.
///
/// # Errors
/// CPUs that are offline or not allowed.
pub fn pin(cpus: &CpuSet) -> io::Result<()> {
    let mut mask = Mask::new();
    for cpu in cpus
        .iter()
        .map(|cpu| cpu.0 as usize)
        .filter(|cpu| *cpu < Mask::MAX_CPU)
    {
        mask.set(cpu);
    }
    Ok(rustix::thread::sched_setaffinity(None, &mask)?)
}

/// Pins the calling thread to one CPU.
///
/// # Errors
/// A CPU that is offline or not allowed.
pub fn pin_to(cpu: CpuId) -> io::Result<()> {
    pin(&[cpu].into_iter().collect())
}

/// Returns the calling thread's CPU time: unlike the wall clock it stops while other threads have its CPU.
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

/// Returns the processor's time-stamp counter, if readable.
pub fn time_stamp() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has the instruction, and Linux allows it.
        Some(unsafe { std::arch::x86_64::_rdtsc() })
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Returns true if the last-level cache holds everything that inner caches hold; `None` if the processor does not say.
pub fn llc_inclusive() -> Option<bool> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid_count;
        #[allow(unused_unsafe)] // safe in some compilers
        // SAFETY: every x86-64 processor has the instruction.
        let leaf = |leaf: u32, sub: u32| unsafe { __cpuid_count(leaf, sub) };
        // The leaves by which Intel's and AMD's processors describe caches; both have the same format.
        let caches = [4_u32, 0x8000_001d].into_iter().filter(|number| {
            let highest = leaf(number & 0x8000_0000, 0).eax;
            highest >= *number
        });
        let mut last = None;
        for number in caches {
            for sub in 0..8 {
                let cache = leaf(number, sub);
                let level = cache.eax >> 5 & 7;
                if cache.eax & 31 == 0 {
                    break;
                }
                if level >= 3 {
                    last = Some(cache.edx & 2 != 0);
                }
            }
            if last.is_some() {
                break;
            }
        }
        last
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Runs exactly two instructions this many times, on x86-64; returns false elsewhere.
pub fn two_instructions(times: u64) -> bool {
    #[cfg(target_arch = "x86_64")]
    if times > 0 {
        // SAFETY: it counts a register down to 0, and touches nothing else.
        unsafe {
            std::arch::asm!("2:", "dec {0}", "jnz 2b", inout(reg) times => _, options(nomem, nostack));
        }
    }
    cfg!(target_arch = "x86_64")
}

/// Returns the CPU time of a page fault on a page that is in memory: the kernel only has to enter it in the page table, as for a
/// page that NUMA balancing made inaccessible.
///
/// # Errors
/// No memory, or a kernel that refuses.
pub fn present_fault_ns(pages: usize) -> io::Result<f64> {
    let page = page_bytes();
    let bytes = pages.max(1) * page;
    let file = rustix::fs::memfd_create("faults", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes as u64)?;
    // SAFETY: this creates a new mapping of our own file where the kernel chooses; nothing else refers to it.
    let mapped = unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0)?
    };
    let touch = || {
        for at in (0..bytes).step_by(page) {
            // SAFETY: the byte is in our own mapping, which has `bytes` bytes and is not shared with another thread.
            unsafe { mapped.cast::<u8>().add(at).write_volatile(1) };
        }
    };
    touch();
    // SAFETY: advice on our own mapping; the file keeps its contents.
    let dropped = unsafe { rustix::mm::madvise(mapped, bytes, Advice::LinuxDontNeed) };
    let begin = cpu_time();
    touch();
    let took = cpu_time() - begin;
    // SAFETY: this unmaps our own mapping as a whole, and nothing refers to it any more.
    unsafe { rustix::mm::munmap(mapped, bytes)? };
    dropped?;
    Ok(took.as_nanos() as f64 / pages.max(1) as f64)
}

/// Returns the bytes of a base page.
pub fn page_bytes() -> usize {
    // SAFETY: only queries a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Prepares [`interrupt_others`]; returns `false` if the kernel does not support it.
pub fn register_interrupts() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Interrupts every other CPU that runs a thread of this process, and waits for their answers. Returns `false` on failure.
pub fn interrupt_others() -> bool {
    membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_aligned_and_as_large_as_asked_for() {
        for pages in [Pages::Base, Pages::Huge] {
            let mut memory = Memory::map(3 << 20, pages, None).unwrap();
            assert!(memory.words().len() * 8 >= 3 << 20);
            assert_eq!(memory.words().as_ptr() as usize % HUGE_BYTES, 0);
            assert!(memory.words().iter().all(|word| *word == 0));
            memory.words_mut().fill(7);
            assert!(memory.words().iter().all(|word| *word == 7));
            let huge = memory.huge_share().expect("Linux says");
            assert!(pages == Pages::Huge || huge == 0.0, "{huge}");
        }
    }

    #[test]
    fn memory_on_a_node_that_is_not_there_is_an_error() {
        assert!(Memory::map(1 << 20, Pages::Base, Some(NodeId(900))).is_err());
    }

    #[test]
    fn a_fault_takes_time() {
        let ns = present_fault_ns(4096).unwrap();
        assert!(ns > 10.0, "{ns}");
    }

    #[test]
    fn the_time_stamp_does_not_run_backwards() {
        if let Some(first) = time_stamp() {
            assert!(time_stamp().unwrap() >= first);
        }
    }
}

//! Records in the ring buffer of an event that samples IBS ops.
//!
//! # Layout
//! A record begins with a header of 8 bytes: type (4), flags (2), and the size of all of it (2), a multiple of 8
//! (`linux/perf_event.h`). With `PERF_SAMPLE_RAW` as its only content, a sample continues with the size of the raw data (4) and
//! the data, which are a word of capabilities (4) and registers of 8 bytes each: `IBS_OP_CTL`, `IBS_OP_RIP`, `IBS_OP_DATA`,
//! `IBS_OP_DATA2`, `IBS_OP_DATA3`, `IBS_DC_LINADDR`, `IBS_DC_PHYSADDR`, and others by capability (`arch/x86/events/amd/ibs.c`,
//! `asm/amd/ibs.h`). So every field lies in an aligned word, and no word is cut by the ring's end.
//!
//! # Which samples are accesses to memory
//! - The op loads or stores, its physical address is valid, and it missed the core's data cache. Accesses to uncached memory,
//!   software prefetches, and misses on a line that was already on its way are left out. The last two have no valid source on
//!   the first Zen 3 (erratum 1293).
//! - A load's data came from memory: DRAM, or on Zen 4 also persistent or extension (CXL) memory.
//! - A store has no source (`IBS_OP_DATA2` is valid only for loads), so it counts if it missed the L2.
//!
//! # Trust
//! The kernel writes the ring. Still, whatever is in it, reading ends after at most as many steps as the ring has words.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a word.
const WORD: u64 = 8;
/// `PERF_RECORD_LOST`: the kernel had no room for some records.
const LOST: u32 = 2;
/// `PERF_RECORD_SAMPLE`.
const SAMPLE: u32 = 9;
/// `PERF_RECORD_LOST_SAMPLES`: the hardware had no room for some samples.
const LOST_SAMPLES: u32 = 13;
/// Registers that each sample has, up to the physical address.
const REGISTERS: u64 = 7;
/// Bytes of a sample's header, of the size of its raw data, and of the capabilities.
const BEFORE_REGISTERS: u64 = 16;
/// Fewest bytes of a sample.
pub(super) const SAMPLE_BYTES: u64 = BEFORE_REGISTERS + REGISTERS * WORD;

/// Capability: the source of data has five bits.
const CAP_ZEN4: u32 = 1 << 11;
/// Bits of `IBS_OP_DATA3`.
const LOAD: u64 = 1 << 0;
const STORE: u64 = 1 << 1;
const DC_MISS: u64 = 1 << 7;
const UNCACHED: u64 = 1 << 14;
const NO_MAB: u64 = 1 << 16;
const PHYSICAL_VALID: u64 = 1 << 18;
const L2_MISS: u64 = 1 << 20;
const SOFTWARE_PREFETCH: u64 = 1 << 21;
/// Sources of data in `IBS_OP_DATA2`.
const DRAM: u64 = 3;
const PERSISTENT: u64 = 6;
const EXTENSION: u64 = 8;
/// Physical addresses have at most 52 bits.
const ADDRESS_MASK: u64 = (1 << 52) - 1;

/// An access that reached memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Machine frame of 4 KiB.
    pub frame: u64,
    /// Whether the access was a write.
    pub is_write: bool,
}

/// What was read from a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Samples read, accesses to memory or not.
    pub samples: u64,
    /// Samples that the kernel or the hardware had no room for.
    pub lost: u64,
    /// Records that are not of the published layout. After one whose size cannot be, the rest of the ring is skipped.
    pub malformed: u64,
}

/// Reads the records between two positions, in bytes since the event was opened, and passes accesses to memory to `note`. The
/// ring must have a power of two of words.
pub fn drain(ring: &[AtomicU64], tail: u64, head: u64, note: &mut dyn FnMut(Access)) -> Drained {
    let mut drained = Drained::default();
    let unread = head.wrapping_sub(tail);
    let is_possible = unread <= ring.len() as u64 * WORD && unread.is_multiple_of(WORD);
    if !ring.len().is_power_of_two() || !is_possible {
        drained.malformed = 1;
        return drained;
    }
    let mask = ring.len() as u64 - 1;
    let mut at = 0;
    while at < unread {
        let first = (tail.wrapping_add(at)) / WORD;
        let word = |number: u64| {
            let place = first.wrapping_add(number) & mask;
            ring[place as usize].load(Ordering::Relaxed)
        };
        let header = word(0);
        let (kind, bytes) = (header as u32, header >> 48);
        if bytes < WORD || !bytes.is_multiple_of(WORD) || bytes > unread - at {
            drained.malformed += 1;
            return drained;
        }
        match kind {
            SAMPLE => {
                drained.samples += 1;
                match sample(bytes, word) {
                    Some(access) => access.into_iter().for_each(&mut *note),
                    None => drained.malformed += 1,
                }
            }
            // The first word is the event's number.
            LOST if bytes >= 3 * WORD => drained.lost = drained.lost.saturating_add(word(2)),
            LOST_SAMPLES if bytes >= 2 * WORD => drained.lost = drained.lost.saturating_add(word(1)),
            LOST | LOST_SAMPLES => drained.malformed += 1,
            // The kernel may write other records, such as about throttling, and later kernels more.
            _ => {}
        }
        at += bytes;
    }
    drained
}

/// Reads a sample: `Some(None)` if it is no access to memory, `None` if it is not of the published layout.
fn sample(bytes: u64, word: impl Fn(u64) -> u64) -> Option<Option<Access>> {
    if bytes < SAMPLE_BYTES {
        return None;
    }
    let sizes = word(1);
    let (raw_bytes, caps) = (sizes & u64::from(u32::MAX), (sizes >> 32) as u32);
    // The raw data's size does not count the field of that size, but counts the capabilities.
    let (least, most) = (SAMPLE_BYTES - WORD - 4, bytes - WORD - 4);
    if !(least..=most).contains(&raw_bytes) {
        return None;
    }
    let register = |number: u64| word(BEFORE_REGISTERS / WORD + number);
    let (data2, data3, physical) = (register(3), register(4), register(6));
    let is_access = reached_memory(caps, data2, data3);
    Some(is_access.then_some(Access {
        frame: (physical & ADDRESS_MASK) >> 12,
        is_write: data3 & STORE != 0,
    }))
}

fn reached_memory(caps: u32, data2: u64, data3: u64) -> bool {
    let needed = PHYSICAL_VALID | DC_MISS;
    if data3 & needed != needed || data3 & (UNCACHED | SOFTWARE_PREFETCH | NO_MAB) != 0 {
        return false;
    }
    if data3 & LOAD == 0 {
        return data3 & STORE != 0 && data3 & L2_MISS != 0;
    }
    let low = data2 & 7;
    match caps & CAP_ZEN4 != 0 {
        true => matches!(low | (data2 >> 6 & 3) << 3, DRAM | PERSISTENT | EXTENSION),
        false => low == DRAM,
    }
}

//! Selects the events that count a thread's cycles, instructions, LLC references and LLC misses.
//!
//! | processor | LLC references | LLC misses |
//! |---|---|---|
//! | Intel | `cache-references` | `cache-misses`: both are architectural events of the LLC |
//! | AMD Zen, Zen 2 | demand fills of the data cache from beyond the L2 | those from memory, or from a cache on another die |
//! | AMD Zen 3 to Zen 5 | any fills of the data cache from beyond the L2 | those from beyond the core complex |
//! | Arm with `ll_cache_rd` and `ll_cache_miss_rd` in sysfs | the former | the latter |
//! | others | none | none |
//!
//! The kernel's generic cache events are not used elsewhere: on AMD they count at the L2, on Arm at the L1, on POWER loads that
//! miss the L1. The encodings for AMD are those of `ls_refills_from_sys` and `ls_any_fills_from_sys` in Linux'
//! `tools/perf/pmu-events/arch/x86/amdzen*`.
//!
//! A host with cores of several types (`cpu_core` and `cpu_atom`, big.LITTLE) has a PMU for each, whose events only count while
//! the thread is on such a core. Each type then has a group of its own.

use std::path::Path;

use super::{Attr, PERF_TYPE_HARDWARE};
use crate::pmu::{self, Pmu};
use crate::processor::{Processor, Vendor, Zen};
use crate::read::ReadError;

const PERF_TYPE_RAW: u32 = 4;
const CYCLES: u64 = 0;
const INSTRUCTIONS: u64 = 1;
const CACHE_REFERENCES: u64 = 2;
const CACHE_MISSES: u64 = 3;
/// With `PERF_TYPE_HARDWARE`, these bits name the PMU of a core type (Linux 5.13).
const PMU_SHIFT: u32 = 32;
/// `CPU_CYCLES` and `INST_RETIRED` of every Armv8 PMU.
const ARM_CYCLES: u64 = 0x11;
const ARM_INSTRUCTIONS: u64 = 0x08;

/// The events of one core type: cycles, instructions, and the two of the LLC if there are any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CoreType {
    pub(super) work: [Attr; 2],
    pub(super) llc: Option<[Attr; 2]>,
}

/// What counts a thread on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Never empty. Either all of them have events of the LLC, or none.
    pub(super) types: Vec<CoreType>,
    pub(super) note: Option<String>,
}

impl Default for Selection {
    /// Cycles and instructions, which every PMU counts alike.
    fn default() -> Selection {
        let types = vec![CoreType {
            work: generic(0, [CYCLES, INSTRUCTIONS]),
            llc: None,
        }];
        Selection { types, note: None }
    }
}

impl Selection {
    /// Selects events for the processor and the PMUs of a host, without opening any.
    ///
    /// # Errors
    /// If a file of a PMU is malformed.
    pub fn discover(root: &Path) -> Result<Selection, ReadError> {
        let processor = Processor::read(root)?;
        let mut types = Vec::new();
        for name in pmu::names(root)? {
            let pmu = match pmu::is_of_cores(root, &name)? {
                true => Pmu::read(root, &name)?,
                false => None,
            };
            let Some(pmu) = pmu else { continue };
            types.push(match processor.vendor {
                Vendor::Intel => intel(pmu.kind),
                _ => arm(&pmu),
            });
        }
        if types.is_empty() {
            types = match processor.vendor {
                Vendor::Intel => vec![intel(0)],
                _ => Selection::default().types,
            };
            types[0].llc = types[0].llc.or(processor.zen().map(amd));
        }
        if types.iter().any(|of| of.llc.is_none()) {
            types.iter_mut().for_each(|of| of.llc = None);
        }
        let note = note(&processor, types[0].llc.is_some());
        Ok(Selection { types, note })
    }
}

fn generic(pmu: u32, events: [u64; 2]) -> [Attr; 2] {
    events.map(|event| Attr::counting(PERF_TYPE_HARDWARE, u64::from(pmu) << PMU_SHIFT | event))
}

/// Returns the architectural events, on the PMU of one core type, or on the only one if it is 0.
fn intel(pmu: u32) -> CoreType {
    CoreType {
        work: generic(pmu, [CYCLES, INSTRUCTIONS]),
        llc: Some(generic(pmu, [CACHE_REFERENCES, CACHE_MISSES])),
    }
}

/// Returns fills of the data cache by source. Bits of the unit mask: 1 the own L2 (left out), 2 the L3 or an L2 of the same core
/// complex, 4 another complex in the node, 8 memory of the node, 16 a cache and 64 memory of another node, 128 extension memory.
fn amd(zen: Zen) -> [Attr; 2] {
    let (event, all, missed) = match zen {
        // Bit 2 is also a cache of another complex on the die, so such a fill counts as a hit.
        Zen::OneOrTwo => (0x43, 0x5a, 0x58),
        Zen::Three => (0x44, 0x5e, 0x5c),
        Zen::Four | Zen::Five => (0x44, 0xde, 0xdc),
    };
    [all, missed].map(|mask: u64| Attr::counting(PERF_TYPE_RAW, mask << 8 | event))
}

fn arm(pmu: &Pmu) -> CoreType {
    CoreType {
        work: [ARM_CYCLES, ARM_INSTRUCTIONS].map(|event| Attr::counting(pmu.kind, event)),
        llc: pmu
            .event("ll_cache_rd")
            .zip(pmu.event("ll_cache_miss_rd"))
            .map(|(all, missed)| [all, missed]),
    }
}

/// Returns what an operator should know about the figures of the LLC.
fn note(processor: &Processor, has_llc: bool) -> Option<String> {
    match (has_llc, processor.zen()) {
        (true, None) => None,
        (true, Some(zen)) => {
            let left_out = match zen {
                Zen::OneOrTwo => "fetches of code and prefetches",
                _ => "fetches of code, and prefetches into the L2,",
            };
            Some(format!(
                "LLC references and misses of threads are fills of the data cache from beyond the L2 and from beyond the core complex, since the generic events count at the L2 on AMD: {left_out} are not in them. amd_l3 counts by cache and not by VM, so it is not read"
            ))
        }
        (false, _) => Some(format!(
            "{processor} has no event that is known to count LLC misses of threads: miss rates and bandwidth of VMs are unknown, permits are not enforced, and no home is predicted"
        )),
    }
}

#[cfg(test)]
mod tests;

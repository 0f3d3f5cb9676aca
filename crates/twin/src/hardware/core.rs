//! Cores: what a thread's instructions cost.
//!
//! # Model
//!
//! `CPI = cpi_core * h + a * (1 - m) * L_llc / H + a * m * L / P` (`facts/simulators.md`, 3.3 item 3) with `a` LLC
//! accesses per instruction, `m` the miss ratio at the capacity that the thread holds, `L_llc` and `L` the latencies
//! of an LLC hit and of memory in cycles, `H` hits and `P` misses in flight. `P` is at most what one core sustains.
//!
//! Two busy hyperthreads share the core. The core's own work and the LLC hits of each are stretched by `h = 2 / s`, where `s` is
//! the throughput of a core with two busy threads relative to one. Each thread gets half of the core's outstanding misses.
//! Waiting for memory is not stretched, because it overlaps; hyperthreads exist for that.
//!
//! Address translation adds `t * R` references to page tables per instruction. `t` is the TLB misses at the TLB's reach (entries
//! times page size), `R` the references per walk that page-walk caches do not save; a guest has more, because its walk is
//! two-dimensional (item 8). The references depend on each other, so none overlap. A page table has 8 bytes per page that the
//! program uses. As much of it as fits is found in L2, then in the LLC, and the rest in memory, where the data is.
//!
//! # Left out
//!
//! L1 and L2 shared by hyperthreads (`a` stays the same), frequency changes. Lines of page tables take no room from data in the
//! caches. Page tables are where the program's data is, not where their own pages were allocated.

use homenode_machine::{Hardware, Machine};
use homenode_units::Bytes;

use crate::workload::Program;

/// Bytes of page table per mapped page.
const ENTRY_BYTES: f64 = 8.0;

/// Cost of translating a program's addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Paging {
    /// References to page tables per instruction, outside of phases.
    refs: f64,
    /// Bytes of the page table that maps what the program uses.
    table: f64,
}

impl Paging {
    /// Returns the cost for a program mapped in pages of this size, in a guest or on the bare machine.
    pub(crate) fn new(hw: &Hardware, page: Bytes, program: &Program, in_guest: bool) -> Paging {
        let entries = if page > Bytes(homenode_units::PAGE_BYTES) {
            hw.tlb_entries_2m
        } else {
            hw.tlb_entries_4k
        };
        let reach = f64::from(entries) * page.as_f64();
        let refs_per_walk = if in_guest {
            hw.walk.nested_refs
        } else {
            hw.walk.native_refs
        };
        let walks = program.translation.as_ref().map_or(0.0, |translation| {
            translation.accesses_per_kilo_instruction / 1000.0 * translation.miss_ratio.at(reach)
        });
        Paging {
            refs: walks * refs_per_walk,
            table: program.footprint(1).as_f64() / page.as_f64() * ENTRY_BYTES,
        }
    }
}

/// The part of an LLC that a thread can use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct InLlc {
    pub bytes: f64,
    /// Share of the thread's accesses that miss with this part.
    pub miss_ratio: f64,
}

/// Cost of a thread's instructions, given where the thread runs and whether its sibling is busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CoreCost {
    /// Cycles per instruction without waiting for memory.
    pub busy_cycles: f64,
    /// LLC accesses per instruction.
    pub accesses: f64,
    /// LLC misses per instruction.
    pub misses: f64,
    /// Misses per instruction whose line does not follow on another missed line in memory.
    pub scattered: f64,
    /// Number of memory latencies that an instruction waits for: misses over misses in flight.
    pub waits: f64,
}

/// Whether the other hyperthread of a core is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sibling {
    Idle,
    Busy,
}

impl CoreCost {
    /// Returns the cost of a program's instructions, scaled by a phase's factors, with this part of the LLC.
    pub(crate) fn of(
        program: &Program,
        phase: (f64, f64),
        hw: &Hardware,
        paging: &Paging,
        llc: InLlc,
        sibling: Sibling,
    ) -> CoreCost {
        let (access_factor, cpi_factor) = phase;
        let accesses = program.llc_accesses_per_kilo_instruction * access_factor / 1000.0;
        let misses = accesses * llc.miss_ratio;
        let (stretch, threads) = match sibling {
            Sibling::Idle => (1.0, 1.0),
            Sibling::Busy => (2.0 / hw.smt_throughput, 2.0),
        };
        let hits = (accesses - misses) * hw.latency.llc_cycles / program.hits_in_flight;
        let in_flight = program
            .misses_in_flight
            .min(f64::from(hw.misses_in_flight_max) / threads);
        let mut cost = CoreCost {
            busy_cycles: program.cpi_core * cpi_factor + hits,
            accesses,
            misses,
            scattered: misses * (1.0 - program.streamed(llc.miss_ratio)),
            waits: misses / in_flight,
        };
        if paging.refs > 0.0 {
            cost.walk(paging.refs * access_factor, hw, paging.table, llc.bytes);
        }
        cost.busy_cycles *= stretch;
        cost
    }

    /// Whether any part of this cost differs from the other cost by more than this share.
    pub(crate) fn differs(&self, other: &CoreCost, share: f64) -> bool {
        let off = |a: f64, b: f64| (a - b).abs() > share * a;
        off(self.busy_cycles, other.busy_cycles)
            || off(self.misses, other.misses)
            || off(self.waits, other.waits)
    }

    /// Adds the cost of references to a page table of this size.
    fn walk(&mut self, refs: f64, hw: &Hardware, table: f64, llc_bytes: f64) {
        let in_l2 = (hw.l2_bytes.as_f64() / table).min(1.0);
        let beyond = refs * (1.0 - in_l2);
        let missed = beyond * (1.0 - llc_bytes / table).max(0.0);
        self.busy_cycles += refs * in_l2 * hw.latency.l2_cycles + (beyond - missed) * hw.latency.llc_cycles;
        self.accesses += beyond;
        self.misses += missed;
        self.scattered += missed;
        self.waits += missed;
    }

    /// Returns nanoseconds per instruction when a miss takes `latency_ns`.
    pub(crate) fn ns_per_instruction(&self, clock_ghz: f64, latency_ns: f64) -> f64 {
        self.busy_cycles / clock_ghz + self.waits * latency_ns
    }
}

impl Program {
    /// Returns how long the program runs alone on an idle machine, with all of its memory local and an LLC to itself, according
    /// to the equation above at unloaded latency. For sizing scenarios; not a result.
    pub fn solo_seconds(&self, machine: &Machine, hw: &Hardware) -> f64 {
        let capacity = machine
            .llcs
            .iter()
            .map(|llc| llc.size_bytes.as_f64())
            .fold(0.0, f64::max)
            / 4.0;
        self.seconds_within(capacity, hw)
    }

    /// Returns how long the program runs alone with this many bytes of an LLC, as if it had a partition of the LLC.
    pub fn seconds_within(&self, llc_bytes: f64, hw: &Hardware) -> f64 {
        let paging = Paging::new(hw, Bytes(homenode_units::PAGE_BYTES), self, false);
        let llc = InLlc {
            bytes: llc_bytes,
            miss_ratio: self.miss_ratio.at(llc_bytes),
        };
        let cost = CoreCost::of(self, (1.0, 1.0), hw, &paging, llc, Sibling::Idle);
        let ns = cost.ns_per_instruction(hw.clock_hz as f64 / 1e9, hw.latency.memory_ns);
        self.instructions_g_per_thread * ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{MissRatioCurve, Translation, builtin};
    use homenode_machine_files::preset;

    fn cost(page: Bytes, in_guest: bool, llc_bytes: f64) -> CoreCost {
        let hw = preset("amd48").unwrap().hardware.unwrap();
        let mut program = builtin("mcf").unwrap().program.unwrap();
        let curve = MissRatioCurve::family(0.0, Bytes::from_mib(64), 1.0);
        program.translation = Some(Translation {
            accesses_per_kilo_instruction: 400.0,
            miss_ratio: curve,
        });
        program.regions.truncate(1);
        program.regions[0].size = Bytes::from_gib(1);
        let paging = Paging::new(&hw, page, &program, in_guest);
        let llc = InLlc {
            bytes: llc_bytes,
            miss_ratio: program.miss_ratio.at(llc_bytes),
        };
        CoreCost::of(&program, (1.0, 1.0), &hw, &paging, llc, Sibling::Idle)
    }

    #[test]
    fn a_walk_costs_what_the_module_says() {
        // 512 entries of 4 KiB reach 2 MiB of a curve that falls with 64 MiB: exp(-1/32) of 0.4 accesses need a walk, with 4
        // references each if nested. 1 GiB has a table of 2 MiB, of which L2 holds a quarter and the LLC nothing.
        let (small, none) = (Bytes(4096), cost(Bytes(1 << 50), true, 0.0));
        let walked = cost(small, true, 0.0);
        let refs = 0.4 * libm::exp(-1.0 / 32.0) * 4.0;
        assert!((walked.misses - none.misses - 0.75 * refs).abs() < 1e-3);
        assert!((walked.waits - none.waits - 0.75 * refs).abs() < 1e-3);
        assert!((walked.busy_cycles - none.busy_cycles - 0.25 * refs * 16.0).abs() < 1e-2);
    }

    #[test]
    fn large_pages_and_the_bare_machine_walk_less() {
        let ns = |page, in_guest| cost(page, in_guest, 1e6).ns_per_instruction(2.2, 70.0);
        let (small, large) = (Bytes(4096), Bytes::from_mib(2));
        assert!(ns(small, true) > ns(small, false) && ns(small, true) > ns(large, true));
    }

    #[test]
    fn a_page_table_in_the_llc_costs_no_memory_access() {
        assert!(cost(Bytes(4096), true, 4e6).waits < cost(Bytes(4096), true, 1e6).waits);
    }
}

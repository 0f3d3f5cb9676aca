//! Cores: what a thread's instructions cost.
//!
//! # Model
//!
//! `CPI = cpi_core * h + a * (1 - m) * L_llc / H + a * m * L / P` (`facts/simulators.md`, 3.3 item 3) with `a` LLC
//! accesses per instruction, `m` the miss ratio at the capacity that the thread holds, `L_llc` and `L` the latencies
//! of an LLC hit and of memory in cycles, `H` hits and `P` misses in flight. `P` is at most what one core sustains.
//!
//! Two busy hyperthreads share the core: the core's own work and the LLC hits of each are stretched by `h = 2 / s`,
//! where `s` is the throughput of a core with two busy threads over one, and each gets half of the core's outstanding
//! misses. Waiting for memory is not stretched: it overlaps, which is what hyperthreads are for.
//!
//! # Left out
//!
//! L1 and L2 shared by hyperthreads (`a` stays), frequency changes, TLB misses and nested page walks.

use homenode_machine::{Hardware, Machine};

use crate::workload::Program;

/// What costs a thread's instructions have, where and beside whom it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CoreCost {
    /// Cycles per instruction without waiting for memory.
    pub busy_cycles: f64,
    /// LLC accesses per instruction.
    pub accesses: f64,
    /// LLC misses per instruction.
    pub misses: f64,
    /// Misses in flight.
    pub in_flight: f64,
}

/// Whether the other hyperthread of a core is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sibling {
    Idle,
    Busy,
}

impl CoreCost {
    /// Cost of a program's instructions, scaled by a phase, with this LLC miss ratio.
    pub fn of(
        program: &Program,
        phase: (f64, f64),
        hw: &Hardware,
        miss_ratio: f64,
        sibling: Sibling,
    ) -> CoreCost {
        let (access_factor, cpi_factor) = phase;
        let accesses = program.llc_accesses_per_kilo_instruction * access_factor / 1000.0;
        let misses = accesses * miss_ratio;
        let (stretch, threads) = match sibling {
            Sibling::Idle => (1.0, 1.0),
            Sibling::Busy => (2.0 / hw.smt_throughput, 2.0),
        };
        let hits = (accesses - misses) * hw.latency.llc_cycles / program.hits_in_flight;
        CoreCost {
            busy_cycles: (program.cpi_core * cpi_factor + hits) * stretch,
            accesses,
            misses,
            in_flight: program
                .misses_in_flight
                .min(f64::from(hw.misses_in_flight_max) / threads),
        }
    }

    /// Nanoseconds per instruction when a miss takes `latency_ns`.
    pub fn ns_per_instruction(&self, clock_ghz: f64, latency_ns: f64) -> f64 {
        self.busy_cycles / clock_ghz + self.misses * latency_ns / self.in_flight
    }
}

impl Program {
    /// How long the program runs alone on an idle machine with all of its memory local and an LLC to itself, by the
    /// equation above at unloaded latency: for sizing scenarios, not a result.
    pub fn solo_seconds(&self, machine: &Machine, hw: &Hardware) -> f64 {
        let capacity = machine
            .llcs
            .iter()
            .map(|llc| llc.size_bytes.as_f64())
            .fold(0.0, f64::max)
            / 4.0;
        let cost = CoreCost::of(self, (1.0, 1.0), hw, self.miss_ratio.at(capacity), Sibling::Idle);
        let ns = cost.ns_per_instruction(hw.clock_hz as f64 / 1e9, hw.latency.memory_ns);
        self.instructions_g_per_thread * ns
    }
}

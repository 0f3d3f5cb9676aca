//! What a VM asks of a host, whatever the arrangement.

use homenode_units::BytesPerSec;

use super::{Config, profile};

/// What a VM asks of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Character {
    /// CPUs' worth of time that it wants.
    pub threads: f64,
    /// What it gets of a CPU that several want, by weight: share of the time it wants that it ran.
    pub share: f64,
    /// Cycles per second of a running thread.
    pub clock: f64,
    /// Cycles per instruction but for waiting for memory, on a core of its own.
    pub core: f64,
    /// Cycles that a miss stalls a thread per unloaded local latency.
    pub stall: f64,
    /// LLC references per instruction.
    pub references: f64,
    /// Miss ratio where each thread has [`Character::capacity`].
    pub miss_ratio: f64,
    /// Bytes; 0 where not known.
    pub capacity: f64,
    /// Power by which the miss ratio falls with capacity.
    pub slope: f64,
    /// Bytes that a miss moves.
    pub bytes_per_miss: f64,
    /// Share of its accesses that are local where the kernel puts it and its memory was never moved.
    pub local_free: f64,
    /// Share of its threads that the kernel keeps on each cache's CPUs, by position; `None` where that was not seen, and it is
    /// taken to spread them evenly.
    pub found: Option<Vec<f64>>,
    /// Share of its memory on each node, by position, if it lies where an agent put it; else it lies where threads are.
    pub memory: Option<Vec<f64>>,
    /// Measured over modelled speed at home, seen while its memory is there.
    pub at_home: f64,
    /// Measured over modelled speed while no VM had a home: where the kernel keeps it is not what a mean kernel does.
    pub at_free: f64,
}

impl Character {
    /// The mean VM of several; `None` of none.
    pub fn mean(all: &[&Character]) -> Option<Character> {
        let count = all.len() as f64;
        let mean = |of: fn(&Character) -> f64| all.iter().map(|vm| of(vm)).sum::<f64>() / count;
        (count > 0.0).then(|| Character {
            threads: mean(|vm| vm.threads),
            share: mean(|vm| vm.share),
            clock: mean(|vm| vm.clock),
            core: mean(|vm| vm.core),
            stall: mean(|vm| vm.stall),
            references: mean(|vm| vm.references),
            miss_ratio: mean(|vm| vm.miss_ratio),
            capacity: mean(|vm| vm.capacity),
            slope: mean(|vm| vm.slope),
            bytes_per_miss: mean(|vm| vm.bytes_per_miss),
            local_free: mean(|vm| vm.local_free),
            found: None,
            memory: None,
            at_home: 1.0,
            at_free: 1.0,
        })
    }

    /// A VM that has not run yet, with so many threads: one that draws this bandwidth (bytes per second, of all of them) from
    /// memory, or else waits for memory for a third of its time.
    pub fn newcomer(threads: f64, bandwidth: Option<BytesPerSec>, config: &Config) -> Character {
        let (core, stall, clock, bytes) = (
            profile::CORE,
            profile::STALL,
            profile::CLOCK,
            config.bytes_per_miss,
        );
        // Of x misses per instruction a thread draws clock * x * bytes / (core + x * stall).
        let misses = match bandwidth {
            None => core / (2.0 * stall),
            Some(bandwidth) => {
                let each = bandwidth.as_f64() / threads.max(1.0);
                let most = clock * bytes / stall;
                let each = each.min(0.9 * most);
                each * core / (clock * bytes - each * stall)
            }
        };
        Character {
            threads: threads.max(0.01),
            share: 1.0,
            clock,
            core,
            stall,
            references: 2.0 * misses,
            miss_ratio: 0.5,
            capacity: 0.0,
            slope: profile::SLOPE,
            bytes_per_miss: bytes,
            local_free: config.local_unknown,
            found: None,
            memory: None,
            at_home: 1.0,
            at_free: 1.0,
        }
    }

    /// Share of its cycles that it waits for memory, on an idle host.
    pub fn waiting_share(&self) -> f64 {
        let waits = self.references * self.miss_ratio * self.stall;
        waits / (self.core + waits)
    }
}

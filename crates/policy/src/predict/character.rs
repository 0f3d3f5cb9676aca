//! What a VM needs from a host, whatever the arrangement.

use homenode_units::BytesPerSec;

use super::{Config, profile};

/// What a VM needs from a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Character {
    /// CPU time that the VM wants, in CPUs.
    pub threads: f64,
    /// The VM's share of a contended CPU, given its weight: the part of the time that it wanted in which it ran.
    pub share: f64,
    /// Cycles per second of a running thread.
    pub clock: f64,
    /// Cycles per instruction on an unshared core, without those that wait for memory.
    pub core: f64,
    /// Cycles for which a miss stalls a thread if its latency is the unloaded local one.
    pub stall: f64,
    /// LLC references per instruction.
    pub references: f64,
    /// Share of references that miss if each thread has [`Character::capacity`].
    pub miss_ratio: f64,
    /// Cache bytes per thread at which [`Character::miss_ratio`] holds; 0 if unknown.
    pub capacity: f64,
    /// The power with which the miss ratio falls as capacity grows.
    pub slope: f64,
    /// Bytes that a miss moves.
    pub bytes_per_miss: f64,
    /// Share of the VM's accesses that are local if the kernel places it and its memory was never moved.
    pub local_free: f64,
    /// Share of its threads that the kernel keeps on each cache's CPUs, by position of the cache. `None` if not observed;
    /// then threads count as spread evenly.
    pub found: Option<Vec<f64>>,
    /// Share of its memory on each node, by position of the node, if an agent moved it. Otherwise memory counts as being
    /// where the threads are.
    pub memory: Option<Vec<f64>>,
    /// Ratio of measured to modelled speed at home, once the VM's memory is there.
    pub at_home: f64,
    /// Ratio of measured to modelled speed while no VM had a home. It differs from 1 because the kernel's actual placement
    /// differs from the mean.
    pub when_unplaced: f64,
}

impl Character {
    /// Returns the mean VM of several; `None` if there are none.
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
            when_unplaced: 1.0,
        })
    }

    /// Returns the character that is assumed for a VM with this many threads that has not run yet. It draws this bandwidth (bytes
    /// per second, all threads together) from memory or, if no bandwidth is given, waits for memory for a third of its time.
    pub fn newcomer(threads: f64, bandwidth: Option<BytesPerSec>, config: &Config) -> Character {
        let (core, stall, clock, bytes) = (
            profile::CORE,
            profile::STALL,
            profile::CLOCK,
            config.bytes_per_miss,
        );
        // With x misses per instruction a thread draws clock * x * bytes / (core + x * stall).
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
            when_unplaced: 1.0,
        }
    }

    /// Returns the share of the VM's cycles that it spends waiting for memory, on an idle host.
    pub fn waiting_share(&self) -> f64 {
        let waits = self.references * self.miss_ratio * self.stall;
        waits / (self.core + waits)
    }
}

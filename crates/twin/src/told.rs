//! What an agent sees of a disturbed simulated host ([`crate::scenario::Disturbance`]): counters with noise, or none.
//!
//! Each increment of a counter since the last reading is multiplied by `1 + d * z` before it is reported. `d` is the stated
//! noise; `z` is normal and within three standard deviations. Misses never exceed references.

use std::collections::BTreeMap;

use homenode_host::{Accesses, Counters, Sample};
use homenode_machine::Machine;

use crate::scenario::Disturbance;
use homenode_units::{Chance, VmId};

/// Number of standard deviations at which noise is cut off.
const DEVIATIONS_MAX: f64 = 3.0;

/// What an agent sees of a simulated host, and the counters reported to it so far.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    /// The machine as an agent sees it.
    pub machine: Machine,
    disturbance: Disturbance,
    chance: Chance,
    counters: BTreeMap<(VmId, u16), [Counter; 4]>,
    /// Local and remote accesses of a VM, and those to each node.
    accesses: BTreeMap<VmId, Vec<Counter>>,
}

/// A counter that is reported with an error.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    real: u64,
    told: u64,
}

impl Counter {
    /// Returns the value to report now. A counter that restarted is again reported from 0.
    fn tell(&mut self, real: u64, factor: f64) -> u64 {
        if real < self.real {
            *self = Counter::default();
        }
        self.told += ((real - self.real) as f64 * factor) as u64;
        self.real = real;
        self.told
    }
}

impl Told {
    pub(crate) fn new(disturbance: Disturbance, machine: &Machine, seed: u64) -> Told {
        Told {
            machine: disturbance.told(machine),
            disturbance,
            chance: Chance::labelled(seed, "noise", 0),
            counters: BTreeMap::new(),
            accesses: BTreeMap::new(),
        }
    }

    fn factor(&mut self) -> f64 {
        let deviations = self.chance.normal().clamp(-DEVIATIONS_MAX, DEVIATIONS_MAX);
        (1.0 + self.disturbance.noise * deviations).max(0.0)
    }

    /// Turns a sample into the sample that an agent sees.
    pub(crate) fn distort(&mut self, sample: &mut Sample) {
        for vm in &mut sample.vms {
            if self.disturbance.no_llc_counters {
                vm.accesses = None;
                vm.vcpus.iter_mut().for_each(|vcpu| vcpu.counters = None);
            }
            if self.disturbance.noise == 0.0 {
                continue;
            }
            for vcpu in &mut vm.vcpus {
                if let Some(counters) = &mut vcpu.counters {
                    self.distort_counters((vm.id, vcpu.index), counters);
                }
            }
            if let Some(accesses) = &mut vm.accesses {
                self.distort_accesses(vm.id, accesses);
            }
        }
    }

    fn distort_counters(&mut self, whose: (VmId, u16), counters: &mut Counters) {
        let factors = [(); 4].map(|()| self.factor());
        let told = self.counters.entry(whose).or_default();
        let Counters {
            instructions,
            cycles,
            llc_references,
            llc_misses,
        } = counters;
        let all = [
            Some(instructions),
            Some(cycles),
            llc_references.as_mut(),
            llc_misses.as_mut(),
        ];
        for ((counter, told), factor) in all.into_iter().zip(told.iter_mut()).zip(factors) {
            if let Some(counter) = counter {
                *counter = told.tell(*counter, factor);
            }
        }
        told[3].told = told[3].told.min(told[2].told);
        counters.llc_misses = counters.llc_misses.map(|_| told[3].told);
    }

    fn distort_accesses(&mut self, vm: VmId, accesses: &mut Accesses) {
        let count = 2 + accesses.on.len();
        let factors: Vec<f64> = (0..count).map(|_| self.factor()).collect();
        let told = self.accesses.entry(vm).or_default();
        told.resize(count, Counter::default());
        let Accesses { local, remote, on } = accesses;
        let all = [local, remote]
            .into_iter()
            .chain(on.iter_mut().map(|(_, count)| count));
        for ((count, told), factor) in all.zip(told).zip(factors) {
            *count = told.tell(*count, factor);
        }
    }
}

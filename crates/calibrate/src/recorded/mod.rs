//! Turns a stretch of a recorded run into a scenario for the simulator, to simulate what could have happened instead.
//!
//! # Problem
//! A history has counts for each VM. But the simulator needs programs: instructions, their core cycles, LLC accesses, a curve of
//! miss ratios, rests, and memory with its owners.
//!
//! # Approach
//! Samples are added up ([`Seen`]), and each VM's counts become a program ([`Load`]). Work, LLC accesses, phases and rests are
//! those counted. The core's own cycles are all cycles less the waits for memory. The curve goes through the one observed miss
//! ratio. Then the scenario runs on the simulated host under the recorded policies, and the same code adds up the simulator's
//! samples. Each program is corrected by the difference between the two sums. This is repeated, and the closest round is kept.
//!
//! # What is assumed
//! Figures missing from samples get a usual value, and are reported in comments of the file and by the command. A program
//! ends when it has done the counted work, so under another policy it ends sooner or later.
//!
//! # Left out
//! I/O, barriers, address translation: their cost is part of the core's cycles. The share of each vCPU in the work. Pins of
//! single vCPUs.
//!
//! # Properties
//! - `a_recorded_twin_simulated_again_is_as_near_as_stated`
//! - `whatever_a_vm_is_called_the_file_reads`

mod load;
mod seen;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, BTreeSet};

use homenode_machine::Machine;
use homenode_twin::Scenario;
use homenode_units::Ns;

pub use load::{Figures, Load};
pub use seen::{Counted, Life, Seen};
pub use write::Purpose;

/// First words of every file that is made here.
pub const FIRST_WORDS: &str = "Made by homenode record scenario from";

/// VMs that ran before the stretch start this long before it, to boot, touch their memory, and find their homes.
const LEAD: Ns = Ns::from_secs(20);
/// The fit ends when the average of the VMs' errors is at most this. A VM's error is the sum of its differences.
const NEAR_ENOUGH: f64 = 0.03;
/// From this traffic on, in bytes per second, a VM fully depends on where its memory is. The less traffic it has, the more
/// the scheduler's luck decides.
const TRAFFIC_CARED: f64 = 5e8;
/// A VM whose CPU time is less than this share of the time counts as idle.
const RAN_MIN: f64 = 1e-4;

/// Description of the file, for its head.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Title for people.
    pub title: String,
    /// Source of the counts, in a few words.
    pub source: String,
    /// A preset's name, or a file in the same folder.
    pub machine: String,
    /// Policies to simulate, the recorded ones first.
    pub policies: Vec<String>,
    /// Assumptions about all VMs, each a sentence without its full stop.
    pub notes: Vec<String>,
}

/// A stretch of a recorded run, as a scenario.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// VMs, in order of arrival.
    pub vms: Vec<Vm>,
    /// Duration of the recorded stretch.
    pub lasted: Ns,
    /// Time in the scenario at which the stretch begins.
    pub lead: Ns,
    /// Whether the host's kernel balanced NUMA memory at the end.
    pub is_balanced: bool,
}

/// A VM of the scenario.
#[derive(Clone, Debug)]
pub struct Vm {
    /// The VM's name, unique in the scenario.
    pub name: String,
    /// The VM's recorded counts.
    pub life: Life,
    /// Time of the VM's arrival in the scenario.
    pub arrival: Ns,
    /// Time at which the VM leaves the scenario.
    pub left: Ns,
    /// Whether the VM was present to the end.
    pub stays: bool,
    /// The name of the VM's workload.
    pub workload: String,
    /// The VM's program; absent if the VM did nothing.
    pub load: Option<Load>,
}

/// Why a stretch cannot become a scenario.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordedError {
    /// The stretch has too few samples.
    #[error("there are fewer than two samples in that time: choose a longer time with --from and --to")]
    TooShort,
    /// The stretch has no VM.
    #[error("no VM ran in that time: choose another with --from and --to")]
    NoVms,
    /// The machine lacks figures that the simulator needs.
    #[error(
        "machine {0} was recorded without timing figures, which a simulation needs: run 'homenode calibrate' on that host and name \
         its file with --machine, or name a preset of a similar machine"
    )]
    NoHardware(String),
}

impl Recorded {
    /// Turns recorded counts into a scenario, without corrections.
    ///
    /// # Errors
    /// Nothing was recorded, or the simulator cannot model the machine.
    pub fn of(machine: &Machine, seen: &Seen) -> Result<Recorded, RecordedError> {
        let hardware = machine.hardware.as_ref();
        let hardware = hardware.ok_or_else(|| RecordedError::NoHardware(machine.name.clone()))?;
        if seen.lasted() == Ns::ZERO {
            return Err(RecordedError::TooShort);
        }
        let written = seen.traffic.and_then(|(bytes, misses)| {
            let read = misses * homenode_host::LINE_BYTES;
            (read > 0.0).then(|| (bytes / read - 1.0).clamp(0.0, 1.0))
        });
        let lead = if seen.lives.iter().any(|life| life.was_there) {
            LEAD
        } else {
            Ns::ZERO
        };
        let mut taken = BTreeSet::new();
        let mut vms: Vec<Vm> = Vec::new();
        // A VM seen only once has no counts.
        for life in seen.lives.iter().filter(|life| life.from < life.to) {
            let whole = life.whole();
            let own_lead = if life.was_there { lead.as_secs_f64() } else { 0.0 };
            let is_idle = whole.ran < RAN_MIN * whole.seconds;
            let load = (!is_idle).then(|| Load::of(hardware, life, written, own_lead));
            let at = |seen_at: Ns| Ns(lead.0 + seen_at.saturating_sub(seen.begun).0);
            vms.push(Vm {
                name: unique(&life.last.name, &mut taken),
                arrival: if life.was_there { Ns::ZERO } else { at(life.from) },
                left: at(life.to),
                stays: life.stayed(seen),
                workload: if load.is_some() {
                    format!("load-{}", vms.len() + 1)
                } else {
                    "idle".to_owned()
                },
                load,
                life: life.clone(),
            });
        }
        if vms.is_empty() {
            return Err(RecordedError::NoVms);
        }
        Ok(Recorded {
            vms,
            lasted: seen.lasted(),
            lead,
            is_balanced: seen.is_balanced(),
        })
    }

    /// Returns each assumption, with the names of the VMs to which it applies.
    pub fn assumed(&self) -> BTreeMap<String, Vec<&str>> {
        let mut assumed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for vm in &self.vms {
            vm.assumed()
                .for_each(|note| assumed.entry(note).or_default().push(&vm.name));
        }
        assumed
    }

    /// Returns the text of the scenario's file.
    pub fn text(&self, about: &About, purpose: Purpose) -> String {
        write::scenario(self, about, purpose)
    }

    /// Corrects the programs for a number of rounds, and keeps the closest round. In each round, `simulate` runs the scenario and
    /// returns the simulator's counts of the stretch. Returns each VM's figures in the round that is kept.
    ///
    /// # Errors
    /// The errors of `simulate`.
    pub fn fit<E: From<homenode_twin::TwinError>>(
        &mut self,
        machine: &Machine,
        about: &About,
        rounds: u32,
        mut simulate: impl FnMut(Scenario, u32) -> Result<Seen, E>,
    ) -> Result<Vec<Option<Figures>>, E> {
        let mut best: Option<(f64, Recorded, Vec<Option<Figures>>)> = None;
        for round in 0..rounds {
            let scenario = Scenario::from_toml("recorded", &self.text(about, Purpose::Fit))?;
            let seen = simulate(scenario, round)?;
            let came: Vec<Option<Counted>> = self.vms.iter().map(|vm| vm.came(&seen)).collect();
            let figures = |came: &Option<Counted>| came.as_ref().map(|came| Figures::of(came, came.seconds));
            let simulated: Vec<Option<Figures>> = came.iter().map(figures).collect();
            let off: f64 = self
                .vms
                .iter()
                .zip(&simulated)
                .map(|(vm, came)| vm.off(came.as_ref()))
                .sum();
            if best.as_ref().is_none_or(|(least, ..)| off < *least) {
                best = Some((off, self.clone(), simulated));
            }
            let Some(hardware) = &machine.hardware else {
                break;
            };
            if off < NEAR_ENOUGH * self.vms.len() as f64 {
                break;
            }
            for (vm, came) in self.vms.iter_mut().zip(&came) {
                if let (Some(load), Some(came)) = (&mut vm.load, came) {
                    load.correct(hardware, vm.life.vcpus, &vm.life.whole(), came);
                }
            }
        }
        let Some((_, nearest, simulated)) = best else {
            return Ok(vec![None; self.vms.len()]);
        };
        *self = nearest;
        Ok(simulated)
    }
}

impl Vm {
    /// Returns the VM's recorded figures.
    pub fn recorded(&self) -> Figures {
        let whole = self.life.whole();
        Figures::of(&whole, whole.seconds)
    }

    /// Returns true if the VM's instructions were counted.
    pub fn is_counted(&self) -> bool {
        self.life.whole().instructions > 0.0
    }

    /// Returns the assumptions about this VM, each a sentence without the full stop.
    pub fn assumed(&self) -> impl Iterator<Item = String> {
        let last = &self.life.last;
        let mut assumed = self
            .load
            .as_ref()
            .map(|load| load.assumed.clone())
            .unwrap_or_default();
        let mut note = |is_so: bool, text: &str| assumed.extend(is_so.then(|| text.to_owned()));
        note(
            last.settings.management == homenode_host::Management::Ignored,
            "an agent may act on it, although its operator excluded it",
        );
        note(
            !last.settings.pinned_vcpus.is_empty(),
            "its vCPUs may run on all of its CPUs, although some of them were pinned",
        );
        note(
            !last.device_nodes.is_empty(),
            "it does no I/O: its devices' transfers were not counted",
        );
        assumed.into_iter()
    }

    /// Returns the simulator's counts of this VM.
    fn came(&self, seen: &Seen) -> Option<Counted> {
        let mut lives = seen.lives.iter().filter(|life| life.last.name == self.name);
        lives.next().map(Life::whole)
    }

    /// Returns the sum of the simulator's errors for this VM: relative errors of CPU use and memory traffic, and absolute errors
    /// of ratios.
    fn off(&self, came: Option<&Figures>) -> f64 {
        let Some(came) = came else { return 4.0 };
        let wanted = self.recorded();
        let share = |a: f64, b: f64| ((a - b) / b.max(0.02)).abs().min(1.0);
        let both = |a: Option<f64>, b: Option<f64>, off: fn(f64, f64) -> f64| {
            a.zip(b).map_or(0.0, |(a, b)| off(a, b))
        };
        let cares = (wanted.bandwidth_bytes_per_s.unwrap_or(0.0) / TRAFFIC_CARED).min(1.0);
        let of_memory = both(came.llc_miss_rate, wanted.llc_miss_rate, |a, b| (a - b).abs())
            + both(came.local_access_ratio, wanted.local_access_ratio, |a, b| {
                (a - b).abs()
            })
            + both(
                came.bandwidth_bytes_per_s,
                wanted.bandwidth_bytes_per_s,
                |a, b| ((a - b) / b.max(1e6)).abs().min(1.0),
            );
        share(came.cpus_used, wanted.cpus_used) + cares * of_memory
    }
}

/// Returns a name that no other VM of the scenario has.
fn unique(name: &str, taken: &mut BTreeSet<String>) -> String {
    let named = (1..).map(|number| match number {
        1 => name.to_owned(),
        _ => format!("{name} ({number})"),
    });
    let mut free = named.filter(|name| !taken.contains(name));
    let name = free.next().unwrap_or_default();
    taken.insert(name.clone());
    name
}

//! A finished run, and its record over time.

use homenode_control::{Control, Cycle, Event, Status};
use homenode_host::{Rates, Sample, VmSample};
use homenode_machine::Machine;
use homenode_search::trial::Trial;
use homenode_units::Ns;

/// The record of one run.
#[derive(Debug)]
pub struct One {
    pub trial: Trial,
    /// The agent's events, with their times.
    pub said: Vec<(f64, Event)>,
    /// Its states over time, if requested.
    pub over_time: Option<Vec<Moment>>,
}

/// The interval between two moments of a run.
#[derive(Debug)]
pub struct Moment {
    pub at: Ns,
    pub status: Status,
    pub rates: Rates,
    /// VMs at its end.
    pub vms: Vec<VmSample>,
}

/// Records moments.
#[derive(Debug)]
pub struct OverTime {
    every: Ns,
    last: Option<Sample>,
    pub moments: Vec<Moment>,
}

impl OverTime {
    /// Records one moment per interval of this length, or as soon afterwards as the agent samples.
    pub fn new(every: Ns) -> OverTime {
        OverTime {
            every,
            last: None,
            moments: Vec::new(),
        }
    }

    /// Takes in a cycle.
    pub fn take(&mut self, machine: &Machine, cycle: &Cycle, control: &Control) {
        let Some(sample) = control.sample() else { return };
        if let Some(last) = &self.last {
            if sample.at.saturating_sub(last.at) < self.every {
                return;
            }
            let Some(rates) = Rates::between(machine, last, sample) else {
                return;
            };
            self.moments.push(Moment {
                at: sample.at,
                status: cycle.status.clone(),
                rates,
                vms: sample.vms.clone(),
            });
        }
        self.last = Some(sample.clone());
    }
}

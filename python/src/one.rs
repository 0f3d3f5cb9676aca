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
    /// The states of the run over time, if requested.
    pub over_time: Option<Vec<Moment>>,
}

/// The state of a run at one moment, and the rates since the moment before.
#[derive(Debug)]
pub struct Moment {
    pub at: Ns,
    pub status: Status,
    pub rates: Rates,
    /// The VMs at this moment.
    pub vms: Vec<VmSample>,
}

/// Records the moments of a run.
#[derive(Debug)]
pub(crate) struct OverTime {
    every: Ns,
    last: Option<Sample>,
    pub moments: Vec<Moment>,
}

impl OverTime {
    /// Records one moment per interval of this length, or as soon afterwards as the agent samples.
    pub(crate) fn new(every: Ns) -> OverTime {
        OverTime {
            every,
            last: None,
            moments: Vec::new(),
        }
    }

    /// Records a moment at this cycle if the interval since the last one is over.
    pub(crate) fn take(&mut self, machine: &Machine, cycle: &Cycle, control: &Control) {
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

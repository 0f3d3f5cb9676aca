//! A run that is over, and what was seen of it meanwhile.

use homenode_control::{Control, Epoch, Event, Status};
use homenode_host::{Rates, Sample, VmSample};
use homenode_machine::Machine;
use homenode_search::trial::Trial;
use homenode_units::Ns;

/// What one run left.
#[derive(Debug)]
pub struct One {
    pub trial: Trial,
    /// What the agent said, and when.
    pub said: Vec<(f64, Event)>,
    /// What it was like over time, where that was asked for.
    pub over_time: Option<Vec<Moment>>,
}

/// Two moments of a run, and what happened between them.
#[derive(Debug)]
pub struct Moment {
    pub at: Ns,
    pub status: Status,
    pub rates: Rates,
    /// VMs in the later of them.
    pub vms: Vec<VmSample>,
}

/// Takes moments.
#[derive(Debug)]
pub struct OverTime {
    every: Ns,
    last: Option<Sample>,
    pub moments: Vec<Moment>,
}

impl OverTime {
    /// One for each so long a time, or as soon afterwards as the agent looks.
    pub fn new(every: Ns) -> OverTime {
        OverTime {
            every,
            last: None,
            moments: Vec::new(),
        }
    }

    /// Looks at an epoch.
    pub fn take(&mut self, machine: &Machine, epoch: &Epoch, control: &Control) {
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
                status: epoch.status.clone(),
                rates,
                vms: sample.vms.clone(),
            });
        }
        self.last = Some(sample.clone());
    }
}

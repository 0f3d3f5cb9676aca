//! Sources that only some hosts have: a modelled PMU, and Xen's trace.

use homenode_kernel::modelled_pmu;
use homenode_undo::notices::Notices;
use homenode_undo::{Acting, Options};

use super::XenHost;
use crate::features::{COUNTED_BY_MODEL, NO_COUNTERS, NO_WAITING};
use crate::hypervisor::Hypervisor;
use crate::modelled::Model;
use crate::trace::Trace;
use crate::waiting::Waiting;

/// Finds the modelled PMU of an emulated host. Adds a notice about where counts come from.
pub(super) fn model(options: &Options, notices: &mut Notices) -> Option<Model> {
    let found = match options.acting {
        Acting::Live => modelled_pmu::find(&options.root),
        Acting::DryRun => Ok(None),
    };
    let page = found.unwrap_or_else(|error| {
        notices.add(format!("the modelled PMU is not used: {error}"));
        None
    });
    notices.add(match page {
        Some(_) => COUNTED_BY_MODEL.to_owned(),
        None => NO_COUNTERS.to_owned(),
    });
    let clock = options
        .machine
        .hardware
        .as_ref()
        .map(|hardware| hardware.clock_hz);
    page.map(|page| Model::new(page, clock))
}

/// Starts to read Xen's trace, if the operator wants that. Otherwise adds a notice with the reason.
pub(super) fn waiting(hypervisor: &Hypervisor, options: &Options, notices: &mut Notices) -> Option<Waiting> {
    let begun = match (options.trace_waiting, options.acting) {
        (true, Acting::Live) => Trace::begin(hypervisor, &options.root).map_err(|error| error.to_string()),
        (true, Acting::DryRun) => Err("a dry run does not read Xen's trace".to_owned()),
        (false, _) => Err("Xen's trace is read only with `--trace-waiting`".to_owned()),
    };
    match begun {
        Ok(trace) => Some(Waiting::new(trace)),
        Err(why) => {
            notices.add(format!("{NO_WAITING}: {why}"));
            None
        }
    }
}

impl XenHost {
    /// Reads the modelled PMU's counts for each domain.
    pub(super) fn count(&mut self) {
        let Some(model) = &mut self.model else {
            return;
        };
        self.counted.clear();
        for (vm, counted) in model.look(&self.hypervisor, &self.domains, self.busy.of_all()) {
            match (counted, self.domains.get(&vm)) {
                (Ok(counted), _) => drop(self.counted.insert(vm, counted)),
                (Err(why), Some(domain)) => self.notices.add(format!(
                    "LLC misses of domain {} are not counted: {why}",
                    domain.run.name
                )),
                (Err(_), None) => {}
            }
        }
    }

    /// Reads vCPUs' waiting times from Xen's trace.
    pub(super) fn trace(&mut self) {
        if let Some(waiting) = &mut self.waiting {
            self.waited = waiting.look(&self.domains);
            if let Some(why) = waiting.ended() {
                self.notices.add(format!("{NO_WAITING}: {why}"));
            }
        }
    }
}

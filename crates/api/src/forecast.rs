//! Predicts how fast VMs would be with other homes.

use homenode_control::Control;
use homenode_machine::Machine;
use homenode_policy::arrange::what_if::{NoForecast, Unknown, VmForecast};

use crate::Homes;
use crate::answer::{ApiError, Forecast, Predicted};
use crate::named;

/// Returns the predictions of the agent's loop.
///
/// # Errors
/// If a VM or node does not exist, or the agent makes no predictions, or knows too little yet.
pub fn forecast(control: &Control, machine: &Machine, homes: &Homes) -> Result<Forecast, ApiError> {
    if let Some(idle) = control.predictions_idle() {
        return Err(ApiError::refused(idle));
    }
    let status = control.status(machine);
    let wanted = homes.iter().map(|(name, home)| {
        let vm = named(&status.vms, name)?;
        Ok((vm.id, home.clone()))
    });
    let wanted = wanted.collect::<Result<_, ApiError>>()?;
    let forecast = control
        .what_if(machine, &wanted)
        .map_err(|refused| match refused {
            NoForecast::Nodes { .. } => ApiError::BadInput {
                why: refused.to_string(),
            },
            NoForecast::Unknown {
                why: Unknown::New { .. },
                ..
            } => ApiError::NotYet {
                why: refused.to_string(),
            },
            NoForecast::Unknown { .. } => ApiError::refused(refused.to_string()),
        })?;
    let idle = control.trials_idle();
    let short = forecast.short.iter().map(|short| {
        let (node, needed, free) = (short.node, short.needed_bytes, short.free_bytes);
        format!("node {node} has {free} free, but {needed} would move to it")
    });
    let vms = status.vms.iter().filter_map(|vm| {
        let found = forecast.vms.iter().find(|found| found.vm == vm.id)?;
        Some(predicted(vm.name.clone(), found))
    });
    Ok(Forecast {
        at_ns: status.at_ns,
        simulated: None,
        vms: vms.collect(),
        error_median: control.trials().error().filter(|_| idle.is_none()),
        trials_count: if idle.is_none() {
            control.trials().count()
        } else {
            0
        },
        notes: short.chain(idle).collect(),
    })
}

fn predicted(name: String, found: &VmForecast) -> Predicted {
    Predicted {
        name,
        id: found.vm,
        home: found.home.clone(),
        home_then: found.home_then.clone(),
        slow_down: found.slow_down.ok().map(|slow| slow.now),
        slow_down_then: found.slow_down.ok().map(|slow| slow.then),
        why_unknown: found.slow_down.err().map(|why| why.to_string()),
        obstacle: found.obstacle.as_ref().map(ToString::to_string),
    }
}

//! Answers about the working sets of VMs.

use homenode_api::answer::{ApiError, Figure, WorkingSet, WorkingSets};
use homenode_control::{Control, Mode, VmStatus};
use homenode_policy::working_set::{Certainty, Measured, Settled, Tracker};
use homenode_units::Ns;

/// Returns what the loop knows of the working sets of these VMs.
pub(crate) fn working_sets(control: &Control, now: Ns, vms: &[&VmStatus]) -> WorkingSets {
    WorkingSets {
        at_ns: now,
        trackers: control.trackers().to_vec(),
        vms: vms.iter().map(|vm| working_set(control, now, vm)).collect(),
    }
}

fn working_set(control: &Control, now: Ns, vm: &VmStatus) -> WorkingSet {
    let state = control.working_set();
    WorkingSet {
        vm: vm.name.clone(),
        memory_bytes: vm.memory_bytes,
        is_watched: state.is_watched(vm.id),
        why_not: state.why_not(vm.id).map(str::to_owned),
        working_set: state.measured(vm.id).map(|measured| figure(measured, now)),
    }
}

fn figure(measured: &Measured, now: Ns) -> Figure {
    let Measured {
        estimate,
        blind,
        cost,
        ..
    } = measured;
    let tracker: Tracker = estimate.tracker;
    let (certainty, certainty_means) = match estimate.certainty {
        Certainty::Bounds => (
            "bounds",
            "the true size is between these bounds if the tracker works as specified",
        ),
        Certainty::Percent95 => (
            "percent95",
            "the true size is between these bounds in 95 of 100 cases",
        ),
        Certainty::Spread => (
            "spread",
            "the smallest and the largest of recent windows; the largest includes what the tracker may have missed",
        ),
    };
    let above = estimate.most.saturating_sub(estimate.size);
    Figure {
        size_bytes: estimate.size,
        least_bytes: estimate.least,
        most_bytes: estimate.most,
        certainty: certainty.to_owned(),
        certainty_means: certainty_means.to_owned(),
        error_bytes: above.max(estimate.size.saturating_sub(estimate.least)),
        window_ns: estimate.window,
        tracker: tracker.name().to_owned(),
        tracker_merit: tracker.merit().to_owned(),
        sees: tracker.sees(),
        blind_spot: tracker.blind_spot().to_owned(),
        blind_bytes: blind.to_bytes(),
        hot_bytes: estimate.hot,
        warm_bytes: estimate.warm,
        kernel_bytes: estimate.kernel,
        is_settled: estimate.settled == Settled::Yes,
        lost: estimate.lost,
        cost_ns: *cost,
        at_ns: estimate.at,
        age_ns: now.saturating_sub(estimate.at),
    }
}

/// Checks that a VM's memory can be watched.
///
/// # Errors
/// If it can never be watched; the error says why.
pub(crate) fn can_be_watched(control: &Control, vm: &VmStatus) -> Result<(), ApiError> {
    let of_vm =
        |why: &str| ApiError::refused(format!("the memory of VM {} cannot be watched: {why}", vm.name));
    if let Some(why) = control.watching_idle() {
        return Err(of_vm(&why));
    }
    if control.is_opted_out(vm.id) {
        return Err(of_vm("its operator opted it out (manage='no' in its metadata)"));
    }
    if vm.mode == Mode::Observe {
        return Err(of_vm(
            "it is in mode observe (`homenode mode`), and watching would clear the kernel's accessed bits",
        ));
    }
    let trackers = control.trackers();
    if trackers.iter().all(|choice| choice.why_not.is_some()) {
        let each = trackers.iter().map(|choice| {
            let why = choice.why_not.as_deref().unwrap_or_default();
            format!("{}: {why}", choice.tracker.name())
        });
        let all: Vec<String> = each.collect();
        return Err(of_vm(&format!(
            "no tracker can determine which memory it uses ({})",
            all.join("; ")
        )));
    }
    Ok(())
}

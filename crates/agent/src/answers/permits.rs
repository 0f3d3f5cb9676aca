//! Answers about permits.

use homenode_api::answer::{Suggestion, VmPermit};
use homenode_control::{Advice, VmStatus};
use homenode_policy::permits::suggest::NoSuggestion;
use homenode_units::Ns;

/// Returns a VM's permit, the budget of cache misses that the operator gave it.
pub(crate) fn permit(vm: &VmStatus) -> VmPermit {
    VmPermit {
        name: vm.name.clone(),
        id: vm.id,
        counted_by: vm.counted_by,
        permit: vm.permit.clone(),
    }
}

/// Suggests two permits for a VM, from its behaviour and from its memory. Either may be missing; each comes with its reason.
pub(crate) fn suggestion(name: String, advice: &Advice, period: Ns) -> Suggestion {
    let (permit, why) = match &advice.from_behaviour {
        Ok(found) => {
            let (count, beyond) = (found.slices_count, found.beyond_count);
            let percent = found.percentile * 100.0;
            let why = format!(
                "by its behaviour: {percent:.0} percent of the last {count} periods of {period} stayed within it, {beyond} did not"
            );
            (Some(found.permit), why)
        }
        Err(NoSuggestion::TooShort {
            slices_count,
            slices_min,
        }) => {
            let least = Ns(period.0.saturating_mul(u64::from(*slices_min)));
            let why = match advice.unmetered {
                Some(unmetered) => format!("by its behaviour: unknown, {unmetered}"),
                None => format!(
                    "by its behaviour: it was watched for only {slices_count} periods of {period}; ask again after {least}"
                ),
            };
            (None, why)
        }
        Err(other) => (None, format!("by its behaviour: {other}")),
    };
    let memory = match advice.from_memory {
        Some(_) => format!(
            "by its memory, {}: a proportional share of the host's total cache capacity",
            advice.memory_bytes
        ),
        None => "by its memory: the host's caches or memory are not known".to_owned(),
    };
    Suggestion {
        vm: name,
        from_behaviour: permit,
        behaviour: why,
        from_memory: advice.from_memory,
        memory,
    }
}

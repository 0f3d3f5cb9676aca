//! The limits beyond which figures are marked. The help text takes the limits from here.

use homenode_control::{NodeStatus, VmStatus};

/// How far a figure is past its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The figure is within its limits, or unknown.
    #[default]
    Fine,
    /// Past the first limit.
    Warn,
    /// Past the second limit.
    Bad,
}

/// Two limits of a share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    what: &'static str,
    warn: f64,
    bad: f64,
}

/// Share of a VM's memory accesses that are local.
pub(crate) const LOCAL: Limit = Limit::new("local: share of a VM's memory accesses that are local", 0.8, 0.5);
/// Waiting vCPUs of a VM, divided by all its vCPUs.
pub(crate) const VM_WAITING: Limit = Limit::new("wait: share of a VM's vCPUs that wait for a CPU", 0.05, 0.1);
/// Waiting vCPUs on a node, divided by the node's CPUs.
pub(crate) const NODE_WAITING: Limit = Limit::new(
    "wait: vCPUs that wait on a node, as a share of its CPUs",
    0.05,
    0.1,
);
/// Share of a node's memory that is free.
pub(crate) const FREE: Limit = Limit::new("free: share of a node's memory that is free", 0.1, 0.03);
/// Load of a memory controller.
pub(crate) const CONTROLLER: Limit =
    Limit::new("controller: load, as a share of what it can sustain", 0.7, 0.9);
/// Load of a link.
pub(crate) const LINK: Limit = Limit::new("link: load, as a share of what it can sustain", 0.5, 0.8);

/// All limits.
const ALL: [Limit; 6] = [LOCAL, VM_WAITING, NODE_WAITING, FREE, CONTROLLER, LINK];

impl Limit {
    const fn new(what: &'static str, warn: f64, bad: f64) -> Limit {
        Limit { what, warn, bad }
    }

    /// Returns the level of a share.
    pub(crate) fn level(self, share: f64) -> Level {
        // If low values are bad, the second limit is the lower one.
        let is_past = |limit: f64| match self.bad < self.warn {
            true => share < limit,
            false => share > limit,
        };
        match (is_past(self.bad), is_past(self.warn)) {
            (true, _) => Level::Bad,
            (false, true) => Level::Warn,
            (false, false) => Level::Fine,
        }
    }
}

/// Returns the limits, one per line.
pub(crate) fn sentences() -> Vec<String> {
    let of_limit = |limit: &Limit| {
        let side = if limit.bad < limit.warn { "below" } else { "above" };
        let percent = |share: f64| format!("{:.0}%", share * 100.0);
        format!(
            "{side} {:>3}, {:>3}  {}",
            percent(limit.warn),
            percent(limit.bad),
            limit.what
        )
    };
    let mut lines: Vec<String> = ALL.iter().map(of_limit).collect();
    lines.push("OVER             permit: more used than booked; red while a quota slows it".to_owned());
    lines.push("less than needs  memory: less than the working set needs (red)".to_owned());
    lines
}

/// Returns the share of a VM's vCPUs that waited, if known.
pub(crate) fn waiting_share(vm: &VmStatus) -> Option<f64> {
    let vcpus: usize = vm.vcpus_by_node.iter().map(|on| on.vcpus).sum();
    Some(vm.vcpus_waiting? / vcpus.max(1) as f64)
}

/// Returns whether a VM exceeds its permit, as a level.
pub(crate) fn permit(vm: &VmStatus) -> Level {
    use homenode_policy::permits::Standing;
    match (vm.permit.standing, vm.permit.quota) {
        (Some(Standing::Over), Some(_)) => Level::Bad,
        (Some(Standing::Over), None) | (_, Some(_)) => Level::Warn,
        _ => Level::Fine,
    }
}

/// Returns whether a VM lacks memory that it needs, as a level.
pub(crate) fn memory(vm: &VmStatus) -> Level {
    match vm.memory.need_bytes {
        Some(need) if vm.memory.limit_bytes.is_some() && vm.memory_bytes < need => Level::Bad,
        _ => Level::Fine,
    }
}

/// Returns the sum of the levels of a VM's figures.
pub(crate) fn trouble(vm: &VmStatus) -> usize {
    let waiting = waiting_share(vm).map(|share| VM_WAITING.level(share));
    let local = vm.local_access_ratio.map(|share| LOCAL.level(share));
    let all = [
        waiting.unwrap_or_default(),
        local.unwrap_or_default(),
        permit(vm),
        memory(vm),
    ];
    all.iter().map(|level| *level as usize).sum()
}

/// Returns the level of a node's free memory.
pub(crate) fn free(node: &NodeStatus) -> Level {
    let share = node.memory_free_bytes.as_f64() / node.memory_bytes.as_f64().max(1.0);
    // A node that has no memory does not run short of it.
    if node.memory_bytes.0 == 0 {
        Level::Fine
    } else {
        FREE.level(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_marks_the_same_figures_as_top() {
        let page = include_str!("../../../web/limits.js");
        for (name, limit) in ["local", "vmWaiting", "nodeWaiting", "free", "controller", "link"]
            .iter()
            .zip(ALL)
        {
            let said = format!("  {name}: {{ warn: {}, bad: {} }},", limit.warn, limit.bad);
            assert!(page.lines().any(|line| line == said), "{said}");
        }
    }

    #[test]
    fn a_limit_holds_in_its_own_direction_and_is_said_so() {
        assert_eq!(
            [0.8, 0.79, 0.49].map(|share| LOCAL.level(share)),
            [Level::Fine, Level::Warn, Level::Bad]
        );
        assert_eq!(
            [0.5, 0.51, 0.81].map(|share| LINK.level(share)),
            [Level::Fine, Level::Warn, Level::Bad]
        );
        let said = sentences();
        assert!(said[0].starts_with("below 80%, 50%  local"), "{said:?}");
        assert!(said[5].starts_with("above 50%, 80%  link"), "{said:?}");
    }
}

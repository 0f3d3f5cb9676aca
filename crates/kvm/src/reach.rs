//! What a VM may use: the CPUs that remain when all bounds that an operator set, by any means, are applied.
//!
//! ```text
//!   cpuset of its cgroups (v1, v2) ─┐
//!   <vcpu cpuset>                  ─┤
//!   nodes of its cgroups' cpuset   ─┼─ intersection ─▶ CPUs ─▶ homes, pins, emulator
//!   affinity before the agent      ─┤                  none ─▶ the VM is not touched, and the reason is reported
//!   not isolated (isolcpus=)       ─┘
//! ```
//!
//! A VM may use an isolated CPU if its operator names that CPU: in the domain's own `<vcpu cpuset>`, or in a cpuset or an
//! affinity that has isolated CPUs only. A slice or an affinity that also has other CPUs does not count: the kernel balances no
//! load on isolated CPUs, so vCPUs pinned to such a set could all stay on one CPU.
//!
//! The kernel removes a CPU that goes offline from every cpuset. That is not an operator's bound, and a home survives it.

use std::path::Path;

use homenode_kernel::cgroup::{Cpuset, Hierarchy};
use homenode_kernel::read::ReadError;
use homenode_machine::Machine;
use homenode_units::CpuSet;

use crate::domain::Domain;

/// The bounds of one VM as of the last reading, except affinities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// The cpuset, which the kernel applies to every affinity of the VM's threads.
    pub cpuset: Cpuset,
    /// CPUs of `<vcpu cpuset>`.
    allowed: Option<CpuSet>,
    /// CPUs of the machine that are offline now.
    pub offline: CpuSet,
}

/// The part of a host that its bounds leave to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub cpus: CpuSet,
    /// The bounds that were applied, for the message if nothing is left.
    bounds: Vec<(&'static str, CpuSet)>,
}

impl Reach {
    /// Reads the bounds of a VM with this QEMU process.
    pub(crate) fn read(groups: &Hierarchy, pid: i32, domain: &Domain) -> Result<Reach, ReadError> {
        Ok(Reach {
            cpuset: groups.cpuset_of(pid)?,
            allowed: domain.cpuset.clone(),
            offline: CpuSet::new(),
        })
    }

    /// Reads the bounds of a VM that is known only by its process, for undoing. Unreadable cgroups count as no bound.
    pub(crate) fn of_process(root: &Path, pid: i32) -> Reach {
        let cpuset = Hierarchy::read(root).and_then(|groups| groups.cpuset_of(pid));
        Reach {
            cpuset: cpuset.unwrap_or_default(),
            allowed: None,
            offline: CpuSet::new(),
        }
    }

    /// Reads the cpuset again, after the kernel did not do what was requested.
    pub(crate) fn look_again(&mut self, root: &Path, pid: i32) {
        self.cpuset = Reach::of_process(root, pid).cpuset;
    }

    /// Returns what is left to a VM whose threads had these affinities before the agent touched it.
    pub(crate) fn left(&self, machine: &Machine, affinities: &[CpuSet]) -> Left {
        let all_cpus = machine.cpu_set();
        let by_nodes = self.cpus_near_memory(machine);
        let mut bounds: Vec<(&'static str, CpuSet)> = Vec::new();
        let all = [
            ("its cgroups", self.cpuset.cpus.as_ref()),
            ("the memory nodes of its cgroups", by_nodes.as_ref()),
            ("its <vcpu cpuset>", self.allowed.as_ref()),
        ];
        let affinities = affinities
            .iter()
            .map(|cpus| ("the affinity of its threads", Some(cpus)));
        for (what, cpus) in all.into_iter().chain(affinities) {
            let Some(cpus) = cpus.map(|cpus| cpus.union(&self.offline).intersection(&all_cpus)) else {
                continue;
            };
            if cpus != all_cpus && bounds.iter().all(|(_, known)| *known != cpus) {
                bounds.push((what, cpus));
            }
        }
        let mut isolated = machine.isolated.clone();
        if let Some(named) = self.allowed.as_ref().filter(|named| !all_cpus.is_subset(named)) {
            isolated = isolated.difference(named);
        }
        let mut cpus = all_cpus;
        for (what, bound) in &bounds {
            cpus = cpus.intersection(bound);
            // A bound to nodes does not name CPUs.
            if *what != all[1].0 && bound.is_subset(&machine.isolated) {
                isolated = isolated.difference(bound);
            }
        }
        let mut left = cpus.difference(&isolated);
        if left.is_subset(&self.offline) {
            left = CpuSet::new();
        }
        if left.is_empty() && !cpus.is_subset(&self.offline) {
            bounds.push(("isolcpus=", machine.cpu_set().difference(&isolated)));
        }
        Left { cpus: left, bounds }
    }

    /// Returns the CPUs of the memory nodes that the VM's cgroups allow; `None` if that is no bound, or would leave no CPU. A
    /// home must be on these nodes, since the VM's memory could not follow it elsewhere.
    fn cpus_near_memory(&self, machine: &Machine) -> Option<CpuSet> {
        let cpus = machine.cpus_of(self.cpuset.nodes.as_ref()?);
        let cpus = match &self.cpuset.cpus {
            Some(allowed) if cpus.intersection(allowed).is_empty() => return None,
            _ => cpus,
        };
        let elsewhere = machine.memory_nodes().difference(self.cpuset.nodes.as_ref()?);
        (!cpus.is_empty() && !elsewhere.is_empty()).then_some(cpus)
    }

    /// Returns the affinity that the kernel applies for these CPUs: those within the cpuset, or the whole cpuset if none are.
    pub(crate) fn in_force(&self, cpus: &CpuSet) -> CpuSet {
        let Some(cpuset) = &self.cpuset.cpus else {
            return cpus.clone();
        };
        match cpus.intersection(cpuset) {
            within if within.is_empty() => cpuset.clone(),
            within => within,
        }
    }

    /// Returns the CPUs to request in order to restore these: the kernel refuses a set that is wholly outside the cpuset.
    pub(crate) fn to_give_back(&self, cpus: &CpuSet) -> CpuSet {
        match &self.cpuset.cpus {
            Some(cpuset) if cpus.intersection(cpuset).is_empty() => cpuset.clone(),
            _ => cpus.clone(),
        }
    }

    /// Whether the CPUs in force are what the kernel applies for one of these sets.
    pub(crate) fn is_one_of(&self, in_force: &CpuSet, usable: &CpuSet, sets: &[CpuSet]) -> bool {
        let is_so = |set: &CpuSet| {
            set.intersection(usable) == *in_force || self.in_force(set).intersection(usable) == *in_force
        };
        sets.iter().any(is_so)
    }

    /// Whether a pin to these CPUs takes nothing from a VM that its other bounds leave it.
    pub(crate) fn is_no_limit(&self, machine: &Machine, cpus: &CpuSet) -> bool {
        let left = self.left(machine, &[]).cpus;
        !left.is_empty() && left.is_subset(cpus)
    }
}

impl Left {
    /// Excludes the operator's reserved CPUs if only reserved CPUs are left: then nothing is left.
    pub(crate) fn but_for(mut self, reserved: &CpuSet) -> Left {
        if !self.cpus.is_empty() && self.cpus.is_subset(reserved) {
            self.bounds.push(("all of these together", self.cpus.clone()));
            self.bounds
                .push(("less those of placement.reserved_cpus", reserved.clone()));
            self.cpus = CpuSet::new();
        }
        self
    }

    /// Returns the CPUs that plans must stay within; `None` if these are all CPUs that VMs may use.
    pub(crate) fn limit(&self, machine: &Machine) -> Option<CpuSet> {
        let of_all = machine.cpu_set().difference(&machine.isolated);
        (self.cpus != of_all).then(|| self.cpus.clone())
    }

    /// Why nothing is left, as the end of a sentence.
    pub(crate) fn why_nothing(&self) -> String {
        let bound = |(what, cpus): &(&str, CpuSet)| match cpus.is_empty() {
            true => format!("{what} (no CPU of this host)"),
            false => format!("{what} (CPUs {cpus})"),
        };
        let bounds: Vec<String> = self.bounds.iter().map(bound).collect();
        format!(
            "no CPU of this host is within all of its bounds: {}",
            bounds.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_kernel::fake::machine;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn reach(cgroup: Option<&str>, nodes: Option<&str>, allowed: Option<&str>) -> Reach {
        Reach {
            cpuset: Cpuset {
                cpus: cgroup.map(cpus),
                nodes: nodes.map(|nodes| nodes.parse().unwrap()),
            },
            allowed: allowed.map(cpus),
            offline: CpuSet::new(),
        }
    }

    /// Returns a host with four nodes of one CPU each; the given CPUs are isolated.
    fn host(isolated: &str) -> Machine {
        Machine {
            isolated: cpus(isolated),
            ..machine(&[0, 0, 1, 1])
        }
    }

    fn left(isolated: &str, reach: &Reach, affinities: &[&str]) -> String {
        let affinities: Vec<CpuSet> = affinities.iter().map(|list| cpus(list)).collect();
        reach.left(&host(isolated), &affinities).cpus.to_string()
    }

    #[test]
    fn a_vm_may_use_what_every_bound_leaves_it() {
        assert_eq!(left("", &reach(None, None, None), &["0-7"]), "0-3");
        assert_eq!(left("", &reach(Some("1,3"), None, None), &["0-3"]), "1,3");
        assert_eq!(left("", &reach(Some("0-2"), None, Some("1-3")), &["0-3"]), "1-2");
        assert_eq!(
            left("", &reach(Some("0-2"), Some("0,2-3"), Some("1-3")), &[]),
            "2"
        );
        assert_eq!(left("", &reach(None, None, None), &["0-1", "1-2"]), "1");
        // A memory node without usable CPUs must not leave the VM without CPUs.
        assert_eq!(left("", &reach(Some("1"), Some("0"), None), &[]), "1");
    }

    #[test]
    fn isolated_cpus_are_left_to_those_whose_own_bounds_name_them() {
        let free = reach(None, None, None);
        assert_eq!(
            left("1,3", &free, &["0-3"]),
            "0,2",
            "all that there is names none"
        );
        assert_eq!(left("1,3", &free, &["0,2"]), "0,2", "what every process inherits");
        assert_eq!(left("1,3", &free, &["1,3"]), "1,3");
        assert_eq!(left("1,3", &reach(None, None, Some("1,3")), &["1,3"]), "1,3");
        assert_eq!(left("1,3", &reach(None, None, Some("0-3")), &["0-3"]), "0,2");
        assert_eq!(left("1,3", &reach(Some("1,3"), None, None), &["1,3"]), "1,3");
        assert_eq!(left("1,3", &reach(Some("0-1"), None, None), &["0"]), "0");
        assert_eq!(left("1,3", &reach(None, Some("0-1"), None), &["0-3"]), "0");
        // A slice of many CPUs, or the affinity that the kernel applies within it, does not name isolated CPUs.
        assert_eq!(left("1,3", &reach(Some("1-3"), None, None), &["1-3"]), "2");
        assert_eq!(
            left("1,3", &reach(Some("1-3"), None, Some("1-3")), &["1-3"]),
            "1-3"
        );
        assert_eq!(free.left(&host("1,3"), &[]).limit(&host("1,3")), None);
        assert_eq!(
            free.left(&host("1,3"), &[cpus("1")]).limit(&host("1,3")),
            Some(cpus("1"))
        );
    }

    #[test]
    fn a_cpu_that_is_offline_is_no_bound_of_an_operators() {
        // While CPU 3 is offline, the kernel removes it from every cpuset.
        let offline = |mut reach: Reach| {
            reach.offline = cpus("3");
            reach
        };
        let free = offline(reach(Some("0-2"), None, None));
        assert_eq!(free.left(&host(""), &[cpus("0-2")]).limit(&host("")), None);
        assert_eq!(
            left("", &offline(reach(Some("1-2"), None, None)), &["0-2"]),
            "1-3"
        );
        // But a bound to only that CPU leaves nothing.
        assert_eq!(left("", &offline(reach(None, None, Some("3"))), &["0-2"]), "");
    }

    #[test]
    fn a_vm_whose_only_cpus_are_reserved_has_none() {
        let only = reach(None, None, Some("3")).left(&host(""), &[]);
        assert_eq!(only.clone().but_for(&cpus("0")).cpus, cpus("3"));
        let none = only.but_for(&cpus("0,3"));
        assert!(
            none.cpus.is_empty() && none.why_nothing().contains("reserved_cpus"),
            "{}",
            none.why_nothing()
        );
    }

    #[test]
    fn where_nothing_is_left_every_bound_is_named() {
        let none = reach(Some("1,3"), None, Some("0,2")).left(&host(""), &[]);
        assert!(none.cpus.is_empty());
        assert_eq!(none.limit(&host("")), Some(CpuSet::new()), "and never anywhere");
        let said = none.why_nothing();
        assert!(
            said.contains("its cgroups (CPUs 1,3), its <vcpu cpuset> (CPUs 0,2)"),
            "{said}"
        );
        let offline = reach(None, None, Some("8-9")).left(&host(""), &[]);
        assert!(
            offline
                .why_nothing()
                .contains("<vcpu cpuset> (no CPU of this host)")
        );
        let only_isolated = reach(None, Some("1"), None).left(&host("1,3"), &[]);
        assert!(only_isolated.cpus.is_empty() && only_isolated.why_nothing().contains("isolcpus="));
    }

    #[test]
    fn what_the_kernel_makes_of_a_pin_within_a_cpuset_is_known() {
        let within = reach(Some("1,3"), None, None);
        let (all, pins) = (cpus("0-3"), [cpus("0-1")]);
        assert_eq!(within.in_force(&cpus("0-1")), cpus("1"));
        assert_eq!(within.in_force(&cpus("0,2")), cpus("1,3"));
        assert!(within.is_one_of(&cpus("1"), &all, &pins) && within.is_one_of(&cpus("0-1"), &all, &pins));
        assert!(!within.is_one_of(&cpus("3"), &all, &pins));
        assert_eq!(within.to_give_back(&cpus("0-3")), cpus("0-3"));
        assert_eq!(within.to_give_back(&cpus("0,2")), cpus("1,3"));
        assert!(within.is_no_limit(&host(""), &cpus("1,3")) && !within.is_no_limit(&host(""), &cpus("1")));
    }
}

//! Checks of a VM and its programs: on its own, and on the machine that is to run it.

use homenode_machine::Machine;
use homenode_units::{Bytes, CpuSet, Migration, NodeSet, Placing};

use super::TwinError;
use crate::scenario::{Allocation, Hypervisor, NextProgram, Pinning, RuntimeNodes, Scenario, VmSpec, Vnuma};

impl NextProgram {
    pub(super) fn check(&self, scenario: &Scenario, vm: &VmSpec) -> Result<(), (&'static str, TwinError)> {
        scenario
            .workload_named(vm, &self.workload)
            .map_err(|error| ("then", error))?;
        if !(self.work_share > 0.0 && self.work_share.is_finite()) {
            let error = TwinError::Figure {
                vm: vm.name.clone(),
                what: "work_share of a program in `then`",
                value: self.work_share.to_string(),
                expected: "it must be above 0",
            };
            return Err(("then", error));
        }
        Ok(())
    }
}

impl VmSpec {
    pub(super) fn check_figures(&self) -> Result<(), (&'static str, TwinError)> {
        let figure = |what, value: String, expected| {
            let vm = self.name.clone();
            Err((
                what,
                TwinError::Figure {
                    vm,
                    what,
                    value,
                    expected,
                },
            ))
        };
        if self.vcpus == 0 {
            return figure("vcpus", "0".into(), "a VM needs at least one");
        }
        if !(self.work_share > 0.0 && self.work_share.is_finite()) {
            return figure("work_share", self.work_share.to_string(), "it must be above 0");
        }
        let moves = self.thread_moves_per_minute;
        if !(0.0..=60_000.0).contains(&moves) {
            let expected = "it must lie between 0 and 60000";
            return figure("thread_moves_per_minute", moves.to_string(), expected);
        }
        if let Some(footprint) = self.kernel_footprint.filter(|footprint| *footprint > self.memory) {
            let expected = "the kernel takes at most the VM's memory";
            return figure("kernel_footprint", footprint.to_string(), expected);
        }
        Ok(())
    }

    /// Checks that the guest's view of nodes is possible on its host.
    pub(super) fn check_guest(&self, hypervisor: Hypervisor) -> Result<(), (&'static str, TwinError)> {
        let native = hypervisor == Hypervisor::Native;
        let rounds = self.memory_policy.placing != Placing::FirstTouch;
        if native && self.vnuma != Vnuma::None {
            return self.refuse(
                "vnuma",
                "vnuma",
                "contradicts hypervisor = \"native\", whose kernel knows the nodes itself",
                "leave it out",
            );
        }
        if native && self.thread_moves_per_minute > 0.0 {
            return self.refuse(
                "thread_moves_per_minute",
                "thread_moves_per_minute",
                "contradicts hypervisor = \"native\", whose scheduler moves the threads itself",
                "leave it out",
            );
        }
        if native && self.memory_policy.placing == Placing::Round1g {
            return self.refuse(
                "memory_policy",
                "memory_policy = \"round-1g\"",
                "needs a hypervisor, but the scenario has hypervisor = \"native\"",
                "use round-4k or first-touch",
            );
        }
        if rounds && self.vnuma != Vnuma::None {
            return self.refuse(
                "memory_policy",
                "memory_policy = \"round-...\"",
                "spreads every virtual node of vnuma = \"static\" or \"live\" over the host",
                "use first-touch, or vnuma = \"none\"",
            );
        }
        if native && self.memory_policy.migration == Migration::AutoNuma {
            return self.refuse(
                "memory_policy",
                "memory_policy = \"...+autonuma\"",
                "needs a hypervisor, but the scenario has hypervisor = \"native\"",
                "set autonuma = true",
            );
        }
        let one_node = !native && self.vnuma == Vnuma::None;
        self.check_sight(one_node)
    }

    /// Checks that the guest sees the nodes that its settings depend on. `one_node` is true if it sees only one.
    fn check_sight(&self, one_node: bool) -> Result<(), (&'static str, TwinError)> {
        let rounds = self.memory_policy.placing != Placing::FirstTouch;
        if one_node && self.passthrough && !rounds {
            return self.refuse(
                "passthrough",
                "passthrough",
                "lets a device write to pages directly, which fails for pages that memory_policy = \"first-touch\" has not \
                 mapped yet, and the guest gives up the request before the hypervisor hears of it",
                "use round-4k or round-1g, or leave it out",
            );
        }
        if one_node && self.allocation == Allocation::Interleave {
            return self.refuse(
                "allocation",
                "allocation = \"interleave\"",
                "has no effect in a guest that sees one node",
                "set vnuma = \"static\", or memory_policy = \"round-4k\"",
            );
        }
        if one_node && self.autonuma {
            return self.refuse(
                "autonuma",
                "autonuma",
                "has no effect in a guest that sees one node",
                "set vnuma = \"static\"",
            );
        }
        if one_node && self.runtime_nodes != RuntimeNodes::None {
            return self.refuse(
                "runtime_nodes",
                "runtime_nodes",
                "has no effect in a guest that sees one node",
                "set vnuma = \"static\" or \"live\"",
            );
        }
        if self.runtime_nodes == RuntimeNodes::Live && self.vnuma == Vnuma::Static {
            return self.refuse(
                "runtime_nodes",
                "runtime_nodes = \"live\"",
                "needs a guest kernel that reports changes, but with vnuma = \"static\" the kernel never learns of them",
                "set vnuma = \"live\", or runtime_nodes = \"static\"",
            );
        }
        Ok(())
    }

    pub(in crate::scenario) fn refuse(
        &self,
        key: &'static str,
        setting: &'static str,
        problem: &'static str,
        remedy: &'static str,
    ) -> Result<(), (&'static str, TwinError)> {
        let vm = self.name.clone();
        let error = TwinError::Contradiction {
            vm,
            setting,
            problem,
            remedy,
        };
        Err((key, error))
    }

    /// Whether the VM gets all of its memory at creation.
    pub(super) fn allocated_at_creation(&self, hypervisor: Hypervisor) -> bool {
        hypervisor != Hypervisor::Native && self.memory_policy.placing != Placing::FirstTouch
    }

    pub(super) fn check_fit(&self, machine: &Machine, host: Bytes) -> Result<(), (&'static str, TwinError)> {
        let name = || self.name.clone();
        if usize::from(self.vcpus) > machine.cpus.len() {
            let (vcpus, cpus) = (self.vcpus, machine.cpus.len());
            let error = TwinError::VcpusBeyondHost {
                vm: name(),
                vcpus,
                machine: machine.name.clone(),
                cpus,
            };
            return Err(("vcpus", error));
        }
        if self.memory > host {
            return Err(("memory", beyond_host(&self.name, self.memory, machine, host)));
        }
        if let Some(cpus) = &self.cpus {
            part_of_cpus(&self.name, cpus, machine).map_err(|error| ("cpus", error))?;
        }
        let cpus = self.cpus.as_ref().map_or(machine.cpus.len(), CpuSet::len);
        if self.pinning == Pinning::OneToOne && usize::from(self.vcpus) > cpus {
            let error = TwinError::Contradiction {
                vm: name(),
                setting: "pinning = \"one-to-one\"",
                problem: "needs a CPU for each vCPU, but the VM has fewer CPUs than vCPUs",
                remedy: "give it more in `cpus`, or fewer vCPUs",
            };
            return Err(("pinning", error));
        }
        match &self.memory_nodes {
            Some(nodes) => part_of_nodes(&self.name, nodes, machine).map_err(|error| ("memory_nodes", error)),
            None => Ok(()),
        }
    }
}

pub(super) fn beyond_host(vm: &str, memory: Bytes, machine: &Machine, host: Bytes) -> TwinError {
    TwinError::MemoryBeyondHost {
        vm: vm.to_owned(),
        memory,
        machine: machine.name.clone(),
        host,
    }
}

pub(super) fn part_of_cpus(vm: &str, cpus: &CpuSet, machine: &Machine) -> Result<(), TwinError> {
    let usable = machine.cpu_set();
    if cpus.is_empty() || !cpus.is_subset(&usable) {
        return Err(TwinError::Cpus {
            vm: vm.to_owned(),
            cpus: cpus.clone(),
            usable,
            machine: machine.name.clone(),
        });
    }
    Ok(())
}

pub(super) fn part_of_nodes(vm: &str, nodes: &NodeSet, machine: &Machine) -> Result<(), TwinError> {
    let usable = machine.memory_nodes();
    if nodes.is_empty() || !nodes.is_subset(&usable) {
        return Err(TwinError::Nodes {
            vm: vm.to_owned(),
            nodes: nodes.clone(),
            usable,
            machine: machine.name.clone(),
        });
    }
    Ok(())
}

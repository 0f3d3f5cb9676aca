//! VMs whose I/O goes through a driver domain, and VMs that run one program after the other.

use crate::flip_pool::{self, Sizing};
use homenode_machine::notation;
use homenode_units::{Bytes, MemoryPolicy, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EventAction, Hypervisor, ReleaseCalls, Scenario, TwinError, VmSpec};

/// The driver domain that a VM's I/O goes through [Flip, section II.B]. Pages change hands according to Algorithm 1
/// (`twin::flip_pool`).
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    /// Name of the driver domain: another VM of the scenario, which is idle and has memory of its own.
    pub vm: String,
    /// How data gets from the driver domain's pages into the VM's.
    #[serde(default)]
    pub transfer: Transfer,
    /// Pool of pages that only I/O uses; absent if any page may be exchanged.
    #[serde(default)]
    pub pool: Option<PoolSpec>,
}

/// How data gets into a VM's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// The VM and the driver domain exchange pages.
    #[default]
    Flip,
    /// The driver domain copies the data.
    Copy,
}

/// A pool of pages for I/O (`flip_pool::Config`).
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolSpec {
    /// Whether the pool keeps its size. If so, `initial` must be set to what `homenode calibrate --pool` finds.
    pub fixed: bool,
    /// Size at the start; if absent, 500 MB as in [Flip, section V-A].
    #[serde(with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Size>")]
    pub initial: Option<Bytes>,
    /// The pool grows at a flip that finds more of it in use than this, in percent.
    pub grow_above_percent: u32,
    /// The pool shrinks at a flip that finds less of it in use than this, in percent.
    pub shrink_below_percent: u32,
    /// The pool grows or shrinks by this much of its size, in percent.
    pub step_percent: u32,
}

impl Default for PoolSpec {
    fn default() -> PoolSpec {
        let pool = flip_pool::Config::default();
        PoolSpec {
            fixed: false,
            initial: None,
            grow_above_percent: pool.grow_above_percent,
            shrink_below_percent: pool.shrink_below_percent,
            step_percent: pool.step_percent,
        }
    }
}

impl PoolSpec {
    /// Returns the pool's configuration in [`crate::flip_pool`].
    pub(crate) fn config(&self) -> flip_pool::Config {
        let unset = match self.fixed {
            true => Pages(1).to_bytes(),
            false => flip_pool::Config::default().initial,
        };
        flip_pool::Config {
            sizing: if self.fixed {
                Sizing::Static
            } else {
                Sizing::Dynamic
            },
            initial: self.initial.unwrap_or(unset),
            grow_above_percent: self.grow_above_percent,
            shrink_below_percent: self.shrink_below_percent,
            step_percent: self.step_percent,
        }
    }
}

/// A program that a guest runs after another.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NextProgram {
    /// The program's workload.
    pub workload: String,
    /// Share of the program's work to do, as `work_share` of a VM.
    #[serde(default = "super::whole")]
    pub work_share: f64,
}

impl NextProgram {
    /// Creates a program that does all the work of a workload.
    pub fn new(workload: &str) -> NextProgram {
        NextProgram {
            workload: workload.to_owned(),
            work_share: super::whole(),
        }
    }

    /// Sets the share of the program's work to do.
    #[must_use]
    pub fn doing(mut self, work_share: f64) -> NextProgram {
        self.work_share = work_share;
        self
    }
}

impl Scenario {
    /// Whether a VM is the driver domain of another.
    pub(crate) fn drives(&self, vm: &str) -> bool {
        let others = self.vms.iter().filter(|other| other.name != vm);
        let mut backends = others.filter_map(|other| other.driver_domain.as_ref());
        backends.any(|backend| backend.vm == vm)
    }

    /// Whether a VM has all of its memory from its creation on, because it has a driver domain or is one.
    pub(crate) fn owns_frames(&self, vm: &VmSpec) -> bool {
        vm.driver_domain.is_some() || self.drives(&vm.name)
    }

    /// Checks that a VM with a driver domain is on one node. Also checks that the driver domain is there before it and runs no
    /// other programs.
    pub(super) fn check_backend(&self, vm: &VmSpec) -> Result<(), (&'static str, TwinError)> {
        let refuse = |key, message| self.refuse(vm, key, message);
        let (name, drives) = (&vm.name, self.drives(&vm.name));
        if self.owns_frames(vm) {
            let role = if drives {
                "is a driver domain"
            } else {
                "has a driver domain"
            };
            if vm.memory_nodes.as_ref().is_none_or(|nodes| nodes.len() != 1) {
                let message =
                    format!("VM {name} {role}, so it is created on one node; set `memory_nodes` to one node");
                return refuse("memory_nodes", message);
            }
            if vm.memory_policy != MemoryPolicy::default() || vm.autonuma {
                let message = format!(
                    "VM {name} {role}, so it stays on one node; leave out memory_policy and autonuma"
                );
                return refuse("memory_nodes", message);
            }
        }
        if drives {
            let stops = |event: &super::EventSpec| event.vm == *name && event.action == EventAction::Stop;
            if self.workload(vm).is_ok_and(|workload| workload.program.is_some()) || !vm.then.is_empty() {
                let message = format!(
                    "VM {name} is a driver domain, in which the twin runs no programs; use workload \"idle\""
                );
                return refuse("workload", message);
            }
            if self.events.iter().any(stops) || self.started_by_event(name) {
                let message = format!("VM {name} is a driver domain; no event may start or stop it");
                return refuse("name", message);
            }
        }
        let released = vm.release_calls != ReleaseCalls::None;
        if released && (self.owns_frames(vm) || !vm.then.is_empty()) {
            let message = format!(
                "VM {name} keeps its pages because of a driver domain or `then`; leave out release_calls"
            );
            return refuse("release_calls", message);
        }
        vm.driver_domain
            .as_ref()
            .map_or(Ok(()), |backend| self.check_way(vm, backend))
    }

    /// Checks that a VM's I/O can go through this driver domain.
    fn check_way(&self, vm: &VmSpec, backend: &Backend) -> Result<(), (&'static str, TwinError)> {
        let refuse = |key, message| self.refuse(vm, key, message);
        let name = &vm.name;
        let known = self.vms.iter().find(|other| other.name == backend.vm);
        let Some(driver) = known.filter(|driver| driver.name != *name) else {
            let message = format!("no other VM is named `{}`; add one that is idle", backend.vm);
            return refuse("driver_domain.vm", message);
        };
        if driver.driver_domain.is_some() {
            let message = format!(
                "VM {} is a driver domain and has one itself; remove its driver_domain",
                driver.name
            );
            return refuse("driver_domain.vm", message);
        }
        if driver.arrival > vm.arrival {
            let message = format!(
                "driver domain {} arrives after VM {name}; let it arrive first",
                driver.name
            );
            return refuse("driver_domain.vm", message);
        }
        if self.hypervisor == Hypervisor::Native {
            let message = format!(
                "VM {name} runs without a hypervisor and drives its devices itself; leave out driver_domain"
            );
            return refuse("driver_domain", message);
        }
        match &backend.pool {
            Some(_) if backend.transfer == Transfer::Copy => {
                let message = format!(
                    "VM {name} uses transfer = \"copy\", which exchanges no pages; leave out the pool"
                );
                refuse("driver_domain.pool", message)
            }
            Some(pool) => match pool.config().check(vm.memory) {
                Ok(()) => Ok(()),
                Err(error) => refuse("driver_domain.pool", format!("VM {name}: {error}")),
            },
            None => Ok(()),
        }
    }

    /// Checks that the size of a pool that keeps its size is known. A scenario can be read without it, to measure it.
    pub(super) fn check_pool(&self, vm: &VmSpec) -> Result<(), (&'static str, TwinError)> {
        let backend = vm.driver_domain.as_ref();
        match backend.and_then(|backend| backend.pool.as_ref()) {
            Some(pool) if pool.fixed && pool.initial.is_none() => {
                let (name, scenario) = (&vm.name, &self.name);
                let message = format!(
                    "the pool of VM {name} keeps its size, which is not set; set `initial` to what `homenode calibrate --pool \
                     {scenario}` finds, with the scenario's name or file"
                );
                self.refuse(vm, "driver_domain.pool", message)
            }
            _ => Ok(()),
        }
    }

    fn refuse(
        &self,
        vm: &VmSpec,
        key: &'static str,
        message: String,
    ) -> Result<(), (&'static str, TwinError)> {
        let (scenario, key_text) = (self.name.clone(), format!("vm {}: {key}", vm.name));
        let error = TwinError::Key {
            scenario,
            key: key_text,
            message,
        };
        Err((key, error))
    }
}

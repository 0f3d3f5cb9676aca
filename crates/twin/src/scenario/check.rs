//! Checks of a scenario that parses, and the places of the errors found.

mod vm;

use homenode_machine::Machine;
use homenode_machine_files::file::FileError;
use homenode_units::{Bytes, Candidates, CpuSet, NodeSet, Ns};

use super::{Enforcer, EventAction, EventSpec, Hypervisor, Scenario, VmSpec};
use crate::workload;
use vm::{beyond_host, part_of_cpus, part_of_nodes};

/// An error in a scenario or in a machine that is to run it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum TwinError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Workload(#[from] workload::WorkloadError),
    #[error(
        "machine {machine} has no timing figures, which a simulation needs; run it on a preset, or add [hardware] to its file"
    )]
    NoHardware { machine: String },
    #[error("machine {machine}: {what} is missing, which a simulation needs; add it to the machine's file")]
    MissingFigure { machine: String, what: String },
    #[error("scenario {scenario}: `{key}`: {message}")]
    Key {
        scenario: String,
        key: String,
        message: String,
    },
    #[error("scenario {scenario}: no VM; add a [[vm]]")]
    NoVms { scenario: String },
    #[error("scenario {scenario}: two VMs are named {vm}; names must differ")]
    VmTwice { scenario: String, vm: String },
    #[error("VM {vm}: {what} is {value}; {expected}")]
    Figure {
        vm: String,
        what: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("scenario {scenario}: two of its workloads are named {workload}; names must differ")]
    WorkloadTwice { scenario: String, workload: String },
    #[error("scenario {scenario}: {what} is {value}; {expected}")]
    Time {
        scenario: String,
        what: &'static str,
        value: Ns,
        expected: String,
    },
    #[error("event at {at}: no VM is named `{vm}`{candidates}")]
    EventVm {
        at: Ns,
        vm: String,
        candidates: Candidates,
    },
    #[error("VM {vm} has both an arrival and an event that starts it at {at}; remove one of them")]
    ArrivesTwice { vm: String, at: Ns },
    #[error("VM {vm}: no workload is named `{workload}`, and file names end with `.toml`{candidates}")]
    UnknownWorkload {
        vm: String,
        workload: String,
        candidates: homenode_units::Candidates,
    },
    #[error("VM {vm}: {setting} {problem}; {remedy}")]
    Contradiction {
        vm: String,
        setting: &'static str,
        problem: &'static str,
        remedy: &'static str,
    },
    #[error(
        "VM {vm} has {vcpus} vCPUs, but machine {machine} has only {cpus} CPUs; give the VM at most {cpus}"
    )]
    VcpusBeyondHost {
        vm: String,
        vcpus: u16,
        machine: String,
        cpus: usize,
    },
    #[error("VM {vm} has {memory} of memory, but machine {machine} has only {host}; give the VM less")]
    MemoryBeyondHost {
        vm: String,
        memory: Bytes,
        machine: String,
        host: Bytes,
    },
    #[error(
        "VM {vm} has {memory} of memory, but its guest with workload {workload} uses {footprint}; give the VM more"
    )]
    FootprintBeyondVm {
        vm: String,
        memory: Bytes,
        workload: String,
        footprint: Bytes,
    },
    #[error(
        "the VMs need {footprint} in total, but machine {machine} has {host}, and a simulated host has no swap; run fewer VMs"
    )]
    FootprintBeyondHost {
        footprint: Bytes,
        machine: String,
        host: Bytes,
    },
    #[error("VM {vm}: CPUs {{{cpus}}} must be one or more of the CPUs {usable} of machine {machine}")]
    Cpus {
        vm: String,
        cpus: CpuSet,
        usable: CpuSet,
        machine: String,
    },
    #[error(
        "VM {vm}: nodes {{{nodes}}} must be one or more of the nodes {usable}, which have memory on machine {machine}"
    )]
    Nodes {
        vm: String,
        nodes: NodeSet,
        usable: NodeSet,
        machine: String,
    },
}

/// An error, and the key of the scenario that it concerns.
struct Wrong {
    key: String,
    error: Box<TwinError>,
}

impl Wrong {
    /// Refuses the value of this key.
    fn at(key: &str, error: TwinError) -> Result<(), Wrong> {
        let (key, error) = (key.to_owned(), Box::new(error));
        Err(Wrong { key, error })
    }
}

/// Puts a table's key before the key within the table.
fn within(table: &str) -> impl Fn((&'static str, TwinError)) -> Wrong {
    move |(key, error)| Wrong {
        key: format!("{table}.{key}"),
        error: Box::new(error),
    }
}

impl Scenario {
    /// Checks the scenario on its own, without a machine.
    pub(super) fn check(&self) -> Result<(), TwinError> {
        self.check_itself().map_err(|wrong| self.placed(wrong))
    }

    /// Checks that a machine can run the scenario.
    ///
    /// # Errors
    /// The reason why it cannot, with the place if the scenario comes from a file.
    pub fn check_on(&self, machine: &Machine) -> Result<(), TwinError> {
        self.check()?;
        self.check_fit(machine).map_err(|wrong| self.placed(wrong))
    }

    /// Adds the place in the file to an error, if the scenario comes from a file.
    fn placed(&self, wrong: Wrong) -> TwinError {
        match &self.origin.0 {
            Some(source) => TwinError::File(source.complaint(&wrong.key, wrong.error.to_string())),
            None => *wrong.error,
        }
    }

    fn check_itself(&self) -> Result<(), Wrong> {
        let scenario = || self.name.clone();
        if self.vms.is_empty() {
            return Wrong::at("name", TwinError::NoVms { scenario: scenario() });
        }
        self.check_times()?;
        if let Some((key, message)) = self.disturbance.complaint() {
            let key = format!("disturbance.{key}");
            let error = TwinError::Key {
                scenario: scenario(),
                key: key.clone(),
                message,
            };
            return Wrong::at(&key, error);
        }
        self.check_workloads()?;
        self.check_vms()?;
        self.check_enforcer()?;
        self.check_balancing()?;
        for (at, event) in self.events.iter().enumerate() {
            self.check_event(event).map_err(within(&format!("event[{at}]")))?;
        }
        Ok(())
    }

    fn check_times(&self) -> Result<(), Wrong> {
        if self.duration == Ns::ZERO {
            let (what, expected) = ("duration", "it must be above 0".to_owned());
            let (scenario, value) = (self.name.clone(), self.duration);
            return Wrong::at(
                "duration",
                TwinError::Time {
                    scenario,
                    what,
                    value,
                    expected,
                },
            );
        }
        let exchanges = self.vcpu_exchanges_per_minute;
        if !(0.0..=60_000.0).contains(&exchanges) {
            let key = "vcpu_exchanges_per_minute";
            let message = format!("it is {exchanges}; it must lie between 0 and 60000");
            return Wrong::at(
                key,
                TwinError::Key {
                    scenario: self.name.clone(),
                    key: key.to_owned(),
                    message,
                },
            );
        }
        if self.warm_up >= self.duration {
            let (what, expected) = (
                "warm_up",
                format!("it must be shorter than the run of {}", self.duration),
            );
            let (scenario, value) = (self.name.clone(), self.warm_up);
            return Wrong::at(
                "warm_up",
                TwinError::Time {
                    scenario,
                    what,
                    value,
                    expected,
                },
            );
        }
        Ok(())
    }

    fn check_workloads(&self) -> Result<(), Wrong> {
        for (at, workload) in self.workloads.iter().enumerate() {
            let key = format!("workload[{at}]");
            if self.workloads[..at]
                .iter()
                .any(|other| other.name == workload.name)
            {
                let (scenario, workload) = (self.name.clone(), workload.name.clone());
                return Wrong::at(
                    &format!("{key}.name"),
                    TwinError::WorkloadTwice { scenario, workload },
                );
            }
            if let Err(error) = workload.check() {
                let key = error.key().map_or(key.clone(), |inner| format!("{key}.{inner}"));
                return Wrong::at(&key, error.into());
            }
        }
        Ok(())
    }

    fn check_vms(&self) -> Result<(), Wrong> {
        for (at, vm) in self.vms.iter().enumerate() {
            let key = format!("vm[{at}]");
            if self.vms[..at].iter().any(|other| other.name == vm.name) {
                let (scenario, vm) = (self.name.clone(), vm.name.clone());
                return Wrong::at(&format!("{key}.name"), TwinError::VmTwice { scenario, vm });
            }
            vm.check_figures().map_err(within(&key))?;
            vm.check_guest(self.hypervisor).map_err(within(&key))?;
            vm.check_scattered(self.hypervisor).map_err(within(&key))?;
            self.workload(vm)
                .map_err(|error| within(&key)(("workload", error)))?;
            self.check_backend(vm).map_err(within(&key))?;
            for next in &vm.then {
                next.check(self, vm).map_err(within(&key))?;
            }
        }
        Ok(())
    }

    /// Checks the keys for NUMA balancing. Xen has no NUMA balancing, and its huge pages are not modelled.
    fn check_balancing(&self) -> Result<(), Wrong> {
        let is_xen = self.hypervisor == Hypervisor::Xen;
        let wrong = |key: &str, message: &str| {
            let (scenario, message) = (self.name.clone(), message.to_owned());
            let key = key.to_owned();
            let error = TwinError::Key {
                scenario,
                key: key.clone(),
                message,
            };
            Err(Wrong {
                key,
                error: Box::new(error),
            })
        };
        if is_xen && self.numa_balancing == Some(true) {
            let message = "Xen has no NUMA balancing; leave it out, or set hypervisor = \"kvm\"";
            return wrong("numa_balancing", message);
        }
        match self.huge_pages {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                wrong("huge_pages", &format!("it is {share}; give a share from 0 to 1"))
            }
            Some(_) if is_xen => wrong(
                "huge_pages",
                "the twin models huge pages only on Linux; leave it out, or set hypervisor = \"kvm\"",
            ),
            _ => Ok(()),
        }
    }

    /// Checks the enforcer, which requires a certain scheduler or a host whose VMs share no CPU.
    fn check_enforcer(&self) -> Result<(), Wrong> {
        let xen = self.hypervisor == Hypervisor::Xen;
        let complaint = match self.enforcer {
            Enforcer::None => None,
            Enforcer::Ks4xen => (!xen).then_some("enforcer = \"ks4xen\" needs hypervisor = \"xen\""),
            Enforcer::Ks4linux => {
                xen.then_some("enforcer = \"ks4linux\" needs hypervisor = \"kvm\" or \"native\"")
            }
            Enforcer::Ks4pisces => xen
                .then_some("enforcer = \"ks4pisces\" needs hypervisor = \"kvm\" or \"native\"")
                .or_else(|| self.partition_fault()),
        };
        let Some(message) = complaint else { return Ok(()) };
        Err(Wrong {
            key: "enforcer".to_owned(),
            error: Box::new(TwinError::Key {
                scenario: self.name.clone(),
                key: "enforcer".to_owned(),
                message: message.to_owned(),
            }),
        })
    }

    /// Returns why VMs do not own their CPUs, or `None` if they do.
    fn partition_fault(&self) -> Option<&'static str> {
        let mut taken = CpuSet::new();
        for vm in &self.vms {
            let own = vm
                .cpus
                .as_ref()
                .filter(|cpus| cpus.len() >= usize::from(vm.vcpus));
            let Some(own) = own else {
                return Some(
                    "enforcer = \"ks4pisces\" needs VMs that own their CPUs; give each VM `cpus`, one per vCPU",
                );
            };
            if own.iter().any(|cpu| taken.contains(cpu)) {
                return Some(
                    "enforcer = \"ks4pisces\" needs VMs that own their CPUs; no CPU may be in the `cpus` of two VMs",
                );
            }
            taken = taken.union(own);
        }
        None
    }

    /// Returns the total memory that a VM's guest and its program touch. It must fit into the VM.
    fn check_footprint(&self, vm: &VmSpec) -> Result<Bytes, (&'static str, TwinError)> {
        let mut touched = (Bytes::ZERO, &vm.workload);
        for name in std::iter::once(&vm.workload).chain(vm.then.iter().map(|next| &next.workload)) {
            let program = self
                .workload_named(vm, name)
                .map_err(|error| ("workload", error))?
                .program;
            let touches = program.map_or(Bytes::ZERO, |program| program.footprint(vm.vcpus));
            if touches > touched.0 {
                touched = (touches, name);
            }
        }
        let pool = vm
            .driver_domain
            .as_ref()
            .and_then(|backend| backend.pool.as_ref());
        let apart =
            crate::guest::boot_footprint(vm.memory) + pool.map_or(Bytes::ZERO, |pool| pool.config().initial);
        let footprint = apart + touched.0;
        if footprint > vm.memory {
            let (vm, memory, workload) = (vm.name.clone(), vm.memory, touched.1.clone());
            let error = TwinError::FootprintBeyondVm {
                vm,
                memory,
                workload,
                footprint,
            };
            return Err(("memory", error));
        }
        Ok(footprint)
    }

    fn check_event(&self, event: &EventSpec) -> Result<(), (&'static str, TwinError)> {
        let Some(vm) = self.vms.iter().find(|vm| vm.name == event.vm) else {
            let candidates = Candidates::of(&event.vm, self.vms.iter().map(|vm| vm.name.clone()));
            let (at, vm) = (event.at, event.vm.clone());
            return Err(("vm", TwinError::EventVm { at, vm, candidates }));
        };
        if event.at >= self.duration {
            let expected = format!("the run ends at {}", self.duration);
            let (scenario, what, value) = (self.name.clone(), "`at` of an event", event.at);
            return Err((
                "at",
                TwinError::Time {
                    scenario,
                    what,
                    value,
                    expected,
                },
            ));
        }
        let figure = |key, what, value: f64, expected| {
            let (vm, value) = (event.vm.clone(), value.to_string());
            Err((
                key,
                TwinError::Figure {
                    vm,
                    what,
                    value,
                    expected,
                },
            ))
        };
        match event.action {
            EventAction::Start if vm.arrival > Ns::ZERO && self.started_by_event(&vm.name) => {
                let (vm, at) = (event.vm.clone(), event.at);
                Err(("action", TwinError::ArrivesTwice { vm, at }))
            }
            EventAction::Balloon { memory: Bytes::ZERO } => figure(
                "action.balloon.memory",
                "memory of a balloon",
                0.0,
                "it must be above 0",
            ),
            EventAction::Gather { thread } if thread >= vm.vcpus => figure(
                "action.gather.thread",
                "thread to gather at",
                thread.into(),
                "threads are numbered from 0, one for each vCPU",
            ),
            EventAction::Phase {
                llc_access_factor: factor,
                ..
            } if !(factor >= 0.0 && factor.is_finite()) => {
                let (key, what) = ("action.phase.llc_access_factor", "llc_access_factor");
                figure(key, what, factor, "it must not be below 0")
            }
            EventAction::Phase {
                cpi_factor: factor, ..
            } if !(factor > 0.0 && factor.is_finite()) => figure(
                "action.phase.cpi_factor",
                "cpi_factor",
                factor,
                "it must be above 0",
            ),
            EventAction::Phase {
                rest_factor: factor, ..
            } if !(0.0..=1e6).contains(&factor) => figure(
                "action.phase.rest_factor",
                "rest_factor",
                factor,
                "it must lie between 0 and 1000000",
            ),
            _ => Ok(()),
        }
    }

    fn check_fit(&self, machine: &Machine) -> Result<(), Wrong> {
        let host: Bytes = machine.nodes.values().map(|n| n.memory_bytes).sum();
        let mut touched = Bytes::ZERO;
        for (at, vm) in self.vms.iter().enumerate() {
            let key = format!("vm[{at}]");
            vm.check_fit(machine, host).map_err(within(&key))?;
            self.check_pool(vm).map_err(within(&key))?;
            let footprint = self.check_footprint(vm).map_err(within(&key))?;
            touched += if vm.allocated_at_creation(self.hypervisor) || self.owns_frames(vm) {
                vm.memory
            } else {
                footprint
            };
        }
        for (at, event) in self.events.iter().enumerate() {
            event
                .check_fit(machine, host)
                .map_err(within(&format!("event[{at}]")))?;
        }
        if touched > host {
            let (footprint, machine) = (touched, machine.name.clone());
            let error = TwinError::FootprintBeyondHost {
                footprint,
                machine,
                host,
            };
            return Err(Wrong {
                key: "vm".to_owned(),
                error: Box::new(error),
            });
        }
        Ok(())
    }
}

impl EventSpec {
    fn check_fit(&self, machine: &Machine, host: Bytes) -> Result<(), (&'static str, TwinError)> {
        match &self.action {
            EventAction::Balloon { memory } if *memory > host => {
                let error = beyond_host(&self.vm, *memory, machine, host);
                Err(("action.balloon.memory", error))
            }
            EventAction::Migrate { nodes, .. } => {
                part_of_nodes(&self.vm, nodes, machine).map_err(|error| ("action.migrate.nodes", error))
            }
            EventAction::Pin { cpus } => {
                part_of_cpus(&self.vm, cpus, machine).map_err(|error| ("action.pin.cpus", error))
            }
            _ => Ok(()),
        }
    }
}

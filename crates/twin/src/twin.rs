//! The simulated host: its engine, what an agent sees of it, and what the agent has set.

use homenode_host::{Lever, VmSettings};
use homenode_machine::Machine;
use homenode_units::{Chance, Migration, Ns, VmId};

use crate::counts::{self, Counts};
use crate::engine::Engine;
use crate::guest::Vm;
use crate::hypervisor::watching::Watching;
use crate::index::{CpuIxSet, IxVec, ThreadIx, VmIx};
use crate::report::TwinReport;
use crate::scenario::{Enforcer, Scenario, TwinError};
use crate::told::Told;

/// A simulated host that runs a scenario.
#[derive(Clone, Debug)]
pub struct Twin {
    pub(crate) machine: Machine,
    /// The machine and the counters as an agent sees them.
    pub(crate) told: Told,
    pub(crate) scenario: String,
    pub(crate) seed: u64,
    pub(crate) engine: Engine,
    /// The operator's settings for each VM, from the scenario.
    pub(crate) settings: IxVec<VmIx, VmSettings>,
    /// Counts up to the mark, which reports subtract.
    pub(crate) mark: Counts,
    /// What each VM's sampling had counted at the last reading, and the random stream of looks. The stream is separate from the
    /// engine's, so that looking changes nothing.
    pub(crate) looked: IxVec<VmIx, Looked>,
    pub(crate) look_chance: Chance,
    /// State of each VM before the agent pinned it or gave it a home.
    pub(crate) before: IxVec<VmIx, Option<Before>>,
    /// Watches on the memory of VMs. They are not part of the engine, because they change nothing in it.
    pub(crate) watches: IxVec<VmIx, Option<Watching>>,
    /// End of the warm-up, if it has not passed yet.
    pub(crate) warm_up: Option<Ns>,
}

/// State of a VM before the agent's first pin or home.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// Allowed CPUs of each vCPU.
    pub(crate) allowed: IxVec<ThreadIx, CpuIxSet>,
    /// Home nodes of the VM's memory.
    pub(crate) home: Option<Vec<usize>>,
}

/// The counts of a VM's sampling at the last reading.
#[derive(Clone, Debug, Default)]
pub(crate) struct Looked {
    /// Number of the sampling that the counts belong to.
    pub(crate) number: u32,
    pub(crate) expected: Vec<f64>,
}

/// Something that ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ends {
    Limit(Lever),
    Window,
    Watch,
}

/// Default epoch of the contention solver.
pub const EPOCH_DEFAULT: Ns = Ns::from_millis(1);

impl Twin {
    /// Creates a host at time 0, before its first VM arrives.
    ///
    /// # Errors
    /// If the machine has no timing figures or cannot run the scenario (see [`TwinError`]).
    pub fn new(machine: Machine, scenario: &Scenario, seed: u64) -> Result<Twin, TwinError> {
        Twin::with_epoch(machine, scenario, seed, EPOCH_DEFAULT)
    }

    /// Creates a host with another epoch of the contention solver, of at least 1 microsecond.
    ///
    /// # Errors
    /// If the machine has no timing figures or cannot run the scenario (see [`TwinError`]).
    pub fn with_epoch(
        machine: Machine,
        scenario: &Scenario,
        seed: u64,
        epoch: Ns,
    ) -> Result<Twin, TwinError> {
        let epoch = epoch.max(Ns(1000));
        let disturbance = scenario.disturbance;
        let engine = Engine::new(&disturbance.real(&machine), scenario, seed, epoch)?;
        let settings = scenario
            .vms
            .iter()
            .map(|vm| VmSettings {
                home: vm.memory_nodes.clone(),
                anti_affinity: vm.anti_affinity.clone(),
                affinity: vm.affinity.clone(),
                cpus_allowed: vm.cpus.clone(),
                // Either the host or the agent enforces a permit, never both.
                permit: vm.permit.filter(|_| scenario.enforcer == Enforcer::None),
                memory_floor: vm.memory_floor,
                kernel_footprint: vm.kernel_footprint,
                // The host decides where pages are at first. The agent moves them later.
                memory_policy: Some(vm.memory_policy).filter(|policy| policy.migration != Migration::None),
                ..VmSettings::default()
            })
            .collect();
        Ok(Twin {
            told: Told::new(disturbance, &machine, seed),
            machine,
            scenario: scenario.name.clone(),
            seed,
            engine,
            settings,
            mark: Counts::default(),
            looked: IxVec::filled(Looked::default(), scenario.vms.len()),
            look_chance: Chance::labelled(seed, "looks", 0),
            before: IxVec::filled(None, scenario.vms.len()),
            watches: IxVec::filled(None, scenario.vms.len()),
            warm_up: Some(scenario.warm_up).filter(|warm| *warm > Ns::ZERO),
        })
    }

    /// Has latencies solved in every epoch, even if nothing has changed. This is slower; it is a reference for the accuracy that
    /// skipping costs.
    #[must_use]
    pub fn solving_every_epoch(mut self) -> Twin {
        self.engine.solve_every_epoch();
        self
    }

    /// Returns the simulated time.
    pub fn now(&self) -> Ns {
        self.engine.now
    }

    /// Whether every VM's program has ended and no event will start another. VMs without a program do not count.
    pub fn finished(&self) -> bool {
        !self.engine.script.starts_something() && !self.engine.vms.iter().any(Vm::busy)
    }

    /// Simulates until every program has ended, or until this time. Returns true if every program has ended.
    pub fn run_to_end(&mut self, until: Ns) -> bool {
        const STEP: Ns = Ns::from_millis(100);
        while !self.finished() && self.engine.now < until {
            self.advance(Ns((self.engine.now.0 + STEP.0).min(until.0)));
        }
        self.finished()
    }

    /// Simulates up to a point in time. Figures count from the end of the scenario's warm-up.
    pub(crate) fn advance(&mut self, until: Ns) {
        if let Some(warm) = self.warm_up.take_if(|warm| *warm <= until) {
            self.engine.run_until(warm);
            self.mark();
        }
        while let Some((end, what, vm)) = self.next_end().filter(|(end, ..)| *end <= until) {
            self.engine.run_until(end);
            match what {
                Ends::Limit(lever) => {
                    self.engine.settle_all();
                    self.lift(vm, lever);
                }
                Ends::Window => self.turn_window(vm),
                Ends::Watch => self.end_watch(vm),
            }
        }
        self.engine.run_until(until);
    }

    fn turn_window(&mut self, vm: VmIx) {
        let engine = self.engine.settled();
        let watch = self.watches[vm].take().filter(|_| engine.vms[vm].present());
        self.watches[vm] = watch.map(|mut watch| {
            watch.turn(&engine.vms[vm], engine.now);
            watch
        });
    }

    /// Returns the id of the VM with this name, whether it has arrived or not.
    pub fn vm_id(&self, name: &str) -> Option<VmId> {
        self.engine.vms.iter().find(|vm| vm.name == name).map(|vm| vm.id)
    }

    /// Reports on the run since the last [`Twin::mark`], or since its start. The end of a scenario's warm-up sets a mark.
    pub fn report(&self) -> TwinReport {
        counts::report(
            &self.machine,
            &self.scenario,
            self.seed,
            &self.engine.settled(),
            &self.mark,
        )
    }

    /// Makes reports count from now on, as if everything before were warm-up. Changes nothing that is simulated.
    pub fn mark(&mut self) {
        self.mark = Counts::of(&self.engine.settled());
    }
}

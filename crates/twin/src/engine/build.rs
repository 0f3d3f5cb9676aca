//! Builds the engine for a scenario on a machine, at time 0.

use homenode_machine::{Hardware, Machine};
use homenode_units::{Chance, Ns};

use super::agenda::{Agenda, Timer};
use super::background::{Daemons, Exchanges};
use super::epochs::Epochs;
use super::figures::Figures;
use super::pace::Pace;
use super::script::Script;
use super::totals::Totals;
use super::{Engine, Owner, flip};
use crate::guest::{Prepared, Vm};
use crate::hardware::core::Paging;
use crate::hardware::{Fabric, Llc, Sharer, Topology};
use crate::hypervisor::permits::Permits;
use crate::hypervisor::{HostMemory, Scheduler};
use crate::index::{IxVec, TaskIx, VmIx, first};
use crate::io::Plan;
use crate::scenario::{Hypervisor, Scenario, TwinError, VmSpec};

/// A scenario's VMs while they are built, one after the other.
struct Guests<'a> {
    machine: &'a Machine,
    scenario: &'a Scenario,
    hardware: &'a Hardware,
    seed: u64,
    line_bytes: f64,
    /// Number of lines in the largest cache.
    lines_max: f64,
    io: Plan<'a>,
    scheduler: Scheduler,
    vms: IxVec<VmIx, Vm>,
    owners: IxVec<TaskIx, Owner>,
    sharers: IxVec<TaskIx, Sharer>,
    paging: IxVec<VmIx, Paging>,
}

impl Guests<'_> {
    /// Adds the next VM. Its vCPUs become the next tasks of the scheduler.
    fn add(&mut self, spec: &VmSpec, nodes: usize) -> Result<(), TwinError> {
        let (machine, scenario, hardware) = (self.machine, self.scenario, self.hardware);
        let at = VmIx(self.vms.len());
        let workload = scenario.workload(spec)?;
        let balances = scenario.balances() == Some(true) && !scenario.owns_frames(spec);
        let is_native = scenario.hypervisor == Hypervisor::Native;
        // Without a hypervisor the guest's kernel is the host's kernel.
        let spec = &VmSpec {
            autonuma: spec.autonuma || balances && is_native,
            ..spec.clone()
        };
        let mut vm = Vm::new(
            spec,
            scenario.hypervisor,
            workload.clone(),
            at,
            TaskIx(self.owners.len()),
            nodes,
            self.seed,
        );
        let position = |node| machine.nodes.position(node).expect("checked");
        let home = spec.memory_nodes.as_ref();
        vm.memory.home = home.map(|home| home.iter().map(position).collect());
        let requests = self.io.requests(spec, scenario.hypervisor, &workload, hardware);
        for thread in &mut vm.threads {
            thread.requests.restart(requests.clone());
        }
        for next in &spec.then {
            let workload = scenario.workload_named(spec, &next.workload)?;
            vm.course.then.push_back(Prepared {
                requests: self.io.requests(spec, scenario.hypervisor, &workload, hardware),
                work_share: next.work_share,
                workload,
            });
        }
        // The kernel does not scan memory that is bound to nodes (`vma_policy_mof`).
        vm.host.balanced = balances && !is_native && spec.memory_nodes.is_none();
        vm.host.huge = scenario.huge_share();
        vm.memory.owns_frames = scenario.owns_frames(spec);
        vm.channel = flip::channel(scenario, spec)?;
        vm.memory.pool = vm.pool_at_start().map(|_| vec![0; nodes]);
        let number = self.scheduler.add_vm(spec.weight, spec.cap_percent);
        for thread in first(spec.vcpus.into()) {
            self.scheduler.add(spec.allowed(thread, machine), Some(number));
            self.owners.push(Owner::Vcpu { vm: at, thread });
        }
        let sharers = vm_sharers(&vm, at, self.line_bytes, self.lines_max, &self.sharers);
        self.sharers.extend(sharers);
        self.paging.push(vm_paging(&vm, hardware, scenario.hypervisor));
        self.vms.push(vm);
        Ok(())
    }
}

impl Engine {
    pub(crate) fn new(
        machine: &Machine,
        scenario: &Scenario,
        seed: u64,
        epoch: Ns,
    ) -> Result<Engine, TwinError> {
        scenario.check_on(machine)?;
        let (topology, hardware) = Topology::new(machine)?;
        let (nodes, cpus) = (topology.nodes(), topology.cpus.len());
        let line_bytes = f64::from(machine.llcs.first().map_or(64, |llc| llc.line_bytes));
        let llc_bytes = machine.llcs.iter().map(|llc| llc.size_bytes.as_f64());
        let mut guests = Guests {
            machine,
            scenario,
            hardware: &hardware,
            seed,
            line_bytes,
            lines_max: llc_bytes.fold(line_bytes, f64::max) / line_bytes,
            io: Plan::new(machine),
            scheduler: Scheduler::new(&topology, scenario.hypervisor, scenario.balances() == Some(true)),
            vms: IxVec::new(),
            owners: IxVec::new(),
            sharers: IxVec::new(),
            paging: IxVec::new(),
        };
        for spec in &scenario.vms {
            guests.add(spec, nodes)?;
        }
        let Guests {
            io,
            scheduler,
            vms,
            owners,
            sharers,
            paging,
            ..
        } = guests;
        let llc = |cache: &homenode_machine::Llc| {
            let lines = cache.size_bytes.as_f64() / line_bytes;
            Llc::new(lines, cache.replacement.unwrap_or_default(), owners.len())
        };
        let permits = scenario.vms.iter().map(|vm| vm.permit).collect();
        let memory = machine.nodes.values();
        let memory = memory.map(|node| node.memory_bytes.to_pages().0);
        let fabric = Fabric::new(&topology, &hardware, line_bytes);
        let mut engine = Engine {
            figures: Figures::new(scenario, &hardware, &fabric, nodes, line_bytes),
            fabric,
            llcs: machine.llcs.iter().map(llc).collect(),
            devices: io.devices,
            backends_free_ns: IxVec::filled(0.0, vms.len()),
            scheduler,
            memory: HostMemory::new(memory.collect()),
            permits: Permits::new(scenario.enforcer, hardware.clock_hz / 1000, line_bytes, permits),
            attribution: scenario.attribution,
            hypervisor: scenario.hypervisor,
            numa_balancing: scenario.balances(),
            vms,
            owners,
            daemons: Daemons::new(seed),
            exchanges: Exchanges::new(scenario, seed),
            script: Script::new(scenario, machine),
            moving: None,
            movers: Vec::new(),
            totals: Totals::new(nodes, topology.links.len()),
            notes: io.notes,
            now: Ns::ZERO,
            version: 1,
            seed,
            chance: Chance::labelled(seed, "host", 0),
            agenda: Agenda::default(),
            epochs: Epochs::new(epoch, machine.llcs.len()),
            pace: Pace::new(cpus, sharers, paging),
            placed: vec![0; nodes],
            topology,
            hardware,
        };
        engine.begin(scenario);
        Ok(engine)
    }

    /// Sets the first timers.
    fn begin(&mut self, scenario: &Scenario) {
        let arrivals = scenario.arrivals(self.seed);
        for (vm, arrival) in first(scenario.vms.len()).zip(arrivals) {
            if let Some(arrival) = arrival {
                self.agenda.set(arrival, Timer::Arrival(vm));
            }
        }
        self.find_movers();
        self.set_events();
        self.start_daemons();
        self.set_permit_tick();
        self.set_exchange();
    }
}

/// Returns what caches know of a VM's vCPUs. A thread can use at most as many lines as its private memory and all shared memory
/// have. `others` are sharers whose curves may be reused.
pub(super) fn vm_sharers(
    vm: &Vm,
    number: VmIx,
    line_bytes: f64,
    lines_max: f64,
    others: &[Sharer],
) -> Vec<Sharer> {
    let regions = vm.course.program.iter().flat_map(|program| &program.regions);
    let footprint = regions.map(|region| region.size.as_f64()).sum::<f64>() / line_bytes;
    let miss_ratio = |lines: f64| match &vm.course.program {
        Some(program) => program.miss_ratio.at(lines * line_bytes),
        None => 1.0,
    };
    let sharer = Sharer::new(lines_max, footprint, miss_ratio).reusing(others);
    let threads = vm.threads.iter();
    threads
        .map(|thread| sharer.clone().in_group(number.0, thread.shared_share))
        .collect()
}

/// Returns the cost of translating the addresses of a VM's program.
pub(super) fn vm_paging(vm: &Vm, hardware: &Hardware, hypervisor: Hypervisor) -> Paging {
    let in_guest = hypervisor != Hypervisor::Native;
    let translate = |program| Paging::new(hardware, vm.page_size, program, in_guest);
    vm.course.program.as_ref().map_or_else(Paging::default, translate)
}

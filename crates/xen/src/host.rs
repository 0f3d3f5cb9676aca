//! Domains behind the host contract.
//!
//! ```text
//!   sample ─ domains, vCPUs, affinities, caps (libxenctrl) ─ names (xenstore) ─ memory by node (console) ─▶ Sample
//!   commit ─ Plan::check ─ as sampled? ─ journal ─ act ─ read back ─▶ Receipt
//! ```
//!
//! A domain is known by its UUID: its number changes when it is migrated to where it is, and when it is restored.

mod levers;
mod sources;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{
    Action, ActionError, CountedBy, CpuSample, Failure, Host, HostError, Immovable, NodeSample, Outcome,
    Plan, Receipt, Refusal, Sample, Setting, Version, VmSample,
};
use homenode_linux::acting::{self, CARRIED_LEASE, Leases, RETRY};
use homenode_linux::journal::{Journal, Run};
use homenode_linux::lock::{ActingLock, Lock};
use homenode_linux::notices::Notices;
use homenode_linux::{Acting, CarriedOver, Options, Undone, now, settings_file};
use homenode_machine::Machine;
use homenode_units::{Bytes, CpuId, NodeMap, Ns, Pages, VmId};

use crate::changed::{self, Cap, Home, Part, Pins};
use crate::counted::{Counted, Model};
use crate::domain::Domain;
use crate::features::{NO_MOVES, NO_PAGE_USES, NO_RELEASES, NO_TOPOLOGY};
use crate::hypervisor::{CallError, Hypervisor, Listed, Pool, XenError};
use crate::waiting::{OfVcpus, Waiting};
use crate::{memory, place};

/// How often is looked where memory lies: Xen counts every page for it, and writes to its console.
const MEMORY_EVERY: Ns = Ns::from_secs(60);
/// Xen is not asked to count the pages of a domain that has more: it holds a lock meanwhile.
const COUNTED_MAX: Pages = Pages(4 << 20);
/// What `xl migrate` calls a domain that is on its way here, or from here.
const ON_ITS_WAY: [&str; 2] = ["--incoming", "--migratedaway"];

/// A host that runs domains under Xen. This system is its dom0.
#[derive(Debug)]
pub struct XenHost {
    hypervisor: Hypervisor,
    options: Options,
    /// Absent in a dry run.
    journal: Option<Journal>,
    /// Held as long as the journal is this agent's, and the host.
    locks: Option<(Lock, ActingLock)>,
    /// Whether a guard would undo what is done now.
    is_guarded: bool,
    carried: Vec<CarriedOver>,
    domains: BTreeMap<VmId, Domain>,
    /// A modelled PMU, where there is one, and what it counted last.
    model: Option<Model>,
    counted: BTreeMap<VmId, Counted>,
    /// Xen's trace, where it is read, and how long vCPUs had waited at the last look.
    waiting: Option<Waiting>,
    waited: BTreeMap<VmId, OfVcpus>,
    /// Until when caps of the agent's hold.
    leases: BTreeMap<VmId, Ns>,
    /// Memory of each domain, by number, and when that was looked up.
    memory: BTreeMap<u32, NodeMap<Pages>>,
    memory_at: Option<Ns>,
    /// Busy time of each CPU, and what is added to the time since boot for it never to be less than nothing.
    busy: BTreeMap<CpuId, Ns>,
    idle_ahead: Option<Ns>,
    last: Sample,
    /// What samples say that plans rely on, of the last one.
    relied_on: Vec<VmSample>,
    notices: Notices,
}

impl XenHost {
    /// The machine of this host.
    ///
    /// # Errors
    /// Each is a sentence with its remedy.
    pub fn machine_here(root: &std::path::Path) -> Result<Machine, XenError> {
        place::machine(&Hypervisor::open(root)?, root)
    }

    /// Opens the hypervisor, and takes over the journal.
    ///
    /// # Errors
    /// [`XenError`], or why the journal or the right to act cannot be had: each is a sentence with its remedy.
    pub fn connect(options: Options) -> Result<XenHost, Box<dyn std::error::Error + Send + Sync>> {
        let hypervisor = Hypervisor::open(&options.root)?;
        let mut notices = Notices::default();
        let (mut journal, locks) = match options.acting {
            Acting::DryRun => (None, None),
            Acting::Live => {
                let (journal, locks) = acting::take_over(&options.root, &options.state_dir)?;
                (Some(journal), Some(locks))
            }
        };
        for warning in journal
            .iter_mut()
            .flat_map(|journal| std::mem::take(&mut journal.warnings))
        {
            notices.add(warning);
        }
        let model = sources::model(&options, &mut notices);
        let waiting = sources::waiting(&hypervisor, &options, &mut notices);
        let mut host = XenHost {
            hypervisor,
            options,
            journal,
            locks,
            is_guarded: true,
            carried: Vec::new(),
            domains: BTreeMap::new(),
            model,
            counted: BTreeMap::new(),
            waiting,
            waited: BTreeMap::new(),
            leases: BTreeMap::new(),
            memory: BTreeMap::new(),
            memory_at: None,
            busy: BTreeMap::new(),
            idle_ahead: None,
            last: Sample::default(),
            relied_on: Vec::new(),
            notices,
        };
        host.carry_over()?;
        Ok(host)
    }

    /// What an earlier agent left: homes and pins go on, caps end with a lease.
    fn carry_over(&mut self) -> Result<(), CallError> {
        let entries = self.journal.as_ref().map(|journal| journal.entries().clone());
        for (vm, entry) in entries.unwrap_or_default() {
            if changed::alive(&self.hypervisor, &entry.run)?.is_none() {
                continue;
            }
            if entry.get::<Cap>().is_some() {
                self.leases.insert(vm, now() + CARRIED_LEASE);
            }
            let pins = entry.get::<Pins>().unwrap_or_default().0;
            self.carried.push(CarriedOver {
                vm,
                home: entry.get::<Home>().and_then(|home| home.0.first().cloned()),
                pins: pins
                    .into_iter()
                    .filter_map(|(index, ours)| Some((index, ours.first()?.clone())))
                    .collect(),
                moving: None,
            });
        }
        Ok(())
    }

    /// What the operator should know and no sample carries. Each is given once.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.notices.take()
    }

    /// Says whether there is a guard that undoes if this process ends. While there is none nothing is changed but given back.
    pub fn set_guarded(&mut self, is_guarded: bool) {
        if let Some((lock, _)) = &mut self.locks {
            lock.set_guarded(is_guarded);
            self.is_guarded = is_guarded;
        }
    }

    /// Homes and pins that an earlier agent left, of domains that still run.
    pub fn carried_over(&self) -> Vec<CarriedOver> {
        self.carried.clone()
    }

    /// Restores every domain that was touched, as the guard would; what cannot be restored is said and stays journalled.
    pub fn restore(&mut self) -> Undone {
        self.leases.clear();
        match &mut self.journal {
            Some(journal) => changed::undo_all(&self.hypervisor, journal),
            None => Undone::default(),
        }
    }

    /// Lifts every cap of the agent's: limits never outlast it. What cannot be lifted is said and stays journalled.
    pub fn lift_limits(&mut self) -> Vec<String> {
        let Some(journal) = &mut self.journal else {
            return Vec::new();
        };
        let capped = journal
            .entries()
            .iter()
            .filter(|(_, entry)| entry.get::<Cap>().is_some());
        let capped: Vec<VmId> = capped.map(|(vm, _)| *vm).collect();
        let lift = |vm| changed::undo(&self.hypervisor, journal, vm, &[Part::Limits]).err();
        capped.into_iter().filter_map(lift).collect()
    }

    /// Whether its locks are where another agent would look for them.
    pub fn owns_its_state(&self) -> bool {
        let is_there = |(lock, acting): &(Lock, ActingLock)| lock.is_there() && acting.is_there();
        self.locks.as_ref().is_none_or(is_there)
    }

    /// Looks at all domains that run, and forgets those that ended.
    fn look(&mut self) -> Result<(), CallError> {
        let mut domains = BTreeMap::new();
        let mut pools: BTreeMap<u32, Pool> = BTreeMap::new();
        let store = self.hypervisor.store();
        for listed in self.hypervisor.domains()?.into_iter().filter(Listed::is_vm) {
            self.options.beat.beat();
            // One that is being built has no name yet, and one that was destroyed none any more.
            let name = format!("/local/domain/{}/name", listed.domid);
            let name = store.as_ref().and_then(|store| store.read(&name));
            let Some(name) = name.filter(|name| !ON_ITS_WAY.iter().any(|end| name.ends_with(end))) else {
                continue;
            };
            let pool = match pools.entry(listed.pool) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.hypervisor.pool(listed.pool)?),
            };
            let pool = pool.clone();
            let run = self.run_of(listed, name);
            match Domain::look(&self.hypervisor, (&self.options.root, run, listed), pool) {
                Ok(domain) if !domain.vcpus.is_empty() => drop(domains.insert(listed.vm, domain)),
                // It ends just now.
                Ok(_) | Err(_) => {}
            }
        }
        drop(store);
        for domain in domains.values() {
            if let Err(why) = &domain.said {
                self.notices
                    .add(format!("domain {} is only watched: {why}", domain.run.name));
            }
        }
        self.domains = domains;
        self.take_in_others_pins()?;
        self.forget_ended()
    }

    /// What somebody else pinned since is the operator's from now on, and is what is given back.
    fn take_in_others_pins(&mut self) -> Result<(), CallError> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        for (vm, domain) in &self.domains {
            let Some(entry) = journal.entry(*vm).filter(|entry| entry.run == domain.run) else {
                continue;
            };
            let (mut pins, mut before) = (entry.get::<Pins>().unwrap_or_default(), entry.before.clone());
            let mut others = Vec::new();
            for (index, vcpu) in &domain.vcpus {
                if pins
                    .0
                    .get(index)
                    .is_some_and(|ours| !ours.contains(&vcpu.affinity))
                {
                    pins.0.remove(index);
                    before.vcpus.insert(*index, vcpu.affinity.clone());
                    others.push((*index, vcpu.affinity.clone()));
                }
            }
            if others.is_empty() {
                continue;
            }
            // In this order: a crash in between leaves a pin that is not the agent's any more, and is left alone.
            let written = journal
                .begin(domain.run.clone(), before)
                .and_then(|()| journal.set(*vm, &pins));
            if let Err(error) = written {
                self.notices.add(error.to_string());
            }
            for (index, cpus) in others {
                let name = &domain.run.name;
                self.notices
                    .add(format!("vCPU {index} of domain {name} was given CPUs {cpus} by someone else; the agent keeps to them"));
            }
        }
        Ok(())
    }

    /// The run of a domain that is listed now.
    fn run_of(&self, listed: Listed, name: String) -> Run {
        Run {
            vm: listed.vm,
            name,
            runtime_id: listed.domid,
            pid: 0,
            start_ticks: self.hypervisor.boot(),
        }
    }

    /// Drops domains from the journal whose run is over.
    fn forget_ended(&mut self) -> Result<(), CallError> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        let runs = |vm: &VmId, run: &Run| {
            self.domains
                .get(vm)
                .is_some_and(|known| known.run.runtime_id == run.runtime_id)
        };
        let others: Vec<(VmId, Run)> = journal
            .entries()
            .iter()
            .filter(|(vm, entry)| !runs(vm, &entry.run))
            .map(|(vm, entry)| (*vm, entry.run.clone()))
            .collect();
        for (vm, run) in others {
            if changed::alive(&self.hypervisor, &run)?.is_none() {
                journal.forget(vm);
                self.leases.remove(&vm);
            }
        }
        Ok(())
    }

    /// Looks where memory lies, where that was not done for long or of a domain.
    fn look_at_memory(&mut self, at: Ns) {
        if self.journal.is_none() {
            return;
        }
        if let Some(large) = self
            .domains
            .values()
            .find(|domain| domain.listed.pages > COUNTED_MAX.0)
        {
            let name = &large.run.name;
            self.notices.add(format!(
                "domain {name} has more than {} of memory: Xen stands still on a CPU while it counts that, so where memory of domains lies is not looked up",
                COUNTED_MAX.to_bytes()
            ));
            self.memory.clear();
            return;
        }
        let is_known = |domain: &Domain| {
            let known = self.memory.get(&domain.run.runtime_id);
            let sum = known.map(|of| of.values().map(|pages| pages.0).sum::<u64>());
            // A balloon moves its pages by and by: it is not worth a look each time.
            sum.is_some_and(|sum| sum.abs_diff(domain.listed.pages) <= domain.listed.pages / 16)
        };
        let is_fresh = self
            .memory_at
            .is_some_and(|last| at.saturating_sub(last) < MEMORY_EVERY);
        // Those that are never told would be asked for in every period.
        let is_settled = self
            .memory_at
            .is_some_and(|last| at.saturating_sub(last) < Ns(MEMORY_EVERY.0 / 6));
        if is_settled || (is_fresh && self.domains.values().all(is_known)) {
            return;
        }
        self.memory_at = Some(at);
        match self.hypervisor.say(memory::KEY) {
            Ok(console) => self.memory = memory::by_node(&console),
            Err(error) => self
                .notices
                .add(format!("where memory of domains lies is not known: {error}")),
        }
    }

    fn sample_of(&self, domain: &Domain) -> VmSample {
        let (usable, vm) = (self.options.machine.cpu_set(), domain.run.vm);
        let entry = self
            .journal
            .as_ref()
            .and_then(|journal| journal.entry(domain.run.vm));
        let entry = entry.filter(|entry| entry.run == domain.run);
        VmSample {
            vcpus: domain.samples(&usable, (self.counted.get(&vm), self.waited.get(&vm))),
            memory_bytes: Pages(domain.listed.pages).to_bytes(),
            pages: self.memory.get(&domain.run.runtime_id).cloned(),
            no_topology_device: Some(NO_TOPOLOGY.to_owned()),
            no_releases: Some(NO_RELEASES.to_owned()),
            immovable: Some(match domain.listed.is_paused {
                true => Immovable::Paused,
                false => Immovable::Hypervisor {
                    reason: NO_MOVES.to_owned(),
                },
            }),
            settings: domain.settings(entry, &usable),
            ..VmSample::new(domain.run.vm, domain.run.name.clone())
        }
    }

    fn sample_cpus(&mut self, at: Ns) -> Result<Vec<CpuSample>, CallError> {
        let idle = self.hypervisor.idle()?;
        // Xen runs for longer than dom0: its CPUs were idle before dom0's clock began.
        let ahead = *self.idle_ahead.get_or_insert_with(|| {
            let most = idle.iter().copied().max().unwrap_or_default();
            most.saturating_sub(at)
        });
        let mut cpus = Vec::new();
        for cpu in &self.options.machine.cpus {
            let idle = idle.get(cpu.id.0 as usize).copied().unwrap_or_default();
            let before = self.busy.get(&cpu.id).copied().unwrap_or_default();
            let busy_ns = (at + ahead).saturating_sub(idle).max(before);
            self.busy.insert(cpu.id, busy_ns);
            cpus.push(CpuSample { id: cpu.id, busy_ns });
        }
        Ok(cpus)
    }

    fn sample_nodes(&self) -> Result<NodeMap<NodeSample>, CallError> {
        let memory = self.hypervisor.nodes()?.memory;
        let mut nodes = NodeMap::new();
        for node in self.options.machine.node_set().iter() {
            let of = memory
                .get(usize::from(node.0))
                .copied()
                .flatten()
                .unwrap_or_default();
            let sample = NodeSample {
                memory_total_bytes: Bytes(of.size),
                memory_free_bytes: Bytes(of.free),
                memory_traffic_bytes: None,
            };
            nodes.insert(node, sample);
        }
        Ok(nodes)
    }

    fn look_and_sample(&mut self, at: Ns) -> Result<Sample, CallError> {
        self.look()?;
        self.look_at_memory(at);
        let cpus = self.sample_cpus(at)?;
        let nodes = self.sample_nodes()?;
        self.count();
        self.trace();
        let vms: Vec<VmSample> = self
            .domains
            .values()
            .map(|domain| self.sample_of(domain))
            .collect();
        Ok(Sample {
            at,
            version: self.version_of(&vms),
            cpus,
            nodes,
            counted_by: match self.model {
                Some(_) => CountedBy::Model,
                None => CountedBy::Hardware,
            },
            no_page_uses: Some(NO_PAGE_USES.to_owned()),
            trackers: Vec::new(),
            vms,
            ..Sample::default()
        })
    }

    /// A new version where something differs that plans rely on.
    fn version_of(&mut self, vms: &[VmSample]) -> Version {
        let relied_on: Vec<VmSample> = vms.iter().map(relied_on).collect();
        if relied_on != self.relied_on || self.last.version == Version::default() {
            self.relied_on = relied_on;
            self.last.version = Version(self.last.version.0 + 1);
        }
        self.last.version
    }

    /// Looks at the domains of a plan again: refused where somebody else changed one since the sample.
    fn refuse_changed(&mut self, plan: &Plan) -> Result<(), Refusal> {
        let before = self.last.version;
        self.look_again(&plan.vms());
        match self.last.version == before {
            true => Ok(()),
            false => Err(Refusal::Stale {
                planned: before,
                current: self.last.version,
            }),
        }
    }

    /// Brings the last sample up to date on some domains, with a new version where it has changed.
    fn look_again(&mut self, touched: &BTreeSet<VmId>) {
        for vm in touched {
            let Some(known) = self.domains.get(vm) else {
                continue;
            };
            // What has ended fails when it is acted on, and is not in the next sample.
            let Ok(Some(listed)) = changed::alive(&self.hypervisor, &known.run) else {
                continue;
            };
            let Ok(pool) = self.hypervisor.pool(listed.pool) else {
                continue;
            };
            let of = (self.options.root.as_path(), known.run.clone(), listed);
            if let Ok(domain) = Domain::look(&self.hypervisor, of, pool) {
                self.domains.insert(*vm, domain);
            }
        }
        let mut vms = std::mem::take(&mut self.last.vms);
        for sampled in vms.iter_mut().filter(|sampled| touched.contains(&sampled.id)) {
            if let Some(domain) = self.domains.get(&sampled.id) {
                *sampled = self.sample_of(domain);
            }
        }
        self.version_of(&vms);
        self.last.vms = vms;
    }

    /// Carries out one action.
    fn act(&mut self, action: &Action) -> Result<Outcome, ActionError> {
        let sampled = self.last.vm(action.vm);
        let name = sampled.map(|vm| vm.name.clone()).unwrap_or_default();
        let kept = acting::kept_from(sampled, self.is_guarded, &action.act);
        let Some(domain) = self.domains.get(&action.vm) else {
            return Err(Failure::VmGone.on(&name));
        };
        let run = domain.run.clone();
        if let Some(cause) = kept {
            return Err(levers::failed(&action.act, cause).on(&name));
        }
        let result = self
            .pull(action.vm, &action.act)
            .map_err(|failure| failure.on(&name));
        // Whatever went wrong: if the domain has ended, that is the reason.
        match changed::alive(&self.hypervisor, &run) {
            Ok(None) => Err(Failure::VmGone.on(&name)),
            _ => result,
        }
    }
}

/// What of a VM plans rely on; the rest of a sample is left out.
fn relied_on(vm: &VmSample) -> VmSample {
    let vcpus = vm.vcpus.iter().map(|vcpu| homenode_host::VcpuSample {
        index: vcpu.index,
        affinity: vcpu.affinity.clone(),
        quota: vcpu.quota,
        ..Default::default()
    });
    VmSample {
        vcpus: vcpus.collect(),
        settings: vm.settings.clone(),
        ..VmSample::new(vm.id, vm.name.clone())
    }
}

impl Leases for XenHost {
    fn next_lease_end(&self) -> Option<Ns> {
        self.leases.values().min().copied()
    }

    fn end_leases(&mut self) {
        let at = now();
        let over: Vec<VmId> = self
            .leases
            .iter()
            .filter(|(_, until)| **until <= at)
            .map(|(vm, _)| *vm)
            .collect();
        for vm in over {
            let Some(journal) = &mut self.journal else {
                continue;
            };
            match changed::undo(&self.hypervisor, journal, vm, &[Part::Limits]) {
                Ok(()) => drop(self.leases.remove(&vm)),
                Err(error) => {
                    self.notices
                        .add(format!("a cap could not be lifted: {error}; tried again"));
                    self.leases.insert(vm, at + RETRY);
                }
            }
        }
    }
}

impl Host for XenHost {
    fn machine(&self) -> &Machine {
        &self.options.machine
    }

    fn wait(&mut self, period: Ns) -> Ns {
        let (bell, beat) = (self.options.bell.clone(), self.options.beat.clone());
        acting::wait(self, (&bell, &beat), period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.end_leases();
        let sampled = self
            .look_and_sample(now())
            .map_err(|error| HostError::Unreachable {
                service: "Xen's hypervisor".to_owned(),
                cause: error.to_string(),
            })?;
        self.last = sampled;
        Ok(self.last.clone())
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        plan.check(&self.options.machine, &self.last)?;
        self.refuse_changed(plan)?;
        let mut outcomes = Vec::with_capacity(plan.decisions.len());
        for decision in &plan.decisions {
            self.options.beat.beat();
            outcomes.push(match self.journal {
                Some(_) => self.act(&decision.action).unwrap_or_else(Outcome::Failed),
                None => Outcome::DryRun,
            });
        }
        self.look_again(&plan.vms());
        Ok(Receipt {
            version: self.last.version,
            outcomes,
        })
    }

    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        let Some(domain) = self.domains.get(&vm) else {
            return Err(Failure::VmGone.on(&vm.to_string()));
        };
        let name = &domain.run.name;
        let failed = |cause: String| Failure::to_set(setting, cause).on(name);
        if self.journal.is_none() {
            return Err(failed(acting::DRY_RUN.to_owned()));
        }
        if let Setting::MemoryPolicy(Some(policy)) = setting {
            levers::policy_is_possible(policy).map_err(|failure| failure.on(name))?;
        }
        let said = match &domain.said {
            Ok(said) => said.with(setting),
            Err(why) => return Err(failed(why.clone())),
        };
        settings_file::write(&self.options.root, name, &said).map_err(failed)
    }
}

//! Domains behind the host contract.
//!
//! ```text
//!   sample ─ domains, vCPUs, affinities, caps (libxenctrl) ─ names (xenstore) ─ memory by node (console) ─▶ Sample
//!   commit ─ Plan::check ─ as sampled? ─ journal ─ act ─ read back ─▶ Receipt
//! ```
//!
//! A domain is identified by its UUID, because its number changes with a local migration, and when it is restored. If two domains
//! have the same UUID, neither is touched or shown: journal entries of one would be taken for the other's.

mod moving;
mod others;
mod sources;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{
    Act, Action, ActionError, Balloon, Balloons, CountedBy, CpuSample, Failure, Holds, Host, HostError,
    Lever, NodeSample, Outcome, Plan, Receipt, Refusal, Sample, Setting, VcpuSample, Version, VmSample,
};
use homenode_kernel::now;
use homenode_machine::Machine;
use homenode_undo::acting::{self, Leases, RightToAct};
use homenode_undo::journal::{Entry as Journalled, Journal, Run, peek};
use homenode_undo::notices::Notices;
use homenode_undo::{Acting, CarriedOver, Commit, Heartbeat, Options, RealHost, Undone};
use homenode_units::{Bytes, CpuId, NodeMap, Ns, Pages, VmId};
use homenode_vm_settings::{Change, file};

use crate::busy::Busy;
use crate::changed::{self, Home, Pins};
use crate::domain::Domain;
use crate::error::{CallError, XenError};
use crate::features::{DEBUG_KEY, NO_PAGE_USES, NO_RELEASES, NO_TOPOLOGY};
use crate::hypervisor::{Hypervisor, Listed, Pool};
use crate::levers::{self, Levers};
use crate::modelled::{Counted, Model};
use crate::moving::{INCOMING, LEFT};
use crate::page_counts::PageCounts;
use crate::store::Asking;
use crate::waiting::{Waiting, Waits};
use crate::{balloon, leftovers, memory, place};
use moving::Moves;

/// If any domain is larger than this, Xen is not asked to count pages, because it holds a lock while it counts.
const COUNTED_MAX: Pages = Pages(4 << 20);
/// The endings that `xl migrate` gives to the names of a domain that is arriving here or has left.
const ON_ITS_WAY: [&str; 2] = [INCOMING, LEFT];

/// A host that runs domains under Xen. This system is its dom0.
#[derive(Debug)]
pub struct XenHost {
    pub(crate) hypervisor: Hypervisor,
    /// Access to xenstore.
    pub(crate) store: Asking,
    names: BTreeMap<(u32, VmId), String>,
    /// The last known targets of balloons, in KiB.
    targets: BTreeMap<(u32, VmId), u64>,
    pub(crate) options: Options,
    /// The journal; `None` in a dry run.
    pub(crate) journal: Option<Journal>,
    /// Another agent's journal, in a dry run.
    peeked: BTreeMap<VmId, Journalled>,
    right: RightToAct,
    carried: Vec<CarriedOver>,
    pub(crate) domains: BTreeMap<VmId, Domain>,
    /// The modelled PMU, if there is one.
    model: Option<Model>,
    counted: BTreeMap<VmId, Counted>,
    /// Xen's trace, if it is read.
    waiting: Option<Waiting>,
    waited: BTreeMap<VmId, Waits>,
    /// Levers of domains that have a lease on one of them.
    pub(crate) levers: BTreeMap<VmId, Levers>,
    /// Domains moving to another node.
    moves: Moves,
    /// How long each vCPU ran before its domain was moved.
    ran_before: BTreeMap<VmId, BTreeMap<u16, Ns>>,
    page_counts: PageCounts,
    busy: Busy,
    said_counting: bool,
    last: Sample,
    /// The parts of the last sample that plans rely on.
    relied_on: Vec<VmSample>,
    notices: Notices,
}

impl XenHost {
    /// Reads the machine of this host.
    ///
    /// # Errors
    /// Each error is a sentence with its remedy.
    pub fn machine_here(root: &std::path::Path) -> Result<Machine, XenError> {
        place::machine(&Hypervisor::open(root)?, root)
    }

    /// Opens the hypervisor and takes over the journal.
    ///
    /// # Errors
    /// [`XenError`], or why the agent cannot get the journal or the right to act. Each error is a sentence with its remedy.
    pub fn connect(options: Options) -> Result<XenHost, Box<dyn std::error::Error + Send + Sync>> {
        let hypervisor = Hypervisor::open(&options.root)?;
        XenHost::of(hypervisor, options)
    }

    /// Like [`XenHost::connect`], with a hypervisor that is already open.
    fn of(
        hypervisor: Hypervisor,
        options: Options,
    ) -> Result<XenHost, Box<dyn std::error::Error + Send + Sync>> {
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
            store: hypervisor.store(),
            names: BTreeMap::new(),
            targets: BTreeMap::new(),
            peeked: BTreeMap::new(),
            hypervisor,
            options,
            journal,
            right: RightToAct::new(locks),
            carried: Vec::new(),
            domains: BTreeMap::new(),
            model,
            counted: BTreeMap::new(),
            waiting,
            waited: BTreeMap::new(),
            levers: BTreeMap::new(),
            moves: Moves::default(),
            ran_before: BTreeMap::new(),
            page_counts: PageCounts::default(),
            busy: Busy::default(),
            said_counting: false,
            last: Sample::default(),
            relied_on: Vec::new(),
            notices,
        };
        host.take_over_moves();
        host.carry_over()?;
        Ok(host)
    }

    /// Takes over what an earlier agent left: homes and pins stay in force, and limits get a lease.
    fn carry_over(&mut self) -> Result<(), CallError> {
        let entries = self.journal.as_ref().map(|journal| journal.entries().clone());
        for (vm, entry) in entries.unwrap_or_default() {
            if changed::alive(&self.hypervisor, &entry.run)?.is_none() {
                continue;
            }
            self.levers.insert(vm, levers::of_domain(Some(&entry)));
            self.forget_unleased(vm);
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

    /// Reads all running domains, and forgets domains that have ended.
    fn look(&mut self) -> Result<(), CallError> {
        self.look_who_arrives();
        let mut listed = self.hypervisor.domains()?;
        let moving = self.moves.on_its_way();
        listed.retain(|of| of.is_vm() && moving != Some(of.vm));
        if self.journal.is_none() {
            self.peeked = peek(&self.options.state_dir);
        }
        self.settle_ended()?;
        let mut domains = BTreeMap::new();
        let mut pools: BTreeMap<u32, Pool> = BTreeMap::new();
        let named = self.named(&listed);
        for (listed, name) in named.clone() {
            self.options.heartbeat.beat();
            let others = named
                .iter()
                .filter(|(other, called)| other.vm != listed.vm && *called == name);
            let namesakes = others.map(|(other, _)| other.vm).collect();
            let pool = match pools.entry(listed.pool) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.hypervisor.pool(listed.pool)?),
            };
            let pool = pool.clone();
            let run = self.run_of(listed, name);
            let target = self.targets.get(&(listed.domid, listed.vm)).copied();
            match Domain::look(
                &self.hypervisor,
                (&self.options.root, run, listed),
                pool,
                namesakes,
            ) {
                Ok(domain) if !domain.vcpus.is_empty() => {
                    drop(domains.insert(listed.vm, Domain { target, ..domain }));
                }
                // The domain is just ending.
                Ok(_) | Err(_) => {}
            }
        }
        // While a domain is on its way, show the old domain as long as it exists, and after that its last known state until the
        // new one has arrived.
        if let Some(vm) = moving.filter(|vm| !self.moves.is_anothers(*vm))
            && let Some(mut known) = self.domains.remove(&vm)
        {
            if let Some(looked) = self.looked_again(&known) {
                known = looked;
            }
            domains.insert(vm, known);
        }
        for domain in domains.values() {
            if let Err(why) = &domain.said {
                self.notices
                    .add(format!("domain {} is only watched: {why}", domain.run.name));
            }
        }
        self.domains = domains;
        self.ran_before.retain(|vm, _| self.domains.contains_key(vm));
        self.look_who_moves();
        let all: Vec<VmId> = self.domains.keys().copied().collect();
        for vm in all {
            if let Err(error) = self.take_in_others(vm) {
                let name = self.domains.get(&vm).map_or("", |domain| &domain.run.name);
                let said = format!("cannot take over what other programs set on domain {name}: {error}");
                self.notices.add(said);
            }
        }
        Ok(())
    }

    /// Reads a domain again, if the same run of it still exists.
    fn looked_again(&self, known: &Domain) -> Option<Domain> {
        let listed = changed::alive(&self.hypervisor, &known.run).ok()??;
        let pool = self.hypervisor.pool(listed.pool).ok()?;
        let of = (self.options.root.as_path(), known.run.clone(), listed);
        let target = known.target;
        let looked = Domain {
            target,
            ..Domain::look(&self.hypervisor, of, pool, known.namesakes.clone()).ok()?
        };
        (looked.vcpus.len() == known.vcpus.len()).then_some(looked)
    }

    /// Returns the domains that have a name and a UUID that no other named domain has. A domain that is being built has no name
    /// yet, and one that was destroyed no longer has one. If xenstore does not answer, domains keep their last names.
    fn named(&mut self, listed: &[Listed]) -> Vec<(Listed, String)> {
        let paths = |of: &Listed| {
            let name = format!("/local/domain/{}/name", of.domid);
            std::iter::once(name).chain(balloon::paths(of.domid))
        };
        let key = |of: &Listed| (of.domid, of.vm);
        match self.store.read(listed.iter().flat_map(paths).collect()) {
            Ok(said) => {
                let told = || listed.iter().zip(said.chunks(1 + balloon::PATHS));
                let name = |(of, said): (&Listed, &[Option<String>])| Some((key(of), said[0].clone()?));
                let target =
                    |(of, said): (&Listed, &[Option<String>])| Some((key(of), balloon::target(&said[1..])?));
                self.names = told().filter_map(name).collect();
                self.targets = told().filter_map(target).collect();
            }
            Err(why) => self.notices.add(format!(
                "xenstored does not report the names of domains ({why}): known domains keep theirs, and new ones are not managed until it does"
            )),
        }
        let mut named: BTreeMap<VmId, Vec<(Listed, String)>> = BTreeMap::new();
        for of in listed {
            let name = self.names.get(&key(of));
            if let Some(name) = name.filter(|name| !ON_ITS_WAY.iter().any(|end| name.ends_with(end))) {
                named.entry(of.vm).or_default().push((*of, name.clone()));
            }
        }
        for of in named.values().filter(|of| of.len() > 1) {
            let names: Vec<&str> = of.iter().map(|(_, name)| name.as_str()).collect();
            self.notices.add(format!(
                "domains {} have the same UUID: none of them is managed; give each its own",
                names.join(", ")
            ));
        }
        let alone = named.into_values().filter(|of| of.len() == 1);
        alone.flatten().collect()
    }

    /// Returns the run of a listed domain.
    fn run_of(&self, listed: Listed, name: String) -> Run {
        Run {
            vm: listed.vm,
            name,
            runtime_id: listed.domid,
            pid: 0,
            start_ticks: self.hypervisor.boot(),
        }
    }

    /// Reads on which nodes domains' memory is, if that is due.
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
                "domain {name} has more than {} of memory: counting it would block a CPU in Xen for too long, so domains' \
                 memory by node is not read",
                COUNTED_MAX.to_bytes()
            ));
            self.page_counts.forget();
            return;
        }
        let pages = self.domains.values();
        let pages = pages
            .map(|domain| (domain.run.runtime_id, domain.listed.pages))
            .collect();
        if !self.page_counts.is_due(&pages, at) {
            return;
        }
        let begun = now();
        let said = self.hypervisor.say(memory::KEY);
        let took = now().saturating_sub(begun);
        match said {
            Ok(console) => {
                self.page_counts.take_in(&console, &pages, (at, took));
                // Report this only once, since each measured time differs.
                if !std::mem::replace(&mut self.said_counting, true) {
                    let (took_us, of) = (took.0 / 1000, Pages(pages.values().sum()).to_bytes());
                    self.notices.add(format!(
                        "{DEBUG_KEY}; the first count took {took_us} µs, for {of} of memory"
                    ));
                }
            }
            Err(error) => {
                self.page_counts.take_in("", &pages, (at, took));
                self.notices
                    .add(format!("domains' memory by node is unknown: {error}"));
            }
        }
    }

    /// Returns the journal entry of this run of a domain. In a dry run it is from the journal of another agent.
    pub(crate) fn entry_of(&self, run: &Run) -> Option<&Journalled> {
        let entry = match &self.journal {
            Some(journal) => journal.entry(run.vm),
            None => self.peeked.get(&run.vm),
        };
        entry.filter(|entry| entry.run == *run)
    }

    fn sample_of(&self, domain: &Domain) -> VmSample {
        let (usable, vm) = (self.options.machine.cpu_set(), domain.run.vm);
        let entry = self.entry_of(&domain.run);
        let known = (self.counted.get(&vm), self.waited.get(&vm));
        VmSample {
            vcpus: self.with_before(vm, domain.samples(&usable, known)),
            memory_bytes: Pages(domain.listed.pages).to_bytes(),
            balloon: domain
                .target
                .map(|target| levers::balloon(target, domain.listed.pages, entry)),
            pages: self.page_counts.of(domain.run.runtime_id).cloned(),
            no_topology_device: Some(NO_TOPOLOGY.to_owned()),
            no_releases: Some(NO_RELEASES.to_owned()),
            immovable: self.immovable(domain),
            moves_whole: true,
            settings: domain.settings(entry, &usable),
            ..VmSample::new(domain.run.vm, domain.run.name.clone())
        }
    }

    /// Adds the time that vCPUs ran before their domain was moved, because the new domain's times begin at zero.
    fn with_before(&self, vm: VmId, mut vcpus: Vec<VcpuSample>) -> Vec<VcpuSample> {
        let before = self.ran_before.get(&vm);
        for vcpu in &mut vcpus {
            let ran = before.and_then(|before| before.get(&vcpu.index)).copied();
            vcpu.running_ns += ran.unwrap_or_default();
        }
        vcpus
    }

    fn sample_cpus(&mut self) -> Result<Vec<CpuSample>, CallError> {
        // Use the time of this look, not the sample's: the CPUs were not idle while the agent worked in between.
        self.busy.take_in(now(), self.hypervisor.idle()?);
        let busy = |id: CpuId| CpuSample {
            id,
            busy_ns: self.busy.of(id),
        };
        Ok(self.options.machine.cpus.iter().map(|cpu| busy(cpu.id)).collect())
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
                huge_pages: None,
            };
            nodes.insert(node, sample);
        }
        Ok(nodes)
    }

    fn look_and_sample(&mut self, at: Ns) -> Result<Sample, CallError> {
        self.look()?;
        self.look_at_memory(at);
        let cpus = self.sample_cpus()?;
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
            balloons: Balloons::Xen,
            no_page_uses: Some(NO_PAGE_USES.to_owned()),
            trackers: Vec::new(),
            vms,
            ..Sample::default()
        })
    }

    /// Returns a new version if anything that plans rely on has changed.
    fn version_of(&mut self, vms: &[VmSample]) -> Version {
        let relied_on: Vec<VmSample> = vms.iter().map(relied_on).collect();
        if relied_on != self.relied_on || self.last.version == Version::default() {
            self.relied_on = relied_on;
            self.last.version = Version(self.last.version.0 + 1);
        }
        self.last.version
    }
}

/// Returns the parts of a VM's sample that plans rely on.
fn relied_on(vm: &VmSample) -> VmSample {
    let vcpus = vm.vcpus.iter().map(|vcpu| VcpuSample {
        index: vcpu.index,
        affinity: vcpu.affinity.clone(),
        quota: vcpu.quota,
        ..Default::default()
    });
    VmSample {
        vcpus: vcpus.collect(),
        settings: vm.settings.clone(),
        // No plan relies on a balloon's current size, so a change of the size alone makes no new version.
        balloon: vm.balloon.map(|balloon| Balloon {
            current: Bytes::ZERO,
            ..balloon
        }),
        ..VmSample::new(vm.id, vm.name.clone())
    }
}

impl RealHost for XenHost {
    fn right(&self) -> &RightToAct {
        &self.right
    }

    fn right_mut(&mut self) -> &mut RightToAct {
        &mut self.right
    }

    fn take_notices(&mut self) -> Vec<String> {
        self.notices.take()
    }

    fn carried_over(&self) -> Vec<CarriedOver> {
        self.carried.clone()
    }

    fn restore(&mut self) -> Undone {
        self.levers.clear();
        match &mut self.journal {
            Some(journal) => {
                let undone = leftovers::undo_all(&self.hypervisor, journal);
                self.right.note_undone(&undone);
                undone
            }
            None => Undone::default(),
        }
    }

    fn lift_limits(&mut self) -> Vec<String> {
        let Some(journal) = &mut self.journal else {
            return Vec::new();
        };
        let limited = journal
            .entries()
            .iter()
            .filter(|(_, entry)| levers::has_limits(entry));
        let limited: Vec<VmId> = limited.map(|(vm, _)| *vm).collect();
        let lift = |vm| levers::undo(&self.hypervisor, journal, vm, Lever::is_leased).err();
        let failures = limited.into_iter().filter_map(lift);
        failures.map(|error| error.to_string()).collect()
    }
}

impl Commit for XenHost {
    fn last(&self) -> &Sample {
        &self.last
    }

    /// Reads the domains of a plan again. Refuses the plan if another program changed one of them since the sample.
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

    fn is_dry_run(&self) -> bool {
        self.journal.is_none()
    }

    fn act(&mut self, action: &Action) -> Result<Outcome, ActionError> {
        let sampled = self.last.vm(action.vm);
        let name = sampled.map(|vm| vm.name.clone()).unwrap_or_default();
        let kept = self.right.kept_from(sampled, &action.act);
        let Some(domain) = self.domains.get(&action.vm) else {
            return Err(Failure::VmGone.on(&name));
        };
        let run = domain.run.clone();
        if let Some(cause) = kept {
            return Err(levers::failed(&action.act, cause).on(&name));
        }
        if self.moves.on_its_way() == Some(action.vm) && !matches!(action.act, Act::Lift { .. }) {
            return Err(levers::failed(&action.act, "it is being moved to another node").on(&name));
        }
        let result = self
            .pull(action.vm, &action.act)
            .map_err(|failure| failure.on(&name));
        // If the domain has ended, report that as the reason for any failure.
        match changed::alive(&self.hypervisor, &run) {
            Ok(None) => Err(Failure::VmGone.on(&name)),
            _ => result,
        }
    }

    fn look_again(&mut self, touched: &BTreeSet<VmId>) {
        for vm in touched {
            let Some(known) = self.domains.get(vm) else {
                continue;
            };
            // Acting on an ended domain fails, and the next sample leaves it out.
            if let Some(domain) = self.looked_again(known) {
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

    fn heartbeat(&self) -> &Heartbeat {
        &self.options.heartbeat
    }
}

impl Leases for XenHost {
    fn next_lease_end(&self) -> Option<Ns> {
        self.levers.values().filter_map(Levers::next_lease_end).min()
    }

    fn end_leases(&mut self) {
        let at = now();
        let is_over = |levers: &Levers| levers.next_lease_end().is_some_and(|until| until <= at);
        let over = self.levers.iter().filter(|(_, levers)| is_over(levers));
        let over: Vec<VmId> = over.map(|(vm, _)| *vm).collect();
        for mut vm in over {
            for error in Levers::end_leases(self, &mut vm, at) {
                self.notices.add(format!(
                    "a limit could not be lifted: {error}; the agent will try again"
                ));
            }
            self.forget_unleased(vm);
        }
    }
}

impl Host for XenHost {
    fn machine(&self) -> &Machine {
        &self.options.machine
    }

    fn wait(&mut self, period: Ns) -> Ns {
        let (wake_signal, heartbeat) = (self.options.wake_signal.clone(), self.options.heartbeat.clone());
        acting::wait(self, (&wake_signal, &heartbeat), period)
    }

    fn sample(&mut self) -> Result<Sample, HostError> {
        self.end_leases();
        self.last = self
            .look_and_sample(now())
            .map_err(|error| HostError::Unreachable {
                service: "Xen's hypervisor".to_owned(),
                cause: error.to_string(),
            })?;
        Ok(self.last.clone())
    }

    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        homenode_undo::commit(self, plan)
    }

    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        let Some(domain) = self.domains.get(&vm) else {
            return Err(Failure::VmGone.on(&vm.to_string()));
        };
        let name = &domain.run.name;
        let failed = |cause: String| Failure::to_set(settings, cause).on(name);
        if self.journal.is_none() {
            return Err(failed(acting::DRY_RUN.to_owned()));
        }
        for setting in settings {
            if let Setting::MemoryPolicy(Some(policy)) = setting {
                levers::memory_policy_is_possible(*policy).map_err(|failure| failure.on(name))?;
            }
        }
        let change = Change { settings, holds };
        let changed = file::change(&self.options.root, domain.whose(), &change);
        changed.map_err(|error| failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests;

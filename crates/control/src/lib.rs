//! The control loop: sample, derive rates, plan, commit. The same code drives the twin and a real host.
//!
//! ```text
//!   host.sample() ─▶ Rates::between ─▶ View ─▶ overcommit ┐
//!                                              permits    │
//!                                              arrange    │
//!                                              balance    ├─▶ levers::merge ─▶ host.commit() ─▶ Receipt
//!                                              repatriate │                                       │
//!                                              memory     │                                       │
//!                                              feed       │                                       │
//!                                              working set┘                                       │
//!        homes, expected affinities  ◀────────────────────────────────────────────────────────────┘
//! ```
//!
//! [`Control`] is a plain struct without threads or clock; whoever owns it calls [`Control::step`] once per period and shows
//! or records the [`Epoch`] that comes back.

mod bill;
mod event;
mod status;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::observed::CarrierChoice;
use homenode_host::{
    Act, Action, CountedBy, HandsOff, Host, HostError, Lever, Limit, Management, Outcome, Plan, Rates,
    Receipt, Refusal, Sample, Setting, View, VmSample, VmView,
};
use homenode_machine::Machine;
use homenode_policy::arrange::what_if::{Forecast, NoForecast, Wanted};
use homenode_policy::demand::{Demand, History};
use homenode_policy::permits::suggest::{self, NoSuggestion, Suggestion};
use homenode_policy::placement::{
    Algorithm, Announcement, Ledger, Placement, Reservation, Shape, Supply, Unplaceable,
};
use homenode_policy::{
    advisor, arrange, balance, levers, memory, numad, overcommit, pace, permits, placement, repatriate,
    topology_feed, trial, working_set,
};
use homenode_units::{Bytes, BytesPerSec, Candidates, MemoryPolicy, Migration, NodeSet, Ns, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use bill::{Bill, Hour, Line};
pub use event::Event;
use status::Known;
pub use status::{
    LinkStatus, MemoryStatus, NodePages, NodeStatus, NodeVcpus, PermitStatus, Status, TopologyStatus,
    VirtualNodeStatus, VmStatus,
};
use watch::Watch;

/// A lease outlasts at least so many periods.
const LEASE_PERIODS_MIN: u64 = 3;

/// Which policies act.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policies {
    /// None: the host's own scheduler, watched.
    Default,
    /// First fit, each vCPU pinned to one CPU, memory bound: the baseline of \[TAVO\].
    FfPin,
    /// numad's own: binds large VMs to nodes and moves their memory whole, to compare with ([`homenode_policy::numad`]).
    Numad,
    /// Memory policies and repatriation alone: homes are what operators chose.
    Memory,
    /// TAVO as published: placement by TAH at arrival, balance and re-homing, repatriation; beside it permits and memory
    /// policies.
    Tavo,
    /// Arrangements predicted from counters and proven by trials ([`homenode_policy::arrange`]); beside it permits, lending,
    /// repatriation, memory policies.
    #[default]
    Homenode,
}

impl Policies {
    /// All of them.
    pub const ALL: [Policies; 6] = [
        Policies::Default,
        Policies::FfPin,
        Policies::Numad,
        Policies::Memory,
        Policies::Tavo,
        Policies::Homenode,
    ];

    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Policies::Default => "default",
            Policies::FfPin => "ff-pin",
            Policies::Numad => "numad",
            Policies::Memory => "memory",
            Policies::Tavo => "tavo",
            Policies::Homenode => "homenode",
        }
    }
}

impl std::str::FromStr for Policies {
    type Err = String;
    fn from_str(text: &str) -> Result<Policies, String> {
        let named = Policies::ALL.into_iter().find(|policies| policies.name() == text);
        named.ok_or_else(|| {
            let valid = Candidates::of(text, Policies::ALL.map(Policies::name));
            format!("no policies are named `{text}`{valid}")
        })
    }
}

/// Whether plans are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Plans are committed.
    #[default]
    Act,
    /// Plans are made and explained; nothing is touched.
    DryRun,
}

/// What the operator may set, in one file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Time between samples.
    #[serde(with = "homenode_units::text")]
    pub period: Ns,
    /// Which policies act.
    pub policies: Policies,
    /// Placement and CPU, memory and link limits.
    pub placement: placement::Config,
    /// Page budgets.
    pub repatriate: repatriate::Config,
    /// How memory policies are carried out.
    pub memory: memory::Config,
    /// When moves slow down.
    pub pace: pace::Config,
    /// How VMs are held to their permits.
    pub permits: permits::Config,
    /// Whose memory is watched, and how.
    pub working_set: working_set::Config,
    /// How memory is taken from VMs that have a floor.
    pub overcommit: overcommit::Config,
    /// How soon and how often guests are told where they are.
    pub topology_feed: topology_feed::Config,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            period: Ns::from_secs(1),
            policies: Policies::Homenode,
            placement: placement::Config::default(),
            repatriate: repatriate::Config::default(),
            memory: memory::Config::default(),
            pace: pace::Config::default(),
            permits: permits::Config::default(),
            working_set: working_set::Config::default(),
            overcommit: overcommit::Config::default(),
            topology_feed: topology_feed::Config::default(),
        }
    }
}

/// What one step saw and did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Epoch {
    /// The host as it was before anything was done in this epoch; homes as they are after it.
    #[serde(flatten)]
    pub status: Status,
    /// What changed, was decided, was done, in order.
    pub events: Vec<Event>,
}

/// An epoch of which everything is known but what came of its plan.
#[derive(Clone, Debug)]
pub struct Begun {
    sample: Sample,
    rates: Option<Rates>,
    plan: Plan,
    events: Vec<Event>,
    mode: Mode,
}

impl Begun {
    /// Has the plan carried out, unless there is nothing to do or nothing may be done.
    ///
    /// # Errors
    /// The host's refusal.
    pub fn commit<H: Host + ?Sized>(&self, host: &mut H) -> Result<Receipt, Refusal> {
        let untouched = |outcomes| {
            Ok(Receipt {
                version: self.sample.version,
                outcomes,
            })
        };
        match self.mode {
            _ if self.plan.decisions.is_empty() => untouched(vec![]),
            Mode::DryRun => untouched(vec![Outcome::DryRun; self.plan.decisions.len()]),
            Mode::Act => host.commit(&self.plan),
        }
    }
}

/// A question about a VM that does not run yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// vCPUs online at start.
    pub vcpus: u32,
    /// Memory.
    pub memory: Bytes,
    /// Declared memory bandwidth.
    pub bandwidth: Option<BytesPerSec>,
}

/// The control loop's state.
#[derive(Debug, Default)]
pub struct Control {
    config: Config,
    mode: Mode,
    history: History,
    placement: placement::State,
    arrange: arrange::State,
    balance: balance::State,
    numad: numad::State,
    repatriate: repatriate::State,
    memory: memory::State,
    pace: pace::State,
    permits: permits::State,
    working_set: working_set::State,
    overcommit: overcommit::State,
    topology_feed: topology_feed::State,
    bill: Bill,
    homes: BTreeMap<VmId, NodeSet>,
    layouts: topology_feed::Layouts,
    watch: Watch,
    /// In a dry run the same plan comes every epoch; it is told once.
    told: BTreeSet<String>,
    last: Option<(Sample, Option<Rates>)>,
}

impl Control {
    /// A loop that has seen nothing yet.
    pub fn new(mut config: Config, mode: Mode) -> Control {
        if config.policies == Policies::FfPin {
            config.placement.algorithm = Algorithm::FirstFit;
        }
        // A limit must not end before the next epoch can renew it, nor must a watch.
        let lease_min = Ns(config.period.0.saturating_mul(LEASE_PERIODS_MIN));
        config.permits.lease = config.permits.lease.max(lease_min);
        config.working_set.lease = config.working_set.lease.max(lease_min);
        config.overcommit.lease = config.overcommit.lease.max(lease_min);
        Control {
            permits: permits::State::new(&config.permits),
            config,
            mode,
            ..Control::default()
        }
    }

    /// The same with promises made before.
    pub fn with_ledger(mut self, ledger: Ledger) -> Control {
        self.placement.ledger = ledger;
        self
    }

    /// Promises that are still open.
    pub fn ledger(&self) -> &Ledger {
        &self.placement.ledger
    }

    /// The same with a bill of before.
    pub fn with_bill(mut self, bill: Bill) -> Control {
        self.bill = bill;
        self
    }

    /// What VMs used of their permits, up to the last [`Control::settle_bill`].
    pub fn bill(&self) -> &Bill {
        &self.bill
    }

    /// Puts what was used since the last call to this hour's account.
    pub fn settle_bill(&mut self, hour: Hour) {
        let Some((sample, _)) = &self.last else { return };
        for (id, usage) in self.permits.take_usage() {
            if let Some(vm) = sample.vm(id)
                && let Some(permit) = vm.settings.permit
            {
                self.bill.add(hour, id, &vm.name, permit.resource(), usage);
            }
        }
        self.bill.forget_before(hour);
    }

    /// Why permits are kept in mind only, if they are.
    pub fn permits_idle(&self) -> Option<&'static str> {
        match (self.config.policies, self.mode) {
            (_, Mode::DryRun) => Some("the agent runs with --dry-run and holds nobody to a permit"),
            (Policies::Homenode | Policies::Tavo, Mode::Act) => None,
            _ => Some("the policies of this agent hold nobody to a permit; run it with --policies homenode"),
        }
    }

    /// The operator set something of a VM. Who sets a permit wants the agent to decide on its CPU quota, whoever changed that.
    pub fn was_set(&mut self, vm: VmId, setting: Setting) {
        if let Setting::Permit(_) = setting {
            self.watch.give_back_quota(vm);
        }
    }

    /// What speaks against a memory policy for a VM, if anything does; `None` too for a VM that does not run.
    pub fn objection(&self, vm: VmId, policy: MemoryPolicy) -> Option<String> {
        let (sample, _) = self.last.as_ref()?;
        let vm = sample.vm(vm)?;
        memory::objection(sample, vm, hands_off(vm, &self.watch), policy)
    }

    /// What the operator should know of a memory policy that a VM can have, each a sentence.
    pub fn cautions(&self, vm: VmId, policy: MemoryPolicy) -> Vec<String> {
        let Some((sample, vm)) = self
            .last
            .as_ref()
            .and_then(|(sample, _)| Some((sample, sample.vm(vm)?)))
        else {
            return Vec::new();
        };
        let is_modelled = policy.migration == Migration::Carrefour && sample.counted_by == CountedBy::Model;
        let modelled = is_modelled
            .then(|| "which node uses a page is sampled by a model of caches, not by hardware".to_owned());
        memory::caution(vm, policy).into_iter().chain(modelled).collect()
    }

    /// Which memory policy is thought to suit a VM; `None` where no such VM runs, or it was not looked at yet.
    pub fn memory_advice(&self, vm: VmId) -> Option<&advisor::Advice> {
        self.memory.advisor.advice(vm)
    }

    /// Why memory policies are kept in mind only, if they are.
    pub fn memory_policies_idle(&self) -> Option<&'static str> {
        match (self.config.policies, self.mode) {
            (_, Mode::DryRun) => Some("the agent runs with --dry-run and moves nobody's memory"),
            (Policies::Homenode | Policies::Tavo | Policies::Memory, Mode::Act) => None,
            _ => Some("the policies of this agent set no memory policy; run it with --policies homenode"),
        }
    }

    /// Somebody wants to know how much memory a VM uses, for so long, in windows of this length where it matters to him.
    pub fn want_working_set(&mut self, vm: VmId, window: Option<Ns>, wait: Ns) {
        let until = Ns(self.now().0.saturating_add(wait.0));
        self.working_set.want(vm, window, until);
    }

    /// What is known of the working sets of VMs.
    pub fn working_set(&self) -> &working_set::State {
        &self.working_set
    }

    /// Why nobody is watched now, if so.
    pub fn watching_idle(&self) -> Option<&'static str> {
        let idle = "the agent runs with --dry-run and watches nobody's memory: that takes clearing what tells of its use";
        (self.mode == Mode::DryRun).then_some(idle)
    }

    /// Whether the operator wants this VM left alone.
    pub fn is_opted_out(&self, vm: VmId) -> bool {
        let vm = self.last.as_ref().and_then(|(sample, _)| sample.vm(vm));
        vm.is_some_and(|vm| vm.settings.management == Management::Ignored)
    }

    /// Who can tell which memory VMs use on this host, best first.
    pub fn carriers(&self) -> &[CarrierChoice] {
        self.last.as_ref().map_or(&[], |(sample, _)| &sample.carriers)
    }

    /// Why memory floors are kept in mind only, if they are.
    pub fn memory_floors_idle(&self) -> Option<&'static str> {
        match (self.config.policies, self.mode) {
            (_, Mode::DryRun) => Some("the agent runs with --dry-run and takes nobody's memory"),
            (Policies::Homenode | Policies::Tavo, Mode::Act) => None,
            _ => Some("the policies of this agent take nobody's memory; run it with --policies homenode"),
        }
    }

    /// Why no guest is told where it is, if so.
    pub fn feed_idle(&self) -> Option<&'static str> {
        match (self.config.policies, self.mode) {
            (_, Mode::DryRun) => Some("the agent runs with --dry-run and tells guests nothing"),
            (Policies::Homenode | Policies::Tavo, Mode::Act) => None,
            _ => Some("the policies of this agent tell guests nothing; run it with --policies homenode"),
        }
    }

    /// Why there are no predictions, if so.
    pub fn predictions_idle(&self) -> Option<&'static str> {
        let idle = "the policies of this agent keep no predictions; run it with --policies homenode";
        (self.config.policies != Policies::Homenode).then_some(idle)
    }

    /// Why no prediction is proven by a trial, if so.
    pub fn trials_idle(&self) -> Option<&'static str> {
        match self.mode {
            Mode::DryRun => Some("the agent runs with --dry-run: it changes nothing, so it tries nothing"),
            Mode::Act if self.config.policies == Policies::Homenode => None,
            Mode::Act => Some("the policies of this agent try nothing; run it with --policies homenode"),
        }
    }

    /// What came of changes, predicted against seen.
    pub fn trials(&self) -> &trial::State {
        &self.arrange.trials
    }

    /// How fast VMs are predicted to be if some had other homes; of an empty question, as they are.
    ///
    /// # Errors
    /// A home that is none on this host; a VM to move of which too little is known.
    pub fn what_if(&self, machine: &Machine, wanted: &Wanted) -> Result<Forecast, NoForecast> {
        let empty = Sample::default();
        let (sample, rates) = self
            .last
            .as_ref()
            .map_or((&empty, None), |(sample, rates)| (sample, rates.as_ref()));
        let view = view(machine, sample, rates, &self.homes, &self.layouts, &self.watch);
        arrange::what_if(&view, &self.config.placement, &self.arrange, wanted)
    }

    /// What a VM might book, by what it did and by how large it is; `None` where no such VM runs.
    pub fn suggest(&self, machine: &Machine, vm: VmId) -> Option<Advice> {
        let (sample, _) = self.last.as_ref()?;
        let memory = sample.vm(vm)?.memory_bytes;
        let conduct = self.permits.conduct(vm);
        let recent: Vec<u64> = conduct
            .map(|conduct| conduct.recent().collect())
            .unwrap_or_default();
        Some(Advice {
            from_behaviour: suggest::from_behaviour(&recent, suggest::PERCENTILE),
            from_memory: suggest::from_memory(memory, machine),
            memory_bytes: memory,
            unmetered: conduct.and_then(|conduct| conduct.unmetered),
        })
    }

    /// What the operator set.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes over the home that an earlier agent gave a VM. Which of its pins are that agent's the host knows better.
    pub fn adopt(&mut self, vm: VmId, home: Option<NodeSet>) {
        self.homes.extend(home.map(|home| (vm, home)));
    }

    /// One epoch: sample, derive, plan, commit.
    ///
    /// # Errors
    /// When the host cannot be read. Nothing was done then, and the next step may succeed.
    pub fn step<H: Host + ?Sized>(&mut self, host: &mut H) -> Result<Epoch, HostError> {
        let sample = host.sample()?;
        let begun = self.begin(host.machine(), sample);
        let answer = begun.commit(host);
        Ok(self.finish(host.machine(), begun, answer))
    }

    /// The first half of an epoch: everything but acting. Between [`Control::begin`] and [`Control::finish`] the loop may be
    /// shared: moving pages takes long, and a VM that starts meanwhile wants an answer.
    pub fn begin(&mut self, machine: &Machine, sample: Sample) -> Begun {
        let events = self
            .watch
            .compare(self.last.as_ref().map(|(sample, _)| sample), &sample);
        self.homes.retain(|id, _| sample.vm(*id).is_some());
        let rates = self
            .last
            .as_ref()
            .and_then(|(prev, _)| Rates::between(machine, prev, &sample));
        let plan = self.plan(machine, &sample, rates.as_ref());
        self.last = Some((sample.clone(), rates.clone()));
        Begun {
            sample,
            rates,
            plan,
            events,
            mode: self.mode,
        }
    }

    /// The second half: remembers what was done.
    pub fn finish(&mut self, machine: &Machine, begun: Begun, answer: Result<Receipt, Refusal>) -> Epoch {
        let Begun {
            sample,
            rates,
            plan,
            mut events,
            ..
        } = begun;
        events.extend(
            plan.findings
                .into_iter()
                .map(|finding| Event::found(finding, &sample)),
        );
        match answer {
            Err(refusal) => events.push(Event::Refused { refusal }),
            Ok(receipt) => {
                for (decision, outcome) in plan.decisions.into_iter().zip(receipt.outcomes) {
                    if outcome == Outcome::DryRun && !self.told.insert(what_is_told(&decision.action)) {
                        continue;
                    }
                    self.remember(&decision.action, &outcome, sample.at);
                    if outcome == Outcome::Renewed {
                        continue;
                    }
                    events.push(Event::decided(decision, outcome, &sample));
                }
            }
        }
        Epoch {
            status: self.status_of(machine, &sample, rates.as_ref()),
            events,
        }
    }

    /// The policies' merged plan. Pure but for the policies' own memory: this is the part that is benchmarked.
    pub fn plan(&mut self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) -> Plan {
        if self.config.policies == Policies::Memory {
            // Nobody places VMs: home is where the operator wants a VM, or all that it may use.
            for vm in &sample.vms {
                let home = self.homes.entry(vm.id);
                home.or_insert_with(|| vm.settings.home.clone().unwrap_or_else(|| may_use(machine, vm)));
            }
        }
        self.layouts.update(sample, &self.homes);
        let Control {
            config,
            mode,
            history,
            placement,
            arrange,
            balance,
            numad,
            repatriate,
            memory,
            pace,
            permits,
            working_set,
            overcommit,
            topology_feed,
            homes,
            layouts,
            watch,
            ..
        } = self;
        let view = view(machine, sample, rates, homes, layouts, watch);
        history.observe(&view);
        let mut pages = || {
            let strays = repatriate::plan(&view, &config.repatriate, repatriate);
            let laid_out = memory::plan(&view, &config.memory, &config.repatriate, &strays, memory);
            match mode {
                Mode::Act => pace::hold(&view, &config.pace, pace, vec![strays, laid_out]),
                // Nothing moves: nothing is learnt from it.
                Mode::DryRun => vec![strays, laid_out],
            }
        };
        if matches!(config.policies, Policies::Tavo | Policies::Homenode) {
            for vm in overcommit::watched(&view) {
                working_set.want(vm, None, view.at + config.overcommit.lease);
            }
        }
        // Who asks how much memory a VM uses is answered whatever policies act.
        let watching = working_set::plan(&view, &config.working_set, working_set);
        let mut plans = match config.policies {
            Policies::Default => vec![],
            Policies::FfPin => vec![placement::plan(&view, &config.placement, history, placement)],
            Policies::Numad => vec![numad::plan(&view, &config.placement, numad)],
            Policies::Memory => pages(),
            Policies::Tavo | Policies::Homenode => {
                let mut plans = vec![
                    overcommit::plan(
                        &view,
                        &config.overcommit,
                        |vm| working_set.estimate(vm),
                        overcommit,
                    ),
                    permits::plan(&view, &config.permits, permits),
                ];
                match config.policies {
                    Policies::Tavo => {
                        plans.push(placement::plan(&view, &config.placement, history, placement));
                        plans.push(balance::plan(
                            &view,
                            &config.placement,
                            history,
                            placement,
                            balance,
                        ));
                    }
                    _ => {
                        plans.push(arrange::plan(
                            &view,
                            &config.placement,
                            history,
                            placement,
                            arrange,
                        ));
                        plans.push(balance::plan_vcpus(&view, &config.placement));
                    }
                }
                plans.extend(pages());
                plans.push(topology_feed::plan(&view, &config.topology_feed, topology_feed));
                plans
            }
        };
        plans.push(watching);
        levers::merge(&view, plans)
    }

    /// What an action that was carried out leaves in force.
    fn remember(&mut self, action: &Action, outcome: &Outcome, at: Ns) {
        let vm = action.vm;
        match (&action.act, outcome) {
            (Act::SetHome { nodes }, Outcome::Done | Outcome::DryRun) => {
                self.homes.insert(vm, nodes.clone());
            }
            (Act::Lift { lever: Lever::Home }, Outcome::Done | Outcome::DryRun) => {
                self.homes.remove(&vm);
                self.watch.forget_pins(vm);
            }
            (Act::PinVcpus { vcpus, cpus }, Outcome::Done) => {
                for index in vcpus {
                    self.watch.expect(vm, *index, cpus.clone());
                }
            }
            // Some vCPUs may have been pinned: what is in force is nobody's mistake and nobody else's doing.
            (Act::PinVcpus { vcpus, .. }, Outcome::Failed(_)) => self.watch.forget(vm, vcpus),
            (Act::SetHome { .. }, Outcome::Failed(_)) => self.placement.ledger.withdraw(vm),
            (Act::Lift { lever: Lever::Home }, Outcome::Failed(_)) => self.watch.forget_pins(vm),
            (
                Act::Limit {
                    limit: Limit::CpuQuota(quota),
                    lease_ns,
                },
                Outcome::Done | Outcome::Renewed,
            ) => self.watch.expect_quota(vm, *quota, at + *lease_ns),
            (act, _) if act.lever() == Lever::CpuQuota => self.watch.forget_quota(vm),
            _ if action.act.lever() == Lever::Watching => self.working_set.outcome(action, outcome, at),
            _ => {}
        }
    }

    /// The host as it was last seen; empty before the first epoch.
    pub fn status(&self, machine: &Machine) -> Status {
        let last = self.last.as_ref();
        last.map_or_else(Status::default, |(sample, rates)| {
            self.status_of(machine, sample, rates.as_ref())
        })
    }

    fn status_of(&self, machine: &Machine, sample: &Sample, rates: Option<&Rates>) -> Status {
        let known = |vm: &VmSample| Known {
            home: self.homes.get(&vm.id).cloned(),
            left_alone: hands_off(vm, &self.watch).map(|why| why.to_string()),
            permit: PermitStatus::of(vm, &self.permits),
            memory: MemoryStatus::of(vm, &self.overcommit),
            topology: TopologyStatus::of(machine, vm, sample.at, self.layouts.of(vm.id)),
        };
        Status::new(machine, sample, rates, known)
    }

    /// Whether there was an epoch: before that nothing is known of the host.
    pub fn has_looked(&self) -> bool {
        self.last.is_some()
    }

    /// Notes that a VM is about to start (libvirt's hook says it).
    pub fn announce(&mut self, announcement: Announcement) {
        let now = self.now();
        self.placement.ledger.announce(announcement, now);
    }

    /// Where a VM that does not run yet would go.
    ///
    /// # Errors
    /// What is short where.
    pub fn place(&self, machine: &Machine, request: &Request) -> Result<Placement, Unplaceable> {
        self.place_for(machine, request, None).1
    }

    fn place_for(
        &self,
        machine: &Machine,
        request: &Request,
        vm: Option<VmId>,
    ) -> (Demand, Result<Placement, Unplaceable>) {
        let empty = Sample::default();
        let (sample, rates) = self
            .last
            .as_ref()
            .map_or((&empty, None), |(sample, rates)| (sample, rates.as_ref()));
        let view = view(machine, sample, rates, &self.homes, &self.layouts, &self.watch);
        let supply = Supply::new(
            &view,
            &self.history,
            &self.placement.ledger,
            &self.config.placement,
            &[],
        );
        let (bandwidth, bandwidth_from) =
            self.history
                .bandwidth(vm, request.vcpus as usize, request.bandwidth);
        let demand = Demand {
            cpus: f64::from(request.vcpus),
            memory_bytes: request.memory,
            bandwidth,
            bandwidth_from,
            device_nodes: NodeSet::new(),
        };
        let placed = placement::place(&supply, &demand, None, &self.config.placement);
        (demand, placed)
    }

    /// Where a VM that is about to start goes, promised to it. There is always an answer: a VM that fits nowhere gets all
    /// nodes, and the second part says why.
    pub fn promise(&mut self, machine: &Machine, shape: Shape) -> Promise {
        let now = self.now();
        let announced = self.placement.ledger.announced(shape, now);
        let vm = announced.as_ref().map(|a| a.vm);
        let bandwidth = announced.as_ref().and_then(|a| a.bandwidth);
        let chosen = announced
            .as_ref()
            .and_then(|a| a.home.clone())
            .filter(|home| home.is_subset(&machine.memory_nodes()));
        let request = Request {
            vcpus: shape.vcpus,
            memory: Bytes::from_mib(shape.memory_mib),
            bandwidth,
        };
        let (demand, placed) = self.place_for(machine, &request, vm);
        let nodes = chosen.map_or_else(|| placed.map(|placement| placement.nodes), Ok);
        let name = announced.map(|a| a.name);
        match nodes {
            Ok(nodes) => {
                let reservation = Reservation {
                    vm,
                    shape,
                    demand,
                    nodes: nodes.clone(),
                    made_at: now,
                };
                self.placement.ledger.reserve(reservation);
                Promise {
                    nodes,
                    name,
                    unplaceable: None,
                }
            }
            Err(unplaceable) => Promise {
                nodes: machine.memory_nodes(),
                name,
                unplaceable: Some(unplaceable),
            },
        }
    }

    fn now(&self) -> Ns {
        self.last.as_ref().map_or(Ns::ZERO, |(sample, _)| sample.at)
    }
}

/// What a VM might book.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// By what it polluted in each of the last periods, on average over the period's slices.
    pub from_behaviour: Result<Suggestion, NoSuggestion>,
    /// By its memory; `None` where the host's caches or memory are not known.
    pub from_memory: Option<Permit>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Why its pollution is not known now, if it is not.
    pub unmetered: Option<permits::Unmetered>,
}

/// The answer to a VM that is about to start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Promise {
    /// Nodes; never empty.
    pub nodes: NodeSet,
    /// The VM's name, where the hook told it.
    pub name: Option<String>,
    /// Why it was given all nodes, if it was.
    pub unplaceable: Option<Unplaceable>,
}

fn view<'a>(
    machine: &'a Machine,
    sample: &'a Sample,
    rates: Option<&'a Rates>,
    homes: &'a BTreeMap<VmId, NodeSet>,
    layouts: &'a topology_feed::Layouts,
    watch: &Watch,
) -> View<'a> {
    let vms = sample.vms.iter().map(|vm| VmView {
        sample: vm,
        rates: rates.and_then(|rates| rates.vm(vm.id)),
        home: homes.get(&vm.id),
        layout: layouts.of(vm.id),
        hands_off: hands_off(vm, watch),
        quota_hands_off: watch
            .quota_changed_by_other(vm.id)
            .then_some(HandsOff::QuotaByHand),
    });
    View {
        version: sample.version,
        at: sample.at,
        machine,
        sample,
        rates,
        vms: vms.collect(),
    }
}

/// Nodes with memory that a VM's vCPUs may run on; all with memory where those have none.
fn may_use(machine: &Machine, vm: &VmSample) -> NodeSet {
    let cpus = vm.vcpus.iter().flat_map(|vcpu| vcpu.affinity.iter());
    let nodes: NodeSet = cpus.filter_map(|cpu| machine.node_of(cpu)).collect();
    let nodes = nodes.intersection(&machine.memory_nodes());
    if nodes.is_empty() {
        machine.memory_nodes()
    } else {
        nodes
    }
}

/// What makes two decisions of a dry run the same: budgets change with every page that the guest touches.
fn what_is_told(action: &Action) -> String {
    let vm = action.vm;
    match &action.act {
        Act::MovePages { to, .. } => format!("pages of {vm} to {to}"),
        Act::MoveVirtualNode { virtual_node, to, .. } => {
            format!("virtual node {virtual_node} of {vm} to {to}")
        }
        Act::MoveFrames { .. } => format!("used pages of {vm}"),
        Act::Limit { limit, .. } => format!("{:?} of {vm}", limit.lever()),
        other => format!("{other:?} of {vm}"),
    }
}

fn hands_off(vm: &VmSample, watch: &Watch) -> Option<HandsOff> {
    if vm.settings.management == Management::Ignored {
        Some(HandsOff::Ignored)
    } else if watch.changed_by_other(vm.id) || !vm.settings.pinned_vcpus.is_empty() {
        Some(HandsOff::PinnedByHand)
    } else {
        None
    }
}

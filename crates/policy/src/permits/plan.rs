//! Holds live VMs to their permits: in each period it settles the ledger, and sets, changes or lifts CPU quotas.
//!
//! # Problem
//! The paper's scheduler looks in every tick and stops a VM that exceeds its permit. An agent looks once a second, which is 33
//! slices: stopping and starting VMs at that pace would stall guests for seconds, and a burst would be over before it is seen. So
//! the agent limits a VM to the share of its CPUs with which it keeps its permit, and leaves the limit in force while the VM
//! rests.
//!
//! # Terms
//! - *Intensity*: pollution per time run. A quota hardly changes it (equation 3.1), so pollution is proportional to the time run.
//! - *Demand* of a vCPU: the share of the period in which it ran, waited, or was throttled by a quota.
//! - *Target*: what the permit earns per slice, plus the account's balance (a debt is negative) spread over [`Config::repay`].
//! - *Budget*: CPU time that the permit pays for, in CPUs: the target over the intensity.
//! - *Burst*: how fast the VM pollutes while it runs (`permits/burst.rs`).
//!
//! # Algorithm
//! For each VM with a permit, in each period:
//! 1. Meter the VM, and settle its account ([`super::ledger`]).
//! 2. Divide the budget among its vCPUs, none of which gets more than its demand. The level to which the highest demands are
//!    cut is the share of a CPU that each vCPU may use, on average. If the budget covers all demands, this needs no limit.
//! 3. In a slice in which the VM runs throughout, each vCPU may use the target over what the burst causes in a slice. If that is
//!    a whole CPU, this needs no limit. If the VM keeps its permit on average, no vCPU gets less than its demand for this.
//! 4. Limit a VM that exceeds its permit, or has a burst, to the lower of these shares, but never below [`Config::share_min`].
//!    The quota is over a tick of 10 ms, or over a slice if the kernel's shortest quota is too long for a tick.
//! 5. Lift the quota once the VM needs none, with a tenth to spare ([`Config::spare`]). A burst is forgotten after
//!    [`Config::calm_cycles`] periods in which the VM ran. Leave the share as it is if it would change by less than a twentieth
//!    ([`Config::change_min`]).
//! 6. Give every quota a lease, and renew it in each period.
//!
//! If the operator chose so and the hardware supports it ([`Enforcer`]), a VM that exceeds its permit is instead confined to a
//! part of the cache's ways or of memory bandwidth until it is UNDER. Fewer ways do not reduce its misses, so it stays confined
//! while it breaks its permit, but meanwhile it harms no other VM. Less bandwidth does reduce its misses.
//!
//! # Properties (tests of the same name)
//! - `a_polluter_is_held_to_its_permit_on_average`
//! - `a_vm_within_its_permit_is_never_touched`
//! - `a_vm_that_turns_quiet_is_let_go_and_not_before`
//! - `no_burst_exceeds_the_permit_of_a_slice`
//! - `a_vm_whose_bursts_fit_its_permit_is_never_touched`
//! - `a_vm_that_cannot_have_broken_a_slice_is_never_touched`
//! - `a_vm_within_its_permit_on_average_loses_no_work_for_its_bursts`
//! - `vcpus_that_do_not_run_at_once_have_what_the_permit_pays_for`
//! - `an_operator_can_allow_bursts`
//! - `what_is_not_metered_is_said_once_and_nobody_is_held`
//! - `one_unreadable_period_keeps_what_is_in_force`
//! - `a_vm_that_vanishes_while_over_leaves_nothing_behind`
//! - `a_clock_that_jumps_changes_nothing_in_force`
//! - `a_restarted_agent_goes_on_with_the_quota_in_force`
//! - `an_operators_lower_quota_is_enough`
//! - `who_is_over_is_confined_until_it_is_under`
//! - `the_level_cuts_the_highest_demands_to_the_budget`
//!
//! # Departures from the source, and why
//! - A VM that exceeds its permit is slowed down, not stopped: a guest without any processor time for seconds loses its timers
//!   and its peers.
//! - The first burst gets through, for up to a period, because the agent sees nothing faster. So does the part of a burst that a
//!   VM hides by computing without misses for the rest of each second: it looks like a slower burst all the time.
//! - A quota saves nothing: a VM that rested for a slice may not use that slice's permit in the next.
//! - All vCPUs have one quota, so it cannot tell vCPUs that pollute together from vCPUs that take turns. vCPUs that did little
//!   before may exceed a slice's permit together, until the average shows it.
//!
//! # Roads not taken
//! - *A `sched_ext` scheduler* that looks in every tick, from Linux 6.12 on. It schedules all ordinary threads of the host, and
//!   the kernel then enforces neither `cpu.max` nor `cpu.weight`, which becomes its task (sched-ext/scx issue 3549): bounds that
//!   the operator set would be gone. If it has only the vCPUs' threads (`SCX_OPS_SWITCH_PARTIAL`), it comes after the fair class,
//!   and any other busy thread starves them (the kernel's `sched-ext.rst`). A host can load only one.
//! - *Periods of a slice*, or the kernel's 100 ms. On Linux 6.18 at 250 Hz a busy thread with a quota of 0.1 CPUs ran in its
//!   worst slice 2.0 times what that pays for (10 ms), 2.5 (30) and 5.3 (100), and waited for at most 40, 60 and 88 ms; with 0.5
//!   CPUs 1.3, 1.5 and 1.5 times, and 12, 16 and 23 ms. The kernel looks at its ticks only, so small shares are exceeded most. No
//!   period cost more of the thread's work than the noise of some percent (`scripts/quota-periods.py`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use homenode_host::{Act, Action, CpuQuota, Lever, Limit, Percent, Plan, VcpuSample, View, VmView};
use homenode_machine::Machine;
use homenode_units::{Any, Ns, Permit, Resource, Section, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bounds::{SHARE, SOME_SHARE, SPAN};

use super::burst::{Burst, at_once, part_shown};
use super::ledger::{Account, Ledger, Standing, Terms};
use super::meter::{Indicator, Meter, Pollution, Reading, Unmetered, Watched};
use super::{POLICY, attribution, suggest};

/// Bytes that an LLC miss moves if the machine does not say. All processors here have lines of this size, so it is not a setting.
const LINE_BYTES: u32 = 64;

/// Period of a quota: the tick of the paper's scheduler, a third of a slice.
const QUOTA_PERIOD: Ns = Ns(Permit::SLICE.0 / 3);

/// How a VM that exceeds its permit is limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcer {
    /// A quota of CPU time, which works everywhere.
    #[default]
    CpuQuota,
    /// A part ([`Config::confined_percent`]) of the ways of the last-level cache (resctrl, CAT).
    CacheWays,
    /// A part ([`Config::confined_percent`]) of memory bandwidth (resctrl, MBA).
    MemoryBandwidth,
}

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How a VM that exceeds its permit is limited.
    pub enforcer: Enforcer,
    /// Part of the ways or bandwidth that a VM may use while it exceeds its permit, in percent from 1 to 100.
    pub confined_percent: Percent,
    /// Measure of pollution.
    pub indicator: Indicator,
    /// Which vCPUs are metered.
    pub watched: Watched,
    /// Bounds of accounts.
    pub terms: Terms,
    /// Time in which a debt should be repaid.
    #[serde(with = "homenode_units::text")]
    pub repay: Ns,
    /// Least share of a CPU that a vCPU keeps, in (0, 1].
    pub share_min: f64,
    /// Time for which a quota stays in force after the last period that wanted it.
    #[serde(with = "homenode_units::text")]
    pub lease: Ns,
    /// Number of periods in which a VM must run and pollute less before its last burst is forgotten, up to 65,536.
    #[serde(alias = "calm_epochs")]
    pub calm_cycles: u32,
    /// Spare budget that is required to lift a limit, as a share of what the permit pays for, 0 to 1.
    pub spare: f64,
    /// Least change of the share of CPUs that is applied, relative to the share in force, 0 to 1.
    pub change_min: f64,
    /// Number of periods without a reading after which limits are lifted, up to 65,536.
    #[serde(alias = "blind_epochs_max")]
    pub blind_cycles_max: u32,
    /// Settings of suggested permits.
    pub suggest: suggest::Config,
    /// Whether and how often VMs have their cache to themselves.
    pub attribution: attribution::Config,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            enforcer: Enforcer::default(),
            confined_percent: Percent(10),
            indicator: Indicator::default(),
            watched: Watched::default(),
            terms: Terms::default(),
            repay: Ns::from_secs(3),
            share_min: 0.05,
            lease: Ns::from_secs(10),
            calm_cycles: 3,
            spare: 0.1,
            change_min: 0.05,
            blind_cycles_max: 3,
            suggest: suggest::Config::default(),
            attribution: attribution::Config::default(),
        }
    }
}

homenode_units::settings! {
    Config {
        enforcer: Any,
        confined_percent: Percent(1)..=Percent(100),
        indicator: Any,
        watched: Any,
        terms: Section,
        repay: SPAN,
        share_min: SOME_SHARE,
        lease: SPAN,
        calm_cycles: 0..=65_536,
        spare: SHARE,
        change_min: SHARE,
        blind_cycles_max: 0..=65_536,
        suggest: Section,
        attribution: Section,
    }
}

/// How a VM used its permit over a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// Measured units: LLC misses, or bytes.
    pub used_units: u64,
    /// Units that the permit allowed.
    pub booked_units: u64,
    /// Time for which the VM had the permit.
    pub time_ns: Ns,
    /// Part of that time without a reading.
    pub unmetered_ns: Ns,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Usage) {
        self.used_units = self.used_units.saturating_add(other.used_units);
        self.booked_units = self.booked_units.saturating_add(other.booked_units);
        self.time_ns = Ns(self.time_ns.0.saturating_add(other.time_ns.0));
        self.unmetered_ns = Ns(self.unmetered_ns.0.saturating_add(other.unmetered_ns.0));
    }
}

/// State kept between periods.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Which of their misses VMs are charged for.
    pub attribution: attribution::State,
    ledger: Ledger,
    vms: BTreeMap<VmId, Conduct>,
    usage: BTreeMap<VmId, Usage>,
    told: BTreeSet<(VmId, &'static str)>,
}

/// How one VM behaved lately.
#[derive(Clone, Debug, Default)]
pub struct Conduct {
    readings: Vec<(u16, Reading)>,
    /// Units that the VM caused per slice in the last period.
    pub units_per_slice: Option<u64>,
    /// Why the last period could not be metered; `None` if it could.
    pub unmetered: Option<Unmetered>,
    /// Units per millisecond run, from when the VM last ran.
    intensity: Option<f64>,
    burst: Burst,
    blind_cycles: u32,
    recent: VecDeque<u64>,
}

impl State {
    /// Returns the empty state.
    pub fn new(config: &Config) -> State {
        State {
            ledger: Ledger::new(config.terms),
            ..State::default()
        }
    }

    /// Returns the account of a VM, if it has a permit.
    pub fn account(&self, vm: VmId) -> Option<&Account> {
        self.ledger.account(vm)
    }

    /// Returns a VM's recent behaviour, with or without a permit.
    pub fn conduct(&self, vm: VmId) -> Option<&Conduct> {
        self.vms.get(&vm)
    }

    /// Returns what each VM used and booked since the last call.
    pub fn take_usage(&mut self) -> BTreeMap<VmId, Usage> {
        std::mem::take(&mut self.usage)
    }
}

impl Conduct {
    /// Returns the pollution per slice that the VM would have had without a quota, as a mean for each of the last periods,
    /// oldest first.
    pub fn recent(&self) -> impl Iterator<Item = u64> + '_ {
        self.recent.iter().copied()
    }

    /// Meters the time since the last readings, and stores the new ones. Returns `None` if there were no readings.
    fn meter(&mut self, meter: &Meter, vcpus: &[VcpuSample]) -> Option<Result<Pollution, Unmetered>> {
        let now = vcpus.iter().map(|vcpu| (vcpu.index, Reading::from(vcpu)));
        let before = std::mem::replace(&mut self.readings, now.collect());
        let pair = |(index, now): &(u16, Reading)| {
            let (_, before) = before.iter().find(|(known, _)| known == index)?;
            Some((*before, *now))
        };
        let pairs: Vec<_> = self.readings.iter().filter_map(pair).collect();
        (!pairs.is_empty()).then(|| meter.pollution(pairs))
    }
}

/// Settles all accounts, and decides which quotas to set, change, renew and lift.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    let runs = |vm: VmId| view.sample.vm(vm).is_some();
    state.vms.retain(|vm, _| runs(*vm));
    state.told.retain(|(vm, _)| runs(*vm));
    let permit_of = |vm: VmId| view.sample.vm(vm).and_then(|vm| vm.settings.permit);
    state.ledger.retain(|vm| permit_of(vm).is_some());
    let mut metered: BTreeMap<VmId, Result<Pollution, Unmetered>> = BTreeMap::new();
    for vm in &view.vms {
        let id = vm.sample.id;
        let meter = meter_for(vm.sample.settings.permit, config, view.machine);
        let conduct = state.vms.entry(id).or_default();
        let found = conduct.meter(&meter, &vm.sample.vcpus);
        // Nothing is charged while it is unknown which misses are its own.
        let own = found.and_then(|found| match found {
            Ok(counted) => Some(Ok(counted.part(state.attribution.part(id)?))),
            Err(why) => Some(Err(why)),
        });
        metered.extend(own.map(|own| (id, own)));
        if let Some(permit) = vm.sample.settings.permit {
            state.ledger.book(id, permit);
        }
    }
    let scale = |vm: VmId, pollution: &Pollution| units_of(permit_of(vm), pollution.units, view.machine);
    let before: BTreeMap<VmId, u64> = state
        .ledger
        .accounts()
        .map(|(vm, account)| (vm, account.earned_units()))
        .collect();
    let units = |vm: VmId| Some(scale(vm, metered.get(&vm)?.as_ref().ok()?));
    let period = state.ledger.settle(view.at, units);
    for vm in &view.vms {
        let id = vm.sample.id;
        if let Some(period) = period {
            let found = metered.get(&id).copied();
            state.note(vm, config, period, units(id), found, before.get(&id).copied());
        }
        let action = match verdict(vm, period, config, state, &mut plan) {
            Verdict::Leave => continue,
            Verdict::Lift { lever, why } => (Act::Lift { lever }.on(id), why),
            Verdict::Hold { limit, why } => (hold(id, limit, config.lease), why),
        };
        plan.decide(POLICY, action.0, action.1);
    }
    plan
}

fn hold(vm: VmId, limit: Limit, lease_ns: Ns) -> Action {
    Act::Limit { limit, lease_ns }.on(vm)
}

/// Returns the meter for a permit. A bandwidth permit counts the misses themselves, whatever the indicator. They are also
/// counted if the clock is unknown: equation 3.1, with the cycles of the time run, amounts to the same.
fn meter_for(permit: Option<Permit>, config: &Config, machine: &Machine) -> Meter {
    let clock_hz = machine.hardware.as_ref().map(|hardware| hardware.clock_hz);
    let counts_bytes = permit.is_some_and(|permit| permit.resource() == Resource::Bandwidth);
    let indicator = match clock_hz {
        Some(_) if !counts_bytes => config.indicator,
        _ => Indicator::RawMisses,
    };
    Meter {
        indicator,
        watched: config.watched,
        clock_khz: clock_hz.unwrap_or_default() / 1000,
    }
}

/// Returns misses in the units of a permit.
fn units_of(permit: Option<Permit>, misses: u64, machine: &Machine) -> u64 {
    match permit.map(Permit::resource) {
        Some(Resource::Bandwidth) => {
            let line_bytes = machine.llcs.first().map_or(LINE_BYTES, |llc| llc.line_bytes);
            misses.saturating_mul(u64::from(line_bytes))
        }
        Some(Resource::Pollution) | None => misses,
    }
}

fn slices(time: Ns) -> f64 {
    time.as_f64() / Permit::SLICE.as_f64()
}

/// Returns the demand of each vCPU; empty without rates.
fn demands(vm: &VmView<'_>) -> Vec<f64> {
    let vcpus = vm.rates.iter().flat_map(|rates| &rates.vcpus);
    vcpus
        .map(|vcpu| (vcpu.running + vcpu.waited() + vcpu.throttled).min(1.0))
        .collect()
}

/// Returns the CPU time that a VM used, as a share of the period; 1.5 is one and a half CPUs.
fn ran(vm: &VmView<'_>) -> f64 {
    vm.rates.map_or(0.0, |rates| rates.cpus_used)
}

impl State {
    /// Records how a VM behaved in a period.
    fn note(
        &mut self,
        vm: &VmView<'_>,
        config: &Config,
        period: Ns,
        units: Option<u64>,
        found: Option<Result<Pollution, Unmetered>>,
        earned_before: Option<u64>,
    ) {
        let id = vm.sample.id;
        let conduct = self.vms.entry(id).or_default();
        conduct.unmetered = found.and_then(Result::err);
        conduct.units_per_slice = units.map(|units| (units as f64 / slices(period)).round() as u64);
        if let Some(units) = units {
            conduct.blind_cycles = 0;
            let ran_ms = ran(vm) * period.as_f64() / 1e6;
            let demands = demands(vm);
            if ran_ms > 0.0 {
                let intensity = units as f64 / ran_ms;
                conduct.intensity = Some(intensity);
                let unbroken = self
                    .ledger
                    .account(id)
                    .map(|account| account.unbroken_units(&config.terms));
                let is_burst = unbroken.is_some_and(|unbroken| units > unbroken);
                let per_ms = is_burst.then(|| intensity * at_once(&demands));
                let resource = vm.sample.settings.permit.map(Permit::resource);
                conduct
                    .burst
                    .note(resource, per_ms, part_shown(vm), config.calm_cycles);
            }
            let wanted_ms = demands.iter().sum::<f64>() * slice_ms();
            // After a reload, fewer values may be kept than before, so several may have to go.
            let excess = (conduct.recent.len() + 1).saturating_sub(config.suggest.slices_max as usize);
            conduct.recent.drain(..excess);
            let without_quota = conduct.intensity.unwrap_or(0.0) * wanted_ms;
            conduct.recent.push_back(without_quota.round() as u64);
        } else if self.attribution.part(id).is_some() {
            conduct.blind_cycles = conduct.blind_cycles.saturating_add(1);
        }
        if let (Some(account), Some(before)) = (self.ledger.account(id), earned_before) {
            *self.usage.entry(id).or_default() += Usage {
                used_units: units.unwrap_or(0),
                booked_units: account.earned_units().saturating_sub(before),
                time_ns: period,
                unmetered_ns: if units.is_some() { Ns::ZERO } else { period },
            };
        }
    }

    /// Reports something about a VM, but not again until it has ceased to hold.
    fn tell(
        &mut self,
        vm: &VmView<'_>,
        what: &'static str,
        message: impl FnOnce() -> String,
        plan: &mut Plan,
    ) {
        if self.told.insert((vm.sample.id, what)) {
            plan.find(POLICY, Some(vm.sample.id), message());
        }
    }
}

const UNMETERED: &str = "unmetered";
const FLOOR: &str = "floor";

/// The decision about a VM's limit.
enum Verdict {
    Leave,
    Lift { lever: Lever, why: String },
    Hold { limit: Limit, why: String },
}

impl Verdict {
    /// Lifts the limit in force, if any.
    fn lift(held: Option<Limit>, why: impl FnOnce() -> String) -> Verdict {
        match held {
            Some(limit) => Verdict::Lift {
                lever: limit.lever(),
                why: why(),
            },
            None => Verdict::Leave,
        }
    }
}

/// Runs steps 2 to 6 for one VM. `period` is `None` if there is no period to judge.
fn verdict(
    vm: &VmView<'_>,
    period: Option<Ns>,
    config: &Config,
    state: &mut State,
    plan: &mut Plan,
) -> Verdict {
    let id = vm.sample.id;
    if !vm.managed() || vm.quota_hands_off.is_some() {
        return Verdict::Leave;
    }
    let held_quota = in_force(vm);
    let held = held_quota.map(Limit::CpuQuota).or(vm.sample.confined);
    let account = state.ledger.account(id).copied();
    let (Some(permit), Some(account)) = (vm.sample.settings.permit, account) else {
        state.told.retain(|(told, _)| *told != id);
        return Verdict::lift(held, || "its permit was removed".into());
    };
    if state.is_blind(vm, permit, config, plan) {
        return Verdict::lift(held, || "its pollution cannot be measured".into());
    }
    // It is not known yet which misses are the VM's own.
    let period = period.filter(|_| state.attribution.part(id).is_some());
    let conduct = state.vms.entry(id).or_default();
    let (Some(_), Some(intensity)) = (period, conduct.intensity) else {
        return match held {
            Some(limit) => Verdict::Hold {
                limit,
                why: format!("it is held to {limit} until its pollution is measured"),
            },
            None => Verdict::Leave,
        };
    };
    if config.enforcer != Enforcer::CpuQuota {
        return confine(permit, &account, conduct, config, held);
    }
    let demands = demands(vm);
    let burst = conduct.burst.per_ms();
    let caused = per_slice(permit, conduct.units_per_slice.unwrap_or(0));
    let Some(wanted) = wanted_share(&account, intensity, burst, &demands, config, held_quota) else {
        return Verdict::lift(held, || {
            format!("it stays within its permit of {permit} by itself: {caused}")
        });
    };
    let is_over = account.standing() == Standing::Over;
    if held.is_none() && !is_over && burst.is_none() {
        return Verdict::Leave;
    }
    let share_min = CpuQuota::of(config.share_min, Permit::SLICE).share();
    let share = wanted.max(share_min);
    if let Some(theirs) = vm.sample.settings.quota.filter(|theirs| theirs.share() <= share) {
        return Verdict::lift(held, || format!("the operator's quota, {theirs}, is low enough"));
    }
    let least = intensity * slice_ms() * demands.iter().map(|demand| demand.min(share_min)).sum::<f64>();
    state.tell_of_floor(vm, least > account.units_per_slice() as f64, permit, least, plan);
    let quota = quota_of(share);
    let is_close = |held: &CpuQuota| (held.share() - quota.share()).abs() <= config.change_min * held.share();
    let quota = held_quota.filter(is_close).unwrap_or(quota);
    let standing = match burst {
        _ if is_over => "OVER".to_owned(),
        Some(burst) => {
            let burst = per_slice(permit, (burst * slice_ms()) as u64);
            format!("UNDER, but {burst} while it runs")
        }
        None => "UNDER".to_owned(),
    };
    Verdict::Hold {
        limit: Limit::CpuQuota(quota),
        why: format!("{caused} against a permit of {permit}, {standing}: each vCPU may run {quota}"),
    }
}

/// Returns the quota for a share of a CPU.
fn quota_of(share: f64) -> CpuQuota {
    let is_too_short = share * QUOTA_PERIOD.as_f64() < CpuQuota::MIN.as_f64();
    CpuQuota::of(share, if is_too_short { Permit::SLICE } else { QUOTA_PERIOD })
}

/// Returns the verdict if limits are on caches or memory bandwidth; they last while the VM exceeds its permit.
fn confine(
    permit: Permit,
    account: &Account,
    conduct: &Conduct,
    config: &Config,
    held: Option<Limit>,
) -> Verdict {
    let caused = per_slice(permit, conduct.units_per_slice.unwrap_or(0));
    let limit = match config.enforcer {
        Enforcer::MemoryBandwidth => Limit::MemoryBandwidth(config.confined_percent),
        Enforcer::CacheWays | Enforcer::CpuQuota => Limit::CacheWays(config.confined_percent),
    };
    // This quota was left by an agent with another configuration.
    if let Some(Limit::CpuQuota(_)) = held {
        return Verdict::lift(held, || format!("it is now held to {limit} instead"));
    }
    match account.standing() {
        Standing::Over => Verdict::Hold {
            limit,
            why: format!("{caused} against a permit of {permit}, OVER: it is held to {limit}"),
        },
        Standing::Under => Verdict::lift(held, || format!("{caused} against a permit of {permit}, UNDER")),
    }
}

impl State {
    /// Whether a VM's pollution cannot be counted, or has not been counted for too long. Reports the reason once.
    fn is_blind(&mut self, vm: &VmView<'_>, permit: Permit, config: &Config, plan: &mut Plan) -> bool {
        let Some(conduct) = self.vms.get(&vm.sample.id) else {
            return false;
        };
        let (unmetered, blind_cycles) = (conduct.unmetered, conduct.blind_cycles);
        let message = |why| {
            let name = &vm.sample.name;
            format!("VM {name} is not held to its permit of {permit}: {why}")
        };
        match unmetered {
            Some(why @ (Unmetered::Missing | Unmetered::AllZero)) => {
                self.tell(vm, UNMETERED, || message(why), plan);
                true
            }
            Some(why) if blind_cycles > config.blind_cycles_max => {
                self.tell(vm, UNMETERED, || message(why), plan);
                true
            }
            Some(_) => false,
            None => {
                self.told.remove(&(vm.sample.id, UNMETERED));
                blind_cycles > config.blind_cycles_max
            }
        }
    }

    /// Reports once that a VM breaks its permit even at the least share of CPUs. If it does not, the report may be made again
    /// later.
    fn tell_of_floor(&mut self, vm: &VmView<'_>, is_so: bool, permit: Permit, least: f64, plan: &mut Plan) {
        if !is_so {
            self.told.remove(&(vm.sample.id, FLOOR));
            return;
        }
        let message = || {
            format!(
                "VM {} exceeds its permit of {permit} even at the smallest share of CPUs: {}; book a larger one, or \
                 lower permits.share_min",
                vm.sample.name,
                per_slice(permit, least as u64)
            )
        };
        self.tell(vm, FLOOR, message, plan);
    }
}

fn slice_ms() -> f64 {
    Permit::SLICE.as_f64() / 1e6
}

/// Returns pollution or traffic in words.
fn per_slice(permit: Permit, units: u64) -> String {
    match permit.resource() {
        Resource::Pollution => format!("{units} LLC misses per slice"),
        Resource::Bandwidth => format!("{:.0} MB/s", units as f64 * slices(Ns::from_secs(1)) / 1e6),
    }
}

/// Returns the quota in force if the agent set it, and not the operator.
fn in_force(vm: &VmView<'_>) -> Option<CpuQuota> {
    let quota = vm.sample.vcpus.first().and_then(|vcpu| vcpu.quota);
    quota.filter(|_| quota != vm.sample.settings.quota)
}

/// Returns the share of a CPU for each vCPU with which a VM keeps its permit, on average and in a burst of this many units per
/// millisecond; `None` if it needs no limit. For a VM that is limited now, no limit is needed only with a margin.
fn wanted_share(
    account: &Account,
    intensity: f64,
    burst: Option<f64>,
    demands: &[f64],
    config: &Config,
    held: Option<CpuQuota>,
) -> Option<f64> {
    let repaid = account.balance_units() as f64 / slices(config.repay).max(1.0);
    let target = (account.units_per_slice() as f64 + repaid).max(0.0);
    let enough = if held.is_some() { 1.0 - config.spare } else { 1.0 };
    let average = if intensity > 0.0 {
        let budget = target / (intensity * slice_ms());
        level(demands, budget, enough * budget)
    } else {
        None
    };
    let in_burst = burst.map(|per_ms| target / (per_ms * slice_ms()));
    let in_burst = in_burst.filter(|share| enough * share < 1.0);
    match average {
        // The fastest burst is also the largest error of measurement, so it has the margin.
        Some(average) => Some(in_burst.map_or(average, |share| average.min(share / (1.0 - config.spare)))),
        None => in_burst.map(|share| demands.iter().copied().fold(share.min(1.0), f64::max)),
    }
}

/// Returns the level to which the highest demands must be cut so that all together use the budget; `None` if together they
/// use at most `enough`.
fn level(demands: &[f64], budget: f64, enough: f64) -> Option<f64> {
    if demands.iter().sum::<f64>() <= enough {
        return None;
    }
    let mut sorted = demands.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut left = budget;
    for (at, demand) in sorted.iter().enumerate() {
        let share = left / (sorted.len() - at) as f64;
        if *demand >= share {
            return Some(share);
        }
        left -= demand;
    }
    // All demands fit into the budget, but not with the margin: none is cut yet.
    sorted.last().copied()
}

#[cfg(test)]
mod tests;

//! Whose memory is watched, for how long, and what came of it.
//!
//! # Problem
//! Watching costs: the host scans, and a VM whose accessed bits are cleared walks its page tables again. A figure that nobody
//! asked for is not worth it, and one that has settled need not be taken again at once.
//!
//! # Terms
//! - *Wanted*: somebody asked for a VM's figure and still waits, an operator or another policy ([`State::want`]).
//! - *Window*: how long one look lasts; the estimate speaks of it.
//! - *Load*: CPU time of the host that looking takes, over all watched VMs, as a share of one CPU.
//!
//! # Algorithm
//! 1. What hosts saw since the last plan goes to each VM's estimator, which [`suited`] chose. Another tracker, and windows of
//!    another length, begin a new one: their figures do not add up.
//! 2. A VM is watched while it is wanted. Under [`Whom::All`] every VM is, but one whose figure has settled and that nobody
//!    wants rests for [`Config::rest_windows`].
//! 3. Where the load at the windows asked for exceeds [`Config::cpu_share_max`], all windows are doubled until it does not.
//! 4. A watch is renewed when half of its lease is over, and lifted when it is not wanted any more.
//!
//! # Properties (tests of the same name)
//! - `nobody_is_watched_unasked`
//! - `a_vm_is_watched_while_wanted_and_then_let_go`
//! - `all_are_watched_and_rest_once_settled`
//! - `windows_grow_until_looking_is_cheap_enough`
//! - `another_tracker_begins_anew_and_so_do_other_windows`
//! - `memory_that_comes_and_goes_in_mid_window_gives_an_estimate_or_a_reason`
//! - `a_vm_that_vanishes_is_forgotten`
//! - `what_cannot_be_watched_has_a_reason_and_is_tried_again`

use std::collections::BTreeMap;

use homenode_host::observation::{Observation, Tracker};
use homenode_host::{Act, Action, Lever, Outcome, Plan, View, VmSample, WINDOW_MAX, WINDOW_MIN};
use homenode_units::{Any, Bytes, Ns, Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::SPAN;

use super::{Estimate, Estimator, Settled, suited};

/// Name of this policy in plans.
pub const POLICY: &str = "working-set";

/// Whose memory is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whom {
    /// VMs that somebody asks about: an operator, or a policy that needs the figure.
    #[default]
    Asked,
    /// Every VM.
    All,
}

/// What the operator may set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whose memory is watched.
    pub watch: Whom,
    /// How long one look lasts.
    #[serde(with = "homenode_units::text")]
    pub window: Ns,
    /// Most CPU time of the host that looking may take, as a share of one CPU; windows grow to stay within it.
    pub cpu_share_max: f64,
    /// How long a host watches on without hearing from the agent.
    #[serde(with = "homenode_units::text")]
    pub lease: Ns,
    /// Windows for which a VM rests whose figure has settled and that nobody wants.
    pub rest_windows: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            watch: Whom::Asked,
            window: Ns::from_secs(30),
            cpu_share_max: 0.02,
            lease: Ns::from_secs(60),
            rest_windows: 10,
        }
    }
}

homenode_units::settings! {
    Config {
        watch: Any,
        window: WINDOW_MIN..=WINDOW_MAX,
        cpu_share_max: 0.0001..=1.0,
        lease: SPAN,
        rest_windows: 0..=65_536,
    }
}

/// What is known of a VM's working set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// How large it is.
    pub estimate: Estimate,
    /// Memory that the VM had.
    pub memory: Pages,
    /// Most memory that may be in use although the tracker does not see it.
    pub blind: Pages,
    /// CPU time of the host that looking took.
    pub cost: Ns,
}

/// What this policy keeps in mind.
#[derive(Debug, Default)]
pub struct State {
    vms: BTreeMap<VmId, Watched>,
}

/// One VM.
#[derive(Debug, Default)]
struct Watched {
    /// Until when somebody waits for it, and for windows of which length.
    wanted: Option<(Ns, Option<Ns>)>,
    /// Until when the host watches, and in which windows.
    in_force: Option<(Ns, Ns)>,
    /// Why it does not, and when to try again.
    why_not: Option<(String, Ns)>,
    estimator: Option<(Tracker, Ns, Box<dyn Estimator + Send>)>,
    measured: Option<Measured>,
    /// End of the last window that was taken in.
    seen: Ns,
    /// Why the last window gave nothing, if so.
    unfit: Option<String>,
    /// Until when it rests.
    rests: Ns,
}

impl State {
    /// Somebody wants this VM's figure until then, in windows of this length where it matters to him. Of several the one who
    /// named a length last decides on it.
    pub fn want(&mut self, vm: VmId, window: Option<Ns>, until: Ns) {
        let wanted = &mut self.vms.entry(vm).or_default().wanted;
        let (before, length) = wanted.unwrap_or_default();
        *wanted = Some((before.max(until), window.or(length)));
    }

    /// How large the VM's working set is, as far as it was watched; [`Estimate::at`] says when that was.
    pub fn estimate(&self, vm: VmId) -> Option<&Estimate> {
        self.measured(vm).map(|measured| &measured.estimate)
    }

    /// The estimate with what it was made from.
    pub fn measured(&self, vm: VmId) -> Option<&Measured> {
        self.vms.get(&vm)?.measured.as_ref()
    }

    /// Why there is no fresh figure, if something speaks against one: the host cannot watch, or saw what cannot be.
    pub fn why_not(&self, vm: VmId) -> Option<&str> {
        let watched = self.vms.get(&vm)?;
        let why = watched.why_not.as_ref().map(|(why, _)| why);
        why.or(watched.unfit.as_ref()).map(String::as_str)
    }

    /// Whether the host watches this VM now.
    pub fn is_watched(&self, vm: VmId) -> bool {
        self.vms
            .get(&vm)
            .is_some_and(|watched| watched.in_force.is_some())
    }

    /// What came of an action of this policy.
    pub fn outcome(&mut self, action: &Action, outcome: &Outcome, at: Ns) {
        let Some(watched) = self.vms.get_mut(&action.vm) else {
            return;
        };
        match (&action.act, outcome) {
            (
                Act::Watch {
                    window_ns, lease_ns, ..
                },
                Outcome::Done | Outcome::Renewed,
            ) => {
                watched.in_force = Some((at + *lease_ns, *window_ns));
                watched.why_not = None;
            }
            (Act::Watch { lease_ns, .. }, Outcome::Failed(error)) => {
                watched.in_force = None;
                watched.why_not = Some((error.to_string(), at + Ns(lease_ns.0 / 2)));
            }
            (Act::Lift { .. }, Outcome::Done) => watched.in_force = None,
            _ => {}
        }
    }
}

impl Watched {
    /// Takes in what the host saw, if it is new.
    fn take_in(&mut self, observed: &Observation) {
        if observed.at <= self.seen {
            return;
        }
        self.seen = observed.at;
        let (tracker, interval) = (observed.tracker, observed.interval);
        let adds_up = |(before, window): (Tracker, Ns)| {
            let (short, long) = (window.min(interval), window.max(interval));
            before == tracker && 2 * long.0 <= 3 * short.0
        };
        let known = self
            .estimator
            .as_ref()
            .map(|(tracker, window, _)| (*tracker, *window));
        if !known.is_some_and(adds_up) {
            self.estimator = None;
        }
        let seen = observed.as_observation();
        let (_, _, estimator) = self.estimator.get_or_insert_with(|| {
            (
                tracker,
                interval,
                suited(tracker, &seen.seen, Bytes::ZERO, interval),
            )
        });
        match estimator.observe(&seen) {
            Ok(estimate) => {
                self.unfit = None;
                if let Some(estimate) = estimate {
                    self.measured = Some(Measured {
                        estimate,
                        memory: observed.memory,
                        blind: observed.blind,
                        cost: observed.cost,
                    });
                }
            }
            Err(unfit) => self.unfit = Some(unfit.to_string()),
        }
    }

    /// In windows of which length it shall be watched now, if at all.
    fn due(&mut self, config: &Config, at: Ns) -> Option<Ns> {
        self.wanted = self.wanted.filter(|(until, _)| *until > at);
        if let Some((_, window)) = self.wanted {
            self.rests = Ns::ZERO;
            return Some(window.unwrap_or(config.window));
        }
        if config.watch == Whom::Asked || self.rests > at {
            return None;
        }
        let settled = |measured: &Measured| measured.estimate.settled == Settled::Yes;
        if self.in_force.is_some() && self.measured.as_ref().is_some_and(settled) {
            self.rests = at + Ns(config.window.0.saturating_mul(u64::from(config.rest_windows)));
            return None;
        }
        Some(config.window)
    }
}

/// Takes in what hosts saw. Comes before anything is planned for the epoch: other policies rely on the estimates.
pub fn observe(view: &View<'_>, state: &mut State) {
    state.vms.retain(|id, _| view.sample.vm(*id).is_some());
    for vm in &view.vms {
        let watched = state.vms.entry(vm.sample.id).or_default();
        if let Some(observed) = &vm.sample.observed {
            watched.take_in(observed);
        }
        watched.in_force = watched.in_force.filter(|(until, _)| *until > view.at);
    }
}

/// Has the VMs watched that clients ask about, once [`observe`] has taken in this epoch.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    let mut due: Vec<(&VmSample, Ns)> = Vec::new();
    for vm in &view.vms {
        let watched = state.vms.entry(vm.sample.id).or_default();
        match watched.due(config, view.at) {
            // Whoever opted out is not asked for in vain.
            Some(window) if vm.managed() => due.push((vm.sample, window)),
            _ if watched.in_force.is_some() => {
                let action = Act::Lift {
                    lever: Lever::Watching,
                }
                .on(vm.sample.id);
                plan.decide(POLICY, action, "nobody waits for its working set now".into());
            }
            _ => {}
        }
    }
    let factor = stretch(&due, config, state);
    for (vm, window) in due {
        let window_ns = Ns(window.0.saturating_mul(factor)).clamp(WINDOW_MIN, WINDOW_MAX);
        let watched = state.vms.entry(vm.id).or_default();
        let renew_after = view.at + Ns(config.lease.0 / 2);
        let is_in_force = |(until, window)| until > renew_after && window == window_ns;
        let waits = |(_, again): &(String, Ns)| *again > view.at;
        if watched.in_force.is_some_and(is_in_force) || watched.why_not.as_ref().is_some_and(waits) {
            continue;
        }
        let action = Act::Watch {
            window_ns,
            lease_ns: config.lease,
        }
        .on(vm.id);
        let who = match watched.wanted {
            Some(_) => "somebody waits for its working set",
            None => "every VM is watched",
        };
        let longer = match factor {
            1 => String::new(),
            _ => format!(
                ", {factor} times longer than asked for: looking may take {:.0} percent of a CPU",
                100.0 * config.cpu_share_max
            ),
        };
        plan.decide(POLICY, action, format!("{who}; windows of {window_ns}{longer}"));
    }
    plan
}

/// By how much windows must grow for looking to stay within its share of a CPU: a power of two, so that a cost which varies a
/// little does not change windows all the time.
fn stretch(due: &[(&VmSample, Ns)], config: &Config, state: &State) -> u64 {
    let load = |(vm, window): &(&VmSample, Ns)| {
        let cost = state
            .measured(vm.id)
            .map_or(0.0, |measured| measured.cost.as_f64());
        cost / window.as_f64().max(1.0)
    };
    let load: f64 = due.iter().map(load).sum();
    let mut factor = 1;
    while load > factor as f64 * config.cpu_share_max && factor < 1 << 20 {
        factor *= 2;
    }
    factor
}

#[cfg(test)]
mod tests;

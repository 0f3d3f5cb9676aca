//! Decides which VMs' memory is watched, and for how long, and keeps the results.
//!
//! # Problem
//! Watching has a cost: the host scans memory, and a VM whose accessed bits are cleared walks its page tables again. It is
//! not worth its cost if the figure was not requested, and a figure that has settled need not be measured again at once.
//!
//! # Terms
//! - *Wanted* VM: an operator or another policy has requested its figure, and the request has not expired ([`State::want`]).
//! - *Window*: the length of one look at a VM's memory. The estimate covers it.
//! - *Load*: the CPU time that the host spends on looking at all watched VMs, as a share of one CPU.
//!
//! # Algorithm
//! 1. The hosts' observations since the last plan go to each VM's estimator, which [`suited`] chose. It takes the footprint of
//!    the guest's kernel (epsilon) from the VM's settings. If the tracker, the length of windows or the footprint has changed, a
//!    new estimator starts, because the figures cannot be combined.
//! 2. A VM is watched while it is wanted. Under [`Whom::All`] every VM is watched, but a VM whose figure has settled, and
//!    that is not wanted, rests for [`Config::rest_windows`].
//! 3. If the load with the requested windows exceeds [`Config::cpu_share_max`], all windows are doubled until it no longer does.
//! 4. A watch is renewed when half of its lease is over, and lifted when the VM is no longer wanted.
//!
//! # Properties (tests of the same name)
//! - `nobody_is_watched_unasked`
//! - `a_vm_is_watched_while_wanted_and_then_let_go`
//! - `all_are_watched_and_rest_once_settled`
//! - `windows_grow_until_looking_is_cheap_enough`
//! - `another_tracker_begins_anew_and_so_do_other_windows`
//! - `the_footprint_in_a_vms_settings_is_the_estimators_epsilon`
//! - `memory_that_comes_and_goes_in_mid_window_gives_an_estimate_or_a_reason`
//! - `a_vm_that_vanishes_is_forgotten`
//! - `what_cannot_be_watched_has_a_reason_and_is_tried_again`

use std::collections::BTreeMap;

use homenode_host::observation::{Observation, Tracker};
use homenode_host::{Act, Action, Lever, Outcome, Plan, View, VmSample, WINDOW_MAX, WINDOW_MIN};
use homenode_units::{Any, Bytes, Ns, Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::SPAN;

use super::{Estimate, Estimator, FRAMES_MAX, Settled, suited};

/// Name of this policy in plans.
pub const POLICY: &str = "working-set";

/// Which VMs' memory is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whom {
    /// VMs whose figure an operator or a policy has requested.
    #[default]
    Asked,
    /// Every VM.
    All,
}

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Which VMs' memory is watched.
    pub watch: Whom,
    /// Length of one look.
    #[serde(with = "homenode_units::text")]
    pub window: Ns,
    /// Most CPU time that the host may spend on looking, as a share of one CPU. Windows grow to stay within it.
    pub cpu_share_max: f64,
    /// How long a host keeps watching without contact with the agent.
    #[serde(with = "homenode_units::text")]
    pub lease: Ns,
    /// Number of windows for which a VM rests once it has settled, if it is not wanted.
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

/// A VM's measured working set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// The estimate.
    pub estimate: Estimate,
    /// Memory that the VM had at that time.
    pub memory: Pages,
    /// Most memory that may be in use although the tracker does not see it.
    pub blind: Pages,
    /// CPU time that the host spent on looking.
    pub cost: Ns,
}

/// State of this policy.
#[derive(Debug, Default)]
pub struct State {
    vms: BTreeMap<VmId, Watched>,
}

/// What is known about one VM.
#[derive(Debug, Default)]
struct Watched {
    /// Time until which the VM is wanted, and the requested length of windows.
    wanted: Option<(Ns, Option<Ns>)>,
    /// Time until which the host watches the VM, and the length of windows in force.
    in_force: Option<(Ns, Ns)>,
    /// Why the host does not watch the VM, and when to try again.
    why_not: Option<(String, Ns)>,
    estimator: Option<Running>,
    measured: Option<Measured>,
    /// End of the last window that was recorded.
    seen: Ns,
    /// Why the last window could not be used; `None` if it could.
    unfit: Option<String>,
    /// Time until which the VM rests.
    rests: Ns,
}

/// An estimator, and what its figures depend on.
#[derive(Debug)]
struct Running {
    tracker: Tracker,
    /// Length of windows.
    window: Ns,
    /// Footprint of the guest's kernel.
    epsilon: Bytes,
    estimator: Box<dyn Estimator + Send>,
}

impl State {
    /// Requests this VM's figure until the given time, in windows of this length if one is given. If several requests give a
    /// length, the last one counts.
    pub fn want(&mut self, vm: VmId, window: Option<Ns>, until: Ns) {
        let wanted = &mut self.vms.entry(vm).or_default().wanted;
        let (before, length) = wanted.unwrap_or_default();
        *wanted = Some((before.max(until), window.or(length)));
    }

    /// Returns the VM's working set, if it was measured; [`Estimate::at`] is its time.
    pub fn estimate(&self, vm: VmId) -> Option<&Estimate> {
        self.measured(vm).map(|measured| &measured.estimate)
    }

    /// Returns the VM's estimate and what it was made from.
    pub fn measured(&self, vm: VmId) -> Option<&Measured> {
        self.vms.get(&vm)?.measured.as_ref()
    }

    /// Returns why there is no fresh figure: the host cannot watch the VM, or reported something impossible. `None` if
    /// nothing is wrong.
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

    /// Records the outcome of an action of this policy.
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
    /// Records an observation by the host, if it is new. `epsilon` is the footprint of the guest's kernel, zero if unknown.
    fn take_in(&mut self, observed: &Observation, epsilon: Bytes) {
        if observed.at <= self.seen {
            return;
        }
        self.seen = observed.at;
        // An operator may have written any size.
        let epsilon = epsilon.min(Pages(FRAMES_MAX).to_bytes());
        let (tracker, window) = (observed.tracker, observed.interval);
        let adds_up = |running: &Running| {
            let (short, long) = (running.window.min(window), running.window.max(window));
            running.tracker == tracker && running.epsilon == epsilon && 2 * long.0 <= 3 * short.0
        };
        let seen = observed.as_observation();
        let running = self.estimator.take().filter(adds_up);
        let running = self.estimator.insert(running.unwrap_or_else(|| Running {
            tracker,
            window,
            epsilon,
            estimator: suited(tracker, &seen.seen, epsilon, window),
        }));
        match running.estimator.observe(&seen) {
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

    /// Returns the length of windows in which the VM should be watched now; `None` if it should not be.
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

/// Records the hosts' observations. To be called before anything is planned in the cycle, because other policies rely on the
/// estimates.
pub fn observe(view: &View<'_>, state: &mut State) {
    state.vms.retain(|id, _| view.sample.vm(*id).is_some());
    for vm in &view.vms {
        let watched = state.vms.entry(vm.sample.id).or_default();
        if let Some(observed) = &vm.sample.observed {
            watched.take_in(
                observed,
                vm.sample.settings.kernel_footprint.unwrap_or(Bytes::ZERO),
            );
        }
        watched.in_force = watched.in_force.filter(|(until, _)| *until > view.at);
    }
}

/// Plans watches of the VMs that are due. To be called after [`observe`] has recorded this cycle.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    let mut due: Vec<(&VmSample, Ns)> = Vec::new();
    for vm in &view.vms {
        let watched = state.vms.entry(vm.sample.id).or_default();
        match watched.due(config, view.at) {
            // A VM that is ignored is not watched, as the figure would be of no use.
            Some(window) if vm.managed() => due.push((vm.sample, window)),
            _ if watched.in_force.is_some() => {
                let action = Act::Lift {
                    lever: Lever::Watching,
                }
                .on(vm.sample.id);
                plan.decide(POLICY, action, "its working set is no longer requested".into());
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
            Some(_) => "measuring working set on request",
            None => "measuring working set, as of every VM",
        };
        let longer = match factor {
            1 => String::new(),
            _ => format!(
                "; {factor} times less often than requested, so that looking takes at most {:.0} percent of a CPU",
                100.0 * config.cpu_share_max
            ),
        };
        plan.decide(POLICY, action, format!("{who}, every {window_ns}{longer}"));
    }
    plan
}

/// Returns the factor by which windows must grow so that looking stays within its share of a CPU. It is a power of two, so
/// that small variations of cost do not keep changing the windows.
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

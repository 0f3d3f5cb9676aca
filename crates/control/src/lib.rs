//! The control loop: sample, derive rates, plan, commit. The same code drives the simulator and a real host.
//!
//! ```text
//!   host.sample() ─▶ Rates::between ─▶ View ─▶ observe ─▶ the stages' plans ─▶ levers::merge ─▶ host.commit() ─▶ Receipt
//!                                       ▲                                                                          │
//!                                       └─────────────── homes, expected affinities and quotas ◀───────────────────┘
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `stages` | a table of which policies plan, in which order, and what each may set |
//! | `external` | a planner from outside the workspace that replaces the policies |
//! | `run` | the loop, and what each kind of run does around it |
//! | `cycle` | one round of the loop: observe, plan, commit, remember |
//! | `answers`, `idle` | questions to the loop: where a VM would be placed, what is known of it, why nothing is done |
//! | `config` | the operator's settings |
//! | `drain` | which nodes are being drained, what is left on them, and whether the agent is paused |
//! | `gate` | how far each decision goes, and lifting what may no longer stay in force |
//! | `recommendations` | decisions that wait for the operator's approval |
//! | `foreign_changes` | changes by operators and other programs |
//! | `turn`, `replay` | the loop's inputs other than samples, and how a recorded run is repeated |
//! | `status`, `event`, `recent`, `hourly_usage` | what the loop shows and reports |
//! | `quiet` | a log of events in which repeats are counted |
//!
//! [`Control`] is a plain struct without threads or clock. [`run()`] steps it over a host, the simulator or a real one, and hands
//! each [`Cycle`] to its caller.

mod answers;
mod config;
mod cycle;
mod drain;
mod event;
pub mod external;
mod foreign_changes;
mod gate;
mod hourly_usage;
pub mod http;
mod idle;
mod migrations;
pub mod quiet;
mod recent;
pub mod recommendations;
pub mod record;
pub mod replay;
mod run;
mod stages;
mod status;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use homenode_host::Mode;
use homenode_host::{EventRecord, Rates, Sample, Setting, VmSettings};
use homenode_policy::placement::{Announcement, Ledger};
use homenode_policy::{permits, topology_feed};
use homenode_units::{NodeSet, Ns, VmId};

pub use answers::{Advice, Price, Request, Reserved};
pub use config::{Config, Modes, PERIOD_MAX, PERIOD_MIN, PolicySet, UnknownPolicy};
pub use cycle::{Begun, Cycle};
pub use drain::{DrainStatus, LeftBehind, NotDrained};
pub use event::Event;
use external::{External, Planner, PlannerFailed};
use foreign_changes::ForeignChanges;
use gate::InForce;
pub use hourly_usage::{Hour, HourlyUsage, Line};
pub use migrations::Migrations;
use recent::Recent;
use recommendations::Recommendations;
pub use recommendations::{NotThat, Recommendation};
pub use run::{Around, Phase, run};
use stages::States;
pub use stages::stages_by_need_of_nodes;
pub use status::{
    Headroom, LinkStatus, MemoryStatus, NodePages, NodeStatus, NodeTraffic, NodeVcpus, PermitStatus, Status,
    TopologyStatus, VirtualNodeStatus, VmStatus,
};
pub use turn::{Decided, Input, Inputs, Turn};

/// For this many samples, a setting that the host carried out is shown although the sample lacks it, since libvirt reports
/// changes a little later. If it is still missing after that, another program has changed it again.
const SHOWN_WITHOUT: u32 = 2;

/// A setting that was carried out since the last sample.
#[derive(Debug)]
struct SetSince {
    vm: VmId,
    setting: Setting,
    samples_left: u32,
}

/// The control loop's state.
#[derive(Debug, Default)]
pub struct Control {
    config: Config,
    mode: Mode,
    /// State of the policies.
    states: States,
    hourly_usage: HourlyUsage,
    homes: BTreeMap<VmId, NodeSet>,
    layouts: topology_feed::Layouts,
    foreign: ForeignChanges,
    migrations: migrations::Counts,
    /// A planner that decides in place of the policies, if there is one.
    external: Option<External>,
    /// Nodes that are being drained.
    drained: NodeSet,
    /// End of the operator's pause.
    paused_until: Option<Ns>,
    /// VMs that the operator wants only observed for a while: until when, and their own modes.
    observed: BTreeMap<VmId, (Ns, Option<Mode>)>,
    /// Decisions that were already reported. A decision that is only reported recurs in every cycle, and is reported once.
    told: BTreeSet<(VmId, String)>,
    /// Recommendations that wait for the operator, and those that were approved.
    recommendations: Recommendations,
    /// What this run has in force on VMs.
    in_force: InForce,
    /// VMs whose working sets clients wait for, and until when.
    asked: BTreeMap<VmId, Ns>,
    /// The last sample and its rates. The sample is shared, since it is large and does not change any more.
    last: Option<(Arc<Sample>, Option<Rates>)>,
    /// Settings that were carried out since the last sample. The status shows them; decisions use them once a sample has them.
    since: Vec<SetSince>,
    /// Inputs since the last half of a cycle.
    inputs: Inputs,
    /// The last cycle without its sample.
    turn: Turn,
    /// Number of cycles that were begun.
    begun_count: u64,
    recent: Recent,
}

impl Control {
    /// Creates a loop that has not sampled the host. Its decisions go as far as the settings allow, but not further than `mode`.
    pub fn new(config: Config, mode: Mode) -> Control {
        let config = config.completed();
        let mode = mode.min(config.mode);
        let states = States {
            permits: permits::State::new(&config.permits),
            ..States::default()
        };
        Control {
            config,
            mode,
            states,
            ..Control::default()
        }
    }

    /// Uses an external planner that decides in place of all policies ([`external`]).
    pub fn with_planner(mut self, planner: Box<dyn Planner>) -> Control {
        self.config.policies = PolicySet::Default;
        self.external = Some(External::new(planner));
        self
    }

    /// Returns why the external planner failed and is no longer called, if so. A run that depends on the planner is then over.
    pub fn failed_planner(&self) -> Option<&PlannerFailed> {
        self.external.as_ref()?.failed()
    }

    /// Continues with the reservations of an earlier ledger.
    pub fn with_ledger(mut self, ledger: Ledger) -> Control {
        self.states.placement.ledger = ledger;
        self
    }

    /// Returns the reservations that are still open.
    pub fn ledger(&self) -> &Ledger {
        &self.states.placement.ledger
    }

    /// Continues with the usage that an earlier run counted.
    pub fn with_usage(mut self, hourly_usage: HourlyUsage) -> Control {
        self.hourly_usage = hourly_usage;
        self
    }

    /// Returns how much VMs used of their permits, up to the last [`Control::settle_usage`].
    pub fn hourly_usage(&self) -> &HourlyUsage {
        &self.hourly_usage
    }

    /// Adds the usage since the last call to this hour's account.
    pub fn settle_usage(&mut self, hour: Hour) {
        let Some((sample, _)) = &self.last else { return };
        for (id, usage) in self.states.permits.take_usage() {
            if let Some(vm) = sample.vm(id)
                && let Some(permit) = vm.settings.permit
            {
                self.hourly_usage
                    .add(hour, id, &vm.name, permit.resource(), usage);
            }
        }
        self.hourly_usage.forget_before(hour);
    }

    /// Notes that the host has carried out an operator's setting for a VM, and shows it from now on. Setting a permit also lets
    /// the agent decide on the VM's CPU quota again, whichever program changed the quota.
    pub fn was_set(&mut self, vm: VmId, setting: Setting) {
        if let Setting::Permit(_) = setting {
            self.inputs.push(Input::PermitSet { vm });
            self.foreign.give_back_quota(vm);
        }
        self.since
            .retain(|set| (set.vm, set.setting.name()) != (vm, setting.name()));
        self.since.push(SetSince {
            vm,
            setting,
            samples_left: SHOWN_WITHOUT,
        });
    }

    /// Returns the settings of a VM: those in the last sample, with those carried out since. Returns `None` if the sample lacks
    /// the VM.
    pub fn settings(&self, vm: VmId) -> Option<VmSettings> {
        let mut settings = self.sample()?.vm(vm)?.settings.clone();
        self.with_set_since(vm, &mut settings);
        Some(settings)
    }

    fn with_set_since(&self, vm: VmId, settings: &mut VmSettings) {
        let since = self.since.iter().filter(|set| set.vm == vm);
        since.for_each(|set| settings.set(set.setting));
    }

    /// Takes over newer settings, as far as a running loop can. Returns the keys that take effect at the next start.
    pub fn take_over(&mut self, newer: Config) -> Vec<&'static str> {
        let (config, kept) = self.config.taken_over(newer);
        if config != self.config {
            self.inputs.push(Input::Configured {
                config: Box::new(config.clone()),
            });
            self.config = config;
        }
        kept
    }

    /// Returns the operator's settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the furthest mode that this run allows.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Takes over the home that an earlier agent gave a VM. Pins are not taken over, since the host knows better which of them
    /// that agent set.
    pub fn adopt(&mut self, vm: VmId, home: Option<NodeSet>) {
        let input = Input::Adopted {
            vm,
            home: home.clone(),
        };
        self.inputs.push(input);
        self.states.permits.attribution.adopted(vm);
        if home.is_some() {
            self.in_force.adopted(vm);
        }
        self.homes.extend(home.map(|home| (vm, home)));
    }

    /// Returns the last finished cycle without its sample.
    pub fn turn(&self) -> &Turn {
        &self.turn
    }

    /// Returns true if there was a cycle: before that, the loop knows nothing of the host.
    pub fn has_looked(&self) -> bool {
        self.last.is_some()
    }

    /// Notes that a VM is about to start, as libvirt's hook reports.
    pub fn announce(&mut self, announcement: Announcement) {
        let now = self.now();
        self.inputs.push(Input::Announced(announcement.clone()));
        self.states.placement.ledger.announce(announcement, now);
    }

    /// Returns recent events, the oldest first.
    pub fn recent(&self) -> impl Iterator<Item = &EventRecord> {
        self.recent.iter()
    }

    /// Returns the last sample.
    pub fn sample(&self) -> Option<&Sample> {
        self.last.as_ref().map(|(sample, _)| sample.as_ref())
    }

    /// Returns the last sample for a caller that wants to keep it.
    pub fn shared_sample(&self) -> Option<Arc<Sample>> {
        self.last.as_ref().map(|(sample, _)| Arc::clone(sample))
    }

    fn now(&self) -> Ns {
        self.last.as_ref().map_or(Ns::ZERO, |(sample, _)| sample.at)
    }
}

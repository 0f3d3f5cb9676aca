//! Repeats a recorded run: the same loop takes in the same samples and inputs, and gets the host's recorded outcomes.
//!
//! # Problem
//!
//! Under its own settings, the repeated run must make the same decisions, bit for bit. Under other settings, it shows what the
//! agent would have decided differently.
//!
//! # Approach
//!
//! Each recorded cycle is stepped through [`Control::begin`] and [`Control::finish`]. A decision that was also recorded gets its
//! recorded outcome. Any other decision counts as one of a dry run, since the host did not carry it out, as later samples show.
//!
//! # Properties
//!
//! - *A run that is repeated from its beginning under its own settings decides the same*: the loop has no clock, no randomness,
//!   and no input other than [`Turn`]s and samples.
//! - Once a decision differs, samples show the effects of the recorded decisions, not of the new ones. Later differences say what
//!   the policies decide on the recorded host, not how a host with the new decisions would have developed.

use homenode_host::{Action, HomeInForce, Outcome, Receipt, Sample};
use homenode_machine::Machine;
use homenode_units::{NodeSet, VmId};

use crate::cycle::what_is_told;
use crate::turn::{Decided, Input, Inputs, Turn};
use crate::{Config, Control, Mode};

/// A run that is being repeated.
#[derive(Debug)]
pub struct Replay {
    machine: Machine,
    control: Control,
    next: u64,
    /// Whether recorded changes of settings are applied again.
    settings: Settings,
}

/// Settings under which a run is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settings {
    /// The run's own settings, with the changes that were made to them while it ran.
    OfThen,
    /// Other settings, from beginning to end.
    Others,
}

/// Decisions of a cycle, in the recording and now, matched by policy and action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Decided in the recording and now.
    pub same: Vec<Decided>,
    /// Decided only in the recording.
    pub then_only: Vec<Decided>,
    /// Decided only now.
    pub now_only: Vec<Decided>,
    /// Number of decisions in `same` that have another reason now.
    pub other_reason_count: usize,
    /// Whether the decisions in `same` were made in the same order.
    pub same_order: bool,
    /// Number of missing cycles between the previous one and this one.
    pub missing_count: u64,
    /// Number of missing inputs before or in this cycle.
    pub inputs_missing_count: u64,
}

impl Compared {
    /// Returns true if the plan is identical, including reasons and order.
    pub fn is_same(&self) -> bool {
        self.then_only.is_empty()
            && self.now_only.is_empty()
            && self.other_reason_count == 0
            && self.same_order
    }
}

impl Replay {
    /// Creates a replay that starts before the first cycle.
    pub fn new(machine: Machine, (config, settings): (Config, Settings), mode: Mode) -> Replay {
        Replay {
            machine,
            control: Control::new(config, mode),
            next: 0,
            settings,
        }
    }

    /// Starts with cycle `number` and these homes, if the beginning of the run is missing.
    pub fn begin_in_the_middle(&mut self, number: u64, homes: impl IntoIterator<Item = (VmId, NodeSet)>) {
        self.next = number;
        for (vm, home) in homes {
            self.control.adopt(vm, Some(home));
        }
    }

    /// Steps through the next cycle.
    pub fn step(&mut self, mut sample: Sample, turn: Turn) -> Compared {
        if self.settings == Settings::Others {
            // The homes that the host had in force are those of the recorded decisions.
            for vm in &mut sample.vms {
                vm.home = HomeInForce::Untold;
            }
        }
        let control = &mut self.control;
        if control.mode != Mode::Observe {
            // Decisions that were not recorded are reported in each cycle, like those of a dry run.
            control.told.clear();
        }
        take_in(control, &self.machine, &turn.before, self.settings);
        let begun = control.begin(&self.machine, sample);
        let now: Vec<Decided> = begun.decisions().iter().map(Decided::from).collect();
        let (mut compared, outcomes) = compare(&turn, now);
        compared.missing_count = turn.number.saturating_sub(self.next);
        compared.inputs_missing_count = turn.before.missed_count + turn.during.missed_count;
        self.next = turn.number.saturating_add(1);
        take_in(control, &self.machine, &turn.during, self.settings);
        let answer = match turn.refused {
            Some(refusal) => Err(refusal),
            None => Ok(Receipt {
                outcomes,
                ..Receipt::default()
            }),
        };
        control.finish(&self.machine, begun, answer);
        compared
    }
}

/// Returns a key that is the same for two actions that differ only in amounts, which change with every sample.
pub fn kind_of(action: &Action) -> String {
    what_is_told(action)
}

/// Repeats recorded inputs to the loop.
fn take_in(control: &mut Control, machine: &Machine, inputs: &Inputs, settings: Settings) {
    for input in inputs.list.iter().cloned() {
        match input {
            Input::Adopted { vm, home } => control.adopt(vm, home),
            Input::PermitSet { vm } => control.was_set(vm, homenode_host::Setting::Permit(None)),
            Input::Announced(announcement) => control.announce(announcement),
            Input::Reserved(asked) => drop(control.reserve(machine, asked)),
            Input::ReservationDropped { id } => drop(control.drop_reservation(id)),
            // Under other settings there may be no recommendation with this number.
            Input::Approved { id } => drop(control.approve(id)),
            Input::Rejected { id } => drop(control.reject(id)),
            Input::Configured { config } if settings == Settings::OfThen => drop(control.take_over(*config)),
            Input::Configured { .. } => {}
            Input::Drained { nodes } => drop(control.drain(machine, nodes)),
            Input::Paused { span } => control.pause(span),
            Input::Observing { vm, span } => control.observe_for(vm, span),
            Input::WorkingSetWanted { vm, window, wait } => control.want_working_set(vm, window, wait),
        }
    }
}

/// Compares the recorded decisions with those of now. Returns the outcome of each decision of now.
fn compare(turn: &Turn, now: Vec<Decided>) -> (Compared, Vec<Outcome>) {
    let mut compared = Compared {
        same_order: true,
        ..Compared::default()
    };
    let mut left: Vec<Option<&Decided>> = turn.decided.iter().map(Some).collect();
    let (mut outcomes, mut last) = (Vec::new(), None);
    for decided in now {
        let is_it = |then: &Option<&Decided>| {
            then.is_some_and(|then| then.policy == decided.policy && then.action == decided.action)
        };
        let Some(at) = left.iter().position(is_it) else {
            outcomes.push(Outcome::DryRun);
            compared.now_only.push(decided);
            continue;
        };
        let then = left[at].take();
        compared.other_reason_count += usize::from(then.is_some_and(|then| then.reason != decided.reason));
        compared.same_order &= last.is_none_or(|last| last < at);
        last = Some(at);
        outcomes.push(turn.outcomes.get(at).cloned().unwrap_or(Outcome::DryRun));
        compared.same.push(decided);
    }
    compared.then_only = left.into_iter().flatten().cloned().collect();
    (compared, outcomes)
}

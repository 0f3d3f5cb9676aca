//! Repeats a recorded run: the same loop takes in the same samples and inputs, and gets the host's recorded outcomes.
//!
//! # Problem
//!
//! Under its own settings the run must decide as it did, bit for bit; under others it shows what it would have decided
//! otherwise.
//!
//! # Approach
//!
//! Each recorded cycle is stepped through [`Control::begin`] and [`Control::finish`]. A decision that was also recorded gets
//! its recorded outcome. Any other counts as in a dry run: it was not carried out on the host, as the samples that follow
//! show.
//!
//! # Properties
//!
//! - *A run that is repeated from its beginning under its own settings decides the same*: the loop has no clock, no chance and
//!   no other input than [`Turn`]s and samples.
//! - Once a decision differs, samples show the effects of the recorded decisions, not of the new ones: later differences say
//!   what the policies thought of that host, not how the other one would have been.

use homenode_host::{Action, Outcome, Receipt, Sample};
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
    /// Whether changes of settings during the run are made again.
    settings: Settings,
}

/// Settings under which a run is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settings {
    /// Its own, with the changes that were made to them while it ran.
    OfThen,
    /// Others, from beginning to end.
    Others,
}

/// Decisions of a cycle, then and now. They are matched by policy and action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Decided both times.
    pub same: Vec<Decided>,
    /// Decided only then.
    pub then_only: Vec<Decided>,
    /// Decided only now.
    pub now_only: Vec<Decided>,
    /// Number of those in `same` with another reason now.
    pub other_reason_count: usize,
    /// Whether those in `same` were decided in the same order.
    pub same_order: bool,
    /// Number of missing cycles between the one before and this one.
    pub missing_count: u64,
    /// Number of missing inputs before or in this cycle.
    pub inputs_missing_count: u64,
}

impl Compared {
    /// Whether the plan is the same to the last letter.
    pub fn is_same(&self) -> bool {
        self.then_only.is_empty()
            && self.now_only.is_empty()
            && self.other_reason_count == 0
            && self.same_order
    }
}

impl Replay {
    /// Starts before the first cycle.
    pub fn new(machine: Machine, (config, settings): (Config, Settings), mode: Mode) -> Replay {
        Replay {
            machine,
            control: Control::new(config, mode),
            next: 0,
            settings,
        }
    }

    /// Starts with this cycle and these homes, for a run whose beginning is missing.
    pub fn begin_in_the_middle(&mut self, number: u64, homes: impl IntoIterator<Item = (VmId, NodeSet)>) {
        self.next = number;
        for (vm, home) in homes {
            self.control.adopt(vm, Some(home));
        }
    }

    /// Steps through the next cycle.
    pub fn step(&mut self, sample: Sample, turn: Turn) -> Compared {
        let control = &mut self.control;
        if control.mode != Mode::Observe {
            // New decisions are reported in each cycle again, as a dry run's are.
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

/// Returns what two actions have in common that differ only in amounts that change with every sample.
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
            // Under other settings there may be none with this number.
            Input::Approved { id } => drop(control.approve(id)),
            Input::Rejected { id } => drop(control.reject(id)),
            Input::Configured { config } if settings == Settings::OfThen => drop(control.take_over(*config)),
            Input::Configured { .. } => {}
            Input::Drained { nodes } => drop(control.drain(machine, nodes)),
            Input::Paused { span } => control.pause(span),
            Input::WorkingSetWanted { vm, window, wait } => control.want_working_set(vm, window, wait),
        }
    }
}

/// Compares decisions then and now; returns the outcome of each one now.
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

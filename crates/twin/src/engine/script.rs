//! The events of a scenario, with positions in place of names; and the outcomes of the events.

use std::collections::VecDeque;

use homenode_machine::Machine;
use homenode_units::Ns;

use crate::guest::Vm;
use crate::index::{CpuIxSet, IxVec, ThreadIx, VmIx, marked};
use crate::report::EventReport;
use crate::scenario::{EventAction, Scenario};

/// The events of a scenario and their outcomes.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(super) events: Vec<Event>,
    pub log: Vec<EventReport>,
    /// VMs that events start, as they were before their first start, with their CPUs.
    pub(super) fresh: IxVec<VmIx, Option<Fresh>>,
    pub(super) starts_left: usize,
    pub(super) migrations: VecDeque<Migration>,
}

/// A VM before its first start, and the CPUs of its vCPUs.
pub(super) type Fresh = (Vm, IxVec<ThreadIx, CpuIxSet>);

#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) at: Ns,
    pub(super) vm: VmIx,
    pub(super) action: EventAction,
    /// Positions of a migration's target nodes.
    pub(super) to: Vec<usize>,
    /// CPUs that a pin allows.
    pub(super) allowed: CpuIxSet,
}

/// A migration of memory that is under way.
#[derive(Clone, Debug)]
pub(super) struct Migration {
    /// The migration's entry in the log of events.
    pub(super) entry: usize,
    pub(super) vm: VmIx,
    pub(super) to: Vec<usize>,
    pub(super) since: Ns,
    pub(super) left: u64,
    pub(super) moved: u64,
    /// Fraction of a page left over from the last slice.
    pub(super) carry: f64,
    pub(super) over: bool,
}

impl Script {
    /// Creates the script of a checked scenario.
    pub(crate) fn new(scenario: &Scenario, machine: &Machine) -> Script {
        let position = |vm: &str| scenario.vms.iter().position(|spec| spec.name == vm).map(VmIx);
        let events = scenario.events.iter().map(|event| Event {
            at: event.at,
            vm: position(&event.vm).expect("checked"),
            action: event.action.clone(),
            to: match &event.action {
                EventAction::Migrate { nodes, .. } => {
                    let positions = nodes.iter().map(|node| machine.nodes.position(node));
                    positions.map(|at| at.expect("checked")).collect()
                }
                _ => Vec::new(),
            },
            allowed: match &event.action {
                EventAction::Pin { cpus } => marked(machine.cpus.iter().map(|cpu| cpus.contains(cpu.id))),
                _ => CpuIxSet::new(),
            },
        });
        let events: Vec<Event> = events.collect();
        Script {
            starts_left: events
                .iter()
                .filter(|event| event.action == EventAction::Start)
                .count(),
            events,
            log: Vec::new(),
            fresh: IxVec::new(),
            migrations: VecDeque::new(),
        }
    }

    /// Whether an event will start a VM.
    pub(crate) fn starts_something(&self) -> bool {
        self.starts_left > 0
    }

    pub(super) fn starts(&self, vm: VmIx) -> bool {
        let starts = |event: &Event| event.vm == vm && event.action == EventAction::Start;
        self.events.iter().any(starts)
    }
}

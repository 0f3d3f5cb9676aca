//! The tracks of one VM.

use std::collections::BTreeMap;
use std::io::{self, Write};

use homenode_control::{Decided, VmStatus};
use homenode_host::{Act, Lever, Outcome, VmSample};
use homenode_machine::Machine;
use homenode_units::{CpuId, CpuSet, Ns};

use crate::Happened;
use crate::writer::{Flow, More, Packets, Track};

/// Number of periods to wait for a decision's effect: a setting is in force in the next sample, or never.
const PENDING_PERIODS: u8 = 2;
/// Names of the values of a VM, with their units.
const VALUES: [(&str, &str); 3] = [
    ("CPUs used", "CPUs"),
    ("LLC miss rate", "share"),
    ("local accesses", "share"),
];

/// Levers with a value in force on a VM. Each has a track.
const STATES: [(Lever, &str); 4] = [
    (Lever::Home, "home"),
    (Lever::MemoryPolicy, "memory policy"),
    (Lever::CpuQuota, "CPU quota"),
    (Lever::Memory, "memory limit"),
];

/// A track of consecutive slices.
#[derive(Debug)]
struct State {
    track: Track,
    shown: Option<String>,
}

impl State {
    /// If the state has changed, ends the slice of the old state and begins one for the new state.
    fn show<W: Write>(
        &mut self,
        to: &mut Packets<W>,
        at: Ns,
        now: Option<String>,
        arrow: Option<Flow>,
    ) -> io::Result<()> {
        if self.shown == now {
            return Ok(());
        }
        if self.shown.is_some() {
            to.end(at, self.track)?;
        }
        if let Some(name) = &now {
            let ends = arrow.into_iter().collect();
            to.begin(
                at,
                self.track,
                name,
                More {
                    ends,
                    ..More::default()
                },
            )?;
        }
        self.shown = now;
        Ok(())
    }
}

/// The CPUs on which a pinned vCPU is expected, and the arrow to draw once it is seen there.
#[derive(Debug)]
struct Pinned {
    cpus: CpuSet,
    flow: Flow,
    periods: u8,
}

/// The tracks of a running VM.
#[derive(Debug)]
pub(crate) struct VmLanes {
    root: Track,
    decisions: Track,
    pages: Track,
    states: [State; STATES.len()],
    values: [Track; VALUES.len()],
    vcpus: BTreeMap<u16, State>,
    /// Arrows from decisions whose effect is not visible yet.
    pending: BTreeMap<Lever, (Flow, u8)>,
    pinned: BTreeMap<u16, Pinned>,
    /// Page moves of the previous period, which are shown as lasting until this period.
    moved: Vec<(Ns, String, Flow)>,
}

impl VmLanes {
    pub(crate) fn new<W: Write>(
        to: &mut Packets<W>,
        name: &str,
        parent: Track,
        rank: i32,
    ) -> io::Result<VmLanes> {
        let root = to.track(&format!("VM {name}"), Some(parent), rank)?;
        let decisions = to.track("decisions", Some(root), 0)?;
        let mut rank = 0;
        let mut next = || {
            rank += 1;
            rank
        };
        let mut state = |(_, name): (Lever, &str)| -> io::Result<State> {
            let track = to.track(name, Some(root), next())?;
            Ok(State { track, shown: None })
        };
        let [home, policy, quota, limit] = STATES;
        let states = [state(home)?, state(policy)?, state(quota)?, state(limit)?];
        let pages = to.track("pages", Some(root), next())?;
        let mut value = |(name, unit): (&str, &str)| to.counter(name, root, next(), unit);
        let [used, misses, local] = VALUES;
        let values = [value(used)?, value(misses)?, value(local)?];
        Ok(VmLanes {
            root,
            decisions,
            pages,
            states,
            values,
            vcpus: BTreeMap::new(),
            pending: BTreeMap::new(),
            pinned: BTreeMap::new(),
            moved: Vec::new(),
        })
    }

    /// Writes an event of the VM. Must be called before [`VmLanes::show`], so that arrows begin before their targets appear.
    pub(crate) fn happened<W: Write>(
        &mut self,
        to: &mut Packets<W>,
        at: Ns,
        event: &Happened,
    ) -> io::Result<()> {
        match event {
            Happened::Other { kind, text, .. } => {
                let notes = vec![("text", text.clone())];
                to.instant(
                    at,
                    self.decisions,
                    kind,
                    More {
                        notes,
                        ..More::default()
                    },
                )
            }
            Happened::Decided(decided, outcome) => {
                let flow = to.flow();
                let leads = self.expect(at, decided, outcome, flow);
                let notes = vec![
                    ("reason", decided.reason.clone()),
                    ("action", serde_json::json!(decided.action).to_string()),
                    ("outcome", serde_json::json!(outcome).to_string()),
                ];
                let more = More {
                    begins: leads.then_some(flow),
                    notes,
                    ..More::default()
                };
                to.instant(at, self.decisions, &decided.policy, more)
            }
        }
    }

    /// Notes the expected effect of a decision. Returns true if an effect would be visible.
    fn expect(&mut self, at: Ns, decided: &Decided, outcome: &Outcome, flow: Flow) -> bool {
        let act = &decided.action.act;
        match (act, outcome) {
            (_, Outcome::Moved { moved, .. }) if moved.0 > 0 => {
                let name = match act {
                    Act::MovePages { to, .. } => format!("{} to node {to}", moved.to_bytes()),
                    Act::MoveVirtualNode { to, .. } => format!("{} to node {to}", moved.to_bytes()),
                    _ => format!("{} to where they are used", moved.to_bytes()),
                };
                self.moved.push((at, name, flow));
                true
            }
            (Act::PinVcpus { vcpus, cpus }, Outcome::Done) => {
                for index in vcpus {
                    let pinned = Pinned {
                        cpus: cpus.clone(),
                        flow,
                        periods: PENDING_PERIODS,
                    };
                    self.pinned.insert(*index, pinned);
                }
                true
            }
            (act, Outcome::Done) if STATES.iter().any(|(lever, _)| *lever == act.lever()) => {
                self.pending.insert(act.lever(), (flow, PENDING_PERIODS));
                true
            }
            _ => false,
        }
    }

    /// Shows the VM's current state.
    pub(crate) fn show<W: Write>(
        &mut self,
        to: &mut Packets<W>,
        at: Ns,
        machine: &Machine,
        status: &VmStatus,
        sample: Option<&VmSample>,
    ) -> io::Result<()> {
        self.end_moves(to, at)?;
        let now = [
            Some(
                status
                    .home
                    .as_ref()
                    .map_or("unplaced".to_owned(), |home| format!("node {home}")),
            ),
            Some(status.memory_policy.to_string()),
            status.permit.quota.map(|quota| quota.to_string()),
            status.memory.limit_bytes.map(|limit| limit.to_string()),
        ];
        for ((state, now), (lever, _)) in self.states.iter_mut().zip(now).zip(STATES) {
            let arrow = (state.shown != now)
                .then(|| self.pending.remove(&lever))
                .flatten();
            state.show(to, at, now, arrow.map(|(flow, _)| flow))?;
        }
        for (track, value) in
            self.values
                .iter()
                .zip([status.cpus_used, status.llc_miss_rate, status.local_access_ratio])
        {
            if let Some(value) = value {
                to.value(at, *track, value)?;
            }
        }
        self.show_vcpus(to, at, machine, sample)?;
        self.pending.retain(|_, (_, periods)| still(periods));
        self.pinned.retain(|_, pinned| still(&mut pinned.periods));
        Ok(())
    }

    fn show_vcpus<W: Write>(
        &mut self,
        to: &mut Packets<W>,
        at: Ns,
        machine: &Machine,
        sample: Option<&VmSample>,
    ) -> io::Result<()> {
        let seen: BTreeMap<u16, CpuId> = sample
            .iter()
            .flat_map(|vm| &vm.vcpus)
            .filter_map(|vcpu| Some((vcpu.index, vcpu.cpu?)))
            .collect();
        for (index, cpu) in &seen {
            if !self.vcpus.contains_key(index) {
                // Ranks after all other tracks of the VM.
                let track = to.track(&format!("vCPU {index}"), Some(self.root), 100 + i32::from(*index))?;
                self.vcpus.insert(*index, State { track, shown: None });
            }
            let node = machine
                .node_of(*cpu)
                .map_or(String::new(), |node| format!("node {node}, "));
            let now = Some(format!("{node}CPU {cpu}"));
            let Some(state) = self.vcpus.get_mut(index) else {
                continue;
            };
            let is_there = |pinned: &Pinned| pinned.cpus.contains(*cpu);
            let arrow = match self.pinned.get(index) {
                Some(pinned) if state.shown != now && is_there(pinned) => self.pinned.remove(index),
                _ => None,
            };
            state.show(to, at, now, arrow.map(|pinned| pinned.flow))?;
        }
        for (_, state) in self
            .vcpus
            .iter_mut()
            .filter(|(index, _)| !seen.contains_key(index))
        {
            state.show(to, at, None, None)?;
        }
        Ok(())
    }

    /// Writes the page moves of the previous period, which end now.
    fn end_moves<W: Write>(&mut self, to: &mut Packets<W>, at: Ns) -> io::Result<()> {
        let mut over = Vec::new();
        self.moved.retain(|moved| {
            let is_over = moved.0 < at;
            if is_over {
                over.push(moved.clone());
            }
            !is_over
        });
        for (begun, name, flow) in &over {
            let ends = vec![*flow];
            to.begin(
                *begun,
                self.pages,
                name,
                More {
                    ends,
                    ..More::default()
                },
            )?;
        }
        over.iter().try_for_each(|_| to.end(at, self.pages))
    }

    /// Closes all slices, because the VM is gone or the trace ends.
    pub(crate) fn close<W: Write>(mut self, to: &mut Packets<W>, at: Ns) -> io::Result<()> {
        self.end_moves(to, at)?;
        let states = self.states.iter_mut().chain(self.vcpus.values_mut());
        states
            .into_iter()
            .try_for_each(|state| state.show(to, at, None, None))
    }
}

/// Decrements a number of periods. Returns true if any are left.
fn still(periods: &mut u8) -> bool {
    *periods = periods.saturating_sub(1);
    *periods > 0
}

//! All tracks of a host.

use std::collections::BTreeMap;
use std::io::{self, Write};

use homenode_control::{NodeStatus, Status};
use homenode_machine::Machine;
use homenode_units::{BytesPerSec, NodeId, Ns, VmId};

use crate::vm::VmLanes;
use crate::writer::{More, Packets, Track};
use crate::{Happened, Period};

/// Names of the values of a node, with their units.
const VALUES: [(&str, &str); 4] = [
    ("CPUs busy", "CPUs"),
    ("vCPUs waiting", "vCPUs"),
    ("memory traffic", "bytes/s"),
    ("memory free", "bytes"),
];

/// Ranks of tracks: nodes, then links, then the agent, then VMs in order of appearance.
const LINKS_RANK: i32 = 1 << 20;
const AGENT_RANK: i32 = LINKS_RANK + 1;
const VM_RANK: i32 = AGENT_RANK + 1;

/// Writes a host's periods as tracks.
#[derive(Debug)]
pub struct Lanes<W: Write> {
    to: Packets<W>,
    host: Host,
    /// Time of the last period.
    last: Option<Ns>,
}

/// A run of a host.
#[derive(Debug)]
struct Host {
    machine: Machine,
    root: Track,
    agent: Track,
    nodes: BTreeMap<NodeId, [Track; VALUES.len()]>,
    links: Option<Track>,
    link: BTreeMap<(NodeId, NodeId), Track>,
    vms: BTreeMap<VmId, VmLanes>,
    vms_count: i32,
}

impl<W: Write> Lanes<W> {
    /// Begins a trace of a host with this name.
    ///
    /// # Errors
    /// If the trace cannot be written.
    pub fn new(to: W, name: &str, machine: &Machine) -> io::Result<Lanes<W>> {
        let mut to = Packets::new(to);
        let host = Host::new(&mut to, name, machine)?;
        Ok(Lanes { to, host, last: None })
    }

    /// Begins another run, of the same host or of another. Its tracks are added to the existing ones, and its clock may begin at
    /// an earlier time.
    pub fn next_run(&mut self, name: &str, machine: &Machine) -> io::Result<()> {
        let next = Host::new(&mut self.to, name, machine)?;
        let before = std::mem::replace(&mut self.host, next);
        before.close(&mut self.to, self.last.take().unwrap_or_default())
    }

    /// Writes a period. Periods of a run must come in order of time.
    ///
    /// # Errors
    /// If the trace cannot be written.
    pub fn period(&mut self, period: Period<'_>) -> io::Result<()> {
        self.last = Some(period.at);
        self.host.period(&mut self.to, period)
    }

    /// Closes all open slices and ends the trace.
    ///
    /// # Errors
    /// If the trace cannot be written.
    pub fn finish(mut self) -> io::Result<()> {
        self.host.close(&mut self.to, self.last.unwrap_or_default())?;
        self.to.flush()
    }
}

impl Host {
    fn new<W: Write>(to: &mut Packets<W>, name: &str, machine: &Machine) -> io::Result<Host> {
        let root = to.track(name, None, 0)?;
        Ok(Host {
            machine: machine.clone(),
            root,
            agent: to.track("agent", Some(root), AGENT_RANK)?,
            nodes: BTreeMap::new(),
            links: None,
            link: BTreeMap::new(),
            vms: BTreeMap::new(),
            vms_count: 0,
        })
    }

    fn period<W: Write>(&mut self, to: &mut Packets<W>, period: Period<'_>) -> io::Result<()> {
        let Period {
            at,
            status,
            sample,
            happened,
        } = period;
        for node in &status.nodes {
            self.node(to, at, node)?;
        }
        self.links(to, at, status)?;
        for vm in &status.vms {
            if !self.vms.contains_key(&vm.id) {
                let rank = VM_RANK.saturating_add(self.vms_count);
                self.vms_count = self.vms_count.saturating_add(1);
                self.vms
                    .insert(vm.id, VmLanes::new(to, &vm.name, self.root, rank)?);
            }
        }
        for event in happened {
            self.happened(to, at, event)?;
        }
        for vm in &status.vms {
            if let Some(lanes) = self.vms.get_mut(&vm.id) {
                let sample = sample.and_then(|sample| sample.vm(vm.id));
                lanes.show(to, at, &self.machine, vm, sample)?;
            }
        }
        let gone: Vec<VmId> = self.vms.keys().copied().collect();
        let gone = gone
            .into_iter()
            .filter(|id| status.vms.iter().all(|vm| vm.id != *id));
        for id in gone {
            if let Some(lanes) = self.vms.remove(&id) {
                lanes.close(to, at)?;
            }
        }
        Ok(())
    }

    fn happened<W: Write>(&mut self, to: &mut Packets<W>, at: Ns, event: &Happened) -> io::Result<()> {
        let vm = match event {
            Happened::Decided(decided, _) => Some(decided.action.vm),
            Happened::Other { vm, .. } => *vm,
        };
        if let Some(lanes) = vm.and_then(|vm| self.vms.get_mut(&vm)) {
            return lanes.happened(to, at, event);
        }
        let (name, text) = match event {
            Happened::Decided(decided, _) => (&decided.policy, &decided.reason),
            Happened::Other { kind, text, .. } => (kind, text),
        };
        let notes = vec![("text", text.clone())];
        to.instant(
            at,
            self.agent,
            name,
            More {
                notes,
                ..More::default()
            },
        )
    }

    fn node<W: Write>(&mut self, to: &mut Packets<W>, at: Ns, node: &NodeStatus) -> io::Result<()> {
        if !self.nodes.contains_key(&node.node) {
            let track = to.track(
                &format!("node {}", node.node),
                Some(self.root),
                i32::from(node.node.0),
            )?;
            let mut tracks = Vec::new();
            for (rank, (name, unit)) in (0..).zip(VALUES) {
                tracks.push(to.counter(name, track, rank, unit)?);
            }
            let tracks = std::array::from_fn(|at| tracks[at]);
            self.nodes.insert(node.node, tracks);
        }
        let values = [
            node.cpus_busy,
            node.vcpus_waiting,
            node.bandwidth_bytes_per_s.map(BytesPerSec::as_f64),
            Some(node.memory_free_bytes.as_f64()),
        ];
        let known = self.nodes.get(&node.node).into_iter().flatten().zip(values);
        for (track, value) in known {
            if let Some(value) = value {
                to.value(at, *track, value)?;
            }
        }
        Ok(())
    }

    fn links<W: Write>(&mut self, to: &mut Packets<W>, at: Ns, status: &Status) -> io::Result<()> {
        for link in &status.links {
            let key = (link.from, link.to);
            let track = match self.link.get(&key) {
                Some(track) => *track,
                None => {
                    let parent = match self.links {
                        Some(parent) => parent,
                        None => to.track("links", Some(self.root), LINKS_RANK)?,
                    };
                    self.links = Some(parent);
                    let rank = i32::try_from(self.link.len()).unwrap_or(i32::MAX);
                    let name = format!("{} → {}", link.from, link.to);
                    let track = to.counter(&name, parent, rank, "bytes/s")?;
                    self.link.insert(key, track);
                    track
                }
            };
            to.value(at, track, link.bandwidth_bytes_per_s.as_f64())?;
        }
        Ok(())
    }

    fn close<W: Write>(self, to: &mut Packets<W>, at: Ns) -> io::Result<()> {
        self.vms.into_values().try_for_each(|lanes| lanes.close(to, at))
    }
}

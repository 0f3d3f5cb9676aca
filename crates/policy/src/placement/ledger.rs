//! Reservations for VMs that have not appeared yet. Without them, VMs that start together would all be sent to one node,
//! because memory that they have not touched yet looks free.

use homenode_host::{HugeMemory, View, VmSample};
use homenode_units::{Bytes, BytesPerSec, NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::demand::Demand;

/// Time after which a reservation is dropped if its VM has not appeared, because its start must have failed. It is not a
/// setting: agent, numad and libvirt's hook share a ledger, and must agree even if no agent runs.
pub const RESERVATION_LIFE: Ns = Ns::from_secs(120);

/// What libvirt tells numad about a VM. If a reservation does not name its VM, nothing else can match the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shape {
    /// Number of online vCPUs at start.
    pub vcpus: u32,
    /// Memory in MiB, rounded up.
    pub memory_mib: u64,
}

impl Shape {
    /// Returns the shape of a VM with this many vCPUs and this much memory.
    pub fn new(vcpus: u32, memory: Bytes) -> Shape {
        Shape {
            vcpus,
            memory_mib: memory.0.div_ceil(1 << 20),
        }
    }
}

/// A request to `numad -w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Asked {
    /// Number of online vCPUs at start.
    pub vcpus: u32,
    /// Memory in MiB, rounded up.
    pub memory_mib: u64,
    /// Size of the huge pages that hold all of the memory (`-H`); `None` for ordinary pages, or if the hook reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_bytes: Option<Bytes>,
}

impl Asked {
    /// Returns the shape that matches reservations and VMs.
    pub fn shape(self) -> Shape {
        Shape {
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
        }
    }
}

impl From<Shape> for Asked {
    fn from(shape: Shape) -> Asked {
        Asked {
            vcpus: shape.vcpus,
            memory_mib: shape.memory_mib,
            huge_page_bytes: None,
        }
    }
}

/// A named VM that is about to start. The libvirt hook announces it before libvirt asks for nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Announcement {
    /// The VM.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// The shape that libvirt will ask for.
    pub shape: Shape,
    /// Memory bandwidth that the operator declared.
    pub bandwidth: Option<BytesPerSec>,
    /// Home that the operator chose.
    pub home: Option<NodeSet>,
    /// Nodes of the devices assigned to it; empty in announcements from before 0.2.
    #[serde(default, skip_serializing_if = "NodeSet::is_empty")]
    pub device_nodes: NodeSet,
    /// Its memory in huge pages, with their sizes; the rest is in ordinary pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub huge_pages: Vec<HugeMemory>,
}

/// Nodes reserved for a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    /// The reservation's number in the ledger, from 1. [`Ledger::reserve`] assigns it; it is 0 until then, and in ledgers from
    /// before 0.2.
    #[serde(default)]
    pub id: u64,
    /// The VM, if known.
    pub vm: Option<VmId>,
    /// The VM's name, if known.
    #[serde(default)]
    pub name: Option<String>,
    /// Shape of the request.
    pub shape: Shape,
    /// The reserved resources.
    pub demand: Demand,
    /// The reserved nodes.
    pub nodes: NodeSet,
    /// When the reservation was made, on the host's clock.
    pub made_at: Ns,
}

impl Reservation {
    /// Returns when the reservation expires, on the host's clock.
    pub fn expires_at(&self) -> Ns {
        self.made_at + RESERVATION_LIFE
    }

    fn is_open(&self, now: Ns) -> bool {
        is_young(self.made_at, now)
    }
}

/// Whether a record from this time is still valid. A time in the future is from before a reboot, which reset the host's
/// clock, so the record's age is unknown and it is invalid.
fn is_young(made_at: Ns, now: Ns) -> bool {
    now.0
        .checked_sub(made_at.0)
        .is_some_and(|age| age <= RESERVATION_LIFE.0)
}

/// All announcements and reservations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    announced: Vec<(Announcement, Ns)>,
    reservations: Vec<Reservation>,
    /// Number of the last reservation.
    #[serde(default)]
    last_id: u64,
}

impl Ledger {
    /// Records a VM that is about to start. This has to be kept, because libvirt's hook has ended before libvirt asks for nodes.
    pub fn announce(&mut self, announcement: Announcement, now: Ns) {
        self.expire(now);
        self.announced.retain(|(known, _)| known.vm != announcement.vm);
        self.announced.push((announcement, now));
    }

    /// Drops a VM's reservation, after the VM could not be given the home.
    pub fn withdraw(&mut self, vm: VmId) {
        self.reservations.retain(|r| r.vm != Some(vm));
    }

    /// Removes and returns the announced VM from which a request of this shape must come: the one that was announced first.
    pub fn announced(&mut self, shape: Shape, now: Ns) -> Option<Announcement> {
        self.expire(now);
        let at = self
            .announced
            .iter()
            .position(|(known, _)| known.shape == shape)?;
        Some(self.announced.remove(at).0)
    }

    /// Records a reservation of nodes. It replaces any reservation that the VM already holds.
    pub fn reserve(&mut self, mut reservation: Reservation) {
        self.expire(reservation.made_at);
        self.last_id += 1;
        reservation.id = self.last_id;
        if reservation.vm.is_some() {
            self.reservations.retain(|old| old.vm != reservation.vm);
        }
        self.reservations.push(reservation);
    }

    /// Removes the reservation of a VM that now runs, and returns its nodes. The reservation is found by the VM's id or else,
    /// oldest first, by its shape. From now on the VM itself is counted.
    pub fn redeem(&mut self, vm: &VmSample, now: Ns) -> Option<NodeSet> {
        self.expire(now);
        let at = self.position_of(vm, now)?;
        Some(self.reservations.remove(at).nodes)
    }

    /// Whether [`Ledger::redeem`] would find nodes for a VM.
    pub fn has_reservation(&self, vm: &VmSample, now: Ns) -> bool {
        self.position_of(vm, now).is_some()
    }

    fn position_of(&self, vm: &VmSample, now: Ns) -> Option<usize> {
        let shape = Shape::new(vm.vcpus.len() as u32, vm.memory_bytes);
        let find = |is_its: &dyn Fn(&Reservation) -> bool| {
            let mut all = self.reservations.iter();
            all.position(|r| r.is_open(now) && is_its(r))
        };
        find(&|r| r.vm == Some(vm.id)).or_else(|| find(&|r| r.vm.is_none() && r.shape == shape))
    }

    /// Drops reservations of VMs that the view shows with a home, because from now on the VM itself is counted.
    pub fn forget_homed(&mut self, view: &View<'_>) {
        self.reservations.retain(|r| {
            !view
                .vms
                .iter()
                .any(|vm| r.vm == Some(vm.sample.id) && vm.home.is_some())
        });
    }

    /// Returns the nodes reserved for a VM.
    pub fn reserved(&self, vm: VmId) -> Option<&NodeSet> {
        self.reservations
            .iter()
            .find(|r| r.vm == Some(vm))
            .map(|r| &r.nodes)
    }

    /// Returns reservations that are still open at this time, the oldest first.
    pub fn open(&self, now: Ns) -> impl Iterator<Item = &Reservation> {
        self.reservations.iter().filter(move |r| r.is_open(now))
    }

    /// Removes the open reservation with this number; returns whether it existed.
    pub fn drop_reservation(&mut self, id: u64, now: Ns) -> bool {
        self.expire(now);
        let count = self.reservations.len();
        self.reservations.retain(|r| r.id != id);
        self.reservations.len() < count
    }

    /// Returns the reservations that are still open and whose VM the view does not show yet.
    pub fn pending<'a>(&'a self, view: &'a View<'_>) -> impl Iterator<Item = &'a Reservation> {
        self.reservations.iter().filter(|r| {
            let runs = r.vm.is_some_and(|id| view.sample.vm(id).is_some());
            r.is_open(view.at) && !runs
        })
    }

    fn expire(&mut self, now: Ns) {
        self.reservations.retain(|r| r.is_open(now));
        self.announced.retain(|(_, at)| is_young(*at, now));
    }
}

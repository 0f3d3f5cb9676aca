//! Promises to VMs that have not appeared yet. Without it VMs that start together would all be told the same node:
//! memory that nobody has touched looks free.

use homenode_host::{HugeMemory, View, VmSample};
use homenode_units::{Bytes, BytesPerSec, NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::demand::Demand;

/// A promise whose VM does not appear within this time is dropped: its start failed. No setting: agent, numad and libvirt's hook
/// share a ledger, and must agree on it where no agent runs.
pub const RESERVATION_LIFE: Ns = Ns::from_secs(120);

/// What libvirt tells numad of a VM: all that a promise and a VM can be matched by when nobody named the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Shape {
    /// Online vCPUs at start.
    pub vcpus: u32,
    /// Memory in MiB, rounded up.
    pub memory_mib: u64,
}

impl Shape {
    /// Shape of a VM with so many vCPUs and so much memory.
    pub fn new(vcpus: u32, memory: Bytes) -> Shape {
        Shape {
            vcpus,
            memory_mib: memory.0.div_ceil(1 << 20),
        }
    }
}

/// What `numad -w` is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Asked {
    /// Online vCPUs at start.
    pub vcpus: u32,
    /// Memory in MiB, rounded up.
    pub memory_mib: u64,
    /// Size of the huge pages that all of the memory lies in (`-H`); none where the hook tells, or where they are ordinary ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_bytes: Option<Bytes>,
}

impl Asked {
    /// By what a promise and a VM are matched.
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

/// A VM that is about to start, by name: the libvirt hook tells it before libvirt asks for nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Announcement {
    /// Which VM.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// What libvirt will ask for.
    pub shape: Shape,
    /// Memory bandwidth that the operator declared.
    pub bandwidth: Option<BytesPerSec>,
    /// Home that the operator chose.
    pub home: Option<NodeSet>,
    /// Nodes of devices that it is given; announcements before 0.2 have none.
    #[serde(default, skip_serializing_if = "NodeSet::is_empty")]
    pub device_nodes: NodeSet,
    /// What of its memory lies in huge pages, by their size; the rest lies in ordinary ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub huge_pages: Vec<HugeMemory>,
}

/// Nodes promised to a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    /// Its number in the ledger, from 1, which [`Ledger::reserve`] gives it; 0 before, and in ledgers before 0.2.
    #[serde(default)]
    pub id: u64,
    /// Which VM, where somebody said so.
    pub vm: Option<VmId>,
    /// Its name, where somebody said so.
    #[serde(default)]
    pub name: Option<String>,
    /// What was asked.
    pub shape: Shape,
    /// What is promised.
    pub demand: Demand,
    /// Where.
    pub nodes: NodeSet,
    /// When, on the host's clock.
    pub made_at: Ns,
}

impl Reservation {
    /// When it is dropped, on the host's clock.
    pub fn expires_at(&self) -> Ns {
        self.made_at + RESERVATION_LIFE
    }

    fn is_open(&self, now: Ns) -> bool {
        is_young(self.made_at, now)
    }
}

/// Whether something that was written down then still holds. What is of the future was written before a reboot, after which the
/// host's clock began anew: its age is unknown.
fn is_young(made_at: Ns, now: Ns) -> bool {
    now.0
        .checked_sub(made_at.0)
        .is_some_and(|age| age <= RESERVATION_LIFE.0)
}

/// All promises.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    announced: Vec<(Announcement, Ns)>,
    reservations: Vec<Reservation>,
    /// The number of the last promise.
    #[serde(default)]
    last_id: u64,
}

impl Ledger {
    /// Notes that a VM is about to start: libvirt's hook has ended before libvirt asks for nodes.
    pub fn announce(&mut self, announcement: Announcement, now: Ns) {
        self.expire(now);
        self.announced.retain(|(known, _)| known.vm != announcement.vm);
        self.announced.push((announcement, now));
    }

    /// Drops the promise to a VM: it could not be kept.
    pub fn withdraw(&mut self, vm: VmId) {
        self.reservations.retain(|r| r.vm != Some(vm));
    }

    /// The VM that a request of this shape must come from: the one announced longest ago. Taken out.
    pub fn announced(&mut self, shape: Shape, now: Ns) -> Option<Announcement> {
        self.expire(now);
        let at = self
            .announced
            .iter()
            .position(|(known, _)| known.shape == shape)?;
        Some(self.announced.remove(at).0)
    }

    /// Promises nodes. A VM that already holds a promise gets the new one instead.
    pub fn reserve(&mut self, mut reservation: Reservation) {
        self.expire(reservation.made_at);
        self.last_id += 1;
        reservation.id = self.last_id;
        if reservation.vm.is_some() {
            self.reservations.retain(|old| old.vm != reservation.vm);
        }
        self.reservations.push(reservation);
    }

    /// The nodes promised to a VM that now runs, by its id, else by its shape (oldest first). The promise is kept, and so
    /// leaves the ledger: from now on the VM itself is counted.
    pub fn redeem(&mut self, vm: &VmSample, now: Ns) -> Option<NodeSet> {
        self.expire(now);
        let at = self.position_of(vm, now)?;
        Some(self.reservations.remove(at).nodes)
    }

    /// Whether there are nodes that [`Ledger::redeem`] would give to a VM.
    pub fn is_promised(&self, vm: &VmSample, now: Ns) -> bool {
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

    /// Drops promises to VMs that the view shows with a home: from now on the VM itself is counted.
    pub fn forget_homed(&mut self, view: &View<'_>) {
        self.reservations.retain(|r| {
            !view
                .vms
                .iter()
                .any(|vm| r.vm == Some(vm.sample.id) && vm.home.is_some())
        });
    }

    /// The nodes promised to a VM.
    pub fn promised(&self, vm: VmId) -> Option<&NodeSet> {
        self.reservations
            .iter()
            .find(|r| r.vm == Some(vm))
            .map(|r| &r.nodes)
    }

    /// Promises that are still open at this time, the oldest first.
    pub fn open(&self, now: Ns) -> impl Iterator<Item = &Reservation> {
        self.reservations.iter().filter(move |r| r.is_open(now))
    }

    /// Takes back the open promise of this number; whether there was one.
    pub fn drop_promise(&mut self, id: u64, now: Ns) -> bool {
        self.expire(now);
        let count = self.reservations.len();
        self.reservations.retain(|r| r.id != id);
        self.reservations.len() < count
    }

    /// Promises that are still open, to VMs that the view does not show yet.
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

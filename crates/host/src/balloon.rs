//! What a VM's balloon tells: how much memory the guest has, and how it fares with it.
//!
//! Everything that the guest's driver says is the guest's word. It may be old, absurd or meant to mislead: who reads it lets it
//! decide over that guest alone ([`GuestMemory::bounded`]).

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The balloon of a VM that has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Balloon {
    /// Memory that the guest has now, as the hypervisor counts it. It follows what was asked for as fast as the guest likes.
    pub current: Bytes,
    /// Memory that it has with nothing taken by the agent: what the operator gave it. Memory that is plugged in raises it.
    pub maximum: Bytes,
    /// The agent's limit, while it is in force.
    pub limit: Option<Bytes>,
    /// What the guest's driver said last; `None` while it never spoke.
    pub guest: Option<GuestMemory>,
}

/// Whose balloons a host's VMs have: what gives a VM one, and what of its guest tells how it fares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balloons {
    /// QEMU's device, and virtio's driver in the guest.
    #[default]
    Virtio,
    /// Xen's: no device, but a target in xenstore, which Xen's driver in the guest follows.
    Xen,
}

/// What a guest says of its memory. Counters are cumulative since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestMemory {
    /// How old this is at most, by the host's monotonic clock; `None` where that is not known: it was there at the first look.
    pub age: Option<Ns>,
    /// Memory that the guest's kernel manages: what it has less what its kernel image and page tables of boot take.
    pub total: Option<Bytes>,
    /// Memory that programs could still get without swapping (`MemAvailable`).
    pub usable: Option<Bytes>,
    /// Memory that nothing uses (`MemFree`).
    pub unused: Option<Bytes>,
    /// Read back from swap.
    pub swapped_in: Option<Bytes>,
    /// Written to swap.
    pub swapped_out: Option<Bytes>,
    /// Faults that needed a disk.
    pub major_faults: Option<u64>,
}

impl Balloon {
    /// Whether a balloon is where it should be: guests return and take memory in pieces.
    pub fn is_near(current: Bytes, wanted: Bytes) -> bool {
        current.0.abs_diff(wanted.0) <= 4 << 20
    }
}

impl Balloons {
    /// Whether these are virtio's. Recordings say only that others are not.
    pub fn is_virtio(&self) -> bool {
        *self == Balloons::Virtio
    }

    /// How a VM that has none gets one.
    pub fn how_to_get_one(self) -> &'static str {
        match self {
            Balloons::Virtio => {
                "put <memballoon model='virtio'/> into its <devices> (virsh edit), and start it anew"
            }
            Balloons::Xen => {
                "Xen gives one, up to `maxmem`, to a domain without video memory (HVM: vga = \"none\"), and its kernel needs Xen's driver \
                 (xen-balloon, CONFIG_XEN_BALLOON)"
            }
        }
    }

    /// What to look at where a guest's driver says nothing of its memory.
    pub fn why_silent(self) -> &'static str {
        match self {
            Balloons::Virtio => "is virtio_balloon loaded in the guest?",
            Balloons::Xen => {
                "Xen's (xen-balloon, CONFIG_XEN_BALLOON) never does, so nothing is taken; `xl mem-set` sets what it has, up to its `maxmem`"
            }
        }
    }
}

impl GuestMemory {
    /// The same, with nothing in it that cannot be: a guest has no more unused or usable memory than it has memory.
    #[must_use]
    pub fn bounded(self, current: Bytes) -> GuestMemory {
        let at_most = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.min(current));
        GuestMemory {
            total: at_most(self.total),
            usable: at_most(self.usable),
            unused: at_most(self.unused),
            ..self
        }
    }
}

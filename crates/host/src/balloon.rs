//! A VM's balloon: the guest's memory and its memory pressure.
//!
//! Everything that the guest's driver reports is untrusted. It may be old, absurd or meant to mislead: it must only affect
//! decisions about that guest ([`GuestMemory::bounded`]).

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The balloon of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Balloon {
    /// Memory that the guest has now, as the hypervisor counts it. It follows the target as fast as the guest likes.
    pub current: Bytes,
    /// Memory that it has without a limit of the agent: the operator's amount. Memory that is plugged in raises it.
    pub maximum: Bytes,
    /// The agent's limit, while it is in force.
    pub limit: Option<Bytes>,
    /// The last report of the guest's driver; `None` before the first.
    pub guest: Option<GuestMemory>,
}

/// A host's kind of balloons: how a VM gets one, and the source of guest reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balloons {
    /// QEMU's device, with virtio's driver in the guest.
    #[default]
    Virtio,
    /// Xen's: no device, but a target in xenstore that Xen's driver in the guest follows.
    Xen,
}

/// A guest's report on its memory. Counters are cumulative since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestMemory {
    /// Upper bound on the report's age, by the host's monotonic clock; `None` if the guest has sent no newer one since the first
    /// look.
    pub age: Option<Ns>,
    /// Memory that the guest's kernel manages: all of its memory less the kernel image and boot page tables.
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
    /// Whether a balloon is close enough to its target: guests return and take memory in pieces.
    pub fn is_near(current: Bytes, wanted: Bytes) -> bool {
        current.0.abs_diff(wanted.0) <= 4 << 20
    }
}

impl Balloons {
    /// Whether these are virtio's. Recordings only contain other kinds.
    pub fn is_virtio(&self) -> bool {
        *self == Balloons::Virtio
    }

    /// Returns how a VM without a balloon gets one.
    pub fn how_to_get_one(self) -> &'static str {
        match self {
            Balloons::Virtio => {
                "put <memballoon model='virtio'/> into its <devices> (virsh edit), and start it again"
            }
            Balloons::Xen => {
                "Xen gives one, up to `maxmem`, to a domain without video memory (HVM: vga = \"none\"), and its kernel needs Xen's driver \
                 (xen-balloon, CONFIG_XEN_BALLOON)"
            }
        }
    }

    /// Returns what to check if a guest's driver reports nothing.
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
    /// Returns the report without impossible values: a guest has no more unused or usable memory than it has memory.
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

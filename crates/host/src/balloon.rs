//! A VM's balloon: the guest's memory and its memory pressure.
//!
//! Everything that the guest's driver reports is untrusted: it may be outdated, absurd or meant to mislead. A report may only
//! affect decisions about the guest that sent it ([`GuestMemory::bounded`]).

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The balloon of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Balloon {
    /// Memory that the guest has now, as the hypervisor counts it. The guest decides how fast it follows its target.
    pub current: Bytes,
    /// Memory that the guest has if the agent sets no limit: the operator's amount. Plugging in memory raises it.
    pub maximum: Bytes,
    /// The agent's limit, while it is in force.
    pub limit: Option<Bytes>,
    /// The last report of the guest's driver; `None` before the first.
    pub guest: Option<GuestMemory>,
}

/// The kind of balloons on a host: how a VM gets one, and where guest reports come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balloons {
    /// QEMU's balloon device, with a virtio driver in the guest.
    #[default]
    Virtio,
    /// Xen's kind: no device, but a target in xenstore that Xen's driver in the guest follows.
    Xen,
}

/// A guest's report on its memory. Counters are cumulative since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestMemory {
    /// Upper bound on the report's age, by the host's monotonic clock. `None` if the guest has sent no new report since the agent
    /// first looked.
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
    /// Returns true if a balloon is close enough to its target. Guests return and take memory in pieces.
    pub fn is_near(current: Bytes, wanted: Bytes) -> bool {
        current.0.abs_diff(wanted.0) <= 4 << 20
    }
}

impl Balloons {
    /// Returns true for virtio balloons. Recordings leave this kind out, since it is the default.
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
                "a domain gets one, up to its `maxmem`, if it has no video memory (HVM: vga = \"none\") and its kernel has Xen's driver \
                 (xen-balloon, CONFIG_XEN_BALLOON)"
            }
        }
    }

    /// Returns what to check if a guest's driver reports nothing.
    pub fn why_silent(self) -> &'static str {
        match self {
            Balloons::Virtio => "is virtio_balloon loaded in the guest?",
            Balloons::Xen => {
                "Xen's (xen-balloon, CONFIG_XEN_BALLOON) never does, so no memory is taken; set its memory with `xl mem-set`, up to its `maxmem`"
            }
        }
    }
}

impl GuestMemory {
    /// Returns the report with impossible values cut: no amount exceeds the memory that the guest has.
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

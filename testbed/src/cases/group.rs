//! Groups of cases: the cases of a group share a boot of an emulated host, or need none.

use crate::outside::emulated::HostKind;

/// Cases that share a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// The host itself and the agent on it. The kernel's balancing is off unless a case turns it on.
    Agent,
    /// The agent with counters from a modelled PMU.
    Counted,
    /// Decisions and explanations of the agent that rest on counters. Run by name only, as a run takes a quarter of an hour.
    Arrange,
    /// Like [`Group::Arrange`], on a small version of a stock host: its nodes have two last-level caches, and its kernel
    /// balances. Run by name only.
    Caches,
    /// The stock kernel's own balancing. Run by name only.
    Balancing,
    /// `homenode evidence`, with guests of its own. Run by name only, as it takes half an hour.
    Evidence,
    /// A host on which the operator has configured bounds of all kinds, and an agent that acts for ten minutes.
    Bounds,
    /// Trackers of memory use, on a kernel with DAMON. Run by name only, as that kernel is not the stock one.
    Damon,
    /// Guests of a plain QEMU, under the plugin that logs pages. They need no emulated host.
    Pages,
    /// The guest's kernel module, in guests of a plain QEMU. They need no emulated host.
    Module,
    /// Like [`Group::Module`], on kernels that `scripts/testbed-kernel.sh` fetches. Run by name only.
    Kernels,
    /// The cost of the plugin that logs pages. Run by name only.
    Speed,
    /// Programs that `scripts/testbed-setup.sh --programs` installs, under the plugin that logs pages. Run by name only.
    Programs,
    /// Facts about libvirt, the kernel and the emulation, recorded but not judged. Run by name only.
    Record,
    /// A Xen host, which `scripts/xen-setup.sh` makes. Run by name only.
    Xen,
    /// Like [`Group::Xen`], for cases that take minutes. Run by name only.
    XenLong,
    /// Facts about Xen hosts, recorded but not judged. Run by name only.
    XenRecord,
    /// A Xen host whose dom0 runs systemd. Run by name only.
    XenService,
    /// A Xen host with a modelled PMU. Run by name only.
    XenCounted,
}

impl Group {
    /// Returns the group's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Counted => "counted",
            Self::Arrange => "arrange",
            Self::Caches => "caches",
            Self::Balancing => "balancing",
            Self::Evidence => "evidence",
            Self::Bounds => "bounds",
            Self::Damon => "damon",
            Self::Pages => "pages",
            Self::Module => "module",
            Self::Kernels => "kernels",
            Self::Speed => "speed",
            Self::Programs => "programs",
            Self::Record => "record",
            Self::Xen => "xen",
            Self::XenLong => "xen-long",
            Self::XenRecord => "xen-record",
            Self::XenService => "xen-service",
            Self::XenCounted => "xen-counted",
        }
    }

    /// Whether the group's cases run only when they are named.
    pub(super) fn is_by_name(self) -> bool {
        matches!(
            self,
            Self::Arrange
                | Self::Balancing
                | Self::Caches
                | Self::Damon
                | Self::Evidence
                | Self::Kernels
                | Self::Programs
                | Self::Record
                | Self::Speed
                | Self::Xen
                | Self::XenLong
                | Self::XenRecord
                | Self::XenService
                | Self::XenCounted
        )
    }

    /// Returns the kind of emulated host that the group needs; `None` if it needs none.
    #[must_use]
    pub fn host_kind(self) -> Option<HostKind> {
        match self {
            Self::Agent | Self::Record => Some(HostKind::Plain),
            Self::Counted | Self::Arrange => Some(HostKind::Counted),
            Self::Caches => Some(HostKind::Caches),
            Self::Balancing | Self::Evidence => Some(HostKind::TwoNodes),
            Self::Bounds => Some(HostKind::Bounds),
            Self::Damon => Some(HostKind::Damon),
            Self::Xen | Self::XenLong | Self::XenRecord => Some(HostKind::Xen),
            Self::XenService => Some(HostKind::XenService),
            Self::XenCounted => Some(HostKind::XenCounted),
            Self::Pages | Self::Module | Self::Kernels | Self::Speed | Self::Programs => None,
        }
    }
}

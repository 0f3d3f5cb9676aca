//! What cases share: a boot of an emulated host, or none.

use crate::outside::emulated::HostKind;

/// Cases that share a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// The host itself and the agent on it, with the kernel's balancing off except where a case turns it on.
    Agent,
    /// The agent with counters from a modelled PMU.
    Counted,
    /// What the agent decides and explains from counters: run by name only, as a run takes a quarter of an hour.
    Arrange,
    /// The same on a small version of a stock host, whose nodes have two last-level caches and whose kernel balances: run by
    /// name only.
    Caches,
    /// What the stock kernel's balancing does: run by name only.
    Balancing,
    /// An operator's settings of all kinds, on a configured host: ten minutes of an agent that acts.
    Bounds,
    /// Trackers of memory use, on a kernel with DAMON: run by name only, as that kernel is not the stock one.
    Damon,
    /// Guests of a plain QEMU, under the plugin that logs pages: no emulated host.
    Pages,
    /// The guest's kernel module in guests of a plain QEMU: no emulated host.
    Module,
    /// Like [`Group::Module`], on kernels that `scripts/testbed-kernel.sh` fetches: run by name only.
    Kernels,
    /// The cost of the plugin that logs pages: run by name only.
    Speed,
    /// Programs that `scripts/testbed-setup.sh --programs` installs, under that plugin: run by name only.
    Programs,
    /// Findings about libvirt, the kernel and the emulation: run by name only.
    Record,
    /// A Xen host, which `scripts/xen-setup.sh` makes: run by name only.
    Xen,
    /// Like [`Group::Xen`], cases of minutes: run by name only.
    XenLong,
    /// Findings there that are not judged: run by name only.
    XenRecord,
    /// A Xen host whose dom0 has systemd: run by name only.
    XenService,
    /// A Xen host with a modelled PMU: run by name only.
    XenCounted,
}

impl Group {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Counted => "counted",
            Self::Arrange => "arrange",
            Self::Caches => "caches",
            Self::Balancing => "balancing",
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

    /// Whether its cases run only when they are named.
    pub(super) fn is_by_name(self) -> bool {
        matches!(
            self,
            Self::Arrange
                | Self::Balancing
                | Self::Caches
                | Self::Damon
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

    /// The emulated host that it needs, if it needs one.
    #[must_use]
    pub fn host_kind(self) -> Option<HostKind> {
        match self {
            Self::Agent | Self::Record => Some(HostKind::Plain),
            Self::Counted | Self::Arrange => Some(HostKind::Counted),
            Self::Caches => Some(HostKind::Caches),
            Self::Balancing => Some(HostKind::TwoNodes),
            Self::Bounds => Some(HostKind::Bounds),
            Self::Damon => Some(HostKind::Damon),
            Self::Xen | Self::XenLong | Self::XenRecord => Some(HostKind::Xen),
            Self::XenService => Some(HostKind::XenService),
            Self::XenCounted => Some(HostKind::XenCounted),
            Self::Pages | Self::Module | Self::Kernels | Self::Speed | Self::Programs => None,
        }
    }
}

//! The contract between the control loop and a host.
//!
//! ```text
//!            Sample (raw counters)                    Plan (actions + reasons)
//!   host ──────────────────────────▶  control loop ──────────────────────────▶ host
//!                                          │ Rates::between(prev, cur)            │ commit(plan) -> Receipt | Refusal
//!                                          ▼
//!                                     View ─▶ policy::* (pure)
//! ```
//!
//! A host says what it sees ([`Sample`]: cumulative counters and states, nothing derived) and carries out
//! what a [`Plan`] asks for. Rates are derived in one pure place ([`Rates::between`]). A policy reads a
//! [`View`]. The twin and the live host both pass [`conformance`]. What of a VM's memory is in use comes from *trackers*, in
//! observations of their own ([`observation`]).

mod action;
mod balloon;
mod bell;
mod check;
pub mod conformance;
mod kernel;
mod limit;
mod local_migration;
pub mod observation;
mod plan;
mod rates;
mod refusal;
mod sample;
mod topology;
mod view;

pub use action::{Act, Action, FrameMove, Lever, WINDOW_MAX, WINDOW_MIN};
pub use balloon::{Balloon, Balloons, GuestMemory};
pub use bell::Bell;
pub use kernel::{KernelSettings, NumaBalancing, NumaScanning, TransparentHugePages};
pub use limit::{CpuQuota, Limit, Percent};
pub use local_migration::{Allow, LocalMigration};
pub use plan::{Decision, Finding, Outcome, Plan, Receipt};
pub use rates::{LINE_BYTES, LinkRates, NodeRates, Rates, VcpuRates, VmRates, imbalance};
pub use refusal::{ActionError, Failure, Impossible, Refusal};
pub use sample::{
    Accesses, CountedBy, Counters, CpuSample, HugeMemory, HugePages, Immovable, LinkSample, Management, Mode,
    NodeSample, PageUse, Sample, Setting, VcpuSample, Version, VmSample, VmSettings,
};
pub use topology::{GuestTopology, Published, VirtualNode};
pub use view::{Barred, CPUS_SETTLE, HandsOff, View, VmView};

use homenode_machine::Machine;
use homenode_units::{Ns, VmId};

/// A host that runs VMs: the twin, or a real one.
pub trait Host {
    /// What the host is. Does not change while the host value lives.
    fn machine(&self) -> &Machine;

    /// Lets `period` pass: a real host sleeps, the twin simulates that long. Says how long that was: less where it was woken.
    fn wait(&mut self, period: Ns) -> Ns;

    /// What the host sees now.
    ///
    /// # Errors
    /// When the host cannot be read at all. A VM that vanishes while being read is simply not in the sample, and a
    /// counter that is missing is `None`.
    fn sample(&mut self) -> Result<Sample, HostError>;

    /// Carries out a plan, or refuses all of it. Refused means that nothing was done.
    ///
    /// # Errors
    /// See [`Refusal`]. What goes wrong while acting is not a refusal: it is in the [`Receipt`].
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal>;

    /// Sets something of a VM from now on: an operator's word, not a policy's. It lives with the VM as its other settings do,
    /// and is in the next sample's.
    ///
    /// # Errors
    /// When the VM is gone, or the host cannot keep it.
    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError>;

    /// Sets several things at once where `holds` of what is stored of the VM's settings when that is done, under the lock that
    /// it is done under; false, and nothing is set, where it does not. The default is for hosts whose settings their caller
    /// alone sets: the caller has asked by then.
    ///
    /// # Errors
    /// As for [`Host::set`].
    fn set_where(
        &mut self,
        vm: VmId,
        settings: &[Setting],
        _holds: &dyn Fn(&VmSettings) -> bool,
    ) -> Result<bool, ActionError> {
        settings.iter().try_for_each(|setting| self.set(vm, *setting))?;
        Ok(true)
    }
}

impl<H: Host + ?Sized> Host for Box<H> {
    fn machine(&self) -> &Machine {
        (**self).machine()
    }
    fn wait(&mut self, period: Ns) -> Ns {
        (**self).wait(period)
    }
    fn sample(&mut self) -> Result<Sample, HostError> {
        (**self).sample()
    }
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal> {
        (**self).commit(plan)
    }
    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        (**self).set(vm, setting)
    }
    fn set_where(
        &mut self,
        vm: VmId,
        settings: &[Setting],
        holds: &dyn Fn(&VmSettings) -> bool,
    ) -> Result<bool, ActionError> {
        (**self).set_where(vm, settings, holds)
    }
}

/// Why a host could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The hypervisor's management service does not answer; the loop tries again.
    #[error("{service} does not answer: {cause}; the agent keeps trying, VMs run on undisturbed")]
    Unreachable {
        /// Which service, with its address (`libvirt at qemu:///system`).
        service: String,
        /// What it or the system said.
        cause: String,
    },
    /// Something the agent must read is unreadable or malformed.
    #[error("cannot read {path}: {cause}")]
    Unreadable {
        /// The file.
        path: String,
        /// What went wrong, and what was expected.
        cause: String,
    },
}

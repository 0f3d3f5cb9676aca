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
//! A host reports its state ([`Sample`]: cumulative counters and states, nothing derived) and carries out a [`Plan`]. Rates
//! are derived in one pure place ([`Rates::between`]). A policy reads a [`View`]. The twin and the live host both pass
//! [`conformance`]. *Trackers* report a VM's memory use, in separate observations ([`observation`]).

mod action;
mod balloon;
mod check;
pub mod conformance;
mod event;
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
mod wake_signal;

pub use action::{Act, Action, FrameMove, Lever, WINDOW_MAX, WINDOW_MIN};
pub use balloon::{Balloon, Balloons, GuestMemory};
pub use event::EventRecord;
pub use kernel::{KernelSettings, NumaBalancing, NumaScanning, TransparentHugePages};
pub use limit::{CpuQuota, Limit, Percent};
pub use local_migration::{Allow, LocalMigration};
pub use plan::{Decision, Finding, Outcome, Plan, Receipt};
pub use rates::{LINE_BYTES, LinkRates, NodeRates, Rates, VcpuRates, VmRates, imbalance};
pub use refusal::{ActionError, Failure, Impossible, Refusal};
pub use sample::{
    Accesses, CountedBy, Counters, CpuSample, HugeMemory, HugePages, Immovable, LinkSample, Management, Mode,
    NodeSample, PageUse, Sample, Setting, UnknownMode, VcpuSample, Version, VmSample, VmSettings,
};
pub use topology::{GuestTopology, Published, VirtualNode};
pub use view::{Barred, CPUS_SETTLE, HandsOff, View, VmView};
pub use wake_signal::WakeSignal;

use homenode_machine::Machine;
use homenode_units::{Ns, VmId};

/// Whether a VM's stored settings allow a change.
pub type Holds<'a> = &'a dyn Fn(&VmSettings) -> bool;

/// A host that runs VMs: the twin, or a real one.
pub trait Host {
    /// Returns the host's hardware, which does not change while the host value lives.
    fn machine(&self) -> &Machine;

    /// Lets `period` pass: a real host sleeps, the twin simulates that long. Returns the time passed: less if it was woken.
    fn wait(&mut self, period: Ns) -> Ns;

    /// Returns the host's present state.
    ///
    /// # Errors
    /// If the host cannot be read at all. A VM that vanishes while being read is simply not in the sample, and a missing
    /// counter is `None`.
    fn sample(&mut self) -> Result<Sample, HostError>;

    /// Carries out a plan, or refuses all of it. After a refusal nothing was done.
    ///
    /// # Errors
    /// See [`Refusal`]. Errors while acting are not a refusal: they are in the [`Receipt`].
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal>;

    /// Sets a setting of a VM by an operator's order, not a policy's. It lives with the VM like its other settings, and is in
    /// the next sample's.
    ///
    /// # Errors
    /// If the VM left, or the host cannot store it.
    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        self.set_where(vm, &[setting], &|_| true).map(drop)
    }

    /// Sets several settings at once if `holds` accepts the VM's stored settings, under the lock that covers the change;
    /// otherwise returns false, and sets nothing. A host whose settings only its caller changes need not ask `holds`: the
    /// caller has checked by then.
    ///
    /// # Errors
    /// As for [`Host::set`].
    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError>;
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
    fn set_where(&mut self, vm: VmId, settings: &[Setting], holds: Holds<'_>) -> Result<bool, ActionError> {
        (**self).set_where(vm, settings, holds)
    }
}

/// Why a host could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The hypervisor's management service does not answer; the loop tries again.
    #[error("{service} does not answer: {cause}; the agent keeps trying, VMs run on undisturbed")]
    Unreachable {
        /// The service, with its address (`libvirt at qemu:///system`).
        service: String,
        /// The error of the service or the system.
        cause: String,
    },
    /// Something the agent must read is unreadable or malformed.
    #[error("cannot read {path}: {cause}")]
    Unreadable {
        /// The file.
        path: String,
        /// The error, and what was expected.
        cause: String,
    },
}

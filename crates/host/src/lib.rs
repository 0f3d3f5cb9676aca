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
//! A host reports its state as a [`Sample`] (cumulative counters and states, nothing derived) and carries out a [`Plan`]. Only
//! [`Rates::between`], a pure function, derives rates. A policy reads a [`View`]. Both the simulator and the live host pass
//! [`conformance`]. *Trackers* report a VM's memory use, in separate observations ([`observation`]).

mod action;
mod balloon;
mod check;
pub mod conformance;
mod event;
mod home;
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
pub use home::HomeInForce;
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

/// A condition on a VM's stored settings: returns true if they allow a change.
pub type Holds<'a> = &'a dyn Fn(&VmSettings) -> bool;

/// A host that runs VMs: a simulated host, or a real one.
pub trait Host {
    /// Returns the host's hardware, which does not change while the host value lives.
    fn machine(&self) -> &Machine;

    /// Lets `period` pass: a real host sleeps, and the simulator simulates that time. Returns the time that passed, which is less
    /// if the host was woken.
    fn wait(&mut self, period: Ns) -> Ns;

    /// Returns the host's present state.
    ///
    /// # Errors
    /// If the host cannot be read at all. A VM that vanishes during the read is left out of the sample, and a missing counter is
    /// `None`.
    fn sample(&mut self) -> Result<Sample, HostError>;

    /// Carries out a plan, or refuses all of it. A refused plan changes nothing.
    ///
    /// # Errors
    /// See [`Refusal`]. Errors while acting are not a refusal: they are in the [`Receipt`].
    fn commit(&mut self, plan: &Plan) -> Result<Receipt, Refusal>;

    /// Changes a setting of a VM because an operator ordered it, not a policy. The setting lives with the VM like its other
    /// settings, and the next sample shows it.
    ///
    /// # Errors
    /// If the VM is gone, or the host cannot store the setting.
    fn set(&mut self, vm: VmId, setting: Setting) -> Result<(), ActionError> {
        self.set_where(vm, &[setting], &|_| true).map(drop)
    }

    /// Changes several settings at once if `holds` accepts the VM's stored settings; otherwise changes nothing and returns false.
    /// One lock covers both the question and the change. If only the caller can change a host's settings, the host need not ask
    /// `holds`, since the caller has already checked.
    ///
    /// # Errors
    /// If the VM is gone, or the host cannot store the setting.
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
    /// The hypervisor's management service does not answer. The control loop tries again.
    #[error("{service} does not answer: {cause}; the agent keeps trying, and VMs keep running")]
    Unreachable {
        /// The service, with its address (`libvirt at qemu:///system`).
        service: String,
        /// The service's or the system's error.
        cause: String,
    },
    /// A file that the agent must read is unreadable or malformed.
    #[error("cannot read {path}: {cause}")]
    Unreadable {
        /// The file.
        path: String,
        /// The error, and what was expected.
        cause: String,
    },
}

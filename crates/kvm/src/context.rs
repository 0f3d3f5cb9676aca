//! What the code that changes VMs needs from its host. Each kind of change that can be undone is a lever.

use std::collections::BTreeMap;
use std::path::PathBuf;

use homenode_host::WakeSignal;
use homenode_kernel::task::{self, Process};
use homenode_machine::Machine;
use homenode_undo::heartbeat::Heartbeat;
use homenode_undo::journal::Journal;
use homenode_undo::notices::Notices;
use homenode_units::{CpuSet, Ns, VmId};

use crate::manager::Manager;
use crate::mark::Marks;
use crate::topology_pages::TopologyPages;

/// Everything that a lever needs from its host except the VM, which it gets separately.
pub(crate) struct HostContext {
    pub manager: Box<dyn Manager>,
    /// `None` in a dry run.
    pub journal: Option<Journal>,
    /// Changes recorded in VMs' own metadata.
    pub marks: Marks,
    /// Root of `/proc`, `/sys` and `/run`.
    pub root: PathBuf,
    pub machine: Machine,
    /// CPUs of the machine that were offline in the last sample.
    pub offline: CpuSet,
    /// CPUs that the operator keeps for the host.
    pub reserved_cpus: CpuSet,
    /// Ends page moves early.
    pub wake_signal: WakeSignal,
    /// Tells the guard that the agent is alive.
    pub heartbeat: Heartbeat,
    /// The topology pages, from which guests read which nodes they run on.
    pub topology: TopologyPages,
    /// Why it is not known which node uses a page, as of the last sample.
    pub no_page_uses: Option<String>,
    /// CPUs to which the plan that is carried out pins vCPUs, by VM.
    pub pinned_with_home: BTreeMap<VmId, CpuSet>,
    notices: Notices,
    /// Until this time, a changed affinity counts as the kernel's doing, because CPUs went offline or came back.
    pub kernels_until: Ns,
}

impl HostContext {
    pub(crate) fn new(
        manager: Box<dyn Manager>,
        journal: Option<Journal>,
        root: PathBuf,
        (machine, reserved_cpus): (Machine, CpuSet),
        (wake_signal, heartbeat): (WakeSignal, Heartbeat),
        topology: TopologyPages,
    ) -> HostContext {
        HostContext {
            manager,
            journal,
            marks: Marks::new(&root),
            root,
            machine,
            offline: CpuSet::new(),
            reserved_cpus,
            wake_signal,
            heartbeat,
            topology,
            no_page_uses: None,
            pinned_with_home: BTreeMap::new(),
            notices: Notices::default(),
            kernels_until: Ns::ZERO,
        }
    }

    /// Adds a notice for the operator. Reports each notice once, or again if it was old and has been forgotten.
    pub(crate) fn notice(&mut self, text: String) {
        self.notices.add(text);
    }

    /// Takes the notices that were not reported yet.
    pub(crate) fn take_notices(&mut self) -> Vec<String> {
        self.notices.take()
    }

    /// Whether work on a VM should continue. Sends a heartbeat.
    pub(crate) fn goes_on(&self, process: Process) -> bool {
        self.heartbeat.beat();
        !self.wake_signal.is_stopping() && task::is_alive(&self.root, process)
    }
}

//! What levers of VMs are pulled with.

use std::path::PathBuf;

use homenode_host::Bell;
use homenode_kernel::task::{self, Process};
use homenode_machine::Machine;
use homenode_undo::beat::Beat;
use homenode_undo::journal::Journal;
use homenode_undo::notices::Notices;
use homenode_units::{CpuSet, Ns};

use crate::manager::Manager;
use crate::mark::Marks;
use crate::topology_pages::TopologyPages;

/// What a lever needs of its host: all but the VMs, of which it is given its own.
pub(crate) struct Hands {
    pub manager: Box<dyn Manager>,
    /// Absent in a dry run.
    pub journal: Option<Journal>,
    /// What VMs' own metadata says.
    pub marks: Marks,
    /// Root of `/proc`, `/sys` and `/run`.
    pub root: PathBuf,
    pub machine: Machine,
    /// CPUs of the machine that were offline in the last sample.
    pub offline: CpuSet,
    /// CPUs that the operator keeps for the host.
    pub reserved_cpus: CpuSet,
    /// Ends moving early.
    pub bell: Bell,
    /// Tells the guard that the agent goes on.
    pub beat: Beat,
    /// Where guests are told where they are.
    pub topology: TopologyPages,
    /// Why nobody is known to use a page, as of the last sample.
    pub no_page_uses: Option<String>,
    notices: Notices,
    /// Until when another affinity is the kernel's doing: CPUs went offline, or came back.
    pub kernels_until: Ns,
}

impl Hands {
    pub fn new(
        manager: Box<dyn Manager>,
        journal: Option<Journal>,
        root: PathBuf,
        (machine, reserved_cpus): (Machine, CpuSet),
        (bell, beat): (Bell, Beat),
        topology: TopologyPages,
    ) -> Hands {
        Hands {
            manager,
            journal,
            marks: Marks::new(&root),
            root,
            machine,
            offline: CpuSet::new(),
            reserved_cpus,
            bell,
            beat,
            topology,
            no_page_uses: None,
            notices: Notices::default(),
            kernels_until: Ns::ZERO,
        }
    }

    /// Tells the operator something, once. What was said long ago, and much else since, may be told again.
    pub fn notice(&mut self, text: String) {
        self.notices.add(text);
    }

    /// What is to be told and was not yet.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.notices.take()
    }

    /// Whether work on a VM is still worth going on with.
    pub fn goes_on(&self, process: Process) -> bool {
        self.beat.beat();
        !self.bell.is_stopping() && task::is_alive(&self.root, process)
    }
}

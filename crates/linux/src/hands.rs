//! What levers of VMs are pulled with.

use std::collections::BTreeSet;
use std::path::PathBuf;

use homenode_host::Bell;
use homenode_machine::Machine;

use crate::guard::Beat;
use crate::journal::Journal;
use crate::libvirt::Libvirt;
use crate::task::{self, Process};
use crate::topology_pages::TopologyPages;

/// Notices that are remembered in order to be said once.
const SAID_MAX: usize = 4096;

/// What a lever needs of its host: all but the VMs, of which it is given its own.
pub(crate) struct Hands {
    pub libvirt: Libvirt,
    /// Absent in a dry run.
    pub journal: Option<Journal>,
    /// Root of `/proc`, `/sys` and `/run`.
    pub root: PathBuf,
    pub machine: Machine,
    /// Ends moving early.
    pub bell: Bell,
    /// Tells the guard that the agent goes on.
    pub beat: Beat,
    /// Where guests are told where they are.
    pub topology: TopologyPages,
    /// Why nobody is known to use a page, as of the last sample.
    pub no_page_uses: Option<String>,
    said: BTreeSet<String>,
    notices: Vec<String>,
}

impl Hands {
    pub fn new(
        libvirt: Libvirt,
        journal: Option<Journal>,
        root: PathBuf,
        machine: Machine,
        (bell, beat): (Bell, Beat),
        topology: TopologyPages,
    ) -> Hands {
        Hands {
            libvirt,
            journal,
            root,
            machine,
            bell,
            beat,
            topology,
            no_page_uses: None,
            said: BTreeSet::new(),
            notices: Vec::new(),
        }
    }

    /// Tells the operator something, once.
    pub fn notice(&mut self, text: String) {
        if self.said.len() < SAID_MAX && self.said.insert(text.clone()) {
            self.notices.push(text);
        }
    }

    /// What is to be told and was not yet.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Whether work on a VM is still worth going on with.
    pub fn goes_on(&self, process: Process) -> bool {
        self.beat.beat();
        !self.bell.is_stopping() && task::is_alive(&self.root, process)
    }
}

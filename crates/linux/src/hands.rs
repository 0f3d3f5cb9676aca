//! What levers of VMs are pulled with.

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;

use homenode_host::Bell;
use homenode_machine::Machine;
use homenode_units::Ns;

use crate::beat::Beat;
use crate::journal::Journal;
use crate::manager::Manager;
use crate::mark::Marks;
use crate::task::{self, Process};
use crate::topology_pages::TopologyPages;

/// Notices that are remembered in order to be said once; some for each VM of a large host.
const SAID_MAX: usize = 32_768;
/// Notices that wait to be told.
const WAITING_MAX: usize = 4096;

/// What the operator is told, each once as long as it is remembered. A host that has ever more to say is heard on: the oldest
/// makes room.
#[derive(Debug, Default)]
struct Notices {
    said: BTreeSet<String>,
    /// The same by age, the oldest first.
    by_age: VecDeque<String>,
    waiting: VecDeque<String>,
    /// Those that made room before they were told.
    dropped_count: u64,
}

impl Notices {
    fn add(&mut self, text: String) {
        if !self.said.insert(text.clone()) {
            return;
        }
        self.by_age.push_back(text.clone());
        if self.by_age.len() > SAID_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.said.remove(&oldest);
        }
        self.waiting.push_back(text);
        if self.waiting.len() > WAITING_MAX {
            self.waiting.pop_front();
            self.dropped_count += 1;
        }
    }

    fn take(&mut self) -> Vec<String> {
        let dropped = match std::mem::take(&mut self.dropped_count) {
            0 => None,
            1 => Some("one notice before these was dropped: more came at once than are kept".to_owned()),
            count => Some(format!(
                "{count} notices before these were dropped: more came at once than are kept"
            )),
        };
        dropped.into_iter().chain(self.waiting.drain(..)).collect()
    }
}

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
        machine: Machine,
        (bell, beat): (Bell, Beat),
        topology: TopologyPages,
    ) -> Hands {
        Hands {
            manager,
            journal,
            marks: Marks::new(&root),
            root,
            machine,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_go_on_after_any_number_of_them() {
        let mut notices = Notices::default();
        for number in 0..3 * SAID_MAX {
            notices.add(format!("notice {number}"));
            assert_eq!(notices.take(), [format!("notice {number}")]);
        }
        let last = format!("notice {}", 3 * SAID_MAX - 1);
        notices.add(last);
        assert_eq!(notices.take(), Vec::<String>::new(), "said once");
        assert!(notices.said.len() <= SAID_MAX && notices.by_age.len() == notices.said.len());
    }

    #[test]
    fn of_too_many_notices_at_once_the_newest_are_told_and_the_others_counted() {
        let mut notices = Notices::default();
        for number in 0..WAITING_MAX + 3 {
            notices.add(format!("notice {number}"));
        }
        let told = notices.take();
        assert!(
            told[0].starts_with("3 notices before these were dropped"),
            "{}",
            told[0]
        );
        assert_eq!((told[1].as_str(), told.len()), ("notice 3", WAITING_MAX + 1));
        notices.add("another".into());
        assert_eq!(notices.take(), ["another"]);
    }
}

//! How many files each part of the agent may have open. The process has one limit for all, and clients, whoever they are, must
//! not take what the control loop reads the host with (`/proc`, counters, libvirt).

use rustix::process::{Resource, getrlimit};

/// A part of the agent that others, or many VMs, can have open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Clients of the agent's socket.
    Clients,
    /// Clients over HTTP, on one of the two ways.
    Http,
    /// Processes that have a topology page.
    TopologyPages,
    /// Files of the kernel that are kept open because they are read often.
    KeptOpen,
    /// Connections to monitors of QEMUs, out of what is left to the loop, in whose place they are asked.
    Monitors,
}

impl Part {
    /// One file of so many is this part's.
    const fn of(self) -> u64 {
        match self {
            Part::Clients | Part::TopologyPages => 4,
            Part::KeptOpen => 8,
            Part::Http | Part::Monitors => 16,
        }
    }

    /// How many files it may have open now, `most` at most and one at least.
    pub fn share(self, most: usize) -> usize {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.share_of(limit).clamp(1, most)
    }

    fn share_of(self, limit: u64) -> usize {
        usize::try_from(limit / self.of()).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_files_is_left_for_the_loop_whatever_clients_take() {
        for limit in [40, 256, 1024, 1 << 20] {
            let [clients, http, pages, kept] =
                [Part::Clients, Part::Http, Part::TopologyPages, Part::KeptOpen]
                    .map(|part| part.share_of(limit) as u64);
            assert!(clients + 2 * http + pages + kept <= limit / 4 * 3, "{limit}");
        }
        assert!(
            Part::Monitors.share_of(1024) <= 1024 / 4 / 4,
            "most of that quarter is the loop's own"
        );
        assert_eq!(Part::Clients.share(0x1), 1);
    }
}

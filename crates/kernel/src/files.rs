//! How many files each part of the agent may have open. The process has one limit for all parts. Clients must not use up the
//! files that the control loop needs to read the host (`/proc`, counters, libvirt).

use rustix::process::{Resource, getrlimit};

/// A part of the agent in which other programs, or many VMs, can make it open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Clients of the agent's socket.
    Clients,
    /// Clients over HTTP, for each of the two ways to connect.
    Http,
    /// Processes that have a topology page.
    TopologyPages,
    /// Kernel files kept open because they are read often.
    KeptOpen,
    /// Connections to QEMU monitors. They count against the loop's own part, since they are made for the loop.
    Monitors,
}

impl Part {
    /// Returns the divisor of the limit: the part may open one in this many files.
    const fn of(self) -> u64 {
        match self {
            Part::Clients | Part::TopologyPages => 4,
            Part::KeptOpen => 8,
            Part::Http | Part::Monitors => 16,
        }
    }

    /// Returns how many files the part may have open now, from one to `most`.
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

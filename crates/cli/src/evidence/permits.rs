//! Permits for VMs of this command, from the agent that acts here.
//!
//! The agent keeps a permit in a file of settings, which must not outlive this command. A guard removes it when this process has
//! ended, however it ended.

use std::path::Path;

use homenode_api::Request;
use homenode_api::answer::{Overview, PermitSet};
use homenode_evidence::measure::{Afterwards, Permits, THRASHER, THRASHER_UUID};
use homenode_units::Permit;

use crate::ask::ask_agent;

/// Where the agent keeps settings of VMs without libvirt.
const SETTINGS: &str = "/etc/homenode/vms";

/// The agent whose state is in a directory.
pub(super) struct OwnPermits<'a> {
    state: &'a Path,
    guard: Option<Afterwards>,
}

impl<'a> OwnPermits<'a> {
    /// Returns `None` if no agent answers.
    pub(super) fn of(state: &'a Path) -> Option<OwnPermits<'a>> {
        let answers: anyhow::Result<Overview> = ask_agent(state, &Request::Overview);
        answers.is_ok().then_some(OwnPermits { state, guard: None })
    }

    fn set(&self, vm: &str, permit: Option<Permit>) -> anyhow::Result<PermitSet> {
        let vm = vm.to_owned();
        ask_agent(self.state, &Request::PermitSet { vm, permit })
    }
}

/// Starts a guard that removes the permit's file of settings when this process has ended.
fn guard(settings: &str) -> std::io::Result<Afterwards> {
    let files = [THRASHER, THRASHER_UUID].map(|name| format!("{settings}/{name}.toml"));
    Afterwards::run("rm -f -- \"$@\"", files)
}

impl Permits for OwnPermits<'_> {
    fn book(&mut self, vm: &str, permit: Permit) -> bool {
        if self.guard.is_none() {
            self.guard = guard(SETTINGS).ok();
        }
        // Without a guard the permit could outlive this command.
        self.guard.is_some() && self.set(vm, Some(permit)).is_ok_and(|set| set.note.is_none())
    }

    fn give_up(&mut self, vm: &str) {
        // If the agent does not answer, the guard still removes the permit.
        let _ = self.set(vm, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_permits_file_goes_when_the_command_ends_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join(format!("{THRASHER_UUID}.toml"));
        let other = dir.path().join("web.toml");
        for path in [&own, &other] {
            std::fs::write(path, "permit = \"33k\"\n").unwrap();
        }
        let guard = guard(dir.path().to_str().unwrap()).unwrap();
        assert!(own.exists());
        drop(guard);
        assert!(!own.exists() && other.exists());
    }
}

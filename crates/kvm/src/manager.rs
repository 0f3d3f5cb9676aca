//! The manager of a host's VMs, which runs them and changes them for the agent: libvirt, or QEMU itself.
//!
//! Levers call a [`Manager`] and read the result back from the kernel; they do not know which one it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use homenode_host::{CpuQuota, GuestMemory, HostError, Immovable};
use homenode_kernel::cgroup::{CpuGroup, GroupError};
use homenode_kernel::read::ReadError;
use homenode_kernel::task::{Process, Thread};
use homenode_undo::journal::{Run, VcpuThread};
use homenode_units::{Bytes, CpuSet, NodeSet, VmId};
use homenode_vm_settings::Change;

use crate::domain::Domain;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// The manager does not answer.
    #[error("{0}")]
    Lost(String),
    /// The manager refused; if the VM has ended, that is why.
    #[error("{0}")]
    Refused(String),
    /// The manager's answer about the VM cannot be read.
    #[error("{0}")]
    Unclear(String),
}

impl From<GroupError> for CallError {
    fn from(error: GroupError) -> CallError {
        CallError::Refused(error.to_string())
    }
}

impl CallError {
    pub fn cause(&self) -> &str {
        match self {
            CallError::Lost(cause) | CallError::Refused(cause) | CallError::Unclear(cause) => cause,
        }
    }
}

/// Manager of a host's VMs; see the module.
pub(crate) trait Manager: std::fmt::Debug {
    /// VMs that run now.
    fn list(&mut self) -> Result<Vec<VmId>, CallError>;

    /// A VM's description. Returns the same value as long as nothing changes.
    fn describe(&mut self, vm: VmId) -> Result<Arc<Domain>, CallError>;

    /// The QEMU process of a VM; `None` if it has none.
    fn process(&mut self, domain: &Domain) -> Result<Option<Process>, ReadError>;

    /// Threads of a VM's process with their roles, ascending by id.
    fn threads(&mut self, run: &Run) -> Result<Vec<Thread>, ReadError>;

    /// Fills in roles of threads that neither their groups nor their names show.
    fn roles(&mut self, _run: &Run, _threads: &mut [Thread]) {}

    /// vCPU threads that only the manager could tell, since neither their groups nor their names do.
    fn told_vcpus(&self, _vm: VmId) -> BTreeMap<u16, VcpuThread> {
        BTreeMap::new()
    }

    /// Takes vCPU threads from the journal if they are not known.
    fn recall_vcpus(&mut self, _run: &Run, _vcpus: &BTreeMap<u16, VcpuThread>) {}

    /// Restoring begins, until VMs are listed again: no period waits, and calls may take longer.
    fn take_time(&mut self) {}

    /// CPUs that vCPUs were pinned to, by the agent or anyone else. `threads` are the VM's.
    fn pins(&mut self, domain: &Domain, threads: &[Thread]) -> BTreeMap<u16, CpuSet>;

    /// Whether a vCPU may run on these CPUs without having been pinned, although they are among the pins.
    fn is_unpinned(&self, _domain: &Domain, _cpus: &CpuSet) -> bool {
        false
    }

    /// Whether the pins it reports are the affinities in force, and not the requested ones.
    fn shows_affinities(&self) -> bool {
        false
    }

    /// Whether a new vCPU starts on the emulator's current CPUs, and the manager leaves it there.
    fn vcpus_inherit(&self) -> bool {
        false
    }

    /// Whether exactly this run of a VM is still known.
    fn knows(&mut self, run: &Run) -> Result<bool, CallError>;

    /// Whether a VM is known to have ended.
    fn is_gone(&mut self, vm: VmId) -> bool;

    /// Why a VM's memory should stay where it is for now, if so: it is paused, or between two hosts.
    fn standstill(&mut self, vm: VmId) -> Result<Option<Immovable>, CallError>;

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_emulator(&mut self, vm: VmId, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_iothread(&mut self, vm: VmId, id: u32, cpus: &CpuSet) -> Result<(), CallError>;

    /// Sets the nodes that a `restrictive` VM may take memory from.
    fn set_memory_nodes(&mut self, vm: VmId, nodes: &NodeSet) -> Result<(), CallError>;

    /// Changes the operator's stored settings as they are now, whatever [`Manager::describe`] returned last. Stores nothing
    /// and returns false if the change does not apply to them. After an error everything is unchanged.
    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError>;

    /// Replaces or removes the mark of a running VM.
    fn set_mark(&mut self, vm: VmId, element: Option<&str>) -> Result<(), CallError>;

    /// Checks that quotas can be set in these cgroups, where a VM's vCPUs are.
    ///
    /// # Errors
    /// Why not, as the end of a sentence.
    fn check_groups(&self, vm: VmId, groups: &[CpuGroup]) -> Result<(), CallError>;

    /// Sets every vCPU's quota, in these cgroups.
    fn hold(&mut self, vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError>;

    /// Restores every vCPU's former quota, or none. `held` are the cgroups that hold the agent's.
    fn lift(&mut self, vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError>;

    /// Memory that a VM's balloon leaves its guest now, or is about to.
    fn memory_now(&mut self, vm: VmId) -> Result<Bytes, CallError> {
        Ok(self.describe(vm)?.memory_current_bytes)
    }

    /// Sets the memory that a VM's balloon leaves its guest. The balloon follows at its own pace.
    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<(), CallError>;

    /// Sets how often a guest is asked for memory statistics; 0 for never.
    fn set_stats_period(&mut self, vm: VmId, seconds: u32) -> Result<(), CallError>;

    /// The last report of the guest's driver, and its time in seconds by the wall clock; `None` if there was none. The time
    /// tells reports apart, not their age: the clock may have been set since.
    fn guest_memory(&mut self, vm: VmId) -> Result<Option<(u64, GuestMemory)>, CallError>;

    /// The error for a host whose manager is away.
    fn unreachable(&self, cause: &str) -> HostError;

    /// Notices for the operator about VMs that are left out, or what is unknown about them.
    fn take_notices(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The manager of most tests.
    #[cfg(test)]
    fn libvirt(&mut self) -> &mut crate::libvirt::Libvirt {
        unreachable!("these VMs are not libvirt's")
    }
}

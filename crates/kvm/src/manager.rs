//! The manager of a host's VMs, which runs them and changes them for the agent: libvirt, or QEMU itself.
//!
//! Levers call a [`Manager`] and read the result back from the kernel. They do not know which manager it is.

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
    /// The manager refused the call, perhaps because the VM has ended.
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
    pub(crate) fn cause(&self) -> &str {
        match self {
            CallError::Lost(cause) | CallError::Refused(cause) | CallError::Unclear(cause) => cause,
        }
    }
}

/// The manager of a host's VMs, as the module describes.
pub(crate) trait Manager: std::fmt::Debug {
    /// VMs that run now.
    fn list(&mut self) -> Result<Vec<VmId>, CallError>;

    /// A VM's description. Returns the same value as long as nothing changes.
    fn describe(&mut self, vm: VmId) -> Result<Arc<Domain>, CallError>;

    /// The QEMU process of a VM; `None` if it has none.
    fn process(&mut self, domain: &Domain) -> Result<Option<Process>, ReadError>;

    /// Threads of a VM's process with their roles, ascending by id.
    fn threads(&mut self, run: &Run) -> Result<Vec<Thread>, ReadError>;

    /// Fills in the roles of threads whose groups and names do not show them.
    fn roles(&mut self, _run: &Run, _threads: &mut [Thread]) {}

    /// Returns the vCPU threads that only the manager could identify, because their groups and names do not show the role.
    fn told_vcpus(&self, _vm: VmId) -> BTreeMap<u16, VcpuThread> {
        BTreeMap::new()
    }

    /// Uses the journal's vCPU threads if the manager does not know the threads.
    fn recall_vcpus(&mut self, _run: &Run, _vcpus: &BTreeMap<u16, VcpuThread>) {}

    /// Allows calls to take longer, from the start of restoring until VMs are listed again: no sampling period waits meanwhile.
    fn take_time(&mut self) {}

    /// Returns the CPUs to which vCPUs are pinned, by the agent or others. `threads` are the VM's.
    fn pins(&mut self, domain: &Domain, threads: &[Thread]) -> BTreeMap<u16, CpuSet>;

    /// Whether a vCPU that may run on these CPUs is unpinned, although [`Manager::pins`] lists it.
    fn is_unpinned(&self, _domain: &Domain, _cpus: &CpuSet) -> bool {
        false
    }

    /// Whether [`Manager::pins`] reports the affinities in force instead of the requested ones.
    fn shows_affinities(&self) -> bool {
        false
    }

    /// Whether a new vCPU starts on the emulator's current CPUs, and the manager leaves it there.
    fn vcpus_inherit(&self) -> bool {
        false
    }

    /// Whether the manager still knows exactly this run of a VM.
    fn knows(&mut self, run: &Run) -> Result<bool, CallError>;

    /// Whether the manager knows that a VM has ended.
    fn is_gone(&mut self, vm: VmId) -> bool;

    /// Why a VM's memory should not be moved for now: it is paused, or between two hosts. `None` if it may be moved.
    fn standstill(&mut self, vm: VmId) -> Result<Option<Immovable>, CallError>;

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_emulator(&mut self, vm: VmId, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_iothread(&mut self, vm: VmId, id: u32, cpus: &CpuSet) -> Result<(), CallError>;

    /// Sets the nodes from which a `restrictive` VM may take memory.
    fn set_memory_nodes(&mut self, vm: VmId, nodes: &NodeSet) -> Result<(), CallError>;

    /// Changes the operator's settings as they are stored now, even if [`Manager::describe`] returned others. Stores nothing and
    /// returns false if the change does not apply to them. An error leaves everything unchanged.
    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError>;

    /// Replaces or removes the mark of a running VM.
    fn set_mark(&mut self, vm: VmId, element: Option<&str>) -> Result<(), CallError>;

    /// Checks that quotas can be set in these cgroups, which contain a VM's vCPUs.
    ///
    /// # Errors
    /// Why quotas cannot be set, as the end of a sentence.
    fn check_groups(&self, vm: VmId, groups: &[CpuGroup]) -> Result<(), CallError>;

    /// Sets every vCPU's quota, in these cgroups.
    fn hold(&mut self, vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError>;

    /// Restores every vCPU's former quota, or no quota. `held` are the cgroups that have the agent's quota.
    fn lift(&mut self, vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError>;

    /// Returns the memory that a VM's balloon leaves the guest now, or will soon.
    fn memory_now(&mut self, vm: VmId) -> Result<Bytes, CallError> {
        Ok(self.describe(vm)?.memory_current_bytes)
    }

    /// Sets the memory that a VM's balloon leaves its guest. The balloon follows at its own pace.
    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<(), CallError>;

    /// Sets how often a guest is asked for memory statistics; 0 for never.
    fn set_stats_period(&mut self, vm: VmId, seconds: u32) -> Result<(), CallError>;

    /// Returns the guest driver's last report, and its wall-clock time in seconds; `None` if there was no report. The time only
    /// tells reports apart: it does not show their age, since the clock may have been set since.
    fn guest_memory(&mut self, vm: VmId) -> Result<Option<(u64, GuestMemory)>, CallError>;

    /// The error for a host whose manager is away.
    fn unreachable(&self, cause: &str) -> HostError;

    /// Takes notices for the operator about VMs that are left out or only partly known.
    fn take_notices(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The libvirt manager, which most tests use.
    #[cfg(test)]
    fn libvirt(&mut self) -> &mut crate::libvirt::Libvirt {
        unreachable!("these VMs are not libvirt's")
    }
}

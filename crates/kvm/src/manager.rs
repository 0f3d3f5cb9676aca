//! Who runs a host's VMs and changes them for the agent: libvirt, or QEMU itself where nothing stands between.
//!
//! Levers ask a [`Manager`] and read back from the kernel what became of it; they do not know which one it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use homenode_host::{CpuQuota, GuestMemory, HostError, Immovable};
use homenode_kernel::cgroup::CpuGroup;
use homenode_kernel::read::ReadError;
use homenode_kernel::task::{Process, Thread};
use homenode_undo::journal::{Run, VcpuThread};
use homenode_units::{Bytes, CpuSet, NodeSet, VmId};
use homenode_vm_settings::Change;

use crate::domain::Domain;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    /// Who manages the VMs does not answer.
    Lost(String),
    /// It said no; where the VM has ended, that is why.
    Refused(String),
    /// What it says of the VM cannot be read.
    Unclear(String),
}

impl CallError {
    pub fn cause(&self) -> &str {
        match self {
            CallError::Lost(cause) | CallError::Refused(cause) | CallError::Unclear(cause) => cause,
        }
    }
}

/// See the module.
pub(crate) trait Manager: std::fmt::Debug {
    /// VMs that run now.
    fn list(&mut self) -> Result<Vec<VmId>, CallError>;

    /// What a VM is and how it was set up. As long as nothing of it changes, the same value is given again.
    fn describe(&mut self, vm: VmId) -> Result<Arc<Domain>, CallError>;

    /// The QEMU process of a VM; `None` where it has none.
    fn process(&mut self, domain: &Domain) -> Result<Option<Process>, ReadError>;

    /// What the threads of a VM's process do, ascending by id.
    fn threads(&mut self, run: &Run) -> Result<Vec<Thread>, ReadError>;

    /// Fills in what threads of a VM do that tell it neither by their groups nor by their names.
    fn roles(&mut self, _run: &Run, _threads: &mut [Thread]) {}

    /// Threads that run vCPUs, where neither their groups nor their names say so and who manages the VMs did.
    fn told_vcpus(&self, _vm: VmId) -> BTreeMap<u16, VcpuThread> {
        BTreeMap::new()
    }

    /// Takes over which threads run vCPUs from the journal, where that is not known.
    fn recall_vcpus(&mut self, _run: &Run, _vcpus: &BTreeMap<u16, VcpuThread>) {}

    /// Everything is given back from now on, until VMs are listed again: no period waits, and calls may take longer.
    fn take_time(&mut self) {}

    /// CPUs that vCPUs were pinned to, by the agent or anybody else. `threads` are the VM's.
    fn pins(&mut self, domain: &Domain, threads: &[Thread]) -> BTreeMap<u16, CpuSet>;

    /// Whether a vCPU may run on these CPUs without anybody's having pinned it, though it is among the pins.
    fn is_unpinned(&self, _domain: &Domain, _cpus: &CpuSet) -> bool {
        false
    }

    /// Whether the pins that it tells are the affinities in force, and not those that were asked for.
    fn shows_affinities(&self) -> bool {
        false
    }

    /// Whether a vCPU begins where the emulator may run just then, and the manager leaves it there.
    fn vcpus_inherit(&self) -> bool {
        false
    }

    /// Whether this very run of a VM is still known.
    fn knows(&mut self, run: &Run) -> Result<bool, CallError>;

    /// Whether a VM is known to run no more.
    fn is_gone(&mut self, vm: VmId) -> bool;

    /// Why a VM's memory should be left where it is for now, if so: it is paused, or between two hosts.
    fn standstill(&mut self, vm: VmId) -> Result<Option<Immovable>, CallError>;

    fn pin_vcpu(&mut self, vm: VmId, index: u16, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_emulator(&mut self, vm: VmId, cpus: &CpuSet) -> Result<(), CallError>;

    fn pin_iothread(&mut self, vm: VmId, id: u32, cpus: &CpuSet) -> Result<(), CallError>;

    /// Nodes that a `restrictive` VM may take memory from.
    fn set_memory_nodes(&mut self, vm: VmId, nodes: &NodeSet) -> Result<(), CallError>;

    /// Makes a change on what is stored of the operator's settings now, whatever [`Manager::describe`] said last; false, and
    /// nothing is stored, where that is not what the change is meant for. With an error everything is as it was.
    fn change_settings(&mut self, vm: VmId, change: &Change<'_>) -> Result<bool, CallError>;

    /// Replaces the mark of a VM that runs, or takes it away.
    fn set_mark(&mut self, vm: VmId, element: Option<&str>) -> Result<(), CallError>;

    /// Whether quotas can be set in these cgroups, where a VM's vCPUs are.
    ///
    /// # Errors
    /// Why not, as the end of a sentence.
    fn check_groups(&self, vm: VmId, groups: &[CpuGroup]) -> Result<(), String>;

    /// Holds every vCPU to a quota, in these cgroups.
    fn hold(&mut self, vm: VmId, quota: CpuQuota, groups: &[CpuGroup]) -> Result<(), CallError>;

    /// Gives every vCPU back the quota that it had, or none. `held` are the cgroups that hold the agent's.
    fn lift(&mut self, vm: VmId, before: Option<CpuQuota>, held: &[CpuGroup]) -> Result<(), CallError>;

    /// What a VM's balloon leaves its guest now, or is about to.
    fn memory_now(&mut self, vm: VmId) -> Result<Bytes, CallError> {
        Ok(self.describe(vm)?.memory_current_bytes)
    }

    /// Has a VM's balloon leave its guest this much memory. It comes to that in its own time.
    fn set_memory(&mut self, vm: VmId, memory: Bytes) -> Result<(), CallError>;

    /// How often a guest is asked for memory statistics; 0 for never.
    fn set_stats_period(&mut self, vm: VmId, seconds: u32) -> Result<(), CallError>;

    /// What the guest's driver said last, and when by the wall clock of that time, in seconds; `None` where it never did. That
    /// tells one report from another, and not how old it is: that clock may have been set since.
    fn guest_memory(&mut self, vm: VmId) -> Result<Option<(u64, GuestMemory)>, CallError>;

    /// The error of a host whose manager is away.
    fn unreachable(&self, cause: &str) -> HostError;

    /// What the operator should know of VMs that are left out, or of what is not known of them.
    fn take_notices(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The manager of most tests.
    #[cfg(test)]
    fn libvirt(&mut self) -> &mut crate::libvirt::Libvirt {
        unreachable!("these VMs are not libvirt's")
    }
}

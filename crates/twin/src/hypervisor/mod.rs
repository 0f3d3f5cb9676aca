//! The host's hypervisor: it schedules (Linux's fair scheduler or Xen's credit scheduler), hands out physical memory, and may
//! enforce permits on VMs.

mod balance;
mod bandwidth;
mod credit;
mod discipline;
mod domains;
mod fair;
pub(crate) mod memory;
pub(crate) mod page_uses;
pub(crate) mod permits;
mod queues;
pub(crate) mod sampling;
mod scheduler;
#[cfg(test)]
mod tests;
pub(crate) mod turns;
pub(crate) mod watching;

pub(crate) use discipline::earliest;
pub(crate) use memory::HostMemory;
pub(crate) use queues::{Run, Segment, Task};
pub(crate) use scheduler::Scheduler;

use homenode_units::Ns;

/// Kernel work per migrated page in addition to the copy: isolating, unmapping, remapping, the system call's share (estimate;
/// Linux moves about 1 GB/s of 4 KiB pages per calling thread on machines of that age). Nanoseconds.
pub(crate) const PAGE_MOVE_NS: f64 = 3000.0;
/// Cost of one migrated page to each running vCPU of the VM, because the shootdown takes it out of the guest: about 1500 cycles
/// (`facts/simulators.md`, 3.3 item 8: 1000 to 2000).
pub(crate) const SHOOTDOWN_CYCLES: f64 = 1500.0;
/// CPU cycles of an exit from a guest and the return, for a call or a fault that does nothing else (same source).
pub(crate) const EXIT_CYCLES: f64 = 1500.0;

/// Mean period at which a host daemon wakes, at random. There is one per node (\[TAVO\]: monitoring, libvirt, kernel threads).
pub(crate) const DAEMON_PERIOD: Ns = Ns::from_millis(250);
/// Mean time that a daemon then runs. Each thus takes about 0.4 percent of one CPU, an idle server's background (estimate).
pub(crate) const DAEMON_RUN: Ns = Ns::from_millis(1);

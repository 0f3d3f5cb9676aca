//! Linux as a host: one module per kernel interface. Nothing here knows libvirt, a journal or a policy.
//!
//! Every reader takes the root of the tree to read: `/` on a live host, a saved or handmade tree in tests. It treats its input as
//! hostile until the input is parsed, and limits how much it keeps. If a host lacks a source, the reader returns `None`. An error
//! names the path.
//!
//! | module | interface |
//! |---|---|
//! | [`proc_stat`] | `/proc/stat`: busy time of CPUs |
//! | [`meminfo`] | `/sys/devices/system/node/nodeN/meminfo`: memory of nodes |
//! | [`kernel_settings`] | `/proc/sys`, `/sys/kernel/mm`: what the kernel does on its own, such as NUMA balancing |
//! | [`task`] | `/proc/PID/task/TID`: threads of a process |
//! | [`cgroup`] | `cpu.stat` and quotas of a thread's cgroup, v1 and v2 |
//! | [`numa_maps`], [`binding`] | `/proc/PID/{maps,numa_maps}`: where guest memory is, and what it is bound to |
//! | [`pages`] | `move_pages(2)`: queries where pages are, and moves them |
//! | [`pagemap`] | `/proc/PID/pagemap`: the machine frames of guest memory |
//! | [`memory_blocks`] | `/sys/devices/system/node/nodeN/memoryM`: the node of a machine frame |
//! | [`perf`] | `perf_event_open(2)` per thread: hardware counters |
//! | [`ibs`] | `perf_event_open(2)` of AMD's IBS per CPU: which node's CPUs use which frame |
//! | [`uncore`] | `perf_event_open(2)` per memory controller and link |
//! | [`resctrl`] | `mon_data` of the root groups: memory traffic, if no uncore PMU is usable |
//! | [`confine`] | control groups of resctrl: a VM's share of cache ways or memory bandwidth |
//! | [`trackers`] | `/proc/PID/{clear_refs,smaps}`, DAMON: which of its memory a VM uses |
//! | [`modelled_pmu`] | an ivshmem device of an emulated host: counts of the emulator's plugin |
//! | [`attribution`] | none of its own: assigns the modelled PMU's counts and samples to VMs by their frames |
//! | [`files`] | `RLIMIT_NOFILE`: how many files each part of the agent may have open |
//!
//! The feature `testing` has what tests in dependent crates need: a handmade tree, faults wherever this crate or those reach
//! outside, and a simulated kernel.

pub mod attribution;
pub mod binding;
pub mod cgroup;
mod clock;
pub mod confine;
pub mod files;
pub mod ibs;
pub mod kernel_settings;
pub mod meminfo;
pub mod memory_blocks;
pub mod modelled_pmu;
pub mod numa_maps;
pub mod pagemap;
pub mod pages;
pub mod perf;
mod pmu;
pub mod proc_stat;
mod processor;
pub mod read;
pub mod resctrl;
pub mod task;
pub mod trackers;
pub mod uncore;

#[cfg(any(test, feature = "testing"))]
pub mod fake;
#[cfg(any(test, feature = "testing"))]
pub mod fault;
#[cfg(any(test, feature = "testing"))]
pub mod system;

pub use clock::{now, wait};
pub use read::ReadError;

//! Linux as a host: one module per kernel interface, and [`LinuxHost`], which puts them together behind the
//! contract of `homenode-host` for VMs that libvirt runs under KVM.
//!
//! Every reader takes the root of the tree that it reads (`/` on a live host, a saved or handmade tree in tests),
//! treats what it reads as hostile until parsed, and bounds what it keeps. A source that a host lacks is `None`, an
//! error names the path.
//!
//! | module | source |
//! |---|---|
//! | [`proc_stat`] | `/proc/stat`: busy time of CPUs |
//! | [`meminfo`] | `/sys/devices/system/node/nodeN/meminfo`: memory of nodes |
//! | [`task`] | `/proc/PID/task/TID`: threads of a process |
//! | [`cgroup`] | `cpu.stat` of a thread's cgroup, v1 and v2: throttled time |
//! | [`numa_maps`] | `/proc/PID/{maps,numa_maps}`: where guest memory lies |
//! | [`pages`] | `move_pages(2)`: asking for and moving pages |
//! | [`perf`] | `perf_event_open(2)` per thread: hardware counters |
//! | [`uncore`] | the same per memory controller and link |
//! | [`resctrl`] | `mon_data` of the root groups: memory traffic where no uncore PMU is usable |
//! | [`modelled_pmu`] | an ivshmem device of an emulated host: counts of the emulator's plugin |
//! | [`pagemap`] | `/proc/PID/pagemap`: in which machine frames guest memory lies |
//! | [`memory_blocks`] | `/sys/devices/system/node/nodeN/memoryM`: on which node a machine frame lies |
//! | [`attribution`] | none of its own: deals what the modelled PMU counts and samples to VMs, by their frames |
//! | [`trackers`] | `/proc/PID/{clear_refs,smaps}`, DAMON: which of its memory a VM uses |
//! | [`confine`] | control groups of resctrl: a VM's part of cache ways or memory bandwidth |
//! | [`domain`] | libvirt's domain XML |
//! | [`journal`], [`guard`], [`lock`] | crash safety: what was changed, who undoes it when the agent dies, who may act |
//! | [`mark`] | none of its own: what a VM's own metadata says was changed, where the journal is lost or elsewhere |
//! | [`files`] | none of its own: how many files each part may have open |
//! | [`peer`] | `SO_PEERCRED`, `SO_PEERGROUPS`: who is at the other end of a socket |
//! | [`state_dir`] | files that are the agent's alone |
//! | [`topology_server`] | none of its own: gives VMs the pages that tell them where they are |
//! | [`settings_file`] | `/etc/homenode/vms/UUID.toml`: what the operator says of a VM that has no metadata |
//! | [`notices`] | none of its own: what the operator is told, once |
//! | [`acting`] | none of its own: the right to act, leases that end while waiting, whom nobody touches |
//! | [`numad_hook`] | what libvirt's prepare hook says of the domain that is about to start |

pub mod acting;
pub mod attribution;
mod beat;
pub mod binding;
pub mod cgroup;
mod clock;
pub mod confine;
mod connect;
pub mod domain;
pub mod files;
pub mod guard;
mod hands;
mod holder;
mod host;
pub mod journal;
pub mod kernel_settings;
mod legacy;
mod levers;
mod libvirt;
pub mod lock;
mod manager;
pub mod mark;
pub mod meminfo;
pub mod memory_blocks;
pub mod modelled_pmu;
pub mod notices;
pub mod numa_maps;
pub mod numad_hook;
pub mod pagemap;
pub mod pages;
pub mod peer;
pub mod perf;
pub mod proc_stat;
mod qemu;
mod reach;
mod read;
pub mod resctrl;
pub mod scope;
pub mod settings_file;
pub mod state_dir;
pub mod task;
mod topology_pages;
pub mod topology_server;
pub mod trackers;
pub mod uncore;
mod vm;
mod xml;

pub use beat::Beat;
pub use clock::now;
pub use connect::{Acting, ConnectError, DEFAULT_URI, Options, TOPOLOGY_SOCKET, Vms};
pub use domain::{Change, OperatorSettings};
pub use host::{CarriedOver, LinuxHost};
pub use legacy::{Legacy, Undone};
pub use levers::{Pins, Quotas, in_force};
pub use libvirt::load as load_libvirt;
pub use qemu::{QemuVm, vms as qemu_vms};
pub use read::ReadError;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod fault;

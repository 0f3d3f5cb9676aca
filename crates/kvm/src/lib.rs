//! KVM behind the contract of `homenode-host`, for VMs managed by libvirt, or by QEMU without libvirt.
//!
//! [`KvmHost`] combines three parts: `homenode-kernel` reads and sets the kernel's state, the VMs' manager reports on VMs and
//! changes them, and `homenode-undo` provides crash safety.
//!
//! | module | what it does |
//! |---|---|
//! | `host` | samples the host and commits plans |
//! | `vm` | one VM as the host watches it |
//! | `levers` | what the agent can change on a VM, one file per lever |
//! | `manager`, `libvirt`, `qemu` | the VMs' manager: libvirt, or QEMU's processes and their monitors |
//! | [`domain`] | libvirt's domain XML |
//! | [`mark`] | changes recorded in a VM's own metadata, in case the journal is lost or the VM is on another host |
//! | `leftovers` | what an ended agent left in force |
//! | `reach` | CPUs that the operator's bounds leave to a VM |
//! | [`topology_server`] | serves VMs the pages that tell them which nodes they run on |
//! | [`numad_hook`] | what libvirt's prepare hook reports about a domain that is about to start |

mod connect;
mod context;
pub mod domain;
mod host;
mod leftovers;
mod levers;
mod libvirt;
mod manager;
pub mod mark;
pub mod numad_hook;
mod qemu;
mod reach;
mod topology_pages;
pub mod topology_server;
mod vm;
mod xml;

pub use connect::{ConnectError, DEFAULT_URI, Vms};
pub use host::KvmHost;
pub use leftovers::Leftovers;
pub use levers::{Pins, Quotas};
#[cfg(all(feature = "testing", target_arch = "x86_64", target_os = "linux"))]
pub use libvirt::simulate as simulate_libvirt;
pub use libvirt::{LibraryError, load as load_libvirt};
pub use qemu::{QemuVm, vms as qemu_vms};

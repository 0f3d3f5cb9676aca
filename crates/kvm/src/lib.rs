//! KVM behind the contract of `homenode-host`, for VMs that libvirt or QEMU alone manages.
//!
//! [`KvmHost`] puts together what `homenode-kernel` reads and sets, what the manager of the VMs says and does, and what
//! `homenode-undo` keeps safe.
//!
//! | module | what it does |
//! |---|---|
//! | `host` | samples the host and carries out plans |
//! | `vm` | one VM as the host watches it |
//! | `levers` | what can be changed of a VM, a file per lever |
//! | `manager`, `libvirt`, `qemu` | who manages the VMs: libvirt, or QEMU's processes and their monitors |
//! | [`domain`] | libvirt's domain XML |
//! | [`mark`] | what a VM's own metadata says was changed, where the journal is lost or on another host |
//! | `legacy` | what an agent that ended left behind |
//! | `reach` | what the operator's cgroups leave to a VM |
//! | [`topology_server`] | gives VMs the pages that tell them where they are |
//! | [`numad_hook`] | what libvirt's prepare hook says of the domain that is about to start |

mod connect;
pub mod domain;
mod hands;
mod host;
mod legacy;
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
pub use legacy::Legacy;
pub use levers::{Pins, Quotas};
pub use libvirt::load as load_libvirt;
pub use qemu::{QemuVm, vms as qemu_vms};

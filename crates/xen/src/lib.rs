//! Xen as a host: [`XenHost`] puts domains behind the contract of `homenode-host`, from dom0, with what stock Xen lets dom0 read
//! and change. docs/XEN.md says what that is, and what is refused.
//!
//! Everything is asked of the hypervisor itself, through libxenctrl, and of xenstore: so the domains of `xl` and of libvirt are
//! managed alike, and what is read is what is in force. Both libraries are loaded when a host is connected; the program is
//! built and starts without them.
//!
//! | module | source |
//! |---|---|
//! | `library` | libxenctrl, libxenstore: the functions that are used, as they are in C |
//! | `hypervisor` | the same as Rust has them: domains, vCPUs, affinities, caps, nodes |
//! | `memory` | Xen's console: what its debug key `u` says of the memory of domains, by node |
//! | `place` | the machine, as Xen sees it: dom0's kernel sees one node |
//! | `dom0` | `/proc/xen/capabilities`, `/sys/hypervisor`: whether this is dom0 |
//! | `error` | none of its own: why Xen cannot be asked, or managed |
//! | `store` | xenstore, asked by a thread of its own |
//! | `privcmd` | `/dev/xen/privcmd`: one hypercall that libxenctrl does not make |
//! | `page_counts` | none of its own: when Xen is asked to count pages |
//! | `balloon` | xenstore: the memory that domains are to come to |
//! | `xl` | `xl`: its commands that end soon |
//! | `busy` | none of its own: busy time of CPUs, from how long they were idle |
//! | `changed` | none of its own: what was changed, how it was before, and how that is undone |
//! | `domain` | none of its own: a domain, as the agent knows it |
//! | `host` | none of its own: the contract |
//! | `moving` | `xl`: its stream, its notes on a domain, its migration of a domain to where it is |
//! | `modelled` | none of its own: what a modelled PMU of an emulated host counts, by domain |
//! | [`runstates`] | `xentrace`: how long vCPUs waited, and were kept off by a cap |
//! | `waiting` | none of its own: what of that a sample has |
//! | `trace` | none of its own: whose Xen's trace is, and how reading it begins and ends |
//! | `features` | what of all that this host has |

#![deny(missing_docs)]

mod balloon;
mod busy;
mod changed;
mod dom0;
mod domain;
mod error;
mod features;
mod host;
mod hypervisor;
mod library;
pub mod memory;
mod modelled;
mod moving;
pub mod page_counts;
mod place;
mod privcmd;
pub mod runstates;
#[cfg(test)]
mod stand_in;
mod store;
mod trace;
mod waiting;
mod xl;

pub use changed::Legacy;
pub use dom0::is_dom0;
pub use error::XenError;
pub use features::features;
pub use host::XenHost;
pub use moving::{carry_out, relay};

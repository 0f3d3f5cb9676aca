//! Xen as a host: [`XenHost`] puts domains behind the contract of `homenode-host`. It runs in dom0, and uses what stock Xen lets
//! dom0 read and change. docs/XEN.md lists that, and what is refused.
//!
//! Everything is read from xenstore and, through libxenctrl, from the hypervisor itself. So domains of `xl` and of libvirt are
//! managed alike, and readings show what is in force. Both libraries are loaded when a host is connected; the program builds and
//! starts without them.
//!
//! | module | source |
//! |---|---|
//! | `library` | libxenctrl, libxenstore: the functions used, as declared in C |
//! | `hypervisor` | the same in Rust: domains, vCPUs, affinities, caps, nodes |
//! | `memory` | Xen's console: memory of domains by node, from its debug key `u` |
//! | `place` | the machine, as Xen sees it: dom0's kernel sees one node |
//! | `dom0` | `/proc/xen/capabilities`, `/sys/hypervisor`: whether this is dom0 |
//! | `error` | none of its own: why Xen cannot be called, or managed |
//! | `store` | xenstore, read by a separate thread |
//! | `privcmd` | `/dev/xen/privcmd`: one hypercall that libxenctrl does not make |
//! | `page_counts` | none of its own: when to have Xen count pages |
//! | `balloon` | xenstore: targets of balloons |
//! | `xl` | `xl`: its short commands |
//! | `busy` | none of its own: busy time of CPUs, from how long they were idle |
//! | `changed` | none of its own: the agent's changes, as journalled, and limits that outlast a run |
//! | `leftovers` | none of its own: undoes what an ended agent left |
//! | `domain` | none of its own: a domain, as the agent knows it |
//! | `levers` | what the agent can change on a domain, a file per lever |
//! | `host` | none of its own: the contract |
//! | `moving` | `xl`: its stream, its notes on a domain, its local migration of a domain |
//! | `modelled` | none of its own: a modelled PMU's counts on an emulated host, by domain |
//! | [`runstates`] | `xentrace`: how long vCPUs waited, and were throttled by a cap |
//! | `waiting` | none of its own: the part of that for a sample |
//! | `trace` | none of its own: which program Xen's trace belongs to, and how reading it begins and ends |
//! | `features` | which of all that this host has |

#![deny(missing_docs)]

mod balloon;
mod busy;
mod changed;
mod dom0;
mod domain;
mod error;
#[cfg(test)]
mod fake;
mod features;
mod host;
mod hypervisor;
mod leftovers;
mod levers;
mod library;
pub mod memory;
mod modelled;
mod moving;
pub mod page_counts;
mod place;
mod privcmd;
pub mod runstates;
mod store;
mod trace;
mod waiting;
mod xl;

pub use dom0::is_dom0;
pub use error::XenError;
pub use features::features;
pub use host::XenHost;
pub use leftovers::Leftovers;
pub use moving::{MoveError, StreamError, carry_out, relay};

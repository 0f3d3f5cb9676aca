//! Requests to a running agent and its answers: a line of JSON each way over a Unix socket, one request per connection. The
//! command line, `numad`, libvirt's hook and other programs use the same types; [`ask`] is the client.
//!
//! ```text
//!   {"request":"permits","vm":"db"}
//!   {"answer":{"of":"permits","vms":[…]}}        or        {"error":{"kind":"no-such-vm","vm":"db","running":["web"]}}
//! ```

pub mod answer;
mod approval;
mod client;
pub mod document;
mod forecast;
pub mod http;
mod maintenance;
mod meant;
mod request;
mod time;
pub mod why;

pub use answer::{Answer, ApiError, Reply};
pub use client::{AskError, ask, remedy, socket_path};
pub use forecast::forecast;
pub use homenode_host::EventRecord;
pub use meant::{meant, named};
pub use request::{Homes, Request};

/// Most bytes of a request, which is one line.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of a reply, which is one line: 10,000 VMs take some 20 MB, or more on hosts with many nodes.
pub const REPLY_BYTES_MAX: u64 = 256 << 20;

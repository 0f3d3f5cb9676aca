//! What can be asked of a running agent, and what it answers: a line of JSON each way over a Unix socket, one request per
//! connection. The command line, `numad`, libvirt's hook and programs of others use the same types; [`ask`] is the client.
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
pub use meant::{meant, named};
pub use request::{Homes, Request};

/// A request is one line of at most so many bytes.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// A reply is one line of at most so many bytes: 10,000 VMs take some 20 MB, on hosts of many nodes more.
pub const REPLY_BYTES_MAX: u64 = 256 << 20;

//! What must never fail: whatever the agent changes on a host is written down before it is changed, and is undone by the agent
//! itself, by its guard if it dies or hangs, or by the agent that follows.
//!
//! Nothing here knows which hypervisor runs the VMs, or a policy. `README.md` beside this crate has the states and what each
//! promise rests on.
//!
//! | module | what it does |
//! |---|---|
//! | [`host`] | what every real host has beside the contract; [`commit`] carries out a plan on any of them |
//! | [`acting`] | takes the right to act on a host; ends leases while the agent waits |
//! | [`journal`] | what was changed and how it was before, on disk before anything is changed |
//! | [`guard`] | the process that undoes if the agent dies or hangs |
//! | [`beat`] | how agent and guard know of each other that they go on |
//! | [`lock`], `holder` | who may act on the host, and who holds that right now |
//! | [`state_dir`] | files that are the agent's alone |
//! | [`scope`] | a systemd unit of its own for the guard |
//! | [`notices`] | what the operator is told, once |
//! | [`peer`] | which user is at the other end of a socket |

pub mod acting;
pub mod beat;
pub mod guard;
mod holder;
pub mod host;
pub mod journal;
pub mod lock;
pub mod notices;
pub mod peer;
pub mod scope;
pub mod state_dir;

pub use acting::Undone;
pub use beat::Beat;
pub use host::{Acting, CarriedOver, Commit, Options, RealHost, TOPOLOGY_SOCKET, commit};

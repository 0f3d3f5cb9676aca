//! The part of Homenode that must never fail. Every change on a host is journalled before it is made. It is undone by the agent
//! itself, by its guard if the agent dies or hangs, or by the next agent.
//!
//! This crate knows no hypervisor and no policy. `README.md` in its directory shows the states and says what each promise rests
//! on.
//!
//! | module | what it does |
//! |---|---|
//! | [`host`] | what every real host provides in addition to the contract; [`commit`] commits a plan on any of them |
//! | [`acting`] | takes the right to act on a host; ends leases while the agent waits |
//! | [`levers`] | what the levers of every host have in common: leases, backoff |
//! | [`journal`] | what was changed and what it was before, on disk before anything is changed |
//! | [`guard`] | the process that undoes if the agent dies or hangs |
//! | [`heartbeat`] | heartbeat between agent and guard |
//! | [`lock`], `holder` | which agent may act on the host, and which process holds that right now |
//! | [`state_dir`] | files that only the agent can use |
//! | [`scope`] | a systemd unit of its own for the guard |
//! | [`notices`] | notices for the operator, each reported once |
//! | [`peer`] | which user is at the other end of a socket |

pub mod acting;
pub mod guard;
pub mod heartbeat;
mod holder;
pub mod host;
pub mod journal;
pub mod levers;
pub mod lock;
pub mod notices;
pub mod peer;
pub mod scope;
pub mod state_dir;

pub use acting::Undone;
pub use heartbeat::Heartbeat;
pub use host::{Acting, CarriedOver, Commit, Options, RealHost, TOPOLOGY_SOCKET, commit};

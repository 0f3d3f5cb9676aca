//! The agent: the control loop over one host, and the parts that make it a service. These are a server that answers clients, a
//! file that keeps the usage of permits, a queue that takes operators' settings to the loop, and, on a real host, a guard that
//! outlives the agent.
//!
//! ```text
//!   signals ─▶ WakeSignal      clients ─▶ server ── what is known ──▶ Control ◀── begin, finish ── run ◀──▶ Host
//!                                            └────── settings ──────▶ setting_queue ─────────────▶ ┘
//! ```
//!
//! | thread | does |
//! |---|---|
//! | the caller's | [`run`]: samples, plans, commits, carries out settings, keeps usage |
//! | server | waits in epoll for clients and answers from the loop's state, whose lock the loop does not hold while it acts |
//! | output | writes output to a reader that may be slow ([`backlog`]) |
//! | http | answers programs and browsers from what the loop publishes ([`feed`]); reads the history on threads of its own |

mod answers;
pub mod backlog;
pub mod doctor;
pub mod drain_file;
pub mod feed;
mod handler;
pub mod history;
pub mod http;
pub mod journald;
pub mod live;
mod loop_queue;
pub mod managed;
pub mod numad;
pub mod past;
pub mod reload;
pub mod replay;
pub mod role;
pub mod run;
pub mod server;
pub mod service;
pub mod setting_queue;
pub mod standalone;
pub mod stretch;
pub mod trace;
pub mod twin;
pub mod usage_file;
pub mod wall_clock;
pub mod why;

pub use handler::Handler;
pub use run::{Listening, Notice, Show, Start};

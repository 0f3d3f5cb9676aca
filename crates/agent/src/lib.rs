//! The agent: the control loop over one host, with what makes it a service. A server answers for it, a bill is kept on disk,
//! operators' settings reach the loop through a queue, and on a real host a guard outlives it.
//!
//! ```text
//!   signals ─▶ Bell            clients ─▶ server ── what is known ──▶ Control ◀── begin, finish ── run ◀──▶ Host
//!                                            └────── settings ──────▶ setting_queue ─────────────▶ ┘
//! ```
//!
//! | thread | does |
//! |---|---|
//! | the caller's | [`run`]: samples, plans, commits, carries out settings, keeps the bill |
//! | server | waits in epoll for clients, and answers from the state of the loop, which the loop does not hold while it acts |
//! | http | answers programs and browsers from what the loop publishes ([`feed`]), and asks the history on threads of its own |

mod answers;
pub mod bill_file;
pub mod doctor;
pub mod drain_file;
pub mod feed;
mod handler;
pub mod history;
pub mod http;
pub mod live;
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
pub mod trace;
pub mod twin;
pub mod wall_clock;
pub mod why;

pub use answers::placed;
pub use handler::Handler;
pub use run::{Listening, Notice, Show, Start};

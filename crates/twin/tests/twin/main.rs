//! The simulated host as its users see it.

mod balloon;
#[path = "../common/mod.rs"]
mod common;
mod contention;
mod disturbed;
mod epochs;
mod events;
mod files;
mod flip;
mod guests;
mod host;
mod io;
mod monotone;
mod permits;
mod policies;
#[path = "../reference/mod.rs"]
mod reference;
mod schedulers;
mod topology;
mod validation;
mod waiting;
mod workloads;

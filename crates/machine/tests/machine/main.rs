//! Machines as programs read and query them.

mod layout;
mod model;

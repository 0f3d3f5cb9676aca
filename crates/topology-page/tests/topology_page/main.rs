//! The topology page, written and read from both sides.

mod header;
mod page;

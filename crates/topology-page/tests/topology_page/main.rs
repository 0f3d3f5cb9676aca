//! The topology page, written and read on both sides.

mod header;
mod page;

//! Tests of programs that follow the topology page, without a guest.

mod allocators;
mod common;
mod follows;
mod hotspot;

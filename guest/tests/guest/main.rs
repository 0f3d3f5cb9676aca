//! Tests of programs that follow the topology page, without a guest.

mod common;
mod follows;
mod hotspot;
mod jemalloc;

//! The terminal screens of `homenode top` and `homenode fleet top`: what is drawn, what keys do, and when a picture is replaced.
//! Callers ask the agents and read the histories.
//!
//! | module | contents |
//! |---|---|
//! | `printable` | escapes text from outside |
//! | `figures`, `wall` | figures and times as people write and read them |
//! | `limits`, `table` | when a figure is marked; columns that fit into a width |
//! | `pictures` | pictures of hosts, asked for by threads |
//! | `terminal` | keys and signals |
//! | `top`, `fleet` | the two screens |

pub mod figures;
pub mod fleet;
mod limits;
pub mod pictures;
pub mod printable;
pub mod table;
pub mod terminal;
pub mod top;
pub mod wall;

//! Many hosts on one page, with a line for each. Opening a line shows the host's own page.
//!
//! | module | contents |
//! |---|---|
//! | `hosts` | the hosts, and how keys change which are shown |
//! | `summary` | what a line says of a host, from its picture alone |
//! | `screen` | the lines |

mod hosts;
mod screen;
mod summary;
#[cfg(test)]
mod tests;

pub use hosts::run;
pub use screen::{Row, plain, rows};
pub use summary::Summary;

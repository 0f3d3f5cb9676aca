//! The page of one host, at the present or at an earlier time.
//!
//! | module | contents |
//! |---|---|
//! | `view` | what the page shows, and how keys change that |
//! | `screen`, `host`, `vms`, `vm_page`, `events` | the page as lines of styled text, from a view alone |
//! | `trail` | how the speeds of VMs changed over the pictures shown so far |
//! | `session` | the page on a terminal, with the agent or a history behind it |

mod events;
mod host;
mod screen;
mod session;
#[cfg(test)]
pub(crate) mod tests;
mod trail;
mod view;
mod vm_page;
mod vms;

pub(crate) use host::{gib, load};
pub(crate) use screen::{draw, text_of};
pub use screen::{glance, help, plain};
pub use session::{History, Session, run};
pub(crate) use view::{Page, Wish};
pub use view::{View, When};
pub use vms::{Choice, Sort};

//! Effects of the machine's figures on running programs: shared caches, cores, memory controllers, links.
//!
//! Everything here is built from [`homenode_machine::Machine`] and its `Hardware`; the code contains no figures of any machine.

pub(crate) mod core;
pub(crate) mod fabric;
pub(crate) mod llc;
mod resource;
pub(crate) mod share;
pub(crate) mod topology;

pub(crate) use fabric::Fabric;
pub(crate) use llc::{Llc, Sharer};
pub(crate) use topology::Topology;

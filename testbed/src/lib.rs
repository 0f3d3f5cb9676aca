//! A real 4-node NUMA Linux host with real libvirt and KVM guests, on any machine.
//!
//! One program, two sides. [`outside`], on the developer's machine, boots emulated hosts and judges. [`inside`] such a
//! host the same program prepares libvirt and runs the [`cases`]. They talk through files: [`exchange`].
//!
//! Nothing here has a meaningful clock: every CPU of the host is emulated, and so are its guests' CPUs, twice. A case
//! may say how long something took; none may fail because of it, except after a limit of minutes.

#![allow(
    clippy::print_stdout,
    reason = "a case's notes and the verdicts are printed where they arise"
)]

pub mod cases;
pub mod exchange;
pub mod inside;
pub mod outside;

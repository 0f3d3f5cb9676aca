//! A real 4-node NUMA Linux host with real libvirt and KVM guests, on any machine.
//!
//! The program has two sides. [`outside`], on the developer's machine, boots emulated hosts and judges the results. [`inside`]
//! such a host, the same program prepares libvirt and runs the [`cases`]. Both sides talk through files: [`exchange`].
//!
//! Time measured here means little: every CPU of the host is emulated, and its guests' CPUs are emulated twice. A case may
//! report how long something took. It must not fail because of that, except after a limit of minutes.

#![allow(
    clippy::print_stdout,
    reason = "a case's notes and the verdicts are printed where they arise"
)]

pub mod cases;
pub mod exchange;
pub mod inside;
pub mod outside;

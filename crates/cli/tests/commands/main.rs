//! The commands as a user runs them. All tests are one program, because each further program links everything again.

mod agent;
mod calibrate;
mod cli;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod evidence;
mod evidence_sections;
mod http;
mod http_access;
mod kernel_footprint;
mod libvirt;
mod maintenance;
mod output;
mod policies;
mod profile;
mod qemu;
mod recommend;
mod record;
mod reproduce;
mod scenario;
mod search;
mod service;
mod signals;
mod sweep;
mod texts;
mod top;
mod trace;
mod whatif;
mod why;

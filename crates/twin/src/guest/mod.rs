//! Guests: VMs, the threads in them, and their memory.

pub(crate) mod autonuma;
mod costs;
pub(crate) mod memory;
pub(crate) mod releases;
pub(crate) mod requests;
pub(crate) mod runtime;
pub(crate) mod thread;
pub(crate) mod view;
pub(crate) mod vm;

pub use costs::boot_footprint;
pub(crate) use costs::{HOUSEKEEPING_PERIOD, TOUCH_NS};
pub(crate) use memory::VmMemory;
pub(crate) use requests::RequestTimes;
pub(crate) use thread::{Doing, Thread};
pub(crate) use view::View;
pub(crate) use vm::{Factors, Lease, Life, Limits, MemoryLease, Prepared, Stage, Vm};

//! The simulator, called *twin* in names: a simulated NUMA host on which to try a policy before it is switched on.
//!
//! ```text
//!   scenario ──▶ engine ──┬── hardware     caches by occupancy, cores, controllers and links under load
//!   machine  ──▶          ├── hypervisor   fair or credit scheduler, physical memory, page moves and uses
//!   seed     ──▶          ├── io           devices: queues, latencies, DMA
//!                         └── guest        VMs: threads, barriers, regions as counts of pages per node, AutoNUMA
//! ```
//!
//! # Kind of model
//!
//! The model consists of epochs and populations, not single accesses. A simulated second of a 32-CPU host costs less than ten
//! milliseconds. The documentation of each module states its equations, their sources and what they leave out.
//!
//! # Properties (tests of the same names)
//!
//! - Same machine, scenario, seed and epoch: the same bytes out, on any machine.
//! - Counts add up: pages, CPU time, traffic.
//! - The epoch's length changes results by less than 2 percent.
//! - A workload's profile comes from its solo behaviour only; what co-running does is predicted.

mod counts;
#[cfg(test)]
mod documented;
mod engine;
mod flip_pool;
mod guest;
mod hardware;
mod host;
mod hypervisor;
mod index;
mod io;
mod levers;
pub mod models;
pub mod named;

pub mod page_queue;
mod report;
pub mod scenario;
pub mod schema;
mod setup;
mod told;
mod twin;
pub mod workload;

pub use guest::boot_footprint;
pub use report::{
    EventReport, EventResult, FlipReport, LinkReport, NodeReport, PermitReport, ProgramReport, ReleaseReport,
    RequestReport, StartReport, TwinReport, VmReport,
};
pub use scenario::{
    AfterProgram, Allocation, ArrivalOrder, Attribution, Backend, Disturbance, Enforcer, EventAction,
    EventSpec, Hypervisor, NextProgram, PageSize, Pinning, PoolSpec, ReleaseCalls, RuntimeNodes, Scenario,
    Transfer, TwinError, VmSpec, Vnuma,
};
pub use setup::Setup;
pub use twin::{EPOCH_DEFAULT, Twin};
pub use workload::{Program, Waiting, Workload, WorkloadError};

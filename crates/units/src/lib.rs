//! Shared types: newtypes for numbers that are easy to confuse, sets of ids in the kernel's list format, one value per NUMA node,
//! suggestions for misspelt names, safe file names, ranges of settings, one seeded generator, and the arithmetic that several
//! crates share. This crate does no I/O.

mod candidates;
mod chance;
mod file_name;
mod id;
mod math;
mod memory_policy;
mod node_map;
mod permit;
mod quantity;
mod reading;
mod schema;
mod set;
mod setting;
pub mod stats;

pub use candidates::Candidates;
pub use chance::{Chance, SplitMix, finalize, mix};
pub use file_name::{BadFileName, file_name};
pub use id::{CpuId, NodeId, VcpuId, VmId};
pub use math::{Ewma, Weight, divide_proportionally};
pub use memory_policy::{MemoryPolicy, MemoryPolicyError, Migration, Placing};
pub use node_map::NodeMap;
pub use permit::{Permit, PermitError, Resource};
pub use quantity::{Bytes, BytesPerSec, Cycles, Ns, PAGE_BYTES, Pages, ParseQuantityError, text};
pub use reading::with_reading_time;
pub use set::{CpuSet, Id, IdSet, NodeSet, ParseSetError};
pub use setting::{Allowed, Any, BadSetting, Section, Settings, Wrong};

//! The topology page tells a guest where its vCPUs and its memory are on the host. This is the host's side; the guest's side is
//! `guest/include/homenode_topology.h`.
//!
//! # Problem
//!
//! A guest's virtual nodes are fixed when it boots, but its host moves vCPUs, and the memory of whole virtual nodes [XPV, section
//! 4.1]. The host publishes the current state in shared memory. A guest must be able to check for changes with a single load, and
//! no bytes in the page, whichever process wrote them, may harm a reader or the writer.
//!
//! # Terms
//!
//! *vCPU*: a virtual processor, by number. *Virtual node*: a NUMA node as the guest sees it ([`VirtualNode`]). *Host node*:
//! a node of the host ([`NodeId`](homenode_units::NodeId)). *Sequence*: the page's version and lock in one word.
//!
//! # Algorithm
//!
//! - The page contains facts, from which readers draw conclusions: a vCPU belongs to the virtual node whose memory is nearest to
//!   where the vCPU runs ([`Topology::node`]). This covers moves of vCPUs and of memory alike, and no memory page has to change
//!   its number.
//! - A sequence lock protects the page: the sequence is odd while the page is written. Each time, [`Publisher`] writes the whole
//!   page from its arguments and its own sequence, and never reads the page. The next version overwrites whatever a guest
//!   scribbled.
//! - [`Reader`] copies the page, and retries, a limited number of times, until the sequence was even and the same before and
//!   after. Then it checks every value.
//!
//! # Properties
//!
//! - Any bytes result in a valid topology or in a [`ReadError`], never in a panic; the C header decides the same.
//! - Only published versions are read: no reader sees parts of two versions.
//! - If several virtual nodes are equally near, a vCPU keeps its present one, so it does not flip between them.
//! - Sequences may wrap: they are only compared for equality.
//!
//! # Departures from \[XPV\]
//!
//! In the paper, the page describes the machine's topology to a modified kernel with one Linux node (section 4.3.1). A stock
//! kernel keeps its virtual nodes, so this page tells where each one's memory is.

mod layout;
mod mapping;
mod page;
mod topology;

pub use layout::{BYTES, LAYOUT, LOCAL_DISTANCE, MAGIC, NODES_MAX, RawPage, VCPUS_MAX, VNODES_MAX, WORDS};
pub use mapping::Mapping;
pub use page::{Publisher, READ_TRIES, ReadError, Reader};
pub use topology::{Facts, Topology, TopologyError, VirtualNode};

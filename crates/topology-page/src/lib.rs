//! The topology page, through which a host tells a guest where its vCPUs and its memory are: the host's side of
//! `guest/include/homenode_topology.h`.
//!
//! # Problem
//!
//! A guest sees virtual nodes that were fixed when it booted, while its host moves vCPUs and whole virtual nodes' memory
//! [XPV, section 4.1]. The host publishes the current state in shared memory. A guest must be able to check for changes with
//! a single load, and no bytes in the page, whichever process wrote them, may harm its readers or its writer.
//!
//! # Terms
//!
//! *vCPU*: a virtual processor, by number. *Virtual node*: a NUMA node as the guest sees it ([`VirtualNode`]). *Host node*:
//! a node of the host ([`NodeId`](homenode_units::NodeId)). *Sequence*: the page's version and lock in one word.
//!
//! # Algorithm
//!
//! - The page has facts, and readers draw conclusions: a vCPU belongs to the virtual node whose memory is nearest to where
//!   it runs ([`Topology::node`]). This covers moves of vCPUs and of memory alike, and needs no memory page to change its number.
//! - A sequence lock: odd while the page is written. [`Publisher`] writes the whole page each time from its arguments and
//!   its own sequence; it never reads the page. The next version overwrites whatever a guest scribbled.
//! - [`Reader`] copies the page between two equal, even sequences, with a limited number of retries, and then checks every
//!   value.
//!
//! # Properties
//!
//! - Any bytes give a topology within its bounds or a [`ReadError`], never a panic; the C header gives the same verdict.
//! - Only published versions are read: no reader sees parts of two versions.
//! - Among equally near virtual nodes the present one stays, so a vCPU does not flip between them.
//! - Sequences may wrap: they are only compared for equality.
//!
//! # Departures from \[XPV\]
//!
//! There the page describes the machine's topology to a rebuilt kernel with one Linux node (section 4.3.1). A stock kernel
//! keeps its virtual nodes, so this page says where each one's memory is.

mod layout;
mod mapping;
mod page;
mod topology;

pub use layout::{BYTES, LAYOUT, LOCAL_DISTANCE, MAGIC, NODES_MAX, RawPage, VCPUS_MAX, VNODES_MAX, WORDS};
pub use mapping::Mapping;
pub use page::{Publisher, READ_TRIES, ReadError, Reader};
pub use topology::{Facts, Topology, TopologyError, VirtualNode};

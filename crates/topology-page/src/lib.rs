//! The topology page, through which a host tells a guest where its vCPUs and its memory are: the host's side of
//! `guest/include/homenode_topology.h`.
//!
//! # Problem
//!
//! A guest sees virtual nodes that were fixed when it booted, while its host moves vCPUs and whole virtual nodes' memory
//! [XPV, section 4.1]. The host says what is so in memory that both share; the guest must be able to ask whether anything
//! changed for the price of one load, and nobody may be hurt by what the other, or anybody who got hold of the page, writes
//! there.
//!
//! # Terms
//!
//! *vCPU*: a virtual processor, by number. *Virtual node*: a NUMA node as the guest sees it ([`VirtualNode`]). *Host node*: one
//! of the host ([`NodeId`](homenode_units::NodeId)). *Sequence*: the page's version and lock in one word.
//!
//! # Algorithm
//!
//! - Facts are published, conclusions are drawn by who reads: a vCPU belongs to the virtual node whose memory is nearest to
//!   where it runs ([`Topology::node`]). This covers moves of vCPUs and of memory alike, and needs no page to change its
//!   number.
//! - A sequence lock: odd while the page is written. [`Publisher`] writes all of the page each time from what it was given and
//!   from a sequence that it keeps itself; it never reads the page. What a guest scribbled is gone with the next version.
//! - [`Reader`] copies the page between two equal, even sequences, a bounded number of times, and then checks every figure.
//!
//! # Properties
//!
//! - Any bytes give a topology within its bounds or a [`ReadError`], never a panic; the C header gives the same verdict.
//! - What is read was published: no reader sees parts of two versions.
//! - Of virtual nodes that are as near the present one stays, so that nothing flips between equals.
//! - Sequences may wrap: they are compared for equality only.
//!
//! # Departures from \[XPV\]
//!
//! There the page lists the machine's topology for a rebuilt kernel with one Linux node (section 4.3.1). A stock kernel keeps its
//! virtual nodes, so the page says where each one's memory is instead.

mod layout;
mod mapping;
mod page;
mod topology;

pub use layout::{BYTES, LAYOUT, LOCAL_DISTANCE, MAGIC, NODES_MAX, RawPage, VCPUS_MAX, VNODES_MAX, WORDS};
pub use mapping::Mapping;
pub use page::{Publisher, READ_TRIES, ReadError, Reader};
pub use topology::{Facts, Topology, TopologyError, VirtualNode};

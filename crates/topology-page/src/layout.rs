//! The page's layout. A test checks that it is the same as in `guest/include/homenode_topology.h`.

use std::mem::{offset_of, size_of};

/// `HNTOPOLO`, read as a little-endian word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"HNTOPOLO");
/// Version of the layout.
pub const LAYOUT: u32 = 1;
/// Bytes to map, in whole pages.
pub const BYTES: usize = 8192;
/// Most vCPUs on a page.
pub const VCPUS_MAX: usize = 1024;
/// Most virtual nodes.
pub const VNODES_MAX: usize = 64;
/// Most nodes of the host.
pub const NODES_MAX: usize = 64;
/// Distance of a node to itself, which is the smallest distance, as in ACPI's SLIT.
pub const LOCAL_DISTANCE: u8 = 10;
/// Stored instead of a node: the node is unknown, there is no memory, or the reader decides.
pub(crate) const NONE: u8 = 0xff;

/// The page as a C structure. It is used only for offsets, because Rust must not have references to memory that others write.
#[repr(C)]
#[derive(Debug)]
pub struct RawPage {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`LAYOUT`].
    pub layout: u32,
    /// Size of this structure, bytes.
    pub size: u32,
    /// Odd while the page is being written.
    pub sequence: u64,
    /// 1 to [`VCPUS_MAX`].
    pub vcpu_count: u32,
    /// 1 to [`VNODES_MAX`].
    pub vnode_count: u16,
    /// 1 to [`NODES_MAX`].
    pub pnode_count: u16,
    /// Zero.
    pub reserved: [u64; 4],
    /// The host node on which each vCPU runs.
    pub vcpu_pnode: [u8; VCPUS_MAX],
    /// The virtual node that each vCPU belongs to, if the page's writer decides that.
    pub vcpu_vnode: [u8; VCPUS_MAX],
    /// The host node that holds each virtual node's memory.
    pub vnode_pnode: [u8; VNODES_MAX],
    /// Distances between host nodes, indexed by from, to.
    pub distance: [[u8; NODES_MAX]; NODES_MAX],
}

/// Size of the structure in words.
pub const WORDS: usize = size_of::<RawPage>() / size_of::<u64>();
/// Index of the word that serves as version and as lock.
pub(crate) const SEQUENCE_WORD: usize = offset_of!(RawPage, sequence) / size_of::<u64>();

const _: () = assert!(size_of::<RawPage>() == 6272 && size_of::<RawPage>() <= BYTES);
const _: () = assert!(offset_of!(RawPage, sequence) == 16 && offset_of!(RawPage, vcpu_pnode) == 64);
const _: () = assert!(offset_of!(RawPage, vcpu_vnode) == 1088 && offset_of!(RawPage, vnode_pnode) == 2112);
const _: () = assert!(offset_of!(RawPage, distance) == 2176);

//! TLBs and walkers of some cores. Values that the sources lack are marked; sizes of walkers' caches are not published for any
//! core.

use super::PageSize::{self, Large, Medium, Small};
use super::{Hash, Shape};

/// The translation hardware of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The core's name.
    pub name: &'static str,
    /// First-level arrays of the core's TLBs, and the page sizes that each holds.
    pub first: &'static [(Shape, &'static [PageSize])],
    /// Second-level arrays of the core's TLBs, and the page sizes that each holds.
    pub second: &'static [(Shape, &'static [PageSize])],
    /// Caches of guest page-table entries: those that lead to tables of pages, of 2 MiB stretches, and of 1 GiB stretches.
    pub walk: [Shape; 3],
    /// Cache of the locations of the guest's page tables: guest-physical translations that need no nested walk.
    pub nested: Shape,
}

/// Second level of Skylake and its servers: 1536 entries for 4 KiB and 2 MiB, 12 ways, sets chosen by exclusive or (Gras et al.,
/// TLBleed, cited from memory). CPUID leaf 2 of Cascade Lake (63 03 76 b5 f0 c3) confirms the sizes, but states 6 ways.
const SKYLAKE_SECOND: &[(Shape, &[PageSize])] = &[
    (
        Shape {
            entries: 1536,
            ways: 12,
            hash: Hash::Fold,
        },
        &[Small, Medium],
    ),
    (Shape::low(16, 4), &[Large]),
];
const SKYLAKE_FIRST: &[(Shape, &[PageSize])] = &[
    (Shape::low(64, 4), &[Small]),
    (Shape::low(32, 4), &[Medium]),
    (Shape::full(4), &[Large]),
];
/// Walker's caches of Intel's cores (estimate): about 32 entries that lead to tables of pages, and a few for the levels above.
const INTEL_WALK: [Shape; 3] = [Shape::low(32, 4), Shape::low(4, 4), Shape::low(2, 2)];
/// Cache of the locations of guest page tables (estimate): as many entries as there are entries that lead to tables of pages.
const NESTED: Shape = Shape::low(32, 4);

/// All known cores.
pub const CORES: [Core; 4] = [
    // [PRL, section 3.1]: 64 entries, 4 ways. The rest is from the i7-6700, which the machine file represents.
    Core {
        name: "i7_pml",
        first: SKYLAKE_FIRST,
        second: SKYLAKE_SECOND,
        walk: INTEL_WALK,
        nested: NESTED,
    },
    Core {
        name: "cascade-lake",
        first: SKYLAKE_FIRST,
        second: SKYLAKE_SECOND,
        walk: INTEL_WALK,
        nested: NESTED,
    },
    // WikiChip: 64 fully associative entries for all sizes, 2048 in the second level. AMD's guide, cited from memory: 16 ways.
    // Pages of 1 GiB are entered as 2 MiB. The second level also holds entries that lead to tables of pages: here, a separate
    // array.
    Core {
        name: "zen2",
        first: &[(Shape::full(64), &[Small, Medium])],
        second: &[(Shape::low(2048, 16), &[Small, Medium])],
        walk: [Shape::low(64, 4), Shape::low(16, 4), Shape::low(4, 4)],
        nested: NESTED,
    },
    // AMD's guide, cited from memory: 72 entries in the first level, and 3072 in the second.
    Core {
        name: "zen4",
        first: &[(Shape::full(72), &[Small, Medium])],
        second: &[(Shape::low(3072, 12), &[Small, Medium])],
        walk: [Shape::low(64, 4), Shape::low(16, 4), Shape::low(4, 4)],
        nested: NESTED,
    },
];

/// Returns the core of this name.
pub fn core(name: &str) -> Option<&'static Core> {
    static ALL: [Core; 4] = CORES;
    ALL.iter().find(|core| core.name == name)
}

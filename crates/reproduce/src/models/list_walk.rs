//! Simulates, access by access, what an array walk loses by alternating with another on one CPU; independent of `homenode-twin`.

use anyhow::Result;
use homenode_machine::Replacement;
use homenode_tracking::cache::{Cache, Outcome as Access, Shape as CacheShape};
use homenode_tracking::stream::{Pattern, Stream};

use crate::design::array::Named;
use crate::models::{Values, named};

/// Returns `by_access`: the percentage lost, along the experiment's axis `mib`.
pub(super) fn by_access(value: Values<'_>) -> Result<Named> {
    let lost = value("mib")?.map_numbers(|mib| Ok(lost_by_alternating(mib as u64)))?;
    Ok(named([("by_access", lost)]))
}

/// Alternates slices in which the walk goes through its list with slices of the disruptor's misses. Returns the percentage
/// of accesses that are lost because lines must be reloaded.
fn lost_by_alternating(mib: u64) -> f64 {
    /// Latencies in cycles on the paper's machine [Kyoto, section 3.1.2.4].
    const HIT: u64 = 45;
    const MISS: u64 = 180;
    const SLICE_CYCLES: u64 = 84_000_000;
    const SLICES_RUN: usize = 3;
    let lines = |mib: u64| (mib << 20) / 64;
    let shape = CacheShape::of_lines(lines(10) as usize, 20, Replacement::QuadAge);
    let mut cache = Cache::new(shape, 2, 1);
    let mut walk = Stream::new(&Pattern::Cyclic { lines: lines(mib) }, 0, 1);
    let mut other = Stream::new(&Pattern::Cyclic { lines: lines(32) }, 1 << 40, 2);
    let mut slice = |cache: &mut Cache| {
        let (mut cycles, mut accesses) = (0, 0_u64);
        while cycles < SLICE_CYCLES {
            cycles += match cache.access(0, walk.next_line()) {
                Access::Hit => HIT,
                Access::Miss(_) => MISS,
            };
            accesses += 1;
        }
        accesses
    };
    // Undisturbed, the second slice finds all of its lines in the cache.
    slice(&mut cache);
    let undisturbed = slice(&mut cache);
    let mut disturbed = 0;
    for _ in 0..SLICES_RUN {
        // The disruptor walks four lists at once.
        for _ in 0..4 * SLICE_CYCLES / MISS {
            let _ = cache.access(1, other.next_line());
        }
        disturbed += slice(&mut cache);
    }
    100.0 * (1.0 - disturbed as f64 / (SLICES_RUN as u64 * undisturbed) as f64)
}

#[cfg(test)]
mod tests {
    use homenode_units::Bytes;

    use super::*;

    #[test]
    fn the_machine_is_the_presets() {
        let machine = homenode_machine_files::preset("e5_1603v3").unwrap();
        assert_eq!(machine.llcs[0].size_bytes, Bytes::from_mib(10));
        assert_eq!(machine.llcs[0].ways, Some(20));
        assert_eq!(machine.llcs[0].replacement, Some(Replacement::QuadAge));
    }
}

//! Divides the ways of a cache between two programs.
//!
//! The cache is that of machine i7_pml. Each program has its own ways and its own core. The ways are divided equally, in
//! proportion to the working sets (the memory that the profiles touch), or in the best way for both according to their miss-ratio
//! curves. A program's loss is its time with its ways relative to its time with all ways, at the simulator's cost of an access.

use anyhow::{Context as _, Result};
use homenode_machine_files::preset;
use homenode_twin::Program;

use crate::design::array::{Array, Axis, Named};
use crate::design::functions::{hardware, profile};
use crate::models::{Values, named};

/// Returns arrays by axis `pair`, whose labels name two programs (`astar, lbm`), and by `divided`: `ways` of the first
/// program, and `lost`, the percentage that both lose on average.
pub(crate) fn shared(value: Values<'_>) -> Result<Named> {
    let pairs = value("pair")?;
    let machine = preset("i7_pml")?;
    let hw = hardware(&machine)?;
    let llc = machine
        .llcs
        .first()
        .context("the machine file describes no last-level cache")?;
    let ways = llc
        .ways
        .context("the machine file does not state the ways of the cache")?;
    let way_bytes = llc.size_bytes.as_f64() / f64::from(ways);
    let (mut some, mut lost) = (Vec::new(), Vec::new());
    for pair in pairs.cells() {
        let pair = pair.shown();
        let two = pair.split_once(", ");
        let (first, second) = two.with_context(|| format!("`{pair}` does not name two programs"))?;
        let (first, second) = (profile(first)?, profile(second)?);
        let of = |program: &Program, some: u32| {
            let within = |ways: u32| program.seconds_within(f64::from(ways) * way_bytes, hw);
            100.0 * (within(some) / within(ways) - 1.0)
        };
        let both = |own: u32| (of(&first, own) + of(&second, ways - own)) / 2.0;
        let (mine, theirs) = (first.footprint(1).as_f64(), second.footprint(1).as_f64());
        let share = (f64::from(ways) * mine / (mine + theirs)).round() as u32;
        let by_curves = (1..ways)
            .min_by(|a, b| both(*a).total_cmp(&both(*b)))
            .context("a cache of one way cannot be divided")?;
        for own in [ways / 2, share.clamp(1, ways - 1), by_curves] {
            some.push(f64::from(own));
            lost.push(both(own));
        }
    }
    let divided = Axis::new("divided", ["equal", "by working sets", "by miss-ratio curves"]);
    let axes = [pairs.axes.clone(), vec![divided]].concat();
    Ok(named([
        ("ways", Array::of_numbers(axes.clone(), some)),
        ("lost", Array::of_numbers(axes, lost)),
    ]))
}

//! Shows what PML cannot see, with the array of 400 MB.

use anyhow::Result;
use homenode_policy::working_set::{Logged, logged};
use homenode_tracking::paging::{Mode, Options};
use homenode_tracking::tlb::Access;
use homenode_units::{Chance, Ns};

use super::array::GEM5_NS;
use super::guest::{ARRAY, Model};
use super::mb;
use crate::design::array::{Array, Axis, Cell, Named};
use crate::models::{Values, named};

const SEED: u64 = 3;
/// Number of pages that stay in use.
const HOT: u64 = ARRAY / 4;
const PASSES: u64 = 60;
const INTERVAL: Ns = Ns::from_secs(30);

/// Returns, along axis `written`, the percentage of pages that one pass writes: `written_mb` and `pml_mb`. By `tracker`:
/// `cold_mb`, the tracker's estimate for 400 MB of which only `hot_mb` are still in use.
pub(crate) fn limits(value: Values<'_>) -> Result<Named> {
    let percents = value("written")?;
    let mut estimates = Vec::new();
    let written = percents.map_numbers(|percent| {
        let (written, pml) = one_pass(percent as u64);
        estimates.push(pml);
        Ok(written)
    })?;
    let cold = vec![
        cold_first(Mode::Pml, logged::Config::pml()),
        cold_first(Mode::Paml, logged::Config::published()),
    ];
    let trackers = Axis::new("tracker", ["PML", "PRL"]);
    Ok(named([
        ("pml_mb", Array::of_numbers(percents.axes.clone(), estimates)),
        ("written_mb", written),
        ("cold_mb", Array::of_numbers(vec![trackers], cold)),
        ("hot_mb", Array::one(Cell::Number(mb(HOT)))),
        ("all_mb", Array::one(Cell::Number(mb(ARRAY)))),
    ]))
}

/// Returns the MB that one pass writes, and PML's estimate of the working set.
fn one_pass(write_percent: u64) -> (f64, f64) {
    let mut chance = Chance::new(SEED);
    let mut model = Model::new(ARRAY, Mode::Pml, 512, Options::PUBLISHED);
    let mut written = 0;
    for page in 0..ARRAY {
        let writes = chance.bits() % 100 < write_percent;
        written += u64::from(writes);
        let access = if writes { Access::Write } else { Access::Read };
        model.access(page, access, GEM5_NS);
    }
    let estimate = model.close(&mut Logged::new(logged::Config::pml()), INTERVAL);
    (mb(written), mb(estimate.hot.to_pages().0))
}

/// Returns a tracker's estimate if cold pages were written once.
fn cold_first(mode: Mode, config: logged::Config) -> f64 {
    let mut model = Model::new(ARRAY, mode, 512, Options::PUBLISHED);
    (0..ARRAY).for_each(|page| model.access(page, Access::Write, GEM5_NS));
    for page in (0..PASSES).flat_map(|_| 0..HOT) {
        model.access(page, Access::Write, GEM5_NS);
    }
    let estimate = model.close(&mut Logged::new(config), INTERVAL);
    mb(estimate.hot.to_pages().0)
}

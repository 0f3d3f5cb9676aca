//! Shows for which programs of PARSEC a log of writes contains the whole working set ([PRL, figure 11]).
//!
//! For a program that was run, the pages are measured. For the other programs, a profile states how many accesses of a
//! thread leave its core's caches, which regions they hit, and what share of them writes. In a class of `N` pages with `A`
//! accesses in an interval, `N (1 - exp(-A / N))` pages are used and `N (1 - exp(-w A / N))` are written; `w` is the share
//! of writes.

use anyhow::Result;
use homenode_formats::measured::{Measured, PROGRAMS, PROGRAMS_FILE};
use homenode_twin::workload::{Program, RegionProfile};

use super::mb;
use crate::design::array::{Array, Named};
use crate::design::functions::profile;
use crate::models::{Values, named};

/// The paper's interval, seconds.
const MU_S: f64 = 30.0;
/// PML is accurate if its log has at least this share of the used pages.
const ACCURATE: f64 = 0.95;

/// Returns, along axis `program`: the used and written pages, as `used_mb`, `written_mb` and `percent`; and whether PML is
/// `accurate`. If the program was run, `rest` is the percentage in the whole run; otherwise it is the number of accesses to
/// each used page, from the runs of grid `alone`.
pub(crate) fn parsec(value: Values<'_>) -> Result<Named> {
    let real = Measured::parse(PROGRAMS_FILE, PROGRAMS)?.program;
    let programs = value("program")?;
    let mut found = Vec::new();
    for name in &programs.axes[0].labels {
        let run = real
            .iter()
            .find(|program| program.parsec && program.name == *name);
        found.push(match run {
            Some(run) => {
                let whole = 100.0 * run.written as f64 / run.used as f64;
                (run.intervals_used as f64, run.intervals_written as f64, whole)
            }
            None => {
                let counted = |what: &str| {
                    let counted = value(&format!("alone.{what}[program='{name}']"))?;
                    anyhow::Ok(counted.only()?.number()?.unwrap_or(f64::NAN))
                };
                let accesses = counted("llc_references")? / counted("seconds")? * MU_S;
                let (used, written) = of_profile(&profile(name)?, accesses);
                (used, written, accesses / used)
            }
        });
    }
    let all = |of: fn(&(f64, f64, f64)) -> f64| {
        Array::of_numbers(programs.axes.clone(), found.iter().map(of).collect())
    };
    Ok(named([
        ("used_mb", all(|(used, ..)| mb(used.round() as u64))),
        ("written_mb", all(|(_, written, _)| mb(written.round() as u64))),
        ("percent", all(|(used, written, _)| 100.0 * (written / used))),
        (
            "accurate",
            all(|(used, written, _)| f64::from(written / used >= ACCURATE)),
        ),
        ("rest", all(|(.., rest)| *rest)),
    ]))
}

fn of_profile(program: &Program, accesses: f64) -> (f64, f64) {
    let regions = program
        .regions
        .iter()
        .map(|region| pages(program, region, accesses));
    regions.fold((0.0, 0.0), |all, region| (all.0 + region.0, all.1 + region.1))
}

/// Returns the pages of a region that are used, and those that are written, by this number of accesses to the program's
/// memory.
fn pages(program: &Program, region: &RegionProfile, accesses: f64) -> (f64, f64) {
    let heat = region
        .heat
        .iter()
        .map(|class| (class.page_share, class.access_share));
    let mut classes: Vec<(f64, f64)> = heat.collect();
    if classes.is_empty() {
        classes.push((1.0, 1.0));
    }
    let (mut used, mut written) = (0.0, 0.0);
    for (page_share, access_share) in classes {
        let count = region.size.to_pages().0 as f64 * page_share;
        let each = accesses * region.access_share * access_share / count;
        used += count * (1.0 - libm::exp(-each));
        written += count * (1.0 - libm::exp(-program.write_share * each));
    }
    (used, written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_accessed_once_is_written_by_the_share_of_writes_and_used_if_that_is_none() {
        let mut program = profile("vips").unwrap();
        let region = program.regions[0].clone();
        let few = pages(&program, &region, 10.0);
        assert!((few.1 / few.0 - program.write_share).abs() < 1e-3, "{few:?}");
        program.write_share = 0.0;
        let many = pages(&program, &region, 1e12);
        assert_eq!(many, (region.size.to_pages().0 as f64, 0.0));
    }
}

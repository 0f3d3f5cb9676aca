//! Computes how many pages a program writes in a given time, according to its profile.
//!
//! A page counts as written if it is written at least once: with `w` writes to `n` pages, these are `n (1 - exp(-w / n))`.
//! The number of writes is the profile's accesses to the last-level cache at solo speed, times its share of writes. Regions
//! are those of the profile.

use anyhow::Result;
use homenode_machine_files::preset;

use crate::design::array::{Cell, Named};
use crate::design::functions::{hardware, profile};
use crate::models::{Values, named};

const MACHINE: &str = "i7_pml";

/// Returns `written_pages`, for the programs that value `profile` names, and for the times on axis `seconds`.
pub(super) fn written_pages(value: Values<'_>) -> Result<Named> {
    let pages = value("profile")?.zip(&value("seconds")?, |profile, seconds| {
        let seconds = seconds.number()?.unwrap_or(f64::NAN);
        written(&profile.shown(), seconds).map(Cell::Number)
    })?;
    Ok(named([("written_pages", pages)]))
}

fn written(name: &str, seconds: f64) -> Result<f64> {
    let (machine, program) = (preset(MACHINE)?, profile(name)?);
    let solo_s = program.solo_seconds(&machine, hardware(&machine)?);
    let instructions = program.instructions_g_per_thread * 1e9;
    let per_second = instructions / solo_s * program.llc_accesses_per_kilo_instruction / 1000.0;
    let writes = per_second * program.write_share * seconds;
    let regions = program.regions.iter().map(|region| {
        let pages = region.size.to_pages().as_f64();
        pages * (1.0 - libm::exp(-(writes * region.access_share) / pages))
    });
    Ok(regions.sum())
}

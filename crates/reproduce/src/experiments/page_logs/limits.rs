//! `pml.limits` (section 3.4, L1 and L2): what PML cannot see.
//!
//! # Choices, made before the experiment was run
//!
//! - L1: the program of figure 2 without its outer loop, as the paper says: one pass over 400 MB, each page written with the
//!   probability wi and read otherwise, wi of 0, 50, 80 and 100 percent.
//! - L2: all pages written once, then 60 passes over the first 100 MB, more than the paper's tau.
//!
//! # Tests of shapes
//!
//! - PML's estimate is within 2 percent of 400 MB of what was written, at each wi, and so off by what was only read.
//! - In L2 it is within 2 percent of 400 MB, where 100 MB are in use.

use homenode_policy::working_set::{Logged, logged};
use homenode_tracking::paging::{Mode, Options};
use homenode_tracking::tlb::Access;
use homenode_units::{Chance, Ns};

use super::accuracy::GEM5_NS;
use super::mb;
use super::model::{ARRAY, Model};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{shape, table};
use crate::figure::{Figure, Shape as Drawing};
use crate::verdict::{Measured, show};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "pml.limits",
    runs: Vec::new,
    decide: |_| Ok(decide()),
};

const WRITE_PERCENT: [u64; 4] = [0, 50, 80, 100];
const SEED: u64 = 3;
/// Pages that stay in use in L2.
const HOT: u64 = ARRAY / 4;
const PASSES: u64 = 60;
const WITHIN_MB: f64 = 8.0;
const INTERVAL: Ns = Ns::from_secs(30);

/// What PML and PRL make of one pass.
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

/// What a tracker makes of cold pages that were written once.
fn cold_first(mode: Mode, config: logged::Config) -> f64 {
    let mut model = Model::new(ARRAY, mode, 512, Options::PUBLISHED);
    (0..ARRAY).for_each(|page| model.access(page, Access::Write, GEM5_NS));
    for page in (0..PASSES).flat_map(|_| 0..HOT) {
        model.access(page, Access::Write, GEM5_NS);
    }
    let estimate = model.close(&mut Logged::new(config), INTERVAL);
    mb(estimate.hot.to_pages().0)
}

fn decide() -> Decision {
    let passes = WRITE_PERCENT.map(one_pass);
    let off = passes.map(|(written, pml)| (pml - written).abs());
    let worst = off.into_iter().fold(0.0, f64::max);
    let all = mb(ARRAY);
    let unseen = passes.map(|(_, pml)| all - pml);
    let pml = cold_first(Mode::Pml, logged::Config::pml());
    let prl = cold_first(Mode::Paml, logged::Config::published());
    let rows = WRITE_PERCENT.iter().zip(passes);
    let rows =
        rows.map(|(percent, (written, pml))| (format!("{percent} percent written"), vec![written, pml, all]));
    let points = |of: fn((f64, f64)) -> f64| {
        let points = WRITE_PERCENT.iter().zip(passes);
        points
            .map(|(percent, pass)| (*percent as f64, of(pass)))
            .collect::<Vec<_>>()
    };
    Decision {
        measured: Measured {
            shapes: vec![
                shape(
                    "L1: PML gives what was written",
                    format!(
                        "off by at most {} MB; unseen {} MB where nothing is written",
                        show(worst),
                        show(unseen[0])
                    ),
                    worst <= WITHIN_MB,
                ),
                shape(
                    "L2: PML counts cold pages",
                    format!("{} MB, {} in use", show(pml), show(mb(HOT))),
                    (pml - all).abs() <= WITHIN_MB,
                ),
            ],
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![
            table(
                "L1: one pass over 400 MB, MB.",
                &["program", "written", "PML", "true working set"],
                rows,
            ),
            table(
                "L2: 400 MB written once, then 100 MB in use, MB.",
                &["tracker", "estimate"],
                [("PML".to_owned(), vec![pml]), ("PRL".to_owned(), vec![prl])],
            ),
        ],
        figures: vec![Figure {
            name: "pml-limits".to_owned(),
            title: "What PML sees of 400 MB, by share of writes [PRL, section 3.4]".to_owned(),
            x_label: "operations that write, percent".to_owned(),
            y_label: "MB".to_owned(),
            shape: Drawing::Lines(vec![
                ("PML".to_owned(), points(|(_, pml)| pml)),
                ("true working set".to_owned(), points(|_| mb(ARRAY))),
            ]),
        }],
        why: vec![],
        ..Decision::default()
    }
}

const SET_UP: &str = "Access by access on the model of core i7_pml: TLBs, nested walks, flags and PML's buffer by the manual's rules. The \
     guest's page tables, which PML logs as written when they are walked, are the kernel's and counted apart. PRL is not part of the \
     claim; its estimate on L2 is beside it.";

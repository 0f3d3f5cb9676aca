//! Simulates HPL page by page: blocked LU of the profile's matrix, which is 10000 by 10000, in blocks of 128 columns. Each
//! step reads its panel once for each following block of columns, and updates that block. The matrix is first filled, and
//! then factorised repeatedly, as in HPL's list of runs. The 330 G instructions, at 0.5 cycles each, are spread evenly over
//! the visited pages.

use std::ops::ControlFlow;

use anyhow::Result;
use homenode_policy::working_set::{Logged, Settled, logged};
use homenode_tracking::paging::{Mode, Options};
use homenode_tracking::tlb::Access;

use super::array::MU;
use super::guest::Model;
use super::mb;
use crate::design::array::{Array, Cell, Named};
use crate::models::{Values, named, numbered};

/// Returns `hot_mb` by interval, with PRL; `prl_mb`, the last of these estimates; `ended`, the interval in which PRL's loop
/// ended; `pml_mb` and `used_mb`.
pub(crate) fn working_set(_: Values<'_>) -> Result<Named> {
    let (hot, ended) = prl();
    let one = |number: Option<f64>| Array::one(number.into());
    let axis = numbered("interval", 1..=INTERVALS);
    let hot: Vec<f64> = hot.into_iter().map(mb).collect();
    let last = hot.last().copied();
    Ok(named([
        ("hot_mb", Array::of_numbers(vec![axis], hot)),
        ("prl_mb", one(last)),
        ("ended", one(ended.map(|interval| interval as f64))),
        ("pml_mb", one(Some(mb(pml())))),
        ("used_mb", Array::one(Cell::Number(mb(PAGES)))),
    ]))
}

const COLUMNS: u64 = 10_000;
const BLOCK: u64 = 128;
const STEPS: u64 = COLUMNS.div_ceil(BLOCK);
/// Numbers of 8 bytes in a page.
const PER_PAGE: u64 = 512;
const PAGES: u64 = (COLUMNS * COLUMNS).div_ceil(PER_PAGE);
/// The time that 330 G instructions take at 0.5 cycles each and 3.4 GHz (profile `hpl`).
const RUN_NS: f64 = 330e9 * 0.5 / 3.4;
const INTERVALS: usize = 12;

/// Returns the pages of a column, from a row to the end of the column.
fn pages(column: u64, first_row: u64) -> std::ops::RangeInclusive<u64> {
    let first = column * COLUMNS;
    (first + first_row) / PER_PAGE..=(first + COLUMNS - 1) / PER_PAGE
}

fn columns(block: u64) -> std::ops::Range<u64> {
    block * BLOCK..((block + 1) * BLOCK).min(COLUMNS)
}

/// Calls a function for each page that the first steps of a factorisation visit, in order.
fn visit(steps: u64, mut page: impl FnMut(u64, Access) -> ControlFlow<()>) -> ControlFlow<()> {
    for step in 0..steps {
        let first_row = step * BLOCK;
        for block in step..STEPS {
            for (column, access) in columns(step)
                .map(|column| (column, Access::Read))
                .chain(columns(block).map(|column| (column, Access::Write)))
            {
                for at in pages(column, first_row) {
                    page(at, access)?;
                }
            }
        }
    }
    ControlFlow::Continue(())
}

/// Returns the time between two visited pages of a run, in nanoseconds.
fn page_ns() -> f64 {
    let mut visits = 0_u64;
    let counted = visit(STEPS, |_, _| {
        visits += 1;
        ControlFlow::Continue(())
    });
    debug_assert!(counted.is_continue());
    RUN_NS / visits as f64
}

/// Returns the model after the first third of a run's steps, with PRL's log.
pub(crate) fn third_of_a_run(entries: u16) -> Model {
    let each_ns = page_ns();
    let mut model = Model::new(PAGES, Mode::Paml, entries, Options::PUBLISHED);
    let done = visit(STEPS / 3, |page, access| {
        model.access(page, access, each_ns);
        ControlFlow::Continue(())
    });
    debug_assert!(done.is_continue());
    model
}

/// Returns the hot pages by interval, and the interval in which PRL's loop ended.
fn prl() -> (Vec<u64>, Option<usize>) {
    let each_ns = page_ns();
    let in_interval = (MU.as_f64() / each_ns) as u64;
    let mut model = Model::new(PAGES, Mode::Paml, 512, Options::PUBLISHED);
    let mut estimator = Logged::new(logged::Config::published());
    let (mut hot, mut ended, mut visits) = (Vec::new(), None, 0);
    let mut page = |at, access| {
        model.access(at, access, each_ns);
        visits += 1;
        if visits % in_interval == 0 {
            let estimate = model.close(&mut estimator, MU);
            hot.push(estimate.hot.to_pages().0);
            if estimate.settled == Settled::Yes {
                ended = Some(hot.len());
            }
        }
        if ended.is_some() || hot.len() == INTERVALS {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    loop {
        let filled = (0..PAGES).try_for_each(|at| page(at, Access::Write));
        if filled.is_break() || visit(STEPS, &mut page).is_break() {
            return (hot, ended);
        }
    }
}

/// Returns PML's estimate in pages after the matrix was filled.
fn pml() -> u64 {
    let mut model = Model::new(PAGES, Mode::Pml, 512, Options::PUBLISHED);
    (0..PAGES).for_each(|at| model.access(at, Access::Write, 1.0));
    let mut estimator = Logged::new(logged::Config::pml());
    model.close(&mut estimator, MU).hot.to_pages().0
}

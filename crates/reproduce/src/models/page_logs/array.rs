//! Runs the programs of [PRL, figure 9], 400 MB, under PRL, PML and a poll of 100 pages.

use anyhow::Result;
use homenode_policy::working_set::logged::{Ageing, Config, Flush, HeatBy};
use homenode_policy::working_set::{
    Estimator, Logged, ObservationRef, Sampling, Settled, Tracker, UsedRef, sampling,
};
use homenode_tracking::paging::{Mode, Options, Start};
use homenode_tracking::tlb::Access;
use homenode_units::{Bytes, Chance, Ns, Pages};

use super::guest::{ARRAY, FRAMES, Model};
use super::mb;
use crate::design::array::{Array, Axis, Named};
use crate::models::{Values, named, numbered};

pub(crate) const MU: Ns = Ns::from_secs(30);
pub(crate) const PASSES: u64 = 17;
/// Nanoseconds per page with which 17 passes fill an interval.
pub(crate) const GEM5_NS: f64 = 30e9 / (PASSES * ARRAY) as f64;
/// Nanoseconds per page on the real machine: 60 s for 63 G instructions, with 26 instructions per turn (profile
/// `array.rrww`).
pub(crate) const NATIVE_NS: f64 = 60e9 / (63e9 / 26.0);
/// Number of intervals in each half. Tau is reached in the third interval, and PRL's loop ends four intervals later.
const HALF: u64 = 8;
const SAMPLES: u64 = 30;

/// A program: its name, and its accesses to each page in each half of its run.
pub(crate) type Program = (&'static str, [&'static [Access]; 2]);
pub(crate) const PROGRAMS: [Program; 3] = [
    ("RWRW", [&[Access::Read, Access::Write]; 2]),
    ("RRWW", [&[Access::Read], &[Access::Write]]),
    ("WWRR", [&[Access::Write], &[Access::Read]]),
];

/// Makes one pass over the array.
pub(crate) fn pass(model: &mut Model, operations: &[Access], page_ns: f64) {
    for page in 0..ARRAY {
        let each_ns = page_ns / operations.len() as f64;
        for access in operations {
            model.access(page, *access, each_ns);
        }
    }
}

/// The estimate with which PRL's loop first ends, and the hot pages in each interval.
struct Ended {
    estimate_mb: Option<f64>,
    dist_mb: Vec<f64>,
}

fn prl(program: &Program, page_ns: f64, start: Start) -> Ended {
    let options = Options {
        start,
        ..Options::PUBLISHED
    };
    let mut model = Model::new(ARRAY, Mode::Paml, 512, options);
    let mut estimator = Logged::new(Config::published());
    let mut ended = Ended {
        estimate_mb: None,
        dist_mb: Vec::new(),
    };
    for half in program.1 {
        for _ in 0..HALF {
            (0..PASSES).for_each(|_| pass(&mut model, half, page_ns));
            let estimate = model.close(&mut estimator, MU);
            let hot = mb(estimate.hot.to_pages().0);
            ended.dist_mb.push(hot);
            // An estimate at which the loop ends before any page is hot does not count.
            if estimate.settled == Settled::Yes && hot > 0.0 && ended.estimate_mb.is_none() {
                ended.estimate_mb = Some(hot);
            }
        }
    }
    ended
}

/// Returns, all in MB: PML's estimate at the end of each half, the page tables in its log, and the root-mean-square error of
/// a poll of 100 pages.
fn pml_and_poll(program: &Program) -> ([f64; 2], f64, f64) {
    let mut model = Model::new(ARRAY, Mode::Pml, 512, Options::PUBLISHED);
    let mut estimator = Logged::new(Config::pml());
    // PML logs a page once per interval, so one pass is enough.
    let estimates = program.1.map(|half| {
        pass(&mut model, half, GEM5_NS);
        mb(model.close(&mut estimator, MU).hot.to_pages().0)
    });
    let squares = (0..SAMPLES).map(|seed| {
        let mut chance = Chance::new(seed);
        let used = (0..100).filter(|_| model.used(chance.bits() % FRAMES)).count();
        let seen = ObservationRef {
            tracker: Tracker::Sampling,
            at: MU,
            interval: MU,
            memory: Pages(FRAMES),
            frames: FRAMES,
            seen: UsedRef::Sample {
                used: used as u32,
                drawn: 100,
                complete: true,
            },
            lost: 0,
            blind: Pages::ZERO,
        };
        let estimate = Sampling::new(sampling::Averages::Last, Bytes::ZERO).observe(&seen);
        let estimate = estimate
            .ok()
            .flatten()
            .map_or(f64::NAN, |estimate| mb(estimate.size.to_pages().0));
        (estimate - mb(ARRAY)).powi(2)
    });
    let rms = (squares.sum::<f64>() / SAMPLES as f64).sqrt();
    (estimates, mb(model.kernel_logged()), rms)
}

/// Programs other than a constant loop, at a tenth of the size. Each shows what one of the repairs is for.
mod repairs {
    use super::*;

    const PAGES: u64 = ARRAY / 10;
    const INTERVALS: u64 = 16;
    /// Passes per interval. With this number, two intervals exceed plain PRL's tau.
    const PASSES: u64 = 30;

    pub(super) const PROGRAMS: [&str; 4] = [
        "constant",
        "falls to a quarter",
        "hot pages in the TLB, cold scan",
        "one new page an interval",
    ];

    /// Returns the pages that the passes of an interval visit, and the number of pages truly in use at the end of the run.
    fn pages(program: usize, interval: u64) -> (std::ops::Range<u64>, u64) {
        match program {
            1 if interval >= 8 => (0..PAGES / 4, PAGES / 4),
            1 => (0..PAGES, PAGES / 4),
            2 => (0..500, 500),
            3 => (0..PAGES + interval, PAGES + INTERVALS),
            _ => (0..PAGES, PAGES),
        }
    }

    /// Returns the error of the last estimate in MB, and the number of the interval in which the loop first ended.
    pub(super) fn run(program: usize, config: Config) -> (f64, f64) {
        let mut model = Model::new(PAGES + INTERVALS, Mode::Paml, 512, Options::PUBLISHED);
        let mut estimator = Logged::new(config);
        let (mut last, mut ended) = (0.0, f64::NAN);
        for interval in 0..INTERVALS {
            let (used, _) = pages(program, interval);
            for page in (0..PASSES).flat_map(|_| used.clone()) {
                model.access(page, Access::Write, GEM5_NS);
            }
            // The scan visits all pages once, in every fourth interval.
            if program == 2 && interval % 4 == 0 {
                (0..PAGES).for_each(|page| model.access(page, Access::Read, GEM5_NS));
            }
            let estimate = model.close(&mut estimator, MU);
            if config.flush == Flush::EachWindow {
                model.flush();
            }
            last = mb(estimate.hot.to_pages().0);
            if estimate.settled == Settled::Yes && ended.is_nan() {
                ended = interval as f64 + 1.0;
            }
        }
        (last - mb(pages(program, INTERVALS).1), ended)
    }

    pub(super) fn configs() -> [(&'static str, Config); 4] {
        let plain = Config::published();
        let heat = HeatBy::Logs {
            tau: 50,
            ageing: Ageing::Halve,
        };
        [
            ("plain", plain),
            (
                "tolerance of 1 percent",
                Config {
                    tolerance: 0.01,
                    ..plain
                },
            ),
            ("counts halved each interval", Config { heat, ..plain }),
            (
                "all: seen in 2 of 4 intervals, flush, tolerance",
                Config::repaired(),
            ),
        ]
    }
}

/// Returns arrays along several axes. By `program` and `speed`: `prl_mb`, the estimate with which PRL's loop first ends (NaN
/// if it never does). By `program` and `interval`: `hot_mb`, at the first speed. By `program`: `pml_mb` after each `half`,
/// `tables_mb`, the page tables in PML's log, and `poll_mb`, the error of a poll. `past_mb` is PRL's estimate for RRWW if
/// the index begins one past the last entry. By `rule` and `case`: `error_mb`, and the interval in which the loop `ended`.
pub(crate) fn accuracy(_: Values<'_>) -> Result<Named> {
    let run = |page_ns| {
        PROGRAMS
            .each_ref()
            .map(|program| prl(program, page_ns, Start::Last))
    };
    let (gem5, native) = (run(GEM5_NS), run(NATIVE_NS));
    let past = prl(&PROGRAMS[1], GEM5_NS, Start::PastLast);
    let others = PROGRAMS.each_ref().map(pml_and_poll);
    let estimate = |ended: &Ended| ended.estimate_mb.unwrap_or(f64::NAN);
    let both = gem5
        .iter()
        .zip(&native)
        .flat_map(|both| [estimate(both.0), estimate(both.1)]);
    let axis = |name, labels: &[&str]| Axis::new(name, labels.iter().copied());
    let program = axis("program", &PROGRAMS.map(|(name, _)| name));
    let intervals = numbered("interval", 1..=2 * HALF as usize);
    let repaired = |of: fn((f64, f64)) -> f64| {
        let rules = repairs::configs().into_iter();
        let all = rules.flat_map(|(_, config)| (0..repairs::PROGRAMS.len()).map(move |case| (case, config)));
        all.map(|(case, config)| of(repairs::run(case, config)))
            .collect::<Vec<f64>>()
    };
    let cases = vec![
        axis("rule", &repairs::configs().map(|(name, _)| name)),
        axis("case", &repairs::PROGRAMS),
    ];
    let by_program = |of: fn(&([f64; 2], f64, f64)) -> f64| others.iter().map(of).collect::<Vec<f64>>();
    let of = Array::of_numbers;
    let hot = gem5.iter().flat_map(|ended| ended.dist_mb.clone());
    let pml = others.iter().flat_map(|of| of.0);
    Ok(named([
        (
            "prl_mb",
            of(
                vec![program.clone(), axis("speed", &["slow", "fast"])],
                both.collect(),
            ),
        ),
        ("hot_mb", of(vec![program.clone(), intervals], hot.collect())),
        (
            "pml_mb",
            of(
                vec![program.clone(), axis("half", &["first", "second"])],
                pml.collect(),
            ),
        ),
        ("tables_mb", of(vec![program.clone()], by_program(|of| of.1))),
        ("poll_mb", of(vec![program], by_program(|of| of.2))),
        ("past_mb", of(Vec::new(), vec![estimate(&past)])),
        ("error_mb", of(cases.clone(), repaired(|(error, _)| error))),
        ("ended", of(cases, repaired(|(_, ended)| ended))),
        ("all_mb", of(Vec::new(), vec![mb(ARRAY)])),
    ]))
}

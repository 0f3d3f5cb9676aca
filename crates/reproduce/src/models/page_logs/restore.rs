//! Restores a VM of 1 GiB with only its working set.
//!
//! The VM was checkpointed after some intervals in which its log of walks was read. The frames that the estimator called hot
//! are loaded before the VM starts. The other frames follow in the background, in order. If a page is used before it
//! arrives, it is fetched at once. *Whole* loads everything before the start. *Lazy* loads nothing before it, and later
//! fetches only used pages. A fetched page waits for the page that is being sent, and overtakes the others.

use anyhow::Result;
use homenode_policy::working_set::Logged;
use homenode_policy::working_set::logged::Config;
use homenode_tracking::paging::{Mode, Options};
use homenode_tracking::stream::{Pattern, Stream};
use homenode_tracking::tlb::Access;
use homenode_units::Ns;

use super::guest::{ARRAY, FAULT_NS, FRAMES, Model, frame};
use super::mb;
use crate::design::array::{Array, Axis, Named, places};
use crate::models::{Values, named};

const PAGE_BITS: f64 = 8.0 * 4096.0;
/// Intervals before the checkpoint: the estimator looks back at four.
const INTERVALS: u32 = 6;
const MU: Ns = Ns::from_secs(1);
const VISIT_NS: f64 = 1000.0;
const ASK_NS: f64 = 100_000.0;
const USEFUL_NS: f64 = 1e8;
const WORK_NS: f64 = 1e10;
/// Numbers of hot and cold pages of the second program: 100 and 700 MB.
const HOT: u64 = 25_600;
const COLD: u64 = 179_200;

/// A program: the pages that it visits, whether it uses other pages after the restore, and the number of pages.
struct Program {
    name: &'static str,
    pattern: Pattern,
    moves_on: bool,
    pages: u64,
}

fn programs() -> [Program; 3] {
    let array = || Pattern::Cyclic { lines: ARRAY };
    let uniform = |lines| Pattern::Uniform { lines };
    let two = Pattern::Mix(vec![(0.99, uniform(HOT)), (0.01, uniform(COLD))]);
    let of = |name, pattern, moves_on, pages| Program {
        name,
        pattern,
        moves_on,
        pages,
    };
    [
        of("array", array(), false, ARRAY),
        of("hot and cold", two, false, HOT + COLD),
        of("array that moves on", array(), true, 2 * ARRAY),
    ]
}

impl Program {
    fn visits(&self, first: u64) -> Stream {
        Stream::new(&self.pattern, first, 1)
    }

    /// Returns the frames that are hot at the checkpoint according to the estimator.
    fn working_set(&self) -> Vec<u64> {
        let mut model = Model::new(self.pages, Mode::Paml, 512, Options::PUBLISHED);
        let mut estimator = Logged::new(Config {
            mu: MU,
            ..Config::repaired()
        });
        let mut visits = self.visits(0);
        for _ in 0..INTERVALS {
            for _ in 0..(MU.as_f64() / VISIT_NS) as u64 {
                model.access(visits.next_line(), Access::Write, VISIT_NS);
            }
            model.close(&mut estimator, MU);
            model.flush();
        }
        estimator.hot_frames().collect()
    }
}

/// How a VM is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Whole,
    WorkingSet,
    Lazy,
}

const WAYS: [(Way, &str); 3] = [
    (Way::Whole, "whole"),
    (Way::WorkingSet, "working set first"),
    (Way::Lazy, "lazy"),
];

/// Times of a restore, nanoseconds from its beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Restored {
    start: f64,
    useful: f64,
    worked: f64,
    /// Number of pages loaded before the start, and of pages waited for after it.
    loaded: u64,
    fetched: u64,
}

/// The link that delivers frames, and the frames that have arrived.
struct Memory {
    has: Vec<bool>,
    /// The frames to be sent in the background, in order.
    rest: std::vec::IntoIter<u64>,
    /// Time at which the link has sent everything that was requested so far.
    busy_ns: f64,
    page_ns: f64,
}

impl Memory {
    /// Delivers everything sent in the background until now.
    fn advance(&mut self, now_ns: f64) {
        while self.busy_ns + self.page_ns <= now_ns
            && let Some(frame) = self.next()
        {
            self.has[frame as usize] = true;
            self.busy_ns += self.page_ns;
        }
    }

    /// Returns the next background frame that has not been fetched in the meantime.
    fn next(&mut self) -> Option<u64> {
        let has = &self.has;
        self.rest.find(|frame| !has[*frame as usize])
    }

    /// Waits for a missing frame, which is sent after the frame already on its way. Returns the time of its arrival.
    fn fetch(&mut self, frame: u64, now_ns: f64) -> f64 {
        if self.busy_ns <= now_ns
            && let Some(on_its_way) = self.next()
        {
            self.has[on_its_way as usize] = true;
            self.busy_ns += self.page_ns;
        }
        if self.has[frame as usize] {
            return self.busy_ns + FAULT_NS;
        }
        self.has[frame as usize] = true;
        self.busy_ns = self.busy_ns.max(now_ns) + self.page_ns;
        self.busy_ns + ASK_NS + FAULT_NS
    }
}

fn restored(program: &Program, hot: &[u64], way: Way, gbit: f64) -> Restored {
    let page_ns = PAGE_BITS / gbit;
    let (before, rest): (Vec<u64>, Vec<u64>) = match way {
        Way::Whole => ((0..FRAMES).collect(), Vec::new()),
        Way::WorkingSet => (hot.to_vec(), (0..FRAMES).collect()),
        Way::Lazy => (Vec::new(), Vec::new()),
    };
    let start = before.len() as f64 * page_ns;
    let mut memory = Memory {
        has: vec![false; FRAMES as usize],
        rest: rest.into_iter(),
        busy_ns: start,
        page_ns,
    };
    before.iter().for_each(|frame| memory.has[*frame as usize] = true);
    let mut visits = program.visits(if program.moves_on { ARRAY } else { 0 });
    let (mut now, mut useful, mut fetched) = (start, start, 0);
    for visit in 0..(WORK_NS / VISIT_NS) as u64 {
        let frame = frame(visits.next_line());
        if !memory.has[frame as usize] {
            memory.advance(now);
            if !memory.has[frame as usize] {
                now = memory.fetch(frame, now);
                fetched += 1;
            }
        }
        now += VISIT_NS;
        if visit as f64 * VISIT_NS < USEFUL_NS {
            useful = now;
        }
    }
    Restored {
        start,
        useful,
        worked: now,
        loaded: before.len() as u64,
        fetched,
    }
}

/// Returns, by `gbit` of the link, `program` and `way`: `loaded_mb` before the start; the times of the `start`, of the first
/// 100 ms of `useful` work, and when all work was done (`worked`), in nanoseconds; and the number of `fetched` pages.
pub(crate) fn restore(value: Values<'_>) -> Result<Named> {
    let links = value("gbit")?;
    let sets = programs().map(|program| {
        let hot = program.working_set();
        (program, hot)
    });
    let mut axes = links.axes.clone();
    axes.push(Axis::new("program", sets.iter().map(|(program, _)| program.name)));
    axes.push(Axis::new("way", WAYS.map(|(_, name)| name)));
    let mut all = Vec::new();
    for place in places(&axes) {
        let gbit = links.at(&place[..1]).number()?.unwrap_or(f64::NAN);
        let (program, hot) = &sets[place[1]];
        all.push(restored(program, hot, WAYS[place[2]].0, gbit));
    }
    let of = |of: fn(&Restored) -> f64| Array::of_numbers(axes.clone(), all.iter().map(of).collect());
    Ok(named([
        ("loaded_mb", of(|times| mb(times.loaded))),
        ("start", of(|times| times.start)),
        ("useful", of(|times| times.useful)),
        ("worked", of(|times| times.worked)),
        ("fetched", of(|times| times.fetched as f64)),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array() -> Program {
        let [array, ..] = programs();
        array
    }

    #[test]
    fn what_was_loaded_first_is_not_waited_for_and_what_was_not_is_once() {
        let hot: Vec<u64> = (0..ARRAY).map(frame).collect();
        let page_ns = PAGE_BITS / 10.0;
        let set = restored(&array(), &hot, Way::WorkingSet, 10.0);
        let loaded_ns = ARRAY as f64 * page_ns;
        assert_eq!((set.start, set.fetched, set.loaded), (loaded_ns, 0, ARRAY));
        assert!((set.useful - loaded_ns - USEFUL_NS).abs() < 1e3, "{set:?}");
        let lazy = restored(&array(), &hot, Way::Lazy, 10.0);
        assert_eq!((lazy.start, lazy.fetched), (0.0, ARRAY));
        // Each page takes a transfer, a round trip and a fault. Computed by hand, so equal up to the rounding of sums.
        let waited = ARRAY as f64 * (page_ns + ASK_NS + FAULT_NS);
        assert!((lazy.worked - WORK_NS - waited).abs() < 1e4, "{lazy:?}");
    }

    #[test]
    fn what_was_not_loaded_first_comes_by_itself_or_is_asked_for() {
        // Nothing is loaded first. After the time of a whole restore, everything has arrived except perhaps the last fetched
        // page.
        let behind = restored(&array(), &[], Way::WorkingSet, 10.0);
        let whole = restored(&array(), &[], Way::Whole, 10.0);
        assert!(behind.fetched > 0 && behind.fetched < ARRAY, "{behind:?}");
        assert!(behind.worked < whole.worked + ASK_NS + FAULT_NS, "{behind:?}");
        assert_eq!(whole.fetched, 0);
    }
}

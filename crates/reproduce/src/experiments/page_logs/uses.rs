//! `restore.working-set` and `cache.working-set`: two uses of a working set that \[PRL\] names (section 3.4) and does not
//! measure: a VM that is restored with it alone, and a cache that is divided by it.
//!
//! # Restoring
//!
//! A VM of 1 GiB was checkpointed after [`INTERVALS`] intervals in which its log of walks was read; the frames that the estimator
//! called hot are what is loaded before it starts. The rest follows in the background, in order, and what is used before it has
//! come is fetched at once. *Whole* loads all before the start, *lazy* nothing, and fetches what is used and no more.
//!
//! | | | source |
//! |---|---|---|
//! | link | 10 Gbit/s | as for `pml.live-migration` its alternative; 1 Gbit/s, its choice, is in the table |
//! | fault on a page that is not there | 1805 ns | as for `pml.invalidation-overhead` |
//! | asking for a page, there and back | 100 us | estimate: a round trip within a data centre |
//! | visit of a page | 1 us | estimate: a program that reads what it visits, 4 KiB, at 4 GB/s |
//!
//! A page that is asked for waits for the one that is being sent, and overtakes the others.
//!
//! # Dividing a cache
//!
//! Two programs share the 16 ways of machine i7_pml's cache, each with ways of its own and a core: in equal parts; in proportion
//! to their working sets, the memory that their profiles touch; and as is best for both by their miss-ratio curves. What one
//! loses is its time in its ways over its time in all of them, by the twin's cost of an access.
//!
//! # Choices, made before the experiments were run
//!
//! - Programs to restore: the paper's array, 400 MB in order; one that makes 99 of 100 visits to 100 MB and the rest to 700 MB,
//!   both at random; and the array again that after the restore is another 400 MB, the worst case.
//! - Useful: the first 100 ms of a program's work. Slow-down: of its first 10 s of work from the start on.
//! - The estimator is PRL repaired, with intervals of 1 s.
//! - Programs to share a cache: all pairs of the eight of SPEC CPU2006 that \[TAVO\] names.

use homenode_policy::working_set::Logged;
use homenode_policy::working_set::logged::Config;
use homenode_tracking::paging::{Mode, Options};
use homenode_tracking::stream::{Pattern, Stream};
use homenode_tracking::tlb::Access;
use homenode_twin::workload;
use homenode_units::Ns;

use super::costs::{FAULT_NS, PAGE_BITS};
use super::mb;
use super::model::{ARRAY, FRAMES, Model, frame};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{SPEC_2006, shape, table};
use crate::stats::mean;
use crate::verdict::Measured;

/// `restore.working-set`.
pub const RESTORE: Experiment = Experiment {
    claim: "restore.working-set",
    runs: Vec::new,
    decide: |_| restore(),
};
/// `cache.working-set`.
pub const CACHE: Experiment = Experiment {
    claim: "cache.working-set",
    runs: Vec::new,
    decide: |_| cache(),
};

/// Intervals before the checkpoint: the estimator looks back at four.
const INTERVALS: u32 = 6;
const MU: Ns = Ns::from_secs(1);
const VISIT_NS: f64 = 1000.0;
const ASK_NS: f64 = 100_000.0;
const LINKS_GBIT: [f64; 2] = [10.0, 1.0];
const USEFUL_NS: f64 = 1e8;
const WORK_NS: f64 = 1e10;
/// Pages of the second program: 100 and 700 MB.
const HOT: u64 = 25_600;
const COLD: u64 = 179_200;

/// A program: what it visits, whether it works on other pages after the restore, and how many pages that takes.
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

    /// Frames that the estimator calls hot when the VM is checkpointed.
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
    /// Pages loaded before the start, and pages that were waited for after it.
    loaded: u64,
    fetched: u64,
}

impl Restored {
    /// Percent by which the first 10 s of work took longer.
    fn slowdown(&self) -> f64 {
        100.0 * ((self.worked - self.start) / WORK_NS - 1.0)
    }
}

/// The link that frames come over, and which have come.
struct Memory {
    has: Vec<bool>,
    /// What is sent unasked, in order.
    rest: std::vec::IntoIter<u64>,
    /// Until when the link is busy with what was sent so far.
    busy_ns: f64,
    page_ns: f64,
}

impl Memory {
    /// What has come by itself until now.
    fn advance(&mut self, now_ns: f64) {
        while self.busy_ns + self.page_ns <= now_ns
            && let Some(frame) = self.next()
        {
            self.has[frame as usize] = true;
            self.busy_ns += self.page_ns;
        }
    }

    /// The next to be sent that was not asked for meanwhile.
    fn next(&mut self) -> Option<u64> {
        let has = &self.has;
        self.rest.find(|frame| !has[*frame as usize])
    }

    /// Waits for a frame that is not there: it is sent after what is on the way. Gives when it has come.
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

fn restore() -> Result<Decision, String> {
    let mut tables = Vec::new();
    let mut measured = Measured::default();
    let sets: Vec<(Program, Vec<u64>)> = programs()
        .into_iter()
        .map(|program| {
            let hot = program.working_set();
            (program, hot)
        })
        .collect();
    for gbit in LINKS_GBIT {
        let (mut rows, mut useful, mut slowdown) = (Vec::new(), Vec::new(), Vec::new());
        for (program, hot) in &sets {
            let all = WAYS.map(|(way, name)| (name, way, restored(program, hot, way, gbit)));
            let whole = all[0].2;
            for (name, way, times) in all {
                if way == Way::WorkingSet && !program.moves_on {
                    useful.push(100.0 * times.useful / whole.useful);
                    slowdown.push(times.slowdown());
                }
                rows.push((
                    format!("{}, {name}", program.name),
                    vec![
                        mb(times.loaded),
                        times.start / 1e6,
                        times.useful / 1e6,
                        times.slowdown(),
                        times.worked / 1e9,
                        times.fetched as f64,
                    ],
                ));
            }
        }
        if gbit == LINKS_GBIT[0] {
            let largest = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            measured.numbers.insert("useful".to_owned(), largest(&useful));
            measured.numbers.insert("slowdown".to_owned(), largest(&slowdown));
        }
        tables.push(table(
            &format!("A VM of 1 GiB restored over {gbit} Gbit/s."),
            &[
                "program and way",
                "loaded first, MB",
                "start, ms",
                "first 100 ms of work done, ms",
                "slow-down of 10 s of work, %",
                "10 s of work done, s",
                "pages waited for",
            ],
            rows,
        ));
    }
    Ok(Decision {
        measured,
        set_up: vec![
            "Accesses one by one on the access-level model; frames are those that PRL repaired calls hot. What counts is the worse of the two \
             programs that go on as they were, at 10 Gbit/s; what happens to one that does not is in the tables."
                .to_owned(),
        ],
        tables,
        why: vec![
            "What a restore by working sets saves is what the VM does not use. Over a slow link, or for a program that has moved on, pages \
             are waited for one by one, a round trip each."
                .to_owned(),
        ],
        ..Decision::default()
    })
}

fn cache() -> Result<Decision, String> {
    let machine = homenode_machine_files::preset("i7_pml").map_err(|error| error.to_string())?;
    let hw = machine.hardware.clone().ok_or("the machine has no hardware")?;
    let llc = machine.llcs.first().ok_or("the machine has no cache")?.clone();
    let ways = llc
        .ways
        .ok_or("the machine does not say how many ways its cache has")?;
    let way_bytes = llc.size_bytes.as_f64() / f64::from(ways);
    let programs = SPEC_2006.map(|name| (name, workload::builtin(name).and_then(|found| found.program)));
    let programs: Vec<_> = programs
        .into_iter()
        .map(|(name, program)| {
            Ok((
                name,
                program.ok_or_else(|| format!("there is no profile {name}"))?,
            ))
        })
        .collect::<Result<_, String>>()?;
    let (mut rows, mut lost) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    for (at, (name, program)) in programs.iter().enumerate() {
        for (other_name, other) in &programs[at + 1..] {
            let of = |program: &workload::Program, some: u32| {
                let within = |ways: u32| program.seconds_within(f64::from(ways) * way_bytes, &hw);
                100.0 * (within(some) / within(ways) - 1.0)
            };
            let both = |first: u32| (of(program, first) + of(other, ways - first)) / 2.0;
            let (mine, theirs) = (program.footprint(1).as_f64(), other.footprint(1).as_f64());
            let share = (f64::from(ways) * mine / (mine + theirs)).round() as u32;
            let by_sets = share.clamp(1, ways - 1);
            let by_curves = (1..ways)
                .min_by(|a, b| both(*a).total_cmp(&both(*b)))
                .ok_or("a cache of one way cannot be divided")?;
            let divided = [ways / 2, by_sets, by_curves];
            for (list, first) in lost.iter_mut().zip(divided) {
                list.push(both(first));
            }
            let row = divided.iter().flat_map(|first| [f64::from(*first), both(*first)]);
            rows.push((format!("{name}, {other_name}"), row.collect()));
        }
    }
    let [equal, sets, curves] = lost.map(|list| mean(&list).unwrap_or(f64::NAN));
    let mut measured = Measured::default();
    measured
        .numbers
        .insert("by_curves".to_owned(), 100.0 * curves / equal);
    measured.shapes.push(shape(
        "in proportion to working sets less is lost than in equal parts",
        format!("{sets:.2} against {equal:.2} percent"),
        sets < equal,
    ));
    Ok(Decision {
        measured,
        set_up: vec![
            "28 pairs on machine i7_pml, each program with ways of its own and all memory to itself; what is lost is the mean of both, against \
             all 16 ways alone."
                .to_owned(),
        ],
        tables: vec![
            table(
                "Percent that the two programs of a pair lose on average.",
                &["pairs", "equal", "by working sets", "by miss-ratio curves"],
                [(format!("all {}", rows.len()), vec![equal, sets, curves])],
            ),
            table(
                "Ways of the first program, and percent that both lose on average.",
                &[
                    "programs",
                    "equal",
                    "lost",
                    "by working sets",
                    "lost",
                    "by miss-ratio curves",
                    "lost",
                ],
                rows,
            ),
        ],
        why: vec![
            "A working set counts pages that were used, however often; what a cache gains by a way is how often lines come back that fit into \
             it. A program that streams through much memory has the largest working set and the least use for a cache."
                .to_owned(),
        ],
        ..Decision::default()
    })
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
        // A page each, a round trip and a fault: by hand, to the rounding of sums.
        let waited = ARRAY as f64 * (page_ns + ASK_NS + FAULT_NS);
        assert!((lazy.worked - WORK_NS - waited).abs() < 1e4, "{lazy:?}");
    }

    #[test]
    fn what_was_not_loaded_first_comes_by_itself_or_is_asked_for() {
        // Nothing first: in the time of a whole restore all has come, and only the last page asked for may still be waited for.
        let behind = restored(&array(), &[], Way::WorkingSet, 10.0);
        let whole = restored(&array(), &[], Way::Whole, 10.0);
        assert!(behind.fetched > 0 && behind.fetched < ARRAY, "{behind:?}");
        assert!(behind.worked < whole.worked + ASK_NS + FAULT_NS, "{behind:?}");
        assert_eq!(whole.fetched, 0);
    }
}

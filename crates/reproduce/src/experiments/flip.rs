//! The claims on page flipping: `flip.*` of \[Flip\] and `xpv.flipping-drift` [XPV, figure 4.2].
//!
//! # Choices, made before the experiments were run
//!
//! - [Flip, section V-A]: machine xeon26x2 under Xen's credit scheduler; a VM of 16 vCPUs and 16 GiB on node 0, pinned one vCPU
//!   per CPU, which sees that one node (vNUMA); the driver domain has node 1 to itself, with all of its memory. The
//!   benchmark runs, then BigBench for 180 minutes, then the benchmark again, without a reboot. A benchmark takes a
//!   minute.
//! - BigBench's I/O rate is the one figure that is fitted, to 25 percent of the VM's memory after 180 minutes, which
//!   `flip.drift` lists as its input. All other claims here take it as it is.
//! - Repatriation is Homenode's, looking every 10 s; it brings home strays of the driver domain as well.
//! - [XPV, section 4.1.2]: machine amd6344x8; the driver domain has node 0 to itself, the VM is on node 2, in another
//!   package, with a vCPU for each of its 6 CPUs and 6 of its 8 GiB. A run is as many instructions of each thread as BigBench
//!   ran in 180 minutes on xeon26x2. Remote memory is that at the beginning of a run, a slowdown against the first.
//!
//! # Tests of shapes, fixed before the experiments were run
//!
//! - `flip.drift`: remote memory never falls from one half hour to the next; with copying none is remote; "significantly
//!   slower" is at least 5 percent.
//! - `flip.cost`: the worst case is the greatest loss among STREAM, LinkBench and BigBench itself.
//! - `flip.cured`: "stay zero" is none at all; "alike" is within 2 percent.
//! - `flip.period-equals-threshold`: both benchmarks afterwards within 2 percent of each other.

use homenode_control::PolicySet;
use homenode_policy::repatriate::Start;
use homenode_twin::{
    Backend, Hypervisor, NextProgram, PoolSpec, ProgramReport, Scenario, Transfer, VmReport, VmSpec, Vnuma,
    Workload, workload,
};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeSet, Ns};

use super::{shape, slowdown_percent, table, work_share};
use crate::experiment::{Decision, Experiment, Table};
use crate::figure::{Figure, Line, PUBLISHED_SERIES, Shape as Drawing};
use crate::run::{Outcome, Run};
use crate::verdict::{Measured, Shape, show};
use crate::work::Outcomes;

/// [XPV, figure 4.2].
pub const AGAIN: Experiment = Experiment {
    claim: "xpv.flipping-drift",
    runs: || LENGTHS.into_iter().map(repeated).collect(),
    decide: again,
};
/// Figs 3 and 7a.
pub const DRIFT: Experiment = Experiment {
    claim: "flip.drift",
    runs: || {
        let mut runs = vec![one("stream", Remedy::None), one("stream", Remedy::Copy)];
        runs.extend([Remedy::None, Remedy::Copy].map(at_full_rate));
        runs
    },
    decide: drift,
};
/// Figs 4 and 8.
pub const COST: Experiment = Experiment {
    claim: "flip.cost",
    runs: || {
        PROGRAMS
            .into_iter()
            .map(|program| one(program, Remedy::None))
            .collect()
    },
    decide: cost,
};
/// Figs 7b, 7c and 8.
pub const CURED: Experiment = Experiment {
    claim: "flip.cured",
    runs: || {
        let main = PAIR
            .into_iter()
            .flat_map(|program| CURES.map(|cure| one(program, cure)));
        main.chain(VARIANTS.map(|remedy| one("stream", remedy))).collect()
    },
    decide: cured,
};
/// Section V-A.
pub const TRIGGERS: Experiment = Experiment {
    claim: "flip.period-equals-threshold",
    runs: || {
        let of = |program| [AMOUNT, PERIOD].map(|remedy| one(program, remedy));
        PAIR.into_iter().flat_map(of).collect()
    },
    decide: triggers,
};

/// Bytes that a thread of BigBench moves over the network in a thousand instructions: fitted so that 25 percent of the VM's
/// memory is remote after 180 minutes (`flip.drift`).
const BYTES_PER_KILO_INSTRUCTION: f64 = 0.0244;
/// BigBench's work, of which its profile does a minute's on 4 vCPUs: 180 minutes and a little on 16, so that it still runs then.
const WORK: f64 = 184.0;
const MINUTES: u64 = 180;
const BIGBENCH: &str = "bigbench at the fitted rate";
/// The benchmarks of Fig 8, and all that are run after flipping.
const PAIR: [&str; 2] = ["stream", "linkbench"];
const PROGRAMS: [&str; 3] = ["stream", "linkbench", "bigbench"];
const WATCH: Ns = Ns::from_secs(30);
/// The agent's, of which nothing here needs more.
const STEP: Ns = Ns::from_secs(10);
const GUEST: Bytes = Bytes::from_gib(16);
const SLOWER_LEAST: f64 = 5.0;
const ALIKE_MOST: f64 = 2.0;

/// What is done about flips.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Remedy {
    None,
    Copy,
    /// A pool: initial MB, grow above, shrink below, both percent.
    Pool(u64, u32, u32),
    /// A pool of so many MB that stays as it is.
    Fixed(u64),
    /// Repatriation at so many MB.
    Amount(u64),
    /// Repatriation every so many seconds.
    Period(u64),
}

const POOL: Remedy = Remedy::Pool(500, 90, 20);
const AMOUNT: Remedy = Remedy::Amount(500);
const PERIOD: Remedy = Remedy::Period(900);
const CURES: [Remedy; 2] = [POOL, AMOUNT];
const VARIANTS: [Remedy; 8] = [
    Remedy::Pool(100, 90, 20),
    Remedy::Pool(2000, 90, 20),
    Remedy::Pool(500, 80, 50),
    Remedy::Pool(500, 95, 5),
    Remedy::Fixed(500),
    Remedy::Amount(2000),
    Remedy::Period(300),
    Remedy::Period(3600),
];

impl Remedy {
    fn name(self) -> String {
        match self {
            Remedy::None => "flipping".to_owned(),
            Remedy::Copy => "copying".to_owned(),
            Remedy::Pool(initial, grow, shrink) => {
                format!(
                    "pool of {initial} MB at first, grows above {grow} and shrinks below {shrink} percent"
                )
            }
            Remedy::Fixed(size) => format!("pool of {size} MB"),
            Remedy::Amount(amount) => format!("repatriation at {amount} MB"),
            Remedy::Period(period) => format!("repatriation every {period} s"),
        }
    }

    fn backend(self) -> Backend {
        let mb = |mb: u64| Bytes(mb * 1_000_000);
        Backend {
            vm: "privvm".to_owned(),
            transfer: if self == Remedy::Copy {
                Transfer::Copy
            } else {
                Transfer::Flip
            },
            pool: match self {
                Remedy::Pool(initial, grow, shrink) => Some(PoolSpec {
                    initial: mb(initial),
                    grow_above_percent: grow,
                    shrink_below_percent: shrink,
                    ..PoolSpec::default()
                }),
                Remedy::Fixed(size) => Some(PoolSpec {
                    fixed: true,
                    initial: mb(size),
                    ..PoolSpec::default()
                }),
                _ => None,
            },
        }
    }

    fn start(self) -> Option<Start> {
        match self {
            Remedy::Amount(amount) => Some(Start::Amount(Bytes(amount * 1_000_000))),
            Remedy::Period(period) => Some(Start::Period(Ns::from_secs(period))),
            _ => None,
        }
    }
}

fn cpus(first: u32, count: u16) -> CpuSet {
    (first..first + u32::from(count)).map(CpuId).collect()
}

/// BigBench with its I/O rate fitted.
fn bigbench() -> Workload {
    let mut fitted = workload::builtin("bigbench").expect("a profile that comes with the twin");
    fitted.name = BIGBENCH.to_owned();
    fitted.calibrated_to = ["flip.drift", "xpv.flipping-drift"].map(str::to_owned).to_vec();
    for io in fitted.program.iter_mut().flat_map(|program| &mut program.io) {
        io.bytes_per_kilo_instruction = BYTES_PER_KILO_INSTRUCTION;
    }
    fitted
}

/// A driver domain that has a node to itself, and a VM behind it that runs one program after the other.
fn host(name: &str, driver: VmSpec, mut vm: VmSpec, then: Vec<NextProgram>, remedy: Remedy) -> Scenario {
    vm.vnuma = Vnuma::Static;
    vm.then = then;
    let mut scenario =
        Scenario::of(name, vec![driver, vm.behind(remedy.backend())]).with_workload(bigbench());
    scenario.hypervisor = Hypervisor::Xen;
    scenario
}

fn on_xeon(name: &str, program: &str, then: Vec<NextProgram>, remedy: Remedy) -> Scenario {
    let node = |node| NodeSet::one(NodeId(node));
    let driver = VmSpec::new("privvm", 4, Bytes::from_gib(64), "idle")
        .on_cpus(cpus(26, 26))
        .with_memory_on(node(1));
    let vm = VmSpec::new("vm", 16, GUEST, program)
        .doing(work_share("xeon26x2", program))
        .on_cpus(cpus(0, 16))
        .with_memory_on(node(0));
    host(name, driver, vm, then, remedy)
}

/// A benchmark, BigBench for 180 minutes, the benchmark again.
fn one(program: &str, remedy: Remedy) -> Run {
    let again = NextProgram::new(program).doing(work_share("xeon26x2", program));
    let then = vec![NextProgram::new(BIGBENCH).doing(WORK), again];
    let name = format!("{program} before and after BigBench, {}", remedy.name());
    let start = remedy.start();
    let policies = if start.is_some() {
        PolicySet::Tavo
    } else {
        PolicySet::Default
    };
    let mut run = Run {
        until: Ns::from_secs(20_000),
        watch: Some(WATCH),
        ..Run::to_end("xeon26x2", on_xeon(&name, program, then, remedy), policies, 1)
    };
    run.config.period = STEP;
    if let Some(start) = start {
        run.config.repatriate.start = start;
    }
    run
}

/// A minute of BigBench at the rate that its profile has, or what the network gives.
fn at_full_rate(remedy: Remedy) -> Run {
    let name = format!("BigBench at its profile's rate, {}", remedy.name());
    Run::to_end(
        "xeon26x2",
        on_xeon(&name, "bigbench", Vec::new(), remedy),
        PolicySet::Default,
        1,
    )
}

/// Length of a run of BigBench on amd6344x8, as a share of what 180 minutes are on xeon26x2: as chosen, and others.
const LENGTHS: [f64; 2] = [1.0, 0.5];
const REPEATS: usize = 8;
/// The fifth run, counted from 0.
const FIFTH: usize = 4;

fn repeated(length: f64) -> Run {
    let node = |node| NodeSet::one(NodeId(node));
    let driver = VmSpec::new("privvm", 4, Bytes::from_gib(8), "idle")
        .on_cpus(cpus(0, 6))
        .with_memory_on(node(0));
    let vm = VmSpec::new("vm", 6, Bytes::from_gib(6), BIGBENCH)
        .doing(MINUTES as f64 * length)
        .on_cpus(cpus(12, 6))
        .with_memory_on(node(2));
    let then = vec![NextProgram::new(BIGBENCH).doing(MINUTES as f64 * length); REPEATS - 1];
    let name = format!("BigBench again and again, {length} of the length");
    let scenario = host(&name, driver, vm, then, Remedy::None);
    let mut run = Run {
        until: Ns::from_secs(400_000),
        watch: Some(WATCH),
        ..Run::to_end("amd6344x8", scenario, PolicySet::Default, 1)
    };
    run.config.period = STEP;
    run
}

/// CPU time that a VM's driver domain owed for its I/O, in seconds; 0 where it has none.
fn backend_s(vm: &VmReport) -> f64 {
    vm.driver_domain.map_or(0.0, |channel| channel.backend_s)
}

fn guest(outcome: &Outcome) -> Result<&VmReport, String> {
    outcome
        .vms
        .get(1)
        .ok_or_else(|| "a run has no second VM".to_owned())
}

fn program(outcome: &Outcome, at: usize) -> Result<&ProgramReport, String> {
    let program = guest(outcome)?.programs.get(at);
    program.ok_or_else(|| format!("program {} of a run did not begin", at + 1))
}

fn runtime(outcome: &Outcome, at: usize) -> Result<f64, String> {
    let runtime = program(outcome, at)?.runtime_s;
    runtime.ok_or_else(|| format!("program {} of a run did not end", at + 1))
}

/// What the benchmark loses of its throughput, percent of the first run.
fn loss_percent(outcome: &Outcome) -> Result<f64, String> {
    Ok(100.0 * (1.0 - runtime(outcome, 0)? / runtime(outcome, 2)?))
}

/// Percent of the VM's memory that is remote, by minutes since a time.
fn remote(outcome: &Outcome, since_s: f64, memory: Bytes) -> Vec<(f64, f64)> {
    let all = memory.to_pages().0 as f64;
    let moments = outcome.moments.iter();
    moments
        .map(|moment| {
            let minute = (moment.at_ns as f64 / 1e9 - since_s) / 60.0;
            let away = moment.vms.get(1).map_or(0, |vm| vm.pages_away);
            (minute, 100.0 * away as f64 / all)
        })
        .filter(|(minute, _)| *minute >= 0.0)
        .collect()
}

/// The line of a run during BigBench.
fn layout(outcome: &Outcome) -> Result<Vec<(f64, f64)>, String> {
    let mut line = remote(outcome, program(outcome, 1)?.began_s, GUEST);
    line.retain(|(minute, _)| *minute <= MINUTES as f64 + 1.0);
    Ok(line)
}

/// The value of a line at a point, between its two neighbours.
fn at(line: &[(f64, f64)], x: f64) -> f64 {
    let after = line.partition_point(|(here, _)| *here < x);
    match (line.get(after.wrapping_sub(1)), line.get(after)) {
        (Some(a), Some(b)) => a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0),
        _ => f64::NAN,
    }
}

fn lines(name: &str, title: &str, x_label: &str, lines: Vec<Line>) -> Figure {
    Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        x_label: x_label.to_owned(),
        y_label: "percent of the VM's memory".to_owned(),
        shape: Drawing::Lines(lines),
    }
}

fn bars(
    name: &str,
    title: &str,
    y_label: &str,
    categories: Vec<String>,
    series: Vec<(String, Vec<Option<f64>>)>,
) -> Figure {
    Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        x_label: String::new(),
        y_label: y_label.to_owned(),
        shape: Drawing::Bars(categories, series),
    }
}

fn drift(outcomes: &Outcomes) -> Result<Decision, String> {
    let runs = [Remedy::None, Remedy::Copy];
    let [flip, copy] = runs.map(|remedy| outcomes.of(&one("stream", remedy)));
    let (flip, copy) = (flip?, copy?);
    let (flipped, copied) = (layout(flip)?, layout(copy)?);
    let slower = slowdown_percent(runtime(flip, 1)?, runtime(copy, 1)?);
    let full = |remedy| -> Result<(f64, f64), String> {
        let vm = guest(outcomes.of(&at_full_rate(remedy))?)?;
        let runtime = vm.runtime_s.ok_or("BigBench at its profile's rate did not end")?;
        Ok((runtime, backend_s(vm)))
    };
    let (full_flip, full_copy) = (full(Remedy::None)?, full(Remedy::Copy)?);
    let halves: Vec<f64> = (0..=6)
        .map(|half| at(&flipped, 30.0 * f64::from(half).max(0.2)))
        .collect();
    let most_copied = copied.iter().map(|(_, percent)| *percent).fold(0.0, f64::max);
    let rows = [
        (
            "at the fitted rate",
            runtime(flip, 1)?,
            backend_s(guest(flip)?),
            runtime(copy, 1)?,
            backend_s(guest(copy)?),
        ),
        (
            "a minute at the profile's rate",
            full_flip.0,
            full_flip.1,
            full_copy.0,
            full_copy.1,
        ),
    ];
    let rows = rows.map(|(name, a, b, c, d)| (name.to_owned(), vec![a, b, c, d, slowdown_percent(a, c)]));
    Ok(Decision {
        measured: Measured {
            numbers: [("remote_pct_at_180_min".to_owned(), at(&flipped, MINUTES as f64))].into(),
            inputs: vec!["remote_pct_at_180_min".to_owned()],
            shapes: vec![
                shape(
                    "with flipping it never falls in half an hour",
                    halves
                        .iter()
                        .map(|percent| show(*percent))
                        .collect::<Vec<_>>()
                        .join(", "),
                    halves.windows(2).all(|pair| pair[1] >= pair[0]),
                ),
                shape(
                    "with copying none is remote",
                    format!("{} percent", show(most_copied)),
                    most_copied == 0.0,
                ),
                shape(
                    "copying makes BigBench at least 5 percent slower",
                    format!("{} percent", show(slower)),
                    slower >= SLOWER_LEAST,
                ),
            ],
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned(), drift_set_up(flip)?],
        tables: vec![table(
            "BigBench: its runtime and the driver domain's CPU time for it, seconds; by what copying makes it slower, percent.",
            &["I/O", "flipping", "CPU", "copying", "CPU", "slower"],
            rows,
        )],
        figures: vec![lines(
            "flip-drift",
            "Remote memory during BigBench [Flip, figure 3a and 3b]",
            "minutes",
            vec![
                ("flipping".to_owned(), flipped),
                ("copying".to_owned(), copied),
                (
                    format!("{PUBLISHED_SERIES}: flipping"),
                    vec![(0.0, 0.0), (180.0, 25.0)],
                ),
            ],
        )],
        why: vec![WHY_COPYING.to_owned()],
        ..Decision::default()
    })
}

fn drift_set_up(flip: &Outcome) -> Result<String, String> {
    let program = workload::builtin("bigbench").and_then(|workload| workload.program);
    let instructions = program.map_or(0.0, |program| program.instructions_g_per_thread) * 16.0 * 1e9 * WORK;
    let bytes = instructions * BYTES_PER_KILO_INSTRUCTION / 1000.0;
    Ok(format!(
        "Fitted: {} bytes in a thousand instructions, {} MB/s of the VM, {} GB in all. A guest that gave back the page freed last would \
         flip one page again and again; then the rate fitted here is that of flips that reach another page, and the I/O itself is \
         more.",
        BYTES_PER_KILO_INSTRUCTION,
        show(bytes / runtime(flip, 1)? / 1e6),
        show(bytes / 1e9)
    ))
}

fn cost(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut rows = Vec::new();
    for name in PROGRAMS {
        let outcome = outcomes.of(&one(name, Remedy::None))?;
        let last = program(outcome, 2)?;
        let away = 100.0 * last.pages_touched_away as f64 / last.pages_touched.max(1) as f64;
        let values = vec![
            runtime(outcome, 0)?,
            runtime(outcome, 2)?,
            loss_percent(outcome)?,
            away,
        ];
        rows.push((name.to_owned(), values));
    }
    let losses: Vec<f64> = rows.iter().map(|(_, values)| values[2]).collect();
    let worst = losses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Ok(Decision {
        measured: Measured {
            numbers: [
                ("stream_pct".to_owned(), losses[0]),
                ("worst_pct".to_owned(), worst),
            ]
            .into(),
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned(), COST_SET_UP.to_owned()],
        figures: vec![bars(
            "flip-cost",
            "What programs lose after flipping [Flip, figure 4 and 8]",
            "percent of throughput",
            PROGRAMS.map(str::to_owned).to_vec(),
            vec![
                ("ours".to_owned(), losses.iter().map(|loss| Some(*loss)).collect()),
                (PUBLISHED_SERIES.to_owned(), vec![Some(13.0), None, None]),
            ],
        )],
        tables: vec![table(
            "Before and after BigBench: seconds, loss of throughput in percent, and how much of the memory that it took the \
             second time was remote, percent.",
            &["program", "before", "after", "loss", "remote allocations"],
            rows,
        )],
        why: vec![WHY_COST.to_owned()],
        ..Decision::default()
    })
}

/// Most remote memory during BigBench, remote allocations of the second run, both percent, and its loss.
fn effect(outcome: &Outcome) -> Result<[f64; 3], String> {
    let most = layout(outcome)?
        .into_iter()
        .map(|(_, percent)| percent)
        .fold(0.0, f64::max);
    let last = program(outcome, 2)?;
    let away = 100.0 * last.pages_touched_away as f64 / last.pages_touched.max(1) as f64;
    Ok([most, away, loss_percent(outcome)?])
}

fn cured(outcomes: &Outcomes) -> Result<Decision, String> {
    let (mut most, mut shapes, mut drawn, mut rows) = (0.0_f64, Vec::new(), Vec::new(), Vec::new());
    let mut losses: Vec<(String, Vec<Option<f64>>)> = Vec::new();
    for cure in CURES {
        let (mut away_most, mut of_cure) = (0.0_f64, Vec::new());
        for name in PAIR {
            let outcome = outcomes.of(&one(name, cure))?;
            let [remote, away, loss] = effect(outcome)?;
            (most, away_most) = (most.max(remote), away_most.max(away));
            of_cure.push(Some(loss));
            let what = format!("{name} before and after alike, {}", short(cure));
            shapes.push(shape(
                &what,
                format!("{} percent lost", show(loss)),
                loss.abs() <= ALIKE_MOST,
            ));
            rows.push((format!("{name}: {}", cure.name()), vec![remote, away, loss]));
        }
        let what = format!("no remote allocation, {}", short(cure));
        shapes.push(shape(
            &what,
            format!("{} percent", show(away_most)),
            away_most == 0.0,
        ));
        drawn.push((
            short(cure).to_owned(),
            layout(outcomes.of(&one("stream", cure))?)?,
        ));
        losses.push((short(cure).to_owned(), of_cure));
    }
    let varied = VARIANTS.map(|remedy| {
        let effect = effect(outcomes.of(&one("stream", remedy))?)?;
        Ok::<_, String>((remedy.name(), effect.to_vec()))
    });
    let varied: Vec<(String, Vec<f64>)> = varied.into_iter().collect::<Result<_, _>>()?;
    let header = ["", "most remote", "remote allocations", "loss"];
    Ok(Decision {
        measured: Measured {
            numbers: [("remote_pct".to_owned(), most)].into(),
            shapes,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned(), cured_set_up(outcomes)?],
        tables: vec![
            table(
                "Percent of memory, of what the second run takes, and of its throughput.",
                &header,
                rows,
            ),
            table("The same for STREAM with other settings.", &header, varied),
        ],
        figures: vec![
            lines(
                "flip-cured",
                "Remote memory during BigBench [Flip, figure 7b and 7c]",
                "minutes",
                drawn,
            ),
            bars(
                "flip-cured-cost",
                "What programs lose after BigBench [Flip, figure 8]",
                "percent of throughput",
                PAIR.map(str::to_owned).to_vec(),
                losses,
            ),
        ],
        why: vec![WHY_CURED.to_owned()],
        ..Decision::default()
    })
}

fn short(cure: Remedy) -> &'static str {
    if cure == POOL { "page pool" } else { "repatriation" }
}

fn cured_set_up(outcomes: &Outcomes) -> Result<String, String> {
    let channel = guest(outcomes.of(&one("stream", POOL))?)?.driver_domain;
    let used = channel.map_or(0, |channel| channel.pages_used_max);
    Ok(format!(
        "Of the pool at most {used} pages were used at once, the ring's 256 and those under way. By Algorithm 1, at each flip, the pool \
         shrinks from 500 MB until that is a fifth of it, within the first tens of flips; what it gives back is at home still, so \
         no program gets a remote page. A pool that stays at 500 MB is all remote in the end: 2.9 percent of 16 GiB, which is \
         the paper's 3 percent; what bounds remote memory is thus the size of the pool, and not a threshold."
    ))
}

fn triggers(outcomes: &Outcomes) -> Result<Decision, String> {
    let (mut shapes, mut rows): (Vec<Shape>, Vec<(String, Vec<f64>)>) = (Vec::new(), Vec::new());
    let mut drawn = Vec::new();
    for name in PAIR {
        let by_amount = runtime(outcomes.of(&one(name, AMOUNT))?, 2)?;
        let by_period = runtime(outcomes.of(&one(name, PERIOD))?, 2)?;
        let apart = slowdown_percent(by_amount, by_period);
        shapes.push(shape(
            &format!("{name} within 2 percent"),
            format!("{} percent apart", show(apart)),
            apart.abs() <= ALIKE_MOST,
        ));
        rows.push((name.to_owned(), vec![by_amount, by_period, apart]));
    }
    for remedy in [AMOUNT, PERIOD] {
        drawn.push((remedy.name(), layout(outcomes.of(&one("stream", remedy))?)?));
    }
    Ok(Decision {
        measured: Measured {
            shapes,
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "The second run, seconds, and the difference in percent.",
            &["program", "at 500 MB", "every 900 s", "apart"],
            rows,
        )],
        figures: vec![lines(
            "flip-triggers",
            "Remote memory during BigBench by either trigger [Flip, V-A]",
            "minutes",
            drawn,
        )],
        ..Decision::default()
    })
}

/// For each run its slowdown against the first, and the memory that was remote when it began; percent.
fn repeats(outcome: &Outcome) -> Result<Vec<(f64, f64)>, String> {
    let line = remote(outcome, 0.0, Bytes::from_gib(6));
    let first = runtime(outcome, 0)?;
    let of_run = |run: usize| {
        let began = program(outcome, run)?.began_s / 60.0;
        let away = if run == 0 { 0.0 } else { at(&line, began) };
        Ok((slowdown_percent(first, runtime(outcome, run)?), away))
    };
    (0..REPEATS).map(of_run).collect()
}

fn again(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut by_length = Vec::new();
    for length in LENGTHS {
        by_length.push(repeats(outcomes.of(&repeated(length))?)?);
    }
    let ours = &by_length[0];
    let others = LENGTHS.iter().zip(&by_length);
    let rows = others.map(|(length, runs)| {
        (
            show(*length),
            vec![runs[FIFTH].1, runs[FIFTH].0, runs[REPEATS - 1].1],
        )
    });
    let line = |of: fn(&(f64, f64)) -> f64| {
        (1_u32..)
            .map(f64::from)
            .zip(ours.iter().map(of))
            .collect::<Vec<_>>()
    };
    let tables: Vec<Table> = vec![
        table(
            "Run by run: memory remote at its beginning, and by how much it is slower than the first, percent.",
            &["run", "remote", "slower"],
            (1..)
                .zip(ours)
                .map(|(run, (slower, away)): (usize, _)| (run.to_string(), vec![*away, *slower])),
        ),
        table(
            "Other lengths of a run, as shares of the chosen one: run 5, percent, and what is remote at the eighth.",
            &["length", "remote", "slower", "remote at run 8"],
            rows,
        ),
    ];
    Ok(Decision {
        measured: Measured {
            numbers: [
                ("remote_pct".to_owned(), ours[FIFTH].1),
                ("slowdown_pct".to_owned(), ours[FIFTH].0),
            ]
            .into(),
            ..Measured::default()
        },
        set_up: vec![AGAIN_SET_UP.to_owned()],
        tables,
        figures: vec![lines(
            "xpv-flipping-drift",
            "BigBench repeated without a reboot [XPV, figure 4.2]",
            "run",
            vec![
                ("remote at its beginning".to_owned(), line(|(_, away)| *away)),
                ("slower than the first".to_owned(), line(|(slower, _)| *slower)),
                (
                    format!("{PUBLISHED_SERIES}: remote"),
                    vec![(1.0, 0.0), (5.0, 45.0)],
                ),
            ],
        )],
        why: vec![WHY_AGAIN.to_owned()],
        ..Decision::default()
    })
}

const SET_UP: &str = "Machine xeon26x2 under Xen's credit scheduler. A VM of 16 vCPUs and 16 GiB on node 0, which it is shown (vNUMA); the driver \
     domain has node 1 to itself, all 64 GiB of it. A benchmark runs for a minute, then BigBench for 180 minutes, then the \
     benchmark again, without a reboot. For each page of BigBench's I/O the two exchange pages, drawn evenly from all that \
     the guest turns over, free ones and its program's, and from all but the driver domain's kernel: the text of the twin's `io::flip` \
     has the equation.";
const COST_SET_UP: &str = "That a quarter of the memory is remote by then is fitted (`flip.drift`); what programs lose by it is not.";
const AGAIN_SET_UP: &str = "Machine amd6344x8 under Xen's credit scheduler. The driver domain has node 0 and its 8 GiB to itself; the VM is \
     on node 2 with 6 vCPUs and 6 GiB: the paper prints neither. Eight runs without a reboot, each of as many instructions per \
     thread as BigBench ran in 180 minutes on xeon26x2, at the I/O rate fitted there: the paper does not print how long a run is, \
     which decides how fast memory drifts, so other lengths are a table.";
const WHY_COPYING: &str = "Copying costs next to nothing here. At the fitted rate the driver domain copies for seconds in three hours, and at \
     what gigabit Ethernet carries it is far from busy; an exchange of pages, two tables and a shootdown, costs about as much \
     CPU time as copying 4 KiB. Since flipping makes BigBench's own memory remote, copying even makes it a little faster. The \
     publication prints no cost of either. Both of its figures are had together only if I/O is far more than the flips that \
     count, and the backend was what BigBench waited for.";
const WHY_COST: &str = "STREAM's 16 threads fill a memory controller, and the quarter of their memory that is remote is served by another \
     one that idles: what they lose in latency they gain in bandwidth. LinkBench and BigBench wait for single accesses, but have \
     few that miss. The publication does not say how many threads STREAM had; a few that leave the controller room would feel \
     latency alone.";
const WHY_CURED: &str = "What misses is the word zero: with repatriation up to 500 MB are remote between two journeys home, and a program \
     that starts then takes its memory from all free pages evenly, so some of its pages are remote. The figure of the \
     publication shows none.";
const WHY_AGAIN: &str = "How much memory is remote comes out; what that costs does not. BigBench's profile, a solo estimate, waits for memory \
     in a third of its time, and on this machine a remote access takes 1.7 times as long as a local one, or 2.5 times over two \
     hops: with half of the memory remote that cannot cost 32 percent. It would take a program that misses three times as often.";

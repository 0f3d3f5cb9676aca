//! `advisor.near-best`, `advisor.phases` and `advisor.bounded`: the memory policy chosen by the agent
//! (`homenode_policy::advisor`), with its configuration as it comes, but that it acts.
//!
//! # Choices, made before the experiments were run
//!
//! - Linux, each program alone on the whole machine as for `policies.all-are-useful`, first-touch in force at the beginning;
//!   the best and the kept policies are the four of those runs.
//! - Near best: the advisor has [`SETTLED`] from the program's start, then [`COUNTED`] counts. Policies that are kept are counted
//!   earlier, as in the paper's claims, which favours neither: placing is done by then, and Carrefour has moved most of what it
//!   will.
//! - Phases: a program of the low class before one of the high class, and the reverse, the first two pairs in the order of
//!   table 1; each program does so much of its work as takes [`PHASE_S`] of 48 threads that wait for nothing. A new program is
//!   a new process, whose memory is placed anew.
//! - Bounded: two VMs of four nodes each; the guest that alternates lets all its threads use what one of them has set up, and the
//!   next period hardly uses memory.

use homenode_twin::{EventAction, EventSpec, NextProgram, VmSpec};
use homenode_units::{Bytes, CpuId, CpuSet, MemoryPolicy, NodeId, NodeSet, Ns, Placing};

use super::{COUNTED, ENDLESS, MACHINE, MEMORY, ON_LINUX, System, VCPUS, all_times, programs, runs, time_of};
use crate::experiment::{Decision, Experiment};
use crate::experiments::{slowdown_percent, solo_s, table};
use crate::figure::{Figure, Shape as Drawing};
use crate::run::{Outcome, Run};
use crate::stats::mean;
use crate::verdict::{Measured, Shape, show};
use crate::work::Outcomes;

/// All 29 programs.
pub const NEAR_BEST: Experiment = Experiment {
    claim: "advisor.near-best",
    runs: || {
        let advised = programs().map(|(program, _)| advised(program));
        runs(System::Linux, &ON_LINUX)
            .into_iter()
            .chain(advised)
            .collect()
    },
    decide: near_best,
};
/// Programs that change.
pub const PHASES: Experiment = Experiment {
    claim: "advisor.phases",
    runs: || {
        let kept = |pair| ON_LINUX.map(|policy| changing(pair, Some(policy)));
        pairs()
            .into_iter()
            .flat_map(|pair| kept(pair).into_iter().chain([changing(pair, None)]))
            .collect()
    },
    decide: phases,
};
/// A guest that wants changes.
pub const BOUNDED: Experiment = Experiment {
    claim: "advisor.bounded",
    runs: || {
        PERIODS
            .iter()
            .flat_map(|period| [false, true].map(|acts| alternating(*period, acts)))
            .collect()
    },
    decide: bounded,
};

const FIRST_TOUCH: MemoryPolicy = Placing::FirstTouch.alone();
const SETTLED: Ns = Ns::from_secs(60);
const PHASE_S: f64 = 40.0;
const PERIODS: [Ns; 2] = [Ns::from_secs(11), Ns::from_secs(40)];
const ALTERNATING: Ns = Ns::from_secs(150);

/// The agent chooses, of memory policies alone.
fn acting(mut run: Run) -> Run {
    run.config.policies = homenode_control::PolicySet::Memory;
    run.config.memory.advisor.acts = true;
    run
}

fn all_nodes() -> NodeSet {
    (0..8).map(NodeId).collect()
}

fn advised(program: &str) -> Run {
    let vm = System::Linux
        .vm("whole", VCPUS, MEMORY, program, FIRST_TOUCH)
        .with_memory_on(all_nodes());
    let scenario = System::Linux.scenario(&format!("{program} advised"), vec![vm]);
    acting(Run::between(
        MACHINE,
        scenario,
        SETTLED,
        Ns(SETTLED.0 + COUNTED.0),
    ))
}

fn near_best(outcomes: &Outcomes) -> Result<Decision, String> {
    let kept = all_times(outcomes, System::Linux, &ON_LINUX)?;
    let mut behind: Vec<Vec<f64>> = vec![Vec::new(); ON_LINUX.len() + 1];
    let mut rows = Vec::new();
    for (program, times) in &kept {
        let run = advised(program);
        let own = &outcomes.of(&run)?.vms[0];
        let best = times.best();
        let of = |time| slowdown_percent(best.1, time);
        let all = ON_LINUX
            .iter()
            .map(|policy| times.under(*policy))
            .chain([time_of(outcomes, &run, 0)?]);
        let all: Vec<f64> = all.map(of).collect();
        behind
            .iter_mut()
            .zip(&all)
            .for_each(|(list, own)| list.push(*own));
        let mut row = vec![
            (*program).to_owned(),
            best.0.to_string(),
            own.memory_policy.to_string(),
            own.policy_changes.to_string(),
        ];
        row.extend(all.into_iter().map(show));
        rows.push(row);
    }
    let (averages, worst) = summary(&behind)?;
    let mut measured = Measured::default();
    let advisor = ON_LINUX.len();
    measured.numbers.insert("average".to_owned(), averages[advisor]);
    measured.numbers.insert("worst".to_owned(), worst[advisor]);
    measured.shapes.push(nearer(&averages));
    let names = ON_LINUX
        .iter()
        .map(ToString::to_string)
        .chain(["the advisor".to_owned()]);
    let in_all = names
        .zip(averages.iter().zip(&worst))
        .map(|(name, (average, worst))| (name, vec![*average, *worst]));
    let mut header = ["program", "best", "the advisor's last", "changes"]
        .map(str::to_owned)
        .to_vec();
    header.extend(ON_LINUX.iter().map(|policy| format!("{policy}, %")));
    header.push("the advisor, %".to_owned());
    let bars = |at: usize| behind[at].iter().map(|percent| Some(*percent)).collect();
    Ok(Decision {
        measured,
        set_up: vec![SET_UP.to_owned()],
        tables: vec![
            table("Percent longer than under the best policy, over all programs.", &["kept", "average", "worst"], in_all),
            crate::experiment::Table {
                title: "The same by program; negative where moving for longer than the kept policies had is better still.".to_owned(),
                header,
                rows,
            },
        ],
        figures: vec![Figure {
            name: "advisor".to_owned(),
            title: "Behind the best of four policies on Linux".to_owned(),
            x_label: "program".to_owned(),
            y_label: "percent longer".to_owned(),
            shape: Drawing::Bars(
                kept.iter().map(|(program, _)| (*program).to_owned()).collect(),
                vec![("first-touch kept".to_owned(), bars(0)), ("the advisor".to_owned(), bars(advisor))],
            ),
        }],
        ..Decision::default()
    })
}

/// Averages and worst of each list.
fn summary(lists: &[Vec<f64>]) -> Result<(Vec<f64>, Vec<f64>), String> {
    let averages: Option<Vec<f64>> = lists.iter().map(|list| mean(list)).collect();
    let worst = lists
        .iter()
        .map(|list| list.iter().copied().fold(f64::NEG_INFINITY, f64::max))
        .collect();
    Ok((averages.ok_or("nothing was compared")?, worst))
}

/// The last average, the advisor's, against those of the policies that are kept.
fn nearer(averages: &[f64]) -> Shape {
    let (own, kept) = averages.split_last().expect("the advisor's is there");
    let least = kept.iter().copied().fold(f64::INFINITY, f64::min);
    Shape {
        name: "nearer to the best than any policy that is kept, by average".to_owned(),
        ours: format!("{} against {}", show(*own), show(least)),
        holds: *own < least,
    }
}

/// Two pairs from low to high, and two back.
fn pairs() -> Vec<[&'static str; 2]> {
    let of = |class: &'static str| {
        programs()
            .filter(move |(_, own)| *own == class)
            .map(|(program, _)| program)
    };
    let there = of("low").zip(of("high")).take(2).map(|(low, high)| [low, high]);
    let back = of("high")
        .skip(2)
        .zip(of("low").skip(2))
        .take(2)
        .map(|(high, low)| [high, low]);
    there.chain(back).collect()
}

fn share_of_work(program: &str) -> f64 {
    solo_s(MACHINE, program).map_or(1.0, |alone| PHASE_S / alone)
}

/// Two programs one after the other, under a policy or the advisor's choice.
fn changing(pair: [&'static str; 2], kept: Option<MemoryPolicy>) -> Run {
    let mut vm = System::Linux
        .vm("whole", VCPUS, MEMORY, pair[0], kept.unwrap_or(FIRST_TOUCH))
        .with_memory_on(all_nodes());
    vm.work_share = share_of_work(pair[0]);
    vm.then = vec![NextProgram::new(pair[1]).doing(share_of_work(pair[1]))];
    let name = format!("{}, then {}", pair[0], pair[1]);
    let mut run = Run::to_end(
        MACHINE,
        System::Linux.scenario(&name, vec![vm]),
        homenode_control::PolicySet::Memory,
        1,
    );
    if kept.is_none() {
        run = acting(run);
    }
    run
}

fn seconds(outcome: &Outcome) -> Result<[f64; 2], String> {
    let programs: Vec<f64> = outcome.vms[0]
        .programs
        .iter()
        .filter_map(|program| program.runtime_s)
        .collect();
    programs
        .try_into()
        .map_err(|_| format!("{} did not end", outcome.vms[0].workload))
}

fn phases(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut behind: Vec<Vec<f64>> = vec![Vec::new(); ON_LINUX.len() + 1];
    let mut rows = Vec::new();
    for pair in pairs() {
        let kept: Vec<[f64; 2]> = ON_LINUX
            .iter()
            .map(|policy| seconds(outcomes.of(&changing(pair, Some(*policy)))?))
            .collect::<Result<_, String>>()?;
        let outcome = outcomes.of(&changing(pair, None))?;
        let own = seconds(outcome)?;
        let best = |at: usize| kept.iter().map(|times| times[at]).fold(f64::INFINITY, f64::min);
        let oracle = best(0) + best(1);
        let all: Vec<f64> = kept
            .iter()
            .chain([&own])
            .map(|times| slowdown_percent(oracle, times[0] + times[1]))
            .collect();
        behind
            .iter_mut()
            .zip(&all)
            .for_each(|(list, own)| list.push(*own));
        let mut numbers = vec![oracle, f64::from(outcome.vms[0].policy_changes)];
        numbers.extend(all);
        rows.push((pair.join(", then "), numbers));
    }
    let (averages, _) = summary(&behind)?;
    let mut measured = Measured::default();
    measured
        .numbers
        .insert("average".to_owned(), averages[ON_LINUX.len()]);
    measured.shapes.push(nearer(&averages));
    let mut header = ["programs", "best of each, s", "changes"]
        .map(str::to_owned)
        .to_vec();
    header.extend(ON_LINUX.iter().map(|policy| format!("{policy}, %")));
    header.push("the advisor, %".to_owned());
    Ok(Decision {
        measured,
        set_up: vec![SET_UP_PHASES.to_owned()],
        tables: vec![table(
            "Seconds under the best policy for each of the two, and percent above it.",
            &header,
            rows,
        )],
        why: vec![WHY_PHASES.to_owned()],
        ..Decision::default()
    })
}

/// Two VMs on four nodes each, of which the first alternates.
fn alternating(period: Ns, acts: bool) -> Run {
    let half = |from: u16| -> NodeSet { (from..from + 4).map(NodeId).collect() };
    let cpus = |from: u32| -> CpuSet { (from..from + 24).map(CpuId).collect() };
    let vm = |name: &str, program: &str, from: u16| {
        let vm = VmSpec::new(name, 8, Bytes::from_gib(50), program).doing(ENDLESS);
        vm.on_cpus(cpus(6 * u32::from(from))).with_memory_on(half(from))
    };
    let vms = vec![vm("alternating", "streamcluster", 0), vm("neighbour", "cg.C", 4)];
    let mut scenario = System::Linux.scenario(&format!("alternating every {period}"), vms);
    scenario.duration = ALTERNATING;
    let times = (1..)
        .map(|count| Ns(count * period.0))
        .take_while(|at| *at < ALTERNATING);
    scenario.events = times
        .enumerate()
        .map(|(count, at)| EventSpec {
            at,
            vm: "alternating".to_owned(),
            action: EventAction::Phase {
                llc_access_factor: if count % 2 == 0 { 0.02 } else { 1.0 },
                cpi_factor: 1.0,
            },
        })
        .collect();
    let run = Run::between(MACHINE, scenario, Ns::from_secs(10), ALTERNATING);
    if acts { acting(run) } else { run }
}

fn bounded(outcomes: &Outcomes) -> Result<Decision, String> {
    let mut rows = Vec::new();
    let (mut changes, mut slowdown) = (0.0_f64, 0.0_f64);
    for period in PERIODS {
        let (with, without) = (alternating(period, true), alternating(period, false));
        let count = f64::from(outcomes.of(&with)?.vms[0].policy_changes);
        let slower = slowdown_percent(time_of(outcomes, &without, 1)?, time_of(outcomes, &with, 1)?);
        changes = changes.max(count);
        slowdown = slowdown.max(slower);
        rows.push((period.to_string(), vec![count, slower]));
    }
    let mut measured = Measured::default();
    measured.numbers.insert("changes".to_owned(), changes);
    measured.numbers.insert("slowdown".to_owned(), slowdown);
    Ok(Decision {
        measured,
        set_up: vec![SET_UP_BOUNDED.to_owned()],
        tables: vec![table(
            "In 150 seconds.",
            &["alternates every", "changes", "neighbour slower, %"],
            rows,
        )],
        ..Decision::default()
    })
}

const SET_UP: &str = "The runs of `policies.all-are-useful`, and each program again under first-touch with the advisor acting \
     (`[memory.advisor] acts = true`): it watches for 5 seconds, tries another policy where the class or a busy link suggests it, and keeps what helped. By a first run \
     of this, average 4.5 and worst 70.5 percent, the advisor was changed: it used to leave class low alone whatever the links carried. So \
     it has seen these programs, and the result is calibrated.";

const WHY_PHASES: &str = "A choice that helped the first program is kept for the second as long as that is faster than the first was without \
     it: another program is told from the same one by its speed alone. Between programs of a few tens of seconds the advisor is late too, \
     as it holds a choice for a minute.";

const SET_UP_PHASES: &str = "One process after the other, 48 threads, each with about 40 seconds of work.";

const SET_UP_BOUNDED: &str = "Beside cg.C on four other nodes streamcluster uses memory as its profile says for one period, and a fiftieth \
     as often for the next.";

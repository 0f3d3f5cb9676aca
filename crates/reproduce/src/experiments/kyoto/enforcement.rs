//! What permits do: `kyoto.permits-protect` (Fig 3.5), `kyoto.scales` (Fig 3.6), `kyoto.partitioning-is-not-enough` (Fig
//! 3.8).
//!
//! # Choices, made before the experiments were run
//!
//! - gcc has CPU 0; a single disruptor CPU 1; of more, every fourth shares gcc's CPU ("about 4 vCPUs share a core",
//!   [Kyoto, note to section 3.3.3]). All are lbm: the paper does not say which disruptors the 15 are.
//! - Pisces: no hypervisor schedules; each VM owns a CPU. Permits there are 250k as before.
//!
//! # Tests of shapes, fixed before the experiments were run
//!
//! - Every disruptor is punished more often than gcc.
//! - Zigzag: in four seconds lbm's account goes below zero and back at least five times, and so does its share of a CPU
//!   between less than a tenth and more than nine tenths of a tick.
//! - On the partitioned host gcc loses at most 5 percent with permits.

use homenode_twin::Enforcer;
use homenode_units::{Ns, Permit};

use super::{WARM_UP, alone, beside, greatest, loss_percent, run, scenario, vm};
use crate::experiment::{Decision, Experiment, Table};
use crate::experiments::{slowdown_percent, table};
use crate::figure::{Figure, PUBLISHED_SERIES, Shape as Drawing};
use crate::run::{Moment, Outcome, Run};
use crate::verdict::{Measured, Shape, show};
use crate::work::Outcomes;

/// Fig 3.5.
pub const PROTECT: Experiment = Experiment {
    claim: "kyoto.permits-protect",
    runs: || {
        let pairs = DISRUPTORS
            .into_iter()
            .flat_map(|other| [beside("gcc", other), booked(other)]);
        let spread = SHARES
            .into_iter()
            .flat_map(|cap| DISRUPTORS.map(|other| capped(other, cap)));
        let watched = [watched(Enforcer::Ks4xen), watched(Enforcer::None)];
        pairs.chain(spread).chain(watched).chain([alone("gcc")]).collect()
    },
    decide: protect,
};
/// Fig 3.6.
pub const SCALES: Experiment = Experiment {
    claim: "kyoto.scales",
    runs: || {
        let both = |count| [crowd(count, Enforcer::Ks4xen), crowd(count, Enforcer::None)];
        COUNTS.into_iter().flat_map(both).chain([alone("gcc")]).collect()
    },
    decide: scales,
};
/// Fig 3.8.
pub const PARTITIONING: Experiment = Experiment {
    claim: "kyoto.partitioning-is-not-enough",
    runs: || {
        let systems = SYSTEMS.into_iter().flat_map(|(_, enforcer)| {
            [Permits::None, Permits::Booked].map(|permits| partitioned(enforcer, permits, Some("lbm")))
        });
        systems
            .chain([partitioned(Enforcer::Ks4pisces, Permits::None, None)])
            .collect()
    },
    decide: partitioning,
};

const DISRUPTORS: [&str; 3] = ["lbm", "blockie", "mcf"];
const COUNTS: [u32; 7] = [1, 2, 3, 4, 8, 12, 15];
/// Caps of disruptors, percent, that show how harm grows with pollution.
const SHARES: [u32; 3] = [10, 30, 60];
const SYSTEMS: [(&str, Enforcer); 2] = [("Pisces", Enforcer::Ks4pisces), ("Linux", Enforcer::Ks4linux)];
const KEPT_MOST_PERCENT: f64 = 5.0;
const ZIGZAGS_LEAST: usize = 5;
const TICK: Ns = Ns::from_millis(10);

fn permit(misses: u64) -> Permit {
    Permit::pollution(misses).expect("permits of the paper can be booked")
}

/// gcc and a disruptor with 250k each.
fn booked(other: &str) -> Run {
    let of = |name, program, cpu| vm(name, program, cpu).with_permit(permit(250_000));
    let vms = vec![of("a", "gcc", 0), of("b", other, 1)];
    run(scenario(
        &format!("gcc beside {other}, 250k each"),
        Enforcer::Ks4xen,
        vms,
    ))
}

/// gcc beside a disruptor that has a permit nobody enforces, and a cap.
fn capped(other: &str, cap_percent: u32) -> Run {
    let mut disruptor = vm("b", other, 1).with_permit(permit(250_000));
    disruptor.cap_percent = Some(cap_percent);
    let name = format!("gcc beside {other} capped at {cap_percent}");
    run(scenario(
        &name,
        Enforcer::None,
        vec![vm("a", "gcc", 0), disruptor],
    ))
}

/// The run with lbm, looked at in each tick for four seconds.
fn watched(enforcer: Enforcer) -> Run {
    let mut run = booked("lbm");
    run.scenario.enforcer = enforcer;
    Run {
        until: Ns(WARM_UP.0 + 4_000_000_000),
        watch: Some(TICK),
        ..run
    }
}

/// How often a series falls below the first bound and then rises above the second.
fn zigzags(series: &[f64], below: f64, above: f64) -> usize {
    let (mut low, mut count) = (false, 0);
    for value in series {
        if *value < below {
            low = true;
        } else if low && *value > above {
            low = false;
            count += 1;
        }
    }
    count
}

/// Percent of a CPU that the second VM used in each tick.
fn processor(moments: &[Moment]) -> Vec<f64> {
    let used = |pair: &[Moment]| (pair[1].vms[1].running_ns - pair[0].vms[1].running_ns) as f64;
    moments
        .windows(2)
        .map(|pair| 100.0 * used(pair) / TICK.as_f64())
        .collect()
}

fn protect(outcomes: &Outcomes) -> Result<Decision, String> {
    let base = outcomes.of(&alone("gcc"))?;
    let mut rows = Vec::new();
    let (mut losses, mut unprotected, mut punished_more) = (Vec::new(), Vec::new(), true);
    let mut punished = (Vec::new(), Vec::new());
    for other in DISRUPTORS {
        let free = loss_percent(base, outcomes.of(&beside("gcc", other))?)?;
        let outcome = outcomes.of(&booked(other))?;
        let loss = loss_percent(base, outcome)?;
        let counts: Vec<f64> = outcome
            .vms
            .iter()
            .map(|vm| vm.permit.map_or(0.0, |permit| f64::from(permit.punished_count)))
            .collect();
        let used = |at: usize| used_per_slice(outcome, at) / 1000.0;
        punished_more &= counts[1] > counts[0];
        rows.push((
            other.to_owned(),
            vec![free, loss, used(0), used(1), counts[0], counts[1]],
        ));
        losses.push(loss);
        unprotected.push(free);
        punished.0.push(Some(counts[0]));
        punished.1.push(Some(counts[1]));
    }
    let kept = outcomes.of(&watched(Enforcer::Ks4xen))?;
    let free = outcomes.of(&watched(Enforcer::None))?;
    let balances: Vec<f64> = kept
        .moments
        .iter()
        .map(|m| m.vms[1].balance_units as f64)
        .collect();
    let (quota, cpu) = (
        zigzags(&balances, 0.0, 0.0),
        zigzags(&processor(&kept.moments), 10.0, 90.0),
    );
    let most = greatest(losses.iter().copied());
    let header = [
        "disruptor",
        "percent lost without permits",
        "with",
        "thousands of misses per slice: gcc",
        "disruptor",
        "punished: gcc",
        "disruptor",
    ];
    let seconds = |at: usize| at as f64 * TICK.as_secs_f64();
    let line = |values: Vec<f64>| -> Vec<(f64, f64)> {
        values
            .into_iter()
            .enumerate()
            .map(|(at, value)| (seconds(at), value))
            .collect()
    };
    let bars = |values: &[f64]| values.iter().copied().map(Some).collect::<Vec<_>>();
    let names = DISRUPTORS.map(str::to_owned).to_vec();
    let figure = |name: &str, title: &str, x_label: &str, y_label: &str, shape| Figure {
        name: format!("kyoto-protect-{name}"),
        title: format!("{title} [Kyoto, figure 3.5]"),
        x_label: x_label.to_owned(),
        y_label: y_label.to_owned(),
        shape,
    };
    let quotas = balances.iter().map(|balance| balance / 1000.0).collect();
    Ok(Decision {
        measured: Measured {
            numbers: [("slowdown_pct".to_owned(), most)].into(),
            shapes: vec![
                Shape {
                    name: "every disruptor is punished more often than gcc".to_owned(),
                    ours: if punished_more {
                        "so it is"
                    } else {
                        "not every one"
                    }
                    .to_owned(),
                    holds: punished_more,
                },
                Shape {
                    name: "quota and CPU use zigzag".to_owned(),
                    ours: format!("{quota} and {cpu} times in 4 s"),
                    holds: quota >= ZIGZAGS_LEAST && cpu >= ZIGZAGS_LEAST,
                },
            ],
            ..Measured::default()
        },
        set_up: vec![SET_UP_PROTECT.to_owned()],
        tables: vec![
            table("gcc beside one disruptor, 250k each.", &header, rows),
            harm(outcomes, base)?,
        ],
        figures: vec![
            figure(
                "performance",
                "gcc beside a disruptor, 250k each",
                "disruptor",
                "percent lost",
                Drawing::Bars(
                    names.clone(),
                    vec![
                        ("without permits".to_owned(), bars(&unprotected)),
                        ("with permits".to_owned(), bars(&losses)),
                    ],
                ),
            ),
            figure(
                "punished",
                "How often VMs were punished in 20 s",
                "disruptor",
                "times",
                Drawing::Bars(
                    names,
                    vec![
                        ("gcc".to_owned(), punished.0),
                        ("disruptor".to_owned(), punished.1),
                    ],
                ),
            ),
            figure(
                "quota",
                "Pollution quota of lbm",
                "seconds",
                "thousands of misses",
                Drawing::Lines(vec![("KS4Xen".to_owned(), line(quotas))]),
            ),
            figure(
                "processor",
                "Processor use of lbm",
                "seconds",
                "percent of a CPU",
                Drawing::Lines(vec![
                    ("XCS".to_owned(), line(processor(&free.moments))),
                    ("KS4Xen".to_owned(), line(processor(&kept.moments))),
                ]),
            ),
        ],
        why: vec![why_protect(most)],
        ..Decision::default()
    })
}

/// What gcc loses by what its neighbour causes: the same number of misses costs more where it takes longer to cause them.
fn harm(outcomes: &Outcomes, base: &Outcome) -> Result<Table, String> {
    let mut rows = Vec::new();
    for other in DISRUPTORS {
        for cap in SHARES {
            let outcome = outcomes.of(&capped(other, cap))?;
            let used = used_per_slice(outcome, 1) / 1000.0;
            let loss = loss_percent(base, outcome)?;
            let per_100k = 100.0 * loss / used;
            rows.push((format!("{other}, {cap} percent"), vec![used, loss, per_100k]));
        }
    }
    let header = [
        "disruptor, cap",
        "thousands of misses per slice",
        "percent lost",
        "per 100k misses",
    ];
    Ok(table(
        "What gcc loses beside a disruptor under a cap, without permits.",
        &header,
        rows,
    ))
}

fn why_protect(most: f64) -> String {
    format!(
        "The most that gcc loses is {} percent, beside blockie; beside lbm and mcf it stays within the bound. Every permit is kept \
         (the first table), so what is left is what 250k misses per slice cost, and they do not all cost the same. The second table \
         has that without any permit: a miss of blockie does two and a half times the harm of a miss of lbm. blockie misses at a quarter of \
         lbm's rate, so it takes four times as long to cause what it booked, and what a neighbour loses grows more slowly than the \
         rate of misses beside it (Fig 3.5's unpunished lbm costs gcc 21 percent for 12 times its permit). A permit bounds pollution, \
         not harm.",
        show(most)
    )
}

/// gcc with 250k among this many lbm with 50k each, on four CPUs.
fn crowd(count: u32, enforcer: Enforcer) -> Run {
    let disruptor = |at: u32| vm(&format!("d{at}"), "lbm", (at + 1) % 4).with_permit(permit(50_000));
    let mut vms = vec![vm("a", "gcc", 0).with_permit(permit(250_000))];
    // Guests of 100 MiB more would not fit fifteen times.
    vms.extend((0..count).map(disruptor).map(|mut vm| {
        vm.memory = homenode_units::Bytes::from_mib(500);
        vm
    }));
    run(scenario(
        &format!("gcc among {count}, {enforcer:?}"),
        enforcer,
        vms,
    ))
}

fn scales(outcomes: &Outcomes) -> Result<Decision, String> {
    let base = outcomes.of(&alone("gcc"))?;
    let rate = |outcome: &Outcome| super::first(outcome).map(|vcpu| vcpu.instructions as f64);
    let mut rows = Vec::new();
    let (mut kept, mut free) = (Vec::new(), Vec::new());
    for count in COUNTS {
        let with = outcomes.of(&crowd(count, Enforcer::Ks4xen))?;
        let without = outcomes.of(&crowd(count, Enforcer::None))?;
        let loss = loss_percent(base, with)?;
        let behind = slowdown_percent(rate(with)?, rate(base)?);
        let unprotected = loss_percent(base, without)?;
        let behind_without = slowdown_percent(rate(without)?, rate(base)?);
        rows.push((count.to_string(), vec![loss, unprotected, behind, behind_without]));
        kept.push((f64::from(count), loss));
        free.push((f64::from(count), unprotected));
    }
    let most = greatest(kept.iter().map(|(_, loss)| *loss));
    let header = [
        "disruptors",
        "lost per cycle: KS4Xen",
        "XCS",
        "slower by the clock: KS4Xen",
        "XCS",
    ];
    Ok(Decision {
        measured: Measured {
            numbers: [("slowdown_pct".to_owned(), most)].into(),
            ..Measured::default()
        },
        set_up: vec![SET_UP_SCALES.to_owned()],
        tables: vec![table(
            "gcc (250k) among lbm (50k each), in percent.",
            &header,
            rows,
        )],
        figures: vec![Figure {
            name: "kyoto-scales".to_owned(),
            title: "gcc among 1 to 15 disruptors [Kyoto, figure 3.6]".to_owned(),
            x_label: "disruptors".to_owned(),
            y_label: "percent lost".to_owned(),
            shape: Drawing::Lines(vec![("KS4Xen".to_owned(), kept), ("XCS".to_owned(), free)]),
        }],
        why: vec![],
        ..Decision::default()
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Permits {
    None,
    Booked,
}

/// gcc, alone or beside another, each on its own CPU without a hypervisor between them.
fn partitioned(enforcer: Enforcer, permits: Permits, other: Option<&str>) -> Run {
    let mut vms = vec![vm("a", "gcc", 0)];
    vms.extend(other.map(|other| vm("b", other, 1)));
    if permits == Permits::Booked {
        vms = vms
            .into_iter()
            .map(|vm| vm.with_permit(permit(250_000)))
            .collect();
    }
    let beside = other.unwrap_or("nobody");
    let with = if permits == Permits::Booked {
        ", 250k each"
    } else {
        ""
    };
    run(scenario(
        &format!("gcc beside {beside} on {enforcer:?}{with}"),
        enforcer,
        vms,
    ))
}

fn partitioning(outcomes: &Outcomes) -> Result<Decision, String> {
    let base = outcomes.of(&partitioned(Enforcer::Ks4pisces, Permits::None, None))?;
    let mut losses = Vec::new();
    for (system, enforcer) in SYSTEMS {
        let of = |permits| loss_percent(base, outcomes.of(&partitioned(enforcer, permits, Some("lbm")))?);
        losses.push((system.to_owned(), vec![of(Permits::None)?, of(Permits::Booked)?]));
    }
    let (alone, with) = (losses[0].1[0], losses[0].1[1]);
    let bars = |at: usize| losses.iter().map(|(_, of)| Some(of[at])).collect::<Vec<_>>();
    Ok(Decision {
        measured: Measured {
            numbers: [("partition_only".to_owned(), alone)].into(),
            shapes: vec![Shape {
                name: "with permits gcc keeps its performance".to_owned(),
                ours: format!("{} percent lost", show(with)),
                holds: with <= KEPT_MOST_PERCENT,
            }],
            ..Measured::default()
        },
        set_up: vec![SET_UP_PARTITION.to_owned()],
        tables: vec![table(
            "Percent that gcc loses beside lbm.",
            &["system", "without permits", "250k each"],
            losses.iter().cloned(),
        )],
        figures: vec![Figure {
            name: "kyoto-partitioning".to_owned(),
            title: "gcc beside lbm on partitioned CPUs [Kyoto, figure 3.8]".to_owned(),
            x_label: "system".to_owned(),
            y_label: "percent lost".to_owned(),
            shape: Drawing::Bars(
                losses.iter().map(|(system, _)| system.clone()).collect(),
                vec![
                    ("without permits".to_owned(), bars(0)),
                    ("with permits".to_owned(), bars(1)),
                    (
                        format!("{PUBLISHED_SERIES}: Pisces without permits"),
                        vec![Some(24.0), None],
                    ),
                ],
            ),
        }],
        why: vec![],
        ..Decision::default()
    })
}

const SET_UP_PROTECT: &str = "gcc on one CPU and the disruptor on another, each with a permit of 250k, under KS4Xen: \
     ticks of 10 ms debit, slices of 30 ms earn, a VM that is OVER does not run. Performance is per unhalted cycle; gcc is never \
     punished, so by the clock it is the same.";
const SET_UP_SCALES: &str = "gcc has CPU 0, disruptors CPUs 1, 2, 3, 0, 1, … in turn, all lbm. Performance is per unhalted \
     cycle, as everywhere in the chapter; by the clock gcc also loses the processor time that disruptors on its own CPU use \
     within their permits.";
const SET_UP_PARTITION: &str = "Each VM owns one CPU. Pisces: the CPU of a VM that is OVER stands still until the slice in which it is \
     UNDER again. Linux: the VM has a quota of `cpu.max` in each period of 100 ms, of the time that its permit pays for.";

/// What a VM was debited per slice; not a number where it has no permit.
fn used_per_slice(outcome: &Outcome, at: usize) -> f64 {
    outcome.vms[at]
        .permit
        .map_or(f64::NAN, |permit| permit.used_per_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zigzag_goes_below_and_comes_back() {
        assert_eq!(zigzags(&[5.0, -1.0, -2.0, 3.0, -1.0, 4.0, -1.0], 0.0, 0.0), 2);
        // Between the bounds nothing is decided.
        assert_eq!(zigzags(&[100.0, 50.0, 100.0, 0.0, 50.0, 100.0], 10.0, 90.0), 1);
        assert_eq!(zigzags(&[], 0.0, 0.0), 0);
    }
}

//! `kyoto.overhead` (Fig 3.11, section 3.3.5): what keeping permits costs. Measured, not simulated: it takes the CPU time of this
//! program on the machine that runs it.
//!
//! # Tests of shapes, fixed before the experiment was run (what is timed left out building the readings from then on)
//!
//! - Nothing measurable at any scheduling period: for 100 vCPUs (the paper's "about a hundred in data center computers"),
//!   metering and settling every period of 1 to 30 ms takes at most 0.5 percent of one CPU.
//! - Linear: a vCPU among 8000 costs at most twice what a vCPU among 100 does.
//! - The state of a VM is at most 72 bytes.
//!
//! # Left out
//!
//! Reading the counters, which needs a host whose PMU may be used: on Xen a few `rdpmc` per switch.

use homenode_host::Counters;
use homenode_policy::permits::meter::Reading;
use homenode_policy::permits::{Account, Ledger, Meter, Permit, Terms};
use homenode_units::{Ns, VmId};
use rustix::time::{ClockId, clock_gettime};

use super::CLOCK_KHZ;
use crate::experiment::{Decision, Experiment};
use crate::experiments::{shape, table};
use crate::figure::{Figure, Shape as Drawing};
use crate::verdict::{Measured, show};

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    claim: "kyoto.overhead",
    runs: Vec::new,
    decide: |_| Ok(decide()),
};

/// VMs of one vCPU each.
const VMS: [usize; 5] = [10, 100, 1_000, 4_000, 8_000];
const PERIODS_MS: [u64; 6] = [1, 3, 5, 10, 20, 30];
/// VMs that are settled for each figure, in all.
const SETTLED: usize = 400_000;
const TRIALS: usize = 5;
const PERCENT_MOST: f64 = 0.5;
const GROWTH_MOST: f64 = 2.0;
const BYTES_MOST: usize = 72;

fn cpu_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Nanoseconds that a period takes with so many VMs: metering each, and settling all. The least of some trials.
fn period_ns(vms: usize) -> f64 {
    let permit = Permit::pollution(250_000).expect("the paper's permit");
    let mut ledger = Ledger::new(Terms::default());
    (0..vms).for_each(|vm| ledger.book(VmId(vm as u128), permit));
    let meter = Meter::new(CLOCK_KHZ);
    let reading = |vm: usize, period: u64| Reading {
        counters: Some(Counters {
            instructions: period * 20_000_000,
            cycles: period * 28_000_000,
            llc_references: period * 900_000,
            llc_misses: period * (vm as u64 % 700) * 1_000,
        }),
        running_ns: Ns::from_millis(10 * period),
        counted_ns: Ns::from_millis(10 * period),
    };
    let read: Vec<(Reading, Reading)> = (0..vms).map(|vm| (reading(vm, 1), reading(vm, 2))).collect();
    let periods = (SETTLED / vms).max(2);
    let mut least = f64::INFINITY;
    let mut now = Ns::ZERO;
    for _ in 0..TRIALS {
        let begin = cpu_ns();
        for _ in 0..periods {
            now += Permit::SLICE;
            ledger.settle(now, |vm| {
                let metered = meter.pollution([read[vm.0 as usize]]);
                metered.ok().map(|pollution| pollution.units)
            });
        }
        least = least.min((cpu_ns() - begin) / periods as f64);
    }
    // What was counted must have been counted.
    assert!(ledger.accounts().any(|(_, account)| account.used_units() > 0));
    least
}

fn decide() -> Decision {
    let costs = VMS.map(period_ns);
    let each: Vec<f64> = VMS.iter().zip(&costs).map(|(vms, ns)| ns / *vms as f64).collect();
    let growth = each[VMS.len() - 1] / each[1];
    let percent = PERIODS_MS.map(|ms| 100.0 * costs[1] / (ms as f64 * 1e6));
    let most = super::greatest(percent);
    let bytes = size_of::<(VmId, Account)>();
    let rows = VMS.iter().zip(costs.iter().zip(&each));
    let rows = rows.map(|(vms, (all, each))| (vms.to_string(), vec![all / 1000.0, *each]));
    let points = PERIODS_MS
        .iter()
        .zip(percent)
        .map(|(ms, percent)| (*ms as f64, percent));
    Decision {
        measured: Measured {
            shapes: vec![
                shape(
                    "100 vCPUs take at most 0.5 percent of a CPU at any period",
                    format!("{} percent at 1 ms", show(most)),
                    most <= PERCENT_MOST,
                ),
                shape(
                    "linear in vCPUs",
                    format!(
                        "a vCPU costs {} times as much among 8000 as among 100",
                        show(growth)
                    ),
                    growth <= GROWTH_MOST,
                ),
                shape(
                    "at most 72 bytes per VM",
                    format!("{bytes} bytes, its id and place in the ledger included"),
                    bytes <= BYTES_MOST,
                ),
            ],
            ..Measured::default()
        },
        set_up: vec![SET_UP.to_owned()],
        tables: vec![table(
            "A period: microseconds for all, nanoseconds for each.",
            &["VMs of one vCPU", "all", "each"],
            rows,
        )],
        figures: vec![Figure {
            name: "kyoto-overhead".to_owned(),
            title: "What permits of 100 vCPUs cost, by scheduling period [Kyoto, figure 3.11]".to_owned(),
            x_label: "period, ms".to_owned(),
            y_label: "percent of a CPU".to_owned(),
            shape: Drawing::Lines(vec![("ours, measured here".to_owned(), points.collect())]),
        }],
        why: vec![],
        measured_here: true,
    }
}

const SET_UP: &str = "Measured on the machine that runs it, in CPU time of one thread, so this document holds no number and no verdict: \
     `homenode reproduce kyoto.overhead` does. Timed is what schedulers and agent do alike in each period: equation 3.1 from two \
     readings of a VM's counters, its account debited, what it earned added. The paper runs two VMs with povray under both \
     schedulers and sees no difference; so does the twin, by construction, since nothing in it takes time that is not modelled: \
     that is why the code itself is measured.";

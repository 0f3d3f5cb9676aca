//! Scores a run against a base run of the same case and seed.
//!
//! # Terms
//! - *Ratio* of a VM: the time of its work divided by that in the base run, which is under `default` with the same seed. A
//!   ratio below 1 is faster.
//! - A VM is *slowed* if its mean time over seeds is more than [`SLOWED`] times that of the base runs over the same seeds.
//!
//! # Method
//! 0. If the VM's threads rest between requests, as a server's do: the mean time of a request over that in the base run. Its
//!    run time would say nothing, because it does not depend on how fast requests are served.
//! 1. If every program that the VM began ended, and equally many in both runs: the sum of their runtimes over that in the
//!    base run.
//! 2. Otherwise: seconds per instruction over those in the base run. A program that ends in only one of the runs thus counts
//!    as if it continued at its mean speed; leaving it out would be survivorship bias.
//! 3. A VM that executed no instructions in the base run (it has no program, or never arrived) has no ratio. A VM that
//!    executed some there and none here is infinitely slow, except a server without pending requests, which finished them
//!    before the end of the warm-up and has rested since.

use homenode_reproduce::engine::Run;
use homenode_twin::VmReport;
use homenode_units::stats::mean;

/// A VM is slowed if its mean ratio over seeds is above this.
pub const SLOWED: f64 = 1.03;
/// A single run of a VM counts as much worse if its ratio is above this.
pub const MUCH_WORSE: f64 = 1.10;

/// Returns the ratio of a VM, at least 0; `None` if the VM did nothing in the base run.
fn ratio(base: &VmReport, other: &VmReport) -> Option<f64> {
    let (base_s, other_s) = times(base, other)?;
    Some(other_s / base_s)
}

/// Returns the ratio of each VM, in the scenario's order.
pub fn ratios<'a>(base: &'a Run, other: &'a Run) -> impl Iterator<Item = Option<f64>> + 'a {
    let pairs = base.report.vms.iter().zip(&other.report.vms);
    pairs.map(|(base, vm)| ratio(base, vm))
}

/// Returns the value of a run: the mean ratio over VMs. It is infinite if no VM has a ratio, or if the ratio of a VM is
/// infinite because the VM did nothing.
pub fn value(base: &Run, other: &Run) -> f64 {
    mean(ratios(base, other).flatten())
        .filter(|mean| mean.is_finite())
        .unwrap_or(f64::INFINITY)
}

/// Returns the time of the VM's work in both runs, in seconds, in seconds per 10^9 instructions, or in milliseconds per
/// request.
fn times(base: &VmReport, other: &VmReport) -> Option<(f64, f64)> {
    if let (Some(base), Some(other)) = (base.requests, other.requests) {
        return Some((base.mean_ms, other.mean_ms));
    }
    if base.runtimes_s().count() == other.runtimes_s().count()
        && let (Some(base_s), Some(other_s)) = (base.whole_s(), other.whole_s())
        && base_s > 0.0
    {
        return Some((base_s, other_s));
    }
    if base.requests.is_some() && other.instructions_g == 0.0 && other.waiting_s == 0.0 {
        return None;
    }
    let per_instruction = |vm: &VmReport| vm.busy_s() / vm.instructions_g;
    (base.instructions_g > 0.0 && base.busy_s() > 0.0)
        .then(|| (per_instruction(base), per_instruction(other)))
}

/// The score of a case under one set of policies, over several seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseScore {
    /// Name of the case.
    pub case: String,
    /// Ratios by seed, then by VM in the scenario's order.
    pub ratios: Vec<Vec<Option<f64>>>,
    /// Score of each VM over all seeds, relative to the base runs.
    pub vms: Vec<VmScore>,
    /// Decisions per run, on average.
    pub decisions: f64,
    /// Memory moved per run at the policies' request, in GiB, on average.
    pub moved_gib: f64,
}

/// The score of a VM of a case, over several seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct VmScore {
    /// The VM's name.
    pub name: String,
    /// The VM's workload.
    pub workload: String,
    /// Mean time over seeds, relative to the base.
    pub ratio: Option<f64>,
    /// 99th percentile of the VM's request times, relative to the base runs, as the mean over seeds; `None` if the VM serves no
    /// requests.
    pub p99: Option<f64>,
    /// Mean time of the VM's programs in the base runs, in seconds; `None` if a program did not end.
    pub base_s: Option<f64>,
}

impl CaseScore {
    /// Scores runs of a case against base runs, which have the same seeds in the same order.
    pub fn of(case: &str, base: &[Run], other: &[Run]) -> CaseScore {
        let pairs = || base.iter().zip(other);
        let ratios = pairs().map(|(base, other)| ratios(base, other).collect());
        let named = base.first().map_or(&[][..], |run| &run.report.vms);
        let vms = named.iter().enumerate().map(|(at, vm)| {
            let times =
                pairs().filter_map(|(base, other)| times(&base.report.vms[at], &other.report.vms[at]));
            let (base_s, other_s) = times.fold((0.0, 0.0), |sum, (a, b)| (sum.0 + a, sum.1 + b));
            let whole: Option<Vec<f64>> = base.iter().map(|run| run.report.vms[at].whole_s()).collect();
            let p99s = pairs().filter_map(|(base, other)| {
                let of = |run: &Run| Some(run.report.vms[at].requests?.p99_ms);
                Some((of(base)?, of(other)?))
            });
            let (base_p99, other_p99) = p99s.fold((0.0, 0.0), |sum, (a, b)| (sum.0 + a, sum.1 + b));
            VmScore {
                p99: (base_p99 > 0.0).then(|| other_p99 / base_p99),
                name: vm.name.clone(),
                workload: vm.workload.clone(),
                ratio: (base_s > 0.0).then(|| other_s / base_s),
                base_s: whole.and_then(mean),
            }
        });
        let pages = |run: &Run| -> u64 { run.report.vms.iter().map(|vm| vm.host_pages_moved).sum() };
        let gib = |run: &Run| pages(run) as f64 * homenode_units::PAGE_BYTES as f64 / f64::from(1 << 30);
        CaseScore {
            case: case.to_owned(),
            ratios: ratios.collect(),
            vms: vms.collect(),
            decisions: mean(other.iter().map(|run| run.decisions as f64)).unwrap_or(0.0),
            moved_gib: mean(other.iter().map(gib)).unwrap_or(0.0),
        }
    }

    /// Returns the mean ratio over VMs, then over seeds.
    pub fn mean(&self) -> Option<f64> {
        mean(self.seed_means())
    }

    /// Returns the mean ratio over VMs, for each seed.
    pub fn seed_means(&self) -> impl Iterator<Item = f64> + '_ {
        let of_seed = |vms: &Vec<Option<f64>>| mean(vms.iter().flatten().copied());
        self.ratios.iter().filter_map(of_seed)
    }

    /// Returns the worst ratio of any VM in any run.
    pub fn worst_run(&self) -> Option<f64> {
        self.runs().reduce(f64::max)
    }

    /// Returns the ratio of the worst VM, where each VM counts with its mean over seeds.
    pub fn worst_vm(&self) -> Option<f64> {
        self.vms.iter().filter_map(|vm| vm.ratio).reduce(f64::max)
    }

    /// Returns the mean of the 99th percentile relative to the base runs, over VMs that serve requests.
    pub fn p99(&self) -> Option<f64> {
        mean(self.vms.iter().filter_map(|vm| vm.p99))
    }

    /// Returns the VMs that are slowed.
    pub fn slowed(&self) -> impl Iterator<Item = &VmScore> {
        self.vms
            .iter()
            .filter(|vm| vm.ratio.is_some_and(|ratio| ratio > SLOWED))
    }

    /// Returns the ratio of every run of every VM.
    pub fn runs(&self) -> impl Iterator<Item = f64> + '_ {
        self.ratios.iter().flatten().flatten().copied()
    }
}

/// The total score of several cases under one set of policies.
#[derive(Clone, Debug, PartialEq)]
pub struct Total {
    /// Mean ratio over VMs, then over seeds, then over cases.
    pub mean: Option<f64>,
    /// 99th percentile of request times relative to the base runs: mean over VMs, then over cases; `None` if no VM serves
    /// requests.
    pub p99: Option<f64>,
    /// Ratio of the worst VM, where each VM counts with its mean over seeds.
    pub worst_vm: Option<f64>,
    /// Worst ratio of any VM in any run.
    pub worst_run: Option<f64>,
    /// Number of VMs that are slowed, and number of all VMs.
    pub slowed: (usize, usize),
    /// Number of runs of VMs with a ratio above [`MUCH_WORSE`], and number of all runs of VMs.
    pub much_worse: (usize, usize),
    /// Decisions per run, on average.
    pub decisions: f64,
    /// Memory moved per run, in GiB, on average.
    pub moved_gib: f64,
}

impl Total {
    /// Computes the total of several cases.
    pub fn of(cases: &[CaseScore]) -> Total {
        let worst = |of: fn(&CaseScore) -> Option<f64>| cases.iter().filter_map(of).reduce(f64::max);
        let vms = cases.iter().flat_map(|case| &case.vms);
        let runs = || cases.iter().flat_map(CaseScore::runs);
        Total {
            mean: mean(cases.iter().filter_map(CaseScore::mean)),
            p99: mean(cases.iter().filter_map(CaseScore::p99)),
            worst_vm: worst(CaseScore::worst_vm),
            worst_run: worst(CaseScore::worst_run),
            slowed: (
                cases.iter().map(|case| case.slowed().count()).sum(),
                vms.filter(|vm| vm.ratio.is_some()).count(),
            ),
            much_worse: (runs().filter(|ratio| *ratio > MUCH_WORSE).count(), runs().count()),
            decisions: mean(cases.iter().map(|case| case.decisions)).unwrap_or(0.0),
            moved_gib: mean(cases.iter().map(|case| case.moved_gib)).unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use homenode_machine_files::preset;
    use homenode_twin::{RequestReport, Scenario, StartReport, Twin, VmSpec};
    use homenode_units::Bytes;

    use super::*;

    fn vm(runtimes_s: &[Option<f64>], instructions_g: f64, busy_s: f64) -> VmReport {
        VmReport {
            starts: vec![StartReport {
                arrival_s: 0.0,
                runtimes_s: runtimes_s.to_vec(),
                busy_s,
            }],
            instructions_g,
            ..VmReport::default()
        }
    }

    #[test]
    fn programs_that_end_are_judged_by_their_time() {
        // The first VM takes 60 + 20 s, the second 50 + 70 s, whatever the other counts are.
        let (base, other) = (
            vm(&[Some(60.0), Some(20.0)], 7.0, 1.0),
            vm(&[Some(50.0), Some(70.0)], 9.0, 1.0),
        );
        assert_eq!(ratio(&base, &other), Some(1.5));
    }

    #[test]
    fn a_program_that_ends_in_one_run_only_is_judged_by_its_speed() {
        // The first VM runs 100 G instructions in 50 s, the second 80 G in 100 s: 0.5 s and 1.25 s per G.
        let (base, other) = (vm(&[Some(50.0)], 100.0, 50.0), vm(&[None], 80.0, 100.0));
        assert_eq!(ratio(&base, &other), Some(2.5));
        assert_eq!(ratio(&other, &base), Some(0.4));
        // Only one of the runs has a second program, as if the VM returned after the end of the other run.
        let fewer = vm(&[Some(50.0)], 50.0, 50.0);
        assert_eq!(ratio(&vm(&[Some(50.0), None], 100.0, 100.0), &fewer), Some(1.0));
    }

    #[test]
    fn a_vm_that_does_nothing_has_no_ratio_and_one_that_stops_is_infinitely_slow() {
        let (idle, busy) = (vm(&[None], 0.0, 100.0), vm(&[None], 10.0, 100.0));
        assert_eq!(ratio(&idle, &busy), None);
        assert_eq!(ratio(&busy, &idle), Some(f64::INFINITY));
        assert_eq!(ratio(&vm(&[], 0.0, 0.0), &busy), None);
    }

    #[test]
    fn a_server_that_rests_all_the_time_has_no_ratio_and_one_that_is_kept_waiting_is_infinitely_slow() {
        let requests = RequestReport {
            count: 1,
            mean_ms: 90.0,
            p50_ms: 90.0,
            p99_ms: 90.0,
        };
        let base = VmReport {
            requests: Some(requests),
            ..vm(&[None], 10.0, 100.0)
        };
        let rests = vm(&[None], 0.0, 100.0);
        assert_eq!(ratio(&base, &rests), None);
        let waits = VmReport {
            waiting_s: 1.0,
            ..rests
        };
        assert_eq!(ratio(&base, &waits), Some(f64::INFINITY));
    }

    fn run(times: &[f64], decisions: usize) -> Run {
        let vms = (0..times.len()).map(|at| VmSpec::new(&format!("vm{at}"), 1, Bytes::from_gib(1), "cg.B"));
        let scenario = Scenario::of("some", vms.collect());
        let twin = Twin::new(preset("r420").unwrap(), &scenario, 1).unwrap();
        let mut report = twin.report();
        for (report, time) in report.vms.iter_mut().zip(times) {
            report.starts = vm(&[Some(*time)], 1.0, *time).starts;
            report.instructions_g = 1.0;
        }
        report.vms[0].host_pages_moved = 131_072;
        Run {
            policy: "some".to_owned(),
            decisions,
            report,
        }
    }

    #[test]
    fn scores_are_means_over_vms_then_seeds_then_cases() {
        let base = [run(&[10.0, 20.0], 0), run(&[20.0, 20.0], 0)];
        // The VMs' ratios are 0.9 and 1.2 in the first run, and 1.2 and 0.7 in the second. Over both runs the first VM takes 33 s
        // instead of 30 s, and the second 38 s instead of 40 s.
        let other = [run(&[9.0, 24.0], 3), run(&[24.0, 14.0], 5)];
        let score = CaseScore::of("one", &base, &other);
        let near = |value: Option<f64>, expected: f64| {
            assert!((value.unwrap() - expected).abs() < 1e-12, "{value:?}");
        };
        near(score.mean(), (1.05 + 0.95) / 2.0);
        near(score.worst_run(), 1.2);
        near(score.worst_vm(), 33.0 / 30.0);
        let slowed: Vec<&str> = score.slowed().map(|vm| vm.name.as_str()).collect();
        assert_eq!(slowed, ["vm0"]);
        near(score.vms[0].base_s, 15.0);
        near(Some(score.decisions), 4.0);
        near(Some(score.moved_gib), 0.5);
        let other = CaseScore::of("two", &base, &base);
        let total = Total::of(&[score, other]);
        near(total.mean, 1.0);
        near(total.worst_run, 1.2);
        assert_eq!((total.slowed, total.much_worse), ((1, 4), (2, 8)));
        near(Some(total.decisions), 2.0);
    }

    #[test]
    fn nothing_at_all_has_no_mean() {
        let total = Total::of(&[]);
        assert_eq!((total.mean, total.worst_vm, total.slowed), (None, None, (0, 0)));
    }
}

//! Bursts that a sample taken once a second does not show.

use super::*;

/// A third of a slice.
const TICK: Ns = Ns::from_millis(10);
/// What a vCPU misses in a slice in which it always runs.
const IN_A_BURST: u64 = 30 * INTENSITY;

/// Runs the host for some seconds in ticks of 10 ms. `demand` is that of each vCPU in the tick that begins at this millisecond.
/// The policy looks once a second. Returns the most that the VM missed in three ticks in a row, and the number of decisions.
fn run(host: &mut Host, seconds: u64, demand: impl Fn(u64) -> f64) -> (u64, usize) {
    let (mut ticks, mut decisions) = (Vec::new(), 0);
    for at_ms in (0..1000 * seconds).step_by(10) {
        let before = host.misses();
        host.demand = demand(at_ms);
        host.run(TICK);
        ticks.push(host.misses() - before);
        if (at_ms + 10).is_multiple_of(1000) {
            decisions += host.act().decisions.len();
        }
    }
    let slices = ticks.windows(3).map(|slice| slice.iter().sum());
    (slices.max().unwrap_or(0), decisions)
}

/// Pollutes for 450 ms of each second, and rests.
fn below_a_second(at_ms: u64) -> f64 {
    f64::from(at_ms % 1000 < 450)
}

/// Pollutes for 5 s, and rests for 5 s.
fn over_seconds(at_ms: u64) -> f64 {
    f64::from(at_ms % 10_000 < 5000)
}

const BURSTS: [fn(u64) -> f64; 2] = [below_a_second, over_seconds];

#[test]
fn no_burst_exceeds_the_permit_of_a_slice() {
    // The average of a second, or of ten, is within the larger permits; the bursts are within none.
    for units in [300_000, 1_000_000, 1_500_000, 1_800_000, 2_500_000] {
        for demand in BURSTS {
            let mut host = Host::new(1, INTENSITY, &units.to_string());
            let (worst, _) = run(&mut host, 10, demand);
            assert_eq!(worst, IN_A_BURST, "not known yet");
            let (worst, _) = run(&mut host, 60, demand);
            // A slice that was saved up is spent over the time to repay.
            assert!(
                worst <= units + units / 50,
                "a permit of {units}: {worst} in a slice"
            );
        }
    }
}

#[test]
fn a_vm_whose_bursts_fit_its_permit_is_never_touched() {
    for demand in BURSTS {
        let mut host = Host::new(2, INTENSITY, "6M");
        assert_eq!(run(&mut host, 20, demand), (2 * IN_A_BURST, 0));
    }
}

#[test]
fn a_vm_that_cannot_have_broken_a_slice_is_never_touched() {
    // In 20 ms of each second it causes what it may save up and what a slice earns.
    let mut host = Host::new(1, INTENSITY, "1M");
    assert_eq!(run(&mut host, 20, |at_ms| f64::from(at_ms % 1000 < 20)).1, 0);
    let mut host = Host::new(1, INTENSITY, "1M");
    assert!(run(&mut host, 20, |at_ms| f64::from(at_ms % 1000 < 30)).1 > 0);
}

#[test]
fn a_vm_within_its_permit_on_average_loses_no_work_for_its_bursts() {
    // The VM has a quota of half a CPU, and never needs more than 0.45.
    let mut host = Host::new(1, INTENSITY, "1500k");
    let (_, decisions) = run(&mut host, 20, |_| 0.45);
    assert!(decisions > 0 && host.quota().is_some());
    let free = 20 * 450 * INTENSITY;
    assert!(host.misses() >= free - free / 1000, "{} of {free}", host.misses());
}

#[test]
fn vcpus_that_do_not_run_at_once_have_what_the_permit_pays_for() {
    // The permit pays for two CPUs.
    let account = Account::open("6M".parse().unwrap());
    let share = |at_once: f64, demands: &[f64]| {
        let (intensity, config) = (INTENSITY as f64, Config::default());
        wanted_share(
            &account,
            intensity,
            Some(at_once * intensity),
            demands,
            &config,
            None,
        )
    };
    let near = |share: Option<f64>, expected: f64| share.is_some_and(|share| (share - expected).abs() < 0.01);
    let (one, alike) = ([0.9, 0.1, 0.1, 0.1], [0.2; 4]);
    assert_eq!(share(at_once(&one), &one), None);
    assert!(near(share(at_once(&alike), &alike), 0.5));
    // After a burst of all four, one that works alone is not cut.
    assert!(near(share(4.0, &one), 0.9));
}

#[test]
fn an_operator_can_allow_bursts() {
    let mut host = Host::new(1, INTENSITY, "1500k");
    // A second has 33.3 slices.
    host.config.terms.burst_slices = 34;
    host.state = State::new(&host.config);
    assert_eq!(run(&mut host, 20, below_a_second), (IN_A_BURST, 0));
}

#[test]
fn a_quota_is_over_a_tick_if_the_kernel_can_hold_it_there() {
    assert_eq!(quota_of(0.5), CpuQuota::of(0.5, TICK));
    assert_eq!(quota_of(0.1), CpuQuota::of(0.1, TICK));
    assert_eq!(quota_of(0.05), CpuQuota::of(0.05, Permit::SLICE));
}

use homenode_host::{
    Barred, Counters, Decision, HandsOff, Management, Rates, Sample, Version, VmSample, VmSettings,
};
use homenode_units::Bytes;
use proptest::prelude::*;

use super::*;
use crate::testing::{Scene, vm_id};

mod bursts;

const PERIOD: Ns = Ns::from_secs(1);
const GHZ: u64 = 1_000_000_000;
/// Counters that have counted nothing yet.
const NOTHING: Counters = Counters {
    instructions: 0,
    cycles: 0,
    llc_references: Some(0),
    llc_misses: Some(0),
};

/// A host with one VM, which carries out plans. The VM pollutes in proportion to the time that it runs.
struct Host {
    machine: Machine,
    at: Ns,
    vms: Vec<VmSample>,
    before: Option<Sample>,
    quota_hands_off: Option<HandsOff>,
    /// Misses per millisecond run, and the demand of each vCPU.
    intensity: u64,
    demand: f64,
    config: Config,
    state: State,
}

impl Host {
    /// Returns a host with one VM, which has this many busy vCPUs and a permit.
    fn new(vcpus: u16, intensity: u64, permit: &str) -> Host {
        let vcpu = |index| VcpuSample {
            index,
            counters: Some(NOTHING),
            ..VcpuSample::default()
        };
        let vm = VmSample {
            vcpus: (0..vcpus).map(vcpu).collect(),
            memory_bytes: Bytes::from_gib(1),
            settings: VmSettings {
                permit: Some(permit.parse().unwrap()),
                ..VmSettings::default()
            },
            ..VmSample::new(vm_id(1), "vm1")
        };
        let config = Config::default();
        Host {
            machine: Scene::nodes(1, 8).machine,
            at: Ns::from_secs(100),
            vms: vec![vm],
            before: None,
            quota_hands_off: None,
            intensity,
            demand: 1.0,
            state: State::new(&config),
            config,
        }
    }

    /// Advances time. Every vCPU runs as much as it wants and may.
    fn run(&mut self, time: Ns) {
        self.at += time;
        let part = |share: f64| Ns((share * time.as_f64()).round() as u64);
        for vcpu in self.vms.iter_mut().flat_map(|vm| &mut vm.vcpus) {
            let may = vcpu.quota.map_or(1.0, CpuQuota::share);
            let ran = part(self.demand.min(may));
            vcpu.running_ns += ran;
            vcpu.throttled_ns += part((self.demand - may).max(0.0));
            vcpu.waiting_ns = Some(vcpu.throttled_ns);
            if let Some(counters) = &mut vcpu.counters {
                *counters.llc_misses.as_mut().unwrap() += ran.0 * self.intensity / 1_000_000;
                counters.cycles += ran.0 * GHZ / 1_000_000_000;
                counters.instructions += ran.0;
            }
        }
    }

    /// Returns the policy's plan for the host as it is now.
    fn look(&mut self) -> Plan {
        let sample = Sample {
            at: self.at,
            version: Version(1),
            vms: self.vms.clone(),
            ..Sample::default()
        };
        let rates = self
            .before
            .as_ref()
            .and_then(|before| Rates::between(&self.machine, before, &sample));
        let vms = sample.vms.iter().map(|vm| VmView {
            sample: vm,
            rates: rates.as_ref().and_then(|rates| rates.vm(vm.id)),
            home: None,
            layout: None,
            hands_off: None,
            quota_hands_off: self.quota_hands_off,
        });
        let rates = rates.as_ref();
        let view = View::new(&self.machine, &sample, rates, Barred::default(), vms.collect());
        let plan = plan(&view, &self.config, &mut self.state);
        self.before = Some(sample);
        plan
    }

    /// Runs one period: time passes, the policy looks at the host, and its plan is carried out.
    fn step(&mut self) -> Plan {
        self.run(PERIOD);
        self.act()
    }

    /// Has the policy look at the host, and carries out its plan.
    fn act(&mut self) -> Plan {
        let plan = self.look();
        for Decision { action, .. } in &plan.decisions {
            match &action.act {
                Act::Limit {
                    limit: limit @ (Limit::CacheWays(_) | Limit::MemoryBandwidth(_)),
                    ..
                } => {
                    self.vms[0].confined = Some(*limit);
                    continue;
                }
                Act::Lift {
                    lever: Lever::Resctrl,
                } => {
                    self.vms[0].confined = None;
                    continue;
                }
                _ => {}
            }
            let quota = match &action.act {
                Act::Limit {
                    limit: Limit::CpuQuota(quota),
                    lease_ns,
                    ..
                } => {
                    assert_eq!(*lease_ns, self.config.lease);
                    Some(*quota)
                }
                Act::Lift {
                    lever: Lever::CpuQuota,
                    ..
                } => self.vms[0].settings.quota,
                other => panic!("{other:?}"),
            };
            self.set(quota);
        }
        plan
    }

    fn steps(&mut self, count: usize) -> Vec<Plan> {
        (0..count).map(|_| self.step()).collect()
    }

    fn set(&mut self, quota: Option<CpuQuota>) {
        self.vms[0].vcpus.iter_mut().for_each(|vcpu| vcpu.quota = quota);
    }

    fn quota(&self) -> Option<CpuQuota> {
        self.vms[0].vcpus[0].quota
    }

    fn misses(&self) -> u64 {
        let counters = self.vms[0].vcpus.iter().filter_map(|vcpu| vcpu.counters);
        counters.filter_map(|counters| counters.llc_misses).sum()
    }

    fn settings(&mut self) -> &mut VmSettings {
        &mut self.vms[0].settings
    }

    fn account(&self) -> &Account {
        self.state.account(vm_id(1)).expect("a permit")
    }
}

fn findings(plans: &[Plan]) -> Vec<&str> {
    plans
        .iter()
        .flat_map(|plan| &plan.findings)
        .map(|finding| finding.message.as_str())
        .collect()
}

/// 100,000 misses per millisecond run are 3M per slice for a vCPU that always runs.
const INTENSITY: u64 = 100_000;

#[test]
fn a_polluter_is_held_to_its_permit_on_average() {
    for (vcpus, permit, units) in [(1, "1M", 1_000_000), (4, "3M", 3_000_000), (2, "300k", 300_000)] {
        let mut host = Host::new(vcpus, INTENSITY, permit);
        host.steps(120);
        let before = host.misses();
        host.steps(60);
        let per_slice = (host.misses() - before) as f64 / slices(Ns::from_secs(60));
        assert!(
            (per_slice / f64::from(units) - 1.0).abs() < 0.06,
            "{permit}: {per_slice} per slice"
        );
    }
}

#[test]
fn the_first_answer_is_what_the_ledger_says() {
    let mut host = Host::new(1, INTENSITY, "1M");
    assert_eq!(host.steps(1)[0].decisions, [], "one look says nothing");
    // A second has 33.3 slices of 3M, against 1M per slice and one slice saved, so 65.7M are owed. A hundredth of that is to
    // be repaid per slice: 1M - 657k = 343k per slice, which is 0.114 of a CPU.
    let plan = host.step();
    assert_eq!(
        host.account().balance_units(),
        1_000_000 - 100_000_000 + 33_333_333
    );
    let quota = host.quota().unwrap();
    assert!((quota.share() - 0.1144).abs() < 0.0005, "{quota}");
    let reason = &plan.decisions[0].reason;
    assert!(
        reason.starts_with("3000000 LLC misses per slice against a permit of 1M, OVER: each vCPU may run"),
        "{reason}"
    );
}

#[test]
fn a_vm_within_its_permit_is_never_touched() {
    let mut host = Host::new(2, INTENSITY, "6M");
    let plans = host.steps(20);
    assert!(
        plans
            .iter()
            .all(|plan| plan.decisions.is_empty() && plan.findings.is_empty())
    );
    // A VM without a permit is not touched either.
    host.settings().permit = None;
    host.intensity *= 1000;
    assert!(host.steps(20).iter().all(|plan| plan.decisions.is_empty()));
    assert!(host.state.account(vm_id(1)).is_none());
}

#[test]
fn a_vm_that_turns_quiet_is_let_go_and_not_before() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(60);
    assert!(
        host.quota().is_some(),
        "without the quota it would break its permit"
    );
    host.intensity /= 10;
    let plans = host.steps(30);
    assert_eq!(host.quota(), None);
    let lifts: Vec<_> = plans
        .iter()
        .flat_map(|plan| &plan.decisions)
        .filter(|d| matches!(d.action.act, Act::Lift { .. }))
        .collect();
    assert_eq!(lifts.len(), 1);
    assert!(lifts[0].reason.contains("by itself"), "{}", lifts[0].reason);
}

/// Returns the number of periods from when the VM turns quiet until its limit is lifted.
fn let_go_after(set: fn(&mut Config)) -> Option<usize> {
    let mut host = Host::new(1, INTENSITY, "1M");
    set(&mut host.config);
    host.steps(60);
    host.intensity /= 10;
    (0..60).find(|_| {
        host.step();
        host.quota().is_none()
    })
}

#[test]
fn how_soon_a_vm_is_let_go_is_the_operators_to_say() {
    let usual = let_go_after(|_| {}).expect("it is let go");
    let late = let_go_after(|config| config.calm_cycles = 20).expect("it is let go");
    assert_eq!(late, usual + 17);
    // The VM uses a part of what its permit pays for, but with this setting it would have to use none of it.
    assert_eq!(let_go_after(|config| config.spare = 1.0), None);
}

#[test]
fn for_how_long_a_vm_is_held_blindly_and_what_change_counts_are_the_operators_to_say() {
    for (most, is_held) in [(3, false), (10, true)] {
        let mut host = Host::new(1, INTENSITY, "1M");
        host.config.blind_cycles_max = most;
        host.steps(20);
        for n in 0..6 {
            // The counters run backwards.
            let count = (10 - n) * 1_000_000_000_000;
            host.vms[0].vcpus[0].counters = Some(Counters {
                instructions: count,
                cycles: count,
                llc_references: Some(count),
                llc_misses: Some(count),
            });
            host.step();
        }
        assert_eq!(host.quota().is_some(), is_held, "{most}");
    }
    // A VM that misses a fifth more in each period gets a lower quota each time, or keeps its first one.
    for (least, changes) in [(0.05, true), (1.0, false)] {
        let mut host = Host::new(1, INTENSITY, "1M");
        host.config.change_min = least;
        host.steps(20);
        let before = host.quota();
        for _ in 0..3 {
            host.intensity += host.intensity / 5;
            host.step();
        }
        assert_eq!(host.quota() != before, changes, "{least}");
    }
}

#[test]
fn as_many_periods_are_remembered_as_the_operator_says() {
    let mut host = Host::new(1, INTENSITY, "1M");
    let count = |host: &Host| {
        host.state
            .conduct(vm_id(1))
            .map(|conduct| conduct.recent().count())
    };
    host.steps(50);
    host.config.suggest.slices_max = 20;
    host.steps(1);
    assert_eq!(count(&host), Some(20), "what is too much is forgotten");
    host.steps(10);
    assert_eq!(count(&host), Some(20));
}

#[test]
fn a_permit_taken_back_lets_a_vm_go() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(3);
    host.settings().permit = None;
    assert!(matches!(host.step().decisions[0].action.act, Act::Lift { .. }));
    assert_eq!(host.steps(2)[1].decisions, []);
}

#[test]
fn what_is_not_metered_is_said_once_and_nobody_is_held() {
    for missing in [true, false] {
        let mut host = Host::new(1, INTENSITY, "1M");
        host.steps(5);
        assert!(host.quota().is_some());
        if missing {
            host.vms[0].vcpus[0].counters = None;
        } else {
            host.intensity = 0;
        }
        // If a PMU exists in name only, neither cycles nor instructions are counted.
        let stuck = host.vms[0].vcpus[0].counters;
        let mut plans = Vec::new();
        for _ in 0..10 {
            host.run(PERIOD);
            host.vms[0].vcpus[0].counters = stuck;
            let plan = host.look();
            for decision in &plan.decisions {
                assert!(matches!(decision.action.act, Act::Lift { .. }), "{decision:?}");
                host.set(None);
            }
            plans.push(plan);
        }
        assert_eq!(host.quota(), None);
        let said = findings(&plans);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].starts_with("VM vm1 is not held to its permit of 1M: "),
            "{said:?}"
        );
        let decided: usize = plans.iter().map(|plan| plan.decisions.len()).sum();
        assert_eq!(decided, 1);
    }
}

#[test]
fn one_unreadable_period_keeps_what_is_in_force() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(20);
    let quota = host.quota();
    assert!(quota.is_some());
    // The counters wrap around, so they seem to run backwards.
    host.vms[0].vcpus[0].counters = Some(NOTHING);
    let plan = host.step();
    assert_eq!((host.quota(), plan.findings.len()), (quota, 0));
    host.steps(2);
    assert!(host.quota().is_some());
}

#[test]
fn a_vm_that_vanishes_while_over_leaves_nothing_behind() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(3);
    assert_eq!(host.account().standing(), Standing::Over);
    let vms = std::mem::take(&mut host.vms);
    host.run(PERIOD);
    let plan = host.look();
    assert_eq!(plan.decisions, []);
    assert!(host.state.account(vm_id(1)).is_none() && host.state.conduct(vm_id(1)).is_none());
    // The same VM owes nothing when it is started again.
    host.vms = vms;
    host.set(None);
    host.run(PERIOD);
    assert_eq!(host.look().decisions, []);
    assert_eq!(host.account().standing(), Standing::Under);
}

#[test]
fn a_clock_that_jumps_changes_nothing_in_force() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(20);
    let (quota, balance) = (host.quota(), host.account().balance_units());
    host.at += Ns::from_secs(7200);
    host.step();
    assert_eq!((host.quota(), host.account().balance_units()), (quota, balance));
    // Then the clock jumps back.
    host.at = Ns::from_secs(100);
    host.step();
    assert_eq!((host.quota(), host.account().balance_units()), (quota, balance));
    host.steps(5);
    assert!(host.quota().is_some());
}

#[test]
fn a_restarted_agent_goes_on_with_the_quota_in_force() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(40);
    let quota = host.quota();
    host.state = State::new(&host.config);
    host.before = None;
    let plan = host.step();
    assert!(
        matches!(plan.decisions[0].action.act, Act::Limit { .. }),
        "renewed before anything is known"
    );
    assert_eq!(host.quota(), quota);
    let plans = host.steps(10);
    assert!(
        plans
            .iter()
            .flat_map(|plan| &plan.decisions)
            .all(|d| matches!(d.action.act, Act::Limit { .. }))
    );
}

#[test]
fn an_operators_lower_quota_is_enough() {
    let mut host = Host::new(1, INTENSITY, "1M");
    let theirs = CpuQuota::of(0.02, Ns::from_millis(100));
    host.settings().quota = Some(theirs);
    host.set(Some(theirs));
    assert!(host.steps(10).iter().all(|plan| plan.decisions.is_empty()));
    // If the operator's quota is higher, the agent's replaces it, and the operator's is restored afterwards.
    let theirs = CpuQuota::of(0.8, Ns::from_millis(100));
    host.settings().quota = Some(theirs);
    host.set(Some(theirs));
    host.steps(10);
    assert!(host.quota().unwrap().share() < 0.5);
    host.intensity /= 100;
    host.steps(60);
    assert_eq!(host.quota(), Some(theirs));
}

#[test]
fn whom_the_operator_keeps_is_left_alone() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.quota_hands_off = Some(HandsOff::QuotaByHand);
    assert!(host.steps(5).iter().all(|plan| plan.decisions.is_empty()));
    host.quota_hands_off = None;
    host.settings().management = Management::Ignored;
    assert!(host.steps(5).iter().all(|plan| plan.decisions.is_empty()));
}

#[test]
fn a_permit_that_the_floor_breaks_is_said_once() {
    let mut host = Host::new(1, INTENSITY, "10k");
    let plans = host.steps(20);
    assert_eq!(host.quota(), Some(CpuQuota::of(0.05, Permit::SLICE)));
    let said = findings(&plans);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("even at the smallest share of CPUs: 150000 LLC misses per slice"),
        "{said:?}"
    );
}

#[test]
fn a_bandwidth_permit_is_kept_with_the_same_ledger() {
    // 100,000 lines of 64 bytes per millisecond are 6.4 GB/s.
    let mut host = Host::new(1, INTENSITY, "1600MB/s");
    host.steps(100);
    let before = host.misses();
    let plans = host.steps(60);
    let bytes_per_s = (host.misses() - before) as f64 * 64.0 / 60.0;
    assert!((bytes_per_s / 1.6e9 - 1.0).abs() < 0.06, "{bytes_per_s}");
    let reason = &plans.last().unwrap().decisions[0].reason;
    assert!(reason.contains("MB/s against a permit of 1600MB/s"), "{reason}");
}

#[test]
fn usage_and_behaviour_are_remembered() {
    let mut host = Host::new(1, INTENSITY, "1M");
    host.steps(11);
    let usage = host.state.take_usage()[&vm_id(1)];
    assert_eq!(usage.time_ns, Ns::from_secs(10));
    assert_eq!(usage.booked_units, 333_333_333);
    // At the first reading there is no earlier reading.
    assert_eq!(usage.used_units, host.misses() - 100_000_000);
    assert_eq!(host.state.take_usage(), BTreeMap::new());
    // A permit is suggested from how the VM behaves without a quota.
    let conduct = host.state.conduct(vm_id(1)).unwrap();
    assert!(conduct.recent().all(|slice| slice.abs_diff(3_000_000) < 30_000));
    host.vms[0].vcpus[0].counters = None;
    host.steps(3);
    let usage = host.state.take_usage()[&vm_id(1)];
    assert_eq!((usage.unmetered_ns, usage.used_units), (Ns::from_secs(3), 0));
}

#[test]
fn who_is_over_is_confined_until_it_is_under() {
    for (enforcer, limit) in [
        (Enforcer::CacheWays, Limit::CacheWays(Percent(10))),
        (Enforcer::MemoryBandwidth, Limit::MemoryBandwidth(Percent(10))),
    ] {
        let mut host = Host::new(1, INTENSITY, "1M");
        host.config.enforcer = enforcer;
        host.steps(3);
        assert_eq!((host.quota(), host.vms[0].confined), (None, Some(limit)));
        // Confinement does not reduce the VM's misses, so it stays confined.
        host.steps(20);
        assert_eq!(host.vms[0].confined, Some(limit));
        host.intensity /= 100;
        let plans = host.steps(60);
        assert_eq!(host.vms[0].confined, None);
        let lifts = plans.iter().flat_map(|plan| &plan.decisions);
        assert_eq!(
            lifts.filter(|d| matches!(d.action.act, Act::Lift { .. })).count(),
            1
        );
    }
}

#[test]
fn the_level_cuts_the_highest_demands_to_the_budget() {
    assert_eq!(level(&[0.2, 1.0, 1.0], 1.2, 1.2), Some(0.5));
    assert_eq!(level(&[1.0, 1.0], 0.0, 0.0), Some(0.0));
    assert_eq!(level(&[0.5, 0.5], 1.0, 1.0), None);
    assert_eq!(
        level(&[0.5, 0.5], 1.05, 0.945),
        Some(0.5),
        "too little to spare: held, and no VM is cut"
    );
    assert_eq!(level(&[], 1.0, 1.0), None);
}

proptest! {
    #[test]
    fn a_level_uses_the_budget(demands in prop::collection::vec(0.0f64..1.0, 1..9), budget in 0.0f64..8.0) {
        match level(&demands, budget, budget) {
            None => prop_assert!(demands.iter().sum::<f64>() <= budget),
            Some(level) => {
                let used: f64 = demands.iter().map(|demand| demand.min(level)).sum();
                prop_assert!((used - budget).abs() < 1e-9, "{used} of {budget}");
            }
        }
    }
}

//! Permits that the simulator's host itself enforces.

use crate::common::inert;
use homenode_host::Host;
use homenode_machine_files::preset;
use homenode_twin::{
    Attribution, Enforcer, EventAction, Hypervisor, PermitReport, Scenario, Twin, TwinReport, VmSpec,
};
use homenode_units::{Bytes, CpuId, CpuSet, Ns};

const ENFORCERS: [Enforcer; 3] = [Enforcer::Ks4xen, Enforcer::Ks4linux, Enforcer::Ks4pisces];

/// Returns a VM of one vCPU with a CPU of its own and a permit.
fn vm(name: &str, program: &str, cpu: u32, permit: &str) -> VmSpec {
    VmSpec::new(name, 1, Bytes::from_mib(1200), program)
        .doing(100.0)
        .on_cpus(CpuSet::one(CpuId(cpu)))
        .with_permit(permit.parse().expect("a permit"))
}

fn scenario(enforcer: Enforcer, vms: Vec<VmSpec>) -> Scenario {
    let mut scenario = Scenario::of("permits", vms).with_workload(inert());
    scenario.enforcer = enforcer;
    if enforcer == Enforcer::Ks4xen {
        scenario.hypervisor = Hypervisor::Xen;
    }
    scenario
}

fn twin(scenario: &Scenario) -> Twin {
    Twin::new(preset("e5_1603v3").expect("a preset"), scenario, 1).expect("the scenario fits")
}

/// Returns the report of ten seconds after five seconds of warm-up.
fn after(scenario: &Scenario) -> TwinReport {
    let mut twin = twin(scenario);
    twin.wait(Ns::from_secs(5));
    twin.mark();
    twin.wait(Ns::from_secs(10));
    twin.report()
}

fn permit(report: &TwinReport, at: usize) -> PermitReport {
    report.vms[at].permit.expect("it has a permit")
}

#[test]
fn a_polluter_stays_within_its_permit_under_every_enforcer() {
    for enforcer in ENFORCERS {
        let report = after(&scenario(enforcer, vec![vm("a", "lbm", 0, "250k")]));
        let permit = permit(&report, 0);
        // Alone, lbm causes 3 million per slice. One tick (KS4Linux: one period) causes at most a few slices' worth.
        let off = permit.used_per_slice / 250_000.0 - 1.0;
        assert!(off.abs() < 0.03, "{enforcer:?}: {permit:?}");
        assert!(permit.throttled_s > 8.0, "{enforcer:?}: {permit:?}");
    }
}

#[test]
fn who_stays_within_its_permit_is_never_stopped() {
    for enforcer in ENFORCERS {
        // Alone, gcc causes about 16 thousand per slice.
        let report = after(&scenario(enforcer, vec![vm("a", "gcc", 0, "60k")]));
        let permit = permit(&report, 0);
        assert_eq!(
            (permit.punished_count, permit.throttled_s),
            (0, 0.0),
            "{enforcer:?}"
        );
    }
}

#[test]
fn nobody_is_punished_for_what_others_evict() {
    let mut scenario = scenario(
        Enforcer::Ks4xen,
        vec![vm("victim", "gcc", 0, "60k"), vm("polluter", "lbm", 1, "1G")],
    );
    let replayed = permit(&after(&scenario), 0);
    assert_eq!(replayed.punished_count, 0);
    // If the host charges the misses that its counters show, the VM pays for its neighbour: next to lbm it misses eight times as
    // often.
    scenario.attribution = Attribution::Counted;
    let counted = permit(&after(&scenario), 0);
    assert!(counted.punished_count > 10, "{counted:?}");
    assert!(counted.throttled_s > 1.0, "{counted:?}");
}

#[test]
fn without_an_enforcer_permits_are_metered_only() {
    let report = after(&scenario(Enforcer::None, vec![vm("a", "lbm", 0, "250k")]));
    let permit = permit(&report, 0);
    assert!(permit.used_per_slice > 2_000_000.0, "{permit:?}");
    assert_eq!(permit.throttled_s, 0.0);
    assert!(permit.balance_units < 0);
}

#[test]
fn a_permit_for_bandwidth_is_kept_by_the_same_ledger() {
    // 500 MB/s are 15 million bytes per slice.
    let report = after(&scenario(Enforcer::Ks4xen, vec![vm("a", "lbm", 0, "500MB/s")]));
    let permit = permit(&report, 0);
    assert!((permit.used_per_slice / 15e6 - 1.0).abs() < 0.05, "{permit:?}");
}

#[test]
fn a_vm_that_leaves_while_over_is_free_when_it_comes_back() {
    for enforcer in ENFORCERS {
        let scenario = scenario(enforcer, vec![vm("a", "lbm", 0, "50k")])
            .with_event(Ns::from_millis(4_500), "a", EventAction::Stop)
            .with_event(Ns::from_millis(5_000), "a", EventAction::Start);
        let mut twin = twin(&scenario);
        twin.wait(Ns::from_millis(4_500));
        assert!(permit(&twin.report(), 0).throttled_s > 0.5, "{enforcer:?}");
        // The VM boots at full speed: its vCPU runs all of the time.
        let ran = |twin: &mut Twin| twin.sample().expect("the twin answers").vms[0].vcpus[0].running_ns;
        twin.wait(Ns::from_millis(550));
        let before = ran(&mut twin);
        twin.wait(Ns::from_millis(500));
        assert!(ran(&mut twin).0 - before.0 > 490_000_000, "{enforcer:?}");
        assert!(permit(&twin.report(), 0).balance_units >= 0, "{enforcer:?}");
    }
}

#[test]
fn an_enforcer_on_the_wrong_host_is_refused_with_the_remedy() {
    let refusal = |enforcer, hypervisor, vms| {
        let mut scenario = scenario(enforcer, vms);
        scenario.hypervisor = hypervisor;
        let machine = preset("e5_1603v3").expect("a preset");
        Twin::new(machine, &scenario, 1).expect_err("refused").to_string()
    };
    let one = || vec![vm("a", "inert", 0, "1M")];
    assert!(refusal(Enforcer::Ks4xen, Hypervisor::Kvm, one()).contains("needs hypervisor = \"xen\""));
    assert!(refusal(Enforcer::Ks4linux, Hypervisor::Xen, one()).contains("needs hypervisor = \"kvm\""));
    let mut unpinned = one();
    unpinned[0].cpus = None;
    assert!(refusal(Enforcer::Ks4pisces, Hypervisor::Kvm, unpinned).contains("give each VM `cpus`"));
    let shared = vec![vm("a", "inert", 0, "1M"), vm("b", "inert", 0, "1M")];
    assert!(
        refusal(Enforcer::Ks4pisces, Hypervisor::Kvm, shared).contains("no CPU may be in the `cpus` of two")
    );
}

use homenode_units::CpuId;
use proptest::prelude::*;

use super::*;
use crate::sample::{Accesses, CpuSample, NodeSample};

fn machine() -> Machine {
    homenode_machine_files::preset("r910").unwrap()
}

fn vcpu(index: u16, ran_ms: u64, waited_ms: u64) -> VcpuSample {
    VcpuSample {
        index,
        running_ns: Ns::from_millis(ran_ms),
        waiting_ns: Some(Ns::from_millis(waited_ms)),
        cpu: Some(CpuId(0)),
        ..VcpuSample::default()
    }
}

fn counted(vcpu: VcpuSample, references: u64, misses: u64) -> VcpuSample {
    let counters = Counters {
        instructions: 10 * references,
        cycles: 20 * references,
        llc_references: Some(references),
        llc_misses: Some(misses),
    };
    VcpuSample {
        counters: Some(counters),
        ..vcpu
    }
}

fn vm(id: u128, vcpus: Vec<VcpuSample>) -> VmSample {
    VmSample {
        vcpus,
        ..VmSample::new(VmId(id), "vm")
    }
}

fn sample(at_ms: u64, vms: Vec<VmSample>) -> Sample {
    Sample {
        at: Ns::from_millis(at_ms),
        vms,
        ..Sample::default()
    }
}

fn between(prev: &Sample, cur: &Sample) -> Rates {
    Rates::between(&machine(), prev, cur).unwrap()
}

#[test]
fn without_time_between_them_two_samples_have_no_rates() {
    let (early, late) = (sample(1000, Vec::new()), sample(2000, Vec::new()));
    assert_eq!(Rates::between(&machine(), &late, &early), None);
    assert_eq!(Rates::between(&machine(), &late, &late), None);
    assert_eq!(between(&early, &late).period_ns, Ns::from_secs(1));
}

#[test]
fn what_is_not_counted_at_the_llc_is_unknown_and_not_zero() {
    let without = |ran, references| {
        let mut vcpu = counted(vcpu(0, ran, 0), references, 0);
        let counters = vcpu.counters.as_mut().unwrap();
        (counters.llc_references, counters.llc_misses) = (None, None);
        vm(1, vec![vcpu])
    };
    let prev = sample(0, vec![without(100, 1000)]);
    let rates = between(&prev, &sample(2000, vec![without(1100, 5000)]));
    let vm = rates.vm(VmId(1)).unwrap();
    assert_eq!(
        (vm.llc_miss_rate, vm.llc_misses_per_s, vm.llc_references_per_s),
        (None, None, None)
    );
    assert_eq!((vm.bandwidth(), vm.vcpus[0].llc_miss_rate), (None, None));
    assert_eq!(
        (vm.instructions_per_s, vm.cycles_per_s),
        (Some(20_000.0), Some(40_000.0))
    );
}

#[test]
fn what_a_vm_did_is_its_counters_over_the_period() {
    let prev = sample(0, vec![vm(1, vec![counted(vcpu(0, 100, 0), 1000, 100)])]);
    let cur = sample(2000, vec![vm(1, vec![counted(vcpu(0, 1100, 500), 5000, 1100)])]);
    let rates = between(&prev, &cur);
    let vm = rates.vm(VmId(1)).unwrap();
    assert_eq!((vm.cpus_used, vm.llc_miss_rate), (0.5, Some(0.25)));
    assert_eq!(
        (vm.llc_misses_per_s, vm.instructions_per_s),
        (Some(500.0), Some(20_000.0))
    );
    let [first] = vm.vcpus.as_slice() else {
        panic!("{vm:?}")
    };
    assert_eq!(
        (first.running, first.waiting, first.throttled),
        (0.5, Some(0.25), 0.0)
    );
}

#[test]
fn waiting_for_a_quota_is_not_waiting_for_a_cpu() {
    let held = VcpuSample {
        throttled_ns: Ns::from_millis(300),
        ..vcpu(0, 0, 400)
    };
    let rates = between(
        &sample(0, vec![vm(1, vec![vcpu(0, 0, 0)])]),
        &sample(1000, vec![vm(1, vec![held])]),
    );
    let first = rates.vms[0].vcpus[0];
    assert!(
        (first.waited() - 0.1).abs() < 1e-9 && (first.throttled - 0.3).abs() < 1e-9,
        "{first:?}"
    );
}

#[test]
fn who_came_or_left_between_samples_has_no_rates() {
    let prev = sample(0, vec![vm(1, vec![vcpu(0, 0, 0)]), vm(2, vec![vcpu(0, 0, 0)])]);
    let cur = sample(
        1000,
        vec![
            vm(2, vec![vcpu(0, 500, 0), vcpu(1, 500, 0)]),
            vm(3, vec![vcpu(0, 9, 0)]),
        ],
    );
    let rates = between(&prev, &cur);
    let ids: Vec<u128> = rates.vms.iter().map(|vm| vm.id.0).collect();
    assert_eq!(ids, [2], "1 left, 3 came");
    assert_eq!(rates.vms[0].vcpus.len(), 1, "its second vCPU was plugged in");
    assert_eq!(rates.vms[0].cpus_used, 0.5);
}

#[test]
fn a_counter_that_fell_leaves_its_own_figure_out_and_no_other() {
    let prev = sample(0, vec![vm(1, vec![counted(vcpu(0, 0, 0), 9000, 9000)])]);
    let cur = sample(1000, vec![vm(1, vec![counted(vcpu(0, 250, 0), 10, 1)])]);
    let vm = &between(&prev, &cur).vms[0];
    assert_eq!(
        (vm.cpus_used, vm.llc_miss_rate, vm.instructions_per_s),
        (0.25, None, None)
    );
}

#[test]
fn traffic_is_of_nodes_that_count_it() {
    let of = |at, bytes: Option<u64>| {
        let node = |traffic| NodeSample {
            memory_traffic_bytes: traffic,
            ..NodeSample::default()
        };
        let mut sample = sample(at, Vec::new());
        sample.nodes = [(NodeId(0), node(bytes)), (NodeId(1), node(None))]
            .into_iter()
            .collect();
        sample
    };
    let rates = between(&of(0, Some(1000)), &of(500, Some(3000)));
    let bandwidth = |node| rates.nodes.get(NodeId(node)).unwrap().bandwidth;
    assert_eq!((bandwidth(0), bandwidth(1)), (Some(BytesPerSec(4000)), None));
}

/// Any values that a kernel, a PMU or a guest may report.
fn any_vcpu() -> impl Strategy<Value = VcpuSample> {
    let counters = proptest::option::of(any::<[u64; 4]>());
    (0..3u16, any::<[u64; 3]>(), counters, 0..80u32).prop_map(|(index, times, counters, cpu)| VcpuSample {
        index,
        running_ns: Ns(times[0]),
        waiting_ns: Some(Ns(times[1])),
        throttled_ns: Ns(times[2]),
        cpu: Some(CpuId(cpu)),
        counters: counters.map(|[instructions, cycles, llc_references, llc_misses]| Counters {
            instructions,
            cycles,
            llc_references: Some(llc_references),
            llc_misses: Some(llc_misses),
        }),
        ..VcpuSample::default()
    })
}

fn any_vm() -> impl Strategy<Value = VmSample> {
    let accesses = proptest::option::of(any::<(u64, u64)>());
    (proptest::collection::vec(any_vcpu(), 0..3), accesses).prop_map(|(mut vcpus, accesses)| {
        vcpus.sort_by_key(|vcpu| vcpu.index);
        vcpus.dedup_by_key(|vcpu| vcpu.index);
        VmSample {
            accesses: accesses.map(|(local, remote)| Accesses {
                local,
                remote,
                on: NodeMap::new(),
            }),
            ..vm(1, vcpus)
        }
    })
}

proptest! {
    #[test]
    fn shares_are_shares_whatever_is_counted(
        prev in any_vm(), cur in any_vm(), period in 1u64.., busy in any::<(u64, u64)>(),
    ) {
        let cpu = |busy| CpuSample { id: CpuId(0), busy_ns: Ns(busy) };
        let mut early = sample(0, vec![prev]);
        let mut late = sample(0, vec![cur]);
        late.at = Ns(period);
        (early.cpus, late.cpus) = (vec![cpu(busy.0)], vec![cpu(busy.1)]);
        let rates = between(&early, &late);
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        prop_assert!(rates.cpus_busy.iter().all(|(_, busy)| is_share(*busy)));
        for vm in &rates.vms {
            prop_assert!(vm.local_access_ratio.is_none_or(is_share), "{vm:?}");
            prop_assert!(vm.llc_miss_rate.is_none_or(is_share), "{vm:?}");
            for vcpu in &vm.vcpus {
                let shares = [vcpu.running, vcpu.waited(), vcpu.throttled];
                prop_assert!(shares.into_iter().all(is_share), "{vcpu:?}");
            }
        }
    }
}

#[test]
fn speed_does_not_grow_with_work_and_falls_with_waiting() {
    let speed = |ran_ms: u64, waited_ms: u64, references: u64| {
        let before = sample(1000, vec![vm(1, vec![counted(vcpu(0, 0, 0), 0, 0)])]);
        let after = vec![vm(1, vec![counted(vcpu(0, ran_ms, waited_ms), references, 0)])];
        between(&before, &sample(2000, after)).vms[0].speed()
    };
    // Ten instructions for each reference, over half a second and over a quarter.
    assert_eq!(speed(500, 0, 1_000_000), Some(2e7));
    assert_eq!(speed(250, 0, 500_000), Some(2e7));
    assert_eq!(speed(500, 500, 1_000_000), Some(1e7));
    assert_eq!(speed(50, 0, 100_000), None, "it ran too little");
    let uncounted = |ran_ms| sample(1000 + ran_ms, vec![vm(1, vec![vcpu(0, ran_ms, 0)])]);
    assert_eq!(between(&uncounted(0), &uncounted(500)).vms[0].speed(), None);
}

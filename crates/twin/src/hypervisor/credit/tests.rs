use super::*;

#[test]
fn credits_burnt_equal_time_run() {
    let mut credit = Credit::new(2, 1);
    credit.add_vm(256, None);
    credit.added(Some(VmIx(0)));
    let stretches = [1u64, 99_999, 100_000, 1_234_567, 7, 30_000_000, 333_333];
    let mut ran = 0;
    for ns in stretches.into_iter().cycle().take(10_000) {
        credit.burn(TaskIx(0), ns);
        ran += ns;
        let vcpu = &credit.vcpus[TaskIx(0)];
        let burnt = -vcpu.credit * 1_000_000 + vcpu.residual.cast_signed();
        assert_eq!(burnt, (ran * CREDITS_PER_MS).cast_signed());
    }
}

#[test]
fn no_more_credits_are_handed_out_than_cpus_are_worth() {
    // Four domains of various weights on 8 CPUs: 2400 credits, plus at most one per vCPU from rounding up.
    let mut credit = Credit::new(8, 1);
    for (weight, vcpus) in [(256, 4), (512, 1), (64, 9), (1024, 3)] {
        credit.add_vm(weight, None);
        let vm = VmIx(credit.domains.len() - 2);
        for _ in 0..vcpus {
            credit.added(Some(vm));
            credit.activate(TaskIx(credit.vcpus.len() - 1));
        }
    }
    credit.hand_out_all(8);
    let handed: i64 = credit.vcpus.iter().map(|vcpu| vcpu.credit).sum();
    assert!((2400..=2400 + 17 + 4).contains(&handed), "{handed} credits");
    // The heavy single vCPU gets what one CPU is worth, not more.
    assert_eq!(credit.vcpus[TaskIx(4)].credit, 300);
}

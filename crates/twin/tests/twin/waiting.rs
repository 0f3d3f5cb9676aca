//! What waiting costs guests: interrupts, a halted vCPU's way back into the guest, CPU time of spinning.

use crate::common::{amd48, cores, meeting, one, program, start, vm};
use homenode_host::Host;
use homenode_machine::{Machine, Wake};
use homenode_twin::workload::Waiting;
use homenode_twin::{Hypervisor, Workload};
use homenode_units::Ns;

/// Returns the machine of \[Policies\] with wake-ups that cost an interrupt only.
fn without_wake() -> Machine {
    let mut machine = amd48();
    machine.hardware.as_mut().unwrap().wake = None;
    machine
}

/// Returns the run time of a VM of 6 vCPUs on 6 CPUs, and the CPU time that its vCPUs used, in seconds.
fn runtime(hypervisor: Hypervisor, workload: &Workload) -> (f64, f64) {
    runtime_on(&without_wake(), hypervisor, workload)
}

fn runtime_on(machine: &Machine, hypervisor: Hypervisor, workload: &Workload) -> (f64, f64) {
    let mut spec = vm(&workload.name).on_cpus(cores(machine, 3, 0, 6));
    spec.vcpus = 6;
    let mut twin = start(machine, &one(hypervisor, spec, std::slice::from_ref(workload)));
    assert!(twin.run_to_end(Ns::from_secs(60)), "the program does not end");
    let sample = twin.sample().unwrap();
    let ran: u64 = sample.vms[0].vcpus.iter().map(|vcpu| vcpu.running_ns.0).sum();
    (twin.report().vms[0].runtime_s.unwrap(), ran as f64 / 1e9)
}

#[test]
fn who_releases_sleepers_pays_an_interrupt_for_each() {
    // The program has 20 001 barriers (one before the first interval), each with five sleepers. Waking one takes 0.9 us natively,
    // and 10.9 us under a hypervisor.
    let (spin, _) = runtime(Hypervisor::Native, &meeting(Waiting::Spin));
    for (hypervisor, ipi_s) in [(Hypervisor::Native, 0.9e-6), (Hypervisor::Kvm, 10.9e-6)] {
        let (sleep, _) = runtime(hypervisor, &meeting(Waiting::Sleep));
        let (got, expected) = (sleep - spin, 20_001.0 * 5.0 * ipi_s);
        assert!(
            (got / expected - 1.0).abs() < 0.05,
            "{hypervisor:?}: {got} s of interrupts, expected {expected}"
        );
    }
}

#[test]
fn who_halted_pays_for_its_way_back_under_a_hypervisor() {
    let mut slow = without_wake();
    slow.hardware.as_mut().unwrap().wake = Some(Wake {
        exit_ns: 1000.0,
        schedule_ns: 4000.0,
    });
    let more = |hypervisor, workload: &Workload| {
        runtime_on(&slow, hypervisor, workload).0 - runtime(hypervisor, workload).0
    };
    // The program has 20 001 barriers. The vCPU woken last sets the pace and is 5 us late at each.
    let meeting = meeting(Waiting::Sleep);
    let (got, expected) = (more(Hypervisor::Kvm, &meeting), 20_001.0 * 5e-6);
    assert!(
        (got / expected - 1.0).abs() < 0.05,
        "{got} s, expected {expected}"
    );
    assert_eq!(more(Hypervisor::Native, &meeting), 0.0);
    // The program has 80 000 wake-ups other than at barriers.
    let mut waking = program("waking", 0.01, 0.02, 4.0, "private");
    waking.program.as_mut().unwrap().wakeups_per_m_instructions = 20.0;
    let (got, expected) = (more(Hypervisor::Xen, &waking), 80_000.0 * 5e-6);
    assert!(
        (got / expected - 1.0).abs() < 0.05,
        "{got} s, expected {expected}"
    );
}

#[test]
fn spinning_costs_no_interrupts_but_cpu_time() {
    let (native, _) = runtime(Hypervisor::Native, &meeting(Waiting::Spin));
    let (virtual_, _) = runtime(Hypervisor::Kvm, &meeting(Waiting::Spin));
    assert!(
        (virtual_ / native - 1.0).abs() < 1e-3,
        "{virtual_} virtual, {native} native"
    );
    // Half of the time is spent waiting for the slowest: sleepers leave their CPUs, spinners keep them busy.
    let uneven = |waiting| {
        let mut workload = meeting(waiting);
        let barrier = workload
            .program
            .as_mut()
            .and_then(|p| p.barrier.as_mut())
            .unwrap();
        (barrier.imbalance, barrier.interval_m_instructions) = (0.5, 20.0);
        workload
    };
    let (took, spun) = runtime(Hypervisor::Native, &uneven(Waiting::Spin));
    let (took_too, slept) = runtime(Hypervisor::Native, &uneven(Waiting::Sleep));
    assert!(
        (took / took_too - 1.0).abs() < 0.01,
        "{took} spinning, {took_too} sleeping"
    );
    assert!(spun > 1.2 * slept, "{spun} s of CPU spinning, {slept} s sleeping");
    assert!(
        (spun / (6.0 * took) - 1.0).abs() < 0.3,
        "{spun} s of CPU in {took} s"
    );
}

#[test]
fn a_vm_that_says_how_it_waits_waits_so_whatever_its_program_does() {
    let machine = amd48();
    let report = |profile, own| {
        let mut spec = vm("meeting").on_cpus(cores(&machine, 3, 0, 6));
        (spec.vcpus, spec.waiting) = (6, own);
        let mut twin = start(&machine, &one(Hypervisor::Xen, spec, &[meeting(profile)]));
        assert!(twin.run_to_end(Ns::from_secs(60)), "the program does not end");
        twin.report()
    };
    for (profile, own) in [(Waiting::Sleep, Waiting::Spin), (Waiting::Spin, Waiting::Sleep)] {
        assert_eq!(report(profile, Some(own)), report(own, None));
        assert_ne!(report(profile, Some(own)), report(profile, None));
    }
}

#[test]
fn other_wake_ups_cost_an_interrupt_each_unless_the_program_spins() {
    let with = |wakeups, waiting| {
        let mut workload = program("waking", 0.01, 0.02, 4.0, "private");
        let program = workload.program.as_mut().unwrap();
        (program.wakeups_per_m_instructions, program.waiting) = (wakeups, waiting);
        workload
    };
    for (hypervisor, ipi_s) in [(Hypervisor::Native, 0.9e-6), (Hypervisor::Xen, 10.9e-6)] {
        let (quiet, _) = runtime(hypervisor, &with(0.0, Waiting::Sleep));
        let (waking, _) = runtime(hypervisor, &with(20.0, Waiting::Sleep));
        let (spinning, _) = runtime(hypervisor, &with(20.0, Waiting::Spin));
        // The program has 4 G instructions with 20 wake-ups per million, so it causes 80 000 interrupts.
        let expected = 80_000.0 * ipi_s;
        assert!(
            ((waking - quiet) / expected - 1.0).abs() < 0.05,
            "{hypervisor:?}: {waking} against {quiet}"
        );
        assert!(
            (spinning / quiet - 1.0).abs() < 1e-3,
            "{spinning} against {quiet}"
        );
    }
}

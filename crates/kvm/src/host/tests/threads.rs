//! Threads that a QEMU gives misleading names.

use super::*;

#[test]
fn threads_that_take_a_vcpus_name_leave_the_vm_alone_and_are_said() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    write_thread(&tree, PID, 90, "CPU 1/KVM", "0");
    assert!(host.sample().unwrap().vms.is_empty());
    let notices = host.take_notices().concat();
    assert!(notices.contains("VM one is left out"), "{notices}");
    assert!(
        notices.contains("vCPU 1") && notices.contains("42, 90"),
        "{notices}"
    );
    // If libvirt's cgroups show a thread's role, its name does not count.
    for (tid, group) in [(PID, "emulator"), (41, "vcpu0"), (42, "vcpu1"), (90, "emulator")] {
        tree.write(
            &format!("proc/{PID}/task/{tid}/cgroup"),
            &format!("0::/machine/one/{group}\n"),
        );
    }
    let seen = host.sample().unwrap();
    let affinities: Vec<_> = seen.vms[0]
        .vcpus
        .iter()
        .map(|vcpu| (vcpu.index, vcpu.affinity.clone()))
        .collect();
    assert_eq!(affinities, [(0, cpus("0-1")), (1, cpus("0-1"))]);
}

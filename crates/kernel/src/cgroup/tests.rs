use super::*;
use crate::fake::Tree;

const V2: &str = "23 1 0:1 / / rw - ext4 /dev/x rw\n24 23 0:21 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const V1: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
    33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

#[test]
fn version_2_with_a_vcpu_and_a_vm_limit() {
    let vm = "sys/fs/cgroup/machine.slice/machine-qemu\\x2d1\\x2da.scope/libvirt";
    let tree = Tree::new(&[
        ("proc/self/mountinfo", V2),
        (
            "proc/40/task/43/cgroup",
            "0::/machine.slice/machine-qemu\\x2d1\\x2da.scope/libvirt/vcpu0\n",
        ),
        (
            &format!("{vm}/cpu.stat"),
            "usage_usec 1\nnr_throttled 2\nthrottled_usec 400\n",
        ),
        (
            &format!("{vm}/vcpu0/cpu.stat"),
            "usage_usec 1\nnr_periods 9\nthrottled_usec 36\n",
        ),
    ]);
    let group = Hierarchy::read(tree.root())
        .unwrap()
        .group_of(40, 43)
        .unwrap()
        .unwrap();
    let throttled = group.throttled().unwrap().unwrap();
    assert_eq!(
        throttled,
        Throttled {
            own_ns: Ns(36_000),
            vm_ns: Ns(400_000)
        }
    );
    assert_eq!(throttled.per_vcpu(4, 1), Ns(136_000));
}

#[test]
fn version_1_is_found_among_other_controllers() {
    let tree = Tree::new(&[
        ("proc/self/mountinfo", V1),
        (
            "proc/40/task/43/cgroup",
            "5:cpuset:/other\n4:cpuacct,cpu:/machine/qemu-1-a.libvirt-qemu/emulator\n0::/\n",
        ),
        (
            "sys/fs/cgroup/cpu,cpuacct/machine/qemu-1-a.libvirt-qemu/emulator/cpu.stat",
            "nr_periods 1\nthrottled_time 77\n",
        ),
    ]);
    let group = Hierarchy::read(tree.root())
        .unwrap()
        .group_of(40, 43)
        .unwrap()
        .unwrap();
    assert_eq!(
        group.throttled(),
        Ok(Some(Throttled {
            own_ns: Ns(77),
            vm_ns: Ns::ZERO
        }))
    );
}

#[test]
fn a_mount_of_a_part_shows_that_part_only() {
    let tree = Tree::new(&[
        (
            "proc/self/mountinfo",
            "24 23 0:21 /vms /cg\\040roups rw - cgroup2 none rw\n",
        ),
        ("proc/1/task/1/cgroup", "0::/vms/a\n"),
        ("proc/1/task/2/cgroup", "0::/elsewhere\n"),
        ("proc/1/task/3/cgroup", "0::/../../etc\n"),
        ("cg roups/a/cpu.stat", "usage_usec 4\n"),
        ("cg roups/elsewhere/cpu.stat", "throttled_usec 4\n"),
    ]);
    let hierarchy = Hierarchy::read(tree.root()).unwrap();
    let group = hierarchy.group_of(1, 1).unwrap().unwrap();
    assert_eq!(group.throttled(), Ok(None), "this kernel counts no throttling");
    assert_eq!(hierarchy.group_of(1, 2), Ok(None));
    assert_eq!(hierarchy.group_of(1, 3), Ok(None));
    assert_eq!(hierarchy.group_of(1, 4), Ok(None));
}

#[test]
fn quotas_read_in_both_versions() {
    let quota = |run_ms, period_ms| {
        let (run_ns, period_ns) = (Ns::from_millis(run_ms), Ns::from_millis(period_ms));
        Some(CpuMax::Quota(CpuQuota { run_ns, period_ns }))
    };
    let tree = Tree::new(&[("g/none", "")]);
    let group = CpuGroup::open(&tree.root().join("g")).unwrap().unwrap();
    assert_eq!(group.max(), Ok(None), "a kernel without quotas");
    for (run, period, expected) in [
        ("-1", "100000", Some(CpuMax::Unlimited)),
        ("17592186044415", "100000", Some(CpuMax::Unlimited)),
        ("3000", "30000", quota(3, 30)),
    ] {
        tree.write("g/cpu.cfs_quota_us", run);
        tree.write("g/cpu.cfs_period_us", period);
        assert_eq!(group.max(), Ok(expected), "version 1");
    }
    tree.write("g/cpu.max", "max 100000\n");
    assert_eq!(group.max(), Ok(Some(CpuMax::Unlimited)));
    tree.write("g/cpu.max", "20000 100000\n");
    assert_eq!(group.max(), Ok(quota(20, 100)));
    for bad in [
        "",
        "max",
        "20000",
        "x 100000",
        "1 0",
        "1 -5",
        "9999999999999999999 1",
    ] {
        tree.write("g/cpu.max", bad);
        let error = group.max().unwrap_err().to_string();
        assert!(error.contains("cpu.max") && error.contains("QUOTA"), "{error}");
    }
}

#[test]
fn malformed_files_are_errors_with_the_path() {
    assert!(Hierarchy::read(Tree::new(&[]).root()).is_err());
    let error =
        Hierarchy::read(Tree::new(&[("proc/self/mountinfo", "24 23 0:21 / /sys")]).root()).unwrap_err();
    assert!(error.to_string().contains("mountinfo"), "{error}");
    let tree = Tree::new(&[
        ("proc/self/mountinfo", V2),
        ("proc/1/task/1/cgroup", "0:/a"),
        ("proc/1/task/2/cgroup", "0::/a"),
        ("sys/fs/cgroup/a/cpu.stat", "throttled_usec many\n"),
    ]);
    let hierarchy = Hierarchy::read(tree.root()).unwrap();
    assert!(
        hierarchy
            .group_of(1, 1)
            .unwrap_err()
            .to_string()
            .contains("task/1/cgroup")
    );
    let group = hierarchy.group_of(1, 2).unwrap().unwrap();
    assert!(group.throttled().unwrap_err().to_string().contains("cpu.stat"));
}

//! CPU quotas.

use super::*;

#[test]
fn a_quota_is_journalled_set_seen_renewed_and_lifted_to_what_was_there() {
    for (before, held) in [("max 100000", None), ("50000 100000", Some(quota(50, 100)))] {
        let tree = host_with_groups(before);
        let mut host = connect_with_quotas(&tree);
        let version = host.sample().unwrap().version;
        assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
        assert_eq!(cpu_max(&tree), ["3000 30000", "3000 30000"]);
        let seen = host.sample().unwrap();
        assert!(seen.version > version);
        assert_eq!(seen.vms[0].vcpus[1].quota, Some(quota(3, 30)));
        assert_eq!(seen.vms[0].settings.quota, held, "the operator's");
        let journalled = || journal::peek(&tree.root().join("state"))[&vm()].get::<Quotas>();
        assert_eq!(journalled().unwrap().before, held);
        assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Renewed);
        assert_eq!(host.sample().unwrap().version, seen.version);
        assert_eq!(commit(&mut host, hold(6, LONG)), Outcome::Done);
        assert_eq!(
            journalled().unwrap().before,
            held,
            "not the agent's own first quota"
        );
        assert_eq!(commit(&mut host, lift()), Outcome::Done);
        assert_eq!(cpu_max(&tree)[0], before);
        assert_eq!((journalled(), commit(&mut host, lift())), (None, Outcome::Done));
    }
}

#[test]
fn a_quota_ends_with_its_lease_and_when_the_host_is_restored() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, Ns::from_millis(1))), Outcome::Done);
    host.wait(Ns::from_millis(60));
    assert_eq!(cpu_max(&tree)[0], "max 100000", "without another sample");
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(cpu_max(&tree)[0], "max 100000");
    // The quota does not outlast an agent that leaves pins and homes to its successor either.
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    assert_eq!(host.lift_limits(), Vec::<String>::new());
    assert_eq!(cpu_max(&tree)[0], "max 100000");
    assert_eq!(
        journal::peek(&tree.root().join("state"))[&vm()].get::<Quotas>(),
        None
    );
}

#[test]
fn a_vm_that_cannot_be_looked_at_keeps_its_leases_and_they_end() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, Ns::from_millis(300))), Outcome::Done);
    let stat = tree.root().join(format!("proc/{PID}/task/41/stat"));
    let whole = std::fs::read(&stat).unwrap();
    std::fs::write(&stat, "41 (torn").unwrap();
    assert!(host.sample().unwrap().vms[0].is_unread);
    assert_eq!(cpu_max(&tree)[0], "3000 30000");
    host.wait(Ns::from_millis(600));
    assert_eq!(cpu_max(&tree)[0], "max 100000");
    std::fs::write(&stat, whole).unwrap();
    assert!(!host.sample().unwrap().vms[0].is_unread);
}

#[test]
fn without_a_guard_nothing_is_changed_but_given_back() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    host.right_mut().set_guarded(false);
    let Outcome::Failed(error) = commit(&mut host, hold(6, LONG)) else {
        panic!("it was changed");
    };
    assert!(error.to_string().contains("no guard"), "{error}");
    assert_eq!(commit(&mut host, lift()), Outcome::Done);
    assert_eq!(cpu_max(&tree)[0], "max 100000");
    host.right_mut().set_guarded(true);
    assert_eq!(commit(&mut host, hold(6, LONG)), Outcome::Done);
}

#[test]
fn a_quota_that_somebody_else_changed_is_theirs() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    let version = host.sample().unwrap().version;
    let theirs = |tree: &Tree| hold_groups(tree, "70000 100000\n");
    theirs(&tree);
    assert!(matches!(
        host.commit(&plan(version, hold(3, LONG))),
        Err(Refusal::Stale { .. })
    ));
    host.take_notices();
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].settings.quota, Some(quota(70, 100)));
    let notices = host.take_notices();
    assert!(
        notices.iter().any(|n| n.contains("another program")),
        "{notices:?}"
    );
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(
        cpu_max(&tree)[0],
        "70000 100000",
        "nothing of ours is left to restore"
    );
    // A guard that finds the other program's quota after the agent's death does not lift it either.
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    theirs(&tree);
    guard_undoes(&mut host, &tree);
    assert_eq!(cpu_max(&tree)[0], "70000 100000");
}

#[test]
fn a_lease_that_ends_takes_no_quota_that_somebody_else_set_since_the_sample() {
    for by_lease in [true, false] {
        let tree = host_with_groups("max 100000");
        let mut host = connect_with_quotas(&tree);
        let lease_ns = if by_lease { Ns::from_millis(1) } else { LONG };
        assert_eq!(commit(&mut host, hold(3, lease_ns)), Outcome::Done);
        hold_groups(&tree, "2000 100000\n");
        match by_lease {
            true => drop(host.wait(Ns::from_millis(60))),
            false => assert_eq!(host.lift_limits(), Vec::<String>::new()),
        }
        assert_eq!(cpu_max(&tree)[0], "2000 100000", "by its lease: {by_lease}");
        let entries = journal::peek(&tree.root().join("state"));
        assert_eq!(entries[&vm()].get::<Quotas>(), None, "nothing is left to undo");
    }
}

#[test]
fn a_quota_of_an_agent_that_died_is_lifted_by_the_guard_or_taken_over_for_a_while() {
    let tree = host_with_groups("max 100000");
    let mut first = connect_with_quotas(&tree);
    assert_eq!(commit(&mut first, hold(3, LONG)), Outcome::Done);
    drop(first);
    let mut second = connect_with_quotas(&tree);
    let seen = second.sample().unwrap();
    assert_eq!(
        (seen.vms[0].vcpus[0].quota, seen.vms[0].settings.quota),
        (Some(quota(3, 30)), None)
    );
    let carried = &second.vms[&vm()];
    assert!(
        carried.next_lease_end().is_none_or(|until| until > now())
            && carried
                .next_lease_end()
                .is_some_and(|until| until <= now() + homenode_undo::acting::CARRIED_LEASE)
    );
    guard_undoes(&mut second, &tree);
    assert_eq!(cpu_max(&tree)[0], "max 100000");
}

#[test]
fn an_agent_that_died_while_it_set_or_lifted_a_quota_leaves_nobody_throttled() {
    for (before, quota_before) in [("max 100000", None), ("50000 100000", Some(quota(50, 100)))] {
        // The journal has 6 of 30 ms, and 3 of 30 before that. Either may be in force, or the time of one quota with the period
        // of another.
        for found in ["3000 30000", "6000 30000", "3000 100000", "6000 100000", before] {
            let tree = host_with_groups(before);
            let mut host = connect_with_quotas(&tree);
            assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
            assert_eq!(commit(&mut host, hold(6, LONG)), Outcome::Done);
            let journalled = journal::peek(&tree.root().join("state"))[&vm()].get::<Quotas>();
            assert_eq!(journalled.unwrap().before, quota_before);
            hold_groups(&tree, &format!("{found}\n"));
            guard_undoes(&mut host, &tree);
            assert_eq!(cpu_max(&tree)[0], before, "found {found}");
            drop(host);
            // A successor does not mistake it for another program's quota either.
            hold_groups(&tree, &format!("{found}\n"));
            let mut successor = connect_with_quotas(&tree);
            successor.sample().unwrap();
            assert!(
                !successor
                    .take_notices()
                    .iter()
                    .any(|n| n.contains("another program"))
            );
            assert_eq!(successor.lift_limits(), Vec::<String>::new());
            assert_eq!(cpu_max(&tree)[0], before, "found {found}");
        }
    }
}

#[test]
fn a_libvirt_that_died_with_the_agent_leaves_nobody_throttled() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    let second = "sys/fs/cgroup/machine/one/vcpu1/cpu.max";
    tree.write(second, "max 100000\n");
    guard_undoes(&mut host, &tree);
    assert_eq!(cpu_max(&tree), ["max 100000", "max 100000"]);
    drop(host);
    tree.write("sys/fs/cgroup/machine/one/vcpu0/cpu.max", "3000 30000\n");
    let mut successor = connect_with_quotas(&tree);
    successor.sample().unwrap();
    assert_eq!(successor.lift_limits(), Vec::<String>::new());
    assert_eq!(cpu_max(&tree), ["max 100000", "max 100000"]);
}

#[test]
fn a_quota_that_does_not_come_into_force_is_undone_and_said() {
    // libvirt's test driver has no quotas: nothing reaches the cgroups.
    let tree = host_with_groups("max 100000");
    let mut host = connect(&tree, Acting::Live);
    let outcome = commit(&mut host, hold(3, LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::Host { what, .. }, .. }) if what == "setting the CPU quota"),
        "{outcome:?}"
    );
    // A VM without cgroups has no known quota.
    let tree = self::host("");
    let outcome = commit(&mut connect(&tree, Acting::Live), hold(3, LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::Host { cause, .. }, .. }) if cause.contains("no cgroups")),
        "{outcome:?}"
    );
    // If a VM's vCPUs have different quotas, these could not be restored.
    let tree = host_with_groups("max 100000");
    tree.write("sys/fs/cgroup/machine/one/vcpu1/cpu.max", "9000 10000\n");
    let outcome = commit(&mut connect_with_quotas(&tree), hold(3, LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::Host { cause, .. }, .. }) if cause.contains("different quotas")),
        "{outcome:?}"
    );
    assert_eq!(cpu_max(&tree)[1], "9000 10000");
}

#[test]
fn a_dry_run_ends_nothing_that_an_agent_left_in_force() {
    let tree = host_with_groups("max 100000");
    let mut first = connect_with_quotas(&tree);
    assert_eq!(commit(&mut first, hold(3, LONG)), Outcome::Done);
    let mut dry = connect(&tree, Acting::DryRun);
    dry.sample().unwrap();
    let vm = &dry.vms[&vm()];
    assert_eq!(vm.levers.limits().count(), 1, "it is seen");
    assert_eq!(vm.next_lease_end(), None, "and not ended");
}

#[test]
fn a_limit_that_an_earlier_agent_left_on_a_vm_not_seen_since_is_lifted_with_the_others() {
    let tree = host_with_groups("max 100000");
    let mut first = connect_with_quotas(&tree);
    assert_eq!(commit(&mut first, hold(3, LONG)), Outcome::Done);
    let libvirt = ended(first);
    let mut second = connect(&tree, Acting::Live);
    second.context.manager = libvirt;
    assert_eq!(second.lift_limits(), Vec::<String>::new());
    assert_eq!(cpu_max(&tree)[0], "max 100000");
}

#[test]
fn an_agent_whose_files_were_removed_knows_it_and_gives_back() {
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    assert!(host.right().owns_its_state());
    std::fs::remove_dir_all(tree.root().join("state")).unwrap();
    assert!(!host.right().owns_its_state());
    assert!(
        matches!(commit(&mut host, hold(6, LONG)), Outcome::Failed(_)),
        "it cannot be written down"
    );
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(cpu_max(&tree)[0], "max 100000");
}

/// Moves the VM's threads to another cgroup with its own quota, as `systemd` or a script may.
fn move_to_another_group(tree: &Tree) {
    for tid in [41, 42] {
        tree.write(&format!("proc/{PID}/task/{tid}/cgroup"), "0::/machine/two\n");
    }
    tree.write("sys/fs/cgroup/machine/two/cpu.max", "70000 100000\n");
    tree.write("sys/fs/cgroup/machine/two/cpu.stat", "throttled_usec 0\n");
}

fn of_the_other_group(tree: &Tree) -> String {
    std::fs::read_to_string(tree.root().join("sys/fs/cgroup/machine/two/cpu.max")).unwrap()
}

#[test]
fn a_vm_that_is_moved_to_another_cgroup_leaves_no_quota_in_its_old_one() {
    for acts in [Some(hold(6, LONG)), Some(lift()), None] {
        let tree = host_with_groups("50000 100000");
        let mut host = connect_with_quotas(&tree);
        assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
        move_to_another_group(&tree);
        match acts {
            // The outcome is the same whatever is requested meanwhile.
            Some(act) => drop(commit(&mut host, act)),
            None => host.vms.get_mut(&vm()).unwrap().look_soon(),
        }
        let seen = host.sample().unwrap();
        assert_eq!(cpu_max(&tree), ["50000 100000", "50000 100000"]);
        assert_eq!(of_the_other_group(&tree), "70000 100000\n", "another program's");
        assert_eq!(
            seen.vms[0].settings.quota,
            Some(quota(35, 100)),
            "half of it for each of two"
        );
        assert_eq!(host.vms[&vm()].levers.limits().count(), 0);
        let notices = host.take_notices();
        let of_it = notices
            .iter()
            .filter(|n| n.contains("was moved out of its cgroup"));
        assert_eq!(of_it.count(), 1, "{notices:?}");
        assert_eq!(host.restore().failures, Vec::<String>::new());
    }
    // The guard leaves no quota in the old cgroup either.
    let tree = host_with_groups("max 100000");
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    move_to_another_group(&tree);
    guard_undoes(&mut host, &tree);
    assert_eq!(cpu_max(&tree), ["max 100000", "max 100000"]);
    assert_eq!(of_the_other_group(&tree), "70000 100000\n");
}

#[test]
fn a_cgroup_that_outlasts_its_vm_is_given_back() {
    for by_guard in [false, true] {
        let tree = host_with_groups("max 100000");
        let mut host = connect_with_quotas(&tree);
        assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
        std::fs::remove_dir_all(tree.root().join(format!("proc/{PID}"))).unwrap();
        match by_guard {
            true => guard_undoes(&mut host, &tree),
            false => drop(host.sample().unwrap()),
        }
        assert_eq!(cpu_max(&tree), ["max 100000", "max 100000"]);
    }
}

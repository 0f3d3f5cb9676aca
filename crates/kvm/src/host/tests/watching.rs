//! Watched memory, and what an agent that watches leaves behind.

use super::*;

fn watch(lease_ns: Ns) -> Action {
    Act::Watch {
        window_ns: Ns::from_millis(100),
        lease_ns,
    }
    .on(vm())
}

fn observed(host: &mut KvmHost) -> Option<Observation> {
    host.sample().unwrap().vms[0].observed.clone()
}

#[test]
fn memory_is_watched_window_after_window_until_the_lease_is_over() {
    if !rustix::process::geteuid().is_root() {
        return; // clearing needs root, also in a handmade tree
    }
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let outcome = commit(&mut host, watch(LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::NoTracker { why, .. }, .. })
            if why.contains("clear_refs") && why.contains("damon")),
        "{outcome:?}"
    );
    tree.write("proc/self/clear_refs", "");
    let cleared = tree.write(&format!("proc/{PID}/clear_refs"), "");
    tree.write(
        &format!("proc/{PID}/smaps"),
        "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \nReferenced: 40 kB\nAnonHugePages: 0 kB\n",
    );
    assert_eq!(commit(&mut host, watch(LONG)), Outcome::Done);
    assert_eq!(commit(&mut host, watch(LONG)), Outcome::Renewed);
    assert_eq!(observed(&mut host), None, "no window is over");
    host.wait(Ns::from_millis(300));
    let first = observed(&mut host).unwrap();
    assert_eq!(first.tracker, Tracker::Invalidation);
    let (used, coarse) = (Pages(10), Pages::ZERO);
    assert_eq!(
        (&first.found, first.memory),
        (&Used::Amount { used, coarse }, Pages(256))
    );
    assert!(first.interval >= Ns::from_millis(100) && first.blind == Pages::ZERO);
    // The first write drops what KVM has mapped; the second, seen here, clears the marks that dropping those mappings leaves.
    assert_eq!(std::fs::read_to_string(&cleared).unwrap(), "1");
    host.wait(Ns::from_millis(300));
    assert!(observed(&mut host).is_some_and(|second| second.at > first.at));
    let end = Act::Lift {
        lever: Lever::Watching,
    }
    .on(vm());
    assert_eq!(commit(&mut host, end), Outcome::Done);
    assert_eq!(observed(&mut host), None);
    assert_eq!(commit(&mut host, watch(Ns::from_millis(250))), Outcome::Done);
    host.wait(Ns::from_millis(400));
    assert_eq!(observed(&mut host), None, "the lease is over");
    // If QEMU ends within a window, that is not a failure: the VM has ended.
    assert_eq!(commit(&mut host, watch(LONG)), Outcome::Done);
    std::fs::remove_file(tree.root().join(format!("proc/{PID}/smaps"))).unwrap();
    host.take_notices();
    host.wait(Ns::from_millis(300));
    assert_eq!(observed(&mut host), None);
    assert_eq!(host.take_notices(), Vec::<String>::new());
}

#[test]
fn damon_is_journalled_and_taken_down_by_lift_guard_and_successor() {
    use homenode_kernel::fake::{damon_files, mount_damon};
    let tree = host("");
    let nr = tree.root().join("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
    let is_on = || std::fs::read_to_string(&nr).unwrap().starts_with('1');
    let is_journalled = |vm| {
        journal::peek(&tree.root().join("state"))[&vm]
            .get::<Watched>()
            .is_some()
    };
    mount_damon(&tree, "1\n");
    let theirs = damon_files(&tree);
    let mut host = connect(&tree, Acting::Live);
    let outcome = commit(&mut host, watch(LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::NoTracker { why, .. }, .. }) if why.contains("another owner")),
        "{outcome:?}"
    );
    assert!(damon_files(&tree) == theirs && !is_journalled(vm()));
    mount_damon(&tree, "0\n");
    assert_eq!(commit(&mut host, watch(LONG)), Outcome::Done);
    assert!(is_on() && is_journalled(vm()));
    let end = Act::Lift {
        lever: Lever::Watching,
    }
    .on(vm());
    assert_eq!(commit(&mut host, end), Outcome::Done);
    assert!(!is_on() && !is_journalled(vm()));
    // Leaves what a killed agent leaves: its files in sysfs and its journal.
    let left = |tree: &Tree, host: &mut KvmHost| {
        assert_eq!(commit(host, watch(LONG)), Outcome::Done);
        let files = damon_files(tree);
        let journal = JOURNAL.map(|copy| std::fs::read(tree.root().join(copy)).unwrap());
        (files, journal)
    };
    let (files, journal_bytes) = left(&tree, &mut host);
    drop(host);
    for (path, text) in &files {
        std::fs::write(path, text).unwrap();
    }
    for (copy, bytes) in JOURNAL.iter().zip(&journal_bytes) {
        std::fs::write(tree.root().join(copy), bytes).unwrap();
    }
    let mut successor = connect(&tree, Acting::Live);
    guard_undoes(&mut successor, &tree);
    assert!(!is_on(), "as the guard does");
    for (path, text) in &files {
        std::fs::write(path, text).unwrap();
    }
    assert_eq!(
        commit(&mut successor, watch(LONG)),
        Outcome::Done,
        "what was left is its own"
    );
    assert_eq!(successor.restore().failures, Vec::<String>::new());
    assert!(!is_on() && !is_journalled(vm()));
}

//! Processes that claim the name or the UUID of another process's VM.

use homenode_undo::RealHost as _;

use super::*;

const TWIN: &str = "6695eb01-f6a4-8304-79aa-97f2502e193f";
const OTHER: &str = "7795eb01-f6a4-8304-79aa-97f2502e193f";

/// A tree in which processes with these users, names and UUIDs claim to run VMs; the VM `web` has a settings file.
fn claimed(claims: &[(i32, u32, &str, &str)]) -> (homenode_kernel::fake::Tree, Qemu) {
    let tree = homenode_kernel::fake::Tree::new(&[("etc/homenode/vms/web.toml", "home = 1")]);
    claim(&tree, claims);
    let qemu = Qemu::new(tree.root());
    (tree, qemu)
}

fn claim(tree: &homenode_kernel::fake::Tree, claims: &[(i32, u32, &str, &str)]) {
    for (pid, user, name, uuid) in claims {
        tree.write(
            &format!("proc/{pid}/cmdline"),
            &format!("kvm\0-name\0{name}\0-uuid\0{uuid}\0"),
        );
        write_process(tree, *pid, *user);
    }
}

/// Returns the process of each VM, and whether its settings are accepted as its own.
fn taken(qemu: &mut Qemu) -> Vec<(i32, bool)> {
    qemu.scan(false).unwrap();
    let ids: Vec<VmId> = qemu.vms.keys().copied().collect();
    let of = |id| {
        (
            qemu.vms[&id].process.pid,
            qemu.describe(id).unwrap().settings.is_ok(),
        )
    };
    ids.into_iter().map(of).collect()
}

#[test]
fn the_name_and_the_uuid_of_roots_vm_are_roots_whoever_came_first() {
    let ours = (60, 0, "web", TWIN);
    for theirs in [
        (50, 107, "web", TWIN),
        (50, 107, "other", TWIN),
        (50, 65534, "web", OTHER),
    ] {
        let (tree, mut qemu) = claimed(&[theirs]);
        assert_eq!(taken(&mut qemu), [(50, true)], "it is alone");
        claim(&tree, &[ours]);
        let both = taken(&mut qemu);
        assert!(
            both.contains(&(60, true)) && !both.contains(&(50, true)),
            "{theirs:?}: {both:?}"
        );
        let notices = qemu.take_notices().join("\n");
        let user = format!("50 (user {})", theirs.1);
        for word in [user.as_str(), "60 (user 0)", "only root's is managed"] {
            assert!(notices.contains(word), "{word}: {notices}");
        }
        // The order does not matter: root's VM first, or both at once.
        for first in [&[ours][..], &[ours, theirs]] {
            let (tree, mut qemu) = claimed(first);
            taken(&mut qemu);
            claim(&tree, &[theirs]);
            for _ in 0..3 {
                assert_eq!(taken(&mut qemu), [(60, true)], "{theirs:?} beside {first:?}");
            }
            // Once root's process is gone, the other is a VM like any other.
            std::fs::remove_dir_all(tree.root().join("proc/60")).unwrap();
            qemu.next_scan = now();
            qemu.list().unwrap();
            assert_eq!(taken(&mut qemu), [(50, true)]);
        }
    }
}

#[test]
fn of_two_services_processes_that_claim_a_name_neither_is_managed_and_it_is_said() {
    for second in [
        (51, 65534, "web", TWIN),
        (51, 107, "web", OTHER),
        (51, 107, "other", TWIN),
    ] {
        let first = (50, 107, "web", TWIN);
        let (_tree, mut qemu) = claimed(&[first, second]);
        assert_eq!(taken(&mut qemu), [], "{second:?}");
        let notices = qemu.take_notices().join("\n");
        let user = format!("51 (user {})", second.1);
        for word in ["50 (user 107)", user.as_str(), "neither is managed"] {
            assert!(notices.contains(word), "{word}: {notices}");
        }
        // A VM that is already managed is only watched while its rival exists.
        let (tree, mut qemu) = claimed(&[first]);
        assert_eq!(taken(&mut qemu), [(50, true)]);
        claim(&tree, &[second]);
        assert_eq!(taken(&mut qemu), [(50, false)], "{second:?}");
        let id = *qemu.vms.keys().next().unwrap();
        assert!(
            qemu.describe(id)
                .unwrap()
                .settings
                .clone()
                .unwrap_err()
                .to_string()
                .contains(&user)
        );
        std::fs::remove_dir_all(tree.root().join("proc/51")).unwrap();
        assert_eq!(taken(&mut qemu), [(50, true)], "the other is gone");
    }
}

#[test]
fn a_child_of_a_vms_own_is_no_rival() {
    let (vm, child) = ((50, 107, "web", TWIN), (51, 107, "web", TWIN));
    let (tree, mut qemu) = claimed(&[vm]);
    let has_parent = |pid: i32, parent: i32| {
        let stat = homenode_kernel::fake::stat(pid, "kvm", 'S', 7, 0);
        let stat = stat.replacen(" S 1 ", &format!(" S {parent} "), 1);
        assert!(stat.contains(&format!(" S {parent} ")), "{stat}");
        tree.write(&format!("proc/{pid}/stat"), &stat);
    };
    for is_late in [true, false] {
        if is_late {
            assert_eq!(taken(&mut qemu), [(50, true)]);
        } else {
            qemu = Qemu::new(tree.root());
        }
        claim(&tree, &[child]);
        has_parent(51, 50);
        assert_eq!(taken(&mut qemu), [(50, true)], "late: {is_late}");
        assert_eq!(qemu.take_notices(), [""; 0]);
    }
    // A process whose parent runs a VM of another name is not that VM's child.
    claim(&tree, &[(60, 107, "db", OTHER)]);
    has_parent(51, 60);
    let seen = taken(&mut qemu);
    assert!(
        seen.contains(&(50, false)) && seen.contains(&(60, true)),
        "{seen:?}"
    );
}

#[test]
fn what_was_changed_is_found_by_its_process_whatever_that_is_called_by_now() {
    let (tree, mut qemu) = claimed(&[(60, 0, "web", TWIN)]);
    taken(&mut qemu);
    let id = *qemu.vms.keys().next().unwrap();
    let run = qemu.run(id);
    let late = (50, 107, "web", TWIN);
    // The process has changed its name and a rival has taken the old one; or its command line is empty.
    for line in ["kvm\0-name\0other\0", "kvm\0-readconfig\0/none\0", ""] {
        tree.write("proc/60/cmdline", line);
        claim(&tree, &[late]);
        let mut qemu = Qemu::new(tree.root());
        qemu.scan(true).unwrap();
        assert_eq!(qemu.vms[&id].process.pid, 50);
        assert_eq!(qemu.knows(&run), Ok(true), "{line:?}");
        assert_eq!(qemu.vms[&id].process.pid, 60);
        assert!(!qemu.is_gone(id) && qemu.describe(id).is_ok());
    }
    // Another process has the number by now.
    let stat = homenode_kernel::fake::stat(60, "kvm", 'S', 8, 0);
    tree.write("proc/60/stat", &stat);
    let mut qemu = Qemu::new(tree.root());
    assert_eq!(qemu.knows(&run), Ok(false));
}

/// A service's user was first to give a process the name and the UUID of root's VM.
#[test]
fn what_was_changed_of_a_process_that_took_roots_name_is_given_back_and_roots_is_managed() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can start processes of other users
    }
    let around = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let theirs = Guest::start(&around, "real-twin,debug-threads=on", 0x30);
    let mut qemu = theirs.seen();
    assert!(until(|| vcpus_of(&mut qemu, theirs.id) == 2));
    let (their_run, before) = (qemu.run(theirs.id), qemu.affinities(theirs.id));
    let dir = tempfile::tempdir().unwrap();
    let (_acts, mut host) = acting(&dir);
    let cpu = CpuSet::one(homenode_units::CpuId(1));
    let id = theirs.id;
    let pin = |host: &mut KvmHost| {
        let mut plan = Plan::new(host.sample().unwrap().version);
        let pin = Act::PinVcpus {
            vcpus: vec![0],
            cpus: cpu.clone(),
        };
        plan.decide("test", pin.on(id), "to run there".into());
        host.commit(&plan).unwrap().outcomes
    };
    assert_eq!(pin(&mut host), [Outcome::Done]);
    let pinned = |run: &Run| {
        let threads = task::threads(Path::new("/"), run.pid).unwrap();
        threads
            .into_iter()
            .find(|thread| thread.role == Role::Vcpu(0))
            .map(|thread| thread.affinity)
    };
    assert_eq!(pinned(&their_run), Some(cpu.clone()));

    let ours = Guest::start(&[], "real-twin,debug-threads=on", 0x30);
    let mut qemu = ours.seen();
    assert!(until(|| vcpus_of(&mut qemu, id) == 2));
    let our_run = qemu.run(id);
    assert_ne!(our_run.pid, their_run.pid, "root's is the VM");
    let is_taken_in = until(|| {
        host.sample().unwrap();
        pinned(&their_run) == before.get(&Role::Vcpu(0)).cloned()
    });
    assert!(is_taken_in, "{:?}", host.take_notices());
    let notices = host.take_notices().join("\n");
    for word in [
        format!("{} (user 65534)", their_run.pid),
        format!("{} (user 0)", our_run.pid),
    ] {
        assert!(notices.contains(&word), "{word}: {notices}");
    }
    assert_eq!(pin(&mut host), [Outcome::Done]);
    assert_eq!(pinned(&our_run), Some(cpu));
    // Undoing uses the process in the journal, even if another process claims to be the VM.
    assert_eq!(host.restore().failures, Vec::<String>::new());
    for run in [&our_run, &their_run] {
        assert_eq!(pinned(run), before.get(&Role::Vcpu(0)).cloned(), "{run:?}");
    }
}

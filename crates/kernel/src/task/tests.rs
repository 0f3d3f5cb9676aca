//! Tests with the threads of handmade processes, and of this process.

use super::*;
use crate::fake::{Tree, stat, write_thread};

fn qemu() -> Tree {
    let tree = Tree::new(&[
        ("proc/40/stat", &stat(40, "qemu) (x", 'S', 77, 0)),
        ("proc/40/cmdline", "qemu\0-name\0guest=a\0-uuid\0u-u\0-m\0"),
    ]);
    for (tid, comm) in [
        (40, "qemu-system-x86"),
        (41, "call_rcu"),
        (43, "CPU 0/KVM"),
        (44, "CPU 12/TCG"),
        (45, "IO iothread1"),
        (46, "CPU x/KVM"),
    ] {
        write_thread(&tree, 40, tid, comm, "0-3");
    }
    tree
}

#[test]
fn threads_are_told_apart_by_name_where_there_are_no_groups() {
    let seen = threads(qemu().root(), 40).unwrap();
    let roles: Vec<_> = seen.iter().map(|t| (t.tid, t.role)).collect();
    let io = Role::IoThread(1);
    assert_eq!(
        roles,
        [
            (40, Role::Emulator),
            (41, Role::Other),
            (43, Role::Vcpu(0)),
            (44, Role::Vcpu(12)),
            (45, io),
            (46, Role::Other)
        ]
    );
    assert_eq!(
        (seen[2].running_ns, seen[2].waiting_ns, seen[2].cpu),
        (Ns(5000), Ns(700), Some(CpuId(1)))
    );
    assert_eq!(
        (seen[2].affinity.to_string(), seen[2].memory_nodes.to_string()),
        ("0-3".into(), "0-1".into())
    );
}

/// Puts these threads into these cgroups, as libvirt does.
fn put_in_groups(tree: &Tree, groups: &[(i32, &str)]) {
    for (tid, group) in groups {
        let text = format!("0::/machine.slice/machine-qemu.scope/libvirt/{group}\n");
        tree.write(&format!("proc/40/task/{tid}/cgroup"), &text);
    }
}

fn roles_in(tree: &Tree) -> Vec<(i32, Role)> {
    let seen = threads(tree.root(), 40).unwrap();
    seen.into_iter().map(|t| (t.tid, t.role)).collect()
}

#[test]
fn a_name_never_chooses_the_thread_of_a_vcpu_where_libvirt_made_groups() {
    let tree = qemu();
    // QEMU can give its threads any name, but cannot take them out of the groups in which libvirt put them.
    for tid in 100..200 {
        write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
        put_in_groups(&tree, &[(tid, "emulator")]);
    }
    write_thread(&tree, 40, 44, "harmless", "0-3");
    write_thread(&tree, 40, 45, "CPU 0/KVM", "0-3");
    write_thread(&tree, 40, 40, "CPU 5/KVM", "0-3");
    let groups = [(40, "emulator"), (41, "emulator"), (46, "emulator")];
    put_in_groups(&tree, &groups);
    put_in_groups(&tree, &[(43, "vcpu0"), (44, "vcpu12"), (45, "iothread1")]);
    let named: Vec<_> = roles_in(&tree)
        .into_iter()
        .filter(|(_, role)| *role != Role::Other)
        .collect();
    let expected = [
        (40, Role::Emulator),
        (43, Role::Vcpu(0)),
        (44, Role::Vcpu(12)),
        (45, Role::IoThread(1)),
    ];
    assert_eq!(named, expected);
}

#[test]
fn of_the_threads_in_a_vcpus_group_the_oldest_is_the_vcpus() {
    let tree = qemu();
    put_in_groups(
        &tree,
        &[
            (40, "emulator"),
            (41, "emulator"),
            (45, "emulator"),
            (46, "emulator"),
            (44, "vcpu12"),
        ],
    );
    // A thread that a vCPU's thread starts (an io_uring worker, a thread with its name) is in the same group, and younger.
    for (tid, start) in [(42, 90), (47, 77)] {
        write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
        tree.write(
            &format!("proc/40/task/{tid}/stat"),
            &stat(tid, "CPU 0/KVM", 'S', start, 1),
        );
        put_in_groups(&tree, &[(tid, "vcpu0")]);
    }
    put_in_groups(&tree, &[(43, "vcpu0")]);
    tree.write("proc/40/task/43/comm", "worker\n");
    let vcpus: Vec<_> = roles_in(&tree)
        .into_iter()
        .filter(|(_, role)| *role == Role::Vcpu(0))
        .collect();
    assert_eq!(vcpus, [(43, Role::Vcpu(0))]);
}

#[test]
fn threads_of_one_name_are_refused_where_nothing_else_tells_them_apart() {
    let tree = qemu();
    for tid in 100..140 {
        write_thread(&tree, 40, tid, "CPU 0/KVM", "0-3");
    }
    let error = threads(tree.root(), 40).expect_err("41 of vCPU 0").to_string();
    assert!(
        error.contains("proc/40/task") && error.contains("vCPU 0"),
        "{error}"
    );
    assert!(
        error.contains("43, 100, 101") && error.contains("41 threads"),
        "{error}"
    );
}

#[test]
fn more_threads_than_any_qemu_has_are_refused_and_not_cut_off() {
    let tree = qemu();
    for tid in 100..100 + THREADS_MAX {
        std::fs::create_dir(tree.root().join(format!("proc/40/task/{tid}"))).unwrap();
    }
    let error = threads(tree.root(), 40).expect_err("too many").to_string();
    assert!(
        error.contains("proc/40/task") && error.contains("8192"),
        "{error}"
    );
}

#[test]
fn numbers_in_names_are_read_as_qemu_writes_them() {
    for name in [
        "CPU +1/KVM",
        "CPU 01/KVM",
        "CPU /KVM",
        "CPU 65536/KVM",
        "IO iothread01",
        "IO other",
    ] {
        assert_eq!(named(name), Role::Other, "{name}");
    }
    assert_eq!(named("CPU 10/TCG"), Role::Vcpu(10));
    assert_eq!(named("IO iothread2"), Role::IoThread(2));
}

#[test]
fn a_process_is_found_by_uuid_and_known_by_its_start_time() {
    let tree = qemu();
    let found = find_qemu(tree.root(), "u-u").unwrap().unwrap();
    assert_eq!(
        found,
        Process {
            pid: 40,
            start_ticks: 77
        }
    );
    assert_eq!(find_qemu(tree.root(), "other"), Ok(None));
    assert!(is_alive(tree.root(), found));
    tree.write("proc/40/stat", &stat(40, "qemu", 'S', 78, 0));
    assert!(!is_alive(tree.root(), found), "the number was used again");
    tree.write("proc/40/stat", &stat(40, "qemu", 'Z', 77, 0));
    assert_eq!(process(tree.root(), 40), Ok(None), "a zombie runs no VM");
}

#[test]
fn a_thread_that_ends_is_left_out_and_no_process_has_no_threads() {
    let tree = qemu();
    std::fs::remove_file(tree.root().join("proc/40/task/43/status")).unwrap();
    assert_eq!(threads(tree.root(), 40).unwrap().len(), 5);
    assert_eq!(threads(tree.root(), 99), Ok(vec![]));
    assert_eq!(affinity(tree.root(), 40, 43), Ok(None));
    assert_eq!(affinity(tree.root(), 40, 44).unwrap().unwrap().to_string(), "0-3");
}

#[test]
fn malformed_and_truncated_files_are_errors_with_the_path() {
    for (file, bad) in [
        ("stat", "40 (CPU 0/KVM S 1"),
        ("stat", "40 (CPU 0/KVM) S 1 2 3"),
        ("schedstat", "5 x 1"),
        ("schedstat", "5 6"),
        ("status", "Cpus_allowed_list:\t0-3\n"),
        ("status", "Cpus_allowed_list:\t3-0\nMems_allowed_list:\t0\n"),
    ] {
        let tree = qemu();
        tree.write(&format!("proc/40/task/43/{file}"), bad);
        let error = threads(tree.root(), 40).unwrap_err();
        assert!(error.to_string().contains(&format!("task/43/{file}")), "{error}");
    }
}

#[test]
fn without_schedstat_running_time_comes_in_ticks() {
    let tree = qemu();
    std::fs::remove_file(tree.root().join("proc/40/task/43/schedstat")).unwrap();
    let seen = threads(tree.root(), 40).unwrap();
    assert_eq!(
        (seen[2].running_ns, seen[2].waiting_ns),
        (Ns::from_secs(1), Ns::ZERO)
    );
}

#[test]
fn this_process_reads() {
    let pid = i32::try_from(std::process::id()).unwrap();
    let seen = threads(Path::new("/"), pid).unwrap();
    assert!(
        seen.iter()
            .any(|t| t.tid == pid && t.role == Role::Emulator && !t.affinity.is_empty())
    );
}

/// Returns the result of one reading.
fn look(tasks: &mut Tasks, depth: Depth) -> Result<Vec<Thread>, ReadError> {
    let mut seen = Vec::new();
    tasks.look(depth, &mut seen)?;
    Ok(seen)
}

/// A process with two vCPUs that has been read often enough not to be new.
fn looked_at() -> (Tree, Tasks) {
    let tree = Tree::new(&[("proc/40/stat", &stat(40, "qemu", 'S', 77, 0))]);
    for (tid, comm) in [(40, "qemu-system-x86"), (43, "CPU 0/KVM"), (44, "CPU 1/KVM")] {
        write_thread(&tree, 40, tid, comm, "0-3");
    }
    let mut tasks = Tasks::new(tree.root(), 40);
    for _ in 0..LOOKS {
        let seen = look(&mut tasks, Depth::Counters).unwrap();
        assert_eq!(seen, threads(tree.root(), 40).unwrap());
    }
    (tree, tasks)
}

#[test]
fn of_threads_that_are_known_counters_alone_are_read_again() {
    let (tree, mut tasks) = looked_at();
    for tid in [43, 44] {
        write_thread(&tree, 40, tid, "CPU 9/KVM", "1");
        tree.write(
            &format!("proc/40/task/{tid}/stat"),
            &stat(tid, "CPU 9/KVM", 'S', 77, 3),
        );
    }
    tree.write("proc/40/task/43/schedstat", "6000 800 4\n");
    let of = |seen: &[Thread], at: usize| {
        let thread = &seen[at];
        (
            thread.role,
            thread.running_ns,
            thread.waiting_ns,
            thread.cpu,
            thread.affinity.to_string(),
        )
    };
    let cpu = |number| Some(CpuId(number));
    let seen = look(&mut tasks, Depth::Counters).unwrap();
    assert_eq!(
        of(&seen, 1),
        (Role::Vcpu(0), Ns(6000), Ns(800), cpu(3), "0-3".into())
    );
    assert_eq!(
        of(&seen, 2),
        (Role::Vcpu(1), Ns(5000), Ns(700), cpu(1), "0-3".into()),
        "it did not run"
    );
    let seen = look(&mut tasks, Depth::Affinities).unwrap();
    assert_eq!((of(&seen, 2).0, of(&seen, 2).4), (Role::Vcpu(1), "1".into()));
    write_thread(&tree, 40, 44, "CPU 1/KVM", "1");
    let seen = look(&mut tasks, Depth::Whole).unwrap();
    assert_eq!(of(&seen, 1).0, Role::Vcpu(9));
    assert_eq!(of(&seen, 2).4, "1");
}

#[test]
fn threads_that_come_and_go_are_seen_at_once() {
    let (tree, mut tasks) = looked_at();
    write_thread(&tree, 40, 45, "CPU 2/KVM", "1");
    std::fs::remove_dir_all(tree.root().join("proc/40/task/43")).unwrap();
    let seen = look(&mut tasks, Depth::Counters).unwrap();
    assert_eq!(seen, threads(tree.root(), 40).unwrap());
    let roles: Vec<Role> = seen.iter().map(|thread| thread.role).collect();
    assert_eq!(roles, [Role::Emulator, Role::Vcpu(1), Role::Vcpu(2)]);
}

#[test]
fn a_threads_number_that_is_used_again_is_of_a_thread_that_is_read_whole() {
    let (tree, mut tasks) = looked_at();
    write_thread(&tree, 40, 43, "worker", "2");
    tree.write("proc/40/task/43/stat", &stat(43, "worker", 'S', 99, 1));
    tree.write("proc/40/task/43/schedstat", "1 1 1\n");
    let seen = look(&mut tasks, Depth::Counters).unwrap();
    assert_eq!(seen, threads(tree.root(), 40).unwrap());
    assert_eq!(
        (seen[1].role, seen[1].affinity.to_string()),
        (Role::Other, "2".into())
    );
}

#[test]
fn a_process_that_comes_to_a_known_number_is_not_taken_for_the_one_before() {
    let (tree, mut tasks) = looked_at();
    let (pid, start_ticks) = (40, 77);
    let who = Process { pid, start_ticks };
    assert!(tasks.is_alive(who));
    std::fs::rename(tree.root().join("proc/40"), tree.root().join("ended")).unwrap();
    std::fs::remove_dir_all(tree.root().join("ended")).unwrap();
    write_thread(&tree, 40, 43, "CPU 0/KVM", "0-3");
    tree.write("proc/40/stat", &stat(40, "qemu", 'S', 77, 0));
    assert!(is_alive(tree.root(), who), "as far as numbers tell");
    assert!(!tasks.is_alive(who));
    assert_eq!(look(&mut tasks, Depth::Counters), Ok(vec![]));
    assert_eq!(look(&mut tasks, Depth::Whole), Ok(vec![]));
}

#[test]
fn after_a_look_that_failed_all_is_read_anew() {
    let (tree, mut tasks) = looked_at();
    write_thread(&tree, 40, 44, "CPU 1/KVM", "1");
    tree.write("proc/40/task/43/schedstat", "many");
    assert!(look(&mut tasks, Depth::Counters).is_err());
    tree.write("proc/40/task/43/schedstat", "6000 800 4\n");
    assert_eq!(
        look(&mut tasks, Depth::Counters).unwrap(),
        threads(tree.root(), 40).unwrap()
    );
}

#[test]
fn a_thread_that_is_named_after_it_was_seen_first_gets_its_role_soon() {
    let (tree, mut tasks) = looked_at();
    write_thread(&tree, 40, 45, "qemu-system-x86", "0-3");
    assert_eq!(look(&mut tasks, Depth::Counters).unwrap()[3].role, Role::Other);
    write_thread(&tree, 40, 45, "CPU 2/KVM", "0-3");
    assert_eq!(look(&mut tasks, Depth::Counters).unwrap()[3].role, Role::Vcpu(2));
}

#[test]
fn threads_are_listed_where_the_process_has_another_number_of_them_and_else_now_and_then() {
    let (tree, mut tasks) = looked_at();
    let (pid, start_ticks) = (40, 77);
    let mut looked = |count: u32, depth| {
        let text = stat(pid, "qemu", 'S', start_ticks, 0).replace(" 20 0 9 0 ", &format!(" 20 0 {count} 0 "));
        tree.write("proc/40/stat", &text);
        assert!(tasks.is_alive(Process { pid, start_ticks }));
        look(&mut tasks, depth).unwrap().len()
    };
    assert_eq!(looked(3, Depth::Counters), 3);
    // One thread ends and another starts.
    std::fs::remove_dir_all(tree.root().join("proc/40/task/40")).unwrap();
    write_thread(&tree, 40, 45, "CPU 2/KVM", "0-3");
    write_thread(&tree, 40, 46, "worker", "0-3");
    assert_eq!(looked(3, Depth::Counters), 3, "as far as their number tells");
    assert_eq!(looked(4, Depth::Counters), 4);
    std::fs::remove_dir_all(tree.root().join("proc/40/task/46")).unwrap();
    assert_eq!(looked(4, Depth::Affinities), 3);
}

#[test]
fn a_look_into_what_the_one_before_found_is_a_look() {
    let (tree, mut tasks) = looked_at();
    let (pid, start_ticks) = (40, 77);
    let mut seen = look(&mut tasks, Depth::Counters).unwrap();
    for (ran, depth) in [
        (6000, Depth::Counters),
        (7000, Depth::Affinities),
        (8000, Depth::Whole),
    ] {
        tree.write("proc/40/task/43/schedstat", &format!("{ran} 900 4\n"));
        tree.write(
            "proc/40/task/43/stat",
            &stat(43, "CPU 0/KVM", 'S', start_ticks, 3),
        );
        assert!(tasks.is_alive(Process { pid, start_ticks }));
        tasks.look(depth, &mut seen).unwrap();
        assert_eq!(seen, threads(tree.root(), 40).unwrap());
    }
    write_thread(&tree, 40, 45, "worker", "1");
    tasks.look(Depth::Counters, &mut seen).unwrap();
    assert_eq!(seen, threads(tree.root(), 40).unwrap());
    std::fs::remove_dir_all(tree.root().join("proc/40/task")).unwrap();
    tasks.look(Depth::Counters, &mut seen).unwrap();
    assert_eq!(seen, []);
}

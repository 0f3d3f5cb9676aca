//! Everything that operators set is a bound: cpusets of cgroups, `<vcpu cpuset>`, isolated and reserved CPUs, affinities.

use super::home::{runs_on, set_home};
use super::*;
use homenode_kernel::fault::{self, Point};

/// Path of the VM's cgroup, in both cgroup versions.
const GROUP: &str = "machine/qemu-1-one.libvirt-qemu";
const V1: &str = "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";

/// A machine with two nodes of two CPUs each.
fn two_by_two(isolated: &str) -> Machine {
    let mut machine = machine(&[0, 0, 1, 1]);
    let cpu = |cpu: homenode_machine::Cpu| homenode_machine::Cpu {
        node: NodeId((cpu.id.0 / 2) as u16),
        ..cpu
    };
    machine.cpus = machine.cpus.iter().copied().map(cpu).collect();
    let nodes = ["0-1", "2-3"].into_iter().zip(0..);
    let nodes = nodes.map(|(list, at)| {
        let node = machine.nodes[NodeId(at * 2)].clone();
        (
            NodeId(at),
            homenode_machine::Node {
                cpus: cpus(list),
                ..node
            },
        )
    });
    machine.nodes = nodes.collect();
    machine.memory_allowed = machine.nodes.node_set();
    machine.distances.rows = vec![vec![10, 20], vec![20, 10]];
    machine.isolated = cpus(isolated);
    machine.checked().unwrap()
}

/// A host with two CPUs on each node, with this `<vcpu>` element from the VM's operator.
fn tree(vcpu: &str) -> Tree {
    tree_with("", vcpu)
}

/// Like `tree`, with `extra` in the VM's XML.
fn tree_with(extra: &str, vcpu: &str) -> Tree {
    let tree = host(extra);
    let xml = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write("node.xml", &xml.replace("<vcpu>", vcpu));
    let stat: String = (0..4).map(|cpu| format!("cpu{cpu} 1 1 1 1 1 1 1 1\n")).collect();
    tree.write("proc/stat", &stat);
    for (tid, group) in [(PID, "emulator"), (41, "vcpu0"), (42, "vcpu1")] {
        let group = format!("3:cpuset:/{GROUP}/{group}\n0::/{GROUP}/{group}\n");
        tree.write(&format!("proc/{PID}/task/{tid}/cgroup"), &group);
        // libvirt writes its own pins there, which are not an operator's bound.
        let name = group.rsplit('/').next().unwrap().trim();
        tree.write(
            &format!("sys/fs/cgroup/{GROUP}/{name}/cpuset.cpus.effective"),
            "0\n",
        );
    }
    tree
}

/// Gives the slice of all VMs these CPUs, and runs the threads on `threads`.
fn confine(tree: &Tree, slice: &str, threads: &str) {
    tree.write(
        "sys/fs/cgroup/machine/cpuset.cpus.effective",
        &format!("{slice}\n"),
    );
    for (tid, comm) in [(PID, "qemu-system-x86"), (41, "CPU 0/KVM"), (42, "CPU 1/KVM")] {
        write_thread(tree, PID, tid, comm, threads);
    }
}

/// An agent on a host whose kernel confines threads to these CPUs.
fn agent(tree: &Tree, machine: Machine, kernel: &str) -> KvmHost {
    agent_with(tree, Options::new(machine), kernel)
}

fn agent_with(tree: &Tree, options: Options, kernel: &str) -> KvmHost {
    let options = Options {
        root: tree.root().to_owned(),
        state_dir: tree.root().join("state"),
        topology_socket: tree.root().join("run/topology.sock"),
        ..options
    };
    let mut host = connect_as(tree, options);
    let fake = &mut host.context.manager.libvirt().fake;
    fake.threads = Some((tree.root().join(format!("proc/{PID}/task")), PID));
    fake.cpuset = Some(cpus(kernel));
    host
}

/// Commits an action that was decided on the last sample, and returns its outcome.
fn commit_as_sampled(host: &mut KvmHost, action: Action) -> Outcome {
    let version = host.last.version;
    host.commit(&plan(version, action)).unwrap().outcomes.remove(0)
}

fn allowed(host: &mut KvmHost) -> Option<String> {
    let settings = host.sample().unwrap().vms[0].settings.clone();
    settings.cpus_allowed.map(|cpus| cpus.to_string())
}

fn notices(host: &mut KvmHost) -> String {
    host.take_notices().join("\n")
}

/// Whether anything is left to undo.
fn in_force(tree: &Tree) -> bool {
    let entries = journal::peek(&tree.root().join("state"));
    entries.get(&vm()).is_some_and(journal::Entry::is_in_force)
}

#[test]
fn the_cpuset_of_the_machine_slice_bounds_libvirts_vms_in_both_versions_of_cgroups() {
    let v2 = tree("<vcpu>");
    confine(&v2, "1,3", "1,3");
    let v1 = tree("<vcpu>");
    v1.write("proc/self/mountinfo", V1);
    v1.write("sys/fs/cgroup/cpuset/machine/cpuset.effective_cpus", "1,3\n");
    let old_v1 = tree("<vcpu>");
    old_v1.write("proc/self/mountinfo", V1);
    old_v1.write("sys/fs/cgroup/cpuset/machine/cpuset.cpus", "1,3\n");
    for tree in [v2, v1, old_v1] {
        let mut host = agent(&tree, two_by_two(""), "1,3");
        assert_eq!(allowed(&mut host).as_deref(), Some("1,3"));
        let version = host.last.version;
        let refusal = host.commit(&plan(version, pin(&[0], "0-1"))).unwrap_err();
        assert!(
            refusal.to_string().contains("CPUs 1,3 that the VM may use"),
            "{refusal:?}"
        );
        assert_eq!(commit(&mut host, pin(&[0, 1], "1")), Outcome::Done);
        assert_eq!(commit(&mut host, set_home(0)), Outcome::Done);
        assert_eq!(runs_on(&tree), ["1", "1", "1"]);
        assert_eq!(host.restore().failures, Vec::<String>::new());
    }
}

#[test]
fn memory_nodes_of_the_cgroups_bound_the_home() {
    let tree = tree("<vcpu>");
    tree.write("sys/fs/cgroup/machine/cpuset.mems.effective", "1\n");
    tree.write("sys/fs/cgroup/cpuset.mems.effective", "0-1\n");
    let mut host = agent(&tree, two_by_two(""), "0-3");
    assert_eq!(allowed(&mut host).as_deref(), Some("2-3"));
    tree.write("sys/fs/cgroup/machine/cpuset.mems.effective", "0-1\n");
    assert_eq!(allowed(&mut host), None, "these are all");
}

#[test]
fn a_vm_to_which_no_cpu_is_left_is_left_alone_and_the_reason_is_said() {
    // In turn: none of the VM's CPUs exists; its slice has only other CPUs; all CPUs are isolated.
    for (vcpu, slice, isolated) in [
        ("<vcpu cpuset='8-9'>", "0-3", ""),
        ("<vcpu cpuset='1,3'>", "0,2", ""),
        ("<vcpu>", "0-3", "0-3"),
    ] {
        let tree = tree(vcpu);
        confine(&tree, slice, "0-3");
        let mut host = agent(&tree, two_by_two(isolated), slice);
        let seen = host.sample().unwrap();
        assert_eq!(seen.vms[0].settings.management, Management::Ignored, "{vcpu}");
        assert_eq!(
            seen.vms[0].settings.cpus_allowed,
            Some(CpuSet::new()).filter(|_| isolated.is_empty())
        );
        let said = notices(&mut host);
        assert!(
            said.contains("VM one is watched only: no CPU of this host"),
            "{said}"
        );
        assert!(!in_force(&tree));
    }
}

#[test]
fn isolated_cpus_are_only_for_a_vm_whose_own_bounds_name_them() {
    let others = tree("<vcpu>");
    confine(&others, "0-3", "0,2");
    let mut host = agent(&others, two_by_two("1,3"), "0-3");
    assert_eq!(
        allowed(&mut host),
        None,
        "no plan may use 1 and 3: the view leaves them out"
    );
    assert_eq!(commit(&mut host, set_home(1)), Outcome::Done);
    assert_eq!(runs_on(&others)[0], "2");

    let named = tree("<vcpu cpuset='1,3'>");
    confine(&named, "0-3", "1,3");
    let mut host = agent(&named, two_by_two("1,3"), "0-3");
    assert_eq!(allowed(&mut host).as_deref(), Some("1,3"));
    assert_eq!(commit(&mut host, pin(&[0, 1], "3")), Outcome::Done);
}

#[test]
fn an_affinity_from_before_the_agent_is_a_bound_also_while_a_pin_is_in_force() {
    let tree = tree("<vcpu>");
    confine(&tree, "0-3", "1-2");
    let mut host = agent(&tree, two_by_two(""), "0-3");
    assert_eq!(allowed(&mut host).as_deref(), Some("1-2"));
    for action in [pin(&[0, 1], "2"), set_home(1)] {
        assert_eq!(commit(&mut host, action), Outcome::Done);
        assert_eq!(allowed(&mut host).as_deref(), Some("1-2"));
    }
    assert_eq!(runs_on(&tree), ["2", "2", "2"]);
}

#[test]
fn an_affinity_that_a_tool_advised_is_no_bound() {
    let tree = tree("<vcpu placement='auto'>");
    confine(&tree, "0-3", "0-1");
    let mut host = agent(&tree, two_by_two(""), "0-3");
    assert_eq!(allowed(&mut host), None);
    assert_eq!(commit(&mut host, set_home(1)), Outcome::Done);
    assert_eq!(runs_on(&tree)[0], "2-3");
}

#[test]
fn nothing_is_pinned_to_cpus_that_the_operator_keeps_for_the_host() {
    let tree = tree("<vcpu>");
    let options = Options {
        reserved_cpus: cpus("0"),
        ..Options::new(two_by_two(""))
    };
    let mut host = agent_with(&tree, options, "0-3");
    assert_eq!(commit(&mut host, set_home(0)), Outcome::Done);
    assert_eq!(runs_on(&tree)[0], "1");
}

/// Shrinks the slice after it was read, while an action is carried out.
fn shrink_meanwhile(tree: &Tree, slice: &'static str) {
    let file = tree.root().join("sys/fs/cgroup/machine/cpuset.cpus.effective");
    fault::plan(move |point| {
        if point == Point::Call {
            std::fs::write(&file, slice).unwrap();
        }
        None
    });
}

#[test]
fn a_pin_or_a_home_that_comes_into_force_in_part_is_undone() {
    for action in [pin(&[0, 1], "0-1"), set_home(0)] {
        let tree = tree("<vcpu>");
        confine(&tree, "0-3", "0-3");
        let mut host = agent(&tree, two_by_two(""), "1,3");
        host.sample().unwrap();
        shrink_meanwhile(&tree, "1,3\n");
        let outcome = commit_as_sampled(&mut host, action);
        fault::end();
        let Outcome::Failed(error) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(error.to_string().contains("CPUs 1 are in force"), "{error}");
        let touched: Vec<String> = runs_on(&tree).into_iter().filter(|on| *on != "0-3").collect();
        assert!(
            !touched.is_empty() && touched.iter().all(|on| on == "1,3"),
            "{touched:?}"
        );
        assert!(pinned_in_xml(&mut host).values().all(|pin| *pin == cpus("0-3")));
        assert!(!in_force(&tree), "nothing is left to undo");
        let seen = host.sample().unwrap();
        assert_eq!(seen.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
        let said = notices(&mut host);
        assert!(!said.contains("another program"), "{said}");
    }
}

#[test]
fn a_pin_that_fails_leaves_the_agents_earlier_one_in_force() {
    let tree = tree("<vcpu>");
    confine(&tree, "0-3", "0-3");
    let mut host = agent(&tree, two_by_two(""), "1-3");
    assert_eq!(commit(&mut host, pin(&[0, 1], "2-3")), Outcome::Done);
    host.sample().unwrap();
    shrink_meanwhile(&tree, "1-3\n");
    assert!(matches!(
        commit_as_sampled(&mut host, pin(&[1], "0-1")),
        Outcome::Failed(_)
    ));
    fault::end();
    assert_eq!(runs_on(&tree)[1..], ["2-3", "2-3"]);
    assert_eq!(pinned_in_xml(&mut host)[&1], cpus("2-3"));
    assert_eq!(
        host.vms[&vm()].pins.ours,
        [(0, vec![cpus("2-3")]), (1, vec![cpus("2-3")])].into()
    );
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert!(!in_force(&tree));
}

#[test]
fn a_cpuset_that_shrinks_ends_home_and_pins_outside_and_is_nobodys_pin() {
    // For each slice: what the kernel makes of CPUs 0-1, and the VM's CPUs once the agent has lifted its pins.
    for (slice, made_of_it, left) in [("1,3", "1", "1,3"), ("2-3", "2-3", "2-3")] {
        let tree = tree("<vcpu>");
        confine(&tree, "0-3", "0-3");
        let mut host = agent(&tree, two_by_two(""), slice);
        host.context.manager.libvirt().fake.cpuset = None;
        for action in [pin(&[0, 1], "0-1"), set_home(0)] {
            assert_eq!(commit(&mut host, action), Outcome::Done);
        }
        let planned = host.sample().unwrap().version;
        host.context.manager.libvirt().fake.cpuset = Some(cpus(slice));
        confine(&tree, slice, made_of_it);
        let refusal = host.commit(&plan(planned, pin(&[0], "0"))).unwrap_err();
        assert!(matches!(refusal, Refusal::Stale { .. }), "{refusal:?}");
        let seen = host.sample().unwrap();
        assert_eq!(runs_on(&tree), [left, left, left]);
        assert_eq!(seen.vms[0].settings.cpus_allowed, Some(cpus(left)));
        assert_eq!(seen.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
        let said = notices(&mut host);
        assert!(
            said.contains("home and pins of VM one are lifted: its bounds were changed"),
            "{said}"
        );
        assert!(!said.contains("another program") && !in_force(&tree), "{said}");
        let again = host.sample().unwrap();
        assert_eq!(again.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
        assert_eq!(notices(&mut host), "", "it is said once");
    }
}

#[test]
fn a_guard_gives_back_within_a_cpuset_that_shrank_meanwhile() {
    let tree = tree("<vcpu>");
    confine(&tree, "0-3", "0-1");
    let mut host = agent(&tree, two_by_two(""), "0-3");
    for action in [pin(&[0, 1], "0"), set_home(0)] {
        assert_eq!(commit(&mut host, action), Outcome::Done);
    }
    host.context.manager.libvirt().fake.cpuset = Some(cpus("2-3"));
    confine(&tree, "2-3", "2-3");
    guard_undoes(&mut host, &tree);
    assert_eq!(runs_on(&tree), ["2-3", "2-3", "2-3"]);
}

#[test]
fn what_the_kernel_refuses_is_not_tried_again_in_each_period() {
    let tree = tree("<vcpu>");
    // No cgroup file shows the CPUs to which the kernel confines the VM.
    let mut host = agent(&tree, two_by_two(""), "2-3");
    let calls = std::rc::Rc::new(std::cell::Cell::new(0));
    let made = std::rc::Rc::clone(&calls);
    fault::plan(move |point| {
        made.set(made.get() + u32::from(point == Point::Call));
        None
    });
    let mut tried = Vec::new();
    for _ in 0..8 {
        host.sample().unwrap();
        let before = calls.get();
        let outcome = commit_as_sampled(&mut host, pin(&[0], "0-1"));
        assert!(matches!(&outcome, Outcome::Failed(error) if error.to_string().contains("Invalid argument")));
        tried.push(calls.get() > before);
    }
    fault::end();
    assert_eq!(tried, [true, true, true, false, false, false, false, false]);
    assert_eq!(
        commit(&mut host, pin(&[0], "2-3")),
        Outcome::Done,
        "something else is tried at once"
    );
}

#[test]
fn what_giving_back_leaves_in_the_xml_is_no_pin_for_the_next_agent() {
    let pins = "<cputune><vcpupin vcpu='0' cpuset='1,3'/><emulatorpin cpuset='1,3'/></cputune>";
    let tree = tree_with(pins, "<vcpu>");
    confine(&tree, "1,3", "1,3");
    let mut host = agent(&tree, two_by_two(""), "1,3");
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
    assert_eq!(commit(&mut host, set_home(0)), Outcome::Done);
    assert_eq!(runs_on(&tree)[0], "1");
}

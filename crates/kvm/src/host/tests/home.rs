//! Homes that are lifted: in every case, the VM ends in its state from before the agent first pinned it.

use homenode_host::HomeInForce;

use super::*;

/// A VM whose memory nodes libvirt can change.
pub(super) const RESTRICTIVE: &str = "<numatune><memory mode='restrictive' nodeset='0'/></numatune>";

pub(super) fn set_home(node: u16) -> Action {
    Act::SetHome {
        nodes: NodeSet::one(NodeId(node)),
    }
    .on(vm())
}

pub(super) fn lift_home() -> Action {
    Act::Lift { lever: Lever::Home }.on(vm())
}

/// An agent whose VM has node 1 as its home and runs both vCPUs there.
pub(super) fn homed(tree: &Tree) -> KvmHost {
    let mut host = connect(tree, Acting::Live);
    let tasks = tree.root().join(format!("proc/{PID}/task"));
    host.context.manager.libvirt().fake.threads = Some((tasks, PID));
    for action in [pin(&[0, 1], "1"), set_home(1)] {
        assert_eq!(commit(&mut host, action), Outcome::Done);
    }
    host
}

fn entry(tree: &Tree) -> journal::Entry {
    journal::peek(&tree.root().join("state"))[&vm()].clone()
}

/// CPUs of emulator and vCPUs.
pub(super) fn runs_on(tree: &Tree) -> [String; 3] {
    [PID, 41, 42].map(|tid| {
        let affinity = task::affinity(tree.root(), PID, tid).unwrap();
        affinity.unwrap().to_string()
    })
}

/// Ends an agent like SIGKILL, which leaves its journal on disk. The next agent finds the XML that a real libvirt would show.
fn kill(mut host: KvmHost, tree: &Tree) {
    let xml = host.context.manager.libvirt().xml(vm()).unwrap();
    tree.write("node.xml", &format!("<node>{xml}</node>"));
}

#[test]
fn a_vm_whose_home_was_lifted_runs_as_before_and_nobody_takes_it_for_homed() {
    let tree = host("");
    let mut host = homed(&tree);
    assert_eq!(runs_on(&tree), ["1", "1", "1"]);
    let version = host.sample().unwrap().version;
    assert_eq!(commit(&mut host, lift_home()), Outcome::Done);
    assert_eq!(runs_on(&tree), ["0-3", "0-3", "0-3"]);
    let seen = host.sample().unwrap();
    assert!(seen.version > version);
    assert_eq!(seen.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
    assert!(!entry(&tree).is_in_force());
    let journal = std::fs::read(tree.root().join(JOURNAL[0])).unwrap();
    assert_eq!(
        commit(&mut host, lift_home()),
        Outcome::Done,
        "nothing is in force"
    );
    assert_eq!(std::fs::read(tree.root().join(JOURNAL[0])).unwrap(), journal);
    let notices = host.take_notices();
    assert!(
        !notices.iter().any(|n| n.contains("another program")),
        "{notices:?}"
    );
    kill(host, &tree);
    let mut successor = connect(&tree, Acting::Live);
    assert_eq!(successor.carried_over(), []);
    let seen = successor.sample().unwrap();
    assert_eq!(seen.vms[0].settings.pinned_vcpus, Vec::<u16>::new());
    assert!(successor.vms[&vm()].home.is_none());
}

#[test]
fn memory_nodes_of_before_are_allowed_again_and_none_that_memory_lies_on_is_taken_away() {
    // Node 1 has more pages than are moved at once, or none.
    for (on_node_1, left) in [(600, "0-1"), (0, "0")] {
        let tree = host(RESTRICTIVE);
        let mut host = homed(&tree);
        let allowed = |host: &KvmHost| host.vms[&vm()].restrictive_nodes().unwrap().to_string();
        assert_eq!(allowed(&host), "1");
        let maps = format!("7f0000000000 default anon=9 N0=5 N1={on_node_1} kernelpagesize_kB=4\n");
        tree.write(&format!("proc/{PID}/numa_maps"), &maps);
        host.vms.get_mut(&vm()).unwrap().forget_pages();
        assert_eq!(commit(&mut host, lift_home()), Outcome::Done);
        assert_eq!(allowed(&host), left);
    }
}

#[test]
fn pins_of_somebody_else_outlast_the_agent() {
    let tree = host("");
    let mut host = homed(&tree);
    host.sample().unwrap();
    host.context.manager.pin_vcpu(vm(), 1, &cpus("0")).unwrap();
    host.sample().unwrap();
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(runs_on(&tree)[1..], ["0-3", "0"]);
}

#[test]
fn what_the_kernel_makes_of_pins_where_a_cpu_goes_offline_is_nobodys_doing() {
    let tree = host("");
    let mut host = homed(&tree);
    host.sample().unwrap();
    tree.write("proc/stat", "cpu0 1 1 1 1 1 1 1 1\n");
    host.sample().unwrap();
    host.context.manager.pin_vcpu(vm(), 1, &cpus("0")).unwrap();
    let by_hand = |host: &mut KvmHost| host.sample().unwrap().vms[0].settings.pinned_vcpus.clone();
    assert_eq!(by_hand(&mut host), Vec::<u16>::new());
    // Long afterwards, the change counts as an operator's.
    host.context.kernels_until = Ns::ZERO;
    assert_eq!(by_hand(&mut host), [1]);
}

#[test]
fn pins_of_somebody_else_outlast_the_home() {
    let tree = host("");
    let mut host = homed(&tree);
    host.context.manager.pin_vcpu(vm(), 1, &cpus("0")).unwrap();
    assert_eq!(commit(&mut host, lift_home()), Outcome::Done);
    assert_eq!(runs_on(&tree), ["0-3", "0-3", "0"]);
    assert_eq!(host.sample().unwrap().vms[0].settings.pinned_vcpus, [1]);
}

#[test]
fn what_is_set_after_a_lift_is_journalled_anew() {
    let tree = host("");
    let mut host = homed(&tree);
    assert_eq!(commit(&mut host, lift_home()), Outcome::Done);
    // The operator pins the second vCPU and the emulator while the VM has no home or pins of the agent's.
    host.context.manager.pin_vcpu(vm(), 1, &cpus("0")).unwrap();
    host.context.manager.pin_emulator(vm(), &cpus("0-1")).unwrap();
    assert_eq!(commit(&mut host, pin(&[0], "0")), Outcome::Done);
    assert_eq!(commit(&mut host, set_home(0)), Outcome::Done);
    let before = entry(&tree).before;
    assert_eq!(before.vcpus, [(0, cpus("0-3")), (1, cpus("0"))].into());
    assert_eq!((before.emulator, before.operator_pins), (cpus("0-1"), vec![1]));
    // Also within one plan: the journal has the state after the lift, not the sampled state.
    let mut plan = Plan::new(host.sample().unwrap().version);
    for action in [lift_home(), pin(&[0], "1"), set_home(1)] {
        plan.decide("test", action, "a test".into());
    }
    assert_eq!(host.commit(&plan).unwrap().outcomes, [const { Outcome::Done }; 3]);
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(runs_on(&tree), ["0-1", "0-3", "0"]);
}

/// Gives the VM a home on both nodes, and keeps its vCPUs on CPU 1.
fn homed_on_a_part(tree: &Tree) -> KvmHost {
    let mut host = connect(tree, Acting::Live);
    let tasks = tree.root().join(format!("proc/{PID}/task"));
    host.context.manager.libvirt().fake.threads = Some((tasks, PID));
    let mut plan = Plan::new(host.sample().unwrap().version);
    let nodes = NodeSet::from_iter([NodeId(0), NodeId(1)]);
    for action in [Act::SetHome { nodes }.on(vm()), pin(&[0, 1], "1")] {
        plan.decide("test", action, "a test".into());
    }
    assert_eq!(host.commit(&plan).unwrap().outcomes, [const { Outcome::Done }; 2]);
    host
}

/// The home on both nodes, with the vCPUs on these CPUs.
fn on_part(list: &str) -> HomeInForce {
    HomeInForce::On {
        nodes: "0-1".parse().unwrap(),
        cpus: cpus(list),
    }
}

fn told(host: &mut KvmHost) -> HomeInForce {
    host.sample().unwrap().vms[0].home.clone()
}

#[test]
fn the_home_in_force_and_its_part_are_told_across_restarts() {
    let tree = host("");
    let mut host = homed_on_a_part(&tree);
    assert_eq!(told(&mut host), on_part("1"));
    // As for a measurement of seconds.
    assert_eq!(commit(&mut host, pin(&[0, 1], "0")), Outcome::Done);
    assert_eq!(told(&mut host), on_part("1"));
    kill(host, &tree);
    let mut successor = connect(&tree, Acting::Live);
    assert_eq!(successor.carried_over()[0].home, Some("0-1".parse().unwrap()));
    assert_eq!(told(&mut successor), on_part("1"));
    assert_eq!(runs_on(&tree)[1..], ["0", "0"]);
    // The VM's own mark says it as well as the journal.
    kill(successor, &tree);
    std::fs::remove_dir_all(tree.root().join("state")).unwrap();
    let mut other = connect(&tree, Acting::Live);
    assert_eq!(other.carried_over(), []);
    assert_eq!(told(&mut other), on_part("1"));
    let tasks = tree.root().join(format!("proc/{PID}/task"));
    other.context.manager.libvirt().fake.threads = Some((tasks, PID));
    assert_eq!(commit(&mut other, pin(&[0, 1], "0-1")), Outcome::Done);
    assert_eq!(told(&mut other), on_part(""), "the home is whole now");
    assert_eq!(commit(&mut other, lift_home()), Outcome::Done);
    assert_eq!(told(&mut other), HomeInForce::Unplaced);
}

#[test]
fn a_journal_of_an_earlier_version_names_a_home_on_all_of_its_nodes() {
    let nodes: NodeSet = "0-1".parse().unwrap();
    let earlier = serde_json::to_string(&nodes).unwrap();
    let home: Home = serde_json::from_str(&earlier).unwrap();
    assert_eq!(home, Home(on_part("")));
    assert_eq!(serde_json::to_string(&home).unwrap(), earlier);
    let part = serde_json::to_string(&Home(on_part("1"))).unwrap();
    assert_eq!(serde_json::from_str::<Home>(&part).unwrap(), Home(on_part("1")));
}

#[test]
fn a_vm_that_cannot_be_read_stays_in_the_sample_as_last_read_for_as_long_as_it_runs() {
    let tree = host("");
    let mut host = homed(&tree);
    let read = host.sample().unwrap();
    let schedstat = tree.root().join(format!("proc/{PID}/task/41/schedstat"));
    let text = std::fs::read_to_string(&schedstat).unwrap();
    std::fs::write(&schedstat, "x\n").unwrap();
    for _ in 0..3 {
        let unread = host.sample().unwrap();
        let expected = VmSample {
            is_unread: true,
            ..read.vms[0].clone()
        };
        assert_eq!((unread.vms, unread.version), (vec![expected], read.version));
    }
    // It is unknown whether the settings in force are still the agent's, so the agent leaves them.
    for act in [lift_home(), set_home(0)] {
        let failed = commit(&mut host, act);
        assert!(
            matches!(&failed, Outcome::Failed(error) if error.to_string().contains("could not be read")),
            "{failed:?}"
        );
    }
    assert_eq!(runs_on(&tree), ["1", "1", "1"]);
    std::fs::write(&schedstat, text).unwrap();
    assert_eq!(commit(&mut host, lift_home()), Outcome::Done);
    let again = host.sample().unwrap();
    assert!(!again.vms[0].is_unread);
    assert_eq!(again.vms[0].home, HomeInForce::Unplaced);
    std::fs::write(&schedstat, "x\n").unwrap();
    tree.write(&format!("proc/{PID}/stat"), &stat(PID, "qemu", 'S', 78, 0));
    assert_eq!(host.sample().unwrap().vms, [], "another process has its number");
}

#[test]
fn the_emulator_is_unpinned_though_a_thread_cannot_be_read() {
    let tree = host("");
    let mut host = homed(&tree);
    let pinned = |host: &mut KvmHost| parsed(host.context.manager.as_mut()).emulator_pin;
    assert_eq!(pinned(&mut host), Some(cpus("1")));
    tree.write(&format!("proc/{PID}/task/41/stat"), "41 (torn");
    let mut journal = Journal::open(&tree.root().join("state")).unwrap();
    // The vCPU may remain pinned; if so, that is reported.
    let _ = levers::undo(host.context.manager.as_mut(), tree.root(), &mut journal, vm());
    assert_eq!(pinned(&mut host), Some(cpus("0-3")));
}

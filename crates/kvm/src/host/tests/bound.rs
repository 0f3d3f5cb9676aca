//! Memory that its operator bound to nodes, or that is in a pool's huge pages, stays where it is.

use homenode_host::{FrameMove, Immovable};

use super::*;

fn set(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn numa_maps(tree: &Tree, lines: &[&str]) {
    tree.write(
        &format!("proc/{PID}/numa_maps"),
        &format!("{}\n", lines.join("\n")),
    );
}

/// Returns all actions that could move pages of the VM, whose guest sees `cells` nodes, to a node.
fn moves(host: &KvmHost, to: u16, cells: usize) -> Vec<Action> {
    let node = NodeId(to);
    let moves = vec![FrameMove {
        frame: 0,
        pages: Pages(1),
        from: NodeId(1 - to),
        to: node,
    }];
    let of_cell = |virtual_node| Act::MoveVirtualNode {
        virtual_node,
        to: node,
        pages_max: Pages(9),
    };
    let of_cells = (0..cells).map(|at| of_cell(at as u16).on(vm()));
    let others = [
        Action::gather(host.machine(), vm(), NodeSet::one(node), Pages(9)),
        Act::MoveFrames { moves }.on(vm()),
    ];
    of_cells.chain(others).collect()
}

/// A host's reason not to move memory.
fn refusal(outcome: &Outcome) -> Option<&str> {
    match outcome {
        Outcome::Failed(ActionError {
            why: Failure::MemoryFixed { why },
            ..
        }) => Some(why),
        _ => None,
    }
}

/// Checks that all actions that would move pages to one of these nodes are refused.
fn assert_stays(host: &mut KvmHost, nodes: &[u16]) {
    let cells = host.sample().unwrap().vms[0].virtual_nodes.len();
    for &to in nodes {
        for action in moves(host, to, cells) {
            let outcome = commit(host, action.clone());
            let why = refusal(&outcome).unwrap_or_else(|| panic!("{action:?}: {outcome:?}"));
            assert!(why.contains("node") || why.contains("pool"), "{why}");
        }
    }
}

/// Two cells with 512 KiB of memory each.
const CELLS: &str = "<cpu><numa><cell id='0' cpus='0' memory='512' unit='KiB'/><cell id='1' cpus='1' memory='512' unit='KiB'/></numa></cpu>";

#[test]
fn cells_bound_to_a_node_each_stay_whoever_bound_them() {
    let told = "<numatune><memory mode='strict' nodeset='0-1'/><memnode cellid='0' mode='strict' nodeset='0'/>\
        <memnode cellid='1' mode='strict' nodeset='1'/></numatune>";
    let free = "7f0000000000 default anon=9 N0=5 N1=4 kernelpagesize_kB=4";
    let bound = [
        "7f0000000000 bind:1 anon=4 dirty=4 active=0 N1=4 kernelpagesize_kB=4",
        "7f0000080000 bind:0 anon=5 dirty=5 active=0 N0=5 kernelpagesize_kB=4",
    ];
    // Bound by libvirt, which describes the cells, or by a program, whose binding only the kernel shows.
    for (extra, lines) in [
        (format!("{told}{CELLS}"), &[free][..]),
        (String::new(), &bound[..]),
    ] {
        let tree = host(&extra);
        numa_maps(&tree, lines);
        let mut host = connect(&tree, Acting::Live);
        let seen = host.sample().unwrap();
        let nodes = set("0-1");
        assert_eq!(
            seen.vms[0].immovable,
            Some(Immovable::BoundInParts { nodes: nodes.clone() })
        );
        assert_eq!(seen.vms[0].bound_to, Some(nodes));
        assert_stays(&mut host, &[0, 1]);
    }
}

#[test]
fn what_was_bound_after_the_last_sample_stays_too() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].immovable, None);
    numa_maps(
        &tree,
        &["7f0000000000 bind=static:1 anon=9 N1=9 kernelpagesize_kB=4"],
    );
    let to_0 = Action::gather(host.machine(), vm(), NodeSet::one(NodeId(0)), Pages(9));
    let outcome = host.commit(&plan(seen.version, to_0)).unwrap().outcomes.remove(0);
    assert!(
        refusal(&outcome).is_some_and(|why| why.contains("node 1")),
        "{outcome:?}"
    );
}

#[test]
fn which_policies_bind_is_what_the_operator_meant_by_them() {
    let none = (None, None);
    let one = |nodes: &str| {
        (
            Some(Immovable::BoundAtStart { nodes: set(nodes) }),
            Some(set(nodes)),
        )
    };
    let parts = |nodes: &str| {
        (
            Some(Immovable::BoundInParts { nodes: set(nodes) }),
            Some(set(nodes)),
        )
    };
    let tune =
        |mode: &str, nodes: &str| format!("<numatune><memory mode='{mode}' nodeset='{nodes}'/></numatune>");
    for (extra, policy, on, expected) in [
        // `numactl --membind`, a QEMU without a manager, a policy that names all nodes.
        (String::new(), "bind:1", "N1=9", one("1")),
        (String::new(), "bind=relative:0", "N0=9", one("0")),
        (String::new(), "bind:0-1", "N0=9", none.clone()),
        // A preferred node is only where memory is placed first; interleaved memory is spread on purpose.
        (String::new(), "prefer:1", "N1=9", none.clone()),
        (String::new(), "prefer (many):1", "N1=9", none.clone()),
        (String::new(), "interleave:0-1", "N0=5 N1=4", parts("0-1")),
        (
            String::new(),
            "weighted interleave:0-1",
            "N0=5 N1=4",
            parts("0-1"),
        ),
        (tune("strict", "1"), "default", "N1=9", one("1")),
        (tune("strict", "0-1"), "default", "N1=9", none.clone()),
        (tune("preferred", "1"), "prefer:1", "N1=9", none.clone()),
        (tune("restrictive", "1"), "default", "N1=9", none.clone()),
        (
            tune("interleave", "0-1"),
            "interleave:0-1",
            "N0=5 N1=4",
            parts("0-1"),
        ),
        // A part is bound, and the rest is elsewhere.
        (
            String::new(),
            "bind:1",
            "N1=4\n7f0000080000 default anon=5 N0=5",
            (one("1").0, Some(set("0-1"))),
        ),
    ] {
        let tree = host(&extra);
        numa_maps(
            &tree,
            &[&format!("7f0000000000 {policy} anon=9 {on} kernelpagesize_kB=4")],
        );
        let seen = connect(&tree, Acting::Live).sample().unwrap();
        let vm = &seen.vms[0];
        assert_eq!(
            (vm.immovable.clone(), vm.bound_to.clone()),
            expected,
            "{extra} {policy} {on}"
        );
    }
}

#[test]
fn memory_nodes_of_a_vm_with_bound_memory_are_left_as_they_are() {
    let tree = host(home::RESTRICTIVE);
    numa_maps(&tree, &["7f0000000000 bind:0 anon=9 N0=9 kernelpagesize_kB=4"]);
    let mut host = home::homed(&tree);
    let nodes = parsed(host.context.manager.as_mut()).numatune.unwrap().nodes;
    assert_eq!(nodes, Some(set("0")));
}

/// A VM with two huge pages of RAM, one on each node; either node's pool has room for both.
fn in_huge_pages(extra: &str) -> Tree {
    let tree = host(extra);
    let domain = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write("node.xml", &domain.replace("'KiB'>1024<", "'KiB'>4096<"));
    tree.write(
        &format!("proc/{PID}/maps"),
        "7f0000000000-7f0000400000 rw-s 00000000 00:0f 9 /dev/hugepages/libvirt/qemu/1-one/ram (deleted)\n",
    );
    numa_maps(
        &tree,
        &[
            "7f0000000000 default file=/dev/hugepages/ram\\040(deleted) huge dirty=2 N0=1 N1=1 kernelpagesize_kB=2048",
        ],
    );
    for node in 0..2 {
        let pool = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
        for file in ["nr_hugepages", "free_hugepages"] {
            tree.write(&format!("{pool}/{file}"), "9\n");
        }
    }
    tree
}

#[test]
fn huge_pages_of_a_pool_stay_unless_the_operator_says_move() {
    let said = |value: &str| {
        format!("<metadata><vm xmlns='https://homenode.dev/xmlns/vm/1' hugepages='{value}'/></metadata>")
    };
    let stays = Some(Immovable::HugePagePool {
        page_bytes: Bytes::from_mib(2),
    });
    for (extra, immovable, bound_to) in [
        (String::new(), stays.clone(), Some(set("0-1"))),
        (said("stay"), stays, Some(set("0-1"))),
        (said("move"), None, None),
    ] {
        let tree = in_huge_pages(&extra);
        let mut host = connect(&tree, Acting::Live);
        let seen = host.sample().unwrap();
        let vm = &seen.vms[0];
        assert_eq!((&vm.immovable, &vm.bound_to), (&immovable, &bound_to), "{extra}");
        if immovable.is_some() {
            assert_stays(&mut host, &[0, 1]);
        }
    }
    // Bound memory stays, even if the setting for the pool says `move`.
    let tree = in_huge_pages(&said("move"));
    numa_maps(
        &tree,
        &["7f0000000000 bind:0 file=/dev/hugepages/ram huge dirty=2 N0=2 kernelpagesize_kB=2048"],
    );
    let seen = connect(&tree, Acting::Live).sample().unwrap();
    assert_eq!(
        seen.vms[0].immovable,
        Some(Immovable::BoundAtStart { nodes: set("0") })
    );
}

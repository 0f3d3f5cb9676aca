//! `sysfs::read` on saved trees of unusual hosts.

use crate::trees::{TREES, Tree};
use homenode_machine::Machine;
use homenode_machine_files::sysfs::{read, read_confined};
use homenode_units::{Bytes, BytesPerSec, CpuId, NodeId};

fn machine(name: &str) -> Machine {
    read(Tree::saved(name).root()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns everything about a machine in a few lines, short enough to compare with the tree by eye.
fn shown(machine: &Machine) -> Vec<String> {
    let mut lines = Vec::new();
    for ((id, node), row) in machine.nodes.iter().zip(&machine.distances.rows) {
        let socket = node.socket.map_or("-".to_owned(), |socket| socket.to_string());
        lines.push(format!(
            "node {id}: socket {socket} cpus {} cores {} memory {}kB llcs {:?} distances {row:?}",
            node.cpus,
            machine.core_count(id),
            node.memory_bytes.0 / 1024,
            machine.llcs_of(id),
        ));
    }
    let llcs: Vec<String> = machine
        .llcs
        .iter()
        .map(|llc| format!("{}:{}", llc.cpus, llc.size_bytes))
        .collect();
    lines.push(format!("llcs {}", llcs.join(" ")));
    lines.extend(
        machine
            .devices
            .iter()
            .map(|device| format!("{} {} node {}", device.address, device.class, device.node)),
    );
    lines.extend(machine.notes.iter().map(|note| format!("note: {note}")));
    lines
}

fn assert_shown(name: &str, expected: &[&str]) {
    assert_eq!(shown(&machine(name)), expected, "{name}");
}

#[test]
fn every_saved_tree_is_tested() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trees");
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            entry
                .unwrap()
                .file_name()
                .to_string_lossy()
                .trim_end_matches(".tree")
                .to_owned()
        })
        .collect();
    names.sort();
    assert_eq!(names, TREES);
}

#[test]
fn a_node_without_memory() {
    assert_shown(
        "memoryless-node",
        &[
            "node 0: socket 0 cpus 0-1 cores 2 memory 982824kB llcs [0] distances [10, 20]",
            "node 1: socket 0 cpus 2-3 cores 2 memory 0kB llcs [1] distances [20, 10]",
            "llcs 0-1:8MiB 2-3:8MiB",
            "note: node 1 has no memory: homes need memory, so VMs with a home do not run on CPUs 2-3",
        ],
    );
    assert_eq!(machine("memoryless-node").memory_nodes().to_string(), "0");
}

#[test]
fn a_node_without_cpus_and_bandwidth_from_hmat() {
    assert_shown(
        "cpuless-node",
        &[
            "node 0: socket 0 cpus 0-1 cores 2 memory 514388kB llcs [0] distances [10, 21, 24]",
            "node 1: socket 1 cpus 2-3 cores 2 memory 470152kB llcs [1] distances [21, 10, 14]",
            "node 2: socket - cpus  cores 0 memory 515736kB llcs [] distances [24, 14, 10]",
            "llcs 0-1:16MiB 2-3:16MiB",
            "note: node 2 has memory but no CPU",
        ],
    );
    let machine = machine("cpuless-node");
    let bandwidth = |node| machine.nodes[NodeId(node)].memory_bandwidth;
    assert_eq!(bandwidth(0), Some(BytesPerSec(122_880_000_000)));
    assert_eq!(bandwidth(2), Some(BytesPerSec(24_576_000_000)));
    assert!(machine.nodes[NodeId(2)].cpus.is_empty());
}

#[test]
fn uneven_nodes() {
    assert_shown(
        "uneven-nodes",
        &[
            "node 0: socket 0 cpus 0 cores 1 memory 514636kB llcs [0] distances [10, 16, 22]",
            "node 1: socket - cpus 1-4 cores 4 memory 727704kB llcs [1, 2, 3, 4] distances [16, 10, 16]",
            "node 2: socket - cpus 5-6 cores 2 memory 257192kB llcs [5, 6] distances [22, 16, 10]",
            "llcs 0:16MiB 1:16MiB 2:16MiB 3:16MiB 4:16MiB 5:16MiB 6:16MiB",
        ],
    );
}

#[test]
fn hyperthreads_share_a_core() {
    assert_shown(
        "hyperthreads",
        &[
            "node 0: socket 0 cpus 0-3 cores 2 memory 255844kB llcs [0] distances [10, 20, 20, 20]",
            "node 1: socket 1 cpus 4-7 cores 2 memory 256880kB llcs [1] distances [20, 10, 20, 20]",
            "node 2: socket 2 cpus 8-11 cores 2 memory 256880kB llcs [2] distances [20, 20, 10, 20]",
            "node 3: socket 3 cpus 12-15 cores 2 memory 211420kB llcs [3] distances [20, 20, 20, 10]",
            "llcs 0-3:16MiB 4-7:16MiB 8-11:16MiB 12-15:16MiB",
        ],
    );
    let machine = machine("hyperthreads");
    assert_eq!((machine.threads_per_core(), machine.cpus.len()), (2, 16));
    let core = |cpu| machine.cpu(CpuId(cpu)).unwrap().core;
    assert_eq!((core(2), core(3), core(4)), (1, 1, 2));
}

#[test]
fn offline_cpus_are_left_out_and_said() {
    assert_shown(
        "offline-cpus",
        &[
            "node 0: socket 0 cpus 0-2 cores 2 memory 468620kB llcs [0] distances [10, 21]",
            "node 1: socket 1 cpus 4-5,7 cores 2 memory 514744kB llcs [1] distances [21, 10]",
            "llcs 0-2:16MiB 4-5,7:16MiB",
            "note: CPUs 3,6 are offline and left out",
        ],
    );
    let machine = machine("offline-cpus");
    assert_eq!(machine.cpu(CpuId(3)), None);
    // The sibling of CPU 2 is offline; CPUs 0 and 1 still have theirs.
    let core = |cpu| machine.cpu(CpuId(cpu)).unwrap().core;
    assert_eq!((core(0), core(1), core(2), core(4), core(7)), (0, 0, 1, 2, 3));
}

#[test]
fn nodes_that_share_a_socket_and_its_cache() {
    assert_shown(
        "sub-numa-clusters",
        &[
            "node 0: socket 0 cpus 0-1 cores 2 memory 256340kB llcs [0] distances [10, 12, 20, 20]",
            "node 1: socket 0 cpus 2-3 cores 2 memory 257376kB llcs [0] distances [12, 10, 20, 20]",
            "node 2: socket 1 cpus 4-5 cores 2 memory 257376kB llcs [1] distances [20, 20, 10, 12]",
            "node 3: socket 1 cpus 6-7 cores 2 memory 211920kB llcs [1] distances [20, 20, 12, 10]",
            "llcs 0-3:16MiB 4-7:16MiB",
        ],
    );
}

#[test]
fn devices_are_on_their_nodes() {
    assert_shown(
        "testbed",
        &[
            "node 0: socket 0 cpus 0 cores 1 memory 985460kB llcs [0] distances [10, 16, 22, 16]",
            "node 1: socket 0 cpus 1 cores 1 memory 966100kB llcs [1] distances [16, 10, 16, 22]",
            "node 2: socket 0 cpus 2 cores 1 memory 1031768kB llcs [2] distances [22, 16, 10, 16]",
            "node 3: socket 0 cpus 3 cores 1 memory 1030940kB llcs [3] distances [16, 22, 16, 10]",
            "llcs 0:8MiB 1:8MiB 2:8MiB 3:8MiB",
            "0000:40:00.0 0x060400 node 2",
            "0000:41:00.0 0x020000 node 2",
        ],
    );
}

#[test]
fn the_host_is_what_is_online_whatever_the_reading_process_may_use() {
    assert_shown(
        "cpuset-restricted",
        &[
            "node 0: socket 0 cpus 0 cores 1 memory 985460kB llcs [0] distances [10, 16, 22, 16]",
            "node 1: socket 0 cpus 1 cores 1 memory 966100kB llcs [1] distances [16, 10, 16, 22]",
            "node 2: socket 0 cpus 2 cores 1 memory 1031768kB llcs [2] distances [22, 16, 10, 16]",
            "node 3: socket 0 cpus 3 cores 1 memory 1030940kB llcs [3] distances [16, 22, 16, 10]",
            "llcs 0:8MiB 1:8MiB 2:8MiB 3:8MiB",
            "0000:40:00.0 0x060400 node 2",
            "0000:41:00.0 0x020000 node 2",
        ],
    );
    // An affinity of the process, as set by a service manager's CPUAffinity=, does not limit the host either.
    let tree = Tree::saved("testbed");
    tree.write(
        "proc/self/status",
        b"Cpus_allowed_list:\t0,2\nMems_allowed_list:\t0\n",
    );
    let whole = read(tree.root()).unwrap();
    assert_eq!(
        (whole.cpu_set().to_string(), whole.memory_nodes().to_string()),
        ("0-3".into(), "0-3".into())
    );
    let confined = read_confined(tree.root()).unwrap();
    assert_eq!(
        (
            confined.cpu_set().to_string(),
            confined.memory_nodes().to_string()
        ),
        ("0,2".into(), "0".into())
    );
}

#[test]
fn isolated_cpus_are_told_apart_and_said() {
    let tree = Tree::saved("testbed");
    for (isolated, expected) in [("1,3\n", "1,3"), ("2-7\n", "2-3"), ("\n", ""), ("", "")] {
        tree.write("sys/devices/system/cpu/isolated", isolated.as_bytes());
        let machine = read(tree.root()).unwrap();
        assert_eq!(machine.isolated.to_string(), expected);
        assert_eq!(
            machine.cpu_set().to_string(),
            "0-3",
            "they are the host's all the same"
        );
        let is_said = machine
            .notes
            .iter()
            .any(|note| note.contains("isolated (isolcpus=)"));
        assert_eq!(is_said, !expected.is_empty(), "{:?}", machine.notes);
    }
    tree.write("sys/devices/system/cpu/isolated", b"many\n");
    assert!(
        read(tree.root())
            .unwrap_err()
            .to_string()
            .contains("cpu/isolated")
    );
}

#[test]
fn a_process_that_measures_leaves_out_what_its_cpuset_keeps_from_it() {
    let confined = read_confined(Tree::saved("cpuset-restricted").root()).unwrap();
    assert_eq!(
        shown(&confined),
        [
            "node 0: socket 0 cpus  cores 0 memory 985460kB llcs [] distances [10, 16, 22, 16]",
            "node 1: socket 0 cpus  cores 0 memory 966100kB llcs [] distances [16, 10, 16, 22]",
            "node 2: socket 0 cpus 2 cores 1 memory 1031768kB llcs [0] distances [22, 16, 10, 16]",
            "node 3: socket 0 cpus 3 cores 1 memory 1030940kB llcs [1] distances [16, 22, 16, 10]",
            "llcs 2:8MiB 3:8MiB",
            "0000:40:00.0 0x060400 node 2",
            "0000:41:00.0 0x020000 node 2",
            "note: CPUs 0-1 are online, but not in the cpuset of this process; left out",
            "note: nodes 0-1 have memory that the cpuset of this process excludes",
        ],
    );
    assert_eq!(confined.node_set().to_string(), "0-3");
    assert_eq!(confined.memory_nodes().to_string(), "2-3");
    assert_eq!(confined.cpu_set().to_string(), "2-3");
}

#[test]
fn node_numbers_with_gaps() {
    assert_shown(
        "gaps-in-node-numbers",
        &[
            "node 0: socket 0 cpus 0-3 cores 1 memory 268435456kB llcs [0] distances [10, 40, 80, 80, 80, 80]",
            "node 8: socket 8 cpus 4-7 cores 1 memory 268435456kB llcs [1] distances [40, 10, 80, 80, 80, 80]",
            "node 252: socket - cpus  cores 0 memory 16515072kB llcs [] distances [80, 80, 10, 80, 80, 80]",
            "node 253: socket - cpus  cores 0 memory 16515072kB llcs [] distances [80, 80, 80, 10, 80, 80]",
            "node 254: socket - cpus  cores 0 memory 16515072kB llcs [] distances [80, 80, 80, 80, 10, 80]",
            "node 255: socket - cpus  cores 0 memory 16515072kB llcs [] distances [80, 80, 80, 80, 80, 10]",
            "llcs 0-3:10MiB 4-7:10MiB",
            "0004:04:00.0 0x030200 node 0",
            "0035:03:00.0 0x030200 node 8",
            "note: nodes 252-255 have memory but no CPU",
        ],
    );
    let machine = machine("gaps-in-node-numbers");
    assert_eq!(machine.name, "power9");
    assert_eq!(machine.distance(NodeId(8), NodeId(255)), Some(80));
    assert_eq!((machine.threads_per_core(), machine.llcs[0].line_bytes), (4, 128));
}

#[test]
fn a_kernel_without_numa_is_one_node() {
    assert_shown(
        "no-numa",
        &[
            "node 0: socket 0 cpus 0-1 cores 2 memory 2010268kB llcs [0] distances [10]",
            "llcs 0-1:8MiB",
            "note: the kernel reports no NUMA nodes: the whole host is treated as node 0",
        ],
    );
}

#[test]
fn rows_longer_than_the_online_nodes_older_files_and_strange_packages() {
    assert_shown(
        "long-distance-rows",
        &[
            "node 0: socket 0 cpus 0-3 cores 4 memory 8388608kB llcs [0, 1] distances [10, 31]",
            "node 2: socket 1 cpus 4-7 cores 4 memory 8388608kB llcs [2, 3] distances [31, 10]",
            "llcs 0-1:16MiB 2-3:16MiB 4-5:16MiB 6-7:16MiB",
            "0000:01:00.0 0x010802 node 2",
            "note: devices left out because their node is not online: 0000:81:00.0 (node 3)",
        ],
    );
}

#[test]
fn this_host_reads() {
    let machine = read(std::path::Path::new("/")).expect("this host");
    assert!(!machine.cpus.is_empty() && !machine.nodes.is_empty());
}

#[test]
fn memory_of_a_node_is_what_meminfo_says() {
    assert_eq!(
        machine("no-numa").nodes[NodeId(0)].memory_bytes,
        Bytes(2_010_268 * 1024)
    );
}

#[test]
fn caches_of_a_node_are_told_apart() {
    let machine = machine("ccx-in-node");
    assert_eq!((machine.nodes.len(), machine.llcs.len()), (2, 4));
    assert_eq!(machine.llcs_of(NodeId(1)), [2, 3]);
}

#[test]
fn memory_without_cpus_is_no_home_and_its_latency_is_read() {
    let machine = machine("cxl-node");
    assert_eq!(machine.memory_nodes().to_string(), "0,2");
    assert_eq!(machine.home_nodes().to_string(), "0");
    assert_eq!(machine.nodes[NodeId(0)].memory_ns, Some(100.0));
    assert_eq!(machine.nodes[NodeId(2)].memory_ns, Some(250.0));
    // Firmware that does not know the latency prints 0.
    let tree = Tree::saved("cxl-node");
    tree.write(
        "sys/devices/system/node/node2/access0/initiators/read_latency",
        b"0\n",
    );
    assert_eq!(read(tree.root()).unwrap().nodes[NodeId(2)].memory_ns, None);
}

#[test]
fn a_cache_of_which_nobody_says_who_shares_it_is_each_cpus_own() {
    let note = "the kernel does not report which CPUs share some last-level caches; each CPU is assumed to have its own";
    let hidden = machine("empty-shared-list");
    assert_eq!(hidden.llcs.len(), hidden.cpus.len());
    assert!(hidden.notes.contains(&note.to_owned()), "{:?}", hidden.notes);
    // A list without the CPU itself counts as missing.
    let tree = Tree::saved("ccx-in-node");
    tree.write(
        "sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
        b"6-7\n",
    );
    let wrong = read(tree.root()).unwrap();
    assert_eq!(wrong.llcs[0].cpus.to_string(), "0");
    assert!(wrong.notes.contains(&note.to_owned()), "{:?}", wrong.notes);
}

#[test]
fn a_cache_whose_sharers_are_a_mask_alone() {
    let old = machine("shared-map-only");
    let llcs: Vec<String> = old.llcs.iter().map(|llc| llc.cpus.to_string()).collect();
    assert_eq!(llcs, ["0-3", "4-7"]);
    assert_eq!(old.notes, Vec::<String>::new());
    // A mask is a list of words for 32 CPUs each, the highest word first.
    let tree = Tree::saved("shared-map-only");
    let path = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_map");
    (0..8).for_each(|cpu| tree.write(&path(cpu), b"00000001,00000000,000000ff\n"));
    assert_eq!(read(tree.root()).unwrap().llcs.len(), 1);
    tree.write(&path(3), b"00000000,0000000g\n");
    let error = read(tree.root()).unwrap_err().to_string();
    assert!(
        error.contains("shared_cpu_map") && error.contains("a mask of CPUs"),
        "{error}"
    );
}

#[test]
fn a_gpus_memory_is_not_for_vms() {
    let gpus = machine("gpu-memory-nodes");
    assert_eq!(gpus.memory_nodes().to_string(), "0-1");
    assert_eq!(
        gpus.notes,
        [
            "nodes 250-251 have a device's memory, which is not for VMs",
            "nodes 2-3 have neither CPUs nor memory",
            "nodes 250-251 have memory but no CPU",
        ]
    );
    // A device whose driver keeps the memory prints -1; a device without a driver has no such file.
    let tree = Tree::saved("gpu-memory-nodes");
    tree.write(
        "proc/driver/nvidia/gpus/0004:04:00.0/numa_status",
        b"Node: -1\nStatus: offline\n",
    );
    tree.remove("proc/driver/nvidia/gpus/0035:03:00.0/numa_status");
    assert_eq!(
        read(tree.root()).unwrap().memory_nodes().to_string(),
        "0-1,250-251"
    );
}

#[test]
fn a_nul_behind_a_list_is_white_space() {
    let old = machine("nul-after-list");
    assert_eq!((old.nodes.len(), old.cpus.len()), (2, 4));
    let tree = Tree::saved("nul-after-list");
    for file in [
        "cpu/online",
        "cpu/present",
        "node/node0/cpulist",
        "cpu/cpu1/topology/core_cpus_list",
    ] {
        let path = format!("sys/devices/system/{file}");
        let mut text = std::fs::read(tree.root().join(&path)).unwrap();
        text.push(0);
        tree.write(&path, &text);
    }
    assert_eq!(read(tree.root()).unwrap().nodes, old.nodes);
}

#[test]
fn of_fake_nodes_a_cpu_is_in_the_one_that_it_links() {
    let fake = machine("numa-fake");
    let cpus: Vec<String> = fake.nodes.values().map(|node| node.cpus.to_string()).collect();
    assert_eq!(cpus, ["0-1", "2-3"]);
    // If no file tells which node a CPU belongs to, the error says so.
    let tree = Tree::saved("numa-fake");
    tree.remove("sys/devices/system/cpu/cpu3/node1");
    let error = read(tree.root()).unwrap_err().to_string();
    assert!(error.contains("nodes 0 and 1 both list CPU 3"), "{error}");
}

#[test]
fn a_host_may_be_called_anything() {
    assert_eq!(machine("odd-host-name").name, "db_1-prod--");
    let tree = Tree::saved("odd-host-name");
    for (bytes, name) in [
        (&b"\xff\xfe\n"[..], "host"),
        (b"\x1b[31mred\n", "--31mred"),
        (b"", "host"),
        (b"(none)\n", "(none)"),
        (&[b'x'; 300], &"x".repeat(64)),
    ] {
        tree.write("proc/sys/kernel/hostname", bytes);
        assert_eq!(read(tree.root()).unwrap().name, name);
    }
}

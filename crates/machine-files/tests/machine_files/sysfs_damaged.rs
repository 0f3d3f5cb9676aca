//! `sysfs::read` on trees with missing, malformed, hostile and damaged files.

use crate::trees::{TREES, Tree};
use homenode_machine::MachineError;
use homenode_machine_files::sysfs::{SysfsError, read, read_confined};
use homenode_units::CpuId;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Reads a tree after a change that must make reading fail.
fn refused(name: &str, change: impl FnOnce(&Tree)) -> (SysfsError, String) {
    let tree = Tree::saved(name);
    change(&tree);
    let error = read_confined(tree.root()).expect_err("must be refused");
    let text = error.to_string().replace(tree.root().to_str().unwrap(), "ROOT");
    (error, text)
}

#[test]
fn a_tree_without_cpus_is_refused() {
    let empty = Tree::unpack("");
    assert!(matches!(read(empty.root()), Err(SysfsError::Missing { .. })));
    assert!(matches!(
        read(&empty.root().join("none")),
        Err(SysfsError::Missing { .. })
    ));
    let (error, text) = refused("testbed", |tree| tree.remove("sys/devices/system/cpu/cpu2"));
    assert!(matches!(error, SysfsError::Missing { .. }));
    assert_eq!(
        text,
        "ROOT/sys/devices/system/cpu/cpu2: missing; the kernel counts the CPU as online"
    );
    let (error, _) = refused("testbed", |tree| {
        tree.write("proc/self/status", b"Cpus_allowed_list:\t9\n");
    });
    assert!(
        matches!(
            error,
            SysfsError::Impossible {
                error: MachineError::NoCpus { .. },
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn malformed_files_are_named_with_what_was_expected() {
    let node = "sys/devices/system/node";
    let cpu = "sys/devices/system/cpu";
    let device = "sys/bus/pci/devices/0000:41:00.0";
    let tree = Tree::saved("testbed");
    for (path, contents, expected) in [
        (
            format!("{cpu}/online"),
            "0-x",
            "`0-x` is not a list of CPUs such as `0-3,8`",
        ),
        (format!("{cpu}/present"), "-", "`-` is not a list of CPUs"),
        (
            format!("{node}/online"),
            "zero",
            "`zero` is not a list of nodes such as `0-1`",
        ),
        (format!("{node}/possible"), "0-99999999", "is not a list of nodes"),
        (
            format!("{node}/node1/cpulist"),
            "1-0",
            "`1-0` is not a list of CPUs",
        ),
        (format!("{node}/node1/cpulist"), "2", "no node lists CPU 1"),
        (
            format!("{node}/node2/cpulist"),
            "1-2",
            "`nodes 1 and 2 both list CPU 1` is not valid: each CPU must be on only one node",
        ),
        (
            format!("{node}/node1/meminfo"),
            "Node 1 MemFree: 4 kB",
            "is not a text with the line `Node 1 MemTotal: 1024 kB`",
        ),
        (
            format!("{node}/node1/meminfo"),
            "Node 1 MemTotal: many kB",
            "`many kB` is not",
        ),
        (
            format!("{node}/node1/meminfo"),
            "Node 1 MemTotal: 18446744073709551615 kB",
            "is not",
        ),
        (
            format!("{node}/node1/distance"),
            "16 10 a 22",
            "`16 10 a 22` is not a row of distances such as `10 20`",
        ),
        (
            format!("{node}/node1/distance"),
            "",
            "`` is not a row of distances",
        ),
        (
            format!("{node}/node1/distance"),
            "16 10",
            "`16 10` is not a row of 4 distances, one for each online node",
        ),
        (
            format!("{node}/node1/access0/initiators/read_bandwidth"),
            "fast",
            "`fast` is not a bandwidth in MB/s",
        ),
        (
            format!("{cpu}/cpu1/topology/core_cpus_list"),
            "one",
            "`one` is not a list of CPUs",
        ),
        (
            format!("{cpu}/cpu1/topology/core_cpus_list"),
            "2",
            "`2` is not a list of the core's CPUs that includes CPU 1",
        ),
        (
            format!("{cpu}/cpu1/topology/physical_package_id"),
            "0x",
            "`0x` is not a package number, or -1",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/level"),
            "L3",
            "`L3` is not a cache level",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/type"),
            "Victim",
            "`Victim` is not `Data`, `Instruction` or `Unified`",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/size"),
            "8 MB",
            "`8 MB` is not a size such as `8192K`",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/ways_of_associativity"),
            "full",
            "is not a number of ways",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/coherency_line_size"),
            "-64",
            "is not a line size in bytes",
        ),
        (
            format!("{cpu}/cpu1/cache/index3/shared_cpu_list"),
            "all",
            "`all` is not a list of CPUs",
        ),
        (
            format!("{device}/numa_node"),
            "two",
            "`two` is not a node number, or -1",
        ),
        (
            format!("{device}/numa_node"),
            "-7",
            "`-7` is not a node number, or -1",
        ),
        (
            format!("{device}/class"),
            "network",
            "`network` is not a class such as `0x020000`",
        ),
        (
            "proc/self/status".to_owned(),
            "Cpus_allowed_list:\tall\n",
            "`all` is not a list of CPUs",
        ),
        (
            "proc/self/status".to_owned(),
            "Mems_allowed_list:\tall\n",
            "`all` is not a list of nodes",
        ),
        (
            "proc/meminfo".to_owned(),
            "MemTotal: 1 GB\n",
            "`1 GB` is not a text with the line",
        ),
    ] {
        let whole = std::fs::read(tree.root().join(&path)).ok();
        tree.write(&path, contents.as_bytes());
        let error = read_confined(tree.root()).expect_err("must be refused");
        let text = error.to_string().replace(tree.root().to_str().unwrap(), "ROOT");
        match whole {
            Some(whole) => tree.write(&path, &whole),
            None => tree.remove(&path),
        }
        assert!(matches!(error, SysfsError::Malformed { .. }), "{path}: {text}");
        assert!(
            text.starts_with("ROOT/sys") || text.starts_with("ROOT/proc"),
            "{text}"
        );
        assert!(text.contains(expected), "{path}: {text}");
    }
}

#[test]
fn a_distance_below_10_is_refused_with_the_root() {
    let (error, text) = refused("testbed", |tree| {
        tree.write("sys/devices/system/node/node1/distance", b"16 10 1 22\n");
    });
    assert!(matches!(
        error,
        SysfsError::Impossible {
            error: MachineError::Distance { distance: 1, .. },
            ..
        }
    ));
    assert!(
        text.starts_with("ROOT: machine host: distance from node 1 to node 2 is 1"),
        "{text}"
    );
}

#[test]
fn files_that_must_be_there() {
    for file in ["cpulist", "meminfo"] {
        let path = format!("sys/devices/system/node/node1/{file}");
        let (error, text) = refused("testbed", |tree| tree.remove(&path));
        assert!(
            matches!(error, SysfsError::Missing { .. }) && text.contains(&path),
            "{text}"
        );
    }
    let (error, text) = refused("testbed", |tree| tree.remove("sys/devices/system/cpu/online"));
    assert!(
        matches!(error, SysfsError::Missing { .. }) && text.contains("cpu/online: missing"),
        "{text}"
    );
}

#[test]
fn files_that_may_be_missing() {
    let tree = Tree::saved("testbed");
    for path in [
        "sys/devices/system/cpu/present",
        "sys/devices/system/node/online",
        "sys/devices/system/node/possible",
        "sys/devices/system/node/node1/distance",
        "sys/devices/system/cpu/cpu1/topology",
        "sys/devices/system/cpu/cpu1/cache",
        "sys/bus/pci/devices/0000:41:00.0/class",
        "proc/self/status",
        "proc/meminfo",
    ] {
        tree.remove(path);
    }
    let machine = read(tree.root()).unwrap();
    assert_eq!(
        (machine.nodes.len(), machine.cpus.len(), machine.llcs.len()),
        (4, 4, 3)
    );
    assert_eq!(machine.cpu(CpuId(1)).unwrap().llc, None);
    assert_eq!(machine.distances.rows[1], [20, 10, 20, 20]);
    assert_eq!(
        machine.notes,
        ["the kernel does not report distances; all other nodes are assumed to be equally far"]
    );
    assert!(
        machine
            .devices
            .iter()
            .all(|device| device.address != "0000:41:00.0")
    );
    tree.remove("sys/bus");
    tree.remove("sys/devices/system/cpu/cpu0/cache/index3/size");
    let machine = read(tree.root()).unwrap();
    assert!(machine.devices.is_empty());
    assert_eq!(machine.llcs.len(), 2);
    assert!(
        machine
            .notes
            .iter()
            .any(|note| note.contains("size of some last-level caches"))
    );
}

#[test]
fn absent_package_numbers_are_not_numbers() {
    for absent in ["-1", "65535", "4294967295"] {
        let tree = Tree::saved("hyperthreads");
        for cpu in 0..16 {
            tree.write(
                &format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
                absent.as_bytes(),
            );
        }
        let machine = read(tree.root()).unwrap();
        assert!(
            machine.nodes.values().all(|node| node.socket.is_none()),
            "{absent}"
        );
        assert_eq!(machine.cpus[0].socket, 0);
    }
}

#[test]
fn a_huge_file_is_not_swallowed() {
    let (error, text) = refused("testbed", |tree| {
        let path = tree.root().join("sys/devices/system/cpu/online");
        std::fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(1 << 30)
            .unwrap();
    });
    assert!(matches!(error, SysfsError::TooLarge { .. }), "{text}");
    assert_eq!(
        text,
        "ROOT/sys/devices/system/cpu/online: more than 64 KiB, which no kernel produces"
    );
}

#[test]
fn a_directory_in_place_of_a_file_is_refused() {
    let (error, text) = refused("testbed", |tree| {
        tree.remove("sys/devices/system/node/node1/cpulist");
        tree.write("sys/devices/system/node/node1/cpulist/x", b"");
    });
    assert!(
        matches!(error, SysfsError::Malformed { .. }) && text.contains("node1/cpulist"),
        "{text}"
    );
}

#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_followed_is_unreadable() {
    let (error, text) = refused("testbed", |tree| {
        let path = tree.root().join("sys/devices/system/node/node1/cpulist");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
    });
    assert!(
        matches!(error, SysfsError::Unreadable { .. }) && text.contains("node1/cpulist: cannot be read"),
        "{text}"
    );
}

/// Returns true if the reader uses this file; the trees contain more.
fn is_read(path: &str) -> bool {
    const NAMES: [&str; 20] = [
        "online",
        "possible",
        "present",
        "cpulist",
        "meminfo",
        "distance",
        "read_bandwidth",
        "core_cpus_list",
        "thread_siblings_list",
        "physical_package_id",
        "level",
        "type",
        "size",
        "ways_of_associativity",
        "coherency_line_size",
        "shared_cpu_list",
        "numa_node",
        "class",
        "status",
        "hostname",
    ];
    NAMES.contains(&path.rsplit('/').next().unwrap_or_default())
}

#[derive(Clone, Debug)]
enum Damage {
    CutAt(usize),
    ReplacedBy(Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        any::<usize>().prop_map(Damage::CutAt),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Damage::ReplacedBy),
        "[-0-9, KkBx\\n]{0,30}".prop_map(|text| Damage::ReplacedBy(text.into_bytes())),
    ]
}

/// Each tree has hundreds of files, so it is unpacked only once; each file is restored after its turn.
#[test]
fn any_file_cut_or_replaced_gives_a_machine_or_an_error_that_names_a_path() {
    let trees = TREES.map(Tree::saved);
    let read_files = |at: usize| {
        trees[at]
            .files()
            .into_iter()
            .filter(|path| is_read(path))
            .map(move |path| (at, path))
    };
    let files: Vec<(usize, String)> = (0..trees.len()).flat_map(read_files).collect();
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 300,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(
        &(prop::sample::select(files), damage()),
        |((at, path), damage)| {
            let tree = &trees[at];
            let whole = std::fs::read(tree.root().join(&path)).unwrap();
            let damaged = match damage {
                Damage::CutAt(length) => whole[..length % (whole.len() + 1)].to_vec(),
                Damage::ReplacedBy(garbage) => garbage,
            };
            tree.write(&path, &damaged);
            let result = read(tree.root());
            tree.write(&path, &whole);
            if let Err(error) = result {
                let text = error.to_string();
                let named = text.starts_with(tree.root().to_str().unwrap());
                prop_assert!(named && !text.contains('\n'), "{path}: {text}");
            }
            Ok(())
        },
    );
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

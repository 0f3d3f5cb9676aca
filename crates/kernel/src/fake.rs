//! A handmade tree and a small machine for tests.

mod resctrl;

pub use resctrl::{empty_group, fake_resctrl, refuse_schemata, resctrl_says};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use homenode_machine::{Cpu, Distances, Machine, Node};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId};

use crate::trackers::damon::KDAMONDS;

/// A directory tree that is removed when the value is dropped.
pub struct Tree(tempfile::TempDir);

impl Tree {
    /// Creates a tree with these files.
    pub fn new(files: &[(&str, &str)]) -> Tree {
        // In memory if the host has such a file system, because tests sync journals hundreds of times.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let tree = Tree(dir.expect("a temporary directory"));
        for (path, text) in files {
            tree.write(path, text);
        }
        tree
    }

    /// Writes a file, and the directories above it.
    pub fn write(&self, path: &str, text: &str) -> PathBuf {
        let full = self.0.path().join(path);
        std::fs::create_dir_all(full.parent().expect("a file lies in a directory")).expect("directories");
        std::fs::write(&full, text).expect("a file");
        full
    }

    /// The tree's root.
    pub fn root(&self) -> &Path {
        self.0.path()
    }
}

/// Returns a machine with one node for each entry, on that socket, with one CPU each.
pub fn machine(sockets: &[u16]) -> Machine {
    let one = |(at, socket): (usize, &u16)| (*socket, CpuSet::one(CpuId(at as u32)));
    machine_of(&sockets.iter().enumerate().map(one).collect::<Vec<_>>())
}

/// Returns a machine with one node for each entry, on that socket, with these CPUs.
pub fn machine_of(nodes: &[(u16, CpuSet)]) -> Machine {
    let node = |at: usize| Node {
        cpus: nodes[at].1.clone(),
        memory_bytes: Bytes::from_gib(1),
        memory_bandwidth: None,
        memory_ns: None,
        socket: Some(nodes[at].0),
    };
    let cpus_of = |at: usize| {
        let cpu = move |id: CpuId| Cpu {
            id,
            node: NodeId(at as u16),
            socket: nodes[at].0,
            core: id.0,
            llc: None,
        };
        nodes[at].1.iter().map(cpu).collect::<Vec<_>>()
    };
    let count = nodes.len();
    let mut cpus: Vec<Cpu> = (0..count).flat_map(cpus_of).collect();
    cpus.sort_by_key(|cpu| cpu.id);
    Machine {
        name: "test".into(),
        nodes: (0..count).map(|at| (NodeId(at as u16), node(at))).collect(),
        memory_allowed: (0..count).map(|at| NodeId(at as u16)).collect(),
        isolated: CpuSet::new(),
        cpus,
        llcs: vec![],
        distances: Distances {
            rows: (0..count)
                .map(|i| (0..count).map(|j| if i == j { 10 } else { 20 }).collect())
                .collect(),
        },
        links: vec![],
        routes: vec![],
        devices: vec![],
        notes: vec![],
        hardware: None,
    }
    .checked()
    .unwrap()
}

/// Returns a `stat` line with this name, state, start time and CPU.
pub fn stat(tid: i32, comm: &str, state: char, start_ticks: u64, cpu: u32) -> String {
    format!(
        "{tid} ({comm}) {state} 1 1 1 0 -1 0 0 0 0 0 70 30 0 0 20 0 9 0 {start_ticks} 1000 10 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0 0 0 0\n"
    )
}

/// Writes one thread of a process into a tree.
pub fn write_thread(tree: &Tree, pid: i32, tid: i32, comm: &str, cpus: &str) {
    let dir = format!("proc/{pid}/task/{tid}");
    tree.write(&format!("{dir}/comm"), &format!("{comm}\n"));
    tree.write(&format!("{dir}/stat"), &stat(tid, comm, 'S', 77, 1));
    tree.write(&format!("{dir}/schedstat"), "5000 700 3\n");
    tree.write(
        &format!("{dir}/status"),
        &format!("Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n"),
    );
}

/// Creates the files of a kernel's DAMON. All directories exist from the start, because writing a number does not make them here
/// as it does in the kernel.
pub fn mount_damon(tree: &Tree, kdamonds: &str) {
    let context = "0/contexts/0";
    let files = [
        "0/state",
        "0/contexts/nr_contexts",
        "0/contexts/0/operations",
        "0/contexts/0/monitoring_attrs/intervals/sample_us",
        "0/contexts/0/monitoring_attrs/intervals/aggr_us",
        "0/contexts/0/monitoring_attrs/intervals/update_us",
        "0/contexts/0/monitoring_attrs/nr_regions/min",
        "0/contexts/0/monitoring_attrs/nr_regions/max",
        "0/contexts/0/targets/nr_targets",
        "0/contexts/0/targets/0/pid_target",
        "0/contexts/0/targets/0/regions/nr_regions",
        "0/contexts/0/targets/0/regions/0/start",
        "0/contexts/0/targets/0/regions/0/end",
        "0/contexts/0/schemes/nr_schemes",
        "0/contexts/0/schemes/0/action",
        "0/contexts/0/schemes/0/access_pattern/sz/max",
        "0/contexts/0/schemes/0/access_pattern/nr_accesses/max",
        "0/contexts/0/schemes/0/access_pattern/age/max",
    ];
    for file in files {
        tree.write(&format!("{KDAMONDS}/{file}"), "");
    }
    tree.write(&format!("{KDAMONDS}/nr_kdamonds"), kdamonds);
    tree.write(&format!("{KDAMONDS}/0/pid"), "77\n");
    tree.write(
        &format!("{KDAMONDS}/{context}/avail_operations"),
        "vaddr\nfvaddr\npaddr\n",
    );
    let tried = format!("{KDAMONDS}/{context}/schemes/0/tried_regions");
    tree.write(&format!("{tried}/total_bytes"), "0\n");
    // Numbers have holes, and the second region reaches beyond the range, as may happen in the kernel.
    for (number, start, end, found) in [(3, 0x1_0000, 0x1_4000, 20), (7, 0x1_4000, 0x2_4000, 3)] {
        for (file, value) in [("start", start), ("end", end), ("nr_accesses", found), ("age", 1)] {
            tree.write(&format!("{tried}/{number}/{file}"), &format!("{value}\n"));
        }
    }
}

/// Returns every file of the tree's DAMON with its text.
pub fn damon_files(tree: &Tree) -> BTreeMap<PathBuf, String> {
    let mut dirs = vec![tree.root().join(KDAMONDS)];
    let mut files = BTreeMap::new();
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => dirs.push(path),
                path => drop(files.insert(path.clone(), std::fs::read_to_string(path).unwrap())),
            }
        }
    }
    files
}

/// Returns how nodes used one page: which node it is on, the number of samples by node, and how many of them wrote.
#[cfg(test)]
pub(crate) fn page_use(frame: u64, on: u16, samples: &[(u16, u32)], writes: u32) -> homenode_host::PageUse {
    let samples = samples
        .iter()
        .map(|(node, count)| (homenode_units::NodeId(*node), *count));
    homenode_host::PageUse {
        frame,
        pages: homenode_units::Pages(1),
        on: homenode_units::NodeId(on),
        samples: samples.collect(),
        writes,
    }
}

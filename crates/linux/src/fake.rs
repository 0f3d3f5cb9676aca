//! A handmade tree and a small machine for tests.

use std::path::{Path, PathBuf};

use homenode_machine::{Cpu, Distances, Machine, Node};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId};

/// A directory that vanishes with the value.
pub struct Tree(tempfile::TempDir);

impl Tree {
    /// A tree with these files.
    pub fn new(files: &[(&str, &str)]) -> Tree {
        // In memory where the host has such a file system: journals are synced hundreds of times.
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

/// Nodes with one CPU each, on these sockets.
pub fn machine(sockets: &[u16]) -> Machine {
    let node = |at: usize| Node {
        cpus: CpuSet::one(CpuId(at as u32)),
        memory_bytes: Bytes::from_gib(1),
        memory_bandwidth: None,
        memory_ns: None,
        socket: Some(sockets[at]),
    };
    let cpu = |at: usize| Cpu {
        id: CpuId(at as u32),
        node: NodeId(at as u16),
        socket: sockets[at],
        core: at as u32,
        llc: None,
    };
    let count = sockets.len();
    Machine {
        name: "test".into(),
        nodes: (0..count).map(|at| (NodeId(at as u16), node(at))).collect(),
        memory_allowed: (0..count).map(|at| NodeId(at as u16)).collect(),
        isolated: CpuSet::new(),
        cpus: (0..count).map(cpu).collect(),
        llcs: vec![],
        distances: Distances {
            rows: (0..count)
                .map(|i| (0..count).map(|j| if i == j { 10 } else { 20 }).collect())
                .collect(),
        },
        links: vec![],
        devices: vec![],
        notes: vec![],
        hardware: None,
    }
    .checked()
    .unwrap()
}

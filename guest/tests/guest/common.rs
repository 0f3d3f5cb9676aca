//! A topology page in a file, as a host would publish it to a guest, for programs under test.

use std::path::PathBuf;
use std::process::Command;

use homenode_topology_page::{Facts, Mapping, Publisher, Topology};
use homenode_units::NodeId;

/// Number of virtual nodes, and of host nodes.
pub(crate) const NODES: u16 = 4;
/// Number of vCPUs of the emulated VM. It exceeds the number of this machine's CPUs.
const VCPUS: u16 = 256;

/// The file of a topology page, opened for writing.
pub(crate) struct Page {
    directory: tempfile::TempDir,
    mapping: Mapping,
    sequence: u64,
}

impl Page {
    /// Creates a page with all vCPUs on this node.
    pub(crate) fn new(node: u16) -> Page {
        let directory = tempfile::tempdir().expect("a directory");
        let options = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(directory.path().join("page"));
        let mapping = Mapping::new(&options.expect("a file")).expect("mapped");
        let mut page = Page {
            directory,
            mapping,
            sequence: 0,
        };
        page.put_vcpus_on(node);
        page
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("page")
    }

    /// Publishes that all vCPUs are on this host node, and each virtual node's memory on the host node of the same number.
    pub(crate) fn put_vcpus_on(&mut self, node: u16) {
        self.put_vcpus(|_| node);
    }

    /// Publishes that each vCPU is on the host node of its own number, modulo the number of nodes.
    #[allow(dead_code, reason = "for the benchmark")]
    pub(crate) fn put_each_vcpu_on_its_node(&mut self) {
        self.put_vcpus(|vcpu| vcpu % NODES);
    }

    fn put_vcpus(&mut self, node: impl Fn(u16) -> u16) {
        let distances = (0..NODES)
            .map(|from| (0..NODES).map(|to| if from == to { 10 } else { 20 }).collect())
            .collect();
        let topology = Topology::new(Facts {
            vcpu_pnode: (0..VCPUS).map(|vcpu| Some(NodeId(node(vcpu)))).collect(),
            vnode_pnode: (0..NODES).map(|node| Some(NodeId(node))).collect(),
            distances,
        });
        let mut publisher = Publisher::new(self.mapping.words(), self.sequence);
        self.sequence = publisher.publish(&topology.expect("within bounds"));
    }

    /// Overwrites one word, as a program in the guest could.
    #[allow(dead_code, reason = "the benchmark does not scribble")]
    pub(crate) fn scribble(&self, word: usize, value: u64) {
        self.mapping.words()[word].store(value, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Compiles a program or library of these tests.
pub(crate) fn compile(source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let built = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O2",
            "-fPIC",
            "-pthread",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
        ])
        .arg(manifest.join("include"))
        .arg("-I")
        .arg(manifest.join("runtime"))
        .arg(manifest.join("tests").join(source))
        .args(flags)
        .arg("-o")
        .arg(&built)
        .status()
        .expect("a C compiler: scripts/setup.sh installs it");
    assert!(status.success(), "{source} does not compile");
    built
}

//! What the fuzz targets share: a tree of files as a kernel shows it, made from one text; what holds of any machine; an agent
//! that answers HTTP; and a history whose rows are an input's.
//!
//! Targets go through the functions that the agent calls, files included: on a memory file system that costs little, and nothing
//! has to be made public for them.

pub mod history;
pub mod site;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use homenode_machine::Machine;
use homenode_machine_files::{Comments, from_toml, render_text, to_toml};
use tempfile::TempDir;

/// More files than any input needs.
const FILES_MAX: usize = 400;

/// A machine that was read is whole, can be drawn, and can be written and read again.
///
/// # Panics
/// Where one of these does not hold.
pub fn reads_as_written(machine: Machine) {
    let _ = render_text(&machine);
    let machine = machine.checked().expect("what was read is whole");
    let written = to_toml(&machine, &Comments::default());
    let again = from_toml("machine.toml", &written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again.cpu_set(), machine.cpu_set());
    assert_eq!(again.node_set(), machine.node_set());
    assert_eq!(again.distances, machine.distances);
}

/// A directory that vanishes with the value.
pub struct Tree(TempDir);

impl Default for Tree {
    fn default() -> Tree {
        Tree::new()
    }
}

impl Tree {
    /// An empty one, in memory where the host has such a file system.
    pub fn new() -> Tree {
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        Tree(dir.expect("a temporary directory"))
    }

    /// Unpacks lines `=== path`, each followed by that file's contents, as the saved trees of `machine-files` are. Paths that
    /// lead out of the tree, or cannot be made, are left out.
    pub fn unpack(text: &str) -> Tree {
        let tree = Tree::new();
        for section in text.split("=== ").skip(1).take(FILES_MAX) {
            let (path, contents) = section.split_once('\n').unwrap_or((section, ""));
            tree.write(path, contents.as_bytes());
        }
        tree
    }

    /// Writes a file for its owner alone, if its path can be.
    pub fn write(&self, path: &str, contents: &[u8]) {
        let is_inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        let path = Path::new(path);
        if !is_inside(path) {
            return;
        }
        let full: PathBuf = self.0.path().join(path);
        if full.parent().is_some_and(|dir| fs::create_dir_all(dir).is_ok()) {
            let mut options = fs::OpenOptions::new();
            let file = options
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(full);
            let _ = file.and_then(|mut file| file.write_all(contents));
        }
    }

    /// A file's text; empty where it is not there.
    pub fn text(&self, path: &str) -> String {
        fs::read_to_string(self.0.path().join(path)).unwrap_or_default()
    }

    /// Where it lies.
    pub fn root(&self) -> &Path {
        self.0.path()
    }
}

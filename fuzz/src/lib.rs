//! Shared by the fuzz targets: a tree of files like a kernel's, unpacked from one text; checks for any machine; an agent that
//! answers HTTP; and a history that has the rows of an input.
//!
//! Targets call the same functions as the agent, and these read files. On a memory file system that costs little, and no private
//! function has to be made public.

pub mod history;
pub mod site;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use homenode_machine::Machine;
use homenode_machine_files::{Comments, from_toml, render_text, to_toml};
use tempfile::TempDir;

/// Maximum number of files in a tree; more than any input needs.
const FILES_MAX: usize = 400;

/// Checks that a machine is complete, can be drawn, and can be written and parsed again.
///
/// # Panics
/// If a check fails.
pub fn reads_as_written(machine: Machine) {
    let _ = render_text(&machine);
    let machine = machine.checked().expect("what was read is whole");
    let written = to_toml(&machine, &Comments::default());
    let again = from_toml("machine.toml", &written).unwrap_or_else(|error| panic!("{error}\n{written}"));
    assert_eq!(again.cpu_set(), machine.cpu_set());
    assert_eq!(again.node_set(), machine.node_set());
    assert_eq!(again.distances, machine.distances);
}

/// A directory that is removed when the value is dropped.
pub struct Tree(TempDir);

impl Default for Tree {
    fn default() -> Tree {
        Tree::new()
    }
}

impl Tree {
    /// Creates an empty directory, in memory if the host has a memory file system.
    pub fn new() -> Tree {
        let memory = Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        Tree(dir.expect("a temporary directory"))
    }

    /// Unpacks a text that has a line `=== path` before each file's contents, like the saved trees of `machine-files`. Skips
    /// paths that lead out of the tree or cannot be created.
    pub fn unpack(text: &str) -> Tree {
        let tree = Tree::new();
        for section in text.split("=== ").skip(1).take(FILES_MAX) {
            let (path, contents) = section.split_once('\n').unwrap_or((section, ""));
            tree.write(path, contents.as_bytes());
        }
        tree
    }

    /// Writes a file that only its owner may access; skips a path that leads out of the tree or cannot be created.
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

    /// Returns the text of a file, or an empty text if the file cannot be read.
    pub fn text(&self, path: &str) -> String {
        fs::read_to_string(self.0.path().join(path)).unwrap_or_default()
    }

    /// Returns the path of the directory.
    pub fn root(&self) -> &Path {
        self.0.path()
    }
}

//! Saved trees: the contents of a host's `/sys` and `/proc`, each tree in one text file.
//!
//! A line `=== path` (relative to the root) precedes the contents of each file. `testbed/capture.sh` writes these trees.

use std::fs;
use std::path::{Component, Path, PathBuf};

use tempfile::TempDir;

/// All saved trees.
pub(crate) const TREES: [&str; 19] = [
    "ccx-in-node",
    "cpuless-node",
    "cpuset-restricted",
    "cxl-node",
    "empty-shared-list",
    "gaps-in-node-numbers",
    "gpu-memory-nodes",
    "hyperthreads",
    "long-distance-rows",
    "memoryless-node",
    "no-numa",
    "nul-after-list",
    "numa-fake",
    "odd-host-name",
    "offline-cpus",
    "shared-map-only",
    "sub-numa-clusters",
    "testbed",
    "uneven-nodes",
];

/// A tree unpacked into a temporary directory.
pub(crate) struct Tree {
    dir: TempDir,
}

impl Tree {
    /// Unpacks `tests/trees/NAME.tree`.
    pub(crate) fn saved(name: &str) -> Tree {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/trees")
            .join(format!("{name}.tree"));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Tree::unpack(&text)
    }

    /// Unpacks a tree from its text.
    pub(crate) fn unpack(text: &str) -> Tree {
        let tree = Tree {
            dir: tempfile::tempdir().expect("a temporary directory"),
        };
        let mut file: Option<(&str, String)> = None;
        for line in text.lines() {
            if let Some(path) = line.strip_prefix("=== ") {
                if let Some((path, contents)) = file.replace((path, String::new())) {
                    tree.write(path, contents.as_bytes());
                }
            } else if let Some((_, contents)) = &mut file {
                contents.push_str(line);
                contents.push('\n');
            }
        }
        if let Some((path, contents)) = file {
            tree.write(path, contents.as_bytes());
        }
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Writes or replaces a file, with the directories above it.
    pub(crate) fn write(&self, path: &str, contents: &[u8]) {
        let path = self.inside(path);
        fs::create_dir_all(path.parent().expect("a file has a directory")).expect("a directory");
        fs::write(&path, contents).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// Removes a file or a directory.
    pub(crate) fn remove(&self, path: &str) {
        let path = self.inside(path);
        if path.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        }
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// Paths of all files, relative to the root, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut files = Vec::new();
        let mut dirs = vec![self.root().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir).expect("a directory") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    dirs.push(path);
                } else {
                    let path = path.strip_prefix(self.root()).expect("below the root");
                    files.push(path.to_str().expect("UTF-8").to_owned());
                }
            }
        }
        files.sort();
        files
    }

    fn inside(&self, path: &str) -> PathBuf {
        let relative = Path::new(path);
        assert!(
            relative
                .components()
                .all(|part| matches!(part, Component::Normal(_))),
            "{path}: leads out of the tree"
        );
        self.root().join(relative)
    }
}

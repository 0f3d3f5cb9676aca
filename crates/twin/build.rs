//! Lists the workloads that come with the simulator. They are the files below `data/workloads`, each named by its path without
//! `.toml`.
//!
//! The result is `OUT_DIR/workloads.rs`: a slice of (name, path in the repository, text), sorted by name.

#![allow(clippy::disallowed_methods)] // what cargo says to a build script is in the environment
#![allow(clippy::print_stdout)] // and cargo reads what it prints

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const FOLDER: &str = "data/workloads";

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let root = root.canonicalize()?;
    let mut files = BTreeMap::new();
    list(&root.join(FOLDER), &mut files)?;
    let mut table = "[\n".to_owned();
    for (name, path) in &files {
        let shown = path.strip_prefix(&root)?.display().to_string();
        writeln!(table, "({name:?}, {shown:?}, include_str!({path:?})),")?;
    }
    table.push(']');
    fs::write(Path::new(&std::env::var("OUT_DIR")?).join("workloads.rs"), table)?;
    Ok(())
}

/// Adds the profiles in a folder and in its subfolders, keyed by name.
fn list(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), Box<dyn Error>> {
    // Adding or removing a file changes the modification time of its folder.
    println!("cargo::rerun-if-changed={}", folder.display());
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if let Some(name) = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".toml"))
            && let Some(other) = files.insert(name.to_owned(), path.clone())
        {
            return Err(format!(
                "two workloads are called {name}: {} and {}; rename one",
                other.display(),
                path.display()
            )
            .into());
        }
    }
    Ok(())
}

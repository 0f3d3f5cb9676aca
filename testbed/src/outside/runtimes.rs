//! Programs of this machine for a guest: a JVM, allocators, test programs, and the libraries that make them follow the
//! topology.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::topology_guest::workspace;

const JVM: &str = "/usr/lib/jvm/java-17-openjdk-amd64";
/// Path of jemalloc, here and in the guest.
pub const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
/// Path of gperftools' TCMalloc, here and in the guest.
pub const TCMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4";
/// Files of the JVM that are enough to start a program without a display or a network.
const JVM_FILES: [&str; 18] = [
    "bin/java",
    "conf/security/java.security",
    "lib/classlist",
    "lib/jvm.cfg",
    "lib/libjava.so",
    "lib/libjimage.so",
    "lib/libjli.so",
    "lib/libmanagement.so",
    "lib/libmanagement_ext.so",
    "lib/libnet.so",
    "lib/libnio.so",
    "lib/libverify.so",
    "lib/libzip.so",
    "lib/modules",
    "lib/server/classes.jsa",
    "lib/server/libjvm.so",
    "lib/tzdb.dat",
    "release",
];

/// Path of the JVM's program, here and in the guest.
pub const JAVA: &str = "/usr/lib/jvm/java-17-openjdk-amd64/bin/java";
/// Directory, in the guest, of the libraries that follow the topology.
pub const LIBRARIES: &str = "/homenode";

/// Files for a guest. The key is the path in the guest, without a leading slash; the value is the file on this machine.
pub type Files = BTreeMap<String, PathBuf>;

/// Returns all files for the guest. Builds those that must be built in this directory.
///
/// # Errors
/// When a requirement is not installed, or something does not build.
pub fn files(dir: &Path) -> anyhow::Result<Files> {
    let guest = workspace().join("guest");
    let libraries = dir.join("runtime");
    let output = format!("O={}", libraries.display());
    run(Command::new("make")
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .arg("--directory")
        .arg(guest.join("runtime"))
        .arg(output))?;
    let classes = dir.join("classes");
    run(Command::new(Path::new(JVM).join("bin/java"))
        .args(["-m", "jdk.compiler/com.sun.tools.javac.Main", "-d"])
        .arg(&classes)
        .arg(guest.join("tests/Young.java")))?;
    let allocates = dir.join("allocates");
    run(Command::new("cc")
        .args(["-std=gnu11", "-O2", "-pthread", "-fno-builtin"])
        .arg(guest.join("tests/allocates.c"))
        .arg("-o")
        .arg(&allocates))?;

    let mut files = Files::new();
    for file in JVM_FILES {
        let path = Path::new(JVM).join(file);
        // This file of the JVM exists only on some machines.
        if file != "lib/server/classes.jsa" || path.exists() {
            put(&mut files, path);
        }
    }
    put(&mut files, PathBuf::from(JEMALLOC));
    put(&mut files, PathBuf::from(TCMALLOC));
    files.insert("bin/allocates".to_owned(), allocates);
    files.insert("Young.class".to_owned(), classes.join("Young.class"));
    for name in ["hotspot", "hotspot_numa", "jemalloc", "tcmalloc"] {
        let library = format!("libhomenode_{name}.so");
        files.insert(format!("{}/{library}", &LIBRARIES[1..]), libraries.join(library));
    }
    for path in files.values().cloned().collect::<Vec<_>>() {
        for library in needed(&path)? {
            put(&mut files, library);
        }
    }
    Ok(files)
}

/// Adds a file, which has the same path in the guest.
fn put(files: &mut Files, path: PathBuf) {
    files.insert(
        path.display().to_string().trim_start_matches('/').to_owned(),
        path,
    );
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| {
        format!(
            "cannot start {}: run scripts/setup.sh",
            command.get_program().display()
        )
    })?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Returns the libraries that a program or library is linked with, as this machine finds them. Other files have none.
fn needed(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let is_elf = fs::read(path)
        .with_context(|| format!("cannot read {}: run scripts/setup.sh", path.display()))?
        .starts_with(b"\x7fELF");
    if !is_elf {
        return Ok(Vec::new());
    }
    let output = Command::new("ldd")
        .arg(path)
        .output()
        .context("cannot start ldd, which lists a program's libraries")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    // The JVM's own libraries are left out: it finds them by itself.
    let found = paths.filter(|path| !path.starts_with(JVM));
    Ok(found.map(PathBuf::from).collect())
}

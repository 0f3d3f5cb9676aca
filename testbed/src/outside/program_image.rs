//! An initramfs with programs of this machine. It consists of the guests' own archive, followed by an archive with the
//! programs, their libraries and their input.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use homenode_formats::cpio::Archive;

/// Directory of a program's input in a guest.
pub const INPUT: &str = "/input";
const BUSYBOX: &str = "/bin/busybox";

/// Files for a guest.
#[derive(Debug, Default)]
pub struct Image {
    /// Permissions and contents of each file, by its path.
    files: BTreeMap<PathBuf, (u32, Vec<u8>)>,
}

impl Image {
    /// Creates an image with the shell that runs programs.
    ///
    /// # Errors
    /// When the shell is not installed.
    pub fn with_shell() -> anyhow::Result<Image> {
        let mut image = Image::default();
        image.copy(Path::new(BUSYBOX), Path::new(BUSYBOX))?;
        Ok(image)
    }

    /// Adds a file with these contents.
    pub fn add(&mut self, path: impl Into<PathBuf>, contents: Vec<u8>) {
        self.files.insert(path.into(), (0o644, contents));
    }

    /// Adds a program or a library of this machine, under this name, and all libraries that it is linked with, under their
    /// paths on this machine.
    ///
    /// # Errors
    /// When the file or a library is missing.
    pub fn add_program(&mut self, path: &Path, name: &Path) -> anyhow::Result<()> {
        self.copy(path, name)?;
        let output = Command::new("ldd")
            .arg(path)
            .output()
            .context("cannot start ldd")?;
        ensure!(
            output.status.success(),
            "ldd {}: {}",
            path.display(),
            output.status
        );
        for library in libraries(&String::from_utf8_lossy(&output.stdout))? {
            self.copy(&library, &library)?;
        }
        Ok(())
    }

    /// Adds all files below a directory, except those with one of these names.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn add_tree(&mut self, dir: &Path, without: &[&str]) -> anyhow::Result<()> {
        let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
        for entry in entries {
            let path = entry
                .with_context(|| format!("cannot list {}", dir.display()))?
                .path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // A link that dangles here would dangle in the guest, too.
            if without.contains(&name.as_ref()) || !path.exists() {
                continue;
            }
            if path.is_dir() {
                self.add_tree(&path, without)?;
            } else {
                self.copy(&path, &path)?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, from: &Path, to: &Path) -> anyhow::Result<()> {
        if !self.files.contains_key(to) {
            let complain = || format!("cannot read {}", from.display());
            let permissions = fs::metadata(from).with_context(complain)?.permissions().mode() & 0o777;
            let contents = fs::read(from).with_context(complain)?;
            self.files.insert(to.to_owned(), (permissions, contents));
        }
        Ok(())
    }

    /// Writes another initramfs, followed by these files, into `target`.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn write_behind(&self, first: &Path, target: &Path) -> anyhow::Result<()> {
        let mut bytes = fs::read(first).with_context(|| format!("cannot read {}", first.display()))?;
        bytes.extend(self.archive());
        fs::write(target, bytes).with_context(|| format!("cannot write {}", target.display()))
    }

    fn archive(&self) -> Vec<u8> {
        let mut archive = Archive::default();
        let within = |path: &Path| {
            path.strip_prefix("/")
                .unwrap_or(path)
                .to_string_lossy()
                .into_owned()
        };
        let mut folders = BTreeSet::from(["/tmp", INPUT].map(PathBuf::from));
        let parents = self.files.keys().flat_map(|path| path.ancestors().skip(1));
        folders.extend(parents.filter(|path| *path != Path::new("/")).map(Path::to_owned));
        for folder in &folders {
            archive.directory(&within(folder));
        }
        for (path, (permissions, contents)) in &self.files {
            archive.file(&within(path), *permissions, contents);
        }
        archive.finish()
    }
}

/// Returns the files that `ldd` names.
fn libraries(said: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in said.lines().map(str::trim) {
        ensure!(!line.ends_with("not found"), "a library is not installed: {line}");
        // A line is `name => path (address)`, or `path (address)` for the loader. The kernel's own library has no path.
        let path = line.rsplit("=> ").next().and_then(|rest| rest.split(" (").next());
        found.extend(path.filter(|path| path.starts_with('/')).map(PathBuf::from));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_file_and_one_that_is_missing_is_named() {
        let said = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(libraries(said).expect("all are there"), expected);
        let error = libraries("\tlibvips.so.42 => not found\n").expect_err("one is not there");
        assert!(error.to_string().contains("libvips.so.42"), "{error}");
    }

    #[test]
    fn folders_stand_before_what_is_in_them() {
        let mut image = Image::default();
        image.add("/usr/share/x/input", b"contents".to_vec());
        let archive = image.archive();
        let at = |name: &[u8]| archive.windows(name.len()).position(|window| window == name);
        let order = [
            &b"usr\0"[..],
            b"usr/share\0",
            b"usr/share/x\0",
            b"usr/share/x/input\0",
            b"contents",
        ]
        .map(at);
        assert!(
            order.iter().all(Option::is_some) && order.is_sorted(),
            "{order:?}"
        );
    }
}

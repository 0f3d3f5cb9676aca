//! The input of the rules: the workspace's files and crates.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use ignore::WalkBuilder;

use super::Finding;
use super::literals::without_literals;
use crate::cargo::{Licensed, Metadata, Package};

/// A text file of the workspace.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Path from the root of the workspace.
    pub path: String,
    /// The file's whole text.
    pub text: String,
    /// For a Rust file its text with string and character literals emptied; for any other file its whole text.
    pub text_without_literals: String,
}

impl SourceFile {
    /// Creates a file with this path and text.
    pub(super) fn new(path: &str, text: &str) -> Self {
        let text_without_literals = if path.ends_with(".rs") {
            without_literals(text)
        } else {
            text.to_owned()
        };
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            text_without_literals,
        }
    }

    /// Whether the file's name ends with one of these endings.
    pub(super) fn ends_with(&self, endings: &[&str]) -> bool {
        endings.iter().any(|ending| self.path.ends_with(ending))
    }

    /// Creates a finding at a line of this file; lines count from 0 here.
    pub(super) fn at_line(&self, line_index: usize, message: String) -> Finding {
        Finding {
            place: format!("{}:{}", self.path, line_index + 1),
            message,
        }
    }

    /// Creates a finding about the file as a whole.
    pub(super) fn whole(&self, message: String) -> Finding {
        Finding {
            place: self.path.clone(),
            message,
        }
    }
}

/// A member of the workspace with its directory, relative to the root of the workspace.
#[derive(Debug)]
pub(super) struct Member {
    /// Directory of the package, such as `crates/units`.
    pub directory: String,
    /// The package's metadata from cargo.
    pub package: Package,
}

/// The whole input.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// All text files.
    pub files: Vec<SourceFile>,
    /// Members in cargo's order.
    pub members: Vec<Member>,
    /// Packages from registries that are built here.
    pub packages: Vec<Licensed>,
}

impl Workspace {
    /// Reads the files that git tracks or would track. It needs no repository, so it also works in an export.
    pub(super) fn read(root: &Path, metadata: Metadata, packages: Vec<Licensed>) -> anyhow::Result<Self> {
        let mut files = Vec::new();
        let walk = WalkBuilder::new(root)
            .hidden(false)
            .parents(false)
            .git_global(false)
            .require_git(false)
            .filter_entry(|entry| entry.file_name() != ".git")
            .sort_by_file_name(Ord::cmp)
            .build();
        for entry in walk {
            let entry = entry?;
            if entry.file_type().is_some_and(|kind| kind.is_file()) {
                files.extend(read_text(root, entry.path())?);
            }
        }
        let members = metadata
            .packages
            .into_iter()
            .map(|package| member(&metadata.workspace_root, package))
            .collect();
        Ok(Self {
            files,
            members,
            packages,
        })
    }

    /// Returns the file of this path.
    pub(super) fn file(&self, path: &str) -> Option<&SourceFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

fn member(root: &Path, package: Package) -> Member {
    let directory = package.manifest_path.parent().unwrap_or(Path::new(""));
    let directory = directory
        .strip_prefix(root)
        .unwrap_or(directory)
        .display()
        .to_string();
    Member { directory, package }
}

/// Reads a file; `None` if it is not text, or has been removed since it was listed.
fn read_text(root: &Path, path: &Path) -> anyhow::Result<Option<SourceFile>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let Ok(text) = String::from_utf8(bytes) else {
        return Ok(None);
    };
    let path = path.strip_prefix(root).unwrap_or(path);
    Ok(Some(SourceFile::new(&path.display().to_string(), &text)))
}

#[cfg(test)]
mod tests {
    use super::Workspace;
    use crate::cargo::{metadata, root};

    #[test]
    fn this_workspace_is_read() {
        let workspace =
            Workspace::read(root(), metadata().expect("metadata"), Vec::new()).expect("readable files");
        assert!(workspace.file("xtask/src/main.rs").is_some());
        assert!(
            workspace.file(".cargo/config.toml").is_some(),
            "hidden files are part of it"
        );
        assert!(
            !workspace
                .files
                .iter()
                .any(|file| file.path.starts_with("target/")),
            "what git ignores is not"
        );
        assert!(
            workspace
                .members
                .iter()
                .any(|member| member.directory == "crates/units")
        );
    }
}

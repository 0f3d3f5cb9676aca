//! The rule on unused files.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Expr, ExprLit, Item, Lit, Meta};

use super::Finding;
use super::syntax::folder;
use super::tree::Workspace;

/// Files with fixed names, by which programs find them.
const KNOWN: [&str; 11] = [
    "CHANGELOG.md",
    "COPYING",
    "Cargo.lock",
    "Cargo.toml",
    "Kbuild",
    "LICENSE",
    "Makefile",
    "README.md",
    "build.rs",
    "rust-toolchain.toml",
    "rustfmt.toml",
];

/// Folders in which cargo treats each Rust file as a program of its own.
const PROGRAMS: [&str; 4] = ["src/bin", "tests", "benches", "examples"];

/// Finds unused files: Rust files in a crate that are no module of it, and other files that no other file mentions by name,
/// with or without extension.
pub(super) fn unused_files(workspace: &Workspace) -> Vec<Finding> {
    let modules = modules(workspace);
    let words = words(workspace);
    let is_used = |index: usize| {
        let path = &*workspace.files[index].path;
        let name = path.rsplit('/').next().unwrap_or(path);
        let stem = name.split_once('.').map_or(name, |(stem, _)| stem);
        let is_named = |word: &str| {
            words
                .get(word)
                .is_some_and(|files| files.iter().any(|file| *file != index))
        };
        let is_hidden = path.split('/').any(|folder| folder.starts_with('.'));
        let is_read = is_snapshot(workspace, path) || is_seed(workspace, path) || is_python_test(name);
        is_hidden || KNOWN.contains(&name) || is_named(name) || is_named(stem) || is_read
    };
    let files = workspace.files.iter().enumerate();
    let unused = files.filter(|(index, file)| match file.ends_with(&[".rs"]) {
        true => is_in_a_crate(workspace, &file.path) && !modules.contains(&file.path),
        false => !is_used(*index),
    });
    let say = "nothing uses it: take it out, or name it where it is used";
    unused.map(|(_, file)| file.whole(say.to_owned())).collect()
}

/// Whether the file is a snapshot of an existing test. By insta's naming, `tests/snapshots/texts__help.snap` belongs to
/// `tests/texts.rs`, and `tests/all/snapshots/all__texts__help.snap` to `tests/all/texts.rs`.
fn is_snapshot(workspace: &Workspace, path: &str) -> bool {
    let Some((folder, name)) = path.split_once("/snapshots/").filter(|_| path.ends_with(".snap")) else {
        return false;
    };
    let mut modules = name.split("__");
    let mut first = modules.next();
    if first.is_some_and(|program| folder.ends_with(&format!("/{program}"))) {
        first = modules.next();
    }
    first.is_some_and(|test| workspace.file(&format!("{folder}/{test}.rs")).is_some())
}

/// Whether the file is a seed of a fuzz target: `fuzz/corpus/units/00` belongs to `fuzz/fuzz_targets/units.rs`.
fn is_seed(workspace: &Workspace, path: &str) -> bool {
    let target = path
        .strip_prefix("fuzz/corpus/")
        .and_then(|rest| rest.split_once('/'));
    target.is_some_and(|(target, _)| {
        workspace
            .file(&format!("fuzz/fuzz_targets/{target}.rs"))
            .is_some()
    })
}

/// Whether pytest finds the file by its name.
fn is_python_test(name: &str) -> bool {
    name.starts_with("test_") && name.ends_with(".py")
}

fn is_in_a_crate(workspace: &Workspace, path: &str) -> bool {
    let mut folders = workspace
        .members
        .iter()
        .map(|member| format!("{}/", member.directory));
    folders.any(|folder| path.starts_with(&folder))
}

/// Returns the words of all files, each with the first two files that contain it. A word consists of letters, digits, `_` and
/// `-`. Words joined by `.` count separately and as one.
fn words(workspace: &Workspace) -> BTreeMap<&str, Vec<usize>> {
    let mut words: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, file) in workspace.files.iter().enumerate() {
        if file.path == "Cargo.lock" {
            continue;
        }
        let is_part = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        let long = file
            .text
            .split(|c: char| !is_part(c))
            .map(|word| word.trim_matches('.'));
        for word in long.flat_map(|word| std::iter::once(word).chain(word.split('.'))) {
            let files = words.entry(word).or_default();
            if files.len() < 2 && files.last() != Some(&index) {
                files.push(index);
            }
        }
    }
    words
}

/// Returns the Rust files that cargo finds by their location or in a manifest, and the modules of these files.
fn modules(workspace: &Workspace) -> BTreeSet<String> {
    let mut next: Vec<(String, String)> = Vec::new();
    for member in &workspace.members {
        let manifest = workspace.file(&format!("{}/Cargo.toml", member.directory));
        for file in workspace.files.iter().filter(|file| file.ends_with(&[".rs"])) {
            let Some(inner) = file.path.strip_prefix(&format!("{}/", member.directory)) else {
                continue;
            };
            let of_folder = PROGRAMS.iter().any(|folder| {
                let rest = inner.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
                rest.is_some_and(|rest| {
                    !rest.contains('/') || (rest.ends_with("/main.rs") && rest.matches('/').count() == 1)
                })
            });
            let is_named = manifest.is_some_and(|manifest| manifest.text.contains(&format!("\"{inner}\"")));
            if of_folder || is_named || ["build.rs", "src/lib.rs", "src/main.rs"].contains(&inner) {
                let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
                next.push((file.path.clone(), folder.to_owned()));
            }
        }
    }
    let mut found = BTreeSet::new();
    while let Some((path, folder_of_modules)) = next.pop() {
        let Some(file) = workspace.file(&path) else {
            continue;
        };
        if !found.insert(path.clone()) {
            continue;
        }
        let Ok(syntax) = syn::parse_file(&file.text) else {
            continue;
        };
        for module in declared(&syntax.items, &folder_of_modules, &path) {
            for name in [format!("{module}.rs"), format!("{module}/mod.rs")] {
                next.push((name.clone(), folder(&name).to_owned()));
            }
        }
    }
    found
}

/// Returns the files of the modules that these items declare, without `.rs`.
fn declared(items: &[Item], folder_of_modules: &str, path: &str) -> Vec<String> {
    let mut found = Vec::new();
    for item in items {
        let Item::Mod(module) = item else { continue };
        let inner = format!("{folder_of_modules}/{}", module.ident);
        if let Some((_, items)) = &module.content {
            found.extend(declared(items, &inner, path));
            continue;
        }
        let elsewhere = module.attrs.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                Expr::Lit(ExprLit {
                    lit: Lit::Str(text), ..
                }) => Some(text.value()),
                _ => None,
            },
            _ => None,
        });
        found.push(elsewhere.map_or(inner, |named| beside(path, named.trim_end_matches(".rs"))));
    }
    found
}

/// Resolves a path relative to the folder of a file.
fn beside(path: &str, relative: &str) -> String {
    let mut folders: Vec<&str> = path.split('/').collect();
    folders.pop();
    for name in relative.split('/') {
        match name {
            ".." => drop(folders.pop()),
            name => folders.push(name),
        }
    }
    folders.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::crates::tests::{member, places};
    use crate::rules::tree::SourceFile;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(path, text)| SourceFile::new(path, text))
            .collect();
        let members = vec![member("crates/a", "homenode-a", &[])];
        places(unused_files(&Workspace {
            files,
            members,
            ..Workspace::default()
        }))
    }

    #[test]
    fn unused_files_finds_modules_and_data_that_nothing_names() {
        let files = [
            ("README.md", "see data/used.toml."),
            ("crates/a/src/lib.rs", "mod b;\nmod inner { mod d; }\n"),
            ("crates/a/src/b/mod.rs", "#[cfg(test)]\nmod tests;\n"),
            (
                "crates/a/src/b/tests.rs",
                "const NAMES: [&str; 1] = [\"by-stem\"];\n",
            ),
            ("crates/a/src/c.rs", "mod e;\n"),
            ("crates/a/src/e.rs", ""),
            ("crates/a/src/inner/d.rs", ""),
            ("crates/a/tests/t.rs", "mod common;\n"),
            ("crates/a/tests/common/mod.rs", ""),
            ("crates/a/examples/x.rs", "#[path = \"../shared/y.rs\"]\nmod y;\n"),
            ("crates/a/shared/y.rs", ""),
            ("crates/a/tests/snapshots/t__help.snap", ""),
            ("crates/a/tests/snapshots/gone__help.snap", ""),
            ("crates/a/tests/all/main.rs", "mod texts;\n"),
            ("crates/a/tests/all/texts.rs", ""),
            ("crates/a/tests/all/snapshots/all__texts__help.snap", ""),
            ("crates/a/tests/all/snapshots/all__gone__help.snap", ""),
            ("fuzz/fuzz_targets/t.rs", ""),
            ("fuzz/corpus/t/00", ""),
            ("fuzz/corpus/gone/00", ""),
            ("data/by-stem.tree", ""),
            ("data/dead.toml", "name = \"dead\""),
            ("data/used.toml", ""),
        ];
        assert_eq!(
            found(&files),
            [
                "crates/a/src/c.rs",
                "crates/a/src/e.rs",
                "crates/a/tests/snapshots/gone__help.snap",
                "crates/a/tests/all/snapshots/all__gone__help.snap",
                "fuzz/corpus/gone/00",
                "data/dead.toml"
            ]
        );
    }
}

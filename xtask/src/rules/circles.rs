//! The rule on import cycles. Files that form a cycle can be understood only together.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::syntax::{Shipped, paths, shipped};
use super::tree::Workspace;

/// The files that each file imports, by the importing file's path.
type Imports<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// Finds, in each crate, the groups of files that all reach each other by imports. A file imports another if its shipped code
/// has a path that begins with `crate::` and leads to one of the other file's modules.
pub(super) fn circles(workspace: &Workspace) -> Vec<Finding> {
    let sources = shipped(workspace);
    let files: BTreeSet<&str> = sources.iter().map(|source| &*source.file.path).collect();
    let imports: Imports<'_> = sources
        .iter()
        .map(|source| (&*source.file.path, imported(source, &files)))
        .collect();
    let reached: Imports<'_> = imports
        .keys()
        .map(|file| (*file, reach(file, &imports)))
        .collect();
    let mut seen = BTreeSet::new();
    let mut findings = Vec::new();
    for (file, reached_from_it) in &reached {
        let back = |other: &&&str| reached[*other].contains(file);
        let circle: Vec<&str> = reached_from_it.iter().filter(back).copied().collect();
        if circle.len() > 1 && !seen.contains(file) {
            seen.extend(circle.iter().copied());
            findings.push(Finding {
                place: (*file).to_owned(),
                message: format!(
                    "imports, and is imported by: {}",
                    described(&circle, file, &imports)
                ),
            });
        }
    }
    findings
}

/// Lists the cycle's other files, each with the files of the cycle that it imports.
fn described(circle: &[&str], first: &str, imports: &Imports<'_>) -> String {
    let within = |file: &str| {
        let names = imports[file].iter().filter(|other| circle.contains(*other));
        names.map(|other| short(other)).collect::<Vec<_>>().join(", ")
    };
    let others = circle.iter().filter(|file| **file != first);
    let others: Vec<String> = others
        .map(|file| format!("{} -> {}", short(file), within(file)))
        .collect();
    format!("{}; {}", within(first), others.join("; "))
}

/// Shortens a path to the part after its crate's `src`.
fn short(path: &str) -> &str {
    path.split_once("/src/").map_or(path, |(_, rest)| rest)
}

/// Returns the files that a file's `crate::` paths lead to. A path leads to the deepest module that has a file of its own.
fn imported<'a>(source: &Shipped<'a>, files: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
    let root = root(&source.file.path);
    let own = &*source.file.path;
    paths(&source.syntax, &["crate"])
        .iter()
        .filter_map(|path| {
            let modules = &path.names[1..];
            let deepest = (0..=modules.len()).rev().find_map(|length| {
                let module = [&[root.to_owned()], &modules[..length]].concat().join("/");
                let names = match length {
                    0 => [format!("{module}/lib.rs"), format!("{module}/main.rs")],
                    _ => [format!("{module}.rs"), format!("{module}/mod.rs")],
                };
                names.iter().find_map(|name| files.get(&**name).copied())
            });
            deepest.filter(|file| *file != own)
        })
        .collect()
}

/// Returns the root folder of the crate that a file belongs to. Each program below `src/bin` is a crate of its own.
fn root(path: &str) -> &str {
    let source = path.find("/src/").map_or(0, |at| at + "/src".len());
    match path[source..]
        .strip_prefix("/bin/")
        .and_then(|rest| rest.split_once('/'))
    {
        Some((program, _)) => &path[..source + "/bin/".len() + program.len()],
        None => &path[..source],
    }
}

/// Returns all files that a file reaches by imports, including itself if it is on a cycle.
fn reach<'a>(file: &str, imports: &Imports<'a>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&str> = imports[file].iter().copied().collect();
    while let Some(other) = next.pop() {
        if reached.insert(other) {
            next.extend(&imports[other]);
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::crates::tests::places;
    use crate::rules::tree::SourceFile;

    fn found(files: &[(&str, &str)]) -> Vec<Finding> {
        let files = files
            .iter()
            .map(|(path, text)| SourceFile::new(path, text))
            .collect();
        circles(&Workspace {
            files,
            ..Workspace::default()
        })
    }

    #[test]
    fn circles_finds_files_that_reach_each_other() {
        let files = [
            ("crates/a/src/lib.rs", "mod b; mod c; mod d; mod e;"),
            ("crates/a/src/b.rs", "use crate::{c::C, e::E};"),
            ("crates/a/src/c/mod.rs", "fn f(d: crate::d::D) {}"),
            (
                "crates/a/src/d.rs",
                "fn f() { println!(\"{}\", crate::b::x::y()); }",
            ),
            ("crates/a/src/e.rs", "pub struct E;"),
            ("crates/other/src/d.rs", "use crate::b::B;"),
            ("crates/other/src/b.rs", "pub struct B;"),
        ];
        let findings = found(&files);
        assert_eq!(places(findings.clone()), ["crates/a/src/b.rs"]);
        let message = "imports, and is imported by: c/mod.rs; c/mod.rs -> d.rs; d.rs -> b.rs";
        assert_eq!(findings[0].message, message);
    }

    #[test]
    fn circles_leaves_parents_and_tests_alone() {
        let files = [
            ("crates/a/src/b.rs", "mod c; use c::C; pub use self::c::D;"),
            (
                "crates/a/src/b/c.rs",
                "use super::B;\n#[cfg(test)]\nmod tests { use crate::d::D; }",
            ),
            ("crates/a/src/d.rs", "use crate::b::c::C;"),
        ];
        assert_eq!(found(&files), []);
    }
}

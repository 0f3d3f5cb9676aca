//! The rule that decisions are pure: the code that decides and its dependencies do no I/O.

use std::collections::BTreeSet;

use super::Finding;
use super::crates::{in_manifest, shipped_dependencies};
use super::syntax::{Named, paths, shipped};
use super::tree::Workspace;

/// The pure crates. The workspace's crates that they depend on must be pure, too.
const PURE: [&str; 5] = [
    "homenode-policy",
    "homenode-host",
    "homenode-machine",
    "homenode-units",
    "homenode-why",
];

/// The libraries from outside the workspace that pure crates may use. None of them does I/O.
const LIBRARIES: [&str; 7] = [
    "libm",
    "rand_core",
    "rand_pcg",
    "schemars",
    "serde",
    "strsim",
    "thiserror",
];

/// Modules of the standard library that do I/O, start threads or read a clock. `time::Duration` is allowed.
const IMPURE: [&str; 8] = ["env", "fs", "io", "net", "os", "process", "thread", "time"];

/// Macros that print.
const PRINTING: [&str; 5] = ["dbg", "eprint", "eprintln", "print", "println"];

/// Checks that the pure crates, and their dependencies in the workspace, are free of code and libraries with I/O.
pub(super) fn pure_crates(workspace: &Workspace) -> Vec<Finding> {
    let (pure, mut findings) = (pure_members(workspace), Vec::new());
    for member in workspace
        .members
        .iter()
        .filter(|member| pure.contains(&*member.package.name))
    {
        let foreign =
            shipped_dependencies(member).filter(|name| !pure.contains(name) && !LIBRARIES.contains(name));
        findings.extend(foreign.map(|name| {
            let message = format!(
                "'{}' is pure, and '{name}' is not known to be: of libraries it may use {}",
                member.package.name,
                LIBRARIES.join(", ")
            );
            in_manifest(workspace, member, name, message)
        }));
    }
    let folders: Vec<String> = workspace
        .members
        .iter()
        .filter(|member| pure.contains(&*member.package.name))
        .map(|member| format!("{}/src/", member.directory))
        .collect();
    for source in shipped(workspace) {
        if !folders.iter().any(|folder| source.file.path.starts_with(folder)) {
            continue;
        }
        let mut named: Vec<(usize, String)> = paths(&source.syntax, &["std", "core", "alloc"])
            .into_iter()
            .filter(is_impure)
            .map(|path| (path.line, path.names.join("::")))
            .collect();
        named.extend(printed(&source.syntax));
        named.sort();
        findings.extend(named.into_iter().map(|(line, name)| {
            let message =
                format!("'{name}' is I/O or a clock: what decides is pure; take the value as an argument");
            source.file.at_line(line - 1, message)
        }));
    }
    findings
}

/// Returns the names of the pure crates, and of all workspace members that their shipped code depends on.
fn pure_members(workspace: &Workspace) -> BTreeSet<&str> {
    let mut pure = BTreeSet::new();
    let mut next: Vec<&str> = PURE.to_vec();
    while let Some(name) = next.pop() {
        let member = workspace
            .members
            .iter()
            .find(|member| member.package.name == name);
        if let Some(member) = member.filter(|_| pure.insert(name)) {
            next.extend(shipped_dependencies(member));
        }
    }
    pure
}

fn is_impure(path: &Named) -> bool {
    let names: Vec<&str> = path.names.iter().map(String::as_str).collect();
    match names[1..] {
        // The path imports `std` under another name, or everything in it.
        [] | ["*", ..] => true,
        ["time", "Duration", ..] => false,
        [module, ..] => IMPURE.contains(&module) || PRINTING.contains(&module),
    }
}

/// Finds calls of macros that print.
fn printed(syntax: &syn::File) -> Vec<(usize, String)> {
    struct Calls(Vec<(usize, String)>);
    impl<'ast> syn::visit::Visit<'ast> for Calls {
        fn visit_macro(&mut self, call: &'ast syn::Macro) {
            let name = call.path.segments.last().map(|segment| segment.ident.to_string());
            if let Some(name) = name.filter(|name| PRINTING.contains(&&**name)) {
                self.0
                    .push((call.bang_token.span.start().line, format!("{name}!")));
            }
        }
    }
    let mut calls = Calls(Vec::new());
    syn::visit::Visit::visit_file(&mut calls, syntax);
    calls.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::crates::tests::{member, places};
    use crate::rules::tree::SourceFile;

    fn found(path: &str, text: &str) -> Vec<String> {
        let workspace = Workspace {
            files: vec![SourceFile::new(path, text)],
            members: vec![
                member("crates/policy", "homenode-policy", &[("homenode-below", None)]),
                member("crates/below", "homenode-below", &[]),
                member("crates/cli", "homenode-cli", &[("homenode-policy", None)]),
            ],
            ..Workspace::default()
        };
        places(pure_crates(&workspace))
    }

    #[test]
    fn pure_crates_finds_io_also_in_what_a_policy_depends_on() {
        let text = "use std::{collections::BTreeMap, io::{self, Read}};\nfn f() {\n    let now = std::time::Instant::now();\n\
            \x20   println!(\"\");\n}\n";
        let lines = |path: &str| [1, 1, 3, 4].map(|line| format!("{path}:{line}"));
        for path in ["crates/policy/src/a.rs", "crates/below/src/lib.rs"] {
            assert_eq!(found(path, text), lines(path));
        }
        assert_eq!(
            found("crates/cli/src/a.rs", text),
            [""; 0],
            "no policy depends on it"
        );
        assert_eq!(
            found("crates/policy/src/a.rs", "use std as s;\n"),
            ["crates/policy/src/a.rs:1"]
        );
        assert_eq!(
            found(
                "crates/policy/src/a.rs",
                "fn f() { format!(\"{}\", std::env::args().count()); }\n"
            )
            .len(),
            1
        );
    }

    #[test]
    fn pure_crates_leaves_tests_and_durations_alone() {
        let text = "use std::time::Duration;\nuse std::sync::Arc;\n#[cfg(test)]\nmod tests { use std::fs; fn f() { println!(); } }\n";
        assert_eq!(found("crates/policy/src/a.rs", text), [""; 0]);
        assert_eq!(found("crates/policy/benches/a.rs", "use std::fs;\n"), [""; 0]);
    }

    #[test]
    fn pure_crates_finds_a_library_that_is_not_on_the_list() {
        let dev = Some(crate::cargo::DependencyKind::Dev);
        let dependencies = [("serde", None), ("homenode-below", None), ("tempfile", dev)];
        let workspace = Workspace {
            files: vec![SourceFile::new(
                "crates/below/Cargo.toml",
                "[dependencies]\ntokio = \"1\"\n",
            )],
            members: vec![
                member("crates/policy", "homenode-policy", &dependencies),
                member("crates/below", "homenode-below", &[("tokio", None)]),
                member("crates/cli", "homenode-cli", &[("tokio", None)]),
            ],
            ..Workspace::default()
        };
        assert_eq!(places(pure_crates(&workspace)), ["crates/below/Cargo.toml:2"]);
    }
}

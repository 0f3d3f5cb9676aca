//! Rules about crates: their allowed dependencies, and their entries in the architecture.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::{Member, SourceFile, Workspace};
use crate::cargo::DependencyKind;

/// The crates of the workspace that each crate may depend on, apart from its tests and benches.
///
/// Dependencies point one way: units ← machine ← host ← {policy, kernel ← undo ← {kvm, xen}}; policy ← {twin, control};
/// control ← api ← {agent, screens} ← cli; and machine ← machine-files, for crates that read files or `/sys`. The testbed uses
/// the product through its commands, and its live host through the contract that it must honour.
const MAY_DEPEND_ON: [(&str, &[&str]); 37] = [
    ("homenode-units", &[]),
    ("homenode-topology-page", &["homenode-units"]),
    ("homenode-machine", &["homenode-units"]),
    ("homenode-machine-files", &["homenode-machine", "homenode-units"]),
    ("homenode-host", &["homenode-machine", "homenode-units"]),
    (
        "homenode-formats",
        &["homenode-machine-files", "homenode-machine", "homenode-units"],
    ),
    (
        "homenode-tracking",
        &[
            "homenode-formats",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-meter",
        &[
            "homenode-formats",
            "homenode-tracking",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-qemu-plugin",
        &[
            "homenode-formats",
            "homenode-meter",
            "homenode-tracking",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-policy",
        &["homenode-host", "homenode-machine", "homenode-units"],
    ),
    (
        "homenode-kernel",
        &[
            "homenode-formats",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    // Crash safety must not depend on a hypervisor.
    (
        "homenode-undo",
        &[
            "homenode-kernel",
            "homenode-formats",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-vm-settings",
        &[
            "homenode-kernel",
            "homenode-formats",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-kvm",
        &[
            "homenode-undo",
            "homenode-kernel",
            "homenode-vm-settings",
            "homenode-formats",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-topology-page",
            "homenode-units",
        ],
    ),
    (
        "homenode-xen",
        &[
            "homenode-undo",
            "homenode-kernel",
            "homenode-vm-settings",
            "homenode-formats",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-topology-page",
            "homenode-units",
        ],
    ),
    (
        "homenode-twin",
        &[
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-control",
        &[
            "homenode-policy",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    ("homenode-load", &["homenode-units"]),
    (
        "homenode-calibrate",
        &[
            "homenode-formats",
            "homenode-load",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-reproduce",
        &[
            "homenode-formats",
            "homenode-control",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
            "homenode-tracking",
        ],
    ),
    // `homenode-search` knows the best decisions, so no crate that decides may depend on it.
    (
        "homenode-search",
        &[
            "homenode-api",
            "homenode-formats",
            "homenode-reproduce",
            "homenode-control",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
            "homenode-tracking",
        ],
    ),
    ("homenode-table", &[]),
    (
        "homenode-recorder",
        &[
            "homenode-table",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-sweep",
        &[
            "homenode-search",
            "homenode-formats",
            "homenode-reproduce",
            "homenode-table",
            "homenode-control",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
            "homenode-tracking",
        ],
    ),
    (
        "homenode-why",
        &["homenode-host", "homenode-machine", "homenode-units"],
    ),
    (
        "homenode-api",
        &[
            "homenode-control",
            "homenode-policy",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
            "homenode-why",
        ],
    ),
    (
        "homenode-evidence",
        &[
            "homenode-calibrate",
            "homenode-load",
            "homenode-kernel",
            "homenode-formats",
            "homenode-twin",
            "homenode-machine-files",
            "homenode-control",
            "homenode-policy",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-screens",
        &[
            "homenode-api",
            "homenode-control",
            "homenode-policy",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
            "homenode-why",
        ],
    ),
    (
        "homenode-trace",
        &[
            "homenode-control",
            "homenode-policy",
            "homenode-host",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    (
        "homenode-agent",
        &[
            "homenode-api",
            "homenode-control",
            "homenode-recorder",
            "homenode-trace",
            "homenode-xen",
            "homenode-kvm",
            "homenode-undo",
            "homenode-kernel",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
            "homenode-why",
        ],
    ),
    (
        "homenode-cli",
        &[
            "homenode-agent",
            "homenode-api",
            "homenode-evidence",
            "homenode-recorder",
            "homenode-screens",
            "homenode-trace",
            "homenode-reproduce",
            "homenode-search",
            "homenode-sweep",
            "homenode-table",
            "homenode-calibrate",
            "homenode-load",
            "homenode-control",
            "homenode-kvm",
            "homenode-undo",
            "homenode-kernel",
            "homenode-formats",
            "homenode-tracking",
            "homenode-twin",
            "homenode-policy",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
            "homenode-why",
        ],
    ),
    (
        "homenode-testbed",
        &[
            "homenode-host",
            "homenode-xen",
            "homenode-kvm",
            "homenode-undo",
            "homenode-kernel",
            "homenode-formats",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-testbed-guest",
            "homenode-topology-page",
            "homenode-units",
        ],
    ),
    (
        "homenode-python",
        &[
            "homenode-api",
            "homenode-recorder",
            "homenode-reproduce",
            "homenode-search",
            "homenode-sweep",
            "homenode-table",
            "homenode-control",
            "homenode-formats",
            "homenode-twin",
            "homenode-host",
            "homenode-machine-files",
            "homenode-machine",
            "homenode-units",
        ],
    ),
    // The whole crate is a test.
    ("homenode-faults", &[]),
    ("homenode-testbed-guest", &[]),
    ("homenode-guest", &[]),
    ("xtask", &[]),
];

/// Crates that policies must not depend on, even in tests: a policy is tested on a view, never on a host.
const NEVER_SEEN_BY_POLICY: [&str; 4] = [
    "homenode-twin",
    "homenode-kernel",
    "homenode-undo",
    "homenode-kvm",
];

/// Checks that the crates of the workspace depend on each other only in the allowed direction.
pub(super) fn crate_direction(workspace: &Workspace) -> Vec<Finding> {
    let names: BTreeSet<&str> = workspace
        .members
        .iter()
        .map(|member| member.package.name.as_str())
        .collect();
    let mut findings = Vec::new();
    for member in &workspace.members {
        let crate_name = &member.package.name;
        let Some(allowed) = listed(&MAY_DEPEND_ON, crate_name) else {
            let message =
                format!("'{crate_name}' is new: add it to MAY_DEPEND_ON in xtask/src/rules/crates.rs");
            findings.push(in_manifest(workspace, member, "[package]", message));
            continue;
        };
        for name in
            shipped_dependencies(member).filter(|name| names.contains(name) && !allowed.contains(name))
        {
            let message = format!(
                "'{crate_name}' may not depend on '{name}': see docs/ARCHITECTURE.md for the direction"
            );
            findings.push(in_manifest(workspace, member, name, message));
        }
        if crate_name == "homenode-policy" {
            let test_only = member
                .package
                .dependencies
                .iter()
                .filter(|d| d.kind == Some(DependencyKind::Dev));
            for dependency in test_only.filter(|d| NEVER_SEEN_BY_POLICY.contains(&d.name.as_str())) {
                let message = format!(
                    "tests of policies may not use '{}': give them a view",
                    dependency.name
                );
                findings.push(in_manifest(workspace, member, &dependency.name, message));
            }
        }
    }
    findings
}

/// Features that contain code for tests, which must not ship.
const TEST_FEATURES: [&str; 1] = ["testing"];

/// Finds features for tests that shipped code could contain: requested outside of dev-dependencies, or enabled by a feature
/// that ships.
pub(super) fn test_features(workspace: &Workspace) -> Vec<Finding> {
    let is_for_tests = |feature: &String| {
        let name = feature
            .rsplit_once('/')
            .map_or(feature.as_str(), |(_, name)| name);
        TEST_FEATURES.contains(&name)
    };
    let mut findings = Vec::new();
    for member in &workspace.members {
        let dependencies = member.package.dependencies.iter();
        let shipped = dependencies.filter(|d| d.kind != Some(DependencyKind::Dev));
        for dependency in shipped.filter(|d| d.features.iter().any(is_for_tests)) {
            let message = format!(
                "'{}' is asked for its feature for tests: name that under [dev-dependencies] only",
                dependency.name
            );
            findings.push(in_manifest(workspace, member, &dependency.name, message));
        }
        let features = member.package.features.iter();
        let enabling = features.filter(|(name, all)| !is_for_tests(name) && all.iter().any(is_for_tests));
        for (name, _) in enabling {
            let message = format!("the feature '{name}' ships, and enables one for tests");
            findings.push(in_manifest(workspace, member, name, message));
        }
    }
    findings
}

/// Checks that each crate's manifest inherits the workspace's lints, without which no lints apply to the crate.
pub(super) fn workspace_lints(workspace: &Workspace) -> Vec<Finding> {
    let lacks = |file: &&SourceFile| !file.text.contains("[lints]\nworkspace = true");
    let manifests = workspace
        .members
        .iter()
        .filter_map(|member| workspace.file(&manifest_path(member)));
    manifests
        .filter(lacks)
        .map(|file| file.whole("add '[lints]' with 'workspace = true'".to_owned()))
        .collect()
}

/// Checks that the table between the marks names every crate, in backquotes, in its first column.
pub(super) fn crate_table(workspace: &Workspace) -> Vec<Finding> {
    const BEGIN: &str = "<!-- crates -->";
    const END: &str = "<!-- /crates -->";
    let Some(document) = workspace.file("docs/ARCHITECTURE.md") else {
        return Vec::new();
    };
    let lines: Vec<&str> = document.text.lines().collect();
    let at = |mark: &str| lines.iter().position(|line| line.trim() == mark);
    let (begin, end) = match (at(BEGIN), at(END)) {
        (None, None) => return Vec::new(),
        (Some(begin), Some(end)) if begin < end => (begin, end),
        _ => {
            return vec![document.whole(format!(
                "the table of crates stands between '{BEGIN}' and '{END}'"
            ))];
        }
    };
    let rows: Vec<(usize, &str)> = (begin..end)
        .flat_map(|index| named_crates(lines[index]).map(move |name| (index, name)))
        .collect();
    let short = |member: &Member| {
        let name = member.package.name.as_str();
        name.strip_prefix("homenode-").unwrap_or(name).to_owned()
    };
    let members: Vec<String> = workspace.members.iter().map(short).collect();
    let members: BTreeSet<&str> = members.iter().map(String::as_str).collect();
    let listed: BTreeSet<&str> = rows.iter().map(|&(_, name)| name).collect();
    let gone = rows
        .iter()
        .filter(|(_, name)| !members.contains(name))
        .map(|&(index, name)| {
            document.at_line(index, format!("no crate is called '{name}': take the row out"))
        });
    let missing = members
        .difference(&listed)
        .map(|name| document.at_line(begin, format!("add a row for `{name}`")));
    gone.chain(missing).collect()
}

/// Returns the names in backquotes in a row's first column: `` | `testbed`, `testbed-guest` | … | ``.
fn named_crates(row: &str) -> impl Iterator<Item = &str> {
    let column = row.trim().strip_prefix('|').and_then(|row| row.split('|').next());
    column.unwrap_or_default().split('`').skip(1).step_by(2)
}

fn listed<'a>(table: &[(&str, &'a [&'a str])], name: &str) -> Option<&'a [&'a str]> {
    table
        .iter()
        .find(|(listed, _)| *listed == name)
        .map(|&(_, allowed)| allowed)
}

/// Returns the dependencies of a crate's shipped code.
pub(super) fn shipped_dependencies(member: &Member) -> impl Iterator<Item = &str> {
    let shipped = member
        .package
        .dependencies
        .iter()
        .filter(|d| d.kind != Some(DependencyKind::Dev));
    shipped.map(|dependency| dependency.name.as_str())
}

fn manifest_path(member: &Member) -> String {
    format!("{}/Cargo.toml", member.directory)
}

/// Creates a finding at the first line of the crate's manifest that begins with this text.
pub(super) fn in_manifest(workspace: &Workspace, member: &Member, begin: &str, message: String) -> Finding {
    let path = manifest_path(member);
    let manifest = workspace.file(&path);
    let line =
        manifest.and_then(|file| Some((file, file.text.lines().position(|line| line.starts_with(begin))?)));
    match line {
        Some((file, index)) => file.at_line(index, message),
        None => Finding { place: path, message },
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cargo::{Dependency, Package};

    pub(in crate::rules) fn member(
        directory: &str,
        name: &str,
        dependencies: &[(&str, Option<DependencyKind>)],
    ) -> Member {
        let dependencies = dependencies
            .iter()
            .map(|&(name, kind)| Dependency {
                name: name.to_owned(),
                kind,
                features: Vec::new(),
            })
            .collect();
        let manifest_path = format!("{directory}/Cargo.toml").into();
        Member {
            directory: directory.to_owned(),
            package: Package {
                name: name.to_owned(),
                manifest_path,
                dependencies,
                features: BTreeMap::new(),
            },
        }
    }

    pub(in crate::rules) fn places(findings: Vec<Finding>) -> Vec<String> {
        findings.into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn crate_direction_finds_a_dependency_against_it() {
        let dev = Some(DependencyKind::Dev);
        let workspace = Workspace {
            members: vec![
                member(
                    "crates/host",
                    "homenode-host",
                    &[("homenode-policy", None), ("homenode-units", None)],
                ),
                member("crates/policy", "homenode-policy", &[("homenode-twin", dev)]),
                member("crates/twin", "homenode-twin", &[("homenode-policy", None)]),
                member("crates/control", "homenode-control", &[("homenode-twin", dev)]),
                member("crates/units", "homenode-units", &[]),
            ],
            ..Workspace::default()
        };
        assert_eq!(
            places(crate_direction(&workspace)),
            ["crates/host/Cargo.toml", "crates/policy/Cargo.toml"]
        );
    }

    #[test]
    fn test_features_finds_one_outside_of_dev_dependencies() {
        let dev = Some(DependencyKind::Dev);
        let asking = |directory: &str, kind| {
            let mut member = member(directory, "homenode-kvm", &[("homenode-kernel", kind)]);
            member.package.dependencies[0].features = vec!["testing".to_owned()];
            member
        };
        let enabling = |directory: &str, name: &str| {
            let mut member = member(directory, "homenode-undo", &[]);
            let enabled = vec!["homenode-kernel/testing".to_owned()];
            member.package.features.insert(name.to_owned(), enabled);
            member
        };
        let workspace = Workspace {
            members: vec![
                asking("tests", dev),
                asking("ships", None),
                enabling("for-tests", "testing"),
                enabling("by-default", "default"),
            ],
            ..Workspace::default()
        };
        assert_eq!(
            places(test_features(&workspace)),
            ["ships/Cargo.toml", "by-default/Cargo.toml"]
        );
    }

    #[test]
    fn crate_direction_wants_to_know_every_crate() {
        let workspace = Workspace {
            members: vec![member("crates/new", "homenode-new", &[])],
            ..Workspace::default()
        };
        assert_eq!(places(crate_direction(&workspace)), ["crates/new/Cargo.toml"]);
    }

    #[test]
    fn crate_direction_has_no_cycle() {
        // The lists are free of cycles if each crate depends only on crates with shorter lists.
        for (name, allowed) in MAY_DEPEND_ON {
            for other in allowed {
                let below = listed(&MAY_DEPEND_ON, other).expect("a crate of the table");
                assert!(below.len() < allowed.len(), "{name} -> {other}");
            }
        }
    }

    #[test]
    fn workspace_lints_finds_a_crate_without_them() {
        let with = "[package]\n\n[lints]\nworkspace = true\n";
        let workspace = Workspace {
            files: vec![
                SourceFile::new("crates/a/Cargo.toml", with),
                SourceFile::new("crates/b/Cargo.toml", "[package]\n"),
            ],
            members: vec![member("crates/a", "a", &[]), member("crates/b", "b", &[])],
            ..Workspace::default()
        };
        assert_eq!(places(workspace_lints(&workspace)), ["crates/b/Cargo.toml"]);
    }

    fn with_table(text: &str) -> Workspace {
        Workspace {
            files: vec![SourceFile::new("docs/ARCHITECTURE.md", text)],
            members: vec![
                member("crates/units", "homenode-units", &[]),
                member("testbed", "homenode-testbed", &[]),
            ],
            ..Workspace::default()
        }
    }

    #[test]
    fn crate_table_finds_rows_that_are_missing_or_too_many() {
        let table = "<!-- crates -->\n| crate | what |\n|---|---|\n| `units` | x |\n| `gone` | x |\n";
        let workspace = with_table(&format!("# A\n{table}<!-- /crates -->\n"));
        assert_eq!(
            places(crate_table(&workspace)),
            ["docs/ARCHITECTURE.md:6", "docs/ARCHITECTURE.md:2"]
        );
    }

    #[test]
    fn crate_table_finds_a_table_without_its_end() {
        assert_eq!(
            places(crate_table(&with_table("<!-- crates -->\n"))),
            ["docs/ARCHITECTURE.md"]
        );
    }

    #[test]
    fn crate_table_is_content_with_links_and_with_no_table() {
        let rows = "| [`units`](crates/units), `testbed` | `x` |\n";
        assert!(crate_table(&with_table(&format!("<!-- crates -->\n{rows}<!-- /crates -->\n"))).is_empty());
        assert!(crate_table(&with_table("# A\n")).is_empty());
        assert!(crate_table(&Workspace::default()).is_empty());
    }
}

//! Rules about the structure of the code.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::tree::{SourceFile, Workspace};

/// Crates that carry out the policies' requests. Each has one place for that.
const HOSTS: [&str; 3] = ["crates/kvm/src/", "crates/twin/src/", "crates/xen/src/"];
/// Where a host crate carries out requests for a VM.
const LEVERS: &str = "levers";

/// Finds levers and acts that a host crate mentions outside of [`LEVERS`] or in more than one file, apart from tests.
pub(super) fn lever_places(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for host in HOSTS {
        let mut places: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        let sources = workspace.files.iter().filter(|file| file.path.starts_with(host));
        for file in sources.filter(|file| file.ends_with(&[".rs"]) && !is_test(&file.path)) {
            for name in names(file) {
                places.entry(name).or_default().insert(&file.path);
            }
        }
        for (name, files) in places {
            let is_elsewhere = |file: &&str| !file[host.len()..].starts_with(LEVERS);
            let elsewhere = files.iter().copied().filter(is_elsewhere);
            findings.extend(elsewhere.map(|file| Finding {
                place: file.to_owned(),
                message: format!(
                    "'{name}' is for {host}{LEVERS} alone: what a lever does stands in its file"
                ),
            }));
            if files.len() > 1 {
                let files: Vec<_> = files.into_iter().collect();
                findings.push(Finding {
                    place: files[0].to_owned(),
                    message: format!(
                        "'{name}' stands in {} files of {host}: {}",
                        files.len(),
                        files.join(", ")
                    ),
                });
            }
        }
    }
    findings
}

fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

/// Returns the levers and acts named in a file's code, without tests and comments. Lifting is left out: every lever needs it.
fn names(file: &SourceFile) -> BTreeSet<String> {
    let code = file
        .text_without_literals
        .split("#[cfg(test)]")
        .next()
        .unwrap_or_default();
    let lines = code.lines().filter_map(|line| line.split("//").next());
    let words = lines.flat_map(|line| line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')));
    let named = words.filter(|word| {
        let variant = word
            .strip_prefix("Lever::")
            .or_else(|| word.strip_prefix("Act::"));
        variant.is_some_and(|variant| variant.starts_with(char::is_uppercase) && !SHARED.contains(&variant))
    });
    named.map(str::to_owned).collect()
}

/// Acts that several levers share.
const SHARED: [&str; 2] = ["Lift", "Limit"];

#[cfg(test)]
mod tests {
    use super::*;

    fn places(files: &[(&str, &str)]) -> Vec<String> {
        let workspace = Workspace {
            files: files
                .iter()
                .map(|(path, text)| SourceFile::new(path, text))
                .collect(),
            ..Workspace::default()
        };
        let findings = lever_places(&workspace);
        findings.into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn lever_places_finds_a_lever_of_two_files_or_outside_its_folder() {
        let home = (
            "crates/kvm/src/levers/home.rs",
            "fn a() { Lever::Home; Act::Lift {}; }\n",
        );
        let quota = "fn b() { Lever::CpuQuota; Act::Lift {}; } // Lever::Home\n#[cfg(test)] Lever::Home";
        assert_eq!(
            places(&[home, ("crates/kvm/src/levers/quota.rs", quota)]),
            [""; 0]
        );
        assert_eq!(
            places(&[home, ("crates/kvm/src/levers/pages.rs", "Lever::Home\n")]),
            ["crates/kvm/src/levers/home.rs"]
        );
        assert_eq!(
            places(&[("crates/twin/src/host.rs", "Act::SetHome\n")]),
            ["crates/twin/src/host.rs"]
        );
        assert_eq!(
            places(&[("crates/policy/src/levers.rs", "Lever::Home\n"), home]),
            [""; 0]
        );
    }
}

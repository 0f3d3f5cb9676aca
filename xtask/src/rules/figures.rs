//! The rules on files that scripts write: figures that documents quote, and drawn programs. With `--check` a script reports the
//! differences; without it, the script writes the files again.

use std::io;
use std::path::Path;
use std::process::Command;

use super::Finding;
use super::tree::Workspace;
use crate::cargo::root;

const FIGURES: &str = "scripts/figures.py";
const DRAWN: &str = "scripts/drawn-programs.py";

/// Finds figures and tables in documents that differ from the file in which they were generated.
pub(super) fn quoted_figures(workspace: &Workspace) -> Vec<Finding> {
    told_by(workspace, FIGURES)
}

/// Finds held-out programs that were drawn for an earlier version of the advisor, which may since have been tuned to them.
pub(super) fn held_out_programs(workspace: &Workspace) -> Vec<Finding> {
    told_by(workspace, DRAWN)
}

/// Returns the findings of a script on the workspace; none if the workspace lacks the script.
fn told_by(workspace: &Workspace, script: &str) -> Vec<Finding> {
    let Some(file) = workspace.file(script) else {
        return Vec::new();
    };
    checked(script, root()).unwrap_or_else(|error| vec![file.whole(format!("cannot run: {error}"))])
}

/// Runs a script's check on a folder that has the workspace's structure.
fn checked(script: &str, folder: &Path) -> io::Result<Vec<Finding>> {
    let output = Command::new("python3")
        .arg(root().join(script))
        .arg("--check")
        .arg(folder)
        .output()?;
    let told = String::from_utf8_lossy(&output.stdout);
    let findings: Vec<Finding> = told.lines().map(finding).collect();
    if output.status.success() || !findings.is_empty() {
        return Ok(findings);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(error.trim().to_owned()))
}

/// Parses a script's line such as `docs/A.md:3: message`.
fn finding(line: &str) -> Finding {
    let (place, message) = line.split_once(": ").unwrap_or(("scripts", line));
    Finding {
        place: place.to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const GENERATED: &str = "# Made\n\n## Some results\n\n| policy | mean, % | worst |\n| --- | --- | --- |\n\
                             | best known | 0.248 | 2 of 93 |\n| ours | 1.87 | - |\n\nA gap of 12.35 on average.\n";
    const DATA: &str = "[[run]]\nname = \"a\"\nshare = 0.0349\n\n[[run]]\nname = \"b\"\nshare = 12345.6\n";

    /// Checks a document beside a generated page and a data file, and returns where findings are.
    fn places(document: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("docs")).unwrap();
        for (name, text) in [
            ("docs/DECISIONS.md", GENERATED),
            ("docs/data.toml", DATA),
            ("docs/A.md", document),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let findings = checked(FIGURES, folder.path()).unwrap();
        findings.into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn a_figure_that_is_its_source_rounded_is_accepted() {
        let quoted = "# A\n0.25<!--=DECISIONS.md#some-results/best-known/mean--> and\n\
                      93<!--=DECISIONS.md#some-results/best-known/worst:2--> and\n\
                      12.4<!--=DECISIONS.md#some-results/~a-gap-of-->, 0.03<!--=data.toml#run[name=a]/share-->,\n\
                      12,346<!--=data.toml#run[name=b:-1]/share-->, 1.9<!--=short/ours/mean-->\n\
                      <!-- figures: short=DECISIONS.md#some-results -->\n";
        assert!(places(quoted).is_empty(), "{:?}", places(quoted));
    }

    #[test]
    fn a_stale_figure_is_found() {
        let quoted = "# A\n1.1<!--=DECISIONS.md#some-results/best-known/mean-->\n0.26<!--=data.toml#run[name=a]/share-->\n";
        assert_eq!(places(quoted), ["docs/A.md:2", "docs/A.md:3"]);
    }

    #[test]
    fn a_source_that_is_gone_or_has_no_number_is_found() {
        let quoted = "# A\n1<!--=DECISIONS.md#some-results/gone/mean-->\n1<!--=DECISIONS.md#gone/ours/mean-->\n\
                      1<!--=gone.toml#a-->\n1<!--=data.toml#run[name=c]/share-->\n1<!--=DECISIONS.md#some-results/ours/worst-->\n\
                      much<!--=data.toml#run[name=a]/share-->\n";
        let lines: Vec<String> = (2..=7).map(|line| format!("docs/A.md:{line}")).collect();
        assert_eq!(places(quoted), lines);
    }

    #[test]
    fn a_table_without_end_or_maker_is_found() {
        assert_eq!(places("# A\n<!-- table: scoreboard -->\n"), ["docs/A.md:1"]);
        assert_eq!(
            places("# A\n\n<!-- table: gone -->\n<!-- /table -->\n"),
            ["docs/A.md:3"]
        );
    }

    #[test]
    fn scripts_are_needed_only_where_they_are() {
        assert!(quoted_figures(&Workspace::default()).is_empty());
        assert!(held_out_programs(&Workspace::default()).is_empty());
    }

    #[test]
    fn a_change_of_the_advisors_code_asks_for_other_programs_and_one_of_its_comments_does_not() {
        const ADVISOR: &str = "crates/policy/src/advisor.rs";
        const MODULE: &str = "crates/policy/src/advisor/evidence.rs";
        const EXPERIMENT: &str = "data/experiments/policies/held-out.toml";
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let found = || checked(DRAWN, folder.path()).unwrap().len();
        let advisor = fs::read_to_string(root().join(ADVISOR)).unwrap();
        write(EXPERIMENT, &fs::read_to_string(root().join(EXPERIMENT)).unwrap());
        let module = fs::read_to_string(root().join(MODULE)).unwrap();
        write(ADVISOR, &advisor);
        write(MODULE, &module);
        assert_eq!(found(), 0);
        write(ADVISOR, &format!("//! A comment.\n{advisor}"));
        assert_eq!(found(), 0);
        for (path, code) in [(ADVISOR, &advisor), (MODULE, &module)] {
            write(path, &format!("const CHANGED: u32 = 1;\n{code}"));
            assert_eq!(found(), 1);
            write(path, code);
        }
    }
}

//! House rules: what this code base holds itself to and clippy cannot see.
//!
//! A rule is a pure function of the workspace's text and of what cargo says about its crates, so each has a test with an
//! example that breaks it. To add one: write the function in [`text`] or [`crates`], and add it to [`RULES`].

mod crates;
mod literals;
mod pure;
mod structure;
mod syntax;
mod text;
mod tree;

use crate::cargo::{metadata, root};
use crate::tally::Tally;
use tree::Workspace;

/// Something that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    /// `file` or `file:line`, from the root of the workspace.
    place: String,
    /// What is wrong, and what to do.
    message: String,
}

struct Rule {
    name: &'static str,
    about: &'static str,
    check: fn(&Workspace) -> Vec<Finding>,
}

const RULES: [Rule; 12] = [
    Rule {
        name: "line-length",
        about: "lines of Rust have at most 130 columns, string contents and URLs aside",
        check: text::line_length,
    },
    Rule {
        name: "file-length",
        about: "source files have at most 900 lines",
        check: text::file_length,
    },
    Rule {
        name: "leftovers",
        about: "no notes to oneself, no ignored tests: an issue is the place for what is not done",
        check: text::leftovers,
    },
    Rule {
        name: "markdown-title",
        about: "a Markdown file has one title",
        check: text::markdown_title,
    },
    Rule {
        name: "developer-paths",
        about: "no absolute path of a developer's machine",
        check: text::developer_paths,
    },
    Rule {
        name: "registry-hosts",
        about: "no package registry is named",
        check: text::registry_hosts,
    },
    Rule {
        name: "known-decisions",
        about: "what is known to be the best decision is read by search and xtask alone",
        check: text::known_decisions,
    },
    Rule {
        name: "lever-places",
        about: "a lever and an act are named in one file of each crate that is a host, tests aside",
        check: structure::lever_places,
    },
    Rule {
        name: "readme-crates",
        about: "README.md lists the crates that there are",
        check: crates::readme_crates,
    },
    Rule {
        name: "pure-crates",
        about: "policy, host, machine, units and all of the workspace below them: no I/O, clock or thread, known libraries only",
        check: pure::pure_crates,
    },
    Rule {
        name: "crate-direction",
        about: "crates depend on each other in one direction only",
        check: crates::crate_direction,
    },
    Rule {
        name: "workspace-lints",
        about: "every crate takes the workspace's lints",
        check: crates::workspace_lints,
    },
];

/// Checks all rules and prints what breaks them.
pub fn run() -> anyhow::Result<Tally> {
    let workspace = Workspace::read(root(), metadata()?)?;
    Ok(RULES
        .iter()
        .map(|rule| report(rule, &(rule.check)(&workspace)))
        .sum())
}

fn report(rule: &Rule, findings: &[Finding]) -> Tally {
    let verdict = if findings.is_empty() { "ok  " } else { "FAIL" };
    println!("{verdict} {}: {}", rule.name, rule.about);
    for finding in findings {
        println!("       {}: {}", finding.place, finding.message);
    }
    Tally::of(findings.is_empty())
}

//! House rules of this code base that clippy cannot check.
//!
//! A rule is a pure function of the workspace's text and cargo's metadata, so each has a test with an example that breaks it.
//! Only the rules in [`figures`] run a program: the script that writes the checked text. To add a rule, write its function in one
//! of the modules here, and add it to [`RULES`].
//!
//! Most rules allow no findings. The others limit the number of findings.

mod circles;
mod crates;
mod duplicates;
mod evidence;
mod figures;
mod functions;
mod licences;
mod literals;
mod mechanisms;
mod pure;
mod structure;
mod syntax;
mod text;
mod tree;
mod unused;
mod words;

use crate::cargo::{metadata, packages, root};
use crate::tally::Tally;
use tree::Workspace;

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    /// `file` or `file:line`, from the root of the workspace.
    place: String,
    /// The breach of the rule, and how to repair it.
    message: String,
}

struct Rule {
    name: &'static str,
    about: &'static str,
    check: fn(&Workspace) -> Vec<Finding>,
    limit: Limit,
}

/// How many findings a rule allows.
#[derive(Clone, Copy)]
enum Limit {
    /// No findings.
    None,
    /// Up to this number of findings.
    AtMost(usize),
}

const RULES: [Rule; 25] = [
    Rule {
        name: "line-length",
        about: "lines of Rust have at most 130 columns, string contents and URLs aside",
        check: text::line_length,
        limit: Limit::None,
    },
    Rule {
        name: "file-length",
        about: "source files have at most 900 lines",
        check: text::file_length,
        limit: Limit::None,
    },
    Rule {
        name: "leftovers",
        about: "no notes to oneself, no ignored tests: an issue is the place for what is not done",
        check: text::leftovers,
        limit: Limit::None,
    },
    Rule {
        name: "markdown-title",
        about: "a Markdown file has one title",
        check: text::markdown_title,
        limit: Limit::None,
    },
    Rule {
        name: "developer-paths",
        about: "no absolute path of a developer's machine",
        check: text::developer_paths,
        limit: Limit::None,
    },
    Rule {
        name: "registry-hosts",
        about: "no package registry is named",
        check: text::registry_hosts,
        limit: Limit::None,
    },
    Rule {
        name: "known-decisions",
        about: "what is known to be the best decision is read by search and xtask alone",
        check: text::known_decisions,
        limit: Limit::None,
    },
    Rule {
        name: "lever-places",
        about: "a lever and an act are named in one file of each crate that is a host, tests aside",
        check: structure::lever_places,
        limit: Limit::None,
    },
    Rule {
        name: "crate-table",
        about: "docs/ARCHITECTURE.md lists the crates that there are",
        check: crates::crate_table,
        limit: Limit::None,
    },
    Rule {
        name: "promised-tests",
        about: "the tests that docs/SECURITY.md names are there",
        check: text::promised_tests,
        limit: Limit::None,
    },
    Rule {
        name: "mechanisms",
        about: "rows of the table of mechanisms in docs/SOURCES.md name modules, tests, cases and claims that exist, or a reason",
        check: mechanisms::mechanisms,
        limit: Limit::None,
    },
    Rule {
        name: "quoted-figures",
        about: "figures and tables that documents quote are those of the generated files (scripts/figures.py)",
        check: figures::quoted_figures,
        limit: Limit::None,
    },
    Rule {
        name: "held-out-programs",
        about: "the programs of the claim advisor.held-out are drawn from the advisor's code as it is (scripts/drawn-programs.py)",
        check: figures::held_out_programs,
        limit: Limit::None,
    },
    Rule {
        name: "pure-crates",
        about: "policy, host, machine, units and all of the workspace below them: no I/O, clock or thread, known libraries only",
        check: pure::pure_crates,
        limit: Limit::None,
    },
    Rule {
        name: "crate-direction",
        about: "crates depend on each other in one direction only",
        check: crates::crate_direction,
        limit: Limit::None,
    },
    Rule {
        name: "test-features",
        about: "cargo features with code for tests are named under dev-dependencies only",
        check: crates::test_features,
        limit: Limit::None,
    },
    Rule {
        name: "workspace-lints",
        about: "every crate takes the workspace's lints",
        check: crates::workspace_lints,
        limit: Limit::None,
    },
    Rule {
        name: "circles",
        about: "groups of files of a crate that reach each other by paths that begin with crate::, in code that ships",
        check: circles::circles,
        limit: Limit::AtMost(3),
    },
    Rule {
        name: "long-files",
        about: "source files over 700 lines, tests among them, generated ones aside",
        check: text::long_files,
        limit: Limit::AtMost(4),
    },
    Rule {
        name: "long-functions",
        about: "functions over 80 lines from 'fn' to the last brace, comments counted, tests aside",
        check: functions::long_functions,
        limit: Limit::AtMost(4),
    },
    Rule {
        name: "duplicates",
        about: "runs of 12 lines of code (about 20 with the rest) that stand twice; tests, comments, imports and constants aside",
        check: duplicates::duplicates,
        limit: Limit::None,
    },
    Rule {
        name: "riddles",
        about: "words by which text is read twice, such as 'nobody', 'anew', 'so much': the number only falls",
        check: words::riddles,
        limit: Limit::AtMost(51),
    },
    Rule {
        name: "evidence",
        about: "docs/EVIDENCE.md's table and the README's first paragraph say what the reports in data/evidence say",
        check: evidence::reports,
        limit: Limit::None,
    },
    Rule {
        name: "licences",
        about: "packages come from the registry, under licences that deny.toml allows",
        check: licences::licences,
        limit: Limit::None,
    },
    Rule {
        name: "unused-files",
        about: "Rust files are modules of something, and every other file is named in another one",
        check: unused::unused_files,
        limit: Limit::None,
    },
];

/// Checks all rules and prints the violations. With `HOMENODE_WRITE_EVIDENCE` set, it first writes what documents say of reports.
pub(crate) fn run() -> anyhow::Result<Tally> {
    let mut workspace = Workspace::read(root(), metadata()?, packages()?)?;
    if std::env::var_os("HOMENODE_WRITE_EVIDENCE").is_some() {
        for (path, text) in evidence::corrected(&workspace) {
            std::fs::write(root().join(path), text)?;
        }
        workspace = Workspace::read(root(), metadata()?, packages()?)?;
    }
    Ok(RULES
        .iter()
        .map(|rule| report(rule, &(rule.check)(&workspace)))
        .sum())
}

/// Lists the rules with their counts, for `cargo xtask rules --help`.
pub(crate) fn help() -> String {
    let rules = RULES
        .iter()
        .map(|rule| format!("  {:<15}  {}{}\n", rule.name, rule.about, rule.limit));
    format!("Rules:\n{}", rules.collect::<String>())
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limit::None => Ok(()),
            Limit::AtMost(count) => write!(f, ": at most {count}"),
        }
    }
}

fn report(rule: &Rule, findings: &[Finding]) -> Tally {
    let allowed = match rule.limit {
        Limit::None => 0,
        Limit::AtMost(count) => count,
    };
    let is_kept = findings.len() <= allowed;
    let verdict = if is_kept { "ok  " } else { "FAIL" };
    let count = match rule.limit {
        Limit::None => String::new(),
        Limit::AtMost(_) => format!(" ({} found)", findings.len()),
    };
    println!("{verdict} {}: {}{}{count}", rule.name, rule.about, rule.limit);
    if !is_kept {
        for finding in findings {
            println!("       {}: {}", finding.place, finding.message);
        }
    }
    Tally::of(is_kept)
}

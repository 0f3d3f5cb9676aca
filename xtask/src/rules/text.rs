//! Rules about text: lengths, leftovers, and forbidden names.

use super::Finding;
use super::tree::{SourceFile, Workspace};

const LINE_COLUMNS_MAX: usize = 130;
const FILE_LINES_MAX: usize = 900;
/// A file with more lines than this is long.
const LONG_FILE_LINES: usize = 700;

/// Endings of files written by hand. Recorded data and lock files may have any length.
const SOURCE_ENDINGS: [&str; 9] = [".rs", ".sh", ".py", ".md", ".toml", ".c", ".h", ".js", ".html"];

/// Generated files, which may have any length.
const GENERATED: [&str; 4] = [
    "docs/FORMATS.md",
    "docs/REPRODUCTION.md",
    "docs/REPRODUCTION-DETAILS.md",
    "data/reproduction/log.toml",
];

/// Checks the lines that rustfmt does not wrap: comments and unwrappable code. It wraps other code at 110 columns.
pub(super) fn line_length(workspace: &Workspace) -> Vec<Finding> {
    of_lines(workspace, &[".rs"], Text::WithoutLiterals, |line| {
        let columns: usize = line
            .split(' ')
            .map(|word| 1 + if is_url(word) { 0 } else { word.chars().count() })
            .sum();
        let columns = columns.saturating_sub(1);
        (columns > LINE_COLUMNS_MAX)
            .then(|| format!("{columns} columns, {LINE_COLUMNS_MAX} are the most: break the line"))
    })
}

/// Checks the length of files: a file that exceeds the maximum has more than one subject.
pub(super) fn file_length(workspace: &Workspace) -> Vec<Finding> {
    over(workspace, FILE_LINES_MAX)
}

/// Finds files that may have more than one subject.
pub(super) fn long_files(workspace: &Workspace) -> Vec<Finding> {
    over(workspace, LONG_FILE_LINES)
}

fn over(workspace: &Workspace, most: usize) -> Vec<Finding> {
    let sources = workspace
        .files
        .iter()
        .filter(|file| file.ends_with(&SOURCE_ENDINGS) && !GENERATED.contains(&file.path.as_str()));
    let too_long = sources.filter_map(|file| {
        let lines = file.text.lines().count();
        (lines > most).then(|| file.whole(format!("{lines} lines, {most} are the most: split it by subject")))
    });
    too_long.collect()
}

/// Finds leftovers in comments and in other languages, and disabled tests. In Rust code, clippy refuses the macro.
pub(super) fn leftovers(workspace: &Workspace) -> Vec<Finding> {
    const LEFTOVERS: [&str; 4] = ["FIXME", "TODO", "todo!", "#[ignore"];
    of_lines(workspace, &[""], Text::WithoutLiterals, |line| {
        let found = LEFTOVERS.iter().find(|&&leftover| has_word(line, leftover))?;
        Some(format!("'{found}': do it now, or take it out and open an issue"))
    })
}

/// Checks that each document has one title. Lines in code blocks may look like titles, and do not count.
pub(super) fn markdown_title(workspace: &Workspace) -> Vec<Finding> {
    let markdown = workspace.files.iter().filter(|file| file.ends_with(&[".md"]));
    markdown.flat_map(titles_but_one).collect()
}

fn titles_but_one(file: &SourceFile) -> Vec<Finding> {
    let mut in_code = false;
    let mut titles = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code && line.starts_with("# ") {
            titles.push(index);
        }
    }
    let Some((_, more)) = titles.split_first() else {
        return vec![file.whole("no title: begin it with a line '# …'".to_owned())];
    };
    more.iter()
        .map(|&index| file.at_line(index, "a second title: make it '## …'".to_owned()))
        .collect()
}

/// Checks that the tests that docs/SECURITY.md names exist. A test's name has at least four words.
pub(super) fn promised_tests(workspace: &Workspace) -> Vec<Finding> {
    let Some(promises) = workspace.file("docs/SECURITY.md") else {
        return Vec::new();
    };
    let is_name = |word: &str| {
        word.matches('_').count() >= 3
            && word
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let rust = || workspace.files.iter().filter(|file| file.ends_with(&[".rs"]));
    let is_there = |name: &str| rust().any(|file| file.text.contains(&format!("fn {name}(")));
    let named = promises.text.lines().enumerate().flat_map(|(index, line)| {
        let words = line.split('`').skip(1).step_by(2);
        words.map(move |word| (index, word))
    });
    named
        .filter(|(_, word)| is_name(word) && !is_there(word))
        .map(|(index, name)| {
            promises.at_line(
                index,
                format!("there is no test `{name}`: name the one that holds this"),
            )
        })
        .collect()
}

/// Finds paths of developers' home directories and work trees, which do not exist on other machines.
pub(super) fn developer_paths(workspace: &Workspace) -> Vec<Finding> {
    // The names are split in two so that this file passes the rule.
    const DIRECTORIES: [&str; 3] = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
    ];
    of_lines(workspace, &[""], Text::All, |line| {
        let found = DIRECTORIES
            .iter()
            .find(|&&directory| has_absolute_path(line, directory))?;
        Some(format!(
            "'{found}…' is only on your machine: use a path from the workspace, or an argument"
        ))
    })
}

/// Finds host names of package registries: downloads must use the package managers' configuration, which may name a mirror.
pub(super) fn registry_hosts(workspace: &Workspace) -> Vec<Finding> {
    // The names are split in two so that this file passes the rule.
    const HOSTS: [&str; 8] = [
        concat!("crates", ".io"),
        concat!("deb.debian", ".org"),
        concat!("security.debian", ".org"),
        concat!("pypi", ".org"),
        concat!("pythonhosted", ".org"),
        concat!("registry.npmjs", ".org"),
        concat!("proxy.golang", ".org"),
        concat!("repo.maven.apache", ".org"),
    ];
    let findings = of_lines(workspace, &[""], Text::All, |line| {
        let found = HOSTS.iter().find(|&&host| line.contains(host))?;
        Some(format!(
            "names the package registry '{found}': leave that to the package manager's configuration"
        ))
    });
    // Cargo writes the registry's host into its lock files.
    let is_lock = |finding: &Finding| {
        let (path, _) = finding.place.rsplit_once(':').unwrap_or_default();
        path.rsplit('/').next() == Some("Cargo.lock")
    };
    findings.into_iter().filter(|finding| !is_lock(finding)).collect()
}

/// Finds uses of the best known decisions. A policy that has seen the best decisions for the cases that judge it proves
/// nothing.
pub(super) fn known_decisions(workspace: &Workspace) -> Vec<Finding> {
    const MAY_READ: [&str; 3] = ["crates/search/", "xtask/", "data/decisions/"];
    const READERS: [&str; 7] = [".rs", ".sh", ".py", ".toml", ".c", ".js", "Makefile"];
    let findings = of_lines(workspace, &READERS, Text::All, |line| {
        let names_them = line.contains("data/decisions") || line.contains("decisions/known");
        let message = "'data/decisions' is for crates/search and xtask alone: a policy that knows the best is no policy";
        names_them.then(|| message.to_owned())
    });
    let may_read = |finding: &Finding| MAY_READ.iter().any(|folder| finding.place.starts_with(folder));
    findings
        .into_iter()
        .filter(|finding| !may_read(finding))
        .collect()
}

/// The part of a file's text that a rule checks.
#[derive(Clone, Copy)]
enum Text {
    All,
    WithoutLiterals,
}

/// Applies a check to each line of the files with these endings.
fn of_lines(
    workspace: &Workspace,
    endings: &[&str],
    text: Text,
    message: impl Fn(&str) -> Option<String>,
) -> Vec<Finding> {
    let of_file = |file: &SourceFile| -> Vec<Finding> {
        let text = match text {
            Text::All => &file.text,
            Text::WithoutLiterals => &file.text_without_literals,
        };
        let lines = text.lines().enumerate();
        lines
            .filter_map(|(index, line)| Some(file.at_line(index, message(line)?)))
            .collect()
    };
    workspace
        .files
        .iter()
        .filter(|file| file.ends_with(endings))
        .flat_map(of_file)
        .collect()
}

fn is_url(word: &str) -> bool {
    word.contains("https://") || word.contains("http://")
}

/// Whether the word occurs as a whole word, not as part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let is_word = |c: char| c == '_' || c.is_alphanumeric();
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Whether a path in the line begins with this directory, rather than containing its name further down.
fn has_absolute_path(line: &str, directory: &str) -> bool {
    let continues_path = |c: char| c.is_alphanumeric() || "_-.}$)~*".contains(c);
    line.match_indices(directory)
        .any(|(at, _)| !line[..at].chars().next_back().is_some_and(continues_path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(rule: fn(&Workspace) -> Vec<Finding>, path: &str, text: &str) -> Vec<String> {
        let workspace = Workspace {
            files: vec![SourceFile::new(path, text)],
            ..Workspace::default()
        };
        rule(&workspace)
            .into_iter()
            .map(|finding| finding.place)
            .collect()
    }

    #[test]
    fn line_length_finds_a_long_comment() {
        let text = format!("// short\n// {}\n", "x".repeat(128));
        assert_eq!(places(line_length, "a.rs", &text), ["a.rs:2"]);
        assert!(
            places(line_length, "a.md", &text).is_empty(),
            "prose wraps as it likes"
        );
    }

    #[test]
    fn line_length_does_not_count_strings_and_urls() {
        let long = "x".repeat(200);
        let text = format!(
            "let a = \"{long}\";\n// see https://example.org/{long}\n// {}\n",
            "é".repeat(127)
        );
        assert!(places(line_length, "a.rs", &text).is_empty());
    }

    #[test]
    fn file_length_finds_a_long_source_file() {
        assert_eq!(places(file_length, "a.rs", &"\n".repeat(901)), ["a.rs"]);
        assert!(places(file_length, "a.rs", &"\n".repeat(900)).is_empty());
        assert!(
            places(file_length, "a.tree", &"\n".repeat(901)).is_empty(),
            "recorded data"
        );
        assert!(
            places(file_length, GENERATED[0], &"\n".repeat(901)).is_empty(),
            "generated"
        );
    }

    #[test]
    fn long_files_finds_one_of_701_lines() {
        assert_eq!(places(long_files, "a.rs", &"\n".repeat(701)), ["a.rs"]);
        assert!(places(long_files, "a.rs", &"\n".repeat(700)).is_empty());
    }

    #[test]
    fn leftovers_finds_notes_and_ignored_tests() {
        let text = "// TODO: later\nfn f() {\n    todo!()\n}\n#[ignore = \"slow\"]\n#[ignore]\n// FIXME\n";
        let found = ["a.rs:1", "a.rs:3", "a.rs:5", "a.rs:6", "a.rs:7"];
        assert_eq!(places(leftovers, "a.rs", text), found);
        assert_eq!(places(leftovers, "a.sh", "# TODO\n"), ["a.sh:1"]);
        assert!(places(leftovers, "a.rs", "const TODOS: &str = \"TODO\";\n").is_empty());
    }

    #[test]
    fn markdown_title_wants_exactly_one() {
        assert_eq!(places(markdown_title, "a.md", "# A\n## B\n# C\n"), ["a.md:3"]);
        assert_eq!(places(markdown_title, "a.md", "text\n"), ["a.md"]);
        assert!(places(markdown_title, "a.md", "# A\n```sh\n# comment\n```\n").is_empty());
    }

    #[test]
    fn promised_tests_finds_names_of_tests_that_are_not_there() {
        let promises = "# A\n`a_b` `gone_is_the_test`,\n`here_is_the_test`.\n";
        let mut workspace = Workspace::default();
        workspace
            .files
            .push(SourceFile::new("docs/SECURITY.md", promises));
        workspace
            .files
            .push(SourceFile::new("a.rs", "fn here_is_the_test() {}\n"));
        let found = promised_tests(&workspace);
        assert_eq!(found.len(), 1);
        assert!(found[0].place == "docs/SECURITY.md:2" && found[0].message.contains("gone_is_the_test"));
        assert!(promised_tests(&Workspace::default()).is_empty());
    }

    #[test]
    fn developer_paths_finds_home_directories() {
        for directory in [
            concat!("/ho", "me/alice/x"),
            concat!("/ro", "ot/x"),
            concat!("/wo", "rk/x"),
        ] {
            assert_eq!(
                places(developer_paths, "a.sh", &format!("cd {directory}\n")),
                ["a.sh:1"]
            );
            assert_eq!(
                places(developer_paths, "a.rs", &format!("open(\"{directory}\")\n")),
                ["a.rs:1"]
            );
            assert!(
                places(
                    developer_paths,
                    "a.sh",
                    &format!("cd target{directory} \"$dir{directory}\"\n")
                )
                .is_empty()
            );
        }
    }

    #[test]
    fn registry_hosts_finds_a_host() {
        let text = concat!("see https://static.crates", ".io/x\n");
        assert_eq!(places(registry_hosts, "a.md", text), ["a.md:1"]);
        assert!(places(registry_hosts, "Cargo.lock", text).is_empty());
        assert!(places(registry_hosts, "fuzz/Cargo.lock", text).is_empty());
    }

    #[test]
    fn known_decisions_finds_a_policy_that_reads_them() {
        let text = "include_str!(\"../../../data/decisions/known/churn.toml\")\n";
        assert_eq!(
            places(known_decisions, "crates/policy/src/arrange.rs", text),
            ["crates/policy/src/arrange.rs:1"]
        );
        assert_eq!(
            places(known_decisions, "scripts/tune.py", "glob('data/decisions')\n"),
            ["scripts/tune.py:1"]
        );
        for path in [
            "crates/search/src/known.rs",
            "xtask/src/steps.rs",
            "docs/DECISIONS.md",
        ] {
            assert!(places(known_decisions, path, text).is_empty(), "{path}");
        }
    }
}

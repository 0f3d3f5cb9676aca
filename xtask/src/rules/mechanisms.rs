//! The rule on the table of mechanisms in docs/SOURCES.md: the papers, modules, tests, testbed cases and claims that its rows
//! name exist, and a row without a test, or without a real host, says why.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::Workspace;

const DOCUMENT: &str = "docs/SOURCES.md";
const CASES: &str = "testbed/src/cases/mod.rs";
const CLAIMS: &str = "data/published/claims.toml";
/// The head of the table's columns.
const HEAD: [&str; 5] = ["section", "mechanism", "where", "shown by", "on, departures"];
/// Real hosts and what runs on them. A mechanism that the last column has on none of these needs a reason.
const REAL: [&str; 3] = ["KVM", "Xen", "guest"];
const REFUSED: &str = "refused:";
/// The fewest words of a reason.
const REASON_WORDS_MIN: usize = 4;

/// Finds rows of the table of mechanisms that name what is not in the workspace, or that show nothing and give no reason.
pub(super) fn mechanisms(workspace: &Workspace) -> Vec<Finding> {
    let Some(document) = workspace.file(DOCUMENT) else {
        return Vec::new();
    };
    let rows = rows(&document.text);
    if rows.is_empty() {
        let columns = HEAD.join("', '");
        return vec![document.whole(format!(
            "no table of mechanisms: add one with the columns '{columns}'"
        ))];
    }
    let names = Names::of(workspace);
    let papers = papers(&document.text);
    let without = papers.iter().filter(|paper| {
        let is_of = |cells: &[&str]| cells.first().and_then(|cell| cell.split(' ').next()) == Some(**paper);
        !rows.iter().any(|(_, cells)| is_of(cells))
    });
    let without: Vec<Finding> = without
        .map(|paper| {
            document.whole(format!(
                "the table of mechanisms has no row of [{paper}]: add its mechanisms"
            ))
        })
        .collect();
    let of_rows = rows.iter().flat_map(|(index, cells)| {
        let faults = faults(cells, &papers, &names);
        faults.into_iter().map(|fault| document.at_line(*index, fault))
    });
    of_rows.chain(without).collect()
}

/// The names that rows may use.
#[derive(Default)]
struct Names<'a> {
    paths: BTreeSet<&'a str>,
    tests: BTreeSet<&'a str>,
    cases: BTreeSet<&'a str>,
    claims: BTreeSet<String>,
}

impl<'a> Names<'a> {
    /// Reads each file once, and collects its names.
    fn of(workspace: &'a Workspace) -> Self {
        let mut names = Self::default();
        for file in &workspace.files {
            names.paths.insert(&file.path);
            if file.ends_with(&[".rs"]) {
                names.tests.extend(tests(&file.text_without_literals));
            }
            match file.path.as_str() {
                CASES => names.cases.extend(cases(&file.text)),
                CLAIMS => names.claims.extend(claims(&file.text)),
                _ => {}
            }
        }
        names
    }

    /// Whether a file or a folder has this path.
    fn has_path(&self, path: &str) -> bool {
        let folder = format!("{path}/");
        let next = self.paths.range(folder.as_str()..).next();
        self.paths.contains(path) || next.is_some_and(|next| next.starts_with(&folder))
    }

    /// Whether `crate::module`, a crate's name, or a path from the root of the workspace exists.
    fn has_place(&self, name: &str) -> bool {
        let Some((package, module)) = name.split_once("::") else {
            return self.has_path(name) || self.has_path(&format!("crates/{name}"));
        };
        let source = format!("{}/src/{}", package.replace('_', "-"), module.replace("::", "/"));
        ["crates/", ""].iter().any(|base| {
            let path = format!("{base}{source}");
            self.has_path(&path) || self.has_path(&format!("{path}.rs"))
        })
    }

    /// Describes what a name in the column 'shown by' should refer to, if nothing of that name exists.
    fn missing(&self, name: &str) -> Option<String> {
        if self.tests.contains(name) || self.cases.contains(name) || self.claims.contains(name) {
            return None;
        }
        let (kind, place) = match name {
            _ if name.contains('_') => ("test", "the workspace's Rust files"),
            _ if name.contains('.') => ("claim", CLAIMS),
            _ => ("testbed case", CASES),
        };
        Some(format!("no {kind} `{name}` in {place}"))
    }
}

/// Returns the names of functions under `#[test]`.
fn tests(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim_start) {
        is_test |= line.starts_with("#[test]");
        if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test) {
            names.extend(rest.split(['(', '<']).next());
            is_test = false;
        }
    }
    names
}

/// Returns the first argument of each `case(…)` and `plain_case(…)` if it is a string.
fn cases(text: &str) -> Vec<&str> {
    let calls = text.split("case(").skip(1);
    calls
        .filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next())
        .collect()
}

/// Returns the ids of claims; none from a file that is not TOML, which other tests find.
fn claims(text: &str) -> Vec<String> {
    let table: toml::Table = toml::from_str(text).unwrap_or_default();
    let claims = table
        .get("claim")
        .and_then(toml::Value::as_array)
        .into_iter()
        .flatten();
    claims
        .filter_map(|claim| Some(claim.get("id")?.as_str()?.to_owned()))
        .collect()
}

/// Returns the keys of the papers, from the first cell of rows such as ``| `[TAVO]` | …``.
fn papers(text: &str) -> Vec<&str> {
    let keys = text.lines().filter_map(|line| line.strip_prefix("| `["));
    keys.filter_map(|rest| rest.split(']').next()).collect()
}

/// Returns the rows of the table of mechanisms, each with the index of its line.
fn rows(text: &str) -> Vec<(usize, Vec<&str>)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index, cells(line)));
    lines
        .skip_while(|(_, cells)| cells[..] != HEAD)
        .skip(2)
        .take_while(|(_, cells)| cells.len() > 1)
        .collect()
}

fn cells(line: &str) -> Vec<&str> {
    let line = line.trim().trim_start_matches('|').trim_end_matches('|');
    line.split('|').map(str::trim).collect()
}

/// Returns the words of a cell that are in backticks.
fn named(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Returns what is wrong with a row, each with the cell and the remedy.
fn faults(cells: &[&str], papers: &[&str], names: &Names<'_>) -> Vec<String> {
    let [section, mechanism, place, shown, on] = cells else {
        let count = cells.len();
        return vec![format!(
            "{count} cells, {} are needed: '{}'",
            HEAD.len(),
            HEAD.join("', '")
        )];
    };
    let mut faults = Vec::new();
    let mut add = |cell: &str, fault: String| faults.push(format!("{mechanism}, cell '{cell}': {fault}"));
    let paper = section.split_once(' ').map_or(*section, |(paper, _)| paper);
    if paper == *section || !papers.contains(&paper) {
        let known = papers.join(", ");
        add(
            HEAD[0],
            format!("'{section}' is no section of a paper: write one of {known}, a space, and the section"),
        );
    }
    let (shown, reason) = shown.split_once(REFUSED).unwrap_or((shown, ""));
    let words = reason.split_whitespace().count();
    let is_refused = words >= REASON_WORDS_MIN;
    if words > 0 && !is_refused {
        let remedy = format!("give a reason of at least {REASON_WORDS_MIN} words");
        add(HEAD[3], format!("'{REFUSED}{reason}' says little: {remedy}"));
    }
    let places = named(place);
    if places.is_empty() && !is_refused {
        add(
            HEAD[2],
            "no module: name one in backticks, as `policy::balance` or `guest/module`".to_owned(),
        );
    }
    for name in places.iter().filter(|name| !names.has_place(name)) {
        add(
            HEAD[2],
            format!("`{name}` does not exist: name the module, or the path from the root"),
        );
    }
    let proofs = named(shown);
    if proofs.is_empty() && words == 0 {
        let remedy = format!(
            "name a test, testbed case or claim in backticks, or write '{REFUSED} …' with the reason"
        );
        add(HEAD[3], format!("nothing shows it: {remedy}"));
    }
    for missing in proofs.iter().filter_map(|name| names.missing(name)) {
        add(HEAD[3], format!("{missing}: name the one that shows this now"));
    }
    if !is_refused && !REAL.iter().any(|host| on.contains(host)) {
        let remedy = format!(
            "begin with {}, or write '{REFUSED} …' with the reason in cell '{}'",
            REAL.join(", "),
            HEAD[3]
        );
        add(HEAD[4], format!("'{on}' names no real host: {remedy}"));
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::super::tree::SourceFile;
    use super::*;

    const PAPERS: &str = "# Sources\n| key | paper |\n|---|---|\n| `[A]` | One. |\n\n";
    const TABLE: &str = "section | mechanism | where | shown by | on, departures\n---|---|---|---|---\n";

    /// Returns the findings on a document with these rows in a small workspace.
    fn found(document: &str) -> Vec<String> {
        let test = "#[test]\n#[allow(unused)]\nfn a_move_is_undone() {}\nfn not_a_test() {}\n";
        let cases = "    case(\n        \"bring-home\",\n    ),\n    plain_case(\"page-log\", 1), case(\"module-6.1\", 1),\nconst fn case(\n    name: &str,\n";
        let files = [
            (DOCUMENT, document),
            ("crates/topology-page/src/page/mod.rs", test),
            ("crates/topology-page/src/layout.rs", ""),
            ("guest/module/Makefile", ""),
            (CASES, cases),
            (CLAIMS, "[[claim]]\nid = \"a.b-c\"\n"),
        ];
        let workspace = Workspace {
            files: files
                .iter()
                .map(|(path, text)| SourceFile::new(path, text))
                .collect(),
            ..Workspace::default()
        };
        let findings = mechanisms(&workspace);
        findings
            .into_iter()
            .map(|finding| format!("{}: {}", finding.place, finding.message))
            .collect()
    }

    fn of_row(row: &str) -> Vec<String> {
        let another = "A 0 | another | `guest` | `page-log` | KVM";
        found(&format!("{PAPERS}{TABLE}{row}\n{another}\n"))
    }

    #[test]
    fn rows_that_name_what_exists_are_accepted() {
        for row in [
            "A 1 | m | `topology_page::page` | `a_move_is_undone`, `bring-home` | KVM",
            "A 1.2 | m | `topology_page::layout`, `guest/module` | `a.b-c` | twin, KVM",
            "| A V.B | m | `topology-page` | `page-log` | Xen, twin |",
            "A 2 | m | - | refused: no kernel tells this | -",
            "A 2 | m | `guest` | `module-6.1` | guest",
            "A 2 | m | `guest` | `page-log`; refused: Xen has no such call | KVM",
            "A 3 | m | `guest` | `a.b-c`; refused: no processor has this | twin",
        ] {
            assert!(of_row(row).is_empty(), "{row}: {:?}", of_row(row));
        }
    }

    #[test]
    fn what_a_row_names_and_is_not_there_is_found_with_cell_and_remedy() {
        for (row, cell, said) in [
            ("B 1 | m | `guest` | `page-log` | KVM", "section", "'B 1'"),
            ("A | m | `guest` | `page-log` | KVM", "section", "'A'"),
            (
                "A 1 | m | `topology_page::gone` | `page-log` | KVM",
                "where",
                "`topology_page::gone`",
            ),
            ("A 1 | m | `guest/mod` | `page-log` | KVM", "where", "`guest/mod`"),
            ("A 1 | m | guest | `page-log` | KVM", "where", "no module"),
            (
                "A 1 | m | `guest` | `not_a_test` | KVM",
                "shown by",
                "no test `not_a_test`",
            ),
            (
                "A 1 | m | `guest` | `gone` | KVM",
                "shown by",
                "no testbed case `gone`",
            ),
            (
                "A 1 | m | `guest` | `a.gone` | KVM",
                "shown by",
                "no claim `a.gone`",
            ),
            (
                "A 1 | m | `guest` | page-log | KVM",
                "shown by",
                "nothing shows it",
            ),
            (
                "A 1 | m | `guest` | refused: not yet | KVM",
                "shown by",
                "says little",
            ),
            (
                "A 1 | m | `guest` | `page-log` | twin only",
                "on, departures",
                "names no real host",
            ),
        ] {
            let found = of_row(row);
            let expected = found.len() == 1
                && found[0].starts_with("docs/SOURCES.md:8: m, cell '")
                && found[0].contains(&format!("cell '{cell}'"))
                && found[0].contains(said);
            assert!(expected, "{row}: {found:?}");
        }
        assert!(of_row("A 1 | m | `guest` | `page-log`")[0].contains("4 cells"));
    }

    #[test]
    fn a_paper_without_rows_and_a_document_without_the_table_are_found() {
        let second = PAPERS.replace("\n\n", "\n| `[B]` | Two. |\n\n");
        let one = format!("{second}{TABLE}A 1 | m | `guest` | `page-log` | KVM\n");
        assert!(found(&one)[0].contains("no row of [B]"), "{:?}", found(&one));
        assert!(found(PAPERS)[0].contains("no table of mechanisms"));
        assert!(mechanisms(&Workspace::default()).is_empty());
    }
}

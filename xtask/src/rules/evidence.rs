//! The rule on what was measured where: the reports in `data/evidence`, their index, the table of docs/EVIDENCE.md, and what the
//! README's first paragraph says of them.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::Finding;
use super::tree::{SourceFile, Workspace};

/// The reports' folder, and its list of them.
const FOLDER: &str = "data/evidence/";
const INDEX: &str = "data/evidence/index.toml";
/// The document that has the table.
const TABLE: &str = "docs/EVIDENCE.md";
const BEGIN: &str = "<!-- reports -->";
const END: &str = "<!-- /reports -->";
const README: &str = "README.md";
/// How the README's sentence begins and ends.
const SAID_BEGIN: &str = "Measured on silicon:";
const SAID_END: &str = "([reports](docs/EVIDENCE.md)).";
/// Most columns of the README.
const COLUMNS: usize = 128;

/// What can be measured, as documents and as people call it.
const TOPICS: [(&str, &str); 11] = [
    ("crossover", "the agent on and off"),
    ("machine", "memory and caches"),
    ("counters", "hardware counters"),
    ("contention", "contention"),
    ("kyoto", "permits"),
    ("placement", "placement"),
    ("moving", "moving memory"),
    ("working-set", "working sets"),
    ("balancing", "NUMA balancing"),
    ("numad", "numad"),
    ("requests", "request times"),
];

/// The index.
#[derive(Deserialize)]
struct Index {
    report: Vec<Entry>,
}

/// A report in the index.
#[derive(Deserialize)]
struct Entry {
    /// The report's folder.
    folder: String,
    /// What the machine is, in words.
    what: String,
}

/// As much of a report as the table and the README say.
#[derive(Deserialize)]
struct Report {
    host: Host,
    crossover: Option<serde_json::Value>,
    sections: Vec<Section>,
}

#[derive(Deserialize)]
struct Host {
    hardware: String,
    nodes: usize,
}

#[derive(Deserialize)]
struct Section {
    topic: String,
    outcome: String,
    bearing: Option<String>,
    with: Option<String>,
}

impl Report {
    /// Returns what it measured: not counters that do not work, nor what needs far memory on a host that has none, nor VMs that
    /// were emulated.
    fn measured(&self) -> BTreeSet<&str> {
        let is_there = |section: &&Section| match section.topic.as_str() {
            "counters" => section.bearing.as_deref() != Some("against"),
            "placement" | "moving" | "balancing" | "numad" => self.host.nodes > 1,
            _ => true,
        };
        let sections = self.sections.iter().filter(is_there);
        let is_measured = |section: &&Section| {
            section.outcome == "measured" && section.with.as_deref() != Some("emulated-vms")
        };
        let measured = sections.filter(is_measured);
        let trial = self.crossover.iter().map(|_| "crossover");
        measured
            .map(|section| section.topic.as_str())
            .chain(trial)
            .collect()
    }
}

/// Checks that index, table and README say what the reports say.
pub(super) fn reports(workspace: &Workspace) -> Vec<Finding> {
    let Some(index) = workspace.file(INDEX) else {
        return Vec::new();
    };
    let entries = match toml::from_str::<Index>(&index.text) {
        Ok(index) => index.report,
        Err(error) => return vec![index.whole(error.to_string())],
    };
    let mut findings = unlisted(workspace, &entries);
    let (found, wrong) = read(workspace, index, &entries);
    findings.extend(wrong);
    findings.extend(workspace.file(TABLE).and_then(|file| in_table(file, &found)));
    findings.extend(workspace.file(README).and_then(|file| in_readme(file, &found)));
    findings
}

/// Returns the documents that say something else than the reports, as they should be.
pub(super) fn corrected(workspace: &Workspace) -> Vec<(&'static str, String)> {
    let Some(index) = workspace.file(INDEX) else {
        return Vec::new();
    };
    let entries = toml::from_str::<Index>(&index.text).map_or_else(|_| Vec::new(), |index| index.report);
    let (found, _) = read(workspace, index, &entries);
    let in_table = workspace.file(TABLE).and_then(|file| {
        let (before, rest) = file.text.split_once(BEGIN)?;
        let (_, after) = rest.split_once(END)?;
        Some((TABLE, format!("{before}{BEGIN}\n{}{END}{after}", table(&found))))
    });
    let in_readme = workspace.file(README).and_then(|file| {
        let (before, rest) = file.text.split_once(SAID_BEGIN)?;
        let (_, after) = rest.split_once(SAID_END)?;
        let text = format!("{before}{}{after}", sentence(&found));
        let paragraphs = text
            .split("\n\n")
            .map(|paragraph| match paragraph.contains(SAID_BEGIN) {
                true => wrapped(paragraph),
                false => paragraph.to_owned(),
            });
        Some((README, paragraphs.collect::<Vec<_>>().join("\n\n")))
    });
    in_table.into_iter().chain(in_readme).collect()
}

/// Reads the reports of the index.
fn read<'a>(
    workspace: &Workspace,
    index: &SourceFile,
    entries: &'a [Entry],
) -> (Vec<(&'a Entry, Report)>, Vec<Finding>) {
    let (mut found, mut wrong) = (Vec::new(), Vec::new());
    for entry in entries {
        let path = format!("{FOLDER}{}/evidence.json", entry.folder);
        let Some(file) = workspace.file(&path) else {
            wrong.push(index.whole(format!("there is no {path}")));
            continue;
        };
        match serde_json::from_str::<Report>(&file.text) {
            Ok(report) => found.push((entry, report)),
            Err(error) => wrong.push(file.whole(error.to_string())),
        }
    }
    (found, wrong)
}

/// Breaks the lines of a paragraph.
fn wrapped(paragraph: &str) -> String {
    let mut lines = vec![String::new()];
    for word in paragraph.split_whitespace() {
        let line = lines.last_mut().filter(|line| line.len() + word.len() < COLUMNS);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Finds files of reports that the index does not list.
fn unlisted(workspace: &Workspace, entries: &[Entry]) -> Vec<Finding> {
    let is_listed = |path: &str| {
        entries
            .iter()
            .any(|entry| path.split('/').next() == Some(&entry.folder))
    };
    let files = workspace.files.iter().filter(|file| file.path != INDEX);
    let reports = files.filter(|file| {
        file.path
            .strip_prefix(FOLDER)
            .is_some_and(|path| !is_listed(path))
    });
    reports
        .map(|file| file.whole(format!("add its folder to {INDEX}")))
        .collect()
}

fn in_table(file: &SourceFile, found: &[(&Entry, Report)]) -> Option<Finding> {
    let between = file
        .text
        .split_once(BEGIN)
        .and_then(|(_, rest)| rest.split_once(END));
    let expected = table(found);
    match between {
        Some((between, _)) if between.trim() == expected.trim() => None,
        _ => Some(file.whole(format!("write between '{BEGIN}' and '{END}':\n{expected}"))),
    }
}

fn in_readme(file: &SourceFile, found: &[(&Entry, Report)]) -> Option<Finding> {
    let paragraphs = file
        .text
        .split("\n\n")
        .map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
    let first = paragraphs
        .into_iter()
        .find(|text| !text.is_empty() && !text.starts_with('#'));
    let expected = sentence(found);
    match first {
        Some(first) if first.contains(&expected) => None,
        _ => Some(file.whole(format!("write in the first paragraph: {expected}"))),
    }
}

/// Lists the reports.
fn table(found: &[(&Entry, Report)]) -> String {
    let row = |(entry, report): &(&Entry, Report)| {
        let measured = report.measured();
        let (here, not) = in_words(|topic| measured.contains(topic));
        format!(
            "| [{}](../{FOLDER}{}/evidence.html) | {} | {} | {} |\n",
            entry.folder,
            entry.folder,
            entry.what,
            or_nothing(&here),
            or_nothing(&not)
        )
    };
    let rows: String = found.iter().map(row).collect();
    format!("| report | machine | measured | not measured there |\n|---|---|---|---|\n{rows}")
}

/// Writes the README's sentence: what was measured on real hardware, and what was not.
fn sentence(found: &[(&Entry, Report)]) -> String {
    let on = |hardware: &str| -> BTreeSet<&str> {
        let there = found
            .iter()
            .filter(|(_, report)| report.host.hardware == hardware);
        there.flat_map(|(_, report)| report.measured()).collect()
    };
    let (silicon, guest) = (on("silicon"), on("guest"));
    let (on_silicon, _) = in_words(|topic| silicon.contains(topic));
    let (in_guest, _) = in_words(|topic| guest.contains(topic) && !silicon.contains(topic));
    let (_, nowhere) = in_words(|topic| guest.contains(topic) || silicon.contains(topic));
    format!(
        "{SAID_BEGIN} {}; in a cloud's VM: {}; only on emulated hosts and the twin: {} {SAID_END}",
        or_nothing(&on_silicon),
        or_nothing(&in_guest),
        or_nothing(&nowhere)
    )
}

/// Splits what can be measured into what is and what is not.
fn in_words(is_it: impl Fn(&str) -> bool) -> (String, String) {
    let (are, are_not): (Vec<_>, Vec<_>) = TOPICS.into_iter().partition(|(topic, _)| is_it(topic));
    let joined = |topics: Vec<(&str, &'static str)>| {
        topics
            .into_iter()
            .map(|(_, words)| words)
            .collect::<Vec<_>>()
            .join(", ")
    };
    (joined(are), joined(are_not))
}

fn or_nothing(words: &str) -> &str {
    if words.is_empty() { "nothing yet" } else { words }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "[[report]]\nfolder = \"a\"\nwhat = \"a guest\"\n";
    const REPORT: &str = r#"{"host": {"hardware": "guest", "nodes": 1}, "crossover": null, "sections": [
        {"topic": "counters", "outcome": "measured", "bearing": "against"}, {"topic": "contention", "outcome": "measured"},
        {"topic": "kyoto", "outcome": "measured", "with": "emulated-vms"}, {"topic": "balancing", "outcome": "measured"},
        {"topic": "requests", "outcome": "not-possible"}]}"#;

    fn found(index: &str, report: &str, table: &str, readme: &str) -> Vec<String> {
        let files = [
            (INDEX, index),
            ("data/evidence/a/evidence.json", report),
            (TABLE, table),
            (README, readme),
        ];
        let files = files.map(|(path, text)| SourceFile::new(path, text)).into();
        let workspace = Workspace {
            files,
            ..Workspace::default()
        };
        reports(&workspace)
            .into_iter()
            .map(|finding| finding.message)
            .collect()
    }

    /// Returns a table and a README that say what a report says.
    fn written(report: &str) -> (String, String) {
        let entry = Entry {
            folder: "a".to_owned(),
            what: "a guest".to_owned(),
        };
        let found = [(&entry, serde_json::from_str(report).unwrap())];
        (
            format!("# T\n{BEGIN}\n{}{END}\n", table(&found)),
            format!(
                "# Homenode\n\nIt runs. {}\n\nMore.\n",
                sentence(&found).replace("; ", ";\n")
            ),
        )
    }

    #[test]
    fn table_and_readme_say_what_the_reports_say() {
        let (table, readme) = written(REPORT);
        assert!(table.contains("| a guest | contention |"), "{table}");
        assert!(
            readme.contains("silicon: nothing yet") && readme.contains("VM: contention;"),
            "{readme}"
        );
        assert_eq!(found(LISTED, REPORT, &table, &readme), [""; 0]);
        for silicon in [
            REPORT.replace("\"guest\"", "\"silicon\""),
            REPORT.replace("not-possible", "measured"),
        ] {
            let said = found(LISTED, &silicon, &table, &readme);
            assert!(
                said.iter().any(|said| said.contains("first paragraph")),
                "{said:?}"
            );
        }
        // A figure in another paragraph does not count.
        let later = readme.replace("It runs. ", "It runs.\n\n");
        assert_eq!(found(LISTED, REPORT, &table, &later).len(), 1);
        assert_eq!(found(LISTED, REPORT, "# T\n", &readme).len(), 1);
    }

    #[test]
    fn what_is_corrected_says_what_the_reports_say() {
        let (table, readme) = written(&REPORT.replace("\"guest\"", "\"emulated\""));
        let files = [
            (INDEX, LISTED),
            ("data/evidence/a/evidence.json", REPORT),
            (TABLE, &table),
            (README, &readme),
        ];
        let workspace = Workspace {
            files: files.map(|(path, text)| SourceFile::new(path, text)).into(),
            ..Workspace::default()
        };
        let [(TABLE, table), (README, readme)] = &corrected(&workspace)[..] else {
            panic!("both are wrong");
        };
        assert_eq!(found(LISTED, REPORT, table, readme), [""; 0]);
        assert!(
            readme.starts_with("# Homenode\n\nIt runs. ") && readme.ends_with("\n\nMore.\n"),
            "{readme}"
        );
        assert!(readme.lines().all(|line| line.len() <= COLUMNS), "{readme}");
    }

    #[test]
    fn each_report_is_in_the_index_and_each_of_the_index_is_there() {
        let (table, readme) = written(REPORT);
        let other = LISTED.replace("\"a\"", "\"b\"");
        let said = found(&other, REPORT, &table, &readme).join(" ");
        assert!(
            said.contains("add its folder") && said.contains("there is no data/evidence/b/"),
            "{said}"
        );
        assert!(!found(LISTED, "{}", &table, &readme).is_empty());
        assert!(!found("report", REPORT, &table, &readme).is_empty());
    }
}

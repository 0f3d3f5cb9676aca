//! The rule that counts words that make a reader read a sentence twice: they name no actor, or translate another language.

use super::Finding;
use super::tree::{SourceFile, Workspace};

/// The words, or sequences of words, and what to write instead.
const RIDDLES: [(&[&str], &str); 17] = [
    (&["nobody"], "name the actor: 'no client', 'the agent never'"),
    (&["somebody"], "name the actor: 'another program', 'an operator'"),
    (&["whoever"], "name the actor: 'any process that'"),
    (&["anew"], "'again', or a verb: 'rewrites', 'starts over'"),
    (&["so", "many"], "say how many: '`count` pages', 'this many'"),
    (&["so", "much"], "say how much: '`bytes` of it', 'this much'"),
    (&["give", "back"], "'restore', 'return' or 'release'"),
    (&["gives", "back"], "'restore', 'return' or 'release'"),
    (&["gave", "back"], "'restore', 'return' or 'release'"),
    (&["given", "back"], "'restored', 'returned' or 'released'"),
    (&["giving", "back"], "'restoring', 'returning' or 'releasing'"),
    (&["as", "it", "is", "found"], "say what is found"),
    (&["and", "of", "them"], "begin with the noun"),
    (&["of", "those", "that"], "begin with the noun"),
    (&["he"], "'they', or the program's name"),
    (&["his"], "'their', or the program's name"),
    (&["him"], "'them', or the program's name"),
];

/// Finds these words in all text that people read.
pub(super) fn riddles(workspace: &Workspace) -> Vec<Finding> {
    let read = |file: &&SourceFile| {
        let is_rule = file.path.starts_with("xtask/src/rules/words.rs");
        file.ends_with(&[".rs", ".md", ".py", ".sh", ".js", ".html"]) && !is_rule
    };
    let files = workspace.files.iter().filter(read);
    files.flat_map(of_file).collect()
}

fn of_file(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let line = line.to_lowercase();
        // A name in code counts as one word, so `nobody_acts` contains none of the words above.
        let words: Vec<&str> = line
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .filter(|word| !word.is_empty())
            .collect();
        for (riddle, better) in RIDDLES {
            let count = words
                .windows(riddle.len())
                .filter(|window| *window == riddle)
                .count();
            let finding = || file.at_line(index, format!("'{}': {better}", riddle.join(" ")));
            findings.extend(std::iter::repeat_with(finding).take(count));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(path: &str, text: &str) -> Vec<String> {
        let workspace = Workspace {
            files: vec![SourceFile::new(path, text)],
            ..Workspace::default()
        };
        let findings = riddles(&workspace);
        findings.into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn riddles_are_found_in_comments_strings_and_documents_and_not_in_names() {
        let text = "// Nobody knows.\nlet said = \"given back, so much\";\nfn nobody_acts() {}\n";
        assert_eq!(places("a.rs", text), ["a.rs:1", "a.rs:2", "a.rs:2"]);
        assert_eq!(
            places("a.md", "It is his, and his alone.\n"),
            ["a.md:1", "a.md:1"]
        );
        assert!(places("a.toml", "# nobody\n").is_empty());
    }
}

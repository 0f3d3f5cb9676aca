//! The rule on duplicated code.

use std::collections::{BTreeMap, HashMap};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::Item;

use super::Finding;
use super::syntax::shipped;
use super::tree::{SourceFile, Workspace};

/// Minimum length of a duplicate, in counted lines. With brackets, comments and blank lines, 12 counted lines are about 20
/// lines of a file.
const LINES: usize = 12;

/// The other languages that are checked, and how their comments and imports begin.
const OTHERS: [(&str, &[&str]); 5] = [
    (".c", &["//", "/*", "*", "#include"]),
    (".h", &["//", "/*", "*", "#include"]),
    (".js", &["//", "/*", "*", "import "]),
    (".py", &["#", "import ", "from "]),
    (".sh", &["#"]),
];

/// The counted lines of a file, each with its line number, from 1.
struct Lines<'a> {
    file: &'a SourceFile,
    lines: Vec<(usize, String)>,
}

/// Finds runs of at least 12 lines that also occur elsewhere. Only lines of shipped code count, compared without white space.
/// Comments, imports, constants (tables) and lines with only closing brackets do not count.
pub(super) fn duplicates(workspace: &Workspace) -> Vec<Finding> {
    let mut all: Vec<Lines<'_>> = Vec::new();
    for source in shipped(workspace) {
        let lines = of_rust(&source.syntax);
        all.push(Lines {
            file: source.file,
            lines,
        });
    }
    for file in &workspace.files {
        let language = OTHERS.iter().find(|(ending, _)| file.path.ends_with(ending));
        all.extend(language.map(|(_, left_out)| Lines {
            file,
            lines: of_others(&file.text, left_out),
        }));
    }
    let mut first_places: HashMap<Vec<&str>, (usize, usize)> = HashMap::new();
    let mut findings = Vec::new();
    for (number, own) in all.iter().enumerate() {
        let mut at = 0;
        while at + LINES <= own.lines.len() {
            let run: Vec<&str> = own.lines[at..at + LINES]
                .iter()
                .map(|(_, line)| &**line)
                .collect();
            let there = *first_places.entry(run).or_insert((number, at));
            // A repeated line makes overlapping runs of one file equal: these are not duplicates.
            let is_apart = there.0 != number || there.1 + LINES <= at;
            if there == (number, at) || !is_apart {
                at += 1;
                continue;
            }
            let other = &all[there.0];
            let length = same(&own.lines[at..], &other.lines[there.1..]);
            let message = format!(
                "{length} lines as from {}:{} on: say it once",
                other.file.path, other.lines[there.1].0
            );
            findings.push(own.file.at_line(own.lines[at].0 - 1, message));
            at += length;
        }
    }
    findings
}

/// Returns how many lines from here on are equal in both.
fn same(one: &[(usize, String)], other: &[(usize, String)]) -> usize {
    one.iter()
        .zip(other)
        .take_while(|((_, a), (_, b))| a == b)
        .count()
}

fn of_rust(syntax: &syn::File) -> Vec<(usize, String)> {
    let mut lines = BTreeMap::new();
    for item in &syntax.items {
        add_item(item, &mut lines);
    }
    lines.into_iter().filter(|(_, line)| is_code(line)).collect()
}

fn add_item(item: &Item, lines: &mut BTreeMap<usize, String>) {
    match item {
        Item::Use(_) | Item::Const(_) | Item::Static(_) => {}
        Item::Mod(module) => {
            for item in module.content.iter().flat_map(|(_, items)| items) {
                add_item(item, lines);
            }
        }
        other => add(other.to_token_stream(), lines),
    }
}

/// Adds each token to the line in which it begins, except doc comments.
fn add(tokens: TokenStream, lines: &mut BTreeMap<usize, String>) {
    let mut tokens = tokens.into_iter().peekable();
    let mut put = |line: usize, text: &str| {
        let line = lines.entry(line).or_default();
        line.push_str(text);
        line.push(' ');
    };
    while let Some(token) = tokens.next() {
        match &token {
            TokenTree::Punct(mark)
                if mark.as_char() == '#' && tokens.peek().is_some_and(is_documentation) =>
            {
                tokens.next();
            }
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::None => ("", ""),
                };
                put(group.span_open().start().line, open);
                let mut inner = BTreeMap::new();
                add(group.stream(), &mut inner);
                inner.iter().for_each(|(line, text)| put(*line, text.trim_end()));
                put(group.span_close().start().line, close);
            }
            other => put(other.span().start().line, &other.to_string()),
        }
    }
}

fn is_documentation(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else {
        return false;
    };
    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(name)) if name == "doc")
}

fn of_others(text: &str, left_out: &[&str]) -> Vec<(usize, String)> {
    let lines = text.lines().enumerate();
    let lines = lines.map(|(index, line)| (index + 1, line.split_whitespace().collect::<Vec<_>>().join(" ")));
    let counts = |line: &str| is_code(line) && !left_out.iter().any(|begin| line.starts_with(begin));
    lines.filter(|(_, line)| counts(line)).collect()
}

/// Whether a line has anything but closing brackets.
fn is_code(line: &str) -> bool {
    line.chars().any(|c| !c.is_whitespace() && !"})];,".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::crates::tests::places;

    fn found(files: &[(&str, String)]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(path, text)| SourceFile::new(path, text))
            .collect();
        places(duplicates(&Workspace {
            files,
            ..Workspace::default()
        }))
    }

    fn calls(count: usize) -> String {
        (0..count)
            .map(|at| format!("    call{at}(1,\n 2);\n    // said {at}\n\n"))
            .collect()
    }

    #[test]
    fn duplicates_finds_lines_that_stand_twice() {
        let long = format!("/// One.\nfn one() {{\n{}}}\n", calls(6));
        let other = format!(
            "use a::b;\n\n\n\nfn other() {{\n{}}}\n",
            calls(6).replace("    ", "\t").replace("said", "told")
        );
        let files = [("crates/a/src/a.rs", long), ("crates/b/src/b.rs", other)];
        assert_eq!(found(&files), ["crates/b/src/b.rs:6"]);
        let script = (0..12).map(|at| format!("run {at}\n")).collect::<String>();
        assert_eq!(
            found(&[("a.sh", script.clone()), ("b.sh", format!("# b\n{script}"))]),
            ["b.sh:2"]
        );
    }

    #[test]
    fn duplicates_leaves_tables_tests_and_what_repeats_itself_alone() {
        let table = |name: &str| {
            let rows: String = (0..30).map(|at| format!("    ({at}, {at}),\n")).collect();
            format!("const {name}: [(u8, u8); 30] = [\n{rows}];\n")
        };
        let test = |name: &str| format!("#[cfg(test)]\nmod {name} {{\nfn f() {{\n{}}}\n}}\n", calls(20));
        let short = format!("fn f() {{\n{}}}\n", calls(5));
        let same = format!("fn g() {{\n{}}}\n", "    again();\n".repeat(20));
        let text = |name: &str| format!("{}{}{short}", table(name), test(name));
        assert_eq!(
            found(&[
                ("crates/a/src/a.rs", text("A") + &same),
                ("crates/b/src/b.rs", text("B"))
            ]),
            [""; 0]
        );
    }
}

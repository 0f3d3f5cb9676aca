//! Parses Rust files to find the workspace's shipped code, without tests.

use std::collections::BTreeSet;
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Attribute, ImplItem, Item};

use super::tree::{SourceFile, Workspace};

/// A Rust file that is part of a library or a program.
pub(super) struct Shipped<'a> {
    /// The file.
    pub file: &'a SourceFile,
    /// The file's syntax tree without tests.
    pub syntax: syn::File,
}

/// A path in code that begins with one of the requested names, such as `std::fs::read`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// The path's names, including the first; `*` for a glob import.
    pub names: Vec<String>,
    /// The line where the path ends, from 1.
    pub line: usize,
}

/// Returns all shipped Rust files: the files below a `src` folder, without their `#[cfg(test)]` parts. A file that does not
/// parse is left out, as the compiler reports it.
pub(super) fn shipped(workspace: &Workspace) -> Vec<Shipped<'_>> {
    let sources = workspace.files.iter().filter(|file| file.ends_with(&[".rs"]));
    let parsed: Vec<(&SourceFile, syn::File)> = sources
        .filter(|file| file.path.split('/').any(|folder| folder == "src"))
        .filter_map(|file| Some((file, syn::parse_file(&file.text).ok()?)))
        .collect();
    let tests: BTreeSet<String> = parsed
        .iter()
        .flat_map(|(file, syntax)| test_modules(&file.path, &syntax.items))
        .collect();
    let is_test = |path: &str| {
        let whole = path.trim_end_matches(".rs").trim_end_matches("/mod");
        let mut folders = Path::new(whole).ancestors();
        folders.any(|folder| tests.contains(&folder.display().to_string()))
    };
    let ship = parsed.into_iter().filter(|(file, _)| !is_test(&file.path));
    ship.map(|(file, mut syntax)| {
        leave_out_tests(&mut syntax.items);
        Shipped { file, syntax }
    })
    .collect()
}

/// Returns the folder in which a file's modules are.
pub(super) fn folder(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some((folder, "mod.rs" | "lib.rs" | "main.rs")) => folder,
        _ => path.trim_end_matches(".rs"),
    }
}

/// Returns the test-only modules that have a file of their own, as paths without `.rs`.
fn test_modules<'a>(path: &'a str, items: &'a [Item]) -> impl Iterator<Item = String> + 'a {
    items.iter().filter_map(move |item| match item {
        Item::Mod(module) if module.content.is_none() && is_for_tests(&module.attrs) => {
            Some(format!("{}/{}", folder(path), module.ident))
        }
        _ => None,
    })
}

/// Whether one of the attributes is `#[cfg(test)]` or `#[cfg(all(test, …))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        let words = list.tokens.to_string();
        list.path.is_ident("cfg") && (words == "test" || words.starts_with("all (test"))
    })
}

fn leave_out_tests(items: &mut Vec<Item>) {
    items.retain(|item| !is_for_tests(attributes(item)));
    for item in items {
        match item {
            Item::Mod(module) => {
                if let Some((_, items)) = &mut module.content {
                    leave_out_tests(items);
                }
            }
            Item::Impl(block) => block
                .items
                .retain(|item| !matches!(item, ImplItem::Fn(function) if is_for_tests(&function.attrs))),
            _ => {}
        }
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns every path in imports, expressions, types and macros that begins with one of these names.
pub(super) fn paths(syntax: &syn::File, first: &[&str]) -> Vec<Named> {
    let mut found = Vec::new();
    scan(syntax.to_token_stream(), first, &mut found);
    found
}

fn scan(tokens: TokenStream, first: &[&str], found: &mut Vec<Named>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Group(group) => scan(group.stream(), first, found),
            TokenTree::Ident(name) if first.iter().any(|first| name == first) && is_path(&tokens, at) => {
                at = path_from(&tokens, at, &[], found);
                continue;
            }
            _ => {}
        }
        at += 1;
    }
}

/// Whether a path begins at this token. Otherwise it is a variable or a field of that name, or a later part of a path.
fn is_path(tokens: &[TokenTree], at: usize) -> bool {
    let before = |by: usize| at.checked_sub(by).map(|at| &tokens[at]);
    let is_import = matches!(before(1), Some(TokenTree::Ident(word)) if word == "use");
    let goes_on = at >= 3 && is_colons(tokens, at - 2) && matches!(before(3), Some(TokenTree::Ident(_)));
    is_import || (is_colons(tokens, at + 1) && !goes_on)
}

fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    colon(at) && colon(at + 1)
}

/// Follows a path from its name at `at`; `before` are the names in front of it. A list of imports at the end yields several
/// paths. Returns the position after the path.
fn path_from(tokens: &[TokenTree], at: usize, before: &[String], found: &mut Vec<Named>) -> usize {
    let mut names = before.to_vec();
    let mut at = at;
    loop {
        let line = tokens[at].span().end().line;
        match &tokens[at] {
            TokenTree::Group(list) if list.delimiter() == Delimiter::Brace => {
                let list: Vec<TokenTree> = list.stream().into_iter().collect();
                for entry in list.split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ',')) {
                    if !entry.is_empty() {
                        path_from(entry, 0, &names, found);
                    }
                }
                return at + 1;
            }
            TokenTree::Ident(name) if name == "self" && !names.is_empty() => {}
            name @ (TokenTree::Ident(_) | TokenTree::Punct(_)) => names.push(name.to_string()),
            _ => {}
        }
        let goes_on = is_colons(tokens, at + 1)
            && match tokens.get(at + 3) {
                Some(TokenTree::Ident(_)) => true,
                Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Brace,
                Some(TokenTree::Punct(punct)) => punct.as_char() == '*',
                _ => false,
            };
        if !goes_on {
            found.push(Named { names, line });
            return at + 1;
        }
        at += 3;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str, first: &[&str]) -> Vec<String> {
        let syntax = syn::parse_file(text).expect("Rust");
        let found = paths(&syntax, first);
        found
            .iter()
            .map(|path| format!("{}:{}", path.line, path.names.join("::")))
            .collect()
    }

    #[test]
    fn paths_are_found_in_imports_expressions_types_and_macros() {
        let text = "use std::{fs, io::{self, Read as _}, *};\nfn f(a: std::net::IpAddr) { ::std::env::args::<u8>(); }\n\
            fn g() { format!(\"{}\", std::process::id()); let std = x.std; a::std::b; }\n";
        let found = [
            "1:std::fs",
            "1:std::io",
            "1:std::io::Read",
            "1:std::*",
            "2:std::net::IpAddr",
            "2:std::env::args",
            "3:std::process::id",
        ];
        assert_eq!(named(text, &["std"]), found);
    }

    fn named_items(items: &[Item]) -> Vec<String> {
        let modules = items.iter().filter_map(|item| match item {
            Item::Mod(module) => Some(module),
            _ => None,
        });
        let empty =
            |module: &&syn::ItemMod| module.content.as_ref().is_none_or(|(_, items)| items.is_empty());
        modules
            .filter(empty)
            .map(|module| module.ident.to_string())
            .collect()
    }

    #[test]
    fn tests_do_not_ship() {
        let files = [
            (
                "crates/a/src/lib.rs",
                "mod b;\n#[cfg(test)]\nmod c;\nmod d { #[cfg(test)] fn f() {} }\n#[cfg(test)]\nmod e {\n}\n",
            ),
            ("crates/a/src/b.rs", "fn b() {}\n#[cfg(test)]\nmod tests;\n"),
            ("crates/a/src/b/tests.rs", "fn t() {}\n"),
            ("crates/a/src/c.rs", "fn c() {}\n"),
            ("crates/a/src/c/deep/mod.rs", "fn c() {}\n"),
            ("crates/a/tests/t.rs", "fn t() {}\n"),
        ];
        let files = files
            .iter()
            .map(|(path, text)| SourceFile::new(path, text))
            .collect();
        let workspace = Workspace {
            files,
            ..Workspace::default()
        };
        let shipped = shipped(&workspace);
        let paths: Vec<&str> = shipped.iter().map(|source| source.file.path.as_str()).collect();
        assert_eq!(paths, ["crates/a/src/lib.rs", "crates/a/src/b.rs"]);
        assert_eq!(named_items(&shipped[0].syntax.items), ["b", "d"]);
    }
}

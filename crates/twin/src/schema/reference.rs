//! The reference of file formats, docs/FORMATS.md, from the schemas of the files.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Map, Value};

/// Writes a reference: a section for each kind of file, with a table for each type that it has.
#[derive(Default)]
pub(super) struct Reference {
    text: String,
    /// Types that have a table already: files of two kinds share some.
    told: BTreeSet<String>,
    /// Notations by name, with an example of each.
    notations: Vec<(String, String)>,
}

impl Reference {
    /// Adds a kind of file: its schema, and the path of an example from the root of the workspace.
    pub(super) fn file(&mut self, title: &str, schema: &Value, example: &str) {
        let defs = schema["$defs"].as_object().cloned().unwrap_or_default();
        let _ = write!(self.text, "\n## {title}\n\n{}\n\n", prose(schema));
        self.properties(schema, &defs);
        let _ = writeln!(self.text, "\nAn example is [`{example}`](../{example}).");
        let mut names = Vec::new();
        mentions(schema, &defs, &mut names);
        for name in names {
            if self.told.insert(name.clone()) {
                self.definition(&name, &defs[&name], &defs);
            }
        }
    }

    /// Returns the document.
    pub(super) fn document(mut self) -> String {
        let mut text = HEAD.to_owned();
        self.notations.sort();
        self.notations.dedup();
        for (name, example) in &self.notations {
            let _ = writeln!(text, "| {} | `\"{example}\"` |", words(name));
        }
        homenode_units::with_reading_time(&(text + &self.text))
    }

    fn definition(&mut self, name: &str, schema: &Value, defs: &Map<String, Value>) {
        if let Some(example) = schema["examples"][0].as_str() {
            self.notations.push((name.to_owned(), example.to_owned()));
            return;
        }
        let _ = write!(self.text, "\n### {name}\n\n{}\n\n", prose(schema));
        match variants(schema) {
            Some(variants) => variants.iter().for_each(|variant| self.variant(variant, defs)),
            None => self.properties(schema, defs),
        }
    }

    /// Writes one of the values that a type may have.
    fn variant(&mut self, schema: &Value, defs: &Map<String, Value>) {
        let meaning = prose(schema);
        let line = match (
            &schema["const"],
            schema["enum"].as_array(),
            schema["properties"].as_object(),
        ) {
            (Value::String(word), ..) => format!("`\"{word}\"`: {meaning}"),
            (_, Some(words), _) => {
                let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
                format!("{}: {meaning}", quoted.join(", "))
            }
            (.., Some(properties)) => {
                let keys: Vec<String> = properties
                    .iter()
                    .map(|(key, of)| property(key, of, schema, defs))
                    .collect();
                format!("{{ {} }}: {meaning}", keys.join(", "))
            }
            _ => format!("{}: {meaning}", type_of(schema, defs)),
        };
        let _ = writeln!(self.text, "- {}", line.trim_end_matches([':', ' ']));
    }

    fn properties(&mut self, schema: &Value, defs: &Map<String, Value>) {
        let Some(properties) = schema["properties"].as_object() else {
            return;
        };
        let is_required = |key: &str| required(schema).any(|name| name == key);
        let (first, rest): (Vec<_>, Vec<_>) = properties.iter().partition(|(key, _)| is_required(key));
        for (key, of) in first.into_iter().chain(rest) {
            let default = match &of["default"] {
                _ if is_required(key) => "; required".to_owned(),
                Value::Null | Value::Object(_) => String::new(),
                Value::Array(list) if list.is_empty() => String::new(),
                Value::String(text) if text.is_empty() => String::new(),
                default => format!("; default `{default}`"),
            };
            let kind = type_of(of, defs);
            let _ = writeln!(self.text, "- `{key}` ({kind}{default}): {}", prose(of));
        }
    }
}

const HEAD: &str = "# File formats

*For people who write machines, scenarios or workloads.*

Every key of the files that the twin reads, from the types that read them: `cargo xtask schema` writes this page, and the JSON schemas
in `data/schema`, by which editors complete and check such files. A key that is not listed is refused, with the nearest one that is.

| notation | example |
|---|---|
";

/// Returns a key with its type, as the values of an enumeration that are tables show it.
fn property(key: &str, of: &Value, schema: &Value, defs: &Map<String, Value>) -> String {
    let optional = if required(schema).any(|name| name == key) {
        ""
    } else {
        "?"
    };
    match of["properties"].as_object() {
        Some(inner) => {
            let inner: Vec<String> = inner
                .iter()
                .map(|(key, deep)| property(key, deep, of, defs))
                .collect();
            format!("`{key}`{optional} = {{ {} }}", inner.join(", "))
        }
        None => format!("`{key}`{optional} = {}", type_of(of, defs)),
    }
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

fn variants(schema: &Value) -> Option<&Vec<Value>> {
    schema["oneOf"].as_array().or_else(|| schema["anyOf"].as_array())
}

/// Returns the description on one line.
fn prose(schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_default();
    text.split("\n\n")
        .map(|paragraph| paragraph.replace('\n', " "))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the type of a value in words.
fn type_of(schema: &Value, defs: &Map<String, Value>) -> String {
    if let Some(name) = reference(schema) {
        return match defs.get(name) {
            Some(of) if of["examples"].is_array() => words(name),
            Some(of) if of["type"].is_string() && of["properties"].is_null() => type_of(of, defs),
            _ => format!("[{name}](#{})", name.to_lowercase()),
        };
    }
    if let Some(one) = variants(schema).and_then(|some| some.iter().find(|one| one["type"] != "null")) {
        return type_of(one, defs);
    }
    if let Some(items) = schema["prefixItems"].as_array() {
        let items: Vec<String> = items.iter().map(|item| type_of(item, defs)).collect();
        return format!("[{}]", items.join(", "));
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").and_then(Value::as_str),
        kind => kind.as_str(),
    };
    match kind {
        Some("array") => format!("list of {}", type_of(&schema["items"], defs)),
        Some("object") => "table".to_owned(),
        Some("string") => "text".to_owned(),
        Some("integer") => "whole number".to_owned(),
        Some("boolean") => "`true` or `false`".to_owned(),
        Some(other) => other.to_owned(),
        None => "any".to_owned(),
    }
}

fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// Appends the types that a schema mentions, directly or through others, in the order of their first mention.
fn mentions(schema: &Value, defs: &Map<String, Value>, names: &mut Vec<String>) {
    let mut found = Vec::new();
    direct(schema, &mut found);
    for name in found {
        let is_plain =
            |of: &Value| of["type"].is_string() && of["properties"].is_null() && of["examples"].is_null();
        if !names.contains(&name) && defs.get(&name).is_some_and(|of| !is_plain(of)) {
            names.push(name.clone());
            mentions(&defs[&name], defs, names);
        }
    }
}

fn direct(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(map) => {
            found.extend(reference(schema).map(str::to_owned));
            map.iter()
                .filter(|(key, _)| *key != "$defs")
                .for_each(|(_, value)| direct(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| direct(value, found)),
        _ => {}
    }
}

/// Returns a type's name as words: `MemoryPolicy` as "memory policy".
fn words(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !text.is_empty() {
            text.push(' ');
        }
        text.extend(c.to_lowercase());
    }
    text
}

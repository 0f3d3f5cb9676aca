//! Finds the places of errors that are noticed only after a file was read.

use std::path::{Path, PathBuf};

use homenode_units::BadSetting;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{FileError, Place, Problem, place};

/// A file that was read, kept so that later complaints can name their place: about a name that occurs twice in the file, or a
/// figure that is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// Returns the file at this path with this text.
    pub fn new(path: impl AsRef<Path>, text: &str) -> Source {
        Source {
            path: path.as_ref().to_owned(),
            text: text.to_owned(),
        }
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a complaint about a key, which is given with its tables and list indices from 0: `vm[1].workload`. If the key is
    /// not in the file because its default is what is wrong, the place is that of the enclosing table.
    pub fn complaint(&self, key: &str, message: impl Into<String>) -> FileError {
        let segments: Vec<(&str, Vec<usize>)> = key.split('.').map(segment).collect();
        let names: Vec<&str> = segments.iter().map(|(name, _)| *name).collect();
        FileError {
            path: self.path.clone(),
            place: self.find(&segments),
            key: names.join("."),
            problem: Box::new(Problem::Value(message.into())),
        }
    }

    /// Returns a complaint about an invalid setting.
    pub fn bad_setting(&self, bad: &BadSetting) -> FileError {
        let mut found = self.complaint(&bad.key, "");
        *found.problem = Problem::Setting(bad.to_string());
        found
    }

    fn find(&self, segments: &[(&str, Vec<usize>)]) -> Option<Place> {
        let document = DeTable::parse(&self.text).ok()?;
        let mut table = document.get_ref();
        let mut found = None;
        for (name, entries) in segments {
            let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == name) else {
                break;
            };
            let (start, value) = entry(key.span().start, value, entries);
            found = Some(place(&self.text, start));
            match value {
                DeValue::Table(inner) => table = inner,
                _ => break,
            }
        }
        found
    }
}

/// Splits `vm[1]` into a name and the indices.
fn segment(text: &str) -> (&str, Vec<usize>) {
    let mut parts = text.split('[');
    let name = parts.next().unwrap_or_default();
    let entries = parts.filter_map(|part| part.trim_end_matches(']').parse().ok());
    (name, entries.collect())
}

/// Returns the value of a key, or the entry of its list at these indices, and where it begins.
fn entry<'a>(
    key_start: usize,
    value: &'a Spanned<DeValue<'a>>,
    entries: &[usize],
) -> (usize, &'a DeValue<'a>) {
    let mut found = (key_start, value.get_ref());
    for at in entries {
        let DeValue::Array(list) = found.1 else { break };
        let mut whole = list.iter();
        let Some(inner) = whole.nth(*at) else { break };
        found = (inner.span().start, inner.get_ref());
    }
    found
}

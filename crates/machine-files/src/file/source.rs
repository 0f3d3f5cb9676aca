//! Places of what is found wrong only after a file was read.

use std::path::{Path, PathBuf};

use homenode_units::BadSetting;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{FileError, Place, Problem, place};

/// A file that was read, kept so that a complaint that comes up later still names its place: a name that nothing else
/// in the file bears, a figure that is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// The file at this path with this text.
    pub fn new(path: impl AsRef<Path>, text: &str) -> Source {
        Source {
            path: path.as_ref().to_owned(),
            text: text.to_owned(),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A complaint about a key, written with its tables and the entries of lists from 0: `vm[1].workload`. Where the
    /// key is not in the file (its default is what is wrong) the place is that of the table it would be in.
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

    /// A complaint about a setting that may not be what it is.
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

/// `vm[1]` as a name and the entries asked for.
fn segment(text: &str) -> (&str, Vec<usize>) {
    let mut parts = text.split('[');
    let name = parts.next().unwrap_or_default();
    let entries = parts.filter_map(|part| part.trim_end_matches(']').parse().ok());
    (name, entries.collect())
}

/// The value of a key, or an entry of the list that it is, and where that begins.
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

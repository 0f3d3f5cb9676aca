//! Reads TOML files that people write: the single mechanism for machines, scenarios, workloads and configuration.
//!
//! A Rust type defines the valid contents of a file (with `#[serde(deny_unknown_fields)]` on every struct). This module turns a
//! mismatch into a sentence with path, line, column and key, and suggests the nearest valid key or value for a misspelt one.

use std::fmt::{self, Write as _};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use homenode_units::{BadSetting, Candidates};
use serde::de::DeserializeOwned;

mod every;
mod source;

pub use every::read_toml_every;
pub use source::Source;

/// Largest file that is read. The project's largest files have a few KiB.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a file could not be read, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// Where the problem begins, if known.
    pub place: Option<Place>,
    /// The key that has the problem, with its enclosing tables: `hardware.latency.l1_cycles`. Empty if it is the whole file.
    pub key: String,
    /// The problem, boxed to keep results small.
    pub problem: Box<Problem>,
}

/// A place in a text file. Lines and columns are counted from 1, columns in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
}

/// The problem with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// An unknown key.
    UnknownKey {
        /// The key as written.
        key: String,
        /// The keys that are valid there.
        valid: Candidates,
    },
    /// A word that is not allowed.
    UnknownWord {
        /// The word as written.
        word: String,
        /// The words that are allowed there.
        valid: Candidates,
    },
    /// A missing key that is required.
    MissingKey {
        /// The key.
        key: String,
    },
    /// A value that has the wrong type, or is out of its type's range.
    WrongType {
        /// What was found, in words.
        found: String,
        /// What is expected, in words.
        expected: String,
    },
    /// A value that its type refuses; holds the type's message.
    Value(String),
    /// An invalid setting; holds a sentence that names its key ([`homenode_units::BadSetting`]).
    Setting(String),
    /// The file is not TOML.
    Syntax(String),
    /// The file could not be read.
    Unreadable(io::ErrorKind),
    /// The file is larger than [`FILE_BYTES_MAX`].
    TooLarge,
    /// The file is not UTF-8.
    NotText,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::UnknownKey { key, valid } => write!(f, "unknown key `{key}`{valid}"),
            Problem::UnknownWord { word, valid } => write!(f, "unknown value `{word}`{valid}"),
            Problem::MissingKey { key } => write!(f, "key `{key}` is missing"),
            Problem::WrongType { found, expected } => write!(f, "{expected} is expected, not {found}"),
            Problem::Value(message) | Problem::Setting(message) => f.write_str(message),
            Problem::Syntax(message) => write!(f, "not valid TOML: {message}"),
            Problem::Unreadable(kind) => write!(f, "cannot be read: {}", in_words(*kind)),
            Problem::TooLarge => write!(f, "is larger than {} KiB", FILE_BYTES_MAX >> 10),
            Problem::NotText => write!(f, "is not UTF-8 text"),
        }
    }
}

/// Returns why a file cannot be read or written, in the words that a shell would use.
pub fn in_words(kind: io::ErrorKind) -> String {
    match kind {
        io::ErrorKind::NotFound => "there is no such file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::IsADirectory => "it is a directory".to_owned(),
        io::ErrorKind::NotADirectory => "a part of its path is not a directory".to_owned(),
        io::ErrorKind::InvalidInput => "it is not a regular file".to_owned(),
        other => other.to_string(),
    }
}

/// Escapes control characters. Messages quote files, and must neither break a line of a log nor control a terminal.
struct OneLine<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for OneLine<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| {
            if c.is_control() {
                write!(self.0, "{}", c.escape_default())
            } else {
                self.0.write_char(c)
            }
        })
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = OneLine(f);
        write!(f, "{}", self.path.display())?;
        if let Some(place) = self.place {
            write!(f, ":{}:{}", place.line, place.column)?;
        }
        write!(f, ": {}", self.problem)?;
        match &*self.problem {
            // The sentence already names the key, so only its table is added.
            Problem::UnknownKey { .. } | Problem::MissingKey { .. } => match self.key.rsplit_once('.') {
                Some((table, _)) => write!(f, " (in `{table}`)"),
                None => Ok(()),
            },
            Problem::Setting(_) => Ok(()),
            _ if self.key.is_empty() => Ok(()),
            _ => write!(f, " (key `{}`)", self.key),
        }
    }
}

impl std::error::Error for FileError {}

/// Reads the text of a file as TOML. `path` is used only in messages.
///
/// # Errors
/// Anything that `T` does not allow, with its place.
pub fn read_toml<T: DeserializeOwned>(path: impl AsRef<Path>, text: &str) -> Result<T, FileError> {
    let path = path.as_ref();
    let document = toml::Deserializer::parse(text).map_err(|error| not_toml(path, text, &error))?;
    T::deserialize(document).map_err(|error| explain(path, text, &error))
}

fn not_toml(path: &Path, text: &str, error: &toml::de::Error) -> FileError {
    FileError {
        path: path.to_owned(),
        place: error.span().map(|span| place(text, span.start)),
        key: String::new(),
        problem: Box::new(Problem::Syntax(error.message().to_owned())),
    }
}

/// Opens a file and reads it as TOML.
///
/// # Errors
/// A file that is missing, unreadable, too large or not text, and everything that [`read_toml`] refuses.
pub fn read_toml_file<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<T, FileError> {
    let path = path.as_ref();
    read_toml(path, &read_text_file(path)?)
}

/// Opens a file of at most [`FILE_BYTES_MAX`] and returns its text.
///
/// # Errors
/// A file that is missing, unreadable, too large or not text.
pub fn read_text_file(path: impl AsRef<Path>) -> Result<String, FileError> {
    let path = path.as_ref();
    let failed = |problem| FileError {
        path: path.to_owned(),
        place: None,
        key: String::new(),
        problem: Box::new(problem),
    };
    let unreadable = |error: io::Error| failed(Problem::Unreadable(error.kind()));
    // Opening a pipe or a device could block, or reading it never end.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(failed(Problem::Unreadable(io::ErrorKind::InvalidInput)));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(Problem::TooLarge));
    }
    String::from_utf8(bytes).map_err(|_| failed(Problem::NotText))
}

/// Converts an error of the TOML crate. That error has only a message, so its text is parsed here; the tests below fail if the
/// crate changes its wording.
fn explain(path: &Path, text: &str, error: &toml::de::Error) -> FileError {
    if let Some(key) = BadSetting::key_of(error.message()) {
        // The settings were checked after the whole file was read, so the place must be looked up.
        let mut found = Source::new(path, text).complaint(key, "");
        *found.problem = Problem::Setting(error.message().to_owned());
        return found;
    }
    let problem = problem(error.message());
    let mut key = key_path(error);
    if let Problem::UnknownKey { key: last, .. } | Problem::MissingKey { key: last } = &problem {
        // The path that the crate prints ends with the key itself, or with its table.
        if key.rsplit('.').next() != Some(last) {
            key = if key.is_empty() {
                last.clone()
            } else {
                format!("{key}.{last}")
            };
        }
    }
    let place = error.span().map(|span| place(text, span.start));
    FileError {
        path: path.to_owned(),
        place,
        key,
        problem: Box::new(problem),
    }
}

/// Returns the path of the tables around an error. The crate prints this path only if the error has no input attached.
fn key_path(error: &toml::de::Error) -> String {
    let mut bare = error.clone();
    bare.set_input(None);
    let printed = bare.to_string();
    let last = printed.trim_end().rsplit('\n').next().unwrap_or_default();
    last.strip_prefix("in `")
        .and_then(|rest| rest.strip_suffix('`'))
        .unwrap_or_default()
        .to_owned()
}

fn place(text: &str, offset: usize) -> Place {
    let before = text.get(..offset.min(text.len())).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    let from_1 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX - 1) + 1;
    Place {
        line: from_1(before.matches('\n').count()),
        column: from_1(before[line_start..].chars().count()),
    }
}

fn problem(message: &str) -> Problem {
    let quoted = |list: &str| {
        list.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let named = |prefix: &str| {
        let rest = message.strip_prefix(prefix)?;
        rest.split_once("`, ")
            .map(|(name, valid)| (name.to_owned(), Candidates::of(name, quoted(valid))))
    };
    if let Some((key, valid)) = named("unknown field `") {
        return Problem::UnknownKey { key, valid };
    }
    if let Some((word, valid)) = named("unknown variant `") {
        return Problem::UnknownWord { word, valid };
    }
    if let Some(key) = message
        .strip_prefix("missing field `")
        .and_then(|rest| rest.strip_suffix('`'))
    {
        return Problem::MissingKey { key: key.to_owned() };
    }
    for prefix in ["invalid type: ", "invalid value: "] {
        if let Some((found, expected)) = message
            .strip_prefix(prefix)
            .and_then(|rest| rest.rsplit_once(", expected "))
        {
            return Problem::WrongType {
                found: found_in_words(found),
                expected: expected_in_words(expected),
            };
        }
    }
    // The crate words an unknown key differently inside a table variant of an enum.
    if let Some((keys, valid)) = message
        .strip_prefix("unexpected keys in table: ")
        .and_then(|rest| rest.rsplit_once(", available keys: "))
    {
        let key = keys.split(", ").next().unwrap_or(keys);
        return Problem::UnknownKey {
            key: key.to_owned(),
            valid: Candidates::of(key, valid.split(", ")),
        };
    }
    Problem::Value(message.to_owned())
}

/// Translates Rust's name of a value's type into the words of a TOML author.
fn found_in_words(found: &str) -> String {
    let number = found
        .strip_prefix("integer `")
        .or_else(|| found.strip_prefix("floating point `"));
    match found {
        "map" => "a table".to_owned(),
        "sequence" => "a list".to_owned(),
        _ => match (
            number,
            found.strip_prefix("string "),
            found.strip_prefix("boolean `"),
        ) {
            (Some(number), _, _) => format!("the number {}", number.trim_end_matches('`')),
            (_, Some(text), _) => format!("the text {text}"),
            (_, _, Some(value)) => value.trim_end_matches('`').to_owned(),
            _ => found.to_owned(),
        },
    }
}

fn expected_in_words(expected: &str) -> String {
    match expected {
        "u8" => "a whole number from 0 to 255".to_owned(),
        "u16" => "a whole number from 0 to 65535".to_owned(),
        "u32" => "a whole number from 0 to 4294967295".to_owned(),
        "u64" | "u128" | "usize" => "a whole number, 0 or above,".to_owned(),
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a string" | "str" | "string" => "a text in quotes".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a table".to_owned(),
        _ if expected.starts_with("struct ") => "a table".to_owned(),
        _ if expected.starts_with("tuple ") => "a list".to_owned(),
        _ => expected.to_owned(),
    }
}

#[cfg(test)]
mod tests;

//! Reads a file and reports all its errors at once, for a user who corrects it.

use std::path::Path;

use serde::de::DeserializeOwned;
use toml::de::{DeTable, DeValue};

use super::{FileError, Problem, explain, not_toml};

/// Most complaints about one file. A file with more is probably of another kind.
const COMPLAINTS_MAX: usize = 100;

/// Reads the text of a file as TOML and collects all errors, treating each refused key as omitted. `path` is used only in
/// messages.
///
/// # Errors
/// Everything that `T` does not allow, each with its place, up to 100 of them; if the file is not TOML, its syntax errors.
pub fn read_toml_every<T: DeserializeOwned>(path: impl AsRef<Path>, text: &str) -> Result<T, Vec<FileError>> {
    let path = path.as_ref();
    let (mut table, wrong) = DeTable::parse_recoverable(text);
    if !wrong.is_empty() {
        let complaints = wrong.iter().map(|error| not_toml(path, text, error));
        return Err(complaints.take(COMPLAINTS_MAX).collect());
    }
    let mut complaints: Vec<FileError> = Vec::new();
    loop {
        match T::deserialize(toml::Deserializer::from(table.clone())) {
            Ok(value) if complaints.is_empty() => return Ok(value),
            Ok(_) => return Err(in_order(complaints)),
            Err(error) => {
                let found = explain(path, text, &error);
                let goes_on = leave_out(table.get_mut(), &found) && complaints.len() < COMPLAINTS_MAX;
                complaints.push(found);
                if !goes_on {
                    return Err(in_order(complaints));
                }
            }
        }
    }
}

fn in_order(mut complaints: Vec<FileError>) -> Vec<FileError> {
    complaints.sort_by_key(|found| found.place.map(|place| (place.line, place.column)));
    complaints
}

/// Removes the key that a complaint is about; returns true if it was there.
fn leave_out(root: &mut DeTable<'_>, found: &FileError) -> bool {
    if let Problem::MissingKey { .. } = &*found.problem {
        return false;
    }
    remove(root, &found.key)
}

fn remove(table: &mut DeTable<'_>, key: &str) -> bool {
    let (name, rest) = key
        .split_once('.')
        .map_or((key, None), |(name, rest)| (name, Some(rest)));
    if let (Some(rest), Some(DeValue::Table(inner))) = (rest, table.get_mut(name).map(toml::Spanned::get_mut))
    {
        return remove(inner, rest);
    }
    // Removes the whole value if it should be a table and is not, or if it is a list with an error.
    table.remove(name).is_some()
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Outer {
        name: String,
        inner: Inner,
        list: Vec<u16>,
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Inner {
        count: u8,
        share: f64,
    }

    fn said(text: &str) -> Vec<String> {
        let complaints = read_toml_every::<Outer>("x.toml", text).expect_err("wrong");
        complaints.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_right_is_read_as_ever() {
        let text = "name = \"a\"\n[inner]\ncount = 3\n";
        assert_eq!(
            read_toml_every("x.toml", text),
            Ok(super::super::read_toml::<Outer>("x.toml", text).unwrap())
        );
    }

    #[test]
    fn every_mistake_is_said_with_its_place_in_the_order_of_the_file() {
        let text =
            "nam = \"a\"\nlist = [1, \"two\"]\n[inner]\ncount = 300\nshare = \"half\"\n[other]\nx = 1\n";
        let said = said(text);
        let begins = [
            "x.toml:1:1: unknown key `nam`",
            "x.toml:2:12: ",
            "x.toml:4:9: ",
            "x.toml:5:9: ",
            "x.toml:6:2: ",
        ];
        assert_eq!(said.len(), begins.len(), "{said:#?}");
        for (said, begin) in said.iter().zip(begins) {
            assert!(said.starts_with(begin), "{said}");
        }
    }

    #[test]
    fn of_what_is_not_toml_that_is_said_alone() {
        let said = said("name = \nlist = [1\nnam = 3\n");
        assert!(
            !said.is_empty() && said.iter().all(|said| said.contains("not valid TOML")),
            "{said:#?}"
        );
    }
}

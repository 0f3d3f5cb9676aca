//! Turns names from files into file names.

use std::fmt;

/// Longest file name, in bytes. Linux allows 255, ending included; the difference leaves room for a suffix that a program adds.
const BYTES_MAX: usize = 200;

/// A name that cannot become a file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadFileName {
    name: String,
    why: &'static str,
}

impl fmt::Display for BadFileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown: String = self.name.chars().take(40).collect();
        if shown.len() < self.name.len() {
            shown.push('…');
        }
        write!(
            f,
            "{shown:?} cannot be the name of a file: it {}; rename it",
            self.why
        )
    }
}

impl std::error::Error for BadFileName {}

/// Returns the file name for a name: the name followed by its ending. The result never leaves the directory it is joined to.
///
/// Different names produce different file names. Any name that comes from a file, a VM or another program must pass through this
/// function before it becomes part of a path.
///
/// # Errors
/// If the name is empty, contains a slash or a control character, is that of a directory (`.`, `..`), or exceeds 200 bytes.
pub fn file_name(name: &str, ending: &str) -> Result<String, BadFileName> {
    let file = format!("{name}{ending}");
    let why = match name {
        _ if name.is_empty() => "is empty",
        _ if name.contains('/') => "has a `/`",
        _ if name.contains(char::is_control) => "has a control character",
        _ if [".", ".."].contains(&file.as_str()) => "is a directory",
        _ if name.len() > BYTES_MAX => "is longer than 200 bytes",
        _ => return Ok(file),
    };
    Err(BadFileName {
        name: name.to_owned(),
        why,
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::{Component, Path};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_that_lead_elsewhere_or_to_no_file_are_refused_by_name() {
        let long = "a".repeat(201);
        for (name, why) in [
            ("", "is empty"),
            ("../x", "has a `/`"),
            ("/abs", "has a `/`"),
            ("a/b", "has a `/`"),
            ("a/../../b", "has a `/`"),
            ("a\0b", "control character"),
            ("a\nb", "control character"),
            ("a\u{9b}b", "control character"),
            (&long, "longer than 200"),
            (&"ä".repeat(101), "longer than 200"),
        ] {
            let said = file_name(name, ".svg").unwrap_err().to_string();
            assert!(said.contains(why) && !said.contains('\0'), "{name:?}: {said}");
            assert!(said.len() < 300, "{said}");
        }
        for name in [".", ".."] {
            let said = file_name(name, "").unwrap_err().to_string();
            assert!(said.contains("is a directory"), "{said}");
            assert!(file_name(name, ".svg").is_ok());
        }
        for name in ["web", "1a cost", "kyoto-1", "größe", "a.b", "a..b", "-x", "c:\\d"] {
            assert_eq!(file_name(name, ".svg").unwrap(), format!("{name}.svg"));
        }
    }

    proptest! {
        #[test]
        fn any_name_is_refused_or_one_file_of_the_directory(name in "([./\x00\x01]|\\PC){0,8}|\\PC{0,300}") {
            if let Ok(file) = file_name(&name, ".svg") {
                let path = Path::new("figures").join(&file);
                let parts: Vec<_> = path.components().collect();
                let expected = [Component::Normal(OsStr::new("figures")), Component::Normal(OsStr::new(&file))];
                prop_assert_eq!(parts, expected);
                prop_assert!(file.len() < 255);
            }
        }
    }
}

//! Suggests valid names for a misspelt one.

use std::fmt;

/// Valid names, the one closest to the input first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// The names.
    pub names: Vec<String>,
    /// Whether the first name is so close to the input that it was probably meant.
    pub near: bool,
}

impl Candidates {
    /// Sorts valid names by their distance to the input.
    pub fn of<S: Into<String>>(written: &str, valid: impl IntoIterator<Item = S>) -> Candidates {
        let plain = |name: &str| name.to_lowercase().replace('-', "_");
        let mut names: Vec<(usize, String)> = valid
            .into_iter()
            .map(Into::into)
            .map(|name| (strsim::damerau_levenshtein(&plain(written), &plain(&name)), name))
            .collect();
        names.sort();
        // Up to a third of the letters may be wrong, and at least two (one in a name of up to three letters).
        let slip = |name: &str| (name.len() / 3).max(if name.len() < 4 { 1 } else { 2 });
        let near = names.first().is_some_and(|(edits, name)| *edits <= slip(name));
        Candidates {
            names: names.into_iter().map(|(_, name)| name).collect(),
            near,
        }
    }
}

impl fmt::Display for Candidates {
    /// Writes the end of a sentence: `; did you mean …?`, or all valid names, the closest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.as_slice() {
            [] => write!(f, "; none is valid here"),
            [first, ..] if self.near => write!(f, "; did you mean `{first}`?"),
            names => write!(f, "; valid, nearest first: `{}`", names.join("`, `")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Candidates;

    #[test]
    fn a_slip_is_answered_with_the_nearest_name_and_another_word_with_all() {
        let said = |written| Candidates::of(written, ["tavo", "ff-pin", "numad"]).to_string();
        assert_eq!(said("FF_PIM"), "; did you mean `ff-pin`?");
        assert_eq!(
            said("nothing"),
            "; valid, nearest first: `ff-pin`, `numad`, `tavo`"
        );
        assert_eq!(
            Candidates::of::<String>("a", []).to_string(),
            "; none is valid here"
        );
    }
}

//! Reads machines from files and from the presets that come with the program.

use std::path::{Path, PathBuf};

use homenode_machine::{Machine, MachineError, MachineFile};
use homenode_units::Candidates;

use crate::file::{FileError, read_text_file, read_toml};

/// Why no machine could be read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read, or is not a machine file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file describes an impossible machine.
    #[error("{}: {error}", path.display())]
    Machine {
        /// The file.
        path: PathBuf,
        /// The rule that the machine breaks.
        error: MachineError,
    },
    /// There is no preset of that name.
    #[error("no machine preset `{name}`{valid}")]
    UnknownPreset {
        /// The requested name.
        name: String,
        /// All presets, the nearest first.
        valid: PresetNames,
    },
}

/// Names of presets, the one nearest to the request first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresetNames(pub Candidates);

impl std::fmt::Display for PresetNames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.0.names.join("`, `");
        match self.0.near {
            true => write!(f, "; did you mean `{}`? There are `{all}`", self.0.names[0]),
            false => write!(f, "; there are `{all}`"),
        }
    }
}

macro_rules! presets {
    ($($name:literal),*) => {
        &[$(($name, concat!($name, ".toml"), include_str!(concat!("../../../data/machines/", $name, ".toml")))),*]
    };
}

/// Name, file name and text of every preset, in alphabetical order.
const PRESETS: &[(&str, &str, &str)] = presets![
    "altra-q80",
    "amd48",
    "amd6344x8",
    "e5_1603v3",
    "epyc7763-nps1",
    "epyc7763-nps4",
    "epyc9654-nps4",
    "i7_pml",
    "r420",
    "r910",
    "xeon-cxl",
    "xeon26x2",
    "xeon8380",
    "xeon8480",
    "xeon8480-snc4"
];

/// Returns the names of the machines that come with the program.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, ..)| *name)
}

/// Returns a machine that comes with the program: a host of a published experiment, or a current one.
///
/// # Errors
/// [`LoadError::UnknownPreset`], which lists all presets, the nearest name first.
pub fn preset(name: &str) -> Result<Machine, LoadError> {
    let (file, text) = preset_file(name)?;
    from_toml(file, text)
}

/// Returns name and text of the file of a machine that comes with the program.
///
/// # Errors
/// See [`preset`].
pub fn preset_file(name: &str) -> Result<(&'static str, &'static str), LoadError> {
    let found = PRESETS.iter().find(|(known, ..)| *known == name);
    let (_, file, text) = found.ok_or_else(|| LoadError::UnknownPreset {
        name: name.to_owned(),
        valid: PresetNames(Candidates::of(name, preset_names())),
    })?;
    Ok((file, text))
}

/// Reads a machine from the text of a file; `path` is used only in messages.
///
/// # Errors
/// If the text is not a machine file, or the machine is impossible.
pub fn from_toml(path: impl AsRef<Path>, text: &str) -> Result<Machine, LoadError> {
    let path = path.as_ref();
    let file: MachineFile = read_toml(path, text)?;
    file.machine().map_err(|error| LoadError::Machine {
        path: path.to_owned(),
        error,
    })
}

/// Opens a machine file and reads it.
///
/// # Errors
/// As for [`from_toml`], and if the file cannot be read.
pub fn from_toml_file(path: impl AsRef<Path>) -> Result<Machine, LoadError> {
    let path = path.as_ref();
    from_toml(path, &read_text_file(path)?)
}

#[cfg(test)]
mod tests;

//! Checks names of figures, which become file names.

use std::collections::BTreeSet;

use homenode_machine_files::file::FileError;
use homenode_units::file_name;

use super::Design;

/// Checks that each figure's name is valid for a file, and no two figures share a name.
pub(super) fn check(design: &Design) -> Result<(), FileError> {
    let mut taken = BTreeSet::new();
    for (at, figure) in design.file.figures.iter().enumerate() {
        let wrong = |said: String| design.complaint(&format!("figure[{at}].name"), said);
        file_name(&figure.name, "").map_err(|error| wrong(error.to_string()))?;
        if figure.name.starts_with('.') {
            return Err(wrong(format!(
                "`{}` begins with a dot, which hides its file; rename it",
                figure.name
            )));
        }
        if !taken.insert(&figure.name) {
            return Err(wrong(format!(
                "two figures have the name `{}`, and one file each; rename one",
                figure.name
            )));
        }
    }
    Ok(())
}

//! Names in an experiment that become names of files: each figure is drawn in a file of its own.

use std::collections::BTreeSet;

use homenode_machine_files::file::FileError;
use homenode_units::file_name;

use super::Design;

/// Whether each figure's name is a file's, and no two figures have the same.
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

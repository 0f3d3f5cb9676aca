//! Reads the operators' settings of policies.

use std::path::Path;

use homenode_control::Config;
use homenode_machine::Machine;
use homenode_machine_files::file::{FileError, Source, read_toml};

/// Reads settings from the text of a file, for a run on this machine; messages name `path`.
///
/// # Errors
/// An unknown setting, or one that does not fit the machine, with its position.
pub fn from_toml(path: &Path, text: &str, machine: &Machine) -> Result<Config, FileError> {
    let config: Config = read_toml(path, text)?;
    let on_machine = config.check_on(machine);
    on_machine.map_err(|bad| Source::new(path, text).bad_setting(&bad))?;
    Ok(config)
}

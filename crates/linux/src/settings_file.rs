//! What the operator says of a VM that has no metadata of libvirt's: a file of its own, with the same names and values.
//!
//! ```toml
//! # /etc/homenode/vms/web.toml
//! manage = "yes"
//! home = "0-1"
//! permit = "250k"
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::domain::OperatorSettings;
use crate::read;

/// Where the files lie.
const DIR: &str = "etc/homenode/vms";
const BYTES_MAX: u64 = 64 << 10;

/// The file of a VM. Some managers take any name: one that leads elsewhere is no file's, and nor is one that would be several
/// lines of what is written.
fn path(root: &Path, name: &str) -> Result<PathBuf, String> {
    let file = homenode_units::file_name(name, ".toml").map_err(|error| error.to_string())?;
    Ok(root.join(DIR).join(file))
}

/// What the file of this VM says; nothing where there is none.
///
/// # Errors
/// A sentence that names the file, and the line or value that is wrong.
pub fn read(root: &Path, name: &str) -> Result<OperatorSettings, String> {
    let path = path(root, name)?;
    let Some(text) = read::text_if_there(&path, BYTES_MAX).map_err(|e| e.to_string())? else {
        return Ok(OperatorSettings::default());
    };
    let wrong = |why: String| format!("{}: {why}", path.display());
    let table: toml::Table = text
        .parse()
        .map_err(|e: toml::de::Error| wrong(e.message().to_owned()))?;
    let written = table.into_iter().map(|(key, value)| match value {
        toml::Value::String(text) => Ok((key, text)),
        // A node is as well a number.
        toml::Value::Integer(number) => Ok((key, number.to_string())),
        toml::Value::Boolean(is_on) if key == "manage" => {
            Ok((key, if is_on { "yes" } else { "no" }.to_owned()))
        }
        _ => Err(wrong(format!("`{key}` is not a text; write it in quotes"))),
    });
    OperatorSettings::of(written.collect::<Result<_, _>>()?).map_err(wrong)
}

/// Writes that file anew: whole, or not at all.
///
/// # Errors
/// A sentence that names the file.
pub fn write(root: &Path, name: &str, settings: &OperatorSettings) -> Result<(), String> {
    let path = path(root, name)?;
    let table: toml::Table = settings
        .written()
        .iter()
        .map(|(key, value)| (key.clone(), toml::Value::String(value.clone())))
        .collect();
    let text = format!("# What Homenode is told of VM {name}; docs/USE.md says what there is.\n{table}");
    let dir = root.join(DIR);
    let replace = || {
        std::fs::create_dir_all(&dir)?;
        let mut file = tempfile::NamedTempFile::new_in(&dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        use std::os::unix::fs::PermissionsExt as _;
        file.as_file()
            .set_permissions(std::fs::Permissions::from_mode(0o644))?;
        file.persist(&path).map_err(|e| e.error)?;
        Ok(())
    };
    replace().map_err(|e: std::io::Error| format!("{} cannot be written: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use homenode_host::{Management, Setting};

    use super::*;
    use crate::fake::Tree;

    #[test]
    fn what_is_written_reads_back_beside_what_the_operator_wrote() {
        let tree = Tree::new(&[]);
        let none = read(tree.root(), "web").unwrap();
        assert_eq!(none, OperatorSettings::default());
        tree.write(
            "etc/homenode/vms/web.toml",
            "manage = true\nhome = 1 # near the disk\n",
        );
        let said = read(tree.root(), "web").unwrap();
        assert_eq!(
            (said.management, said.home.clone().unwrap().to_string()),
            (Management::Managed, "1".into())
        );
        let permit = "250k".parse().unwrap();
        write(tree.root(), "web", &said.with(Setting::Permit(Some(permit)))).unwrap();
        let again = read(tree.root(), "web").unwrap();
        assert_eq!(
            (again.permit, again.home.unwrap().to_string()),
            (Some(permit), "1".into())
        );
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_no_file() {
        let tree = Tree::new(&[
            ("etc/homenode/other.toml", "manage = true"),
            ("etc/homenode/vms/..toml", ""),
        ]);
        for name in ["../other", "a/b", "/etc/passwd", "", "a\0b", "a\nmanage = 'no'"] {
            let why = read(tree.root(), name).unwrap_err();
            assert!(why.contains("rename it"), "{name:?}: {why}");
            let why = write(tree.root(), name, &OperatorSettings::default()).unwrap_err();
            assert!(why.contains("rename it"), "{name:?}: {why}");
        }
        assert_eq!(
            read(tree.root(), "."),
            Ok(OperatorSettings::default()),
            "a file like any other"
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_the_file() {
        for (text, word) in [
            ("homes = '1'", "homes"),
            ("home = [1]", "quotes"),
            ("home", "web.toml"),
            ("mode = 'loud'", "mode"),
        ] {
            let tree = Tree::new(&[("etc/homenode/vms/web.toml", text)]);
            let why = read(tree.root(), "web").unwrap_err();
            assert!(why.contains("web.toml") && why.contains(word), "{text}: {why}");
        }
    }
}

//! Finds QEMU and its plugin, and checks that they work together.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::program::HERE;

/// The plugin's file.
const PLUGIN: &str = "libhomenode_plugin.so";

/// The oldest QEMU that the plugin was tested with.
const VERSION_MIN: (u32, u32) = (7, 2);

/// An emulator.
pub struct Emulator {
    /// Its file.
    pub path: PathBuf,
}

impl Emulator {
    /// Returns the requested emulator, else the one in `PATH`.
    ///
    /// # Errors
    /// A message that says what to install.
    pub fn find(asked: Option<&Path>) -> Result<Emulator, String> {
        if let Some(asked) = asked {
            return Emulator::given(asked.to_owned());
        }
        let name = format!("qemu-{}", HERE.1);
        let found = which::which(&name).map_err(|_| {
            format!("needs {name}, QEMU's emulator of programs: install Debian's package qemu-user, or name one with --qemu")
        })?;
        Ok(Emulator { path: found })
    }

    /// Returns the emulator in this file.
    ///
    /// # Errors
    /// A message if there is no such file.
    pub fn given(path: PathBuf) -> Result<Emulator, String> {
        match path.metadata() {
            Ok(found) if found.is_file() => Ok(Emulator { path }),
            Ok(_) => Err(format!("{}: is not a file", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Checks its version and whether it supports plugins.
    ///
    /// # Errors
    /// A message that says what it lacks.
    pub fn check(self) -> Result<Emulator, String> {
        let shown = self.path.display();
        let version = self.says("--version")?;
        let found = version_of(&version).ok_or_else(|| {
            format!(
                "{shown} is no QEMU: asked for its version it says `{}`",
                first_line(&version)
            )
        })?;
        if found < VERSION_MIN {
            let (major, minor) = VERSION_MIN;
            return Err(format!(
                "{shown} is too old: needs QEMU {major}.{minor} or newer, found {}.{}",
                found.0, found.1
            ));
        }
        if !self.says("-h")?.contains("-plugin") {
            return Err(format!(
                "{shown} was built without plugins (as static builds are, Debian's from version 9 on): name another with --qemu"
            ));
        }
        Ok(self)
    }

    fn says(&self, argument: &str) -> Result<String, String> {
        let output = Command::new(&self.path)
            .arg(argument)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{}: cannot be started: {error}", self.path.display()))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the command that loads the plugin; append the program to emulate.
    pub fn command(&self, plugin: &Path, arguments: &str) -> Command {
        let mut command = Command::new(&self.path);
        command
            .arg("-plugin")
            .arg(format!("{},{arguments}", escaped(plugin)));
        command
    }
}

/// Escapes a path for QEMU's options, which end at commas.
pub fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Parses `qemu-x86_64 version 7.2.22 (Debian …)`.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let (name, rest) = first_line(text).split_once(" version ")?;
    let mut numbers = rest.split(['.', ' ']).map(|number| number.parse().ok());
    let named = name.to_ascii_lowercase().contains("qemu");
    named.then_some((numbers.next()??, numbers.next()??))
}

/// Returns the requested plugin, else the one installed with this program.
///
/// # Errors
/// A message that says where it was searched.
pub fn plugin(asked: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(asked) = asked {
        return match asked.is_file() {
            true => Ok(asked.to_owned()),
            false => Err(format!("--plugin {}: there is no such file", asked.display())),
        };
    }
    let own =
        std::env::current_exe().map_err(|error| format!("this program's own file is not known: {error}"))?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(PLUGIN), folder.join("../lib/homenode").join(PLUGIN)];
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        format!(
            "the emulator's plugin is neither {} nor {}: 'make build' makes it, 'make install' installs it, --plugin names another",
            places[0].display(),
            places[1].display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_qemu_says_them() {
        let debian = "qemu-x86_64 version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        assert_eq!(version_of(debian), Some((7, 2)));
        assert_eq!(version_of("QEMU emulator version 10.0.2"), Some((10, 0)));
        assert_eq!(version_of("gzip version 1.12"), None);
        assert_eq!(version_of("qemu version x"), None);
        assert_eq!(version_of(""), None);
    }
}

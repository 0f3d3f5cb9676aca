//! Finds QEMU and its plugin, and checks that they work together.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::program::HERE;

/// The plugin's file.
const PLUGIN: &str = "libhomenode_plugin.so";

/// The oldest QEMU that the plugin was tested with.
const VERSION_MIN: (u32, u32) = (7, 2);

/// Why the emulator or its plugin cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// QEMU's user-mode emulator is not installed.
    #[error(
        "{0}, QEMU's emulator of programs, is not installed: install Debian's package qemu-user, or name one with --qemu"
    )]
    NotInstalled(String),
    /// The file's metadata cannot be read.
    #[error("{}: {cause}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The path is that of a directory or a device.
    #[error("{} is not a file", .0.display())]
    NoFile(PathBuf),
    /// The emulator does not start.
    #[error("{} cannot be started: {cause}", .file.display())]
    NotStarted {
        /// The file.
        file: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The file is another program, not QEMU.
    #[error("{} is not QEMU: asked for its version, it printed `{said}`", .file.display())]
    NoQemu {
        /// The file.
        file: PathBuf,
        /// The first line that it printed.
        said: String,
    },
    /// QEMU's plugin interface lacks something that the plugin calls.
    #[error(
        "{} is too old: needs QEMU {}.{} or newer, found {}.{}",
        .file.display(), VERSION_MIN.0, VERSION_MIN.1, .found.0, .found.1
    )]
    TooOld {
        /// The file.
        file: PathBuf,
        /// The version that was found.
        found: (u32, u32),
    },
    /// QEMU was built without support for plugins.
    #[error(
        "{} was built without plugins (as static builds are, Debian's from version 9 on): name another with --qemu",
        .0.display()
    )]
    WithoutPlugins(PathBuf),
    /// The named plugin is missing.
    #[error("--plugin {}: there is no such file", .0.display())]
    NoSuchPlugin(PathBuf),
    /// The path of this program, next to which the plugin is installed, is not known.
    #[error("cannot find this program's own file, next to which the plugin is: {0}")]
    NotKnownWhere(std::io::Error),
    /// The plugin is not installed.
    #[error(
        "the emulator's plugin is neither at {} nor at {}: run 'make build' or 'make install', or name another with --plugin",
        .0[0].display(), .0[1].display()
    )]
    NoPlugin([PathBuf; 2]),
}

/// An emulator.
pub struct Emulator {
    /// The emulator's file.
    pub path: PathBuf,
}

impl Emulator {
    /// Returns the requested emulator, or else the one in `PATH`.
    ///
    /// # Errors
    /// There is no emulator.
    pub fn find(asked: Option<&Path>) -> Result<Emulator, EmulatorError> {
        if let Some(asked) = asked {
            return Emulator::given(asked.to_owned());
        }
        let name = format!("qemu-{}", HERE.1);
        match which::which(&name) {
            Ok(path) => Ok(Emulator { path }),
            Err(_) => Err(EmulatorError::NotInstalled(name)),
        }
    }

    /// Returns the emulator in this file.
    ///
    /// # Errors
    /// If there is no such file.
    pub fn given(path: PathBuf) -> Result<Emulator, EmulatorError> {
        match path.metadata() {
            Ok(found) if found.is_file() => Ok(Emulator { path }),
            Ok(_) => Err(EmulatorError::NoFile(path)),
            Err(cause) => Err(EmulatorError::Unreadable { file: path, cause }),
        }
    }

    /// Checks the emulator's version, and whether it supports plugins. # Errors
    ///
    /// If a feature is missing.
    pub fn check(self) -> Result<Emulator, EmulatorError> {
        let file = || self.path.clone();
        let version = self.says("--version")?;
        let found = version_of(&version).ok_or_else(|| EmulatorError::NoQemu {
            file: file(),
            said: first_line(&version).to_owned(),
        })?;
        if found < VERSION_MIN {
            return Err(EmulatorError::TooOld { file: file(), found });
        }
        if !self.says("-h")?.contains("-plugin") {
            return Err(EmulatorError::WithoutPlugins(file()));
        }
        Ok(self)
    }

    fn says(&self, argument: &str) -> Result<String, EmulatorError> {
        let output = Command::new(&self.path)
            .arg(argument)
            .stdin(Stdio::null())
            .output()
            .map_err(|cause| EmulatorError::NotStarted {
                file: self.path.clone(),
                cause,
            })?;
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

/// Escapes a path for QEMU's options, in which a comma separates options.
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

/// Returns the requested plugin, or else the one that is installed with this program.
///
/// # Errors
/// The plugin does not exist.
pub fn plugin(asked: Option<&Path>) -> Result<PathBuf, EmulatorError> {
    if let Some(asked) = asked {
        return match asked.is_file() {
            true => Ok(asked.to_owned()),
            false => Err(EmulatorError::NoSuchPlugin(asked.to_owned())),
        };
    }
    let own = std::env::current_exe().map_err(EmulatorError::NotKnownWhere)?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(PLUGIN), folder.join("../lib/homenode").join(PLUGIN)];
    let found = places.iter().find(|place| place.is_file()).cloned();
    found.ok_or(EmulatorError::NoPlugin(places))
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

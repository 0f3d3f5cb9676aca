//! Options that several commands share, and how their values are parsed.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, ensure};
use clap::builder::{
    BoolishValueParser, PathBufValueParser, TryMapValueParser, TypedValueParser as _, ValueParserFactory,
};
use homenode_agent::managed::Managed;
use homenode_twin::Scenario;
use homenode_units::{Bytes, Ns};
use rustix::fs::{Access, access};

use crate::bad_input;

/// A host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostArg {
    /// The simulated host: the name or file of a scenario or a machine.
    Twin(Option<String>),
    /// A real host: this one.
    Live(Managed),
}

impl std::str::FromStr for HostArg {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (kind, rest) = text
            .split_once(':')
            .map_or((text, None), |(kind, rest)| (kind, Some(rest.to_owned())));
        if rest.as_deref() == Some("") {
            bail!("nothing follows the colon in `{text}`");
        }
        match kind {
            "twin" => Ok(HostArg::Twin(rest)),
            _ => text.parse().map(HostArg::Live).map_err(|_| {
                anyhow!(
                    "a host is `twin`, `twin:SCENARIO`, `twin:MACHINE`, `twin:FILE.toml`, `libvirt`, `libvirt:URI`, `qemu` or `xen`"
                )
            }),
        }
    }
}

/// Options of `permit show`, `memory-policy show`, `memory show` and `topology`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// Show only this VM
    pub vm: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit suggest` and `memory-policy advise`.
#[derive(Debug, clap::Args)]
pub(crate) struct SuggestArgs {
    /// The VM's name
    pub vm: String,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// How a command prints its answer.
#[derive(Debug, clap::Args)]
pub(crate) struct ShownArgs {
    /// Print JSON for programs instead of text (docs/JSON.md)
    #[arg(long)]
    pub json: bool,
}

/// Memory management of the simulator's kernel that works without the agent.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct TwinKernelArgs {
    /// Turn NUMA balancing of the simulated host's kernel (`kernel.numa_balancing`) on or off, overriding the scenario
    #[arg(long, value_name = "on|off", value_parser = BoolishValueParser::new(), hide_possible_values = true)]
    pub numa_balancing: Option<bool>,
}

impl TwinKernelArgs {
    /// Returns the scenario with these options applied.
    pub(crate) fn of(self, scenario: Scenario) -> Scenario {
        match self.numa_balancing {
            Some(is_on) => scenario.with_numa_balancing(is_on),
            None => scenario,
        }
    }
}

/// Where the agent keeps its files.
#[derive(Debug, clap::Args)]
pub(crate) struct StateArgs {
    /// The agent's directory: its journal and its socket
    #[arg(id = "state", long, value_name = "DIR", default_value = homenode_undo::state_dir::STATE_DIR)]
    pub dir: PathBuf,
}

/// Options of commands that ask the running agent.
#[derive(Debug, clap::Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    pub shown: ShownArgs,
    #[command(flatten)]
    pub state: StateArgs,
}

impl AgentArgs {
    /// Whether to answer in JSON.
    pub(crate) fn json(&self) -> bool {
        self.shown.json
    }

    /// The directory of the agent's socket.
    pub(crate) fn dir(&self) -> &Path {
        &self.state.dir
    }
}

/// Parses the time between pictures.
pub(crate) fn interval(text: &str) -> anyhow::Result<Ns> {
    time_within(text, ("100ms", "1h"))
}

/// Parses a time that is at least `least` and at most `most`.
pub(crate) fn time_within(text: &str, (least, most): (&str, &str)) -> anyhow::Result<Ns> {
    let time: Ns = text.parse()?;
    let range = least.parse()?..=most.parse()?;
    ensure!(range.contains(&time), "{time} is out of range: {least} to {most}");
    Ok(time)
}

/// The path of a file for a result. Parsing checks that the file can be written, so no command works in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutFile(PathBuf);

/// The path of a directory for results. Parsing checks that it can be created or that the user may write into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutDir(PathBuf);

/// Why a result cannot be written where the user wants it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unwritable {
    /// The path of a file is that of a directory.
    #[error("this path is a directory; name a file")]
    IsDirectory,
    /// The path of a file ends as that of a directory.
    #[error("a path that ends in a slash is that of a directory; name a file")]
    EndsAsDirectory,
    /// The file's directory does not exist.
    #[error("the directory of this file does not exist; create it first")]
    NoDirectory,
    /// The user may not write to the existing file.
    #[error("you may not write to this file; name another file")]
    File,
    /// The user may not create a file in the directory.
    #[error("you may not write into the directory of this file; name another file")]
    Directory,
    /// The user may write to the file, but not replace it by another.
    #[error("a new file replaces this one, but you may not write into its directory; name another file")]
    Irreplaceable,
    /// The directory for results cannot be created.
    #[error("this directory cannot be created: {0}; name another directory")]
    CannotCreate(String),
    /// The user may not write into the directory for results.
    #[error("you may not write into this directory; name another directory")]
    NoEntry,
}

fn may_write(path: &Path) -> bool {
    access(path, Access::WRITE_OK).is_ok()
}

/// Returns the directory of a file. A bare name is in the current directory.
fn directory_of(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

impl OutFile {
    /// Checks that a file can be written at this path.
    ///
    /// # Errors
    /// [`Unwritable`].
    pub(crate) fn at(path: PathBuf) -> Result<OutFile, Unwritable> {
        let parent = directory_of(&path);
        let end = path.as_os_str().as_encoded_bytes();
        match (path.is_dir(), parent.is_dir()) {
            (true, _) => Err(Unwritable::IsDirectory),
            // The standard library's paths ignore these ends; the kernel does not.
            _ if end.ends_with(b"/") || end.ends_with(b"/.") => Err(Unwritable::EndsAsDirectory),
            (_, false) => Err(Unwritable::NoDirectory),
            _ if path.exists() && !may_write(&path) => Err(Unwritable::File),
            _ if !path.exists() && !may_write(parent) => Err(Unwritable::Directory),
            _ => Ok(OutFile(path)),
        }
    }

    /// Checks, before the work, that a further file that belongs to the file of this option can be written.
    ///
    /// # Errors
    /// Bad input: [`Unwritable`], with the option and the path.
    pub(crate) fn further(option: &str, path: PathBuf) -> anyhow::Result<OutFile> {
        let shown = path.display().to_string();
        OutFile::at(path).map_err(|why| bad_input(format!("{option} writes {shown}, too: {why}")))
    }

    /// Checks, before the work, that this file of an option can be replaced by one that is first written at `new`.
    ///
    /// # Errors
    /// As [`OutFile::further`].
    pub(crate) fn replaced_by(&self, option: &str, new: PathBuf) -> anyhow::Result<()> {
        OutFile::further(option, new)?;
        let why = Unwritable::Irreplaceable;
        match may_write(directory_of(&self.0)) {
            true => Ok(()),
            false => Err(bad_input(format!("{option} {}: {why}", self.0.display()))),
        }
    }
}

impl OutDir {
    /// Checks that this is a directory that the user may write into, or that it can be created.
    ///
    /// # Errors
    /// [`Unwritable`].
    pub(crate) fn at(path: PathBuf) -> Result<OutDir, Unwritable> {
        let mut ancestors = path.ancestors().map(|path| match path.as_os_str().is_empty() {
            true => Path::new("."),
            false => path,
        });
        let nearest = ancestors.find(|path| path.symlink_metadata().is_ok());
        match nearest {
            Some(nearest) if !nearest.is_dir() => Err(Unwritable::CannotCreate(format!(
                "{} is not a directory",
                nearest.display()
            ))),
            Some(nearest) if may_write(nearest) => Ok(OutDir(path)),
            Some(nearest) if nearest == path => Err(Unwritable::NoEntry),
            Some(nearest) => Err(Unwritable::CannotCreate(format!(
                "you may not write into {}",
                nearest.display()
            ))),
            None => Err(Unwritable::CannotCreate("it has no parent directory".to_owned())),
        }
    }

    /// Creates the directory if there is none. Called once the rest of the command line is known to be right.
    ///
    /// # Errors
    /// Bad input: [`Unwritable`], with the path.
    pub(crate) fn create(&self) -> anyhow::Result<&Path> {
        let why = |error: std::io::Error| Unwritable::CannotCreate(error.to_string());
        std::fs::create_dir_all(&self.0)
            .map_err(|error| bad_input(format!("{}: {}", self.0.display(), why(error))))?;
        Ok(&self.0)
    }
}

impl std::ops::Deref for OutFile {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for OutFile {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

/// A parser of paths that checks them.
type Checked<T> = TryMapValueParser<PathBufValueParser, fn(PathBuf) -> Result<T, Unwritable>>;

impl ValueParserFactory for OutFile {
    type Parser = Checked<OutFile>;
    fn value_parser() -> Checked<OutFile> {
        PathBufValueParser::new().try_map(OutFile::at)
    }
}

impl ValueParserFactory for OutDir {
    type Parser = Checked<OutDir>;
    fn value_parser() -> Checked<OutDir> {
        PathBufValueParser::new().try_map(OutDir::at)
    }
}

/// A value to set, or `none` to remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrNone<T> {
    /// Set this value.
    Some(T),
    /// Remove the current value.
    None,
}

/// A size on the command line: the usual notation, or a bare number of MiB, as QEMU and numad take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub Bytes);

impl std::str::FromStr for Size {
    type Err = <Bytes as std::str::FromStr>::Err;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match is_number {
            true => format!("{text}MiB").parse().map(Size),
            false => text.parse().map(Size),
        }
    }
}

impl<T> OrNone<T> {
    /// Converts to an `Option`.
    pub(crate) fn into_option(self) -> Option<T> {
        match self {
            OrNone::Some(value) => Some(value),
            OrNone::None => None,
        }
    }
}

impl<T: std::str::FromStr> std::str::FromStr for OrNone<T> {
    type Err = T::Err;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(OrNone::None),
            value => value.parse().map(OrNone::Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_refused_if_its_path_is_that_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| OutFile::at(PathBuf::from(format!("{}/{name}", dir.path().display())));
        assert!(at("new.toml").is_ok() && at("./new.toml").is_ok());
        assert_eq!(at("new/"), Err(Unwritable::EndsAsDirectory));
        assert_eq!(at("new/."), Err(Unwritable::EndsAsDirectory));
        assert_eq!(at(""), Err(Unwritable::IsDirectory));
        assert_eq!(at("none/new.toml"), Err(Unwritable::NoDirectory));
        assert!(!dir.path().join("new.toml").exists());
    }

    #[test]
    fn a_file_next_to_the_result_is_checked_too() {
        let dir = tempfile::tempdir().unwrap();
        let file = OutFile::at(dir.path().join("known.toml")).unwrap();
        let new = dir.path().join("known.toml.new");
        file.replaced_by("--known", new.clone()).unwrap();
        std::fs::create_dir(&new).unwrap();
        let refused = file.replaced_by("--known", new).unwrap_err().to_string();
        assert!(
            refused.contains("--known") && refused.contains("known.toml.new, too: this path is a directory"),
            "{refused}"
        );
    }

    #[test]
    fn a_directory_is_checked_when_it_is_named_and_created_when_the_work_begins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let named = OutDir::at(path.clone()).unwrap();
        assert!(!dir.path().join("a").exists());
        assert_eq!(named.create().unwrap(), path);
        assert!(path.is_dir());
        assert!(OutDir::at(path).is_ok(), "one that exists");
        std::fs::write(dir.path().join("file"), "").unwrap();
        let refused = OutDir::at(dir.path().join("file/figures")).unwrap_err();
        assert!(
            refused.to_string().contains("file is not a directory"),
            "{refused}"
        );
        assert!(
            OutDir::at("figures-of-no-run".into()).is_ok(),
            "in the current directory"
        );
        assert!(!Path::new("figures-of-no-run").exists());
    }
}

//! Operator's settings of a VM without libvirt metadata. They are in a file of their own, with the same names and values.
//!
//! ```toml
//! # /etc/homenode/vms/6f2a4f2e-92f4-4c7b-8a0e-3f1d8f1f7a10.toml
//! manage = "yes"
//! home = "0-1"
//! permit = "250k"
//! ```
//!
//! The file is named after the VM's UUID. `NAME.toml` is read too if only one VM has that name and the two files do not
//! contradict each other; the first change renames it. Every change is made to the file's current text. Homenode's programs take
//! turns, using a lock. An editor that saves in between is noticed, because the new file is exchanged with the old one, whose
//! text is then compared.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use homenode_kernel::read::{self, ReadError};
use homenode_units::VmId;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use toml_edit::{DocumentMut, Item, Value};

use crate::{Change, OperatorSettings, SettingError};

/// Directory of the files.
const DIR: &str = "etc/homenode/vms";
const BYTES_MAX: u64 = 64 << 10;
/// Lock file for changing settings. Other users cannot open it, since they could hold the lock forever.
const LOCK: &str = ".lock";
/// How long to wait for another program's change. The agent's loop stands still meanwhile.
const LOCK_MAX: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_millis(5);
/// How many times a change is tried if editors save in the middle of it.
const TRIES: u32 = 10;

/// Why a VM's settings cannot be read from its files, or written to them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The system cannot read the file.
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    /// The file's settings are wrong.
    #[error("{}: {why}", .file.display())]
    Wrong {
        /// The file.
        file: PathBuf,
        /// The mistake in the file.
        why: SettingError,
    },
    /// Several VMs have the name that the file is named after.
    #[error(
        "{}: the VMs {vms} are all named {name}, so this file applies to none of them; rename it to UUID.toml for the \
         VM that it is meant for, and write another for each other VM",
        .file.display()
    )]
    Ambiguous {
        /// The file.
        file: PathBuf,
        /// UUIDs of these VMs.
        vms: String,
        /// The name that these VMs share.
        name: String,
    },
    /// Two files of one VM contradict each other.
    #[error(
        "{} and {} both belong to VM {name} but set `{key}` differently: move the right value to {} and \
         remove the other file",
        .first.display(), .second.display(), .own.display()
    )]
    Contradiction {
        /// The first of the two files.
        first: PathBuf,
        /// The second of the two files.
        second: PathBuf,
        /// The VM.
        name: String,
        /// The setting in which they differ.
        key: String,
        /// The file to keep.
        own: PathBuf,
    },
    /// The system cannot write the file.
    #[error("{} cannot be written: {cause}", .file.display())]
    NotWritten {
        /// The file.
        file: PathBuf,
        /// The system's error.
        cause: String,
    },
    /// Another program keeps changing the settings.
    #[error(
        "another program keeps changing the settings of VM {name} in {}; try again",
        .dir.display()
    )]
    Busy {
        /// The VM.
        name: String,
        /// Directory of the files.
        dir: PathBuf,
    },
}

/// The VM whose settings are read or changed.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    /// The VM.
    pub vm: VmId,
    /// The VM's name.
    pub name: &'a str,
    /// Other VMs on this host with the same name.
    pub namesakes: &'a [VmId],
    /// Whether the VM keeps its UUID at its next start. Xen gives a domain a new UUID at each start unless its configuration has
    /// one. If the UUID changes, the settings stay in the file named after the VM.
    pub keeps_uuid: bool,
}

impl Whose<'_> {
    /// Returns the file named after the VM. `None` if no file can have that name, or if the name looks like a UUID: such a file
    /// belongs to the VM with that UUID.
    fn named(&self, dir: &Path) -> Option<PathBuf> {
        let file = homenode_units::file_name(self.name, ".toml").ok()?;
        VmId::parse(self.name).is_none().then(|| dir.join(file))
    }

    /// Returns the error that several VMs have the name of this file.
    fn ambiguous(&self, path: &Path) -> FileError {
        let mut all: Vec<String> = self.namesakes.iter().map(VmId::to_string).collect();
        all.push(self.vm.to_string());
        all.sort();
        FileError::Ambiguous {
            file: path.to_owned(),
            vms: all.join(" and "),
            name: self.name.to_owned(),
        }
    }
}

/// A settings file and its text when it was read.
struct Read {
    path: PathBuf,
    text: String,
    said: OperatorSettings,
}

impl Read {
    fn of(path: &Path) -> Result<Option<Read>, FileError> {
        let Some(text) = read::text_if_there(path, BYTES_MAX)? else {
            return Ok(None);
        };
        let path = path.to_owned();
        let said = match parse(&text) {
            Ok(said) => said,
            Err(why) => return Err(FileError::Wrong { file: path, why }),
        };
        Ok(Some(Read { path, text, said }))
    }
}

/// Parses the settings in a text.
fn parse(text: &str) -> Result<OperatorSettings, SettingError> {
    let document: DocumentMut = text.parse().map_err(|e: toml_edit::TomlError| {
        let before = e
            .span()
            .and_then(|span| text.get(..span.start))
            .unwrap_or_default();
        SettingError::Syntax {
            line: before.matches('\n').count() + 1,
            why: e.message().to_owned(),
        }
    })?;
    let written = document.iter().map(|(key, item)| match item {
        Item::Value(Value::String(text)) => Ok((key.to_owned(), text.value().clone())),
        // Nodes may be written as a number without quotes.
        Item::Value(Value::Integer(number)) => Ok((key.to_owned(), number.value().to_string())),
        Item::Value(Value::Boolean(is_on)) if key == "manage" => {
            let text = if *is_on.value() { "yes" } else { "no" };
            Ok((key.to_owned(), text.to_owned()))
        }
        _ => Err(SettingError::NotText(key.to_owned())),
    });
    OperatorSettings::of(written.collect::<Result<_, _>>()?)
}

/// The current settings of a VM, as stored.
struct Stored {
    /// The file to write to.
    own: PathBuf,
    /// The file that has the settings, if there is one.
    file: Option<Read>,
    /// Other files of the VM that repeat the same settings.
    others: Vec<Read>,
    /// Whether to rename `file` to `own` if it has another name.
    is_renamed: bool,
}

impl Stored {
    fn find(dir: &Path, whose: Whose<'_>) -> Result<Stored, FileError> {
        let uuid = whose.vm.to_string();
        let own = dir.join(format!("{uuid}.toml"));
        let mut found: Vec<Read> = Vec::new();
        let upper = dir.join(format!("{}.toml", uuid.to_uppercase()));
        for path in [&own, &upper] {
            if found.iter().all(|read| read.path != *path) {
                found.extend(Read::of(path)?);
            }
        }
        if let Some(named) = whose.named(dir) {
            match whose.namesakes {
                [] => found.extend(Read::of(&named)?),
                _ if found.is_empty() && named.exists() => return Err(whose.ambiguous(&named)),
                _ => {}
            }
        }
        if found.is_empty() {
            // Another program may have renamed the file between the two readings.
            found.extend(Read::of(&own)?);
        }
        let mut found = found.into_iter();
        let file = found.next();
        let says = |pair: &(String, String)| {
            file.as_ref()
                .is_some_and(|file| file.said.written().contains(pair))
        };
        let mut others = Vec::new();
        for other in found {
            if let Some((key, _)) = other.said.written().iter().find(|pair| !says(pair)) {
                let first = file.as_ref().map_or(&own, |file| &file.path);
                return Err(FileError::Contradiction {
                    first: first.clone(),
                    second: other.path.clone(),
                    name: whose.name.to_owned(),
                    key: key.clone(),
                    own,
                });
            }
            others.push(other);
        }
        // If the VM's UUID will change, write its first settings to the file that its next start will find.
        let named = whose.named(dir).filter(|_| whose.namesakes.is_empty());
        let own = match (whose.keeps_uuid, &file, named) {
            (false, None, Some(named)) => named,
            _ => own,
        };
        Ok(Stored {
            own,
            file,
            others,
            is_renamed: whose.keeps_uuid,
        })
    }

    fn said(&self) -> OperatorSettings {
        self.file
            .as_ref()
            .map(|file| file.said.clone())
            .unwrap_or_default()
    }

    /// Replaces these settings in one step. Returns false if another program changed the files meanwhile; its version then stays.
    fn replace(&self, name: &str, after: &OperatorSettings) -> io::Result<bool> {
        let Some(before) = &self.file else {
            let text = format!(
                "# Settings of VM {} for Homenode; docs/USE.md lists the keys.\n{}",
                name.escape_debug(),
                edited("", &[], after.written())
            );
            let file = new_file(&self.own, &text, None)?;
            return match file.persist_noclobber(&self.own) {
                Ok(_) => Ok(true),
                Err(failed) if failed.error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(failed) => Err(failed.error),
            };
        };
        if before.path != self.own && self.is_renamed {
            match renameat_with(CWD, &before.path, CWD, &self.own, RenameFlags::NOREPLACE) {
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::EXIST) => return Ok(false),
                // This file system cannot rename a file without overwriting another one, so only the lock protects the change.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    fs::rename(&before.path, &self.own)?;
                }
                renamed => renamed?,
            }
        }
        // If the operator made a link, write to its target and keep the link.
        let path = fs::canonicalize(if self.is_renamed { &self.own } else { &before.path })?;
        let text = edited(&before.text, before.said.written(), after.written());
        let file = new_file(&path, &text, Some(&fs::metadata(&path)?))?;
        for other in &self.others {
            if fs::read(&other.path)? != other.text.as_bytes() {
                return Ok(false);
            }
            fs::remove_file(&other.path)?;
        }
        exchange(file, &path, &before.text)
    }
}

/// Creates a file that will replace `path`, with the mode and owner of the file before it.
fn new_file(path: &Path, text: &str, before: Option<&fs::Metadata>) -> io::Result<tempfile::NamedTempFile> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(text.as_bytes())?;
    let mode = before.map_or(0o644, |before| before.mode() & 0o7777);
    if let Some(before) = before {
        // Only root may do this; otherwise the file belongs to the user who runs this program.
        let _ = std::os::unix::fs::fchown(file.as_file(), Some(before.uid()), Some(before.gid()));
    }
    file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Replaces a file whose text should be `before`. If its text has changed, the file stays.
fn exchange(file: tempfile::NamedTempFile, path: &Path, before: &str) -> io::Result<bool> {
    match renameat_with(CWD, file.path(), CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) if fs::read(file.path())? == before.as_bytes() => Ok(true),
        Ok(()) => fs::rename(file.path(), path).map(|()| false),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => match fs::read(path) {
            Ok(now) if now == before.as_bytes() => file.persist(path).map(|_| true).map_err(|e| e.error),
            _ => Ok(false),
        },
        Err(error) => Err(error.into()),
    }
}

/// Returns the text with `after` in place of `before`, and everything else unchanged.
fn edited(text: &str, before: &[(String, String)], after: &[(String, String)]) -> String {
    // This text has already been parsed, so parsing cannot fail.
    let mut document: DocumentMut = text.parse().unwrap_or_default();
    for (key, _) in before
        .iter()
        .filter(|(key, _)| after.iter().all(|(name, _)| name != key))
    {
        remove(&mut document, key);
    }
    for (key, text) in after.iter().filter(|pair| !before.contains(pair)) {
        match document.get_mut(key).and_then(Item::as_value_mut) {
            Some(value) => {
                let decor = value.decor().clone();
                *value = Value::from(text.as_str());
                *value.decor_mut() = decor;
            }
            None => drop(document.insert(key, toml_edit::value(text.as_str()))),
        }
    }
    document.to_string()
}

/// Removes a setting's line. Comments above it stay.
fn remove(document: &mut DocumentMut, key: &str) {
    let comments = document
        .key(key)
        .and_then(|key| key.leaf_decor().prefix()?.as_str());
    let comments = comments.unwrap_or_default().to_owned();
    let next = document.iter().skip_while(|(name, _)| *name != key).nth(1);
    let next = next.map(|(name, _)| name.to_owned());
    document.remove(key);
    match next.and_then(|next| {
        document.as_table_mut().key_mut(&next).map(|mut key| {
            let decor = key.leaf_decor_mut();
            let prefix = decor
                .prefix()
                .and_then(|prefix| prefix.as_str())
                .unwrap_or_default();
            let prefix = format!("{comments}{prefix}");
            decor.set_prefix(prefix);
        })
    }) {
        Some(()) => {}
        None => {
            let rest = format!("{comments}{}", document.trailing().as_str().unwrap_or_default());
            document.set_trailing(rest);
        }
    }
}

/// Takes the lock for changing settings. Dropping the returned file releases it.
fn lock(dir: &Path) -> io::Result<File> {
    let path = dir.join(LOCK);
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::CLOEXEC)
        .bits()
        .cast_signed();
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(&path)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if begun.elapsed() >= LOCK_MAX => {
                return Err(io::Error::other(format!(
                    "another process has held {} for {} s; end it, or try again",
                    path.display(),
                    LOCK_MAX.as_secs()
                )));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_AGAIN),
        }
    }
}

/// Reads this VM's settings from its file. Without a file, returns the defaults.
///
/// # Errors
/// The error names the file, and the line or value that is wrong.
pub fn read(root: &Path, whose: Whose<'_>) -> Result<OperatorSettings, FileError> {
    Stored::find(&root.join(DIR), whose).map(|stored| stored.said())
}

/// Changes the settings that are in the file now. If the change does not apply to them, writes nothing and returns false.
///
/// # Errors
/// The error names the file. Nothing is changed then.
pub fn change(root: &Path, whose: Whose<'_>, change: &Change<'_>) -> Result<bool, FileError> {
    let dir = root.join(DIR);
    let cannot = |path: &Path, error: io::Error| FileError::NotWritten {
        file: path.to_owned(),
        cause: error.to_string(),
    };
    fs::create_dir_all(&dir).map_err(|error| cannot(&dir, error))?;
    let _lock = lock(&dir).map_err(|error| cannot(&dir, error))?;
    for _ in 0..TRIES {
        let stored = Stored::find(&dir, whose)?;
        let before = stored.said();
        if !change.holds(&before) {
            return Ok(false);
        }
        let after = change.made_on(&before);
        if after.written() == before.written()
            || stored
                .replace(whose.name, &after)
                .map_err(|error| cannot(&stored.own, error))?
        {
            // A confirmed change must survive a crash.
            return File::open(&dir)
                .and_then(|dir| dir.sync_all())
                .map(|()| true)
                .map_err(|e| cannot(&dir, e));
        }
    }
    Err(FileError::Busy {
        name: whose.name.to_owned(),
        dir,
    })
}

#[cfg(test)]
mod tests;

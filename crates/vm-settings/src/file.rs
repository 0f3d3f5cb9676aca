//! What the operator says of a VM that has no metadata of libvirt's: a file of its own, with the same names and values.
//!
//! ```toml
//! # /etc/homenode/vms/6f2a4f2e-92f4-4c7b-8a0e-3f1d8f1f7a10.toml
//! manage = "yes"
//! home = "0-1"
//! permit = "250k"
//! ```
//!
//! The file bears the VM's UUID. `NAME.toml` is read too, as long as one VM alone has that name and the two files do not
//! contradict each other; the first change renames it. A change is made on what the file says at that moment: programs of
//! Homenode take turns by a lock, and an editor that saves in between is seen, since the old file is exchanged and compared.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use homenode_kernel::read;
use homenode_units::VmId;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use toml_edit::{DocumentMut, Item, Value};

use crate::{Change, OperatorSettings};

/// Where the files lie.
const DIR: &str = "etc/homenode/vms";
const BYTES_MAX: u64 = 64 << 10;
/// Who holds a lock on it changes settings. Other users cannot open it: they could hold it for ever.
const LOCK: &str = ".lock";
/// How long another program may take over its change: the agent's loop waits for it.
const LOCK_MAX: Duration = Duration::from_secs(2);
const LOCK_AGAIN: Duration = Duration::from_millis(5);
/// How often a change is begun again when an editor saves in the middle of it.
const TRIES: u32 = 10;

/// Whose settings are meant.
#[derive(Clone, Copy, Debug)]
pub struct Whose<'a> {
    /// The VM.
    pub vm: VmId,
    /// Its name.
    pub name: &'a str,
    /// Other VMs that run here under the same name.
    pub namesakes: &'a [VmId],
    /// Whether it has the same UUID at its next start. Xen gives a domain another each time where its configuration names none:
    /// such a VM's file keeps its name.
    pub keeps_uuid: bool,
}

impl Whose<'_> {
    /// The file that its name leads to; `None` where the name cannot be a file's, or is written as a UUID: that file is the VM's
    /// that has the UUID.
    fn named(&self, dir: &Path) -> Option<PathBuf> {
        let file = homenode_units::file_name(self.name, ".toml").ok()?;
        VmId::parse(self.name).is_none().then(|| dir.join(file))
    }

    /// That nobody can know whom a file of that name means.
    fn ambiguous(&self, path: &Path) -> String {
        let mut all: Vec<String> = self.namesakes.iter().map(VmId::to_string).collect();
        all.push(self.vm.to_string());
        all.sort();
        format!(
            "{}: the VMs {} are all named {}, so this file applies to none of them; rename it to UUID.toml for the \
             VM that it is meant for, and write another for each other VM",
            path.display(),
            all.join(" and "),
            self.name
        )
    }
}

/// A file as it is now.
struct Read {
    path: PathBuf,
    text: String,
    said: OperatorSettings,
}

impl Read {
    fn of(path: &Path) -> Result<Option<Read>, String> {
        let Some(text) = read::text_if_there(path, BYTES_MAX).map_err(|e| e.to_string())? else {
            return Ok(None);
        };
        let said = parse(&text).map_err(|why| format!("{}: {why}", path.display()))?;
        let path = path.to_owned();
        Ok(Some(Read { path, text, said }))
    }
}

/// The settings in a text.
fn parse(text: &str) -> Result<OperatorSettings, String> {
    let document: DocumentMut = text.parse().map_err(|e: toml_edit::TomlError| {
        let before = e
            .span()
            .and_then(|span| text.get(..span.start))
            .unwrap_or_default();
        format!("line {}: {}", before.matches('\n').count() + 1, e.message())
    })?;
    let written = document.iter().map(|(key, item)| match item {
        Item::Value(Value::String(text)) => Ok((key.to_owned(), text.value().clone())),
        // A node is as well a number.
        Item::Value(Value::Integer(number)) => Ok((key.to_owned(), number.value().to_string())),
        Item::Value(Value::Boolean(is_on)) if key == "manage" => {
            let text = if *is_on.value() { "yes" } else { "no" };
            Ok((key.to_owned(), text.to_owned()))
        }
        _ => Err(format!("`{key}` is not a text; write it in quotes")),
    });
    OperatorSettings::of(written.collect::<Result<_, _>>()?)
}

/// What is stored of a VM now.
struct Stored {
    /// The file that is to be written.
    own: PathBuf,
    /// The file that says it, if there is one.
    file: Option<Read>,
    /// Files of other names that say nothing else.
    others: Vec<Read>,
    /// Whether a file of another name is to be renamed to that.
    is_renamed: bool,
}

impl Stored {
    fn find(dir: &Path, whose: Whose<'_>) -> Result<Stored, String> {
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
            // It may have been renamed between the two looks.
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
                return Err(format!(
                    "{} and {} are both of VM {}, and do not say the same of `{key}`: move what is right to {} and \
                     remove the other file",
                    first.display(),
                    other.path.display(),
                    whose.name,
                    own.display()
                ));
            }
            others.push(other);
        }
        // The first settings of a VM whose UUID changes go where its next start finds them.
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

    /// Writes new settings in the place of these: whole, or not at all. False where the files changed meanwhile: then they are as
    /// another program left them.
    fn replace(&self, name: &str, after: &OperatorSettings) -> io::Result<bool> {
        let Some(before) = &self.file else {
            let text = format!(
                "# What Homenode is told of VM {}; docs/USE.md says what there is.\n{}",
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
                // A file system that cannot: who writes holds the lock.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    fs::rename(&before.path, &self.own)?;
                }
                renamed => renamed?,
            }
        }
        // Through a link of the operator's, not in its place.
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

/// A file that is to come to this place, with the rights and the owner of the one before.
fn new_file(path: &Path, text: &str, before: Option<&fs::Metadata>) -> io::Result<tempfile::NamedTempFile> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(text.as_bytes())?;
    let mode = before.map_or(0o644, |before| before.mode() & 0o7777);
    if let Some(before) = before {
        // Refused to who is not root; then it is the writer's own.
        let _ = std::os::unix::fs::fchown(file.as_file(), Some(before.uid()), Some(before.gid()));
    }
    file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    Ok(file)
}

/// Puts a file in the place of one that should have this text. Where it has another by then, that one stays.
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

/// A text with other settings, and everything else as it is in it.
fn edited(text: &str, before: &[(String, String)], after: &[(String, String)]) -> String {
    // It was read before.
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

/// Takes out a line; comments above it stay.
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

/// The lock of who changes settings; it ends with the value.
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

/// What the file of this VM says; nothing where there is none.
///
/// # Errors
/// A sentence that names the file, and the line or value that is wrong.
pub fn read(root: &Path, whose: Whose<'_>) -> Result<OperatorSettings, String> {
    Stored::find(&root.join(DIR), whose).map(|stored| stored.said())
}

/// Makes a change on what the file says now; false, and nothing is written, where that is not what the change is meant for.
///
/// # Errors
/// A sentence that names the file. Nothing is changed then.
pub fn change(root: &Path, whose: Whose<'_>, change: &Change<'_>) -> Result<bool, String> {
    let dir = root.join(DIR);
    let cannot = |path: &Path, error: io::Error| format!("{} cannot be written: {error}", path.display());
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
            // What was confirmed is there after a crash.
            return File::open(&dir)
                .and_then(|dir| dir.sync_all())
                .map(|()| true)
                .map_err(|e| cannot(&dir, e));
        }
    }
    Err(format!(
        "the settings of VM {} in {} are being changed by another program again and again; try again",
        whose.name,
        dir.display()
    ))
}

#[cfg(test)]
mod tests;

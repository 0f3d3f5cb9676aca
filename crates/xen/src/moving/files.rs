//! Files of a move: who is at it, what is to be done, how far it is; and `xl`'s own, where it keeps what it knows of a domain.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use homenode_units::VmId;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::Job;
use super::configuration::{BYTES_MAX, Configuration};

/// Where files of moves lie; gone after a reboot, as domains are.
const DIR: &str = "/run/homenode-xen";
/// Held by who moves a domain.
pub const MOVING: &str = "moving.lock";
/// Held as long as a domain is being copied.
pub const COPYING: &str = "copying.lock";
const JOB: &str = "job";
const COPIED: &str = "copied";
/// What `xl` said.
const SAID: &str = "said";
/// Where libxl keeps what it knows of domains.
const USERDATA: &str = "/var/lib/xen";
/// What it keeps of each; others keep more there, as libvirt does.
const KEPT: &str = "libxl-json";

/// A file in the directory of moves, for writing.
///
/// # Errors
/// When it cannot be had.
pub fn open(name: &str) -> Result<File, String> {
    let failed = |error: std::io::Error| format!("{DIR}/{name}: {error}");
    match fs::DirBuilder::new().mode(0o700).create(DIR) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).mode(0o600);
    options
        .custom_flags(libc::O_NOFOLLOW)
        .open(Path::new(DIR).join(name))
        .map_err(failed)
}

/// Takes one of the locks; `None` while another holds it. It is held until the file is closed.
///
/// # Errors
/// When it cannot be had.
pub fn lock(name: &str) -> Result<Option<File>, String> {
    let file = open(name)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(format!("{DIR}/{name}: {error}")),
    }
}

fn write(name: &str, text: &str) -> Result<(), String> {
    use std::io::Write as _;
    let new = format!("{name}.new");
    let mut file = open(&new)?;
    let written = file
        .set_len(0)
        .and_then(|()| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(Path::new(DIR).join(&new), Path::new(DIR).join(name)));
    written.map_err(|error| format!("{DIR}/{name}: {error}"))
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(BYTES_MAX as u64).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Writes down what is to be done, before it is.
///
/// # Errors
/// When it cannot be written.
pub fn begin(job: &Job) -> Result<(), String> {
    write(COPIED, "0")?;
    write(
        JOB,
        &serde_json::to_string(job).map_err(|error| error.to_string())?,
    )
}

/// What was being done last, where that was not brought to its end.
pub fn job() -> Option<Job> {
    serde_json::from_str(&read(&Path::new(DIR).join(JOB))?).ok()
}

/// It was brought to its end.
pub fn end() {
    let _ = fs::remove_file(Path::new(DIR).join(JOB));
}

/// Says how many pages were copied.
pub fn copied(pages: u64) {
    let _ = write(COPIED, &pages.to_string());
}

/// How many pages were copied.
pub fn how_many_copied() -> u64 {
    let text = read(&Path::new(DIR).join(COPIED));
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Where what `xl` says goes.
///
/// # Errors
/// When it cannot be had.
pub fn for_what_is_said() -> Result<File, String> {
    let file = open(SAID)?;
    file.set_len(0).map_err(|error| error.to_string())?;
    Ok(file)
}

/// What `xl` said last that tells why it failed.
pub fn what_was_said() -> String {
    let text = read(&Path::new(DIR).join(SAID)).unwrap_or_default();
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Ours says that the domain was not sent or received whole, and the other's first word may say why.
    let ours = lines().rfind(|line| line.starts_with("homenode"));
    let error = lines().find(|line| line.contains("error") || line.contains("ailed"));
    let told: Vec<&str> = match (ours, error) {
        (None, None) => lines().next_back().into_iter().collect(),
        (ours, error) => ours
            .into_iter()
            .chain(error.filter(|line| ours != Some(line)))
            .collect(),
    };
    match told.is_empty() {
        true => "xl gave no reason".into(),
        false => told.join("; ").chars().take(400).collect(),
    }
}

fn kept(domid: u32, vm: VmId, what: &str) -> PathBuf {
    Path::new(USERDATA).join(format!("userdata-d.{domid}.{vm}.{what}"))
}

/// Whose notes on a domain there are, beside libxl's own.
///
/// # Errors
/// libxl keeps nothing of it, or its directory cannot be read.
pub fn others_notes(domid: u32, vm: VmId) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(USERDATA).map_err(|error| format!("{USERDATA}: {error}"))?;
    let mine = format!("userdata-d.{domid}.{vm}.");
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut notes: Vec<String> = names
        .filter_map(|name| name.strip_prefix(&mine).map(str::to_owned))
        .collect();
    let before = notes.len();
    notes.retain(|note| note != KEPT);
    match before > notes.len() {
        true => Ok(notes),
        false => Err("xl knows nothing of it".into()),
    }
}

/// What libxl keeps of a domain.
///
/// # Errors
/// When it cannot be read, as the end of a sentence.
pub fn configuration(domid: u32, vm: VmId) -> Result<Configuration, String> {
    let path = kept(domid, vm, KEPT);
    let text = read(&path).ok_or_else(|| format!("{} cannot be read", path.display()))?;
    Configuration::read(text.as_bytes()).map_err(|why| format!("{}: {why}", path.display()))
}

/// Changes what libxl keeps of a domain, as libxl does: under its lock, a new file in the place of the old one.
///
/// # Errors
/// When that cannot be done; then it is as it was.
pub fn change(domid: u32, vm: VmId, change: impl FnOnce(&mut Configuration)) -> Result<(), String> {
    let lock = Path::new(USERDATA).join(format!("userdata-l.{domid}.{vm}.domain-userdata-lock"));
    let failed = |error: std::io::Error| format!("{}: {error}", lock.display());
    let held = loop {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).mode(0o600);
        let file = options
            .custom_flags(libc::O_NOFOLLOW)
            .open(&lock)
            .map_err(failed)?;
        rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        // Who had it before removes the file with it.
        let is_it = fs::metadata(&lock).is_ok_and(|there| {
            file.metadata()
                .is_ok_and(|own| (own.dev(), own.ino()) == (there.dev(), there.ino()))
        });
        if is_it {
            break file;
        }
    };
    let result = configuration(domid, vm).and_then(|mut of| {
        change(&mut of);
        let (path, new) = (
            kept(domid, vm, KEPT),
            kept(domid, vm, KEPT).with_extension("homenode-new"),
        );
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let written = options.open(&new).and_then(|mut file| {
            use std::io::Write as _;
            file.write_all(&[of.written(), vec![0]].concat())
        });
        written
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| format!("{}: {error}", path.display()))
    });
    let _ = fs::remove_file(&lock);
    drop(held);
    result
}

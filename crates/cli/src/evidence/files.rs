//! The files of a report.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use homenode_evidence::{Report, page, read, share};

use crate::bad_input;

/// The report, for programs.
pub(super) const REPORT: &str = "evidence.json";
/// The report, for people.
const PAGE: &str = "evidence.html";
/// Both, without what names the host and its VMs.
const SHARED: &str = "to-share.tar.gz";
/// Most bytes of a file that is read: a crossover of 1600 VMs has 4 MiB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// Reads a report: `evidence.json`, or what was made to be shared.
///
/// # Errors
/// The file cannot be read, or is neither.
pub(super) fn read_report(path: &Path) -> anyhow::Result<Report> {
    let bytes =
        bytes_of(path).map_err(|error| bad_input(format!("cannot read {}: {error}", path.display())))?;
    let wrong = |error: &dyn std::fmt::Display| bad_input(format!("{}: {error}", path.display()));
    match share::is_archive(&bytes) {
        true => share::unpacked(&bytes).map_err(|error| wrong(&error)),
        false => {
            let text =
                String::from_utf8(bytes).map_err(|_| wrong(&"neither evidence.json nor to-share.tar.gz"))?;
            read::read(&text).map_err(|error| wrong(&error))
        }
    }
}

fn bytes_of(path: &Path) -> std::io::Result<Vec<u8>> {
    // Opening a pipe or a device could block, or reading it never end.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other("not a file"));
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    match bytes.len() as u64 > FILE_BYTES_MAX {
        true => Err(std::io::Error::other(format!(
            "larger than {} MiB",
            FILE_BYTES_MAX >> 20
        ))),
        false => Ok(bytes),
    }
}

/// Writes the files of a report. Each is replaced as a whole.
///
/// # Errors
/// A file cannot be written.
pub(super) fn keep(directory: &Path, report: &Report) -> anyhow::Result<()> {
    let files = [
        (PAGE, page::page(report).into_bytes()),
        (SHARED, share::archive(report)?),
        (REPORT, read::written(report).into_bytes()),
    ];
    for (name, bytes) in files {
        let path = directory.join(name);
        let written = tempfile::NamedTempFile::new_in(directory).and_then(|mut file| {
            file.write_all(&bytes)?;
            // A new temporary file can be read by its owner only.
            file.as_file().set_permissions(Permissions::from_mode(0o644))?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        });
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

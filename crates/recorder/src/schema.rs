//! The database's schema, and how to open it.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

/// "HNod", which marks a database as ours.
const APPLICATION_ID: i32 = 0x484e_6f64;
/// The newest version that can be read. The oldest is 1.
const FORMAT: i32 = 1;
/// How long to wait if a reader has locked the database.
const BUSY: Duration = Duration::from_secs(5);
/// Most bytes of an unpacked block.
pub(crate) const BLOCK_BYTES_MAX: usize = 256 << 20;

const TABLES: &str = "
    CREATE TABLE run (
        id INTEGER PRIMARY KEY, wall_ns INTEGER NOT NULL, version TEXT NOT NULL, host TEXT NOT NULL, detail TEXT NOT NULL
    );
    CREATE TABLE tail (
        id INTEGER PRIMARY KEY, run INTEGER NOT NULL, kind INTEGER NOT NULL, at_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
        frame BLOB NOT NULL
    );
    CREATE TABLE block (
        id INTEGER PRIMARY KEY, run INTEGER NOT NULL, kind INTEGER NOT NULL,
        first_at_ns INTEGER NOT NULL, last_at_ns INTEGER NOT NULL,
        first_wall_ns INTEGER NOT NULL, last_wall_ns INTEGER NOT NULL,
        count INTEGER NOT NULL, frames BLOB NOT NULL
    );
    CREATE INDEX block_by_time ON block (kind, last_wall_ns);
    CREATE TABLE event (
        id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, at_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
        last_wall_ns INTEGER NOT NULL, count INTEGER NOT NULL, kind TEXT NOT NULL, vm TEXT, name TEXT, policy TEXT,
        action TEXT, outcome TEXT, text TEXT NOT NULL, detail TEXT NOT NULL
    );
    CREATE INDEX event_by_time ON event (last_wall_ns);
    CREATE INDEX event_by_vm ON event (vm, last_wall_ns);
";

/// Why a history cannot be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// SQLite failed, or the disk that it uses.
    #[error("history {path}: {cause}")]
    Database {
        /// The file.
        path: String,
        /// SQLite's error.
        cause: String,
    },
    /// Another program's file.
    #[error("{path} is not a Homenode history: choose another file")]
    Foreign {
        /// The file.
        path: String,
    },
    /// A newer version wrote the history.
    #[error(
        "the history {path} has format {format}, but this version of homenode reads only formats up to {FORMAT}: use a newer one"
    )]
    Newer {
        /// The file.
        path: String,
        /// The format of the file.
        format: i32,
    },
    /// The file does not exist.
    #[error("there is no history at {path}: an agent writes one while it runs; name another with --history")]
    Missing {
        /// The path.
        path: String,
    },
    /// An export cannot be written.
    #[error("{path} cannot be written: {cause}")]
    Export {
        /// The file to be written.
        path: String,
        /// The reason.
        cause: String,
    },
    /// Part of the history cannot be read.
    #[error("the history {path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: String,
        /// The damaged part.
        what: String,
    },
}

impl RecordError {
    pub(crate) fn new(path: &Path, cause: impl std::fmt::Display) -> RecordError {
        RecordError::Database {
            path: path.display().to_string(),
            cause: cause.to_string(),
        }
    }

    /// Converts an error of SQLite about a file. If SQLite finds the content invalid, the file counts as damaged if it has our
    /// header, and otherwise as another program's.
    pub(crate) fn of_sqlite(path: &Path, error: rusqlite::Error) -> RecordError {
        use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
        let name = || path.display().to_string();
        match error.sqlite_error_code() {
            Some(DatabaseCorrupt | NotADatabase) if has_our_header(path) => RecordError::Damaged {
                path: name(),
                what: error.to_string(),
            },
            Some(DatabaseCorrupt | NotADatabase) => RecordError::Foreign { path: name() },
            _ if lacks_shared_memory(&error) => RecordError::new(
                path,
                "processes cannot share memory on its file system (such as NFS or 9p): choose a local one with --history",
            ),
            _ => RecordError::new(path, error),
        }
    }
}

/// Returns true if SQLite cannot create the file through which readers and the writer share memory.
fn lacks_shared_memory(error: &rusqlite::Error) -> bool {
    use rusqlite::ffi;
    let code = error.sqlite_error().map(|error| error.extended_code);
    let all = [
        ffi::SQLITE_IOERR_SHMOPEN,
        ffi::SQLITE_IOERR_SHMSIZE,
        ffi::SQLITE_IOERR_SHMLOCK,
        ffi::SQLITE_IOERR_SHMMAP,
    ];
    code.is_some_and(|code| all.contains(&code))
}

/// The content of a block or a row of the tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The agent's status.
    Status,
    /// A sample of the host.
    Sample,
}

impl Kind {
    /// Both kinds of documents.
    pub const ALL: [Kind; 2] = [Kind::Status, Kind::Sample];

    /// Returns the kind's index in [`Kind::ALL`].
    pub(crate) fn index(self) -> usize {
        match self {
            Kind::Status => 0,
            Kind::Sample => 1,
        }
    }

    pub(crate) fn number(self) -> i64 {
        self.index().cast_signed() as i64
    }
}

/// Opens a history for writing, and creates missing tables.
pub(crate) fn open_to_write(path: &Path) -> Result<Connection, RecordError> {
    check_kind(path)?;
    let failed = |e: rusqlite::Error| RecordError::of_sqlite(path, e);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NOFOLLOW
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(whole(path), flags).map_err(failed)?;
    connection.busy_timeout(BUSY).map_err(failed)?;
    let is_new = match form(&connection).map_err(failed)? {
        (0, 0) if table_count(&connection).map_err(failed)? == 0 => true,
        form => {
            check(path, form)?;
            false
        }
    };
    if is_new {
        // Allows the pages of pruned data to be returned to the file system. Must be set before there are tables.
        connection
            .pragma_update(None, "auto_vacuum", "INCREMENTAL")
            .map_err(failed)?;
    }
    // With these settings, readers and the writer do not block each other, and a power cut loses only the last seconds.
    connection
        .pragma_update(None, "journal_mode", "WAL")
        .map_err(failed)?;
    connection
        .pragma_update(None, "synchronous", "NORMAL")
        .map_err(failed)?;
    connection
        .pragma_update(None, "journal_size_limit", 4 << 20)
        .map_err(failed)?;
    if is_new {
        let make = connection.transaction().map_err(failed)?;
        make.execute_batch(TABLES).map_err(failed)?;
        make.pragma_update(None, "application_id", APPLICATION_ID)
            .map_err(failed)?;
        make.pragma_update(None, "user_version", FORMAT).map_err(failed)?;
        make.commit().map_err(failed)?;
    }
    Ok(connection)
}

/// Resolves links in the file's directory. SQLite refuses a link anywhere in a path, but operators move directories to other
/// disks. SQLite itself checks that the file is not a link.
fn whole(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let real = parent.and_then(|parent| parent.canonicalize().ok());
    match (real, path.file_name()) {
        (Some(real), Some(name)) => real.join(name),
        _ => path.to_owned(),
    }
}

/// Rejects a path that cannot be a history: for a directory SQLite would report a disk error, and for a pipe wait forever.
///
/// # Errors
/// If the path is a directory, a pipe, a socket or a device. Links are left to SQLite, which refuses them.
pub(crate) fn check_kind(path: &Path) -> Result<(), RecordError> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() && !found.is_symlink() => Err(foreign(path)),
        _ => Ok(()),
    }
}

fn foreign(path: &Path) -> RecordError {
    RecordError::Foreign {
        path: path.display().to_string(),
    }
}

/// Opens a history for reading, even while an agent writes to it.
pub(crate) fn open_to_read(path: &Path) -> Result<Connection, RecordError> {
    if !path.exists() {
        return Err(RecordError::Missing {
            path: path.display().to_string(),
        });
    }
    // `is_file` follows links.
    if !path.is_file() {
        return Err(foreign(path));
    }
    let failed = |e: rusqlite::Error| RecordError::of_sqlite(path, e);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(failed)?;
    connection.busy_timeout(BUSY).map_err(failed)?;
    check(path, form(&connection).map_err(failed)?)?;
    Ok(connection)
}

/// Offset of the application id in an SQLite file.
const APPLICATION_ID_AT: usize = 68;

fn has_our_header(path: &Path) -> bool {
    let mut header = [0; APPLICATION_ID_AT + 4];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header[APPLICATION_ID_AT..] == APPLICATION_ID.to_be_bytes()
}

fn form(connection: &Connection) -> rusqlite::Result<(i32, i32)> {
    let number = |name| connection.pragma_query_value(None, name, |row| row.get(0));
    Ok((number("application_id")?, number("user_version")?))
}

fn table_count(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))
}

fn check(path: &Path, (application, format): (i32, i32)) -> Result<(), RecordError> {
    let path = path.display().to_string();
    match (application, format) {
        (APPLICATION_ID, 1..=FORMAT) => Ok(()),
        (APPLICATION_ID, format) => Err(RecordError::Newer { path, format }),
        _ => Err(RecordError::Foreign { path }),
    }
}

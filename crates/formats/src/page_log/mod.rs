//! The log of a guest's pages. The plugin writes it window by window; `homenode wss --log` reads it.
//!
//! # Format
//!
//! Little-endian throughout: a header of [`Header::BYTES`] bytes, then records.
//!
//! ```text
//!   header   0  "HNPAGLOG"               32  core, 16 bytes, filled up with zeroes
//!            8  version                  48  guest frames, 64 bits        72  pages the TLBs hold, 64 bits
//!           12  byte order: 0x0a0b0c0d   56  modelled table frames, 64    80  begun, ns since 1970, 64 bits
//!           16  bytes of this header     64  bytes of a page              88  begun, ns of the host's monotonic clock, 64 bits
//!           20  bytes of a record's      68  vCPUs                        96  entries of a buffer
//!           24  bytes of a row           28  mode, tables, flags: a byte each, and 0     100  0
//!          104  offset of the first kept record, 64 bits            112  its number, 64      124  CRC-32 of the above
//!
//!   record   0  "WIND" or "ENDS"         16  begin, ns since begun, 64    48  walks, 64 bits       80  outside, 64 bits
//!            4  rows                     24  end, likewise                56  logged, 64 bits      88  CRC-32 of the rows
//!            8  number, 64 bits          32  label, 16 bytes              64  lost, 64 bits        92  CRC-32 of the above
//!                                                                         72  full buffers, 64
//!   row      0  frame                     4  number of times it was logged, 24 bits; its uses ([`Marks`]), 8 bits
//! ```
//!
//! Records are numbered from 0, and their windows do not overlap. Rows are in ascending order of frames. In \[PRL\] the handler
//! of full buffers counts each frame (section 4.3); therefore a row is a frame with its count, and the order within a window is
//! lost. A closed log ends with a record `ENDS` without rows. If that is missing, the machine is still running or was killed.
//!
//! A log may drop its oldest records, which makes it a feed: on `/dev/shm` it is memory that the writer shares with its followers
//! ([`Follower`]). Records never move. The memory of dropped records is returned to the system and reads as zeroes; the writer
//! updates the header first.
//!
//! # What a reader does
//!
//! It trusts nothing. A file that ends within a record yields all whole records and [`Log::missing`]; any other deviation is an
//! error that names record and offset.

mod follow;
mod records;

use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::path::Path;

pub use follow::{Followed, Follower};
use records::{Record, Records};

/// Header of a log: which machine was modelled, and where records begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The events that were logged.
    pub logs: Logs,
    /// Which of the guest's page tables are logged.
    pub tables: Tables,
    /// Whether rows contain all used frames, rather than only the logged ones.
    pub exact: bool,
    /// Whether used frames include those that were only executed.
    pub fetches: bool,
    /// Whether TLBs are flushed after each window.
    pub flush: bool,
    /// Name of the core whose TLBs are modelled.
    pub core: String,
    /// Number of guest frames. Frame numbers from here on are modelled page tables.
    pub frames: u64,
    /// Number of frames of modelled page tables.
    pub table_frames: u64,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Number of pages whose translations the TLBs of all vCPUs can hold, so that a log may not show them.
    pub blind: u64,
    /// When the log was begun, in nanoseconds since 1970.
    pub begun_unix_ns: u64,
    /// When the log was begun, on the host's monotonic clock.
    pub begun_ns: u64,
    /// Entries of a vCPU's buffer.
    pub entries: u32,
    /// The first kept record.
    pub kept: Kept,
}

/// Where the kept part of a log begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Offset in the file, bytes.
    pub at: u64,
    /// Number of the record.
    pub number: u64,
}

impl Kept {
    /// All records.
    pub const ALL: Kept = Kept {
        at: Header::BYTES as u64,
        number: 0,
    };
}

/// The events that were logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logs {
    /// Nothing; the log contains only used frames.
    Nothing,
    /// First writes (PML).
    Writes,
    /// Walks (PRL in PAML mode).
    Walks,
}

/// Which page tables are logged, like `homenode_tracking::paging::TablePages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// No tables.
    Silent,
    /// Tables whose location the walker had to find by a nested walk.
    Walked,
    /// All tables that a walk reads.
    Each,
}

/// How a frame was used in a window: a set of the constants below.
///
/// An address in the lower half counts as the program's, one in the upper half as the kernel's: x86-64 and all its 64-bit guests
/// divide addresses so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks(pub u8);

impl Marks {
    /// A program read or wrote the frame.
    pub const USED: u8 = 1;
    /// A program wrote the frame.
    pub const WRITTEN: u8 = 2;
    /// A program executed code in the frame.
    pub const FETCHED: u8 = 4;
    /// All uses by a program.
    pub const PROGRAM: u8 = 7;
    /// The kernel read or wrote the frame.
    pub const KERNEL_USED: u8 = 8;
    /// The kernel wrote the frame.
    pub const KERNEL_WRITTEN: u8 = 16;
    /// The kernel executed code in the frame.
    pub const KERNEL_FETCHED: u8 = 32;
    /// A program used the frame in the previous window.
    pub const BEFORE: u8 = 64;
    const ALL: u8 = 127;

    /// Returns true if the frame was used in the window.
    pub fn used(self) -> bool {
        self.0 & !Marks::BEFORE != 0
    }

    /// Returns true if the frame was written in the window.
    pub fn written(self) -> bool {
        self.0 & (Marks::WRITTEN | Marks::KERNEL_WRITTEN) != 0
    }

    /// Returns true if the frame counts as a program's: a program used it in this window; or it was not used in this window, and
    /// a program used it in the previous one.
    pub fn program(self) -> bool {
        self.0 & Marks::PROGRAM != 0 || self.0 == Marks::BEFORE
    }
}

/// A frame and its uses in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Guest frame.
    pub frame: u32,
    /// Number of times the frame was logged, up to [`Row::COUNT_MAX`].
    pub count: u32,
    /// The frame's uses.
    pub marks: Marks,
}

impl Row {
    /// Largest count; larger ones are stored as this.
    pub const COUNT_MAX: u32 = (1 << 24) - 1;
    const BYTES: usize = 8;
}

/// A window: everything seen between two points in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// The window's number.
    pub number: u64,
    /// Begin of the window, in nanoseconds since the log was begun.
    pub begin_ns: u64,
    /// End of the window, on the same clock. This is host time: the plugin's interface has no other, and without `-icount` QEMU's
    /// virtual clock runs with it.
    pub end_ns: u64,
    /// Label from the caller that ended the previous window; printable, at most [`LABEL_BYTES`].
    pub label: String,
    /// Number of walks.
    pub walks: u64,
    /// Number of entries taken out of buffers.
    pub logged: u64,
    /// Number of frames that were lost because a buffer was full.
    pub lost: u64,
    /// Number of buffers that became full.
    pub filled: u64,
    /// Number of accesses to memory outside of the guest's `frames`, which is not modelled. Device registers do not count.
    pub outside: u64,
    /// Rows of the window's frames, ascending.
    pub rows: Vec<Row>,
}

/// Maximum bytes of a label.
pub const LABEL_BYTES: usize = 16;

/// A parsed log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// The log's header.
    pub header: Header,
    /// All windows, in order.
    pub windows: Vec<Window>,
    /// What is missing at the end, if anything.
    pub missing: Option<Missing>,
}

/// What is missing at the end of an incomplete log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The end record: the machine is still running, or was killed.
    End,
    /// The rest of a record.
    Rest {
        /// Number of the record.
        record: u64,
        /// Bytes of the record that are present.
        bytes: u64,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::End => f.write_str(
                "the log has no end record: its machine is still running or was killed, and what followed is missing",
            ),
            Missing::Rest { record, bytes } => {
                write!(
                    f,
                    "the log is cut off {bytes} bytes into record {record}: that record and what followed are missing"
                )
            }
        }
    }
}

/// Why a file cannot be read as a log.
#[derive(Debug, thiserror::Error)]
pub enum PageLogError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file.
        path: String,
        /// The system's error.
        error: io::Error,
    },
    /// The file has another format.
    #[error(
        "{0}: not a log of pages: its first bytes are not those of one; the plugin writes one with pages=FILE"
    )]
    Magic(String),
    /// The file has no complete header.
    #[error("{path}: cut off within its header, after {bytes} bytes: nothing was recorded")]
    Short {
        /// Path of the file.
        path: String,
        /// The file's length.
        bytes: usize,
    },
    /// The file has another version.
    #[error(
        "{path}: the log has version {version}, but this program reads {VERSION}; use a plugin and a program of the same build"
    )]
    Version {
        /// Path of the file.
        path: String,
        /// The file's version.
        version: u32,
    },
    /// A machine of the other byte order wrote the file.
    #[error("{0}: written by a machine with the other byte order; read it on such a machine")]
    Order(String),
    /// Another writer restarted the log while this reader followed it.
    #[error("{0}: another machine restarted the log while it was being followed; follow it again")]
    Anew(String),
    /// A checksum or a figure is wrong.
    #[error("{path}: corrupt at byte {at}, {place}: {what}; record the log again")]
    Corrupt {
        /// Path of the file.
        path: String,
        /// Offset in the file.
        at: usize,
        /// Part of the log.
        place: Place,
        /// The reason.
        what: &'static str,
    },
    /// Records are out of order.
    #[error(
        "{path}: record {found} is in the place of record {expected}: parts of the log were joined in the wrong order, or are missing"
    )]
    Reordered {
        /// Path of the file.
        path: String,
        /// The expected number.
        expected: u64,
        /// The number found.
        found: u64,
    },
}

/// A part of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The header.
    Header,
    /// A record.
    Record(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header => f.write_str("the header"),
            Place::Record(number) => write!(f, "record {number}"),
        }
    }
}

const MAGIC: &[u8; 8] = b"HNPAGLOG";
const WINDOW: &[u8; 4] = b"WIND";
const END: &[u8; 4] = b"ENDS";
/// Version of the format.
pub const VERSION: u32 = 2;
const ORDER: u32 = 0x0a0b_0c0d;
const PAGE_BYTES: u32 = 4096;
const RECORD_BYTES: usize = 96;
/// Frame numbers have 32 bits, which is enough for 16 TiB.
const FRAMES_MAX: u64 = 1 << 32;

impl Header {
    /// Size of the header.
    pub const BYTES: usize = 128;

    /// Formats the header for a file.
    pub fn to_bytes(&self) -> [u8; Header::BYTES] {
        let mut bytes = [0; Header::BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &ORDER.to_le_bytes());
        put(16, &(Header::BYTES as u32).to_le_bytes());
        put(20, &(RECORD_BYTES as u32).to_le_bytes());
        put(24, &(Row::BYTES as u32).to_le_bytes());
        let flags = u8::from(self.exact) | u8::from(self.fetches) << 1 | u8::from(self.flush) << 2;
        put(28, &[self.logs as u8, self.tables as u8, flags]);
        put(32, &text_bytes(&self.core));
        put(48, &self.frames.to_le_bytes());
        put(56, &self.table_frames.to_le_bytes());
        put(64, &PAGE_BYTES.to_le_bytes());
        put(68, &self.vcpus.to_le_bytes());
        put(72, &self.blind.to_le_bytes());
        put(80, &self.begun_unix_ns.to_le_bytes());
        put(88, &self.begun_ns.to_le_bytes());
        put(96, &self.entries.to_le_bytes());
        put(104, &self.kept.at.to_le_bytes());
        put(112, &self.kept.number.to_le_bytes());
        let sum = crc32(&bytes[..124]);
        bytes[124..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Returns the header's bytes, if they are complete and of this version and byte order.
    fn whole<'a>(path: &str, bytes: &'a [u8]) -> Result<&'a [u8], PageLogError> {
        let there = bytes.len().min(MAGIC.len());
        if bytes[..there] != MAGIC[..there] || bytes.is_empty() {
            return Err(PageLogError::Magic(path.to_owned()));
        }
        let short = || PageLogError::Short {
            path: path.to_owned(),
            bytes: bytes.len(),
        };
        let fixed = bytes.get(..16).ok_or_else(short)?;
        if u32_at(fixed, 12) == ORDER.swap_bytes() {
            return Err(PageLogError::Order(path.to_owned()));
        }
        let version = u32_at(fixed, 8);
        if version != VERSION {
            return Err(PageLogError::Version {
                path: path.to_owned(),
                version,
            });
        }
        let bytes = bytes.get(..Header::BYTES).ok_or_else(short)?;
        let corrupt = |at, what| corrupt(path, at, what);
        if u32_at(bytes, 124) != crc32(&bytes[..124]) {
            return Err(corrupt(0, "its checksum does not match"));
        }
        let sizes = [
            (12, ORDER),
            (16, Header::BYTES as u32),
            (20, RECORD_BYTES as u32),
            (24, Row::BYTES as u32),
        ];
        for (at, expected) in sizes.into_iter().chain([(64, PAGE_BYTES)]) {
            if u32_at(bytes, at) != expected {
                return Err(corrupt(at, "a size does not match this version"));
            }
        }
        Ok(bytes)
    }

    fn parse(path: &str, bytes: &[u8]) -> Result<Header, PageLogError> {
        let bytes = Header::whole(path, bytes)?;
        let corrupt = |at, what| corrupt(path, at, what);
        let logs = match bytes[28] {
            0 => Logs::Nothing,
            1 => Logs::Writes,
            2 => Logs::Walks,
            _ => return Err(corrupt(28, "the mode is unknown")),
        };
        let tables = match bytes[29] {
            0 => Tables::Silent,
            1 => Tables::Walked,
            2 => Tables::Each,
            _ => return Err(corrupt(29, "the choice of page tables is unknown")),
        };
        let (frames, table_frames) = (u64_at(bytes, 48), u64_at(bytes, 56));
        if frames
            .checked_add(table_frames)
            .is_none_or(|all| all > FRAMES_MAX)
        {
            return Err(corrupt(48, "the guest has more than 16 TiB, the most possible"));
        }
        let kept = Kept {
            at: u64_at(bytes, 104),
            number: u64_at(bytes, 112),
        };
        if kept.at < Kept::ALL.at {
            return Err(corrupt(104, "its first record begins within the header"));
        }
        Ok(Header {
            logs,
            tables,
            exact: bytes[30] & 1 != 0,
            fetches: bytes[30] & 2 != 0,
            flush: bytes[30] & 4 != 0,
            core: text(&bytes[32..48]).ok_or_else(|| corrupt(32, "the core's name is not text"))?,
            frames,
            table_frames,
            vcpus: u32_at(bytes, 68),
            blind: u64_at(bytes, 72),
            begun_unix_ns: u64_at(bytes, 80),
            begun_ns: u64_at(bytes, 88),
            entries: u32_at(bytes, 96),
            kept,
        })
    }
}

/// Returns the error for an invalid header.
fn corrupt(path: &str, at: usize, what: &'static str) -> PageLogError {
    PageLogError::Corrupt {
        path: path.to_owned(),
        at,
        place: Place::Header,
        what,
    }
}

impl Window {
    /// Formats the record for a file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = record(WINDOW, self);
        for row in &self.rows {
            let count = row.count.min(Row::COUNT_MAX);
            bytes.extend(row.frame.to_le_bytes());
            bytes.extend((count | u32::from(row.marks.0) << 24).to_le_bytes());
        }
        seal(bytes)
    }
}

/// Returns the record that closes a log of this many windows; `at_ns` is counted from the log's beginning.
pub fn end(windows: u64, at_ns: u64) -> Vec<u8> {
    let last = Window {
        number: windows,
        begin_ns: at_ns,
        end_ns: at_ns,
        ..Window::default()
    };
    seal(record(END, &last))
}

/// Formats a record, without its checksums.
fn record(kind: &[u8; 4], window: &Window) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(RECORD_BYTES + window.rows.len() * Row::BYTES);
    bytes.extend(kind);
    bytes.extend((window.rows.len() as u32).to_le_bytes());
    for figure in [window.number, window.begin_ns, window.end_ns] {
        bytes.extend(figure.to_le_bytes());
    }
    bytes.extend(text_bytes(&window.label));
    for figure in [
        window.walks,
        window.logged,
        window.lost,
        window.filled,
        window.outside,
    ] {
        bytes.extend(figure.to_le_bytes());
    }
    bytes.resize(RECORD_BYTES, 0);
    bytes
}

/// Fills in a record's checksums.
fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let rows = crc32(&bytes[RECORD_BYTES..]);
    bytes[88..92].copy_from_slice(&rows.to_le_bytes());
    let head = crc32(&bytes[..92]);
    bytes[92..96].copy_from_slice(&head.to_le_bytes());
    bytes
}

impl Log {
    /// Reads a log.
    ///
    /// # Errors
    /// [`PageLogError`].
    pub fn read(path: &Path) -> Result<Log, PageLogError> {
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        let read = fs::File::open(path).and_then(|mut file| {
            let mut magic = [0; MAGIC.len()];
            let count = file.read(&mut magic)?;
            bytes.extend(&magic[..count]);
            // Reads no further if the file has another format.
            if magic == *MAGIC {
                file.read_to_end(&mut bytes)
            } else {
                Ok(0)
            }
        });
        match read {
            Ok(_) => Log::parse(&name, &bytes),
            Err(error) => Err(PageLogError::Io { path: name, error }),
        }
    }

    /// Parses a log in memory; `path` is for error messages.
    ///
    /// # Errors
    /// [`PageLogError`], if the bytes are not a log.
    pub fn parse(path: &str, bytes: &[u8]) -> Result<Log, PageLogError> {
        let header = Header::parse(path, bytes)?;
        let mut records = Records::new(path, &header);
        let mut windows: Vec<Window> = Vec::new();
        let mut at = usize::try_from(header.kept.at).unwrap_or(usize::MAX);
        let missing = loop {
            let rest = bytes.get(at..).unwrap_or_default();
            match records.next(at, rest)? {
                Some((Record::Window(window), length)) => {
                    windows.push(window);
                    at += length;
                }
                Some((Record::End, length)) if length == rest.len() => break None,
                Some((Record::End, _)) => return Err(records.corrupt(at, "data follows the end record")),
                None if rest.is_empty() => break Some(Missing::End),
                None => {
                    break Some(Missing::Rest {
                        record: records.number,
                        bytes: rest.len() as u64,
                    });
                }
            }
        };
        Ok(Log {
            header,
            windows,
            missing,
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Formats a short text for a file: keeps printable ASCII characters, and truncates.
fn text_bytes(text: &str) -> [u8; LABEL_BYTES] {
    let mut bytes = [0; LABEL_BYTES];
    let printable = text.bytes().filter(u8::is_ascii_graphic);
    bytes.iter_mut().zip(printable).for_each(|(to, byte)| *to = byte);
    bytes
}

fn text(bytes: &[u8]) -> Option<String> {
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (text, rest) = bytes.split_at(length);
    let fine = text.iter().all(u8::is_ascii_graphic) && rest.iter().all(|byte| *byte == 0);
    fine.then(|| text.iter().map(|byte| char::from(*byte)).collect())
}

/// CRC-32 as in Ethernet and zip: polynomial 0xedb88320, reflected.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut value = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 != 0 {
                    value >> 1 ^ 0xedb8_8320
                } else {
                    value >> 1
                };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    !bytes
        .iter()
        .fold(!0, |sum, byte| TABLE[usize::from(sum as u8 ^ byte)] ^ sum >> 8)
}

#[cfg(test)]
mod tests;

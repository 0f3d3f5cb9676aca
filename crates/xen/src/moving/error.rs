//! Why a domain is not moved, or not completely.

use homenode_undo::state_dir::StateError;

use super::configuration::BYTES_MAX;
use crate::error::{CallError, LeverError, ResumeError, StoreError, XenError};
use crate::library::LoadError;
use crate::xl::XlError;

/// Why a configuration cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationError {
    #[error("the configuration has {bytes} bytes, more than {}", BYTES_MAX)]
    TooLong { bytes: usize },
    #[error("{0}")]
    NoJson(String),
    #[error("the configuration has a number that is not a 64-bit integer")]
    Inexact,
    #[error("the configuration has no `{0}`")]
    Lacks(&'static str),
}

/// Reasons why a domain cannot be moved, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmovable {
    #[error("an HVM domain's device model would have to move with it")]
    Hvm,
    #[error("the domain's configuration does not say of what kind the domain is")]
    UnknownKind,
    #[error("the domain's configuration says `nomigrate`")]
    NoMigrate,
    #[error("this is a driver domain: other domains use its devices")]
    DriverDomain,
    #[error("the domain has virtual nodes")]
    VirtualNodes,
    #[error("hardware is passed through to the domain (`{0}`)")]
    Hardware(&'static str),
    #[error("the configuration puts the domain into a CPU pool other than pool 0")]
    ConfiguredPool,
    #[error(
        "the domain's configuration has `{0}`, whose backend would have to serve two copies of the domain at once (not tested)"
    )]
    Parts(String),
    #[error("`{0}` in the domain's configuration is not a list")]
    NoList(&'static str),
    #[error("the domain's configuration has `{key}` = {value} for one of its `{devices}`: {which}")]
    Configured {
        devices: &'static str,
        key: String,
        value: String,
        which: &'static str,
    },
    #[error("xenstored does not report the domain's devices: {0}")]
    DevicesUnknown(StoreError),
    #[error("xenstore has no {0}")]
    NoPath(String),
    #[error(
        "the domain has a device `{0}`, whose backend would have to serve two copies of the domain at once (not tested)"
    )]
    Device(String),
    #[error("the domain's device `{name}` {number} is not served by dom0's kernel: {which}")]
    ServedByAnother {
        name: String,
        number: String,
        which: &'static str,
    },
    #[error("the domain's device `{name}` {number} is served with `{key}` = `{value}`: {which}")]
    ServedWith {
        name: String,
        number: String,
        key: &'static str,
        value: String,
        which: &'static str,
    },
    #[error(
        "the domain's device `{name}` {number} has `{key}` = `{value}`, but after a move it would have `{new}`"
    )]
    Changed {
        name: String,
        number: String,
        key: &'static str,
        value: String,
        new: String,
    },
    #[error("{0}")]
    NotAllowed(&'static str),
    #[error(
        "the domain was not created by xl, and its toolstack, which keeps data about it (`{0}`), would lose track of it"
    )]
    Notes(String),
    #[error("the domain runs in a CPU pool other than pool 0, and a move would put it into pool 0")]
    Pool,
    #[error("the domain's name begins with `-`, so xl would take it for an option")]
    Name,
    #[error("xenstored does not report which domains depend on this one: {0}")]
    UsersUnknown(StoreError),
    #[error("other domains use this domain's devices")]
    Serves,
    #[error("the guest does not report that it can be suspended")]
    NotSuspendable,
    #[error(
        "this Xen has no shadow paging, so a PV domain must be paused while it is copied: allow that with \
         `local_migration.allow = \"paused\"`"
    )]
    NoShadow,
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    File(#[from] FileError),
}

/// Why a file of a move, or a file of `xl`, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error("{path}: {cause}")]
    At { path: String, cause: String },
    #[error("{path}: {cause}")]
    Configuration { path: String, cause: ConfigurationError },
    #[error("libxl keeps no data about the domain")]
    NotKept,
    #[error("{0}")]
    System(String),
}

impl FileError {
    /// Returns the system's error for a path.
    #[expect(clippy::needless_pass_by_value, reason = "it stands in map_err")]
    pub fn at(path: &std::path::Path, error: impl ToString) -> FileError {
        FileError::At {
            path: path.display().to_string(),
            cause: error.to_string(),
        }
    }
}

/// Why the relay does not pass on a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The stream does not begin with `xl`'s header.
    #[error("this is not a stream from xl")]
    NotXl,
    /// The stream's byte order is not this machine's.
    #[error("the stream's byte order is not this machine's")]
    Order,
    /// The flags are unknown.
    #[error("the stream's flags {0:#x} are not those of Xen 4.17")]
    Flags(u32),
    /// The configuration's length is invalid.
    #[error("the stream gives the configuration an impossible length, {0} bytes")]
    ConfigurationBytes(usize),
    /// Something besides the configuration follows the header.
    #[error("the stream's header has something else besides the configuration")]
    SomethingElse,
    /// The configuration cannot be read.
    #[error("the configuration in the stream cannot be read: {0}")]
    Configuration(ConfigurationError),
    /// A part's header is unknown.
    #[error("{0} does not begin as in Xen 4.17")]
    Begins(&'static str),
    /// A record's length is invalid.
    #[error("a record gives its length as {0} bytes, which is too much")]
    RecordBytes(u32),
    /// The sending `xl` is gone.
    #[error("the output of xl cannot be read: {0}")]
    Read(String),
    /// The receiving `xl` is gone.
    #[error("the xl that receives the domain has ended: {0}")]
    Write(String),
    /// The configuration belongs to another domain.
    #[error("xl is sending another domain than the one to be moved")]
    AnotherDomain,
    /// The domain cannot be moved.
    #[error(transparent)]
    Unmovable(#[from] Unmovable),
    /// The domain's devices have changed.
    #[error("a device was attached or detached during the copy")]
    DevicesChanged,
    /// The time limit is over.
    #[error("the time limit of the copy was reached")]
    Late,
    /// The sending `xl` ended early.
    #[error("xl ended before it had sent the whole domain")]
    CutOff,
    /// Another relay holds the lock.
    #[error("another domain is being copied")]
    Busy,
    /// The job cannot be read from the environment.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A file of the move cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Xenstore's library cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The system's error.
    #[error("{0}")]
    System(String),
}

/// Why a process has no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    #[error("only the agent may start this command")]
    NotStarted,
    #[error("{variable}: {cause}")]
    Unreadable { variable: &'static str, cause: String },
}

/// Why a move did not begin, or did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The job cannot be read from the environment.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Another mover holds the lock.
    #[error("another domain is being moved")]
    Busy,
    /// Xen cannot be managed.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A command of `xl` failed.
    #[error(transparent)]
    Xl(#[from] XlError),
    /// A file of the move, or of `xl`, cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The agent's own limits could not be lifted.
    #[error(transparent)]
    Lever(#[from] LeverError),
    /// `xl` cannot be started.
    #[error("xl cannot be started: {0}")]
    NotStarted(String),
    /// The mover cannot have a unit of its own.
    #[error("the move cannot run in a systemd unit of its own: {0}")]
    NoUnit(String),
    /// `xl` failed with this output.
    #[error("{0}")]
    Said(String),
    /// The new domain has ended.
    #[error("the new domain has ended")]
    NewEnded,
    /// Both domains have ended.
    #[error("the domain has ended")]
    Ended,
    /// The old domain is suspended.
    #[error("the domain is suspended and could not be resumed: {0}")]
    Suspended(ResumeError),
    /// It is unknown which of the two domains is the old one.
    #[error(
        "xenstored does not say which of two domains is the one that was moved ({0}); leaving both as they are"
    )]
    Unnamed(StoreError),
    /// The domain is where it was. Holds what failed on the way back, if anything.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Stays(Vec<MoveError>),
    /// The system's error.
    #[error("{0}")]
    System(String),
}

impl MoveError {
    /// Returns the system's error.
    #[expect(clippy::needless_pass_by_value, reason = "it stands in map_err")]
    pub fn system(error: impl ToString) -> MoveError {
        MoveError::System(error.to_string())
    }

    /// Returns true if the domain is where it was and nothing failed on the way back.
    pub fn is_nothing(&self) -> bool {
        matches!(self, MoveError::Stays(failures) if failures.is_empty())
    }
}

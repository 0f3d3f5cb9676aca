//! Why a domain is not moved, or not completely.

use homenode_undo::state_dir::StateError;

use super::configuration::BYTES_MAX;
use crate::error::{CallError, LeverError, ResumeError, StoreError, XenError};
use crate::library::LoadError;
use crate::xl::XlError;

/// Why a configuration cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationError {
    #[error("it has {bytes} bytes, more than {}", BYTES_MAX)]
    TooLong { bytes: usize },
    #[error("{0}")]
    NoJson(String),
    #[error("it has a number that is no whole one of 64 bits")]
    Inexact,
    #[error("it has no `{0}`")]
    Lacks(&'static str),
}

/// What keeps a domain where it is, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmovable {
    #[error("an HVM domain's device model would have to move with it")]
    Hvm,
    #[error("its configuration does not say what kind of domain it is")]
    UnknownKind,
    #[error("its configuration says `nomigrate`")]
    NoMigrate,
    #[error("it is a driver domain: others use what it serves")]
    DriverDomain,
    #[error("it has virtual nodes")]
    VirtualNodes,
    #[error("it was given hardware (`{0}`)")]
    Hardware(&'static str),
    #[error("its configuration puts it into another pool of CPUs than the first")]
    ConfiguredPool,
    #[error(
        "its configuration has `{0}`: what serves that would have to serve two of it at once, which was not tried"
    )]
    Parts(String),
    #[error("its configuration has `{0}` that are no list")]
    NoList(&'static str),
    #[error("its configuration says `{key}` = {value} of one of its `{devices}`: {which}")]
    Configured {
        devices: &'static str,
        key: String,
        value: String,
        which: &'static str,
    },
    #[error("xenstored does not report its devices: {0}")]
    DevicesUnknown(StoreError),
    #[error("xenstore has no {0}")]
    NoPath(String),
    #[error(
        "it has a device `{0}`: what serves that would have to serve two of it at once, which was not tried"
    )]
    Device(String),
    #[error("its device `{name}` {number} is served by another than dom0's kernel: {which}")]
    ServedByAnother {
        name: String,
        number: String,
        which: &'static str,
    },
    #[error("its device `{name}` {number} is served with `{key}` = `{value}`: {which}")]
    ServedWith {
        name: String,
        number: String,
        key: &'static str,
        value: String,
        which: &'static str,
    },
    #[error(
        "its device `{name}` {number} has `{key}` = `{value}`, and a new domain's would have `{new}`: moving it would change that"
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
    #[error("its toolstack keeps notes on it (`{0}`), and would lose it: xl did not make it")]
    Notes(String),
    #[error("it runs in another pool of CPUs than the first, and would be put there")]
    Pool,
    #[error("its name begins with `-`")]
    Name,
    #[error("xenstored does not report the domains that need it: {0}")]
    UsersUnknown(StoreError),
    #[error("others use what it serves")]
    Serves,
    #[error("its guest does not say that it can be suspended")]
    NotSuspendable,
    #[error(
        "this Xen has no shadow paging, so that a PV domain must stand still while it is copied: `local_migration.allow = \"paused\"` lets it"
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
    #[error("xl knows nothing of it")]
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
    /// The header is unknown.
    #[error("this is not what xl writes")]
    NotXl,
    /// The byte order is not this machine's.
    #[error("its bytes are in another order than this machine's")]
    Order,
    /// The flags are unknown.
    #[error("flags {0:#x} are not those of Xen 4.17")]
    Flags(u32),
    /// The configuration's length is invalid.
    #[error("its configuration is said to have {0} bytes")]
    ConfigurationBytes(usize),
    /// Something besides the configuration follows the header.
    #[error("beside its configuration there is something else")]
    SomethingElse,
    /// The configuration cannot be read.
    #[error("its configuration cannot be read: {0}")]
    Configuration(ConfigurationError),
    /// A part's header is unknown.
    #[error("{0} begins otherwise than that of Xen 4.17")]
    Begins(&'static str),
    /// A record's length is invalid.
    #[error("a record is said to have {0} bytes")]
    RecordBytes(u32),
    /// The sending `xl` is gone.
    #[error("the output of xl cannot be read: {0}")]
    Read(String),
    /// The receiving `xl` is gone.
    #[error("the receiver of the domain has gone: {0}")]
    Write(String),
    /// The configuration belongs to another domain.
    #[error("another domain is sent than was asked for")]
    AnotherDomain,
    /// The domain cannot be moved.
    #[error(transparent)]
    Unmovable(#[from] Unmovable),
    /// The domain's devices have changed.
    #[error("a device was attached or detached meanwhile")]
    DevicesChanged,
    /// The time limit is over.
    #[error("its time is over")]
    Late,
    /// The sending `xl` ended early.
    #[error("xl ended in the midst of the domain")]
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
    #[error("only the agent may start this")]
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
    #[error("another domain is on its way")]
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
    #[error("it cannot be done in a unit of its own: {0}")]
    NoUnit(String),
    /// `xl` failed with this output.
    #[error("{0}")]
    Said(String),
    /// The new domain has ended.
    #[error("the new one has ended")]
    NewEnded,
    /// Both domains have ended.
    #[error("it has ended")]
    Ended,
    /// The old domain is suspended.
    #[error("it is suspended: {0}")]
    Suspended(ResumeError),
    /// It is unknown which of the two domains is which.
    #[error("xenstored does not tell which of two domains is it ({0}): both are left as they are")]
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

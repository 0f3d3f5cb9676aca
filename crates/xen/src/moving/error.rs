//! Why a domain is not moved, or not completely.

use homenode_undo::state_dir::StateError;

use super::configuration::BYTES_MAX;
use crate::error::{CallError, LeverError, ResumeError, StoreError, XenError};
use crate::library::LoadError;
use crate::xl::XlError;

/// Why a configuration cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigurationError {
    /// It is longer than any of `xl`'s.
    #[error("it has {bytes} bytes, more than {BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It is no JSON.
    #[error("{0}")]
    NoJson(String),
    /// A number of it would be changed when it is written again.
    #[error("it has a number that is no whole one of 64 bits")]
    Inexact,
    /// A part is missing.
    #[error("it has no `{0}`")]
    Lacks(&'static str),
}

/// What keeps a domain where it is, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmovable {
    /// An HVM domain.
    #[error("an HVM domain's device model would have to move with it")]
    Hvm,
    /// No known kind of domain.
    #[error("its configuration does not say what kind of domain it is")]
    UnknownKind,
    /// The operator's word.
    #[error("its configuration says `nomigrate`")]
    NoMigrate,
    /// A driver domain.
    #[error("it is a driver domain: others use what it serves")]
    DriverDomain,
    /// A virtual NUMA.
    #[error("it has virtual nodes")]
    VirtualNodes,
    /// Hardware of the host, by its key.
    #[error("it was given hardware (`{0}`)")]
    Hardware(&'static str),
    /// The pool in its configuration.
    #[error("its configuration puts it into another pool of CPUs than the first")]
    ConfiguredPool,
    /// Unknown parts of its configuration.
    #[error(
        "its configuration has `{0}`: what serves that would have to serve two of it at once, which was not tried"
    )]
    Parts(String),
    /// Devices in an unknown form, by their key.
    #[error("its configuration has `{0}` that are no list")]
    NoList(&'static str),
    /// A device in its configuration that cannot be served twice.
    #[error("its configuration says `{key}` = {value} of one of its `{devices}`: {which}")]
    Configured {
        /// The devices' key.
        devices: &'static str,
        /// The device's key.
        key: String,
        /// Its value, as JSON.
        value: String,
        /// The devices that can be served twice.
        which: &'static str,
    },
    /// Xenstore does not have its devices.
    #[error("xenstored does not report its devices: {0}")]
    DevicesUnknown(StoreError),
    /// Xenstore does not have this path.
    #[error("xenstore has no {0}")]
    NoPath(String),
    /// A kind of device.
    #[error(
        "it has a device `{0}`: what serves that would have to serve two of it at once, which was not tried"
    )]
    Device(String),
    /// A device that dom0's kernel does not serve.
    #[error("its device `{name}` {number} is served by another than dom0's kernel: {which}")]
    ServedByAnother {
        /// The device's kind.
        name: String,
        /// The device.
        number: String,
        /// The devices that can be served twice.
        which: &'static str,
    },
    /// A device that is served in another way.
    #[error("its device `{name}` {number} is served with `{key}` = `{value}`: {which}")]
    ServedWith {
        /// The device's kind.
        name: String,
        /// The device.
        number: String,
        /// Xenstore's key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The devices that can be served twice.
        which: &'static str,
    },
    /// A device whose place in dom0 has changed.
    #[error(
        "its device `{name}` {number} has `{key}` = `{value}`, and a new domain's would have `{new}`: moving it would change that"
    )]
    Changed {
        /// The device's kind.
        name: String,
        /// The device.
        number: String,
        /// Xenstore's key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What dom0 finds now.
        new: String,
    },
    /// The operator does not allow it.
    #[error("{0}")]
    NotAllowed(&'static str),
    /// Another toolstack's notes.
    #[error("its toolstack keeps notes on it (`{0}`), and would lose it: xl did not make it")]
    Notes(String),
    /// The pool where it runs.
    #[error("it runs in another pool of CPUs than the first, and would be put there")]
    Pool,
    /// `xl` would take its name for an option.
    #[error("its name begins with `-`")]
    Name,
    /// Xenstore does not have its backends.
    #[error("xenstored does not report the domains that need it: {0}")]
    UsersUnknown(StoreError),
    /// It is a backend.
    #[error("others use what it serves")]
    Serves,
    /// Its kernel.
    #[error("its guest does not say that it can be suspended")]
    NotSuspendable,
    /// A PV domain that may not be paused.
    #[error(
        "this Xen has no shadow paging, so that a PV domain must stand still while it is copied: `local_migration.allow = \"paused\"` lets it"
    )]
    NoShadow,
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// `xl`'s notes cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Why a file of a move, or of `xl`, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The system's error on a path.
    #[error("{path}: {cause}")]
    At {
        /// The path.
        path: String,
        /// The error.
        cause: String,
    },
    /// The configuration in it.
    #[error("{path}: {cause}")]
    Configuration {
        /// The path.
        path: String,
        /// Why it cannot be read.
        cause: ConfigurationError,
    },
    /// `xl` keeps no configuration of the domain.
    #[error("xl knows nothing of it")]
    NotKept,
    /// The system's error.
    #[error("{0}")]
    System(String),
}

impl FileError {
    /// An error of the system on a path.
    pub fn at(path: &std::path::Path, error: impl ToString) -> FileError {
        FileError::At {
            path: path.display().to_string(),
            cause: error.to_string(),
        }
    }
}

/// Why a stream is not passed on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// Another header.
    #[error("this is not what xl writes")]
    NotXl,
    /// Another byte order.
    #[error("its bytes are in another order than this machine's")]
    Order,
    /// Unknown flags.
    #[error("flags {0:#x} are not those of Xen 4.17")]
    Flags(u32),
    /// The configuration's length.
    #[error("its configuration is said to have {0} bytes")]
    ConfigurationBytes(usize),
    /// Unknown data.
    #[error("beside its configuration there is something else")]
    SomethingElse,
    /// The configuration.
    #[error("its configuration cannot be read: {0}")]
    Configuration(ConfigurationError),
    /// Another part's header.
    #[error("{0} begins otherwise than that of Xen 4.17")]
    Begins(&'static str),
    /// A record's length.
    #[error("a record is said to have {0} bytes")]
    RecordBytes(u32),
    /// The sender's `xl` has gone.
    #[error("the output of xl cannot be read: {0}")]
    Read(String),
    /// The receiver's `xl` has gone.
    #[error("the receiver of the domain has gone: {0}")]
    Write(String),
    /// Another domain's configuration.
    #[error("another domain is sent than was asked for")]
    AnotherDomain,
    /// The domain cannot be moved.
    #[error(transparent)]
    Unmovable(#[from] Unmovable),
    /// Its devices are others than before.
    #[error("a device was attached or detached meanwhile")]
    DevicesChanged,
    /// The time limit.
    #[error("its time is over")]
    Late,
    /// The sender ended early.
    #[error("xl ended in the midst of the domain")]
    CutOff,
    /// Another relay's lock.
    #[error("another domain is being copied")]
    Busy,
    /// The job in the environment.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A file of the move.
    #[error(transparent)]
    File(#[from] FileError),
    /// No library of xenstore.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The system's error.
    #[error("{0}")]
    System(String),
}

/// Why there is no job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// It was not the agent that started this.
    #[error("only the agent may start this")]
    NotStarted,
    /// Its text.
    #[error("{variable}: {cause}")]
    Unreadable {
        /// The environment's variable.
        variable: &'static str,
        /// The error.
        cause: String,
    },
}

/// Why a move was not begun, or not completed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The job in the environment.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Another mover's lock.
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
    /// A file of the move, or of `xl`.
    #[error(transparent)]
    File(#[from] FileError),
    /// The agent's own limits.
    #[error(transparent)]
    Lever(#[from] LeverError),
    /// `xl` is not there.
    #[error("xl cannot be started: {0}")]
    NotStarted(String),
    /// No unit of its own.
    #[error("it cannot be done in a unit of its own: {0}")]
    NoUnit(String),
    /// The output of `xl` that failed.
    #[error("{0}")]
    Said(String),
    /// The new domain.
    #[error("the new one has ended")]
    NewEnded,
    /// Both domains.
    #[error("it has ended")]
    Ended,
    /// The old domain.
    #[error("it is suspended: {0}")]
    Suspended(ResumeError),
    /// It is unknown which of two domains is which.
    #[error("xenstored does not tell which of two domains is it ({0}): both are left as they are")]
    Unnamed(StoreError),
    /// It is where it was; what failed on the way back there, if anything.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Stays(Vec<MoveError>),
    /// The system's error.
    #[error("{0}")]
    System(String),
}

impl MoveError {
    /// An error of the system.
    pub fn system(error: impl ToString) -> MoveError {
        MoveError::System(error.to_string())
    }

    /// Whether the domain is where it was, and nothing is amiss.
    pub fn is_nothing(&self) -> bool {
        matches!(self, MoveError::Stays(failures) if failures.is_empty())
    }
}

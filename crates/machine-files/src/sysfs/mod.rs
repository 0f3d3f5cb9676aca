//! Reads a machine from a Linux host's `/sys` and `/proc`.
//!
//! [`read`] takes the root directory as an argument, so it can also read a saved tree of another host.
//!
//! | what | file, below the root | if the file is missing |
//! |---|---|---|
//! | nodes | `sys/devices/system/node/online` | the `nodeN` directories; without those, one node with everything |
//! | a node's CPUs and memory | `…/node/nodeN/{cpulist,meminfo}` | an error |
//! | distances | `…/node/nodeN/distance` | 10 and 20, with a note |
//! | memory bandwidth | `…/node/nodeN/access0/initiators/read_bandwidth` (HMAT, MB/s) | `None` |
//! | CPUs | `sys/devices/system/cpu/{online,present}` | an error; no CPU counts as offline |
//! | cores, packages | `…/cpu/cpuN/topology/{core_cpus_list,thread_siblings_list,physical_package_id}` | a core each; package 0 |
//! | last-level caches | `…/cpu/cpuN/cache/indexM/…` | none |
//! | devices | `sys/bus/pci/devices/*/{numa_node,class}` | the device is left out, also if its node is `-1` |
//! | CPUs that the kernel keeps free | `sys/devices/system/cpu/isolated` | none |
//! | what this process may use, for [`read_confined`] | `proc/self/status` | everything |
//! | name | `proc/sys/kernel/hostname` | `host` |
//!
//! `reader` knows the files and their formats, `types` holds their contents, and `build` makes a [`Machine`] from the contents
//! alone.

mod build;
mod reader;
mod types;

use std::io;
use std::path::{Path, PathBuf};

use homenode_machine::{Machine, MachineError};

/// Why a tree could not be read as a machine. Every error names a path.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SysfsError {
    /// A required file is missing.
    #[error("{}: missing; {expected}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// Its expected contents.
        expected: &'static str,
    },
    /// A file exists but cannot be read.
    #[error("{}: cannot be read: {}", path.display(), crate::file::in_words(*kind))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        kind: io::ErrorKind,
    },
    /// A file or a directory is larger than any that a kernel creates.
    #[error("{}: more than {limit}, which no kernel produces", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit, with its unit.
        limit: &'static str,
    },
    /// A file has unexpected contents.
    #[error("{}: `{found}` is not {expected}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The beginning of its contents.
        found: String,
        /// Its expected contents.
        expected: String,
    },
    /// Two files contradict each other, or no CPU of the tree is usable.
    #[error("{}: {error}", root.display())]
    Impossible {
        /// The root of the tree.
        root: PathBuf,
        /// The contradiction.
        error: MachineError,
    },
}

/// How much of a host is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// Everything that is online.
    WholeHost,
    /// The part that cpusets and the affinity of the calling process allow.
    ThisProcess,
}

/// Reads the machine that the tree below `root` describes; `/` is the host that this program runs on.
///
/// The machine has everything that is online. A cpuset or an affinity of the calling process is ignored, because it limits the
/// process, not its VMs. [`read_confined`] is for programs that measure on the CPUs themselves.
///
/// The tree does not describe links or timing: [`Machine::links`] is empty and [`Machine::hardware`] is `None`.
///
/// # Errors
/// If the tree has no CPUs, if files are malformed, unreadable or too large, or if files contradict each other. A CPU or a device
/// that disappears during reading may cause such a contradiction; then reading again succeeds.
pub fn read(root: &Path) -> Result<Machine, SysfsError> {
    read_as(root, Extent::WholeHost)
}

/// Reads the part of the machine below `root` that the calling process may run on and take memory from.
///
/// # Errors
/// If the tree has no CPUs, or if files are malformed, unreadable or too large, or contradict each other.
pub fn read_confined(root: &Path) -> Result<Machine, SysfsError> {
    read_as(root, Extent::ThisProcess)
}

fn read_as(root: &Path, extent: Extent) -> Result<Machine, SysfsError> {
    let told = reader::read(root, extent)?;
    build::machine(told)?
        .checked()
        .map_err(|error| SysfsError::Impossible {
            root: root.to_owned(),
            error,
        })
}

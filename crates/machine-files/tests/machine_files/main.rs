//! Machines read from the files of hosts.

mod sysfs;
mod sysfs_damaged;
mod trees;

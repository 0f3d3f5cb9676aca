//! An operator's settings for one VM: whether Homenode may act on it, its home, its permit. Names and values are the same in
//! libvirt's metadata element and in the VM's own file ([`mod@file`]), and so under KVM and Xen.

pub mod file;
mod said;

pub use said::{Change, OperatorSettings, PoolPages, SettingError};

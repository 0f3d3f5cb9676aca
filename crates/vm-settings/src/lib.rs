//! An operator's settings for one VM, such as whether Homenode may act on it, its home, and its permit. Names and values are the
//! same in libvirt's metadata element and in the VM's own file ([`mod@file`]), and so the same under KVM and Xen.

pub mod file;
mod said;

pub use said::{Change, OperatorSettings, PoolPages, SettingError};

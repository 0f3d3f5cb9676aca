//! The plugin's only kind of error.

/// What is wrong with the arguments, or kept the plugin from beginning: printed once, by QEMU's entry point.
pub type Complaint = Box<dyn std::error::Error>;

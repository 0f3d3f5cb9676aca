//! The plugin's only kind of error.

/// Why the arguments are wrong or the plugin could not start. QEMU's entry point prints it, once.
pub(crate) type Complaint = Box<dyn std::error::Error>;

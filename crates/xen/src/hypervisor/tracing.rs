//! Xen's trace: whether it has buffers, and an end of it.

#![allow(unsafe_code)] // calls of a C library, each with a buffer of the size that it asks for

use super::{CallError, Hypervisor};
use crate::library::HostInfo;

impl Hypervisor {
    /// Whether Xen has trace buffers: somebody has traced since it was booted, or does.
    pub fn has_trace_buffers(&self) -> bool {
        let mut size = 0;
        // SAFETY: one number has room.
        unsafe { (self.control.xc_tbuf_get_size)(self.at(), &raw mut size) == 0 }
    }

    /// Writes no more records.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn stop_tracing(&self) -> Result<(), CallError> {
        // SAFETY: the handle is open.
        match unsafe { (self.control.xc_tbuf_disable)(self.at()) } {
            0 => Ok(()),
            _ => Err(CallError::last("xc_tbuf_disable")),
        }
    }

    /// How fast CPUs count the cycles with which records are stamped.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn cycles_per_s(&self) -> Result<f64, CallError> {
        let mut of = HostInfo::default();
        // SAFETY: one has room, and more than any version of this library writes.
        match unsafe { (self.control.xc_physinfo)(self.at(), &raw mut of) } {
            0 if of.cpu_khz > 0 => Ok(f64::from(of.cpu_khz) * 1e3),
            _ => Err(CallError::last("xc_physinfo")),
        }
    }
}

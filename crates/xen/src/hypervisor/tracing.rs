//! Xen's trace: whether it has buffers, and how to stop it.

#![allow(unsafe_code)] // calls of a C library, each with a buffer of the size that it asks for

use super::{CallError, Hypervisor};
use crate::library::HostInfo;

impl Hypervisor {
    /// Returns true if Xen has trace buffers, which means that a program traces, or has traced since boot.
    pub(crate) fn has_trace_buffers(&self) -> bool {
        let mut size = 0;
        // SAFETY: there is room for one number.
        unsafe { (self.control.xc_tbuf_get_size)(self.at(), &raw mut size) == 0 }
    }

    /// Stops Xen from writing trace records.
    ///
    /// # Errors
    /// If the call fails.
    pub(crate) fn stop_tracing(&self) -> Result<(), CallError> {
        // SAFETY: the handle is open.
        match unsafe { (self.control.xc_tbuf_disable)(self.at()) } {
            0 => Ok(()),
            _ => Err(CallError::last("xc_tbuf_disable")),
        }
    }

    /// Returns the frequency of the cycle counter that stamps records.
    ///
    /// # Errors
    /// If the call fails.
    pub(crate) fn cycles_per_s(&self) -> Result<f64, CallError> {
        let mut of = HostInfo::default();
        // SAFETY: there is room for one, and more than any version of this library writes.
        match unsafe { (self.control.xc_physinfo)(self.at(), &raw mut of) } {
            0 if of.cpu_khz > 0 => Ok(f64::from(of.cpu_khz) * 1e3),
            _ => Err(CallError::last("xc_physinfo")),
        }
    }
}

//! The state of each vCPU, indexed by the vCPU's number and used only by its thread.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Maximum number of vCPUs. It exceeds any program's number of threads; further vCPUs are ignored.
const VCPUS_MAX: usize = 4096;

/// A state for each vCPU that has begun, kept for as long as the process lives.
pub(crate) struct PerVcpu<T: 'static>([AtomicPtr<T>; VCPUS_MAX]);

impl<T> PerVcpu<T> {
    /// Creates an empty set.
    pub(crate) const fn new() -> PerVcpu<T> {
        PerVcpu([const { AtomicPtr::new(ptr::null_mut()) }; VCPUS_MAX])
    }

    /// Sets up the state of a vCPU that starts. QEMU may reuse the number of a vCPU that has ended; the new vCPU inherits the
    /// old one's state.
    pub(crate) fn begin(&self, at: c_uint, state: impl FnOnce() -> Option<T>) {
        let Some(slot) = self.0.get(at as usize) else {
            return;
        };
        if slot.load(Ordering::Acquire).is_null()
            && let Some(state) = state()
        {
            slot.store(Box::into_raw(Box::new(state)), Ordering::Release);
        }
    }

    /// Returns the state of a vCPU, to be called only by its thread; `None` if the vCPU has no state.
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "a vCPU's state is used by its thread alone")]
    pub(crate) fn get(&'static self, at: c_uint) -> Option<&'static mut T> {
        let pointer = self.0.get(at as usize)?.load(Ordering::Relaxed);
        // SAFETY: it is null or a box that is never freed, and QEMU calls back for a vCPU from one thread at a time.
        unsafe { pointer.as_mut() }
    }

    /// Returns the states of all vCPUs. Call it only once QEMU has stopped every vCPU.
    pub(crate) fn all(&'static self) -> impl Iterator<Item = &'static mut T> {
        (0..VCPUS_MAX as c_uint).filter_map(|at| self.get(at))
    }
}

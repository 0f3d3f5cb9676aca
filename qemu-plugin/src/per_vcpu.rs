//! What belongs to each vCPU, reached by its number and used by its thread alone.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// More vCPUs than any program has threads; what others do is not seen, and said.
const VCPUS_MAX: usize = 4096;

/// A state for each vCPU that has begun, for as long as the process lives.
pub struct PerVcpu<T: 'static>([AtomicPtr<T>; VCPUS_MAX]);

impl<T> PerVcpu<T> {
    /// Of none yet.
    pub const fn new() -> PerVcpu<T> {
        PerVcpu([const { AtomicPtr::new(ptr::null_mut()) }; VCPUS_MAX])
    }

    /// A vCPU begins. The number of one that has ended may come again; its successor goes on with what it left.
    pub fn begin(&self, at: c_uint, state: impl FnOnce() -> Option<T>) {
        let Some(slot) = self.0.get(at as usize) else {
            return;
        };
        if slot.load(Ordering::Acquire).is_null()
            && let Some(state) = state()
        {
            slot.store(Box::into_raw(Box::new(state)), Ordering::Release);
        }
    }

    /// The state of a vCPU, for the thread that runs it; `None` for those that have none.
    #[inline]
    #[allow(clippy::mut_from_ref, reason = "a vCPU's state is used by its thread alone")]
    pub fn get(&'static self, at: c_uint) -> Option<&'static mut T> {
        let pointer = self.0.get(at as usize)?.load(Ordering::Relaxed);
        // SAFETY: it is null or a box that is never freed, and QEMU calls back for a vCPU from one thread at a time.
        unsafe { pointer.as_mut() }
    }

    /// The states of all, once QEMU has stopped every vCPU.
    pub fn all(&'static self) -> impl Iterator<Item = &'static mut T> {
        (0..VCPUS_MAX as c_uint).filter_map(|at| self.get(at))
    }
}

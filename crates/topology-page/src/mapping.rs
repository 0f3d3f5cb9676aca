//! Shared memory: a file, or anonymous memory whose descriptor is passed on.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::layout::BYTES;

/// The first [`BYTES`] of a file, as a shared mapping.
pub struct Mapping {
    start: NonNull<AtomicU64>,
}

impl Mapping {
    /// Maps a file, which must be open for reading and writing, and extends it if it is shorter.
    ///
    /// # Errors
    /// If the file cannot be extended or mapped.
    #[allow(unsafe_code)] // memory that others write to at the same time
    pub fn new(file: &File) -> io::Result<Mapping> {
        if file.metadata()?.len() < BYTES as u64 {
            file.set_len(BYTES as u64)?;
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at any free address; nothing else in this process refers to it.
        let start = unsafe { mmap(ptr::null_mut(), BYTES, access, MapFlags::SHARED, file.as_fd(), 0) }?;
        let start = NonNull::new(start.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped the page at address 0"))?;
        Ok(Mapping { start })
    }

    /// Returns the mapping's words.
    #[allow(unsafe_code)] // memory that others write to at the same time
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped until `self` is dropped, page-aligned, and accessed only as atomic words, which may change.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), BYTES / size_of::<AtomicU64>()) }
    }
}

impl Drop for Mapping {
    #[allow(unsafe_code)] // see above
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; words borrow `self`, so none are left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), BYTES) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").finish_non_exhaustive()
    }
}

// SAFETY: processes share the memory already, and its words are atomic.
#[allow(unsafe_code)]
unsafe impl Send for Mapping {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Mapping {}

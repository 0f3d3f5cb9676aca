//! The machine frames of a PV domain.
//!
//! Xen has no call that lists them. But Xen can be asked about given frames. For a PV domain, which names frames by their machine
//! numbers, it returns their types; for frames of other domains, it returns that they do not belong to this one. The guest cannot
//! influence the answers. A PVH domain names frames by the guest's own numbers, so the answers say nothing about machine frames.

#![allow(unsafe_code)] // a call of a C library, with a buffer of the size passed to it

use super::{CallError, Hypervisor};

/// Most frames in one call to Xen.
const BATCH: usize = 1024;
/// `XEN_DOMCTL_PFINFO_LTAB_MASK`.
const KIND: u64 = 0xf << 28;
/// `XEN_DOMCTL_PFINFO_XTAB`, `…_XALLOC`: the frame does not belong to the domain.
const NOT_ITS: [u64; 2] = [0xf << 28, 0xe << 28];

impl Hypervisor {
    /// Returns the number of the machine's frames.
    ///
    /// # Errors
    /// If the call fails.
    pub(crate) fn frame_count(&self) -> Result<u64, CallError> {
        let mut last = 0;
        // SAFETY: there is room for one number.
        match unsafe { (self.control.xc_maximum_ram_page)(self.at(), &raw mut last) } {
            0 => Ok(last + 1),
            _ => Err(CallError::last("xc_maximum_ram_page")),
        }
    }

    /// Returns those of these frames that belong to a PV domain, in the same order.
    ///
    /// # Errors
    /// If the call fails, for example because the domain has ended.
    pub(crate) fn frames(&self, domid: u32, all: &[u64]) -> Result<Vec<u64>, CallError> {
        let mut its = Vec::new();
        for batch in all.chunks(BATCH) {
            let mut kinds = batch.to_vec();
            // SAFETY: the call reads and writes `count` elements of `kinds`, which has as many.
            let done = unsafe {
                let (count, kinds) = (batch.len() as u32, kinds.as_mut_ptr());
                (self.control.xc_get_pfn_type_batch)(self.at(), domid, count, kinds)
            };
            if done != 0 {
                return Err(CallError::last("xc_get_pfn_type_batch"));
            }
            let of = batch.iter().zip(&kinds);
            its.extend(
                of.filter(|(_, kind)| !NOT_ITS.contains(&(*kind & KIND)))
                    .map(|(frame, _)| *frame),
            );
        }
        Ok(its)
    }
}

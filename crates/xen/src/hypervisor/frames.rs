//! The machine frames of a PV domain.
//!
//! Xen has no call that lists them. For given frames it returns their types in a PV domain, which names frames by their
//! numbers; for another domain's frames it returns that they do not belong to it. The guest has no influence on that. For a
//! PVH domain it returns this for the guest's own numbers, which say nothing about machine frames.

#![allow(unsafe_code)] // a call of a C library, with a buffer of the size passed to it

use super::{CallError, Hypervisor};

/// Most frames in one call to Xen.
const BATCH: usize = 1024;
/// `XEN_DOMCTL_PFINFO_LTAB_MASK`.
const KIND: u64 = 0xf << 28;
/// `XEN_DOMCTL_PFINFO_XTAB`, `…_XALLOC`: the frame is not the domain's.
const NOT_ITS: [u64; 2] = [0xf << 28, 0xe << 28];

impl Hypervisor {
    /// Number of the machine's frames, counted from 0.
    ///
    /// # Errors
    /// When the call fails.
    pub fn frame_count(&self) -> Result<u64, CallError> {
        let mut last = 0;
        // SAFETY: there is room for one number.
        match unsafe { (self.control.xc_maximum_ram_page)(self.at(), &raw mut last) } {
            0 => Ok(last + 1),
            _ => Err(CallError::last("xc_maximum_ram_page")),
        }
    }

    /// The frames among these that belong to a PV domain, in their order.
    ///
    /// # Errors
    /// When the call fails, as for an ended domain.
    pub fn frames(&self, domid: u32, all: &[u64]) -> Result<Vec<u64>, CallError> {
        let mut its = Vec::new();
        for batch in all.chunks(BATCH) {
            let mut kinds = batch.to_vec();
            // SAFETY: as many are read and written as the call is told.
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
